"""Servers of tiers are emptied by Jobs, looked at, and waited for, until nothing of what was ordered is there."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from kvstrata.clients.kube import KubeError
from kvstrata.clients.redis.probe import Failure
from kvstrata.clients.redis.verifier import TierLook
from kvstrata.contract.receipt.residue import ReceiptClaim, Residue
from kvstrata.model.erasure.evidence import found_again
from kvstrata.objects.erasure.delete_job import TierDeletion
from kvstrata.plan.erasure.advance import RETRY_S
from kvstrata.plan.erasure.deletions import DeletionRun
from kvstrata.reconcile.erasure.record_store import PREFIX, RecordStore
from tests.support.objects import NAMESPACE, model
from tests.support.worlds import finish
from tests.unit.reconcile.deletions import end_pods
from tests.unit.reconcile.erasing import KIND, OPERATOR_NAMESPACE, Verifier, World
from tests.unit.reconcile.erasure_stories import ALL, acked, order, run, world


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
    store = RecordStore(made.sim.kube, OPERATOR_NAMESPACE)

    def dies_when_it_found_something(verb: str, kind: str, name: str) -> None:
        kept = finish(store.read(name.removeprefix(PREFIX))) if name.startswith(PREFIX) and verb == "replace" else None
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
            return {tier for now in w.sim.world.erasures.values() for tier in now.pinned_tiers}

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


def test_a_server_that_goes_away_after_the_deletion_is_looked_at_when_it_is_back() -> None:
    made = world()
    made.jobs.late = [partial(setattr, made.server, "problem", "nothing listens at redis:6379")]

    async def story(w: World) -> None:
        order(w.sim)
        await acked(w)
        await w.until(lambda: len(w.jobs.ran) == 1 and w.server.problem)
        for _ in range(100):
            await w.turn(10)
        assert (w.sim.condition(KIND, "leave", "Verified")[0], w.chain.issued) == ("False", [])
        assert "nothing listens at redis:6379" in w.status["message"]
        w.server.problem = ""
        await w.until(lambda: w.phase == "Complete")

    run(story, made)
    assert (len(made.jobs.ran), made.proven()) == (1, ALL)


def test_a_look_that_one_server_did_not_answer_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = world()
    silent, look = list[Failure](), Verifier.look
    made.jobs.late = [partial(silent.append, Failure("Timeout", "redis-1:6379 does not answer"))]

    async def partial_look(self: Verifier, domain: str, keyspaces: Any, chunks: Any = ()) -> TierLook:
        return replace(await look(self, domain, keyspaces, chunks), problems=tuple(silent))

    monkeypatch.setattr(Verifier, "look", partial_look)

    async def story(w: World) -> None:
        order(w.sim)
        await acked(w)
        await w.until(lambda: silent)
        looks = w.server.looks
        for _ in range(100):
            await w.turn(10)
        assert w.server.looks > looks
        assert (w.sim.condition(KIND, "leave", "Verified")[0], w.chain.issued) == ("False", [])
        silent.clear()
        await w.until(lambda: w.phase == "Complete")

    run(story, made)
    assert made.proven() == ALL


def test_a_tier_that_is_known_to_be_away_is_not_looked_at_until_it_is_back() -> None:
    made = world()

    def goes_away() -> None:
        made.sim.backends_up = False
        made.sim.advance(30)

    made.jobs.late = [goes_away]

    async def story(w: World) -> None:
        order(w.sim)
        await acked(w)
        await w.until(lambda: not w.sim.backends_up)
        looks = w.server.looks
        for _ in range(100):
            await w.turn(10)
        assert w.sim.condition(KIND, "leave", "Ready") == ("False", "TierAway")
        assert (w.server.looks, w.chain.issued) == (looks, [])
        w.sim.backends_up = True
        w.sim.advance(60)
        await w.until(lambda: w.phase == "Complete")

    run(story, made)
    assert made.proven() == ALL


def test_what_only_time_changes_is_told_too() -> None:
    made = world(pods=1)
    end_pods(made.sim)
    made.sim.backends_up = False
    made.sim.advance(20)

    async def story(w: World) -> None:
        order(w.sim)
        await w.until(lambda: w.phase == "WaitingOutWrites")
        await w.until(lambda: w.sim.condition(KIND, "leave", "Ready") == ("False", "TierAway"), turns=60)
        assert "there is no route" in w.status["message"]

    run(story, made)
    assert made.server.looks == 0, "servers that are known to be away are not asked"


def test_a_job_that_the_api_server_refuses_is_reported_by_its_order_and_made_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = world()
    said = 'jobs.batch "kvs-delete" is forbidden: exceeded quota: count/jobs.batch'

    async def refused(_: TierDeletion) -> DeletionRun:
        raise KubeError(403, "Forbidden", said)

    async def story(w: World) -> None:
        with monkeypatch.context() as refusing:
            refusing.setattr(w.jobs, "start", refused)
            order(w.sim)
            await acked(w)
            await w.until(lambda: said in w.status.get("message", ""))
        await w.until(lambda: w.phase == "Complete", turns=120)

    run(story, made)
    assert made.proven() == ALL


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
    assert ReceiptClaim.ERASED not in made.proven()


def test_who_has_just_begun_to_lead_looks_every_second_until_it_has_heard_of_a_tiers_servers() -> None:
    made = world()

    async def story(w: World) -> None:
        order(w.sim)
        await acked(w)
        await w.until(lambda: w.phase == "WaitingOutWrites")
        assert w.board is not None
        (runner,) = w.board._runners.values()
        told = w.sim.store.domain(NAMESPACE).backends
        heard = dict(told)
        told.clear()
        for _ in range(6):
            w.sim.now += timedelta(seconds=1)
            await runner.turn()
            for _ in range(12):
                await asyncio.sleep(0)
        assert runner._pause_s <= RETRY_S
        told.update(heard)
        await w.until(lambda: w.phase == "Complete")

    run(story, made)
