"""Objects of others under the names of children, on a real API server with its controllers: garbage is collected."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from e2e.cluster.control_plane import ControlPlane
from kvstrata.clients.resources import BY_KIND, SERVICE_MONITOR
from tests.apiserver.conftest import OPERATOR_NAMESPACE, REPOSITORY, install_crds
from tests.apiserver.operator_process import OperatorProcess, Operators
from tests.apiserver.server import NAMESPACE, Server
from tests.support import objects

Raw = dict[str, Any]
POD = {"metadata": {"labels": {"app": "somebody"}}, "spec": {"containers": [{"name": "web", "image": "web:1"}]}}
WORKLOAD = {"selector": {"matchLabels": {"app": "somebody"}}, "template": POD, "replicas": 0}
CONTENT: Mapping[str, Raw] = {
    "Deployment": {"spec": WORKLOAD},
    "StatefulSet": {"spec": {**WORKLOAD, "serviceName": "web"}},
    "Service": {"spec": {"selector": {"app": "somebody"}, "ports": [{"name": "web", "port": 80}]}},
    "ServiceAccount": {},
    "Role": {"rules": []},
    "RoleBinding": {"roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "somebody"}},
    "NetworkPolicy": {"spec": {"podSelector": {"matchLabels": {"app": "somebody"}}, "policyTypes": ["Ingress"]}},
    "PodDisruptionBudget": {"spec": {"maxUnavailable": 0, "selector": {"matchLabels": {"app": "somebody"}}}},
    "ServiceMonitor": {"spec": {"selector": {}, "endpoints": []}},
    "Secret": {"data": {"mine": "AA=="}},
}
"""What somebody else's object of a kind has; all of them are valid and none has a label of ours."""

MODEL_CHILDREN = {
    **dict.fromkeys(CONTENT.keys() - {"StatefulSet", "Secret"}, ("", "")),
    "gate-tls": ("Secret", "-gate-tls"),
    "bundle": ("Secret", "-bundle"),
    "bundle-0a": ("Secret", "-bundle-0a"),
}
TIER_CHILDREN = {
    **dict.fromkeys(("Service", "NetworkPolicy", "PodDisruptionBudget"), ("", "-redis")),
    "StatefulSet": ("", "-redis-0"),
    "redis-auth": ("Secret", "-redis-auth"),
    "redis-tls": ("Secret", "-redis-tls"),
}
NOTICED_WITHIN_S = 180.0
"""The operator looks every 15 s whether an object that is in its way is still there."""
WITH_CONTROLLERS = ("Deployment", "StatefulSet", "PodDisruptionBudget")
OWNED: Mapping[str, Mapping[str, tuple[str, str]]] = {"CachedModel": MODEL_CHILDREN, "CacheTier": TIER_CHILDREN}
CASES = [
    (owner_kind, owner, kind or case, f"kvs-{owner}{suffix}")
    for owner_kind, children in OWNED.items()
    for case, (kind, suffix) in children.items()
    for owner in [f"{owner_kind}-{case}".lower()]
]
"""An owner of its own for each kind of child: kind and name of the owner, then of the child."""


def owner_object(kind: str, name: str, **engine: Any) -> Raw:
    raw = objects.redis_tier(name) if kind == "CacheTier" else objects.model(name)
    if kind == "CachedModel":
        raw["spec"]["engine"] |= {"replicas": 2, **engine}
    return {**raw, "metadata": {**raw["metadata"], "namespace": NAMESPACE}}


def foreign_object(kind: str, name: str, namespace: str = NAMESPACE) -> Raw:
    metadata = {"name": name, "namespace": namespace, "labels": {"app": "somebody"}}
    return {"apiVersion": BY_KIND[kind].api_version, "kind": kind, "metadata": metadata, **CONTENT[kind]}


class World:
    """The API server, one operator, and what others made."""

    def __init__(self, server: Server, operators: Operators) -> None:
        self.server, self.operators = server, operators
        self.operator = self.start()

    def start(self) -> OperatorProcess:
        self.operator = self.operators.start(f"operator-{len(self.operators.started)}")
        self.operator.wait_until_leading()
        return self.operator

    def live(self, kind: str, name: str) -> Raw | None:
        """An object without what Kubernetes' own controllers write to its status meanwhile."""
        found = self.server.get(kind, name)
        if found is not None and kind in WITH_CONTROLLERS:
            found.pop("status", None)
            del found["metadata"]["resourceVersion"]
        return found

    def live_as_written(self, kind: str, name: str) -> Raw | None:
        """An object without what controllers write into it, which they do late: its status, a Deployment's revision."""
        found = self.live(kind, name)
        if found is None or kind not in WITH_CONTROLLERS:
            return found
        metadata = {key: value for key, value in found["metadata"].items() if key != "resourceVersion"}
        managers = metadata.pop("managedFields", ())
        metadata["managedFields"] = [one for one in managers if one["manager"] != "kube-controller-manager"]
        annotations = dict(metadata.pop("annotations", None) or {})
        annotations.pop("deployment.kubernetes.io/revision", None)
        return {**found, "metadata": {**metadata, "annotations": annotations}, "status": None}

    def written(self) -> dict[str, Any]:
        """The operator's count of its writes, and versions of the objects whose status no controller writes."""
        versions = self.server.versions().items()
        return {
            "kvstrata_writes_total": self.operator.metric("kvstrata_writes_total"),
            **{name: version for name, version in versions if name.partition("/")[0] not in WITH_CONTROLLERS},
        }

    def in_the_way(self, kind: str, name: str) -> str:
        """What Stalled names, empty unless its reason is NameConflict."""
        status = (self.server.get(kind, name) or {}).get("status") or {}
        stalled = next((c for c in status.get("conditions", ()) if c["type"] == "Stalled"), None)
        return stalled["message"] if stalled and stalled["reason"] == "NameConflict" else ""

    def wait_for_conflict(self, owner_kind: str, owner: str, kind: str, name: str) -> None:
        self.server.wait(
            f"{owner} to name {kind} {name}",
            lambda: f"{kind} {name}" in self.in_the_way(owner_kind, owner),
            NOTICED_WITHIN_S,
        )

    def wait_for_child(self, owner_kind: str, owner: str, kind: str, name: str) -> None:
        def is_there() -> bool:
            found = self.live(kind, name) or {"metadata": {}}
            controllers = [(one["kind"], one["name"]) for one in found["metadata"].get("ownerReferences", ())]
            return controllers == [(owner_kind, owner)]

        self.server.wait(f"{kind} {name} of {owner}", is_there, NOTICED_WITHIN_S)
        self.server.wait(f"{owner} to go on", lambda: not self.in_the_way(owner_kind, owner), NOTICED_WITHIN_S)

    def delete(self, kind: str, name: str, *more: str) -> None:
        self.server.kubectl("-n", NAMESPACE, "delete", kind, name, *more)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """An owner for each case, with one object of others under a name that it needs, and an operator."""
    folder = tmp_path_factory.mktemp("foreign")
    with ControlPlane(folder / "plane", controller_manager=True) as plane:
        server = Server(plane.kubectl, plane.kubeconfig)
        install_crds(server)
        server.apply(_service_monitor_crd())
        server.kubectl("wait", "--for=condition=Established", "--timeout=60s", "crd", "--all")
        for namespace in (OPERATOR_NAMESPACE, NAMESPACE, "key"):
            server.kubectl("create", "namespace", namespace)
        for owner_kind, owner, kind, name in CASES:
            server.apply(foreign_object(kind, name))
            server.apply(owner_object(owner_kind, owner))
        started = Operators(plane.kubeconfig, OPERATOR_NAMESPACE, REPOSITORY, folder)
        yield World(server, started)
        for running in started.running():
            running.kill()


def test_objects_of_others_are_left_alone_outlive_the_owner_and_their_end_is_noticed(world: World) -> None:
    before = {(kind, name): world.live_as_written(kind, name) for _, _, kind, name in CASES}
    assert not [slot for slot, found in before.items() if found is None or "ownerReferences" in found["metadata"]]
    for case in CASES:
        world.wait_for_conflict(*case)
        assert world.server.condition(*case[:2], "Ready") == ("False", "NameConflict")
    for owner_kind, owner, _, _ in CASES:
        world.delete(owner_kind, owner, "--cascade=foreground", "--timeout=50s")
    assert {slot: world.live_as_written(*slot) for slot in before} == before, "the end of an owner took it along"
    for owner_kind, owner, _, _ in CASES:
        world.server.apply(owner_object(owner_kind, owner))
    for case in CASES:
        world.wait_for_conflict(*case)
    assert {slot: world.live_as_written(*slot) for slot in before} == before
    for slot in before:
        world.delete(*slot)
    for case in CASES:
        world.wait_for_child(*case)


def test_then_everything_is_at_rest(world: World) -> None:
    deadline = time.monotonic() + 120
    while True:
        before = world.operator.metric("kvstrata_writes_total")
        time.sleep(3)
        if world.operator.metric("kvstrata_writes_total") == before > 0:
            break
        assert time.monotonic() < deadline, world.operator.log_tail()


def test_while_a_conflict_lasts_nothing_is_written(world: World) -> None:
    world.server.apply(foreign_object("Service", "kvs-resting"))
    world.server.apply(owner_object("CachedModel", "resting"))
    world.wait_for_conflict("CachedModel", "resting", "Service", "kvs-resting")
    give_up_at_s = time.monotonic() + 120
    while True:
        before = world.written()
        time.sleep(20)  # more than one look at what is in the way
        changes = dict(world.written().items() ^ before.items())
        if not changes:
            break
        assert time.monotonic() < give_up_at_s, f"written again and again: {sorted(changes)}"
    world.delete("service", "kvs-resting")
    world.wait_for_child("CachedModel", "resting", "Service", "kvs-resting")


def test_one_that_comes_before_the_name_is_needed_is_left_alone(world: World) -> None:
    kind, name = "PodDisruptionBudget", "kvs-later"
    world.server.apply(owner_object("CachedModel", "later", replicas=1))
    world.wait_for_child("CachedModel", "later", "Deployment", name)
    world.server.apply(foreign_object(kind, name))
    before = world.live_as_written(kind, name)
    world.server.patch("cachedmodel", "later", engine={"replicas": 2})
    world.wait_for_conflict("CachedModel", "later", kind, name)
    assert world.live_as_written(kind, name) == before
    world.server.patch("cachedmodel", "later", engine={"replicas": 1})
    world.server.wait("the model to do without", lambda: not world.in_the_way("CachedModel", "later"), NOTICED_WITHIN_S)
    assert world.live_as_written(kind, name) == before


def test_one_that_takes_a_childs_place_while_no_operator_looks_is_left_alone(world: World) -> None:
    replaced = [("Service", "kvs-absent"), ("Role", "kvs-absent"), ("Secret", "kvs-absent-bundle")]
    world.server.apply(owner_object("CachedModel", "absent"))
    for kind, name in replaced:
        world.wait_for_child("CachedModel", "absent", kind, name)
    world.operator.stop()
    for kind, name in replaced:
        world.delete(kind, name)
        world.server.apply(foreign_object(kind, name))
    before = [world.live(*slot) for slot in replaced]
    world.start()
    for kind, name in replaced:
        world.wait_for_conflict("CachedModel", "absent", kind, name)
    assert [world.live(*slot) for slot in replaced] == before
    for kind, name in replaced:
        world.delete(kind, name)
    for kind, name in replaced:
        world.wait_for_child("CachedModel", "absent", kind, name)


def test_annotated_objects_are_replaced_also_where_no_write_could_change_them(world: World) -> None:
    """The selector of a Deployment and the role of a RoleBinding cannot be changed."""
    given = [("Deployment", "kvs-given"), ("RoleBinding", "kvs-given"), ("Secret", "kvs-given-gate-tls")]
    for kind, name in given:
        world.server.apply(foreign_object(kind, name))
    world.server.apply(owner_object("CachedModel", "given"))
    for kind, name in given:
        world.wait_for_conflict("CachedModel", "given", kind, name)
    world.server.kubectl(*world.in_the_way("CachedModel", "given").partition(": kubectl ")[2].split())
    for kind, name in given:
        world.wait_for_child("CachedModel", "given", kind, name)
        assert "app" not in (world.live(kind, name) or {})["metadata"]["labels"], "something of it remained"


def test_a_domains_key_is_drawn_where_nobody_has_its_name(world: World) -> None:
    world.server.apply(foreign_object("Secret", "kvstrata-domain", "key"))
    group = objects.group("research", "acme")
    world.server.apply({**group, "metadata": {**group["metadata"], "namespace": "key"}})

    def stalled() -> Any:
        listed = json.loads(world.server.kubectl("-n", "key", "get", "cachedomains", "-o", "json"))["items"]
        conditions = [c for one in listed for c in (one.get("status") or {}).get("conditions", ())]
        return next(((c["status"], c["reason"]) for c in conditions if c["type"] == "Stalled"), None)

    world.server.wait("the conflict", lambda: stalled() == ("True", "NameConflict"))
    text = world.server.kubectl("-n", "key", "get", "secret", "kvstrata-domain", "-o", "json")
    assert json.loads(text)["data"] == {"mine": "AA=="}
    assert "ownerReferences" not in json.loads(text)["metadata"]
    world.server.kubectl("-n", "key", "delete", "secret", "kvstrata-domain")
    world.server.wait("the key", lambda: not stalled(), NOTICED_WITHIN_S)
    text = world.server.kubectl("-n", "key", "get", "secret", "kvstrata-domain", "-o", "json")
    assert "ownerReferences" in json.loads(text)["metadata"]


@pytest.mark.parametrize("kind", ["Service", "ServiceAccount", "Deployment"])
def test_a_child_that_lost_our_label_is_still_ours(world: World, kind: str) -> None:
    world.server.apply(owner_object("CachedModel", "bare"))
    world.wait_for_child("CachedModel", "bare", kind, "kvs-bare")
    before = world.live(kind, "kvs-bare") or {}
    world.server.kubectl("-n", NAMESPACE, "label", kind, "kvs-bare", "app.kubernetes.io/managed-by-")

    def is_back() -> bool:
        found = world.live(kind, "kvs-bare") or {"metadata": {"labels": {}}}
        return bool(found["metadata"]["labels"].get("app.kubernetes.io/managed-by") == "kvstrata")

    world.server.wait("the label", is_back)
    assert (world.live(kind, "kvs-bare") or {})["metadata"]["uid"] == before["metadata"]["uid"]
    assert not world.in_the_way("CachedModel", "bare")


def test_what_a_child_has_no_more_goes_from_one_that_was_created_by_the_operator(world: World) -> None:
    """Created by an apply: fields that are left out later are removed, which is not so of what a POST made."""
    world.server.apply(owner_object("CachedModel", "owned"))
    world.wait_for_child("CachedModel", "owned", "Deployment", "kvs-owned")
    get = ("-n", NAMESPACE, "get", "deployment", "kvs-owned", "-o", "json", "--show-managed-fields")
    managers = json.loads(world.server.kubectl(*get))["metadata"]["managedFields"]
    assert {(one["manager"], one["operation"]) for one in managers if "subresource" not in one} == {
        ("kvstrata-cachedmodel", "Apply")
    }


def _service_monitor_crd() -> Raw:
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    plural, group = SERVICE_MONITOR.plural, SERVICE_MONITOR.api_version.split("/", maxsplit=1)[0]
    names = {"plural": plural, "kind": SERVICE_MONITOR.kind, "singular": SERVICE_MONITOR.kind.lower()}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {"group": group, "scope": "Namespaced", "names": names, "versions": [version]},
    }
