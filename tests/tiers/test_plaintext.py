"""A tier in use is switched to encryption, and back, on a real Redis: what becomes of the plaintext that it holds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from kvstrata.contract.policy.data_key import DataKey
from kvstrata.contract.store.block_value import HEADER_BYTES, unpack_header, value_bytes
from kvstrata.contract.store.redis_keys import BUCKETS, bucket_prefix
from kvstrata_sidecar.adapter.redis.client import commands as protocol
from kvstrata_sidecar.adapter.redis.client.commands import Place, Terms, call, reserve, state_key
from kvstrata_sidecar.adapter.redis.client.connection import Connection
from kvstrata_sidecar.adapter.redis.client.resp import Reply
from kvstrata_sidecar.adapter.redis.sweep.plaintext import CLOSED_MS, Plaintext
from tests.support.redis_binary import needs_redis
from tests.tiers.books import Books
from tests.tiers.gate_stand_in import DOMAIN, KEYSPACE_A, KEYSPACE_B, GateStandIn
from tests.tiers.keyed_gate import KeyedGate
from tests.tiers.redis_process import RedisProcess
from tests.tiers.tier_driver import BLOCK_BYTES, Driver, block, stored

pytestmark = needs_redis

KEYS = {KEYSPACE_A: (DataKey(1, b"a" * 32),), KEYSPACE_B: (DataKey(1, b"b" * 32),)}
FILL = 0x41
PLAIN_BYTES = value_bytes(BLOCK_BYTES, encrypted=False)


@pytest.fixture
def plain(start: Callable[..., Driver], redis_server: RedisProcess, gate: GateStandIn) -> Driver:
    """A pod from before the switch."""
    driver = start(redis_server.port, encryption="Disabled")
    driver.until("closed")
    KeyedGate(gate).allow(KEYS)
    return driver


@pytest.fixture
def begin(start: Callable[..., Driver], redis_server: RedisProcess) -> Callable[[], Driver]:
    """Starts a pod that encrypts."""

    def begin() -> Driver:
        driver = start(redis_server.port, encryption="Required")
        driver.until("closed")
        return driver

    return begin


def until_looked_through(driver: Driver) -> None:
    give_up_at_s = time.monotonic() + 10
    while (state := driver.tier.state()).unseen or state.plaintext:
        assert time.monotonic() < give_up_at_s, state
        time.sleep(0.02)


def plaintexts(server: RedisProcess) -> list[str]:
    found = []
    for name in stored(server):
        value = server.admin().get(name)
        header = unpack_header(name.encode(), value[:HEADER_BYTES]) if isinstance(value, bytes) else None
        if header is not None and not header.encrypted:
            found.append(name)
    return found


def read(reply: Reply) -> Reply:
    return reply


class TestSwitchingOn:
    def test_plaintext_of_before_is_gone_once_a_pod_says_that_nothing_is_left(
        self, plain: Driver, begin: Callable[[], Driver], redis_server: RedisProcess
    ) -> None:
        plain.store([block(KEYSPACE_A, number) for number in range(1, 200)], fill=FILL)
        plain.store([block(KEYSPACE_B)], fill=FILL)
        assert len(plaintexts(redis_server)) == 200
        until_looked_through(begin())
        assert stored(redis_server) == []
        Books(redis_server, KEYSPACE_A).assert_consistent()

    def test_a_pod_that_has_looked_at_nothing_says_so(
        self, plain: Driver, begin: Callable[[], Driver], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Plaintext, "look", lambda *_: None)
        plain.store([block(KEYSPACE_A)])
        assert begin().tier.state().unseen == len(KEYS)
        assert plain.tier.state().unseen == 0

    def test_a_block_that_is_there_as_plaintext_is_stored_anew(
        self, plain: Driver, begin: Callable[[], Driver], redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Plaintext, "look", lambda *_: None)
        plain.store([block(KEYSPACE_A)], fill=FILL)
        sealed = begin()
        assert sealed.store([block(KEYSPACE_A)], fill=FILL).stored_bytes == BLOCK_BYTES
        assert sealed.load([block(KEYSPACE_A)]) == ([1], [bytearray([FILL]) * BLOCK_BYTES])
        assert plaintexts(redis_server) == []
        Books(redis_server, KEYSPACE_A).assert_consistent()

    def test_pods_that_do_not_encrypt_yet_store_nothing_more_where_one_that_does_has_looked(
        self, plain: Driver, begin: Callable[[], Driver], redis_server: RedisProcess
    ) -> None:
        until_looked_through(begin())
        plain.store([block(KEYSPACE_A)])
        assert plain.refused("plaintext") == 1
        assert stored(redis_server) == []

    def test_a_store_without_encryption_that_began_before_the_look_is_not_committed_behind_it(
        self, redis_server: RedisProcess, connect_to: Callable[..., Connection]
    ) -> None:
        connection, place, token = connect_to(redis_server.port), place_of(), b"late"
        plaintext = Plaintext(DOMAIN, lambda *_: None, window_ms=200)
        connection.ask([reserve(place, PLAIN_BYTES, token, Terms(60_000), 0, 30_000)])
        plaintext.follow({KEYSPACE_A})
        plaintext.look(connection, KEYSPACE_A)
        assert plaintext.todo() == [KEYSPACE_A], "its value may be on its way"
        assert not write(connection, place, PLAIN_BYTES, token)
        assert stored(redis_server) == []
        plaintext.look(connection, KEYSPACE_A)
        assert plaintext.todo() == []

    def test_a_late_value_without_encryption_does_not_stay_in_place_of_an_encrypted_one(
        self,
        plain: Driver,
        begin: Callable[[], Driver],
        redis_server: RedisProcess,
        connect_to: Callable[..., Connection],
    ) -> None:
        sealed = begin()
        until_looked_through(sealed)
        assert sealed.store([block(KEYSPACE_A)]).stored_bytes == BLOCK_BYTES, sealed.tier.counters()
        (name,) = stored(redis_server)
        place = place_of(name)
        connection = connect_to(redis_server.port)
        assert not write(connection, place, PLAIN_BYTES, b"late")
        assert stored(redis_server) == []
        Books(redis_server, KEYSPACE_A).assert_consistent()

    def test_plaintext_that_came_while_nobody_renewed_is_found_again(
        self, redis_server: RedisProcess, connect_to: Callable[..., Connection]
    ) -> None:
        connection = connect_to(redis_server.port)
        counts: dict[str, int] = {}
        plaintext = Plaintext(DOMAIN, lambda name, amount, _: counts.update({name: amount}), closed_ms=50)
        plaintext.follow({KEYSPACE_A})
        plaintext.look(connection, KEYSPACE_A)
        assert plaintext.todo() == []
        time.sleep(0.1)
        write_plain(connection, place_of())
        plaintext.look(connection, KEYSPACE_A)
        assert counts == {"plaintext_removed": 1}
        assert stored(redis_server) == []

    def test_a_walk_that_was_overtaken_by_a_gap_begins_anew(
        self, redis_server: RedisProcess, connect_to: Callable[..., Connection]
    ) -> None:
        connection, place = connect_to(redis_server.port), place_of()
        state = state_key(place.base)

        def oust(closed_ms: int, since: int, cursor: int) -> list[Any]:
            (answer,) = connection.ask([call("oust", state, closed_ms, 10**6, 0, since, cursor, 32, read=read)])
            return list(answer)

        for number in range(600):
            write_plain(connection, place_of(number=number))
        status, since, cursor, _ = oust(30, 0, 0)
        assert status == b"more"
        time.sleep(0.06)
        write_plain(connection, place_of(number=1000))
        _, since_then, _, _ = oust(CLOSED_MS, 0, 0)
        assert int(since_then) > int(since)
        status, since_now, *_ = oust(CLOSED_MS, int(since), int(cursor))
        assert (status, since_now) == (b"more", since_then), "the first walk was not the one that may end it"

    def test_a_scope_that_comes_later_counts_only_if_there_is_plaintext_in_it(
        self, redis_server: RedisProcess, connect_to: Callable[..., Connection]
    ) -> None:
        connection = connect_to(redis_server.port)
        plaintext = Plaintext(DOMAIN, lambda *_: None)
        plaintext.follow({KEYSPACE_A})
        plaintext.look(connection, KEYSPACE_A)
        plaintext.follow({KEYSPACE_A, KEYSPACE_B})
        assert plaintext.todo() == [KEYSPACE_B]
        assert plaintext.unseen({KEYSPACE_A, KEYSPACE_B}) == 0
        connection.ask([reserve(place_of(KEYSPACE_B, 2), PLAIN_BYTES, b"t", Terms(60_000), 0, 30_000)])
        write_plain(connection, place_of(KEYSPACE_B, 3))
        plaintext.look(connection, KEYSPACE_B)
        assert plaintext.found == 1
        plaintext.follow({KEYSPACE_A})
        assert (plaintext.found, plaintext.todo()) == (0, [])

    def test_what_a_look_leaves_in_the_tier_goes_by_itself(
        self, redis_server: RedisProcess, connect_to: Callable[..., Connection]
    ) -> None:
        Plaintext(DOMAIN, lambda *_: None).look(connect_to(redis_server.port), KEYSPACE_A)
        names = list(redis_server.admin().scan_iter())
        assert len(names) == BUCKETS
        assert all(redis_server.admin().pttl(name) > CLOSED_MS for name in names)

    def test_a_revoked_keyspace_keeps_its_tombstone_for_ever(
        self, redis_server: RedisProcess, connect_to: Callable[..., Connection]
    ) -> None:
        connection, state = connect_to(redis_server.port), state_key(place_of().base)
        connection.ask([call("drop", state, 256, 0, read=read)])
        Plaintext(DOMAIN, lambda *_: None).look(connection, KEYSPACE_A)
        assert redis_server.admin().pttl(state) == -1


class TestSwitchingOff:
    def test_encrypted_blocks_stay_for_when_it_is_switched_on_again(
        self, begin: Callable[[], Driver], plain: Driver, redis_server: RedisProcess
    ) -> None:
        sealed = begin()
        sealed.store([block(KEYSPACE_A)])
        plain.tier._sweeper.sweep(KEYSPACE_A, audit=True)
        assert sealed.load([block(KEYSPACE_A)])[0] == [1]

    def test_a_block_that_is_there_encrypted_is_stored_anew_when_the_last_pod_with_encryption_is_gone_for_long(
        self, begin: Callable[[], Driver], plain: Driver, redis_server: RedisProcess
    ) -> None:
        sealed = begin()
        until_looked_through(sealed)
        sealed.store([block(KEYSPACE_A)])
        sealed.tier.close()
        for bucket in range(BUCKETS):
            redis_server.admin().hset(f"{bucket_prefix(DOMAIN, KEYSPACE_A, bucket)}:#s", "sealed", "1")
        assert plain.store([block(KEYSPACE_A)], fill=FILL).stored_bytes == BLOCK_BYTES
        assert plain.load([block(KEYSPACE_A)])[0] == [1]
        Books(redis_server, KEYSPACE_A).assert_consistent()


def place_of(keyspace_or_name: str = KEYSPACE_A, number: int = 1) -> Place:
    """The place of a block of bucket 0, or of one that is known by its name."""
    if ":" in keyspace_or_name:
        bucket, _, member = keyspace_or_name.partition("}:")
        return Place(KEYSPACE_A, 0, f"{bucket}}}".encode(), member.encode())
    base = bucket_prefix(DOMAIN, keyspace_or_name, 0).encode()
    return Place(keyspace_or_name, 0, base, b"%016x:01000100:0:00%062x" % (0, number))


def write_plain(connection: Connection, place: Place) -> None:
    token = b"t"
    connection.ask([reserve(place, 100, token, Terms(60_000), 0, 30_000)])
    assert write(connection, place, 100, token)


def write(connection: Connection, place: Place, size: int, token: bytes) -> bool:
    asked = protocol.write(place, lambda: [bytes(size)], token, Terms(60_000), 30_000)
    connection.set_each([asked])
    return bool(asked.answer == "ok")
