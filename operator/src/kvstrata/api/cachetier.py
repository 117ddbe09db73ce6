"""CacheTier: one layer of memory or storage that holds KV blocks."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field, StringConstraints
from pydantic.alias_generators import to_camel

from kvstrata.api.base import READY, ApiModel, Column, KindInfo, Resource, Rule, StatusModel, exactly_one_of
from kvstrata.api.cachetier_managed import NAME_FITS, RedisManaged
from kvstrata.api.common import Classification, SecretKeyRef, SecretRef
from kvstrata.api.markers import at_least, atomic_list, immutable, set_list
from kvstrata.api.scalars import AbsolutePath, Duration, Pattern, Quantity, ShortText, Text, Timestamp
from kvstrata.api.status import Status

DEFAULT_HIGH_WATERMARK_PERCENT = 90
REDIS_HIGH_WATERMARK_PERCENT = 80
"""Part of a Redis tier's capacity for blocks; the rest is for their index and the allocator's rounding."""

CLUSTER_HIGH_WATERMARK_PERCENT = 65
"""The same of several servers: a scope's sixteen buckets fall on them by chance, on some more than their share."""

MAX_SHOWN_SHARDS = 1024
MAX_SERVERS = 512
"""Most servers in status.servers: all of the largest cluster, and the last that vanished."""

CLUSTER_SLOTS = 16_384


class Medium(StrEnum):
    """Memory or storage that a tier uses."""

    CPU = "CPU"
    NVME = "NVMe"
    REDIS = "Redis"


class Encryption(StrEnum):
    """Whether blocks at rest must be encrypted."""

    REQUIRED = "Required"
    DISABLED = "Disabled"


class Eviction(ApiModel):
    """When a tier evicts; the least recently used blocks go first."""

    high_watermark_percent: Annotated[int, Field(ge=10, le=100)] | None = None
    """Share of the capacity at which eviction starts, and which guarantees cannot exceed. Absent means 90, for Redis
    80, for several Redis servers 65. On Redis these values are also the maximum, because index and allocator need the
    rest."""


class RedisClientTls(ApiModel):
    """TLS towards external servers."""

    ca_secret_ref: SecretKeyRef
    """Certificate authority in PEM that signs the servers' certificates."""


Endpoint = Annotated[
    str,
    StringConstraints(min_length=3, max_length=261),
    Pattern(
        r"^([A-Za-z0-9]([-A-Za-z0-9.]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}$",
        "must be HOST:PORT such as redis.example.com:6379",
    ),
]


class RedisExternal(ApiModel):
    """Redis servers that the operator does not run."""

    endpoints: Annotated[tuple[Endpoint, ...], Field(min_length=1, max_length=64), set_list()]
    """Addresses as HOST:PORT. Of a cluster some servers are enough; otherwise exactly one."""

    cluster: bool | None = None
    """Whether the servers form a Redis Cluster. Absent means false."""

    tls: RedisClientTls | None = None
    """TLS towards the servers. Absent means plain text."""

    username: (
        Annotated[
            str,
            StringConstraints(min_length=1, max_length=128),
            Pattern(r"^[^\s\p{C}]+$", "must be printable characters without white space"),
        ]
        | None
    ) = None
    """User of the server. Absent means its default user."""

    auth_secret_ref: SecretRef | None = None
    """Secret with the key password. Absent means that the server requires no password."""

    RULES = (
        Rule(
            cel="(has(self.cluster) && self.cluster) || size(self.endpoints) == 1",
            message="without cluster: true exactly one endpoint is allowed",
            field_path=".endpoints",
            holds=lambda external: bool(external.cluster) or len(external.endpoints) == 1,
        ),
    )


class Redis(ApiModel):
    """Servers of a Redis tier."""

    managed: RedisManaged | None = None
    """A Redis Cluster that the operator runs."""

    external: RedisExternal | None = None
    """Servers that the operator does not run."""

    RULES = (exactly_one_of(("managed", "external"), "redis needs exactly one of managed and external"),)


class NvmeEmptyDir(ApiModel):
    """Space of the node, lost with the pod. It outlives the pod's containers."""


class NvmeHostPath(ApiModel):
    """A folder of the node with a subfolder for each pod, which the next pod of the same model on the node inherits."""

    path: AbsolutePath
    """FOLDER/NAMESPACE, where the installation allows FOLDER; it must exist and belong to uid 65532. Such volumes need
    a namespace whose Pod Security level is privileged."""


class Nvme(ApiModel):
    """Where an NVMe tier keeps its files."""

    empty_dir: NvmeEmptyDir | None = None
    """Space of the node, lost with the pod."""

    host_path: NvmeHostPath | None = None
    """A folder of the node with a subfolder for each pod, which the next pod of the same model on the node inherits."""

    RULES = (exactly_one_of(("emptyDir", "hostPath"), "nvme needs exactly one of emptyDir and hostPath"),)


def _member(attribute: str, media: tuple[Medium, ...], message: str) -> Rule:
    """A member of the union: required for these media, not allowed for others."""
    field, fits = to_camel(attribute), ", ".join(f"'{medium}'" for medium in media)
    return Rule(
        cel=f"has(self.{field}) == (self.medium in [{fits}])",
        message=message,
        field_path=f".{field}",
        holds=lambda spec: (getattr(spec, attribute) is not None) == (spec.medium in media),
    )


_PER_POD = (Medium.CPU, Medium.NVME)
_AT_REST = (Medium.NVME, Medium.REDIS)

LEAST_CAPACITY = "16Mi"
_WHY_NOT_LESS = (
    f"must be at least {LEAST_CAPACITY}: a chunk of 256 tokens of a model with a billion parameters takes 8Mi, and in "
    "a smaller tier every chunk evicts the previous one"
)


def _watermark_fits(spec: CacheTierSpec) -> bool:
    chosen = spec.eviction.high_watermark_percent if spec.eviction is not None else None
    return chosen is None or spec.medium is not Medium.REDIS or chosen <= spec.default_high_watermark_percent


def _has_room_in_each_shard(spec: CacheTierSpec) -> bool:
    shards = spec.managed.shards if spec.managed is not None else 1
    return spec.capacity is None or spec.capacity.in_bytes >= shards * Quantity(LEAST_CAPACITY).in_bytes


class CacheTierSpec(ApiModel):
    """One layer of memory or storage. The medium decides which of the other fields apply."""

    medium: Annotated[Medium, immutable("medium is immutable: create another CacheTier and move the models to it")]
    """CPU: memory of each pod. NVMe: local files of each pod. Redis: servers that all pods share."""

    capacity_per_pod: Annotated[Quantity, at_least(LEAST_CAPACITY, _WHY_NOT_LESS)] | None = None
    """Bytes in each pod, at least 16Mi; for CPU and NVMe."""

    capacity: Annotated[Quantity, at_least(LEAST_CAPACITY, _WHY_NOT_LESS)] | None = None
    """Bytes in total, at least 16Mi for each shard; for Redis. Managed servers share it; of external servers it is the
    part that this tier may use. A change reaches the models' pods as policy does, without a restart."""

    eviction: Eviction | None = None
    """When the tier evicts blocks."""

    encryption: Encryption | None = None
    """Whether blocks at rest must be encrypted; for Redis and NVMe, where absent means Required. Immutable."""

    allowed_classifications: (
        Annotated[tuple[Classification, ...], Field(min_length=1, max_length=4), set_list()] | None
    ) = None
    """Classifications of data that may be stored here. Absent means all."""

    max_retention: Duration | None = None
    """Longest life of any block on this tier. Absent means that the tier sets no limit; on Redis, blocks without a
    retention then expire after 24 h."""

    redis: Redis | None = None
    """The servers; for Redis."""

    nvme: Nvme | None = None
    """Place of the files; for NVMe."""

    RULES = (
        _member(
            "capacity_per_pod",
            _PER_POD,
            "capacityPerPod is required for the media CPU and NVMe and not allowed for Redis, which takes capacity",
        ),
        _member(
            "capacity",
            (Medium.REDIS,),
            "capacity is required for the medium Redis and not allowed for CPU and NVMe, which take capacityPerPod",
        ),
        _member(
            "redis",
            (Medium.REDIS,),
            "the redis block is required for the medium Redis and not allowed for others: set it, or remove it",
        ),
        _member(
            "nvme",
            (Medium.NVME,),
            "the nvme block is required for the medium NVMe and not allowed for others: set it, or remove it",
        ),
        Rule(
            cel="!has(self.encryption) || self.medium in ['NVMe', 'Redis']",
            message="encryption is only for the media Redis and NVMe: remove it, memory of a pod is not encrypted",
            field_path=".encryption",
            holds=lambda spec: spec.encryption is None or spec.medium in _AT_REST,
        ),
        Rule(
            cel="!has(self.capacity) || !has(self.redis) || !has(self.redis.managed) || "
            "!has(self.redis.managed.shards) || !isQuantity(string(self.capacity)) || "
            "quantity(string(self.capacity)).asApproximateFloat() >= "
            f"{Quantity(LEAST_CAPACITY).in_bytes}.0 * double(self.redis.managed.shards)",
            message=f"capacity must be at least {LEAST_CAPACITY} for each of redis.managed.shards: in a smaller "
            "shard every chunk evicts the previous one; raise capacity, or lower shards",
            field_path=".capacity",
            holds=_has_room_in_each_shard,
        ),
        Rule(
            cel="!has(self.redis) || !has(self.eviction) || !has(self.eviction.highWatermarkPercent) || "
            "self.eviction.highWatermarkPercent <= "
            "((has(self.redis.managed) ? has(self.redis.managed.shards) && self.redis.managed.shards > 1 : "
            "has(self.redis.external) && has(self.redis.external.cluster) && self.redis.external.cluster) ? "
            f"{CLUSTER_HIGH_WATERMARK_PERCENT} : {REDIS_HIGH_WATERMARK_PERCENT})",
            message=f"on Redis blocks can take at most {REDIS_HIGH_WATERMARK_PERCENT} percent of the capacity, of "
            f"several servers {CLUSTER_HIGH_WATERMARK_PERCENT}, because index and allocator need the rest: lower "
            "eviction.highWatermarkPercent, or remove it",
            field_path=".eviction",
            holds=_watermark_fits,
        ),
        Rule(
            cel="(has(self.encryption) ? self.encryption : 'Required') == "
            "(has(oldSelf.encryption) ? oldSelf.encryption : 'Required')",
            message="encryption is immutable: create another CacheTier and move the models to it",
            field_path=".encryption",
        ),
    )

    @property
    def capacity_bytes(self) -> int:
        """Bytes in each pod for CPU and NVMe, in total for Redis."""
        return (self.capacity or self.capacity_per_pod or Quantity("0")).in_bytes

    @property
    def per_pod(self) -> bool:
        """Whether every pod has this tier for itself."""
        return self.medium is not Medium.REDIS

    @property
    def managed(self) -> RedisManaged | None:
        """Redis servers that the operator runs; None for any other tier."""
        return self.redis.managed if self.redis is not None else None

    @property
    def is_cluster(self) -> bool:
        external = self.redis.external if self.redis is not None else None
        return self.managed is not None or (external is not None and bool(external.cluster))

    @property
    def has_several_primaries(self) -> bool:
        """Whether blocks are spread over several servers; assumed of an external cluster."""
        return self.is_cluster if self.managed is None else self.managed.shards > 1

    @property
    def default_high_watermark_percent(self) -> int:
        """highWatermarkPercent when it is absent; for Redis also the maximum."""
        if self.medium is not Medium.REDIS:
            return DEFAULT_HIGH_WATERMARK_PERCENT
        return CLUSTER_HIGH_WATERMARK_PERCENT if self.has_several_primaries else REDIS_HIGH_WATERMARK_PERCENT

    @property
    def high_watermark_percent(self) -> int:
        chosen = self.eviction.high_watermark_percent if self.eviction is not None else None
        return chosen if chosen is not None else self.default_high_watermark_percent

    @property
    def encryption_required(self) -> bool:
        """Whether blocks at rest must be encrypted; never for media that are memory of a pod."""
        return self.medium in _AT_REST and self.encryption is not Encryption.DISABLED

    @property
    def outlives_pods(self) -> bool:
        """Whether files stay when their pod ends: in a folder of the node they do, in a pod's own volume they do
        not."""
        return self.nvme is not None and self.nvme.host_path is not None

    @property
    def max_retention_s(self) -> int | None:
        return self.max_retention.in_seconds if self.max_retention is not None else None

    def admits(self, classification: Classification) -> bool:
        return self.allowed_classifications is None or classification in self.allowed_classifications


Count = Annotated[int, Field(ge=0)]


class SlotLoss(ApiModel):
    """Slots of a cluster whose blocks were lost with their servers."""

    at: Timestamp
    """When the slots were assigned to servers without these blocks."""

    slots: Annotated[int, Field(ge=1, le=CLUSTER_SLOTS)]
    """Number of slots: 16384 if all blocks were lost at once."""


class Restores(ApiModel):
    """Loads of a tier's hits, compared with their prefill. Figures are rounded to two digits, those of several pods are
    summed, and their speeds are the slowest pod's."""

    loaded: Count
    """Hits of requests that were loaded."""

    declined: Count
    """Hits of requests that were computed, because loading them takes longer."""

    saved_seconds: Count
    """Prefill of loaded hits, less the duration of their loads."""

    avoided_seconds: Count
    """Loads of declined hits, less their prefill; estimated."""

    bytes_per_second: Count
    """Speed of loads."""

    tokens_per_second: Count
    """Speed of loads."""

    prefill_tokens_per_second: Count
    """Speed of the engine's prefill."""


class TierServer(StatusModel):
    """A managed server that ran, by its pod."""

    name: ShortText
    """Name of its pod."""

    uid: ShortText
    """UID of its pod."""

    lost_at: Timestamp | None = None
    """When an operator noticed that the pod had vanished before its end was reported. Erasures that had begun by then
    name it as residue."""


class CacheTierStatus(Status):
    """Observed state of a CacheTier."""

    capacity: Quantity | None = None
    """The capacity in the spec: in each pod for CPU and NVMe, in total for Redis. It is not measured."""

    used: Quantity | None = None
    """Bytes in use: on Redis as its servers report, on NVMe in the pod that uses most; absent on CPU. Updated when it
    changes by a twentieth of the capacity."""

    guaranteed: Quantity | None = None
    """Sum of the admitted guarantees: in each pod for CPU and NVMe, in total for Redis."""

    restores: Restores | None = None
    """Loads of its hits, and the time saved, in pods that serve now; absent until a pod has measured it, and on CPU."""

    shards: Annotated[int, Field(ge=0, le=MAX_SHOWN_SHARDS)] | None = None
    """Shards that the spec asks for; for Redis."""

    shards_ready: Annotated[int, Field(ge=0, le=MAX_SHOWN_SHARDS)] | None = None
    """Shards that answer; for Redis. Of a managed cluster: shards that serve and whose replicas are all in step. Absent
    while the tier is stalled."""

    replicas: Annotated[int, Field(ge=0, le=MAX_SHOWN_SHARDS)] | None = None
    """Replicas in step with their primaries, over all shards; for a managed cluster."""

    progress: Text | None = None
    """Current change to a managed cluster and its progress. Absent if there is none."""

    formed_at: Timestamp | None = None
    """When all slots of a managed cluster were first served after it was formed. A cluster that is formed again has
    lost all blocks."""

    last_loss: SlotLoss | None = None
    """The last loss of blocks together with servers of a managed cluster."""

    servers: Annotated[tuple[TierServer, ...], Field(max_length=MAX_SERVERS), atomic_list()] = ()
    """Servers of a managed tier that may have blocks, by which a later operator notices those that vanished."""

    external: RedisExternal | None = None
    """The external servers that pods use: those of the spec that last passed the required checks. Until new servers in
    the spec pass, pods continue with these. Absent until servers have passed."""


class CacheTier(Resource):
    """A CacheTier is one layer that holds KV blocks behind the engine's own memory: memory or local files of each
    pod, or Redis servers that all pods share. CachedModels list their tiers from fast to slow; policies give tenants
    budgets on them."""

    INFO: ClassVar[KindInfo] = KindInfo(
        kind="CacheTier",
        plural="cachetiers",
        short_names=("ctier",),
        columns=(
            Column("Medium", ".spec.medium"),
            Column(
                "Capacity", ".status.summary.capacity", description="In each pod for CPU and NVMe, in total for Redis"
            ),
            Column("Used", ".status.summary.used"),
            *READY,
            Column("Guaranteed", ".status.summary.guaranteed", priority=1),
            Column("Shards", ".status.shardsReady", "integer", "Shards that answer", priority=1),
        ),
        selectable_fields=(".spec.medium",),
    )
    RULES = (*Resource.RULES, NAME_FITS)

    spec: CacheTierSpec
    status: CacheTierStatus = CacheTierStatus()
