"""Epochs of PrefixPools: their data keys stay as long as a pool names them, and an invalidation replaces them."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from kvstrata.objects import names
from tests.support.objects import NAMESPACE, Raw, invalidation, model, pod, policy, pool, redis_tier
from tests.support.worlds import Simulation, finish

POOL, KIND = "PrefixPool", "CacheInvalidation"
OLD, NEW, OTHER = "0" * 32, "1" * 32, "2" * 32
SEALED = redis_tier(encryption="Required")


def scope(epoch: str, rolls: int = 0, name: str = "manual") -> Raw:
    return {"kind": "Pool", "name": name, "epoch": epoch, "rolls": rolls}


def holding(epoch: str, following: str | None = None, name: str = "manual", **status: Any) -> Raw:
    """Return a pool whose status names these epochs; without its model nothing is done about its content."""
    also = {"next": {"scope": scope(following, 1, name), "contentDigest": "ab"}} if following else {}
    return {**pool(name, model="elsewhere"), "status": {"scope": scope(epoch, 0, name), **also, **status}}


def at_rest(*objects: Raw) -> Simulation:
    simulation = Simulation(SEALED, model(tiers=("shared",)), policy("acme"), *objects, pod("pod-0"))
    simulation.come_to_rest()
    return simulation


def keyed(simulation: Simulation) -> set[str]:
    """The epochs that have a data key."""
    secrets = [
        raw
        for (kind, _, name), raw in simulation.kube.objects.items()
        if kind == "Secret" and name.startswith(names.DATA_KEYS_PREFIX)
    ]
    return {epoch for raw in secrets for epoch, key in (raw.get("data") or {}).items() if base64.b64decode(key)}


def say(simulation: Simulation, raw: Raw) -> None:
    """Write a pool's status, as another plan would."""
    stored = simulation.kube.objects[(POOL, NAMESPACE, raw["metadata"]["name"])]
    simulation.put({**stored, "status": {**raw["status"], "conditions": stored["status"].get("conditions", [])}})
    simulation.come_to_rest()


def list_and_diff(simulation: Simulation) -> None:
    finish(simulation.resync.objects(simulation.queue.add))
    finish(simulation.resync.secrets())
    simulation.enqueue_all()
    simulation.come_to_rest()


class TestDataKeys:
    @pytest.mark.parametrize("restarts", [False, True])
    def test_a_pools_epochs_have_a_key_as_long_as_its_status_names_them(self, restarts: bool) -> None:
        simulation = at_rest(holding(OLD, NEW))
        assert {OLD, NEW} <= keyed(simulation)
        if restarts:
            simulation.restart()
        list_and_diff(simulation)
        list_and_diff(simulation)
        assert {OLD, NEW} <= keyed(simulation)
        assert simulation.unsettled() == {}

    def test_the_key_of_content_that_was_replaced_goes_and_that_of_its_successor_stays(self) -> None:
        simulation = at_rest(holding(OLD, NEW))
        say(simulation, holding(NEW))
        assert OLD not in keyed(simulation)
        assert NEW in keyed(simulation)

    def test_the_key_of_content_that_was_given_up_goes_and_that_of_the_content_in_force_stays(self) -> None:
        simulation = at_rest(holding(OLD, NEW))
        say(simulation, holding(OLD))
        assert NEW not in keyed(simulation)
        assert OLD in keyed(simulation)

    def test_the_keys_of_a_pool_that_goes_go_with_it(self) -> None:
        simulation = at_rest(holding(OLD, NEW))
        assert {OLD, NEW} <= keyed(simulation)
        simulation.delete(POOL, "manual")
        simulation.come_to_rest()
        assert not {OLD, NEW} & keyed(simulation)

    def test_no_key_goes_while_a_pool_cannot_be_read(self) -> None:
        simulation = at_rest(holding(OLD), policy("globex", deletionPolicy="Abandon"))
        gone = simulation.status("TenantCachePolicy", "globex")["scope"]["epoch"]
        stored = simulation.kube.objects[(POOL, NAMESPACE, "manual")]
        simulation.put({**stored, "spec": {**stored["spec"], "readers": {}}})
        simulation.delete("TenantCachePolicy", "globex")
        simulation.come_to_rest()
        assert {OLD, gone} <= keyed(simulation)
        simulation.put({**simulation.kube.objects[(POOL, NAMESPACE, "manual")], "spec": stored["spec"]})
        simulation.come_to_rest()
        assert gone not in keyed(simulation)
        assert OLD in keyed(simulation)


class TestInvalidation:
    @pytest.mark.parametrize("what", [{"pool": "manual"}, {"all": True}])
    def test_a_pool_that_is_invalidated_keeps_no_epoch(self, what: Raw) -> None:
        simulation = at_rest(holding(OLD, NEW, published=True))
        simulation.put(invalidation("now", scope=what))
        simulation.come_to_rest()
        assert simulation.status(KIND, "now")["phase"] == "Complete"
        told = simulation.status(POOL, "manual")
        assert told["scope"]["epoch"] not in (OLD, NEW)
        assert told["scope"]["rolls"] == 2
        assert not told.get("published")
        assert not told.get("next")
        assert not {OLD, NEW} & keyed(simulation)
        assert told["scope"]["epoch"] in keyed(simulation)

    def test_other_pools_and_tenants_stay_as_they_are(self) -> None:
        simulation = at_rest(holding(OLD), holding(OTHER, name="other", published=True))
        before = simulation.entry("acme").keyspace
        simulation.put(invalidation("now", scope={"pool": "manual"}))
        simulation.come_to_rest()
        assert simulation.status(POOL, "other")["scope"]["epoch"] == OTHER
        assert simulation.status(POOL, "other")["published"] is True
        assert simulation.entry("acme").keyspace == before

    @pytest.mark.parametrize(("name", "reached"), [("elsewhere", True), ("tiny", False)])
    def test_a_models_invalidation_reaches_its_own_pools(self, name: str, reached: bool) -> None:
        simulation = at_rest(model("elsewhere"), holding(OLD, published=True))
        before = simulation.status(POOL, "manual")["scope"]["epoch"]
        simulation.put(invalidation("now", scope={"model": name}))
        simulation.come_to_rest()
        assert simulation.status(KIND, "now")["phase"] == "Complete"
        assert (simulation.status(POOL, "manual")["scope"]["epoch"] != before) is reached

    def test_content_that_takes_over_meanwhile_is_reached_all_the_same(self) -> None:
        """What was computed before an invalidation may not survive it by being promoted between two of its writes."""
        simulation = at_rest(holding(OLD, NEW))
        simulation.put(invalidation("now", scope={"pool": "manual"}))
        while not simulation.status(KIND, "now").get("scopes"):
            key = simulation._take()
            assert key is not None
            simulation.step(key)
        stored = simulation.kube.objects[(POOL, NAMESPACE, "manual")]
        simulation.put({**stored, "status": {**stored["status"], "scope": scope(NEW, 1), "next": None}})
        simulation.come_to_rest()
        assert simulation.status(POOL, "manual")["scope"]["epoch"] not in (OLD, NEW)

    def test_content_that_is_begun_meanwhile_is_left(self) -> None:
        simulation = at_rest(holding(OLD))
        simulation.put(invalidation("now", scope={"pool": "manual"}))
        while not simulation.status(KIND, "now").get("scopes"):
            key = simulation._take()
            assert key is not None
            simulation.step(key)
        stored = simulation.kube.objects[(POOL, NAMESPACE, "manual")]
        simulation.put(
            {**stored, "status": {**stored["status"], "next": {"scope": scope(NEW, 1), "contentDigest": "ab"}}}
        )
        simulation.come_to_rest()
        told = simulation.status(POOL, "manual")
        assert told["scope"]["epoch"] not in (OLD, NEW)
        assert told["next"]["scope"]["epoch"] == NEW

    def test_a_pool_without_content_is_nothing_to_wait_for(self) -> None:
        simulation = at_rest(pool("manual", model="elsewhere"))
        simulation.put(invalidation("one", scope={"pool": "manual"}), invalidation("two", scope={"all": True}))
        simulation.come_to_rest()
        assert simulation.status(KIND, "one")["phase"] == simulation.status(KIND, "two")["phase"] == "Complete"

    def test_a_pool_that_does_not_exist_is_a_mistake(self) -> None:
        simulation = at_rest()
        simulation.put(invalidation("now", scope={"pool": "gone"}))
        simulation.come_to_rest()
        assert simulation.condition(KIND, "now", "Failed") == ("True", "PoolNotFound")
