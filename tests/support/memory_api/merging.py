"""Merging an applied configuration into an object, taking fields out of it, and merge patches.

Follows `structured-merge-diff`, which the API server uses, and RFC 7386.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .fieldsets import Fields, Path
from .schemas import Schema, child, element, is_atomic, item_of


def copied(value: Any) -> Any:
    """Return a deep copy of JSON."""
    if isinstance(value, dict):
        return {name: copied(inner) for name, inner in value.items()}
    if isinstance(value, Mapping):
        return {str(name): copied(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [copied(item) for item in value]
    return value


def merged(schema: Schema, live: Any, applied: Any) -> Any:
    """Return `live` with everything of `applied` in it; values that are only in `live` stay."""
    if isinstance(live, Mapping) and isinstance(applied, Mapping) and not is_atomic(schema, applied):
        result = dict(live)
        for name, value in applied.items():
            result[name] = merged(child(schema, name), live.get(name), value)
        return result
    if isinstance(live, list) and isinstance(applied, list) and not is_atomic(schema, applied):
        return _merged_lists(schema, live, applied)
    return applied


def _merged_lists(schema: Schema, live: list[Any], applied: list[Any]) -> list[Any]:
    """Merge by key: the order of `applied` counts, and items that are only in `live` keep their neighbours."""
    item_schema = item_of(schema)
    old = {element(schema, item): item for item in live}
    new = {element(schema, item): item for item in applied}
    old_order, new_order = list(old), list(new)
    shared = [key for key in new_order if key in old]
    result: list[Any] = []
    left = right = 0
    while left < len(old_order) or right < len(new_order):
        next_shared = shared[0] if shared else None
        if left < len(old_order) and right < len(new_order) and old_order[left] == new_order[right]:
            key = old_order[left]
            result.append(merged(item_schema, old[key], new[key]))
            shared = shared[1:]
            left, right = left + 1, right + 1
        elif left < len(old_order) and old_order[left] not in new:
            result.append(old[old_order[left]])
            left += 1
        elif left < len(old_order) and next_shared != old_order[left]:
            # It was, or will be, taken where `applied` has it.
            left += 1
        else:
            key = new_order[right]
            result.append(merged(item_schema, old[key], new[key]) if key in old else new[key])
            shared = shared[1:] if key == next_shared else shared
            right += 1
    return result


def without(schema: Schema, value: Any, fields: Fields) -> Any:
    """Return `value` without `fields` and all that is below them; None where nothing is left."""
    tree: dict[str, Any] = {}
    for path in fields:
        _plant(tree, path)
    return _without(schema, value, tree) if tree else value


_GONE: dict[str, Any] = {"": None}


def _plant(tree: dict[str, Any], path: Path) -> None:
    for step in path[:-1]:
        tree = tree.setdefault(step, {})
        if tree is _GONE:
            return
    tree[path[-1]] = _GONE


def _without(schema: Schema, value: Any, tree: Mapping[str, Any]) -> Any:
    if isinstance(value, Mapping) and not is_atomic(schema, value):
        kept: dict[str, Any] = {}
        for name, inner in value.items():
            below = tree.get(f"f:{name}")
            if below is _GONE:
                continue
            kept[name] = _without(child(schema, name), inner, below) if below else inner
        return kept or None
    if isinstance(value, list) and not is_atomic(schema, value):
        items: list[Any] = []
        for item in value:
            below = tree.get(element(schema, item))
            if below is _GONE:
                continue
            items.append(_without(item_of(schema), item, below) if below else item)
        return items or None
    return value


def without_empty(schema: Schema, value: Any) -> Any:
    """Return `value` without empty lists and maps, which built-in types do not keep; structs may be empty."""
    if isinstance(value, Mapping):
        kept = {name: without_empty(child(schema, name), inner) for name, inner in value.items()}
        return {
            name: inner
            for name, inner in kept.items()
            if inner != [] and not (inner == {} and "additionalProperties" in child(schema, name))
        }
    if isinstance(value, list):
        return [without_empty(item_of(schema), item) for item in value]
    return value


def patched(before: Any, patch: Any) -> Any:
    """Return `before` with the merge patch `patch` applied (RFC 7386)."""
    if not isinstance(patch, Mapping):
        return copied(patch)
    result = dict(before) if isinstance(before, Mapping) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = patched(result.get(name), value)
    return result
