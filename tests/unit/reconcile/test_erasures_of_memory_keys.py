"""Data keys that were in memory only: an erasure says that they are destroyed when everybody who had them let go."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from kvstrata.contract.receipt.residue import Claim
from kvstrata.contract.receipt.vocabulary import KeyCustody, Party
from kvstrata.plan.erasure.next_step import LOOK_AGAIN_S
from kvstrata.reconcile.erasure.keys import KeyRevoker
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


async def come_back(w: World) -> None:
    await w.keys.turn()
    assert not w.sim.world.keys_awaited


async def come_back_and_erased(w: World) -> None:
    await come_back(w)
    order(w.sim)
    await until_complete(w)


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
    assert "2 of 2 holders have not let go" in why_not_destroyed(made)


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


def test_of_keys_that_came_back_from_pods_the_end_is_known_if_the_operator_before_left_word() -> None:
    made = world()

    async def story(w: World) -> None:
        await brought(w)
        await w.sim.holders.leave()

    run(story, made)
    made.sim.restart()
    run(come_back_and_erased, made)
    assert made.proven() == ALL | {Claim.KEYS_DESTROYED}


def test_an_operator_that_went_without_anybody_seeing_its_end_may_have_what_came_back_from_pods_for_ever() -> None:
    made = world()
    run(brought, made)
    made.sim.restart()
    run(come_back, made)
    made.sim.restart()
    run(come_back_and_erased, made)
    assert made.proven() == ALL
    assert "among them op-1" in why_not_destroyed(made)


def test_a_key_that_was_drawn_after_it_went_was_never_with_it() -> None:
    made = world()
    run(brought, made)
    made.sim.restart()

    async def drawn_anew(w: World) -> None:
        await come_back(w)
        w.sim.edit("TenantCachePolicy", "acme", cacheGeneration=1)
        await w.keys.turn(61)
        await w.keys.turn(61)
        await w.sim.holders.leave()

    run(drawn_anew, made)
    made.sim.restart()
    run(come_back_and_erased, made)
    assert made.proven() == ALL | {Claim.KEYS_DESTROYED}


def test_an_operator_that_takes_an_erasure_over_gives_the_key_to_nobody_and_hears_from_those_who_had_it() -> None:
    made = world()

    async def story(w: World) -> None:
        await brought(w)
        order(w.sim)
        await w.until(lambda: w.status.get("rolledTime"))
        await w.sim.holders.leave()

    run(story, made)
    made.sim.restart()
    run(until_complete, made)
    assert made.proven() == ALL | {Claim.KEYS_DESTROYED}


def test_one_that_takes_an_erasure_over_does_not_call_the_key_destroyed_if_the_one_before_went_unseen() -> None:
    made = world()

    async def story(w: World) -> None:
        await brought(w)
        order(w.sim)
        await w.until(lambda: w.status.get("rolledTime"))

    run(story, made)
    made.sim.restart()
    run(until_complete, made)
    assert made.proven() == ALL
    assert "among them op-1" in why_not_destroyed(made)


@pytest.mark.parametrize("ask", ["revoke", "destroy"])
def test_a_custody_that_has_no_news_is_asked_again_after_a_while_and_not_at_once(
    ask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = world()
    asked: list[Any] = []
    crew = made.crew

    async def nothing(*about: Any) -> tuple[()]:
        asked.append(about)
        return ()

    async def sleep(seconds: float) -> None:
        await (asyncio.Event().wait() if seconds == LOOK_AGAIN_S else asyncio.sleep(0))

    monkeypatch.setattr(KeyRevoker, ask, nothing)
    monkeypatch.setattr(made, "crew", lambda: replace(crew(), sleep=sleep))

    async def story(w: World) -> None:
        await brought(w)
        order(w.sim)
        await w.until(lambda: w.status.get("rolledTime"))
        for name in w.addresses:
            w.keys.say(name)
        await w.until(lambda: asked)
        for _ in range(5):
            await w.turn(1)
        assert len(asked) == 1

    run(story, made)
