"""Restarts that edits of fields cause, for the reference. Kinds and fields that are not listed restart no pod."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class Restart(StrEnum):
    NONE = "no pod"
    PODS = "the models' pods"
    PODS_OF_OWN_TIER = "the models' pods for CPU and NVMe; no pod for Redis"
    PODS_OF_FILES = "the models' pods for NVMe; no pod for CPU and Redis"
    SERVERS = "the servers of a managed tier"
    REFUSED = "refused: the field is immutable"


RESTARTS: Mapping[str, Mapping[str, Restart]] = {
    "CacheTier": {
        "spec.medium": Restart.REFUSED,
        "spec.encryption": Restart.REFUSED,
        "spec.capacityPerPod": Restart.PODS,
        "spec.capacity": Restart.SERVERS,
        "spec.eviction": Restart.PODS_OF_OWN_TIER,
        "spec.maxRetention": Restart.PODS_OF_FILES,
        "spec.nvme": Restart.PODS,
        "spec.redis.managed.shards": Restart.SERVERS,
        "spec.redis.managed.image": Restart.SERVERS,
        "spec.redis.managed.resources": Restart.SERVERS,
        "spec.redis.managed.podTemplate": Restart.SERVERS,
        "spec.redis.managed.serviceAccountName": Restart.SERVERS,
        "spec.redis.managed.tls": Restart.SERVERS,
    },
    "CachedModel": {
        "spec": Restart.PODS,
        "spec.engine.replicas": Restart.NONE,
        "spec.engine.rollout": Restart.NONE,
        "spec.tiers": Restart.PODS_OF_OWN_TIER,
        "spec.gate.rateLimit": Restart.NONE,
        "spec.reuse": Restart.NONE,
        "spec.rollbackWindow": Restart.NONE,
        "spec.probe": Restart.NONE,
    },
}
"""By kind and field; a field inside another has the other's unless it is listed itself."""


def restart_of(kind: str, field: str) -> Restart:
    declared, path = RESTARTS.get(kind, {}), field
    while path not in declared:
        path, _, last = path.rpartition(".")
        if not last:
            return Restart.NONE
    return declared[path]
