"""The seam for encryption: a sealer with staging and a tag, on a real Redis."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.contract.store.block_value import HEADER_BYTES, TAG_BYTES, Header, pack_header, unpack_header, value_bytes
from kvstrata_sidecar.adapter.policy.enforcement import Refusal
from kvstrata_sidecar.adapter.tier.encryption import PlainSealer
from kvstrata_sidecar.adapter.tier.sealer import Opening
from kvstrata_sidecar.adapter.tier.tasks import StoreOutcome
from tests.support.redis_binary import needs_redis
from tests.tiers.books import Books
from tests.tiers.gate_stand_in import KEYSPACE_A, KEYSPACE_B, GateStandIn
from tests.tiers.redis_process import RedisProcess
from tests.tiers.tier_driver import BLOCK_BYTES, Driver, block, stored

NONCE = bytes(range(12))


class MirrorOpening:
    """Reads into staging and turns the bytes around; its tag is the body's last bytes."""

    damaged = False

    def __init__(self, key: bytes, view: memoryview) -> None:
        self._key, self._view = key, view
        self._header, self._staging, self._tag = bytearray(HEADER_BYTES), bytearray(len(view)), bytearray(TAG_BYTES)
        self.parts: Sequence[memoryview] = tuple(map(memoryview, (self._header, self._staging, self._tag)))

    def header_holds(self) -> bool:
        return unpack_header(self._key, bytes(self._header)) == Header(len(self._view), True, 3, NONCE)

    def finish(self) -> bool:
        if self._tag != self._staging[-TAG_BYTES:]:
            return False
        self._view[:] = self._staging[::-1]
        return True


class MirrorSealer:
    """Stores blocks turned around, but for one keyspace of which it has no key."""

    def refusal(self, keyspace: str, *, seals: bool = False) -> Refusal | None:
        return Refusal.NO_POLICY if keyspace == KEYSPACE_B else None

    def seal(self, keyspace: str, key: bytes, view: memoryview, computed_ms: int) -> Sequence[bytes | memoryview]:
        body = bytes(view[::-1])
        return (pack_header(key, Header(len(view), True, 3, NONCE)), memoryview(body), body[-TAG_BYTES:])

    def open_into(self, keyspace: str, key: bytes, view: memoryview) -> Opening:
        return MirrorOpening(key, view)


@pytest.fixture
def mirrored(driver: Driver, gate: GateStandIn) -> Driver:
    object.__setattr__(driver.tier._deps, "sealer", MirrorSealer)
    return driver


class TestASealerWithStaging:
    pytestmark = needs_redis

    def test_a_block_goes_through_it_both_ways_and_is_accounted_for_as_stored(
        self, mirrored: Driver, redis_server: RedisProcess
    ) -> None:
        content = bytes(range(256)) * (BLOCK_BYTES // 256)
        task_id = mirrored.tier.store([block(KEYSPACE_A)], [memoryview(content)])
        mirrored.wait(task_id)
        assert mirrored.tier.pop_stores()[task_id] == StoreOutcome(True, BLOCK_BYTES), mirrored.tier.counters()
        (name,) = stored(redis_server)
        assert redis_server.admin().getrange(name, HEADER_BYTES, HEADER_BYTES + 2) == b"\xff\xfe\xfd"
        assert mirrored.load([block(KEYSPACE_A)]) == ([1], [bytearray(content)])
        books = Books(redis_server, KEYSPACE_A)
        books.assert_consistent()
        assert books.totals().used == HEADER_BYTES + BLOCK_BYTES + TAG_BYTES

    def test_a_body_that_was_changed_is_a_miss_and_touches_no_buffer(
        self, mirrored: Driver, redis_server: RedisProcess
    ) -> None:
        assert mirrored.store([block(KEYSPACE_A)], fill=9).stored_bytes, mirrored.tier.counters()
        (name,) = stored(redis_server)
        redis_server.admin().setrange(name, HEADER_BYTES + BLOCK_BYTES - 3, b"x")
        assert mirrored.load([block(KEYSPACE_A)]) == ([0], [bytearray(BLOCK_BYTES)])

    def test_plain_and_encrypted_values_are_not_taken_for_one_another(self, mirrored: Driver) -> None:
        assert mirrored.store([block(KEYSPACE_A)]).stored_bytes == BLOCK_BYTES
        object.__setattr__(mirrored.tier._deps, "sealer", PlainSealer)
        assert mirrored.load([block(KEYSPACE_A)])[0] == [0]

    def test_a_keyspace_without_a_key_is_refused_with_the_reason(
        self, mirrored: Driver, redis_server: RedisProcess
    ) -> None:
        assert mirrored.store([block(KEYSPACE_B)]) == StoreOutcome(True, 0)
        assert mirrored.load([block(KEYSPACE_B)])[0] == [0]
        assert mirrored.refused("no_policy") == 2
        assert stored(redis_server) == []


def test_a_plain_value_of_another_length_is_refused_by_its_header() -> None:
    sealer = PlainSealer()
    view = memoryview(bytearray(10))
    header, *_ = sealer.seal("", b"key", memoryview(bytes(9)), 0)
    opening = sealer.open_into("", b"key", view)
    opening.parts[0][:] = header
    assert not opening.header_holds()


@pytest.mark.parametrize("size", [0, 1, 4096])
def test_a_plain_value_is_as_long_as_it_was_said_to_be(size: int) -> None:
    parts = PlainSealer().seal("", b"k", memoryview(bytes(size)), 0)
    assert sum(map(len, parts)) == value_bytes(size)


@given(st.binary(min_size=1, max_size=300), st.integers(0, 2**64 - 1), st.none() | st.integers(0, 10_000))
def test_a_plain_value_with_any_flipped_bit_is_a_miss_and_leaves_zeros(
    body: bytes, computed_ms: int, bit: int | None
) -> None:
    value = bytearray(b"".join(PlainSealer().seal("", b"key", memoryview(body), computed_ms)))
    if bit is not None:
        value[bit // 8 % len(value)] ^= 1 << bit % 8
    view = memoryview(bytearray(len(body)))
    opening = PlainSealer().open_into("", b"key", view)
    start = 0
    for part in opening.parts:
        part[:] = value[start : start + len(part)]
        start += len(part)
    whole = opening.header_holds() and opening.finish()
    assert whole == (bit is None)
    assert not whole or bytes(view) == body
