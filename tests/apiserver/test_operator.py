"""The operator's loop against a real apiserver. No controller of Kubernetes runs, so no pod ever does."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from kvstrata.reconcile.queue import MAX_WAIT_S
from tests.apiserver.operator_process import OperatorProcess, Operators
from tests.apiserver.server import NAMESPACE, Server

CHILDREN = {
    "Deployment/kvs-smollm2", "Service/kvs-smollm2", "ServiceAccount/kvs-smollm2", "PodDisruptionBudget/kvs-smollm2",
    "NetworkPolicy/kvs-smollm2", "Role/kvs-smollm2", "RoleBinding/kvs-smollm2", "Secret/kvs-smollm2-gate-tls",
    "Secret/kvs-smollm2-bundle", "Secret/kvstrata-domain", "StatefulSet/kvs-shared-redis-0", "Service/kvs-shared-redis",
    "Secret/kvs-shared-redis-auth", "Secret/kvs-shared-redis-tls", "CacheDomain/default",
}  # fmt: skip
QUIET_S = 8.0
LATE_S = 6.0
"""How late an operator on a busy machine may write what it put off."""


def at_rest(server: Server) -> dict[str, str]:
    """Wait until nothing changes for longer than a status of progress may wait; return the resourceVersions."""
    deadline = time.monotonic() + 90
    before = server.versions()
    while True:
        time.sleep(MAX_WAIT_S + LATE_S)
        after = server.versions()
        if before == after:
            return after
        assert time.monotonic() < deadline, {k for k in after if after[k] != before.get(k)}
        before = after


def test_the_samples_end_ready_or_with_the_documented_reason(server: Server, operator: OperatorProcess) -> None:
    at_rest(server)
    expected = {
        ("CacheDomain", "default"): ("True", "NoLivePods"),
        ("CacheTier", "cpu"): ("True", "InPod"),
        ("CachedModel", "smollm2"): ("False", "RollingOut"),
        **{
            ("TenantCachePolicy", name): ("True", "NoLivePods")
            for name in ("acme", "globex", "public-docs", "vision", "speech")
        },
        ("TenantGroup", "research"): ("True", "NoLivePods"),
    }
    found = {key: server.condition(*key, "Ready") for key in expected}
    assert found == expected, operator.log_tail()
    # No DNS and no server: the tier says that it cannot be reached, and nothing worse.
    assert server.condition("CacheTier", "shared", "Ready")[0] == "False"
    assert server.condition("CacheTier", "shared", "Stalled")[0] != "True"
    assert set(server.versions()) >= CHILDREN


@pytest.mark.claim("at rest the operator writes nothing")
def test_at_rest_the_operator_writes_nothing(server: Server, operator: OperatorProcess) -> None:
    before = at_rest(server)
    writes = operator.metric("kvstrata_writes_total")
    assert writes > 0
    time.sleep(QUIET_S)
    assert server.versions() == before
    assert operator.metric("kvstrata_writes_total") == writes


@pytest.mark.parametrize("kind", ["service", "networkpolicy", "role", "deployment"])
def test_a_child_that_was_deleted_by_hand_comes_back(server: Server, operator: OperatorProcess, kind: str) -> None:
    before = server.get(kind, "kvs-smollm2") or {}
    server.kubectl("-n", NAMESPACE, "delete", kind, "kvs-smollm2", "--wait=false")

    def is_back() -> bool:
        found = server.get(kind, "kvs-smollm2")
        return found is not None and found["metadata"]["uid"] != before["metadata"]["uid"]

    server.wait(f"{kind} kvs-smollm2 to come back", is_back)


def test_a_child_that_was_edited_by_hand_is_put_right(server: Server, operator: OperatorProcess) -> None:
    server.patch("deployment", "kvs-smollm2", replicas=7)
    server.wait("the replicas", lambda: (server.get("deployment", "kvs-smollm2") or {})["spec"]["replicas"] == 2)


def test_a_child_that_the_api_server_refuses_stalls_its_owner_until_it_is_put_right(
    server: Server, operator: OperatorProcess
) -> None:
    good = (server.get("cachetier", "shared") or {})["spec"]["redis"]
    requests_above_limits = {"requests": {"memory": "2Gi"}, "limits": {"memory": "1Gi"}}
    server.patch("cachetier", "shared", redis={"managed": {"resources": requests_above_limits}})
    server.wait("the refusal", lambda: server.condition("CacheTier", "shared", "Stalled") == ("True", "ChildRefused"))
    status = (server.get("cachetier", "shared") or {})["status"]
    told = next(c["message"] for c in status["conditions"] if c["type"] == "Stalled")
    assert "StatefulSet kvs-shared-redis-0" in told
    assert "must be less than or equal to memory limit" in told
    server.patch("cachetier", "shared", redis={"managed": {"resources": None, **good["managed"]}})
    server.wait(
        "the tier to go on", lambda: server.condition("CacheTier", "shared", "Stalled")[0] != "True", timeout_s=70
    )


def test_an_invalid_policy_is_stalled_and_changes_no_bundle(server: Server, operator: OperatorProcess) -> None:
    at_rest(server)
    bundle = server.get("secret", "kvs-smollm2-bundle")
    server.patch("tcpol", "acme", budgets=[{"tier": "gone", "limit": "1Mi"}])
    try:
        server.wait(
            "the reason", lambda: server.condition("TenantCachePolicy", "acme", "Stalled") == ("True", "TierNotFound")
        )
        assert server.condition("TenantCachePolicy", "acme", "Enforced") == ("", ""), "no pod serves"
        assert server.get("secret", "kvs-smollm2-bundle") == bundle
    finally:
        server.patch("tcpol", "acme", budgets=[{"tier": "shared", "limit": "100Mi"}])
    server.wait(
        "the policy to act again", lambda: server.condition("TenantCachePolicy", "acme", "Stalled")[0] != "True"
    )
    server.wait("the bundle to change", lambda: server.get("secret", "kvs-smollm2-bundle") not in (None, bundle))


def test_an_invalidation_completes_and_changes_the_tenants_epoch(server: Server, operator: OperatorProcess) -> None:
    before = (server.get("tcpol", "globex") or {})["status"]["scope"]["epoch"]
    server.apply(_own("CacheInvalidation", "globex-leaves", {"scope": {"tenant": "globex"}, "mode": "Lazy"}))
    server.wait("completion", lambda: server.condition("CacheInvalidation", "globex-leaves", "Complete")[0] == "True")
    scope = (server.get("tcpol", "globex") or {})["status"]["scope"]
    assert scope["epoch"] != before
    assert scope["rolls"] == 1


def test_a_guarantee_that_does_not_fit_waits_for_room(server: Server, operator: OperatorProcess) -> None:
    def own_policy(tenant: str, guaranteed: str) -> dict[str, Any]:
        budgets = [{"tier": "cpu", "guaranteed": guaranteed}]
        spec = {"tenant": tenant, "isolation": "Isolated", "classification": "Internal", "budgets": budgets}
        # An erasure would go on for as long as there are no servers, and the operator has to come to rest.
        return _own("TenantCachePolicy", tenant, spec | {"deletionPolicy": "Abandon"})

    def admitted(name: str) -> tuple[str, str]:
        return server.condition("TenantCachePolicy", name, "Admitted")

    server.apply(own_policy("early", "150Mi"))
    server.wait("what fits to be admitted", lambda: admitted("early") == ("True", "GuaranteesAdmitted"))
    server.apply(own_policy("late", "150Mi"))
    server.wait("what does not fit to wait", lambda: admitted("late") == ("False", "InsufficientCapacity"))
    assert (server.get("tcpol", "late") or {})["status"]["admission"] == {"models": "", "tiers": []}
    server.wait(
        "the tier to say so",
        lambda: server.condition("CacheTier", "cpu", "CapacityCommitted") == ("False", "GuaranteesWaiting"),
    )
    server.kubectl("-n", NAMESPACE, "delete", "tcpol", "early", "--wait=false")
    server.wait("freed room to be given", lambda: admitted("late") == ("True", "GuaranteesAdmitted"))
    rows = (server.get("tcpol", "late") or {})["status"]["admission"]["tiers"]
    assert rows == [{"tier": "cpu", "guaranteed": "150Mi"}]
    server.kubectl("-n", NAMESPACE, "delete", "tcpol", "late", "--wait=false")


def test_kubectl_get_cache_status_lists_every_kind(server: Server, operator: OperatorProcess) -> None:
    server.apply(
        _own("PrefixPool", "manual", {
            "modelRef": {"name": "smollm2"}, "prefixes": [{"name": "a", "text": "x"}], "readers": {"public": True}
        })
    )  # fmt: skip
    server.apply(_own("CacheInvalidation", "listed", {"scope": {"tenant": "globex"}, "mode": "Lazy"}))
    server.wait(
        "the pool's status", lambda: server.condition("PrefixPool", "manual", "Ready") == ("True", "NoLivePods")
    )

    def table() -> list[str]:
        return server.kubectl("-n", NAMESPACE, "get", "tcpol").splitlines()

    def have_no_pods() -> bool:
        _, *rows = table()
        return bool(rows) and all("no pods" in row and "NoLivePods" in row for row in rows)

    listed = server.kubectl("-n", NAMESPACE, "get", "cache-status")
    for kind in ("cachedomain", "cachetier", "cachedmodel", "tenantcachepolicy", "tenantgroup", "prefixpool",
                 "cacheinvalidation"):  # fmt: skip
        assert f"{kind}.kvstrata.io/" in listed, listed
    assert "tenantcachepolicy.kvstrata.io/" in server.kubectl("-n", NAMESPACE, "get", "kvstrata")
    header, *_ = table()
    assert header.split() == ["NAME", "TENANT", "USED", "LIMIT", "ENFORCED", "READY", "REASON", "AGE"]
    server.wait("the row of each policy to say that it has no pods", have_no_pods)


def test_a_prefix_is_read_from_a_config_map_that_appears_and_changes(server: Server, operator: OperatorProcess) -> None:
    prefix = {"name": "a", "configMapKeyRef": {"name": "prefix", "key": "text"}}
    pool = {"modelRef": {"name": "smollm2"}, "prefixes": [prefix], "readers": {"public": True}}

    def digest() -> str | None:
        return ((server.get("prefixpool", "sourced") or {}).get("status") or {}).get("contentDigest")

    def write(text: str) -> None:
        metadata = {"name": "prefix", "namespace": NAMESPACE}
        server.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"text": text}})

    server.apply(_own("PrefixPool", "sourced", pool))
    server.wait(
        "the missing source", lambda: server.condition("PrefixPool", "sourced", "Stalled") == ("True", "SourceNotFound")
    )
    time.sleep(3)
    write("You answer in one sentence.")
    server.patch("prefixpool", "sourced", pinned=True)
    server.wait("the source", lambda: digest() is not None)
    server.wait(
        "the content, without pods",
        lambda: server.condition("PrefixPool", "sourced", "Ready") == ("True", "NoLivePods"),
    )
    before = digest()
    time.sleep(3)
    write("You answer in two sentences.")
    server.patch("prefixpool", "sourced", pinned=False)
    server.wait("the changed source", lambda: digest() != before)
    server.kubectl("-n", NAMESPACE, "delete", "prefixpool", "sourced")


@pytest.mark.claim("a restart over a settled world writes nothing")
def test_a_restart_over_a_settled_world_writes_nothing(
    server: Server, operator: OperatorProcess, operators: Operators
) -> None:
    before = at_rest(server)
    assert operator.stop() == 0
    lease = _lease(server)["spec"]
    assert not lease.get("holderIdentity"), "an operator that ended still holds the Lease"
    assert lease["leaseDurationSeconds"] == 1, "a lease that was given up is not waited for"
    # On a busy machine the tier's unknown host may also be a time-out, which is another reason in its status.
    for _ in range(3):
        successor = operators.start("operator-b")
        successor.wait_until_leading()
        time.sleep(5)
        after = server.versions()
        changed = {name for name in after if after[name] != before.get(name)}
        if not changed:
            break
        assert changed == {"CacheTier/shared"}, successor.log_tail()
        before = at_rest(server)
        assert successor.stop() == 0
    assert changed == set()
    assert successor.metric("kvstrata_writes_total") == 0


def test_when_the_leader_vanishes_the_other_takes_over(
    server: Server, operator: OperatorProcess, operators: Operators
) -> None:
    lease = _lease(server)
    leader = next((running for running in operators.running() if running.leading), None) or operators.start(
        "operator-c"
    )
    leader.wait_until_leading()
    standby = operators.start("operator-d")
    time.sleep(3)
    assert leader.leading
    assert not standby.leading
    leader.kill()
    standby.wait_until_leading(120)
    found = _lease(server)
    assert found["spec"]["holderIdentity"] == "operator-d"
    assert found["spec"]["leaseTransitions"] > lease["spec"]["leaseTransitions"]
    server.patch("tcpol", "globex", suspend=True)
    server.wait(
        "the successor to act",
        lambda: (
            (server.get("tcpol", "globex") or {})["status"].get("observedGeneration")
            == (server.get("tcpol", "globex") or {})["metadata"]["generation"]
        ),
    )


def _lease(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        server.kubectl("-n", "kvstrata-system", "get", "lease", "kvstrata-operator", "-o", "json")
    )
    return found


def _own(kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "kvstrata.io/v1alpha1", "kind": kind, "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": spec,
    }  # fmt: skip
