"""A prefix is erased while its scopes pause: its chunks alone go from servers, and everything else is in use again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvstrata.contract.messages.prefix import PrefixSource
from kvstrata.contract.receipt.residue import ReceiptClaim, Residue
from kvstrata.contract.receipt.vocabulary import prefix_commitment
from kvstrata.plan.bundle.compile import paused_epochs
from kvstrata.plan.erasure.gather import rolled
from kvstrata.plan.erasure.policy_deletion import ABANDON
from tests.support.objects import NAMESPACE, group, invalidation, model, pod, policy, pool, redis_tier
from tests.unit.plan.invalidations import at_rest
from tests.unit.plan.rendered_pools import TEXT, rendered_by
from tests.unit.reconcile.erasing import CHUNK, KIND, World
from tests.unit.reconcile.erasure_stories import acked, run

PROVEN = {ReceiptClaim.UNREACHABLE, ReceiptClaim.ERASED, ReceiptClaim.VERIFIED}
SOURCE = PrefixSource(text=TEXT)


def world(*objects: Any) -> World:
    """Two tenants that have a prefix and other blocks in a Redis tier and in two pods."""
    plain = {"managed": {"tls": {"mode": "Disabled"}}}
    sim = at_rest(redis_tier(encryption="Required", redis=plain), policy("acme"), policy("globex"), *objects)
    listing = model(tiers=("cpu", "shared"))
    sim.put(listing)
    sim.put(*(pod(f"pod-{number}", render_id=rendered_by(listing)) for number in range(2)))
    sim.come_to_rest()
    made = World(sim)
    sim.come_to_rest()
    hashes = sim.renderer._made(sim.pod("pod-0"), sim.acks[sim.pod("pod-0").uid], SOURCE).hashes
    chunks = tuple(hashes[at : at + 32] for at in range(0, len(hashes), 32))
    for tenant in ("acme", "globex"):
        made.server.fill(sim.world.domain_id or "", sim.entry(tenant).keyspace, chunks=chunks)
    return made


def order(made: World, tenants: tuple[str, ...] = ("acme",), **spec: Any) -> None:
    """Order the erasure of the prefix."""
    prefix: dict[str, Any] = {"modelRef": {"name": "tiny"}, "content": {"text": TEXT}}
    prefix |= {"tenants": list(tenants)} if tenants else {}
    made.sim.put(invalidation("leave", scope={"prefix": prefix}, **{"mode": "Eager", "hbm": "ResetEngine", **spec}))


async def complete(made: World) -> None:
    """Wait for the end, and for what follows from it."""
    await made.until(lambda: made.phase == "Complete")
    await made.turn(1)


def test_of_a_prefix_its_chunks_go_and_the_keyspace_is_in_use_again_with_all_else() -> None:
    made = world()
    sim = made.sim
    old, other = sim.entry("acme"), sim.entry("globex")
    before = set(made.server.values[old.keyspace])
    theirs = set(made.server.values[other.keyspace])

    async def story(w: World) -> None:
        order(w)
        await w.until(lambda: w.status.get("rolledTime"))
        paused = w.sim.entry("acme")
        assert (paused.suspended, paused.resumes, paused.keyspace) == (True, True, old.keyspace)
        assert old.keyspace not in w.sim.bundle().keyspaces
        assert not w.sim.entry("globex").suspended
        await acked(w)
        await complete(w)

    run(story, made)
    assert made.sim.condition(KIND, "leave", "Complete") == ("True", "ErasedAndVerified")
    assert made.proven() == PROVEN
    now = sim.entry("acme")
    assert (now.keyspace, now.suspended, now.resumes, now.keys) == (old.keyspace, False, False, old.keys)
    left = made.server.values[old.keyspace]
    assert left < before
    assert len(left) == 3
    (chunks,) = {one.chunks for one in made.jobs.ran}
    assert {name.rpartition(":")[2] for name in before - left} == set(chunks)
    assert made.server.values[other.keyspace] == theirs
    assert sorted(made.gates.resets) == ["pod-0", "pod-1"]
    assert all(request.keyspaces == (old.keyspace,) for _, request in made.gates.erased)
    assert sim.status("TenantCachePolicy", "acme")["scope"]["epoch"] in sim.world.data_keys
    assert sim.unsettled() == {}


def test_a_receipt_of_a_prefix_commits_to_it_and_tells_no_text() -> None:
    made = world()

    async def story(w: World) -> None:
        order(w)
        await acked(w)
        await complete(w)

    run(story, made)
    (facts,) = made.chain.issued
    (revoked,) = facts.revoked
    assert (str(revoked.kind), revoked.name, revoked.new) == ("Prefix", "tiny", None)
    assert revoked.old == prefix_commitment(made.sim.world.domain_key or b"", "tiny", SOURCE.digest)
    assert (str(facts.subject.scope), facts.subject.scope_name, facts.subject.tenants) == ("prefix", "tiny", ("acme",))
    assert facts.keys == ()
    assert TEXT[:8] not in repr(facts)


def test_a_prefix_is_committed_to_under_the_key_of_when_its_erasure_began() -> None:
    made = world()
    key = made.sim.world.domain_key or b""

    async def story(w: World) -> None:
        order(w)
        await w.until(lambda: w.status.get("rolledTime"))
        seen = w.sim.world
        (asked,) = seen.invalidations.values()
        kept = seen.erasures[asked.uid].record
        for other in (None, b"another key of thirty-two bytes."):
            told = rolled(replace(seen, domain_key=other), asked, kept)
            assert told is not None
            assert [one.old for one in told.revoked] == [prefix_commitment(key, "tiny", SOURCE.digest)]

    run(story, made)


@pytest.mark.parametrize("how", ["a pod finds it", "given up", "too late"])
def test_where_it_is_not_proven_the_scopes_get_new_epochs_and_what_is_left_is_out_of_reach(how: str) -> None:
    made = world()
    old = made.sim.entry("acme").keyspace

    async def story(w: World) -> None:
        if how == "a pod finds it":
            w.gates.finding.add("pod-1")
        order(w, **({"deadline": "20s"} if how == "too late" else {}))
        await acked(w)
        if how == "given up":
            raw = w.sim.kube.objects[(KIND, NAMESPACE, "leave")]
            w.sim.put({**raw, "metadata": {**raw["metadata"], "annotations": {ABANDON: "no time"}}})
        await w.until(lambda: w.phase == "Failed", tick_s=5)
        await w.turn(1)

    run(story, made)
    entry = made.sim.entry("acme")
    assert entry.keyspace != old
    assert not entry.suspended
    assert paused_epochs(made.sim.world) == frozenset()
    assert made.sim.unsettled() == {}


def test_without_tenants_everybodys_chunks_go_and_pools_are_named_as_left() -> None:
    content = {"prefixes": [{"name": "p0", "text": TEXT}]}
    made = world(group("lab", "ann"), policy("ann", group="lab"), pool("manual", **content))
    keyspaces = {tenant: made.sim.entry(tenant).keyspace for tenant in ("acme", "globex", "ann")}

    async def story(w: World) -> None:
        order(w, tenants=())
        await w.until(lambda: w.status.get("rolledTime"))
        assert all(w.sim.entry(tenant).resumes for tenant in keyspaces)
        await acked(w)
        await complete(w)

    run(story, made)
    assert all(len(names) == 3 for names in made.server.values.values())
    assert {tenant: made.sim.entry(tenant).keyspace for tenant in keyspaces} == keyspaces
    (facts,) = made.chain.issued
    left = {item.about for item in facts.residue if item.kind is Residue.SHARED_SCOPE_EXCLUDED}
    assert left == {"manual"}
    after = [(item.about, item.count) for item in facts.residue if item.kind is Residue.CONTINUATIONS]
    assert after == [("shared", 6)], "of the blocks that stay, all may be of text after the prefix"


def test_where_a_tier_keeps_no_other_block_of_the_scopes_no_continuation_is_named() -> None:
    made = world()
    chunks = {name.rpartition(":")[2] for name in made.server.values[made.sim.entry("acme").keyspace]}
    prefix = tuple(bytes.fromhex(one) for one in chunks if one[2:] != CHUNK[1:].hex())
    made.server.fill(made.sim.world.domain_id or "", made.sim.entry("acme").keyspace, blocks=0, chunks=prefix)

    async def story(w: World) -> None:
        order(w)
        await acked(w)
        await complete(w)

    run(story, made)
    (facts,) = made.chain.issued
    assert made.proven() == PROVEN
    assert Residue.CONTINUATIONS not in {item.kind for item in facts.residue}


@pytest.mark.parametrize(
    ("says", "text"),
    [({"pod-1": {"seasoning": b"another tokenizer"}}, "different tokens"), ({"pod-0": {"hashes": b""}}, "tokens")],
)
def test_a_prefix_that_pods_do_not_agree_on_or_that_fills_no_chunk_is_refused_and_nothing_is_done(
    says: dict[str, dict[str, Any]], text: str
) -> None:
    made = world()
    made.sim.renderer.overrides = says
    before = made.sim.bundle()

    async def story(w: World) -> None:
        order(w)
        await w.until(lambda: w.phase == "Failed")

    run(story, made)
    assert made.sim.condition(KIND, "leave", "Failed") == ("True", "PrefixRefused")
    assert text in made.status["message"]
    assert made.sim.bundle() == before
    assert made.kept() == []


def test_a_pod_that_names_no_chunks_yet_is_waited_for() -> None:
    made = world()
    made.sim.renderer.silent = {"pod-0", "pod-1"}

    async def story(w: World) -> None:
        order(w)
        await w.until(lambda: "chunks of the prefix" in w.status.get("message", ""))
        assert not w.phase
        w.sim.renderer.silent = set()
        await acked(w)
        await complete(w)

    run(story, made)


def engine_is(made: World, name: str, *, ready: bool) -> None:
    """Let a pod tell whether its engine can be asked."""
    found = made.sim.pod(name)
    made.sim.acks[found.uid] = replace(made.sim.acks[found.uid], engine_ready=ready)
    made.sim._report(found, made.sim.acks[found.uid])


def test_nothing_is_done_while_a_pod_has_another_template_which_makes_other_chunks() -> None:
    made = world()
    before = made.sim.bundle()
    made.sim.put(pod("old", render_id="0123456789abcdef", ready=False))

    async def story(w: World) -> None:
        order(w)
        await w.until(lambda: "old has another template" in w.status.get("message", ""))
        assert w.sim.condition(KIND, "leave", "Reconciling") == ("True", "NamingChunks")
        assert not w.phase
        assert w.sim.bundle().entries == before.entries
        w.sim.put(pod("old", render_id="0123456789abcdef", ready=False, state="terminated"))
        await acked(w)
        await complete(w)

    run(story, made)
    assert made.proven() == PROVEN


def test_a_pod_that_cannot_be_asked_is_waited_for_although_others_answered() -> None:
    made = world()
    engine_is(made, "pod-1", ready=False)

    async def story(w: World) -> None:
        order(w)
        await w.until(lambda: "waiting for pod-1" in w.status.get("message", ""))
        assert not w.phase
        engine_is(w, "pod-1", ready=True)
        await acked(w)
        await complete(w)

    run(story, made)
    assert made.proven() == PROVEN


def test_who_leads_next_keeps_scopes_paused_before_it_has_read_what_is_kept() -> None:
    made = world()
    old = made.sim.entry("acme").keyspace

    async def begin(w: World) -> None:
        order(w)
        await acked(w)
        await w.until(lambda: w.phase in ("WaitingOutWrites", "Erasing"))

    run(begin, made)
    made.sim.erase = lambda _namespace, _order: None
    made.sim.restart()
    made.sim.settle()
    assert made.sim.entry("acme").resumes
    assert old not in made.sim.bundle().keyspaces

    async def rest(w: World) -> None:
        await acked(w)
        await complete(w)

    run(rest, made)
    assert made.proven() == PROVEN
    assert made.sim.entry("acme").keyspace == old
    assert not made.sim.entry("acme").suspended


def forgotten(made: World) -> None:
    """Have the operator die when its intent is written and nothing is kept, and with it what pods said."""
    order(made)
    made.sim.settle()
    assert made.phase == "Rolling"
    assert made.kept() == []
    made.sim.restart()


def test_an_operator_that_dies_before_anything_is_kept_is_followed_by_one_that_has_the_chunks_named_again() -> None:
    made = world()
    forgotten(made)

    async def story(w: World) -> None:
        await acked(w)
        await complete(w)

    run(story, made)
    assert made.proven() == PROVEN
    assert len(made.server.values[made.sim.entry("acme").keyspace]) == 3


@pytest.mark.parametrize("how", ["they disagree", "nobody says"])
def test_what_cannot_be_named_again_ends_and_nobody_pauses_any_more(how: str) -> None:
    made = world()
    before = made.sim.entry("acme")
    if how == "nobody says":
        order_with_deadline = {"deadline": "1m"}
        order(made, **order_with_deadline)
        made.sim.settle()
        made.sim.restart()
        made.sim.renderer.silent = {"pod-0", "pod-1"}
    else:
        forgotten(made)
        made.sim.renderer.overrides = {"pod-1": {"seasoning": b"another tokenizer"}}

    async def story(w: World) -> None:
        await w.until(lambda: w.phase == "Failed", tick_s=5)
        await w.until(lambda: w.board is not None and not w.board.open)

    run(story, made)
    reason = "PrefixRefused" if how == "they disagree" else "DeadlineExceeded"
    assert made.sim.condition(KIND, "leave", "Failed") == ("True", reason)
    now = made.sim.entry("acme")
    assert (now.keyspace, now.suspended) == (before.keyspace, False)
    assert made.kept() == []


def test_a_tenant_whose_spec_becomes_invalid_meanwhile_is_in_use_again_as_it_was() -> None:
    made = world()

    async def story(w: World) -> None:
        order(w)
        await acked(w)
        w.sim.edit("TenantCachePolicy", "acme", models={"names": ["gone"]})
        await w.turn(1)
        assert w.sim.entry("acme").suspended
        await w.until(lambda: w.phase == "Complete")
        await w.turn(1)

    run(story, made)
    entry = made.sim.entry("acme")
    assert (entry.suspended, entry.resumes) == (False, False)
