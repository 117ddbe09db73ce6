"""The client of a key management service with the Transit API: OpenBao, or HashiCorp Vault.

A wrapping key never leaves the service: it creates, wraps and unwraps data keys, and deletes its own keys. Requests use
HTTPS with a pinned authority and follow no redirect, which could leak the token. No message quotes a token, a key, or
an answer other than the service's errors. The interpreter's copies of a key are not overwritten.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import re
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, TypeVar

import aiohttp

from kvstrata.clients.http import CONNECT_TIMEOUT, failure_of, read_capped

T = TypeVar("T")
Body = Mapping[str, Any] | None

REQUEST_TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 256 * 1024
MAX_QUOTED_CHARACTERS = 200
MAX_PATH_CHARACTERS = 128
AT_ONCE = 8
"""Concurrent requests; waiting for a turn does not count toward the timeout."""

_NAME = re.compile(r"[0-9A-Za-z._-]{1,128}")
_PATH = re.compile(r"[0-9A-Za-z_][0-9A-Za-z._-]*(?:/[0-9A-Za-z_][0-9A-Za-z._-]*)*")
"""No segment is empty or begins with a dot: `..` would lead elsewhere."""


class KmsFailure(StrEnum):
    """Why the service did not do it; used as a reason in logs, metrics and conditions."""

    UNREACHABLE = "Unreachable"
    TIMEOUT = "Timeout"
    TLS_FAILED = "TLSFailed"
    DISCONNECTED = "Disconnected"
    NO_TOKEN = "NoToken"  # noqa: S105  (a reason's name)
    TOKEN_NOT_RENEWED = "TokenNotRenewed"  # noqa: S105  (a reason's name)
    DENIED = "Denied"
    SEALED = "Sealed"
    BUSY = "Busy"
    NO_MOUNT = "NoMount"
    NO_KEY = "NoKey"
    REFUSED = "Refused"
    FAILED = "Failed"
    TOO_LARGE = "TooLarge"
    MALFORMED = "Malformed"


class KmsError(Exception):
    """`reason` is stable; the message holds no secret. The outcome may be unknown."""

    def __init__(self, reason: KmsFailure, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Tokens(Protocol):
    async def token(self, client: TransitClient) -> str:
        """Return a token that stays valid for some time. Raises KmsError."""

    def refused(self, token: str) -> bool:
        """Forget a token that the service refused; return whether there may be another now."""


@dataclass(frozen=True, slots=True)
class Service:
    """`cluster` is the random id of the service's setup."""

    cluster: str
    version: str


@dataclass(frozen=True, slots=True)
class Drawn:
    secret: bytes = field(repr=False)
    wrapped: str


class TransitClient:
    """Client of one Transit mount at `address` (`https://host:port`), for one event loop.

    `authority_pem` is the only trusted authority. `namespace` is the service's own, empty for its root; `place` is
    namespace and mount. `turns` limits concurrent requests and may be shared. Raises ValueError for an address that is
    not HTTPS or an invalid mount, ssl.SSLError for an invalid authority. Requests raise KmsError.
    """

    def __init__(
        self,
        address: str,
        authority_pem: bytes,
        tokens: Tokens,
        *,
        mount: str = "transit",
        namespace: str = "",
        timeout_s: float = REQUEST_TIMEOUT_S,
        turns: asyncio.Semaphore | None = None,
    ) -> None:
        if not address.startswith("https://"):
            raise ValueError("the address of a key management service begins with https://")
        for path in (mount, *([namespace] if namespace else [])):
            checked_path(path)
        self._address, self._mount, self._tokens, self._timeout_s = address.rstrip("/"), mount, tokens, timeout_s
        self._turns = turns or asyncio.Semaphore(AT_ONCE)
        self.place = f"{namespace}:{mount}"
        self._headers = {"X-Vault-Request": "true"} | ({"X-Vault-Namespace": namespace} if namespace else {})
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._tls.minimum_version = ssl.TLSVersion.TLSv1_2
        self._tls.load_verify_locations(cadata=authority_pem.decode("ascii"))
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def close(self) -> None:
        """Close the client: pending and later requests fail with `DISCONNECTED`."""
        self._closed = True
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def service(self) -> Service:
        """Raises KmsError, with `SEALED` while the service cannot work."""
        raw = await self.call("GET", "sys/health", query={"standbyok": "true"})
        return _read(lambda: Service(_text(raw["cluster_id"]), _text(raw["version"])))

    async def make(self, name: str) -> bool:
        """Create a key that cannot be taken out of the service, unless the name exists; return as `is_copyable`."""
        body = {"type": "aes256-gcm96", "exportable": False, "allow_plaintext_backup": False}
        await self._ask("POST", f"keys/{_checked(name)}", body)
        copyable = await self.is_copyable(name)
        if copyable is None:
            raise KmsError(KmsFailure.NO_KEY, f"key {name} was made, and is not there")
        return copyable

    async def is_copyable(self, name: str) -> bool | None:
        """Return whether a key could be taken out of the service; None if the service reports that there is none."""
        try:
            raw = await self._ask("GET", f"keys/{_checked(name)}")
        except KmsError as error:
            if error.reason is KmsFailure.NO_KEY:
                return None
            raise
        return _read(lambda: any(raw["data"][way] is not False for way in ("exportable", "allow_plaintext_backup")))

    async def draw(self, name: str) -> Drawn:
        """Create a data key of 256 bits, wrapped by the key `name`."""
        raw = await self._ask("POST", f"datakey/plaintext/{_checked(name)}", {"bits": 256})
        return _read(lambda: Drawn(_secret(raw["data"]["plaintext"]), _text(raw["data"]["ciphertext"])))

    async def unwrap(self, name: str, wrapped: str) -> bytes:
        raw = await self._ask("POST", f"decrypt/{_checked(name)}", {"ciphertext": wrapped})
        return _read(lambda: _secret(raw["data"]["plaintext"]))

    async def delete(self, name: str) -> None:
        """Delete a key; a missing one is fine. Only a later question confirms that it is gone."""
        if await self.is_copyable(name) is None:
            return
        await self._ask("POST", f"keys/{_checked(name)}/config", {"deletion_allowed": True})
        await self._ask("DELETE", f"keys/{_checked(name)}")

    async def call(
        self, method: str, path: str, body: Body = None, *, query: Mapping[str, str] | None = None, token: str = ""
    ) -> Any:
        """Return the answer at `path`, None if it is empty."""
        headers = self._headers | ({"X-Vault-Token": token} if token else {})
        try:
            async with (
                self._turns,
                asyncio.timeout(self._timeout_s),
                self._open().request(
                    method,
                    f"{self._address}/v1/{path}",
                    params=dict(query or {}),
                    json=None if body is None else dict(body),
                    headers=headers,
                    allow_redirects=False,
                    timeout=CONNECT_TIMEOUT,
                ) as response,
            ):
                encoded = await read_capped(response, MAX_ANSWER_BYTES)
                if encoded is None:
                    message = f"the key management service sent more than {MAX_ANSWER_BYTES} bytes"
                    raise KmsError(KmsFailure.TOO_LARGE, message)
                return _judged(response.status, encoded, path)
        except RuntimeError:
            if not self._closed:
                raise
            raise _replaced() from None
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            # The error's own text may quote headers.
            message = f"the key management service at {self._address}: {type(error).__name__}"
            raise KmsError(KmsFailure(failure_of(error)), message) from None

    async def _ask(self, method: str, path: str, body: Body = None) -> Any:
        whole = f"{self._mount}/{path}"
        token = await self._tokens.token(self)
        try:
            return await self.call(method, whole, body, token=token)
        except KmsError as error:
            if error.reason is not KmsFailure.DENIED or not self._tokens.refused(token):
                raise
        return await self.call(method, whole, body, token=await self._tokens.token(self))

    def _open(self) -> aiohttp.ClientSession:
        if self._closed:
            raise _replaced()
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(ssl=self._tls, limit=AT_ONCE),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
            )
        return self._session


def _judged(status: int, body: bytes, path: str) -> Any:
    """Return an answer's JSON, None if it is empty. Raises KmsError for a refusal or invalid JSON."""
    try:
        raw = json.loads(body) if body.strip() else None
    except (ValueError, RecursionError):
        if 200 <= status < 300:
            raise KmsError(KmsFailure.MALFORMED, "the key management service sent an answer that is not JSON") from None
        raw = None
    if 200 <= status < 300:
        return raw
    errors = raw.get("errors") if isinstance(raw, dict) else None
    text = "; ".join(one for one in errors if isinstance(one, str)) if isinstance(errors, list) else ""
    text = "".join(character if character.isprintable() else " " for character in text)[:MAX_QUOTED_CHARACTERS]
    message = f"the key management service answered HTTP {status}" + (f": {text}" if text else "")
    raise KmsError(_refusal(status, errors, text, path), message)


def _refusal(status: int, errors: object, text: str, path: str) -> KmsFailure:
    match status:
        case 401 | 403:
            return KmsFailure.DENIED
        case 404:
            # "No such key" has an empty list of errors, an unserved path has one entry, another kind of server has no
            # list. Only the first is about a key.
            return KmsFailure.NO_KEY if errors == [] and "/keys/" in path else KmsFailure.NO_MOUNT
        case 400 if "encryption key not found" in text:
            return KmsFailure.NO_KEY
        case 429:
            return KmsFailure.BUSY
        case 501 | 503:
            return KmsFailure.SEALED
    return KmsFailure.FAILED if status >= 500 else KmsFailure.REFUSED


def _read(read: Callable[[], T]) -> T:
    try:
        return read()
    except (KeyError, TypeError, ValueError, AttributeError, binascii.Error):
        # The error's text would quote the answer.
        raise KmsError(KmsFailure.MALFORMED, "the key management service answered with something else") from None


def _text(raw: Any) -> str:
    if not isinstance(raw, str) or not raw or len(raw) > 4096 or not raw.isprintable():
        raise ValueError("no text")
    return raw


def _secret(raw: Any) -> bytes:
    secret = base64.b64decode(raw, validate=True)
    if len(secret) != 32 or not any(secret):
        raise ValueError("no key")
    return secret


def checked_path(path: str) -> str:
    """Return a path of the service unless it could lead elsewhere. Raises ValueError."""
    if len(path) > MAX_PATH_CHARACTERS or _PATH.fullmatch(path) is None:
        raise ValueError("a mount, a method or a namespace of a key management service is no path")
    return path


def _replaced() -> KmsError:
    return KmsError(KmsFailure.DISCONNECTED, "the connection to the key management service is being replaced")


def _checked(name: str) -> str:
    if _NAME.fullmatch(name) is None:
        raise ValueError("the name of a key in a key management service has letters, digits and ._- only")
    return name
