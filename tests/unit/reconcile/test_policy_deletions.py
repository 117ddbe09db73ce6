"""A policy that is deleted goes when a receipt says what became of what its tenant had, whoever dies meanwhile."""

from __future__ import annotations

from datetime import timedelta

import pytest

from kvstrata.contract.receipt.claims import claims
from kvstrata.contract.receipt.residue import ReceiptClaim, Residue
from kvstrata.contract.receipt.vocabulary import SubjectKind
from kvstrata.objects.labels import ERASES
from kvstrata.plan.erasure.policy_deletion import ABANDON, FINALIZER, invalidation_name
from tests.support.objects import NAMESPACE, Raw, group, invalidation, model, own, policy, redis_tier
from tests.support.worlds import Simulation
from tests.unit.plan.invalidations import at_rest
from tests.unit.reconcile.deletions import (
    ALL,
    POLICY,
    acked_until,
    annotate,
    delete_namespace,
    end_pods,
    erasing,
    gone,
    is_gone,
    phase,
    residue,
    run,
    stored,
    world,
)
from tests.unit.reconcile.erasing import KIND, World


def test_a_policy_has_its_finalizer_before_it_has_an_epoch() -> None:
    sim = Simulation(policy("acme"))
    seen: list[tuple[bool, bool]] = []

    def look(verb: str, kind: str, name: str) -> None:
        raw = stored(sim, POLICY, "acme") or {}
        seen.append((FINALIZER in raw["metadata"].get("finalizers", ()), bool((raw.get("status") or {}).get("scope"))))

    sim.kube.after_write = look
    sim.settle()
    assert (True, True) in seen
    assert (False, True) not in seen
    assert sim.condition(POLICY, "acme", "ErasesOnDeletion") == ("True", "Erases")
    assert sim.unsettled() == {}


def test_who_wants_nothing_erased_has_no_finalizer_and_who_changes_their_mind_loses_it() -> None:
    sim = Simulation(policy("acme", deletionPolicy="Abandon"), policy("globex"))
    sim.settle()
    assert not stored(sim, POLICY, "acme")["metadata"].get("finalizers")  # type: ignore[index]
    assert sim.condition(POLICY, "acme", "ErasesOnDeletion") == ("", "")
    sim.edit(POLICY, "globex", deletionPolicy="Abandon")
    sim.edit(POLICY, "acme", deletionPolicy="Erase")
    sim.settle()
    assert not stored(sim, POLICY, "globex")["metadata"].get("finalizers")  # type: ignore[index]
    assert stored(sim, POLICY, "acme")["metadata"]["finalizers"] == [FINALIZER]  # type: ignore[index]
    sim.delete(POLICY, "globex")
    assert stored(sim, POLICY, "globex") is None


def test_a_tenant_that_shares_all_that_it_has_goes_at_once_and_is_told_so_before() -> None:
    sim = Simulation(group("lab", "a"), policy("a", group="lab"), policy("b", isolation="Public"))
    sim.settle()
    for name in "ab":
        assert sim.condition(POLICY, name, "ErasesOnDeletion") == ("False", "SharesAll")
        sim.delete(POLICY, name)
        assert stored(sim, POLICY, name) is None
    sim.settle()
    assert sim.unsettled() == {}


def test_a_tenant_that_joins_a_group_loses_its_finalizer_after_its_own_epoch() -> None:
    sim = at_rest(policy("acme"), group("lab", "acme"))
    sim.kube.log.clear()
    sim.edit(POLICY, "acme", isolation="Group", groupRef={"name": "lab"})
    sim.come_to_rest()
    assert sim.status(POLICY, "acme")["scope"]["kind"] == "Group"
    assert FINALIZER not in (stored(sim, POLICY, "acme") or {})["metadata"].get("finalizers", [])
    own_writes = [verb for verb, *what in sim.kube.log if what == [POLICY, "acme"] and verb != "put"]
    assert own_writes[0] == "status"


def test_the_finalizers_of_others_stay() -> None:
    sim = Simulation(own(POLICY, "acme", policy("acme")["spec"], finalizers=["other.io/wait"]))
    sim.settle()
    assert stored(sim, POLICY, "acme")["metadata"]["finalizers"] == ["other.io/wait", FINALIZER]  # type: ignore[index]
    sim.edit(POLICY, "acme", deletionPolicy="Abandon")
    sim.delete(POLICY, "acme")
    sim.settle()
    assert stored(sim, POLICY, "acme")["metadata"]["finalizers"] == ["other.io/wait"]  # type: ignore[index]


def test_a_deleted_policy_has_no_access_from_then_on_and_goes_with_a_receipt_that_proves_all_of_it() -> None:
    made = world()
    old, other = made.sim.entry("acme").keyspace, made.sim.entry("globex").keyspace
    epoch = made.sim.status(POLICY, "acme")["scope"]["epoch"]
    assert epoch in made.sim.world.data_keys

    async def story(w: World) -> None:
        w.sim.delete(POLICY, "acme")
        await w.turn()
        assert "acme" not in w.sim.bundle().entries
        assert w.sim.condition(POLICY, "acme", "Enforced") == ("False", "BeingDeleted")
        assert w.sim.condition(POLICY, "acme", "Ready") == ("False", "Erasing")
        assert w.sim.status(POLICY, "acme")["scope"]["epoch"] == epoch
        await acked_until(w, lambda: phase(w.sim) == "WaitingOutWrites")
        w.sim.enqueue_all()
        await w.turn()
        assert epoch not in w.sim.world.data_keys, "it was revoked, and is not drawn again for a policy that goes"
        await gone(w)

    run(story, made)
    assert made.proven() == ALL
    assert (old in made.server.values, other in made.server.values) == (False, True)
    (facts,) = made.chain.issued
    assert (facts.subject.scope_name, facts.subject.reason) == ("acme", "TenantCachePolicy acme was deleted")
    assert phase(made.sim) == "Complete"
    made.sim.come_to_rest()
    assert made.sim.unsettled() == {}


@pytest.mark.parametrize("where", [POLICY, KIND, "Secret"])
def test_another_operator_goes_on_wherever_one_died(where: str) -> None:
    """Each write of the API server may be the last of an operator; there is one receipt, and it proves the same."""
    number = 0
    while True:
        made = world()

        async def story(w: World, at: int = number) -> None:
            count = 0

            def hook(verb: str, kind: str, name: str) -> None:
                nonlocal count
                if kind == where and w.leading:
                    count += 1
                    w.leading = count <= at

            w.sim.delete(POLICY, "acme")
            w.sim.kube.after_write = hook
            for _ in range(200):
                if is_gone(w) or not w.leading:
                    return
                for pod in w.addresses:
                    w.sim.ack(pod)
                await w.turn(1)

        run(story, made)
        if made.leading:
            break
        made.leading = True
        made.sim.restart()
        run(gone, made)
        assert made.proven() == ALL, number
        number += 1
    assert number >= {POLICY: 2, KIND: 6, "Secret": 8}[where]


def test_an_erasure_that_failed_keeps_the_policy_until_it_is_tried_again_and_erases_the_same() -> None:
    made = world()
    old = made.sim.entry("acme").keyspace
    made.gates.finding = {"pod-1"}

    async def story(w: World) -> None:
        w.sim.delete(POLICY, "acme")
        await acked_until(w, lambda: w.sim.condition(POLICY, "acme", "Stalled") == ("True", "ErasureFailed"))
        failed = erasing(w.sim)
        assert failed is not None
        w.gates.finding = set()
        before = len(w.jobs.ran)
        w.sim.delete(KIND, failed["metadata"]["name"])
        await gone(w)
        assert [order.keyspaces for order in w.jobs.ran[before:]] == [(old,)]

    run(story, made)
    first, second = made.chain.issued
    assert ReceiptClaim.VERIFIED not in claims(first)
    assert ReceiptClaim.VERIFIED in claims(second)


def test_a_person_may_give_it_up_on_the_policy_and_the_receipt_says_so() -> None:
    made = world()
    made.server.problem = "nothing listens"

    async def story(w: World) -> None:
        w.sim.delete(POLICY, "acme")
        await acked_until(w, lambda: phase(w.sim) == "Erasing")
        annotate(w.sim, POLICY, "acme", **{ABANDON: "the servers were scrapped"})
        await gone(w)

    run(story, made)
    (facts,) = made.chain.issued
    assert Residue.ABANDONED in residue(facts)
    assert "the servers were scrapped" in facts.subject.reason


def test_at_the_domains_deadline_a_policy_goes_with_a_receipt_that_names_the_rest() -> None:
    made = world()
    made.sim.edit("CacheDomain", "default", deletionDeadline="30m")
    made.sim.come_to_rest()
    made.server.problem = "nothing listens"
    began = made.sim.now

    async def story(w: World) -> None:
        w.sim.delete(POLICY, "acme")
        await gone(w, tick_s=15)

    run(story, made)
    assert 1800 <= (made.sim.now - began).total_seconds() < 2400
    (facts,) = made.chain.issued
    assert ReceiptClaim.VERIFIED not in claims(facts)
    assert ReceiptClaim.UNREACHABLE in claims(facts)


EXTERNAL = {"external": {"endpoints": ["redis.example:6379"]}}


@pytest.mark.parametrize(("tier", "lost"), [(EXTERNAL, ["shared"]), ({"managed": {}}, [])])
@pytest.mark.parametrize("before", ["", "ending", "gone"])
def test_a_policy_goes_although_a_tier_with_its_blocks_went_first_and_its_receipt_names_what_may_remain(
    tier: Raw, lost: list[str], before: str
) -> None:
    sim = at_rest(redis_tier(redis=tier), policy("acme"), pods=2)
    sim.put(model(tiers=("cpu", "shared")))
    made = World(sim)
    made.server.problem = "nothing listens"
    raw = stored(sim, "CacheTier", "shared") or {}
    sim.put({**raw, "metadata": {**raw["metadata"], "finalizers": ["foregroundDeletion"]}})
    sim.come_to_rest()

    async def story(w: World) -> None:
        if not before:
            w.sim.delete(POLICY, "acme")
            await acked_until(w, lambda: phase(w.sim) == "Erasing")
        w.sim.put(model(tiers=("cpu",)))
        w.sim.delete("CacheTier", "shared")
        if before != "ending":
            raw = stored(sim, "CacheTier", "shared") or {}
            w.sim.put({**raw, "metadata": {**raw["metadata"], "finalizers": []}})
            w.sim.store.domain(NAMESPACE).servers["shared"].clear()
        if before:
            await w.turn(5)
            w.sim.delete(POLICY, "acme")
        began = w.sim.now
        await gone(w, tick_s=5)
        assert (w.sim.now - began).total_seconds() < 120

    run(story, made)
    (facts,) = made.chain.issued
    named = [item.about for item in facts.residue if item.kind is Residue.TIER_LOST]
    assert named == (lost if before == "gone" else ["shared"])
    assert (ReceiptClaim.VERIFIED in claims(facts)) is (not named)
    reasons = [raw["reason"] for (kind, *_), raw in made.sim.kube.objects.items() if kind == "Event"]
    assert ("NotProven" in reasons) is bool(named)


@pytest.mark.parametrize("namespace_goes", [False, True])
def test_a_receipt_names_no_tier_that_had_gone_before_the_policy_came(namespace_goes: bool) -> None:
    sim = at_rest(redis_tier(redis=EXTERNAL), policy("acme"), pods=2)
    sim.put(model(tiers=("cpu", "shared")))
    sim.come_to_rest()
    made = World(sim)

    async def story(w: World) -> None:
        w.sim.put(model(tiers=("cpu",)))
        w.sim.delete("CacheTier", "shared")
        w.sim.put(policy("globex"))
        for _ in range(3):
            await w.turn(5)
        if namespace_goes:
            delete_namespace(w.sim)
            end_pods(w.sim)
            await gone(w, name="acme", tick_s=5)
        else:
            w.sim.delete(POLICY, "globex")
        await gone(w, name="globex", tick_s=5)

    run(story, made)
    lost = {facts.subject.scope_name: Residue.TIER_LOST in residue(facts) for facts in made.chain.issued}
    assert lost == {"globex": False} | ({"acme": True} if namespace_goes else {})


def test_a_policy_that_was_deleted_long_before_an_operator_saw_it_is_erased_as_any_other() -> None:
    made = world()
    made.sim.edit("CacheDomain", "default", deletionDeadline="30m")
    made.sim.come_to_rest()
    made.sim.delete(POLICY, "acme", seen=False)
    made.sim.now += timedelta(hours=2)
    made.sim.restart()
    run(gone, made)
    (facts,) = made.chain.issued
    assert set(claims(facts)) == ALL


def test_a_pod_that_never_answers_holds_a_policy_no_longer_than_the_deadline() -> None:
    made = world()
    made.sim.edit("CacheDomain", "default", deletionDeadline="30m", onStale="ServeStale")
    made.sim.come_to_rest()

    async def story(w: World) -> None:
        w.sim.delete(POLICY, "acme")
        for _ in range(20):
            await w.turn(30)
        assert phase(w.sim) == "AwaitingAcks"
        for _ in range(100):
            await w.turn(30)
            if is_gone(w):
                break
        assert is_gone(w)

    run(story, made)
    (facts,) = made.chain.issued
    assert {pod.standing for pod in facts.pods} == {"Open"}
    assert Residue.ABANDONED in residue(facts)
    assert "deletionDeadline" in facts.subject.reason


def test_at_the_deadline_a_policy_goes_without_a_receipt_that_is_refused_and_the_receipt_follows() -> None:
    made = world()
    made.sim.edit("CacheDomain", "default", deletionDeadline="30m")
    made.sim.come_to_rest()
    made.chain.conflict = "two records have one number"

    async def story(w: World) -> None:
        w.sim.delete(POLICY, "acme")
        await acked_until(w, lambda: phase(w.sim) == "Receipting")
        await acked_until(w, lambda: stored(w.sim, POLICY, "acme") is None, tick_s=15)
        await acked_until(w, lambda: phase(w.sim) == "Failed")
        assert "two records have one number" in erasing(w.sim)["status"]["message"]  # type: ignore[index]
        events = [raw for (kind, _, _), raw in w.sim.kube.objects.items() if kind == "Event"]
        assert any(raw["reason"] == "NotProven" and raw["involvedObject"]["kind"] == POLICY for raw in events)
        assert w.kept(), "the receipt is owed"
        w.chain.conflict = ""
        await acked_until(w, lambda: not w.kept())

    run(story, made)
    assert made.proven() == ALL


def test_who_leads_next_knows_of_an_erasure_that_was_given_up_before_it_plans_and_begins_no_second_one() -> None:
    made = world()
    made.server.problem = "nothing listens"

    async def begin(w: World) -> None:
        w.sim.delete(POLICY, "acme")
        await acked_until(w, lambda: phase(w.sim) == "Erasing")

    run(begin, made)
    made.sim.erase = lambda _namespace, _order: None
    annotate(made.sim, POLICY, "acme", **{ABANDON: "the servers were scrapped"})
    made.sim.restart()
    run(gone, made)
    (facts,) = made.chain.issued
    assert facts.subject.kind is SubjectKind.INVALIDATION


def test_a_policy_of_the_same_name_that_comes_at_once_does_not_keep_what_was_kept_of_its_predecessor() -> None:
    made = world()
    made.server.problem = "nothing listens"

    async def story(w: World) -> None:
        w.sim.put(invalidation(invalidation_name(w.sim.world.policies["acme"]), scope={"tenant": "globex"}))
        w.sim.delete(POLICY, "acme")
        annotate(w.sim, POLICY, "acme", **{ABANDON: "somebody sits on the name"})

        def come(verb: str, kind: str, name: str) -> None:
            if kind == POLICY and stored(w.sim, POLICY, "acme") is None:
                w.sim.kube.after_write = lambda verb, kind, name: None
                w.sim.put(policy("acme"))

        w.sim.kube.after_write = come
        await acked_until(w, lambda: w.chain.issued and not w.kept())
        assert stored(w.sim, POLICY, "acme") is not None

    run(story, made)
    assert len(made.chain.issued) == 1


def test_a_strangers_invalidation_of_its_name_is_named_and_giving_up_needs_no_invalidation() -> None:
    made = world()

    async def story(w: World) -> None:
        w.sim.delete(POLICY, "acme")
        w.sim.settle()
        taken = erasing(w.sim)
        assert taken is not None
        w.sim.delete(KIND, taken["metadata"]["name"])
        w.sim.put(invalidation(taken["metadata"]["name"], scope={"tenant": "globex"}))
        await w.turn()
        assert w.sim.condition(POLICY, "acme", "Stalled") == ("True", "NameTaken")
        annotate(w.sim, POLICY, "acme", **{ABANDON: "somebody sits on the name"})
        await gone(w)

    run(story, made)
    (facts,) = made.chain.issued
    assert (facts.subject.kind, facts.subject.name) == (SubjectKind.POLICY, "acme")
    assert Residue.ABANDONED in residue(facts)


def test_who_changes_to_abandon_meanwhile_lets_the_policy_go_and_the_erasure_goes_on() -> None:
    made = world()

    async def story(w: World) -> None:
        w.sim.delete(POLICY, "acme")
        await acked_until(w, lambda: phase(w.sim) == "WaitingOutWrites")
        w.sim.edit(POLICY, "acme", deletionPolicy="Abandon")
        await w.turn()
        assert stored(w.sim, POLICY, "acme") is None
        await acked_until(w, lambda: phase(w.sim) == "Complete")

    run(story, made)
    assert made.proven() == ALL


def test_a_successor_acts_while_its_predecessor_is_erased_and_keeps_what_it_has() -> None:
    made = world()
    old = made.sim.entry("acme").keyspace

    async def story(w: World) -> None:
        w.sim.delete(POLICY, "acme")
        await w.turn()
        w.sim.put(policy("acme", name="acme-anew"))
        await w.turn()
        new = w.sim.entry("acme")
        assert new.keyspace != old
        w.server.fill(w.sim.world.domain_id or "", new.keyspace)
        await gone(w)
        assert w.sim.entry("acme") == new
        assert {old, new.keyspace} & w.server.values.keys() == {new.keyspace}

    run(story, made)
    assert made.proven() == ALL


def test_of_two_policies_for_a_tenant_the_younger_goes_without_what_the_older_has() -> None:
    made = world(policy("acme", name="acme-too"))
    kept = made.sim.entry("acme")

    async def story(w: World) -> None:
        w.sim.delete(POLICY, "acme-too")
        await gone(w, name="acme-too")

    run(story, made)
    assert kept.keyspace in made.server.values
    assert made.sim.entry("acme") == kept


def test_a_policy_whose_spec_cannot_be_read_any_more_has_no_access_when_it_is_deleted_and_goes() -> None:
    made = world()
    made.sim.edit(POLICY, "acme", isolation="Alone")
    made.sim.settle()
    assert "acme" in made.sim.bundle().entries, "what was understood last is in force"

    async def story(w: World) -> None:
        w.sim.delete(POLICY, "acme")
        await w.turn()
        assert "acme" not in w.sim.bundle().entries
        await gone(w)

    run(story, made)
    assert made.proven() == ALL


def test_an_order_by_annotation_for_a_policy_that_lives_is_refused() -> None:
    made = world()
    raw = invalidation("forged", scope={"tenant": "acme"}, mode="Eager")
    raw["metadata"]["annotations"] = {ERASES: made.sim.world.policies["acme"].uid}
    made.sim.put(raw)
    made.sim.settle()
    assert made.sim.condition(KIND, "forged", "Failed") == ("True", "PolicyGone")
    assert "acme" in made.sim.bundle().entries
