"""What LMCache frees is overwritten before anybody gets it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from kvstrata_sidecar.upstream import pool as pool_module
from kvstrata_sidecar.upstream import pool as scrub
from kvstrata_sidecar.upstream.pool import Pool, Scrubber, joined
from tests.adapter.memory_server import PATIENCE_S, A, B, Server, keys_of, until
from tests.adapter.memory_stand_in import (
    BLOCK_BYTES,
    NO_MEMORY,
    STORE_TAG,
    SUCCESS,
    Key,
    Manager,
    MemoryObject,
)


@pytest.fixture
def server() -> Iterator[Server]:
    with closing(Server()) as server:
        yield server


def test_freed_memory_is_nobodys_until_it_is_overwritten(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.manager.store(*keys_of(A, 16))
    overwrite, going_on = server.pool.overwrite, threading.Event()
    monkeypatch.setattr(server.pool, "overwrite", lambda *span: going_on.wait() and overwrite(*span))
    server.manager.delete(keys_of(A, 16))
    assert not server.manager.reserve(Key(B, 1))
    assert server.pool.usage()[0] == 0, "what waits to be overwritten is nobody's use"
    going_on.set()
    assert server.pool.settle(PATIENCE_S)
    assert not any(server.has_bytes_of(key) for key in keys_of(A, 16))
    assert server.manager.reserve(Key(B, 1))


def test_memory_that_cannot_be_overwritten_is_kept_back_and_health_says_so(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    overwrite = server.pool.overwrite

    def fails(*_: int) -> None:
        raise OSError

    monkeypatch.setattr(server.pool, "overwrite", fails)
    server.manager.store(Key(A, 1))
    server.manager.delete([Key(A, 1)])
    assert not server.pool.settle(0.05)
    until(lambda: not server.pool.scrubber.healthy)
    assert server.free_blocks() == 15
    monkeypatch.setattr(server.pool, "overwrite", overwrite)
    assert server.pool.settle(PATIENCE_S)
    assert server.pool.scrubber.healthy
    assert server.free_blocks() == 16


def test_memory_that_was_freed_twice_and_is_somebody_elses_is_left_alone() -> None:
    content = ctypes.create_string_buffer(b"somebody else's", BLOCK_BYTES)
    freed = MemoryObject(ctypes.addressof(content), 1, valid=False)
    manager = Manager(1)
    pool = Pool(manager, SUCCESS, NO_MEMORY, STORE_TAG)
    scrubber = Scrubber(pool)
    scrubber.start()
    scrubber.take([freed])
    assert scrubber.flush(PATIENCE_S)
    scrubber.close()
    assert content.value == b"somebody else's"


def test_an_object_that_is_freed_twice_at_once_costs_nobody_a_byte(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.manager.store(Key(A, 1))
    freed = server.manager._objects[Key(A, 1)].memory_obj
    overwrite, going_on = server.pool.overwrite, threading.Event()
    monkeypatch.setattr(server.pool, "overwrite", lambda *span: going_on.wait() and overwrite(*span))
    give_back = server.pool.give_back

    def give_back_and_store(objects: list[Any]) -> None:
        give_back(objects)
        if not server.resident():
            server.manager.store(Key(B, 1))

    monkeypatch.setattr(server.pool, "give_back", give_back_and_store)
    server.manager.delete([Key(A, 1)])
    until(lambda: not server.pool.scrubber._aside)
    server.pool.scrubber.take([freed])
    going_on.set()
    assert server.pool.settle(PATIENCE_S)
    assert server.manager._objects[Key(B, 1)].memory_obj.data_ptr == freed.data_ptr
    assert server.has_bytes_of(Key(B, 1))


def test_closing_leaves_lmcaches_manager_as_it_was(server: Server) -> None:
    own = type(server.manager._memory_manager).free
    server.manager.store(Key(A, 1))
    server.manager.delete([Key(A, 1)])
    server.close()
    assert server.free_blocks() == 16
    assert server.manager._memory_manager.free.__func__ is own  # type: ignore[attr-defined]


def test_neighbours_are_overwritten_in_one_go() -> None:
    assert joined([(30, 10), (0, 10), (10, 10), (50, 5), (0, 10)]) == [(0, 20), (30, 10), (50, 5)]


def test_many_blocks_are_deleted_and_overwritten_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "DELETED_AT_ONCE", 4)
    monkeypatch.setattr(scrub, "BATCH_BYTES", 3 * BLOCK_BYTES)
    with closing(Server(blocks=11)) as server:
        server.manager.store(*keys_of(A, 11))
        server.manager.read(Key(A, 5))
        asked, given_back = list[int](), list[int]()
        delete, give_back = server.manager.delete, server.pool.give_back
        monkeypatch.setattr(server.manager, "delete", lambda keys: asked.append(len(keys)) or delete(keys))
        monkeypatch.setattr(server.pool, "give_back", lambda ones: given_back.append(len(ones)) or give_back(ones))
        overwrite, going_on = server.pool.overwrite, threading.Event()
        monkeypatch.setattr(server.pool, "overwrite", lambda *span: going_on.wait() and overwrite(*span))
        deleted = server.pool.delete([*keys_of(A, 11), Key(B, 1)])
        assert deleted == {*keys_of(A, 11)} - {Key(A, 5)}
        assert asked == [4, 4, 4]
        assert server.pool.scrubber.pending_bytes == 10 * BLOCK_BYTES
        going_on.set()
        assert server.pool.settle(PATIENCE_S)
        assert (sum(given_back), max(given_back)) == (10, 3)
        assert (server.pool.scrubber.pending_bytes, server.pool.scrubber.overwritten_bytes) == (0, 10 * BLOCK_BYTES)


def test_what_is_being_written_is_summed_up_by_keyspace_and_for_every_writer(server: Server) -> None:
    server.manager.reserve(Key(A, 1), tag="x")
    server.manager.reserve(Key(A, 1), Key(A, 2), tag="y")
    server.manager.reserve(Key(B, 1))
    assert server.pool.staged_bytes() == {A: 3 * BLOCK_BYTES, B: BLOCK_BYTES}
    assert server.pool.usage() == (4 * BLOCK_BYTES, 16 * BLOCK_BYTES)
    assert server.memory.fill() == (4 * BLOCK_BYTES, 16 * BLOCK_BYTES)
    assert server.pool.abandoned() == []
    server.manager._staging[Key(A, 1)]["x"].write_lock.count = 0
    assert server.pool.abandoned() == [Key(A, 1)]
