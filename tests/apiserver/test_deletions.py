"""Deletion Jobs and receipts, and a namespace that is deleted, on a real API server, with its controllers, and with the
rights that the chart gives.

There is no kubelet: a pod ends when the test says so, and what it printed is the test's word too.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.cluster.control_plane import ControlPlane
from kvstrata.api.cachetier import CacheTier
from kvstrata.clients.kube import Kube, KubeError
from kvstrata.clients.resources import CONFIG_MAP, JOB, Resource
from kvstrata.clients.signing import is_signed
from kvstrata.contract.messages.erase_report import End, Line, Outcome, StopReason, encode_line
from kvstrata.contract.receipt.chain import check_chain
from kvstrata.contract.receipt.record import read_link, read_receipt
from kvstrata.model.erasure.facts import JobState
from kvstrata.objects import labels, names
from kvstrata.objects.context import BuildContext
from kvstrata.objects.erasure.delete_job import CONTAINER, TierDeletion
from kvstrata.objects.erasure.receipts import read_receipt_objects
from kvstrata.plan.erasure.deletions import DeletionRun
from kvstrata.plan.erasure.policy_deletion import FINALIZER
from kvstrata.plan.erasure.receipt_chain import ChainState
from kvstrata.reconcile.erasure.jobs import Jobs
from kvstrata.reconcile.erasure.receipt_chain import Chains
from tests.apiserver.conftest import OPERATOR_NAMESPACE, REPOSITORY, install_crds
from tests.apiserver.kubelet import wait
from tests.apiserver.operator_process import Operators
from tests.apiserver.server import Server
from tests.golden.chart.rendering import OPERATOR_CHART, render
from tests.support.objects import NAMESPACE, cpu_tier, model, policy, redis_tier
from tests.support.receipts import DOMAIN, erasure

CONTEXT = BuildContext(sidecar_image="sidecar:1", redis_image="redis:7", operator_namespace=OPERATOR_NAMESPACE)
RIGHTS = ("ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")
WHOLE: tuple[Line, ...] = (End(Outcome.ERASED, StopReason.NONE, "", "5" * 64, 30_000),)
PATIENCE_S = 60.0
LEAVING = "leaving"
POLICIES = f"/apis/kvstrata.io/v1alpha1/namespaces/{LEAVING}/tenantcachepolicies"
READY_REASON = '{.status.conditions[?(@.type=="Ready")].reason}'


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A control plane with its controllers, the operator's namespace, restricted, and a domain that it serves."""
    with ControlPlane(tmp_path_factory.mktemp("deletions"), controller_manager=True) as running:
        server = Server(running.kubectl, running.kubeconfig)
        install_crds(server)
        server.kubectl("create", "namespace", LEAVING)
        for name in (OPERATOR_NAMESPACE, NAMESPACE):
            restricted = {"pod-security.kubernetes.io/enforce": "restricted"}
            metadata = {"name": name, "labels": restricted}
            server.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
        for (kind, _), built in render(OPERATOR_CHART, {"watchNamespaces": [NAMESPACE, LEAVING]}).items():
            if kind in RIGHTS:
                namespaced = {} if kind.startswith("Cluster") else {"namespace": OPERATOR_NAMESPACE}
                server.apply({**built, "metadata": namespaced | built["metadata"]})
        for name, data in ((names.redis_auth("shared"), "password"), (names.redis_tls("shared"), "ca.crt")):
            values = {data: base64.b64encode(b"copied").decode()}
            metadata = {"name": name, "namespace": NAMESPACE}
            server.apply({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": values})
        yield server


@pytest.fixture(scope="module")
def kubeconfig(plane: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The operator's own access: a token of the service account that the chart makes."""
    config = yaml.safe_load(plane.kubeconfig.read_text())
    token = plane.kubectl("-n", OPERATOR_NAMESPACE, "create", "token", "kvstrata").strip()
    config["users"] = [{**config["users"][0], "user": {"token": token}}]
    path = tmp_path_factory.mktemp("access") / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    return path


class KilledError(BaseException):
    """Ends an operator where it stands."""


class Mortal(Kube):
    """Dies before or after one write, and knows what pods printed, because there is no kubelet to ask."""

    logs: Mapping[str, bytes] = {}
    dies_before = dies_after = 0

    async def container_log(self, namespace: str, pod: str, container: str, limit_bytes: int) -> bytes:
        if pod in self.logs:
            return self.logs[pod]
        return await super().container_log(namespace, pod, container, limit_bytes)

    async def create(self, resource: Resource, namespace: str, body: Mapping[str, Any]) -> dict[str, Any]:
        self._count(-1)
        written = await super().create(resource, namespace, body)
        self._count(1)
        return written

    async def replace(self, resource: Resource, namespace: str, body: Mapping[str, Any]) -> dict[str, Any]:
        self._count(-1)
        written = await super().replace(resource, namespace, body)
        self._count(1)
        return written

    def _count(self, side: int) -> None:
        if side < 0 and self.dies_before:
            self.dies_before -= 1
            if not self.dies_before:
                raise KilledError
        if side > 0 and self.dies_after:
            self.dies_after -= 1
            if not self.dies_after:
                raise KilledError


@pytest.fixture
async def kube(kubeconfig: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Mortal]:
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    found = await Mortal.connect()
    assert isinstance(found, Mortal)
    yield found
    await found.close()


@pytest.fixture
def jobs(kube: Mortal) -> Jobs:
    return Jobs(kube, CONTEXT, lambda: datetime.now(UTC))


def order(uid: str, turn: int = 1) -> TierDeletion:
    raw = redis_tier(redis={"managed": {"tls": {"mode": "Issued"}}})
    tier = CacheTier.parse({**raw, "metadata": {**raw["metadata"], "uid": "uid-shared"}})
    return TierDeletion(uid, tier, turn, DOMAIN, 7, ("0" * 31 + "1",))


async def pod_of(plane: Server, uid: str) -> dict[str, Any]:
    """Wait for the pod that the Job's controller makes."""
    deadline = asyncio.get_running_loop().time() + PATIENCE_S
    while True:
        found = pods(plane, uid)
        if found:
            return found[0]
        assert asyncio.get_running_loop().time() < deadline, "no pod was made"
        await asyncio.sleep(0.1)


def pods(plane: Server, uid: str) -> list[dict[str, Any]]:
    told = plane.kubectl("-n", OPERATOR_NAMESPACE, "get", "pods", "-l", f"{labels.ERASURE}={uid}", "-o", "json")
    found: list[dict[str, Any]] = json.loads(told)["items"]
    return found


def end(plane: Server, pod: dict[str, Any], code: int) -> None:
    """Say of a pod what a kubelet says when its container has ended."""
    image = {"image": "sidecar:1", "imageID": "", "ready": False, "restartCount": 0}
    finished = {"exitCode": code, "reason": "Completed", "finishedAt": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")}
    status = {
        "phase": "Failed" if code else "Succeeded",
        "containerStatuses": [{"name": CONTAINER, "state": {"terminated": finished}, **image}],
    }
    name = pod["metadata"]["name"]
    patch = json.dumps({"status": status})
    arguments = ("patch", "pod", name, "--subresource=status", "--type=merge", "-p", patch)
    plane.kubectl("-n", OPERATOR_NAMESPACE, *arguments)


async def seen(jobs: Jobs, uid: str) -> DeletionRun:
    run = await jobs.look(uid, "shared", 1)
    assert run is not None
    return run


async def made_for(plane: Server, uid: str) -> list[str]:
    kinds = "jobs,secrets,networkpolicies,pods"
    told = plane.kubectl("-n", OPERATOR_NAMESPACE, "get", kinds, "-l", f"{labels.ERASURE}={uid}", "-o", "json")
    return [item["kind"] for item in json.loads(told)["items"]]


async def test_a_deletion_has_a_restricted_pod_is_believed_by_its_report_and_goes_with_all_that_was_made(
    plane: Server, kube: Mortal, jobs: Jobs
) -> None:
    run = await jobs.start(order("order-1"))
    assert run.state is JobState.RUNNING
    pod = await pod_of(plane, "order-1")
    assert pod["metadata"]["ownerReferences"][0]["uid"] == run.job
    assert [volume["name"] for volume in pod["spec"]["volumes"]] == ["deletion"], "no token"
    end(plane, pod, 0)
    waiting = await seen(jobs, "order-1")
    assert waiting.state is JobState.RUNNING, "its report is not there"
    assert "cannot be read" in waiting.problem
    assert "Forbidden" not in waiting.problem, "the operator may read logs"
    kube.logs = {pod["metadata"]["name"]: b"".join(map(encode_line, WHOLE))}
    done = await seen(jobs, "order-1")
    assert (done.state, done.job, done.lines) == (JobState.DONE, run.job, WHOLE)
    assert (await jobs.start(order("order-1"))).state is JobState.DONE, "it is not begun again"
    await jobs.remove("order-1")
    deadline = asyncio.get_running_loop().time() + PATIENCE_S
    while left := await made_for(plane, "order-1"):
        assert asyncio.get_running_loop().time() < deadline, left
        await asyncio.sleep(0.2)


@pytest.mark.parametrize("write", [1, 2, 3, 4])
@pytest.mark.parametrize("side", ["dies_before", "dies_after"])
async def test_an_operator_that_dies_at_any_write_leaves_a_job_that_the_next_one_begins(
    plane: Server, kube: Mortal, jobs: Jobs, side: str, write: int
) -> None:
    uid = f"order-{side[5:]}-{write}"
    setattr(kube, side, write)
    with pytest.raises(KilledError):
        await jobs.start(order(uid))
    left = await kube.get(JOB, OPERATOR_NAMESPACE, names.deletion_job(uid, "shared", 1))
    begun = left is not None and not left["spec"]["suspend"]
    assert begun == (side == "dies_after" and write == 4)
    run = await jobs.start(order(uid))
    assert left is None or left["metadata"]["uid"] == run.job
    assert (await pod_of(plane, uid))["metadata"]["ownerReferences"][0]["uid"] == run.job
    assert sorted(set(await made_for(plane, uid))) == ["Job", "NetworkPolicy", "Pod", "Secret"]
    await jobs.remove(uid)


async def test_two_operators_at_once_make_one_job(plane: Server, kube: Mortal, jobs: Jobs) -> None:
    runs = await asyncio.gather(*(jobs.start(order("order-2")) for _ in range(4)))
    assert len({run.job for run in runs}) == 1
    await pod_of(plane, "order-2")
    assert len(pods(plane, "order-2")) == 1
    await jobs.remove("order-2")


async def test_what_is_stored_is_what_was_asked_for(plane: Server, kube: Mortal, jobs: Jobs) -> None:
    await jobs.start(order("order-3"))
    name = names.deletion_job("order-3", "shared", 1)
    job = await kube.get(JOB, OPERATOR_NAMESPACE, name)
    assert job is not None
    assert (job["spec"]["backoffLimit"], job["spec"]["suspend"]) == (0, False)
    patch = json.dumps({"data": {"order.json": ""}})
    with pytest.raises(AssertionError, match="immutable"):
        plane.kubectl("-n", OPERATOR_NAMESPACE, "patch", "secret", name, "--type=merge", "-p", patch)
    told = plane.kubectl("-n", OPERATOR_NAMESPACE, "get", "networkpolicy", name, "-o", "json")
    assert len(json.loads(told)["spec"]["egress"]) == 2
    await jobs.remove("order-3")


async def receipt_objects(kube: Kube, domain: str) -> dict[str, dict[str, Any]]:
    return {
        raw["metadata"]["name"]: raw
        async for raw in kube.list(CONFIG_MAP, OPERATOR_NAMESPACE, f"{labels.DOMAIN}={domain}")
    }


async def chain_of(kube: Kube, domain: str) -> list[str | None]:
    """The orders of a chain that holds, and that the operator's key vouches for."""
    found = [data for _, data in read_receipt_objects(await receipt_objects(kube, domain))]
    receipts = [read_receipt(data) for data in found if isinstance(data, bytes)]
    published = await kube.get(CONFIG_MAP, OPERATOR_NAMESPACE, names.RECEIPT_PUBLIC_KEYS)
    assert published is not None
    chain = check_chain(receipts, is_signed, {name.removesuffix(".pem") for name in published["data"]})
    assert not chain.unvouched
    return [one.link.subject_uid for one in chain.receipts]


async def persist(kube: Kube, domain: str, uid: str) -> ChainState:
    """Ask for a receipt as who carries an erasure out does: again after each conflict."""
    while True:
        try:
            chains = Chains(kube, OPERATOR_NAMESPACE, lambda: datetime.now(UTC))
            return await chains.issue("team", domain, None, erasure(uid))
        except KubeError as error:
            if not error.is_conflict:
                raise


async def test_operators_that_write_receipts_at_once_write_one_chain_with_one_key(plane: Server, kube: Mortal) -> None:
    uids = [f"order-{n}" for n in range(4)]
    await asyncio.gather(*(persist(kube, "aa" * 8, uid) for uid in (*uids, *uids)))
    assert sorted(await chain_of(kube, "aa" * 8), key=str) == uids


@pytest.mark.parametrize("side", ["dies_before", "dies_after"])
async def test_one_that_dies_at_the_receipt_is_followed_by_one_that_writes_the_same(
    plane: Server, kube: Mortal, side: str
) -> None:
    domain = {"dies_before": "bb" * 8, "dies_after": "cc" * 8}[side]
    await persist(kube, domain, "order-1")
    setattr(kube, side, 1)
    with pytest.raises(KilledError):
        await persist(kube, domain, "order-2")
    second = await persist(kube, domain, "order-2")
    assert len(second.stored) == 2
    assert await chain_of(kube, domain) == ["order-1", "order-2"]


async def test_the_operator_may_neither_change_nor_delete_a_receipt(plane: Server, kube: Mortal) -> None:
    await persist(kube, "dd" * 8, "order-1")
    raw = await kube.get(CONFIG_MAP, OPERATOR_NAMESPACE, names.receipt("dd" * 8, 1))
    assert raw is not None
    with pytest.raises(KubeError, match="Forbidden"):
        await kube.replace(CONFIG_MAP, OPERATOR_NAMESPACE, raw)
    with pytest.raises(KubeError, match="Forbidden"):
        await kube.delete(CONFIG_MAP, OPERATOR_NAMESPACE, raw["metadata"]["name"], raw["metadata"]["uid"])


def put(server: Server, raw: dict[str, Any]) -> None:
    """Apply an object in the namespace that is to go."""
    server.apply({**raw, "metadata": {**raw["metadata"], "namespace": LEAVING}})


def kubelet_says(server: Server, phase: str, state: dict[str, Any]) -> None:
    """Say of the model's pod what a kubelet says."""
    ready = phase == "Running"
    told = {"name": "engine", "state": state, "ready": ready, "restartCount": 0, "image": "e:1", "imageID": ""}
    patch = json.dumps({"status": {"phase": phase, "containerStatuses": [told]}})
    server.kubectl("-n", LEAVING, "patch", "pod", "tiny-0", "--subresource=status", "--type=merge", "-p", patch)


async def receipt_versions(kube: Kube, domain: str) -> dict[str | None, int]:
    """The resourceVersion at which each receipt was written, by the UID of its order. Receipts are immutable."""
    objects = await receipt_objects(kube, domain)
    return {
        read_link(data).subject_uid: int(objects[name]["metadata"]["resourceVersion"])
        for name, data in read_receipt_objects(objects)
        if isinstance(data, bytes)
    }


def release_versions(server: Server, since: str) -> dict[str, int]:
    """The resourceVersion at which each policy lost the finalizer that waits for its receipt, by UID."""
    told = server.kubectl("get", "--raw", f"{POLICIES}?watch=1&resourceVersion={since}&timeoutSeconds=2")
    found: dict[str, int] = {}
    for event in map(json.loads, told.splitlines()):
        metadata = event["object"]["metadata"]
        # The event of a deletion has the finalizers of before, and the version of the deletion.
        if event["type"] == "DELETED" or FINALIZER not in metadata.get("finalizers", ()):
            found.setdefault(metadata["uid"], int(metadata["resourceVersion"]))
    return found


@pytest.mark.claim("a namespace that is deleted goes, and leaves a receipt for each policy")
async def test_a_namespace_that_is_deleted_goes_and_leaves_a_receipt_for_each_policy(
    plane: Server, kubeconfig: Path, kube: Mortal, tmp_path: Path
) -> None:
    """Its RoleBindings go with it, at any moment: what it waits for is among what the operator may do without them.

    Kubernetes deletes the pods first, and the rest in any order when they have ended. The test deletes the domain's key
    while the pod is there: it goes before every policy, and the operator must remember it.
    """
    operator = Operators(kubeconfig, OPERATOR_NAMESPACE, REPOSITORY, tmp_path).start(
        "operator-a", KVSTRATA_WATCH_NAMESPACES=LEAVING
    )
    # A pod on no node of the cluster is deleted within a minute.
    plane.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "elsewhere"}})
    labelled = {"name": "tiny-0", "labels": {"app.kubernetes.io/managed-by": "kvstrata", "kvstrata.io/model": "tiny"}}
    spec = {"nodeName": "elsewhere", "containers": [{"name": "engine", "image": "e:1"}]}
    policies = ("tenantcachepolicies", "--all", "--timeout=50s")
    try:
        for raw in (cpu_tier(), redis_tier(), model(tiers=("cpu",)), policy("acme"), policy("globex")):
            put(plane, raw)
        put(plane, {"apiVersion": "v1", "kind": "Pod", "metadata": labelled, "spec": spec})
        kubelet_says(plane, "Running", {"running": {}})
        plane.kubectl("-n", LEAVING, "wait", "--for=condition=ErasesOnDeletion", *policies)
        plane.kubectl("-n", LEAVING, "wait", "--for=jsonpath={.status.digest}", *policies)
        named = ("cachedomain", "default", "--timeout=50s")
        plane.kubectl("-n", LEAVING, "wait", "--for=jsonpath={.status.domainID}", *named)
        domain = plane.kubectl("-n", LEAVING, "get", "cachedomain", "default", "-o", "jsonpath={.status.domainID}")
        before = json.loads(plane.kubectl("get", "--raw", POLICIES))
        plane.kubectl("delete", "namespace", LEAVING, "--wait=false")
        ending = ("pod/tiny-0", "--timeout=50s")
        plane.kubectl("-n", LEAVING, "wait", "--for=jsonpath={.metadata.deletionTimestamp}", *ending)
        plane.kubectl("-n", LEAVING, "delete", "secret", names.DOMAIN_KEY_SECRET)
        # A policy under deletion has another reason: none is yet, and the operator has seen that the key is gone.
        plane.kubectl("-n", LEAVING, "wait", f"--for=jsonpath={READY_REASON}=WaitingForDomain", *policies)
        kubelet_says(plane, "Succeeded", {"terminated": {"exitCode": 0}})
        plane.kubectl("-n", LEAVING, "delete", "pod", "tiny-0", "--grace-period=0", "--force", "--wait=false")
        there = ("get", "namespace", LEAVING, "--ignore-not-found", "-o", "name")
        wait("the namespace to go", lambda: not plane.kubectl(*there).strip(), 4 * PATIENCE_S)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{operator.log_tail()}") from error
    finally:
        operator.kill()
    receipted = await receipt_versions(kube, domain)
    uids = {one["metadata"]["uid"] for one in before["items"]}
    released: dict[str, int] = {}

    def are_released() -> bool:
        """Whether the API server has sent all of it, which may take it longer than one watch lasts."""
        released.update(release_versions(plane, before["metadata"]["resourceVersion"]))
        return released.keys() >= uids

    wait("the policies' finalizers to go", are_released)
    assert receipted.keys() == released.keys() == uids, "each policy has a receipt"
    early = [uid for uid in uids if released[uid] < receipted[uid]]
    assert not early, "each receipt is written before its policy goes"
    assert len(await chain_of(kube, domain)) == 2
