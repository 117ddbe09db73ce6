"""A tier that requires encryption, on a real Redis: what is in it, and what is taken from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstrata.api.cachetier import CacheTier
from kvstrata.contract.policy.data_key import DataKey
from kvstrata.contract.store.block_value import (
    HEADER_BYTES,
    TAG_BYTES,
    pack_header,
    unpack_header,
)
from kvstrata_sidecar.adapter.params import TierParams
from kvstrata_sidecar.adapter.tier.encryption import GcmSealer
from kvstrata_sidecar.adapter.tier.tasks import StoreOutcome
from tests.support.amounts import examples
from tests.support.objects import redis_tier
from tests.support.redis_binary import needs_redis
from tests.tiers.books import Books
from tests.tiers.data_keys import FIRST, OTHER, SECOND, held
from tests.tiers.gate_stand_in import KEYSPACE_A, KEYSPACE_B, GateStandIn
from tests.tiers.keyed_gate import KeyedGate
from tests.tiers.redis_process import RedisProcess
from tests.tiers.tier_driver import BLOCK_BYTES, Driver, block, stored

Allow = Callable[[Mapping[str, tuple[DataKey, ...]]], None]


@pytest.fixture
def allow(gate: GateStandIn) -> Allow:
    return KeyedGate(gate).allow


@pytest.fixture
def sealed(start: Callable[..., Driver], redis_server: RedisProcess, allow: Allow) -> Driver:
    driver = start(redis_server.port, encryption="Required")
    driver.until("closed")
    allow({KEYSPACE_A: (FIRST,), KEYSPACE_B: (OTHER,)})
    return driver


@pytest.mark.claim("a Redis tier holds ciphertext only, each scope's under a key of its own")
class TestATierThatRequiresEncryption:
    pytestmark = needs_redis

    def test_a_block_comes_back_and_nothing_of_it_is_in_the_tier(
        self, sealed: Driver, redis_server: RedisProcess
    ) -> None:
        assert sealed.store([block(KEYSPACE_A)], fill=7) == StoreOutcome(True, BLOCK_BYTES)
        (name,) = stored(redis_server)
        value = redis_server.admin().get(name)
        assert isinstance(value, bytes)
        assert bytes([7]) * 8 not in value
        header = unpack_header(name.encode(), value[:HEADER_BYTES])
        assert header is not None
        assert header.encrypted
        assert header.generation == 1
        assert sealed.lookup([block(KEYSPACE_A)]) == [1]
        assert sealed.load([block(KEYSPACE_A)]) == ([1], [bytearray([7]) * BLOCK_BYTES])
        books = Books(redis_server, KEYSPACE_A)
        books.assert_consistent()
        assert books.totals().used == HEADER_BYTES + BLOCK_BYTES + TAG_BYTES

    def test_each_scopes_blocks_are_under_a_key_of_its_own(self, sealed: Driver, redis_server: RedisProcess) -> None:
        for keyspace, key in ((KEYSPACE_A, FIRST), (KEYSPACE_B, OTHER)):
            sealed.store([block(keyspace)], fill=7)
            (name,) = [name for name in stored(redis_server) if keyspace in name]
            value = redis_server.admin().get(name)
            assert isinstance(value, bytes)
            header = unpack_header(name.encode(), value[:HEADER_BYTES])
            assert header is not None
            data = header.associated_data(name.encode())
            assert AESGCM(key.secret).decrypt(header.nonce, value[HEADER_BYTES:], data) == bytes([7]) * BLOCK_BYTES

    def test_one_block_is_never_written_twice_alike(self, sealed: Driver, redis_server: RedisProcess) -> None:
        values = set()
        for _ in range(3):
            sealed.store([block(KEYSPACE_A)])
            (name,) = stored(redis_server)
            value = redis_server.admin().get(name)
            assert isinstance(value, bytes)
            values |= {value[HEADER_BYTES - 20 : HEADER_BYTES - 8], value[HEADER_BYTES:]}
            sealed.tier.delete([block(KEYSPACE_A)])
        assert len(values) == 6

    @pytest.mark.parametrize("place", [0, 5, 8, 30, HEADER_BYTES, HEADER_BYTES + BLOCK_BYTES // 2, -1])
    def test_a_flipped_bit_is_a_miss_and_the_buffer_is_overwritten(
        self, sealed: Driver, redis_server: RedisProcess, place: int
    ) -> None:
        sealed.store([block(KEYSPACE_A)], fill=9)
        (name,) = stored(redis_server)
        value = bytearray(redis_server.admin().get(name))
        value[place] ^= 1
        redis_server.admin().set(name, bytes(value), keepttl=True)
        assert sealed.load([block(KEYSPACE_A)]) == ([0], [bytearray(BLOCK_BYTES)])
        assert sealed.tier.counters()["unreadable"] == 1

    def test_a_block_with_a_wrong_tag_makes_room_for_a_good_one(
        self, sealed: Driver, redis_server: RedisProcess
    ) -> None:
        sealed.store([block(KEYSPACE_A)], fill=9)
        (name,) = stored(redis_server)
        redis_server.admin().setrange(name, HEADER_BYTES, b"x")
        assert sealed.load([block(KEYSPACE_A)])[0] == [0]
        assert stored(redis_server) == []
        assert sealed.store([block(KEYSPACE_A)], fill=9) == StoreOutcome(True, BLOCK_BYTES)
        assert sealed.lookup([block(KEYSPACE_A)]) == [1], "it is not remembered as unreadable"
        assert sealed.load([block(KEYSPACE_A)])[0] == [1]
        Books(redis_server, KEYSPACE_A).assert_consistent()

    @pytest.mark.parametrize(
        "change", [lambda value: value[:-1], lambda value: value[:100], lambda value: value + b"x"]
    )
    def test_a_value_of_another_length_is_a_miss(
        self, sealed: Driver, redis_server: RedisProcess, change: Callable[[bytes], bytes]
    ) -> None:
        sealed.store([block(KEYSPACE_A)], fill=9)
        (name,) = stored(redis_server)
        value = redis_server.admin().get(name)
        assert isinstance(value, bytes)
        redis_server.admin().set(name, change(value), keepttl=True)
        assert sealed.load([block(KEYSPACE_A)]) == ([0], [bytearray(BLOCK_BYTES)])
        assert sealed.tier.counters()["unreadable"] == 1

    @pytest.mark.parametrize("header_made_to_fit", [False, True])
    @pytest.mark.parametrize("to", [block(KEYSPACE_A, 2), block(KEYSPACE_B, 1)])
    def test_a_value_under_another_name_is_a_miss_also_if_its_header_was_made_to_fit(
        self, sealed: Driver, redis_server: RedisProcess, to: object, header_made_to_fit: bool
    ) -> None:
        sealed.store([block(KEYSPACE_A)], fill=9)
        (source,) = stored(redis_server)
        sealed.store([to], fill=5)  # type: ignore[list-item]
        (target,) = set(stored(redis_server)) - {source}
        value = redis_server.admin().get(source)
        assert isinstance(value, bytes)
        if header_made_to_fit:
            header = unpack_header(source.encode(), value[:HEADER_BYTES])
            assert header is not None
            value = pack_header(target.encode(), header) + value[HEADER_BYTES:]
        redis_server.admin().set(target, value, keepttl=True)
        assert sealed.load([to]) == ([0], [bytearray(BLOCK_BYTES)])  # type: ignore[list-item]
        assert sealed.tier.counters()["unreadable"] == 1
        assert sealed.load([block(KEYSPACE_A)]) == ([1], [bytearray([9]) * BLOCK_BYTES])

    def test_a_keyspace_without_a_key_is_not_used_and_counted(
        self, sealed: Driver, redis_server: RedisProcess, gate: GateStandIn, allow: Allow
    ) -> None:
        allow({KEYSPACE_A: (FIRST,), KEYSPACE_B: ()})
        assert sealed.store([block(KEYSPACE_B)]) == StoreOutcome(True, 0)
        assert sealed.lookup([block(KEYSPACE_B)]) == [0]
        assert sealed.load([block(KEYSPACE_B)])[0] == [0]
        assert sealed.refused("no_key") == 3
        assert stored(redis_server) == []
        (tier,) = gate.state().tiers
        assert (tier.encrypted, tier.keyless) == (True, 1)
        allow({KEYSPACE_A: (FIRST,), KEYSPACE_B: (OTHER,)})
        assert gate.state().tiers[0].keyless == 0
        assert sealed.store([block(KEYSPACE_B)]) == StoreOutcome(True, BLOCK_BYTES)

    def test_after_a_rotation_new_blocks_have_the_new_key_and_old_ones_are_readable_while_theirs_is_named(
        self, sealed: Driver, redis_server: RedisProcess, allow: Allow
    ) -> None:
        sealed.store([block(KEYSPACE_A, 1)], fill=1)
        (old,) = stored(redis_server)
        allow({KEYSPACE_A: (SECOND, FIRST)})
        sealed.store([block(KEYSPACE_A, 2)], fill=2)
        (new,) = set(stored(redis_server)) - {old}
        assert redis_server.admin().getrange(new, 5, 5) == b"\x02"
        assert sealed.load([block(KEYSPACE_A, 1), block(KEYSPACE_A, 2)])[0] == [1, 1]
        allow({KEYSPACE_A: (SECOND,)})
        assert sealed.load([block(KEYSPACE_A, 1), block(KEYSPACE_A, 2)])[0] == [0, 1]
        assert old in stored(redis_server)  # another pod may still have its key

    def test_blocks_of_a_key_that_was_replaced_are_misses(self, sealed: Driver, allow: Allow) -> None:
        sealed.store([block(KEYSPACE_A)], fill=1)
        allow({KEYSPACE_A: (DataKey(1, SECOND.secret),)})
        assert sealed.load([block(KEYSPACE_A)]) == ([0], [bytearray(BLOCK_BYTES)])

    def test_plain_and_sealed_values_are_not_taken_for_one_another(
        self, start: Callable[..., Driver], sealed: Driver, redis_server: RedisProcess
    ) -> None:
        plain = start(redis_server.port)
        plain.until("closed")
        plain.store([block(KEYSPACE_A, 1)])
        sealed.store([block(KEYSPACE_A, 2)])
        assert sealed.load([block(KEYSPACE_A, 1)])[0] == [0]
        assert plain.load([block(KEYSPACE_A, 2)])[0] == [0]
        assert not plain.tier.state().encrypted

    def test_no_key_shows_in_what_the_adapter_tells(
        self, sealed: Driver, gate: GateStandIn, caplog: pytest.LogCaptureFixture
    ) -> None:
        sealed.store([block(KEYSPACE_A)])
        told = [repr(gate.state()), caplog.text, (gate.policy_dir / "policy.json").read_text()]
        told += [repr(sealed.runtime.enforcement.view), repr(sealed.runtime.enforcement.keys.sealing(KEYSPACE_A))]
        for secret in (FIRST.secret, OTHER.secret):
            assert not any(form in text for text in told for form in (secret.decode(), secret.hex()))


@pytest.mark.claim("of a value that was changed or is under another name nothing is taken")
class TestWhatIsTaken:
    @settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        body=st.binary(min_size=1, max_size=300),
        name=st.binary(max_size=40),
        read_as=st.binary(max_size=40),
        bit=st.none() | st.integers(0, 10_000),
    )
    def test_a_value_is_taken_under_its_own_name_and_unchanged_or_not_at_all(
        self, tmp_path: Path, body: bytes, name: bytes, read_as: bytes, bit: int | None
    ) -> None:
        sealer = GcmSealer(held(tmp_path, FIRST, SECOND))
        header, sealed = sealer.seal(KEYSPACE_A, name, memoryview(body), 5)
        fields = unpack_header(name, bytes(header))
        assert fields is not None
        value = bytearray(pack_header(read_as, fields) + sealed)
        if bit is not None:
            value[bit // 8 % len(value)] ^= 1 << bit % 8
        view = memoryview(bytearray(len(body)))
        opening = sealer.open_into(KEYSPACE_A, read_as, view)
        opening.parts[0][:], opening.parts[1][:] = value[:HEADER_BYTES], value[HEADER_BYTES:]
        untouched = bit is None and read_as == name
        assert opening.finish() == untouched
        assert bytes(view) == (body if untouched else bytes(len(body)))


@pytest.mark.claim("a Redis tier holds ciphertext only, unless it is told otherwise")
@pytest.mark.parametrize(("declared", "is_required"), [(None, True), ("Required", True), ("Disabled", False)])
def test_a_tier_that_says_nothing_of_encryption_requires_it(declared: str | None, is_required: bool) -> None:
    assert CacheTier.model_validate(redis_tier(encryption=declared)).spec.encryption_required is is_required


@pytest.mark.claim("a Redis tier holds ciphertext only, unless it is told otherwise")
@pytest.mark.parametrize("encryption", ["required", None, True, ""])
def test_an_unknown_mode_of_encryption_stops_the_server(encryption: object) -> None:
    raw = {"name": "t", "endpoints": [{"host": "h", "port": 1}], "encryption": encryption}
    with pytest.raises(ValueError, match="encryption"):
        TierParams.from_json(raw)
