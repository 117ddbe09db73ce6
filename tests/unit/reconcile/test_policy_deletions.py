"""A policy that is deleted goes when a receipt says what became of what its tenant had, whoever dies meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import pytest

from kvstrata.contract.receiptclaims import claims
from kvstrata.contract.receiptfacts import Erasure
from kvstrata.contract.receiptresidue import Claim, Residue
from kvstrata.contract.receiptwords import SubjectKind
from kvstrata.model.ending import Ending
from kvstrata.plan.deletion import ABANDON, ERASES, FINALIZER, invalidation_name
from kvstrata.reconcile.erasures.keep import PREFIX
from tests.support.objects import NAMESPACE, Raw, group, invalidation, model, own, policy, redis_tier
from tests.support.worlds import Simulation
from tests.unit.plan.invalidations import at_rest
from tests.unit.reconcile.erasing import KIND, World

POLICY = "TenantCachePolicy"
ALL = {Claim.UNREACHABLE, Claim.KEYS_REVOKED, Claim.ERASED, Claim.VERIFIED}


def world(*objects: Raw, pods: int = 2) -> World:
    """Two tenants with blocks in a Redis tier that encrypts and in pods."""
    tier = redis_tier(encryption="Required", redis={"managed": {"tls": {"mode": "Disabled"}}})
    sim = at_rest(tier, policy("acme"), policy("globex"), *objects, pods=pods)
    sim.put(model(tiers=("cpu", "shared")))
    sim.come_to_rest()
    made = World(sim)
    sim.come_to_rest()
    made.server.fill(sim.world.domain_id or "", sim.entry("acme").keyspace, sim.entry("globex").keyspace)
    return made


def run(story: Callable[[World], Coroutine[Any, Any, None]], made: World) -> None:
    """Let a story happen while an operator leads."""

    async def told() -> None:
        async with made.leading_operator():
            await story(made)

    asyncio.run(told())


def stored(sim: Simulation, kind: str, name: str) -> Raw | None:
    """An object, as the API server has it."""
    found: Raw | None = sim.kube.objects.get((kind, NAMESPACE, name))
    return found


def erasing(sim: Simulation) -> Raw | None:
    """The CacheInvalidation that a deletion ordered."""
    found = (raw for (kind, _, _), raw in sim.kube.objects.items() if kind == KIND)
    return next((raw for raw in found if ERASES in raw["metadata"].get("annotations", {})), None)


def phase(sim: Simulation) -> str:
    """Where it stands."""
    found = erasing(sim)
    return str((found or {}).get("status", {}).get("phase", ""))


def is_gone(made: World, name: str = "acme") -> bool:
    """Whether a policy is gone, and nothing is kept of its erasure."""
    return stored(made.sim, POLICY, name) is None and not made.kept()


def annotate(sim: Simulation, kind: str, name: str, **annotations: str) -> None:
    """Annotate an object, as a person would."""
    raw = dict(sim.kube.objects[(kind, NAMESPACE, name)])
    merged = {**raw["metadata"].get("annotations", {}), **annotations}
    sim.put({**raw, "metadata": {**raw["metadata"], "annotations": merged}})


async def gone(made: World, *, name: str = "acme", tick_s: float = 1.0, turns: int = 400) -> None:
    """Let time pass, and pods acknowledge, until a policy is gone."""
    for _ in range(turns):
        if is_gone(made, name):
            return
        for pod in made.sim.world.pods.get("tiny", {}):
            made.sim.ack(pod)
        await made.turn(tick_s)
    raise AssertionError(f"it never went: {stored(made.sim, POLICY, name)}, {erasing(made.sim)}")


def residue(facts: Erasure) -> set[Residue]:
    return {item.kind for item in facts.residue}


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
    assert Claim.VERIFIED not in claims(first)
    assert Claim.VERIFIED in claims(second)


async def acked_until(made: World, holds: Callable[[], object], *, tick_s: float = 1.0) -> None:
    """Let time pass, and pods acknowledge, until something is so."""
    for _ in range(400):
        if holds():
            return
        for pod in made.sim.world.pods.get("tiny", {}):
            made.sim.ack(pod)
        await made.turn(tick_s)
    raise AssertionError(f"it never came: {stored(made.sim, POLICY, 'acme')}, {erasing(made.sim)}")


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


# a namespace that is deleted


def end_pods(sim: Simulation) -> None:
    """Let every pod end, as a kubelet reports it, and go."""
    for name in list(sim.world.pods.get("tiny", {})):
        raw = dict(sim.kube.objects[("Pod", NAMESPACE, name)])
        ended = [{"name": "engine", "state": {"terminated": {}}}]
        sim.put({**raw, "status": {**raw["status"], "phase": "Succeeded", "containerStatuses": ended}})
        sim.delete("Pod", name)


def delete_namespace(sim: Simulation, *, last: str = POLICY) -> None:
    """Delete all that a namespace has, as its controller does; objects of the kind `last` after all others."""
    sim.kube.api.ending.add(NAMESPACE)
    slots = [(kind, name) for kind, where, name in sim.kube.objects if where == NAMESPACE and kind != "Pod"]
    for kind, name in sorted(slots, key=lambda slot: slot[0] == last):
        if (kind, NAMESPACE, name) in sim.kube.objects:
            sim.delete(kind, name)


def left(sim: Simulation) -> list[tuple[str, str]]:
    """What a namespace still has."""
    return [(kind, name) for kind, where, name in sim.kube.objects if where == NAMESPACE and kind != "Event"]


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
        assert set(claims(facts)) & {Claim.UNREACHABLE, Claim.ERASED, Claim.VERIFIED} == {Claim.UNREACHABLE}
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


def test_an_operator_that_comes_before_the_domain_goes_says_that_it_does_not_know_what_went() -> None:
    made = world()
    sim = made.sim
    sim.kube.api.ending.add(NAMESPACE)
    for kind, name in (("CachedModel", "tiny"), ("CacheTier", "shared"), ("CacheTier", "cpu"), (POLICY, "acme")):
        sim.delete(kind, name)
    end_pods(sim)
    sim.restart()
    run(partial(gone, tick_s=5), made)
    (facts,) = made.chain.issued
    assert [item.about for item in facts.residue if item.kind is Residue.TIER_LOST] == [""]
    assert Claim.ERASED not in claims(facts)
