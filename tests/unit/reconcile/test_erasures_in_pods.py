"""Pods and their engines let go of what was ordered, are asked until they did, and speak for nobody else."""

from __future__ import annotations

import pytest

from kvstrata.contract.messages.engine_reset import ResetOutcome
from kvstrata.contract.receipt.residue import ReceiptClaim, Residue
from tests.support.objects import NAMESPACE, model, own, pod
from tests.unit.reconcile.deletions import end_pods
from tests.unit.reconcile.erasing import KIND, World
from tests.unit.reconcile.erasure_stories import ALL, acked, order, run, world


def test_engines_forget_where_the_order_says_so_and_each_is_asked_until_it_did() -> None:
    made = world()
    made.gates.engines = {"pod-0": [ResetOutcome.AWAY, ResetOutcome.BUSY, ResetOutcome.RESET]}

    async def story(w: World) -> None:
        order(w.sim, hbm="ResetEngine")
        await w.until(lambda: w.status.get("rolledTime"))
        w.sim.ack("pod-0")
        for _ in range(50):
            await w.turn(1)
        assert w.gates.resets == [], "a pod that has not let go may still fill its engine"
        await acked(w)
        await w.until(lambda: w.phase == "Complete")

    run(story, made)
    assert sorted(made.gates.resets) == ["pod-0"] * 3 + ["pod-1"]
    assert made.proven() == ALL
    (facts,) = made.chain.issued
    assert all(pod.engine_reset for pod in facts.pods)
    assert Residue.ENGINE_MEMORY not in {item.kind for item in facts.residue}


@pytest.mark.parametrize("allowed", [True, False])
def test_an_engine_that_cannot_forget_is_told_by_its_pods_name(allowed: bool) -> None:
    made = world()
    made.gates.engines = {"pod-1": [ResetOutcome.CANNOT]}

    async def story(w: World) -> None:
        order(w.sim, hbm="ResetEngine", allowResidue=allowed)
        await acked(w)
        await w.until(lambda: "engine of pod pod-1 cannot" in w.status.get("message", ""))
        await w.until(lambda: w.phase in ("Complete", "Failed"), tick_s=20)

    run(story, made)
    ended = ("Complete", "CompleteWithResidue") if allowed else ("Failed", "EngineNotReset")
    assert (made.phase, made.sim.condition(KIND, "leave", made.phase)) == (ended[0], ("True", ended[1]))
    assert made.gates.resets.count("pod-1") == 1
    (facts,) = made.chain.issued
    assert Residue.ENGINE_MEMORY in {item.kind for item in facts.residue}


def test_a_pod_that_still_holds_something_is_asked_again_and_its_reason_is_told() -> None:
    made = world()
    made.gates.holding = {"pod-1"}

    async def story(w: World) -> None:
        order(w.sim)
        await acked(w)
        await w.until(lambda: "2 blocks are being read" in w.status.get("message", ""))
        assert "Erased" not in w.holds()
        w.gates.holding = set()
        await w.until(lambda: w.phase == "Complete")

    run(story, made)
    assert made.proven() == ALL


def with_files(folder: bool = True) -> World:
    """Two pods of one node with files, in a folder of the node or in their own volumes."""
    made = world()
    nvme = {"hostPath": {"path": "/disks"}} if folder else {"emptyDir": {}}
    made.sim.put(own("CacheTier", "disk", {"medium": "NVMe", "capacityPerPod": "10Gi", "nvme": nvme}))
    made.sim.put(model(tiers=("cpu", "disk", "shared")))
    made.sim.come_to_rest()
    return made


def residue(made: World, kind: Residue) -> list[tuple[str, int]]:
    (facts,) = made.chain.issued
    return [(item.about, item.count) for item in facts.residue if item.kind is kind]


@pytest.mark.parametrize("folder", [True, False])
def test_files_of_pods_that_ended_are_residue_by_node_and_folder_where_they_outlive_them(folder: bool) -> None:
    made = with_files(folder)

    async def story(w: World) -> None:
        order(w.sim, allowResidue=True)
        await w.until(lambda: w.status.get("rolledTime"))
        end_pods(w.sim)
        await w.until(lambda: w.phase == "Complete", tick_s=5)

    run(story, made)
    place = f"node:/disks/kvs1/{made.sim.world.domain_id}/disk/tiny"
    assert residue(made, Residue.COPY_UNREACHABLE) == ([(place, 2)] if folder else [])
    assert residue(made, Residue.UNSEEN_FOLDERS) == ([("disk", 0)] if folder else [])


def test_files_of_a_pod_that_ended_are_erased_by_one_that_lives_on_its_node() -> None:
    made = with_files()

    async def story(w: World) -> None:
        order(w.sim)
        await w.until(lambda: w.status.get("rolledTime"))
        end_pods(w.sim, "pod-1")
        w.sim.ack("pod-0")
        await w.until(lambda: w.phase == "Complete")

    run(story, made)
    assert made.proven() == ALL
    assert residue(made, Residue.COPY_UNREACHABLE) == []
    assert residue(made, Residue.UNSEEN_FOLDERS) == [("disk", 0)], "other nodes may have files of earlier pods"


@pytest.mark.parametrize("finds", [False, True])
def test_a_pod_that_begins_on_the_node_of_one_that_ended_erases_its_files(finds: bool) -> None:
    made = with_files()
    made.gates.missing_places = {"pod-2"} if finds else set()

    async def story(w: World) -> None:
        order(w.sim, allowResidue=True)
        await w.until(lambda: w.status.get("rolledTime"))
        end_pods(w.sim)
        await w.until(lambda: "stayed on its node" in w.status.get("message", ""))
        assert "Erased" not in w.holds()
        w.sim.put(pod("pod-2"))
        w.address("pod-2", "10.0.0.9")
        w.sim.ack("pod-2")
        await w.until(lambda: w.phase == "Complete", tick_s=5)

    run(story, made)
    asked = [name for name, _ in made.gates.erased]
    (facts,) = made.chain.issued
    assert made.sim.pod("pod-2").uid in {one.uid for one in facts.pods}
    place = f"node:/disks/kvs1/{made.sim.world.domain_id}/disk/tiny"
    if finds:
        assert asked == ["pod-2"] * 3
        assert residue(made, Residue.COPY_UNREACHABLE) == [(place, 2)]
    else:
        assert asked == ["pod-2"]
        assert made.proven() == ALL
        assert residue(made, Residue.COPY_UNREACHABLE) == []


def test_an_answer_with_another_pods_token_proves_nothing() -> None:
    made = world()

    async def story(w: World) -> None:
        w.gates.token = w.token("pod-0")
        order(w.sim)
        await acked(w)
        await w.until(lambda: "not believed: ForeignToken" in w.status.get("message", ""))
        for _ in range(20):
            await w.turn(1)
        assert "Erased" not in w.holds()

    run(story, made)


def test_a_pod_that_finds_what_it_should_miss_fails_it() -> None:
    made = world()
    made.gates.finding = {"pod-1"}

    async def story(w: World) -> None:
        order(w.sim)
        await acked(w)
        await w.until(lambda: w.phase == "Failed")

    run(story, made)
    assert ReceiptClaim.VERIFIED not in made.proven()
    assert made.sim.condition(KIND, "leave", "Failed") == ("True", "LateCopies")


def test_a_pod_that_ends_meanwhile_took_its_memory_with_it() -> None:
    made = world()

    async def story(w: World) -> None:
        w.gates.away = {"pod-1"}
        order(w.sim)
        await acked(w)
        await w.until(lambda: "pod-1 did not answer" in w.status.get("message", ""))
        raw = dict(w.sim.kube.objects[("Pod", NAMESPACE, "pod-1")])
        ended = [{"name": "engine", "state": {"terminated": {}}}]
        w.sim.put({**raw, "status": {**raw["status"], "phase": "Succeeded", "containerStatuses": ended}})
        await w.until(lambda: w.phase == "Complete")

    run(story, made)
    assert ReceiptClaim.VERIFIED in made.proven()
