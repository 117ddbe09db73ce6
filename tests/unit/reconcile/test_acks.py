"""Acknowledgements: only a pod's own token makes its word count."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from kvstrata.clients.gate import GateClient, GateError, GateFailure
from kvstrata.clients.kube import KubeError, TokenIdentity
from kvstrata.clients.resources import Resource
from kvstrata.contract.messages.audit import Action
from kvstrata.contract.messages.pod_state import PodState
from kvstrata.model.pods import Pod
from kvstrata.plan.witnesses import ended_pods
from kvstrata.reconcile.pod_states import NODES_EVERY_S, NODES_REFUSED_S, AckListener
from tests.support.audit import lines
from tests.support.objects import NAMESPACE, model, pod
from tests.support.virtual_time import in_virtual_time
from tests.support.worlds import Simulation

ACCOUNT = f"system:serviceaccount:{NAMESPACE}:kvs-tiny"
OWN, FOREIGN, OTHER_ACCOUNT, INVALID = "own", "foreign", "other-account", "invalid"


class OneGate(GateClient):
    """Stands in for a gate: answers what a test says, then is silent as a long poll is."""

    def __init__(self, answer: tuple[PodState, str] | GateError) -> None:
        self.answer = answer
        self.asked: list[tuple[str, str, int, float]] = []

    async def state(self, host: str, server_name: str, after: int, wait_s: float) -> tuple[PodState, str]:
        """Answer at once the first time, and never again."""
        self.asked.append((host, server_name, after, wait_s))
        if isinstance(self.answer, GateError):
            raise self.answer
        if len(self.asked) > 1:
            await asyncio.sleep(3600)
        return self.answer


def world() -> tuple[Simulation, Pod]:
    simulation = Simulation(model(), pod("pod-0"))
    simulation.settle()
    serving = simulation.pod("pod-0")
    simulation.kube.tokens = {
        OWN: TokenIdentity(ACCOUNT, serving.uid),
        FOREIGN: TokenIdentity(ACCOUNT, "another-pod"),
        OTHER_ACCOUNT: TokenIdentity(f"system:serviceaccount:{NAMESPACE}:default", serving.uid),
    }
    return simulation, serving


def state_of(serving: Pod) -> PodState:
    return PodState(
        pod=serving.name, pod_uid=serving.uid, namespace=NAMESPACE, model=serving.model, identity="", gate_boot="g",
        cache_boot="c", term=1, acked=7, seen=7, fresh=True, fresh_age_ms=0, engine_ready=True,
    )  # fmt: skip


async def heard(simulation: Simulation, gate: OneGate) -> int:
    """The revision that the operator believes after listening for a moment."""
    listener = AckListener(simulation.kube, gate, simulation.store, simulation.queue, jitter=lambda: 0.0)
    listening = asyncio.create_task(listener.run())
    await asyncio.sleep(0.05)
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)
    return simulation.world.acked_revision(simulation.pod("pod-0"))


@in_virtual_time
async def test_a_pods_word_with_its_own_token_counts() -> None:
    simulation, serving = world()
    gate = OneGate((state_of(serving), OWN))
    assert await heard(simulation, gate) == 7
    host, server_name, after, wait_s = gate.asked[0]
    assert (host, server_name) == ("127.0.0.9", f"gate.tiny.{NAMESPACE}.kvstrata.internal")
    assert (after, wait_s) == (0, 0.0)
    assert gate.asked[1][2] == 7
    assert gate.asked[1][3] > 0


@pytest.mark.parametrize("token", [FOREIGN, OTHER_ACCOUNT, INVALID, ""])
@in_virtual_time
async def test_a_word_with_another_token_does_not(token: str) -> None:
    simulation, serving = world()
    assert await heard(simulation, OneGate((state_of(serving), token))) == 0


@pytest.mark.parametrize("lies", [{"pod_uid": "other"}, {"namespace": "other"}, {"model": "other"}])
@in_virtual_time
async def test_a_pod_cannot_speak_for_another_with_its_own_token(lies: dict[str, Any]) -> None:
    simulation, serving = world()
    lie = replace(state_of(serving), **lies)
    assert await heard(simulation, OneGate((lie, OWN))) == 0


@in_virtual_time
async def test_a_word_that_is_not_believed_is_a_denial_in_the_audit_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvstrata.audit")
    simulation, serving = world()
    gate = OneGate((state_of(serving), FOREIGN))
    listener = AckListener(simulation.kube, gate, simulation.store, simulation.queue, jitter=lambda: 0.0)
    listening = asyncio.create_task(listener.run())
    async with asyncio.timeout(60):
        while not (told := [line for line in lines(caplog) if line.action is Action.REPORT_REFUSED]):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)
    assert (told[0].pod_uid, told[0].model, told[0].reason) == (serving.uid, "tiny", "ForeignToken")


@in_virtual_time
async def test_a_gate_that_cannot_be_reached_is_asked_again() -> None:
    simulation, _ = world()
    gate = OneGate(GateError(GateFailure.UNREACHABLE, "no route"))
    listener = AckListener(simulation.kube, gate, simulation.store, simulation.queue, jitter=lambda: 0.0)
    listening = asyncio.create_task(listener.run())
    await asyncio.sleep(0.5)
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)
    assert 2 <= len(gate.asked) <= 6


@pytest.mark.parametrize("token", [None, FOREIGN])
@in_virtual_time
async def test_what_was_acknowledged_stands_without_contact_but_freshness_does_not(token: str | None) -> None:
    simulation, serving = world()
    assert await heard(simulation, OneGate((state_of(serving), OWN))) == 7
    assert simulation.world.states[serving.uid].in_contact
    lost = GateError(GateFailure.UNREACHABLE, "no route")
    assert await heard(simulation, OneGate(lost if token is None else (state_of(serving), token))) == 7
    assert not simulation.world.states[serving.uid].in_contact
    assert await heard(simulation, OneGate((state_of(serving), OWN))) == 7
    assert simulation.world.states[serving.uid].in_contact


@in_virtual_time
async def test_a_pod_that_ended_is_no_longer_asked() -> None:
    simulation, serving = world()
    simulation.put(pod("pod-0", state="terminated", ready=False))
    gate = OneGate((state_of(serving), OWN))
    await heard(simulation, gate)
    assert gate.asked == []


async def follow_nodes(simulation: Simulation) -> None:
    silent = OneGate(GateError(GateFailure.UNREACHABLE, "no route"))
    listener = AckListener(simulation.kube, silent, simulation.store, simulation.queue)
    following = asyncio.create_task(listener.follow_nodes())
    await asyncio.sleep(3 * NODES_EVERY_S)
    assert not following.done()
    following.cancel()


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize(
    ("node", "ended"),
    [
        (None, True),
        ({"taints": [{"key": "node.kubernetes.io/out-of-service", "effect": "NoExecute"}]}, True),
        ({"taints": [{"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}]}, False),
        ({}, False),
        (KubeError(403, "Forbidden", "nodes is forbidden"), False),
    ],
)
def test_a_pod_that_vanished_has_ended_once_its_node_is_gone_or_out_of_service(
    monkeypatch: pytest.MonkeyPatch, node: dict[str, Any] | KubeError | None, *, ended: bool, restarts: bool
) -> None:
    simulation, serving = world()
    simulation.delete("Pod", serving.name)
    simulation.settle()
    if restarts:
        simulation.restart()
        simulation.settle()
    asked = []

    async def get(resource: Resource, namespace: str | None, name: str) -> dict[str, Any] | None:
        asked.append(resource.path(namespace, name))
        if isinstance(node, KubeError):
            raise node
        return {"spec": node} if node is not None else None

    monkeypatch.setattr(simulation.kube, "get", get)
    assert serving.uid not in ended_pods(simulation.world)
    in_virtual_time(follow_nodes)(simulation)
    assert set(asked) == {"/api/v1/nodes/node"}
    assert (serving.uid in ended_pods(simulation.world)) is ended
    assert bool(len(simulation.queue)) is ended


def test_nodes_that_may_not_be_read_are_asked_for_every_ten_minutes_and_the_right_is_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    simulation, serving = world()
    simulation.delete("Pod", serving.name)
    simulation.settle()
    answers: list[KubeError | None] = [KubeError(500, "InternalError", "no"), *[KubeError(403, "Forbidden", "no")] * 3]
    asked: list[float] = []

    async def get(*_: Any) -> None:
        asked.append(asyncio.get_running_loop().time())
        if error := answers[len(asked) - 1] if len(asked) <= len(answers) else None:
            raise error

    async def follow() -> None:
        silent = OneGate(GateError(GateFailure.UNREACHABLE, "no route"))
        following = asyncio.create_task(
            AckListener(simulation.kube, silent, simulation.store, simulation.queue).follow_nodes()
        )
        await asyncio.sleep(5 * NODES_REFUSED_S)
        following.cancel()

    monkeypatch.setattr(simulation.kube, "get", get)
    in_virtual_time(follow)()
    pauses = [round(later - before) for before, later in pairwise(asked)]
    assert pauses == [NODES_EVERY_S, NODES_REFUSED_S, NODES_REFUSED_S, NODES_REFUSED_S]
    assert serving.uid in ended_pods(simulation.world), "a right that is granted later is found"
    (logged,) = (one for one in caplog.records if one.levelno == logging.WARNING)
    assert "the right to get nodes" in logged.getMessage()
