"""The gate section of a CachedModel: who may call, and what answers reveal."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, StringConstraints

from kvstrata.api.base import ApiModel, exactly_one_of
from kvstrata.api.common import ConfigMapKeyRef, LocalObjectRef, ServerTls, TlsMode
from kvstrata.api.markers import SetList
from kvstrata.api.pod_template import ResourceRequirements

ClaimName = Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][-A-Za-z0-9_.:/]*$")]
HeaderName = Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][-A-Za-z0-9]*$")]
Url = Annotated[str, StringConstraints(min_length=9, max_length=1024, pattern=r"^https://[^\p{Z}\p{C}]+$")]
Audience = Annotated[str, StringConstraints(min_length=1, max_length=256)]


class ApiKeys(ApiModel):
    """Callers show an API key."""

    secret_ref: LocalObjectRef
    """Secret with the key keys.json: {"keys": [{"tenant": "acme", "sha256": "<hex of the SHA-256 of the key>"}]}."""


class Jwt(ApiModel):
    """Callers show a JSON web token."""

    issuer: Url
    """Required issuer of tokens."""

    audiences: Annotated[tuple[Audience, ...], Field(min_length=1, max_length=8), SetList()]
    """Accepted audiences."""

    jwks_config_map_ref: ConfigMapKeyRef
    """ConfigMap with the issuer's public keys as a JSON web key set."""

    tenant_claim: ClaimName
    """Claim that names the tenant."""


class TrustedHeader(ApiModel):
    """A gateway in front has authenticated the caller and says who it is."""

    name: HeaderName
    """Header that names the tenant; what callers send in it must be removed by the gateway."""

    client_ca_secret_ref: LocalObjectRef
    """Secret with ca.crt, the authority of the gateway's client certificate. Only such connections may set the
    header."""


class Authentication(ApiModel):
    """How the gate learns the tenant of a caller."""

    api_keys: ApiKeys | None = None
    """API keys, hashed in a Secret."""

    jwt: Jwt | None = None
    """JSON web tokens."""

    trusted_header: TrustedHeader | None = None
    """A header set by a gateway."""

    RULES = (
        exactly_one_of(
            ("apiKeys", "jwt", "trustedHeader"), "authentication needs exactly one of apiKeys, jwt and trustedHeader"
        ),
    )


class TimingMode(StrEnum):
    """What answers reveal about hits."""

    EXACT = "Exact"
    PADDED = "Padded"


class TimingSpec(ApiModel):
    """What the time of the first token reveals to callers that share a scope."""

    mode: TimingMode
    """Exact: answers are passed on at once. Padded: the first token comes no sooner than without any hit, and usage
    details about cached tokens are left out."""


class GateSpec(ApiModel):
    """The proxy in front of the engine, in every pod."""

    authentication: Authentication
    """How callers prove which tenant they are."""

    tls: ServerTls | None = None
    """TLS towards callers. Absent means Issued."""

    timing: TimingSpec | None = None
    """What the time of the first token reveals. Absent means Exact."""

    resources: ResourceRequirements | None = None
    """Resources of the gate container. Absent means the operator's choice."""

    @property
    def tls_mode(self) -> TlsMode:
        """tls.mode, or its default."""
        return self.tls.mode if self.tls is not None else TlsMode.ISSUED

    @property
    def timing_mode(self) -> TimingMode:
        """timing.mode, or its default."""
        return self.timing.mode if self.timing is not None else TimingMode.EXACT
