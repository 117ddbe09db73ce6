"""A crowded namespace: denied connections, a quota, a webhook that adds containers, objects of others, two releases.

All that should be Ready is, a tenant finds its blocks in its tier, objects of others stay unchanged, and at rest no
operator writes anything. Last, one release hands over to the other, and back, while a tenant asks. The webhook serves
on this machine, so this needs the local cluster.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from e2e.product.calls import replica
from e2e.product.chapters import ACME_KEY, MODEL, keyspace_of
from e2e.product.direct import pods_run_here
from e2e.product.direct_operator import OperatorWrites
from e2e.product.direct_stage import USAGE_KINDS
from e2e.product.injector import CONTAINER, LABEL, Injector, injector
from e2e.product.install import CHARTS
from e2e.product.kubectl import CommandError, Kubectl, pod_names, wait_until
from e2e.product.prompts import CHUNK_TOKENS, WHOLE_CHUNKS, fresh_prompt
from e2e.product.release import (
    PODS,
    Raw,
    Release,
    annotate,
    api_object,
    namespace,
    release,
    small_domain,
    spec_of,
    wait_settled,
)
from e2e.product.shared_tier import TIER
from e2e.product.tier_contents import tier_contents
from e2e.product.traffic import Caller, traffic
from kvstrata.plan.claim import SERVED_BY

pytestmark = pytest.mark.cluster

SERVED = "crowded"
TAKEN, THREE = "taken", "three"
"""A model whose names others have, and a tier of three servers."""

SHARDS = 3
QUOTA = {"requests.cpu": "8", "limits.cpu": "24", "requests.memory": "24Gi", "limits.memory": "48Gi"}
"""Every container needs limits under it; the amounts are no limit here."""

EGRESS = "networkPolicy.egressPorts={443,6443}"
REST_S = 90.0
"""More than a look at foreign objects, at events and at shares of a tier take to come again."""


@dataclass(frozen=True, slots=True)
class Crowd:
    """The namespace when everything in it is at rest: the foreign objects as they were made, and two releases."""

    webhook: Injector
    foreign: dict[tuple[str, str], Raw]
    serves: Release
    stands_back: Release


@pytest.fixture(scope="module")
def crowd(kubectl: Kubectl, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crowd]:
    """Make the crowd, then the objects; afterwards nothing of it is left."""
    if not pods_run_here():
        pytest.skip("the webhook serves on this machine, which the API server of another cluster does not reach")
    with ExitStack() as stack:
        webhook = stack.enter_context(injector(kubectl, Path(tmp_path_factory.mktemp("webhook"))))
        stack.enter_context(namespace(kubectl, SERVED, **{LABEL: "on"}))
        kubectl.apply(*_locks(), *_foreign())
        foreign = _of_others(kubectl)
        first = stack.enter_context(release(kubectl, "crowd", SERVED, EGRESS))
        stack.callback(kubectl.run, "delete", "namespace", SERVED, "--ignore-not-found")
        kubectl.apply(*_objects())
        wait_settled(kubectl, SERVED, but=f"cachedmodel/{TAKEN}")
        second = stack.enter_context(release(kubectl, "latecomer", SERVED, EGRESS))
        yield Crowd(webhook, foreign, first, second)


def test_a_webhook_a_quota_and_denied_connections_keep_nothing_from_ready_and_blocks_from_no_tier(
    kubectl: Kubectl, crowd: Crowd
) -> None:
    changed = {review.name for review in crowd.webhook.reviews if review.namespace == SERVED}
    assert {f"kvs-{MODEL}", f"kvs-{TIER}-redis-0"} <= changed, "the webhook was not asked"
    (pod,) = _pods(kubectl, f"{PODS}={MODEL}")
    servers = [one for tier in (TIER, THREE) for one in _pods(kubectl, f"kvstrata.io/tier={tier}")]
    assert len(servers) == 1 + SHARDS
    for one in (pod, *servers):
        states = {state["name"]: state["ready"] for state in one["status"]["containerStatuses"]}
        assert CONTAINER in states, f"the webhook's container is not in {one['metadata']['name']}"
        assert all(states.values()), states

    with tier_contents(kubectl, TIER, SERVED) as redis, replica(kubectl, SERVED, MODEL, pod_names([pod])[0]) as where:
        keyspace, prompt = keyspace_of(kubectl, "acme", namespace=SERVED), fresh_prompt()
        before = redis.names(keyspace)
        assert where.found(ACME_KEY, prompt) == 0
        wait_until(
            "its blocks are in the tier",
            lambda: len(redis.names(keyspace) - before) >= WHOLE_CHUNKS // CHUNK_TOKENS,
        )
        assert where.found(ACME_KEY, prompt) >= WHOLE_CHUNKS


def test_objects_of_others_are_named_all_at_once_and_stay_unchanged(kubectl: Kubectl, crowd: Crowd) -> None:
    def message() -> str:
        stalled = kubectl.condition("cachedmodel", TAKEN, SERVED, "Stalled")
        return str(stalled.get("message", "")) if stalled.get("reason") == "NameConflict" else ""

    named = str(wait_until("the conflict is reported", message))
    for kind, name in crowd.foreign:
        assert f"{kind} {name}" in named, named
    print(named)
    assert _of_others(kubectl) == crowd.foreign
    kubectl.run("-n", SERVED, "delete", "cachedmodel", TAKEN)
    try:
        assert _of_others(kubectl) == crowd.foreign, "an object of others went with the model"
    finally:
        kubectl.apply(_taken())
    wait_until("the conflict is reported again", message)
    assert _of_others(kubectl) == crowd.foreign


def test_the_release_that_came_second_names_the_first_and_writes_nothing_else(kubectl: Kubectl, crowd: Crowd) -> None:
    claim = _claim(kubectl)
    assert (claim["namespace"], claim["release"]) == (crowd.serves.namespace, crowd.serves.name)
    events = wait_until("the second release reports the first", lambda: _standing_back(kubectl))
    assert f"the operator in namespace {crowd.serves.namespace} (release {crowd.serves.name})" in events[0]["message"]
    assert f"{crowd.stands_back.namespace} (release {crowd.stands_back.name}) writes nothing" in events[0]["message"]


def test_a_release_in_the_namespace_of_another_is_refused_by_name(kubectl: Kubectl, crowd: Crowd) -> None:
    served = f"watchNamespaces={{{SERVED}}}"
    with pytest.raises(CommandError, match=f"has the release {crowd.serves.name} of kvstrata"):
        kubectl.helm("install", "third", str(CHARTS / "kvstrata"), "-n", crowd.serves.namespace, "--set", served)


def test_at_rest_neither_operator_writes_and_the_webhook_is_not_asked(kubectl: Kubectl, crowd: Crowd) -> None:
    wait_settled(kubectl, SERVED, but=f"cachedmodel/{TAKEN}")
    _wait_for_rest(_writes(crowd))
    asked, writes = len(crowd.webhook.reviews), _writes(crowd)
    # That nothing comes can be seen by waiting only.
    time.sleep(REST_S)
    for name, seen in writes.items():
        written = [one for one in seen.all() if one.subresource != "status" or one.resource not in USAGE_KINDS.values()]
        assert written == [], f"release {name} writes at rest"
    assert [review for review in crowd.webhook.reviews[asked:] if review.namespace == SERVED] == []
    wait_settled(kubectl, SERVED, but=f"cachedmodel/{TAKEN}")


def test_a_release_hands_over_under_traffic_and_back_with_epochs_keyspaces_and_blocks_intact(
    kubectl: Kubectl, crowd: Crowd
) -> None:
    (pod,) = _pods(kubectl, f"{PODS}={MODEL}")
    former, heir = _claim(kubectl)["uid"], _inherit(kubectl, crowd.serves, crowd.stands_back)
    with tier_contents(kubectl, TIER, SERVED) as redis, replica(kubectl, SERVED, MODEL, pod_names([pod])[0]) as where:
        keyspace, prompt = keyspace_of(kubectl, "acme", namespace=SERVED), fresh_prompt()
        before = redis.names(keyspace)
        where.ask(ACME_KEY, prompt)
        wait_until(
            "its blocks are in the tier",
            lambda: len(redis.names(keyspace) - before) >= WHOLE_CHUNKS // CHUNK_TOKENS,
        )
        kept, stored = _kept(kubectl), redis.names(keyspace) - before
        with traffic(Caller(where, "acme", ACME_KEY, lambda: prompt)) as running:
            running.wait_for(3)
            try:
                _hand_over(kubectl, crowd.stands_back, heir)
                assert _kept(kubectl) == kept
                running.wait_for(3)
            finally:  # The fixture's end needs the first one.
                _hand_over(kubectl, crowd.serves, former)
            running.wait_for(3)
        print(running.account)
        assert not running.account.failed, str(running.account)
        assert _kept(kubectl) == kept
        assert stored <= redis.names(keyspace)
        assert where.found(ACME_KEY, prompt) >= WHOLE_CHUNKS
    assert _of_others(kubectl) == crowd.foreign


def _claim(kubectl: Kubectl) -> Raw:
    """The installation that claims the namespace."""
    found: Raw = kubectl.get("cachedomain", "default", SERVED)["status"]["servedBy"]
    return found


def _standing_back(kubectl: Kubectl) -> list[Raw]:
    """The Events of releases that leave the namespace to another."""
    chosen = "--field-selector=reason=ServedByAnother"
    return list(json.loads(kubectl.run("-n", SERVED, "get", "events", chosen, "-o", "json"))["items"])


def _inherit(kubectl: Kubectl, former: Release, heir: Release) -> str:
    """Start a release with the authority and the records of another; return the id by which it is chosen then."""
    heir.stop()
    copies = []
    for one in json.loads(kubectl.run("-n", former.namespace, "get", "secrets,configmaps", "-o", "json"))["items"]:
        if one["metadata"]["name"].startswith("kvstrata-"):
            kept = {key: value for key, value in one["metadata"].items() if key in ("name", "labels", "annotations")}
            copies.append({**one, "metadata": {**kept, "namespace": heir.namespace}})
    document = json.dumps({"apiVersion": "v1", "kind": "List", "items": copies})
    kubectl.run("replace", "--force", "-f", "-", stdin=document)
    kubectl.run("-n", SERVED, "delete", "events", "--field-selector=reason=ServedByAnother")
    heir.start()
    events = wait_until("the second release reports its id", lambda: _standing_back(kubectl))
    return str(events[0]["message"]).rpartition(f"{SERVED_BY}: ")[2]


def _hand_over(kubectl: Kubectl, to: Release, uid: str) -> None:
    """Have a release serve the namespace; return once it enforces a new policy."""
    annotate(kubectl, "CacheDomain", "default", SERVED, SERVED_BY, uid)
    wait_until(f"release {to.name} claims the namespace", lambda: _claim(kubectl)["uid"] == uid)
    policy = {"tenant": to.name, "isolation": "Isolated", "deletionPolicy": "Abandon"}
    kubectl.apply(api_object("TenantCachePolicy", to.name, SERVED, policy))
    wait_settled(kubectl, SERVED, but=f"cachedmodel/{TAKEN}")


def _kept(kubectl: Kubectl) -> list[Any]:
    """The identity, epochs, keyspace and key of the domain, and the pods: a hand-over changes none of them."""
    domain = kubectl.get("cachedomain", "default", SERVED)["status"]
    policy = kubectl.get("tenantcachepolicy", "acme", SERVED)["status"]
    key = kubectl.get("secret", "kvstrata-domain", SERVED)["data"]
    pods = [one["metadata"]["uid"] for selector in (PODS, "kvstrata.io/tier") for one in _pods(kubectl, selector)]
    return [
        domain["domainID"],
        domain["scope"],
        policy["scope"],
        keyspace_of(kubectl, "acme", namespace=SERVED),
        key,
        pods,
    ]


def _writes(crowd: Crowd) -> dict[str, OperatorWrites]:
    """The writes of both operators from now on, by the names of their releases."""
    return {one.name: OperatorWrites(namespace=one.namespace) for one in (crowd.serves, crowd.stands_back)}


def _wait_for_rest(writes: dict[str, OperatorWrites]) -> None:
    """Return once a quarter of a minute passed without a write: tests before this one made and deleted a model."""
    counts, since_s = dict[str, int](), time.monotonic()

    def at_rest() -> bool:
        nonlocal counts, since_s
        now = {name: len(seen.all()) for name, seen in writes.items()}
        if now != counts:
            counts, since_s = now, time.monotonic()
        return time.monotonic() - since_s > REST_S / 6

    wait_until("the operators rest", at_rest, every_s=1)


def _pods(kubectl: Kubectl, selector: str) -> list[Raw]:
    return [one for one in kubectl.list("pod", SERVED, selector) if "deletionTimestamp" not in one["metadata"]]


def _locks() -> list[Raw]:
    """No connection but to DNS, and a quota that wants limits of every container."""
    dns = {"ports": [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]}
    denied = {"podSelector": {}, "policyTypes": ["Ingress", "Egress"], "egress": [dns]}
    return [
        _object("networking.k8s.io/v1", "NetworkPolicy", "default-deny", spec=denied),
        _object("v1", "ResourceQuota", "compute", spec={"hard": QUOTA}),
    ]


def _foreign() -> list[Raw]:
    """Objects of another team with names of a model's children; none has a label of the product."""
    name, theirs = f"kvs-{TAKEN}", {"app": "other-team"}
    selected = {"podSelector": {"matchLabels": theirs}, "policyTypes": ["Ingress"]}
    return [
        _object("v1", "Service", name, spec={"selector": theirs, "ports": [{"name": "web", "port": 80}]}),
        _object("networking.k8s.io/v1", "NetworkPolicy", name, spec=selected),
        _object("v1", "ServiceAccount", name),
        _object("v1", "Secret", f"{name}-gate-tls", stringData={"mine": "do not touch"}),
    ]


def _of_others(kubectl: Kubectl) -> dict[tuple[str, str], Raw]:
    """The foreign objects as they are, with their UIDs and versions."""
    slots = [(one["kind"], one["metadata"]["name"]) for one in _foreign()]
    return {slot: json.loads(kubectl.run("-n", SERVED, "get", *slot, "-o", "json")) for slot in slots}


def _objects() -> list[Raw]:
    """A small domain with limits for each container, a tier of three servers, and a model with names of others."""
    objects = small_domain(SERVED)
    model, tier = spec_of(objects, "CachedModel", MODEL), spec_of(objects, "CacheTier", TIER)
    _limit(model)
    tier["redis"]["managed"]["resources"] = _amounts("20m", "64Mi", "200m", "512Mi")
    small = {"shards": SHARDS, "resources": _amounts("10m", "64Mi", "200m", "192Mi")}
    three = {"medium": "Redis", "capacity": "96Mi", "redis": {"managed": small}}
    return [*objects, api_object("CacheTier", THREE, SERVED, three), _taken()]


def _taken() -> Raw:
    """The model with names of others: no node takes its pods, should there be any."""
    spec = spec_of(small_domain(SERVED), "CachedModel", MODEL)
    _limit(spec)
    spec["engine"]["podTemplate"] = {"nodeSelector": {"crowd": "none"}}
    return api_object("CachedModel", TAKEN, SERVED, spec | {"tiers": []})


def _limit(model: Raw) -> None:
    model["engine"]["resources"] = _amounts("100m", "1Gi", "2", "4Gi")
    model["cacheServer"]["resources"] = _amounts("50m", "256Mi", "1", "2500Mi")
    model["gate"]["resources"] = _amounts("20m", "96Mi", "500m", "384Mi")


def _amounts(cpu: str, memory: str, cpu_limit: str, memory_limit: str) -> dict[str, Any]:
    return {"requests": {"cpu": cpu, "memory": memory}, "limits": {"cpu": cpu_limit, "memory": memory_limit}}


def _object(api: str, kind: str, name: str, **content: Any) -> Raw:
    return {"apiVersion": api, "kind": kind, "metadata": {"name": name, "namespace": SERVED}, **content}
