"""A token in a file, for a key service in tests that takes the root token."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from kvstrata.clients.transit import KmsError, TransitClient
from kvstrata.clients.transit_tokens import read_token

READ_EVERY_S = 60.0


class OpenedClient(TransitClient):
    """A client that is closed at the end of its context."""

    async def __aenter__(self) -> TransitClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class TokenFile:
    """A token in a file, read again every minute and when it is refused. `monotonic` returns seconds."""

    def __init__(self, path: Path, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._path, self._monotonic = path, monotonic
        self._token, self._read_at = "", float("-inf")

    async def token(self, client: TransitClient) -> str:
        """Return the token. Raises KmsError if the file holds none."""
        now = self._monotonic()
        if not self._token or now - self._read_at >= READ_EVERY_S:
            self._token, self._read_at = read_token(self._path), now
        return self._token

    def refused(self, token: str) -> bool:
        """Forget this token; return whether the file has another by now."""
        if self._token == token:
            self._token = ""
        try:
            return read_token(self._path) != token
        except KmsError:
            return False


async def nothing() -> str:
    """Return that nothing speaks against a new key."""
    return ""
