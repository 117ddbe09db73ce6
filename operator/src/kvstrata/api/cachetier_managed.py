"""The part of a CacheTier that describes Redis servers which the operator runs."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from kvstrata.api.base import ApiModel, Rule
from kvstrata.api.common import Duration, Quantity, ServerTls, TlsMode
from kvstrata.api.markers import Between, Positive
from kvstrata.api.pod_template import PodTemplate, ResourceRequirements
from kvstrata.api.scalars import Image

MIN_CLUSTER_SHARDS = 3
"""With fewer primaries no majority of them is left to promote the replica of one that fails."""

DEFAULT_MIGRATE_MAX_BYTES = 8 << 20


class Rebalance(StrEnum):
    """What becomes of the blocks in slots that move to another shard."""

    MIGRATE = "Migrate"
    DROP = "Drop"


def _only_in_a_cluster(field: str, attribute: str) -> Rule:
    return Rule(
        cel=f"!has(self.{field}) || (has(self.shards) && self.shards >= {MIN_CLUSTER_SHARDS})",
        message=f"{field} is for slots that move between shards: set shards to {MIN_CLUSTER_SHARDS} or more, or remove "
        f"{field}",
        field_path=f".{field}",
        holds=lambda managed: getattr(managed, attribute) is None or managed.is_cluster,
    )


class RedisManaged(ApiModel):
    """Redis servers that the operator runs: one, or a Redis Cluster of at least three shards."""

    shards: Annotated[int, Field(ge=1, le=64)] | None = None
    """Number of primaries: 1 for a single server, 3 to 64 for a Redis Cluster. Absent means 1. One cannot become the
    other."""

    replicas_per_shard: Annotated[int, Field(ge=0, le=5)] | None = None
    """Replicas of each primary, in a cluster only; without any, a lost server's blocks are misses. Absent means 0."""

    rebalance: Rebalance | None = None
    """What becomes of blocks when the number of shards changes: Migrate moves them, Drop makes them misses, which is
    quicker. Absent means Migrate."""

    migrate_max_bytes: Annotated[Quantity, Positive()] | None = None
    """Largest value that is moved to another shard where servers move keys one by one, as all but Valkey 9 do: a server
    answers nobody else meanwhile. Larger ones become misses. Absent means 8Mi."""

    image: Image | None = None
    """Image with redis-server or valkey-server, version 7.0 or later, and a shell. Absent means the one that the
    operator was installed with."""

    tls: ServerTls | None = None
    """TLS of the servers, towards pods and one another. Absent means Issued. The Secret of a cert-manager Certificate
    fits mode Secret; in a cluster it needs the usages server auth and client auth."""

    rotate_passwords_every: Annotated[Duration, Between("1h", "8760h")] | None = None
    """How old the passwords of the servers' users may become. Absent means 90 days (2160h). A new value of the
    annotation kvstrata.io/rotate-passwords rotates them at once."""

    resources: ResourceRequirements | None = None
    """Resources of each server. Absent means memory that fits the capacity; of a cluster, cpu sets io-threads."""

    pod_template: PodTemplate | None = None
    """Settings of the servers' pods."""

    RULES = (
        Rule(
            cel="!has(self.shards) || self.shards != 2",
            message="shards must be 1 for a single server or 3 to 64 for a cluster: of two primaries none is a "
            "majority that could promote the other's replica",
            field_path=".shards",
            holds=lambda managed: managed.shards != 2,
        ),
        Rule(
            cel="!has(self.replicasPerShard) || self.replicasPerShard == 0 || "
            f"(has(self.shards) && self.shards >= {MIN_CLUSTER_SHARDS})",
            message="replicas need a cluster: set shards to 3 or more, or replicasPerShard to 0",
            field_path=".replicasPerShard",
            holds=lambda managed: not managed.replicas_per_shard or managed.is_cluster,
        ),
        _only_in_a_cluster("rebalance", "rebalance"),
        _only_in_a_cluster("migrateMaxBytes", "migrate_max_bytes"),
        Rule(
            cel=f"(has(self.shards) && self.shards >= {MIN_CLUSTER_SHARDS}) == "
            f"(has(oldSelf.shards) && oldSelf.shards >= {MIN_CLUSTER_SHARDS})",
            message="a single server cannot become a cluster, nor a cluster a single server: create another CacheTier "
            "and move the models to it",
            field_path=".shards",
        ),
    )

    @property
    def effective_shards(self) -> int:
        """Number of primaries."""
        return self.shards if self.shards is not None else 1

    @property
    def effective_replicas_per_shard(self) -> int:
        """Replicas of each primary."""
        return self.replicas_per_shard if self.replicas_per_shard is not None else 0

    @property
    def is_cluster(self) -> bool:
        """Whether the servers form a Redis Cluster."""
        return self.effective_shards >= MIN_CLUSTER_SHARDS

    @property
    def tls_mode(self) -> TlsMode:
        """tls.mode, or its default."""
        return self.tls.mode if self.tls is not None else TlsMode.ISSUED

    @property
    def drops_moved_blocks(self) -> bool:
        """Whether blocks in slots that move become misses."""
        return self.rebalance is Rebalance.DROP

    @property
    def movable_bytes(self) -> int:
        """migrateMaxBytes in bytes, or its default."""
        return self.migrate_max_bytes.in_bytes if self.migrate_max_bytes is not None else DEFAULT_MIGRATE_MAX_BYTES


def has_a_name_for_every_shard(tier: Any) -> bool:
    """Whether the names of a CacheTier's pods are short enough for the labels that Kubernetes gives them."""
    managed = tier.spec.redis.managed if tier.spec.redis is not None else None
    return len(tier.metadata.name) < 40 or managed is None or managed.effective_shards <= 10


NAME_FITS = Rule(
    cel="self.metadata.name.size() < 40 || !has(self.spec.redis) || !has(self.spec.redis.managed) || "
    "!has(self.spec.redis.managed.shards) || self.spec.redis.managed.shards <= 10",
    message="with more than 10 shards the name must have at most 39 characters, so that the names of pods fit their "
    "labels",
    field_path=".metadata.name",
    holds=has_a_name_for_every_shard,
)
