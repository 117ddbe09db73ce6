"""Bounds that a policy changes are put through soon, and the state says for how many scopes they are not yet."""

from __future__ import annotations

import threading
import time

import pytest

from kvstrata.contract.policy.bundle import EnforcedBudget
from kvstrata.contract.policy.cache_view import CacheView
from kvstrata.contract.store.redis_keys import bucket_prefix
from kvstrata_sidecar.adapter.policy.limits import Bounds, SharedBounds, bounds_of
from kvstrata_sidecar.adapter.redis.client.resp import Transport
from kvstrata_sidecar.adapter.redis.sweep import scopes, sweeper
from kvstrata_sidecar.adapter.redis.sweep.scopes import ApplyPolicy, PolicyChanges
from tests.support.redis_binary import needs_redis
from tests.tiers.books import Books
from tests.tiers.gate_stand_in import DOMAIN, KEYSPACE_A, KEYSPACE_B, GateStandIn
from tests.tiers.redis_cluster import until
from tests.tiers.redis_process import RedisProcess
from tests.tiers.sweeping import job_of, make_due, stop, sweep
from tests.tiers.tier_driver import VALUE_BYTES, Driver, block

pytestmark = needs_redis
A, B, C = "a" * 32, "b" * 32, "c" * 32
FREE = (None, None)
PATIENCE_S = 60.0
"""Longer than any turn or wait takes on a busy machine."""


def until_settled(driver: Driver) -> None:
    give_up_at_s = time.monotonic() + PATIENCE_S
    while driver.tier.state().settling:
        assert time.monotonic() < give_up_at_s, driver.tier.state()
        time.sleep(0.002)


class TestWhatIsPending:
    def test_only_scopes_whose_terms_changed(self) -> None:
        changes = PolicyChanges()
        changes.follow({A: (SharedBounds(10), None), B: (None, 1000), C: FREE})
        assert {keyspace for keyspace, _ in changes.pending()} == {A, B}
        for keyspace, terms in changes.pending():
            changes.applied(keyspace, terms)
        changes.follow({A: (SharedBounds(5), None), B: (None, 1000), C: FREE})
        assert changes.pending() == [(A, (SharedBounds(5), None))]

    def test_what_changed_again_meanwhile_is_not_done(self) -> None:
        changes = PolicyChanges()
        changes.follow({A: (SharedBounds(10), None)})
        before = changes.pending()
        changes.follow({A: (SharedBounds(5), None)})
        changes.applied(*before[0])
        assert changes.pending() == [(A, (SharedBounds(5), None))]

    def test_a_scope_that_left_the_policy_has_nothing_to_settle_and_gives_back_until_it_returns(self) -> None:
        changes = PolicyChanges()
        divided = (SharedBounds(10, capacity_bytes=20), None)
        changes.follow({A: divided, C: divided})
        changes.follow({B: FREE})
        assert len(changes) == 0
        assert set(changes.departed) == {A, C}
        changes.released(A)
        assert set(changes.departed) == {C}
        changes.follow({B: FREE, C: divided})
        assert not changes.departed

    def test_a_change_of_guarantees_concerns_all_and_is_told_once(self) -> None:
        changes = PolicyChanges()
        changes.follow({A: (SharedBounds(10), None)})
        assert not changes.take_guarantees_changed()
        changes.follow({A: (SharedBounds(10, guaranteed_bytes=5), None)})
        assert changes.take_guarantees_changed()
        assert not changes.take_guarantees_changed()


class TestOnARealTier:
    def test_a_policy_of_many_scopes_that_is_being_compared_holds_up_no_load(
        self, driver: Driver, gate: GateStandIn, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        driver.store([block(KEYSPACE_A)])
        computing, go_on = threading.Event(), threading.Event()

        def bounds(view: CacheView, tier: str) -> dict[str, Bounds]:
            computing.set()
            assert go_on.wait(PATIENCE_S)
            return bounds_of(view, tier)

        monkeypatch.setattr(scopes, "bounds_of", bounds)
        changing = threading.Thread(target=gate.allow, args=(KEYSPACE_A, KEYSPACE_B))
        changing.start()
        try:
            assert computing.wait(PATIENCE_S)
            assert driver.load([block(KEYSPACE_A)])[0] == [1]
        finally:
            go_on.set()
            changing.join()

    def test_a_lowered_limit_holds_within_moments_of_the_acknowledgement_and_the_state_says_when(
        self, driver: Driver, gate: GateStandIn, redis_server: RedisProcess
    ) -> None:
        books = Books(redis_server, KEYSPACE_A)
        gate.allow(KEYSPACE_A, KEYSPACE_B, budgets=(EnforcedBudget("shared", limit_bytes=40 * VALUE_BYTES),))
        for first in range(0, 40, 8):
            driver.store([block(KEYSPACE_A, number * 6) for number in range(first, first + 8)])
        gate.allow(KEYSPACE_A, KEYSPACE_B, budgets=(EnforcedBudget("shared", limit_bytes=10 * VALUE_BYTES),))
        until_settled(driver)
        assert books.totals().holds(10 * VALUE_BYTES), "nothing is settling, so the limit holds"

    def test_a_turn_over_many_scopes_leaves_them_for_what_cannot_wait_and_goes_on_later(
        self, driver: Driver, gate: GateStandIn, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sweeper, "TURN_S", PATIENCE_S)
        turn = driver.tier._sweeper.turn
        stop(driver.tier)
        make_due(driver.tier, time.monotonic() + 60)
        gate.allow(*(f"{number:032x}" for number in range(6)))
        assert turn() is False
        swept: list[str] = []

        def note(_job: scopes.SweepScopes, _transport: Transport, keyspace: str) -> None:
            swept.append(keyspace)
            if len(swept) == 2:
                driver.tier._deps.inbox.urge(f"{5:032x}")
            elif len(swept) == 5:
                gate.allow(*(f"{number:032x}" for number in range(1, 7)))

        monkeypatch.setattr(scopes.SweepScopes, "sweep", note)
        make_due(driver.tier, 0.0)
        assert turn() is True
        assert [int(one, 16) for one in swept] == [0, 1], "the rest waits"
        assert turn() is True
        assert [int(one, 16) for one in swept] == [0, 1, 5, 2, 3], "and once more when the policy changed"
        assert turn() is False
        assert [int(one, 16) for one in swept[5:]] == [4, 5]

    def test_a_scope_that_stays_above_its_limit_waits_a_turn_and_holds_up_no_other(
        self, driver: Driver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sweeper, "TURN_S", PATIENCE_S)
        stop(driver.tier)
        make_due(driver.tier, time.monotonic() + 60)
        while driver.tier._sweeper.turn():
            pass
        swept: list[str] = []

        def stay_above(_job: scopes.SweepScopes, _transport: Transport, keyspace: str) -> bool:
            swept.append(keyspace)
            return keyspace == KEYSPACE_A

        monkeypatch.setattr(scopes.SweepScopes, "sweep", stay_above)
        for keyspace in (KEYSPACE_A, KEYSPACE_B):
            driver.tier._deps.inbox.urge(keyspace)
        assert driver.tier._sweeper.turn() is False, "it is not tried without a pause"
        assert driver.tier._sweeper.turn() is False
        assert swept == [KEYSPACE_A, KEYSPACE_B, KEYSPACE_A]

    def test_a_policy_that_changes_puts_off_no_sweep(self, driver: Driver, gate: GateStandIn) -> None:
        stop(driver.tier)
        due_s = time.monotonic() + 60
        make_due(driver.tier, due_s)
        gate.allow(KEYSPACE_A)
        driver.tier._sweeper.turn()
        assert job_of(driver.tier, scopes.SweepScopes).due_s == due_s
        make_due(driver.tier, 0.0)
        driver.tier._sweeper.turn()
        assert job_of(driver.tier, scopes.SweepScopes).due_s > due_s - 30, "once an interval"

    def test_a_job_that_fails_is_counted_and_affects_no_other(
        self, driver: Driver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stop(driver.tier)
        make_due(driver.tier, 0.0)
        failed = driver.tier.counters().get("sweep_errors", 0)

        def fail(*_: object) -> bool:
            raise ValueError("a defect")

        monkeypatch.setattr(ApplyPolicy, "run", fail)
        assert driver.tier._sweeper.turn() is False
        assert driver.tier.counters()["sweep_errors"] == failed + 1
        assert job_of(driver.tier, scopes.SweepScopes).due_s > 0, "the sweep was begun"

    def test_of_ten_sweeps_one_compares_index_and_values_whichever_pod_sweeps(
        self, driver: Driver, redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        driver.store([block(KEYSPACE_A)])
        stop(driver.tier)
        redis_server.admin().unlink(*Books(redis_server, KEYSPACE_A).values())
        for chance, drift in ((0.5, 0), (0.05, 1)):  # of a pod that has just started
            deps = job_of(driver.tier, scopes.SweepScopes)._deps
            object.__setattr__(deps, "jitter", lambda chance=chance: chance)
            sweep(driver.tier, KEYSPACE_A)
            assert driver.tier.counters().get("drift_entries", 0) == drift

    def test_a_tier_that_is_away_says_that_it_is_not_settled(
        self, driver: Driver, gate: GateStandIn, redis_server: RedisProcess
    ) -> None:
        gate.allow(KEYSPACE_A, budgets=(EnforcedBudget("shared", limit_bytes=40 * VALUE_BYTES),))
        driver.store([block(KEYSPACE_A, number * 16) for number in range(8)])
        redis_server.freeze()
        try:
            gate.allow(KEYSPACE_A, budgets=(EnforcedBudget("shared", limit_bytes=2 * VALUE_BYTES),))
            until(lambda: driver.tier.state().settling == 1, driver.tier.state)
            time.sleep(0.3)
            assert driver.tier.state().settling == 1
        finally:
            redis_server.thaw()
        until_settled(driver)
        assert Books(redis_server, KEYSPACE_A).totals().holds(2 * VALUE_BYTES)

    @pytest.mark.claim("a shortened retention applies to stored blocks")
    def test_a_shortened_retention_is_put_through_as_well(
        self, driver: Driver, gate: GateStandIn, redis_server: RedisProcess
    ) -> None:
        gate.allow(KEYSPACE_A, budgets=(EnforcedBudget("shared", retention_s=3600),))
        driver.store([block(KEYSPACE_A, 1)])
        gate.allow(KEYSPACE_A, budgets=(EnforcedBudget("shared", retention_s=60),))
        until_settled(driver)
        name = next(iter(Books(redis_server, KEYSPACE_A).values()))
        assert redis_server.admin().pttl(name) <= 60_000


class TestLargeBuckets:
    @pytest.fixture(autouse=True)
    def small_steps(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(scopes, "RECOUNT_STEP", 2)

    def stored(self, driver: Driver) -> None:
        """Store blocks in a tier whose own sweeps no longer come between."""
        stop(driver.tier)
        for first in range(0, 16, 8):
            driver.store([block(KEYSPACE_A, number) for number in range(first, first + 8)])

    def test_accounting_that_is_wrong_is_corrected_in_steps(self, driver: Driver, redis_server: RedisProcess) -> None:
        self.stored(driver)
        admin, base = redis_server.admin(), bucket_prefix(DOMAIN, KEYSPACE_A, 0)
        admin.hincrby(f"{base}:#s", "used", 12_345)
        admin.hincrby(f"{base}:#s", "held", 7)
        admin.zadd(f"{base}:#x", {"stray": admin.time()[0] * 1000 + 1_000_000})
        sweep(driver.tier, KEYSPACE_A, audit=True)
        counters = driver.tier.counters()
        assert counters["drift_bytes"] == 12_352
        assert counters["drift_entries"] == 1
        Books(redis_server, KEYSPACE_A).assert_consistent()
        assert not admin.hmget(f"{base}:#s", "rc_at", "rc_sum")[0]

    def test_names_without_a_block_go_from_the_order_of_use(self, driver: Driver, redis_server: RedisProcess) -> None:
        self.stored(driver)
        admin, base = redis_server.admin(), bucket_prefix(DOMAIN, KEYSPACE_A, 0)
        admin.zadd(f"{base}:#a", {f"stray{number}": number for number in range(600)})
        sweep(driver.tier, KEYSPACE_A, audit=True)
        assert driver.tier.counters().get("drift_entries") == 600
        Books(redis_server, KEYSPACE_A).assert_consistent()

    def test_blocks_that_expire_at_one_moment_are_added_up_in_steps_as_well(
        self, driver: Driver, redis_server: RedisProcess
    ) -> None:
        self.stored(driver)
        admin, base = redis_server.admin(), bucket_prefix(DOMAIN, KEYSPACE_A, 0)
        moment = int(max(score for _, score in admin.zrange(f"{base}:#x", 0, -1, withscores=True)))
        admin.zadd(f"{base}:#x", dict.fromkeys(admin.zrange(f"{base}:#x", 0, -1), moment))
        admin.hincrby(f"{base}:#s", "used", 12_345)
        sweep(driver.tier, KEYSPACE_A, audit=True)
        assert driver.tier.counters()["drift_bytes"] == 12_345
        books = Books(redis_server, KEYSPACE_A)
        books.assert_consistent()
        assert sum(driver.lookup([block(KEYSPACE_A, number) for number in range(16)])) == 16
        assert all(moment - 1 < score <= moment for _, score in admin.zrange(f"{base}:#x", 0, -1, withscores=True))

    def test_many_dead_reservations_go_in_steps_with_one_sweep(
        self, driver: Driver, redis_server: RedisProcess
    ) -> None:
        stop(driver.tier)
        admin, base = redis_server.admin(), bucket_prefix(DOMAIN, KEYSPACE_A, 0)
        admin.hset(f"{base}:#r", mapping={f"dead{number}": "10:1:token:1" for number in range(3000)})
        admin.hincrby(f"{base}:#s", "held", 30_000)
        sweep(driver.tier, KEYSPACE_A)
        assert driver.tier.counters()["reservations_reaped"] == 3000
        Books(redis_server, KEYSPACE_A).assert_consistent()

    def test_a_count_that_somebody_changed_without_telling_is_begun_anew(
        self, driver: Driver, redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.stored(driver)
        admin, base = redis_server.admin(), bucket_prefix(DOMAIN, KEYSPACE_A, 0)
        entries = admin.zrange(f"{base}:#x", 0, -1, withscores=True)
        # A recount of another process that stopped in the middle; then a version without recounts stored a block.
        middle = int(entries[1][1])
        counted = sum(1 for _, expiry in entries if expiry <= middle) * VALUE_BYTES
        used = int(admin.hget(f"{base}:#s", "used") or 0)
        admin.hset(
            f"{base}:#s", mapping={"rc_at": middle, "rc_sum": counted, "rc_used": used - VALUE_BYTES}
        )  # fmt: skip
        sweep(driver.tier, KEYSPACE_A, audit=True)
        counters = driver.tier.counters()
        assert counters["recounts_repeated"] == 1
        assert "drift_bytes" not in counters or counters["drift_bytes"] == 0
        sweep(driver.tier, KEYSPACE_A, audit=True)
        Books(redis_server, KEYSPACE_A).assert_consistent()
