"""A small client for the API server: GET and watch one Secret, which is all that the gate may do."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import httptools

_READ_BYTES = 64 * 1024
_MAX_OBJECT_BYTES = 4 * 1024 * 1024


class ApiError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"the API server answered {status}: {message}")
        self.status = status


class _Answer:
    def __init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.body = bytearray()
        self.head_done = False
        self.keep = False
        self.done = False

    def on_headers_complete(self) -> None:
        self.head_done = True
        self.keep = self.parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.done = True


class KubeApi:
    """One namespace of an API server. The token is read for every request, because Kubernetes replaces it."""

    def __init__(
        self,
        host: str,
        port: int,
        namespace: str,
        token_file: Path,
        tls: ssl.SSLContext | None,
        *,
        timeout_s: float = 10.0,
    ) -> None:
        self._host = host
        self._port = port
        self._secrets = f"/api/v1/namespaces/{quote(namespace, safe='')}/secrets"
        self._token_file = token_file
        self._tls = tls
        self._timeout_s = timeout_s
        self._kept: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def get_secret(self, name: str) -> dict[str, Any] | None:
        """Return a Secret by a quorum read (no resourceVersion is given), or None if there is none. Raises ApiError,
        OSError, TimeoutError, EOFError or ValueError."""
        request = self._request(f"{self._secrets}/{quote(name, safe='')}")
        async with asyncio.timeout(self._timeout_s):
            kept, self._kept = self._kept, None
            if kept is not None:
                try:
                    return await self._exchange(kept, request)
                except (OSError, EOFError):
                    kept[1].close()
            return await self._exchange(await self._connect(), request)

    async def watch_secret(self, name: str, resource_version: str, seconds: int) -> AsyncIterator[dict[str, Any]]:
        """Yield watch events of one Secret until the server ends the watch after `seconds`. Raises ApiError (410 when
        the version is too old), OSError or TimeoutError."""
        query = {
            "watch": "1",
            "fieldSelector": f"metadata.name={name}",
            "resourceVersion": resource_version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(seconds),
        }
        async with asyncio.timeout(self._timeout_s):
            reader, writer = await self._connect()
        try:
            writer.write(self._request(f"{self._secrets}?{urlencode(query)}"))
            answer = _Answer()
            while not answer.done:
                async with asyncio.timeout(seconds + self._timeout_s):
                    data = await reader.read(_READ_BYTES)
                if not data:
                    return
                _feed(answer, data)
                if answer.head_done and answer.parser.get_status_code() != 200:
                    raise ApiError(answer.parser.get_status_code(), "watch refused")
                while (end := answer.body.find(b"\n")) >= 0:
                    line = bytes(answer.body[:end])
                    del answer.body[: end + 1]
                    yield _event(line)
        finally:
            writer.close()

    def close(self) -> None:
        if self._kept is not None:
            self._kept[1].close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self._host, self._port, ssl=self._tls)

    def _request(self, target: str) -> bytes:
        token = self._token_file.read_text().strip()
        host = f"[{self._host}]" if ":" in self._host else self._host
        return (
            f"GET {target} HTTP/1.1\r\nHost: {host}:{self._port}\r\nAuthorization: Bearer {token}\r\n"
            "Accept: application/json\r\nUser-Agent: kvstrata-gate\r\n\r\n"
        ).encode()

    async def _exchange(
        self, connection: tuple[asyncio.StreamReader, asyncio.StreamWriter], request: bytes
    ) -> dict[str, Any] | None:
        reader, writer = connection
        answer = _Answer()
        try:
            writer.write(request)
            while not answer.done:
                data = await reader.read(_READ_BYTES)
                if not data:
                    raise EOFError("the API server closed the connection")
                _feed(answer, data)
        except BaseException:
            writer.close()
            raise
        if answer.keep and self._kept is None:
            self._kept = connection
        else:
            writer.close()
        status = answer.parser.get_status_code()
        if status == 404:
            return None
        if status != 200:
            raise ApiError(status, _message(answer.body))
        document = json.loads(answer.body)
        if not isinstance(document, dict):
            raise ApiError(status, "not an object")
        return document


def in_cluster_tls(ca_file: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(ca_file))
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _feed(answer: _Answer, data: bytes) -> None:
    try:
        answer.parser.feed_data(data)
    except httptools.HttpParserError as error:
        raise EOFError("the API server's answer is not HTTP") from error
    if len(answer.body) > _MAX_OBJECT_BYTES:
        raise EOFError("the API server's answer is too large")


def _event(line: bytes) -> dict[str, Any]:
    event: dict[str, Any] = json.loads(line)
    if event.get("type") == "ERROR":
        status = event.get("object", {})
        raise ApiError(int(status.get("code", 500)), str(status.get("reason", "")))
    return event


def _message(body: bytes | bytearray) -> str:
    try:
        return str(json.loads(body).get("message", ""))[:200]
    except (ValueError, AttributeError):
        return ""
