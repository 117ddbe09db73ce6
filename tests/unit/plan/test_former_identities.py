"""Former identities: kept for a rollback, then deleted once, whoever leads and wherever it dies."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from kvstrata.api.scalars import format_timestamp
from kvstrata.contract.receipt.facts import Amount
from kvstrata.model.erasure.facts import JobState
from kvstrata.model.reclaim import FormerCache, ReclaimReport
from kvstrata.plan.actions import EndReclaim, ReclaimFormer
from kvstrata.plan.kinds.model_rollback import FIRST_PAUSE_S, keyspaces_in_force
from tests.support.objects import NAMESPACE, cpu_tier, model, pod, policy, pool, redis_tier
from tests.support.renderer import FINGERPRINT
from tests.support.worlds import Killed, Simulation

WINDOW_S = 3600
OTHER = "2" * 16
OLD, NEW, NEWEST = "engine:1", "engine:2", "engine:3"
SOME = Amount(7, 700)


class Scene:
    """A model on a Redis tier, whose pods follow its template when they are told to."""

    def __init__(self, **spec: Any) -> None:
        self.simulation = Simulation(redis_tier(), policy("acme"), model(tiers=("shared",), **spec))
        self.simulation.come_to_rest()
        self.generation = 0
        self.roll()

    @property
    def identity(self) -> str:
        """The model's identity now."""
        return str(self.simulation.status("CachedModel", "tiny")["identity"])

    def former(self) -> dict[str, dict[str, Any]]:
        """What status says of former identities."""
        told = self.simulation.status("CachedModel", "tiny").get("formerIdentities") or []
        return {one["identity"]: one for one in told}

    def phases(self) -> dict[str, str]:
        """The phase of each."""
        return {name: one["phase"] for name, one in self.former().items()}

    def resolve(self, fingerprint: str) -> None:
        """Have the pod report this fingerprint."""
        name = f"pod-{self.generation}"
        self.simulation.fingerprints[name] = fingerprint
        self.simulation.ack(name)
        self.simulation.settle()

    @property
    def fingerprints(self) -> dict[str, int]:
        """The fingerprints in status, with how many pods have each."""
        return {row.fingerprint: row.pods for row in self.simulation.world.models["tiny"].status.fingerprints}

    def declare(self, image: str, **more: Any) -> str:
        """Give the model another image; return the identity that it has then."""
        self.simulation.edit("CachedModel", "tiny", engine={"image": image, "replicas": 1}, **more)
        self.simulation.come_to_rest()
        return self.identity

    def roll(self) -> None:
        """Have a pod of the newest template run, and those before it go."""
        before = list(self.simulation.world.pods.get("tiny") or {})
        self.generation += 1
        self.simulation.put(pod(f"pod-{self.generation}", identity=self.identity))
        for name in before:
            self.simulation.delete("Pod", name)
        self.simulation.come_to_rest()

    def replace(self, image: str) -> tuple[str, str]:
        """Roll another image out; return the identity before and after."""
        before, after = self.identity, self.declare(image)
        self.roll()
        assert before != after
        return before, after

    def asked(self) -> list[ReclaimFormer]:
        """What was asked for since the last call."""
        asked, self.simulation.reclaim_questions = self.simulation.reclaim_questions, []
        return asked

    def answer(self, asked: ReclaimFormer, state: JobState, message: str = "", deleted: Amount = SOME) -> None:
        """Let a round end."""
        report = ReclaimReport(asked.cache, state, self.simulation.now, message, deleted)
        self.simulation.store.domain(NAMESPACE).reclaims[(asked.cache.order, asked.round)] = report
        self.simulation.enqueue_all()
        self.simulation.settle()


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_a_replaced_identity_waits_for_its_pods_then_for_the_window_and_then_goes(scene: Scene) -> None:
    old = scene.identity
    scene.declare(NEW)
    assert scene.phases() == {old: "InUse"}
    assert scene.former()[old]["message"] == "pods of this model still have it"
    scene.roll()
    assert scene.phases() == {old: "Kept"}
    assert "a rollback finds it until 2026-" in scene.former()[old]["message"]
    scene.simulation.advance(WINDOW_S - 60)
    assert scene.phases() == {old: "Kept"}
    assert scene.asked() == []
    scene.simulation.advance(120)
    assert scene.phases() == {old: "Reclaiming"}
    (first, *again) = scene.asked()
    assert (first.cache.identity, first.cache.model, first.round) == (old, "tiny", 1)
    assert set(again) <= {first}, "it is the same order however often it is given"
    scene.answer(first, JobState.RUNNING, "its blocks are being deleted from CacheTier shared")
    assert "CacheTier shared" in scene.former()[old]["message"]
    scene.answer(first, JobState.DONE)
    assert scene.former() == {}
    told = scene.simulation.status("CachedModel", "tiny")["reclaimed"]
    assert (told["identity"], told["blocks"], told["bytes"]) == (old, SOME.keys, SOME.bytes)
    scene.simulation.advance(5)
    assert scene.simulation.ended_reclaims == [EndReclaim(first.cache)]
    scene.asked()
    scene.simulation.advance(2 * WINDOW_S)
    assert scene.asked() == []
    assert scene.simulation.unsettled() == {}


def test_a_fingerprint_that_no_pod_has_any_more_is_kept_for_the_window_and_then_goes(scene: Scene) -> None:
    old = f"{scene.identity}.{FINGERPRINT}"
    assert scene.phases() == {}
    scene.resolve(OTHER)
    assert (scene.phases(), scene.fingerprints) == ({old: "Kept"}, {OTHER: 1})
    scene.simulation.advance(WINDOW_S - 60)
    assert (scene.phases(), scene.asked()) == ({old: "Kept"}, [])
    scene.simulation.advance(120)
    first = scene.asked()[0]
    assert (first.cache.identity, first.round) == (old, 1)
    scene.answer(first, JobState.DONE)
    assert scene.former() == {}
    assert scene.simulation.status("CachedModel", "tiny")["reclaimed"]["identity"] == old
    scene.simulation.advance(2 * WINDOW_S)
    assert scene.asked() == []
    assert scene.simulation.unsettled() == {}


def test_files_that_are_back_within_the_window_find_their_blocks(scene: Scene) -> None:
    scene.resolve(OTHER)
    scene.simulation.advance(WINDOW_S - 60)
    scene.resolve(FINGERPRINT)
    assert scene.phases() == {f"{scene.identity}.{OTHER}": "Kept"}
    scene.simulation.advance(120)
    assert scene.asked() == []
    assert scene.fingerprints == {FINGERPRINT: 1}


def test_before_every_pod_has_reported_its_fingerprint_no_window_begins(scene: Scene) -> None:
    scene.resolve("")
    assert (scene.phases(), scene.fingerprints) == ({}, {FINGERPRINT: 0})
    scene.simulation.restart()
    scene.simulation.advance(2 * WINDOW_S)
    assert (scene.phases(), scene.fingerprints) == ({}, {FINGERPRINT: 0}), "a new leader still knows it"
    scene.resolve(OTHER)
    assert scene.phases() == {f"{scene.identity}.{FINGERPRINT}": "Kept"}


def test_former_fingerprints_go_with_their_declared_identity(scene: Scene) -> None:
    scene.resolve(OTHER)
    old, _ = scene.replace(NEW)
    assert scene.phases() == {old: "Kept"}
    scene.simulation.advance(WINDOW_S + 60)
    assert {one.cache.identity for one in scene.asked()} == {old}


def test_a_fingerprint_that_another_model_serves_under_the_same_identity_is_kept(scene: Scene) -> None:
    old = f"{scene.identity}.{FINGERPRINT}"
    scene.simulation.put(model("twin", tiers=("shared",)))
    scene.simulation.come_to_rest()
    scene.simulation.put(pod("twin-1", "twin", identity=scene.identity))
    scene.simulation.come_to_rest()
    scene.resolve(OTHER)
    assert scene.former()[old]["message"] == "CachedModel twin has it, too"
    scene.simulation.advance(2 * WINDOW_S)
    assert scene.asked() == []


def test_before_the_rollout_is_over_no_window_begins(scene: Scene) -> None:
    old = scene.identity
    scene.simulation.edit("CachedModel", "tiny", engine={"image": NEW, "replicas": 1})
    scene.simulation.advance(1)
    scene.simulation.put(pod("newer", identity=scene.identity, ready=False))
    scene.simulation.delete("Pod", "pod-1")
    scene.simulation.advance(2 * WINDOW_S)
    assert scene.phases() == {old: "InUse"}
    assert scene.former()[old]["message"] == "the rollout that replaces it is not over"
    assert scene.asked() == []


def test_a_rollback_within_the_window_has_its_identity_back_and_nothing_of_it_is_deleted(scene: Scene) -> None:
    old, new = scene.replace(NEW)
    scene.simulation.advance(WINDOW_S - 60)
    assert scene.declare(OLD) == old
    assert scene.phases() == {new: "InUse"}
    scene.roll()
    scene.simulation.advance(WINDOW_S - 60)
    assert scene.asked() == []
    scene.simulation.advance(120)
    assert {one.cache.identity for one in scene.asked()} == {new}
    assert scene.simulation.ended_reclaims == []


def test_a_rollback_after_the_window_ends_the_deletion_before_status_forgets_it(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, _ = scene.replace(NEW)
    scene.simulation.advance(WINDOW_S + 60)
    order = scene.asked()[0]
    scene.answer(order, JobState.RUNNING)
    told_at_the_end: list[bool] = []
    end = scene.simulation.end

    async def ended(namespace: str, what: EndReclaim) -> None:
        told_at_the_end.append(old in scene.former())
        await end(namespace, what)

    monkeypatch.setattr(scene.simulation, "end", ended)
    assert scene.declare(OLD) == old
    assert scene.simulation.ended_reclaims[0] == EndReclaim(order.cache)
    assert told_at_the_end[0] is True
    scene.roll()
    scene.asked()
    assert old not in scene.former()
    scene.replace(NEWEST)
    scene.simulation.advance(WINDOW_S + 60)
    later = [one for one in scene.asked() if one.cache.identity == old]
    assert later[0].cache.order != order.cache.order, "replaced again it is another deletion, with other Jobs"


def test_a_window_of_nothing_reclaims_at_the_end_of_the_rollout_and_not_before_status_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(rollbackWindow="0s")
    note = scene.simulation.ask

    def ask(namespace: str, question: ReclaimFormer) -> None:
        if isinstance(question, ReclaimFormer):
            told = scene.former()[question.cache.identity]
            assert told["unusedSince"] == format_timestamp(question.cache.since)
        note(namespace, question)

    monkeypatch.setattr(scene.simulation, "ask", ask)
    old, _ = scene.replace(NEW)
    scene.simulation.advance(10)
    assert scene.phases() == {old: "Reclaiming"}
    assert {one.cache.identity for one in scene.asked()} == {old}


def test_a_longer_window_takes_back_what_is_due(scene: Scene) -> None:
    old, _ = scene.replace(NEW)
    scene.simulation.advance(WINDOW_S + 60)
    order = scene.asked()[0]
    scene.simulation.edit("CachedModel", "tiny", rollbackWindow="48h")
    scene.simulation.come_to_rest()
    assert scene.phases() == {old: "Kept"}
    assert scene.simulation.ended_reclaims == [EndReclaim(order.cache)]


def test_an_identity_that_another_model_has_is_kept_for_as_long_as_it_does(scene: Scene) -> None:
    old = scene.identity
    scene.simulation.put(model("twin", tiers=("shared",), model={"name": "tiny", "source": {"path": "/opt/tiny"}}))
    scene.simulation.come_to_rest()
    assert scene.simulation.status("CachedModel", "twin")["identity"] == old
    scene.replace(NEW)
    scene.simulation.advance(WINDOW_S + 60)
    assert scene.phases() == {old: "InUse"}
    assert scene.former()[old]["message"] == "CachedModel twin has it, too"
    scene.simulation.delete("CachedModel", "twin")
    scene.simulation.advance(120)
    assert scene.phases() == {old: "Reclaiming"}
    assert {one.cache.identity for one in scene.asked()} == {old}


def test_a_round_that_fails_is_followed_by_another_after_a_while_and_counts_are_kept(scene: Scene) -> None:
    old, _ = scene.replace(NEW)
    scene.simulation.advance(WINDOW_S + 60)
    first = scene.asked()[0]
    scene.answer(first, JobState.FAILED, "CacheTier shared: ServerAway")
    assert scene.former()[old]["round"] == 2
    assert scene.former()[old]["message"] == "its deletion is tried again: CacheTier shared: ServerAway"
    scene.simulation.advance(FIRST_PAUSE_S / 2)
    assert scene.asked() == []
    scene.simulation.advance(FIRST_PAUSE_S)
    second = scene.asked()[0]
    assert (second.cache, second.round) == (first.cache, 2)
    scene.answer(second, JobState.DONE)
    assert scene.simulation.status("CachedModel", "tiny")["reclaimed"]["blocks"] == 2 * SOME.keys


def test_who_leads_next_goes_on_with_the_round_that_status_names(scene: Scene) -> None:
    scene.replace(NEW)
    scene.simulation.advance(WINDOW_S + 60)
    first = scene.asked()[0]
    scene.simulation.restart()
    scene.simulation.settle()
    assert scene.asked()[0] == first
    scene.answer(first, JobState.FAILED, "no")
    scene.simulation.restart()
    scene.simulation.settle()
    assert [(one.cache, one.round) for one in scene.asked()] == [(first.cache, 2)]


def test_an_operator_that_dies_between_deployment_and_status_loses_no_identity(scene: Scene) -> None:
    old = scene.identity

    def dies(verb: str, kind: str, name: str) -> None:
        if kind == "CachedModel":
            raise Killed

    scene.simulation.kube.before_write = dies
    scene.simulation.edit("CachedModel", "tiny", engine={"image": NEW, "replicas": 1})
    with pytest.raises(Killed):
        scene.simulation.settle()
    deployment = scene.simulation.kube.objects[("Deployment", NAMESPACE, "kvs-tiny")]
    between = deployment["spec"]["template"]["metadata"]["labels"]["kvstrata.io/identity"]
    assert between not in (old, scene.identity)
    scene.simulation.restart()
    scene.simulation.edit("CachedModel", "tiny", engine={"image": NEWEST, "replicas": 1})
    scene.simulation.come_to_rest()
    assert scene.former().keys() == {old, between}


def lives(kill: Callable[[Simulation], None]) -> tuple[dict[str, Any], set[tuple[str, int]]]:
    """Replace and reclaim under an operator that `kill` lets die once; return the end, and what was ordered."""
    scene = Scene()
    kill(scene.simulation)
    ordered: set[tuple[str, int]] = set()
    steps: list[Callable[[], object]] = [
        lambda: scene.simulation.edit("CachedModel", "tiny", engine={"image": NEW, "replicas": 1}),
        scene.simulation.come_to_rest,
        scene.roll,
        lambda: scene.simulation.advance(WINDOW_S + 60),
        lambda: [scene.answer(one, JobState.DONE) for one in list(scene.asked())[:1]],
        lambda: scene.simulation.advance(30),
    ]
    for number, step in enumerate(steps):
        try:
            step()
        except Killed:
            scene.simulation.restart()
            scene.simulation.come_to_rest()
            if number >= 3:  # time passes and Jobs end for whoever leads next, too
                step()
        ordered |= {(one.cache.identity, one.round) for one in scene.simulation.reclaim_questions}
    return scene.simulation.status("CachedModel", "tiny"), ordered


def test_wherever_it_dies_the_same_is_deleted_once() -> None:
    writes = 0

    def count(simulation: Simulation) -> None:
        def hook(verb: str, kind: str, name: str) -> None:
            nonlocal writes
            writes += 1

        simulation.kube.after_write = hook

    end, ordered = lives(count)
    assert len(ordered) == 1
    assert end["reclaimed"]["blocks"] == SOME.keys
    assert writes > 5
    for number in range(1, writes + 1):
        for after in (False, True):

            def kill(simulation: Simulation, number: int = number, after: bool = after) -> None:
                simulation.kill_at(number, after=after)

            other, others = lives(kill)
            where = f"killed {'after' if after else 'before'} write {number} of {writes}"
            assert others == ordered, where
            assert other.get("formerIdentities", []) == [], where
            assert other["reclaimed"]["identity"] == end["reclaimed"]["identity"], where


def test_without_a_redis_tier_nothing_waits() -> None:
    simulation = Simulation(cpu_tier(), model(tiers=("cpu",)))
    simulation.come_to_rest()
    simulation.edit("CachedModel", "tiny", engine={"image": NEW, "replicas": 1})
    simulation.come_to_rest()
    assert "formerIdentities" not in simulation.status("CachedModel", "tiny")
    assert simulation.reclaim_questions == []


def test_a_deletion_of_a_model_that_was_made_anew_is_ended(scene: Scene) -> None:
    gone = FormerCache("tiny", "another uid", "0" * 16, scene.simulation.now - timedelta(hours=2))
    report = ReclaimReport(gone, JobState.RUNNING, scene.simulation.now)
    scene.simulation.store.domain(NAMESPACE).reclaims[(gone.order, 1)] = report
    scene.simulation.enqueue_all()
    scene.simulation.settle()
    assert scene.simulation.ended_reclaims == [EndReclaim(gone)]


def test_every_keyspace_of_the_namespace_is_looked_through(scene: Scene) -> None:
    scene.simulation.put(policy("globex", suspend=True), pool("manual"))
    scene.simulation.come_to_rest()
    bundle = scene.simulation.bundle()
    found = keyspaces_in_force(scene.simulation.world.bundles.values())
    assert {entry.keyspace for entry in bundle.entries.values()} <= set(found)
    assert scene.simulation.entry("globex").suspended
    assert bundle.pool_keyspaces <= set(found)
    assert len(found) == len(set(found)) == 2 + len(bundle.pool_keyspaces)
