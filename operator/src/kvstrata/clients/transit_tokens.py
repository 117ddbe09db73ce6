"""Tokens for a key management service, in exchange for the service account's token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from kvstrata.clients.transit import KmsError, KmsFailure, TransitClient, checked_path

RENEWED_AT = 0.6
"""The share of its lease after which a token is replaced."""

MAX_TOKEN_BYTES = 64 * 1024


class KubernetesLogin:
    """Tokens from the service's authentication method `kubernetes`, mounted at `method`.

    `role` is the service's name for the operator's rights. `account_token` is the file that the kubelet renews; it
    needs the service's audience if the role demands one. Raises ValueError for an invalid method.
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
        """Of the last login; None after a success."""

    async def token(self, client: TransitClient) -> str:
        """Return a token, after a login if the last one is about to expire. Raises KmsError."""
        before = self._failure
        async with self._login:
            if self._token and self._monotonic() < self._until:
                return self._token
            failure = self._failure
            if failure is not None and failure is not before:
                raise KmsError(failure.reason, str(failure))
            try:
                await self._log_in(client)
            except KmsError as error:
                self._failure = error
                raise
            self._failure = None
            return self._token

    def refused(self, token: str) -> bool:
        """Forget this token, unless it was replaced: after a restart or revocation, a login may bring another."""
        if self._token == token:
            self._token = ""
        return True

    async def _log_in(self, client: TransitClient) -> None:
        body = {"role": self._role, "jwt": read_token(self._account_token)}
        asked_at = self._monotonic()
        raw = await client.call("POST", f"auth/{self._method}/login", body)
        try:
            token, lease_s = raw["auth"]["client_token"], raw["auth"]["lease_duration"]
            if not isinstance(token, str) or not token or not token.isprintable() or type(lease_s) is not int:
                raise TypeError
        except (KeyError, TypeError):
            message = "the key management service answered a login without a token"
            raise KmsError(KmsFailure.MALFORMED, message) from None
        # A lease of 0 does not expire.
        self._token, self._until = token, asked_at + (lease_s * RENEWED_AT if lease_s else float("inf"))


def read_token(path: Path) -> str:
    """Return the token in a file. Raises KmsError if it holds none."""
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
