"""Shared by the clients of gates and of key management services."""

from __future__ import annotations

import ssl
from collections.abc import Iterator

import aiohttp

CONNECT_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=3.0)
"""The rest is bounded by asyncio.timeout; see `kube.UNBOUNDED`."""

_FAILURES = (
    (TimeoutError, "Timeout"),
    ((aiohttp.ClientSSLError, ssl.SSLError), "TLSFailed"),
    (aiohttp.ClientConnectorError, "Unreachable"),
    ((aiohttp.ClientOSError, aiohttp.ServerDisconnectedError, aiohttp.ClientPayloadError), "Disconnected"),
    (aiohttp.ClientResponseError, "Malformed"),
)


def failure_of(error: BaseException) -> str:
    """Return why there was no answer, as `GateFailure` and `KmsFailure` name it."""
    return next((name for kinds, name in _FAILURES if isinstance(error, kinds)), "Unreachable")


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and the errors that led to it."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or found.__context__


async def read_capped(response: aiohttp.ClientResponse, max_bytes: int) -> bytes | None:
    """Return an answer's body; None, and the connection closed, if it is larger."""
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > max_bytes:
            response.close()
            return None
    return bytes(body)
