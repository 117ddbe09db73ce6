"""The words of a receipt, and digests in place of secrets.

An owner of the original can confirm its digest, and no reader can guess it: epochs and data keys are random, and the
text of a prefix is mixed with the domain's key.
"""

from __future__ import annotations

import hashlib
import hmac
from datetime import datetime
from enum import StrEnum
from typing import Annotated, TypeVar, dataclass_transform

from kvstrata.contract.policy.keyspace import ScopeKind
from kvstrata.contract.wire import Form, canonical_json, wired

T = TypeVar("T")

Name = Annotated[str, Form(r"[^\x00-\x1f\x7f]{0,256}", "text of at most 256 characters")]


def moment_in_s(text: str) -> int:
    """Return a `Moment` in seconds since 1970. Raises ValueError if there is no such moment."""
    return int(datetime.fromisoformat(text.removesuffix("Z") + "+00:00").timestamp())


Moment = Annotated[str, Form(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", "time in UTC, in whole seconds", moment_in_s)]


def epoch_commitment(domain: str, scope: ScopeKind, name: str, epoch: str) -> str:
    """Return a receipt's commitment to a scope in an epoch: a SHA-256 that takes the epoch to make.

    It covers the scope's name, too, and hides it: an epoch has 128 random bits.
    """
    return hashlib.sha256(b"kvstrata epoch\n" + canonical_json([domain, str(scope), name, epoch])).hexdigest()


def prefix_commitment(domain_key: bytes, model: str, content_digest: str) -> str:
    """Return a receipt's commitment to a prefix: text can be guessed, so it takes the domain's key to confirm it."""
    return hmac.digest(domain_key, b"kvstrata prefix\n" + canonical_json([model, content_digest]), "sha256").hex()


@dataclass_transform(frozen_default=True)
def evidence(kind: type[T]) -> type[T]:
    """Make a class a part of evidence, which decodes to exactly the written value for every reader."""
    return wired("a receipt", complete=True, closed=True, camel=True)(kind)


class SubjectKind(StrEnum):
    INVALIDATION = "CacheInvalidation"
    POLICY = "TenantCachePolicy"
    GROUP = "TenantGroup"
    POOL = "PrefixPool"
    MODEL = "CachedModel"
    TIER = "CacheTier"
    DOMAIN = "CacheDomain"


class ScopeForm(StrEnum):
    TENANT = "tenant"
    GROUP = "group"
    POOL = "pool"
    MODEL = "model"
    PREFIX = "prefix"
    ALL = "all"


class Mode(StrEnum):
    """How far an invalidation goes."""

    LAZY = "Lazy"
    EAGER = "Eager"


class Hbm(StrEnum):
    """Treatment of the engines' own memory."""

    ROLL_SCOPES = "RollScopes"
    RESET_ENGINE = "ResetEngine"


class RevokedKind(StrEnum):
    TENANT = "Tenant"
    GROUP = "Group"
    PUBLIC = "Public"
    POOL = "Pool"
    MODEL = "Model"
    PREFIX = "Prefix"


class Party(StrEnum):
    """Kind of the party that states a fact."""

    OPERATOR = "Operator"
    JOB = "Job"
    POD = "Pod"
    CUSTODY = "Custody"


class KeyCustody(StrEnum):
    """Place of a data key: it decides which claims about the key's end are possible."""

    SECRET = "Secret"  # noqa: S105  (a name)
    KMS = "KMS"


class Standing(StrEnum):
    ACKED = "Acked"
    FENCED = "Fenced"
    ENDED = "Ended"
    OPEN = "Open"


class PodMedium(StrEnum):
    CPU = "CPU"
    NVME = "NVMe"
