"""The running domain as the fault scenarios see it: pods without the API server, steady traffic, a picture of all."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from .chapters import ACME_KEY, GLOBEX_KEY, MODEL, Stage, open_stage
from .direct import DirectReplica, direct_replica
from .install import DEMO_NAMESPACE, SYSTEM_NAMESPACE
from .kubectl import Kubectl, wait_until
from .prompts import fresh_prompt
from .traffic import Caller, Traffic, traffic

WRITTEN_KINDS = (
    "cachedomain,cachetier,cachedmodel,tenantcachepolicy,tenantgroup,prefixpool,cacheinvalidation,deployment,replicaset,"
    "statefulset,service,serviceaccount,secret,configmap,role,rolebinding,poddisruptionbudget,networkpolicy"
)

USAGE_KINDS = {
    "CacheTier": "cachetiers",
    "TenantCachePolicy": "tenantcachepolicies",
    "TenantGroup": "tenantgroups",
    "CacheDomain": "cachedomains",
    "PrefixPool": "prefixpools",
}
"""Kinds whose status reports usage, and their resources in the API."""


@contextmanager
def open_direct_stage(kubectl: Kubectl, report: Callable[[str], None]) -> Iterator[Stage]:
    """Reach two ready pods of the demo's model without the API server, which is asked only now."""
    with open_stage(kubectl, report) as stage:
        first, second = (
            direct_replica(kubectl, DEMO_NAMESPACE, MODEL, pod) for pod in (stage.first.pod, stage.second.pod)
        )
    yield Stage(kubectl, first, second, report)


@contextmanager
def tenants_ask(stage: Stage) -> Iterator[Traffic]:
    """Let acme ask one pod and globex the other, each the same prompt again and again, which it finds cached."""
    prompts = {key: fresh_prompt() for key in (ACME_KEY, GLOBEX_KEY)}
    for where, key in ((stage.first, ACME_KEY), (stage.second, GLOBEX_KEY)):
        where.ask(key, prompts[key])
    callers = (
        Caller(stage.first, "acme", ACME_KEY, lambda: prompts[ACME_KEY]),
        Caller(stage.second, "globex", GLOBEX_KEY, lambda: prompts[GLOBEX_KEY]),
    )
    with traffic(*callers) as running:
        yield running


def everything(kubectl: Kubectl) -> dict[str, str]:
    """Return the resourceVersion of every object that the operator may write, and which pods run since when.

    For kinds that report usage, the rest of the object instead: usage follows the requests that run meanwhile.
    """
    seen = {}
    for namespace, kinds in ((DEMO_NAMESPACE, WRITTEN_KINDS), (SYSTEM_NAMESPACE, "secret")):
        for item in json.loads(kubectl.run("-n", namespace, "get", kinds, "-o", "json"))["items"]:
            metadata = item["metadata"]
            state = str(metadata["resourceVersion"])
            if item["kind"] in USAGE_KINDS:
                known = {**metadata, "resourceVersion": None, "managedFields": None}
                status = {**item.get("status", {}), "used": None, "usage": None, "summary": None, "restores": None}
                # Whether restoring pays is measured by the requests that run.
                status["conditions"] = [one for one in status.get("conditions", ()) if one["type"] != "RestorePays"]
                state = json.dumps({**status, "metadata": known, "spec": item["spec"]}, sort_keys=True)
            seen[f"{namespace}/{item['kind']}/{metadata['name']}"] = state
    return seen | restarts(kubectl)


def differences(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, Any]:
    """Return the objects that differ in two pictures, each with both states, or both values of fields that differ."""
    found: dict[str, Any] = {}
    for name in sorted(before.keys() | after.keys()):
        states = before.get(name, "{}"), after.get(name, "{}")
        if states[0] == states[1]:
            continue
        was, now = ({"state": state} if isinstance(state, int) else state for state in map(json.loads, states))
        fields = sorted(was.keys() | now.keys())
        found[name] = {one: (was.get(one), now.get(one)) for one in fields if was.get(one) != now.get(one)}
    return found


def restarts(kubectl: Kubectl) -> dict[str, str]:
    """Return how often each container of the domain's pods has been started again, by pod and UID."""
    seen = {}
    for pod in kubectl.list("pod", DEMO_NAMESPACE):
        status = pod["status"]
        statuses = [*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())]
        counts = {one["name"]: one["restartCount"] for one in statuses}
        seen[f"pod {pod['metadata']['name']} {pod['metadata']['uid']}"] = json.dumps(counts, sort_keys=True)
    return seen


@contextmanager
def domain_rules(kubectl: Kubectl, rules: dict[str, Any]) -> Iterator[None]:
    """Let the domain have other rules while the block runs, in force in every pod; the former ones come back."""
    former = kubectl.get("cachedomain", "default", DEMO_NAMESPACE)["spec"]
    _set_rules(kubectl, rules)
    try:
        yield
    finally:
        _set_rules(kubectl, {name: former.get(name) for name in rules})


def _set_rules(kubectl: Kubectl, rules: dict[str, Any]) -> None:
    patch = json.dumps({"spec": rules})
    kubectl.run("-n", DEMO_NAMESPACE, "patch", "cachedomain", "default", "--type", "merge", "-p", patch)

    def in_force() -> bool:
        domain = kubectl.get("cachedomain", "default", DEMO_NAMESPACE)
        status = domain.get("status") or {}
        conditions = {c["type"]: c["status"] for c in status.get("conditions") or ()}
        current = status.get("observedGeneration") == domain["metadata"]["generation"]
        return bool(current and conditions.get("Enforced") == "True")

    wait_until("the domain's rules are in force in every pod", in_force)


def of_gate(stage: Stage, name: str) -> list[float]:
    """Return a metric of both pods' gates, read without the API server."""
    pods = [where for where in (stage.first, stage.second) if isinstance(where, DirectReplica)]
    return [where.gate_metric(name) for where in pods]
