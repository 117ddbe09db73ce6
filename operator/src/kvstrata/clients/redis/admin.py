"""Users, passwords and certificates of managed servers, over short connections.

The operator logs in as its own user, with the first of several passwords that the server accepts, after the server's
certificate was verified. Results are digests. Messages never hold the command's arguments, nor the server's error text,
which could repeat them.
"""

from __future__ import annotations

import asyncio
import hashlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import redis.asyncio as redis

from kvstrata.api.reasons import TierReason
from kvstrata.clients.redis import probe
from kvstrata.clients.redis.probe import Access, reason_of, sentence_of
from kvstrata.model.redis.credentials import ServerCredentials
from kvstrata.objects import names, paths
from kvstrata.objects.redis.passwords import admission
from kvstrata.objects.redis.users import MARKER_PREFIX
from kvstrata.plan.actions import ManagedServer

COMMAND_TIMEOUT_S = 2.0

CERTIFICATE_FILES: Mapping[str, str] = {
    "tls-cert-file": f"{paths.REDIS_TLS}/{names.CERTIFICATE_KEY}",
    "tls-key-file": f"{paths.REDIS_TLS}/{names.PRIVATE_KEY_KEY}",
    "tls-ca-cert-file": f"{paths.REDIS_TLS}/{names.AUTHORITY_KEY}",
}
"""Files of a managed server's Secret, by the setting that names them."""


Users = Mapping[str, tuple[str, ...]]
"""ACL rules of each user, in the order in which they are set. The user that marks the rights comes last."""


class AdminError(Exception):
    def __init__(self, reason: TierReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Admin:
    """A connection to one managed server as the operator. Every call raises AdminError on any failure."""

    def __init__(self, endpoint: str, connection: redis.Connection, certificate: str | None) -> None:
        self._endpoint, self._connection = endpoint, connection
        self.certificate = certificate
        """Fingerprint of the server's certificate; None in plain text."""

    async def look(self, name: str, users: Users) -> ServerCredentials:
        marker = next((user for user in users if user.startswith(MARKER_PREFIX)), "")
        admitted = {user: await self._admits(user) for user in users if user != marker}
        marked = await self._user(marker) is not None
        value = (await self._call("CONFIG GET masterauth", "CONFIG", "GET", "masterauth"))[1]
        return ServerCredentials(
            server=name,
            admitted=admitted,
            marked=marked,
            master=hashlib.sha256(value).hexdigest() if value else "",
            certificate=self.certificate,
        )

    async def set_users(self, users: Users) -> None:
        """Set these users with exactly these rights and passwords, each atomically. Connections of users that stay
        are not closed. The marker comes last: its presence proves all others."""
        for user, words in users.items():
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

    async def _user(self, user: str) -> Any:
        return await self._call(f"ACL GETUSER {user}", "ACL", "GETUSER", user)

    async def _call(self, what: str, *words: str) -> Any:
        try:
            async with asyncio.timeout(COMMAND_TIMEOUT_S):
                await self._connection.send_command(*words)
                return await self._connection.read_response()
        except Exception as error:
            reason = reason_of(error)
            why = "the server refuses it" if reason is TierReason.ERROR else sentence_of(self._endpoint, reason)
            # Without the cause: a traceback would show the server's error text, which may repeat the command.
            raise AdminError(reason, f"{what} at {self._endpoint}: {why}") from None


@asynccontextmanager
async def admin(server: ManagedServer, accesses: Sequence[Access]) -> AsyncIterator[Admin]:
    connection = await _enter(server, accesses)
    try:
        shown = connection.shown() if isinstance(connection, probe.NamedTLSConnection) else None
        yield Admin(server.endpoint, connection, None if shown is None else hashlib.sha256(shown).hexdigest())
    finally:
        await probe.close(connection)


async def tend(
    server: ManagedServer,
    accesses: Sequence[Access],
    users: Users,
    orders: Sequence[Callable[[Admin], Awaitable[None]]],
) -> ServerCredentials:
    """Carry out orders, then read the state over a new connection: only a new handshake shows the certificate in
    force. `accesses` are tried in order. Never raises, except for a cancellation: the result reports the first
    failure."""
    try:
        if orders:
            async with admin(server, accesses) as entered:
                for order in orders:
                    await order(entered)
        async with admin(server, accesses) as entered:
            return await entered.look(server.name, users)
    except AdminError as error:
        return ServerCredentials(server.name, reason=str(error.reason), message=str(error))


async def _enter(server: ManagedServer, accesses: Sequence[Access]) -> redis.Connection:
    refused: AdminError | None = None
    for access in accesses:
        try:
            return await _connect(server, access)
        except AdminError as error:
            if error.reason is not TierReason.WRONG_PASSWORD:
                raise
            refused = error
    raise refused or AdminError(
        TierReason.PASSWORD_REQUIRED, sentence_of(server.endpoint, TierReason.PASSWORD_REQUIRED)
    )


async def _connect(server: ManagedServer, access: Access) -> redis.Connection:
    address = probe.parse_endpoint(server.endpoint)
    if address is None:
        raise AdminError(TierReason.INVALID_ENDPOINT, sentence_of(server.endpoint, TierReason.INVALID_ENDPOINT))
    try:
        connection = probe.dial(address, access, server.server_name, COMMAND_TIMEOUT_S)
    except (ssl.SSLError, ValueError):
        reason = TierReason.INVALID_CERTIFICATE_AUTHORITY
        raise AdminError(reason, sentence_of(server.endpoint, reason)) from None
    try:
        async with asyncio.timeout(COMMAND_TIMEOUT_S):
            await connection.connect()  # type: ignore[no-untyped-call]
    except Exception as error:
        await probe.close(connection)
        reason = reason_of(error)
        raise AdminError(reason, sentence_of(server.endpoint, reason)) from None
    return connection
