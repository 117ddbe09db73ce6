"""The gate section of a CachedModel: authentication of callers, TLS and resources."""

from __future__ import annotations

from kvstrata.api.base import ApiModel
from kvstrata.api.common import SecretRef, ServerTls, TlsMode
from kvstrata.api.pod_template import ResourceRequirements


class ApiKeys(ApiModel):
    """Callers send an API key."""

    secret_ref: SecretRef
    """Secret with the key keys.json: {"keys": [{"tenant": "acme", "sha256": "<hex of the SHA-256 of the key>"}]}."""


class Authentication(ApiModel):
    """How the gate identifies the tenant of a caller."""

    api_keys: ApiKeys
    """API keys, hashed in a Secret."""


class GateSpec(ApiModel):
    """The proxy in front of the engine, in every pod."""

    authentication: Authentication
    """How callers prove which tenant they are."""

    tls: ServerTls | None = None
    """TLS towards callers. Absent means Issued."""

    resources: ResourceRequirements | None = None
    """Resources of the gate container. Absent means defaults of the operator."""

    @property
    def tls_mode(self) -> TlsMode:
        """tls.mode, or its default."""
        return self.tls.mode if self.tls is not None else TlsMode.ISSUED
