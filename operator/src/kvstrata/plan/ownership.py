"""Ownership of objects: foreign ones are never taken over, unwanted ones of the operator are deleted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from kvstrata.api.base import Resource
from kvstrata.api.cachedomain import CacheDomain
from kvstrata.api.conditions import ConditionType
from kvstrata.api.reasons import SharedReason
from kvstrata.model.world import World
from kvstrata.objects import labels, mark
from kvstrata.plan.actions import Decision, ReadForeign, Remove, TakeBack

Foreign = tuple[str, str]
"""Kind and name."""

FOREIGN_S = 15.0
TAKE_OVER = "kvstrata.io/take-over"
"""Annotation of a foreign object: the parent, as Kind/name, that may have its name. It takes the right to change the
foreign object: the right to create a parent is not enough."""


def is_ours(
    key: bytes, owner: Mapping[str, Any], live: Mapping[str, Any], desired: Mapping[str, Any] | None = None
) -> bool:
    """Whether an object belongs to the one of reference `owner`: it is controlled by it, or by none, and has a mark
    under `key` that holds. A Secret may have a deleted predecessor of `owner` as controller, which writes replace."""
    parent, is_secret = (owner["kind"], owner["name"]), live["kind"] == "Secret"
    references = [one for one in live["metadata"].get("ownerReferences") or () if is_secret or one.get("controller")]
    if any(one["uid"] == owner["uid"] for one in references):
        return True
    if is_secret:
        references = [one for one in references if (one["kind"], one["name"]) != parent]
    return not references and mark.holds(key, live, parent, desired)


def secrets_to_take_back(world: World, owner: Resource, *, bundle: bool = False) -> tuple[TakeBack, ...]:
    """Return orders for Secrets of `owner`, of its bundle or all others, that lack the owner reference or a mark."""
    me, reference = (owner.INFO.kind, owner.name), owner.owner_reference()
    if not world.mark_key:
        return ()
    found = [
        name
        for name, facts in world.secrets.items()
        if (facts.parent == me) != (owner.uid in facts.owners) and facts.of_bundle == bundle
    ]
    return tuple(TakeBack(name, reference) for name in sorted(found))


def has_our_label(live: Mapping[str, Any]) -> bool:
    """Whether watches show the object."""
    return labels.OWNED.items() <= (live["metadata"].get("labels") or {}).items()


def may_take_over(owner: Mapping[str, Any], live: Mapping[str, Any]) -> bool:
    """Whether a foreign object's own annotation leaves its name to the object of reference `owner`."""
    return bool((live["metadata"].get("annotations") or {}).get(TAKE_OVER) == f"{owner['kind']}/{owner['name']}")


def conflicting(world: World, owner: Resource, wanted: Iterable[Mapping[str, Any]] = ()) -> list[Foreign]:
    """Return every foreign object with a name that `owner` needs, except those to be taken over. `wanted` objects are
    compared with watches; further ones were found by writes."""
    reference = owner.owner_reference()
    shown = {
        slot
        for child in wanted
        if (live := world.children.get(slot := (child["kind"], child["metadata"]["name"]))) is not None
        and not is_ours(world.mark_key, reference, live, child)
        and not may_take_over(reference, live)
    }
    return sorted(shown | foreign_of(world, owner))


def name_conflict(world: World, owner: Resource, wanted: Iterable[Mapping[str, Any]] = ()) -> Decision | None:
    """Return a decision that names all foreign objects with names that `owner` needs, None if there are none."""
    found = conflicting(world, owner, wanted)
    if not found:
        return None
    owner_kind = owner.INFO.kind
    way_out = "delete them" if owner_kind == CacheDomain.INFO.kind else f"delete them, rename the {owner_kind}"
    taken = ", ".join(map(" ".join, found))
    listed = " ".join(map("/".join, found))
    message = (
        f"objects of others have names that this {owner_kind} needs: {taken}. They are left alone; {way_out}, or have "
        f"them taken over: kubectl -n {owner.namespace} annotate {listed} {TAKE_OVER}={owner_kind}/{owner.name}"
    )
    return Decision(SharedReason.NAME_CONFLICT, message)


def read_foreign(
    world: World, owner: Resource, wanted: Iterable[Mapping[str, Any]] = (), secrets: Iterable[str] = ()
) -> tuple[ReadForeign, ...]:
    """Return the order to read the foreign objects of a conflict again. `secrets` are names of Secrets that `owner`
    needs: those that it does not have are read as well, so that all are reported at once."""
    found = conflicting(world, owner, wanted)
    lacking = {("Secret", name) for name in secrets if name not in world.secrets}
    return (ReadForeign(tuple(sorted({*found, *lacking})), owner.owner_reference()),) if found else ()


def foreign_wait_s(owner: Resource, now: datetime) -> float:
    """Return when to read foreign objects again, which no watch shows: at first each second, a person is at work."""
    stalled = owner.status.condition(ConditionType.STALLED)
    is_old = stalled is not None and stalled.reason == SharedReason.NAME_CONFLICT
    age_s = (now - stalled.last_transition_time).total_seconds() if is_old else 0.0
    return min(FOREIGN_S, max(1.0, age_s / 20))


def foreign_of(world: World, owner: Resource) -> frozenset[Foreign]:
    """Return foreign objects that writes found under names that `owner` needs, except those to be taken over."""
    return frozenset(slot for slot, parent in world.foreign.items() if parent == owner.uid)


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
