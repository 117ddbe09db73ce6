"""API keys, which identify callers.

The Secret holds `keys.json`: `{"keys": [{"tenant": "acme", "sha256": "<hex of sha256(key)>"}]}`. Only hashes are
stored; keys are long and random, so a plain hash is enough and fast.
"""

from __future__ import annotations

import binascii
import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass

from kvstrata_sidecar.gate.http.errors import Reason, Refusal, bad_request

KEYS_DATA_KEY = "keys.json"
MAX_KEY_BYTES = 512
MAX_TENANT_CHARACTERS = 253


class MalformedKeysError(ValueError):
    """The API-key Secret cannot be used; the message contains the reason."""


class KeyRing:
    """The hashes of all keys. An empty ring authenticates no caller."""

    __slots__ = ("_tenants",)

    def __init__(self, tenants: Mapping[bytes, str] | None = None) -> None:
        self._tenants = {digest: (digest, tenant) for digest, tenant in (tenants or {}).items()}

    def __len__(self) -> int:
        return len(self._tenants)

    def is_as(self, other: KeyRing) -> bool:
        return self._tenants == other._tenants

    @classmethod
    def decode(cls, data: bytes) -> KeyRing:
        """Raises MalformedKeysError; a hash of two tenants is malformed too."""
        tenants: dict[bytes, str] = {}
        try:
            for item in json.loads(data)["keys"]:
                tenant, digest = item["tenant"], binascii.unhexlify(item["sha256"])
                if not isinstance(tenant, str) or not 0 < len(tenant) <= MAX_TENANT_CHARACTERS or len(digest) != 32:
                    raise MalformedKeysError("each key needs a tenant and the 64 hex digits of its SHA-256")
                if tenants.setdefault(digest, tenant) != tenant:
                    raise MalformedKeysError("one key is given to two tenants")
        except MalformedKeysError:
            raise
        except (ValueError, KeyError, TypeError) as error:
            raise MalformedKeysError(f"{KEYS_DATA_KEY} is malformed ({type(error).__name__})") from None
        return cls(tenants)

    def tenant_of(self, key: bytes) -> str | None:
        """Return the tenant of `key`, or None. The lookup is by the key's SHA-256, which a caller cannot steer digit by
        digit; the match is compared in constant time."""
        presented = hashlib.sha256(key).digest()
        found = self._tenants.get(presented)
        return found[1] if found is not None and hmac.compare_digest(found[0], presented) else None


@dataclass(slots=True)
class Keys:
    """The ring in force; replaced as a whole when the Secret changes."""

    ring: KeyRing


def credential(headers: Mapping[bytes, bytes]) -> bytes:
    """Return the API key of a request: `Authorization: Bearer` (OpenAI) or `x-api-key` (Anthropic). Raises Refusal when
    there is none, or two that differ."""
    authorization = headers.get(b"authorization")
    api_key = headers.get(b"x-api-key", b"").strip()
    bearer = b""
    if authorization is not None:
        scheme, _, bearer = authorization.strip().partition(b" ")
        bearer = bearer.strip()
        if scheme.lower() != b"bearer" or not bearer:
            raise unauthenticated("use 'Authorization: Bearer <API key>'")
    if bearer and api_key and bearer != api_key:
        raise bad_request(Reason.UNAUTHENTICATED, "Authorization and x-api-key carry different keys")
    key = bearer or api_key
    if not key:
        raise unauthenticated("no API key: use 'Authorization: Bearer <API key>'")
    if len(key) > MAX_KEY_BYTES:
        raise unauthenticated("this API key is not known")
    return key


def unauthenticated(message: str) -> Refusal:
    return Refusal(401, Reason.UNAUTHENTICATED, message, code="invalid_api_key")
