"""LMCache's memory manager, played, for tests without LMCache: its tables, locks and callbacks.

Its memory is real: a buffer with an allocator that gives the lowest free block, so that a block's memory is soon
somebody else's. That LMCache is like this is checked with the real one in tests/dataplane/test_memory.py.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstrata.contract.messages.engine_identity import marked
from tests.tiers.gate_stand_in import FINGERPRINT

BLOCK_BYTES = 4096
SUCCESS = "success"
LOCKED = "locked"
NO_MEMORY = "no memory"
MISSING = "missing"
STORE_TAG = "w"
READ_TTL_S = 300


@dataclass(frozen=True)
class Key:
    cache_salt: str
    number: int
    kv_rank: int = 0
    object_group_id: int = 0
    model_name: str = marked("tiny", FINGERPRINT)

    @property
    def chunk_hash(self) -> bytes:
        return self.number.to_bytes(32, "big")


class Lock:
    """LMCache's TTLLock: who locks renews it for all, and when its time has run out nobody holds it. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = lambda: 0.0) -> None:
        self.count = 0
        self._clock = clock
        self._until_s = float("inf")
        self._atomic = threading.Lock()

    def is_locked(self) -> bool:
        return self.count > 0 and self._clock() < self._until_s

    def lock(self) -> None:
        with self._atomic:
            self.count = self.count + 1 if self.is_locked() else 1
            self._until_s = self._clock() + READ_TTL_S

    def unlock(self) -> None:
        with self._atomic:
            self.count = max(0, self.count - 1)


@dataclass(eq=False)
class MemoryObject:
    data_ptr: int
    blocks: int
    valid: bool = True

    def is_valid(self) -> bool:
        return self.valid

    @property
    def byte_array(self) -> Any:
        return (ctypes.c_ubyte * self.get_physical_size()).from_address(self.data_ptr)

    def get_physical_size(self) -> int:
        return self.blocks * BLOCK_BYTES


@dataclass(eq=False)
class Entry:
    memory_obj: MemoryObject
    write_lock: Lock = field(default_factory=Lock)
    read_lock: Lock = field(default_factory=Lock)
    is_temporary: bool = False


class Allocator:
    """LMCache's L1MemoryManager."""

    def __init__(self, blocks: int) -> None:
        self.buffer = ctypes.create_string_buffer(blocks * BLOCK_BYTES)
        self.base = ctypes.addressof(self.buffer)
        self.free_blocks = set(range(blocks))
        self.total = blocks
        self.lock = threading.Lock()

    def allocate(self) -> MemoryObject | None:
        with self.lock:
            if not self.free_blocks:
                return None
            block = min(self.free_blocks)
            self.free_blocks.remove(block)
            return MemoryObject(self.base + block * BLOCK_BYTES, 1)

    def free(self, objects: list[MemoryObject]) -> str:
        with self.lock:
            for one in objects:
                if one.valid:
                    one.valid = False
                    self.free_blocks.add((one.data_ptr - self.base) // BLOCK_BYTES)
        return SUCCESS


class Manager:
    """LMCache's L1Manager: one block of memory for each key, filled with its number's marker."""

    def __init__(self, blocks: int, clock: Callable[[], float] = lambda: 0.0) -> None:
        self._clock = clock
        self._read_ttl_seconds = READ_TTL_S
        self._objects: dict[Key, Entry] = {}
        self._staging: dict[Key, dict[str, Entry]] = {}
        self._lock = threading.Lock()
        self._memory_manager = Allocator(blocks)
        self._listeners: list[Any] = []

    def register_listener(self, listener: Any) -> None:
        self._listeners.append(listener)

    def get_memory_usage(self) -> tuple[int, int]:
        memory = self._memory_manager
        return (memory.total - len(memory.free_blocks)) * BLOCK_BYTES, memory.total * BLOCK_BYTES

    def reserve(self, *keys: Key, tag: str = "w", like: Key | None = None) -> bool:
        with self._lock:
            reserved = []
            for key in keys:
                memory_object = self._memory_manager.allocate()
                if memory_object is not None:
                    entry = Entry(memory_object, read_lock=Lock(self._clock))
                    entry.write_lock.count = 1
                    self._staging.setdefault(key, {})[tag] = entry
                    content = marker(like or key)
                    ctypes.memmove(memory_object.data_ptr, content, len(content))
                    reserved.append(key)
            self._tell("on_l1_keys_reserved_write", reserved)
            return len(reserved) == len(keys)

    def reserve_write(
        self, keys: Sequence[Key], is_temporary: Sequence[bool], layout_desc: object = None, tag: str = "w"
    ) -> dict[Key, tuple[str, MemoryObject | None]]:
        """All of them, or none."""
        del is_temporary, layout_desc
        if len(keys) > len(self._memory_manager.free_blocks) or not self.reserve(*keys, tag=tag):
            return dict.fromkeys(keys, (NO_MEMORY, None))
        return {key: (SUCCESS, self._staging[key][tag].memory_obj) for key in keys}

    def commit(self, *keys: Key, tag: str = "w") -> None:
        with self._lock:
            for key in keys:
                writers = self._staging[key]
                self._objects[key] = writers.pop(tag)
                if not writers:
                    del self._staging[key]
            self._tell("on_l1_keys_write_finished", list(keys))

    def load(
        self,
        *keys: Key,
        temporary: bool = False,
        like: Key | None = None,
        filled: Callable[[Key, memoryview], None] = lambda _key, _view: None,
    ) -> None:
        """Fill blocks from another tier, with what is found there as `like`; they stay locked for who asked.

        `filled` is told of each before the load is answered.
        """
        self.reserve(*keys, tag="load", like=like)
        for key in keys:
            filled(key, memoryview(self._staging[key]["load"].memory_obj.byte_array).cast("B"))
        with self._lock:
            for key in keys:
                entry = self._objects[key] = self._staging.pop(key)["load"]
                entry.is_temporary = temporary
                entry.read_lock.lock()
            self._tell("on_l1_keys_finish_write_and_reserve_read", list(keys))

    def load_in_vain(self, *keys: Key, filled: Callable[[Key, memoryview], None]) -> None:
        """Fill blocks from another tier whose answer comes too late: nobody gets them."""
        self.reserve(*keys, tag="load")
        for key in keys:
            filled(key, memoryview(self._staging[key]["load"].memory_obj.byte_array).cast("B"))
        with self._lock:
            self._memory_manager.free([self._staging.pop(key)["load"].memory_obj for key in keys])

    def take_up(self, *keys: Key) -> None:
        """Lock blocks to store them in other tiers, as the store loop does."""
        with self._lock:
            for key in keys:
                self._objects[key].read_lock.lock()
            self._tell("on_l1_keys_reserved_read", list(keys))

    def store(self, *keys: Key) -> bool:
        done = self.reserve(*keys)
        self.commit(*(key for key in keys if "w" in self._staging.get(key, {})))
        return done

    def reserve_read(self, keys: Sequence[Key], read_locks: int = 1) -> dict[Key, tuple[str, MemoryObject | None]]:
        answers: dict[Key, tuple[str, MemoryObject | None]] = {}
        with self._lock:
            for key in keys:
                entry = self._objects.get(key)
                if entry is None:
                    answers[key] = (MISSING, None)
                    continue
                for _ in range(read_locks):
                    entry.read_lock.lock()
                answers[key] = (SUCCESS, entry.memory_obj)
            self._tell("on_l1_keys_reserved_read", [key for key in keys if answers[key][0] == SUCCESS])
        return answers

    def finish_read(self, keys: Iterable[Key]) -> None:
        with self._lock:
            finished, gone, objects = [], [], []
            for key in keys:
                entry = self._objects.get(key)
                if entry is None or not entry.read_lock.is_locked():
                    continue
                entry.read_lock.unlock()
                finished.append(key)
                if entry.is_temporary and not entry.read_lock.is_locked():
                    objects.append(self._objects.pop(key).memory_obj)
                    gone.append(key)
            self._memory_manager.free(objects)
            self._tell("on_l1_keys_read_finished", finished)
            self._tell("on_l1_keys_deleted_by_manager", gone)

    def clear(self) -> None:
        """Empty the table, whatever is in use: first LMCache frees, then it strikes out."""
        with self._lock:
            gone = list(self._objects)
            self._memory_manager.free([entry.memory_obj for entry in self._objects.values()])
            self._objects.clear()
            self._tell("on_l1_keys_deleted_by_manager", gone)

    def read(self, *keys: Key) -> None:
        with self._lock:
            for key in keys:
                self._objects[key].read_lock.lock()
            self._tell("on_l1_keys_accessed", list(keys))

    def release(self, *keys: Key) -> None:
        with self._lock:
            for key in keys:
                self._objects[key].read_lock.unlock()
            self._tell("on_l1_keys_read_finished", list(keys))

    def delete(self, keys: Iterable[Key], force: bool = False) -> dict[Key, str]:
        answers: dict[Key, str] = {}
        with self._lock:
            gone, objects = [], []
            for key in keys:
                writers = self._staging.get(key, {})
                dead = [tag for tag, entry in writers.items() if not entry.write_lock.is_locked()]
                objects += [writers.pop(tag).memory_obj for tag in dead]
                if not writers:
                    self._staging.pop(key, None)
                entry = self._objects.get(key)
                if writers or (entry is not None and entry.read_lock.is_locked() and not force):
                    answers[key] = LOCKED
                    continue
                answers[key] = SUCCESS if entry is not None or dead else MISSING
                if entry is not None:
                    objects.append(self._objects.pop(key).memory_obj)
                    gone.append(key)
            self._memory_manager.free(objects)
            self._tell("on_l1_keys_deleted_by_manager", gone)
        return answers

    def _tell(self, callback: str, keys: list[Key]) -> None:
        for listener in self._listeners:
            getattr(listener, callback)(keys)


def marker(key: Key) -> bytes:
    """What a block of `key` holds: easy to find in memory, and no other key's."""
    return f"<{key.cache_salt}:{key.number}>".encode() * 8
