"""A namespace that is deleted goes, and leaves a receipt for each policy that it had."""

from __future__ import annotations

from functools import partial

import pytest

from kvstrata.contract.receipt.claims import claims
from kvstrata.contract.receipt.residue import ReceiptClaim, Residue
from kvstrata.contract.receipt.vocabulary import SubjectKind
from kvstrata.model.world import Ending
from kvstrata.reconcile.erasure.record_store import PREFIX
from tests.support.objects import NAMESPACE
from tests.unit.reconcile.deletions import (
    POLICY,
    acked_until,
    delete_namespace,
    end_pods,
    gone,
    left,
    phase,
    residue,
    run,
    world,
)
from tests.unit.reconcile.erasing import World


@pytest.mark.parametrize("last", [POLICY, "CacheDomain", "CacheTier"])
def test_a_namespace_that_is_deleted_goes_and_leaves_a_receipt_for_each_policy(last: str) -> None:
    made = world()

    async def story(w: World) -> None:
        delete_namespace(w.sim, last=last)
        await w.turn()
        assert {name for kind, name in left(w.sim) if kind == POLICY} == {"acme", "globex"}
        end_pods(w.sim)
        for name in ("acme", "globex"):
            await gone(w, name=name, tick_s=5)
        assert left(w.sim) == []
        await w.turn(10)

    run(story, made)
    assert made.sim.store.domain(NAMESPACE).ending == Ending(), "another namespace of this name inherits nothing"
    assert {facts.subject.kind for facts in made.chain.issued} == {SubjectKind.POLICY}
    assert {facts.subject.scope_name for facts in made.chain.issued} == {"acme", "globex"}
    for facts in made.chain.issued:
        assert set(claims(facts)) & {ReceiptClaim.UNREACHABLE, ReceiptClaim.ERASED, ReceiptClaim.VERIFIED} == {
            ReceiptClaim.UNREACHABLE
        }
        assert [item.about for item in facts.residue if item.kind is Residue.TIER_LOST] == ["shared"]
        assert {pod.standing for pod in facts.pods} == {"Ended"}


def test_an_operator_that_dies_while_a_namespace_goes_is_followed_by_one_that_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """At each of its writes, and with no memory of what went before: what was written down goes with a receipt of its
    own, and not because its order is gone."""
    number = most = 0
    while True:
        made = world()

        async def story(w: World, at: int = number) -> None:
            count = 0

            def hook(verb: str, kind: str, name: str) -> None:
                nonlocal count
                if w.leading:
                    count += 1
                    w.leading = count <= at

            delete_namespace(w.sim)
            end_pods(w.sim)
            w.sim.kube.after_write = hook
            for _ in range(60):
                if not w.leading or not left(w.sim):
                    return
                await w.turn(5)

        run(story, made)
        if made.leading:
            break
        begun = {name.removeprefix(PREFIX) for name in made.kept()}
        caplog.clear()
        made.leading = True
        made.sim.restart()

        async def rest(w: World) -> None:
            for name in ("acme", "globex"):
                await gone(w, name=name, tick_s=5)

        run(rest, made)
        assert left(made.sim) == []
        subjects = [facts.subject.uid for facts in made.chain.issued]
        assert len(set(subjects)) == len(subjects), number
        assert begun <= set(subjects), f"what was written down before {number} is told"
        let_go = [record for record in caplog.records if "without its receipt" in record.message]
        assert len(let_go) <= 2 - len(begun), number
        told = [facts for facts in made.chain.issued if facts.subject.uid in begun]
        assert not any(Residue.ABANDONED in residue(facts) for facts in told), number
        most = max(most, len(begun))
        number += 1
    assert (number >= 8, most) == (True, 2)


def test_an_erasure_that_had_begun_goes_on_when_its_namespace_is_deleted() -> None:
    made = world()

    async def story(w: World) -> None:
        w.sim.delete(POLICY, "acme")
        await acked_until(w, lambda: phase(w.sim) == "WaitingOutWrites")
        delete_namespace(w.sim)
        end_pods(w.sim)
        for name in ("acme", "globex"):
            await gone(w, name=name, tick_s=5)
        assert left(w.sim) == []

    run(story, made)
    kinds = {facts.subject.scope_name: facts.subject.kind for facts in made.chain.issued}
    assert kinds == {"acme": SubjectKind.INVALIDATION, "globex": SubjectKind.POLICY}


def test_a_pod_of_which_nobody_knows_whether_it_ended_holds_a_namespace_up_no_longer_than_a_quarter_of_an_hour() -> (
    None
):
    made = world()

    async def story(w: World) -> None:
        since = w.sim.now
        delete_namespace(w.sim)
        for name in list(w.sim.world.pods["tiny"]):
            w.sim.delete("Pod", name)
        for name in ("acme", "globex"):
            await gone(w, name=name, tick_s=10)
        assert 900 <= (w.sim.now - since).total_seconds() <= 1000

    run(story, made)
    for facts in made.chain.issued:
        assert claims(facts) == ()
        assert Residue.POD_OPEN in residue(facts)


def test_at_the_deadline_a_namespace_goes_without_a_receipt_that_is_refused() -> None:
    made = world()
    made.chain.conflict = "two records have one number"

    async def story(w: World) -> None:
        delete_namespace(w.sim)
        end_pods(w.sim)
        await acked_until(w, lambda: left(w.sim) == [], tick_s=600)
        assert w.kept(), "the receipts are owed"
        w.chain.conflict = ""
        await acked_until(w, lambda: not w.kept())

    run(story, made)
    assert {facts.subject.scope_name for facts in made.chain.issued} == {"acme", "globex"}


def test_an_operator_that_comes_when_the_domain_is_gone_lets_policies_go_and_makes_nothing_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = world()
    delete_namespace(made.sim)
    end_pods(made.sim)
    made.sim.restart()
    run(partial(gone, tick_s=5), made)
    assert made.chain.issued == []
    assert "went without its receipt" in caplog.text


def test_an_operator_that_comes_before_the_domain_goes_knows_from_the_policy_what_went() -> None:
    made = world()
    sim = made.sim
    sim.kube.api.ending.add(NAMESPACE)
    for kind, name in (("CachedModel", "tiny"), ("CacheTier", "shared"), ("CacheTier", "cpu"), (POLICY, "acme")):
        sim.delete(kind, name)
    end_pods(sim)
    sim.store.domain(NAMESPACE).servers.clear()
    sim.restart()
    run(partial(gone, tick_s=5), made)
    (facts,) = made.chain.issued
    assert [item.about for item in facts.residue if item.kind is Residue.TIER_LOST] == ["shared"]
    assert ReceiptClaim.ERASED not in claims(facts)
