"""Which KMS may be used for data keys, and what is reported of the end of a key."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvstrata.api.cachedomain import DEFAULT_AUTH_MOUNT, KeyManagement
from kvstrata.contract.receipt.facts import Word


@dataclass(frozen=True, slots=True)
class AllowedService:
    """An address, and where there the operator may show its token. An empty `role` stands for any.

    The address alone is not enough: a tenant of the service may set up an authentication method of its own there, and
    that has tokens reviewed by whom the tenant chooses.
    """

    address: str
    namespace: str = ""
    auth_mount: str = DEFAULT_AUTH_MOUNT
    role: str = ""

    def allows(self, kms: KeyManagement) -> bool:
        """Whether the operator may log in as this says."""
        return (
            kms.address == self.address.rstrip("/")
            and (kms.namespace or "") == self.namespace
            and kms.effective_auth_mount == self.auth_mount
            and self.role in ("", kms.role)
        )


class Undestroyed(StrEnum):
    """Why a KMS does not confirm that what wraps a key is gone."""

    CUSTODY_CANNOT_KNOW = "CustodyCannotKnow"
    """There is no record of which KMS wrapped it."""

    NOT_REVOKED = "NotRevoked"
    """Its record still holds it."""

    EXPORTABLE = "Exportable"
    """The key that wraps it may have been taken out of the KMS, so its word is not enough."""

    ANOTHER_KMS = "AnotherKms"
    """The KMS that answers is not the one that wrapped it, so what it lacks proves nothing."""

    STILL_THERE = "StillThere"
    """The KMS was told to delete the key that wraps it, and still has it."""


@dataclass(frozen=True, slots=True)
class Destruction:
    """Whether no copy of a key exists: `confirmed` by whom and when, otherwise `why_not`.

    `evidence` is what was seen, in words that reveal nothing: for those who look into it later.
    """

    confirmed: Word | None
    why_not: Undestroyed | None = None
    evidence: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raise ValueError unless it is either confirmed or says why not."""
        if (self.confirmed is None) == (self.why_not is None):
            raise ValueError("a key's end is confirmed, or there is a reason why it is not")
