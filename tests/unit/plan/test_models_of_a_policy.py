"""Pods of a model that never had a policy hold up neither its invalidation nor its deletion."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest

from kvstrata.api.cacheinvalidation import RolledScope
from kvstrata.contract.policy.keyspace import ScopeKind
from kvstrata.model.erasure.facts import Rolled
from kvstrata.model.refs import Key
from kvstrata.objects.names import bundle_root
from kvstrata.plan.erasure import ordering
from kvstrata.plan.erasure.epoch_rolls import models_with
from tests.support.objects import NAMESPACE, group, invalidation, model, pod, policy, pool
from tests.support.worlds import Killed, Simulation

from .invalidations import at_rest, phase

TINY: dict[str, Any] = {"models": {"names": ["tiny"]}}
BOTH: dict[str, Any] = {"models": {"names": ["other", "tiny"]}}


def with_a_silent_pod(*objects: Any) -> Simulation:
    """Pods that never fence themselves off, one of them of another model, which never reports."""
    simulation = at_rest(model("other"), *objects, onStale="ServeStale")
    simulation.put(pod("silent", "other"))
    simulation.settle()
    return simulation


def order(simulation: Simulation, shared: str | None = None, **scope: Any) -> str:
    """Invalidate a scope, let the pods of tiny acknowledge, and return the phase."""
    simulation.put(invalidation("now", scope=scope, **({"sharedScopes": shared} if shared else {})))
    simulation.settle()
    simulation.ack("pod-0")
    simulation.ack("pod-1")
    simulation.settle()
    return phase(simulation)


def test_an_invalidation_of_a_tenant_waits_for_pods_of_its_models_alone() -> None:
    simulation = with_a_silent_pod(policy("acme", **TINY))
    simulation.restart()
    simulation.settle()
    assert order(simulation, tenant="acme") == "Complete"
    status = simulation.status("CacheInvalidation", "now")
    assert [target["model"] for target in status["targets"]] == ["tiny"]
    assert status["pods"] == {"acked": 2, "live": 2, "fenced": 0}


def test_a_policy_without_an_object_for_its_erasure_waits_for_pods_of_its_models_alone() -> None:
    simulation = with_a_silent_pod(policy("acme", **TINY))
    simulation.delete("TenantCachePolicy", "acme")
    simulation.settle()
    found = simulation.world.policies["acme"]
    key = Key("TenantCachePolicy", NAMESPACE, "acme")
    record = ordering.begin(simulation.world, key, found, simulation.now)
    assert record is not None
    (rolled,) = ordering.woken(simulation.world, key, found, record, 0, simulation.now).facts
    assert isinstance(rolled, Rolled)
    assert {witness.name for witness in rolled.witnesses} == {"pod-0", "pod-1"}
    assert [target.model for target in rolled.targets] == ["tiny"]


@pytest.mark.parametrize("first", [BOTH, {}, {"models": {"selector": {"matchLabels": {"fast": "yes"}}}}])
def test_an_invalidation_waits_for_pods_of_every_model_that_ever_had_the_policy(first: dict[str, Any]) -> None:
    simulation = at_rest(model("other", labels={"fast": "yes"}), policy("acme", **first), onStale="ServeStale")
    simulation.put(pod("silent", "other"))
    simulation.settle()
    simulation.edit("TenantCachePolicy", "acme", **TINY)
    simulation.settle()
    assert "acme" not in simulation.bundle("other").entries
    assert order(simulation, tenant="acme") == "AwaitingAcks"
    simulation.ack("silent")
    simulation.settle()
    assert phase(simulation) == "Complete"


def test_a_model_that_is_created_later_and_selected_is_waited_for() -> None:
    by_label = {"models": {"selector": {"matchLabels": {"fast": "yes"}}}}
    simulation = at_rest(policy("acme", **by_label), onStale="ServeStale")
    assert "models" not in simulation.status("TenantCachePolicy", "acme"), "none was selected: it may be any"
    simulation = at_rest(model("fast", labels={"fast": "yes"}), policy("acme", **by_label), onStale="ServeStale")
    assert simulation.status("TenantCachePolicy", "acme")["models"] == ["fast"]
    simulation.put(model("later", labels={"fast": "yes"}), pod("silent", "later"))
    simulation.settle()
    assert simulation.status("TenantCachePolicy", "acme")["models"] == ["fast", "later"]
    assert "acme" in simulation.bundle("later").entries
    assert order(simulation, tenant="acme") == "AwaitingAcks"


def test_a_model_is_recorded_before_its_bundle_has_the_policy() -> None:
    simulation = at_rest(model("other"), policy("acme", **TINY))
    seen = []

    def hook(verb: str, kind: str, name: str) -> None:
        if kind == "Secret" and name.startswith(bundle_root("other")):
            seen.append(simulation.status("TenantCachePolicy", "acme")["models"])

    simulation.kube.after_write = hook
    simulation.edit("TenantCachePolicy", "acme", **BOTH)
    simulation.settle()
    assert "acme" in simulation.bundle("other").entries
    assert seen
    assert all(models == ["other", "tiny"] for models in seen)


@pytest.mark.parametrize("number", range(1, 6))
def test_an_operator_that_ends_while_a_policy_reaches_a_model_forgets_no_model(number: int) -> None:
    simulation = at_rest(model("other"), policy("acme", **TINY))
    simulation.kill_at(number, after=True)
    simulation.edit("TenantCachePolicy", "acme", **BOTH)
    with suppress(Killed):
        simulation.settle()
    simulation.restart()
    recorded = simulation.status("TenantCachePolicy", "acme")["models"]
    assert "acme" not in simulation.bundle("other").entries or "other" in recorded
    simulation.settle()
    assert "acme" in simulation.bundle("other").entries


def test_an_invalidation_of_the_public_scope_waits_for_pods_of_all_models() -> None:
    simulation = with_a_silent_pod(group("lab", "acme"), policy("acme", group="lab", **TINY))
    assert order(simulation, all=True) == "AwaitingAcks"


def test_an_invalidation_of_a_pool_waits_for_pods_of_its_model_alone() -> None:
    simulation = with_a_silent_pod(policy("acme"), pool("manual"))
    assert order(simulation, pool="manual") == "Complete"


def test_a_scope_with_another_epoch_by_now_may_have_been_anywhere() -> None:
    simulation = with_a_silent_pod(policy("acme", **TINY))
    epoch, other = simulation.status("TenantCachePolicy", "acme")["scope"]["epoch"], "f" * 32

    def found(old: str, new: str) -> frozenset[str] | None:
        rolled = RolledScope(kind=ScopeKind.TENANT, name="acme", old_epoch=old, new_epoch=new)
        return models_with(simulation.world, [rolled])

    assert found(epoch, other) == found(other, epoch) == {"tiny"}
    assert found(other, "e" * 32) is None
    assert models_with(simulation.world, []) is None


def test_the_erasure_of_a_policy_with_a_successor_waits_for_pods_of_its_models_alone() -> None:
    simulation = with_a_silent_pod(policy("acme", **TINY))
    epoch = simulation.status("TenantCachePolicy", "acme")["scope"]["epoch"]
    simulation.put(policy("acme", name="later", **BOTH))
    simulation.delete("TenantCachePolicy", "acme")
    simulation.settle()
    assert simulation.status("TenantCachePolicy", "later")["scope"]["epoch"] != epoch
    rolled = RolledScope(kind=ScopeKind.TENANT, name="acme", old_epoch=epoch, new_epoch="f" * 32)
    assert models_with(simulation.world, [rolled]) == {"tiny"}
