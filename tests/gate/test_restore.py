"""etcd is put back to a backup of its data while an operator and a gate live on: nothing invalidated comes back."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster.control_plane import ControlPlane
from e2e.cluster.ports import free_port
from kvstrata.plan.bundle.restore import MARGIN
from tests.apiserver.operator_process import OperatorProcess, Operators
from tests.apiserver.server import NAMESPACE, Server
from tests.support.objects import cpu_tier, invalidation, model, policy
from tests.support.operator_of_one_gate import GATE_PORT

from .test_real_apiserver import RealApi
from .world import World, until

pytestmark = pytest.mark.apiserver

REPOSITORY = Path(__file__).resolve().parents[2]
SYSTEM = "kvstrata-system"
POD = "kvs-tiny-0"
PATIENCE_S = 180.0


class RestorablePlane(ControlPlane):
    """A control plane whose etcd data can be copied and put back; its address and its credentials stay."""

    def __init__(self, directory: Path) -> None:
        self.data = directory / "data"
        self._options: dict[str, Sequence[str]] = {}
        super().__init__(directory, etcd_data=self.data)

    def _spawn(self, name: str, options: Sequence[str]) -> subprocess.Popen[bytes]:
        self._options[name] = options
        return super()._spawn(name, options)

    def back_up(self, to: Path) -> None:
        """Copy etcd's data while nothing writes it."""
        self._kill_all()
        shutil.copytree(self.data, to)
        self._resume()

    def restore(self, backup: Path) -> None:
        """Go on with the data of a backup."""
        self._kill_all()
        shutil.rmtree(self.data)
        shutil.copytree(backup, self.data)
        self._resume()

    def _resume(self) -> None:
        for name in ("etcd", "kube-apiserver"):
            super()._spawn(name, self._options[name])
        self._wait("/readyz", "the API server to be ready", lambda answer: answer == "ok")


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[RestorablePlane]:
    with RestorablePlane(tmp_path / "plane") as started:
        yield started


class Cluster:
    """One operator that is started again when it ends, one pod's gate, and what users see of both."""

    def __init__(self, server: Server, operators: Operators, world: World) -> None:
        self.server, self._operators, self.world = server, operators, world
        self.control_port = free_port()
        self.started: list[OperatorProcess] = []

    def start_operator(self) -> None:
        module = "tests.support.operator_of_one_gate"
        self.started.append(self._operators.start("operator-a", module, **{GATE_PORT: str(self.control_port)}))

    async def wait(self, what: str, kind: str, name: str, condition: str, wanted: tuple[str, str]) -> None:
        """Wait until a condition is so; what the kubelet does for an operator that ended is done meanwhile."""
        seen: tuple[str, str] | None = None
        try:
            async with asyncio.timeout(PATIENCE_S):
                while seen != wanted:
                    if self.started[-1].process.poll() is not None:
                        self.start_operator()
                    seen = await asyncio.to_thread(self._condition, kind, name, condition)
                    await asyncio.sleep(0.2)
        except TimeoutError:
            raise AssertionError(f"waited in vain for {what}: {seen}\n{self.started[-1].log_tail()}") from None

    def _condition(self, kind: str, name: str, condition: str) -> tuple[str, str]:
        try:
            return self.server.condition(kind, name, condition)
        except AssertionError:
            return ("", "the API server does not answer")

    @property
    def keyspaces(self) -> frozenset[str]:
        bundle = self.world.gate.enforcement.bundle
        return bundle.keyspaces if bundle is not None else frozenset()

    def secret(self, name: str) -> dict[str, bytes]:
        found = self.server.get("secret", name)
        return {key: base64.b64decode(value) for key, value in (found or {}).get("data", {}).items()}


@pytest.fixture
async def cluster(plane: RestorablePlane, world: World, tmp_path: Path) -> AsyncIterator[Cluster]:
    """A tenant's policy, enforced by one pod."""
    server = Server(plane.kubectl, plane.kubeconfig)
    operators = Operators(plane.kubeconfig, SYSTEM, REPOSITORY, tmp_path)
    cluster = Cluster(server, operators, world)
    await asyncio.to_thread(_install, server)
    cluster.start_operator()
    try:
        await cluster.wait("the policy", "TenantCachePolicy", "acme", "Ready", ("True", "NoLivePods"))
        await asyncio.to_thread(
            server.wait, "what a pod has from the operator", lambda: _has_parts(cluster), PATIENCE_S
        )
        await asyncio.to_thread(_start_pod, server)
        changes = await asyncio.to_thread(_settings, cluster, RealApi(plane.kubeconfig, world.directory))
        async with world.started(**changes):
            await cluster.wait("the pod", "TenantCachePolicy", "acme", "Enforced", ("True", "AllPodsAcknowledged"))
            yield cluster
    finally:
        for running in operators.running():
            running.kill()


def _install(server: Server) -> None:
    server.kubectl("apply", "--server-side", "-f", str(REPOSITORY / "crds"))
    server.kubectl("wait", "--for=condition=Established", "--timeout=60s", "crd", "--all")
    for namespace in (NAMESPACE, SYSTEM):
        server.kubectl("create", "namespace", namespace)
    for obj in (cpu_tier(), model(tiers=("cpu",)), policy("acme")):
        server.apply({**obj, "metadata": {**obj["metadata"], "namespace": NAMESPACE}})


def _has_parts(cluster: Cluster) -> bool:
    """Whether there is all that a pod needs to start."""
    return bool(cluster.secret("kvs-tiny-gate-tls") and cluster.server.get("serviceaccount", "kvs-tiny"))


def _start_pod(server: Server) -> None:
    """Make a pod as the Deployment's controller, the scheduler and the kubelet do, which do not run here."""
    labels = {"app.kubernetes.io/managed-by": "kvstrata", "kvstrata.io/model": "tiny"}
    container = {"name": "gate", "image": "gate"}
    server.apply(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": POD, "namespace": NAMESPACE, "labels": labels},
            "spec": {
                "nodeName": "node",
                "serviceAccountName": "kvs-tiny",
                "automountServiceAccountToken": False,
                "containers": [container],
            },
        }
    )
    running = {"name": "gate", "ready": True, "restartCount": 0, "image": "gate", "imageID": "", "started": True,
               "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}  # fmt: skip
    status = {
        "phase": "Running",
        "podIP": "127.0.0.1",
        "podIPs": [{"ip": "127.0.0.1"}],
        "containerStatuses": [running],
        "conditions": [{"type": "Ready", "status": "True"}],
    }
    patch = ("patch", "pod", POD, "--subresource=status", "--type=merge")
    server.kubectl("-n", NAMESPACE, *patch, "-p", json.dumps({"status": status}))


def _settings(cluster: Cluster, api: RealApi) -> dict[str, Any]:
    """Return what the gate of that pod is told by its container's environment and volumes."""
    server, directory = cluster.server, cluster.world.directory
    tls = directory / "pod-tls"
    tls.mkdir()
    for name, data in cluster.secret("kvs-tiny-gate-tls").items():
        (tls / name).write_bytes(data)
    pod = server.get("pod", POD) or {}
    token = ("-n", NAMESPACE, "create", "token", "kvs-tiny", "--duration=1h")
    (directory / "kube-token").write_text(server.kubectl(*token))
    bound = ("--bound-object-kind=Pod", f"--bound-object-name={POD}", f"--bound-object-uid={pod['metadata']['uid']}")
    (directory / "ack-token").write_text(server.kubectl(*token, "--audience=kvstrata-ack", *bound))
    api.close()
    return {
        "pod_name": POD, "pod_uid": pod["metadata"]["uid"], "pod_namespace": NAMESPACE, "model": "tiny",
        "served_model": "tiny", "bundle_secret": "kvs-tiny-bundle", "api_keys_secret": "keys",
        "control_port": cluster.control_port, "control_tls_dir": tls, "tls_dir": tls,
        "kube_host": api.host, "kube_port": api.port, "kube_ca_file": api.ca_file,
    }  # fmt: skip


async def test_an_etcd_that_is_put_back_to_a_backup_brings_nothing_back(
    cluster: Cluster, plane: RestorablePlane, tmp_path: Path
) -> None:
    server, gate = cluster.server, cluster.world.gate
    cached = cluster.keyspaces
    assert cached
    await asyncio.to_thread(plane.back_up, tmp_path / "backup")
    everything = invalidation("all", scope={"all": True})
    await asyncio.to_thread(
        server.apply, {**everything, "metadata": {**everything["metadata"], "namespace": NAMESPACE}}
    )
    await cluster.wait("the invalidation", "CacheInvalidation", "all", "Complete", ("True", "LazyComplete"))
    assert not cached & cluster.keyspaces
    cached |= cluster.keyspaces
    witnessed = gate.enforcement.revision
    led = cluster.started[-1]

    await asyncio.to_thread(plane.restore, tmp_path / "backup")
    await cluster.wait("the restore", "CacheDomain", "default", "Restored", ("True", "KeyReplaced"))
    await cluster.wait("the policy", "TenantCachePolicy", "acme", "Enforced", ("True", "AllPodsAcknowledged"))
    assert led.process.poll() is not None, "an operator goes on with what it knew of the lost history"
    assert cluster.keyspaces
    assert not cached & cluster.keyspaces
    assert gate.enforcement.revision > witnessed + MARGIN
    await until(lambda: not gate.bundles.problem)
    restored = (await asyncio.to_thread(server.get, "cachedomain", "default") or {})["status"]["restored"]
    assert [(w["pod"], w["revision"]) for w in restored["witnesses"]] == [(POD, witnessed)]
    assert restored["settledAt"]
