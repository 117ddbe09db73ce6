"""A TenantGroup is Enforced when bundles hold its members as declared and pods acknowledged that, and not before."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvstrata.model.refs import BUNDLE, Key
from kvstrata.model.world import World
from kvstrata.plan.kinds.group import plan_group
from tests.support.objects import NAMESPACE, cpu_tier, group, model, pod, policy, pool
from tests.support.worlds import Simulation, is_empty

GROUP, POLICY = "TenantGroup", "TenantCachePolicy"
LAB = Key(GROUP, NAMESPACE, "lab")
NOT_COMMITTED, AWAITING = ("False", "NotCommitted"), ("False", "AwaitingAcks")
ENFORCED = ("True", "AllPodsAcknowledged")


def at_rest(*objects: Any, models: tuple[str, ...] = ("tiny",)) -> Simulation:
    """A world at rest with a pod for each model."""
    simulation = Simulation(cpu_tier(), *(model(name, tiers=("cpu",)) for name in models), *objects)
    simulation.settle()
    simulation.put(*(pod(f"pod-of-{name}", name) for name in models))
    simulation.come_to_rest()
    return simulation


def lab(*members: str, **spec: Any) -> list[Any]:
    return [group("lab", *members, **spec), *(policy(tenant, group="lab") for tenant in members)]


def enforced(simulation: Simulation, world: World | None = None) -> tuple[str, str]:
    """Return the condition that a plan of the group alone writes, or leaves."""
    made = plan_group(world or simulation.world, "lab", simulation.now)
    for write in made.statuses:
        found = next(one for one in write.status["conditions"] if one["type"] == "Enforced")
        return found["status"], found["reason"]
    return simulation.condition(GROUP, "lab", "Enforced")


def generations(simulation: Simulation) -> tuple[int, int]:
    raw = simulation.kube.objects[GROUP, NAMESPACE, "lab"]
    return raw["metadata"]["generation"], raw["status"].get("enforcedGeneration", 0)


def test_a_member_that_left_is_out_of_the_bundle_before_the_group_is_enforced() -> None:
    simulation = at_rest(*lab("a", "b"))
    assert simulation.condition(GROUP, "lab", "Enforced") == ENFORCED
    simulation.edit(GROUP, "lab", members=["b"])
    assert enforced(simulation) == NOT_COMMITTED
    assert generations(simulation)[1] < generations(simulation)[0]
    simulation.settle()
    assert simulation.condition(GROUP, "lab", "Enforced") == AWAITING
    simulation.come_to_rest()
    assert simulation.condition(GROUP, "lab", "Enforced") == ENFORCED
    assert len(set(generations(simulation))) == 1


def test_a_member_that_joined_is_in_the_bundle_before_the_group_is_enforced() -> None:
    simulation = at_rest(*lab("a"), policy("b"))
    simulation.edit(GROUP, "lab", members=["a", "b"])
    simulation.put(policy("b", group="lab"))
    assert enforced(simulation) == NOT_COMMITTED
    simulation.come_to_rest()
    assert simulation.condition(GROUP, "lab", "Enforced") == ENFORCED
    assert simulation.status(GROUP, "lab")["joined"] == 2


def test_a_policy_deleted_while_its_tenant_is_a_member_is_out_of_the_bundle_first() -> None:
    simulation = at_rest(*lab("a", "b"))
    simulation.delete(POLICY, "a")
    assert enforced(simulation) == NOT_COMMITTED


@pytest.mark.parametrize(("first", "last"), [("tiny", "zeta"), ("zeta", "tiny")])
def test_every_model_has_to_hold_the_group_and_its_pods_to_acknowledge(first: str, last: str) -> None:
    simulation = at_rest(*lab("a", "b"), models=("tiny", "zeta"))
    simulation.edit(GROUP, "lab", members=["b"])
    simulation.settle()
    simulation.ack(f"pod-of-{first}")
    simulation.settle()
    assert simulation.condition(GROUP, "lab", "Enforced") == AWAITING
    simulation.ack(f"pod-of-{last}")
    simulation.settle()
    assert simulation.condition(GROUP, "lab", "Enforced") == ENFORCED


def test_a_bundle_that_is_not_whole_enforces_no_group() -> None:
    simulation = at_rest(*lab("a", "b"))
    committed = simulation.world.bundles["tiny"]
    root = committed.bundle.root
    damaged = replace(root, shards=tuple(replace(shard, digest="") for shard in root.shards))
    bundles = {"tiny": replace(committed, bundle=replace(committed.bundle, root=damaged))}
    assert enforced(simulation, replace(simulation.world, bundles=bundles)) == NOT_COMMITTED


def test_an_edit_of_another_tenant_does_not_take_the_group_out_of_force() -> None:
    simulation = at_rest(*lab("a", "b"), policy("other"))
    simulation.edit(POLICY, "other", cacheGeneration=1)
    simulation.settle()
    assert simulation.world.acked_revision(simulation.pod("pod-of-tiny")) < simulation.bundle().root.revision
    assert enforced(simulation) == ENFORCED


def test_a_group_that_is_not_enforced_any_more_says_so_at_once() -> None:
    simulation = at_rest(*lab("a", "b"))
    simulation.edit(POLICY, "a", suspend=True)
    (write,) = plan_group(simulation.world, "lab", simulation.now).statuses
    assert not write.can_wait
    simulation.step(LAB)
    assert simulation.condition(GROUP, "lab", "Enforced") == NOT_COMMITTED


def test_rules_that_changed_must_be_acknowledged_for_the_group_too() -> None:
    simulation = at_rest(*lab("a", "b"))
    simulation.edit("CachedModel", "tiny", reuse={"mode": "Disabled"})
    simulation.settle()
    assert enforced(simulation) == AWAITING


def test_a_group_without_members_has_nothing_to_enforce() -> None:
    simulation = at_rest(group("lab", "a"), policy("a"))
    assert simulation.condition(GROUP, "lab", "Enforced") == ("", "")
    assert simulation.condition(GROUP, "lab", "Ready") == ("True", "NoMembers")
    assert simulation.condition(GROUP, "lab", "MembersResolved") == ("False", "MembersWithoutPolicy")


class TestPoolsOnly:
    """Members have scopes of their own; their entries hold what the group gives them."""

    def test_members_are_enforced_by_their_own_entries(self) -> None:
        simulation = at_rest(group("lab", "a", "b", sharing="PoolsOnly"), policy("a"), policy("b"))
        assert simulation.condition(GROUP, "lab", "Enforced") == ENFORCED
        simulation.edit(POLICY, "a", cacheGeneration=1)
        simulation.step(Key(POLICY, NAMESPACE, "a"))
        assert enforced(simulation) == NOT_COMMITTED
        simulation.settle()
        assert simulation.condition(GROUP, "lab", "Enforced") == AWAITING

    def test_a_group_that_stops_sharing_is_enforced_when_nobody_is_left_in_its_scope(self) -> None:
        simulation = at_rest(*lab("a", "b"))
        simulation.edit(GROUP, "lab", sharing="PoolsOnly")
        assert enforced(simulation) == NOT_COMMITTED
        simulation.come_to_rest()
        assert simulation.condition(GROUP, "lab", "Enforced")[0] != "False"


def test_a_bundle_is_planned_again_while_the_group_is_not_in_it() -> None:
    simulation = at_rest(*lab("a", "b"))
    simulation.edit(GROUP, "lab", members=["b"])
    assert Key(BUNDLE, NAMESPACE, "tiny") in simulation.step(LAB).enqueue


@pytest.mark.parametrize("pools", [(), ("manual",)])
def test_a_group_at_rest_has_nothing_to_do(pools: tuple[str, ...]) -> None:
    simulation = at_rest(*lab("a", "b"), *(pool(name, "a", "b") for name in pools))
    assert simulation.condition(GROUP, "lab", "Enforced") == ENFORCED
    assert is_empty(simulation.step(LAB))
