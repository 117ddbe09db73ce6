"""A small client for the API server: GET and watch one Secret, which is all that the gate may do."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import httptools

from kvstrata_sidecar.gate import log
from kvstrata_sidecar.gate.http.tls import reason_of, stamps_of

_READ_BYTES = 64 * 1024
_MAX_OBJECT_BYTES = 4 * 1024 * 1024
_TIMEOUT_S = 10.0

_Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class ApiError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"the API server answered {status}: {message}")
        self.status = status


class _Answer:
    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._parser = httptools.HttpResponseParser(self)
        self.body = bytearray()
        self.status = 0  # before the end of the head
        self.keep = self.done = False

    async def read(self) -> bool:
        """Read on; return False at the end of the connection. Raises EOFError if it is not HTTP, or too large."""
        data = await self._reader.read(_READ_BYTES)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise EOFError("the API server's answer is not HTTP") from error
        if len(self.body) > _MAX_OBJECT_BYTES:
            raise EOFError("the API server's answer is too large")
        return bool(data)

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self.keep = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.done = True


class ApiAuthority:
    """The authority that checks the API server's certificate, from a file that Kubernetes replaces. A new one is in use
    once a connection succeeded with it; until then the former is, and `problem` is the reason."""

    def __init__(self, file: Path) -> None:
        self._file, self._read, self._context = file, stamps_of(file), _client_context(file)
        self.problem = ""

    async def connect(self, host: str, port: int) -> _Connection:
        """Raises OSError, also without a usable authority."""
        problem = ""
        try:
            stamps = stamps_of(self._file)
            if stamps != self._read:
                context = _client_context(self._file)
                connection = await asyncio.open_connection(host, port, ssl=context)
                self._read, self._context, self.problem = stamps, context, ""
                log.info("a new authority of the API server is in use")
                return connection
        except (FileNotFoundError, PermissionError, ssl.SSLError) as error:
            problem = f"{self._file}, the API server's authority, cannot be used, and the former is: {reason_of(error)}"
        if problem and problem != self.problem:
            log.warning("authority of the API server", problem=problem)
        self.problem = problem
        return await asyncio.open_connection(host, port, ssl=self._context)


@dataclass(eq=False)
class KubeApi:
    """One namespace of an API server. The token is read for every request, because Kubernetes replaces it; while its
    file cannot be read, the last one is used."""

    host: str
    port: int
    namespace: str
    token_file: Path
    authority: ApiAuthority | None
    _token: str = ""
    _kept: _Connection | None = None

    async def get_secret(self, name: str) -> dict[str, Any] | None:
        """Return a Secret by a quorum read, None without one. Raises ApiError, OSError, EOFError or ValueError."""
        request = self._request("/" + quote(name, safe=""))
        async with asyncio.timeout(_TIMEOUT_S):
            kept, self._kept = self._kept, None
            if kept is not None:
                try:
                    return await self._exchange(kept, request)
                except (OSError, EOFError):
                    kept[1].close()
            return await self._exchange(await self._connect(), request)

    async def watch_secret(self, name: str, resource_version: str, seconds: int) -> AsyncIterator[dict[str, Any]]:
        """Yield events of one Secret for `seconds`. Raises ApiError (410 for a version that is too old) or OSError."""
        query = {
            "watch": "1", "fieldSelector": f"metadata.name={name}", "resourceVersion": resource_version,
            "allowWatchBookmarks": "true", "timeoutSeconds": str(seconds),
        }  # fmt: skip
        async with asyncio.timeout(_TIMEOUT_S):
            reader, writer = await self._connect()
        try:
            writer.write(self._request("?" + urlencode(query)))
            answer = _Answer(reader)
            while not answer.done:
                async with asyncio.timeout(seconds + _TIMEOUT_S):
                    if not await answer.read():
                        return
                if answer.status not in (0, 200):
                    raise ApiError(answer.status, "watch refused")
                while (end := answer.body.find(b"\n")) >= 0:
                    event: dict[str, Any] = json.loads(answer.body[:end])
                    del answer.body[: end + 1]
                    if event.get("type") == "ERROR":
                        about = event.get("object", {})
                        raise ApiError(int(about.get("code", 500)), str(about.get("reason", "")))
                    yield event
        finally:
            writer.close()

    def close(self) -> None:
        if self._kept is not None:
            self._kept[1].close()

    async def _connect(self) -> _Connection:
        if self.authority is not None:
            return await self.authority.connect(self.host, self.port)
        return await asyncio.open_connection(self.host, self.port)

    def _request(self, secrets: str) -> bytes:
        """Return a request whose target is the namespace's Secrets, continued by `secrets`."""
        target = f"/api/v1/namespaces/{quote(self.namespace, safe='')}/secrets{secrets}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return (
            f"GET {target} HTTP/1.1\r\nHost: {host}:{self.port}\r\nAuthorization: Bearer {self._bearer()}\r\n"
            "Accept: application/json\r\nUser-Agent: kvstrata-gate\r\n\r\n"
        ).encode()

    def _bearer(self) -> str:
        """Raises OSError while no token was read yet."""
        try:
            self._token = self.token_file.read_text().strip() or self._token
        except (OSError, UnicodeDecodeError):
            if not self._token:
                raise
        return self._token

    async def _exchange(self, connection: _Connection, request: bytes) -> dict[str, Any] | None:
        reader, writer = connection
        answer = _Answer(reader)
        try:
            writer.write(request)
            while not answer.done:
                if not await answer.read():
                    raise EOFError("the API server closed the connection")
        except BaseException:
            writer.close()
            raise
        if answer.keep and self._kept is None:
            self._kept = connection
        else:
            writer.close()
        if answer.status == 404:
            return None
        if answer.status != 200:
            raise ApiError(answer.status, _message(answer.body))
        document = json.loads(answer.body)
        if not isinstance(document, dict):
            raise ApiError(answer.status, "not an object")
        return document


def _client_context(ca_file: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(ca_file))
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _message(body: bytes | bytearray) -> str:
    try:
        return str(json.loads(body).get("message", ""))[:200]
    except (ValueError, AttributeError):
        return ""
