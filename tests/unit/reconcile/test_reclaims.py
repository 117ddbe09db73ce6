"""Deletions of former caches: Jobs that are found or made, one tier after the other, and what they come to."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from kvstrata.clients.kube import KubeError, NotLeadingError
from kvstrata.contract.messages.erase_report import Erased
from kvstrata.contract.receipt.facts import Amount
from kvstrata.model.erasure.facts import JobState
from kvstrata.model.reclaim import FormerCache, ReclaimReport
from kvstrata.model.refs import Key
from kvstrata.objects.erasure.delete_job import TierDeletion
from kvstrata.plan.actions import EndReclaim, ReclaimFormer
from kvstrata.plan.erasure.deletions import DeletionRun
from kvstrata.plan.kinds.model_rollback import keyspaces_in_force
from kvstrata.reconcile import metrics
from kvstrata.reconcile.erasure import former_identities as reclaims
from kvstrata.reconcile.erasure.former_identities import JOBS_OF_A_ROUND, Reclaims
from tests.support.objects import NAMESPACE, cpu_tier, model, policy, redis_tier
from tests.support.worlds import Simulation

IDENTITY = "0" * 16
SOME, NOTHING = Amount(3, 300), Amount(0, 0)
LINES = (Erased(None, "node-1", SOME, SOME, NOTHING), Erased(None, "node-2", SOME, SOME, NOTHING))
DONE = DeletionRun("job", JobState.DONE, lines=LINES)
RUNNING = DeletionRun("job", JobState.RUNNING)


class FakeJobs:
    """Jobs whose ends a test decides: `ends` gives by tier what each look finds, the last for ever."""

    def __init__(self) -> None:
        self.made: list[TierDeletion] = []
        self.removed: list[str] = []
        self.there: dict[tuple[str, str, int], list[DeletionRun]] = {}
        self.ends: dict[str, list[DeletionRun]] = {}
        self.refusals: list[Exception] = []

    async def start(self, order: TierDeletion) -> DeletionRun:
        runs = self.there.get((order.erasure, order.tier.name, order.round))
        if runs is not None and runs[0].begun:
            return runs.pop(0) if len(runs) > 1 else runs[0]
        if self.refusals:
            raise self.refusals.pop(0)
        self.made.append(order)
        self.there[(order.erasure, order.tier.name, order.round)] = list(self.ends.get(order.tier.name, [DONE]))
        return RUNNING

    async def remove(self, erasure: str) -> None:
        self.removed.append(erasure)


class Scene:
    """A namespace with two Redis tiers and one in memory, whose former caches are deleted by `FakeJobs`."""

    def __init__(self) -> None:
        tiers = (cpu_tier(), redis_tier("shared"), redis_tier("archive"))
        self.simulation = Simulation(*tiers, policy("acme"), model(tiers=("cpu", "shared", "archive")))
        self.simulation.come_to_rest()
        self.jobs, self.slept = FakeJobs(), list[float]()
        self.simulation.queue._due.clear()
        self.reclaims = Reclaims(
            self.simulation.store, self.simulation.queue, self.jobs, lambda: self.simulation.now, self._sleep
        )
        self.cache = FormerCache("tiny", self.model.uid, IDENTITY, self.simulation.now - timedelta(hours=1))

    async def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await asyncio.sleep(0)

    @property
    def model(self) -> Any:
        return self.simulation.world.models["tiny"]

    def ask(self, turn: int = 1) -> None:
        self.reclaims.ask(NAMESPACE, ReclaimFormer(self.cache, turn))

    async def over(self) -> None:
        async with asyncio.timeout(30):
            while self.reclaims._tasks:  # noqa: ASYNC110
                await asyncio.sleep(0)

    def report(self, turn: int = 1) -> ReclaimReport | None:
        return self.simulation.store.domain(NAMESPACE).reclaims.get((self.cache.order, turn))


@pytest.fixture
def scene() -> Scene:
    return Scene()


async def test_every_redis_tier_gets_a_job_for_the_identity_alone_one_after_the_other(scene: Scene) -> None:
    scene.jobs.ends["archive"] = [RUNNING, RUNNING, DONE]
    scene.ask()
    scene.ask()
    await scene.over()
    assert [order.tier.name for order in scene.jobs.made] == ["archive", "shared"]
    bundles = scene.simulation.world.bundles.values()
    for order in scene.jobs.made:
        assert (order.identities, order.strays, order.round) == ((IDENTITY,), (), 1)
        assert order.keyspaces == keyspaces_in_force(bundles) != ()
        assert order.domain == scene.simulation.world.domain_id
    report = scene.report()
    assert report is not None
    assert (report.state, report.deleted) == (JobState.DONE, Amount(4 * SOME.keys, 4 * SOME.bytes))
    assert Key("CachedModel", NAMESPACE, "tiny") in scene.simulation.queue._due


async def test_a_job_that_another_leader_began_is_waited_for_and_made_no_second_time(scene: Scene) -> None:
    for tier in ("archive", "shared"):
        scene.jobs.there[(scene.cache.order, tier, 1)] = [RUNNING, DONE]
    scene.ask()
    await scene.over()
    assert scene.jobs.made == []
    assert scene.report() is not None
    assert scene.report().state is JobState.DONE  # type: ignore[union-attr]


async def test_a_job_that_another_leader_left_before_it_began_is_begun(scene: Scene) -> None:
    left = DeletionRun("job", JobState.RUNNING, begun=False)
    scene.jobs.there[(scene.cache.order, "archive", 1)] = [left]
    scene.ask()
    await scene.over()
    assert [order.tier.name for order in scene.jobs.made] == ["archive", "shared"]


async def test_a_tier_that_fails_ends_the_round_and_says_which(scene: Scene) -> None:
    scene.jobs.ends["archive"] = [DeletionRun("job", JobState.FAILED, lines=LINES[:1], problem="ServerAway: no")]
    scene.ask()
    await scene.over()
    report = scene.report()
    assert report is not None
    assert (report.state, report.message) == (JobState.FAILED, "CacheTier archive: ServerAway: no")
    assert report.deleted == SOME, "what it told until then counts"
    assert [order.tier.name for order in scene.jobs.made] == ["archive"]
    scene.jobs.ends.clear()
    scene.ask(2)
    await scene.over()
    assert [order.round for order in scene.jobs.made[1:]] == [JOBS_OF_A_ROUND + 1] * 2, "Jobs of its own"
    assert scene.report(1) is None


@pytest.mark.parametrize("refusal", [LookupError("Secret x does not exist"), ValueError("too many")])
async def test_what_a_job_lacks_is_said_and_tried_in_another_round(scene: Scene, refusal: Exception) -> None:
    scene.jobs.refusals = [refusal]
    scene.ask()
    await scene.over()
    report = scene.report()
    assert report is not None
    assert (report.state, report.message) == (JobState.FAILED, f"CacheTier archive: {refusal}")


async def test_an_api_server_that_is_away_is_waited_for_within_the_round(scene: Scene) -> None:
    scene.jobs.refusals = [KubeError(503, "Unavailable", "no"), KubeError(429, "TooMany", "later", 40.0)]
    scene.ask()
    await scene.over()
    assert scene.report() is not None
    assert scene.report().state is JobState.DONE  # type: ignore[union-attr]
    assert 40.0 in scene.slept


async def test_one_that_leads_no_more_writes_nothing_and_knows_of_no_end(scene: Scene) -> None:
    scene.jobs.refusals = [NotLeadingError("no")]
    scene.ask()
    await scene.over()
    assert scene.jobs.made == []
    assert scene.report() is None or scene.report().state is JobState.RUNNING  # type: ignore[union-attr]


async def test_what_is_ended_is_deleted_no_further_and_forgotten(scene: Scene) -> None:
    scene.jobs.ends["archive"] = [RUNNING]
    scene.ask()
    async with asyncio.timeout(30):
        while not scene.slept:  # noqa: ASYNC110
            await asyncio.sleep(0)
    await scene.reclaims.end(NAMESPACE, EndReclaim(scene.cache))
    assert scene.jobs.removed == [scene.cache.order]
    assert scene.reclaims._tasks == {}
    assert scene.report() is None
    assert [order.tier.name for order in scene.jobs.made] == ["archive"]


async def test_of_a_model_that_is_gone_nothing_more_is_deleted(scene: Scene) -> None:
    scene.jobs.ends["archive"] = [RUNNING]
    scene.ask()
    async with asyncio.timeout(30):
        while not scene.slept:  # noqa: ASYNC110
            await asyncio.sleep(0)
    scene.simulation.delete("CachedModel", "tiny")
    scene.simulation.settle()
    await scene.over()
    assert [order.tier.name for order in scene.jobs.made] == ["archive"]
    metrics.RECLAIMS.labels(NAMESPACE, "tiny", "failed").inc()
    scene.reclaims.show(NAMESPACE, "tiny")
    assert scene.report() is None
    labels = [one.labels for family in metrics.RECLAIMS.collect() for one in family.samples]
    assert "tiny" not in [one["model"] for one in labels if one["namespace"] == NAMESPACE]


async def test_thousands_of_keyspaces_are_several_jobs(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    for tenant in ("globex", "initech"):
        scene.simulation.put(policy(tenant))
    scene.simulation.come_to_rest()
    monkeypatch.setattr(reclaims, "KEYSPACES_OF_A_JOB", 2)
    scene.ask()
    await scene.over()
    made = [order for order in scene.jobs.made if order.tier.name == "shared"]
    assert [order.round for order in made] == [1, 2]
    everything = tuple(keyspace for order in made for keyspace in order.keyspaces)
    assert everything == keyspaces_in_force(scene.simulation.world.bundles.values())
    assert len(everything) == 3


async def test_the_metric_of_what_waits_goes_with_it(scene: Scene) -> None:
    def shown() -> list[float]:
        samples = next(iter(metrics.FORMER_IDENTITIES.collect())).samples
        return [one.value for one in samples if one.labels == {"namespace": NAMESPACE, "model": "tiny"}]

    models, without = scene.simulation.store.domain(NAMESPACE).models, scene.model
    status = without.status.model_copy(update={"former_identities": ("one", "another")})
    models["tiny"] = without.model_copy(update={"status": status})
    scene.reclaims.show(NAMESPACE, "tiny")
    assert shown() == [2.0]
    models["tiny"] = without
    scene.reclaims.show(NAMESPACE, "tiny")
    scene.reclaims.show(NAMESPACE, "tiny")
    assert shown() == []
