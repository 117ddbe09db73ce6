"""Probes of isolation: each pod once at a time, a few at once, believed only by their tokens, told when they fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from kvstrata.clients.gate import GateError, GateFailure
from kvstrata.clients.kube import TokenIdentity
from kvstrata.contract.messages.probe import Probed, ProbedTier, ProbeOutcome, ProbeRequest
from kvstrata.model.probe import ProbeReport
from kvstrata.model.refs import Key
from kvstrata.plan.actions import ProbePod
from kvstrata.reconcile import metrics
from kvstrata.reconcile.probe import AT_ONCE, EVENT, Probing
from tests.support.objects import NAMESPACE, cpu_tier, model, pod
from tests.support.worlds import Simulation

ROW = ProbedTier("cpu", "CPU", 2, 2, 3, 0, 0, 1, 0)
GOOD = Probed("g", "c", 1, 1, ProbeOutcome.ISOLATED, 2, 1, (ROW,))
BAD = Probed(
    "g", "c", 1, 1, ProbeOutcome.FOREIGN_HIT, 2, 1, (ProbedTier("cpu", "CPU", 2, 2, 3, 1),), ("Tenant/a", "Tenant/b")
)  # fmt: skip
PODS = tuple(f"pod-{number}" for number in range(6))


class Gates:
    """Pods that answer as they are told."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ProbeRequest]] = []
        self.under_way = self.most = 0
        self.answer: Callable[[], Probed] = lambda: GOOD
        self.open = asyncio.Event()
        self.open.set()

    async def probe(self, pod_ip: str, server_name: str, request: ProbeRequest) -> tuple[Probed, str]:
        self.asked.append((server_name, request))
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await self.open.wait()
        self.under_way -= 1
        return self.answer(), "token"


class Scene:
    """A simulation whose pods are probed for real."""

    def __init__(self, leading: bool = True) -> None:
        self.simulation = Simulation(cpu_tier(), model(tiers=("cpu",)), *(pod(name) for name in PODS))
        self.simulation.settle()
        self.gates, self.bound_to = Gates(), self.pod().uid
        kube: Any = self.simulation.kube
        kube.review_token = self._review
        gates: Any = self.gates
        self.probing = Probing(kube, gates, self.simulation.store, self.simulation.queue, lambda: leading)

    def pod(self, name: str = "pod-0") -> Any:
        return self.simulation.pod(name)

    async def _review(self, token: str, audience: str) -> TokenIdentity:
        assert (token, audience) == ("token", "kvstrata-ack")
        return TokenIdentity(f"system:serviceaccount:{NAMESPACE}:kvs-tiny", self.bound_to)

    def ask(self, name: str = "pod-0") -> None:
        self.probing.probe(NAMESPACE, ProbePod("tiny", self.pod(name), 7, "digest", 8))

    async def over(self) -> None:
        async with asyncio.timeout(60):
            while self.probing._tasks:  # noqa: ASYNC110
                await asyncio.sleep(0)

    def report(self) -> ProbeReport | None:
        return self.simulation.store.domain(NAMESPACE).probes.get(self.pod().uid)

    def events(self) -> list[dict[str, Any]]:
        return [one for (kind, *_), one in self.simulation.kube.objects.items() if kind == "Event"]


async def test_what_a_pod_found_is_a_fact_and_its_model_is_planned_again() -> None:
    scene = Scene()
    scene.simulation.queue._due.clear()
    scene.ask()
    await scene.over()
    report = scene.report()
    assert report is not None
    assert report.shown is not None
    assert (report.shown.probed, report.shown.keyspaces) == (GOOD, "digest")
    assert scene.gates.asked == [(f"gate.tiny.{NAMESPACE}.kvstrata.internal", ProbeRequest(7, 8))]
    assert Key("CachedModel", NAMESPACE, "tiny") in scene.simulation.queue._due
    assert scene.events() == []


async def test_a_pod_is_asked_once_at_a_time_and_a_few_pods_at_once() -> None:
    scene = Scene()
    scene.gates.open.clear()
    for _ in range(2):
        for name in PODS:
            scene.ask(name)
            await asyncio.sleep(0)
    scene.gates.open.set()
    await scene.over()
    assert (len(scene.gates.asked), scene.gates.most) == (len(PODS), AT_ONCE)


@pytest.mark.parametrize("error", [GateError(GateFailure.TIMEOUT, ""), GateError(GateFailure.MALFORMED, "")])
async def test_a_pod_that_does_not_answer_shows_nothing_and_takes_nothing_back(error: GateError) -> None:
    scene = Scene()
    scene.ask()
    await scene.over()

    def fail() -> Probed:
        raise error

    scene.gates.answer = fail
    scene.ask()
    await scene.over()
    report = scene.report()
    assert report is not None
    assert report.passing
    assert report.shown is not None
    assert report.shown.probed == GOOD


async def test_another_pods_token_is_not_believed() -> None:
    scene = Scene()
    scene.bound_to = "another pod's uid"
    scene.ask()
    await scene.over()
    report = scene.report()
    assert report is not None
    assert (report.shown, report.passing) == (None, True)


async def test_what_a_pod_found_that_went_meanwhile_is_no_fact() -> None:
    scene = Scene()
    question = ProbePod("tiny", scene.pod(), 7, "digest", 8)
    scene.gates.open.clear()
    scene.probing.probe(NAMESPACE, question)
    await asyncio.sleep(0)
    scene.simulation.delete("Pod", "pod-0")
    scene.gates.open.set()
    await scene.over()
    assert scene.simulation.store.domain(NAMESPACE).probes == {}


@pytest.mark.parametrize("leading", [True, False])
async def test_a_failure_is_an_event_that_only_the_leader_tells(leading: bool) -> None:
    scene = Scene(leading)
    scene.gates.answer = lambda: BAD
    scene.ask()
    await scene.over()
    told = [(one["type"], one["reason"], one["involvedObject"]["name"]) for one in scene.events()]
    assert told == ([("Warning", EVENT, "tiny")] if leading else [])
    if leading:
        assert "blocks of Tenant/a were found for Tenant/b in cpu" in scene.events()[0]["message"]
    report = scene.report()
    assert report is not None
    assert report.shown is not None


async def test_a_failure_that_status_tells_of_is_no_second_event() -> None:
    scene = Scene()
    scene.gates.answer = lambda: BAD
    for _ in range(3):
        scene.ask()
        await scene.over()
        scene.simulation.come_to_rest()
    assert len(scene.events()) == 1


async def test_a_failure_that_stands_is_shown_by_a_metric_until_its_model_is_gone() -> None:
    def shown() -> list[float]:
        (family,) = metrics.ISOLATION_BROKEN.collect()
        return [one.value for one in family.samples if one.labels == {"namespace": NAMESPACE, "model": "tiny"}]

    scene = Scene()
    scene.probing.show(NAMESPACE, "tiny")
    assert shown() == []
    scene.gates.answer = lambda: BAD
    scene.ask()
    await scene.over()
    scene.simulation.come_to_rest()
    scene.probing.show(NAMESPACE, "tiny")
    assert shown() == [1.0]
    scene.simulation.delete("CachedModel", "tiny")
    scene.simulation.settle()
    scene.probing.show(NAMESPACE, "tiny")
    assert shown() == []
