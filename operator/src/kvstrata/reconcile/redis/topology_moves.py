"""Slots on their way: what their movers have done is counted while they are at it, which may take long."""

from __future__ import annotations

from collections.abc import Callable

from kvstrata.clients.redis.slot_moves import MoveStats, Told
from kvstrata.plan.redis.topology import MoveOrder
from kvstrata.reconcile import metrics


class MoveCount:
    """Counts what the movers of one step's orders do, for a tier given by namespace and name.

    `told` hears how many slots have gone to another server so far, whenever that is more than before.
    """

    def __init__(self, where: tuple[str, str], told: Callable[[int], None]) -> None:
        self._slots, self._dropped = metrics.SLOTS_MOVED.labels(*where), metrics.MOVE_DROPPED.labels(*where)
        self._told = told
        self._moved = 0

    def of(self, order: MoveOrder) -> Told:
        """Return what hears of an order's tally, each time it is more, and once when the order has ended."""
        slots = dropped = 0

        def take(tally: MoveStats) -> None:
            nonlocal slots, dropped
            # A slot that stays where it is was only closed.
            more = tally.slots - slots if order.source != order.target else 0
            self._dropped.inc(tally.dropped - dropped)
            slots, dropped = tally.slots, tally.dropped
            if more:
                self._slots.inc(more)
                self._moved += more
                self._told(self._moved)

        return take
