"""Who may hold keys that no object has, noted from one operator to the next: nobody's end is taken for granted."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kvstrata.clients.kube import KubeError
from kvstrata.model.keys import Undestroyed
from kvstrata.reconcile.keyholders import KeyHolders, _has_ended
from tests.support.key_pods import KeyPods
from tests.support.objects import NAMESPACE
from tests.unit.reconcile.test_memory_keys import TCP, restart, told

OPERATORS = "kvstrata-system"
NOTE = ("Secret", OPERATORS, f"kvstrata-keyholders-{NAMESPACE}")

Story = Callable[[KeyPods], Awaitable[None]]


def note(pods: KeyPods) -> dict[str, Any]:
    stored = pods.sim.kube.objects[NOTE]
    found: dict[str, Any] = json.loads(base64.b64decode(stored["data"]["holders.json"]))
    return found


def uids(pods: KeyPods, *names: str) -> list[str]:
    return sorted(pods.sim.pod(name).uid for name in names)


def operator_pod(name: str, state: str = "running", phase: str = "Running") -> dict[str, Any]:
    """The operator's pod of this name, as the API server shows it."""
    containers = [{"name": "operator", "state": {state: {}}}]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": OPERATORS, "uid": f"uid-of-{name}"},
        "status": {"phase": phase, "containerStatuses": containers},
    }


async def anew(pods: KeyPods) -> None:
    """Another operator leads, and has its keys back."""
    restart(pods)
    await pods.turn()
    assert not pods.sim.world.keys_awaited


async def why_not(pods: KeyPods, policy: str = "acme") -> str:
    """Revoke the key of a policy, have every pod drop it, and return why it is not called destroyed; empty if it is."""
    epoch = pods.sim.status(TCP, policy)["scope"]["epoch"]
    custody = pods.sim.memory.custody(NAMESPACE)
    assert (await custody.revoke([epoch]))[epoch].removed is not None
    gone = custody._keys[epoch].id
    for name in pods.addresses:
        pods.held[name].pop(gone, None)
    assert pods.courier is not None
    await pods.courier.ask_holders(NAMESPACE, {epoch: gone}, {"tiny": 1})
    end = (await custody.destroy([epoch]))[epoch]
    return "; ".join(end.evidence) if end.confirmed is None else ""


def test_a_note_names_the_operator_and_its_pods_and_no_key() -> None:
    async def story(pods: KeyPods) -> None:
        assert note(pods) == {
            "operators": {"op-1": None},
            "pods": uids(pods, "pod-0", "pod-1"),
            "term": 1,
            "unaccounted": {},
        }
        await anew(pods)
        pods.sim.kube.remove("Pod", NAMESPACE, "pod-1")
        text = json.dumps(note(pods))
        assert not any(key.hex() in text or one in text for one, key in pods.held["pod-0"].items())

    told(story)


def test_nobody_is_brought_a_key_before_it_is_noted() -> None:
    async def story(pods: KeyPods) -> None:
        def refuse(verb: str, kind: str, name: str) -> None:
            if name == NOTE[2]:
                raise KubeError(500, "InternalError", "not now")

        before = [*pods.brought]
        pods.sim.kube.before_write = refuse
        pods.start("pod-2")
        await pods.turn(20)
        await pods.turn(20)
        assert (pods.held["pod-2"], pods.brought) == ({}, before)
        pods.sim.kube.before_write = lambda *_: None
        await pods.turn()
        assert pods.held["pod-2"] == pods.held["pod-0"]
        assert note(pods)["pods"] == uids(pods, "pod-0", "pod-1", "pod-2")

    told(story)


def test_nobody_asks_for_keys_back_before_it_is_noted_who_asks() -> None:
    async def story(pods: KeyPods) -> None:
        def refuse(verb: str, kind: str, name: str) -> None:
            if name == NOTE[2]:
                raise KubeError(500, "InternalError", "not now")

        restart(pods)
        pods.sim.kube.before_write = refuse
        await pods.turn(20)
        await pods.turn(20)
        assert pods.sim.world.keys_awaited
        assert [*note(pods)["operators"]] == ["op-1"]
        pods.sim.kube.before_write = lambda *_: None
        await pods.turn()
        assert not pods.sim.world.keys_awaited
        assert [*note(pods)["operators"]] == ["op-2"]

    told(story)


class TestTheOperatorBefore:
    def test_left_word_that_it_overwrote_its_keys(self) -> None:
        async def story(pods: KeyPods) -> None:
            buffers = [kept.secret for kept in pods.sim.memory.custody(NAMESPACE)._keys.values()]
            await pods.sim.holders.leave()
            assert buffers
            assert not any(any(buffer) for buffer in buffers)
            assert note(pods)["operators"]["op-1"]["how"] == "Said"
            await anew(pods)
            assert await why_not(pods) == ""

        told(story)

    def test_ended_if_this_one_was_started_in_its_pod(self) -> None:
        async def story(pods: KeyPods) -> None:
            pods.sim.operator_pod = "op-1"
            await anew(pods)
            assert await why_not(pods) == ""

        told(story)

    def test_ended_if_one_that_does_not_lead_was_started_in_its_pod(self) -> None:
        async def story(pods: KeyPods) -> None:
            pods.sim.put(operator_pod("op-1"))
            await anew(pods)
            former = KeyHolders(
                pods.sim.kube, OPERATORS, pods.sim.store, pods.sim.memory, "op-1", lambda: pods.sim.now, lambda: False
            )
            assert note(pods)["operators"] == {"op-1": None, "op-2": None}
            async with former.telling_of_former_self():
                while note(pods)["operators"]["op-1"] is None:  # noqa: ASYNC110
                    await asyncio.sleep(0)
            await pods.turn(5)
            assert await why_not(pods) == ""

        told(story)

    @pytest.mark.parametrize("goes_on", [False, True])
    def test_ended_when_its_kubelet_says_so_of_a_pod_that_is_not_started_again(self, goes_on: bool) -> None:
        async def story(pods: KeyPods) -> None:
            pods.sim.put(operator_pod("op-1"))
            await anew(pods)
            pods.sim.put(operator_pod("op-1", "terminated", "Running" if goes_on else "Failed"))
            await pods.turn(5)
            await pods.turn(5)
            assert note(pods)["operators"] == ({"op-1": None} if goes_on else {}) | {"op-2": None}
            pods.sim.kube.remove("Pod", OPERATORS, "op-1")
            await pods.turn(5)
            assert ("op-1" in await why_not(pods)) == goes_on

        told(story)

    def test_may_have_its_keys_as_long_as_its_pod_runs(self) -> None:
        async def story(pods: KeyPods) -> None:
            pods.sim.put(operator_pod("op-1"))
            await anew(pods)
            assert "operator op-1 is not known to have ended" in await why_not(pods)

        told(story)

    def test_is_not_believed_to_be_the_only_one_if_one_between_left_no_note(self) -> None:
        async def story(pods: KeyPods) -> None:
            await pods.sim.holders.leave()
            pods.sim.boots += 1
            await anew(pods)
            assert "an operator before this one" in await why_not(pods)
            await pods.sim.holders.leave()
            await anew(pods)
            assert "an operator before this one" in await why_not(pods, "globex")

        told(story)

    @pytest.mark.parametrize("content", [b"", b"[]", b'{"term": 1}', b'{"term":1,"operators":{"a":3},"pods":[]}'])
    def test_is_unknown_if_its_note_cannot_be_read(self, content: bytes) -> None:
        async def story(pods: KeyPods) -> None:
            await pods.sim.holders.leave()
            stored = dict(pods.sim.kube.objects[NOTE])
            pods.sim.kube.put({**stored, "data": {"holders.json": base64.b64encode(content).decode()}})
            await anew(pods)
            assert "an operator before this one" in await why_not(pods)

        told(story)


class TestPods:
    def test_that_ended_are_asked_for_no_more_by_whoever_leads(self) -> None:
        async def story(pods: KeyPods) -> None:
            pods.end("pod-1")
            await pods.turn(5)
            await pods.turn(5)
            assert note(pods)["pods"] == uids(pods, "pod-0")
            await pods.sim.holders.leave()
            await anew(pods)
            pods.start("pod-2")
            await pods.turn()
            pods.end("pod-2")
            await pods.turn(5)
            await pods.turn(5)
            assert (note(pods)["pods"], note(pods)["unaccounted"]) == (uids(pods, "pod-0"), {})
            assert await why_not(pods) == ""

        told(story)

    @pytest.mark.parametrize("led", [True, False])
    def test_that_vanished_may_have_for_ever_what_was_drawn_before(self, led: bool) -> None:
        async def story(pods: KeyPods) -> None:
            gone = pods.sim.pod("pod-1").uid
            if not led:
                await pods.sim.holders.leave()
            pods.sim.delete("Pod", "pod-1")
            pods.addresses.pop("pod-1")
            if led:
                await pods.turn(5)
                await pods.turn(5)
                assert {*note(pods)["unaccounted"].values()} == {gone}
                await pods.sim.holders.leave()
            await anew(pods)
            await pods.sim.holders.leave()
            await anew(pods)
            pods.sim.edit(TCP, "globex", cacheGeneration=1)
            await pods.turn(61)
            await pods.turn(61)
            assert gone in await why_not(pods, "acme")
            assert await why_not(pods, "globex") == ""
            await pods.sim.holders.leave()
            await anew(pods)
            assert len(note(pods)["unaccounted"]) <= 1, "nobody asks about what is no longer used"

        told(story)


def test_a_note_goes_with_the_last_pod_of_a_namespace_without_a_domain() -> None:
    async def story(pods: KeyPods) -> None:
        pods.sim.store.domain(NAMESPACE).objects["CacheDomain"].clear()
        assert pods.courier is not None
        pods.courier.follow()
        await asyncio.gather(*pods.courier._looks.values())
        assert NOTE in pods.sim.kube.objects
        pods.sim.store.domain(NAMESPACE).pods.clear()
        pods.sim.advance(5)
        pods.courier.follow()
        await asyncio.gather(*pods.courier._looks.values())
        assert NOTE not in pods.sim.kube.objects
        pods.sim.advance(5)
        pods.courier.follow()
        await asyncio.gather(*pods.courier._looks.values())
        assert NOTE not in pods.sim.kube.objects

    told(story)


def test_a_key_that_was_never_revoked_is_not_called_destroyed_whoever_ended() -> None:
    async def story(pods: KeyPods) -> None:
        await pods.sim.holders.leave()
        await anew(pods)
        epoch = pods.sim.status(TCP, "acme")["scope"]["epoch"]
        custody = pods.sim.memory.custody(NAMESPACE)
        assert (await custody.destroy([epoch]))[epoch].why_not is Undestroyed.NOT_REVOKED

    told(story)


@pytest.mark.parametrize(
    ("deleting", "phase", "states", "ended"),
    [
        (True, "Running", ["terminated"], True),
        (False, "Failed", ["terminated"], True),
        (True, "Running", ["terminated", "running"], False),
        (False, "Running", ["terminated"], False),
        (False, "Failed", [], False),
        (True, "Running", [], False),
    ],
)
def test_an_operator_s_pod_has_ended_when_every_container_has_and_none_is_started_again(
    deleting: bool, phase: str, states: list[str], ended: bool
) -> None:
    raw = operator_pod("op-1", phase=phase)
    raw["status"]["containerStatuses"] = [{"state": {state: {}}} for state in states]
    raw["metadata"] |= {"deletionTimestamp": "2026-11-22T10:00:00Z"} if deleting else {}
    assert _has_ended(raw) == ended
