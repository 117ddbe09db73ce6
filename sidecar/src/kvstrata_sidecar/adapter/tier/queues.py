"""Bounded queues of parts that wait for a worker, urgent ones first.

A part's label is its node. Of several labels, each occupies at most a share of the workers, so that a frozen server
leaves workers to the others.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable

from kvstrata_sidecar.adapter.policy.enforcement import Refusal
from kvstrata_sidecar.adapter.tier.tasks import AnyPart

Label = Hashable

LIMIT = 8_192
LIMIT_BYTES = 16 << 30


class _Queue:
    """Parts of one urgency, round-robin over labels, in order within one."""

    def __init__(self) -> None:
        self.parts: dict[Label, deque[AnyPart]] = {}
        self.count = 0
        self.size = 0

    def add(self, label: Label, part: AnyPart) -> None:
        self.parts.setdefault(label, deque()).append(part)
        self.count += 1
        self.size += part.size

    def next(self, ready: Callable[[Label], bool]) -> tuple[Label, AnyPart] | None:
        for label, waiting in self.parts.items():
            if ready(label):
                part = waiting.popleft()
                # Move the label behind the others, or drop it.
                del self.parts[label]
                if waiting:
                    self.parts[label] = waiting
                self.count -= 1
                self.size -= part.size
                return label, part
        return None

    def remove(self, which: Callable[[AnyPart], bool]) -> list[AnyPart]:
        removed = [part for waiting in self.parts.values() for part in waiting if which(part)]
        if removed:
            left = {label: deque(p for p in waiting if not which(p)) for label, waiting in self.parts.items()}
            self.parts = {label: waiting for label, waiting in left.items() if waiting}
            self.count -= len(removed)
            self.size -= sum(part.size for part in removed)
        return removed


class Lane:
    """A queue of at most `limit` parts and `limit_bytes` of memory, each for urgent parts and for others. Thread-safe.
    Bytes are those of LMCache's memory that a part keeps lent; an empty queue accepts a part beyond the limit. `share`
    is how many parts of one label may be under way at a time, None while there is one label."""

    def __init__(
        self, limit: int = LIMIT, limit_bytes: int = LIMIT_BYTES, share: Callable[[], int | None] = lambda: None
    ) -> None:
        self._limit = limit
        self._limit_bytes = limit_bytes
        self._share = share
        self._changed = threading.Condition()
        self._urgent = _Queue()
        self._patient = _Queue()
        self._under_way: Counter[Label] = Counter()
        self._closed = False

    def put(self, part: AnyPart, label: Label = None) -> Refusal | None:
        """Return why the part was not added, None if it was."""
        with self._changed:
            queue = self._urgent if part.urgent else self._patient
            if self._closed or queue.count >= self._limit:
                return Refusal.QUEUE_FULL
            if queue.count and queue.size + part.size > self._limit_bytes:
                return Refusal.QUEUE_BYTES
            queue.add(label, part)
            self._changed.notify()
            return None

    def take(self) -> tuple[Label, AnyPart] | None:
        """Wait for a part whose label has some of its share left; None once the lane is closed. `done` must follow."""
        with self._changed:
            while not self._closed:
                taken = self._urgent.next(self._is_ready) or self._patient.next(self._is_ready)
                if taken is not None:
                    self._under_way[taken[0]] += 1
                    return taken
                self._changed.wait()
            return None

    def done(self, label: Label) -> None:
        with self._changed:
            self._under_way[label] -= 1
            if not self._under_way[label]:
                del self._under_way[label]
            self._changed.notify()

    def forget(self, which: Callable[[AnyPart], bool]) -> list[AnyPart]:
        """Remove waiting parts and return them."""
        with self._changed:
            return [*self._urgent.remove(which), *self._patient.remove(which)]

    def close(self) -> list[AnyPart]:
        """Refuse further parts, release the workers and return the parts left."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            return self.forget(lambda _: True)

    def _is_ready(self, label: Label) -> bool:
        share = self._share()
        return share is None or self._under_way[label] < share
