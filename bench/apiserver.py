"""A real API server for one benchmark, and a client that costs little beside what is measured.

etcd and kube-apiserver run as processes of this machine; no controller of Kubernetes and no kubelet does, so what is
written is written by the benchmark, its stand-ins or the operator.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import ssl
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httptools
import yaml

from e2e.cluster.build import build_binaries
from e2e.cluster.control_plane import ControlPlane
from e2e.cluster.pki import write_private
from e2e.cluster.processes import recorded_pid
from e2e.cluster.progress import Progress
from e2e.cluster.settings import Paths, kubebuilder_assets
from kvstrata.clients.resources import Resource

REPOSITORY = Path(__file__).resolve().parents[1]
OPERATOR_NAMESPACE = "kvstrata-system"
NAMESPACE = "bench"
"""Where the benchmark's objects are."""

CRD = Resource("apiextensions.k8s.io/v1", "CustomResourceDefinition", "customresourcedefinitions")
NAMESPACES = Resource("v1", "Namespace", "namespaces")
CRD_TIMEOUT_S = 30.0
READ_BYTES = 256 * 1024


class RefusedError(Exception):
    """The API server refused a request of the benchmark."""


class _Answer:
    """Collects one answer; of a watch, the body is taken away line by line."""

    def __init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.body = bytearray()
        self.done = False

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.done = True


@dataclass(frozen=True, slots=True)
class Request:
    """One request, ready to be sent. `path` starts with a slash."""

    method: str
    path: str
    body: bytes = b""
    content_type: str = "application/json"
    accept: str = "application/json"

    def encode(self) -> bytes:
        """Return what goes over the wire."""
        head = (
            f"{self.method} {self.path} HTTP/1.1\r\nHost: apiserver\r\nAccept: {self.accept}\r\n"
            f"Content-Type: {self.content_type}\r\nContent-Length: {len(self.body)}\r\n\r\n"
        )
        return head.encode() + self.body


class Connection:
    """One kept connection to the API server, as administrator. Requests on it go one after another."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def send(self, request: Request) -> dict[str, Any]:
        """Send a request and return the decoded answer. Raises RefusedError or OSError."""
        data = await self.exchange(request)
        decoded: dict[str, Any] = json.loads(data)
        return decoded

    async def exchange(self, request: Request) -> bytes:
        """Send a request and return the answer's body. Raises RefusedError or OSError."""
        answer = _Answer()
        self._writer.write(request.encode())
        while not answer.done:
            await self._more(answer)
        status = answer.parser.get_status_code()
        if not 200 <= status <= 299:
            told = bytes(answer.body[:500]).decode(errors="replace")
            raise RefusedError(f"{request.method} {request.path}: {status} {told}")
        return bytes(answer.body)

    async def lines(self, request: Request) -> AsyncIterator[bytes]:
        """Send a watch and yield its lines until the server ends it. Raises RefusedError or OSError."""
        answer = _Answer()
        self._writer.write(request.encode())
        while not answer.done:
            await self._more(answer)
            status = answer.parser.get_status_code()
            if status and status != 200:
                raise RefusedError(f"the watch {request.path} was refused with {status}")
            # Only what ends in a line feed is complete.
            *complete, rest = answer.body.split(b"\n")
            answer.body = bytearray(rest)
            for line in complete:
                yield bytes(line)

    def close(self) -> None:
        """Close the connection."""
        self._writer.close()

    async def _more(self, answer: _Answer) -> None:
        data = await self._reader.read(READ_BYTES)
        if not data:
            raise ConnectionError("the API server closed the connection")
        answer.parser.feed_data(data)


@dataclass(frozen=True, slots=True)
class ApiAccess:
    """Access to an API server as administrator."""

    host: str
    port: int
    tls: ssl.SSLContext

    async def connect(self) -> Connection:
        """Return a new connection."""
        reader, writer = await asyncio.open_connection(self.host, self.port, ssl=self.tls, limit=2**22)
        return Connection(reader, writer)

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[Connection]:
        """Give a connection to the block, and close it after."""
        connection = await self.connect()
        try:
            yield connection
        finally:
            connection.close()

    async def send_all(self, requests: Sequence[Request], connections: int) -> None:
        """Send every request, over that many connections at once. Raises RefusedError for the first refusal."""
        left = iter(requests)

        async def work() -> None:
            async with self.connected() as connection:
                for request in left:
                    await connection.exchange(request)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(connections, len(requests))):
                group.create_task(work())

    async def get(self, path: str) -> dict[str, Any]:
        """Return the object or list at a path."""
        async with self.connected() as connection:
            return await connection.send(Request("GET", path))


@dataclass(frozen=True, slots=True)
class ApiServer(ApiAccess):
    """An API server that runs for a benchmark alone."""

    plane: ControlPlane
    authority_file: Path

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig."""
        return self.plane.kubeconfig

    def pids(self) -> list[int]:
        """The process ids of API server and etcd."""
        files = (self.plane.kubeconfig.parents[1] / "pid" / name for name in ("kube-apiserver", "etcd"))
        return [pid for file in files if (pid := recorded_pid(file)) is not None]

    async def prepare(self) -> None:
        """Install the CRDs and make the namespaces."""
        paths = sorted((REPOSITORY / "crds").glob("*.yaml"))
        definitions = [found for path in paths for found in yaml.safe_load_all(path.read_text()) if found]
        namespaces = [
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
            for name in (OPERATOR_NAMESPACE, NAMESPACE)
        ]
        await self.send_all([created(CRD, None, body) for body in definitions], 4)
        await self.send_all([created(NAMESPACES, None, body) for body in namespaces], 2)
        deadline = time.monotonic() + CRD_TIMEOUT_S
        for body in definitions:
            spec = body["spec"]
            kind = Resource(f"{spec['group']}/{spec['versions'][0]['name']}", "", spec["names"]["plural"])
            while not await self._serves(kind):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the API server does not serve {kind.plural} after {CRD_TIMEOUT_S:g} s")
                await asyncio.sleep(0.1)

    async def _serves(self, resource: Resource) -> bool:
        try:
            await self.get(resource.path(NAMESPACE))
        except RefusedError:
            return False
        return True


@contextlib.contextmanager
def running_api_server(progress: Progress) -> Iterator[ApiServer]:
    """Run an API server while the block runs; its files are in a temporary folder and gone after.

    The programs come from KUBEBUILDER_ASSETS, else they are built first. Raises ClusterError.
    """
    if kubebuilder_assets() is None:
        build_binaries(Paths(), progress)
    with tempfile.TemporaryDirectory(prefix="kvstrata-bench-") as folder, ControlPlane(Path(folder)) as plane:
        cluster = yaml.safe_load(plane.kubeconfig.read_text())["clusters"][0]["cluster"]
        host, port = cluster["server"].removeprefix("https://").rsplit(":", 1)
        authority = plane.pki.crt("ca")
        tls = ssl.create_default_context(cafile=str(authority))
        tls.load_cert_chain(plane.pki.crt("admin"), plane.pki.key("admin"))
        yield ApiServer(host, int(port), tls, plane, authority)


def access_by(kubeconfig: Path, folder: Path) -> ApiAccess:
    """Return access to a running cluster by its administrator's kubeconfig, whose certificates go into `folder`."""
    found = yaml.safe_load(kubeconfig.read_text())
    cluster, user = found["clusters"][0]["cluster"], found["users"][0]["user"]
    host, port = cluster["server"].removeprefix("https://").rsplit(":", 1)
    for name in ("client-certificate", "client-key"):
        write_private(folder / name, base64.b64decode(user[f"{name}-data"]).decode())
    tls = ssl.create_default_context(cadata=base64.b64decode(cluster["certificate-authority-data"]).decode())
    tls.load_cert_chain(folder / "client-certificate", folder / "client-key")
    return ApiAccess(host, int(port), tls)


def created(resource: Resource, namespace: str | None, body: Mapping[str, Any]) -> Request:
    """Return the request that creates an object."""
    return Request("POST", resource.path(namespace), json.dumps(body).encode())


def applied(resource: Resource, namespace: str, body: Mapping[str, Any]) -> Request:
    """Return the request that applies an object on the server's side."""
    path = f"{resource.path(namespace, body['metadata']['name'])}?fieldManager=bench&force=true"
    return Request("PATCH", path, json.dumps(body).encode(), "application/apply-patch+yaml")


def merged(path: str, patch: Mapping[str, Any]) -> Request:
    """Return the request that merges `patch` into the object at `path`."""
    return Request("PATCH", path, json.dumps(patch).encode(), "application/merge-patch+json")
