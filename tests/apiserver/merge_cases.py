"""Sequences of requests whose effect depends on who owns which field."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Raw = dict[str, Any]
NAMESPACE = "merging"
DEPLOYMENT, POLICY = "Deployment", "TenantCachePolicy"
ABSENT_UID = "00000000-0000-4000-8000-000000000000"


@dataclass(frozen=True, slots=True)
class Step:
    """One request: apply, create, replace, patch, status (a merge patch of it) or delete; `status` is its answer's."""

    verb: str
    kind: str
    name: str
    body: Mapping[str, Any]
    manager: str = "alice"
    force: bool = False
    status: int = 200

    @property
    def slot(self) -> tuple[str, str, str]:
        """Where the object is."""
        return (self.kind, NAMESPACE, self.name)


def _step(verb: str, kind: str, name: str, body: Mapping[str, Any], manager: str = "alice", **more: Any) -> Step:
    metadata = {"name": name, "namespace": NAMESPACE, **body.get("metadata", {})}
    whole = body if verb in ("patch", "status", "delete") else {**body, "metadata": metadata}
    return Step(verb, kind, name, whole, manager, **more)


def _deployment(containers: list[Raw], **spec: Any) -> Raw:
    selector = {"matchLabels": {"app": "x"}}
    pod = {"containers": containers, **spec.pop("pod", {})}
    return {"spec": {"selector": selector, "template": {"metadata": {"labels": {"app": "x"}}, "spec": pod}, **spec}}


def _container(name: str, *env: str, image: str = "image:1", **more: Any) -> Raw:
    variables = [{"name": variable, "value": variable.lower()} for variable in env]
    return {"name": name, "image": image, **({"env": variables} if env else {}), **more}


def _owner(name: str, number: int) -> Raw:
    uid = f"00000000-0000-4000-8000-00000000000{number}"
    return {"apiVersion": "v1", "kind": "ConfigMap", "name": name, "uid": uid}


_ONLY_ENV = {"spec": {"template": {"spec": {"containers": [{"name": "a", "env": [{"name": "C", "value": "c"}]}]}}}}
_IMAGE = {"spec": {"template": {"spec": {"containers": [{"name": "a", "image": "image:2"}]}}}}
_RULE: Raw = {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}
_SPEC: Raw = {"tenant": "acme", "isolation": "Isolated"}
_CPU, _SHARED = {"tier": "cpu", "limit": "1Mi"}, {"tier": "shared", "limit": "2Mi"}


def _condition(kind: str, status: str = "True") -> Raw:
    return {
        "type": kind, "status": status, "reason": "R", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z",
        "observedGeneration": 1,
    }  # fmt: skip


CASES: Mapping[str, tuple[Step, ...]] = {
    "containers and their variables merge by name": (
        _step("apply", DEPLOYMENT, "d", _deployment([_container("a", "A", "B"), _container("b")], replicas=2)),
        _step("apply", DEPLOYMENT, "d", _deployment([_container("a", "A", "B"), _container("b")], replicas=2)),
        _step("apply", DEPLOYMENT, "d", _ONLY_ENV, "bob"),
        _step("apply", DEPLOYMENT, "d", _IMAGE, "bob", status=409),
        _step("apply", DEPLOYMENT, "d", _deployment([_container("a", "A"), _container("b")])),
        _step("apply", DEPLOYMENT, "d", _deployment([_container("b"), _container("a", "D", "A")])),
        _step("apply", DEPLOYMENT, "d", _ONLY_ENV | _IMAGE, "bob", force=True),
        _step("apply", DEPLOYMENT, "d", _deployment([_container("b")])),
        _step("patch", DEPLOYMENT, "d", {"spec": {"replicas": 5}}, "carol"),
        _step("apply", DEPLOYMENT, "d", _deployment([_container("b")], replicas=1), status=409),
        _step("apply", DEPLOYMENT, "d", _deployment([_container("b")], replicas=1), force=True),
        _step("apply", DEPLOYMENT, "d", _deployment([_container("b")])),
        _step("delete", DEPLOYMENT, "d", {"uid": ABSENT_UID}, status=409),
        _step("delete", DEPLOYMENT, "d", {}),
        _step("delete", DEPLOYMENT, "d", {}, status=404),
    ),
    "ports merge by number and protocol, volumes by name, mounts by path": (
        _step(
            "apply", DEPLOYMENT, "p",
            _deployment(
                [_container("a", ports=[{"containerPort": 1}, {"containerPort": 1, "protocol": "UDP"}],
                            volumeMounts=[{"name": "v", "mountPath": "/v"}, {"name": "w", "mountPath": "/w"}])],
                pod={"volumes": [{"name": "v", "emptyDir": {}}, {"name": "w", "emptyDir": {"medium": "Memory"}}]},
            ),
        ),
        _step(
            "apply", DEPLOYMENT, "p",
            _deployment(
                [_container("a", ports=[{"containerPort": 1, "protocol": "UDP"}, {"containerPort": 2, "name": "two"}],
                            volumeMounts=[{"name": "w", "mountPath": "/w"}])],
                pod={"volumes": [{"name": "w", "emptyDir": {"medium": "Memory"}}], "nodeSelector": {"a": "b"}},
            ),
        ),
        _step(
            "apply", DEPLOYMENT, "p", {"spec": {"template": {"spec": {"nodeSelector": {"c": "d"}}}}}, "bob", status=409
        ),
        _step(
            "apply", DEPLOYMENT, "p", {"spec": {"template": {"spec": {"nodeSelector": {"c": "d"}}}}}, "bob", force=True
        ),
        _step("apply", DEPLOYMENT, "p", _deployment([_container("a")])),
        _step("apply", DEPLOYMENT, "p", {}, "bob"),
    ),
    "rules are one value": (
        _step("apply", "Role", "r", {"rules": [_RULE]}),
        _step("apply", "Role", "r", {"rules": [{**_RULE, "verbs": ["watch"]}]}, "bob", status=409),
        _step("apply", "Role", "r", {"rules": [_RULE]}, "bob"),
        _step("apply", "Role", "r", {"rules": []}, status=409),
        _step("apply", "Role", "r", {}),
        _step("apply", "Role", "r", {"rules": [_RULE]}, "bob", force=True),
        _step("apply", "Role", "r", {}, "bob"),
    ),
    "labels are shared by those who agree": (
        _step("apply", "ServiceAccount", "l", {"metadata": {"labels": {"a": "1", "b": "1"}}}),
        _step("apply", "ServiceAccount", "l", {"metadata": {"labels": {"b": "1", "c": "1"}}}, "bob"),
        _step("apply", "ServiceAccount", "l", {"metadata": {"labels": {"a": "1"}}}),
        _step("apply", "ServiceAccount", "l", {"metadata": {"labels": {"a": "2"}}}, "bob", status=409),
        _step("apply", "ServiceAccount", "l", {}),
        _step("apply", "ServiceAccount", "l", {}, "bob"),
    ),
    "owners merge by uid and finalizers are a set": (
        _step("apply", "ServiceAccount", "o", {"metadata": {"ownerReferences": [_owner("x", 1)]}}),
        _step("apply", "ServiceAccount", "o", {"metadata": {"ownerReferences": [_owner("y", 2)]}}, "bob"),
        _step("apply", "ServiceAccount", "o", {"metadata": {"finalizers": ["t.io/a", "t.io/b"]}}, "carol"),
        _step("apply", "ServiceAccount", "o", {"metadata": {"finalizers": ["t.io/c"]}}, "dave"),
        _step("apply", "ServiceAccount", "o", {}),
        _step("apply", "ServiceAccount", "o", {"metadata": {"finalizers": ["t.io/a"]}}, "carol"),
        _step("delete", "ServiceAccount", "o", {}),
        _step("delete", "ServiceAccount", "o", {}),
        _step("patch", "ServiceAccount", "o", {"metadata": {"finalizers": None}}, "eve"),
    ),
    "a service's ports and selector": (
        _step("apply", "Service", "s", {"spec": {"selector": {"a": "b"}, "ports": [{"port": 1, "name": "one"}]}}),
        _step("apply", "Service", "s", {"spec": {"ports": [{"port": 2, "name": "two"}]}}, "bob"),
        _step("apply", "Service", "s", {"spec": {"selector": {"c": "d"}}}, "bob", status=409),
        _step(
            "apply", "Service", "s",
            {"spec": {"selector": {"c": "d"}, "ports": [{"port": 1, "name": "one", "targetPort": 7}]}},
        ),
        _step("apply", "Service", "s", {"spec": {"selector": {"c": "d"}, "ports": [{"port": 3, "name": "three"}]}}),
    ),
    "a secret is created, replaced on condition, and merges by key": (
        _step("create", "Secret", "k", {"data": {"a": "MQ=="}}),
        _step("create", "Secret", "k", {"data": {"a": "MQ=="}}, status=409),
        _step("replace", "Secret", "k", {"data": {"a": "Mg==", "b": "MQ=="}}, "bob"),
        _step("replace", "Secret", "k", {"data": {"a": "Mg=="}, "metadata": {"resourceVersion": "1"}}, status=409),
        _step("apply", "Secret", "k", {"data": {"b": "MQ==", "c": "MQ=="}}, "carol"),
        _step("apply", "Secret", "k", {"data": {"a": "MQ=="}}, "carol", status=409),
        _step("apply", "Secret", "k", {"data": {"a": "MQ=="}}, "carol", force=True),
        _step("replace", "Secret", "gone", {"data": {}}, status=404),
    ),
    "an apply that may only create, or only change one object": (
        _step("apply", "ServiceAccount", "c", {"metadata": {"uid": ABSENT_UID}}, status=409),
        _step("apply", "ServiceAccount", "c", {"metadata": {"resourceVersion": "1", "labels": {"a": "1"}}}),
        _step("apply", "ServiceAccount", "c", {"metadata": {"resourceVersion": "1"}}, status=409),
        _step("apply", "ServiceAccount", "c", {"metadata": {"resourceVersion": "1"}}, "bob", force=True, status=409),
        _step("apply", "ServiceAccount", "c", {"metadata": {"labels": {"b": "1"}}}),
    ),
    "a policy's spec and status are apart": (
        _step("create", POLICY, "s", {"spec": _SPEC}),
        _step("patch", POLICY, "s", {"spec": {"suspend": True}}, "bob"),
        _step("patch", POLICY, "s", {"spec": {"suspend": True}}, "bob"),
        _step("patch", POLICY, "s", {"status": {"cacheGeneration": 3}}, "bob"),
        _step("status", POLICY, "s", {"status": {"cacheGeneration": 1, "conditions": [_condition("Ready")]}}, "op"),
        _step("status", POLICY, "s", {"status": {"cacheGeneration": 1}}, "op"),
        _step("status", POLICY, "s", {"status": {"unheardOf": 1}}, "op"),
        _step(
            "status", POLICY, "s",
            {"status": {"cacheGeneration": None, "conditions": [_condition("Ready", "False"), _condition("Admitted")]},
             "spec": {"suspend": False}},
            "op",
        ),
        _step("status", POLICY, "s", {"metadata": {"resourceVersion": "1"}, "status": {}}, "op", status=409),
        _step("replace", POLICY, "s", {"spec": _SPEC, "metadata": {"labels": {"a": "b"}}}, "bob"),
        _step("status", POLICY, "gone", {"status": {}}, status=404),
        _step("delete", POLICY, "s", {}),
    ),
    "a policy's budgets merge by tier": (
        _step("apply", POLICY, "t", {"spec": {**_SPEC, "budgets": [_CPU, _SHARED]}}),
        _step("apply", POLICY, "t", {"spec": {"budgets": [{"tier": "shared", "retention": "1h"}]}}, "bob"),
        _step("apply", POLICY, "t", {"spec": {"budgets": [{"tier": "cpu", "limit": "9Mi"}]}}, "bob", status=409),
        _step("apply", POLICY, "t", {"spec": {**_SPEC, "budgets": [_CPU]}}),
        _step("apply", POLICY, "t", {"spec": {**_SPEC, "budgets": [_SHARED]}}),
        _step("apply", POLICY, "t", {"spec": _SPEC}),
        _step("apply", POLICY, "t", {}, "bob"),
    ),
    "going with a finalizer": (
        _step("create", POLICY, "f", {"spec": _SPEC, "metadata": {"finalizers": ["t.io/a"]}}),
        _step("delete", POLICY, "f", {"uid": ABSENT_UID}, status=409),
        _step("delete", POLICY, "f", {}),
        _step("status", POLICY, "f", {"status": {"cacheGeneration": 2}}, "op"),
        _step("patch", POLICY, "f", {"metadata": {"finalizers": []}}, "bob"),
    ),
}  # fmt: skip


def _some(chance: random.Random, names: str) -> list[str]:
    chosen = [name for name in names.split() if chance.random() < 0.5]
    chance.shuffle(chosen)
    return chosen


def random_deployment(chance: random.Random) -> Raw:
    """Return a Deployment as one of several managers applies it: a random part of what others apply, too."""
    containers = []
    for name in ["a", *_some(chance, "b c")]:
        container = _container(name, *_some(chance, "A B C"), image=f"image:{chance.choice('11112')}")
        if ports := _some(chance, "1 2 3"):
            container["ports"] = [{"containerPort": int(port)} for port in ports]
        if chance.random() < 0.3:
            container["args"] = _some(chance, "x y z")
        containers.append(container)
    chance.shuffle(containers)
    pod: Raw = {"volumes": [{"name": name, "emptyDir": {}} for name in _some(chance, "v w")]}
    if chance.random() < 0.4:
        pod["tolerations"] = [{"key": key, "operator": "Exists"} for key in _some(chance, "k l")]
    spec = _deployment(containers, pod=pod)
    return {**spec, "metadata": {"labels": {name: chance.choice("112") for name in _some(chance, "p q r")}}}


def random_policy(chance: random.Random) -> Raw:
    """Return a policy as one of several managers applies it."""
    budgets = []
    for name in _some(chance, "cpu shared disk"):
        budget = {"tier": name, "limit": chance.choice(["1Mi", "1Mi", "2Mi"])}
        if chance.random() < 0.4:
            budget["retention"] = chance.choice(["1h", "2h"])
        budgets.append(budget)
    spec: Raw = {**_SPEC, **({"budgets": budgets} if budgets else {})}
    if chance.random() < 0.4:
        spec["suspend"] = chance.random() < 0.5
    if chance.random() < 0.4:
        spec["models"] = {"names": _some(chance, "m n")}
    return {"spec": spec, "metadata": {"annotations": {name: chance.choice("12") for name in _some(chance, "p q")}}}
