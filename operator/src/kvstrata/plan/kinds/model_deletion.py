"""Deletion of a CachedModel: the object stays until its Deployment and its bundle are deleted.

Garbage collection does not reach children that lost their owner reference, and their pods would serve on from a bundle
that no longer follows any policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvstrata.api.cachedmodel import CachedModel
from kvstrata.model.world import World
from kvstrata.objects import names
from kvstrata.plan.actions import Action, Plan, Remove, SetFinalizers, key_of
from kvstrata.plan.ownership import is_ours

FINALIZER = "kvstrata.io/end-serving"


def finalizer_due(model: CachedModel) -> Plan | None:
    """Return the plan that sets the finalizer of a live model, before anything serves it; None if it has it."""
    metadata = model.metadata
    if FINALIZER in metadata.finalizers:
        return None
    order = SetFinalizers((*metadata.finalizers, FINALIZER), metadata.resource_version)
    return Plan(actions=(order,), enqueue=(key_of(model),))


def departure(world: World, model: CachedModel, children: Iterable[Mapping[str, Any]]) -> tuple[Action, ...]:
    """Return the deletions of a deleted model's Deployment and bundle, then the release of the model. Objects that do
    not exist are done, and foreign ones are left alone. `children` are its desired ones, if they can be built."""
    if FINALIZER not in model.metadata.finalizers:
        return ()
    kind, name, me = "Deployment", names.model_child(model.name), (model.INFO.kind, model.name)
    live = world.children.get((kind, name))
    desired = next((child for child in children if child["kind"] == kind), None)
    deployment = (
        (Remove(kind, name, live["metadata"]["uid"]),)
        if live is not None and is_ours(world.mark_key, model.owner_reference(), live, desired)
        else ()
    )
    bundle = (
        Remove("Secret", name, facts.uid)
        for name, facts in sorted(world.secrets.items())
        if facts.of_bundle and (model.uid in facts.owners or facts.parent == me)
    )
    return *deployment, *bundle, released(model.metadata.finalizers, model.metadata.resource_version)


def released(finalizers: tuple[str, ...], resource_version: str) -> SetFinalizers:
    return SetFinalizers(tuple(one for one in finalizers if one != FINALIZER), resource_version)
