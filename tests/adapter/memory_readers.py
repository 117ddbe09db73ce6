"""Readers of a pool in a stand-in for LMCache's memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from tests.adapter.memory_server import Server
from tests.adapter.memory_stand_in import Key, MemoryObject

P = "p" * 32
"""A pool's keyspace."""

CHUNKS = 3


def found(server: Server, *keys: Key) -> list[MemoryObject | None]:
    """Look blocks up for a request, which locks what is there."""
    answers = server.manager.reserve_read(keys, 1)
    return [answers[key][1] for key in keys]


def from_the_pool(server: Server) -> Callable[[Key, memoryview], None]:
    """What a tier says of each block that it found under the pool's keyspace."""
    return lambda key, view: server.memory.borrowed.loaded(key, P, view)


def content(memory: MemoryObject) -> bytes:
    return ctypes.string_at(memory.data_ptr, memory.get_physical_size())
