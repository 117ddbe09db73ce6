"""Orders to erase that come twice, too late or while somebody deletes by hand what they need: each ends by name."""

from __future__ import annotations

from kvstrata.contract.policy.data_key import key_id
from kvstrata.contract.receipt.claims import claims
from kvstrata.objects import names
from tests.unit.reconcile.erasing import KIND, World
from tests.unit.reconcile.erasure_stories import ALL, acked, order, run, world


def test_two_orders_for_one_tenant_at_once_both_end_with_a_whole_receipt() -> None:
    made = world()
    old, epoch = made.sim.entry("acme").keyspace, made.sim.status("TenantCachePolicy", "acme")["scope"]["epoch"]
    key = key_id(made.sim.world.data_keys[epoch])

    async def story(w: World) -> None:
        order(w.sim)
        order(w.sim, "again")
        await acked(w)
        await w.until(lambda: w.sim.status(KIND, "again").get("rolledTime"))
        for pod in w.addresses:
            w.sim.ack(pod)
        await w.until(lambda: w.phase == "Complete" and w.sim.status(KIND, "again")["phase"] == "Complete")

    run(story, made)
    assert [set(claims(facts)) for facts in made.chain.issued] == [ALL, ALL]
    assert all(key in {one.fingerprint for one in facts.keys} for facts in made.chain.issued)
    assert old not in made.server.values
    assert made.sim.world.policies["acme"].status.scope is not None
    assert made.sim.world.policies["acme"].status.scope.epoch != epoch
    assert made.sim.unsettled() == {}


def test_a_deadline_that_passed_while_no_operator_ran_fails_it_by_name_and_nothing_is_deleted() -> None:
    made = world()

    async def begun(w: World) -> None:
        order(w.sim, deadline="60s")
        await acked(w)
        await w.until(lambda: w.phase == "WaitingOutWrites")

    async def too_late(w: World) -> None:
        await w.until(lambda: w.phase == "Failed")
        await w.until(lambda: not w.kept())

    run(begun, made)
    made.sim.advance(120)
    made.sim.restart()
    run(too_late, made)
    assert made.sim.condition(KIND, "leave", "Failed") == ("True", "DeadlineExceeded")
    assert "not complete within 60 s" in made.sim.status(KIND, "leave")["message"]
    assert made.jobs.ran == []
    assert "Erased" not in {str(claim) for claim in made.proven()}


def test_a_secret_of_data_keys_that_is_deleted_by_hand_meanwhile_changes_nothing_of_what_is_proven() -> None:
    made = world()
    epoch = made.sim.status("TenantCachePolicy", "acme")["scope"]["epoch"]
    key = key_id(made.sim.world.data_keys[epoch])

    async def story(w: World) -> None:
        order(w.sim)
        await w.until(lambda: w.kept())
        w.sim.delete("Secret", names.data_keys_secret(epoch))
        await acked(w)
        for _ in range(3):
            # Another tenant's key may have been in that Secret: its new one is for pods to take, too.
            await w.turn(1)
            for pod in w.addresses:
                w.sim.ack(pod)
        await w.until(lambda: w.phase == "Complete")

    run(story, made)
    assert made.proven() == ALL
    assert {one.fingerprint for one in made.chain.issued[0].keys} == {key}
    assert made.sim.entry("acme").keys
    assert epoch not in made.sim.world.data_keys
