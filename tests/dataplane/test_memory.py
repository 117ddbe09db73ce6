"""LMCache's own memory under the policy, in the real server: caps under load, retention, and erasure down to the bytes.

One server serves all tests. Each uses keyspaces and prompts (sequences) of its own.
"""

from __future__ import annotations

import itertools
import os
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvstrata.contract.messages.adapter import (
    MAX_HASHED_TOKENS,
    TOKEN_BYTES,
    ChunkHashes,
    HashRequest,
    MetricsPage,
    MetricsRequest,
    ScopeUsage,
)
from kvstrata.contract.messages.erase import Check, ErasedTier
from kvstrata.contract.policy.bundle import EnforcedBudget
from kvstrata.contract.policy.keyspace import SCOPE_DIGITS
from kvstrata.contract.policy.pools import CHUNK_HASH_BYTES
from tests.dataplane import memory_scan
from tests.dataplane.conftest import StartServer
from tests.dataplane.fresh import CHUNKS, fresh_keyspace, until
from tests.dataplane.lmcache_server import LMCacheServer
from tests.tiers.gate_stand_in import GateStandIn

pytestmark = pytest.mark.lmcache

PROMPTS = 60
TIER = "dram"
WITHIN_S = 30.0


@dataclass
class Pod:
    """A cache container whose memory is governed."""

    server: LMCacheServer
    gate: GateStandIn

    def usage(self, keyspace: str) -> ScopeUsage | None:
        return next((row for row in self.gate.state().usage if row.scope == keyspace[:SCOPE_DIGITS]), None)

    def used_bytes(self, keyspace: str) -> int:
        row = self.usage(keyspace)
        return row.used_bytes if row is not None else 0

    def blocks(self, keyspace: str) -> int:
        row = self.usage(keyspace)
        return row.blocks if row is not None else 0

    def until_blocks(self, count: int, *keyspaces: str) -> None:
        """Wait until so many blocks of each keyspace are counted: they are a moment after they were stored."""
        until(lambda: all(self.blocks(one) == count for one in keyspaces), self.gate.state)

    def erased(self, keyspace: str) -> ErasedTier:
        """Have a keyspace erased that left the policy, as often as it takes to overwrite what is not in use."""
        until(lambda: all(Check.OVERWRITTEN in row.checked for row in self.gate.erase(keyspace).tiers))
        return self.gate.erased(keyspace)

    def objects(self) -> int:
        """How many blocks LMCache itself says that it has."""
        status = self.server.get("/status")["storage_manager"]
        return int(next(iter(_found(status, "total_object_count"))))

    def markers(self, *markers: bytes) -> tuple[list[int], list[int]]:
        """How often each marker is in the server's memory, and in the shared segment."""
        return (
            memory_scan.in_process(self.server.process.pid, markers),
            memory_scan.in_file(self.server.segment, markers),
        )


class Loader(threading.Thread):
    """A thread whose failure is the test's to look at."""

    def __init__(self, target: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self._work = target
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self.failure = error


@pytest.fixture(scope="module")
def pod(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pod]:
    directory = tmp_path_factory.mktemp("pod")
    gate = GateStandIn(directory)
    server = start_server(directory, gate, [None], memory={"tier": TIER, "high_watermark_percent": 60})
    yield Pod(server, gate)
    assert server.get("/status")["is_healthy"]
    assert "Traceback" not in server.log_file.read_text()


@pytest.fixture
def other() -> str:
    return fresh_keyspace()


def test_chunks_are_named_by_the_servers_own_hasher(pod: Pod) -> None:
    # blake3(blake3(blake3(int64 0, uint32 0), tokens 0 to 15), tokens 16 to 31), tokens as big-endian uint32.
    first = "32748aa00c5090e4f0e1f149078a07381f4f618d898c1cbac17e36521c3de48f"
    second = "b41527751e5bac5a664450d89585d03c64c3985924969dfb1808b151dd214695"
    told = pod.gate.put(HashRequest(struct.pack("<40I", *range(40))), ChunkHashes)
    assert (told.chunk_tokens, told.hashes.hex()) == (16, first + second)
    assert told.boot == pod.gate.state().boot


def test_as_many_tokens_as_may_be_asked_for_are_named_at_once(pod: Pod) -> None:
    told = pod.gate.put(HashRequest(bytes(MAX_HASHED_TOKENS * TOKEN_BYTES)), ChunkHashes)
    assert len(told.hashes) == MAX_HASHED_TOKENS // 16 * CHUNK_HASH_BYTES


def test_what_lmcache_says_is_in_use_is_what_is_counted(pod: Pod, sequence: int, keyspace: str) -> None:
    def drift() -> list[str]:
        page = pod.gate.put(MetricsRequest(), MetricsPage).page
        return [line for line in page.splitlines() if line.startswith("kvstrata_cache_memory_drift_bytes")]

    pod.gate.allow(keyspace)
    assert pod.server.store_marked(sequence, keyspace, os.urandom(16))["stored"]
    until(lambda: pod.used_bytes(keyspace) > 0)
    until(lambda: drift() == ["kvstrata_cache_memory_drift_bytes 0"])


@pytest.mark.claim("no piece of an erased block is left in the server's process")
class TestErasure:
    def test_an_erasure_leaves_no_byte_of_one_tenant_and_every_byte_of_the_other(
        self, pod: Pod, sequence: int, keyspace: str, other: str
    ) -> None:
        mine, theirs = os.urandom(16), os.urandom(16)
        pod.gate.allow(keyspace, other)
        for number in range(3):
            assert pod.server.store_marked(sequence + number, keyspace, mine)["stored"]
            assert pod.server.store_marked(sequence + number, other, theirs)["stored"]
        pod.until_blocks(3 * CHUNKS, keyspace, other)
        held_bytes = pod.used_bytes(keyspace)
        process, segment = pod.markers(mine, theirs)
        assert process[0] == process[1] >= held_bytes // 16, "the scan finds what is there"
        assert segment == process

        pod.gate.allow(other)
        answer = pod.erased(keyspace)
        assert (answer.deleted.blocks, answer.remaining.blocks) == (3 * CHUNKS, 0)
        assert answer.deleted.bytes == held_bytes
        assert answer.residue == ""
        after_process, after_segment = pod.markers(mine, theirs)
        assert after_process == [0, process[1]]
        assert after_segment == [0, segment[1]]
        assert pod.server.lookup(sequence, keyspace)["hits"] == 0
        assert pod.server.lookup(sequence, other)["hits"] == CHUNKS
        until(lambda: pod.usage(keyspace) is None)

    def test_a_keyspace_that_leaves_the_policy_is_erased_and_an_erasure_tells_the_sum(
        self, pod: Pod, sequence: int, keyspace: str, other: str
    ) -> None:
        marker = os.urandom(16)
        pod.gate.allow(keyspace, other)
        assert pod.server.store_marked(sequence, keyspace, marker)["stored"]
        pod.gate.allow(other)
        answer = pod.erased(keyspace)
        assert (answer.deleted.blocks, answer.remaining.blocks) == (CHUNKS, 0)
        assert pod.markers(marker) == ([0], [0])

    def test_nothing_is_kept_of_a_keyspace_that_no_policy_names(self, pod: Pod, sequence: int, keyspace: str) -> None:
        """As the random salts are, of requests that must not be reused."""
        marker = os.urandom(16)
        pod.gate.allow()
        assert pod.server.store_marked(sequence, keyspace, marker)["stored"], "the request itself goes on"
        until(lambda: pod.objects() == 0)
        until(lambda: pod.markers(marker) == ([0], [0]))
        assert pod.server.lookup(sequence, keyspace)["hits"] == 0

    def test_what_lmcache_frees_by_itself_is_overwritten_too(self, pod: Pod, sequence: int, keyspace: str) -> None:
        marker = os.urandom(16)
        pod.gate.allow(keyspace)
        assert pod.server.store_marked(sequence, keyspace, marker)["stored"]
        assert pod.markers(marker)[1] != [0]
        pod.server.forget_memory()
        until(lambda: pod.markers(marker) == ([0], [0]))

    def test_a_block_in_use_is_counted_left_whole_and_goes_when_it_is_let_go(
        self, pod: Pod, sequence: int, keyspace: str
    ) -> None:
        marker = os.urandom(16)
        pod.gate.allow(keyspace)
        for number in (0, 1):
            assert pod.server.store_marked(sequence + number, keyspace, marker)["stored"]
        whole = pod.markers(marker)[1]
        assert pod.server.hold(sequence, keyspace) == CHUNKS
        pod.gate.allow()
        answer = pod.erased(keyspace)
        assert (answer.deleted.blocks, answer.remaining.blocks) == (CHUNKS, CHUNKS)
        assert answer.remaining.bytes == answer.deleted.bytes > 0
        assert pod.markers(marker)[1] == [whole[0] // 2], "a reader never sees its block change"

        pod.server.let_go(sequence, keyspace)
        until(lambda: pod.gate.erased(keyspace).remaining.blocks == 0)
        assert pod.erased(keyspace).deleted.blocks == 2 * CHUNKS
        assert pod.markers(marker) == ([0], [0])

    def test_a_block_that_was_stored_after_an_erasure_stays(self, pod: Pod, sequence: int, keyspace: str) -> None:
        pod.gate.allow(keyspace)
        pod.server.store(sequence, keyspace, 1)
        pod.until_blocks(CHUNKS, keyspace)
        pod.gate.allow()
        pod.gate.erased(keyspace)
        # By name the next ones are the same blocks: what deletes the first ones has to be over.
        until(lambda: not pod.gate.state().usage)
        pod.gate.allow(keyspace)
        pod.server.store(sequence, keyspace, 2)
        time.sleep(0.2)
        assert pod.server.read(sequence, keyspace)["values"] == [2.0]

    def test_an_erasure_under_load_is_complete_and_harms_nobody(
        self, pod: Pod, sequence: int, keyspace: str, other: str
    ) -> None:
        """Memory goes from tenant to tenant all the time, and still no byte of the erased one is left in it.

        There is more of it than the other ever uses, so that it is not simply written over.
        """
        mine = os.urandom(16)
        pod.gate.enforce({keyspace: (), other: (EnforcedBudget(TIER, limit_bytes=1 << 20),)})
        for number in range(PROMPTS):
            assert pod.server.store_marked(sequence + number, keyspace, mine)["stored"]
        stop = threading.Event()

        def load() -> None:
            for number in itertools.count(PROMPTS):
                if stop.is_set():
                    return
                assert pod.server.store(sequence + number, other, number % 100 + 1)["stored"]
                if number % 10 == 0:
                    values = pod.server.read(sequence + number, other)["values"]
                    assert values == [float(number % 100 + 1)]

        loader = Loader(load)
        loader.start()
        until(lambda: pod.gate.state().counters.get("memory.evicted_limit", 0) > 0)
        pod.gate.enforce({other: (EnforcedBudget(TIER, limit_bytes=1 << 20),)})
        answer = pod.erased(keyspace)
        assert pod.markers(mine) == ([0], [0])
        assert (answer.deleted.blocks, answer.remaining.blocks) == (PROMPTS * CHUNKS, 0)
        stop.set()
        loader.join()
        assert loader.failure is None


@pytest.mark.claim("limit, guarantee and retention hold in LMCache's own memory")
class TestBudgets:
    def test_under_load_a_scope_stays_within_its_limit_and_costs_nobody_else_a_block(
        self, pod: Pod, sequence: int, keyspace: str, other: str
    ) -> None:
        pod.gate.allow(keyspace, other)
        pod.server.store(sequence, other, 1)
        pod.until_blocks(CHUNKS, other)
        prompt_bytes = pod.used_bytes(other)
        limit_bytes = 5 * prompt_bytes
        pod.gate.enforce({keyspace: (EnforcedBudget(TIER, limit_bytes=limit_bytes),), other: ()})
        seen: list[int] = []
        stop = threading.Event()
        before = pod.gate.state().counters.get("memory.evicted_limit", 0)

        def counted() -> int:
            """How many blocks the evictor has come to know of, those included that it has evicted."""
            state = pod.gate.state()
            kept = sum(row.blocks for row in state.usage if row.scope == keyspace[:SCOPE_DIGITS])
            return kept + state.counters.get("memory.evicted_limit", 0) - before

        def watch() -> None:
            while not stop.is_set():
                seen.append(pod.used_bytes(keyspace))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            for number in range(60):
                assert pod.server.store(sequence + number, keyspace, 2)["stored"]
                until(lambda stored=(number + 1) * CHUNKS: counted() >= stored)  # type: ignore[misc]
        finally:
            stop.set()
            watcher.join()
        # What a prompt brings in goes as soon as it is counted; without the limit 60 prompts would be there.
        assert max(seen) <= limit_bytes + 3 * prompt_bytes
        until(lambda: pod.used_bytes(keyspace) <= limit_bytes, lambda: pod.gate.state())
        row = pod.usage(keyspace)
        assert row is not None
        assert row.limit_bytes == limit_bytes
        assert row.used_bytes > limit_bytes - 2 * prompt_bytes, "what it may keep, it keeps"
        assert pod.server.lookup(sequence + 59, keyspace)["hits"] == CHUNKS, "the newest stays"
        assert pod.server.lookup(sequence, keyspace)["hits"] == 0, "the oldest goes"
        assert pod.server.read(sequence, other) | {"ms": 0} == {"hits": CHUNKS, "values": [1.0], "ms": 0}
        counters = pod.gate.state().counters
        assert counters["memory.evicted_limit"] >= 50 * CHUNKS
        assert 0 < counters["memory.slowest_ms"] < 1000 * WITHIN_S

    def test_a_scan_through_the_whole_memory_costs_nobody_a_guaranteed_block(
        self, pod: Pod, sequence: int, keyspace: str, other: str
    ) -> None:
        pod.gate.allow(keyspace, other)
        pod.server.store(sequence, other, 1)
        pod.until_blocks(CHUNKS, other)
        guaranteed_bytes = pod.used_bytes(other)
        pod.gate.enforce({keyspace: (), other: (EnforcedBudget(TIER, guaranteed_bytes=guaranteed_bytes),)})
        evicted = pod.gate.state().counters.get("memory.evicted_room", 0)
        number = newest = 0
        while pod.gate.state().counters.get("memory.evicted_room", 0) < evicted + 400:
            number += 1
            if pod.server.store(sequence + number, keyspace, 2)["stored"]:
                newest = number
            assert number < 5000
        assert pod.server.read(sequence, other).get("values") == [1.0]
        assert pod.server.lookup(sequence + newest, keyspace)["hits"] == CHUNKS, "stores find room all the time"
        pod.gate.allow()

    def test_a_block_that_is_too_old_is_erased(self, pod: Pod, sequence: int, keyspace: str) -> None:
        marker = os.urandom(16)
        pod.gate.enforce({keyspace: (EnforcedBudget(TIER, retention_s=2),)})
        for number in itertools.count(sequence):
            stored_s = time.monotonic()
            assert pod.server.store_marked(number, keyspace, marker)["stored"]
            hits = pod.server.lookup(number, keyspace)["hits"]
            if time.monotonic() - stored_s < 2:
                break
        assert hits == CHUNKS
        until(lambda: pod.server.lookup(number, keyspace)["hits"] == 0)
        assert time.monotonic() - stored_s >= 2
        until(lambda: pod.markers(marker) == ([0], [0]))


class TestStart:
    def test_an_erasure_without_the_module_says_so(self, start_server: StartServer, tmp_path: Path) -> None:
        gate = GateStandIn(tmp_path)
        start_server(tmp_path, gate, [None])
        gate.allow()
        assert "not governed" in gate.erased("a" * 32).problem

    def test_a_server_that_evicts_by_itself_does_not_start(self, pod: Pod, tmp_path: Path) -> None:
        # A server removes what it takes for its predecessor's segment: this one must not be taken for it.
        name = pod.server.segment.name.removeprefix("lmcache_l1_pool_")
        changed = {"noop": "LRU", name: f"{name}-other"}
        command = [changed.get(word, word) for word in pod.server.command]
        ended = subprocess.run(
            command, env=pod.server.environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert ended.returncode != 0
        assert "start it with --eviction-policy noop, not LRU" in ended.stdout + ended.stderr
        assert pod.server.segment.exists()


def _found(tree: Any, name: str) -> Iterator[Any]:
    if isinstance(tree, dict):
        if name in tree:
            yield tree[name]
        for part in tree.values():
            yield from _found(part, name)
    elif isinstance(tree, list):
        for part in tree:
            yield from _found(part, name)
