"""Questions to a Redis server, over one short connection. Failures have reasons; messages never hold the command."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import redis.asyncio as redis
from redis import exceptions
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from kvstrata.api.reasons import TierReason
from kvstrata.clients.http import causes
from kvstrata.contract.policy.tiers import AllowedServers

Answer = TypeVar("Answer")
Argument = str | bytes | int

CONNECT_TIMEOUT_S = 2.0
TOTAL_TIMEOUT_S = 4.0
DEFAULT_PORT = 6379
MAX_ADDRESSES = 3
"""Addresses of a host that are tried, one after the other."""


_SENTENCES: Mapping[TierReason, str] = {
    TierReason.REACHABLE: "{endpoint} answers",
    TierReason.CONNECTION_REFUSED: "nothing listens at {endpoint}: check the port, and whether the server runs",
    TierReason.TIMEOUT: "{endpoint} did not answer in time: check its address, firewalls and NetworkPolicies",
    TierReason.NO_SUCH_HOST: "the host of {endpoint} cannot be resolved: check its spelling, and DNS",
    TierReason.UNREACHABLE: "there is no route to {endpoint}: check its address",
    TierReason.ADDRESS_NOT_ALLOWED: "the installation does not allow an address of {endpoint}: name another server, or "
    "add it to externalRedis of the chart",
    TierReason.PASSWORD_IN_PLAIN_TEXT: "the password would reach {endpoint} without TLS: set `tls`, or allow it by "
    "externalRedis.plainPasswords of the chart",
    TierReason.TLS_FAILED: "{endpoint} does not speak TLS as expected: check the port and `tls`",
    TierReason.CERTIFICATE_REFUSED: "the certificate of {endpoint} is not trusted or names another host: check the "
    "authority in its Secret, and the host",
    TierReason.WRONG_PASSWORD: "{endpoint} refuses the password: check the user, and the Secret of the password",
    TierReason.PASSWORD_REQUIRED: "{endpoint} asks for a password and none is configured",
    TierReason.PASSWORD_UNEXPECTED: "{endpoint} has no password set, but one is configured here",
    TierReason.NO_PERMISSION: "the user may not even run PING at {endpoint}",
    TierReason.LOADING: "{endpoint} is loading its data set",
    TierReason.NOT_REDIS: "the server at {endpoint} is not a Redis server",
    TierReason.NOT_A_CLUSTER: "{endpoint} does not run in cluster mode",
    TierReason.DISCONNECTED: "{endpoint} closed the connection; it may expect TLS",
    TierReason.INVALID_ENDPOINT: "an endpoint has the form host:port",
    TierReason.INVALID_CERTIFICATE_AUTHORITY: "the certificate authority for {endpoint} is not PEM",
    TierReason.ERROR: "{endpoint} answered with an error",
}


OF_REDIS = (TierReason.WRONG_PASSWORD, TierReason.PASSWORD_REQUIRED, TierReason.NO_PERMISSION, TierReason.LOADING)
"""Failures that only Redis reports."""


@dataclass(frozen=True, slots=True)
class Access:
    """Uses TLS when `ca_pem` is given. `allowed` limits external servers, None any."""

    password: str | None = field(repr=False)
    ca_pem: bytes | None = field(repr=False)
    username: str | None = None
    allowed: AllowedServers | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a server gave no answer, or an answer that proves nothing. `reason` is stable, `message` names the server."""

    reason: str
    message: str


async def ask(
    endpoint: str,
    access: Access,
    question: Callable[[redis.Redis], Awaitable[Answer]],
    *,
    server_name: str | None = None,
    timeout_s: float = TOTAL_TIMEOUT_S,
) -> Answer | Failure:
    """Return the answer to `question` over a new connection to `endpoint`, or why there is none. A certificate must
    name `server_name`, by default the endpoint's host. Never raises, except for a cancellation."""
    address = parse_endpoint(endpoint)
    if address is None:
        return _failure(endpoint, TierReason.INVALID_ENDPOINT)
    places, name = [address], server_name or address[0]
    if access.allowed is not None:
        if access.password is not None and access.ca_pem is None and not access.allowed.plain_passwords:
            return _failure(endpoint, TierReason.PASSWORD_IN_PLAIN_TEXT)
        try:
            async with asyncio.timeout(timeout_s):
                found = await asyncio.get_running_loop().getaddrinfo(*address, type=socket.SOCK_STREAM)
            ips = list(dict.fromkeys(str(place[0]) for *_, place in found))
            places = [(ip, address[1]) for ip in ips] if access.allowed.allows(address[0], ips, address[1]) else []
        except (OSError, TimeoutError, ValueError) as error:
            return _failure(endpoint, reason_of(error))
    failed = _failure(endpoint, TierReason.ADDRESS_NOT_ALLOWED)
    for place in places[:MAX_ADDRESSES]:
        try:
            connection_class, settings = _settings(place, access, name, timeout_s)
        except (ssl.SSLError, ValueError):
            return _failure(endpoint, TierReason.INVALID_CERTIFICATE_AUTHORITY)
        pool = redis.ConnectionPool(connection_class, max_connections=1, decode_responses=True, **settings)
        client = redis.Redis(connection_pool=pool)
        try:
            async with asyncio.timeout(timeout_s):
                return await question(client)
        except Exception as error:
            reason = reason_of(error)
            # Redis without TLS takes a handshake for the start of a command and waits for the rest.
            hint = "; it may not speak TLS" if access.ca_pem is not None and reason is TierReason.TIMEOUT else ""
            if failed.reason not in (*OF_REDIS, TierReason.CERTIFICATE_REFUSED):  # else they have the remedy
                failed = _failure(endpoint, reason, hint)
        finally:
            with suppress(Exception):
                async with asyncio.timeout(1.0):
                    await client.aclose()
                    await pool.disconnect()
    return failed


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


def endpoint_of(host: str, port: int | str) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class NamedTLSConnection(redis.SSLConnection):
    """A TLS connection whose certificate must name `server_name`, regardless of the dialled address."""

    def __init__(self, *, server_name: str, **settings: Any) -> None:
        super().__init__(**settings)
        self._server_name = server_name

    def _connection_arguments(self) -> Mapping[str, Any]:
        return {**super()._connection_arguments(), "server_hostname": self._server_name}

    def shown(self) -> bytes:
        """Return the server's certificate, in DER."""
        secured = self._writer.get_extra_info("ssl_object") if self._writer is not None else None
        return (secured.getpeercert(binary_form=True) if secured is not None else None) or b""


def dial(
    address: tuple[str, int], access: Access, server_name: str | None, timeout_s: float, *, decode: bool = False
) -> redis.Connection:
    """Return an unopened connection to a host and port. A certificate must name `server_name`, by default the host.
    Raises ssl.SSLError or ValueError if the certificate authority is not PEM."""
    connection_class, settings = _settings(address, access, server_name, timeout_s)
    return connection_class(decode_responses=decode, driver_info=None, **settings)


def _settings(
    address: tuple[str, int], access: Access, server_name: str | None, timeout_s: float
) -> tuple[type[redis.Connection], dict[str, Any]]:
    host, port = address
    settings: dict[str, Any] = {
        "host": host,
        "port": port,
        "username": access.username,
        "password": access.password,
        "protocol": 2,
        "encoding_errors": "replace",
        "socket_connect_timeout": min(CONNECT_TIMEOUT_S, timeout_s),
        "socket_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 0),
    }
    if access.ca_pem is None:
        return redis.Connection, settings
    text = access.ca_pem.decode("ascii")
    ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=text)
    return NamedTLSConnection, settings | {"server_name": server_name or host, "ssl_ca_data": text}


async def answers(connection: redis.Connection, commands: Sequence[Sequence[Argument]], **reading: Any) -> list[Any]:
    """Send commands in one pipeline; return the answers, errors among them. Raises connection errors."""
    if not connection.is_connected:
        raise exceptions.ConnectionError("it closed the connection")
    await connection.send_packed_command(connection.pack_commands(commands), check_health=False)
    found: list[Any] = []
    for _ in commands:
        try:
            found.append(await connection.read_response(**reading))
        except exceptions.ResponseError as error:
            found.append(error)
    return found


async def pipelined(client: redis.Redis, commands: Iterable[Sequence[Any]], *, errors: bool = True) -> list[Any]:
    """Send commands in one pipeline and return the answers. Raises the first error unless `errors`."""
    async with client.pipeline(transaction=False) as pipeline:
        for words in commands:
            pipeline.execute_command(*words)
        found: list[Any] = await pipeline.execute(raise_on_error=not errors)
    return found


async def close(connection: redis.Connection) -> None:
    with suppress(Exception):
        await connection.disconnect(nowait=True)


def number(info: Mapping[str, Any], name: str) -> int:
    """Return a figure of INFO, 0 if it is missing."""
    value = info.get(name, 0)
    return int(value) if isinstance(value, int | float) else 0


def _failure(endpoint: str, reason: TierReason, hint: str = "") -> Failure:
    return Failure(reason, sentence_of(endpoint, reason) + hint)


def sentence_of(endpoint: str, reason: TierReason) -> str:
    return _SENTENCES[reason].format(endpoint=endpoint)


def reason_of(error: BaseException) -> TierReason:
    """Return the reason of the innermost specific cause; redis-py wraps system errors."""
    named = TierReason.ERROR
    for cause in causes(error):
        found = next((reason for kind, reason in _REASONS if isinstance(cause, kind)), named)
        named = found or _reason_in(str(cause))
        if named not in (TierReason.ERROR, TierReason.DISCONNECTED):
            break
    return named


_REASONS: tuple[tuple[type[BaseException], TierReason | None], ...] = (
    (ssl.SSLCertVerificationError, TierReason.CERTIFICATE_REFUSED),
    (ssl.SSLError, TierReason.TLS_FAILED),
    (socket.gaierror, TierReason.NO_SUCH_HOST),
    (ConnectionRefusedError, TierReason.CONNECTION_REFUSED),
    (ConnectionError, TierReason.DISCONNECTED),
    (exceptions.TimeoutError, TierReason.TIMEOUT),
    (TimeoutError, TierReason.TIMEOUT),
    (exceptions.BusyLoadingError, TierReason.LOADING),
    (exceptions.NoPermissionError, TierReason.NO_PERMISSION),
    (exceptions.InvalidResponse, TierReason.NOT_REDIS),
    (OSError, TierReason.UNREACHABLE),
    (exceptions.AuthenticationError, None),
    (exceptions.ResponseError, None),
    (exceptions.ConnectionError, TierReason.DISCONNECTED),
)
"""None: the error's text has the reason."""


def _reason_in(answer: str) -> TierReason:
    if "NOAUTH" in answer or "Authentication required" in answer:
        return TierReason.PASSWORD_REQUIRED
    if "WRONGPASS" in answer or "invalid password" in answer or "invalid username-password" in answer:
        return TierReason.WRONG_PASSWORD
    if "without any password" in answer:
        return TierReason.PASSWORD_UNEXPECTED
    return TierReason.NOT_A_CLUSTER if "cluster support disabled" in answer else TierReason.ERROR
