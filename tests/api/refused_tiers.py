"""Invalid CacheDomains and CacheTiers."""

from __future__ import annotations

from typing import Any

from tests.api.objects import OWNED_SECRET, REMOVE, Row

LONG_NAME = "a" * 41

KMS = {"address": "https://bao:8200", "role": "kvstrata", "authorityConfigMapRef": {"name": "bao", "key": "ca.crt"}}
DOMAIN = [
    Row("domain_name", "CacheDomain", {"metadata.name": "other"}, "metadata.name", "its name must be default"),
    Row("stale_after_low", "CacheDomain", {"spec.staleAfter": "4s"}, "spec.staleAfter", "must be between 5s and 24h"),
    Row("stale_after_high", "CacheDomain", {"spec.staleAfter": "25h"}, "spec.staleAfter", "must be between 5s and 24h"),
    Row(
        "stale_after_days", "CacheDomain", {"spec.staleAfter": "1.01d"}, "spec.staleAfter", "must be between 5s and 24h"
    ),
    Row("stale_after_hours", "CacheDomain", {"spec.staleAfter": "24.01h"}, "spec.staleAfter", "between 5s and 24h"),
    Row("stale_after_form", "CacheDomain", {"spec.staleAfter": "5 min"}, "spec.staleAfter", "such as 45s, 5m, 1h30m"),
    Row("stale_after_empty", "CacheDomain", {"spec.staleAfter": ""}, "spec.staleAfter", "at least 2 chars"),
    Row(
        "max_request_duration",
        "CacheDomain",
        {"spec.maxRequestDuration": "25h"},
        "spec.maxRequestDuration",
        "must be between 1s and 24h",
    ),
    Row("drain_timeout", "CacheDomain", {"spec.drainTimeout": "2h"}, "spec.drainTimeout", "must be between 1s and 1h"),
    Row("on_stale", "CacheDomain", {"spec.onStale": "Hope"}, "spec.onStale", '"Fence", "ServeStale"'),
    Row("custody", "CacheDomain", {"spec.keyCustody": "Paper"}, "spec.keyCustody", '"Secret", "KMS"'),
    Row(
        "custody_of_none", "CacheDomain", {"spec.keyCustody": "KMS"}, "spec.kms", "kms is required for keyCustody: KMS"
    ),
    Row(
        "kms_in_clear",
        "CacheDomain",
        {"spec.keyCustody": "KMS", "spec.kms": KMS | {"address": "http://bao:8200"}},
        "spec.kms.address",
        "must be https://HOST or https://HOST:PORT",
    ),
    Row(
        "kms_with_a_path",
        "CacheDomain",
        {"spec.keyCustody": "KMS", "spec.kms": KMS | {"address": "https://bao:8200/v1"}},
        "spec.kms.address",
        "must be https://HOST or https://HOST:PORT",
    ),
    *(
        Row(
            f"kms_{field}_{number}",
            "CacheDomain",
            {"spec.keyCustody": "KMS", "spec.kms": KMS | {field: path}},
            f"spec.kms.{field}",
            "must be a path such as transit",
        )
        for field in ("mount", "authMount", "namespace")
        for number, path in enumerate(("/keys", "keys/", "a//b", "..", "x/../../attacker", "x/./y"))
    ),
    Row("unknown", "CacheDomain", {"spec.unknownTenants": "Allow"}, "spec.unknownTenants", '"NoReuse", "Refuse"'),
    Row(
        "public_budget",
        "CacheDomain",
        {"spec.publicBudgets": [{"tier": "shared", "guaranteed": "2Gi", "limit": "1Gi"}]},
        "spec.publicBudgets[0].guaranteed",
        "guaranteed must not be above limit",
    ),
]

CPU: dict[str, Any] = {"spec.medium": "CPU", "spec.capacity": REMOVE, "spec.encryption": REMOVE, "spec.redis": REMOVE}
NVME: dict[str, Any] = {
    "spec.medium": "NVMe",
    "spec.capacity": REMOVE,
    "spec.redis": REMOVE,
    "spec.capacityPerPod": "1Gi",
}
EXTERNAL: dict[str, Any] = {
    "spec.redis.managed": REMOVE,
    "spec.redis.external": {"endpoints": ["a.example:6379", "b.example:6379"]},
}

ONE_SERVER: dict[str, Any] = {"spec.redis": {"external": {"endpoints": ["a.example:6379"]}}}

TIER = [
    Row("long_name", "CacheTier", {"metadata.name": LONG_NAME}, "metadata.name", "at most 40 characters"),
    Row("dotted_name", "CacheTier", {"metadata.name": "a.b"}, "metadata.name", "must not contain dots"),
    Row("medium", "CacheTier", {"spec.medium": "Tape"}, "spec.medium", '"CPU", "NVMe", "Redis"'),
    Row("no_medium", "CacheTier", {"spec.medium": REMOVE}, "spec.medium", "Required value"),
    Row("cpu_no_capacity", "CacheTier", CPU, "spec.capacityPerPod", "capacityPerPod is required for the media CPU"),
    Row(
        "cpu_capacity",
        "CacheTier",
        {**CPU, "spec.capacityPerPod": "1Gi", "spec.capacity": "1Gi"},
        "spec.capacity",
        "not allowed for CPU and NVMe, which take capacityPerPod",
    ),
    Row(
        "redis_no_capacity",
        "CacheTier",
        {"spec.capacity": REMOVE},
        "spec.capacity",
        "capacity is required for the medium Redis",
    ),
    Row(
        "redis_per_pod",
        "CacheTier",
        {"spec.capacityPerPod": "1Gi"},
        "spec.capacityPerPod",
        "not allowed for Redis, which takes capacity",
    ),
    Row(
        "cpu_encryption",
        "CacheTier",
        {**CPU, "spec.capacityPerPod": "1Gi", "spec.encryption": "Disabled"},
        "spec.encryption",
        "encryption is only for the media Redis and NVMe",
    ),
    Row(
        "capacity_zero",
        "CacheTier",
        {"spec.capacity": 0},
        "spec.capacity",
        "must be at least 16Mi: a chunk of 256 tokens",
    ),
    Row("capacity_small", "CacheTier", {"spec.capacity": "16383Ki"}, "spec.capacity", "must be at least 16Mi"),
    Row(
        "capacity_of_cpu",
        "CacheTier",
        {**CPU, "spec.capacityPerPod": 16_777_215},
        "spec.capacityPerPod",
        "with a billion parameters takes 8Mi",
    ),
    Row(
        "capacity_of_shards",
        "CacheTier",
        {"spec.capacity": "47Mi", "spec.redis.managed": {"shards": 3}},
        "spec.capacity",
        "must be at least 16Mi for each of redis.managed.shards",
    ),
    Row(
        "watermark_of_redis",
        "CacheTier",
        {"spec.eviction": {"highWatermarkPercent": 81}},
        "spec.eviction",
        "at most 80 percent of the capacity, of several servers 65",
    ),
    Row(
        "watermark_of_shards",
        "CacheTier",
        {"spec.redis.managed": {"shards": 3}, "spec.eviction": {"highWatermarkPercent": 66}},
        "spec.eviction",
        "lower eviction.highWatermarkPercent",
    ),
    Row(
        "watermark_of_a_cluster",
        "CacheTier",
        {
            "spec.redis": {"external": {"endpoints": ["a:1"], "cluster": True}},
            "spec.eviction": {"highWatermarkPercent": 66},
        },
        "spec.eviction",
        "lower eviction.highWatermarkPercent",
    ),
    Row("capacity_negative", "CacheTier", {"spec.capacity": -5}, "spec.capacity", "must be a size such as 512Mi"),
    Row("capacity_milli", "CacheTier", {"spec.capacity": "100m"}, "spec.capacity", "must be a size such as 512Mi"),
    Row("no_redis", "CacheTier", {"spec.redis": REMOVE}, "spec.redis", "required for the medium Redis"),
    Row(
        "redis_on_cpu",
        "CacheTier",
        {**CPU, "spec.capacityPerPod": "1Gi", "spec.redis": {"managed": {}}},
        "spec.redis",
        "required for the medium Redis and not allowed for others",
    ),
    Row("redis_neither", "CacheTier", {"spec.redis": {}}, "spec.redis", "exactly one of managed and external"),
    Row(
        "redis_both",
        "CacheTier",
        {"spec.redis.external": {"endpoints": ["a:1"]}},
        "spec.redis",
        "exactly one of managed and external",
    ),
    Row("endpoints", "CacheTier", EXTERNAL, "spec.redis.external.endpoints", "exactly one endpoint"),
    Row(
        "endpoint_twice",
        "CacheTier",
        {**EXTERNAL, "spec.redis.external": {"cluster": True, "endpoints": ["a:1", "a:1"]}},
        "spec.redis.external.endpoints[1]",
        "Duplicate value",
    ),
    Row(
        "endpoint_form",
        "CacheTier",
        {**EXTERNAL, "spec.redis.external": {"endpoints": ["redis://a:1"]}},
        "spec.redis.external.endpoints[0]",
        "must be HOST:PORT such as",
    ),
    Row("no_nvme", "CacheTier", NVME, "spec.nvme", "required for the medium NVMe"),
    Row("nvme_neither", "CacheTier", {**NVME, "spec.nvme": {}}, "spec.nvme", "exactly one of emptyDir and hostPath"),
    Row(
        "nvme_both",
        "CacheTier",
        {**NVME, "spec.nvme": {"emptyDir": {}, "hostPath": {"path": "/x"}}},
        "spec.nvme",
        "exactly one of emptyDir and hostPath",
    ),
    Row(
        "nvme_path",
        "CacheTier",
        {**NVME, "spec.nvme": {"hostPath": {"path": "x"}}},
        "spec.nvme.hostPath.path",
        "must be an absolute path",
    ),
    Row("nvme_on_redis", "CacheTier", {"spec.nvme": {"emptyDir": {}}}, "spec.nvme", "not allowed for others"),
    Row(
        "watermark",
        "CacheTier",
        {"spec.eviction": {"highWatermarkPercent": 101}},
        "spec.eviction.highWatermarkPercent",
        "less than or equal to 100",
    ),
    Row(
        "classification_twice",
        "CacheTier",
        {"spec.allowedClassifications": ["Public", "Public"]},
        "spec.allowedClassifications[1]",
        "Duplicate value",
    ),
    Row(
        "tls_secret",
        "CacheTier",
        {"spec.redis.managed": {"tls": {"mode": "Secret"}}},
        "spec.redis.managed.tls",
        "secretRef is required for mode Secret",
    ),
    *(
        Row(f"owned_secret_{number}", "CacheTier", {**changes, path: reference}, f"{path}.name", OWNED_SECRET)
        for number, (path, reference, changes) in enumerate(
            (
                ("spec.redis.managed.tls.secretRef", {"name": "kvs-ca"}, {"spec.redis.managed.tls.mode": "Secret"}),
                ("spec.redis.external.authSecretRef", {"name": "kvs-a-redis-auth"}, ONE_SERVER),
                ("spec.redis.external.tls.caSecretRef", {"name": "kvstrata-ca", "key": "ca.crt"}, ONE_SERVER),
            )
        )
    ),
    Row(
        "two_shards",
        "CacheTier",
        {"spec.redis.managed": {"shards": 2}},
        "spec.redis.managed.shards",
        "shards must be 1 or 3 to 64",
    ),
    Row("no_shards", "CacheTier", {"spec.redis.managed": {"shards": 0}}, "spec.redis.managed.shards", "greater than"),
    Row("many_shards", "CacheTier", {"spec.redis.managed": {"shards": 65}}, "spec.redis.managed.shards", "less than"),
    *(
        Row(
            f"replicas_{name}",
            "CacheTier",
            {"spec.redis.managed": {"replicasPerShard": 1, **shards}},
            "spec.redis.managed.replicasPerShard",
            "replicas need the votes of three primaries: set shards to 3 or more",
        )
        for name, shards in (("alone", {}), ("one", {"shards": 1}), ("two", {"shards": 2}))
    ),
    Row(
        "rebalance",
        "CacheTier",
        {"spec.redis.managed": {"shards": 3, "rebalance": "Flush"}},
        "spec.redis.managed.rebalance",
        '"Migrate", "Drop"',
    ),
    Row(
        "migrate_nothing",
        "CacheTier",
        {"spec.redis.managed": {"shards": 3, "migrateMaxBytes": 0}},
        "spec.redis.managed.migrateMaxBytes",
        "must be above 0",
    ),
    Row(
        "rotate_hourly",
        "CacheTier",
        {"spec.redis.managed": {"rotatePasswordsEvery": "59m"}},
        "spec.redis.managed.rotatePasswordsEvery",
        "must be between 1h and 8760h",
    ),
    Row(
        "long_name_of_many_shards",
        "CacheTier",
        {"metadata.name": "a" * 40, "spec.redis.managed": {"shards": 11}},
        "metadata.name",
        "with more than 10 shards the name must have at most 39 characters",
    ),
    Row(
        "pod_label",
        "CacheTier",
        {"spec.redis.managed": {"podTemplate": {"labels": {"kvstrata.io/tier": "x"}}}},
        "spec.redis.managed.podTemplate.labels",
        "belong to the operator",
    ),
    Row(
        "pod_label_form",
        "CacheTier",
        {"spec.redis.managed": {"podTemplate": {"labels": {"a b": "x"}}}},
        "spec.redis.managed.podTemplate.labels",
        "every key must be the key of a label",
    ),
]
