"""How the operator proves to a key management service who it is: a token in a file, or its Kubernetes service account.

A file is for services that an agent or a Secret brings tokens for. With Kubernetes authentication the service asks the
API server whose the service account's token is, and gives one of its own for some time; nothing has to be stored.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from kvstrata.clients.transit import KmsError, KmsFailure, TransitClient, checked_path

READ_EVERY_S = 60.0
"""How long a token is used before its file is read again; who renews it writes it there."""

RENEWED_AT = 0.6
"""After which part of its lease a token is replaced."""

MAX_TOKEN_BYTES = 64 * 1024


class TokenFile:
    """A token in a file, read again every minute and when it is refused. `monotonic` returns seconds."""

    def __init__(self, path: Path, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._path, self._monotonic = path, monotonic
        self._token, self._read_at = "", float("-inf")

    async def token(self, client: TransitClient) -> str:  # noqa: ARG002  (as the protocol has it)
        """Return the token. Raises KmsError if the file holds none."""
        now = self._monotonic()
        if not self._token or now - self._read_at >= READ_EVERY_S:
            self._token, self._read_at = _read(self._path), now
        return self._token

    def refused(self, token: str) -> bool:
        """Forget this token; return whether the file has another by now."""
        if self._token == token:
            self._token = ""
        try:
            return _read(self._path) != token
        except KmsError:
            return False


class KubernetesLogin:
    """A token that the service gives for the service account's, by its authentication method `kubernetes`.

    `role` is the service's name for what the operator may do, `method` where the method is mounted. `account_token` is
    the file that the kubelet renews; give it the service's audience where the role demands one. Raises ValueError for
    a method that is no path. Whoever asks while a login is under way has what comes of it.
    """

    def __init__(
        self,
        role: str,
        account_token: Path,
        *,
        method: str = "kubernetes",
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._role, self._account_token, self._monotonic = role, account_token, monotonic
        self._method = checked_path(method)
        self._token, self._until = "", float("-inf")
        self._login = asyncio.Lock()
        self._failure: KmsError | None = None
        """What the last login came to, if it came to nothing."""

    async def token(self, client: TransitClient) -> str:
        """Return a token, after a login if there is none that is good for long enough. Raises KmsError."""
        before = self._failure
        if self._is_good():
            return self._token
        async with self._login:
            if self._is_good():
                return self._token
            failure = self._failure
            if failure is not None and failure is not before:
                raise KmsError(failure.reason, str(failure), failure.status)
            try:
                await self._log_in(client)
            except KmsError as error:
                self._failure = error
                raise
            self._failure = None
            return self._token

    def refused(self, token: str) -> bool:
        """Forget this token: the service may have been restarted or have revoked it, so a login may bring another.

        Who comes later with a token that was replaced already forgets nothing.
        """
        if self._token == token:
            self._token = ""
        return True

    def _is_good(self) -> bool:
        return bool(self._token) and self._monotonic() < self._until

    async def _log_in(self, client: TransitClient) -> None:
        body = {"role": self._role, "jwt": _read(self._account_token)}
        asked_at = self._monotonic()
        raw = await client.call("POST", f"auth/{self._method}/login", body)
        try:
            token, lease_s = raw["auth"]["client_token"], raw["auth"]["lease_duration"]
            if not isinstance(token, str) or not token or not token.isprintable() or type(lease_s) is not int:
                raise TypeError
        except (KeyError, TypeError):
            raise KmsError(
                KmsFailure.MALFORMED, "the key management service answered a login without a token"
            ) from None
        # A lease of 0 does not end.
        self._token, self._until = token, asked_at + (lease_s * RENEWED_AT if lease_s else float("inf"))


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            token = file.read(MAX_TOKEN_BYTES + 1).decode("ascii").strip()
    except OSError as error:
        raise KmsError(KmsFailure.NO_TOKEN, f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        token = ""
    if not token or len(token) > MAX_TOKEN_BYTES or not token.isprintable():
        raise KmsError(KmsFailure.NO_TOKEN, f"{path} holds no token")
    return token
