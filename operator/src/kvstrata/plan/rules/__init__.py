"""Decision chains: for each kind a tuple of small rules, in the order of the documentation.

A rule returns a Decision (a reason and a sentence) or None; the first decision stands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from kvstrata.model.world import World
from kvstrata.plan.actions import Decision

T = TypeVar("T")
Rule = Callable[[World, T], Decision | None]


def first(rules: Iterable[Rule[T]], world: World, subject: T) -> Decision | None:
    for rule in rules:
        decision = rule(world, subject)
        if decision:
            return decision
    return None
