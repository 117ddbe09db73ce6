"""A model's pod where no kubelet runs: its object, a gate process with the pod's own tokens, the policy adapter over
files and a real Redis. LMCache and the engine are stand-ins: a chunk of 16 tokens is named by its first one, and an
engine that serves says the tokens of no text."""

from __future__ import annotations

import base64
import os
import queue
import socket
import socketserver
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from kvstrata.contract.messages.engine_identity import IDENTITY_FILE, EngineIdentity
from kvstrata.contract.messages.pod_state import CONTROL_PORT
from kvstrata.contract.policy.cache_view import POLICY_FILE
from kvstrata_sidecar.adapter.files.tier import FileTier
from kvstrata_sidecar.adapter.params import AdapterParams, Endpoint, FileTierParams, TierParams
from kvstrata_sidecar.adapter.pool_report import Hasher
from kvstrata_sidecar.adapter.runtime import Runtime
from kvstrata_sidecar.adapter.tier.tasks import Task
from kvstrata_sidecar.connector.reset import ENGINE_RESET_PATH
from tests.adapter.memory_server import Server as Memory
from tests.adapter.memory_stand_in import Key
from tests.apiserver.kubelet import NODE, wait
from tests.files.file_driver import aligned, files_in
from tests.tiers.gate_stand_in import FINGERPRINT
from tests.tiers.tier_driver import BLOCK_BYTES, Driver, block

ROOT = Path(__file__).resolve().parents[2]
CHUNK_TOKENS = 16
MERGE = {"Content-Type": "application/merge-patch+json"}


class Engine(socketserver.ThreadingUnixStreamServer):
    """Answers on the engine's socket: how often it was told to forget, and, if it `serves`, that any token is one."""

    daemon_threads = True

    def __init__(self, path: Path) -> None:
        super().__init__(str(path), _EngineRequest)
        self.resets = 0
        self.serves = False
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def get_request(self) -> tuple[Any, Any]:
        """Name the caller, whose unix address is empty."""
        connection, _ = super().get_request()
        return connection, ("gate", 0)


class _EngineRequest(BaseHTTPRequestHandler):
    server: Engine

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.path == ENGINE_RESET_PATH:
            self.server.resets += 1
            self._answer(200, b'{"success":true}')
        elif self.server.serves and self.path == "/tokenize":
            self._answer(200, b'{"tokens":[1],"max_model_len":4096}')
        else:
            self._answer(200 if self.server.serves else 503, b"{}")

    def do_GET(self) -> None:
        self._answer(200 if self.server.serves else 503, b"{}")

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


class InferencePod:
    """A pod of model `tiny` at a loopback address of its own. `request` asks the API server as its administrator."""

    def __init__(self, request: Any, kubeconfig: Path, namespace: str, name: str, address: str) -> None:
        self._request, self._namespace, self.name, self._address = request, namespace, name, address
        # Paths of unix sockets are short.
        self._folder = tempfile.TemporaryDirectory(prefix="pod")
        self.directory = Path(self._folder.name)
        for folder in ("policy", "link", "engine", "gate-tls", "files"):
            (self.directory / folder).mkdir()
        self._cluster = yaml.safe_load(kubeconfig.read_text())["clusters"][0]["cluster"]
        self._gate: subprocess.Popen[bytes] | None = None
        self._runtime: Runtime | None = None
        self._answered: queue.Queue[Task] = queue.Queue()
        self.memory = Memory(tier="cpu")
        self.engine = Engine(self.directory / "engine" / "engine.sock")
        (self.directory / "engine" / IDENTITY_FILE).write_bytes(EngineIdentity(FINGERPRINT).encode())
        self.uid = ""

    def start(
        self, domain: str, redis_port: int, open_port: int, render_id: str = "", *, cluster: bool = False
    ) -> None:
        """Show the pod as running, and start what is in it: `shared` is a tier that is encrypted, and maybe a cluster,
        `open` one that is not."""
        self._render_id = render_id
        self._show()
        self._write_files()
        self._domain, self._ports, self._cluster_tier = domain, (redis_port, open_port), cluster
        self._start_gate()
        self._start_cache_server()

    def restart_gate(self) -> None:
        """Have the gate's container die and start anew; return when it listens."""
        assert self._gate is not None
        self._gate.kill()
        self._gate.wait(10)
        self._start_gate()
        wait("the gate to listen", self._listens)

    def restart_cache_server(self) -> None:
        """Have the cache server's container start anew: what it had in memory is gone, its files are there."""
        self._end_cache_server()
        self.memory = Memory(tier="cpu")
        self._start_cache_server()

    def _start_gate(self) -> None:
        api = urlsplit(self._cluster["server"])
        environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT}/operator/src:{ROOT}/sidecar/src",
            **{f"KVSTRATA_{name}": str(value) for name, value in self._settings().items()},
            "KUBERNETES_SERVICE_HOST": str(api.hostname),
            "KUBERNETES_SERVICE_PORT": str(api.port),
            "POD_NAME": self.name,
            "POD_UID": self.uid,
            "POD_NAMESPACE": self._namespace,
        }
        with (self.directory / "gate.log").open("ab") as log:
            command = [sys.executable, "-c", "from kvstrata_sidecar.gate.main import main; main()"]
            self._gate = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)

    def _listens(self) -> bool:
        try:
            with socket.create_connection((self._address, CONTROL_PORT), timeout=1):
                return True
        except OSError:
            return False

    def _start_cache_server(self) -> None:
        domain, (redis_port, open_port) = self._domain, self._ports
        folders = {"policy_dir": self.directory / "policy", "link_dir": self.directory / "link"}
        params = AdapterParams(domain=domain, identity="1" * 16, tier=None, **folders)
        self._runtime = Runtime(params)
        self._runtime.names = _names
        self._runtime.hasher = Hasher(CHUNK_TOKENS, _chunks)
        self._runtime.memory = self.memory.memory
        self._runtime.enforcement.fingerprints = lambda: [FINGERPRINT]
        files = FileTierParams(
            "files", self.directory / "files", 64 << 20, 4096, free_floor_percent=0, encryption="Required"
        )
        answered, own = self._answered.put, self._runtime
        self.files = FileTier(params, files, own.enforcement, answered, spans=own.spans, guarded=lambda: False)
        self._runtime.add(self.files)
        shared = replace(_tier("shared", redis_port, "Required"), cluster=self._cluster_tier)
        tiers = [shared, _tier("open", open_port, "Disabled")]
        self.driver, self.open_driver = (Driver(self._runtime, params, tier) for tier in tiers)

    def store(self, keyspace: str, *numbers: int, content: bytes = b"\1") -> None:
        """Have the pod hold blocks in memory, in files and, with this content over and over, in both shared tiers."""
        for driver in (self.driver, self.open_driver):
            driver.until("closed")
            outcome = driver.store([block(keyspace, number) for number in numbers], content=content)
            assert outcome.stored_bytes > 0, outcome
        wait("the directory to be read", lambda: (now := self.files.state()).breaker == "closed" and not now.recovering)
        task = self.files.store(
            [block(keyspace, number) for number in numbers], [aligned(BLOCK_BYTES, 1)] * len(numbers)
        )
        assert self._answered.get(timeout=30).task_id == task
        assert self.files.pop_stores()[task].stored_bytes > 0, (self.files.state(), self.files.counters())
        for number in numbers:
            self.memory.manager.store(_key(keyspace, bytes([number]) * 32))

    def finds(self, keyspace: str, *numbers: int) -> list[int]:
        """Of each block, whether a lookup in the tier finds it."""
        return self.driver.lookup([block(keyspace, number) for number in numbers])

    def file_names(self, keyspace: str) -> list[str]:
        """Return the names of the files that hold its blocks of a keyspace."""
        return [path.name for path in files_in(self.directory / "files") if path.parent.name == keyspace]

    def stop(self) -> None:
        """End it, without a word."""
        self.engine.shutdown()
        self.engine.server_close()
        if self._gate is not None:
            self._gate.kill()
            self._gate.wait(10)
        self._end_cache_server()
        self._folder.cleanup()

    def _end_cache_server(self) -> None:
        if self._runtime is not None:
            self._runtime.memory = None
            self._runtime.close()
            for driver in (self.driver, self.open_driver):
                driver.tier.close()
            self.files.close()
        self.memory.close()

    def may_use(self, keyspace: str) -> bool:
        """Whether the gate's word to the cache server, or what the cache server goes by, has a keyspace in it."""
        policy = self.directory / "policy" / POLICY_FILE
        view = self._runtime.enforcement.view if self._runtime is not None else None
        told = policy.exists() and keyspace in policy.read_text()
        return told or (view is not None and keyspace in view.keyspaces)

    def holds(self, keyspace: str) -> int:
        """Return how many blocks of a keyspace are in memory and in files."""
        resident = sum(key.cache_salt == keyspace for key in self.memory.resident())
        return resident + len(self.file_names(keyspace))

    @property
    def gate_pid(self) -> int:
        """The process id of its gate."""
        assert self._gate is not None
        return self._gate.pid

    def log_tail(self) -> str:
        """The last lines of the gate's log."""
        return "\n".join((self.directory / "gate.log").read_text().splitlines()[-10:])

    def _show(self) -> None:
        pods = f"/api/v1/namespaces/{self._namespace}/pods"
        owned = {"app.kubernetes.io/managed-by": "kvstrata", "kvstrata.io/model": "tiny"}
        owned |= {"kvstrata.io/render": self._render_id} if self._render_id else {}
        spec = {"nodeName": NODE, "serviceAccountName": "kvs-tiny", "containers": [{"name": "engine", "image": "e:1"}]}
        metadata = {"name": self.name, "labels": owned}
        made = self._request("POST", pods, {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}, {})
        self.uid = made["metadata"]["uid"]
        running = {
            "name": "engine", "state": {"running": {}}, "ready": True, "restartCount": 0, "image": "e:1", "imageID": "",
        }  # fmt: skip
        status = {
            "phase": "Running",
            "podIP": self._address,
            "podIPs": [{"ip": self._address}],
            "conditions": [{"type": "Ready", "status": "True"}],
            "containerStatuses": [running],
        }
        self._request("PATCH", f"{pods}/{self.name}/status", {"status": status}, {}, MERGE)

    def _write_files(self) -> None:
        tls = self._request("GET", f"/api/v1/namespaces/{self._namespace}/secrets/kvs-tiny-gate-tls", None, {})
        for name, value in tls["data"].items():
            (self.directory / "gate-tls" / name).write_bytes(base64.b64decode(value))
        (self.directory / "ack-token").write_text(self._token("kvstrata-ack"))
        (self.directory / "kube-token").write_text(self._token())
        authority = self._cluster.get("certificate-authority-data")
        pem = base64.b64decode(authority) if authority else Path(self._cluster["certificate-authority"]).read_bytes()
        (self.directory / "kube-ca.crt").write_bytes(pem)

    def _token(self, *audiences: str) -> str:
        bound = {"apiVersion": "v1", "kind": "Pod", "name": self.name, "uid": self.uid}
        spec = {"boundObjectRef": bound, **({"audiences": list(audiences)} if audiences else {})}
        path = f"/api/v1/namespaces/{self._namespace}/serviceaccounts/kvs-tiny/token"
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"audiences": [], **spec}}
        return str(self._request("POST", path, body, {})["status"]["token"])

    def _settings(self) -> dict[str, Any]:
        return {
            "MODEL": "tiny",
            "IDENTITY": "1" * 16,
            "RENDER_ID": self._render_id,
            "BUNDLE_SECRET": "kvs-tiny-bundle",
            "API_KEYS_SECRET": "keys",
            "BIND": self._address,
            "HTTPS_PORT": 0,
            "HEALTH_PORT": 0,
            "ENGINE_SOCKET": self.directory / "engine" / "engine.sock",
            "POLICY_DIR": self.directory / "policy",
            "ADAPTER_SOCKET": self.directory / "link" / "adapter.sock",
            "TLS_DIR": self.directory / "gate-tls",
            "CONTROL_TLS_DIR": self.directory / "gate-tls",
            "ACK_TOKEN_FILE": self.directory / "ack-token",
            "KUBE_TOKEN_FILE": self.directory / "kube-token",
            "KUBE_CA_FILE": self.directory / "kube-ca.crt",
            "MEMORY_PATIENCE_S": 0,
        }


def _tier(name: str, port: int, encryption: str) -> TierParams:
    return TierParams(
        name, (Endpoint("127.0.0.1", port),), capacity_bytes=64 << 20, encryption=encryption, connect_timeout_ms=5000,
        io_timeout_ms=5000, lookup_deadline_ms=10_000, load_deadline_ms=10_000,
    )  # fmt: skip


def _chunks(tokens: list[int]) -> list[bytes]:
    return [bytes([tokens[at]]) * 32 for at in range(0, len(tokens), CHUNK_TOKENS)]


def _names(keyspace: str, chunks: Any) -> list[list[Key]]:
    return [[_key(keyspace, chunk)] for chunk in chunks]


def _key(keyspace: str, chunk: bytes) -> Key:
    return Key(keyspace, int.from_bytes(chunk, "big"), 0x01000100)
