"""The part of a CacheTier that describes Redis servers which the operator runs."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from kvstrata.api.base import ApiModel, Rule
from kvstrata.api.common import ServerTls, TlsMode
from kvstrata.api.markers import at_least, between
from kvstrata.api.pod_template import PodTemplate, ResourceRequirements
from kvstrata.api.scalars import Duration, ForeignName, Image, Quantity

MIN_SHARDS_WITH_REPLICAS = 3
"""With fewer primaries, the rest is no majority that could promote the replica of a failed primary."""


class Rebalance(StrEnum):
    """Treatment of blocks in slots that move to another shard."""

    MIGRATE = "Migrate"
    DROP = "Drop"


class RedisManaged(ApiModel):
    """A Redis Cluster that the operator runs."""

    shards: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of primaries: 1, or 3 to 64. Absent means 1."""

    replicas_per_shard: Annotated[int, Field(ge=0, le=5)] = 0
    """Replicas of each primary; needs three shards or more. Without replicas, the blocks of a lost server become
    misses. Absent means 0."""

    rebalance: Rebalance = Rebalance.MIGRATE
    """Treatment of blocks when the number of shards changes. Migrate: blocks move to their new shard. Drop: they become
    misses, which is faster. Absent means Migrate."""

    migrate_max_bytes: Annotated[Quantity, at_least("1", "must be above 0")] = Quantity("8Mi")
    """Largest value that moves between servers that move keys one by one (all but Valkey 9), because a server answers
    no other request during such a move. Larger values become misses. Absent means 8Mi."""

    image: Image | None = None
    """Image with redis-server or valkey-server, version 7.0 or later, and a shell. Absent means the one that the
    operator was installed with."""

    tls: ServerTls = ServerTls(mode=TlsMode.ISSUED)
    """TLS of the servers, towards pods and one another. Absent means Issued. The Secret of a cert-manager Certificate
    fits mode Secret; it needs the usages server auth and client auth."""

    rotate_passwords_every: Annotated[Duration, between("1h", "8760h")] | None = None
    """Longest life of the passwords of the servers' users. Absent means 90 days (2160h). A new value of the annotation
    kvstrata.io/rotate-passwords rotates them at once."""

    resources: ResourceRequirements | None = None
    """Resources of each server. Absent means memory that fits the capacity; cpu also sets io-threads."""

    pod_template: PodTemplate | None = None
    """Settings of the servers' pods."""

    service_account_name: ForeignName | None = None
    """ServiceAccount of the servers' pods; its token is not mounted. Absent means the namespace's default."""

    RULES = (
        Rule(
            cel="!has(self.shards) || self.shards != 2",
            message="shards must be 1 or 3 to 64: one of two primaries is no majority that could promote the other's "
            "replica",
            field_path=".shards",
            holds=lambda managed: managed.shards != 2,
        ),
        Rule(
            cel="!has(self.replicasPerShard) || self.replicasPerShard == 0 || "
            f"(has(self.shards) && self.shards >= {MIN_SHARDS_WITH_REPLICAS})",
            message="replicas need the votes of three primaries: set shards to 3 or more, or replicasPerShard to 0",
            field_path=".replicasPerShard",
            holds=lambda managed: not managed.replicas_per_shard or managed.shards >= MIN_SHARDS_WITH_REPLICAS,
        ),
    )


NAME_FITS = Rule(
    cel="self.metadata.name.size() < 40 || !has(self.spec.redis) || !has(self.spec.redis.managed) || "
    "!has(self.spec.redis.managed.shards) || self.spec.redis.managed.shards <= 10",
    message="with more than 10 shards the name must have at most 39 characters, so that the names of pods fit their "
    "labels",
    field_path=".metadata.name",
    holds=lambda tier: len(tier.metadata.name) < 40 or tier.spec.managed is None or tier.spec.managed.shards <= 10,
)
