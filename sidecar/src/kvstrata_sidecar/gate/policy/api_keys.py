"""API keys, which identify callers. Only hashes are stored: keys are long and random, so a plain hash is enough."""

from __future__ import annotations

import binascii
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from math import inf

from kvstrata.contract.policy.api_keys import KEYS_DATA_KEY, expiry_s
from kvstrata_sidecar.gate.http.errors import Reason, Refusal, bad_request

UNKNOWN_KEY = "this model knows no such API key: each model has keys of its own, check the key and the address"
"""The same for a key of another model and for one that no model knows, so a caller learns nothing of others."""

MAX_KEY_BYTES = 512
MAX_TENANT_CHARACTERS = 253

unauthenticated = partial(Refusal, 401, Reason.UNAUTHENTICATED, code="invalid_api_key")


class MalformedKeysError(ValueError):
    """The API-key Secret cannot be used; the message contains the reason."""


@dataclass(frozen=True, slots=True)
class _Key:
    tenant: str
    expires_s: float


@dataclass(slots=True, repr=False)
class KeyRing:
    """All keys by their hashes. An empty ring authenticates no caller."""

    _keys: Mapping[bytes, _Key] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._keys)

    @classmethod
    def decode(cls, data: bytes) -> KeyRing:
        """Raises MalformedKeysError, also for a hash of two tenants. Of a key's entries the first to expire counts."""
        keys: dict[bytes, _Key] = {}
        try:
            entries = json.loads(data)["keys"]
            for number, item in enumerate(entries, start=1):
                if missing := [name for name in ("tenant", "sha256") if name not in item]:
                    raise MalformedKeysError(f"entry {number} of {KEYS_DATA_KEY} has no {' and no '.join(missing)}")
                tenant, digest = item["tenant"], binascii.unhexlify(item["sha256"])
                if not isinstance(tenant, str) or not 0 < len(tenant) <= MAX_TENANT_CHARACTERS or len(digest) != 32:
                    raise MalformedKeysError("each key needs a tenant and the 64 hex digits of its SHA-256")
                key = _Key(tenant, _expiry_s(item, number))
                known = keys.get(digest, key)
                if known.tenant != tenant:
                    raise MalformedKeysError("one key is given to two tenants")
                keys[digest] = min(known, key, key=lambda one: one.expires_s)
        except MalformedKeysError:
            raise
        except (ValueError, KeyError, TypeError) as error:
            form = '{"keys": [{"tenant": "…", "sha256": "<64 hex digits>"}]}'
            problem = f"{KEYS_DATA_KEY} is malformed ({type(error).__name__}): its form is {form}"
            raise MalformedKeysError(problem) from None
        return cls(keys)

    def tenant_of(self, key: bytes, now_s: float) -> str | None:
        """Return the tenant of `key`, or None; `now_s` is wall-clock time. Raises Refusal if the key has expired. The
        lookup is by the key's SHA-256, which a caller cannot steer."""
        found = self._keys.get(hashlib.sha256(key).digest())
        if found is None:
            return None
        if now_s >= found.expires_s:
            raise unauthenticated("this API key has expired: ask the operator of this model for another one")
        return found.tenant


def _expiry_s(item: Mapping[str, object], number: int) -> float:
    try:
        return expiry_s(item["expires"]) if item.get("expires") is not None else inf
    except ValueError:
        form = "a time of the form 2027-01-31T12:00:00Z"
        raise MalformedKeysError(f"expires in entry {number} of {KEYS_DATA_KEY} is not {form}") from None


def credential(headers: Mapping[bytes, bytes]) -> bytes:
    """Return a request's API key, by OpenAI's or Anthropic's header. Raises Refusal for none, or two that differ."""
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
        raise unauthenticated(UNKNOWN_KEY)
    return key
