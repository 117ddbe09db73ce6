"""A namespace as backup tools restore it: objects without status, UID, owner references and managed fields.

Pods and ReplicaSets are not restored; Deployments and StatefulSets make others. In its own namespace, with the
installation that it had, the objects are taken back while the model answers. Elsewhere, under another installation,
they are foreign: all of them are named with the command that annotates them, and then replaced. Objects that only lose
their owner are taken back with their pods.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress

import pytest

from e2e.product.caller_pod import CallerPod, caller_pod
from e2e.product.calls import replica
from e2e.product.chapters import ACME_KEY, MODEL
from e2e.product.install import READY_TIMEOUT_S
from e2e.product.kubectl import CommandError, Kubectl, pod_names, wait_until
from e2e.product.prompts import WHOLE_CHUNKS, fresh_prompt
from e2e.product.release import PODS, Raw, Release, namespace, release, small_domain, wait_settled
from e2e.product.shared_tier import TIER
from kvstrata.objects.mark import MARK, parent_of

pytestmark = pytest.mark.cluster

SERVED, ELSEWHERE = "restored", "restored-elsewhere"
CHILDREN = (
    "secrets,serviceaccounts,services,networkpolicies,poddisruptionbudgets,roles,rolebindings,statefulsets,deployments"
)
OWN = "cachedomains,cachetiers,cachedmodels,tenantcachepolicies"
KEPT = ("name", "namespace", "labels", "annotations")
"""The metadata that backup tools restore."""

MADE_BY_KUBERNETES = ("ServiceAccount", "default")
DOMAIN, REDIS, SERVES = ("CacheDomain", "default"), ("CacheTier", TIER), ("CachedModel", MODEL)
SHARDS = f"kvs-{MODEL}-bundle-"
NOT_NEEDED_YET = (f"Secret {SHARDS}", "Secret kvstrata-data-keys-")
"""Secrets of the former installation stay until one of their name is due."""

PARENTS = (DOMAIN, REDIS, SERVES)


@pytest.fixture(scope="module")
def installed(kubectl: Kubectl) -> Iterator[Release]:
    """A release whose namespace has a model, a tier and a tenant, all at rest."""
    with ExitStack() as stack:
        # The served namespace goes before its operator.
        stack.enter_context(namespace(kubectl, SERVED))
        made = stack.enter_context(release(kubectl, "restore", SERVED))
        stack.callback(kubectl.run, "delete", "namespace", SERVED, "--ignore-not-found")
        kubectl.apply(*small_domain(SERVED))
        wait_settled(kubectl, SERVED)
        yield made


@pytest.fixture(scope="module")
def backup(kubectl: Kubectl, installed: Release) -> list[Raw]:
    """The objects of the namespace as they come back, children first. The namespace is gone, and its operator ended."""
    found = [_restorable(item) for kinds in (CHILDREN, OWN) for item in _stored(kubectl, SERVED, kinds)]
    kubectl.run("delete", "namespace", SERVED)
    installed.stop()
    return [one for one in found if (one["kind"], one["metadata"]["name"]) != MADE_BY_KUBERNETES]


@pytest.mark.usefixtures("installed")
def test_objects_that_lose_their_owner_are_taken_back_and_no_pod_is_touched(kubectl: Kubectl) -> None:
    before, uids = kubectl.list("pod", SERVED, PODS), _uids(kubectl, SERVED)
    with caller_pod(kubectl, SERVED, MODEL, ACME_KEY, streams=1, plain=1) as caller:
        for kind, name in uids:
            forget = '[{"op": "remove", "path": "/metadata/ownerReferences"}]'
            kubectl.run("-n", SERVED, "patch", kind, name, "--type", "json", "-p", forget)
        wait_until("every child has its owner again", lambda: not _orphans(kubectl, SERVED))
        wait_settled(kubectl, SERVED)
        assert _made_again(kubectl, uids) == []
        after = kubectl.list("pod", SERVED, PODS)
        assert [one["metadata"]["uid"] for one in after] == [one["metadata"]["uid"] for one in before]
        _all_served(caller)


def test_a_restored_namespace_is_taken_back_while_its_model_answers(
    kubectl: Kubectl, installed: Release, backup: list[Raw]
) -> None:
    children, own = _parted(backup)
    with ExitStack() as stack:
        kubectl.run("create", "namespace", SERVED)
        _create(kubectl, children)
        _wait_for_pod(kubectl, SERVED)
        uids = _uids(kubectl, SERVED)
        caller = stack.enter_context(caller_pod(kubectl, SERVED, MODEL, ACME_KEY, streams=1, plain=1))

        _create(kubectl, own)
        installed.start()
        wait_until("every child has its owner again", lambda: not _orphans(kubectl, SERVED))
        wait_settled(kubectl, SERVED)
        assert _made_again(kubectl, uids) == []
        for kind, name in PARENTS:
            assert kubectl.condition(kind, name, SERVED, "Stalled").get("status") != "True"
        # The domain has a new id, which a rolling update brings to the pods.
        kubectl.run("-n", SERVED, "rollout", "status", f"deployment/kvs-{MODEL}", "--timeout=590s", timeout_s=600)
        _all_served(caller)
        _serves_from_its_cache(kubectl, SERVED)


def test_a_namespace_restored_elsewhere_is_named_object_by_object_and_replaced_once_annotated(
    kubectl: Kubectl, backup: list[Raw]
) -> None:
    expected = _expected(backup)
    # The former one makes room for its copy.
    kubectl.run("delete", "namespace", SERVED, "--ignore-not-found")
    with ExitStack() as stack:
        stack.enter_context(namespace(kubectl, ELSEWHERE))
        # Roles of the former release do not move with the objects.
        moved = [_moved(one) for one in backup if parent_of(one) or one["kind"] not in ("Role", "RoleBinding")]
        _create(kubectl, moved)
        before = _children(kubectl, ELSEWHERE)
        stack.enter_context(release(kubectl, "elsewhere", ELSEWHERE))
        ends = ("delete", "namespace", ELSEWHERE, "--ignore-not-found")
        stack.callback(kubectl.run, *ends, timeout_s=READY_TIMEOUT_S)

        for parent in PARENTS:
            # Tiers and models wait for the domain's key.
            command = _in_the_way(kubectl, parent, expected[parent])
            print(f"{parent[0]} {parent[1]}: kubectl {' '.join(command)}")
            if parent == DOMAIN:
                now = _children(kubectl, ELSEWHERE)
                assert {slot: now.get(slot) for slot in before} == before, "an object of others was written"
                kubectl.run(*command)

        def all_taken_over() -> bool:
            for parent in PARENTS:
                # A shard of the bundle is named by a root that was in the way itself. One that the status still names
                # may be deleted.
                if command := _proposed(kubectl, parent):
                    with suppress(CommandError):
                        kubectl.run(*command)
            lost = [one for one in _orphans(kubectl, ELSEWHERE) if not one.startswith(NOT_NEEDED_YET)]
            return not any(_proposed(kubectl, parent) for parent in PARENTS) and not lost

        wait_until("nothing is in the way", all_taken_over, every_s=2)
        wait_settled(kubectl, ELSEWHERE)
        after = _children(kubectl, ELSEWHERE)
        for slot, one in before.items():
            if parent_of(one) in PARENTS and not f"{slot[0]} {slot[1]}".startswith(NOT_NEEDED_YET):
                assert after[slot]["metadata"]["uid"] != one["metadata"]["uid"], f"{slot} was not made again"
        for name in ("kvstrata-domain", f"kvs-{TIER}-redis-auth", f"kvs-{MODEL}-gate-tls"):
            assert after["Secret", name]["data"] != before["Secret", name]["data"], f"{name} may be known to others"
        _serves_from_its_cache(kubectl, ELSEWHERE)


def _stored(kubectl: Kubectl, where: str, kinds: str) -> list[Raw]:
    found: list[Raw] = json.loads(kubectl.run("-n", where, "get", kinds, "-o", "json"))["items"]
    return found


def _children(kubectl: Kubectl, where: str) -> dict[tuple[str, str], Raw]:
    """The objects with a mark, without that which Kubernetes itself writes into them."""
    found = {}
    for one in _stored(kubectl, where, CHILDREN):
        metadata = one["metadata"]
        if mark := (metadata.get("annotations") or {}).get(MARK):
            kept = {name: metadata.get(name) for name in ("name", "uid", "labels", "ownerReferences")}
            shown = {**one, "metadata": {**kept, "annotations": {MARK: mark}}, "status": None}
            found[one["kind"], str(metadata["name"])] = shown
    return found


def _uids(kubectl: Kubectl, where: str) -> dict[tuple[str, str], str]:
    return {slot: str(one["metadata"]["uid"]) for slot, one in _children(kubectl, where).items()}


def _made_again(kubectl: Kubectl, uids: dict[tuple[str, str], str]) -> list[tuple[str, str]]:
    """The children that others replaced, or that are gone. Shards of bundles take turns."""
    now = _uids(kubectl, SERVED)
    return [slot for slot, uid in uids.items() if not slot[1].startswith(SHARDS) and now.get(slot) != uid]


def _all_served(caller: CallerPod) -> None:
    calls = caller.calls()
    print(calls)
    assert calls.requests
    assert not calls.broken, str(calls)


def _restorable(item: Raw) -> Raw:
    """Return an object as a backup tool creates it."""
    metadata = {key: value for key, value in item["metadata"].items() if key in KEPT}
    made = {key: value for key, value in item.items() if key != "status"} | {"metadata": metadata}
    if made["kind"] == "Service" and made["spec"].get("clusterIP") != "None":
        made["spec"] = {key: value for key, value in made["spec"].items() if key not in ("clusterIP", "clusterIPs")}
    return made


def _moved(item: Raw) -> Raw:
    """Return an object of the served namespace for the other one."""
    made = {**item, "metadata": {**item["metadata"], "namespace": ELSEWHERE}}
    if "subjects" in made:
        made["subjects"] = [
            {**one, "namespace": ELSEWHERE} if one.get("namespace") == SERVED else one for one in made["subjects"]
        ]
    return made


def _parted(backup: Sequence[Raw]) -> tuple[list[Raw], list[Raw]]:
    """Return children and other objects of Kubernetes, and those of this API."""
    own = [one for one in backup if one["apiVersion"].startswith("kvstrata.io/")]
    return [one for one in backup if one not in own], own


def _create(kubectl: Kubectl, objects: Sequence[Raw]) -> None:
    document = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
    kubectl.run("create", "-f", "-", stdin=document)


def _wait_for_pod(kubectl: Kubectl, where: str) -> None:
    """Wait for the model's restored Deployment, which no operator looks after."""
    kubectl.run("-n", where, "rollout", "status", f"deployment/kvs-{MODEL}", "--timeout=590s", timeout_s=600)


def _orphans(kubectl: Kubectl, where: str) -> list[str]:
    """Children whose parent is there and owns them not."""
    uids = {(one["kind"], one["metadata"]["name"]): one["metadata"]["uid"] for one in _stored(kubectl, where, OWN)}
    lost = []
    for (kind, name), one in _children(kubectl, where).items():
        owners = {reference["uid"] for reference in one["metadata"].get("ownerReferences") or ()}
        parent = parent_of(one)
        if parent is None or uids.get(parent) not in owners:
            lost.append(f"{kind} {name}")
    return lost


def _expected(backup: Sequence[Raw]) -> dict[tuple[str, str], set[str]]:
    """The children that each parent has to name at once: of Secrets with keys and bundles the first, which name the
    others."""
    found: dict[tuple[str, str], set[str]] = {DOMAIN: {"Secret/kvstrata-domain"}, REDIS: set(), SERVES: set()}
    for one in backup:
        name, parent = one["metadata"]["name"], parent_of(one)
        if parent in (REDIS, SERVES) and not name.startswith(SHARDS):
            found[parent].add(f"{one['kind']}/{name}")
    return found


def _proposed(kubectl: Kubectl, parent: tuple[str, str]) -> list[str]:
    """The arguments of kubectl that the parent's NameConflict proposes; empty without one."""
    stalled = kubectl.condition(*parent, ELSEWHERE, "Stalled")
    if (stalled.get("status"), stalled.get("reason")) != ("True", "NameConflict"):
        return []
    return str(stalled["message"]).partition(": kubectl ")[2].split()


def _in_the_way(kubectl: Kubectl, parent: tuple[str, str], expected: set[str]) -> list[str]:
    """Wait until the parent names at least the expected objects; return the arguments of kubectl that it proposes."""

    def all_of_them() -> list[str]:
        command = _proposed(kubectl, parent)
        return command if expected <= set(command) else []

    return list(wait_until(f"{parent[0]} {parent[1]} names every foreign object", all_of_them))


def _serves_from_its_cache(kubectl: Kubectl, where: str) -> None:
    """See a prompt found that was asked before. A pod of before may still be ending."""
    kubectl.run("-n", where, "rollout", "status", f"deployment/kvs-{MODEL}", "--timeout=290s")
    pods = [one for one in kubectl.list("pod", where, f"{PODS}={MODEL}") if "deletionTimestamp" not in one["metadata"]]
    with replica(kubectl, where, MODEL, pod_names(pods)[0]) as one:

        def found() -> bool:
            prompt = fresh_prompt()
            one.found(ACME_KEY, prompt)
            return one.found(ACME_KEY, prompt) >= WHOLE_CHUNKS

        wait_until("a prompt is found again", found)
