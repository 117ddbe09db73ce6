"""One step of an erasure for tests: what it orders, and what it says of itself."""

from __future__ import annotations

from kvstrata.api.status import ConditionStatus
from kvstrata.contract.receipt.record import Head
from kvstrata.model.erasure.facts import Fact, Verdict
from kvstrata.model.erasure.record import Erasure
from kvstrata.plan.erasure.next_step import ErasureStep, next_step
from tests.support.receipts import DOMAIN, NAMESPACE, keys

from .erasures import (
    FILES,
    MEMORY,
    acked,
    around,
    at,
    deleted,
    ended,
    erased,
    looked,
    order,
    probed,
    removed,
    rolled,
    witness,
)

HEAD = Head(DOMAIN, NAMESPACE, 1, None, keys().current_id)
"""Where the chain is that the receipt would continue."""


def step_of(*facts: Fact, now_s: float = 60, seen: object = None, **of_order: object) -> ErasureStep:
    """The next step after these facts."""
    found = Erasure(order(**of_order)).with_facts(*facts)
    return next_step(found, seen or around(), at(now_s))  # type: ignore[arg-type]


def ordered(step: ErasureStep, kind: type) -> list[object]:
    """Its orders of one kind."""
    return [one for one in step.orders if isinstance(one, kind)]


def verdict_of(step: ErasureStep) -> Verdict | None:
    """The verdict that it orders to be written."""
    return step.verdict


def holding(step: ErasureStep) -> set[str]:
    """Conditions that it calls true."""
    return {one.type for one in step.findings if one.status is ConditionStatus.TRUE}


def because(step: ErasureStep, condition: str) -> str:
    """The reason of one condition."""
    return next(one.reason for one in step.findings if one.type == condition)


def departed() -> tuple[Fact, ...]:
    """All is done but for files on a node that is gone."""
    pods = (witness("p1", MEMORY), witness("p2", FILES))
    done = (deleted("n1"), deleted("n2"), erased("p1"), looked(), probed("p1"))
    return (rolled(*pods), acked("p1"), ended("p2", 4), *removed(), *done)
