"""What controllers and kubelets do for pods, where there is neither: Jobs get a pod, its container runs as a process,
its end is told, and the API server is given its log."""

from __future__ import annotations

import http.server
import ssl
import subprocess
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.support.job_pod import start_container

NODE = "node"


class Kubelet:
    """Runs the pods of Jobs in one namespace, on a node of its own, while `runs_jobs` is set. `request` asks the API
    server, `certificate` and `key` are the node's."""

    def __init__(
        self, request: Any, namespace: str, certificate: Path, key: Path, directory: Path, node: str = NODE
    ) -> None:
        self._request, self._namespace, self._directory, self._node = request, namespace, directory, node
        self._logs: dict[str, bytes] = {}
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        self.runs_jobs = threading.Event()
        self.runs_jobs.set()
        self.served: list[str] = []
        logs, served = self._logs, self.served

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                pod = self.path.split("?")[0].split("/")[3]
                served.append(pod)
                log = logs.get(pod)
                self.send_response(200 if log is not None else 404)
                self.end_headers()
                self.wfile.write(log or b"")

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)

    def __enter__(self) -> Kubelet:
        self._request(
            "POST", "/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": self._node}}, {}
        )
        account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}
        self._request("POST", f"/api/v1/namespaces/{self._namespace}/serviceaccounts", account, {})
        endpoints = {"kubeletEndpoint": {"Port": self._server.server_port}}
        status = {"addresses": [{"type": "InternalIP", "address": "127.0.0.1"}], "daemonEndpoints": endpoints}
        merge = {"Content-Type": "application/merge-patch+json"}
        self._request("PATCH", f"/api/v1/nodes/{self._node}/status", {"status": status}, {}, merge)
        for work in (self._server.serve_forever, self._work):
            self._threads.append(threading.Thread(target=work, daemon=True))
            self._threads[-1].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._server.shutdown()
        for thread in self._threads:
            thread.join(20)
        for process in self._running.values():
            process.kill()
            process.wait(10)
        self._server.server_close()

    def kill(self, pod: str) -> bool:
        """Kill the container of a pod; return whether it ran."""
        process = self._running.get(pod)
        if process is not None:
            process.kill()
        return process is not None

    def _work(self) -> None:
        jobs = f"/apis/batch/v1/namespaces/{self._namespace}/jobs"
        while not self._over.wait(0.2):
            for job in self._request("GET", jobs, None, {})["items"]:
                name = job["metadata"]["name"]
                is_new = name not in self._logs and name not in self._running
                if is_new and not job["spec"].get("suspend") and self.runs_jobs.is_set():
                    self._begin(name, job)
            for name, process in list(self._running.items()):
                if process.poll() is not None:
                    self._end(name, process)

    def _begin(self, name: str, job: dict[str, Any]) -> None:
        metadata = job["metadata"]
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": metadata["uid"], "controller": True}
        template = job["spec"]["template"]
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": template["metadata"]["labels"], "ownerReferences": [owner]},
            "spec": {**template["spec"], "nodeName": self._node},
        }
        self._request("POST", f"/api/v1/namespaces/{self._namespace}/pods", pod, {})
        self._status(name, "Running", {"running": {"startedAt": _now()}})
        directory = self._directory / name
        directory.mkdir()
        self._running[name] = start_container(template["spec"], self._secret, directory)

    def _end(self, name: str, process: subprocess.Popen[bytes]) -> None:
        output, _ = process.communicate()
        self._logs[name] = output
        del self._running[name]
        code = process.returncode if process.returncode >= 0 else 128 - process.returncode
        ended = {"exitCode": code, "reason": "Completed" if code == 0 else "Error", "finishedAt": _now()}
        self._status(name, "Succeeded" if code == 0 else "Failed", {"terminated": ended})

    def _status(self, name: str, phase: str, state: dict[str, Any]) -> None:
        told = {
            "name": "erase", "state": state, "ready": False, "restartCount": 0, "image": "sidecar", "imageID": "",
        }  # fmt: skip
        path = f"/api/v1/namespaces/{self._namespace}/pods/{name}"
        told["name"] = self._request("GET", path, None, {})["spec"]["containers"][0]["name"]
        patch = {"status": {"phase": phase, "containerStatuses": [told]}}
        self._request("PATCH", f"{path}/status", patch, {}, {"Content-Type": "application/merge-patch+json"})

    def _secret(self, name: str) -> Any:
        return self._request("GET", f"/api/v1/namespaces/{self._namespace}/secrets/{name}", None, {})


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def wait(what: str, holds: Any, timeout_s: float = 60.0) -> Any:
    """Wait until something is so, and return it."""
    deadline = time.monotonic() + timeout_s
    while not (found := holds()):
        assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s in vain for {what}"
        time.sleep(0.1)
    return found
