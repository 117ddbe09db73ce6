"""Questions to a Redis server, over one short connection. Failures have reasons; messages never hold the command."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

import redis.asyncio as redis
from redis import exceptions
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

Answer = TypeVar("Answer")

CONNECT_TIMEOUT_S = 2.0
TOTAL_TIMEOUT_S = 4.0
DEFAULT_PORT = 6379


class RedisReason(StrEnum):
    """How a probe ended; a condition's reason."""

    REACHABLE = "Reachable"
    CONNECTION_REFUSED = "ConnectionRefused"
    TIMEOUT = "Timeout"
    NO_SUCH_HOST = "NoSuchHost"
    UNREACHABLE = "Unreachable"
    TLS_FAILED = "TLSFailed"
    CERTIFICATE_REFUSED = "CertificateRefused"
    WRONG_PASSWORD = "WrongPassword"  # noqa: S105  (a reason's name)
    PASSWORD_REQUIRED = "PasswordRequired"  # noqa: S105  (a reason's name)
    PASSWORD_UNEXPECTED = "PasswordUnexpected"  # noqa: S105  (a reason's name)
    NO_PERMISSION = "NoPermission"
    LOADING = "Loading"
    NOT_REDIS = "NotRedis"
    NOT_A_CLUSTER = "NotACluster"
    DISCONNECTED = "Disconnected"
    INVALID_ENDPOINT = "InvalidEndpoint"
    INVALID_CERTIFICATE_AUTHORITY = "InvalidCertificateAuthority"
    ERROR = "Error"


_SENTENCES: Mapping[RedisReason, str] = {
    RedisReason.REACHABLE: "{endpoint} answers",
    RedisReason.CONNECTION_REFUSED: "nothing listens at {endpoint}",
    RedisReason.TIMEOUT: "{endpoint} did not answer in time",
    RedisReason.NO_SUCH_HOST: "the host of {endpoint} cannot be resolved",
    RedisReason.UNREACHABLE: "there is no route to {endpoint}",
    RedisReason.TLS_FAILED: "{endpoint} does not speak TLS as expected",
    RedisReason.CERTIFICATE_REFUSED: "the certificate of {endpoint} is not trusted or names another host",
    RedisReason.WRONG_PASSWORD: "{endpoint} refuses the password",
    RedisReason.PASSWORD_REQUIRED: "{endpoint} asks for a password and none is configured",
    RedisReason.PASSWORD_UNEXPECTED: "{endpoint} has no password set, but one is configured here",
    RedisReason.NO_PERMISSION: "the user may not even run PING at {endpoint}",
    RedisReason.LOADING: "{endpoint} is loading its data set",
    RedisReason.NOT_REDIS: "the server at {endpoint} is not a Redis server",
    RedisReason.NOT_A_CLUSTER: "{endpoint} does not run in cluster mode",
    RedisReason.DISCONNECTED: "{endpoint} closed the connection; it may expect TLS",
    RedisReason.INVALID_ENDPOINT: "an endpoint has the form host:port",
    RedisReason.INVALID_CERTIFICATE_AUTHORITY: "the certificate authority for {endpoint} is not PEM",
    RedisReason.ERROR: "{endpoint} answered with an error",
}


@dataclass(frozen=True, slots=True)
class Access:
    """Uses TLS when `ca_pem` is given."""

    password: str | None = field(repr=False)
    ca_pem: bytes | None = field(repr=False)
    username: str | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    reason: RedisReason
    message: str


async def ask(
    endpoint: str,
    access: Access,
    question: Callable[[redis.Redis], Awaitable[Answer]],
    *,
    server_name: str | None = None,
    timeout_s: float = TOTAL_TIMEOUT_S,
) -> Answer | Failure:
    """Return the answer to `question` over a new connection to `endpoint` (`host`, `host:port`, `[v6]:port`), or why
    there is none. A certificate must name `server_name`, by default the endpoint's host. Never raises, except for the
    cancellation of the caller."""
    address = parse_endpoint(endpoint)
    if address is None:
        return _failure(endpoint, RedisReason.INVALID_ENDPOINT)
    settings: dict[str, Any] = {
        "host": address[0],
        "port": address[1],
        "username": access.username,
        "password": access.password,
        "protocol": 2,
        "decode_responses": True,
        "encoding_errors": "replace",
        "socket_connect_timeout": min(CONNECT_TIMEOUT_S, timeout_s),
        "socket_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 0),
        "max_connections": 1,
    }
    if access.ca_pem is not None:
        try:
            settings |= {"connection_class": NamedTLSConnection, "server_name": server_name or address[0]}
            settings |= authority(access.ca_pem)
        except (ssl.SSLError, ValueError):
            return _failure(endpoint, RedisReason.INVALID_CERTIFICATE_AUTHORITY)
    pool = redis.ConnectionPool(**settings)
    client = redis.Redis(connection_pool=pool)
    try:
        async with asyncio.timeout(timeout_s):
            return await question(client)
    except Exception as error:
        reason = reason_of(error)
        # Redis without TLS takes a handshake for the start of a command and waits for the rest.
        hint = "; it may not speak TLS" if access.ca_pem is not None and reason is RedisReason.TIMEOUT else ""
        return _failure(endpoint, reason, hint)
    finally:
        await _close(client, pool)


def parse_endpoint(endpoint: str) -> tuple[str, int] | None:
    """Parse `host`, `host:port` or `[v6]:port`; None if malformed."""
    if endpoint.startswith("["):
        host, bracket, rest = endpoint[1:].partition("]")
        port_text = rest[1:] if rest.startswith(":") else ""
        if not bracket or (rest and not port_text):
            return None
    else:
        host, colon, port_text = endpoint.partition(":")
        if colon and not port_text:
            return None
    if not host or any(character.isspace() or character in "/@" for character in host):
        return None
    if not port_text:
        return host, DEFAULT_PORT
    if not (port_text.isascii() and port_text.isdigit()) or not 0 < int(port_text) < 65536:
        return None
    return host, int(port_text)


class NamedTLSConnection(redis.SSLConnection):
    """A TLS connection whose certificate must name `server_name`, regardless of the dialled address."""

    def __init__(self, *, server_name: str, **settings: Any) -> None:
        super().__init__(**settings)
        self._server_name = server_name

    def _connection_arguments(self) -> Mapping[str, Any]:
        return {**super()._connection_arguments(), "server_hostname": self._server_name}


def authority(ca_pem: bytes | None) -> dict[str, Any]:
    """Return the connection settings that trust `ca_pem`. Raises ssl.SSLError or ValueError if it is not PEM."""
    if ca_pem is None:
        return {}
    text = ca_pem.decode("ascii")
    ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=text)
    return {"ssl_ca_data": text}


def number(info: Mapping[str, Any], name: str) -> int:
    """Return a figure of INFO, 0 if it is missing."""
    value = info.get(name, 0)
    return int(value) if isinstance(value, int | float) else 0


def _failure(endpoint: str, reason: RedisReason, hint: str = "") -> Failure:
    return Failure(reason, sentence_of(endpoint, reason) + hint)


def sentence_of(endpoint: str, reason: RedisReason) -> str:
    return _SENTENCES[reason].format(endpoint=endpoint)


def reason_of(error: BaseException) -> RedisReason:
    """Return the reason of the innermost specific cause; redis-py wraps system errors."""
    chain: BaseException | None = error
    named = RedisReason.ERROR
    while chain is not None:
        named = _own_reason(chain) or named
        if named is not RedisReason.ERROR and named is not RedisReason.DISCONNECTED:
            return named
        chain = chain.__cause__ or chain.__context__
    return named


def _own_reason(error: BaseException) -> RedisReason | None:
    for kind, reason in _REASONS:
        if isinstance(error, kind):
            return reason
    if isinstance(error, exceptions.AuthenticationError | exceptions.ResponseError):
        return _answer_reason(str(error))
    if isinstance(error, exceptions.ConnectionError):
        return RedisReason.DISCONNECTED
    return None


_REASONS: tuple[tuple[type[BaseException], RedisReason], ...] = (
    (ssl.SSLCertVerificationError, RedisReason.CERTIFICATE_REFUSED),
    (ssl.SSLError, RedisReason.TLS_FAILED),
    (socket.gaierror, RedisReason.NO_SUCH_HOST),
    (ConnectionRefusedError, RedisReason.CONNECTION_REFUSED),
    (ConnectionError, RedisReason.DISCONNECTED),
    (exceptions.TimeoutError, RedisReason.TIMEOUT),
    (TimeoutError, RedisReason.TIMEOUT),
    (exceptions.BusyLoadingError, RedisReason.LOADING),
    (exceptions.NoPermissionError, RedisReason.NO_PERMISSION),
    (exceptions.InvalidResponse, RedisReason.NOT_REDIS),
    (OSError, RedisReason.UNREACHABLE),
)


def _answer_reason(answer: str) -> RedisReason:
    if "NOAUTH" in answer or "Authentication required" in answer:
        return RedisReason.PASSWORD_REQUIRED
    if "WRONGPASS" in answer or "invalid password" in answer or "invalid username-password" in answer:
        return RedisReason.WRONG_PASSWORD
    if "without any password" in answer:
        return RedisReason.PASSWORD_UNEXPECTED
    if "cluster support disabled" in answer:
        return RedisReason.NOT_A_CLUSTER
    return RedisReason.ERROR


async def _close(client: redis.Redis, pool: redis.ConnectionPool) -> None:
    try:
        async with asyncio.timeout(1.0):
            await client.aclose()
            await pool.disconnect()
    except Exception:  # noqa: S110  (closing a broken connection has nothing left to report)
        pass
