"""Allowed KMS addresses, and the reported destruction of keys."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvstrata.api.cachedomain import DEFAULT_AUTH_MOUNT, KeyManagement
from kvstrata.contract.receipt.facts import Statement

FROM_NAMESPACE = "FromNamespace"


@dataclass(frozen=True, slots=True)
class AllowedService:
    """An address and login to which the operator may send its token. An empty `role` allows any.

    `authority`, in PEM, must have signed the service's certificate. With `FROM_NAMESPACE` a ConfigMap of the domain has
    it, and its owner could take the token with a service of its own at this address. Nor is the address alone enough:
    a tenant of the service may configure an authentication method that has tokens reviewed by a server of its choice.
    """

    address: str
    namespace: str = ""
    auth_mount: str = DEFAULT_AUTH_MOUNT
    role: str = ""
    authority: str = ""

    def allows(self, kms: KeyManagement) -> bool:
        return (
            kms.address == self.address.rstrip("/")
            and (kms.namespace or "") == self.namespace
            and kms.auth_mount == self.auth_mount
            and self.role in ("", kms.role)
        )


class Undestroyed(StrEnum):
    CUSTODY_CANNOT_KNOW = "CustodyCannotKnow"
    """No record of the KMS that wrapped it."""

    NOT_REVOKED = "NotRevoked"
    """The key has not been removed from its record."""

    EXPORTABLE = "Exportable"
    """The wrapping key may have been exported from the KMS."""

    ANOTHER_KMS = "AnotherKms"
    """Another KMS answers than the one that wrapped it, so a missing key proves nothing."""

    STILL_THERE = "StillThere"
    """The KMS accepted the deletion of the wrapping key and still has it."""


@dataclass(frozen=True, slots=True)
class Destruction:
    """Whether no copy of a key exists. `evidence` reveals no secrets."""

    confirmed: Statement | None
    why_not: Undestroyed | None = None
    evidence: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raise ValueError unless exactly one of `confirmed` and `why_not` is set."""
        if (self.confirmed is None) == (self.why_not is None):
            raise ValueError("a key's end is confirmed, or there is a reason why it is not")
