"""Objects of ours and of others: what belongs to someone else is never taken over, what is no longer wanted goes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvstrata.api.base import Resource
from kvstrata.model.world import World
from kvstrata.plan.actions import Remove


def taken_by_someone_else(world: World, owner: Resource, wanted: Iterable[Mapping[str, Any]]) -> str | None:
    """Return kind and name of the first wanted object that exists and does not belong to `owner`, or None."""
    for child in wanted:
        live = world.children.get((child["kind"], child["metadata"]["name"]))
        if live is not None and owner.uid not in controllers(live):
            return f"{child['kind']} {child['metadata']['name']}"
    return None


def left_by_predecessor(world: World, owner: Resource, wanted: Iterable[Mapping[str, Any]]) -> str | None:
    """Return kind and name of the first wanted object that a deleted object of `owner`'s name controls, or None."""
    of_its_name = (owner.INFO.kind, owner.name)
    for child in wanted:
        live = world.children.get((child["kind"], child["metadata"]["name"])) or {"metadata": {}}
        for one in live["metadata"].get("ownerReferences") or ():
            if one.get("controller") and (one["kind"], one["name"]) == of_its_name and one["uid"] != owner.uid:
                return f"{child['kind']} {child['metadata']['name']}"
    return None


def no_longer_wanted(world: World, owner: Resource, wanted: Iterable[Mapping[str, Any]]) -> tuple[Remove, ...]:
    """Return the deletion of every object that `owner` controls and that is not among `wanted`."""
    keep = {(child["kind"], child["metadata"]["name"]) for child in wanted}
    return tuple(
        Remove(*slot, metadata["uid"])
        for slot in sorted(world.owned.get(owner.uid, frozenset()) - keep)
        if "deletionTimestamp" not in (metadata := world.children[slot]["metadata"])
    )


def controllers(live: Mapping[str, Any]) -> frozenset[str]:
    """Return the UIDs of the objects that control `live`; there is one at most in a sound cluster."""
    return frozenset(owner["uid"] for owner in live["metadata"].get("ownerReferences") or () if owner.get("controller"))
