"""Key management services that whoever runs the operator allows, and in which place of them it may log in."""

from __future__ import annotations

from dataclasses import dataclass

from kvstrata.api.cachedomain import DEFAULT_AUTH_MOUNT, KeyManagement


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
