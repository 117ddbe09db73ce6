"""LMCache's memory manager (0.5.6): reads its tables, deletes by key, and replaces its `free`.

Its tables are read without its lock: copying a dictionary's items is atomic, and `delete` checks locks again.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

from kvstrata_sidecar.adapter.tier.buffers import Spans
from kvstrata_sidecar.upstream.loans import Loans

logger = logging.getLogger(__name__)

DELETED_AT_ONCE = 256
"""Blocks deleted under one hold of LMCache's lock, for which all tenants' requests wait."""


BATCH_BYTES = 128 << 20
"""Bytes overwritten before they are freed: a store that waits for room should not wait for the whole queue."""

RETRY_S = 0.1

Item = tuple[int, Any, int]
"""The number in the order of taking, the object, its length."""


ROOM_WITHIN_S = 0.2
"""How long a batch waits, and with it the loop of LMCache that needs it."""


class Pool:
    """One LMCache L1Manager whose freed memory is overwritten from `guard` until `close`. `success` and `no_memory`
    are LMCache's answers, `store_tag` its tag of stores. `spans` is memory that disks may still touch.
    `loans` are not counted as blocks; only `in_use` includes them."""

    def __init__(
        self,
        manager: Any,
        success: object,
        no_memory: object,
        store_tag: str,
        spans: Spans | None = None,
    ) -> None:
        self._manager = manager
        self._success = success
        self._memory = manager._memory_manager
        self._free: Callable[[list[Any]], Any] = self._memory.free
        self._spans = Spans() if spans is None else spans
        self.scrubber = Scrubber(self)
        self._spans.released = self.scrubber.look_again
        self.loans = Loans(manager)
        self.room = Room(manager, no_memory, store_tag)

    def guard(self) -> None:
        self.scrubber.start()

        def free(objects: list[Any]) -> object:
            self.scrubber.take([one for one in objects if self.loans.frees(one)])
            return self._success

        self._memory.free = free

    def close(self) -> None:
        self.room.close()
        self.scrubber.take(self.loans.close())
        self._memory.__dict__.pop("free", None)
        self.scrubber.close()

    def listen(self, listener: Any) -> None:
        """Have LMCache report every change to `listener`, under its lock."""
        self._manager.register_listener(listener)

    def usage(self) -> tuple[int, int]:
        """Return (bytes that hold blocks or are being written, all bytes)."""
        used_bytes, total_bytes = self._manager.get_memory_usage()
        return used_bytes - self.scrubber.pending_bytes, total_bytes

    def resident(self) -> list[tuple[Any, Any]]:
        """Return all blocks that readers can find, as (key, entry)."""
        found, loans = list(self._manager._objects.items()), self.loans
        return [(key, entry) for key, entry in found if not loans.has(key, entry)] if loans else found

    def staged(self) -> list[tuple[Any, Any]]:
        """Return all blocks that are being written, as (key, entry); a key may have several writers."""
        staging = list(self._manager._staging.items())
        return [(key, entry) for key, writers in staging for entry in list(writers.values())]

    def staged_bytes(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for key, entry in self.staged():
            total[key.cache_salt] += self.size(entry)
        return total

    def abandoned(self) -> list[Any]:
        """Return the keys whose writers have timed out."""
        return [key for key, entry in self.staged() if not entry.write_lock.is_locked()]

    def entry(self, key: Hashable) -> Any:
        """Return the entry of a block that readers can find, None without one."""
        entry = self._manager._objects.get(key)
        return None if self.loans.has(key, entry) else entry

    def address(self, key: Hashable) -> int | None:
        """Return the memory address of a block or a loan, None without one."""
        entry = self._manager._objects.get(key)
        return None if entry is None else int(entry.memory_obj.data_ptr)

    def coming(self, key: Hashable) -> bool:
        return bool(self._manager._staging.get(key))

    def holds(self, key: Hashable, entry: Any) -> bool:
        """Whether this very entry is being written or readable; in this order none is missed on its way."""
        writers = self._manager._staging.get(key)
        if writers is not None and any(one is entry for one in list(writers.values())):
            return True
        return self.entry(key) is entry

    def in_use(self, key: Hashable) -> bool:
        entry = self._manager._objects.get(key)
        return entry is not None and bool(entry.read_lock.is_locked())

    @staticmethod
    def size(entry: Any) -> int:
        """Return an entry's bytes, padding included."""
        return int(entry.memory_obj.get_physical_size())

    def delete(self, keys: Sequence[Hashable]) -> set[Hashable]:
        """Delete blocks; return those that were there and unused."""
        deleted: set[Hashable] = set()
        for start in range(0, len(keys), DELETED_AT_ONCE):
            answers = self._manager.delete(list(keys[start : start + DELETED_AT_ONCE]))
            deleted.update(key for key, answer in answers.items() if answer == self._success)
        return deleted

    def return_loans(self) -> None:
        """Return loans of readers that are gone, and free memory that only loans held."""
        unread, unowned = self.loans.overdue()
        self.delete(unread)
        self.scrubber.take(unowned)

    def settle(self, timeout_s: float) -> bool:
        """Wait until everything deleted so far is overwritten; return whether that succeeded in time."""
        # LMCache deletes and frees under one hold of its lock: after taking the lock, the memory has been freed.
        with self._manager._lock:
            pass
        return self.scrubber.flush(timeout_s)

    def span(self, memory_object: Any) -> tuple[int, int] | None:
        """Return address and length of an object's memory, None if it was freed already."""
        if not memory_object.is_valid():
            return None
        return int(memory_object.data_ptr), int(memory_object.get_physical_size())

    def lent(self, address: int, length: int) -> bool:
        """Whether an operation that cannot be cancelled may still touch this memory."""
        return self._spans.touches(address, length)

    def overwrite(self, address: int, length: int) -> None:
        """Fill memory with zeros, without the interpreter's lock."""
        ctypes.memset(address, 0, length)

    def give_back(self, objects: Iterable[Any]) -> None:
        self._free(list(objects))


class Scrubber:
    """Overwrites memory that LMCache frees before it can be allocated again.

    LMCache frees mostly under its global lock. So `take` only queues the objects, which stay allocated until a thread
    has overwritten them. Memory that a disk may still read or write is held back until that ends.
    """

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


@dataclass(eq=False, slots=True)
class Batch:
    """So many blocks that wait; `answered` is set when there is as much room as there can be."""

    blocks: int
    answered: threading.Event = field(default_factory=threading.Event)


class Room:
    """Room for batches of blocks. Replaces the manager's `reserve_write` from `begin` to `close`. Thread-safe.

    LMCache allocates memory for all blocks of a load or a store together, and gives the batch up if it has too little.
    It waits here until the evictor has made room, and is then tried again.
    """

    def __init__(self, manager: Any, no_memory: object, store_tag: str) -> None:
        self._manager = manager
        self._no_memory = no_memory
        self._store_tag = store_tag
        self._lock = threading.Lock()
        self._waiting: list[Batch] = []

    def begin(
        self, wake: Callable[[], object], lost: Callable[[], object], unwritable: Callable[..., Collection[Any]]
    ) -> None:
        """Start. `wake` requests a turn of the evictor, and `lost` is called for each batch that got no memory.
        `unwritable(keys, load=…)` returns the blocks that get none in any case."""
        self._wake, self._lost, self._unwritable = wake, lost, unwritable
        self._reserve: Callable[..., dict[Any, Any]] = self._manager.reserve_write
        self._manager.reserve_write = self.reserve_write

    def close(self) -> None:
        self._manager.__dict__.pop("reserve_write", None)
        for batch in self.take():
            batch.answered.set()

    def take(self) -> list[Batch]:
        """Return, once, the batches that wait."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        return waiting

    def reserve_write(
        self, keys: Sequence[Any], is_temporary: Sequence[bool], *layout: Any, **tag: Any
    ) -> dict[Any, Any]:
        """Replaces LMCache's function, which reserves memory and answers by key. Nothing is locked meanwhile."""
        refused = self._unwritable(keys, load=tag.get("tag") != self._store_tag)
        if refused:
            kept = [key not in refused for key in keys]
            keys, is_temporary = list(compress(keys, kept)), list(compress(is_temporary, kept))
        answers = self._reserve_or_wait(keys, is_temporary, *layout, **tag)
        return answers | dict.fromkeys(refused, (self._no_memory, None))

    def _reserve_or_wait(
        self, keys: Sequence[Any], is_temporary: Sequence[bool], *layout: Any, **tag: Any
    ) -> dict[Any, Any]:
        answers = self._reserve(keys, is_temporary, *layout, **tag)
        lacking = {key for key, (error, _) in answers.items() if error == self._no_memory}
        if not lacking:
            return answers
        batch = Batch(len(lacking))
        with self._lock:
            self._waiting.append(batch)
        self._wake()
        batch.answered.wait(ROOM_WITHIN_S)
        again = [key in lacking for key in keys]
        answers |= self._reserve(list(compress(keys, again)), list(compress(is_temporary, again)), *layout, **tag)
        if any(answers[key][0] == self._no_memory for key in lacking):
            self._lost()
        return answers
