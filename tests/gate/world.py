"""One gate with everything around it, and a client that says exactly what it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvstrata.contract.messages.engine_identity import IDENTITY_FILE, EngineIdentity
from kvstrata.contract.messages.pod_state import gate_server_name
from kvstrata.contract.policy.bundle import (
    ROOT_DATA_KEY,
    SHARD_DATA_KEY,
    Entry,
    Root,
    Rules,
    ShardRef,
    split_into_shards,
)
from kvstrata.contract.policy.keyspace import Scope, ScopeKind
from kvstrata.contract.policy.pools import PoolRef, PoolShard, shard_name
from kvstrata.contract.wire import digest_bytes
from kvstrata_sidecar.gate.main import Gate
from kvstrata_sidecar.gate.settings import Settings
from tests.tiers.gate_stand_in import FINGERPRINT

from . import pki
from .stand_in_api import StandInApi
from .stand_ins import RecorderEngine, StandInAdapter

MODEL = "tiny"
BUNDLE = "kvs-tiny-bundle"
KEYS = "kvs-keys"
ACME, GLOBEX, NOBODY = "key-of-acme", "key-of-globex", "key-without-policy"
PATIENCE_S = 60.0


def keyspace(name: str) -> str:
    """Return a keyspace that is recognisable in a failure."""
    return hashlib.sha256(name.encode()).hexdigest()[:32]


def entry(tenant: str, space: str | None = None, **fields: Any) -> Entry:
    return Entry(tenant, keyspace(space or tenant), Scope(ScopeKind.TENANT, tenant), f"uid-{tenant}", **fields)


@dataclass
class Answer:
    """An HTTP answer; `complete` is false when the connection was cut before its framing ended."""

    status: int
    headers: dict[str, str]
    body: bytes
    complete: bool = True

    @property
    def json(self) -> dict[str, Any]:
        value = json.loads(self.body)
        assert isinstance(value, dict)
        return value

    @property
    def error(self) -> dict[str, Any]:
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        assert error["message"]
        return dict(error)


class Connection:
    """A client connection that sends raw bytes and reads framed answers."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self) -> tuple[int, dict[str, str]]:
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
        return int(lines[0].split(" ")[1]), headers

    async def chunk(self) -> bytes:
        size = int(await self.reader.readuntil(b"\r\n"), 16)
        data = await self.reader.readexactly(size + 2)
        return data[:-2]

    async def answer(self) -> Answer:
        status, headers = await self.head()
        if "content-length" in headers:
            return Answer(status, headers, await self.reader.readexactly(int(headers["content-length"])))
        body = b""
        try:
            while data := await self.chunk():
                body += data
        except (asyncio.IncompleteReadError, ConnectionError):
            return Answer(status, headers, body, complete=False)
        return Answer(status, headers, body)

    async def closed(self) -> bool:
        """Whether the other side closes without another byte."""
        try:
            return await asyncio.wait_for(self.reader.read(1), PATIENCE_S) == b""
        except ConnectionError:
            return True

    def close(self) -> None:
        self.writer.close()


def post(path: str, body: object, key: str = ACME, extra: str = "") -> bytes:
    """Return the bytes of a POST."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return (
        f"POST {path} HTTP/1.1\r\nHost: gate\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\n"
        f"{extra}Content-Length: {len(data)}\r\n\r\n"
    ).encode() + data


def chat(text: str = "hello", **fields: Any) -> dict[str, Any]:
    """Return a small chat body."""
    return {"messages": [{"role": "user", "content": text}], **fields}


class World:
    """The gate, what it talks to, and the bundle that it is given."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        for name in ("engine", "policy", "link"):
            (directory / name).mkdir()
        self.authority = pki.Authority()
        self.gate_tls = self.authority.issue(directory / "gate-tls", gate_server_name(MODEL, "ns"), server=True)
        self.operator_tls = self.authority.issue(directory / "operator-tls", "kvstrata-operator", server=False)
        self.engine = RecorderEngine(directory / "engine" / "engine.sock")
        self.adapter = StandInAdapter(directory / "link" / "adapter.sock")
        self.api = StandInApi()
        self.root = Root("d" * 16, MODEL, "model-uid", 0, 1, Rules(drain_timeout_s=1), ())
        self.gate: Gate = None  # type: ignore[assignment]  # set by started
        self.report_identity(EngineIdentity(FINGERPRINT, {"vllm": "1"}))
        (directory / "ack-token").write_text("the-pods-token\n")
        (directory / "kube-token").write_text("kube-token\n")

    def report_identity(self, identity: EngineIdentity) -> None:
        """Write what an engine reports when it starts."""
        written = self.directory / "engine" / "written"
        written.write_bytes(identity.encode())
        written.replace(self.directory / "engine" / IDENTITY_FILE)

    def settings(self, **changes: Any) -> Settings:
        directory = self.directory
        settings = Settings(
            pod_name="pod-1", pod_uid="pod-uid-1", pod_namespace="ns", model=MODEL, served_model=MODEL,
            identity="i" * 16, bundle_secret=BUNDLE, api_keys_secret=KEYS,
            engine_socket=self.engine.socket_path, policy_dir=directory / "policy",
            adapter_socket=self.adapter.socket_path, bind="127.0.0.1", https_port=0, http_port=0, control_port=0,
            health_port=0, cache_http_port=1, tls_dir=self.gate_tls, control_tls_dir=self.gate_tls,
            ack_token_file=directory / "ack-token", kube_host="127.0.0.1", kube_port=self.api.port,
            kube_token_file=directory / "kube-token", kube_ca_file=self.gate_tls / "ca.crt", drain_grace_s=0.2,
            shutdown_s=3.0, memory_patience_s=0.0,
        )  # fmt: skip
        return replace(settings, **changes)

    async def publish(
        self,
        entries: Iterable[Entry],
        rules: Rules | None = None,
        *,
        revision: int | None = None,
        term: int = 1,
        pools: Mapping[int, PoolShard] | None = None,
    ) -> int:
        """Write a bundle as the operator does: changed shards into their other slot, then the root.

        `pools` are all that there are, by index; None leaves those of before.
        """
        shards = split_into_shards(entries, len(self.root.shards))
        references = []
        for index, data in enumerate(shards):
            old = self.root.shards[index] if index < len(self.root.shards) else None
            if old is not None and old.digest == digest_bytes(data):
                references.append(old)
                continue
            reference = ShardRef(index, old.other_slot if old else "a", digest_bytes(data))
            await self.api.put(f"{BUNDLE}-{index}{reference.slot}", {SHARD_DATA_KEY: data})
            references.append(reference)
        revision = self.root.revision + 1 if revision is None else revision
        self.root = replace(
            self.root,
            revision=revision,
            term=term,
            rules=rules or self.root.rules,
            shards=tuple(references),
            pools=self.root.pools if pools is None else await self._publish_pools(pools, revision),
        )
        await self.api.put(BUNDLE, {ROOT_DATA_KEY: self.root.encode()})
        return self.root.revision

    async def _publish_pools(self, pools: Mapping[int, PoolShard], revision: int) -> tuple[PoolRef, ...]:
        before = {reference.index: reference for reference in self.root.pools}
        references = []
        for index, shard in sorted(pools.items()):
            data, old = shard.encode(), before.get(index)
            if old is not None and old.digest == digest_bytes(data):
                references.append(old)
                continue
            reference = PoolRef(index, old.other_slot if old else "a", digest_bytes(data), revision)
            await self.api.put(shard_name(BUNDLE, index, reference.slot), {SHARD_DATA_KEY: data})
            references.append(reference)
        return tuple(references)

    async def publish_keys(self, **tenants: str) -> None:
        keys = [{"tenant": t, "sha256": hashlib.sha256(key.encode()).hexdigest()} for t, key in tenants.items()]
        await self.api.put(KEYS, {"keys.json": json.dumps({"keys": keys}).encode()})

    @contextlib.asynccontextmanager
    async def started(self, **changes: Any) -> AsyncIterator[World]:
        """Run the gate with these settings changed until the block ends."""
        gate = self.gate = Gate(self.settings(**changes), asyncio.get_running_loop())
        task = asyncio.create_task(gate.run())
        waiting = asyncio.create_task(gate.started.wait())
        await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        try:
            yield self
        finally:
            gate.stop()
            await asyncio.wait_for(task, PATIENCE_S)

    async def connect(self, port: str = "http", context: ssl.SSLContext | None = None) -> Connection:
        name = gate_server_name(MODEL, "ns") if context is not None else None
        return Connection(
            *await asyncio.open_connection(
                "127.0.0.1", self.gate.ports[port], ssl=context, server_hostname=name, limit=1 << 24
            )
        )

    async def ask(self, data: bytes, port: str = "http") -> Answer:
        """Send raw bytes on a fresh connection and return the answer."""
        connection = await self.connect(port)
        try:
            # An answer may come before all is sent, and be lost if it is not read then.
            connection.writer.write(data)
            return await asyncio.wait_for(connection.answer(), PATIENCE_S)
        finally:
            connection.close()

    async def get(self, path: str, port: str = "health") -> Answer:
        return await self.ask(f"GET {path} HTTP/1.1\r\nHost: gate\r\n\r\n".encode(), port)

    async def acked(self, revision: int) -> None:
        await until(lambda: self.gate.enforcement.acked >= revision)


async def until(condition: Callable[[], object], timeout_s: float = PATIENCE_S) -> None:
    """Wait until `condition` holds; fail the test when it does not in time."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
