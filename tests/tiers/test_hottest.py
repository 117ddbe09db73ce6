"""A shared tier tells what was used last in it, and being asked or being loaded to warm a memory up is no use."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.contract.store.redis_keys import BUCKETS, bucket_prefix, capacity_key, member_of, parse_member
from kvstrata_sidecar.adapter.redis.exchanges import SCOPES_AT_ONCE, busiest
from kvstrata_sidecar.adapter.tier.interface import MAX_HOT, Block, Hot, most_of_each
from tests.support.redis_binary import needs_redis
from tests.tiers.gate_stand_in import DOMAIN, IDENTITY, KEYSPACE_A, KEYSPACE_B, KEYSPACE_UNKNOWN
from tests.tiers.redis_cluster import until
from tests.tiers.redis_process import RedisProcess
from tests.tiers.tier_driver import Driver, block, spread

pytestmark = needs_redis


def some(count: int, keyspace: str = KEYSPACE_A) -> list[Block]:
    return [block(keyspace, spread(number)) for number in range(count)]


def named(hot: list[Hot] | None) -> list[int]:
    """Return the blocks' numbers, the hottest first."""
    assert hot is not None
    return [one.chunk_hash[0] for one in sorted(hot, key=lambda one: one.last_use, reverse=True)]


def used(server: RedisProcess, keyspace: str, kinds: str = "af") -> dict[bytes, float]:
    admin = server.admin()
    names = [f"{bucket_prefix(DOMAIN, keyspace, bucket)}:#{kind}" for bucket in range(BUCKETS) for kind in kinds]
    return {member: score for name in names for member, score in admin.zrange(name, 0, -1, withscores=True)}


def test_what_was_read_last_is_told_as_the_hottest(driver: Driver, redis_server: RedisProcess) -> None:
    blocks = some(4)
    driver.store(blocks)
    before = used(redis_server, KEYSPACE_A)
    time.sleep(0.05)
    driver.load([blocks[2]])
    until(lambda: used(redis_server, KEYSPACE_A) != before)
    told = driver.tier.hottest([KEYSPACE_A, KEYSPACE_B])
    assert named(told)[0] == blocks[2].chunk_hash[0]
    assert sorted(named(told)) == sorted(one.chunk_hash[0] for one in blocks)
    assert {(one.keyspace, one.rank, one.group) for one in told or ()} == {(KEYSPACE_A, 0x01000100, 0)}
    assert all(0 <= one.age_s < 60 for one in told or ())
    assert used(redis_server, KEYSPACE_A).keys() == before.keys()


def test_being_asked_and_being_loaded_to_warm_up_is_no_use(driver: Driver, redis_server: RedisProcess) -> None:
    blocks = some(6)
    driver.store(blocks)
    driver.held |= {one.key for one in blocks[4:]}
    before = used(redis_server, KEYSPACE_A)
    driver.runtime.enforcement.warmed = frozenset(one.key for one in blocks)
    assert driver.tier.hottest([KEYSPACE_A])
    assert driver.lookup(blocks) == [1, 1, 1, 1, 0, 0]
    assert driver.load(blocks[:4])[0] == [1] * 4
    time.sleep(2.5)
    assert used(redis_server, KEYSPACE_A) == before
    driver.runtime.enforcement.warmed = frozenset()
    driver.load(blocks[:1])
    driver.lookup(blocks[4:])
    until(lambda: sum(before[name] != score for name, score in used(redis_server, KEYSPACE_A).items()) >= 3)


def test_blocks_of_another_identity_and_keyspaces_outside_of_the_policy_are_not_told(
    driver: Driver, redis_server: RedisProcess
) -> None:
    blocks = some(2)
    driver.store(blocks)
    other = member_of("2e" * 8, 1, 0, b"\x01" * 32)
    redis_server.admin().zadd(f"{bucket_prefix(DOMAIN, KEYSPACE_A, 0)}:#a", {other: 9e15, "no member": 9e15})
    redis_server.admin().hset(f"{bucket_prefix(DOMAIN, KEYSPACE_A, 0)}:#m", other, "5:5")
    assert sorted(named(driver.tier.hottest([KEYSPACE_A]))) == sorted(one.chunk_hash[0] for one in blocks)
    assert driver.tier.hottest([KEYSPACE_UNKNOWN]) == []


@pytest.mark.short_deadlines
def test_a_tier_that_does_not_answer_tells_nothing_in_time(driver: Driver, redis_server: RedisProcess) -> None:
    driver.store(some(2))
    redis_server.freeze()
    try:
        begun_s = time.monotonic()
        assert driver.tier.hottest([KEYSPACE_A]) is None
        assert time.monotonic() - begun_s < 20, "it would hang for ever"
    finally:
        redis_server.thaw()


class Grants:
    """A server whose tier has granted capacity to some scopes."""

    def __init__(self, granted: dict[str, int]) -> None:
        self.granted = granted

    def ask(self, commands: list[Any]) -> list[Any]:
        (command,) = commands
        _, _, _, key, *names = command.arguments
        assert key.decode() == capacity_key(DOMAIN)
        return [command.read([b"%d" % self.granted.get(name.decode(), 0) for name in names])]


@given(st.dictionaries(st.integers(0, 2000), st.integers(1, 10**12), max_size=700))
def test_those_with_the_largest_grants_are_asked_about(grants: dict[int, int]) -> None:
    scopes = [f"{number:032x}" for number in range(2000)]
    granted = {f"{number:032x}": size for number, size in grants.items()}
    told = busiest(Grants(granted), DOMAIN, scopes)  # type: ignore[arg-type]
    assert len(told) <= SCOPES_AT_ONCE
    there = {name: size for name, size in granted.items() if name in scopes}
    if not there:
        assert told == scopes[:SCOPES_AT_ONCE]
        return
    assert sorted((there[name] for name in told), reverse=True) == sorted(there.values(), reverse=True)[:SCOPES_AT_ONCE]


@given(st.integers(0, 2**32 - 1), st.integers(0, 9), st.binary(min_size=1, max_size=40))
def test_a_members_name_is_read_as_it_was_written(rank: int, group: int, chunk_hash: bytes) -> None:
    assert parse_member(member_of(IDENTITY, rank, group, chunk_hash)) == (IDENTITY, rank, group, chunk_hash)


@given(st.text(max_size=60))
def test_no_other_name_is_read(text: str) -> None:
    assert parse_member(text) is None or member_of(*_parsed(text)) == text


def _parsed(text: str) -> tuple[str, int, int, bytes]:
    found = parse_member(text)
    assert found is not None
    return found


@given(st.integers(0, 10**6))
def test_few_scopes_are_asked_for_more_each(scopes: int) -> None:
    assert most_of_each(scopes) >= 1
    assert most_of_each(scopes) * scopes <= max(MAX_HOT, scopes)
