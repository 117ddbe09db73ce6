"""The writer: nothing without leadership, conditional where it must be, and whole bundles only."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
from prometheus_client import REGISTRY

from kvstrata.cli.operator import Operator
from kvstrata.clients.kube import KubeError, NotLeadingError
from kvstrata.contract.policy.bundle import ROOT_DATA_KEY, Root
from kvstrata.model.pods import BackendAccess
from kvstrata.model.refs import BUNDLE, Key
from kvstrata.objects.names import DOMAIN_KEY_SECRET
from kvstrata.plan.actions import Action, Plan, ProbeBackend, Remove, StatusWrite
from kvstrata.reconcile import metrics
from kvstrata.reconcile.bundles import read_bundle
from kvstrata.reconcile.loop import plan
from kvstrata.reconcile.secrets import decode
from kvstrata.reconcile.writer import Writer
from tests.support.objects import NAMESPACE, STALLED_REDIS, cpu_tier, model, older_tier, pod, policy, pool, redis_tier
from tests.support.worlds import CONTEXT, Simulation, finish, is_empty

TINY = Key(BUNDLE, NAMESPACE, "tiny")


def at_rest() -> Simulation:
    simulation = Simulation(cpu_tier(), model(tiers=("cpu",)), policy("acme"))
    simulation.settle()
    simulation.put(pod("pod-0"))
    simulation.come_to_rest()
    return simulation


def stored(simulation: Simulation) -> Any:
    return finish(
        read_bundle(
            simulation.kube,
            simulation.store.domain(NAMESPACE),
            "tiny",
            simulation.world.models["tiny"].owner_reference(),
        )
    )


def with_an_edit() -> Simulation:
    """A world at rest, and one policy more that the bundle does not hold yet."""
    simulation = at_rest()
    simulation.put(policy("globex"))
    for _ in ("its finalizer", "its epoch"):
        simulation.step(Key("TenantCachePolicy", NAMESPACE, "globex"))
    return simulation


@pytest.mark.parametrize("kind", ["TenantCachePolicy", "CachedModel", BUNDLE, "CacheDomain"])
def test_a_process_that_does_not_lead_writes_nothing(kind: str) -> None:
    simulation = Simulation(cpu_tier(), model(tiers=("cpu",)), policy("acme"))
    simulation.settle()
    simulation.edit("TenantCachePolicy", "acme", cacheGeneration=1)
    simulation.edit("CachedModel", "tiny", engine={"image": "engine:2", "replicas": 2})
    if kind == BUNDLE:
        simulation.step(Key("TenantCachePolicy", NAMESPACE, "acme"))
    if kind == "CacheDomain":
        simulation.delete("CacheDomain", "default")
    name = {"TenantCachePolicy": "acme", "CacheDomain": "default"}.get(kind, "tiny")
    key = Key(kind, NAMESPACE, name)
    made = plan(simulation.world, CONTEXT, key, simulation.now)
    assert not is_empty(made)
    writer = Writer(
        simulation.kube,
        simulation.store,
        simulation.queue,
        simulation.secret_store,
        {},
        {},
    )
    before, simulation.kube.may_write = simulation.kube.writes, lambda: False
    with pytest.raises(NotLeadingError):
        finish(writer.carry_out(key, made))
    assert simulation.kube.writes == before


def kinds_of(base: type[Any]) -> set[str]:
    """The names of the classes below `base` that have none below them."""
    return {base.__name__} if not (kinds := base.__subclasses__()) else set().union(*map(kinds_of, kinds))


def test_every_action_of_a_plan_is_carried_out_by_the_writer_or_a_worker_of_the_operator() -> None:
    table = inspect.getsource(Operator._act)
    own = Simulation().writer.own_actions
    left = sorted(kinds_of(Action) - {kind.__name__ for kind in own})
    assert left
    assert [name for name in left if not re.search(rf"\b{name}\b", table)] == []


def test_an_object_that_came_while_the_domains_key_was_written_is_planned_again_when_it_is_there() -> None:
    simulation = Simulation()
    simulation.put(pool("manual"))

    def meanwhile(verb: str, kind: str, name: str) -> None:
        if name == DOMAIN_KEY_SECRET:
            simulation.step(Key("PrefixPool", NAMESPACE, "manual"))
            while (due := simulation._take()) is not None:
                simulation.step(due)

    simulation.kube.before_write = meanwhile
    simulation.settle()
    assert simulation.condition("PrefixPool", "manual", "Stalled") == ("True", "ModelNotFound")


def test_what_a_status_says_for_the_first_time_is_told_also_if_a_watch_was_quicker_than_the_answer() -> None:
    simulation = at_rest()
    key = Key("CachedModel", NAMESPACE, "tiny")
    told = {"identity": "0" * 16, "time": "2026-01-01T00:00:00Z", "blocks": 5, "bytes": 500}
    version = simulation.world.models["tiny"].metadata.resource_version

    def counted() -> float:
        return (
            REGISTRY.get_sample_value("kvstrata_reclaimed_blocks_total", {"namespace": NAMESPACE, "model": "tiny"})
            or 0.0
        )

    before = counted()
    simulation.kube.after_write = lambda *_: simulation._deliver()
    finish(simulation.writer.carry_out(key, Plan(statuses=(StatusWrite(key, version, {"reclaimed": told}),))))
    assert simulation.status("CachedModel", "tiny")["reclaimed"] == told
    assert counted() == before + 5


def test_what_is_stored_is_what_the_operator_remembers() -> None:
    simulation = at_rest()
    assert stored(simulation) == simulation.world.bundles["tiny"]


def test_a_commit_over_another_writers_bundle_is_refused_and_the_bundle_read_anew() -> None:
    simulation = with_an_edit()
    stored_root = simulation.kube.objects[("Secret", NAMESPACE, "kvs-tiny-bundle")]
    simulation.kube.put({**stored_root, "metadata": {**stored_root["metadata"], "annotations": {"mine": "1"}}})
    made = plan(simulation.world, CONTEXT, TINY, simulation.now)
    with pytest.raises(KubeError) as refused:
        finish(simulation.writer.carry_out(TINY, made))
    assert refused.value.is_conflict
    assert "globex" not in stored(simulation).bundle.entries
    simulation.come_to_rest()
    assert set(stored(simulation).bundle.entries) == {"acme", "globex"}
    assert stored(simulation) == simulation.world.bundles["tiny"]


def test_a_writer_that_dies_before_the_root_leaves_the_old_bundle_whole() -> None:
    simulation = with_an_edit()
    before = stored(simulation)

    def die(verb: str, kind: str, name: str) -> None:
        if name == "kvs-tiny-bundle":
            raise KubeError(0, "Killed", name)

    simulation.kube.before_write = die
    made = plan(simulation.world, CONTEXT, TINY, simulation.now)
    with pytest.raises(KubeError):
        finish(simulation.writer.carry_out(TINY, made))
    assert stored(simulation) == before
    simulation.restart()
    simulation.come_to_rest()
    assert set(stored(simulation).bundle.entries) == {"acme", "globex"}


def test_a_damaged_shard_is_rewritten_with_a_higher_revision() -> None:
    simulation = at_rest()
    before = simulation.bundle()
    ref = before.root.shards[0]
    shard = simulation.kube.objects[("Secret", NAMESPACE, f"kvs-tiny-bundle-0{ref.slot}")]
    simulation.kube.put({**shard, "data": {"shard.json": "e30="}})
    simulation.restart()
    simulation.come_to_rest()
    after = stored(simulation).bundle
    assert {t: e.keyspace for t, e in after.entries.items()} == {t: e.keyspace for t, e in before.entries.items()}
    assert after.root.revision > before.root.revision


def test_a_deleted_root_is_written_anew_and_never_goes_back() -> None:
    simulation = at_rest()
    before = simulation.bundle().root.revision
    simulation.kube.remove("Secret", NAMESPACE, "kvs-tiny-bundle")
    simulation.restart()
    simulation.come_to_rest()
    raw = simulation.kube.objects[("Secret", NAMESPACE, "kvs-tiny-bundle")]
    assert Root.decode(decode(raw)[ROOT_DATA_KEY]).revision > before


def test_a_changed_shard_goes_into_the_slot_that_the_root_does_not_name() -> None:
    simulation = with_an_edit()
    used = simulation.bundle().root.shards[0].slot
    simulation.kube.log.clear()
    simulation.step(TINY)
    secrets = [name for _, kind, name in simulation.kube.log if kind == "Secret"]
    assert secrets == [f"kvs-tiny-bundle-0{'b' if used == 'a' else 'a'}", "kvs-tiny-bundle"]


def test_a_status_that_somebody_else_changed_first_is_read_again_and_written_then() -> None:
    simulation = at_rest()
    simulation.edit("TenantCachePolicy", "acme", suspend=True)
    slot = ("TenantCachePolicy", NAMESPACE, "acme")
    unseen = {**simulation.kube.objects[slot]}
    unseen["metadata"] = {**unseen["metadata"], "annotations": {"mine": "1"}}
    simulation.kube.put(unseen)
    simulation.kube.take_events()  # the watch is behind
    simulation.come_to_rest()
    assert simulation.condition("TenantCachePolicy", "acme", "Ready")[0] == "True"
    assert simulation.kube.objects[slot]["metadata"]["annotations"] == {"mine": "1"}


@pytest.mark.parametrize("kind", ["Deployment", "Service", "Role", "NetworkPolicy"])
def test_a_child_that_somebody_changed_or_deleted_comes_back(kind: str) -> None:
    simulation = at_rest()
    slot = (kind, NAMESPACE, "kvs-tiny")
    before = simulation.kube.objects[slot]
    changed = {**before, "metadata": {**before["metadata"], "labels": {"app.kubernetes.io/managed-by": "kvstrata"}}}
    simulation.put(changed)
    simulation.come_to_rest()
    assert simulation.kube.objects[slot]["metadata"]["labels"] == before["metadata"]["labels"]
    simulation.delete(kind, "kvs-tiny")
    simulation.come_to_rest()
    assert slot in simulation.kube.objects
    assert simulation.unsettled() == {}


def test_what_belongs_to_someone_else_is_not_taken_over() -> None:
    simulation = Simulation()
    foreign = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "kvs-tiny", "namespace": NAMESPACE},
        "spec": {},
    }
    simulation.put(foreign)
    simulation.put(cpu_tier(), model(tiers=("cpu",)))
    simulation.come_to_rest()
    assert simulation.condition("CachedModel", "tiny", "Stalled") == ("True", "NameConflict")
    assert simulation.kube.objects[("Service", NAMESPACE, "kvs-tiny")]["spec"] == {}


def test_what_was_removed_is_known_to_be_gone_before_any_watch_tells() -> None:
    simulation = Simulation(redis_tier())
    simulation.come_to_rest()
    key = Key("CacheTier", NAMESPACE, "shared")
    slot = ("Service", "kvs-shared-redis")
    uid = simulation.world.children[slot]["metadata"]["uid"]
    finish(simulation.writer.carry_out(key, Plan(actions=(Remove(*slot, "another"),))))
    assert slot in simulation.world.children
    finish(simulation.writer.carry_out(key, Plan(actions=(Remove(*slot, uid),))))
    assert slot not in simulation.world.children
    simulation.settle()
    assert simulation.world.children[slot]["metadata"]["uid"] != uid


def backend_up(tier: str) -> float | None:
    return REGISTRY.get_sample_value("kvstrata_backend_up", {"namespace": NAMESPACE, "tier": tier})


@pytest.mark.parametrize("stalled", [True, False])
def test_a_tier_that_was_deleted_or_is_stalled_has_no_series_that_says_up_or_down(stalled: bool) -> None:
    simulation = Simulation(older_tier(), redis_tier())
    simulation.come_to_rest()
    metrics.BACKEND_UP.labels(NAMESPACE, "shared").set(0)
    simulation.advance(30)
    assert backend_up("shared") == 0
    if stalled:
        simulation.edit("CacheTier", "shared", redis=STALLED_REDIS)
    else:
        simulation.delete("CacheTier", "shared")
    simulation.settle()
    assert backend_up("shared") is None
    assert "shared" not in simulation.world.backends


def test_the_answer_of_a_tier_that_was_deleted_meanwhile_makes_no_series() -> None:
    simulation = Simulation(redis_tier())
    simulation.come_to_rest()
    access = BackendAccess("127.0.0.1:1", "localhost", None, ("absent", "password"))
    order = ProbeBackend("shared", access, "demo")
    finish(simulation.backends.ask(NAMESPACE, order))
    assert backend_up("shared") == 0
    simulation.delete("CacheTier", "shared")
    simulation.settle()
    finish(simulation.backends.ask(NAMESPACE, order))
    assert backend_up("shared") is None
