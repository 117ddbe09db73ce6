"""Steps of many writers in every order, cut off anywhere, on a real Redis: the books are right after each."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvstrata.contract.store.redis_keys import BUCKETS, bucket_prefix, ledger_key, member_of
from kvstrata_sidecar.adapter.params import TierParams
from kvstrata_sidecar.adapter.policy.limits import SharedBounds
from kvstrata_sidecar.adapter.redis.budget.ledger import Ledgers, ScopeLedger
from kvstrata_sidecar.adapter.redis.client.commands import (
    FOR_EVER_MS,
    Demand,
    Place,
    Terms,
    call,
    reservation,
    state_key,
)
from kvstrata_sidecar.adapter.redis.client.connection import Connection
from kvstrata_sidecar.adapter.redis.client.dial import dial
from kvstrata_sidecar.adapter.redis.client.resp import Reply
from kvstrata_sidecar.adapter.redis.client.slots import Address
from tests.support.amounts import seeds
from tests.support.redis_binary import needs_redis
from tests.tiers.books import Books
from tests.tiers.eraser import set_value
from tests.tiers.gate_stand_in import DOMAIN, KEYSPACE_A, RESOLVED
from tests.tiers.redis_process import RedisProcess

pytestmark = needs_redis
LIMIT = 1000
WINDOW_MS = 20
KEEP_MS = 60_000
PLACES = [
    Place.at(DOMAIN, KEYSPACE_A, member_of(RESOLVED, 0, 0, chunk), chunk)
    for bucket in range(3)
    for number in range(3)
    for chunk in (bytes([16 * bucket, number]),)
]
LEDGER = ledger_key(DOMAIN, KEYSPACE_A).encode()


def raw(reply: Reply) -> Any:
    return reply


@dataclass
class Bench:
    """The server and all messages that writers were about to send when they were stopped."""

    connection: Connection
    books: Books
    ledger: ScopeLedger
    parts: list[tuple[Place, bytes]] = field(default_factory=list)
    grants: list[tuple[int, int, int]] = field(default_factory=list)
    yields: list[tuple[int, int, int]] = field(default_factory=list)
    rebuilds: list[tuple[int, list[int]]] = field(default_factory=list)
    tokens: int = 0

    def ask(self, name: str, key: bytes, **arguments: Any) -> Any:
        return self.connection.ask([call(name, key, raw, **arguments)])[0]

    def state(self, bucket: int) -> bytes:
        return state_key(bucket_prefix(DOMAIN, KEYSPACE_A, bucket).encode())

    def size(self, place: Place) -> int:
        return 60 + 50 * PLACES.index(place)

    @property
    def terms(self) -> Terms:
        return Terms(life_ms=60_000, bounds=SharedBounds(LIMIT))

    def admit(self, number: int) -> None:
        self.tokens += 1
        token = b"t%d" % self.tokens
        place = PLACES[number % len(PLACES)]
        demand = Demand(place, self.size(place), token, self.terms)
        if self.ledger.reserve([demand]) == [True]:
            self.parts.append((place, token))

    def reserve_only(self, number: int) -> None:
        self.tokens += 1
        token = b"t%d" % self.tokens
        place = PLACES[number % len(PLACES)]
        before = FOR_EVER_MS if number % 2 else 0
        demand = Demand(place, self.size(place), token, self.terms)
        (answer,) = self.connection.ask([reservation(demand, WINDOW_MS, before)])
        if answer.outcome is True:
            self.parts.append((place, token))

    def set(self, number: int) -> None:
        if self.parts:
            place, _ = self.parts[number % len(self.parts)]
            set_value(self.connection, place.name, [bytes(self.size(place))], WINDOW_MS)

    def commit(self, number: int) -> None:
        if self.parts:
            place, token = self.parts.pop(number % len(self.parts))
            self.ask("commit", state_key(place.base), **self.committing(place, token))

    def set_and_commit(self, number: int) -> None:
        if self.parts:
            place, token = self.parts.pop(number % len(self.parts))
            commit = call("commit", state_key(place.base), raw, **self.committing(place, token))
            set_value(self.connection, place.name, [bytes(self.size(place))], WINDOW_MS, commit)

    def committing(self, place: Place, token: bytes) -> dict[str, Any]:
        return {"member": place.member, "token": token, "ttl_ms": 60_000, "age_ms": 0, "keep_ms": KEEP_MS}

    def abandon(self, number: int) -> None:
        if self.parts:
            place, token = self.parts[number % len(self.parts)]
            self.ask("abandon", state_key(place.base), member=place.member, token=token)

    def discard(self, number: int) -> None:
        place = PLACES[number % len(PLACES)]
        self.ask("discard", state_key(place.base), members=[place.member])

    def grant(self, number: int) -> None:
        answer = self.ask(
            "lease", LEDGER, bucket=number % 3, wanted=100 + number, minimum=1 + number, limit=LIMIT, keep_ms=KEEP_MS,
            divided=False, growth_share=0,
        )  # fmt: skip
        if answer[0] == b"ok":
            self.grants.append((number % 3, int(answer[1]), int(answer[2])))

    def raise_late(self, number: int) -> None:
        if self.grants:
            bucket, amount, version = self.grants.pop(number % len(self.grants))
            self.ask("raise", self.state(bucket), bytes=amount, of_version=version)

    def yield_some(self, number: int) -> None:
        before = FOR_EVER_MS if number % 2 else 0
        answer = self.ask("yield", self.state(number % 3), bytes=30 + number, evict_before_ms=before, count=10)
        taken, version = map(int, answer[:2])
        if taken:
            self.yields.append((number % 3, taken, version))

    def return_late(self, number: int) -> None:
        if self.yields:
            bucket, amount, version = self.yields.pop(number % len(self.yields))
            self.ask("return", LEDGER, bucket=bucket, bytes=amount, of_version=version)

    def rebuild(self, number: int) -> None:
        if number % 2:
            self.ledger.rebuild(self.books.version())
        else:
            self.begin(self.books.version())

    def begin(self, seen: int) -> None:
        status, version = self.ask("begin_rebuild", LEDGER, seen=seen, at_least=0, patience_ms=0)
        if status == b"void":
            adopted = [
                self.ask("adopt", self.state(bucket), of_version=int(version), keep_ms=KEEP_MS)
                for bucket in range(BUCKETS)
            ]
            if all(one[0] == b"ok" for one in adopted):
                self.rebuilds.append((int(version), [int(one[1]) for one in adopted]))

    def finish_late(self, number: int) -> None:
        if self.rebuilds:
            version, leases = self.rebuilds.pop(number % len(self.rebuilds))
            self.ask("finish_rebuild", LEDGER, of_version=version, keep_ms=KEEP_MS, leases=leases)

    def lose_ledger(self, number: int) -> None:
        if number % 2 == 0:
            self.books.lose_ledger()

    def outlast(self, number: int) -> None:
        if number % 3 == 0:
            time.sleep(WINDOW_MS / 1000)

    def sweep(self, number: int) -> None:
        self.ask("sweep", self.state(number % 3), count=100, cursor=0)

    def touch(self, number: int) -> None:
        place = PLACES[number % len(PLACES)]
        self.ask("touch", state_key(place.base), members=[place.member])

    def recount(self, number: int) -> None:
        """One step of a recount, which others may find under way."""
        answer = self.ask("recount", self.state(number % 3), step=1)
        assert answer[0] in (b"ok", b"more")
        assert [int(drift) for drift in answer[1:]] == [0, 0, 0]


STEPS = {
    "admit": 8, "reserve_only": 4, "set": 3, "commit": 3, "set_and_commit": 12, "abandon": 2, "discard": 1, "grant": 2,
    "raise_late": 3, "yield_some": 3, "return_late": 2, "rebuild": 2, "finish_late": 2, "lose_ledger": 1, "outlast": 1,
    "sweep": 2, "touch": 4, "recount": 4,
}  # fmt: skip
"""How often each step is taken, relative to the others."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    server = RedisProcess(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.kill()


@pytest.mark.claim("no order of steps of several pods exceeds a limit")
@pytest.mark.parametrize("seed", seeds(16, claims=6))
def test_no_order_of_steps_exceeds_the_limit_or_loses_count(server: RedisProcess, seed: int) -> None:
    server.admin().flushall()
    chance = random.Random(seed)
    tier = TierParams("shared", connect_timeout_ms=1000, io_timeout_ms=5000)
    connection = dial(Address("127.0.0.1", server.port), tier)
    books = Books(server, KEYSPACE_A)
    ledgers = Ledgers(DOMAIN, lambda *_: None, time.monotonic, WINDOW_MS)
    bench = Bench(connection, books, ledgers.of(connection, KEYSPACE_A, SharedBounds(LIMIT)))
    most_used = 0
    try:
        for name in chance.choices(list(STEPS), list(STEPS.values()), k=400):
            getattr(bench, name)(chance.randrange(200))
            totals = books.totals()
            assert totals.used == totals.charged, name
            assert totals.used + totals.held <= totals.lease <= LIMIT, (name, totals)
            if books.live():
                assert totals.lease <= totals.leased <= LIMIT, (name, totals)
            most_used = max(most_used, totals.used)
        assert most_used > LIMIT / 2, "the steps got somewhere"
        time.sleep(WINDOW_MS / 1000 + 0.005)
        for bucket in range(BUCKETS):
            bench.ask("sweep", bench.state(bucket), count=100, cursor=0)
            bench.ask("audit", bench.state(bucket), cursor=0, count=100, encrypts=False)
        books.assert_consistent()
        bench.ledger.rebuild(books.version())
        assert books.leases() == books.charged()
    finally:
        connection.close()
