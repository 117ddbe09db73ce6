"""Metrics of slot moves, updated during the moves."""

from __future__ import annotations

from collections.abc import Callable

from kvstrata.clients.redis.slot_moves import MoveStats, Told
from kvstrata.plan.redis.topology import MoveOrder
from kvstrata.reconcile import metrics


class MoveCount:
    """Counts the moves of one step, for a tier given by namespace and name. `told` gets the number of moved slots
    whenever it grows."""

    def __init__(self, where: tuple[str, str], told: Callable[[int], None]) -> None:
        self._slots, self._dropped = metrics.SLOTS_MOVED.labels(*where), metrics.MOVE_DROPPED.labels(*where)
        self._told = told
        self._moved = 0

    def of(self, order: MoveOrder) -> Told:
        """Return a callback for an order's progress, to be called once more at its end."""
        slots = dropped = 0

        def take(tally: MoveStats) -> None:
            nonlocal slots, dropped
            # A slot with the same source and target was only closed.
            more = tally.slots - slots if order.source != order.target else 0
            self._dropped.inc(tally.dropped - dropped)
            slots, dropped = tally.slots, tally.dropped
            if more:
                self._slots.inc(more)
                self._moved += more
                self._told(self._moved)

        return take
