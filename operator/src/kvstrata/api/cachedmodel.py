"""CachedModel: inference pods for one model, with their cache."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, StringConstraints

from kvstrata.api.base import (
    AGE,
    ENFORCED_BY,
    READY,
    ApiModel,
    Column,
    KindInfo,
    Resource,
    Rule,
    Scale,
    StatusModel,
    condition_column,
)
from kvstrata.api.cachedmodel_gate import GateSpec
from kvstrata.api.cachedmodel_source import ModelSpec
from kvstrata.api.cachedmodel_status import (
    DEFAULT_ROLLBACK_WINDOW_S,
    MAX_FORMER_IDENTITIES,
    FormerIdentity,
    OnProbeFailure,
    ProbeMode,
    ProbeSpec,
    ProbeStatus,
    ReclaimedCache,
)
from kvstrata.api.common import Duration, Hex, PodCount, Revision, Status, TierNames, TlsMode
from kvstrata.api.engine_flags import OWNED_ENV, OWNED_FLAGS, owned_flag
from kvstrata.api.markers import AtLeast, AtomicList, Between, MapList, SchemaDefault
from kvstrata.api.pod_template import EnvVar, PodTemplate, ResourceRequirements
from kvstrata.api.scalars import VALIDATIONS, Generation, Image, Quantity, ShortText, cel_text

DEFAULT_CHUNK_SIZE_TOKENS = 256
DEFAULT_STARTUP_TIMEOUT_S = 1800
MAX_WITNESSES = 1000
"""Most pods that status.witnesses names."""


def _unowned_argument(argument: str) -> str:
    owned = owned_flag(argument)
    if owned is not None:
        raise ValueError(f"{_OWNED_FLAG_MESSAGE} ({owned}: {OWNED_FLAGS[owned]})")
    return argument


def _unowned_variable(variable: EnvVar) -> EnvVar:
    if variable.name in OWNED_ENV:
        raise ValueError(_OWNED_ENV_MESSAGE)
    return variable


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

_OWNED_ENV_MESSAGE = f"these variables belong to the operator: {', '.join(sorted(OWNED_ENV))}"
_OWNED_ENV_CEL = "!(self.name in [" + ", ".join(f"'{name}'" for name in sorted(OWNED_ENV)) + "])"


def _chunks_are_whole_blocks(spec: CachedModelSpec) -> bool:
    """Whether a chunk ends where one of the engine's blocks does; other chunks could never be stored."""
    lines = "".join(f"\n{argument}" for argument in spec.engine.args)
    return all(spec.cache_server.chunk_size_tokens % int(size) == 0 for size in re.findall(_BLOCK_SIZE, lines))


EngineArgument = Annotated[
    str,
    StringConstraints(min_length=1, max_length=1024),
    AfterValidator(_unowned_argument),
    Field(json_schema_extra={VALIDATIONS: [_OWNED_FLAG_RULE]}),
]
EngineVariable = Annotated[
    EnvVar,
    AfterValidator(_unowned_variable),
    Field(
        json_schema_extra={VALIDATIONS: [{"rule": _OWNED_ENV_CEL, "message": _OWNED_ENV_MESSAGE, "fieldPath": ".name"}]}
    ),
]


class EngineSpec(ApiModel):
    """The inference engine."""

    image: Image
    """Image with vLLM and LMCache."""

    args: Annotated[tuple[EngineArgument, ...], Field(max_length=128), AtomicList()] = ()
    """Further arguments of the engine. Flags that the operator owns are refused. Arguments are part of the cache
    identity unless they are known to leave KV bytes unchanged."""

    env: Annotated[tuple[EngineVariable, ...], Field(max_length=64), MapList()] = ()
    """Further environment variables with plain values."""

    replicas: Annotated[int, Field(ge=0, le=10_000), SchemaDefault(1)] = 1
    """Number of pods. The API server fills in 1, as for a Deployment, so that autoscalers find a value."""

    tensor_parallel_size: Annotated[int, Field(ge=1, le=64)] | None = None
    """Accelerators that one replica spans. Absent means 1."""

    gpu_memory_utilization_percent: Annotated[int, Field(ge=1, le=100)] | None = None
    """Share of the accelerator's memory that the engine may use. Absent leaves the choice to the engine."""

    kv_cache_dtype: Literal["auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"] | None = None
    """Type of the KV cache's elements; part of the cache identity. Absent means auto."""

    resources: ResourceRequirements | None = None
    """Resources of the engine container."""

    pod_template: PodTemplate | None = None
    """Settings of the pods."""

    startup_timeout: Annotated[Duration, Between("10s", "24h")] | None = None
    """How long a pod may take until its engine answers. Absent means 30m."""

    @property
    def effective_tensor_parallel_size(self) -> int:
        """tensorParallelSize, or its default."""
        return self.tensor_parallel_size if self.tensor_parallel_size is not None else 1

    @property
    def startup_timeout_s(self) -> int:
        """Effective startupTimeout in seconds."""
        return self.startup_timeout.in_seconds if self.startup_timeout is not None else DEFAULT_STARTUP_TIMEOUT_S


class Transfer(StrEnum):
    """How blocks move between engine and cache server."""

    ENGINE_DRIVEN = "EngineDriven"
    GPU_IPC = "GPUIPC"


class WarmupSpec(ApiModel):
    """Loading of a new pod's memory tier from slower tiers before the pod serves, most recently used blocks first."""

    bytes: Annotated[Quantity, AtLeast("1", "must be above 0")]
    """Most bytes that are loaded. A value above the memory tier's capacity does no harm."""

    timeout: Annotated[Duration, Between("1s", "1h")]
    """Longest duration, from the moment at which the engine reports the layout of its blocks to the cache server. A pod
    that is not done by then, or that long after its engine answers, becomes ready nevertheless."""


class CacheServerSpec(ApiModel):
    """The cache server beside the engine."""

    image: Image | None = None
    """Image with LMCache of exactly the engine's version. Absent means the engine's image."""

    chunk_size: Annotated[int, Field(ge=16, le=8192, multiple_of=16)] | None = None
    """Tokens per chunk, a multiple of 16 and of the engine's block size. Absent means 256."""

    resources: ResourceRequirements | None = None
    """Resources of the cache container. Absent means memory that fits the CPU tier."""

    transfer: Transfer | None = None
    """EngineDriven: by shared memory, without access to the accelerator. GPUIPC: by handles of the accelerator's
    memory. Absent means EngineDriven."""

    warmup: WarmupSpec | None = None
    """Loading of a new pod's memory tier from slower tiers before the pod becomes ready. Needs a CPU tier, and an NVMe
    or Redis tier. Absent means that requests load the blocks that they need."""

    @property
    def chunk_size_tokens(self) -> int:
        """Effective chunkSize in tokens."""
        return self.chunk_size if self.chunk_size is not None else DEFAULT_CHUNK_SIZE_TOKENS

    @property
    def effective_transfer(self) -> Transfer:
        """transfer, or its default."""
        return self.transfer or Transfer.ENGINE_DRIVEN


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

    tiers: TierNames = ()
    """CacheTiers from fast to slow, behind the engine's own memory. Absent means that blocks stay in the engine's
    memory alone."""

    cache_server: CacheServerSpec = CacheServerSpec()
    """The LMCache server beside the engine, in every pod."""

    gate: GateSpec
    """The proxy that authenticates tenants and keeps them apart."""

    reuse: ReuseSpec | None = None
    """Reuse of blocks. Absent means mode Prefix."""

    cache_generation: Generation | None = None
    """Raise it to make everything that this model has cached unreachable. It cannot be lowered or removed, because that
    would make invalidated blocks reachable again."""

    rollback_window: Annotated[Duration, Between("0s", "720h")] | None = None
    """How long blocks of a former cache identity stay in Redis tiers, from the end of the rollout that replaced it. A
    rollback within this time reuses them; afterwards they are deleted. Absent means 1h."""

    probe: ProbeSpec | None = None
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
    def reuse_mode(self) -> ReuseMode:
        """reuse.mode, or its default."""
        return self.reuse.mode if self.reuse is not None else ReuseMode.PREFIX

    @property
    def tier_names(self) -> tuple[str, ...]:
        """Names of the tiers from fast to slow."""
        return tuple(tier.name for tier in self.tiers)

    @property
    def cache_image(self) -> str:
        """Image of the cache container."""
        return self.cache_server.image or self.engine.image

    @property
    def effective_cache_generation(self) -> int:
        """cacheGeneration, 0 when absent."""
        return self.cache_generation or 0

    @property
    def rollback_window_s(self) -> int:
        """Effective rollbackWindow in seconds."""
        return self.rollback_window.in_seconds if self.rollback_window is not None else DEFAULT_ROLLBACK_WINDOW_S

    @property
    def probe_interval_s(self) -> int:
        """Time between two probes in seconds."""
        return (self.probe or ProbeSpec()).interval_s

    @property
    def is_probed(self) -> bool:
        """Whether pods are probed."""
        return (self.probe or ProbeSpec()).mode is not ProbeMode.NEVER

    @property
    def on_probe_failure(self) -> OnProbeFailure:
        """probe.onFailure, or its default."""
        return (self.probe or ProbeSpec()).on_failure or OnProbeFailure.REPORT


class WitnessPod(StatusModel):
    """A pod whose acknowledgement an invalidation needs."""

    name: ShortText
    """Its name."""

    uid: ShortText
    """Its uid."""

    acked: Revision | None = None
    """Last bundle revision that it is known to have acknowledged. The rules of that revision decide when the pod fences
    itself."""


class CachedModelStatus(Status):
    """Observed state of a CachedModel."""

    identity: Hex | None = None
    """Cache identity: hash of everything that changes KV bytes."""

    former_identities: Annotated[
        tuple[FormerIdentity, ...], Field(max_length=MAX_FORMER_IDENTITIES), MapList("identity")
    ] = ()
    """Former identities whose blocks are not deleted from Redis tiers yet; at most 32 of them."""

    reclaimed: ReclaimedCache | None = None
    """The last completed deletion of a former identity's blocks."""

    cache_generation: Generation | None = None
    """The cacheGeneration that was last acted on."""

    replicas: PodCount | None = None
    """Pods that exist; read by autoscalers."""

    ready_replicas: PodCount | None = None
    """Pods that are ready."""

    selector: Annotated[str, StringConstraints(max_length=1024)] | None = None
    """Label selector of the pods; read by autoscalers."""

    bundle_revision: Revision | None = None
    """Newest revision of the model's bundle: the compiled policies that its pods read."""

    enforced_by: ShortText | None = None
    """Serving pods that enforce the newest policy, out of all (`2/3`); `no pods` if none serves."""

    pods_acked: PodCount | None = None
    """Pods that acknowledged the newest revision."""

    pods_live: PodCount | None = None
    """Pods that serve."""

    witnesses: Annotated[tuple[WitnessPod, ...], Field(max_length=MAX_WITNESSES), AtomicList()] = ()
    """Pods that may hold a policy, at most 1000 of them. An operator that starts compares them with the pods that
    exist, to find those that vanished."""

    probe: ProbeStatus | None = None
    """Results of isolation probes."""

    endpoint: ShortText | None = None
    """URL of the model's Service."""


class CachedModel(Resource):
    """A CachedModel runs inference pods for one model, which reuse KV blocks as policies allow. The operator makes a
    Deployment of it; each pod has the engine, a gate that authenticates tenants, and a cache server."""

    INFO: ClassVar[KindInfo] = KindInfo(
        kind="CachedModel",
        plural="cachedmodels",
        short_names=("cmodel",),
        columns=(
            Column("Replicas", ".spec.engine.replicas", "integer"),
            ENFORCED_BY,
            *READY,
            condition_column("Isolated", "IsolationVerified", priority=1),
            Column("Model", ".spec.model.name", priority=1),
            Column("Identity", ".status.identity", description="Cache identity", priority=1),
            Column("Endpoint", ".status.endpoint", priority=1),
            AGE,
        ),
        selectable_fields=(".spec.model.name",),
        scale=Scale(".spec.engine.replicas", ".status.replicas", ".status.selector"),
    )

    spec: CachedModelSpec
    status: CachedModelStatus = CachedModelStatus()

    @property
    def gate_tls_mode(self) -> TlsMode:
        """Where the gate's certificate comes from."""
        return self.spec.gate.tls_mode
