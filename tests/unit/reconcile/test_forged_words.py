"""What an erasure hears from pods counts only as the pod's own word, by the processes that let go.

Acknowledgements with others' tokens are in `test_acks`; facts that come too early in `plan.test_erasure`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvstrata.clients.kube import TokenIdentity
from kvstrata.contract.messages.erase import Erased, Verified, VerifyRequest
from kvstrata.contract.receipt.residue import ReceiptClaim
from tests.support.objects import NAMESPACE
from tests.unit.reconcile.erasing import Gates, World
from tests.unit.reconcile.erasure_stories import ALL, acked, order, run, world


class ForgingGates(Gates):
    """Gates of which pod-1 answers as a test says."""

    def __init__(self, made: World) -> None:
        super().__init__(made)
        self.says: dict[str, Any] = {}
        """Fields of its answers that are not what they were."""
        self.verifies_as = ""
        """The token with which it says what it finds; its own if empty."""

    async def erase(self, pod_ip: str, server_name: str, request: Any) -> tuple[Erased, str]:
        """Answer, in another's name if told so."""
        said, token = await super().erase(pod_ip, server_name, request)
        return (replace(said, **self.says) if self._pod(pod_ip) == "pod-1" else said), token

    async def verify(self, pod_ip: str, server_name: str, request: VerifyRequest) -> tuple[Verified, str]:
        """Answer, in another's name if told so."""
        said, token = await super().verify(pod_ip, server_name, request)
        return said, self.verifies_as or token if self._pod(pod_ip) == "pod-1" else token


def forging() -> tuple[World, ForgingGates]:
    made = world()
    gates = ForgingGates(made)
    made.gates = gates
    return made, gates


@pytest.mark.parametrize("boot", ["gate_boot", "cache_boot"])
def test_an_answer_by_a_process_that_is_gone_erases_nothing(boot: str) -> None:
    made, gates = forging()
    gates.says = {boot: "of-the-start-before"}

    async def story(w: World) -> None:
        order(w.sim)
        await acked(w)
        await w.until(lambda: [pod for pod, _ in w.gates.erased].count("pod-1") > 3)
        assert "Erased" not in w.holds()
        assert not w.chain.issued
        gates.says = {}
        await w.until(lambda: w.phase == "Complete")

    run(story, made)
    assert made.proven() == ALL


@pytest.mark.parametrize("whose", ["token-of-pod-0", "another-account", "nobodys"])
def test_a_look_in_another_pods_name_verifies_nothing(whose: str) -> None:
    made, gates = forging()
    made.token("pod-0")
    made.sim.kube.tokens["another-account"] = TokenIdentity(
        f"system:serviceaccount:{NAMESPACE}:default", made.sim.pod("pod-1").uid
    )
    gates.verifies_as = whose

    async def story(w: World) -> None:
        order(w.sim)
        await acked(w)
        await w.until(lambda: "not believed" in w.status.get("message", ""))
        assert w.holds() >= {"Erased"}
        assert "Verified" not in w.holds()
        gates.verifies_as = ""
        await w.until(lambda: w.phase == "Complete")

    run(story, made)
    assert made.proven() == ALL


def test_a_word_on_a_revision_that_still_has_the_epoch_lets_nothing_go_on() -> None:
    made = world()

    async def story(w: World) -> None:
        order(w.sim)
        await w.until(lambda: w.status.get("rolledTime"))
        target = next(one["revision"] for one in w.status["targets"])
        w.sim.ack("pod-0")
        w.sim.ack("pod-1", target - 1)
        for _ in range(60):
            await w.turn(1)
        assert (w.phase, w.gates.erased, w.jobs.ran) == ("AwaitingAcks", [], [])
        assert "pod-1" in w.status["message"]
        w.sim.ack("pod-1", target)
        await w.until(lambda: w.phase == "Complete")

    run(story, made)
    assert ReceiptClaim.UNREACHABLE in made.proven()


def test_a_pod_that_goes_back_to_a_lower_revision_afterwards_takes_back_nothing_that_it_did() -> None:
    made = world()

    async def story(w: World) -> None:
        order(w.sim)
        await acked(w)
        await w.until(lambda: w.phase == "WaitingOutWrites")
        w.sim.ack("pod-1", 1)
        await w.until(lambda: w.phase == "Complete")

    run(story, made)
    assert made.proven() == ALL
    assert made.sim.condition("TenantCachePolicy", "acme", "Enforced")[0] == "False", "it does not enforce the policy"
