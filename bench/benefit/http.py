"""The client of the benchmark: completions as streams, and small questions, each on a connection of its own."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e.cluster.progress import ClusterError

TIMEOUT_S = 600.0
COMPLETIONS = "/v1/completions"


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens: a port of this machine, with TLS or without, or a socket."""

    port: int = 0
    socket: Path | None = None
    context: ssl.SSLContext | None = None
    server_name: str | None = None

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return a new connection. Raises OSError."""
        if self.socket is not None:
            return await asyncio.open_unix_connection(str(self.socket), limit=1 << 24)
        return await asyncio.open_connection(
            "127.0.0.1", self.port, ssl=self.context, server_hostname=self.server_name, limit=1 << 24
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """A completion: seconds from the first byte sent to the first token and to the end, and the engine's counts."""

    first_s: float
    whole_s: float
    prompt_tokens: int
    cached_tokens: int


async def complete(
    address: Address, body: dict[str, Any], key: str | None, on_first: Callable[[], None] = lambda: None
) -> Answer:
    """Send a completion and read its stream; `on_first` is called at its first token.

    The time includes the connection, because a Service chooses the pod by it. Raises ClusterError for another answer.
    """
    sent = body | {"stream": True, "stream_options": {"include_usage": True}}
    begun_s = time.perf_counter()
    first_s: float | None = None
    usage: dict[str, Any] = {}
    async with asyncio.timeout(TIMEOUT_S):
        reader, writer = await address.connect()
        try:
            writer.write(_post(COMPLETIONS, json.dumps(sent).encode(), key))
            head = await reader.readuntil(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 200"):
                raise ClusterError(f"a completion was answered {head.decode()} {(await reader.read(2000)).decode()}")
            async for line in _lines(reader, head):
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise ClusterError(f"a completion failed: {event['error']}")
                if first_s is None and event.get("choices"):
                    first_s = time.perf_counter() - begun_s
                    on_first()
                usage = event.get("usage") or usage
        finally:
            writer.close()
    if first_s is None or not usage:
        raise ClusterError("a completion's stream has no token, or no usage")
    details = usage.get("prompt_tokens_details") or {}
    return Answer(
        first_s, time.perf_counter() - begun_s, usage["prompt_tokens"], int(details.get("cached_tokens") or 0)
    )


async def ask(address: Address, path: str, body: bytes | None = None, timeout_s: float = TIMEOUT_S) -> bytes:
    """Return the body of an answer to a GET, or to a POST of JSON. Raises OSError, TimeoutError or ClusterError."""
    get = f"GET {path} HTTP/1.1\r\nHost: pod\r\nConnection: close\r\n\r\n".encode()
    async with asyncio.timeout(timeout_s):
        reader, writer = await address.connect()
        try:
            writer.write(get if body is None else _post(path, body, None))
            head = await reader.readuntil(b"\r\n\r\n")
            data = b"".join([piece async for piece in _pieces(reader, head)])
        except asyncio.IncompleteReadError as error:
            raise ConnectionError(f"{path}: the connection was closed") from error
        finally:
            writer.close()
    if not head.startswith(b"HTTP/1.1 200"):
        raise ClusterError(f"{path} was answered {head[:40].decode()}: {data[:1000].decode(errors='replace')}")
    return data


async def _pieces(reader: asyncio.StreamReader, head: bytes) -> AsyncIterator[bytes]:
    """Yield the body that follows a head, chunk by chunk if it comes in chunks."""
    fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if line)
    if b"content-length" in fields:
        yield await reader.readexactly(int(fields[b"content-length"]))
    elif fields.get(b"transfer-encoding") == b"chunked":
        while size := int(await reader.readline(), 16):
            yield (await reader.readexactly(size + 2))[:-2]
    else:
        yield await reader.read()


async def _lines(reader: asyncio.StreamReader, head: bytes) -> AsyncIterator[bytes]:
    """Yield the body's lines as soon as each is whole."""
    rest = b""
    async for piece in _pieces(reader, head):
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line


def _post(path: str, body: bytes, key: str | None) -> bytes:
    authorization = f"Authorization: Bearer {key}\r\n" if key else ""
    return (
        f"POST {path} HTTP/1.1\r\nHost: pod\r\n{authorization}Content-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode() + body
