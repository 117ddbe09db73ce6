"""The operator killed, absent, frozen and replaced, while requests run: nothing is lost, and nothing is done twice."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from e2e.cluster.component import paused
from e2e.product.chapters import ACME_KEY, GLOBEX_KEY, MODEL, Stage, raise_generation
from e2e.product.direct_operator import OperatorPod, Operators, OperatorWrites
from e2e.product.direct_stage import USAGE_KINDS, differences, domain_rules, everything, of_gate, tenants_ask
from e2e.product.install import DEMO_NAMESPACE, SYSTEM_NAMESPACE, unsettled
from e2e.product.kubectl import Kubectl, fresh_name, wait_until
from e2e.product.prompts import WHOLE_CHUNKS, fresh_prompt
from kvstrata.clients.lease import DURATION_S, RENEW_EVERY_S
from kvstrata.contract import ContractError
from kvstrata.contract.policy.bundle import ROOT_DATA_KEY, SHARD_DATA_KEY, Root, decode_shard
from kvstrata.contract.policy.keyspace import Scope, ScopeKind, derive_keyspace
from kvstrata.objects.names import DOMAIN_KEY_DATA_KEY

pytestmark = pytest.mark.cluster

MANY = 30
STALE_AFTER_S = 10
COMMITS = (1, 2)
"""A new epoch is committed at once, and again with its data key unless that has been drawn by then."""

LEADS_WITHIN_S = DURATION_S + RENEW_EVERY_S + 60.0
"""From the death of the leader: its Lease runs out, and another notices; the rest is a busy machine's."""

ACTS_WITHIN_S = 10.0
"""From holding the Lease to the first write: the lists of the world and one answer of every pod."""

QUIET_S = 10.0


@pytest.fixture
def operators(kubectl: Kubectl) -> Iterator[Operators]:
    """Two operators, one of which leads; afterwards again, with everything settled."""
    found = Operators(kubectl)
    found.fresh()
    wait_until("everything is ready and enforced", lambda: not unsettled(kubectl))
    yield found
    found.scale(2)
    wait_until("everything is ready and enforced", lambda: not unsettled(kubectl))


def test_an_operator_that_is_killed_at_rest_changes_nothing(
    kubectl: Kubectl, near: Stage, operators: Operators
) -> None:
    leader = operators.acting()
    with tenants_ask(near) as running:
        running.wait_for(4)
        wait_until("everything is at rest", lambda: not unsettled(kubectl) and _is_quiet(kubectl))
        before, writes = everything(kubectl), OperatorWrites()
        killed_at = time.monotonic()
        leader.kill()
        wait_until("its process is gone", lambda: not leader.leads)
        wait_until("another leads", lambda: any(pod.leads for pod in operators.pods()), LEADS_WITHIN_S)
        near.report(f"an operator leads {time.monotonic() - killed_at:.1f} s after the other was killed")
        successor = operators.acting()
        near.report(f"acting and at rest again after {time.monotonic() - killed_at:.1f} s: {successor.name}")
        changed = differences(before, everything(kubectl))
        assert not changed, json.dumps(changed)
        assert [w for w in writes.all() if w.subresource != "status" or w.resource not in USAGE_KINDS.values()] == []
        running.wait_for(4)
    assert not running.account.failed, running.account


@pytest.mark.parametrize(
    "after_writes",
    [
        pytest.param(1, marks=pytest.mark.claim("an edit is carried out once, although the operator is killed in it")),
        3,
    ],
)
def test_a_tenants_generation_is_raised_once_however_the_operator_dies(
    kubectl: Kubectl, near: Stage, operators: Operators, after_writes: int
) -> None:
    prompt = fresh_prompt()
    for key in (ACME_KEY, GLOBEX_KEY):
        near.first.found(key, prompt)
    leader = operators.acting()
    with tenants_ask(near) as running:
        before, revision, writes = _policy(kubectl, "acme"), _root(kubectl).revision, OperatorWrites()
        raise_generation(kubectl, "acme")
        writes.when(after_writes, leader.kill)
        _wait_enforced(kubectl, "acme")
        operators.acting()
        after = _policy(kubectl, "acme")
        assert after["status"]["scope"]["rolls"] == before["status"]["scope"]["rolls"] + 1
        assert after["status"]["scope"]["epoch"] != before["status"]["scope"]["epoch"]
        assert _commits(kubectl, revision, writes) in COMMITS
        _agree(kubectl)
        near.report(f"killed after {after_writes} writes; in all: {[f'{w.verb} {w.resource}' for w in writes.all()]}")
    assert not running.account.failed, running.account
    assert near.first.found(ACME_KEY, prompt) == 0
    assert near.first.found(GLOBEX_KEY, prompt) >= WHOLE_CHUNKS, "globex lost its blocks"


@pytest.mark.parametrize("after_writes", [1, 2])
def test_an_invalidation_is_carried_out_once_however_the_operator_dies(
    kubectl: Kubectl, near: Stage, operators: Operators, after_writes: int
) -> None:
    prompt = fresh_prompt()
    for key in (ACME_KEY, GLOBEX_KEY):
        near.first.found(key, prompt)
    leader = operators.acting()
    name = fresh_name("acme")
    try:
        with tenants_ask(near) as running:
            before, revision, writes = _policy(kubectl, "acme"), _root(kubectl).revision, OperatorWrites()
            kubectl.apply(_object("CacheInvalidation", name, {"scope": {"tenant": "acme"}, "mode": "Lazy"}))
            writes.when(after_writes, leader.kill)
            wait_until("the invalidation is complete", lambda: _phase(kubectl, name) == "Complete")
            _wait_enforced(kubectl, "acme")
            operators.acting()
            after, order = _policy(kubectl, "acme"), kubectl.get("cacheinvalidation", name, DEMO_NAMESPACE)["status"]
            assert after["status"]["scope"]["rolls"] == before["status"]["scope"]["rolls"] + 1
            assert order["scopes"][0]["oldEpoch"] == before["status"]["scope"]["epoch"]
            assert order["scopes"][0]["newEpoch"] == after["status"]["scope"]["epoch"]
            assert _commits(kubectl, revision, writes) in COMMITS
            _agree(kubectl)
        assert not running.account.failed, running.account
        assert near.first.found(ACME_KEY, prompt) == 0
        assert near.first.found(GLOBEX_KEY, prompt) >= WHOLE_CHUNKS, "globex lost its blocks"
    finally:
        kubectl.run("-n", DEMO_NAMESPACE, "delete", "cacheinvalidation", name, "--ignore-not-found")


def test_thirty_policies_end_the_same_with_an_operator_that_dies_halfway(
    kubectl: Kubectl, near: Stage, operators: Operators, many_policies: list[dict[str, Any]]
) -> None:
    kubectl.apply(*many_policies)
    _settled(kubectl, many_policies)
    operators.acting()
    undisturbed = _settled(kubectl, many_policies)
    _delete_many(kubectl)
    leader, writes = operators.acting(), OperatorWrites()
    with tenants_ask(near) as running:
        kubectl.apply(*many_policies)
        writes.when(MANY // 2, leader.kill)
        _settled(kubectl, many_policies)
        operators.acting()
        assert _settled(kubectl, many_policies) == undisturbed
        _agree(kubectl)
    assert not running.account.failed, running.account


def test_without_an_operator_traffic_flows_and_policies_stay_in_force(
    kubectl: Kubectl, near: Stage, operators: Operators
) -> None:
    prompt = fresh_prompt()
    with domain_rules(kubectl, {"staleAfter": f"{STALE_AFTER_S}s"}), tenants_ask(near) as running:
        with operators.absent():
            gone_at = time.monotonic()
            before = _policy(kubectl, "acme")
            assert near.first.found(ACME_KEY, prompt) == 0
            raise_generation(kubectl, "acme")
            # A gate that counted on the operator would have fenced itself off by then.
            while time.monotonic() < gone_at + 1.5 * STALE_AFTER_S:
                assert of_gate(near, "kvstrata_gate_policy_fresh") == [1, 1], "a gate fences without a reason"
                time.sleep(0.5)
            assert near.first.found(ACME_KEY, prompt) >= WHOLE_CHUNKS, "the policy in force was lost"
            assert near.first.found(GLOBEX_KEY, prompt) == 0, "globex found acme's blocks"
            absent = running.account.since(gone_at)
            assert absent.cached_tokens, "no request was made"
            assert min(absent.cached_tokens) >= WHOLE_CHUNKS, f"hits did not continue: {absent.cached_tokens}"
            assert _policy(kubectl, "acme")["status"] == before["status"]
        _wait_enforced(kubectl, "acme")
        after = _policy(kubectl, "acme")
        assert after["status"]["scope"]["rolls"] == before["status"]["scope"]["rolls"] + 1
        assert near.first.found(ACME_KEY, prompt) == 0, "the waiting edit was not carried out"
    assert not running.account.failed, running.account


def test_a_leader_that_is_asked_to_end_hands_over_at_once(kubectl: Kubectl, near: Stage, operators: Operators) -> None:
    leader, writes = operators.acting(), OperatorWrites()
    with tenants_ask(near) as running:
        asked_at = time.time()
        kubectl.run("-n", SYSTEM_NAMESPACE, "delete", "pod", leader.name, "--wait=false")
        raise_generation(kubectl, "acme")
        _wait_enforced(kubectl, "acme")
        took_s = _first_write_by_another(writes, leader) - asked_at
        near.report(f"released: the other's first write came {took_s:.1f} s after the request to end")
        assert took_s < ACTS_WITHIN_S, "a Lease that was given up is not waited for"
    assert not running.account.failed, running.account


@pytest.mark.claim("a leader that is frozen is replaced within seconds, and changes nothing when it wakes")
def test_a_frozen_leader_is_replaced_and_changes_nothing_when_it_wakes(
    kubectl: Kubectl, near: Stage, operators: Operators, many_policies: list[dict[str, Any]]
) -> None:
    leader, writes = operators.acting(), OperatorWrites()
    with tenants_ask(near) as running:
        # In the middle of work: its remaining writes would be the first thing that it does when it wakes.
        kubectl.apply(*many_policies)
        frozen_at = writes.when(MANY // 10, time.time)
        with paused(leader.pid):
            # There is something left to write, also if it was quick.
            raise_generation(kubectl, "acme")
            wait_until("another operator leads", lambda: operators.holder() != leader.name)
            successor = operators.acting()
            took_s = _first_write_by_another(writes, leader) - frozen_at
            near.report(f"frozen: the other's first write came {took_s:.1f} s after the last renewal at the latest")
            assert took_s < LEADS_WITHIN_S
            _settled(kubectl, many_policies)
            _wait_enforced(kubectl, "acme")
            woken_at = time.time()
        wait_until("the old leader has ended itself", lambda: operators.restarts(leader.name) == 1)
        log = kubectl.run("-n", SYSTEM_NAMESPACE, "logs", leader.name, "--previous", "--tail=20")
        near.report("\n".join(line for line in log.splitlines() if "ignore their cancellation" in line))
        assert "could not be renewed in time" in log or "another operator holds the lease" in log, log
        late = [w for w in writes.every_attempt() if w.pod == leader.name and w.received_at.timestamp() > woken_at]
        # Requests that it was sending when it was frozen arrive, and are refused: the object has changed, or the body
        # came late.
        assert not any(write.done for write in late), f"two operators acted: {late}"
        near.report(f"of the old leader's requests that were on their way none took effect: {[w.code for w in late]}")
        assert operators.holder() == successor.name
        _agree(kubectl)
    assert not running.account.failed, running.account


@pytest.fixture
def many_policies(kubectl: Kubectl) -> Iterator[list[dict[str, Any]]]:
    """Policies to apply; gone afterwards."""
    rest = {"isolation": "Isolated", "classification": "Internal", "deletionPolicy": "Abandon"}
    yield [
        _object("TenantCachePolicy", name, {"tenant": name, **rest}) for name in (f"many-{n:02}" for n in range(MANY))
    ]
    _delete_many(kubectl)


def _delete_many(kubectl: Kubectl) -> None:
    names = [f"many-{n:02}" for n in range(MANY)]
    kubectl.run("-n", DEMO_NAMESPACE, "delete", "tenantcachepolicy", "--ignore-not-found", "--wait=true", *names)
    wait_until("they are in no bundle", lambda: not any(t.startswith("many-") for t in _entries(kubectl)))


def _settled(kubectl: Kubectl, policies: list[dict[str, Any]]) -> dict[str, Any]:
    """Wait until policies are enforced; return their statuses without random values and times."""
    names = {policy["metadata"]["name"] for policy in policies}

    def enforced() -> dict[str, Any] | None:
        found = {
            item["metadata"]["name"]: item
            for item in kubectl.list("tenantcachepolicy", DEMO_NAMESPACE)
            if item["metadata"]["name"] in names
        }
        done = len(found) == len(names) and all(_is_enforced(item) for item in found.values())
        return {name: _without_chance(item) for name, item in found.items()} if done else None

    shape: dict[str, Any] = wait_until(f"{len(names)} policies are enforced", enforced)
    return shape


def _without_chance(policy: dict[str, Any]) -> dict[str, Any]:
    status = json.loads(json.dumps(policy["status"]))
    status["scope"].pop("epoch")
    for changes in ("digest", "used", "usage", "summary"):
        status.pop(changes, None)
    for condition in status["conditions"]:
        condition.pop("lastTransitionTime")
    return {
        "spec": policy["spec"],
        "status": status,
        "generation": policy["metadata"]["generation"],
        "finalizers": policy["metadata"].get("finalizers"),
    }


def _commits(kubectl: Kubectl, since: int, writes: OperatorWrites) -> int:
    """Return how many commits there were since a revision, once the API server has accounted for each."""

    def accounted() -> int:
        count = _root(kubectl).revision - since
        return count if count == len(writes.bundle_roots()) else 0

    found: int = wait_until("each commit is one revision", accounted)
    return found


def _agree(kubectl: Kubectl) -> None:
    """See the bundle hold for every policy's tenant the keyspace that follows from the epochs in status."""
    key = base64.b64decode(kubectl.get("secret", "kvstrata-domain", DEMO_NAMESPACE)["data"][DOMAIN_KEY_DATA_KEY])

    def expected() -> dict[str, str]:
        found = {}
        for policy in kubectl.list("tenantcachepolicy", DEMO_NAMESPACE):
            scope = policy["status"]["scope"]
            keyspace = derive_keyspace(key, Scope(ScopeKind(scope["kind"]), scope["name"]), scope["epoch"])
            found[policy["spec"]["tenant"]] = keyspace
        return found

    def agree() -> bool:
        try:
            return _entries(kubectl) == expected()
        except ContractError:
            return False  # a commit came between the reads

    try:
        wait_until("bundle and status agree", agree)
    except AssertionError as late:
        raise AssertionError(f"{late}: {_entries(kubectl)} instead of {expected()}") from late


def _root(kubectl: Kubectl) -> Root:
    data = kubectl.get("secret", f"kvs-{MODEL}-bundle", DEMO_NAMESPACE)["data"][ROOT_DATA_KEY]
    return Root.decode(base64.b64decode(data))


def _entries(kubectl: Kubectl) -> dict[str, str]:
    """Return the keyspace of every tenant in the model's bundle."""
    found = {}
    for ref in _root(kubectl).shards:
        secret = kubectl.get("secret", f"kvs-{MODEL}-bundle-{ref.index}{ref.slot}", DEMO_NAMESPACE)
        for entry in decode_shard(base64.b64decode(secret["data"][SHARD_DATA_KEY]), ref.digest):
            found[entry.tenant] = entry.keyspace
    return found


def _first_write_by_another(writes: OperatorWrites, than: OperatorPod) -> float:
    """Wait for it: the API server's account of a write comes after the write."""
    found = wait_until("another writes", lambda: [w for w in writes.all() if w.pod != than.name])
    return float(found[0].received_at.timestamp())


def _is_quiet(kubectl: Kubectl) -> bool:
    """Whether nothing has changed for as long as plans that follow from each other take."""
    before = everything(kubectl)
    time.sleep(QUIET_S)
    return not differences(before, everything(kubectl))


def _policy(kubectl: Kubectl, name: str) -> dict[str, Any]:
    return kubectl.get("tenantcachepolicy", name, DEMO_NAMESPACE)


def _is_enforced(policy: dict[str, Any]) -> bool:
    status = policy.get("status") or {}
    conditions = {c["type"]: c["status"] for c in status.get("conditions") or ()}
    current = status.get("enforcedGeneration") == policy["metadata"]["generation"]
    return current and conditions.get("Enforced") == "True" and conditions.get("Ready") == "True"


def _wait_enforced(kubectl: Kubectl, policy: str) -> None:
    wait_until(f"policy {policy} is enforced", lambda: _is_enforced(_policy(kubectl, policy)))


def _phase(kubectl: Kubectl, invalidation: str) -> str:
    status = kubectl.get("cacheinvalidation", invalidation, DEMO_NAMESPACE).get("status") or {}
    return str(status.get("phase", ""))


def _object(kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "kvstrata.io/v1alpha1",
        "kind": kind,
        "metadata": {"name": name, "namespace": DEMO_NAMESPACE},
        "spec": spec,
    }
