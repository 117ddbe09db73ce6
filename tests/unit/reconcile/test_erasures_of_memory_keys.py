"""Data keys that were in memory only: an erasure says that they are destroyed when everybody who had them let go."""

from __future__ import annotations

from kvstrata.contract.receiptresidue import Claim
from kvstrata.contract.receiptwords import KeyCustody, Party
from tests.support.objects import domain, model, policy, redis_tier
from tests.unit.plan.invalidations import at_rest
from tests.unit.reconcile.erasing import World
from tests.unit.reconcile.erasure_stories import ALL, order, run


def world(pods: int = 2) -> World:
    """A tenant with blocks in a Redis tier and in pods, which hold ciphertext of keys that no object has."""
    plain = {"managed": {"tls": {"mode": "Disabled"}}}
    tier = redis_tier(encryption="Required", redis=plain)
    sim = at_rest(tier, domain(keyCustody="Memory"), policy("acme"), policy("globex"), pods=pods)
    sim.put(model(tiers=("cpu", "shared")))
    sim.come_to_rest()
    made = World(sim)
    sim.come_to_rest()
    made.server.fill(sim.world.domain_id or "", sim.entry("acme").keyspace, sim.entry("globex").keyspace)
    return made


async def brought(w: World) -> None:
    await w.keys.turn()
    assert w.keys.named() == {*w.keys.held["pod-0"]} != set()


async def until_complete(w: World) -> None:
    await w.until(lambda: w.status.get("rolledTime"))
    for name in w.addresses:
        w.keys.say(name)
    await w.until(lambda: w.phase == "Complete")


def why_not_destroyed(w: World) -> str:
    return next(one["message"] for one in w.status["conditions"] if one["type"] == "KeysDestroyed")


def test_keys_are_destroyed_when_every_pod_that_had_them_says_that_they_are_gone() -> None:
    made = world()

    async def story(w: World) -> None:
        await brought(w)
        (key,) = w.sim.entry("acme").keys
        order(w.sim)
        await until_complete(w)
        (told,) = w.chain.issued[-1].keys
        assert (told.fingerprint, told.custody) == (key.id, KeyCustody.MEMORY)
        assert told.removed is not None
        assert told.destroyed is not None
        assert told.destroyed.by is Party.OPERATOR

    run(story, made)
    assert made.proven() == ALL | {Claim.KEYS_DESTROYED}
    assert "KeysDestroyed" in made.holds()


def test_a_pod_that_ended_has_let_go() -> None:
    made = world(pods=3)

    async def story(w: World) -> None:
        await brought(w)
        w.keys.end("pod-2")
        order(w.sim)
        await until_complete(w)

    run(story, made)
    assert made.proven() == ALL | {Claim.KEYS_DESTROYED}


def test_a_pod_that_says_that_it_still_has_the_key_is_believed() -> None:
    made = world()

    async def story(w: World) -> None:
        await brought(w)
        w.keys.forgetting = False
        order(w.sim)
        await until_complete(w)

    run(story, made)
    assert made.proven() == ALL
    assert "2 of 2 pods have not let go" in why_not_destroyed(made)


def test_a_pod_in_contact_that_does_not_answer_is_asked_again() -> None:
    made = world()

    async def story(w: World) -> None:
        await brought(w)
        order(w.sim)
        await w.until(lambda: w.status.get("rolledTime"))
        for name in w.addresses:
            w.keys.say(name)
        w.keys.away.add("pod-1")
        await w.until(lambda: any("pod pod-1 did not answer" in one["message"] for one in w.status["conditions"]))
        assert w.phase != "Complete"
        w.keys.away.clear()
        await w.until(lambda: w.phase == "Complete")

    run(story, made)
    assert made.proven() == ALL | {Claim.KEYS_DESTROYED}


def test_a_key_that_came_back_from_pods_was_with_a_former_operator_and_is_never_called_destroyed() -> None:
    made = world()

    async def story(w: World) -> None:
        await brought(w)

    async def after(w: World) -> None:
        await w.keys.turn()
        assert not w.sim.world.keys_awaited
        order(w.sim)
        await until_complete(w)

    run(story, made)
    made.sim.restart()
    run(after, made)
    assert made.proven() == ALL
    assert "an operator before this one is not known to have ended" in why_not_destroyed(made)


def test_an_operator_that_takes_an_erasure_over_gives_the_key_to_nobody_and_does_not_call_it_destroyed() -> None:
    made = world()

    async def story(w: World) -> None:
        await brought(w)
        order(w.sim)
        await w.until(lambda: w.status.get("rolledTime"))

    run(story, made)
    made.sim.restart()
    run(until_complete, made)
    assert made.proven() == ALL
    assert "never had the key" in why_not_destroyed(made)
