"""A work queue of keys: one worker at a time per key; repeated requests for a key merge."""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Iterable
from itertools import count

from kvstrata.model.refs import BUNDLE, Key

BASE_BACKOFF_S = 0.05
MAX_BACKOFF_S = 60.0
MAX_WAIT_S = 4.0


class WorkQueue:
    """Keys that wait for a worker, with delays and an exponential backoff for each failing key. `monotonic` gives
    seconds. A key that is added while a worker has it runs again afterwards. The earliest due time counts."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._due: dict[Key, float] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._order = count()
        self._active: set[Key] = set()
        self._again: dict[Key, float] = {}
        self._failures: dict[Key, int] = {}
        self._floor: dict[Key, float] = {}
        self._put_off: dict[Key, tuple[float, float]] = {}
        """End of a delay in monotonic seconds, and its length."""
        self._waiters: deque[asyncio.Future[None]] = deque()

    def __len__(self) -> int:
        now = self._monotonic()
        return sum(1 for due in self._due.values() if due <= now)

    @property
    def idle(self) -> bool:
        return len(self) == 0 and not self._active

    def add(self, key: Key, delay_s: float = 0.0) -> None:
        """Make `key` due in `delay_s` seconds, unless it is due earlier."""
        due = max(self._monotonic() + delay_s, self._floor.get(key, 0.0))
        if key in self._active:
            self._again[key] = min(due, self._again.get(key, due))
            return
        known = self._due.get(key)
        if known is not None and known <= due:
            return
        self._due[key] = due
        heapq.heappush(self._heap, (due, next(self._order), key))
        self._wake_one()

    def add_all(self, keys: Iterable[Key]) -> None:
        """Make keys due now; bundles first, because pods wait for them."""
        for key in sorted(keys, key=lambda key: key.kind != BUNDLE):
            self.add(key)

    def hold_off(self, key: Key, seconds: float) -> None:
        """Start `key` no earlier than in `seconds`: requests within that time merge."""
        self._floor[key] = self._monotonic() + seconds

    def put_off(self, key: Key, seconds: float) -> bool:
        """Delay deferrable work of `key` and enqueue it again; return True once it has waited long enough. The first
        call starts the wait; later ones continue it. Repeated waits grow fourfold, up to MAX_WAIT_S."""
        now = self._monotonic()
        ends, length_s = self._put_off.setdefault(key, (now + seconds, seconds))
        if now >= ends:
            longer_s = min(MAX_WAIT_S, 4 * length_s)
            self._put_off[key] = (now + longer_s, longer_s)
            return True
        self.add(key, ends - now)
        return False

    def put_off_no_more(self, key: Key) -> None:
        """End the wait of `key`: its deferred work is done or obsolete."""
        self._put_off.pop(key, None)

    async def take(self) -> Key:
        """Wait for a due key; the caller must call `done` or `failed` for it."""
        while True:
            now = self._monotonic()
            while self._heap:
                due, _, key = self._heap[0]
                is_current = self._due.get(key) == due
                if is_current and due > now:
                    break
                heapq.heappop(self._heap)
                if not is_current:
                    continue
                del self._due[key]
                self._active.add(key)
                if self._heap:
                    # Another worker must take the next key or wait for it.
                    self._wake_one()
                return key
            await self._wait(self._heap[0][0] - now if self._heap else None)

    async def _wait(self, timeout_s: float | None) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            # Not wait_for, which in Python 3.11 loses a cancellation that meets the result.
            async with asyncio.timeout(timeout_s):
                await waiter
        except TimeoutError:
            pass
        except asyncio.CancelledError:
            if not waiter.cancelled():
                self._wake_one()  # hand its wake-up to another worker
            raise
        finally:
            if waiter.cancelled() and waiter in self._waiters:
                self._waiters.remove(waiter)

    def _wake_one(self) -> None:
        """Wake one waiting worker: waking all sixteen for each key would cost more than most keys."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    def done(self, key: Key) -> None:
        self._failures.pop(key, None)
        if self._floor.get(key, 0.0) <= self._monotonic():
            self._floor.pop(key, None)
        self._active.discard(key)
        again = self._again.pop(key, None)
        if again is not None:
            self.add(key, max(0.0, again - self._monotonic()))
        elif key in self._due:
            self._wake_one()

    def failed(self, key: Key, retry_after_s: float | None = None) -> float:
        """Make `key` due again after a growing delay, which is returned in seconds."""
        named_s = min(MAX_BACKOFF_S, retry_after_s or 0.0)
        self._failures[key] = failures = self._failures.get(key, 0) + 1
        delay_s = max(min(MAX_BACKOFF_S, BASE_BACKOFF_S * float(2 ** min(failures, 16))), named_s)
        if named_s:
            # The server named a time: no event may bring the key back sooner.
            self.hold_off(key, named_s)
        self._again.pop(key, None)
        self._active.discard(key)
        self.add(key, delay_s)
        return delay_s
