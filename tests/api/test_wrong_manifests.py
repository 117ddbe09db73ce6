"""Mistakes in YAML as users make them: each refusal names the field and says in words what to write instead."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import yaml

from tests.api.apiserver import ApiServer, RefusedError
from tests.api.objects import OWNED_SECRET, changed, valid

QUANTITY = "must be a size such as 512Mi, 10Gi or 1048576"


@dataclass(frozen=True, slots=True)
class Mistake:
    """Lines of YAML that spoil a valid object of `kind`, the field that the refusal names, and words of it."""

    kind: str
    text: str
    field: str
    sentence: str


WRONG = {
    "an unquoted Off": Mistake(
        "CachedModel", "spec.reuse.mode: Off", "spec.reuse.mode", 'supported values: "Prefix", "Disabled"'
    ),
    "a value in lower case": Mistake(
        "CacheTier", "spec.medium: redis", "spec.medium", 'supported values: "CPU", "NVMe", "Redis"'
    ),
    "a number in quotes": Mistake(
        "CacheTier", 'spec.redis.managed.shards: "3"', "spec.redis.managed.shards", "must be of type integer"
    ),
    "a duration in words": Mistake(
        "TenantCachePolicy",
        "spec.budgets[0].retention: 7 days",
        "spec.budgets[0].retention",
        "must be a duration of whole seconds such as 45s, 5m, 1h30m, 1.5h or 7d",
    ),
    "a limit in GB": Mistake("TenantCachePolicy", "spec.budgets[0].limit: 10GB", "spec.budgets[0].limit", QUANTITY),
    "a capacity in GB": Mistake("CacheTier", "spec.capacity: 10GB", "spec.capacity", QUANTITY),
    "a capacity in GB of three shards": Mistake(
        "CacheTier", "{spec.capacity: 10GB, spec.redis.managed.shards: 3}", "spec.capacity", QUANTITY
    ),
    "thousandths of a byte": Mistake(
        "CacheTier", "spec.capacity: 100m", "spec.capacity", "without fractions of a byte"
    ),
    "too small a capacity": Mistake(
        "CacheTier", "spec.capacity: 1Mi", "spec.capacity", "must be at least 16Mi: a chunk of 256 tokens"
    ),
    "the capacity of another medium": Mistake(
        "CacheTier",
        "{spec.medium: NVMe, spec.nvme: {emptyDir: {}}}",
        "spec.capacity",
        "not allowed for CPU and NVMe, which take capacityPerPod",
    ),
    "a limit below the guarantee": Mistake(
        "TenantCachePolicy",
        "spec.budgets[0].limit: 512Mi",
        "spec.budgets[0].guaranteed",
        "raise limit or lower guaranteed",
    ),
    "a typing error": Mistake("CacheTier", "spec.capcity: 1Gi", "spec.capcity", "unknown field"),
    "tokens of an identity provider": Mistake(
        "CachedModel",
        "spec.gate.authentication: {jwt: {issuer: https://idp.example.com}}",
        "spec.gate.authentication.jwt",
        "unknown field",
    ),
    "no authentication": Mistake(
        "CachedModel", "spec.gate.authentication: {}", "spec.gate.authentication.apiKeys", "Required value"
    ),
    "an engine flag of the operator": Mistake(
        "CachedModel",
        "spec.engine.args: [--enable-prefix-caching]",
        "spec.engine.args[0]",
        "this flag belongs to the operator (--enable-prefix-caching: set reuse.mode)",
    ),
    "chunks that are no whole blocks": Mistake(
        "CachedModel",
        'spec.engine.args: [--block-size, "48"]',
        "spec.cacheServer.chunkSize",
        "must be a multiple of --block-size in engine.args: change one of them",
    ),
    "a Secret of the operator": Mistake(
        "CachedModel",
        "spec.gate.authentication.apiKeys.secretRef.name: kvstrata-domain",
        "spec.gate.authentication.apiKeys.secretRef.name",
        OWNED_SECRET,
    ),
    "budgets where nothing is stored": Mistake(
        "TenantGroup",
        "{spec.sharing: PoolsOnly, spec.budgets: [{tier: shared, limit: 1Gi}]}",
        "spec.budgets",
        "remove budgets, and give members budgets in their own policies",
    ),
    "two scopes": Mistake(
        "CacheInvalidation",
        "spec.scope: {tenant: acme, all: true}",
        "spec.scope",
        "scope needs exactly one of tenant, group, pool, model, prefix and all",
    ),
    "a name that is too long": Mistake(
        "CacheTier",
        "metadata.name: redis-of-the-inference-team-in-frankfurt-1",
        "metadata.name",
        "the name must have at most 40 characters",
    ),
    "a name with a dot": Mistake("CacheTier", "metadata.name: redis.a", "metadata.name", "must not contain dots"),
}


@pytest.mark.parametrize("mistake", WRONG.values(), ids=WRONG)
def test_wrong_manifest_is_refused_with_field_and_remedy(api: ApiServer, mistake: Mistake) -> None:
    written = changed(valid(mistake.kind), yaml.safe_load(mistake.text))
    with pytest.raises(RefusedError) as refused:
        api.create(written, dry_run=True)
    said = [f"{cause.field}: {cause.message}" for cause in refused.value.causes] or [refused.value.message]
    assert any(mistake.field in line and mistake.sentence in line for line in said), said
    assert not any(sign in line for line in said for sign in ("regular expression", "should match", "^", "\\")), said
