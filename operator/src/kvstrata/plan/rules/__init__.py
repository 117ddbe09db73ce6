"""Decision chains: for each kind a tuple of small rules, in the order in which the documentation lists them.

A rule looks at the world and returns a Decision (a reason and a sentence) or None; the first decision stands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from kvstrata.model.world import World
from kvstrata.plan.actions import Decision

T = TypeVar("T")
Rule = Callable[[World, T], Decision | None]


def first(rules: Iterable[Rule[T]], world: World, subject: T) -> Decision | None:
    """Return the first decision of `rules`, in order, or None if all are content."""
    for rule in rules:
        decision = rule(world, subject)
        if decision:
            return decision
    return None
