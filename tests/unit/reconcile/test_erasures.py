"""An eager invalidation is carried out to its receipt, whoever is away, dies or leads meanwhile."""

from __future__ import annotations

import base64
import logging
from functools import partial

import pytest
from prometheus_client import REGISTRY

from kvstrata.contract.audit import Action
from kvstrata.contract.enginereset import ResetOutcome
from kvstrata.contract.receiptresidue import Claim, Residue
from kvstrata.plan.deletion import ABANDON, FINALIZER
from kvstrata.plan.erasurefacts import found_again
from kvstrata.reconcile.erasures.keep import PREFIX, Keep
from tests.support.audit import lines
from tests.support.objects import NAMESPACE, model, own
from tests.support.worlds import finish
from tests.unit.reconcile.erasing import KIND, OPERATOR_NAMESPACE, World
from tests.unit.reconcile.erasure_stories import ALL, acked, order, run, world


def test_an_erasure_ends_with_a_receipt_that_proves_all_of_it() -> None:
    made = world()
    old, other = made.sim.entry("acme").keyspace, made.sim.entry("globex").keyspace

    async def story(w: World) -> None:
        order(w.sim)
        await acked(w)
        await w.until(lambda: w.phase == "Complete")

    run(story, made)
    assert made.proven() == ALL
    assert made.holds() >= {"LogicallyInvalid", "KeysRevoked", "Erased", "Verified", "Complete", "Ready"}
    assert "KeysDestroyed" not in made.holds()
    assert (old in made.server.values, other in made.server.values) == (False, True)
    assert {pod for pod, _ in made.gates.erased} == set(made.addresses)
    assert all(request.keyspace == old and request.chunks for _, request in made.gates.verified)
    assert (made.status["keys"], made.status["tiers"][0]["deleted"]) == (3, 3)
    assert made.status["receiptDigest"] == f"{1:064x}"
    assert made.sim.status("CacheDomain", "default")["receipts"] == {"count": 1, "head": f"{1:064x}"}


def test_what_a_model_has_is_erased_of_all_its_tenants_whom_the_receipt_does_not_name() -> None:
    made = world()
    gone = {made.sim.entry(tenant).keyspace for tenant in ("acme", "globex")}

    async def story(w: World) -> None:
        order(w.sim, scope={"model": "tiny"})
        await acked(w)
        await w.until(lambda: w.phase == "Complete")

    run(story, made)
    assert made.proven() == ALL
    assert made.server.values == {}
    assert {request.keyspace for _, request in made.gates.verified} == gone
    (facts,) = made.chain.issued
    assert (str(facts.subject.scope), facts.subject.scope_name) == ("model", "tiny")
    assert [(str(one.kind), one.name) for one in facts.revoked] == [("Tenant", None)] * 2


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


def test_nothing_is_kept_of_an_erasure_that_is_over_but_its_receipt() -> None:
    made = world()

    async def story(w: World) -> None:
        order(w.sim)
        await w.until(lambda: w.kept())
        raw = w.sim.kube.objects[(KIND, NAMESPACE, "leave")]
        assert raw["metadata"]["finalizers"] == [FINALIZER]
        await acked(w)
        await w.until(lambda: w.phase == "Complete")
        await w.until(lambda: not w.kept())
        await w.turn()

    run(story, made)
    raw = made.sim.kube.objects[(KIND, NAMESPACE, "leave")]
    assert not raw["metadata"].get("finalizers")
    assert made.jobs.removed == [raw["metadata"]["uid"]]
    assert made.sim.world.erasures == {}


def test_nothing_is_deleted_before_every_pod_let_go_and_writes_are_over() -> None:
    made = world()

    async def story(w: World) -> None:
        order(w.sim)
        await w.until(lambda: w.status.get("rolledTime"))
        w.sim.ack("pod-0")
        for _ in range(50):
            await w.turn(1)
        assert (w.jobs.ran, w.gates.erased, w.phase) == ([], [], "AwaitingAcks")
        assert w.sim.world.data_keys, "keys stay as long as a pod may need them"
        w.sim.ack("pod-1")
        since = w.sim.now
        await w.until(lambda: w.jobs.ran)
        assert (w.sim.now - since).total_seconds() >= 30

    run(story, made)


def test_a_data_key_is_gone_from_secrets_and_from_slots_that_a_bundle_does_not_use() -> None:
    made = world()
    epoch = made.sim.status("TenantCachePolicy", "acme")["scope"]["epoch"]
    secret = made.sim.world.data_keys[epoch]

    def copies() -> list[str]:
        values = [
            (name, value) for (kind, _, name), raw in made.sim.kube.objects.items() if kind == "Secret"
            for value in (raw.get("data") or {}).values()
        ]  # fmt: skip
        encoded = base64.b64encode(secret)
        return [
            name for name, value in values if secret in base64.b64decode(value) or encoded in base64.b64decode(value)
        ]

    assert len(copies()) == 2, "its Secret and the bundle"

    async def story(w: World) -> None:
        order(w.sim)
        await acked(w)
        await w.until(lambda: "KeysRevoked" in w.holds())
        assert copies() == []

    run(story, made)


@pytest.mark.parametrize("where", ["Secret", "CacheInvalidation", "CacheDomain"])
def test_another_operator_goes_on_wherever_one_died(where: str) -> None:
    """Each write of the API server may be the last of an operator; the receipt is the same, and is one."""
    number = 0
    while True:
        made = world()
        made.server.looks = 0

        async def story(w: World, at: int = number) -> None:
            count = 0

            def hook(verb: str, kind: str, name: str) -> None:
                nonlocal count
                if kind == where and w.leading:
                    count += 1
                    w.leading = count <= at

            order(w.sim)
            w.sim.kube.after_write = hook
            for _ in range(200):
                if w.phase == "Complete" or not w.leading:
                    return
                if w.status.get("rolledTime"):
                    for pod in w.addresses:
                        w.sim.ack(pod)
                await w.turn(1)

        run(story, made)
        if made.leading:
            break
        made.leading = True
        made.sim.restart()

        async def rest(w: World) -> None:
            await acked(w)
            await w.until(lambda: w.phase == "Complete")
            await w.until(lambda: not w.kept())

        run(rest, made)
        assert made.proven() == ALL, number
        number += 1
    assert number >= {"Secret": 8, "CacheInvalidation": 5, "CacheDomain": 1}[where]


def test_a_job_that_failed_is_followed_by_another_and_nothing_is_counted_twice() -> None:
    made = world()
    made.jobs.fails = 1

    async def story(w: World) -> None:
        order(w.sim)
        await acked(w)
        await w.until(lambda: len(w.jobs.ran) == 2)
        await w.until(lambda: w.phase == "Complete")

    run(story, made)
    assert [one.round for one in made.jobs.ran] == [1, 2]
    assert (made.status["keys"], made.proven()) == (3, ALL)


def test_what_comes_late_is_deleted_again_and_counted_once_each() -> None:
    made = world()
    old = made.sim.entry("acme").keyspace
    made.jobs.late = [partial(made.server.fill, made.sim.world.domain_id or "", old, blocks=2)]

    async def story(w: World) -> None:
        order(w.sim)
        await acked(w)
        await w.until(lambda: w.phase == "Complete")

    run(story, made)
    assert len(made.jobs.ran) == 2
    assert made.jobs.ran[1].strays, "who deletes again is told what was found"
    assert (made.status["keys"], made.proven()) == (5, ALL)


def test_who_goes_on_after_a_look_that_found_something_deletes_it_by_name_too() -> None:
    made = world()
    old = made.sim.entry("acme").keyspace
    made.jobs.late = [partial(made.server.fill, made.sim.world.domain_id or "", old, blocks=2)]
    keep = Keep(made.sim.kube, OPERATOR_NAMESPACE)

    def dies_when_it_found_something(verb: str, kind: str, name: str) -> None:
        kept = finish(keep.read(name.removeprefix(PREFIX))) if name.startswith(PREFIX) and verb == "replace" else None
        if kept is not None and found_again(kept.record.erasure, "shared"):
            made.leading = False

    async def story(w: World) -> None:
        w.sim.kube.after_write = dies_when_it_found_something
        order(w.sim)
        await acked(w)
        await w.until(lambda: not w.leading)
        assert len(w.jobs.ran) == 1

    run(story, made)
    made.leading = True
    made.sim.restart()

    async def rest(w: World) -> None:
        await acked(w)
        await w.until(lambda: w.phase == "Complete")

    run(rest, made)
    assert len(made.jobs.ran) == 2
    assert made.jobs.ran[1].strays
    assert (made.status["keys"], made.proven()) == (5, ALL)


def test_what_was_deleted_from_a_primary_is_counted_by_who_took_over_from_it() -> None:
    made = world()

    def failed_over() -> None:
        made.server.node = "n2"  # with tombstones, which are what counts

    made.jobs.late = [failed_over]

    async def story(w: World) -> None:
        order(w.sim)
        await acked(w)
        await w.until(lambda: w.phase == "Complete")

    run(story, made)
    assert [one.round for one in made.jobs.ran] == [1, 2]
    assert (made.status["keys"], made.proven()) == (3, ALL)


def test_the_tiers_that_are_emptied_are_told_to_stand_still_until_it_is_judged() -> None:
    made = world()

    async def story(w: World) -> None:
        def still() -> set[str]:
            return {tier for now in w.sim.world.erasures.values() for tier in now.still}

        order(w.sim)
        await w.until(lambda: w.phase == "AwaitingAcks")
        assert still() == set()
        await acked(w)
        await w.until(lambda: w.phase == "WaitingOutWrites")
        assert still() == {"shared"}
        meanwhile: list[set[str]] = []
        w.jobs.late = [lambda: meanwhile.append(still())]
        await w.until(lambda: w.phase == "Complete")
        assert (meanwhile, still()) == ([{"shared"}], set())

    run(story, made)


def test_a_job_whose_maker_died_before_it_began_is_begun_by_the_next() -> None:
    made = world()
    made.jobs.unfinished = 1

    async def story(w: World) -> None:
        order(w.sim)
        await acked(w)
        await w.until(lambda: w.phase == "Complete")

    run(story, made)
    assert [one.round for one in made.jobs.ran] == [1]


def test_a_server_that_is_away_is_waited_for_by_name() -> None:
    made = world()
    made.server.problem = "nothing listens at redis:6379"

    async def story(w: World) -> None:
        order(w.sim)
        await acked(w)
        for _ in range(100):
            await w.turn(10)
        assert (w.phase, w.jobs.ran, w.chain.issued) == ("Erasing", [], [])
        assert "nothing listens at redis:6379" in w.status["message"]
        w.server.problem = ""
        await w.until(lambda: w.phase == "Complete")

    run(story, made)
    assert made.proven() == ALL


def test_what_only_time_changes_is_told_too() -> None:
    made = world(pods=0)
    made.sim.backends_up = False
    made.sim.advance(20)

    async def story(w: World) -> None:
        order(w.sim)
        await w.until(lambda: w.phase == "WaitingOutWrites")
        await w.until(lambda: w.sim.condition(KIND, "leave", "Ready") == ("False", "TierAway"), turns=60)
        assert "there is no route" in w.status["message"]

    run(story, made)
    assert made.server.looks == 0, "servers that are known to be away are not asked"


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
    assert Claim.VERIFIED not in made.proven()
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
    assert Claim.VERIFIED in made.proven()


def test_a_tier_that_is_removed_meanwhile_is_residue_and_no_proof() -> None:
    made = world()
    made.server.problem = "nothing listens"

    async def story(w: World) -> None:
        order(w.sim, allowResidue=True)
        await acked(w)
        await w.until(lambda: w.phase == "Erasing")
        w.sim.put(model(tiers=("cpu",)))
        w.sim.delete("CacheTier", "shared")
        await w.until(lambda: w.phase in ("Complete", "Failed"), tick_s=5)

    run(story, made)
    assert made.phase == "Complete"
    assert Residue.TIER_LOST in {item.kind for item in made.chain.issued[0].residue}
    assert Claim.ERASED not in made.proven()


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


def test_who_does_not_lead_any_more_orders_and_writes_nothing() -> None:
    made = world()

    async def story(w: World) -> None:
        order(w.sim)
        await acked(w)
        await w.until(lambda: w.phase == "WaitingOutWrites")
        w.leading = False
        writes = [entry for entry in w.sim.kube.log if entry[1] == "Secret"]
        for _ in range(60):
            await w.turn(1)
        assert (w.jobs.ran, w.chain.issued) == ([], [])
        assert [entry for entry in w.sim.kube.log if entry[1] == "Secret"] == writes

    run(story, made)


def test_what_has_no_scope_of_its_own_is_refused_before_anything_is_kept() -> None:
    made = world()
    made.sim.put(own("PrefixPool", "docs", {
        "modelRef": {"name": "tiny"}, "prefixes": [{"name": "m", "configMapKeyRef": {"name": "gone", "key": "k"}}],
        "readers": {"public": True},
    }))  # fmt: skip

    async def story(w: World) -> None:
        order(w.sim, scope={"pool": "docs"})
        await w.until(lambda: w.phase == "Failed")

    run(story, made)
    assert made.sim.condition(KIND, "leave", "Failed") == ("True", "NothingToErase")
    assert made.kept() == []


def test_how_long_each_step_took_and_what_looks_found_is_counted() -> None:
    made = world()
    steps = ("unreachable", "keys_revoked", "erased", "verified")
    before = {step: figure("kvstrata_invalidation_seconds_count", mode="Eager", step=step) for step in steps}
    seconds = figure("kvstrata_invalidation_seconds_sum", mode="Eager", step="verified")
    looks, found = figure("kvstrata_erasure_looks_total"), figure("kvstrata_erasure_orphans_total", outcome="found")
    removed = figure("kvstrata_erasure_orphans_total", outcome="removed")
    old = made.sim.entry("acme").keyspace
    made.jobs.late.append(lambda: made.server.fill(made.sim.world.domain_id or "", old, blocks=2))

    async def story(w: World) -> None:
        order(w.sim)
        await acked(w)
        await w.until(lambda: w.phase == "Complete")

    run(story, made)
    assert {step: figure("kvstrata_invalidation_seconds_count", mode="Eager", step=step) for step in steps} == {
        step: count + 1 for step, count in before.items()
    }
    assert figure("kvstrata_invalidation_seconds_sum", mode="Eager", step="verified") > seconds
    assert figure("kvstrata_erasure_looks_total") - looks == 2
    assert figure("kvstrata_erasure_orphans_total", outcome="found") - found == 2
    assert figure("kvstrata_erasure_orphans_total", outcome="removed") - removed == 2


def figure(name: str, **labels: str) -> float:
    """Return what the operator counted by now."""
    return REGISTRY.get_sample_value(name, labels) or 0.0


def test_the_audit_log_tells_each_step_once_whoever_leads(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvstrata.audit")
    made = world()
    caplog.clear()

    async def begun(w: World) -> None:
        order(w.sim)
        await acked(w)
        await w.until(lambda: w.phase not in ("", "Pending", "Rolling", "AwaitingAcks"))

    async def ended(w: World) -> None:
        await w.until(lambda: w.phase == "Complete")

    run(begun, made)
    made.sim.restart()
    run(ended, made)
    told = [line for line in lines(caplog) if line.object == f"{KIND}/leave"]
    steps = [line for line in told if line.action is not Action.INVALIDATION_MOVED]
    assert {line.action for line in steps} == {
        Action.SCOPES_ROLLED,
        Action.POD_STANDS,
        Action.KEY_REVOKED,
        Action.POD_ERASED,
        Action.SERVER_DELETED,
        Action.TIER_VERIFIED,
        Action.POD_PROBED,
        Action.ERASURE_JUDGED,
        Action.RECEIPT_WRITTEN,
    }
    assert len({str(line).replace(str(line.sequence), "") for line in steps}) == len(steps)
    (deleted,) = [line for line in steps if line.action is Action.SERVER_DELETED]
    assert (deleted.tier, deleted.blocks, deleted.remaining, deleted.reason) == ("shared", 3, 0, "Done")
    assert [line.receipt for line in steps if line.receipt] == [f"{1:064x}"]
    assert [line.phase for line in told if line.phase][-1] == "Complete"
