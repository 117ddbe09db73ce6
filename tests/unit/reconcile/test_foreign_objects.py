"""Objects of others under the names of children: left alone, reported, and waited for.

None has the operator's label, so no watch shows them, as on a real API server.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvstrata.clients.kube import KubeError
from kvstrata.clients.resources import BY_KIND, Resource
from kvstrata.model.refs import Key
from kvstrata.objects import names
from tests.support.objects import NAMESPACE, Raw, cpu_tier, model, policy, redis_tier
from tests.support.worlds import Simulation

TIER, MODEL, DOMAIN = ("CacheTier", "shared"), ("CachedModel", "tiny"), ("CacheDomain", "default")
OBJECTS = (
    cpu_tier(),
    redis_tier(),
    model(tiers=("cpu", "shared"), engine={"image": "engine:1", "replicas": 2}),
    policy("acme"),
)
APPLIED = (
    ("Deployment", "kvs-tiny", MODEL),
    ("Service", "kvs-tiny", MODEL),
    ("ServiceAccount", "kvs-tiny", MODEL),
    ("Role", "kvs-tiny", MODEL),
    ("RoleBinding", "kvs-tiny", MODEL),
    ("NetworkPolicy", "kvs-tiny", MODEL),
    ("PodDisruptionBudget", "kvs-tiny", MODEL),
    ("Service", "kvs-shared-redis", TIER),
    ("PodDisruptionBudget", "kvs-shared-redis", TIER),
    ("StatefulSet", "kvs-shared-redis-0", TIER),
    ("NetworkPolicy", "kvs-shared-redis", TIER),
)
SECRETS = (
    ("Secret", "kvs-tiny-gate-tls", MODEL),
    ("Secret", "kvs-tiny-bundle", MODEL),
    ("Secret", "kvs-tiny-bundle-0a", MODEL),
    ("Secret", "kvs-shared-redis-auth", TIER),
    ("Secret", "kvs-shared-redis-tls", TIER),
    ("Secret", "kvstrata-domain", DOMAIN),
)
EACH_CHILD = pytest.mark.parametrize(("kind", "name", "owner"), [*APPLIED, *SECRETS])
QUICKLY_S = 20.0
"""Within which the end of a conflict is noticed."""


def foreign(kind: str, name: str) -> Raw:
    """An object of somebody else, without our label."""
    content = {"data": {"mine": "AA=="}} if kind == "Secret" else {"spec": {"selector": {"app": "somebody"}}}
    metadata = {"name": name, "namespace": NAMESPACE, "labels": {"app": "somebody"}}
    return {"apiVersion": BY_KIND[kind].api_version, "kind": kind, "metadata": metadata, **content}


def live(simulation: Simulation, kind: str, name: str) -> Any:
    return simulation.kube.objects.get((kind, NAMESPACE, name))


def in_the_way(simulation: Simulation, owner: tuple[str, str]) -> str:
    """What the owner's Stalled names, empty unless its reason is NameConflict."""
    told = simulation.status(*owner).get("conditions", ())
    stalled = next((c for c in told if c["type"] == "Stalled" and c["status"] == "True"), None)
    return stalled["message"] if stalled and stalled["reason"] == "NameConflict" else ""


def owners(raw: Raw) -> list[tuple[str, str]]:
    return [(one["kind"], one["name"]) for one in raw["metadata"].get("ownerReferences", ())]


def replace_by_foreign(simulation: Simulation, kind: str, name: str) -> None:
    """Delete a child and make somebody else's in its place before any watch tells."""
    simulation.kube.remove(kind, NAMESPACE, name)
    simulation.kube.put(foreign(kind, name))


def test_every_child_is_looked_at_here() -> None:
    simulation = Simulation(*OBJECTS)
    simulation.come_to_rest()
    children = {(kind, name, owners(raw)[0]) for (kind, _, name), raw in simulation.kube.objects.items() if owners(raw)}
    assert children == {*APPLIED, *SECRETS}


@EACH_CHILD
def test_an_object_of_others_is_left_alone_and_reported_and_its_end_is_noticed(
    kind: str, name: str, owner: tuple[str, str]
) -> None:
    simulation = Simulation(foreign(kind, name))
    before = live(simulation, kind, name)
    simulation.put(*OBJECTS)
    simulation.advance(60)
    assert live(simulation, kind, name) == before
    assert f"{kind} {name}" in in_the_way(simulation, owner)
    assert simulation.condition(*owner, "Ready") == ("False", "NameConflict")
    writes = simulation.kube.writes
    simulation.advance(180)
    assert simulation.kube.writes == writes, "something is written at rest"

    simulation.delete(kind, name)
    simulation.advance(QUICKLY_S)
    simulation.come_to_rest()
    assert owners(live(simulation, kind, name)) == [owner]
    assert simulation.condition(*owner, "Stalled")[0] != "True"
    assert simulation.unsettled() == {}


@EACH_CHILD
def test_an_object_of_others_that_takes_the_place_of_a_child_is_left_alone(
    kind: str, name: str, owner: tuple[str, str]
) -> None:
    simulation = Simulation(*OBJECTS)
    simulation.come_to_rest()
    replace_by_foreign(simulation, kind, name)
    before = live(simulation, kind, name)
    simulation.put(policy("globex"))  # brings the events, and a commit of the bundle
    simulation.advance(60)
    assert live(simulation, kind, name) == before
    assert f"{kind} {name}" in in_the_way(simulation, owner)
    simulation.delete(kind, name)
    simulation.advance(QUICKLY_S)
    simulation.come_to_rest()
    assert owners(live(simulation, kind, name)) == [owner]
    assert simulation.condition(*owner, "Stalled")[0] != "True"


@EACH_CHILD
def test_an_object_of_others_outlives_the_owner(kind: str, name: str, owner: tuple[str, str]) -> None:
    simulation = Simulation(foreign(kind, name), *OBJECTS)
    simulation.advance(60)
    before = live(simulation, kind, name)
    uid = live(simulation, *owner)["metadata"]["uid"]
    simulation.delete(*owner)
    simulation.advance(60)
    assert live(simulation, kind, name) == before
    left = [raw for raw in simulation.kube.objects.values() if uid in str(raw["metadata"].get("ownerReferences"))]
    assert left == [], "children go with their owner"


@EACH_CHILD
def test_a_successor_leaves_it_alone_too(kind: str, name: str, owner: tuple[str, str]) -> None:
    simulation = Simulation(foreign(kind, name), *OBJECTS)
    simulation.advance(60)
    before = live(simulation, kind, name)
    simulation.restart()
    simulation.advance(60)
    assert live(simulation, kind, name) == before
    assert f"{kind} {name}" in in_the_way(simulation, owner)
    writes = simulation.kube.writes
    simulation.advance(180)
    assert simulation.kube.writes == writes, "something is written at rest"


@pytest.mark.parametrize(("kind", "name", "owner"), APPLIED)
def test_a_watch_that_is_behind_takes_nobodys_object_over(kind: str, name: str, owner: tuple[str, str]) -> None:
    simulation = Simulation(*OBJECTS)
    simulation.come_to_rest()
    replace_by_foreign(simulation, kind, name)
    before = live(simulation, kind, name)
    simulation.kube.take_events()
    # What is known is what was there; another image or another port changes every child that names it.
    known = dict(simulation.world.children[kind, name])
    known["metadata"] = {**known["metadata"], "annotations": {}}
    simulation.store.domain(NAMESPACE).children[kind, name] = known
    simulation.queue.add(Key(owner[0], NAMESPACE, owner[1]))
    simulation.advance(60)
    assert live(simulation, kind, name) == before
    assert f"{kind} {name}" in in_the_way(simulation, owner)


@EACH_CHILD
def test_one_that_is_made_between_two_requests_is_left_alone(kind: str, name: str, owner: tuple[str, str]) -> None:
    simulation = Simulation()

    def come_first(verb: str, written: str, written_name: str) -> None:
        if (written, written_name) == (kind, name) and live(simulation, kind, name) is None:
            simulation.kube.put(foreign(kind, name))

    simulation.kube.before_write = come_first
    simulation.put(*OBJECTS)
    simulation.advance(60)
    assert owners(live(simulation, kind, name)) == []
    assert live(simulation, kind, name)["metadata"]["labels"] == {"app": "somebody"}
    assert f"{kind} {name}" in in_the_way(simulation, owner)


@EACH_CHILD
def test_a_child_that_lost_our_label_is_still_ours(kind: str, name: str, owner: tuple[str, str]) -> None:
    simulation = Simulation(*OBJECTS)
    simulation.come_to_rest()
    before = live(simulation, kind, name)
    simulation.put({**before, "metadata": {**before["metadata"], "labels": {"app": "somebody"}}})
    simulation.advance(60)
    after = live(simulation, kind, name)
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    if not name.startswith("kvs-tiny-bundle"):  # whose parts get it with the next commit
        assert before["metadata"]["labels"].items() <= after["metadata"]["labels"].items()
    assert in_the_way(simulation, owner) == ""
    assert simulation.unsettled() == {}


def test_all_that_is_in_the_way_is_named_at_once() -> None:
    taken = [(kind, "kvs-tiny") for kind in ("NetworkPolicy", "Service", "ServiceAccount")]
    secrets = [("Secret", "kvs-tiny-gate-tls"), ("Secret", "kvs-shared-redis-auth"), ("Secret", "kvs-shared-redis-tls")]
    simulation = Simulation(*(foreign(*slot) for slot in [*taken, *secrets]), *OBJECTS)
    simulation.advance(5)
    told = in_the_way(simulation, MODEL)
    assert "NetworkPolicy kvs-tiny, Secret kvs-tiny-gate-tls, Service kvs-tiny, ServiceAccount kvs-tiny." in told
    assert "Secret kvs-shared-redis-auth, Secret kvs-shared-redis-tls." in in_the_way(simulation, TIER)
    assert "rename the CachedModel" in told
    assert live(simulation, "Deployment", "kvs-tiny") is None, "pods without their NetworkPolicy"


@EACH_CHILD
def test_the_end_of_a_conflict_wakes_the_parent_at_once(kind: str, name: str, owner: tuple[str, str]) -> None:
    """One with our label by its event; one without, which no watch shows, is read each second at first."""
    for labels, within_s in (({"app.kubernetes.io/managed-by": "kvstrata"}, 0.4), ({"app": "somebody"}, 1.6)):
        theirs = foreign(kind, name)
        theirs["metadata"]["labels"] = labels
        simulation = Simulation(theirs, *OBJECTS)
        simulation.advance(6)
        assert f"{kind} {name}" in in_the_way(simulation, owner)
        simulation.delete(kind, name)
        simulation.advance(within_s)
        assert in_the_way(simulation, owner) == "", labels


def test_one_that_goes_is_named_no_longer_while_another_stays() -> None:
    simulation = Simulation(foreign("Service", "kvs-tiny"), foreign("ServiceAccount", "kvs-tiny"), *OBJECTS)
    simulation.advance(5)
    simulation.delete("Service", "kvs-tiny")
    simulation.advance(2)
    assert "needs: ServiceAccount kvs-tiny." in in_the_way(simulation, MODEL)


def test_a_conflict_that_lasts_is_read_every_15_seconds() -> None:
    simulation = Simulation(foreign("Service", "kvs-tiny"), *OBJECTS)
    simulation.advance(600)
    before = len(simulation.plans)
    simulation.advance(60)
    planned = [key for key, _ in simulation.plans[before:] if key.kind == "CachedModel"]
    assert 3 <= len(planned) <= 6


def test_a_name_that_is_needed_no_more_is_no_conflict() -> None:
    simulation = Simulation(foreign("PodDisruptionBudget", "kvs-tiny"), *OBJECTS)
    simulation.advance(60)
    assert "PodDisruptionBudget kvs-tiny" in in_the_way(simulation, MODEL)
    simulation.edit("CachedModel", "tiny", engine={"image": "engine:1", "replicas": 1})
    simulation.come_to_rest()
    assert in_the_way(simulation, MODEL) == ""
    assert owners(live(simulation, "PodDisruptionBudget", "kvs-tiny")) == []


def test_secrets_of_data_keys_are_made_where_nobody_has_their_names() -> None:
    taken = [names.data_keys_secret(digit + "0" * 31) for digit in "0123456789abcdef"]
    simulation = Simulation(*(foreign("Secret", name) for name in taken))
    before = [live(simulation, "Secret", name) for name in taken]
    simulation.put(redis_tier(encryption="Required"), *OBJECTS[2:], cpu_tier())
    simulation.advance(60)
    assert [live(simulation, "Secret", name) for name in taken] == before
    told = in_the_way(simulation, DOMAIN)
    epochs = {
        simulation.status("TenantCachePolicy", "acme")["scope"]["epoch"],
        simulation.status(*DOMAIN)["scope"]["epoch"],
    }
    assert all(f"Secret {names.data_keys_secret(epoch)}" in told for epoch in epochs)
    writes = simulation.kube.writes
    simulation.advance(180)
    assert simulation.kube.writes == writes
    for name in taken:
        simulation.delete("Secret", name)
    simulation.advance(QUICKLY_S)
    simulation.come_to_rest()
    assert simulation.condition(*DOMAIN, "Stalled")[0] != "True"
    assert simulation.unsettled() == {}


def test_a_secret_of_data_keys_that_others_have_stops_no_other() -> None:
    simulation = Simulation(redis_tier(encryption="Required"), *OBJECTS[2:], cpu_tier())
    simulation.come_to_rest()
    taken = names.data_keys_secret(simulation.status("TenantCachePolicy", "acme")["scope"]["epoch"])
    replace_by_foreign(simulation, "Secret", taken)
    tenants = [f"tenant-{number}" for number in range(20)]
    simulation.put(*(policy(tenant) for tenant in tenants))
    simulation.advance(30)
    assert in_the_way(simulation, DOMAIN).count("Secret kvstrata") == 1
    epochs = [simulation.status("TenantCachePolicy", tenant)["scope"]["epoch"] for tenant in tenants]
    lacking = [epoch for epoch in epochs if epoch not in simulation.world.data_keys]
    assert len(lacking) < len(tenants)
    assert {names.data_keys_secret(epoch) for epoch in lacking} <= {taken}


def test_policies_are_committed_while_another_name_of_the_model_is_taken() -> None:
    simulation = Simulation(*OBJECTS)
    simulation.come_to_rest()
    replace_by_foreign(simulation, "Service", "kvs-tiny")
    before = simulation.bundle().root.revision
    simulation.put(policy("globex"))
    simulation.advance(30)
    assert "Service kvs-tiny" in in_the_way(simulation, MODEL)
    assert simulation.bundle().root.revision > before
    assert "globex" in simulation.bundle().entries


def test_a_restart_over_known_children_reads_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = Simulation(*OBJECTS)
    simulation.come_to_rest()
    read: list[str] = []
    get = simulation.kube.get

    async def counted(resource: Resource, namespace: str, name: str) -> Raw | None:
        read.append(f"{resource.kind} {name}")
        return await get(resource, namespace, name)

    monkeypatch.setattr(simulation.kube, "get", counted)
    simulation.restart()
    simulation.edit("CachedModel", "tiny", engine={"image": "engine:2", "replicas": 2})
    simulation.come_to_rest()
    assert live(simulation, "Deployment", "kvs-tiny")["spec"]["template"]["spec"]["initContainers"]
    assert [slot for slot in read if not slot.startswith("Secret")] == []


def test_a_quota_that_is_just_being_counted_is_no_object_of_others() -> None:
    simulation = Simulation()
    refusals = [KubeError(409, "Conflict", "Operation cannot be fulfilled on resourcequotas")] * 3

    def refuse(verb: str, kind: str, name: str) -> None:
        if (verb, kind) == ("apply", "Service") and refusals:
            raise refusals.pop()

    simulation.kube.before_write = refuse
    simulation.put(*OBJECTS)
    simulation.come_to_rest()
    assert refusals == []
    assert simulation.unsettled() == {}
