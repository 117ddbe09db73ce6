"""What schema and CEL can decide, the apiserver refuses: with the path of the field and a sentence a person can act on.

Every row is tried twice: on a real apiserver, and with the Python models, which must refuse the same objects. So an
object can never be admitted and then trip the operator, nor pass in Python what a cluster would refuse.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvstrata.api import KINDS
from kvstrata.api.base import InvalidObjectError
from tests.api.apiserver import ApiServer, RefusedError
from tests.api.objects import Row, changed, valid
from tests.api.refused_models import MODEL, OTHERS, POLICY, argument
from tests.api.refused_tiers import DOMAIN, KMS, TIER

ROWS: list[Row] = [*DOMAIN, *TIER, *MODEL, *POLICY, *OTHERS]
BY_KIND = {kind.INFO.kind: kind for kind in KINDS}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.kind}-{row.id}")
def test_the_apiserver_names_the_field_and_says_why(api: ApiServer, row: Row) -> None:
    base = valid(row.kind)
    api.create(base, dry_run=True)
    with pytest.raises(RefusedError) as refused:
        api.create(changed(base, row.changes), dry_run=True)
    assert refused.value.status == 422, refused.value.message
    said = {(cause.field, cause.message) for cause in refused.value.causes}
    assert any(field == row.field and row.sentence in message for field, message in said), said


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.kind}-{row.id}")
def test_the_models_refuse_the_same_objects(row: Row) -> None:
    kind = BY_KIND[row.kind]
    kind.parse(valid(row.kind))
    with pytest.raises(InvalidObjectError) as refused:
        kind.parse(changed(valid(row.kind), row.changes))
    assert refused.value.problems


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("CacheTier", {"spec.colour": "red"}),
        ("CacheTier", {"spec.redis.managed.colour": "red"}),
        ("TenantCachePolicy", {"spec.budgets[0].colour": "red"}),
        ("CachedModel", {"spec.model.adapter": {"name": "lora", "source": {"path": "/opt/lora"}}}),
    ],
)
def test_an_unknown_field_is_refused_by_both(api: ApiServer, kind: str, changes: dict[str, Any]) -> None:
    with pytest.raises(RefusedError, match="unknown field"):
        api.create(changed(valid(kind), changes), dry_run=True)
    with pytest.raises(InvalidObjectError):
        BY_KIND[kind].parse(changed(valid(kind), changes))


PREFIX = {"modelRef": {"name": "m"}, "content": {"tokenIDs": [1, 2]}}
ACCEPTED = [
    ("TenantCachePolicy", {"spec.tenant": "Zürich Büro / 部門 7"}),
    ("TenantCachePolicy", {"spec.tenant": "x"}),
    ("TenantCachePolicy", {"spec.tenant": "ü" * 128}),
    ("TenantCachePolicy", {"spec.budgets[0].guaranteed": 1024, "spec.budgets[0].limit": "1Ki"}),
    ("TenantCachePolicy", {"spec.budgets[0]": {"tier": "shared", "limit": 0}}),
    ("CachedModel", argument("--max-model-length-of-something-else")),
    ("CachedModel", argument("./chat.jinja")),
    ("CachedModel", argument("-1")),
    ("CachedModel", argument("--model-impl=auto")),
    ("CachedModel", {"spec.engine.replicas": 0}),
    ("CachedModel", {"spec.engine.resources": {"requests": {"cpu": 0.5}, "limits": {"cpu": 1, "memory": "1.5Gi"}}}),
    *(
        ("CachedModel", {"spec.engine.args": arguments, "spec.cacheServer": {"chunkSize": 96}})
        for arguments in (
            ["--block-size=48"],
            ["--block_size", "32", "--seed", "1"],
            ["--block-size", "auto"],
            ["--block-size"],
            ["--block-size=0"],
            ["--block-size-of-another=7"],
            ["--seed=7", "7", *["x" * 1024] * 126],
        )
    ),
    ("CachedModel", {"spec.gate.authentication.apiKeys.secretRef": {"name": "team-kvs-keys"}}),
    ("CachedModel", {"spec.engine.podTemplate": {"imagePullSecrets": [{"name": "kvstrata-registry"}]}}),
    ("TenantGroup", {"spec.sharing": "PoolsOnly"}),
    ("TenantGroup", {"spec.sharing": "PoolsOnly", "spec.budgets": []}),
    ("TenantGroup", {"spec.sharing": "Full", "spec.budgets": [{"tier": "cpu", "limit": "1Mi"}]}),
    ("CacheTier", {"metadata.name": "a" * 40}),
    ("CacheTier", {"spec.capacity": "16Mi"}),
    ("CacheTier", {"spec.capacity": 50_331_648, "spec.redis.managed": {"shards": 3}}),
    ("CacheTier", {"spec.eviction": {"highWatermarkPercent": 80}}),
    ("CacheTier", {"spec.redis.managed": {"shards": 3}, "spec.eviction": {"highWatermarkPercent": 65}}),
    ("CachedModel", {"spec.engine.gpuMemoryUtilizationPercent": 92, "spec.engine.kvCacheDtype": "fp8"}),
    ("CacheTier", {"spec.redis.managed": {"shards": 1, "replicasPerShard": 0}}),
    ("CacheTier", {"spec.redis.managed": {"shards": 3}}),
    ("CacheTier", {"spec.redis.managed": {"shards": 64, "replicasPerShard": 5, "rebalance": "Migrate"}}),
    ("CacheTier", {"spec.redis.managed": {"shards": 3, "rebalance": "Drop", "migrateMaxBytes": "1Ki"}}),
    ("CacheTier", {"spec.redis.managed": {"rotatePasswordsEvery": "1h"}}),
    ("CacheTier", {"metadata.name": "a" * 40, "spec.redis.managed": {"shards": 10}}),
    ("CacheTier", {"metadata.name": "a" * 39, "spec.redis.managed": {"shards": 64}}),
    ("CacheInvalidation", {"spec.mode": "Eager", "spec.tiers": [{"name": "shared"}], "spec.allowResidue": True}),
    ("CacheInvalidation", {"spec.mode": "Eager", "spec.hbm": "ResetEngine", "spec.scope": {"prefix": PREFIX}}),
    ("PrefixPool", {"spec.prefixes[0]": {"name": "a", "tokenIDs": [1, 2, 3]}}),
    ("PrefixPool", {"spec.prefixes[0]": {"name": "a", "configMapKeyRef": {"name": "c", "key": "k"}, "format": "Chat"}}),
    ("CacheDomain", {"spec": {}}),
    *(
        ("CacheDomain", {"spec.staleAfter": text})
        for text in ("5s", "1d", "0.01d", "23h60m", "1.5h", "0.05m2s", "24h0m")
    ),
    *(("TenantCachePolicy", {"spec.budgets[0].retention": text}) for text in ("7d", "1.5d", "1h30m", "0.25h", "0s")),
    ("CacheDomain", {"spec.keyCustody": "KMS", "spec.kms": KMS | {"mount": "a/b-c_d.e", "authMount": "team/k8s"}}),
    ("CacheDomain", {"spec.keyCustody": "Secret", "spec.kms": KMS}),
    ("CacheDomain", {"spec.staleAfter": "24h", "spec.drainTimeout": "1h"}),
]


@pytest.mark.parametrize(("kind", "changes"), ACCEPTED)
def test_what_is_just_within_the_rules_is_accepted_by_both(api: ApiServer, kind: str, changes: dict[str, Any]) -> None:
    written = changed(valid(kind), changes)
    assert BY_KIND[kind].parse(api.create(written, dry_run=True)).spec == BY_KIND[kind].parse(written).spec  # type: ignore[attr-defined]


IMMUTABLE = [
    ("TenantCachePolicy", {"tenant": "globex"}, "spec.tenant", "tenant is immutable"),
    (
        "CacheTier",
        {"medium": "CPU", "capacity": None, "capacityPerPod": "1Gi", "redis": None, "encryption": None},
        "spec.medium",
        "is immutable",
    ),
    ("CacheTier", {"encryption": "Required"}, "spec.encryption", "encryption is immutable"),
    ("CacheTier", {"encryption": None}, "spec.encryption", "encryption is immutable"),
    ("PrefixPool", {"modelRef": {"name": "another"}}, "spec.modelRef", "modelRef is immutable"),
    ("CacheInvalidation", {"mode": "Eager"}, "spec", "an invalidation is immutable"),
    ("CacheInvalidation", {"reason": "added later"}, "spec", "an invalidation is immutable"),
]


def test_a_clusters_shards_replicas_and_capacity_can_be_changed(api: ApiServer) -> None:
    stored = changed(valid("CacheTier", name="sizes"), {"spec.redis.managed": {"shards": 3, "replicasPerShard": 1}})
    api.create(stored)
    try:
        alone = {"shards": None, "replicasPerShard": None}
        for managed in ({"shards": 5}, {"replicasPerShard": 0}, {"rebalance": "Drop"}, alone, {"shards": 3}):
            api.merge_patch(stored, {"spec": {"redis": {"managed": managed}, "capacity": "2Gi"}})
    finally:
        api.delete(stored)


def test_a_default_can_be_written_out(api: ApiServer) -> None:
    stored = changed(valid("CacheTier", name="default"), {"spec.encryption": "Required"})
    api.create(stored)
    try:
        api.merge_patch(stored, {"spec": {"encryption": None}})
        api.merge_patch(stored, {"spec": {"encryption": "Required"}})
    finally:
        api.delete(stored)


@pytest.mark.parametrize(("kind", "spec", "field", "sentence"), IMMUTABLE)
def test_what_is_immutable_cannot_be_changed(
    api: ApiServer, kind: str, spec: dict[str, Any], field: str, sentence: str
) -> None:
    stored = valid(kind, name="immutable")
    api.create(stored)
    try:
        with pytest.raises(RefusedError) as refused:
            api.merge_patch(stored, {"spec": spec})
        said = [(cause.field, cause.message) for cause in refused.value.causes]
        assert any(path == field and sentence in message for path, message in said), said
        api.merge_patch(stored, {"metadata": {"labels": {"still": "editable"}}})
    finally:
        api.delete(stored)
