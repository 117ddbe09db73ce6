"""Ownership of objects: foreign ones are never taken over, unwanted ones of the operator are deleted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvstrata.api.base import Resource
from kvstrata.api.cachedomain import CacheDomain
from kvstrata.api.reasons import SharedReason
from kvstrata.model.world import World
from kvstrata.objects import labels
from kvstrata.plan.actions import Decision, ReadForeign, Remove

FOREIGN_S = 15.0


def is_ours(live: Mapping[str, Any], owner: str) -> bool:
    """Whether an object belongs to the one of UID `owner`. A Secret also by the operator's label: one restored from a
    backup has an owner of another UID, or none."""
    metadata = live["metadata"]
    if live["kind"] != "Secret":
        return owner in controllers(live)
    return has_our_label(live) or any(one["uid"] == owner for one in metadata.get("ownerReferences") or ())


def has_our_label(live: Mapping[str, Any]) -> bool:
    """Whether watches show the object."""
    return labels.OWNED.items() <= (live["metadata"].get("labels") or {}).items()


def name_conflict(world: World, owner: Resource, wanted: Iterable[Mapping[str, Any]] = ()) -> Decision | None:
    """Return a decision that names foreign objects with names that `owner` needs, None if there are none. `wanted`
    objects are compared with watches; further ones were found by writes."""
    shown = [
        slot
        for child in wanted
        if (live := world.children.get(slot := (child["kind"], child["metadata"]["name"]))) is not None
        and not is_ours(live, owner.uid)
    ]
    taken = ", ".join(f"{kind} {name}" for kind, name in sorted({*shown, *foreign_of(world, owner)}))
    if not taken:
        return None
    kind = owner.INFO.kind
    way_out = "delete them" if kind == CacheDomain.INFO.kind else f"delete them, or rename the {kind}"
    message = f"objects of others have names that this {kind} needs: {taken}. They are left alone; {way_out}"
    return Decision(SharedReason.NAME_CONFLICT, message)


def read_foreign(world: World, owner: Resource) -> tuple[ReadForeign, ...]:
    met = foreign_of(world, owner)
    return (ReadForeign(met),) if met else ()


def foreign_of(world: World, owner: Resource) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(slot for slot, uid in world.foreign.items() if uid == owner.uid))


def left_by_predecessor(world: World, owner: Resource, wanted: Iterable[Mapping[str, Any]]) -> str | None:
    """Return kind and name of the first wanted object controlled by a deleted predecessor of `owner`, or None."""
    of_its_name = (owner.INFO.kind, owner.name)
    for child in wanted:
        live = world.children.get((child["kind"], child["metadata"]["name"])) or {"metadata": {}}
        for one in live["metadata"].get("ownerReferences") or ():
            if one.get("controller") and (one["kind"], one["name"]) == of_its_name and one["uid"] != owner.uid:
                return f"{child['kind']} {child['metadata']['name']}"
    return None


def no_longer_wanted(world: World, owner: Resource, wanted: Iterable[Mapping[str, Any]]) -> tuple[Remove, ...]:
    keep = {(child["kind"], child["metadata"]["name"]) for child in wanted}
    return tuple(
        Remove(*slot, metadata["uid"])
        for slot in sorted(world.owned.get(owner.uid, frozenset()) - keep)
        if "deletionTimestamp" not in (metadata := world.children[slot]["metadata"])
    )


def controllers(live: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(owner["uid"] for owner in live["metadata"].get("ownerReferences") or () if owner.get("controller"))
