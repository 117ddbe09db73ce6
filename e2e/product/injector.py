"""An admission webhook that adds a container to every Deployment and StatefulSet, as injectors and policy engines do.

It serves on this machine, which the local cluster's API server reaches at its end of the node's network.
"""

from __future__ import annotations

import base64
import json
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from e2e.cluster.settings import Network

from .kubectl import Kubectl

CONFIGURATION = "crowded-injector"
LABEL = "crowded-injector"
"""Of namespaces whose templates it changes."""

CONTAINER = "audit"
_RESOURCES = {"requests": {"cpu": "1m", "memory": "8Mi"}, "limits": {"cpu": "20m", "memory": "32Mi"}}


@dataclass(frozen=True, slots=True)
class Review:
    """A request that the API server asked about."""

    operation: str
    kind: str
    namespace: str
    name: str
    user: str


class Injector:
    """The webhook while it serves."""

    def __init__(self) -> None:
        self._reviews: list[Review] = []
        self._lock = threading.Lock()

    @property
    def reviews(self) -> list[Review]:
        """The requests so far."""
        with self._lock:
            return list(self._reviews)

    def review(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a review: add the container unless the template has it."""
        seen = (request["operation"], request["kind"]["kind"], request["namespace"], request["name"])
        with self._lock:
            self._reviews.append(Review(*seen, request["userInfo"]["username"]))
        containers = request["object"]["spec"]["template"]["spec"]["containers"]
        answer: dict[str, Any] = {"uid": request["uid"], "allowed": True}
        if any(one["name"] == CONTAINER for one in containers):
            return answer
        added = {
            "name": CONTAINER,
            "image": containers[0]["image"],
            "imagePullPolicy": "IfNotPresent",
            "command": ["sh", "-c", "sleep 100000"],
            "resources": _RESOURCES,
        }
        patch = [{"op": "add", "path": "/spec/template/spec/containers/-", "value": added}]
        return {**answer, "patchType": "JSONPatch", "patch": base64.b64encode(json.dumps(patch).encode()).decode()}


@contextmanager
def injector(kubectl: Kubectl, folder: Path) -> Iterator[Injector]:
    """Let the webhook change templates in namespaces with its label while the block runs; `folder` is for its
    certificate."""
    host, made = Network().host_ip, Injector()
    server = ThreadingHTTPServer((host, 0), _handler(made))
    certificate, context = _certificate(folder, host), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, certificate.with_suffix(".key"))
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        authority = base64.b64encode(certificate.read_bytes()).decode()
        kubectl.apply(_configuration(f"https://{host}:{server.server_port}/", authority))
        yield made
    finally:
        kubectl.run("delete", "mutatingwebhookconfiguration", CONFIGURATION, "--ignore-not-found")
        server.shutdown()
        server.server_close()
        thread.join(10)


def _handler(made: Injector) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            """Write no log."""

        def do_POST(self) -> None:
            review = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            response = made.review(review["request"])
            kind = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview"}
            body = json.dumps({**kind, "response": response}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Handler


def _certificate(folder: Path, host: str) -> Path:
    """Make a certificate for an address, with its key beside it."""
    certificate = folder / "webhook.crt"
    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", "webhook.key")
    names = ("-subj", f"/CN={host}", "-addext", f"subjectAltName=IP:{host}")
    command = ("openssl", "req", "-x509", *new, *names, "-days", "2", "-out", certificate.name)
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return certificate


def _configuration(url: str, authority: str) -> dict[str, Any]:
    rule = {"apiGroups": ["apps"], "apiVersions": ["v1"], "resources": ["deployments", "statefulsets"]}
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingWebhookConfiguration",
        "metadata": {"name": CONFIGURATION},
        "webhooks": [
            {
                "name": "inject.crowded.example",
                "admissionReviewVersions": ["v1"],
                "sideEffects": "None",
                "failurePolicy": "Fail",
                "timeoutSeconds": 5,
                "namespaceSelector": {"matchLabels": {LABEL: "on"}},
                "clientConfig": {"url": url, "caBundle": authority},
                "rules": [{**rule, "operations": ["CREATE", "UPDATE"]}],
            }
        ],
    }
