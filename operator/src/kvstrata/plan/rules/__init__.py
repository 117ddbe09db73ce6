"""Decision chains: for each kind a tuple of small rules, in the order of the documentation.

A rule returns a Decision (a reason and a sentence) or None; the first decision stands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from kvstrata.api.base import Resource
from kvstrata.api.reasons import SharedReason
from kvstrata.model.world import World
from kvstrata.plan.actions import Decision

T = TypeVar("T")
Rule = Callable[[World, T], Decision | None]


def first(rules: Iterable[Rule[T]], world: World, subject: T) -> Decision | None:
    return next((decision for rule in rules if (decision := rule(world, subject)) is not None), None)


def absent(world: World, reason: str, what: str, remedy: str) -> Decision:
    return Decision(reason, f"{what} does not exist in namespace {world.namespace}: {remedy}")


def absent_tier(world: World, names: Iterable[str], field: str) -> Decision | None:
    """Return that a tier which `field` names does not exist; None if all do."""
    missing = next((name for name in names if name not in world.tiers), None)
    if missing is None:
        return None
    known = ", ".join(sorted(world.tiers)) or "none"
    message = f"CacheTier {missing} does not exist in namespace {world.namespace} (there: {known}): create it or "
    return Decision(SharedReason.TIER_NOT_FOUND, f"{message}correct {field}")


def age_of(resource: Resource) -> tuple[float, str]:
    """Return a key that sorts objects oldest first."""
    created = resource.metadata.creation_timestamp
    return created.timestamp() if created else 0.0, resource.uid
