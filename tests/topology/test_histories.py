"""Whatever happens to a cluster, and wherever its operator dies: when it is left alone, it becomes whole.

On a model of servers (`gossip_model`), because thousands of histories are tried.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import cycle

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstrata.plan.redis.topology import Step, StepReason, view
from kvstrata.plan.redis.topology.view import count
from tests.support.amounts import examples
from tests.topology.gossip_model import SLOTS, RefusedError
from tests.topology.gossip_operator import Tended
from tests.topology.looks import step

pytestmark = pytest.mark.claim(
    "whatever happens to a managed cluster and wherever its operator dies, left alone it becomes whole"
)

ROUNDS = 60


@pytest.fixture(autouse=True, scope="module")
def few_slots() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(view, "SLOTS", SLOTS)
        yield


def settle(model: Tended) -> None:
    """Tended and operate until nothing is left to do."""
    found: Step | None = None
    for _ in range(ROUNDS):
        model.gossip()
        found = model.operate()
        if found is None and not model.shrink():
            break
    else:
        raise AssertionError(found)
    assert_sound(model)


def assert_sound(model: Tended) -> None:
    """One primary for each slot, in its shard, with its replicas; everybody says so, and knows nobody else."""
    primaries = [node for node in model.nodes.values() if node.primary is None]
    assert sorted(slot for node in primaries for slot in node.slots) == list(range(SLOTS))
    shards = {node.node_id: model.pods[node.pod_uid].shard for node in primaries}
    assert sorted(shards.values()) == list(range(model.goal.shards))
    for node in model.nodes.values():
        assert node.known.keys() == {other.node_id for other in model.nodes.values()} - {node.node_id}
        assert node.owners == primaries[0].owners
        assert node.max_bytes == model.goal.max_bytes_each
        if node.primary is not None:
            assert shards[node.primary] == model.pods[node.pod_uid].shard
            assert node.synced


def pods(model: Tended, shard: int) -> tuple[str, str]:
    """The primary's and the replica's pod of a shard."""
    found = [node for node in model.nodes.values() if model.pods[node.pod_uid].shard == shard]
    first, second = sorted(found, key=lambda node: node.primary is not None)
    return first.pod_uid, second.pod_uid


def lose(*which: tuple[int, int]) -> Callable[[Tended], None]:
    def happen(model: Tended) -> None:
        for uid in [pods(model, shard)[role] for shard, role in which]:
            model.replace(uid)

    return happen


def start_anew(*which: tuple[int, int]) -> Callable[[Tended], None]:
    def happen(model: Tended) -> None:
        for uid in [pods(model, shard)[role] for shard, role in which]:
            model.restart(uid)

    return happen


def want(**changes: object) -> Callable[[Tended], None]:
    return lambda model: model.want(**changes)


ALL = [(shard, role) for shard in range(3) for role in (0, 1)]
EVENTS = {
    "a replica": lose((0, 1)),
    "a primary": lose((0, 0)),
    "two primaries": lose((0, 0), (1, 0)),
    "all primaries": lose((0, 0), (1, 0), (2, 0)),
    "a shard": lose((0, 0), (0, 1)),
    "a shard and a primary": lose((0, 0), (0, 1), (1, 0)),
    "all": lose(*ALL),
    "a primary's server": start_anew((0, 0)),
    "a shard's servers": start_anew((0, 0), (0, 1)),
    "all servers": start_anew(*ALL),
}
EDITS = {
    "a shard more": want(shards=4, revisions=dict.fromkeys(range(4), "a")),
    "a shard fewer": want(shards=2, revisions=dict.fromkeys(range(2), "a")),
    "no replicas": want(replicas=0),
    "two replicas": want(replicas=2),
    "a roll": want(revisions=dict.fromkeys(range(3), "b")),
    "a capacity": want(max_bytes_each=2 << 20),
}
"""Of these nothing may be lost."""


@cache
def first_formed(shards: int, replicas: int) -> bytes:
    model = Tended(shards, replicas)
    settle(model)
    model.write()
    return pickle.dumps(model)


def formed(shards: int = 3, replicas: int = 1) -> Tended:
    """A whole cluster with values in all slots: a copy, because making one takes longer."""
    model: Tended = pickle.loads(first_formed(shards, replicas))  # noqa: S301  (made here)
    return model


def run(model: Tended, budget: int) -> int:
    """Operate until so many acts are done; return how many were."""
    done = 0
    for _ in range(ROUNDS):
        model.gossip()
        upcoming = step(model.look(), model.goal)
        if upcoming is None and model.shrink():
            continue
        if upcoming is None or done >= budget:
            break
        acts = len(model.acts(upcoming))
        model.operate(budget - done)
        done += min(acts, budget - done)
    return done


def test_servers_that_know_nothing_form_and_nothing_is_sent_after() -> None:
    model = Tended()
    settle(model)
    sent = len(model.sent)
    settle(model)
    assert len(model.sent) == sent


@pytest.mark.parametrize("event", (EVENTS | EDITS).values(), ids=EVENTS | EDITS)
def test_an_operator_that_dies_after_any_act_of_a_transition_is_continued(event: Callable[[Tended], None]) -> None:
    whole = formed()
    event(whole)
    acts = run(whole, 10_000)
    assert acts > 5
    for died_after in range(acts):
        model = formed()
        event(model)
        assert run(model, died_after) == died_after
        settle(model)
        assert event not in EDITS.values() or not lost(model)


@pytest.mark.parametrize("event", (EVENTS | EDITS).values(), ids=EVENTS | EDITS)
def test_a_deposed_leader_that_goes_on_after_any_act_of_its_does_no_harm(event: Callable[[Tended], None]) -> None:
    """It is held up anywhere in a step; another leads meanwhile, for a while or until all is done; then it goes on."""
    whole = formed()
    event(whole)
    acts = run(whole, 10_000)
    for held_after, meanwhile in zip(range(acts), cycle((ROUNDS, 1, 3))):
        model = formed()
        event(model)
        stale = held(model, held_after)
        for _ in range(meanwhile):
            model.gossip()
            if model.operate() is None and not model.shrink():
                break
        for act in stale:
            act()
            model.gossip()
            model.operate()
        settle(model)
        assert event not in EDITS.values() or not lost(model), (held_after, meanwhile)


def held(model: Tended, acts: int) -> list[Callable[[], None]]:
    """Operate until so many acts are done; return those of the same step that are left."""
    done = 0
    for _ in range(ROUNDS):
        model.gossip()
        found = step(model.look(), model.goal)
        if found is None and not model.shrink():
            break
        upcoming = model.acts(found) if found is not None else []
        for act in upcoming[: acts - done]:
            act()
        if len(upcoming) > acts - done:
            return upcoming[acts - done :]
        done += len(upcoming)
    return []


def lost(model: Tended) -> set[int]:
    """The slots whose values nobody has any more."""
    return set(range(SLOTS)) - {slot for node in model.nodes.values() for slot in node.keys}


class Lingering(Tended):
    """Pods of a shard that is removed still serve for a while; its StatefulSet has others only when they are gone."""

    marked = True
    """Whether the API server shows them as being deleted already; before that only their StatefulSet is gone."""

    def terminate(self, uid: str) -> None:
        if self.marked:
            self.pods[uid] = replace(self.pods[uid], deleting=True)
        else:
            self.goal = replace(self.goal, doomed=self.goal.doomed | {uid})

    def collect(self) -> None:
        """The pods that were told to go do, and a shard that is wanted again gets new ones."""
        for uid in [uid for uid, pod in self.pods.items() if pod.deleting or uid in self.goal.doomed]:
            self.delete(uid)
        self.want()


@cache
def four_shards() -> bytes:
    model = Lingering(shards=4)
    settle(model)
    model.write()
    return pickle.dumps(model)


def want_shards(model: Tended, shards: int) -> None:
    model.want(shards=shards, revisions=dict.fromkeys(range(shards), "a"))


def drained(acts: int) -> tuple[Lingering, int]:
    """Four shards that are to be three, after at most so many acts on the way, and how many there were."""
    model: Lingering = pickle.loads(four_shards())  # noqa: S301  (made here)
    want_shards(model, 3)
    return model, run(model, acts)


@pytest.mark.parametrize("marked", [True, False], ids=["pods that are being deleted", "pods without a StatefulSet"])
def test_a_shard_that_is_wanted_again_while_it_goes_loses_nothing(
    marked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lingering, "marked", marked)
    _, acts = drained(40)
    went = 0
    for back_after, meanwhile in zip(range(acts + 1), cycle((0, 1, 3, 20))):
        model, _ = drained(back_after)
        went += any(pod.deleting for pod in model.pods.values()) or bool(model.goal.doomed)
        want_shards(model, 4)
        for _ in range(meanwhile):
            model.gossip()
            model.operate()
        model.collect()
        settle(model)
        assert not lost(model), (back_after, meanwhile)
        assert not [taken for taken in model.steps if taken.lost], (back_after, meanwhile)
    assert went, "some were told to go before the shard was wanted again"


def test_an_operator_that_dies_after_any_command_of_forming_is_continued() -> None:
    whole = Tended()
    commands = run(whole, 10_000)
    for died_after in range(commands):
        model = Tended()
        run(model, died_after)
        settle(model)


def resized(shards: int, replicas: int) -> Callable[[Tended], None]:
    """Shards of another size, whose pods need another template for it."""
    revisions = dict.fromkeys(range(shards), "b")
    return want(shards=shards, replicas=replicas, max_bytes_each=(12 << 20) // shards, revisions=revisions)


ALONE = {
    "its pod": (1, 0, lambda model: model.replace(next(iter(model.pods))), 1.0),
    "its server": (1, 0, lambda model: model.restart(next(iter(model.pods))), 1.0),
    "three shards of it": (1, 0, resized(3, 0), 1 / 3),
    "three shards of it, with replicas": (1, 0, resized(3, 1), 0.0),
    "it of three shards": (3, 0, resized(1, 0), 1.0),
    "it of three shards with replicas": (3, 1, resized(1, 0), 0.0),
}
"""Shards and replicas, what happens to them, and the share of all slots whose values that costs."""


@pytest.mark.parametrize(("shards", "replicas", "event", "cost"), ALONE.values(), ids=ALONE)
def test_a_cluster_of_one_is_formed_again_and_gets_and_loses_shards_wherever_its_operator_dies(
    shards: int, replicas: int, event: Callable[[Tended], None], cost: float
) -> None:
    whole = formed(shards, replicas)
    event(whole)
    for died_after in range(run(whole, 10_000) + 1):
        model = formed(shards, replicas)
        event(model)
        run(model, died_after)
        settle(model)
        assert len(lost(model)) == SLOTS * cost, died_after


@pytest.mark.parametrize("event", ["a replica", "a primary", "two primaries", "all primaries", "a primary's server"])
def test_what_a_replica_has_is_not_lost(event: str) -> None:
    model = formed()
    EVENTS[event](model)
    settle(model)
    kept = {slot for node in model.nodes.values() for slot in node.keys}
    assert kept == set(range(SLOTS))
    assert not [taken for taken in model.steps if taken.lost]


def test_what_no_replica_has_is_told_as_lost() -> None:
    model = formed()
    EVENTS["a shard and a primary"](model)
    settle(model)
    told = {slot for taken in model.steps for first, last in taken.lost for slot in range(first, last + 1)}
    kept = {slot for node in model.nodes.values() for slot in node.keys}
    assert told == set(range(SLOTS)) - kept
    assert len(told) == SLOTS // 3


happenings = st.one_of(
    st.tuples(st.sampled_from(["replace", "restart", "freeze", "thaw", "again"]), st.integers(0, 1000)),
    st.tuples(st.just("operate"), st.integers(0, 8)),
    st.tuples(st.sampled_from(["gossip", "step", "write"]), st.just(0)),
)


def happen(model: Tended, what: str, number: int) -> None:
    uids = sorted(model.pods)
    uid = uids[number % len(uids)]
    match what:
        case "replace":
            model.replace(uid)
        case "restart":
            model.restart(uid)
        case "freeze":
            model.nodes[uid].frozen = True
        case "thaw":
            model.nodes[uid].frozen = False
        case "gossip":
            model.gossip()
        case "write":
            model.write()
        case "step":
            model.operate()
        case "operate":
            model.operate(number)
        case "again" if model.sent:
            # A deposed leader's command, or one that a thawed server had not read yet.
            try:
                model.tell(model.sent[number % len(model.sent)])
            except RefusedError:
                pass


@settings(max_examples=examples(200), suppress_health_check=[HealthCheck.too_slow])
@given(st.booleans(), st.lists(happenings, max_size=25))
def test_after_any_history_a_cluster_that_is_left_alone_becomes_whole(
    begins_formed: bool, history: list[tuple[str, int]]
) -> None:
    model = formed() if begins_formed else Tended()
    for what, number in history:
        happen(model, what, number)
    for node in model.nodes.values():
        node.frozen = False
    settle(model)
    sent = len(model.sent)
    settle(model)
    assert len(model.sent) == sent


@settings(max_examples=examples(60))
@given(st.lists(st.integers(0, 1000), max_size=8))
def test_commands_of_a_deposed_leader_lose_nothing(again: list[int]) -> None:
    model = formed()
    EVENTS["a primary"](model)
    settle(model)
    model.write()
    for number in again:
        happen(model, "again", number)
        model.gossip()
    settle(model)
    assert {slot for node in model.nodes.values() for slot in node.keys} == set(range(SLOTS))
    assert sum(count(taken.lost) for taken in model.steps if taken.reason is StepReason.SLOTS_LOST) == 0
