"""An erasure that is taken away, given up or late ends with what was so; one without its receipt waits and says why."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvstrata.contract.receipt.residue import Residue
from kvstrata.plan.actions import CarryOutErasure
from kvstrata.plan.erasure.policy_deletion import ABANDON
from tests.support.objects import NAMESPACE, invalidation
from tests.unit.reconcile.erasing import KIND, World
from tests.unit.reconcile.erasure_stories import ALL, acked, order, run, world


def test_deleting_the_object_meanwhile_lets_it_go_when_the_receipt_is_there() -> None:
    made = world()

    async def story(w: World) -> None:
        order(w.sim)
        await w.until(lambda: w.kept())
        w.sim.delete(KIND, "leave")
        await acked(w)
        await w.until(lambda: (KIND, NAMESPACE, "leave") not in w.sim.kube.objects)
        await w.until(lambda: not w.kept())

    run(story, made)
    assert made.proven() == ALL


def test_a_deleted_order_whose_receipt_is_refused_goes_at_the_domains_deadline() -> None:
    made = world()
    made.chain.conflict = "two records have one number"

    async def story(w: World) -> None:
        order(w.sim)
        await acked(w)
        await w.until(lambda: w.phase == "Receipting")
        w.sim.delete(KIND, "leave")
        await w.until(lambda: (KIND, NAMESPACE, "leave") not in w.sim.kube.objects, tick_s=600)
        assert w.kept()
        w.chain.conflict = ""
        await w.until(lambda: not w.kept())

    run(story, made)
    assert made.proven() == ALL


def test_an_object_whose_finalizer_was_taken_by_force_leaves_a_receipt_that_says_abandoned() -> None:
    made = world()

    async def story(w: World) -> None:
        order(w.sim)
        await acked(w)
        await w.until(lambda: w.phase == "WaitingOutWrites")
        raw = dict(w.sim.kube.objects[(KIND, NAMESPACE, "leave")])
        w.sim.put({**raw, "metadata": {**raw["metadata"], "finalizers": []}})
        w.sim.delete(KIND, "leave")
        await w.until(lambda: w.chain.issued and not w.kept())

    run(story, made)
    assert Residue.ABANDONED in {item.kind for item in made.chain.issued[0].residue}


def test_a_person_may_give_it_up_and_the_receipt_says_so() -> None:
    made = world()
    made.server.problem = "nothing listens"

    async def story(w: World) -> None:
        order(w.sim)
        await acked(w)
        await w.until(lambda: w.phase == "Erasing")
        raw = dict(w.sim.kube.objects[(KIND, NAMESPACE, "leave")])
        annotated = {**raw["metadata"], "annotations": {ABANDON: "the servers were scrapped"}}
        w.sim.put({**raw, "metadata": annotated})
        await w.until(lambda: w.phase == "Failed")

    run(story, made)
    assert "the servers were scrapped" in made.chain.issued[0].subject.reason
    assert made.sim.condition(KIND, "leave", "Failed") == ("True", "Abandoned")


def test_a_deadline_ends_it_in_whatever_phase_with_a_receipt() -> None:
    made = world()

    async def story(w: World) -> None:
        order(w.sim, deadline="20s")
        await w.until(lambda: w.phase == "Failed")

    run(story, made)
    assert made.sim.condition(KIND, "leave", "Failed") == ("True", "DeadlineExceeded")
    assert made.proven() == set()


def test_a_receipt_whose_answer_was_lost_is_found_and_not_written_twice() -> None:
    made = world()
    made.chain.lost_answers = 2

    async def story(w: World) -> None:
        order(w.sim)
        await acked(w)
        await w.until(lambda: w.phase == "Complete")

    run(story, made)
    assert len(made.chain.issued) == 1


def test_a_chain_that_cannot_go_on_is_waited_for_and_named() -> None:
    made = world()
    made.chain.conflict = "two stored receipts have one number"

    async def story(w: World) -> None:
        order(w.sim)
        await acked(w)
        await w.until(lambda: "two stored receipts" in w.status.get("message", ""))
        assert w.phase == "Receipting"
        w.chain.conflict = ""
        await w.until(lambda: w.phase == "Complete")

    run(story, made)


@pytest.mark.parametrize("receipts", [None, {"count": 3, "head": "ab" * 32}])
def test_the_receipt_of_a_domain_that_was_replaced_says_nothing_of_its_successors_chain(receipts: Any) -> None:
    made = world()
    made.chain.conflict = "not yet"
    slot = ("CacheDomain", NAMESPACE, "default")

    def chain_of_domain() -> Any:
        return made.sim.kube.objects[slot]["status"].get("receipts")

    async def story(w: World) -> None:
        order(w.sim)
        await acked(w)
        await w.until(lambda: w.phase == "Receipting")
        raw = dict(w.sim.kube.objects[slot])
        w.sim.put({**raw, "status": {**raw["status"], "domainID": "d2" * 8, "receipts": receipts}})
        w.chain.conflict = ""
        await w.until(lambda: w.phase == "Complete")

    run(story, made)
    assert made.chain.told[-1] is None
    assert chain_of_domain() == receipts


def test_an_order_that_failed_while_something_was_kept_ends_with_a_receipt() -> None:
    made = world()

    async def story(w: World) -> None:
        order(w.sim)
        await w.until(lambda: w.kept() and w.status.get("rolledTime"))
        raw = dict(w.sim.kube.objects[(KIND, NAMESPACE, "leave")])
        w.sim.put({**raw, "status": {**raw["status"], "phase": "Failed"}})
        await w.until(lambda: not w.kept())

    run(story, made)
    (facts,) = made.chain.issued
    assert Residue.ABANDONED in {item.kind for item in facts.residue}


@pytest.mark.parametrize("how", ["removed", "failed"])
def test_nobody_goes_on_with_an_order_of_which_nothing_is_kept_when_it_is_over(how: str) -> None:
    made = world()

    async def story(w: World) -> None:
        assert w.board is not None
        w.sim.put({**invalidation("leave", scope={"tenant": "acme"}), "status": {"phase": "Pending"}})
        uid = w.sim.world.invalidations["leave"].uid
        w.board.take(NAMESPACE, CarryOutErasure(KIND, "leave", uid))
        for _ in range(20):
            await asyncio.sleep(0)
        assert w.board.open == 1
        if how == "removed":
            w.sim.delete(KIND, "leave")
        else:
            raw = dict(w.sim.kube.objects[(KIND, NAMESPACE, "leave")])
            w.sim.put({**raw, "status": {"phase": "Failed"}})
        await w.until(lambda: w.board is not None and not w.board.open)

    run(story, made)
    assert (made.kept(), made.chain.issued) == ([], [])
