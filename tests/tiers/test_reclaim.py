"""What is lent is taken back in fair parts, by one pod of several."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_sidecar.adapter.redis.budget.ledger import ScopeLedger
from kvstrata_sidecar.adapter.redis.client.resp import TransportError
from kvstrata_sidecar.adapter.redis.sweep.reclaim import parts
from tests.support.redis_binary import needs_redis
from tests.tiers.books import Books
from tests.tiers.redis_process import RedisProcess
from tests.tiers.server_kinds import on_every_server
from tests.tiers.sharing_pod import SharingPod
from tests.tiers.sweeping import sweep
from tests.tiers.tier_driver import BLOCK_BYTES, VALUE_BYTES

pytestmark = [*needs_redis, on_every_server]
CAPACITY = 40 * VALUE_BYTES
NEW, *BORROWERS = (f"{number:032x}" for number in range(5))
loans = st.dictionaries(st.text(max_size=3), st.integers(1, 10**6), max_size=8)


class TestParts:
    @given(loans, st.integers(1, 10**7))
    def test_they_cover_the_excess_or_all_that_is_lent(self, lent: dict[str, int], excess: int) -> None:
        total = sum(amount for _, amount in parts(lent, excess))
        assert min(excess, sum(lent.values())) <= total <= excess + len(lent)

    @given(loans, st.integers(1, 10**7))
    def test_who_gives_back_keeps_as_much_as_anybody_else(self, lent: dict[str, int], excess: int) -> None:
        kept = lent | {keyspace: lent[keyspace] - amount for keyspace, amount in parts(lent, excess)}
        assert all(amount > 0 for _, amount in parts(lent, excess))
        assert min(kept.values(), default=0) >= 0
        cut = {kept[keyspace] for keyspace, _ in parts(lent, excess)}
        assert len(cut) <= 1
        assert all(kept[keyspace] <= level for level in cut for keyspace in lent)

    def test_two_that_borrowed_alike_give_alike(self) -> None:
        assert parts({"a": 20, "b": 20, "c": 3}, 20) == [("a", 10), ("b", 10)]
        assert parts({"a": 30, "b": 10}, 15) == [("a", 15)]


@pytest.fixture
def pods(redis_server: RedisProcess) -> Iterator[list[SharingPod]]:
    """Four pods whose policy lets four scopes borrow, each of which borrowed a fourth."""
    pods = [SharingPod(redis_server, CAPACITY // VALUE_BYTES, BLOCK_BYTES) for _ in BORROWERS]
    for pod, keyspace in zip(pods, BORROWERS, strict=True):
        pod.enforce(dict.fromkeys((NEW, *BORROWERS), 0), revision=1)
        pod.turn()
        assert pod.store(keyspace, range(10)) == 10
    yield pods
    for pod in pods:
        pod.close()


def at_once(*actions: Callable[[], None]) -> None:
    """Do all of it at the same time."""
    start = threading.Barrier(len(actions))

    def act(action: Callable[[], None]) -> None:
        start.wait(60)
        action()

    threads = [threading.Thread(target=act, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()


def until_covered(pods: list[SharingPod]) -> None:
    """Have pods take turns, all at once, until the tier is not overcommitted any more: a turn may be interrupted."""
    transport = pods[0].tier._transport()
    give_up_at_s = time.monotonic() + 60
    while True:
        at_once(*(pod.turn for pod in pods))
        if pods[0].tier._deps.ledgers.capacity.free(transport, CAPACITY) >= 0:
            break
        assert time.monotonic() < give_up_at_s
    transport.close()


def kept(server: RedisProcess) -> list[int]:
    """How many blocks each of the borrowers has."""
    return [Books(server, keyspace).totals().used // VALUE_BYTES for keyspace in BORROWERS]


class TestSeveralPods:
    def test_a_new_guarantee_costs_borrowers_alike_however_many_pods_hear_of_it(
        self, pods: list[SharingPod], redis_server: RedisProcess
    ) -> None:
        for pod in pods:
            pod.enforce({NEW: 20} | dict.fromkeys(BORROWERS, 0), revision=2)
        until_covered(pods)
        assert kept(redis_server) == [5, 5, 5, 5]
        assert pods[0].store(NEW, range(20)) == 20
        assert Books(redis_server, NEW).totals().used == 20 * VALUE_BYTES
        assert kept(redis_server) == [5, 5, 5, 5]

    def test_sweeps_of_several_scopes_at_once_give_back_no_more_than_is_needed(
        self, pods: list[SharingPod], redis_server: RedisProcess
    ) -> None:
        for pod in pods:
            pod.enforce({NEW: 20} | dict.fromkeys(BORROWERS, 0), revision=2)
        sweep(pods[0].tier, NEW)
        sweeps = [partial(sweep, pod.tier, keyspace) for pod, keyspace in zip(pods, BORROWERS, strict=True)]
        at_once(*sweeps)
        until_covered(pods)
        assert kept(redis_server) == [5, 5, 5, 5]

    def test_a_scope_that_cannot_give_back_is_made_up_for_by_others(
        self, pods: list[SharingPod], redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pod, give_back = pods[0], ScopeLedger.give_back

        def fail_for_one(ledger: ScopeLedger, back: int = 0) -> int:
            if ledger._keyspace == BORROWERS[0]:
                raise TransportError("the server of its ledger is away")
            return give_back(ledger, back)

        monkeypatch.setattr(ScopeLedger, "give_back", fail_for_one)
        pod.enforce({NEW: 20} | dict.fromkeys(BORROWERS, 0), revision=2)
        until_covered([pod])
        assert kept(redis_server) == [10, 3, 3, 3]
        assert pod.store(NEW, range(20)) == 20

    def test_a_pod_of_whose_scopes_none_borrowed_leaves_it_to_those_that_can(
        self, pods: list[SharingPod], redis_server: RedisProcess
    ) -> None:
        first, second, *_ = pods
        first.enforce({NEW: 20}, revision=2)
        first.turn()
        second.enforce({NEW: 20} | dict.fromkeys(BORROWERS, 0), revision=2)
        until_covered([second])
        assert kept(redis_server) == [5, 5, 5, 5]
