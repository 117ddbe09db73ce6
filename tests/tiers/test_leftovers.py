"""What is not in use, or in use by keyspaces that no policy names, is there for new scopes: on a real Redis."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator

import pytest

from kvstrata.contract.store.redis_keys import capacity_claim_key, capacity_key
from kvstrata_sidecar.adapter.policy.limits import SharedBounds
from kvstrata_sidecar.adapter.redis.budget.capacity import DEPARTED_GRACE_MS, STALE_MS
from kvstrata_sidecar.adapter.redis.budget.scope_state import Grant
from kvstrata_sidecar.adapter.redis.sweep.reclaim import ReclaimCapacity
from tests.support.redis_binary import needs_redis
from tests.tiers.books import Books
from tests.tiers.gate_stand_in import DOMAIN
from tests.tiers.redis_process import RedisProcess
from tests.tiers.sharing_pod import SharingPod
from tests.tiers.sweeping import job_of, sweep

pytestmark = needs_redis
CAPACITY = 768
"""In blocks, so that a 256th of it is several blocks, as in every tier of a real size."""

OLD = [f"{number:032x}" for number in range(8)]
NEW = [f"{number:032x}" for number in range(100, 104)]
FREED_AT_MOST = CAPACITY // 32 + 2


class Shared:
    """The server and its pods, which are all of one model unless a test says otherwise."""

    def __init__(self, server: RedisProcess) -> None:
        self.server = server
        self.pods: list[SharingPod] = []

    def pod(self) -> SharingPod:
        self.pods.append(SharingPod(self.server, CAPACITY, block_bytes=512))
        return self.pods[-1]

    def used(self, *keyspaces: str) -> int:
        """How many blocks these hold."""
        return sum(Books(self.server, one).totals().used for one in keyspaces) // self.pods[0].value_bytes

    def rooms(self) -> dict[str, tuple[int, int]]:
        """What is guaranteed and lent to each, in bytes."""
        entries = self.server.admin().hgetall(capacity_key(DOMAIN)).items()
        words = {name.decode(): entry.split(b":") for name, entry in entries if b":" in entry}
        return {name: (int(one[0]), int(one[1])) for name, one in words.items()}

    def charged(self) -> float:
        """What all are charged, in blocks."""
        charged = sum(max(one) for one in self.rooms().values())
        assert int(self.server.admin().hget(capacity_key(DOMAIN), "sum") or 0) == charged
        return charged / self.pods[0].value_bytes

    def expire(self, keyspace: str) -> None:
        """Have the time of all blocks of a keyspace come."""
        admin, books = self.server.admin(), Books(self.server, keyspace)
        admin.unlink(*books.values())
        for name in books.entries():
            base, _, member = name.partition("}:")
            admin.zadd(f"{base}}}:#x", {member: 1})

    def let_pass(self, milliseconds: int = STALE_MS) -> None:
        """Have all scopes be as they were so long ago, as seen by the next."""
        admin, key = self.server.admin(), capacity_key(DOMAIN)
        for name, entry in admin.hgetall(key).items():
            if b":" in entry:
                guaranteed, room, turn, moment, walk = entry.split(b":")
                admin.hset(key, name, b":".join((guaranteed, room, turn, b"%d" % (int(moment) - milliseconds), walk)))
        admin.unlink(capacity_claim_key(DOMAIN, "d"))
        for pod in self.pods:
            job_of(pod.tier, ReclaimCapacity).unlisted.rest_until_s = 0.0


@pytest.fixture
def shared(redis_server: RedisProcess) -> Iterator[Shared]:
    shared = Shared(redis_server)
    yield shared
    for pod in shared.pods:
        pod.close()


@pytest.fixture
def full(shared: Shared) -> SharingPod:
    """A pod of whose tier departed keyspaces have taken all: they left its policy just now."""
    pod = shared.pod()
    pod.enforce(dict.fromkeys(OLD, 0), revision=1)
    for keyspace in OLD:
        pod.store(keyspace, range(CAPACITY // len(OLD)))
    pod.turn(sweep=True)
    for keyspace in OLD[-2:]:
        pod.store(keyspace, range(CAPACITY // len(OLD)))
    pod.enforce(dict.fromkeys(NEW, 0), revision=2)
    pod.turn()
    return pod


class TestWhatIsNotInUse:
    def test_scopes_of_a_few_blocks_in_each_bucket_do_not_fill_a_tier(self, shared: Shared) -> None:
        pod = shared.pod()
        many = [f"{number:032x}" for number in range(16)]
        pod.enforce(dict.fromkeys((*many, *NEW), 0), revision=1)
        assert [pod.store(keyspace, range(20)) for keyspace in many] == [20] * 16
        assert [pod.store(keyspace, range(60)) for keyspace in NEW] == [60] * 4
        assert shared.charged() < 1.25 * shared.used(*many, *NEW)

    def test_a_sweep_has_scopes_whose_blocks_are_gone_give_everything_back(self, shared: Shared) -> None:
        pod = shared.pod()
        pod.enforce(dict.fromkeys(NEW, 0), revision=1)
        pod.store(NEW[0], range(200))
        for name in Books(shared.server, NEW[0]).values():
            shared.server.admin().unlink(name)
        sweep(pod.tier, NEW[0], audit=True)
        assert shared.charged() == 0

    def test_a_new_scope_gets_all_that_is_free_of_a_tier_whose_scopes_stand_still(self, shared: Shared) -> None:
        pod = shared.pod()
        pod.enforce(dict.fromkeys((*OLD, *NEW), 0), revision=1)
        for keyspace in OLD:
            assert pod.store(keyspace, range(78)) == 78
        free = CAPACITY - shared.used(*OLD)
        pod.store(NEW[0], range(free // 2))
        pod.turn(sweep=True)
        pod.store(NEW[0], range(free))
        pod.turn(sweep=True)
        pod.store(NEW[0], range(free))
        assert free - 16 <= shared.used(NEW[0]) <= free, "but for less than a block in each bucket"
        assert shared.charged() <= CAPACITY

    def test_a_keyspace_that_leaves_keeps_what_its_blocks_take_and_no_lease_beyond(self, shared: Shared) -> None:
        pod = shared.pod()
        pod.enforce(dict.fromkeys(OLD, 10), revision=1)
        pod.turn()
        for keyspace in OLD:
            pod.store(keyspace, range(40))
        pod.enforce(dict.fromkeys(NEW, 0), revision=2)
        pod.turn()
        assert shared.charged() == shared.used(*OLD) == 320


class TestWhatNobodyCanRead:
    def test_it_makes_room_for_new_scopes_at_once_and_no_more_of_it_than_is_needed(
        self, shared: Shared, full: SharingPod
    ) -> None:
        assert shared.charged() > CAPACITY * 0.98
        assert full.store(NEW[0], range(60)) < 60
        shared.let_pass(DEPARTED_GRACE_MS)
        before = shared.used(*OLD)
        full.turn()
        assert before - shared.used(*OLD) <= FREED_AT_MOST
        evicted = full.evicted()
        for first in range(0, 120, 12):
            assert full.store(NEW[1], range(first, first + 12)) == 12
            full.turn()
            assert shared.charged() <= CAPACITY
        assert shared.used(NEW[1]) == 120
        assert full.evicted() == evicted, "nobody who may read anything lost a block"
        for keyspace in (*OLD, *NEW):
            Books(shared.server, keyspace).assert_consistent()

    def test_when_all_of_it_is_gone_it_is_charged_for_nothing_and_forgotten(
        self, shared: Shared, full: SharingPod
    ) -> None:
        shared.let_pass()
        stored = 0
        for _ in range(60):
            stored += full.store(NEW[0], range(stored, stored + 20))
            full.turn()
            if shared.used(*OLD) == 0:
                break
        full.turn(sweep=True)
        assert not set(OLD) & set(shared.rooms())
        assert shared.used(NEW[0]) >= CAPACITY * 0.95

    def test_what_expired_is_not_charged_any_longer_than_somebody_needs_it(self, shared: Shared) -> None:
        pod = shared.pod()
        pod.enforce({OLD[0]: 0}, revision=1)
        pod.turn()
        pod.store(OLD[0], range(CAPACITY))
        pod.enforce(dict.fromkeys(NEW, 0), revision=2)
        pod.turn()
        shared.expire(OLD[0])
        shared.let_pass()
        pod.store(NEW[0], range(60))
        pod.turn()
        assert pod.store(NEW[1], range(300)) == 300
        assert pod.departed() == 0
        assert OLD[0] not in shared.rooms(), "nothing is left of it"

    def test_what_left_a_moment_ago_may_be_in_the_policy_of_another_model(
        self, shared: Shared, full: SharingPod
    ) -> None:
        before = shared.used(*OLD)
        shared.let_pass(DEPARTED_GRACE_MS - 60_000)
        full.store(NEW[0], range(60))
        full.turn()
        assert shared.used(*OLD) == before

    def test_what_is_in_the_policy_is_no_leftover_however_long_nobody_swept_it(self, shared: Shared) -> None:
        pod = shared.pod()
        pod.enforce(dict.fromkeys((*OLD[:2], NEW[0]), 0), revision=1)
        pod.turn()
        pod.store(OLD[0], range(CAPACITY))
        shared.let_pass()
        before = shared.used(OLD[0])
        pod.store(NEW[0], range(60))
        pod.turn()
        assert pod.departed() == 0
        assert shared.used(OLD[0]) == before

    def test_what_another_models_pods_sweep_is_nobodys_leftover(self, shared: Shared, full: SharingPod) -> None:
        other = shared.pod()
        other.enforce(dict.fromkeys(OLD, 0), revision=1)
        shared.let_pass(DEPARTED_GRACE_MS)
        other.turn(sweep=True)
        before = shared.used(*OLD)
        full.store(NEW[0], range(60))
        full.turn()
        assert shared.used(*OLD) == before

    def test_one_that_came_back_while_it_was_looked_at_is_left_alone(self, shared: Shared, full: SharingPod) -> None:
        shared.let_pass()
        transport = full.tier._transport()
        ledgers = full.tier._deps.ledgers
        _, found = ledgers.capacity.unlisted(transport, 0)
        assert {one.keyspace for one in found} >= set(OLD)
        other = shared.pod()
        other.enforce({OLD[0]: 20}, revision=1)
        other.turn()
        before, used = shared.rooms()[OLD[0]], shared.used(OLD[0])
        one = next(one for one in found if one.keyspace == OLD[0])
        ledgers.of(transport, OLD[0]).release(one, missing=CAPACITY * full.value_bytes)
        transport.close()
        assert (shared.rooms()[OLD[0]], shared.used(OLD[0])) == (before, used)

    def test_a_new_guarantee_is_covered_by_it_before_any_borrower_gives_back(
        self, shared: Shared, full: SharingPod
    ) -> None:
        shared.let_pass()
        full.store(NEW[0], range(60))
        full.turn()
        assert full.store(NEW[0], range(100, 118)) == 18
        before, evicted = shared.used(NEW[0]), full.evicted()
        full.enforce(dict.fromkeys(NEW, 0) | {NEW[1]: 240}, revision=3)
        full.turn()
        assert full.store(NEW[1], range(240)) == 240
        assert (shared.used(NEW[0]), full.evicted()) == (before, evicted)

    def test_several_pods_that_are_short_at_once_take_what_one_would(self, shared: Shared, full: SharingPod) -> None:
        pods = [full, *(shared.pod() for _ in range(3))]
        for pod, keyspace in zip(pods, NEW, strict=True):
            pod.enforce(dict.fromkeys(NEW, 0), revision=2)
            pod.store(keyspace, range(30))
        shared.let_pass()
        before, own = shared.used(*OLD), shared.used(*NEW)
        turns = [threading.Thread(target=pod.turn) for pod in pods]
        for turn in turns:
            turn.start()
        for turn in turns:
            turn.join(120)
            assert not turn.is_alive()
        assert 0 < before - shared.used(*OLD) <= FREED_AT_MOST
        assert shared.used(*NEW) == own, "however long nobody swept it"
        assert shared.charged() <= CAPACITY

    def test_without_their_ledgers_they_make_room_all_the_same(self, shared: Shared, full: SharingPod) -> None:
        for keyspace in OLD:
            Books(shared.server, keyspace).lose_ledger()
        shared.let_pass()
        full.store(NEW[0], range(60))
        full.turn()
        assert full.store(NEW[0], range(100, 118)) == 18
        assert shared.charged() <= CAPACITY
        for keyspace in OLD:
            Books(shared.server, keyspace).assert_consistent()

    def test_on_a_full_server_it_is_what_makes_room(self, shared: Shared, full: SharingPod) -> None:
        shared.let_pass()
        before = shared.used(*OLD)
        full.store(NEW[0], range(30))
        shared.server.admin().config_set("maxmemory", 1)
        full.turn()
        shared.server.admin().config_set("maxmemory", 0)
        assert shared.used(*OLD) < before

    def test_a_pod_whose_policy_is_stale_takes_nothing_of_what_others_could_not_renew(
        self, shared: Shared, full: SharingPod
    ) -> None:
        full.store(NEW[0], range(60))
        shared.let_pass()
        full.fresh = False
        before = shared.used(*OLD)
        full.turn(sweep=True)
        full.fresh = True
        full.turn(sweep=True)
        assert shared.used(*OLD) == before, "they have a while to renew it"

    def test_a_pod_that_charges_a_scope_renews_it(self, shared: Shared, full: SharingPod) -> None:
        shared.let_pass()
        transport = full.tier._transport()
        capacity = full.tier._deps.ledgers.capacity
        bounds = SharedBounds(CAPACITY * full.value_bytes, 0, CAPACITY * full.value_bytes)
        capacity.charge(transport, OLD[0], bounds, Grant(0, 0, 0))
        _, found = capacity.unlisted(transport, 0)
        transport.close()
        assert {one.keyspace for one in found} & set(OLD) == set(OLD[1:])


@pytest.mark.parametrize("seed", [1, 2])
def test_whatever_comes_and_goes_neither_capacity_nor_guarantee_is_exceeded(shared: Shared, seed: int) -> None:
    chance = random.Random(seed)
    pods = [shared.pod() for _ in range(2)]
    everybody = [f"{number:032x}" for number in range(12)]
    kept, revision, one_block = everybody[-1], 0, pods[0].value_bytes
    numbers: Callable[[], range] = lambda: range(start := chance.randrange(400), start + chance.randrange(60))  # noqa: E731

    def change_policy() -> None:
        nonlocal revision
        revision += 1
        named = dict.fromkeys(chance.sample(everybody[:-1], 4), 0) | {kept: 100}
        for pod in pods:
            pod.enforce(named, revision)

    change_policy()
    for pod in pods:
        pod.turn(sweep=True)
    stored = 0
    for step in range(60):
        pod = chance.choice(pods)
        what = chance.randrange(10)
        if what == 0:
            change_policy()
        elif what == 1:
            shared.let_pass(DEPARTED_GRACE_MS)
        elif what < 4:
            pod.turn(sweep=what == 2)
        else:
            view = pod.enforcement.view
            assert view is not None
            stored += pod.store(chance.choice(list(view.keyspaces)), numbers())
        assert shared.charged() <= CAPACITY
        if step % 6 == 5:
            totals = [Books(shared.server, keyspace).totals() for keyspace in everybody]
            assert all(one.holds(CAPACITY * one_block) for one in totals)
            assert sum(one.leased for one in totals) <= CAPACITY * one_block
    assert stored > CAPACITY / 2
    pods[0].enforce({kept: 100}, revision + 1)
    shared.let_pass()
    for pod in pods:
        pod.turn()
    assert pods[0].store(kept, range(1000, 1100)) == 100, "what is guaranteed is there"
