"""Sets of fields, as managedFields writes them: which there are in an object, and which differ between two.

A path is a tuple of elements: `f:name` for a field, `k:{…}` for an item of a list with map keys, `v:…` for an item of a
set. A list or map that is atomic is one path, and so is a scalar. Follows `structured-merge-diff`, which the API server
uses.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .schemas import Schema, child, element, is_atomic, is_named, item_of

Path = tuple[str, ...]
Fields = frozenset[Path]
NOTHING: Fields = frozenset()

_MEMBER: Any = object()
"""Stands for the bare existence of a list's item: items are compared by their contents."""
_UNOWNED: Fields = frozenset(
    (("f:apiVersion",), ("f:kind",), ("f:metadata",))
) | frozenset(
    ("f:metadata", f"f:{name}")
    for name in (
        "name", "namespace", "creationTimestamp", "selfLink", "uid", "generation", "managedFields", "resourceVersion",
        "deletionTimestamp", "deletionGracePeriodSeconds",
    )
)  # fmt: skip
"""Fields without an owner, because the server alone sets them."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Fields that a change adds, changes and removes."""

    added: Fields
    modified: Fields
    removed: Fields

    @property
    def empty(self) -> bool:
        """Whether there is no difference."""
        return not (self.added or self.modified or self.removed)


def fields_of(schema: Schema, value: Any) -> Fields:
    """Return the fields of an object that may have an owner."""
    return frozenset(leaves(schema, value)) - _UNOWNED


def leaves(schema: Schema, value: Any, *, holders: bool = False) -> dict[Path, Any]:
    """Return the value at each path of `value`; with `holders` also the maps and lists that hold others."""
    found: dict[Path, Any] = {}
    _collect(schema, value, (), found, holders)
    return found


def compare(schema: Schema, before: Any, after: Any) -> Comparison:
    """Return how `after` differs from `before`."""
    added: set[Path] = set()
    modified: set[Path] = set()
    removed: set[Path] = set()
    _compare(schema, before, after, (), (added, modified, removed))
    return Comparison(frozenset(added) - _UNOWNED, frozenset(modified) - _UNOWNED, frozenset(removed))


def with_named_parents(schema: Schema, fields: Fields) -> Fields:
    """Return `fields` with every declared field on the way to one; keys of maps and items of lists are not added."""
    result = set(fields)
    for path in fields:
        here = schema
        for depth, step in enumerate(path[:-1], 1):
            if not step.startswith("f:"):
                here = item_of(here)
                continue
            if is_named(here, step[2:]):
                result.add(path[:depth])
            here = child(here, step[2:])
    return frozenset(result)


def to_fields_v1(fields: Iterable[Path]) -> dict[str, Any]:
    """Return the form that managedFields has in the API."""
    tree: dict[str, Any] = {}
    members = set(fields)
    for path in sorted(members):
        here = tree
        for step in path:
            here = here.setdefault(step, {})
    for path in members:
        here = tree
        for step in path:
            here = here[step]
        if here:
            here["."] = {}
    return tree


def described(path: Path) -> str:
    """Return a path as the API server names it in a conflict."""
    text = ""
    for step in path:
        if step.startswith("f:"):
            text += f".{step[2:]}"
        elif step.startswith("k:"):
            keys = json.loads(step[2:])
            text += "[" + ",".join(f"{name}={json.dumps(value)}" for name, value in keys.items()) + "]"
        else:
            text += f"[={step[2:]}]"
    return text


def _compare(schema: Schema, old: Any, new: Any, path: Path, found: tuple[set[Path], set[Path], set[Path]]) -> None:
    """Descend where both sides differ and have the same shape, so that equal parts cost nothing."""
    is_map = isinstance(old, Mapping)
    before = old if is_map else {element(schema, item): item for item in old}
    after = new if is_map else {element(schema, item): item for item in new}
    for name in before.keys() | after.keys():
        one, other = before.get(name), after.get(name)
        inner, step = (child(schema, name), f"f:{name}") if is_map else (item_of(schema), name)
        left: dict[Path, Any] = {}
        right: dict[Path, Any] = {}
        if name in before and name in after:
            if one == other:
                continue
            if _same_shape(inner, one, other):
                _compare(inner, one, other, (*path, step), found)
                continue
        if name in before:
            _collect(schema, {name: one} if is_map else [one], path, left, True)
        if name in after:
            _collect(schema, {name: other} if is_map else [other], path, right, True)
        left.pop(path, None)
        right.pop(path, None)
        found[0].update(right.keys() - left.keys())
        found[1].update(path for path in left.keys() & right.keys() if left[path] != right[path])
        found[2].update(left.keys() - right.keys())


def _same_shape(schema: Schema, one: Any, other: Any) -> bool:
    same = (isinstance(one, Mapping) and isinstance(other, Mapping)) or (
        isinstance(one, list) and isinstance(other, list)
    )
    return bool(same and one and other and not is_atomic(schema, one))


def _collect(schema: Schema, value: Any, path: Path, found: dict[Path, Any], holders: bool) -> None:
    if isinstance(value, Mapping):
        if path and is_atomic(schema, value):
            found[path] = value
            return
        if path and holders:
            found[path] = _MEMBER
        for name, inner in value.items():
            step = (*path, f"f:{name}")
            if inner is None or inner == {} or not is_named(schema, name):
                found[step] = _MEMBER if inner is None or isinstance(inner, Mapping | list) else inner
            if inner is None:
                continue
            _collect(child(schema, name), inner, step, found, holders)
    elif isinstance(value, list):
        if is_atomic(schema, value):
            found[path] = value
            return
        if holders:
            found[path] = _MEMBER
        for item in value:
            step = (*path, element(schema, item))
            _collect(item_of(schema), item, step, found, holders)
            found[step] = _MEMBER
    else:
        found[path] = value
