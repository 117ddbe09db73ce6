"""Objects of ours and of others: what belongs to someone else is never taken over, what is no longer wanted goes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvstrata.api.base import Resource
from kvstrata.model.world import World

from .types import Remove


def taken_by_someone_else(world: World, owner: Resource, wanted: Iterable[Mapping[str, Any]]) -> str | None:
    """Return kind and name of the first wanted object that exists and does not belong to `owner`, or None."""
    for child in wanted:
        live = world.children.get((child["kind"], child["metadata"]["name"]))
        if live is not None and owner.uid not in _owner_uids(live):
            return f"{child['kind']} {child['metadata']['name']}"
    return None


def no_longer_wanted(world: World, owner: Resource, wanted: Iterable[Mapping[str, Any]]) -> tuple[Remove, ...]:
    """Return the deletion of every object that `owner` controls and that is not among `wanted`."""
    keep = {(child["kind"], child["metadata"]["name"]) for child in wanted}
    return tuple(
        Remove(kind, name, live["metadata"]["uid"])
        for (kind, name), live in sorted(world.children.items())
        if (kind, name) not in keep and owner.uid in _owner_uids(live) and "deletionTimestamp" not in live["metadata"]
    )


def _owner_uids(live: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(owner["uid"] for owner in live["metadata"].get("ownerReferences") or () if owner.get("controller"))
