"""Tokens for a key management service, in exchange for the service account's token."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

from kvstrata.clients.transit import KmsError, KmsFailure, TransitClient, checked_path

log = logging.getLogger(__name__)

RENEWED_AT = 0.6
"""The share of its lease after which a token is replaced."""

RETRY_S = 10.0
"""Pause after a renewal that failed, while the present token is valid."""

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
        self._token, self._renew_at, self._ends_at = "", float("-inf"), float("-inf")
        self._login = asyncio.Lock()
        self._failure: KmsError | None = None
        """Of the last login; None after a success."""

    async def token(self, client: TransitClient) -> str:
        """Return a token, after a login if the last one is about to expire. A token that cannot be renewed is used to
        its end. Raises KmsError, from then on with `TOKEN_NOT_RENEWED`."""
        before = self._failure
        async with self._login:
            now = self._monotonic()
            if self._token and now < self._renew_at:
                return self._token
            failure = self._failure
            if failure is not None and failure is not before:
                raise KmsError(failure.reason, str(failure))
            try:
                await self._log_in(client)
            except KmsError as error:
                self._failure = error
                if self._token and now < self._ends_at:
                    self._renew_at = min(self._ends_at, now + RETRY_S)
                    about = {"reason": str(error.reason), "error": str(error), "valid_s": int(self._ends_at - now)}
                    log.warning("the token for the key management service was not renewed", extra=about)
                    return self._token
                if self._token:
                    message = f"the token has ended, and the login that renews it fails ({error.reason}): {error}"
                    self._failure = KmsError(KmsFailure.TOKEN_NOT_RENEWED, message)
                    raise self._failure from None
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
        lease = lease_s or float("inf")
        self._token, self._renew_at, self._ends_at = token, asked_at + lease * RENEWED_AT, asked_at + lease


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
