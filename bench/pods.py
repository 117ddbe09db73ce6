"""Pod objects of a CachedModel that look alive, with the files that the kubelet would mount into each, and gates."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import random
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from bench.apiserver import NAMESPACE, ApiServer, Connection, Request, created, merged
from bench.operator_under_test import RunningProcess, program_environment, spawn
from kvstrata.clients.resources import BY_KIND, POD, SECRET
from kvstrata.contract.messages.pod_state import ACK_AUDIENCE
from kvstrata.objects import labels, names

NODE = "stand-in"
TOKEN_SECONDS = 3 * 3600
SERVICE_ACCOUNT = BY_KIND["ServiceAccount"]


@contextlib.asynccontextmanager
async def live_pods(server: ApiServer, model: str, count: int, api_keys_secret: str) -> AsyncIterator[RunningProcess]:
    """Make `count` pods of `model` with a running gate each; yield the process of the gates.

    The model's Deployment, ServiceAccount and gate certificate must exist: the pods are made from them.
    """
    with tempfile.TemporaryDirectory(prefix="kvstrata-bench-gates-") as name:
        folder = Path(name)
        async with server.connected() as connection:
            template = await _template(connection, model)
            # Loopback addresses of this run's own: two runs on one machine do not disturb each other.
            block = f"127.{random.randint(64, 254)}.{random.randint(0, 254)}"
            ips = [f"{block}.{number + 1}" for number in range(count)]
            pods = [await _make(connection, folder, model, template, ip) for ip in ips]
            await _mount_certificate(connection, folder, model)
            (folder / "gates.json").write_text(json.dumps(_described(server, model, api_keys_secret, pods)))
            log = folder / "gates.log"
            command = [sys.executable, "-m", "bench.stand_in_gates", str(folder)]
            gates = RunningProcess(spawn(command, program_environment(), log), log)
            try:
                for pod in pods:
                    path = POD.path(NAMESPACE, pod["name"], "status")
                    await connection.send(merged(path, {"status": _running(pod["ip"])}))
                yield gates
                gates.check()
            except Exception:
                print(gates.log_tail(), file=sys.stderr)
                raise
            finally:
                await asyncio.to_thread(gates.stop)


async def _template(connection: Connection, model: str) -> dict[str, Any]:
    path = BY_KIND["Deployment"].path(NAMESPACE, names.model_child(model))
    template: dict[str, Any] = (await connection.send(Request("GET", path)))["spec"]["template"]
    return template


async def _make(
    connection: Connection, folder: Path, model: str, template: Mapping[str, Any], ip: str
) -> dict[str, str]:
    """Create a pod as the Deployment's would be, and put its two tokens where its gate reads them."""
    name = f"{names.model_child(model)}-{ip.rpartition('.')[2]}"
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": template["metadata"]["labels"]},
        "spec": {**template["spec"], "nodeName": NODE},
    }
    pod = await connection.send(created(POD, NAMESPACE, body))
    uid = pod["metadata"]["uid"]
    own = folder / name
    own.mkdir()
    for file, audiences in (("kube-token", []), ("ack-token", [ACK_AUDIENCE])):
        (own / file).write_text(await _token(connection, model, name, uid, audiences))
    return {
        "name": name,
        "uid": uid,
        "ip": ip,
        "identity": pod["metadata"]["labels"][labels.IDENTITY],
    }


async def _token(connection: Connection, model: str, pod: str, uid: str, audiences: list[str]) -> str:
    path = SERVICE_ACCOUNT.path(NAMESPACE, names.model_child(model), "token")
    body = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {
            "audiences": audiences,
            "expirationSeconds": TOKEN_SECONDS,
            "boundObjectRef": {"apiVersion": "v1", "kind": "Pod", "name": pod, "uid": uid},
        },
    }
    answer = await connection.send(Request("POST", path, body))
    token: str = answer["status"]["token"]
    return token


async def _mount_certificate(connection: Connection, folder: Path, model: str) -> None:
    secret = await connection.send(Request("GET", SECRET.path(NAMESPACE, names.gate_tls(model))))
    mounted = folder / "gate-tls"
    mounted.mkdir(mode=0o700)
    for key, value in secret["data"].items():
        (mounted / key).write_bytes(base64.b64decode(value))


def _described(server: ApiServer, model: str, api_keys_secret: str, pods: list[dict[str, str]]) -> dict[str, Any]:
    return {
        "namespace": NAMESPACE,
        "model": model,
        "bundle_secret": names.bundle_root(model),
        "api_keys_secret": api_keys_secret,
        "kube_host": server.host,
        "kube_port": server.port,
        "kube_ca_file": str(server.authority_file),
        "pods": pods,
    }


def _running(ip: str) -> dict[str, Any]:
    """Return the status that a kubelet would report of a pod that serves."""
    running = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
    state = {"image": "", "imageID": "", "ready": True, "restartCount": 0, "started": True, "state": running}
    return {
        "phase": "Running",
        "podIP": ip,
        "podIPs": [{"ip": ip}],
        "conditions": [{"type": "Ready", "status": "True"}],
        "initContainerStatuses": [{"name": "gate", **state}, {"name": "cache", **state}],
        "containerStatuses": [{"name": "engine", **state}],
    }
