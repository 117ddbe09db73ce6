"""CacheTier: one layer of memory or storage that holds KV blocks."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints

from kvstrata.api.base import AGE, ApiModel, Column, KindInfo, Resource, Rule, condition_column, exactly_one_of
from kvstrata.api.cachetier_managed import NAME_FITS, RedisManaged
from kvstrata.api.common import (
    Classification,
    Duration,
    LocalObjectRef,
    Quantity,
    SecretKeyRef,
    Status,
)
from kvstrata.api.markers import Immutable, Positive, SetList
from kvstrata.api.scalars import AbsolutePath, ForeignName, LabelKey, LabelValue, ShortText, Text, Timestamp

DEFAULT_HIGH_WATERMARK_PERCENT = 90
MAX_SHOWN_SHARDS = 1024
CLUSTER_SLOTS = 16_384


class Medium(StrEnum):
    """What a tier is made of."""

    HBM = "HBM"
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
    """Share of the capacity at which eviction starts, and up to which guarantees are possible. Absent means 90. On
    Redis 80 at the most (of several servers 65), because index and allocator take room, too."""


class RedisClientTls(ApiModel):
    """TLS towards servers that someone else runs."""

    ca_secret_ref: SecretKeyRef
    """Certificate authority that the servers are checked against, in PEM."""


Endpoint = Annotated[
    str,
    StringConstraints(
        min_length=3,
        max_length=261,
        pattern=r"^([A-Za-z0-9]([-A-Za-z0-9.]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}$",
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

    username: Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[^\s\p{C}]+$")] | None = None
    """User of the server. Absent means its default user."""

    auth_secret_ref: LocalObjectRef | None = None
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


class Hbm(ApiModel):
    """The accelerator's memory, which the engine manages itself."""

    gpu_memory_utilization_percent: Annotated[int, Field(ge=1, le=100)] | None = None
    """Share of the accelerator's memory that the engine may use. Absent leaves the choice to the engine."""

    kv_cache_dtype: Literal["auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"] | None = None
    """Type of the KV cache's elements. Absent means auto."""


def _only_for(field: str, media: tuple[Medium, ...], message: str, attribute: str) -> Rule:
    names = ", ".join(f"'{medium}'" for medium in media)
    return Rule(
        cel=f"!has(self.{field}) || self.medium in [{names}]",
        message=message,
        field_path=f".{field}",
        holds=lambda spec: getattr(spec, attribute) is None or spec.medium in media,
    )


def _required_for(field: str, media: tuple[Medium, ...], message: str, attribute: str) -> Rule:
    names = ", ".join(f"'{medium}'" for medium in media)
    return Rule(
        cel=f"has(self.{field}) || !(self.medium in [{names}])",
        message=message,
        field_path=f".{field}",
        holds=lambda spec: getattr(spec, attribute) is not None or spec.medium not in media,
    )


_PER_POD = (Medium.CPU, Medium.NVME)
_AT_REST = (Medium.NVME, Medium.REDIS)


class CacheTierSpec(ApiModel):
    """One layer of memory or storage."""

    medium: Annotated[Medium, Immutable("medium is immutable: create another CacheTier and move the models to it")]
    """HBM: the accelerator's memory. CPU: memory of each pod. NVMe: local files of each pod. Redis: shared by all
    pods."""

    capacity_per_pod: Annotated[Quantity, Positive()] | None = None
    """Bytes in each pod; for CPU and NVMe."""

    capacity: Annotated[Quantity, Positive()] | None = None
    """Bytes in total; for Redis: of all servers together, of external ones what they may hold for this tier. Another
    capacity restarts the models' pods."""

    eviction: Eviction | None = None
    """How the tier makes room; not for HBM, where the engine evicts."""

    encryption: Encryption | None = None
    """Whether blocks at rest must be encrypted; for Redis and NVMe, where absent means Required. Immutable."""

    allowed_classifications: (
        Annotated[tuple[Classification, ...], Field(min_length=1, max_length=4), SetList()] | None
    ) = None
    """Classifications of data that may be stored here. Absent means all."""

    max_retention: Duration | None = None
    """Longest life of any block on this tier; kept on all media but HBM, as condition RetentionKept says. Absent
    means no limit of the tier's own; on Redis, blocks without a retention then expire after 24 h."""

    redis: Redis | None = None
    """Servers; for Redis."""

    nvme: Nvme | None = None
    """Files; for NVMe."""

    hbm: Hbm | None = None
    """Settings for HBM."""

    RULES = (
        _required_for(
            "capacityPerPod", _PER_POD, "capacityPerPod is required for the media CPU and NVMe", "capacity_per_pod"
        ),
        _only_for(
            "capacityPerPod",
            _PER_POD,
            "capacityPerPod is only for the media CPU and NVMe; Redis takes capacity",
            "capacity_per_pod",
        ),
        _required_for("capacity", (Medium.REDIS,), "capacity is required for the medium Redis", "capacity"),
        _only_for(
            "capacity",
            (Medium.REDIS,),
            "capacity is only for the medium Redis; CPU and NVMe take capacityPerPod",
            "capacity",
        ),
        _required_for("redis", (Medium.REDIS,), "the redis block is required for the medium Redis", "redis"),
        _only_for("redis", (Medium.REDIS,), "the redis block is only for the medium Redis", "redis"),
        _required_for("nvme", (Medium.NVME,), "the nvme block is required for the medium NVMe", "nvme"),
        _only_for("nvme", (Medium.NVME,), "the nvme block is only for the medium NVMe", "nvme"),
        _only_for("hbm", (Medium.HBM,), "the hbm block is only for the medium HBM", "hbm"),
        _only_for(
            "encryption",
            _AT_REST,
            "encryption is only for the media Redis and NVMe; memory of a pod is not encrypted",
            "encryption",
        ),
        _only_for(
            "eviction",
            (Medium.CPU, Medium.NVME, Medium.REDIS),
            "eviction is not for the medium HBM, where the engine evicts on its own",
            "eviction",
        ),
        Rule(
            cel="(has(self.encryption) ? self.encryption : 'Required') == "
            "(has(oldSelf.encryption) ? oldSelf.encryption : 'Required')",
            message="encryption is immutable: create another CacheTier and move the models to it",
            field_path=".encryption",
        ),
    )

    @property
    def capacity_bytes(self) -> int | None:
        """Bytes in each pod for CPU and NVMe, in total for Redis; None for HBM."""
        chosen = self.capacity if self.capacity is not None else self.capacity_per_pod
        return chosen.in_bytes if chosen is not None else None

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
    def high_watermark_percent(self) -> int:
        """eviction.highWatermarkPercent, or its default."""
        chosen = self.eviction.high_watermark_percent if self.eviction is not None else None
        return chosen if chosen is not None else DEFAULT_HIGH_WATERMARK_PERCENT

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

    capacity: ShortText | None = None
    """The capacity that spec asks for: in each pod or in total, as the medium has it. It is not measured."""

    used: ShortText | None = None
    """Share of the capacity that is in use, in steps of five percent (~45%); for Redis, as its server says, for NVMe
    in the pod that uses most."""

    guaranteed: ShortText | None = None
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
    """A CacheTier is one layer that holds KV blocks: the accelerator's memory, memory or local files of each pod, or
    Redis servers that all pods share. CachedModels list their tiers from fast to slow; policies give tenants budgets
    on them."""

    INFO: ClassVar[KindInfo] = KindInfo(
        kind="CacheTier",
        plural="cachetiers",
        short_names=("ctier",),
        columns=(
            Column("Medium", ".spec.medium"),
            Column("Capacity", ".status.capacity", description="In each pod for CPU and NVMe, in total for Redis"),
            Column("Used", ".status.used"),
            condition_column("Ready", "Ready"),
            condition_column("Reason", "Ready", "reason"),
            Column("Guaranteed", ".status.guaranteed", priority=1),
            Column("Shards", ".status.shardsReady", "integer", "Shards that answer", priority=1),
            AGE,
        ),
        selectable_fields=(".spec.medium",),
    )
    RULES = (*Resource.RULES, NAME_FITS)

    spec: CacheTierSpec
    status: CacheTierStatus = CacheTierStatus()
