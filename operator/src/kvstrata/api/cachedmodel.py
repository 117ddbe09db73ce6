"""CachedModel: inference pods for one model, with their cache."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints

from kvstrata.api.base import ENFORCED, READY, ApiModel, Column, KindInfo, Resource, Rule
from kvstrata.api.cachedmodel_source import ModelSpec
from kvstrata.api.cachedmodel_status import CachedModelStatus, ProbeSpec
from kvstrata.api.common import RateLimit, SecretRef, ServerTls, TierNames, TlsMode
from kvstrata.api.engine_flags import OWNED_ENV, OWNED_FLAGS, owned_flag
from kvstrata.api.markers import Marker, at_least, atomic_list, between, map_list, schema_default, set_list
from kvstrata.api.pod_template import EnvVar, PodTemplate, ResourceRequirements
from kvstrata.api.pod_volumes import EngineMount, EngineVolume
from kvstrata.api.scalars import VALIDATIONS, Duration, Generation, Image, Pattern, PodShare, Quantity, cel_text
from kvstrata.contract.policy.api_keys import api_keys_secret

DEFAULT_CHUNK_SIZE_TOKENS = 256
DEFAULT_BODY_BYTES = 8 * 1024 * 1024
DEFAULT_CONNECTIONS = 2048


def _refuse_owned_flag(argument: str) -> None:
    owned = owned_flag(argument)
    if owned is not None:
        raise ValueError(f"{_OWNED_FLAG_MESSAGE} ({owned}: {OWNED_FLAGS[owned]})")


def _refuse_owned_variable(variable: EnvVar) -> None:
    if variable.name in OWNED_ENV:
        raise ValueError(_OWNED_ENV_RULE["message"])


_OWNED_FLAG_MESSAGE = "this flag belongs to the operator"
_FLAG_NAME_CEL = "self.split('=')[0].split('.')[0].replace('_', '-')"
_OWNED_FLAG_RULE = {
    # The name of the flag is worked out once, in a list of one: the cost of a rule counts against the CRD's budget.
    "rule": f"!self.startsWith('-') || [{_FLAG_NAME_CEL}].all(name, !["
    + ", ".join(f"'{flag}'" for flag in OWNED_FLAGS)
    + "].exists(flag, flag.startsWith(name)))",
    "message": _OWNED_FLAG_MESSAGE,
    "messageExpression": f"'{_OWNED_FLAG_MESSAGE} (' + [{_FLAG_NAME_CEL}].map(name, ["
    + ", ".join(f'"{flag}: {remedy}"' for flag, remedy in OWNED_FLAGS.items())
    + "].filter(owned, owned.startsWith(name))[0])[0] + ')'",
}
_BLOCK_SIZE = r"\n--block[-_]size[=\n]([1-9][0-9]{0,17})"
"""The number behind --block-size in arguments that each begin with a new line: the same argument, or the next."""

_OWNED_ENV_RULE = {
    "rule": "!(self.name in [" + ", ".join(f"'{name}'" for name in sorted(OWNED_ENV)) + "])",
    "message": f"these variables belong to the operator: {', '.join(sorted(OWNED_ENV))}",
    "fieldPath": ".name",
}


def _chunks_are_whole_blocks(spec: CachedModelSpec) -> bool:
    """Whether a chunk ends where one of the engine's blocks does; other chunks could never be stored."""
    lines = "".join(f"\n{argument}" for argument in spec.engine.args)
    return all(spec.cache_server.chunk_size % int(size) == 0 for size in re.findall(_BLOCK_SIZE, lines))


EngineArgument = Annotated[
    str,
    StringConstraints(min_length=1, max_length=1024),
    Marker({VALIDATIONS: [_OWNED_FLAG_RULE]}, _refuse_owned_flag),
]
EngineVariable = Annotated[EnvVar, Marker({VALIDATIONS: [_OWNED_ENV_RULE]}, _refuse_owned_variable)]


class Rollout(ApiModel):
    """How pods are replaced when their template changes, as in a Deployment."""

    max_surge: PodShare | None = None
    """Pods beyond replicas while pods are replaced. 0 ends an old pod before its successor starts, as nodes without
    spare room need. Absent means 1."""

    max_unavailable: PodShare | None = None
    """Pods that may be missing while pods are replaced. Absent means 0, with maxSurge 0 it means 1."""

    RULES = (
        Rule(
            cel="!(has(self.maxSurge) && string(self.maxSurge) in ['0', '0%'] && "
            "has(self.maxUnavailable) && string(self.maxUnavailable) in ['0', '0%'])",
            message="maxSurge and maxUnavailable cannot both be 0: no pod could be replaced",
            field_path=".maxUnavailable",
            holds=lambda own: not all(one is not None and one.is_zero for one in (own.max_surge, own.max_unavailable)),
        ),
    )


class EngineSpec(ApiModel):
    """The inference engine."""

    image: Image
    """Image with vLLM and LMCache."""

    args: Annotated[tuple[EngineArgument, ...], Field(max_length=128), atomic_list()] = ()
    """Further arguments of the engine. Flags that the operator owns are refused. Arguments are part of the cache
    identity unless they are known to leave KV bytes unchanged."""

    env: Annotated[tuple[EngineVariable, ...], Field(max_length=64), map_list()] = ()
    """Further environment variables with plain values."""

    replicas: Annotated[int, Field(ge=0, le=10_000), schema_default(1)] = 1
    """Number of pods. The API server fills in 1, as for a Deployment, so that autoscalers find a value."""

    tensor_parallel_size: Annotated[int, Field(ge=1, le=64)] = 1
    """Accelerators that one replica spans. Absent means 1."""

    gpu_memory_utilization_percent: Annotated[int, Field(ge=1, le=100)] | None = None
    """Share of the accelerator's memory that the engine may use. Absent leaves the choice to the engine."""

    kv_cache_dtype: Literal["auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"] | None = None
    """Type of the KV cache's elements; part of the cache identity. Absent means auto."""

    resources: ResourceRequirements | None = None
    """Resources of the engine container."""

    temporary_size: Annotated[Quantity, at_least("1Mi", "must be at least 1Mi")] | None = None
    """Size limit of /tmp, where the engine keeps compiled kernels; the pod is evicted above it. Absent means none."""

    pod_template: PodTemplate | None = None
    """Settings of the pods."""

    rollout: Rollout = Rollout()
    """How pods are replaced. Absent means that a new pod becomes ready before an old one ends, one at a time."""

    volumes: Annotated[tuple[EngineVolume, ...], Field(max_length=16), map_list()] = ()
    """Further volumes, which volumeMounts places. Both are part of the cache identity, contents are not."""

    volume_mounts: Annotated[tuple[EngineMount, ...], Field(max_length=16), atomic_list()] = ()
    """Places of the volumes in the engine's container."""

    startup_timeout: Annotated[Duration, between("10s", "24h")] = Duration("30m")
    """How long a pod may take until its engine answers. Absent means 30m."""


class CacheServerSpec(ApiModel):
    """The cache server beside the engine."""

    image: Image | None = None
    """Image with LMCache of exactly the engine's version. Absent means the engine's image."""

    chunk_size: Annotated[int, Field(ge=16, le=8192, multiple_of=16)] = DEFAULT_CHUNK_SIZE_TOKENS
    """Tokens per chunk, a multiple of 16 and of the engine's block size. Absent means 256."""

    resources: ResourceRequirements | None = None
    """Resources of the cache container. Absent means memory that fits the CPU tier."""


Origin = Annotated[
    str,
    StringConstraints(max_length=256),
    Pattern(
        r"^[a-z][-+.a-z0-9]*://([-.a-z0-9]+|\[[:.0-9a-f]+\])(:[0-9]{1,5})?$",
        "must be an origin as browsers send it, such as https://chat.example.com",
    ),
]


class ApiKeys(ApiModel):
    """Callers send an API key."""

    secret_ref: SecretRef | None = None
    """Secret with the key keys.json: {"keys": [{"tenant": "acme", "sha256": "<hex of the SHA-256 of the key>"}]}. With
    "expires": "2027-01-31T12:00:00Z" in its entry, a key is refused from then on. Absent means the Secret
    NAME-api-keys, where NAME is the CachedModel's. `kubectl kvstrata keys add` writes either."""


class Authentication(ApiModel):
    """How the gate identifies the tenant of a caller."""

    api_keys: ApiKeys
    """API keys, hashed in a Secret."""


class GateLimits(ApiModel):
    """Limits of the gate in each pod."""

    max_body_bytes: Annotated[int, Field(ge=64 * 1024, le=32 * 1024 * 1024)] = DEFAULT_BODY_BYTES
    """Largest body of a request. Each byte above 8 MiB adds 28 bytes to the gate's default memory limit. Absent means
    8388608."""

    idle_timeout: Annotated[Duration, between("1s", "1h")] = Duration("75s")
    """How long a connection may wait for its next request; a load balancer's should be shorter. Absent means 75s."""

    max_connections: Annotated[int, Field(ge=16, le=16_384)] = DEFAULT_CONNECTIONS
    """Open connections. Each above 2048 adds 64Ki to the gate's default memory limit. Absent means 2048."""

    max_connections_per_address: Annotated[int, Field(ge=1, le=16_384)] = 1024
    """Open connections of one peer address, which may be a load balancer's. Absent means 1024."""

    max_in_flight: Annotated[int, Field(ge=1, le=16_384)] = 1024
    """Sequences that are computed at a time: a request counts as n times its prompts. Absent means 1024."""

    max_in_flight_per_tenant: Annotated[int, Field(ge=1, le=16_384)] | None = None
    """Sequences of one tenant that are computed at a time. Absent means half of maxInFlight."""

    metrics_tenants: Annotated[int, Field(ge=0, le=10_000)] = 200
    """Tenants with metrics of their own; those of further ones are counted together. Absent means 200."""


class GateSpec(ApiModel):
    """The proxy in front of the engine, in every pod."""

    authentication: Authentication = Authentication(api_keys=ApiKeys())
    """How callers prove which tenant they are. Absent means by API keys."""

    tls: ServerTls = ServerTls(mode=TlsMode.ISSUED)
    """TLS towards callers. Absent means Issued."""

    rate_limit: RateLimit | None = None
    """Rate limits of each tenant on each replica; a TenantCachePolicy may set others. Absent means none."""

    allowed_origins: Annotated[tuple[Origin, ...], Field(max_length=64), set_list()] = ()
    """Origins whose pages may call from a browser (CORS). Absent means none."""

    limits: GateLimits = GateLimits()
    """Limits of bodies and connections."""

    resources: ResourceRequirements | None = None
    """Resources of the gate container. Absent means defaults of the operator."""


class ReuseMode(StrEnum):
    """Kind of reuse between requests."""

    PREFIX = "Prefix"
    DISABLED = "Disabled"


class ReuseSpec(ApiModel):
    """Reuse of KV blocks."""

    mode: ReuseMode
    """Prefix: requests reuse the blocks of equal beginnings. Disabled: no reuse for this model (kill switch)."""


class CachedModelSpec(ApiModel):
    """Inference pods for one model with their cache."""

    model: ModelSpec
    """The served model and its weights."""

    engine: EngineSpec
    """The inference engine and its pods."""

    tiers: TierNames | None = None
    """CacheTiers from fast to slow, behind the engine's own memory. Absent means the one CacheTier of the model's name,
    which the operator creates if there is none: medium CPU, a quarter of the engine's memory limit, without a limit
    1Gi. An empty list means that blocks stay in the engine's memory alone."""

    cache_server: CacheServerSpec = CacheServerSpec()
    """The LMCache server beside the engine, in every pod."""

    gate: GateSpec = GateSpec()
    """The proxy that authenticates tenants and keeps them apart."""

    reuse: ReuseSpec = ReuseSpec(mode=ReuseMode.PREFIX)
    """Reuse of blocks. Absent means mode Prefix."""

    cache_generation: Generation = 0
    """Raise it to make everything that this model has cached unreachable. It cannot be lowered or removed, because that
    would make invalidated blocks reachable again."""

    rollback_window: Annotated[Duration, between("0s", "720h")] = Duration("1h")
    """How long blocks of a former cache identity stay in Redis tiers, from the end of the rollout that replaced it. A
    rollback within this time reuses them; afterwards they are deleted. Absent means 1h."""

    probe: ProbeSpec = ProbeSpec()
    """Isolation probes. Absent means that they run every 5 minutes and report failures."""

    RULES = (
        Rule(
            cel="!has(oldSelf.cacheGeneration) || "
            "(has(self.cacheGeneration) && self.cacheGeneration >= oldSelf.cacheGeneration)",
            message="cacheGeneration can only be raised: a lower one would make invalidated blocks reachable again",
            field_path=".cacheGeneration",
        ),
        Rule(
            cel="!has(self.engine.args) || [has(self.cacheServer) && has(self.cacheServer.chunkSize) ? "
            f"self.cacheServer.chunkSize : {DEFAULT_CHUNK_SIZE_TOKENS}].all(chunk, "
            f"('\\n' + self.engine.args.join('\\n')).findAll({cel_text(_BLOCK_SIZE)})"
            ".all(found, chunk % int(found.find('[0-9]+')) == 0))",
            message="cacheServer.chunkSize, where absent "
            f"{DEFAULT_CHUNK_SIZE_TOKENS}, must be a multiple of --block-size in engine.args: change one of them",
            field_path=".cacheServer.chunkSize",
            holds=_chunks_are_whole_blocks,
        ),
    )

    @property
    def cache_image(self) -> str:
        return self.cache_server.image or self.engine.image


class CachedModel(Resource):
    """A CachedModel runs inference pods for one model, which reuse KV blocks as policies allow. The operator makes a
    Deployment of it; each pod has the engine, a gate that authenticates tenants, and a cache server."""

    INFO: ClassVar[KindInfo] = KindInfo(
        kind="CachedModel",
        plural="cachedmodels",
        short_names=("cmodel",),
        columns=(
            Column("Replicas", ".spec.engine.replicas", "integer"),
            ENFORCED,
            *READY,
            Column.of_condition("Isolated", "IsolationVerified", priority=1),
            Column("Model", ".spec.model.name", priority=1),
            Column("Identity", ".status.identity", description="Cache identity", priority=1),
            Column("Endpoint", ".status.endpoint", priority=1),
        ),
        selectable_fields=(".spec.model.name",),
        scale={
            "specReplicasPath": ".spec.engine.replicas",
            "statusReplicasPath": ".status.replicas",
            "labelSelectorPath": ".status.selector",
        },
    )

    spec: CachedModelSpec
    status: CachedModelStatus = CachedModelStatus()

    @property
    def tier_names(self) -> tuple[str, ...]:
        """Names of the tiers from fast to slow, or of the default tier."""
        return (self.name,) if self.spec.tiers is None else tuple(tier.name for tier in self.spec.tiers)

    @property
    def api_keys_secret(self) -> str:
        chosen = self.spec.gate.authentication.api_keys.secret_ref
        return chosen.name if chosen is not None else api_keys_secret(self.name)
