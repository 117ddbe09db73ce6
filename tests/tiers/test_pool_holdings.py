"""What tiers hold of a pool: counted by whole chunks, without a use of any, by a real Redis for a shared tier."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.contract import ContractError
from kvstrata.contract.messages.adapter import (
    decode_answer,
    decode_request,
    encode_answer,
    encode_request,
    error_answer,
)
from kvstrata.contract.messages.engine_identity import marked
from kvstrata.contract.messages.pools import PoolHolding, PoolQuestion, PoolTierState
from kvstrata.contract.policy.bundle import Rules
from kvstrata.contract.policy.cache_view import CacheView, PoolView
from kvstrata.contract.policy.pools import MAX_CHUNKS
from kvstrata_sidecar.adapter.policy.pools import Readable
from kvstrata_sidecar.adapter.pool_report import Lacking, counted_groups, holding_of
from kvstrata_sidecar.adapter.tier.interface import Block
from tests.tiers.gate_stand_in import FINGERPRINT, GateStandIn
from tests.tiers.pool_gate import POOL, PoolGate, content, reader_space
from tests.tiers.redis_process import RedisProcess
from tests.tiers.tier_driver import BLOCK_BYTES, Driver, block

OTHER = "2" * 16
RANKS = (0, 1)
CHUNKS = [bytes([number]) * 32 for number in range(4)]
HOUR_S = 3600


def view(*tiers: str) -> CacheView:
    return CacheView("d" * 16, 1, 1, Rules(), {POOL: ()}, {}, {POOL: PoolView("0" * 64, False, tiers)})


def names(keyspace: str, chunks: Sequence[bytes], *fingerprints: str) -> list[list[Any]]:
    return [
        [
            SimpleNamespace(
                model_name=marked("m", fingerprint), kv_rank=rank, object_group_id=0, chunk_hash=chunk,
                cache_salt=keyspace,
            )
            for fingerprint in fingerprints or (FINGERPRINT,)
            for rank in RANKS
        ]
        for chunk in chunks
    ]  # fmt: skip


def tier(there: set[tuple[bytes, int]]) -> Callable[[Sequence[Block]], list[int]]:
    return lambda blocks: [10 if (one.chunk_hash, one.rank) in there else 0 for one in blocks]


def readable(*chunks: bytes) -> Readable:
    return Readable({}, {POOL: frozenset(chunks)}, {POOL: frozenset({"dram", "shared"})})


@given(st.sets(st.tuples(st.sampled_from(CHUNKS), st.sampled_from(RANKS))))
def test_a_chunk_counts_when_every_rank_has_its_part(there: set[tuple[bytes, int]]) -> None:
    told = holding_of("b", PoolQuestion(POOL), view("dram"), readable(*CHUNKS), names, {"dram": tier(there)})
    whole = [chunk for chunk in CHUNKS if all((chunk, rank) in there for rank in RANKS)]
    assert told.tiers == (PoolTierState("dram", len(whole), len(CHUNKS), 20 * len(whole)),)
    assert set(told.missing) == {chunk.hex() for chunk in CHUNKS if chunk not in whole}
    assert told.complete == (len(whole) == len(CHUNKS))


def test_blocks_of_another_engine_than_that_of_the_question_do_not_count() -> None:
    """An engine that started again with other files registers beside the former one."""

    def both(keyspace: str, chunks: Sequence[bytes]) -> list[list[Any]]:
        return names(keyspace, chunks, FINGERPRINT, OTHER)

    def former(blocks: Sequence[Block]) -> list[int]:
        return [10 if one.fingerprint == FINGERPRINT else 0 for one in blocks]

    stored = {}
    for fingerprint in (FINGERPRINT, OTHER, ""):
        question = PoolQuestion(POOL, fingerprint=fingerprint)
        told = holding_of("b", question, view("dram"), readable(*CHUNKS), both, {"dram": former})
        stored[fingerprint] = told.tiers[0].stored
    assert stored == {FINGERPRINT: len(CHUNKS), OTHER: 0, "": 0}
    unknown = PoolQuestion(POOL, fingerprint="3" * 16)
    assert not holding_of("b", unknown, view("dram"), readable(*CHUNKS), both, {"dram": former}).known


@pytest.mark.parametrize(("windows", "groups"), [([-1], [0]), ([4, -1, 4, -1], [1, 3]), ([4, 4], [0, 1])])
def test_groups_with_a_window_do_not_decide_unless_there_are_no_others(windows: list[int], groups: list[int]) -> None:
    assert counted_groups(windows) == groups


def test_only_what_is_asked_for_and_in_the_manifest_counts() -> None:
    there = {(chunk, rank) for chunk in CHUNKS for rank in RANKS}
    asked = PoolQuestion(POOL, CHUNKS[0] + CHUNKS[3] + bytes([9]) * 32)
    told = holding_of("b", asked, view("dram"), readable(*CHUNKS[:3]), names, {"dram": tier(there)})
    assert told.tiers == (PoolTierState("dram", 1, 1, 20),)


def test_in_a_tier_that_the_pod_does_not_have_nothing_is_held() -> None:
    there = {(chunk, rank) for chunk in CHUNKS for rank in RANKS}
    told = holding_of("b", PoolQuestion(POOL), view("dram", "gone"), readable(*CHUNKS), names, {"dram": tier(there)})
    assert [(one.name, one.stored) for one in told.tiers] == [("dram", 4), ("gone", 0)]
    assert not told.complete


def test_of_a_manifest_that_the_cache_server_does_not_know_nothing_is_complete() -> None:
    there = {(chunk, rank) for chunk in CHUNKS for rank in RANKS}
    asked = PoolQuestion(POOL, b"".join(CHUNKS))
    told = holding_of("b", asked, view("dram"), readable(), names, {"dram": tier(there)})
    assert told.tiers == (PoolTierState("dram", 0, 0, 0),)
    assert not told.complete


def test_what_memory_has_and_another_tier_lacks_is_named() -> None:
    there = {(chunk, rank) for chunk in CHUNKS[:3] for rank in RANKS}
    elsewhere = there - {(CHUNKS[1], RANKS[0])}
    lacking: list[tuple[str, list[tuple[bytes, int]]]] = []
    offered: Lacking = lambda pool, keys: lacking.append((pool, [(k.chunk_hash, k.kv_rank) for k in keys]))  # noqa: E731
    for memory in (("dram", offered), None):
        holding_of(
            "b", PoolQuestion(POOL), view("dram", "shared"), readable(*CHUNKS), names,
            {"dram": tier(there), "shared": tier(elsewhere)},
            memory=memory,
        )  # fmt: skip
    assert lacking == [(POOL, [(CHUNKS[1], RANKS[0])])]


def test_before_an_engine_said_how_its_blocks_look_nothing_is_known() -> None:
    told = holding_of("b", PoolQuestion(POOL), view("dram"), readable(*CHUNKS), lambda *_: None, {})
    assert (told.known, told.complete) == (False, False)
    assert told.tiers == (PoolTierState("dram", 0, 4, 0),)


@pytest.mark.parametrize("of", [None, view("dram")])
def test_a_keyspace_that_is_no_pools_is_refused(of: CacheView | None) -> None:
    with pytest.raises(ContractError, match="no pool"):
        holding_of("b", PoolQuestion("0123456789abcdef" * 2), of, readable(), names, {})


@given(st.none() | st.lists(st.sampled_from(CHUNKS), max_size=3).map(b"".join))
def test_a_question_and_its_answer_are_read_as_they_were_said(hashes: bytes | None) -> None:
    question = PoolQuestion(POOL, hashes)
    assert decode_request(encode_request(question)) == question
    told = PoolHolding("b", True, (PoolTierState("dram", 1, 2, 3),), (CHUNKS[0].hex(),))
    assert decode_answer(PoolHolding, encode_answer(told)) == told
    assert (POOL in repr(told)) is False


@pytest.mark.parametrize(
    "line",
    [
        b'{"op":"pool"}\n',
        b'{"op":"pool","keyspace":"x"}\n',
        encode_request(PoolQuestion(POOL, bytes(31))),
        encode_request(PoolQuestion(POOL, bytes(32 * (MAX_CHUNKS + 1)))),
    ],
)
def test_a_malformed_question_is_refused(line: bytes) -> None:
    with pytest.raises(ContractError):
        decode_request(line)


@pytest.mark.parametrize("line", [error_answer("no"), b"{}\n", b'{"pool":{"boot":"b","known":1}}\n'])
def test_a_malformed_answer_is_refused(line: bytes) -> None:
    with pytest.raises(ContractError):
        decode_answer(PoolHolding, line)


@pytest.mark.redis
class TestSharedTier:
    @pytest.fixture
    def driver(self, start: Callable[..., Driver], redis_server: RedisProcess, gate: GateStandIn) -> Driver:
        driver = start(redis_server.port, io_timeout_ms=5000, load_deadline_ms=10_000, store_deadline_ms=10_000)
        driver.until("closed")
        PoolGate(gate).publish([], docs=(content(POOL, (1, 2, 3)),))
        return driver

    def test_what_is_committed_counts_with_the_bytes_of_its_value(
        self, driver: Driver, redis_server: RedisProcess
    ) -> None:
        driver.store([block(POOL, 1), block(POOL, 3)])
        found = driver.tier.sizes([block(POOL, number) for number in (1, 2, 3)])
        lengths = {redis_server.admin().strlen(name) for name in redis_server.admin().scan_iter() if b":#" not in name}
        assert found[1] == 0
        assert {found[0], found[2]} == lengths
        assert found[0] > BLOCK_BYTES

    def test_what_is_over_or_only_reserved_does_not_count(self, driver: Driver, redis_server: RedisProcess) -> None:
        driver.store([block(POOL, 1)])
        admin = redis_server.admin()
        (index,) = [name for name in admin.scan_iter() if name.endswith(b":#x")]
        (member,) = admin.zrange(index, 0, -1)
        admin.zadd(index, {member: time.time() * 1000 - 1})
        assert driver.tier.sizes([block(POOL, 1)]) == [0]

    def test_a_count_is_no_use_of_a_block(self, driver: Driver, redis_server: RedisProcess) -> None:
        driver.store([block(POOL, 1)])
        admin = redis_server.admin()
        (index,) = [name for name in admin.scan_iter() if name.endswith(b":#a")]
        before = admin.zrange(index, 0, -1, withscores=True)
        time.sleep(0.01)
        assert driver.tier.sizes([block(POOL, 1)])[0] > 0
        assert admin.zrange(index, 0, -1, withscores=True) == before

    def test_many_chunks_are_counted_at_once(self, driver: Driver) -> None:
        driver.store([block(POOL, 1)])
        first = block(POOL, 1)
        asked = [first._replace(chunk_hash=(number + 10_000).to_bytes(2, "big") * 16) for number in range(4095)] + [
            first
        ]
        found = driver.tier.sizes(asked)
        assert len(found) == 4096
        assert sum(size > 0 for size in found) == 1

    def test_a_server_that_is_away_holds_nothing(self, driver: Driver, redis_server: RedisProcess) -> None:
        driver.store([block(POOL, 1)])
        redis_server.kill()
        assert driver.tier.sizes([block(POOL, 1)]) == [0]

    def test_under_a_keyspace_outside_of_the_policy_nothing_is_asked(self, driver: Driver) -> None:
        assert driver.tier.sizes([block(reader_space(5), 1)]) == [0]
