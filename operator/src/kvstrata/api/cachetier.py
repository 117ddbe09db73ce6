"""CacheTier: one layer of memory or storage that holds KV blocks."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field, StringConstraints

from kvstrata.api.base import AGE, READY, ApiModel, Column, KindInfo, Resource, Rule, exactly_one_of
from kvstrata.api.cachetier_managed import NAME_FITS, RedisManaged
from kvstrata.api.common import (
    Classification,
    Duration,
    Quantity,
    SecretKeyRef,
    SecretRef,
    Status,
)
from kvstrata.api.markers import AtLeast, Immutable, SetList
from kvstrata.api.scalars import AbsolutePath, ForeignName, LabelKey, LabelValue, Pattern, Text, Timestamp

DEFAULT_HIGH_WATERMARK_PERCENT = 90
REDIS_HIGH_WATERMARK_PERCENT = 80
"""Part of a Redis tier's capacity for blocks; the rest is for their index and the allocator's rounding."""

CLUSTER_HIGH_WATERMARK_PERCENT = 65
"""The same of several servers: a scope's sixteen buckets fall on them by chance, on some more than their share."""

MAX_SHOWN_SHARDS = 1024
CLUSTER_SLOTS = 16_384


class Medium(StrEnum):
    """What a tier is made of."""

    CPU = "CPU"
    NVME = "NVMe"
    REDIS = "Redis"


class Encryption(StrEnum):
    """Whether blocks at rest must be encrypted."""

    REQUIRED = "Required"
    DISABLED = "Disabled"


class Eviction(ApiModel):
    """When a tier makes room: the least recently used blocks go first."""

    high_watermark_percent: Annotated[int, Field(ge=10, le=100)] | None = None
    """Share of the capacity at which eviction starts, and up to which guarantees are possible. Absent means 90; for
    Redis 80, or 65 of several servers, which is also the most, because index and allocator take room, too."""


class RedisClientTls(ApiModel):
    """TLS towards servers that someone else runs."""

    ca_secret_ref: SecretKeyRef
    """Certificate authority that the servers are checked against, in PEM."""


Endpoint = Annotated[
    str,
    StringConstraints(min_length=3, max_length=261),
    Pattern(
        r"^([A-Za-z0-9]([-A-Za-z0-9.]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}$",
        "must be HOST:PORT such as redis.example.com:6379",
    ),
]


class RedisExternal(ApiModel):
    """Redis servers that someone else runs."""

    endpoints: Annotated[tuple[Endpoint, ...], Field(min_length=1, max_length=64), SetList()]
    """Addresses as host:port. Of a cluster some are enough; otherwise exactly one."""

    cluster: bool | None = None
    """Whether the servers form a Redis Cluster. Absent means no."""

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
    """Secret with the key password. Absent means that the server asks for none."""

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
    """Servers that the operator runs."""

    external: RedisExternal | None = None
    """Servers that someone else runs."""

    RULES = (exactly_one_of(("managed", "external"), "redis needs exactly one of managed and external"),)


class NvmeEmptyDir(ApiModel):
    """Space of the node, lost with the pod. It outlives the pod's containers."""


class NvmeHostPath(ApiModel):
    """A folder of the node, in which each pod has a place of its own; the next pod on the node inherits it."""

    path: AbsolutePath
    """The folder; it must exist and belong to uid 65532. Namespaces may share one. Such volumes need a namespace whose
    Pod Security level is privileged."""


class NvmeEphemeral(ApiModel):
    """A volume that is claimed for each pod and lost with it."""

    storage_class_name: ForeignName | None = None
    """StorageClass of the claim. Absent means the cluster's default."""

    labels: Annotated[dict[LabelKey, LabelValue], Field(max_length=32)] = Field(default_factory=dict)
    """Labels of the claim."""


class Nvme(ApiModel):
    """Where an NVMe tier keeps its files."""

    empty_dir: NvmeEmptyDir | None = None
    """Space of the node, lost with the pod."""

    host_path: NvmeHostPath | None = None
    """A folder of the node, in which each pod has a place of its own; the next pod on the node inherits it."""

    ephemeral: NvmeEphemeral | None = None
    """A volume that is claimed for each pod."""

    RULES = (
        exactly_one_of(
            ("emptyDir", "hostPath", "ephemeral"), "nvme needs exactly one of emptyDir, hostPath and ephemeral"
        ),
    )


def _only_for(field: str, attribute: str, media: tuple[Medium, ...], message: str) -> Rule:
    fits = ", ".join(f"'{medium}'" for medium in media)
    return Rule(
        cel=f"!has(self.{field}) || self.medium in [{fits}]",
        message=message,
        field_path=f".{field}",
        holds=lambda spec: getattr(spec, attribute) is None or spec.medium in media,
    )


def _member(field: str, attribute: str, media: tuple[Medium, ...], message: str) -> Rule:
    """A member of the union: required for these media, not allowed for others."""
    fits = ", ".join(f"'{medium}'" for medium in media)
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
    f"must be at least {LEAST_CAPACITY}: even of a model with a billion parameters a chunk of 256 tokens takes 8Mi, "
    "and in less every chunk evicts the one before"
)


def _watermark_fits(spec: CacheTierSpec) -> bool:
    chosen = spec.eviction.high_watermark_percent if spec.eviction is not None else None
    return chosen is None or spec.medium is not Medium.REDIS or chosen <= spec.default_high_watermark_percent


def _has_room_in_each_shard(spec: CacheTierSpec) -> bool:
    shards = spec.managed.effective_shards if spec.managed is not None else 1
    return spec.capacity is None or spec.capacity.in_bytes >= shards * Quantity(LEAST_CAPACITY).in_bytes


class CacheTierSpec(ApiModel):
    """One layer of memory or storage. The medium says which of the other fields belong to it."""

    medium: Annotated[Medium, Immutable("medium is immutable: create another CacheTier and move the models to it")]
    """CPU: memory of each pod. NVMe: local files of each pod. Redis: servers that all pods share."""

    capacity_per_pod: Annotated[Quantity, AtLeast(LEAST_CAPACITY, _WHY_NOT_LESS)] | None = None
    """Bytes in each pod, at least 16Mi; for CPU and NVMe."""

    capacity: Annotated[Quantity, AtLeast(LEAST_CAPACITY, _WHY_NOT_LESS)] | None = None
    """Bytes in total, at least 16Mi for each shard; for Redis: of all servers together, of external ones what they may
    hold for this tier. Another capacity restarts the models' pods."""

    eviction: Eviction | None = None
    """How the tier makes room."""

    encryption: Encryption | None = None
    """Whether blocks at rest must be encrypted; for Redis and NVMe, where absent means Required. Immutable."""

    allowed_classifications: (
        Annotated[tuple[Classification, ...], Field(min_length=1, max_length=4), SetList()] | None
    ) = None
    """Classifications of data that may be stored here. Absent means all."""

    max_retention: Duration | None = None
    """Longest life of any block on this tier, as condition RetentionKept reports. Absent means no limit of the tier's
    own; on Redis, blocks without a retention then expire after 24 h."""

    redis: Redis | None = None
    """Servers; for Redis."""

    nvme: Nvme | None = None
    """Files; for NVMe."""

    RULES = (
        _member(
            "capacityPerPod",
            "capacity_per_pod",
            _PER_POD,
            "capacityPerPod is required for the media CPU and NVMe and not allowed for Redis, which takes capacity",
        ),
        _member(
            "capacity",
            "capacity",
            (Medium.REDIS,),
            "capacity is required for the medium Redis and not allowed for CPU and NVMe, which take capacityPerPod",
        ),
        _member(
            "redis",
            "redis",
            (Medium.REDIS,),
            "the redis block is required for the medium Redis and not allowed for others: set it, or remove it",
        ),
        _member(
            "nvme",
            "nvme",
            (Medium.NVME,),
            "the nvme block is required for the medium NVMe and not allowed for others: set it, or remove it",
        ),
        _only_for(
            "encryption",
            "encryption",
            _AT_REST,
            "encryption is only for the media Redis and NVMe: remove it, memory of a pod is not encrypted",
        ),
        Rule(
            cel="!has(self.capacity) || !has(self.redis) || !has(self.redis.managed) || "
            "!has(self.redis.managed.shards) || quantity(string(self.capacity)).asApproximateFloat() >= "
            f"{Quantity(LEAST_CAPACITY).in_bytes}.0 * double(self.redis.managed.shards)",
            message=f"capacity must be at least {LEAST_CAPACITY} for each of redis.managed.shards: in less "
            "every chunk evicts the one before; raise capacity, or lower shards",
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
        """Whether the servers of a Redis tier form a Redis Cluster."""
        external = self.redis.external if self.redis is not None else None
        return self.managed is not None or (external is not None and bool(external.cluster))

    @property
    def has_several_primaries(self) -> bool:
        """Whether blocks are spread over servers; assumed of a cluster that someone else runs."""
        return self.is_cluster if self.managed is None else self.managed.effective_shards > 1

    @property
    def default_high_watermark_percent(self) -> int:
        """highWatermarkPercent when it is absent; for Redis also the most."""
        if self.medium is not Medium.REDIS:
            return DEFAULT_HIGH_WATERMARK_PERCENT
        return CLUSTER_HIGH_WATERMARK_PERCENT if self.has_several_primaries else REDIS_HIGH_WATERMARK_PERCENT

    @property
    def high_watermark_percent(self) -> int:
        """eviction.highWatermarkPercent, or its default."""
        chosen = self.eviction.high_watermark_percent if self.eviction is not None else None
        return chosen if chosen is not None else self.default_high_watermark_percent

    @property
    def encryption_required(self) -> bool:
        """Whether blocks at rest must be encrypted; never for media that are memory of a pod."""
        return self.medium in _AT_REST and self.encryption is not Encryption.DISABLED

    @property
    def outlives_pods(self) -> bool:
        """Whether files stay when their pod is gone: a folder of the node does, a pod's own volume goes with it."""
        return self.nvme is not None and self.nvme.host_path is not None

    @property
    def max_retention_s(self) -> int | None:
        """maxRetention in seconds; None for no limit."""
        return self.max_retention.in_seconds if self.max_retention is not None else None

    def admits(self, classification: Classification) -> bool:
        """Whether data of this classification may be stored on the tier."""
        return self.allowed_classifications is None or classification in self.allowed_classifications


class SlotLoss(ApiModel):
    """Slots of a cluster whose blocks were lost with their servers."""

    at: Timestamp
    """When the slots were given to servers without these blocks."""

    slots: Annotated[int, Field(ge=1, le=CLUSTER_SLOTS)]
    """How many slots: 16384 if everything was lost at once."""


class CacheTierStatus(Status):
    """Observed state of a CacheTier."""

    capacity: Quantity | None = None
    """The capacity that spec asks for: in each pod or in total, as the medium has it. It is not measured."""

    used: Quantity | None = None
    """Bytes in use: of Redis as its server reports, of NVMe in the pod that uses most. It is written when it differs by
    a twentieth of the capacity."""

    guaranteed: Quantity | None = None
    """Sum of the guarantees that were admitted: in each pod for CPU and NVMe, in total for Redis."""

    shards: Annotated[int, Field(ge=0, le=MAX_SHOWN_SHARDS)] | None = None
    """Shards that there should be; for Redis."""

    shards_ready: Annotated[int, Field(ge=0, le=MAX_SHOWN_SHARDS)] | None = None
    """Shards that answer; for Redis. Of a cluster that the operator runs those that serve, with all their replicas in
    step. Absent while the tier is stalled."""

    replicas: Annotated[int, Field(ge=0, le=MAX_SHOWN_SHARDS)] | None = None
    """Replicas that are in step with their primaries, of all shards together; of a cluster that the operator runs."""

    progress: Text | None = None
    """What is being done to a cluster that the operator runs, and how far it is. Absent when there is nothing to do."""

    formed_at: Timestamp | None = None
    """When all slots of a cluster that the operator runs were first served since it was formed. One that is formed
    again has lost everything."""

    last_loss: SlotLoss | None = None
    """The last time that blocks were lost with servers of a cluster that the operator runs."""

    external: RedisExternal | None = None
    """The external servers that pods use: those of spec when they last passed the checks that are required. While
    others that spec names now have not, pods go on with these. Absent until some have."""


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
            AGE,
        ),
        selectable_fields=(".spec.medium",),
    )
    RULES = (*Resource.RULES, NAME_FITS)

    spec: CacheTierSpec
    status: CacheTierStatus = CacheTierStatus()
