"""An eager invalidation is carried out to its receipt, whoever is away, dies or leads meanwhile."""

from __future__ import annotations

import base64
import logging

import pytest
from prometheus_client import REGISTRY

from kvstrata import __version__
from kvstrata.contract.messages.audit import Action
from kvstrata.contract.receipt.facts import Component
from kvstrata.plan.erasure.policy_deletion import FINALIZER
from tests.support.audit import lines
from tests.support.objects import NAMESPACE, Raw, group, own, policy
from tests.unit.reconcile.erasing import FIRST_DIGEST, KIND, World
from tests.unit.reconcile.erasure_stories import ALL, acked, order, run, world


def named(made: World, *others: tuple[str, int]) -> tuple[Component, ...]:
    """Return the versions of a receipt: the model's identities are that of its two pods, and `others`."""
    identity = made.sim.world.models["tiny"].status.identity
    computed = [(f"{identity}.{'f1' * 8}", 2), *others]
    return (
        Component("operator", __version__, 1),
        *(Component("CachedModel tiny", name, pods) for name, pods in computed),
        Component("tiers on Redis", "8.0.0", 1),
    )


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
    (receipt,) = made.chain.issued
    assert receipt.versions == named(made)
    assert made.status["receiptDigest"] == FIRST_DIGEST
    assert made.sim.status("CacheDomain", "default")["receipts"] == {"count": 1, "head": FIRST_DIGEST}


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
    assert facts.versions == named(made)


@pytest.mark.parametrize(("scope", "name"), [({"group": "lab"}, "lab"), ({"all": True}, "")])
def test_what_a_group_or_all_tenants_have_is_erased_with_proof(scope: Raw, name: str) -> None:
    made = world()
    sharing = {"isolation": "Group", "groupRef": {"name": "lab"}}
    made.sim.put(group("lab", "acme", "initech"), policy("initech", **sharing))
    made.sim.edit("TenantCachePolicy", "acme", **sharing)
    made.sim.ack_all()
    shared, own_of_globex = made.sim.entry("acme").keyspace, made.sim.entry("globex").keyspace
    assert made.sim.entry("initech").keyspace == shared
    made.server.fill(made.sim.world.domain_id or "", shared)

    async def story(w: World) -> None:
        order(w.sim, scope=scope)
        await acked(w)
        await w.until(lambda: w.phase == "Complete")

    run(story, made)
    assert made.proven() == ALL
    assert shared not in made.server.values
    assert (own_of_globex in made.server.values) is ("group" in scope)
    (facts,) = made.chain.issued
    assert (str(facts.subject.scope), facts.subject.scope_name) == (next(iter(scope)), name)
    assert ("Group", "lab") in {(str(one.kind), one.name) for one in facts.revoked}


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


@pytest.mark.parametrize("dies", [False, True], ids=["goes on", "dies"])
def test_an_operator_that_begins_before_it_has_checked_the_servers_names_what_they_run(
    dies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = world()
    made.sim.store.domain(NAMESPACE).backends.clear()
    monkeypatch.setattr(made.sim, "tend", lambda order: None)

    async def begun(w: World) -> None:
        order(w.sim)
        await w.until(lambda: w.kept())
        assert w.sim.world.backends == {}, "no check is over"
        monkeypatch.undo()

    async def ended(w: World) -> None:
        await acked(w)
        await w.until(lambda: w.phase == "Complete")

    async def both(w: World) -> None:
        await begun(w)
        await ended(w)

    if dies:
        run(begun, made)
        made.sim.restart()
        run(ended, made)
    else:
        run(both, made)
    (receipt,) = made.chain.issued
    assert receipt.versions == named(made)
    assert made.proven() == ALL


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
    found = figure("kvstrata_erasure_orphans_total", outcome="found")
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
    assert [line.receipt for line in steps if line.receipt] == [FIRST_DIGEST]
    assert [line.phase for line in told if line.phase][-1] == "Complete"
