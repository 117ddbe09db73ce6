"""Times at which scopes must be visited even if nothing happens in them. Pure."""

from __future__ import annotations

import heapq


class Deadlines:
    """A deadline for each keyspace, on a heap: scopes are many, and few are due."""

    def __init__(self) -> None:
        self._moments: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def plan(self, keyspace: str, moment_s: float | None) -> None:
        """Set a keyspace's deadline; None removes it."""
        if moment_s is None:
            self._moments.pop(keyspace, None)
        elif self._moments.get(keyspace) != moment_s:
            self._moments[keyspace] = moment_s
            heapq.heappush(self._heap, (moment_s, keyspace))
            if len(self._heap) > 2 * len(self._moments) + 64:
                self._heap = [(moment, name) for name, moment in self._moments.items()]
                heapq.heapify(self._heap)

    def due(self, now_s: float) -> set[str]:
        """Remove the deadlines that have passed, and return their keyspaces."""
        due: set[str] = set()
        while (next_s := self.next_s()) is not None and next_s <= now_s:
            _, keyspace = heapq.heappop(self._heap)
            del self._moments[keyspace]
            due.add(keyspace)
        return due

    def next_s(self) -> float | None:
        while self._heap and self._moments.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def clear(self) -> None:
        self._moments.clear()
        self._heap.clear()
