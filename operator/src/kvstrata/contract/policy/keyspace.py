"""Keyspaces: the namespace of a scope's blocks in engine, cache server and every tier.

A keyspace is the `cache_salt` that the engine sees. It names no tenant, and a new epoch makes all blocks of the old one
unreachable, because no gate mints the old keyspace any more.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import struct
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from kvstrata.contract.wire import Form

DOMAIN_KEY_BYTES = 32
EPOCH_BYTES = 16
KEYSPACE_HEX_DIGITS = 32

SCOPE_DIGITS = 12
"""Digits of a keyspace that are shown: enough to distinguish known scopes, too few to use one."""

_DIGITS = re.compile(r"[0-9a-f]{32}")
"""Of an epoch, and of a keyspace."""

Keyspace = Annotated[str, Form(_DIGITS.pattern, "keyspace")]
AnyScope = Annotated[str, Form(f"[0-9a-f]{{0,{SCOPE_DIGITS}}}", "scope")]
ScopeDigits = Annotated[str, Form(f"[0-9a-f]{{{SCOPE_DIGITS}}}", f"{SCOPE_DIGITS} digits of a scope")]


class ScopeKind(StrEnum):
    TENANT = "Tenant"
    GROUP = "Group"
    PUBLIC = "Public"
    POOL = "Pool"


@dataclass(frozen=True, slots=True, order=True)
class Scope:
    """A set of callers that share blocks, named within its domain (the public scope's name is `public`)."""

    kind: ScopeKind
    name: str

    def __str__(self) -> str:
        return f"{self.kind}/{self.name}"


PUBLIC_SCOPE = Scope(ScopeKind.PUBLIC, "public")


def derive_keyspace(domain_key: bytes, scope: Scope, epoch: str) -> str:
    """Return the keyspace of `scope` in `epoch`: 32 hexadecimal digits of an HMAC-SHA256.

    The fields are length-prefixed, so different (kind, name, epoch) never give the same message. LMCache and vLLM
    accept the digits as a salt (no `@`, `/`, backslash or NUL, at most 128 characters). Raises ValueError for a key
    shorter than 32 bytes or a malformed epoch.
    """
    if len(domain_key) < DOMAIN_KEY_BYTES:
        raise ValueError(f"a domain key has {DOMAIN_KEY_BYTES} bytes, this one {len(domain_key)}")
    if not is_epoch(epoch):
        raise ValueError("an epoch is 32 lower-case hexadecimal digits")
    message = b"".join(
        struct.pack(">I", len(part)) + part for part in (scope.kind.encode(), scope.name.encode(), epoch.encode())
    )
    return hmac.digest(domain_key, message, hashlib.sha256).hex()[:KEYSPACE_HEX_DIGITS]


def epoch_from_random(random_bytes: bytes) -> str:
    if len(random_bytes) != EPOCH_BYTES:
        raise ValueError(f"an epoch takes {EPOCH_BYTES} random bytes")
    return random_bytes.hex()


def is_epoch(text: str) -> bool:
    return _DIGITS.fullmatch(text) is not None


def is_keyspace(text: str) -> bool:
    return _DIGITS.fullmatch(text) is not None
