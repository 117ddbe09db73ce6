"""A tier whose capacity is divided among scopes: guarantees, loans and what is given back, on a real Redis."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import pytest

from kvstrata.contract.messages.adapter import AdapterAck, ApplyRequest
from kvstrata.contract.policy.bundle import EnforcedBudget, Rules
from kvstrata.contract.policy.cache_view import CacheView
from kvstrata.contract.store.redis_keys import capacity_key
from kvstrata_sidecar.adapter.redis.budget.scope_state import Grant
from kvstrata_sidecar.adapter.redis.client.commands import call, reads_numbers
from kvstrata_sidecar.adapter.redis.sweep import sweeper
from kvstrata_sidecar.adapter.redis.sweep.scopes import SweepScopes
from tests.support.redis_binary import needs_redis
from tests.tiers.books import Books
from tests.tiers.gate_stand_in import DOMAIN, KEYSPACE_A, KEYSPACE_B, STALE_AFTER_S, GateStandIn
from tests.tiers.redis_process import RedisProcess
from tests.tiers.sweeping import make_due, stop, sweep
from tests.tiers.tier_driver import VALUE_BYTES, Driver, block, spread

pytestmark = [*needs_redis, pytest.mark.claim("what a scope is guaranteed is lent to no other scope")]
CAPACITY = 40 * VALUE_BYTES
UNKNOWN = Grant(0, 0, 0)


class Division:
    """A tier without a sweeper's thread, whose scopes have the bounds that a test says, in blocks."""

    def __init__(self, driver: Driver, gate: GateStandIn, server: RedisProcess) -> None:
        self.driver, self._gate, self._server = driver, gate, server
        stop(driver.tier)
        self.a, self.b = Books(server, KEYSPACE_A), Books(server, KEYSPACE_B)

    def allow(self, **guaranteed: int) -> None:
        """Put a policy in force that guarantees a number of blocks to scope `a` and scope `b`."""
        self._enforce({KEYSPACE_A: guaranteed.get("a", 0), KEYSPACE_B: guaranteed.get("b", 0)})

    def allow_only(self, keyspace: str, guaranteed: int) -> None:
        """Put a policy in force that names one scope."""
        self._enforce({keyspace: guaranteed})

    def _enforce(self, guaranteed: Mapping[str, int]) -> None:
        budgets = {
            keyspace: (EnforcedBudget("shared", guaranteed_bytes=blocks * VALUE_BYTES, retention_s=3600),)
            for keyspace, blocks in guaranteed.items()
        }
        self._gate.revision += 1
        self._gate.write_freshness()
        rules = Rules(stale_after_s=STALE_AFTER_S)
        self._gate.write_policy(CacheView(DOMAIN, self._gate.revision, 1, rules, budgets))
        self._gate.put(ApplyRequest(self._gate.revision, 1), AdapterAck)

    def store(self, keyspace: str, numbers: Sequence[int]) -> int:
        """Store blocks one after the other and return how many were taken."""
        stores = [self.driver.store([block(keyspace, spread(number))]).stored_bytes for number in numbers]
        assert self.a.totals().used + self.b.totals().used <= CAPACITY
        assert sum(self.rooms()) <= CAPACITY
        return sum(size > 0 for size in stores)

    def sweep(self) -> None:
        """Sweep both scopes, and take back what that showed to be lent beyond the capacity."""
        for keyspace in (KEYSPACE_A, KEYSPACE_B):
            sweep(self.driver.tier, keyspace)
        self.turn()

    def tidy(self) -> int:
        """Add the rooms up anew; return what differed."""
        transport = self.driver.tier._transport()
        try:
            return self.driver.tier._deps.ledgers.capacity.tidy(transport)
        finally:
            transport.close()

    def turn(self) -> None:
        """Have the sweeper do what is due, without the sweep that is due once an interval."""
        make_due(self.driver.tier, time.monotonic() + 60)
        self.driver.tier._sweeper.turn()

    def rooms(self) -> list[int]:
        return [
            int(entry.split(b":")[1]) for entry in self._server.admin().hvals(capacity_key(DOMAIN)) if b":" in entry
        ]


@pytest.fixture
def division(
    start: Callable[..., Driver], redis_server: RedisProcess, gate: GateStandIn, monkeypatch: pytest.MonkeyPatch
) -> Division:
    # Patient, because every block counts here: on a busy machine a store may wait, and a turn may end early.
    monkeypatch.setattr(sweeper, "TURN_S", 60.0)
    driver = start(redis_server.port, capacity_bytes=CAPACITY, io_timeout_ms=5_000, store_deadline_ms=9_000)
    driver.until("closed")
    return Division(driver, gate, redis_server)


def test_what_is_guaranteed_is_there_however_much_others_store(division: Division) -> None:
    division.allow(a=20)
    division.sweep()
    division.store(KEYSPACE_B, range(60))
    assert division.b.totals().used == 20 * VALUE_BYTES
    assert division.store(KEYSPACE_A, range(20)) == 20
    assert division.a.totals().used == 20 * VALUE_BYTES
    division.a.assert_consistent()
    division.b.assert_consistent()


def test_what_nobody_is_guaranteed_is_lent_to_whoever_needs_it(division: Division) -> None:
    division.allow()
    division.sweep()
    division.store(KEYSPACE_B, range(39))
    assert division.b.totals().used == 39 * VALUE_BYTES


def test_a_scope_that_has_nothing_left_to_borrow_lives_on_its_own_blocks(division: Division) -> None:
    division.allow(a=20)
    division.sweep()
    stored = division.store(KEYSPACE_B, range(60))
    assert stored == 60, division.driver.tier.counters()
    found = division.driver.lookup([block(KEYSPACE_B, spread(number)) for number in range(60)])
    assert sum(found[50:]) >= 8, "its own oldest made room"


def test_a_new_guarantee_takes_back_what_was_lent(division: Division) -> None:
    division.allow()
    division.store(KEYSPACE_B, range(38))
    division.allow(a=20)
    division.sweep()
    division.sweep()
    assert division.b.totals().used <= 20 * VALUE_BYTES
    assert division.store(KEYSPACE_A, range(20)) == 20


def test_room_that_is_not_used_any_more_is_given_back(division: Division, redis_server: RedisProcess) -> None:
    division.allow()
    division.store(KEYSPACE_B, range(38))
    division.driver.tier.delete([block(KEYSPACE_B, spread(number)) for number in range(38)])
    division.sweep()
    assert division.store(KEYSPACE_A, range(30)) == 30
    assert division.a.totals().used == 30 * VALUE_BYTES


def test_keyspaces_that_leave_the_policy_give_back_at_once_what_their_blocks_do_not_take(division: Division) -> None:
    """As a tenant's do that changes its epoch again and again."""
    division.allow(a=30)
    division.sweep()
    division.store(KEYSPACE_A, range(2))
    division.allow_only(KEYSPACE_B, guaranteed=30)
    division.turn()
    assert division.store(KEYSPACE_B, range(37)) == 37
    assert division.b.totals().used == 37 * VALUE_BYTES
    assert division.a.totals().used == 2 * VALUE_BYTES, "which expire, and are not deleted"


def test_a_keyspace_that_no_pod_saw_leave_the_policy_keeps_no_guarantee(
    division: Division, redis_server: RedisProcess
) -> None:
    division.allow(a=30)
    division.sweep()
    long_ago_ms = int(time.time() * 1000) - 3_600_000
    redis_server.admin().hset(
        capacity_key(DOMAIN), KEYSPACE_A, f"{30 * VALUE_BYTES}:{2 * VALUE_BYTES}:9:{long_ago_ms}:0"
    )
    division.tidy()
    division.store(KEYSPACE_B, range(39))
    assert 34 * VALUE_BYTES <= division.b.totals().used <= 38 * VALUE_BYTES, "but what its blocks take"


def test_a_change_that_was_decided_in_an_earlier_turn_comes_too_late(division: Division) -> None:
    division.allow()
    division.store(KEYSPACE_B, range(10))
    ledgers, bounds = division.driver.tier._deps.ledgers, division.driver.tier._deps.terms.bounds(KEYSPACE_B)
    assert bounds is not None
    connection = division.driver.tier._transport()
    ledger, capacity = ledgers.of(connection, KEYSPACE_B, bounds), ledgers.capacity
    granted, sequence, _ = capacity.charge(connection, KEYSPACE_B, bounds, UNKNOWN)
    ledger._grow(Grant(granted, 0, 0), VALUE_BYTES)
    capacity.shrink(connection, KEYSPACE_B, bounds, 1, sequence)
    assert division.rooms()[0] >= granted + VALUE_BYTES
    latest, sequence, _ = capacity.charge(connection, KEYSPACE_B, bounds, UNKNOWN)
    assert ledger._accept(latest, sequence)
    assert ledger._accept(1, sequence - 1)
    assert ledger.view().ledger.granted_bytes == latest
    connection.close()


@pytest.mark.parametrize("how", ["lost", "an older copy", "lost with the ledger"])
def test_a_division_that_is_lost_is_made_anew_from_what_is_in_use(
    division: Division, redis_server: RedisProcess, how: str
) -> None:
    admin, rooms = redis_server.admin(), capacity_key(DOMAIN)
    division.allow()
    division.store(KEYSPACE_A, range(4))
    division.store(KEYSPACE_B, range(4))
    older = admin.hgetall(rooms)
    division.store(KEYSPACE_B, range(34))
    admin.delete(rooms)
    if how == "an older copy":
        admin.hset(rooms, mapping=older)
    elif how == "lost with the ledger":
        division.b.lose_ledger()
    division.driver.store([block(KEYSPACE_A, spread(number)) for number in range(4, 40)])
    for _ in range(4):  # until then nobody can know of what the other has
        division.sweep()
    for number in range(40, 60):
        division.store(KEYSPACE_A, [number])
        division.store(KEYSPACE_B, [number])
        in_use = division.a.totals().used + division.b.totals().used
        assert in_use <= CAPACITY, number
    assert in_use >= CAPACITY * 3 // 4, "room is not wasted"


def test_on_a_full_server_borrowers_still_give_back(division: Division, redis_server: RedisProcess) -> None:
    division.allow()
    division.store(KEYSPACE_B, range(38))
    redis_server.admin().config_set("maxmemory", 1)
    division.allow(a=20)
    division.sweep()
    division.sweep()
    assert division.b.totals().used <= 20 * VALUE_BYTES
    assert "sweep_errors" not in division.driver.tier.counters()


def test_a_new_guarantee_is_taken_from_who_borrowed_and_nobody_else_is_swept(
    division: Division, monkeypatch: pytest.MonkeyPatch
) -> None:
    division.allow()
    division.store(KEYSPACE_B, range(38))
    division.turn()
    swept: list[str] = []
    monkeypatch.setattr(SweepScopes, "sweep", lambda _sweep, _transport, keyspace: swept.append(keyspace))
    division.allow(a=20)
    division.turn()
    assert division.b.totals().used <= 20 * VALUE_BYTES
    assert division.store(KEYSPACE_A, range(20)) == 20
    assert swept == []


def test_what_a_call_costs_does_not_depend_on_how_many_scopes_there_are(
    division: Division, redis_server: RedisProcess
) -> None:
    admin, rooms = redis_server.admin(), capacity_key(DOMAIN)
    division.allow()
    now_ms = int(time.time() * 1000)
    admin.hset(rooms, mapping={f"{number:032x}": f"1:1:1:{now_ms}:0" for number in range(2000)})
    ledgers, bounds = division.driver.tier._deps.ledgers, division.driver.tier._deps.terms.bounds(KEYSPACE_B)
    assert bounds is not None
    transport = division.driver.tier._transport()
    admin.config_resetstat()
    ledgers.of(transport, KEYSPACE_B, bounds)._grow(UNKNOWN, VALUE_BYTES)
    ledgers.capacity.charge(transport, KEYSPACE_B, bounds, UNKNOWN)
    transport.close()
    walks = {"cmdstat_hgetall", "cmdstat_hscan", "cmdstat_hvals", "cmdstat_hkeys"}
    assert not walks & set(admin.info("commandstats"))


def test_the_sum_is_added_up_in_steps_while_rooms_change(division: Division, redis_server: RedisProcess) -> None:
    admin, rooms = redis_server.admin(), capacity_key(DOMAIN)
    now_ms = int(time.time() * 1000)
    admin.hset(rooms, mapping={f"{number:032x}": f"{number % 7}:3:1:{now_ms}:0" for number in range(3000)})
    division.allow(a=2)
    division.store(KEYSPACE_B, range(4))
    transport = division.driver.tier._transport()
    cursor, walk, steps = 0, 0, 0
    while cursor or not steps:
        step = call(
            "tidy",
            rooms.encode(),
            reads_numbers(3),
            cursor=cursor,
            mine=walk,
            count=256,
            stale_ms=10**9,
            keep_ms=10**10,
        )
        ((cursor, walk, _),) = transport.ask([step])
        steps += 1
        if steps % 3 == 0:
            division.store(KEYSPACE_B, [10 + steps])
            division.sweep()
    transport.close()
    assert steps > 5
    entries = [entry.split(b":") for entry in admin.hvals(rooms) if b":" in entry]
    assert int(admin.hget(rooms, "sum") or 0) == sum(max(int(one[0]), int(one[1])) for one in entries)
    assert division.tidy() == 0
