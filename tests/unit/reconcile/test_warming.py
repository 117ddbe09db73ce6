"""Questions for prefix pools: ConfigMaps and pods are asked once at a time, and answers are believed or not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from kvstrata.clients.gate import GateError, GateFailure
from kvstrata.clients.kube import KubeError, TokenIdentity
from kvstrata.contract.messages.pools import (
    PoolReport,
    PoolTierState,
    PoolVersionState,
    Rendered,
    Warmed,
    WarmOutcome,
    WarmRequest,
)
from kvstrata.contract.messages.prefix import PrefixSource
from kvstrata.model.pools import PodAnswer
from kvstrata.model.refs import Key
from kvstrata.plan.actions import InspectPool, ReadSource, RenderPool, WarmPool
from kvstrata.reconcile import pools as module
from kvstrata.reconcile.pools import Warming
from tests.support.objects import NAMESPACE, config_map, cpu_tier, model, pod, pool
from tests.support.pool_answers import PoolQuestion
from tests.support.worlds import Simulation

ONE, TWO = PrefixSource(text="one"), PrefixSource(text="two")
MADE = Rendered("g", "c", "r", 16, 16, 16, 64, bytes(32))
WHERE = ReadSource("sources", "text")
HELD = PoolReport("g", "c", (PoolVersionState("0" * 12, "m", True, (PoolTierState("cpu", 1, 2, 3),)),))
POOL = Key("PrefixPool", NAMESPACE, "manual")


class Gates:
    """Pods that answer as they are told."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.outcome = WarmOutcome.STORED
        self.answers: Callable[[], Rendered] = lambda: MADE
        self.open = asyncio.Event()
        self.open.set()

    async def render(self, pod_ip: str, server_name: str, prefix: PrefixSource) -> tuple[Rendered, str]:
        self.asked.append(f"{pod_ip} {server_name} {prefix.text}")
        await self.open.wait()
        return self.answers(), "token"

    async def warm(self, pod_ip: str, server_name: str, request: WarmRequest, timeout_s: float) -> tuple[Warmed, str]:
        self.asked.append(f"{request.pool_uid} {request.scope} {request.manifest} {request.prefix.text} {timeout_s}")
        await self.open.wait()
        self.answers()
        return Warmed("g", "c", self.outcome), "token"

    async def pool(self, pod_ip: str, server_name: str, uid: str) -> tuple[PoolReport, str]:
        self.asked.append(uid)
        self.answers()
        return HELD, "token"


class Scene:
    """A simulation whose questions are asked for real."""

    def __init__(self) -> None:
        prefixes = [{"name": "p", "configMapKeyRef": {"name": "sources", "key": "text"}}]
        self.simulation = Simulation(cpu_tier(), model(tiers=("cpu",)), pod("pod-0"), pool("manual", prefixes=prefixes))
        self.simulation.settle()
        self.simulation.store.domain(NAMESPACE).sources.clear()
        self.gates = Gates()
        self.bound_to = self.pod.uid
        self.simulation.kube.review_token = self._review  # type: ignore[method-assign]
        self.warming = Warming(self.simulation.kube, self.gates, self.simulation.store, self.simulation.queue)  # type: ignore[arg-type]

    @property
    def pod(self):  # type: ignore[no-untyped-def]
        return self.simulation.pod("pod-0")

    async def _review(self, token: str, audience: str) -> TokenIdentity:
        assert (token, audience) == ("token", "kvstrata-ack")
        return TokenIdentity(f"system:serviceaccount:{NAMESPACE}:kvs-tiny", self.bound_to)

    async def asked(self, *questions: PoolQuestion) -> None:
        for question in questions:
            self.ask(question)
        await self.over()

    def ask(self, question: PoolQuestion) -> None:
        match question:
            case ReadSource():
                self.warming.read(NAMESPACE, question)
            case RenderPool():
                self.warming.render(NAMESPACE, question)
            case WarmPool():
                self.warming.warm(NAMESPACE, question)
            case InspectPool():
                self.warming.inspect(NAMESPACE, question)

    async def over(self) -> None:
        async with asyncio.timeout(60):
            while self.warming._tasks:  # noqa: ASYNC110
                await asyncio.sleep(0)

    def reports(self) -> dict[str, PodAnswer[Rendered]]:
        return self.simulation.store.domain(NAMESPACE).renders[self.pod.uid]

    def due(self) -> bool:
        return POOL in self.simulation.queue._due


async def test_what_a_pod_makes_of_a_prefix_is_a_fact_and_its_pool_is_planned_again() -> None:
    scene = Scene()
    await scene.asked(RenderPool("manual", scene.pod, (ONE, TWO)))
    assert {digest: report.answer for digest, report in scene.reports().items()} == {
        ONE.digest: MADE,
        TWO.digest: MADE,
    }
    assert scene.gates.asked == [f"127.0.0.9 gate.tiny.{NAMESPACE}.kvstrata.internal {text}" for text in ("one", "two")]
    assert scene.due()


async def test_a_question_that_is_being_asked_is_not_asked_beside_it() -> None:
    scene = Scene()
    scene.gates.open.clear()
    for _ in range(3):
        scene.ask(RenderPool("manual", scene.pod, (ONE,)))
        await asyncio.sleep(0)
    scene.gates.open.set()
    await scene.over()
    assert len(scene.gates.asked) == 1
    await scene.asked(RenderPool("manual", scene.pod, (ONE,)))
    assert len(scene.gates.asked) == 2


@pytest.mark.parametrize("error", [GateError(GateFailure.REFUSED, ""), GateError(GateFailure.TIMEOUT, "")])
async def test_a_pod_that_does_not_answer_has_made_nothing(error: GateError) -> None:
    scene = Scene()

    def fail() -> Rendered:
        raise error

    scene.gates.answers = fail
    await scene.asked(RenderPool("manual", scene.pod, (ONE,)))
    assert scene.reports()[ONE.digest].answer is None


async def test_an_answer_with_the_token_of_another_pod_is_not_believed() -> None:
    scene = Scene()
    scene.bound_to = "another-pod"
    await scene.asked(RenderPool("manual", scene.pod, (ONE,)))
    assert scene.reports()[ONE.digest].answer is None


async def test_an_answer_of_a_pod_that_went_meanwhile_is_dropped() -> None:
    scene = Scene()
    scene.gates.open.clear()
    uid = scene.pod.uid
    scene.ask(RenderPool("manual", scene.pod, (ONE,)))
    await asyncio.sleep(0)
    scene.simulation.delete("Pod", "pod-0")
    scene.gates.open.set()
    await scene.over()
    assert not scene.simulation.world.renders.get(uid)


async def test_pods_that_name_the_same_chunks_share_the_names_in_memory() -> None:
    scene = Scene()
    scene.simulation.put(pod("pod-1"))
    scene.gates.answers = lambda: replace(MADE, hashes=bytes(bytearray(32)))
    other = scene.simulation.pod("pod-1")
    for one in (scene.pod, other):
        scene.bound_to = one.uid
        scene.warming._tokens._known.clear()
        await scene.asked(RenderPool("manual", one, (ONE,)))
    first, second = (scene.simulation.world.renders[uid][ONE.digest].answer for uid in (scene.pod.uid, other.uid))
    assert first is not None
    assert second is not None
    assert first.hashes is second.hashes


async def test_what_nobody_asked_for_in_a_long_time_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene()
    await scene.asked(RenderPool("manual", scene.pod, (ONE,)))
    later = module.utc_now() + module.FORGET_AFTER * 2
    monkeypatch.setattr(module, "utc_now", lambda: later)
    await scene.asked(RenderPool("manual", scene.pod, (TWO,)))
    assert set(scene.reports()) == {TWO.digest}


async def test_the_text_of_a_config_map_is_a_fact_and_what_is_missing_is_named() -> None:
    scene = Scene()
    sources = scene.simulation.store.domain(NAMESPACE).sources
    await scene.asked(WHERE)
    assert "does not exist" in sources["sources", "text"].problem
    scene.simulation.kube.put(config_map("sources", other="x"))
    await scene.asked(WHERE)
    assert "no key text" in sources["sources", "text"].problem
    scene.simulation.kube.put(config_map("sources", text="hello"))
    await scene.asked(WHERE)
    assert (sources["sources", "text"].text, sources["sources", "text"].problem) == ("hello", "")
    assert "hello" not in repr(sources)


async def test_what_no_pool_names_any_more_is_forgotten() -> None:
    scene = Scene()
    await scene.asked(ReadSource("other", "key"))
    assert scene.simulation.store.domain(NAMESPACE).sources == {}


async def test_a_config_map_that_cannot_be_read_now_is_no_fact_and_is_asked_for_later() -> None:
    scene = Scene()

    async def fail(*_: object) -> None:
        raise KubeError(500, "InternalError", "no")

    scene.simulation.kube.get = fail  # type: ignore[method-assign, assignment]
    await scene.asked(WHERE)
    assert scene.simulation.store.domain(NAMESPACE).sources == {}
    assert scene.due()


async def test_a_question_that_fails_in_a_way_of_its_own_is_told_and_asked_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scene = Scene()
    scene.simulation.queue._due.clear()

    def answer() -> Rendered:
        raise RuntimeError("nobody thought of it")

    scene.gates.answers = answer
    for question in (RenderPool("manual", scene.pod, (ONE,)), warm(scene), InspectPool("manual", "uid", scene.pod)):
        await scene.asked(question)
        assert scene.due()
        scene.simulation.queue._due.clear()
    assert [record.getMessage() for record in caplog.records] == [
        "a question for a pool failed, and is asked again"
    ] * 3


async def test_who_leads_no_more_ends_its_questions() -> None:
    scene = Scene()
    scene.gates.open.clear()
    async with scene.warming:
        scene.ask(RenderPool("manual", scene.pod, (ONE,)))
        await asyncio.sleep(0)
    await scene.over()
    assert not scene.reports()


def warm(scene: Scene) -> WarmPool:
    return WarmPool("manual", "uid", scene.pod, "0" * 12, "m", (ONE, TWO), 60.0)


async def test_prefixes_are_warmed_one_after_the_other_and_what_became_of_each_is_a_fact() -> None:
    scene = Scene()
    await scene.asked(warm(scene))
    assert scene.gates.asked == [*(f"uid {'0' * 12} m {text} 60.0" for text in ("one", "two")), "uid"]
    warmed = scene.simulation.world.warmed[scene.pod.uid]
    assert {name: report.outcome for name, report in warmed.items()} == {
        ("0" * 12, ONE.digest): WarmOutcome.STORED,
        ("0" * 12, TWO.digest): WarmOutcome.STORED,
    }
    assert scene.due()


@pytest.mark.parametrize("outcome", [WarmOutcome.DISAGREE, WarmOutcome.STALE, WarmOutcome.NO_VERSION])
async def test_a_pod_that_cannot_warm_one_prefix_is_not_asked_for_the_next(outcome: WarmOutcome) -> None:
    scene = Scene()
    scene.gates.outcome = outcome
    await scene.asked(warm(scene))
    assert scene.gates.asked == [f"uid {'0' * 12} m one 60.0", "uid"], "what it holds is asked all the same"
    assert scene.simulation.world.warmed[scene.pod.uid]["0" * 12, ONE.digest].outcome is outcome


async def test_failures_in_a_row_are_counted_until_one_attempt_succeeds() -> None:
    scene = Scene()
    counts = []
    for outcome in (WarmOutcome.ENGINE, WarmOutcome.INCOMPLETE, WarmOutcome.STORED):
        scene.gates.outcome = outcome
        await scene.asked(warm(scene))
        counts.append(scene.simulation.world.warmed[scene.pod.uid]["0" * 12, ONE.digest].failures)
    assert counts == [1, 2, 0]


async def test_pods_of_a_model_compute_as_many_prefixes_at_once_as_a_pool_allows() -> None:
    scene = Scene()
    scene.gates.open.clear()
    one, other = warm(scene), replace(warm(scene), pool="other", pool_uid="other")
    scene.ask(one)
    await asyncio.sleep(0)
    scene.ask(other)
    await asyncio.sleep(0)
    assert [asked.split()[0] for asked in scene.gates.asked] == ["uid"]
    scene.ask(replace(other, at_once=2))
    await asyncio.sleep(0)
    assert [asked.split()[0] for asked in scene.gates.asked] == ["uid", "other"]
    scene.gates.open.set()
    await scene.over()


async def test_what_a_pods_tiers_hold_is_a_fact_and_silence_is_one_too() -> None:
    scene = Scene()
    question = InspectPool("manual", "uid", scene.pod)
    await scene.asked(question)
    assert scene.simulation.world.holdings[scene.pod.uid]["uid"].answer == HELD

    def fail() -> Rendered:
        raise GateError(GateFailure.TIMEOUT, "")

    scene.gates.answers = fail
    await scene.asked(question, warm(scene))
    assert scene.simulation.world.holdings[scene.pod.uid]["uid"].answer is None
    assert scene.simulation.world.warmed[scene.pod.uid]["0" * 12, ONE.digest].outcome is None


async def test_warm_ups_and_holdings_of_another_pods_token_are_not_believed() -> None:
    scene = Scene()
    scene.bound_to = "another-pod"
    await scene.asked(warm(scene), InspectPool("manual", "uid", scene.pod))
    assert scene.simulation.world.warmed[scene.pod.uid]["0" * 12, ONE.digest].outcome is None
    assert scene.simulation.world.holdings[scene.pod.uid]["uid"].answer is None
