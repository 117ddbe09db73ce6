"""Overwrites memory that LMCache frees before it can be allocated again.

LMCache frees mostly under its global lock. So `take` only queues the objects, which stay allocated until a thread has
overwritten them. Memory that a disk may still read or write is held back until that ends.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstrata_sidecar.upstream.pool import Pool

logger = logging.getLogger(__name__)

BATCH_BYTES = 128 << 20
"""Bytes overwritten before they are freed: a store that waits for room should not wait for the whole queue."""

RETRY_S = 0.1

Item = tuple[int, Any, int]
"""The number in the order of taking, the object, its length."""


class Scrubber:
    def __init__(self, memory: Pool) -> None:
        self._memory = memory
        self._aside: deque[Item] = deque()
        self._batch: list[Item] = []
        self._lent: list[Item] = []
        self._changed = threading.Condition()
        self._taken = 0
        self._closed = False
        self.pending_bytes = 0
        self.overwritten_bytes = 0
        self.failures = 0
        self._thread = threading.Thread(target=self._run, name="kvs-memory-scrub", daemon=True)
        self.start = self._thread.start

    @property
    def healthy(self) -> bool:
        return self._thread.is_alive() and not self.failures

    def take(self, objects: Iterable[Any]) -> None:
        """Queue objects. Never blocks for long and never raises: LMCache calls it under its lock."""
        taken = [(one, span[1]) for one in objects if (span := self._memory.span(one)) is not None]
        if not taken:
            return
        with self._changed:
            self._aside.extend((self._taken + number, one, length) for number, (one, length) in enumerate(taken))
            self._taken += len(taken)
            self.pending_bytes += sum(length for _, length in taken)
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything taken before is overwritten; return whether that succeeded in time."""
        with self._changed:
            mark = self._taken
            return self._changed.wait_for(lambda: self._undone() >= mark, timeout_s)

    def look_again(self) -> None:
        """Check held-back memory again: some may have been released."""
        if self._lent:
            with self._changed:
                self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._anything_to_do, RETRY_S if self._lent else None)
                self._take_back()
                if not self._aside:
                    if self._closed:
                        return
                    continue
                self._batch = self._next_batch()
            while not self._scrub([one for _, one, _ in self._batch]):
                # Memory that cannot be overwritten must not be freed; `healthy` reports it.
                with self._changed:
                    if self._changed.wait_for(lambda: self._closed, RETRY_S):
                        return
            with self._changed:
                length = sum(length for _, _, length in self._batch)
                self._batch = []
                self.pending_bytes -= length
                self.overwritten_bytes += length
                self.failures = 0
                self._changed.notify_all()

    def _undone(self) -> int:
        """Return the number up to which everything is overwritten."""
        firsts = (items[0][0] for items in (self._aside, self._batch, self._lent) if items)
        return min(firsts, default=self._taken)

    def _anything_to_do(self) -> bool:
        return bool(self._aside) or self._closed or any(not self._is_lent(one) for _, one, _ in self._lent)

    def _take_back(self) -> None:
        """Split the queue into objects to overwrite now and those still lent."""
        waiting = sorted((*self._lent, *self._aside), key=lambda item: item[0]) if self._lent else list(self._aside)
        lent = [item for item in waiting if self._is_lent(item[1])]
        if lent or self._lent:
            kept_back = {item[0] for item in lent}
            self._aside = deque(item for item in waiting if item[0] not in kept_back)
        self._lent = lent

    def _is_lent(self, one: Any) -> bool:
        span = self._memory.span(one)
        return span is not None and self._memory.lent(*span)

    def _next_batch(self) -> list[Item]:
        batch: list[Item] = []
        length = 0
        while self._aside and length < BATCH_BYTES:
            batch.append(self._aside.popleft())
            length += batch[-1][2]
        return batch

    def _scrub(self, batch: Sequence[Any]) -> bool:
        # LMCache may free an object twice; at the second time its memory may hold another block.
        freed = {id(one): (one, span) for one in batch if (span := self._memory.span(one)) is not None}
        try:
            for address, length in joined(span for _, span in freed.values()):
                self._memory.overwrite(address, length)
            self._memory.give_back([one for one, _ in freed.values()])
        except Exception:
            self.failures += 1
            if self.failures == 1:
                logger.exception("Freed memory could not be overwritten and is kept back")
            return False
        return True


def joined(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return spans by address, neighbours merged: each call of memset may cost a switch of threads."""
    result: list[tuple[int, int]] = []
    for address, length in sorted(spans):
        if result and sum(result[-1]) >= address:
            start, before = result[-1]
            result[-1] = (start, max(before, address + length - start))
        else:
            result.append((address, length))
    return result
