"""Owners of fields, and the consequences for an apply and for any other write.

The rules are those of `structured-merge-diff/merge.Updater`: a manager owns the fields that it applied last; a field
that it no longer applies is removed unless it has another owner; a value of another owner can only be changed by
force, which takes it over; any other write takes over the fields that it changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .fieldsets import NOTHING, Comparison, Fields, compare, described, fields_of, with_named_parents
from .merging import merged, without
from .schemas import Schema


@dataclass(frozen=True, slots=True)
class Manager:
    """A field manager as managedFields distinguishes them."""

    name: str
    operation: str
    subresource: str = ""


Owners = Mapping[Manager, Fields]
_NEVER: Fields = frozenset({("f:metadata",)})
"""Holds fields that the server itself sets, so it is never removed as a whole."""


class FieldConflictError(Exception):
    """Another manager owns a field that would change. The text is the API server's, but for the times."""

    def __init__(self, conflicts: Mapping[Manager, Fields]) -> None:
        paths = sorted((described(path), manager.name) for manager, fields in conflicts.items() for path in fields)
        plural = "s" if len(paths) > 1 else ""
        self.fields = tuple(path for path, _ in paths)
        listed = "; ".join(f'conflict with "{name}": {path}' for path, name in paths)
        super().__init__(f"Apply failed with {len(paths)} conflict{plural}: {listed}")


def apply(
    schema: Schema, live: Mapping[str, Any] | None, config: Mapping[str, Any], owners: Owners, name: str, *, force: bool
) -> tuple[dict[str, Any], dict[Manager, Fields]]:
    """Return the object and its owners after `name` applied `config`. Raises FieldConflictError unless `force`."""
    manager = Manager(name, "Apply")
    before = owners.get(manager, NOTHING)
    claimed = {**owners, manager: fields_of(schema, config)}
    result = merged(schema, live, config) if live else dict(config)
    result = _pruned(schema, result, claimed, before)
    difference = compare(schema, live or {}, result)
    conflicts = _overlap(claimed, manager, difference)
    if conflicts and not force:
        raise FieldConflictError(conflicts)
    return result, _after(claimed, conflicts, difference)


def update(
    schema: Schema, live: Mapping[str, Any] | None, result: Mapping[str, Any], owners: Owners, manager: Manager
) -> dict[Manager, Fields]:
    """Return the owners after `manager` wrote `result` over `live` by any other request than an apply."""
    difference = compare(schema, live or {}, result)
    if live is not None and difference.empty:
        return dict(owners)
    own = owners.get(manager, NOTHING) | difference.added | difference.modified
    claimed = {**owners, manager: own}
    return _after(claimed, _overlap(claimed, manager, difference), difference)


def _pruned(schema: Schema, value: dict[str, Any], owners: Owners, before: Fields) -> dict[str, Any]:
    """Remove fields that the manager applied `before` and that have no owner now."""
    if not before:
        return value
    owned = with_named_parents(schema, frozenset().union(*owners.values()))
    gone = with_named_parents(schema, before) - owned - _NEVER
    return without(schema, value, gone) or {} if gone else value


def _overlap(owners: Owners, manager: Manager, difference: Comparison) -> dict[Manager, Fields]:
    touched = difference.added | difference.modified
    found = {other: fields & touched for other, fields in owners.items() if other != manager}
    return {other: fields for other, fields in found.items() if fields}


def _after(owners: Owners, taken: Owners, difference: Comparison) -> dict[Manager, Fields]:
    rest = {other: fields - taken.get(other, NOTHING) - difference.removed for other, fields in owners.items()}
    return {manager: fields for manager, fields in rest.items() if fields}
