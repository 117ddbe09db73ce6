"""Invalid objects of the other kinds."""

from __future__ import annotations

from typing import Any

from tests.api.objects import OWNED_SECRET, REMOVE, Row


def argument(text: str) -> dict[str, Any]:
    return {"spec.engine.args": ["--max-num-seqs", "8", text]}


OWNED = "this flag belongs to the operator"
MODEL = [
    *(
        Row(f"arg {text}", "CachedModel", argument(text), "spec.engine.args[2]", f"{OWNED} ({remedy}")
        for text, remedy in (
            ("--host", "--host: the engine listens only for the gate)"),
            ("--port=1", "--port: the engine listens only for the gate)"),
            ("--uds", "--uds: "),
            ("--kv-transfer-config", "--kv-transfer-config: the operator connects"),
            ("--kv-transfer-config.kv_role", "--kv-transfer-config: "),
            ("--kv_transfer_config={}", "--kv-transfer-config: "),
            ("--kv-cache-dtype", "--kv-cache-dtype: set engine.kvCacheDtype)"),
            ("--gpu_memory_utilization=0.5", "--gpu-memory-utilization: set engine.gpuMemoryUtilizationPercent)"),
            ("--middleware", "--middleware: the operator's is the only middleware)"),
            ("--model", "--model: set model.source)"),
            ("--served_model_name=x", "--served-model-name: set model.name)"),
            ("--api-key", "--api-key: the gate authenticates: set gate.authentication)"),
            ("--no-enable-prefix-caching", "--no-enable-prefix-caching: set reuse.mode)"),
            ("--served-model", "--served-model-name: set model.name)"),
            ("-tp", "-tp: set engine.tensorParallelSize)"),
            ("--config=/tmp/x", "--config: a file could set any other flag of this list)"),
            ("--grpc", "--grpc: "),
            ("--weight-transfer-config={}", "--weight-transfer-config: "),
            ("--", "--host: "),
        )
    ),
    Row(
        "env",
        "CachedModel",
        {"spec.engine.env": [{"name": "VLLM_API_KEY", "value": "x"}]},
        "spec.engine.env[0].name",
        "these variables belong to the operator",
    ),
    Row(
        "env_of_an_owned_secret",
        "CachedModel",
        {"spec.engine.env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "kvs-tiny-bundle", "key": "a"}}}]},
        "spec.engine.env[0].valueFrom.secretKeyRef.name",
        OWNED_SECRET,
    ),
    Row(
        "env_with_two_values",
        "CachedModel",
        {"spec.engine.env": [{"name": "A", "value": "b", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]},
        "spec.engine.env[0].valueFrom",
        "valueFrom replaces value",
    ),
    Row(
        "env_of_the_identity",
        "CachedModel",
        {"spec.engine.env": [{"name": "VLLM_X", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]},
        "spec.engine.env[0].valueFrom",
        "variables that may change blocks (VLLM, LMCACHE, TORCH) need value",
    ),
    Row(
        "amount_of_a_resource",
        "CachedModel",
        {"spec.engine.resources": {"limits": {"cpu": "much"}}},
        "spec.engine.resources.limits.cpu",
        "should match",
    ),
    Row(
        "env_twice",
        "CachedModel",
        {"spec.engine.env": [{"name": "A"}, {"name": "A"}]},
        "spec.engine.env[1]",
        "Duplicate value",
    ),
    Row(
        "volume_of_an_owned_secret",
        "CachedModel",
        {"spec.engine.volumes": [{"name": "a", "secret": {"secretName": "kvs-tiny-bundle"}}]},
        "spec.engine.volumes[0].secret.secretName",
        OWNED_SECRET,
    ),
    Row(
        "volume_of_a_driver_with_an_owned_secret",
        "CachedModel",
        {"spec.engine.volumes": [{"name": "a", "csi": {"driver": "a", "nodePublishSecretRef": {"name": "kvs-x"}}}]},
        "spec.engine.volumes[0].csi.nodePublishSecretRef.name",
        OWNED_SECRET,
    ),
    Row(
        "volume_without_source",
        "CachedModel",
        {"spec.engine.volumes": [{"name": "a"}]},
        "spec.engine.volumes[0]",
        "a volume needs exactly one of configMap, secret",
    ),
    *(
        Row(
            f"mount {path}",
            "CachedModel",
            {
                "spec.engine.volumes": [{"name": "a", "emptyDir": {}}],
                "spec.engine.volumeMounts": [{"name": "a", "mountPath": path}],
            },
            "spec.engine.volumeMounts[0].mountPath",
            "this place belongs to the operator or the system",
        )
        for path in ("/", "/run/kvstrata", "/kvstrata/plugin", "/opt/../run/kvstrata")
    ),
    Row("no_source", "CachedModel", {"spec.model.source": {}}, "spec.model.source", "exactly one of hub, pvc and path"),
    Row(
        "two_sources",
        "CachedModel",
        {"spec.model.source.hub": {"repository": "a/b"}},
        "spec.model.source",
        "exactly one of hub, pvc and path",
    ),
    Row(
        "relative", "CachedModel", {"spec.model.source": {"path": "x"}}, "spec.model.source.path", "absolute path such"
    ),
    *(
        Row(
            f"origin {text}",
            "CachedModel",
            {"spec.gate.allowedOrigins": ["http://localhost:3000", text]},
            "spec.gate.allowedOrigins[1]",
            "must be an origin as browsers send it",
        )
        for text in (
            "*",
            "chat.example.com",
            "https://chat.example.com/",
            "https://A.example.com",
            "https://a,https://b",
        )
    ),
    Row(
        "rollback_window",
        "CachedModel",
        {"spec.rollbackWindow": "721h"},
        "spec.rollbackWindow",
        "must be between 0s and 720h",
    ),
    Row("replicas", "CachedModel", {"spec.engine.replicas": -1}, "spec.engine.replicas", "greater than or equal to 0"),
    Row(
        "chunk", "CachedModel", {"spec.cacheServer": {"chunkSize": 100}}, "spec.cacheServer.chunkSize", "multiple of 16"
    ),
    Row("chunk_zero", "CachedModel", {"spec.cacheServer": {"chunkSize": 0}}, "spec.cacheServer.chunkSize", "to 16"),
    Row(
        "tier_twice",
        "CachedModel",
        {"spec.tiers": [{"name": "cpu"}, {"name": "cpu"}]},
        "spec.tiers[1]",
        "Duplicate value",
    ),
    Row(
        "no_authentication",
        "CachedModel",
        {"spec.gate.authentication": {}},
        "spec.gate.authentication.apiKeys",
        "Required value",
    ),
    Row("reuse", "CachedModel", {"spec.reuse": {"mode": "Blend"}}, "spec.reuse.mode", '"Prefix", "Disabled"'),
    Row(
        "timeout",
        "CachedModel",
        {"spec.engine.startupTimeout": "1s"},
        "spec.engine.startupTimeout",
        "must be between 10s and 24h",
    ),
    Row("image", "CachedModel", {"spec.engine.image": "a b"}, "spec.engine.image", "reference of an image such"),
    Row("salt_name", "CachedModel", {"spec.model.name": "tiny@1"}, "spec.model.name", "name of a model such"),
    *(
        Row(f"owned_secret_{number}", "CachedModel", {path: reference, **changes}, f"{path}.name", OWNED_SECRET)
        for number, (path, reference, changes) in enumerate(
            (
                ("spec.gate.authentication.apiKeys.secretRef", {"name": "kvstrata-domain"}, {}),
                ("spec.gate.tls.secretRef", {"name": "kvs-tiny-tls"}, {"spec.gate.tls.mode": "Secret"}),
                (
                    "spec.model.source.hub.tokenSecretRef",
                    {"name": "kvs-shared-redis-auth", "key": "password"},
                    {"spec.model.source.path": REMOVE, "spec.model.source.hub.repository": "a/b"},
                ),
            )
        )
    ),
    *(
        Row(
            f"block_size {' '.join(arguments)} {chunk}",
            "CachedModel",
            {"spec.engine.args": list(arguments), **({"spec.cacheServer": {"chunkSize": chunk}} if chunk else {})},
            "spec.cacheServer.chunkSize",
            "must be a multiple of --block-size in engine.args: change one of them",
        )
        for arguments, chunk in (
            (("--block-size=48",), None),
            (("--block_size=48",), None),
            (("--block-size", "48"), None),
            (("--max-num-seqs", "8", "--block_size", "48", "--seed=1"), None),
            (("--block-size=32",), 48),
            (("--block-size=16", "--block-size=128"), 64),
            (("--block-size=123456789012345678",), None),
        )
    ),
]

POLICY = [
    Row("no_tenant", "TenantCachePolicy", {"spec.tenant": REMOVE}, "spec.tenant", "Required value"),
    Row("empty_tenant", "TenantCachePolicy", {"spec.tenant": ""}, "spec.tenant", "at least 1 chars"),
    Row("padded_tenant", "TenantCachePolicy", {"spec.tenant": " acme"}, "spec.tenant", "must be printable characters"),
    Row(
        "padded_end", "TenantCachePolicy", {"spec.tenant": "acme\u00a0"}, "spec.tenant", "must be printable characters"
    ),
    Row(
        "control_tenant",
        "TenantCachePolicy",
        {"spec.tenant": "ac\u0007me"},
        "spec.tenant",
        "must be printable characters",
    ),
    Row("two_lines", "TenantCachePolicy", {"spec.tenant": "ac\nme"}, "spec.tenant", "must be printable characters"),
    Row("long_tenant", "TenantCachePolicy", {"spec.tenant": "x" * 129}, "spec.tenant", "may not be more than 128"),
    Row(
        "group_missing",
        "TenantCachePolicy",
        {"spec.isolation": "Group", "spec.budgets": REMOVE},
        "spec.groupRef",
        "groupRef is required with isolation Group",
    ),
    Row(
        "group_too_much",
        "TenantCachePolicy",
        {"spec.groupRef": {"name": "research"}},
        "spec.groupRef",
        "groupRef is only for isolation Group",
    ),
    Row(
        "generation_of_public",
        "TenantCachePolicy",
        {"spec.isolation": "Public", "spec.budgets": [], "spec.cacheGeneration": 3},
        "spec.cacheGeneration",
        "cacheGeneration is only for isolation Isolated",
    ),
    Row(
        "budgets_of_public",
        "TenantCachePolicy",
        {"spec.isolation": "Public"},
        "spec.budgets",
        "guaranteed and limit are only for isolation Isolated",
    ),
    Row(
        "guarantee",
        "TenantCachePolicy",
        {"spec.budgets[0].guaranteed": "2049Mi"},
        "spec.budgets[0].guaranteed",
        "guaranteed must not be above limit",
    ),
    Row(
        "guarantee_units",
        "TenantCachePolicy",
        {"spec.budgets[0].guaranteed": 1025, "spec.budgets[0].limit": "1Ki"},
        "spec.budgets[0].guaranteed",
        "guaranteed must not be above limit",
    ),
    Row(
        "budget_twice",
        "TenantCachePolicy",
        {"spec.budgets": [{"tier": "shared"}, {"tier": "shared"}]},
        "spec.budgets[1]",
        "Duplicate value",
    ),
    Row(
        "retention",
        "TenantCachePolicy",
        {"spec.budgets[0].retention": "7 days"},
        "spec.budgets[0].retention",
        "must be a duration of whole seconds such as 45s, 5m, 1h30m, 1.5h or 7d",
    ),
    Row("models", "TenantCachePolicy", {"spec.models": {}}, "spec.models", "exactly one of names and selector"),
    Row(
        "selector",
        "TenantCachePolicy",
        {"spec.models": {"selector": {"matchExpressions": [{"key": "a", "operator": "In"}]}}},
        "spec.models.selector.matchExpressions[0]",
        "values are required for In and NotIn",
    ),
    Row(
        "classification",
        "TenantCachePolicy",
        {"spec.classification": "Secret"},
        "spec.classification",
        '"Public", "Internal", "Confidential", "Restricted"',
    ),
    Row(
        "pool_twice",
        "TenantCachePolicy",
        {"spec.pools": [{"name": "a"}, {"name": "a"}]},
        "spec.pools[1]",
        "Duplicate value",
    ),
]

OTHERS = [
    Row("member_twice", "TenantGroup", {"spec.members": ["a", "a"]}, "spec.members[1]", "Duplicate value"),
    Row("member_form", "TenantGroup", {"spec.members": ["a", "b "]}, "spec.members[1]", "must be printable characters"),
    Row(
        "guarantee_of_group",
        "TenantGroup",
        {"spec.budgets": [{"tier": "shared", "guaranteed": "2Gi", "limit": "1Gi"}]},
        "spec.budgets[0].guaranteed",
        "guaranteed must not be above limit",
    ),
    Row(
        "budgets_of_pools_only",
        "TenantGroup",
        {"spec.sharing": "PoolsOnly", "spec.budgets": [{"tier": "cpu", "limit": "1Mi"}]},
        "spec.budgets",
        "with sharing PoolsOnly nothing is stored under the group: remove budgets, and give members",
    ),
    Row("sharing", "TenantGroup", {"spec.sharing": "Some"}, "spec.sharing", '"Full", "PoolsOnly"'),
    Row("no_readers", "PrefixPool", {"spec.readers": {}}, "spec.readers", "readers must name at least one of"),
    Row(
        "readers_public",
        "PrefixPool",
        {"spec.readers": {"public": True, "tenants": ["acme"]}},
        "spec.readers.public",
        "public: true means every tenant",
    ),
    Row(
        "reader_twice",
        "PrefixPool",
        {"spec.readers": {"tenants": ["acme", "acme"]}},
        "spec.readers.tenants[1]",
        "Duplicate value",
    ),
    Row(
        "prefix_empty",
        "PrefixPool",
        {"spec.prefixes": [{"name": "a"}]},
        "spec.prefixes[0]",
        "exactly one of text, messages, tokenIDs and configMapKeyRef",
    ),
    Row(
        "prefix_tools",
        "PrefixPool",
        {"spec.prefixes": [{"name": "a", "text": "b", "tools": [{"type": "function"}]}]},
        "spec.prefixes[0]",
        "only for a prefix with messages",
    ),
    Row(
        "format_of_inline_text",
        "PrefixPool",
        {"spec.prefixes[0].format": "Chat"},
        "spec.prefixes[0].format",
        "format is only for a prefix with configMapKeyRef",
    ),
    Row("no_prefixes", "PrefixPool", {"spec.prefixes": []}, "spec.prefixes", "at least 1 items"),
    Row("no_scope", "CacheInvalidation", {"spec.scope": {}}, "spec.scope", "scope needs exactly one of"),
    Row("two_scopes", "CacheInvalidation", {"spec.scope.all": True}, "spec.scope", "scope needs exactly one of"),
    Row("all_false", "CacheInvalidation", {"spec.scope": {"all": False}}, "spec.scope.all", 'supported values: "true"'),
    Row("no_mode", "CacheInvalidation", {"spec.mode": REMOVE}, "spec.mode", "Required value"),
    Row(
        "shared_scopes",
        "CacheInvalidation",
        {"spec.scope": {"all": True}, "spec.sharedScopes": "Roll"},
        "spec.sharedScopes",
        "sharedScopes is only for a scope that names a tenant",
    ),
    Row(
        "lazy_tiers",
        "CacheInvalidation",
        {"spec.tiers": [{"name": "shared"}]},
        "spec.tiers",
        "tiers are only for mode Eager",
    ),
    Row(
        "lazy_residue",
        "CacheInvalidation",
        {"spec.allowResidue": True},
        "spec.allowResidue",
        "allowResidue is only for mode Eager",
    ),
    Row("deadline", "CacheInvalidation", {"spec.deadline": "1s"}, "spec.deadline", "must be between 10s and 168h"),
    Row("deadline_at_once", "CacheInvalidation", {"spec.deadline": "0s"}, "spec.deadline", "must be between 10s and"),
    Row(
        "deadline_past", "CacheInvalidation", {"spec.deadline": "-10m"}, "spec.deadline", "must be a duration of whole"
    ),
    Row(
        "deadline_date",
        "CacheInvalidation",
        {"spec.deadline": "2020-01-01"},
        "spec.deadline",
        "must be a duration of whole",
    ),
    Row(
        "prefix_content",
        "CacheInvalidation",
        {
            "spec.scope": {"prefix": {"modelRef": {"name": "tiny"}, "content": {}}},
            "spec.mode": "Eager",
            "spec.hbm": "ResetEngine",
        },
        "spec.scope.prefix.content",
        "exactly one of text, messages and tokenIDs",
    ),
    Row(
        "lazy_reset", "CacheInvalidation", {"spec.hbm": "ResetEngine"}, "spec.hbm", "set mode Eager, or hbm RollScopes"
    ),
    *(
        Row(
            f"prefix_{number}",
            "CacheInvalidation",
            {"spec.scope": {"prefix": {"modelRef": {"name": "tiny"}, "content": {"text": "x"}}}, **changes},
            "spec.scope.prefix",
            "a prefix takes mode Eager and hbm ResetEngine, and no tiers",
        )
        for number, changes in enumerate(
            (
                {"spec.mode": "Lazy"},
                {"spec.mode": "Eager"},
                {"spec.mode": "Eager", "spec.hbm": "RollScopes"},
                {"spec.mode": "Eager", "spec.hbm": "ResetEngine", "spec.tiers": [{"name": "cpu"}]},
            )
        )
    ),
]
