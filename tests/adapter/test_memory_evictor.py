"""What has to go from the cache server's memory, and in which order, with a stand-in for LMCache's manager."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvstrata.contract.messages.adapter import ScopeUsage
from kvstrata.contract.policy.bundle import EnforcedBudget
from kvstrata_sidecar.adapter import runtime as running
from kvstrata_sidecar.adapter.memory import evictor as evicting
from kvstrata_sidecar.adapter.params import AdapterParams
from kvstrata_sidecar.adapter.runtime import Runtime
from tests.adapter.memory_server import PATIENCE_S, TIER, A, B, C, Server, keys_of, until
from tests.adapter.memory_stand_in import (
    BLOCK_BYTES,
    Key,
)


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with closing(Server(**getattr(request, "param", {}))) as server:
        yield server


def test_without_a_policy_nothing_is_kept(server: Server) -> None:
    server.manager.store(Key(A, 1))
    server.turn()
    assert server.resident() == []
    assert not server.has_bytes_of(Key(A, 1))


def test_a_keyspace_that_leaves_the_policy_is_emptied_by_the_next_turn(server: Server) -> None:
    server.allow(a=None, b=None)
    server.manager.store(*keys_of(A, 3), *keys_of(B, 2))
    server.turn()
    assert len(server.resident()) == 5
    server.allow(b=None)
    server.turn()
    assert server.resident() == keys_of(B, 2)
    assert server.free_blocks() == 14


def test_of_a_prompt_the_last_blocks_go_first(server: Server) -> None:
    """Without its first block the rest of a prompt cannot be found."""
    server.allow(a=EnforcedBudget(TIER, limit_bytes=2 * BLOCK_BYTES))
    server.manager.store(*keys_of(A, 5))
    server.turn()
    assert server.resident() == keys_of(A, 2)


def test_use_counts_for_the_order(server: Server) -> None:
    server.allow(a=EnforcedBudget(TIER, limit_bytes=2 * BLOCK_BYTES))
    server.manager.store(Key(A, 1))
    server.manager.store(Key(A, 2))
    server.manager.read(Key(A, 1))
    server.manager.release(Key(A, 1))
    server.manager.store(Key(A, 3))
    server.turn()
    assert server.resident() == [Key(A, 1), Key(A, 3)]


def test_a_block_in_use_goes_when_it_is_let_go(server: Server) -> None:
    server.allow(a=None)
    server.manager.store(Key(A, 1))
    server.manager.read(Key(A, 1))
    server.allow()
    server.turn()
    assert server.resident() == [Key(A, 1)]
    assert server.memory.counters()["locked_bytes"] == BLOCK_BYTES
    server.manager.release(Key(A, 1))
    server.turn()
    assert server.resident() == []


def test_a_lock_that_expired_without_a_word_is_noticed_within_a_second(server: Server) -> None:
    server.manager.store(Key(A, 1))
    server.manager.read(Key(A, 1))
    assert server.turn() <= evicting.LOOK_S
    server.manager._objects[Key(A, 1)].read_lock.count = 0
    server.now_s += evicting.LOOK_S
    server.turn()
    assert server.resident() == []


@pytest.mark.parametrize("server", [{"blocks": 20, "high_percent": 50}], indirect=True)
def test_above_the_mark_the_oldest_go_and_guarantees_stay(server: Server) -> None:
    server.allow(a=EnforcedBudget(TIER, guaranteed_bytes=3 * BLOCK_BYTES), b=None)
    server.manager.store(*keys_of(A, 3))
    for number in range(12):
        server.manager.store(Key(B, number))
        server.turn()
    assert set(keys_of(A, 3)) <= set(server.resident())
    assert server.free_blocks() >= 10
    assert Key(B, 11) in server.resident()


def test_what_a_writer_reserved_and_never_wrote_is_freed(server: Server) -> None:
    server.allow(a=None)
    server.manager.reserve(Key(A, 1))
    server.turn()
    assert server.free_blocks() == 15
    server.manager._staging[Key(A, 1)]["w"].write_lock.count = 0
    server.now_s += evicting.LOOK_S
    server.turn()
    assert server.free_blocks() == 16
    assert not server.has_bytes_of(Key(A, 1))


def test_a_writer_that_never_wrote_takes_no_block_of_the_same_name_along(server: Server) -> None:
    server.allow(a=None)
    server.manager.reserve(Key(A, 1), tag="dead")
    server.manager.store(Key(A, 1))
    server.manager._staging[Key(A, 1)]["dead"].write_lock.count = 0
    server.turn()
    server.now_s += evicting.LOOK_S
    server.turn()
    assert server.resident() == [Key(A, 1)]
    server.allow()
    server.turn()
    assert server.free_blocks() == 16, "it goes with the block"


def test_usage_names_no_keyspace_in_full_and_sums_up_what_no_policy_names(server: Server) -> None:
    server.allow(a=EnforcedBudget(TIER, limit_bytes=10**9, guaranteed_bytes=7), b=None)
    server.manager.store(*keys_of(A, 3), Key(B, 1), Key(C, 1))
    server.manager.read(Key(C, 1))
    server.turn()
    assert sorted(server.memory.usage(), key=lambda row: -row.used_bytes) == [
        ScopeUsage(A[:12], TIER, 3 * BLOCK_BYTES, 3, 10**9, 7),
        ScopeUsage(B[:12], TIER, BLOCK_BYTES, 1),
        ScopeUsage("", TIER, BLOCK_BYTES, 1, 0),
    ]


@pytest.mark.parametrize(("tier", "told"), [(TIER, [(TIER, "CPU")]), (None, [])])
def test_the_gate_is_told_whether_the_cpu_tiers_policy_is_enforced(
    tier: str | None, told: list[tuple[str, str]], tmp_path: Path
) -> None:
    with (
        closing(Server(tier=tier)) as server,
        closing(Runtime(AdapterParams("d" * 16, "1" * 16, None, tmp_path, tmp_path))) as runtime,
    ):
        runtime.govern(server.memory)
        assert [(state.name, state.medium) for state in runtime.state().tiers] == told
        assert all(state.breaker == "open" and state.detail for state in runtime.state().tiers)
        assert runtime.state().counters["memory.enforced"] == 0
        server.memory.start()
        assert all(state.breaker == "closed" and not state.detail for state in runtime.state().tiers)
        assert runtime.state().counters["memory.enforced"] == 1


def test_the_thread_follows_by_itself(server: Server) -> None:
    server.memory.start()
    server.allow(a=EnforcedBudget(TIER, limit_bytes=4 * BLOCK_BYTES))
    for number in range(50):
        give_up_at_s = time.monotonic() + PATIENCE_S
        stored = False
        # What was freed and is not overwritten yet cannot be written anew.
        while not (stored := stored or server.manager.store(Key(A, number))) or len(server.resident()) > 4:
            assert time.monotonic() < give_up_at_s
            time.sleep(0.001)
    assert Key(A, 49) in server.resident()
    assert server.memory.healthy


def test_a_turn_that_fails_shows_and_is_made_up_for(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    delete, failing = server.pool.delete, threading.Event()
    failing.set()

    def fails(keys: Any) -> Any:
        if failing.is_set():
            raise RuntimeError
        return delete(keys)

    monkeypatch.setattr(server.pool, "delete", fails)
    server.memory.start()
    server.manager.store(Key(A, 1))
    until(lambda: server.memory.counters()["enforced"] == 0)
    failing.clear()
    until(lambda: server.memory.healthy and not server.resident())


def test_the_state_lists_the_largest_scopes_of_this_pod_and_counts_the_rest(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "MAX_USAGE_ROWS", 2)
    server.allow(a=None, b=None, c=None)
    server.manager.store(Key(A, 1), *keys_of(B, 3), *keys_of(C, 2))
    server.turn()
    with closing(Runtime(AdapterParams("d" * 16, "1" * 16, None, tmp_path, tmp_path))) as runtime:
        runtime.govern(server.memory)
        state = runtime.state()
        assert [(row.scope, row.blocks) for row in state.usage] == [(B[:12], 3), (C[:12], 2)]
        assert (state.usage_left_out, state.tier_usage) == (1, ())
        runtime.govern(None)
        assert (runtime.state().usage, runtime.state().tiers, runtime.state().counters) == ((), (), {})


def test_a_new_policy_wakes_the_evictor_and_its_end_ends_the_thread(server: Server) -> None:
    assert not server.memory._turns._wake.is_set()
    server.memory.policy_changed()
    assert server.memory._turns._wake.is_set()
    server.memory.start()
    assert server.memory.healthy
    server.memory.close()
    assert not server.memory.healthy
