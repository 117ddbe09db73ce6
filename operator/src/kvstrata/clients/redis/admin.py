"""Users, passwords and certificates of managed servers, over short connections.

The operator logs in as its own user, with the first of several passwords that the server accepts, after the server's
certificate was verified. Results are digests and fingerprints. Messages name the endpoint, the command and the cause;
never the command, nor the server's error text, which could repeat it.
"""

from __future__ import annotations

import asyncio
import hashlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from kvstrata.clients.redis.probe import (
    NamedTLSConnection,
    RedisReason,
    authority,
    parse_endpoint,
    reason_of,
    sentence_of,
)
from kvstrata.model.redis.credentials import ServerCredentials
from kvstrata.objects import names, paths
from kvstrata.objects.redis.passwords import admission
from kvstrata.plan.actions import ManagedServer

COMMAND_TIMEOUT_S = 2.0

CERTIFICATE_FILES: Mapping[str, str] = {
    "tls-cert-file": f"{paths.REDIS_TLS}/{names.CERTIFICATE_KEY}",
    "tls-key-file": f"{paths.REDIS_TLS}/{names.PRIVATE_KEY_KEY}",
    "tls-ca-cert-file": f"{paths.REDIS_TLS}/{names.AUTHORITY_KEY}",
}
"""Files of a managed server's Secret, by the setting that names them."""


@dataclass(frozen=True, slots=True)
class Entry:
    """How the operator logs in to managed servers: the passwords are tried in order; `ca_pem` None is plain text."""

    username: str
    passwords: tuple[str, ...] = field(repr=False)
    ca_pem: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Admission:
    """ACL rules of each user, in the order in which they are set. The `marker` user is set last."""

    users: Mapping[str, tuple[str, ...]]
    marker: str


class AdminError(Exception):
    def __init__(self, reason: RedisReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Admin:
    """A connection to one managed server as the operator. Every call raises AdminError on any failure."""

    def __init__(self, endpoint: str, connection: redis.Connection, certificate: str | None) -> None:
        self._endpoint, self._connection = endpoint, connection
        self.certificate = certificate
        """Fingerprint of the server's certificate; None in plain text."""

    async def look(self, name: str, users: Admission) -> ServerCredentials:
        """Return the server's state of these users and its password for the primary."""
        admitted = {user: await self._admits(user) for user in users.users if user != users.marker}
        marked = await self._user(users.marker) is not None
        value = (await self._call("CONFIG GET masterauth", "CONFIG", "GET", "masterauth"))[1]
        return ServerCredentials(
            server=name,
            admitted=admitted,
            marked=marked,
            master=hashlib.sha256(value).hexdigest() if value else "",
            certificate=self.certificate,
        )

    async def set_users(self, users: Admission) -> None:
        """Set these users with exactly these rights and passwords, each atomically. Connections of users that stay
        are not closed. The marker comes last: its presence proves all others."""
        for user, words in users.users.items():
            await self._call(f"ACL SETUSER {user}", "ACL", "SETUSER", user, "reset", *words)

    async def follow(self, username: str, password: str) -> None:
        """Set user and password for the primary, used from the server's next connection on."""
        words = ("masteruser", username, "masterauth", password)
        await self._call("CONFIG SET masterauth", "CONFIG", "SET", *words)

    async def load_certificate(self, files: Mapping[str, str] = CERTIFICATE_FILES) -> None:
        """Have the server reload its certificate files, for new connections. All settings go in one command, because
        certificate and key must match at every moment."""
        words = [word for setting in files.items() for word in setting]
        await self._call("CONFIG SET tls-cert-file", "CONFIG", "SET", *words)

    async def _admits(self, user: str) -> frozenset[str]:
        user_fields = await self._user(user)
        if user_fields is None:
            return frozenset()
        fields = {bytes(name).decode(): value for name, value in zip(user_fields[::2], user_fields[1::2], strict=False)}
        flags = tuple(bytes(flag).decode() for flag in fields.get("flags", ()))
        return admission((*flags, *(f"#{bytes(one).decode()}" for one in fields.get("passwords", ()))))

    async def _user(self, user: str) -> Sequence[Any] | None:
        user_fields: Sequence[Any] | None = await self._call(f"ACL GETUSER {user}", "ACL", "GETUSER", user)
        return user_fields

    async def _call(self, what: str, *words: str) -> Any:
        try:
            async with asyncio.timeout(COMMAND_TIMEOUT_S):
                await self._connection.send_command(*words)
                return await self._connection.read_response()
        except Exception as error:
            reason = reason_of(error)
            why = "the server refuses it" if reason is RedisReason.ERROR else sentence_of(self._endpoint, reason)
            # Without the cause: a traceback would show the server's error text, which may repeat the command.
            raise AdminError(reason, f"{what} at {self._endpoint}: {why}") from None


@asynccontextmanager
async def admin(server: ManagedServer, entry: Entry) -> AsyncIterator[Admin]:
    connection = await _enter(server, entry)
    try:
        yield Admin(server.endpoint, connection, _fingerprint(connection))
    finally:
        await _leave(connection)


async def tend(
    server: ManagedServer,
    entry: Entry,
    users: Admission,
    orders: Sequence[Callable[[Admin], Awaitable[None]]],
) -> ServerCredentials:
    """Carry out orders, then read the state over a new connection: only a new handshake shows the certificate in
    force. Never raises, except for the cancellation of the caller: the result reports the first failure."""
    try:
        if orders:
            async with admin(server, entry) as entered:
                for order in orders:
                    await order(entered)
        async with admin(server, entry) as entered:
            return await entered.look(server.name, users)
    except AdminError as error:
        return ServerCredentials(server.name, reason=str(error.reason), message=str(error))


async def _enter(server: ManagedServer, entry: Entry) -> redis.Connection:
    refused: AdminError | None = None
    for password in entry.passwords:
        try:
            return await _connect(server, entry, password)
        except AdminError as error:
            if error.reason is not RedisReason.WRONG_PASSWORD:
                raise
            refused = error
    raise refused or AdminError(
        RedisReason.PASSWORD_REQUIRED, sentence_of(server.endpoint, RedisReason.PASSWORD_REQUIRED)
    )


async def _connect(server: ManagedServer, entry: Entry, password: str) -> redis.Connection:
    address = parse_endpoint(server.endpoint)
    if address is None:
        raise AdminError(RedisReason.INVALID_ENDPOINT, sentence_of(server.endpoint, RedisReason.INVALID_ENDPOINT))
    settings: dict[str, Any] = {
        "host": address[0],
        "port": address[1],
        "username": entry.username,
        "password": password,
        "protocol": 2,
        "socket_connect_timeout": COMMAND_TIMEOUT_S,
        "socket_timeout": COMMAND_TIMEOUT_S,
        "retry": Retry(NoBackoff(), 0),
        "driver_info": None,
    }
    connection: redis.Connection | None = None
    try:
        if entry.ca_pem is None:
            connection = redis.Connection(**settings)
        else:
            connection = ShownConnection(server_name=server.server_name, **settings, **authority(entry.ca_pem))
        async with asyncio.timeout(COMMAND_TIMEOUT_S):
            await connection.connect()  # type: ignore[no-untyped-call]
    except Exception as error:
        if connection is not None:
            await _leave(connection)
        if connection is None and isinstance(error, ssl.SSLError | ValueError):
            reason = RedisReason.INVALID_CERTIFICATE_AUTHORITY
        else:
            reason = reason_of(error)
        raise AdminError(reason, sentence_of(server.endpoint, reason)) from None
    return connection


class ShownConnection(NamedTLSConnection):
    def shown(self) -> bytes:
        """Return the server's certificate, in DER."""
        secured = self._writer.get_extra_info("ssl_object") if self._writer is not None else None
        return (secured.getpeercert(binary_form=True) if secured is not None else None) or b""


def _fingerprint(connection: redis.Connection) -> str | None:
    if not isinstance(connection, ShownConnection):
        return None
    return hashlib.sha256(connection.shown()).hexdigest()


async def _leave(connection: redis.Connection) -> None:
    try:
        async with asyncio.timeout(1.0):
            await connection.disconnect(nowait=True)
    except Exception:  # noqa: S110  (closing a broken connection has nothing left to report)
        pass
