"""LMCache's memory manager (0.5.6): reads its tables, deletes by key, and replaces its `free`.

Its tables are read without its lock: copying a dictionary's items is atomic, and `delete` checks locks again.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from kvstrata_sidecar.adapter.memory.scrub import Scrubber
from kvstrata_sidecar.adapter.tier.buffers import Spans
from kvstrata_sidecar.upstream.loans import Loans
from kvstrata_sidecar.upstream.room import Room

DELETED_AT_ONCE = 256
"""Blocks deleted under one hold of LMCache's lock, for which all tenants' requests wait."""


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
