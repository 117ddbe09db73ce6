"""An API server with an operator process, and what a pod of a model has from the kubelet: no kubelet runs here.

The test plays it: it makes the Pod object, takes its token, and puts the Secrets where the gate reads them.
"""

from __future__ import annotations

import asyncio
import base64
import random
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException

from e2e.cluster.control_plane import ControlPlane
from kvstrata.contract.messages.pod_state import ACK_AUDIENCE, CONTROL_PORT
from tests.apiserver.operator_process import OperatorProcess, Operators
from tests.support.objects import GROUP_VERSION, NAMESPACE, Raw

ROOT = Path(__file__).parents[2]
GROUP, VERSION = GROUP_VERSION.split("/")
PLURALS = {"CacheDomain": "cachedomains", "CacheTier": "cachetiers", "CachedModel": "cachedmodels",
           "TenantCachePolicy": "tenantcachepolicies"}  # fmt: skip
OPERATOR_NAMESPACE = "kvstrata-system"
NAME = "kvs-tiny"


class ProbedCluster:
    """The namespace of one model, on a control plane of its own."""

    def __init__(self, plane: ControlPlane, directory: Path) -> None:
        self._plane, self._directory = plane, directory
        directory.mkdir()
        for folder in ("control-tls", "logs"):
            (directory / folder).mkdir()
        self._client = config.new_client_from_config(str(plane.kubeconfig))
        # Bodies are written as dictionaries, which the client takes and its types do not.
        self.core: Any = client.CoreV1Api(self._client)
        self._own: Any = client.CustomObjectsApi(self._client)
        self.operators = Operators(plane.kubeconfig, OPERATOR_NAMESPACE, ROOT, directory / "logs")
        self.address = free_address()
        crds = ["apply", "--server-side", "-f", str(ROOT / "crds")]
        for arguments in (crds, ["wait", "--for=condition=Established", "--timeout=60s", "crd", "--all"]):
            command = [str(plane.kubectl), f"--kubeconfig={plane.kubeconfig}", *arguments]
            subprocess.run(command, check=True, capture_output=True, timeout=120)
        for namespace in (OPERATOR_NAMESPACE, NAMESPACE):
            self.core.create_namespace({"metadata": {"name": namespace}})

    def close(self) -> None:
        """End operators that run, and connections."""
        for running in self.operators.running():
            running.kill()
        self._client.close()

    def put(self, *objects: Raw) -> None:
        """Create objects of the project's kinds."""
        for body in objects:
            self._own.create_namespaced_custom_object(GROUP, VERSION, NAMESPACE, PLURALS[body["kind"]], body)

    def put_api_keys(self) -> None:
        """Make the Secret of callers' keys, with none."""
        body = {"metadata": {"name": "keys"}, "stringData": {"keys.json": '{"keys":[]}'}}
        self.core.create_namespaced_secret(NAMESPACE, body)

    def tell_domain(self, domain_id: str) -> None:
        """Let the domain have had this id all along, as the cache server's parameters say."""
        status = {"status": {"domainID": domain_id}}
        self._own.patch_namespaced_custom_object_status(GROUP, VERSION, NAMESPACE, "cachedomains", "default", status)

    def status(self) -> Raw:
        """The model's status."""
        found = self._own.get_namespaced_custom_object(GROUP, VERSION, NAMESPACE, "cachedmodels", "tiny")
        status: Raw = found.get("status") or {}
        return status

    def isolation(self) -> tuple[str, str]:
        """The model's condition IsolationVerified."""
        told = self._told()
        return told.get("status", ""), told.get("reason", "")

    def message(self) -> str:
        """What that condition says in words."""
        return str(self._told().get("message"))

    def events(self) -> list[tuple[str, str]]:
        """Reasons and messages of warnings about the model."""
        found = self.core.list_namespaced_event(NAMESPACE).items
        return [(one.reason, one.message) for one in found if one.type == "Warning"]

    def start_operator(self, name: str, module: str = "kvstrata.cli.operator") -> OperatorProcess:
        """Start an operator and wait until it leads."""
        started = self.operators.start(name, module)
        started.wait_until_leading(90)
        return started

    def start_pod(self) -> dict[str, Any]:
        """Make the Pod, and return the settings of a gate in it."""
        wait(lambda: self._secret(f"{NAME}-bundle") and self._secret(f"{NAME}-gate-tls") and self._account())
        owned = {"app.kubernetes.io/managed-by": "kvstrata", "kvstrata.io/model": "tiny"}
        pod = self.core.create_namespaced_pod(
            NAMESPACE,
            {
                "metadata": {"name": "pod-0", "labels": owned},
                "spec": {
                    "serviceAccountName": NAME,
                    "nodeName": "node",
                    "containers": [{"name": "engine", "image": "engine:1"}],
                },
            },
        )
        running = {"name": "engine", "image": "engine:1", "imageID": "", "ready": True, "restartCount": 0}
        state = {"state": {"running": {}}}
        self.core.patch_namespaced_pod_status(
            "pod-0",
            NAMESPACE,
            {
                "status": {
                    "phase": "Running",
                    "podIP": self.address,
                    "podIPs": [{"ip": self.address}],
                    "conditions": [{"type": "Ready", "status": "True"}],
                    "containerStatuses": [{**running, **state}],
                }
            },
        )
        bound = {"kind": "Pod", "apiVersion": "v1", "name": "pod-0", "uid": pod.metadata.uid}
        for file, audiences in (("ack-token", [ACK_AUDIENCE]), ("kube-token", [])):
            spec = {"spec": {"audiences": audiences, "boundObjectRef": bound}}
            token = self.core.create_namespaced_service_account_token(NAME, NAMESPACE, spec)
            (self._directory / file).write_text(token.status.token)
        for name, value in self._secret(f"{NAME}-gate-tls").items():
            (self._directory / "control-tls" / name).write_bytes(base64.b64decode(value))
        server = yaml.safe_load(self._plane.kubeconfig.read_text())["clusters"][0]["cluster"]
        url = urlsplit(server["server"])
        authority = self._directory / "kube-ca.crt"
        if "certificate-authority-data" in server:
            authority.write_bytes(base64.b64decode(server["certificate-authority-data"]))
        else:
            authority.write_bytes(Path(server["certificate-authority"]).read_bytes())
        return {
            "pod_name": "pod-0", "pod_uid": pod.metadata.uid, "pod_namespace": NAMESPACE, "model": "tiny",
            "bundle_secret": f"{NAME}-bundle", "api_keys_secret": "keys", "bind": self.address,
            "control_port": CONTROL_PORT, "control_tls_dir": self._directory / "control-tls",
            "ack_token_file": self._directory / "ack-token", "kube_token_file": self._directory / "kube-token",
            "kube_host": url.hostname, "kube_port": url.port, "kube_ca_file": authority,
        }  # fmt: skip

    def _told(self) -> Raw:
        conditions = self.status().get("conditions") or ()
        return next((one for one in conditions if one["type"] == "IsolationVerified"), {})

    def _secret(self, name: str) -> dict[str, str]:
        try:
            return self.core.read_namespaced_secret(name, NAMESPACE).data or {}
        except ApiException:
            return {}

    def _account(self) -> bool:
        try:
            return bool(self.core.read_namespaced_service_account(NAME, NAMESPACE))
        except ApiException:
            return False


def free_address() -> str:
    """Return a loopback address on which nobody has the gates' port, which is the same for all pods."""
    while True:
        address = f"127.{random.randint(2, 250)}.{random.randint(0, 250)}.{random.randint(2, 250)}"
        with socket.socket() as tried:
            try:
                tried.bind((address, CONTROL_PORT))
            except OSError:
                continue
            return address


def wait(holds: Callable[[], object], timeout_s: float = 90.0) -> None:
    """Wait until something holds."""
    give_up_at_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < give_up_at_s, "waited in vain"
        time.sleep(0.2)


async def come(holds: Callable[[], object], told: Callable[[], object], timeout_s: float = 120.0) -> None:
    """Wait until something holds, beside a gate that runs in this loop; `told` says why it does not."""
    give_up_at_s = time.monotonic() + timeout_s
    while not await asyncio.to_thread(holds):
        assert time.monotonic() < give_up_at_s, await asyncio.to_thread(told)
        await asyncio.sleep(0.2)
