"""LMCache's memory manager, played, for tests without LMCache: its tables, locks and callbacks.

Its memory is real: a buffer with an allocator that gives the lowest free block, so that a block's memory is soon
somebody else's. That LMCache is like this is checked with the real one in tests/dataplane/test_memory.py.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

BLOCK_BYTES = 4096
SUCCESS = "success"
LOCKED = "locked"
MISSING = "missing"


@dataclass(frozen=True)
class Key:
    cache_salt: str
    number: int


class Lock:
    def __init__(self) -> None:
        self.count = 0

    def is_locked(self) -> bool:
        return self.count > 0


@dataclass(eq=False)
class MemoryObject:
    data_ptr: int
    blocks: int
    valid: bool = True

    def is_valid(self) -> bool:
        return self.valid

    def get_physical_size(self) -> int:
        return self.blocks * BLOCK_BYTES


@dataclass(eq=False)
class Entry:
    memory_obj: MemoryObject
    write_lock: Lock = field(default_factory=Lock)
    read_lock: Lock = field(default_factory=Lock)


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

    def __init__(self, blocks: int) -> None:
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

    def reserve(self, *keys: Key, tag: str = "w") -> bool:
        with self._lock:
            reserved = []
            for key in keys:
                memory_object = self._memory_manager.allocate()
                if memory_object is not None:
                    entry = Entry(memory_object)
                    entry.write_lock.count = 1
                    self._staging.setdefault(key, {})[tag] = entry
                    ctypes.memmove(memory_object.data_ptr, marker(key), len(marker(key)))
                    reserved.append(key)
            self._tell("on_l1_keys_reserved_write", reserved)
            return len(reserved) == len(keys)

    def commit(self, *keys: Key, tag: str = "w") -> None:
        with self._lock:
            for key in keys:
                writers = self._staging[key]
                self._objects[key] = writers.pop(tag)
                if not writers:
                    del self._staging[key]
            self._tell("on_l1_keys_write_finished", list(keys))

    def store(self, *keys: Key) -> bool:
        done = self.reserve(*keys)
        self.commit(*(key for key in keys if "w" in self._staging.get(key, {})))
        return done

    def read(self, *keys: Key) -> None:
        with self._lock:
            for key in keys:
                self._objects[key].read_lock.count += 1
            self._tell("on_l1_keys_accessed", list(keys))

    def release(self, *keys: Key) -> None:
        with self._lock:
            for key in keys:
                self._objects[key].read_lock.count -= 1
            self._tell("on_l1_keys_read_finished", list(keys))

    def delete(self, keys: Iterable[Key], force: bool = False) -> dict[Key, str]:
        answers: dict[Key, str] = {}
        with self._lock:
            gone, objects = [], []
            for key in keys:
                writers = self._staging.get(key, {})
                for tag in [tag for tag, entry in writers.items() if not entry.write_lock.is_locked()]:
                    objects.append(writers.pop(tag).memory_obj)
                if not writers:
                    self._staging.pop(key, None)
                entry = self._objects.get(key)
                if writers or (entry is not None and entry.read_lock.is_locked()):
                    answers[key] = LOCKED
                    continue
                answers[key] = SUCCESS if entry is not None else MISSING
                if entry is not None:
                    objects.append(self._objects.pop(key).memory_obj)
                    gone.append(key)
            self._memory_manager.free(objects)
            self._tell("on_l1_keys_deleted_by_manager", gone)
        return answers

    def _tell(self, callback: str, keys: list[Key]) -> None:
        for listener in self._listeners:
            getattr(listener, callback)(keys)


class Listener:
    """What adapter/memory/module.py registers, without LMCache's base class."""

    def __init__(self, note: Any, kinds: Any) -> None:
        self.on_l1_keys_reserved_write = lambda keys: note(kinds.RESERVED, keys)
        self.on_l1_keys_write_finished = lambda keys: note(kinds.WRITTEN, keys)
        self.on_l1_keys_read_finished = lambda keys: note(kinds.RELEASED, keys)
        self.on_l1_keys_accessed = lambda keys: note(kinds.USED, keys)
        self.on_l1_keys_deleted_by_manager = lambda keys: note(kinds.DELETED, keys)


def marker(key: Key) -> bytes:
    """What a block of `key` holds: easy to find in memory, and no other key's."""
    return f"<{key.cache_salt}:{key.number}>".encode() * 8
