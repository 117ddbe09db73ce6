"""An API server that serves Secrets to a gate: real on the wire and scripted behind it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import ssl
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

from .stand_ins import chunk


@dataclass
class StandInApi:
    """Secrets with versions, GET and watch, over TLS with a bearer token."""

    token: str = "kube-token"
    secrets: dict[str, dict[str, Any]] = field(default_factory=dict)
    port: int = 0
    broken: bool = False
    """Answer 500 to everything."""
    gets: list[str] = field(default_factory=list)
    unauthorized: int = 0
    watches: int = 0
    _version: int = 100
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _server: asyncio.Server | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def start(self, context: ssl.SSLContext) -> None:
        # It may have been started before by a test with another event loop.
        self._changed = asyncio.Condition()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, ssl=context)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def put(self, name: str, data: dict[str, bytes]) -> None:
        self._version += 1
        self.secrets[name] = {
            "kind": "Secret",
            "metadata": {"name": name, "resourceVersion": str(self._version)},
            "data": {key: base64.b64encode(value).decode() for key, value in data.items()},
        }
        async with self._changed:
            self._changed.notify_all()

    async def delete(self, name: str) -> None:
        self.secrets.pop(name, None)
        async with self._changed:
            self._changed.notify_all()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                url = urlsplit(head.split(" ", 2)[1])
                if f"Authorization: Bearer {self.token}\r\n" not in head:
                    self.unauthorized += 1
                    self._send(writer, 401, {"message": "unauthorized"})
                elif self.broken:
                    self._send(writer, 500, {"message": "broken"})
                elif "watch=1" in url.query:
                    await self._watch(parse_qs(url.query), writer)
                    return
                else:
                    name = url.path.rsplit("/", 1)[1]
                    self.gets.append(name)
                    found = self.secrets.get(name)
                    self._send(writer, 200 if found else 404, found or {"message": "not found"})
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, ssl.SSLError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    def _send(self, writer: asyncio.StreamWriter, status: int, value: object) -> None:
        body = json.dumps(value).encode()
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body))

    async def _watch(self, query: dict[str, list[str]], writer: asyncio.StreamWriter) -> None:
        self.watches += 1
        name = query["fieldSelector"][0].removeprefix("metadata.name=")
        last = query.get("resourceVersion", [""])[0]
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while not self.broken:
            found = self.secrets.get(name)
            version = found["metadata"]["resourceVersion"] if found else "gone"
            if version != last:
                last = version
                value = {"type": "MODIFIED", "object": found} if found else {
                    "type": "DELETED", "object": {"metadata": {"name": name, "resourceVersion": "gone"}}
                }  # fmt: skip
                await chunk(writer, json.dumps(value).encode() + b"\n")
            async with self._changed:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), 0.5)
