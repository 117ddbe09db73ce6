"""Reading objects: strict on spec, lenient on status, and effective values for what is absent."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from kvstrata.api import KINDS
from kvstrata.api.base import InvalidObjectError
from kvstrata.api.cachedmodel import CachedModel, ReuseMode
from kvstrata.api.cachedmodel_source import DType
from kvstrata.api.cachedomain import CacheDomain, CacheDomainSpec, OnStale, UnknownTenants
from kvstrata.api.cacheinvalidation import CacheInvalidation, InvalidationScope, Phase
from kvstrata.api.cachetier import CacheTier
from kvstrata.api.common import Budget, Classification, LabelSelector, TlsMode
from kvstrata.api.engine_flags import OWNED_FLAGS, owned_flag
from kvstrata.api.prefixpool import PrefixPool
from kvstrata.api.tenantcachepolicy import DeletionPolicy, TenantCachePolicy
from kvstrata.api.tenantgroup import Sharing, TenantGroup
from kvstrata.contract.receipt.vocabulary import Hbm, KeyCustody
from tests.api.objects import REMOVE, changed, valid


def metadata(**fields: Any) -> dict[str, Any]:
    return {"metadata": {**valid("CacheTier")["metadata"], **fields}}


def test_metadata_is_read_with_its_types() -> None:
    fields = {
        "uid": "u",
        "generation": 4,
        "resourceVersion": "77",
        "creationTimestamp": "2026-11-21T10:00:00Z",
        "deletionTimestamp": "2026-11-21T11:00:00Z",
        "labels": {"a": "b"},
        "finalizers": ["kvstrata.io/erase"],
        "managedFields": [{"manager": "kubectl"}],
    }
    tier = CacheTier.parse({**valid("CacheTier"), **metadata(**fields)})
    assert (tier.name, tier.namespace, tier.uid, tier.generation) == ("base", "default", "u", 4)
    assert tier.metadata.resource_version == "77"
    assert tier.metadata.creation_timestamp == datetime(2026, 11, 21, 10, tzinfo=UTC)
    assert tier.metadata.deleting
    assert tier.metadata.finalizers == ("kvstrata.io/erase",)
    assert tier.owner_reference()["uid"] == "u"
    assert tier.owner_reference()["controller"] is True


def test_objects_cannot_be_changed_once_read() -> None:
    tier = CacheTier.parse(valid("CacheTier"))
    with pytest.raises(ValidationError, match="frozen"):
        tier.spec.capacity = None  # type: ignore[misc]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.INFO.kind)
def test_what_was_read_is_written_back_unchanged(kind: Any) -> None:
    obj = valid(kind.INFO.kind)
    assert kind.parse(obj).spec.to_kubernetes() == obj["spec"]


def test_every_problem_is_named_with_its_field_in_api_form() -> None:
    broken = changed(
        valid("TenantCachePolicy"), {"spec.budgets[0].retention": "7w", "spec.tenant": REMOVE, "spec.isolation": "None"}
    )
    with pytest.raises(InvalidObjectError) as refused:
        TenantCachePolicy.parse(broken)
    assert {problem.field for problem in refused.value.problems} == {
        "spec.tenant",
        "spec.isolation",
        "spec.budgets[0].retention",
    }
    assert "spec.budgets[0].retention: must be a duration" in str(refused.value)


def test_an_object_of_another_kind_is_refused() -> None:
    with pytest.raises(InvalidObjectError, match="expected 'CacheTier'"):
        CacheTier.parse(valid("CacheDomain"))


def test_fields_of_a_newer_status_are_ignored_and_unreadable_ones_count_as_absent() -> None:
    status = {
        "phase": "Levitating",
        "took": "3s",
        "invented": {"x": 1},
        "pods": {"acked": -4},
        "scopeSummary": "tenant/acme",
    }
    read = CacheInvalidation.parse({**valid("CacheInvalidation"), "status": status}).status
    assert (read.phase, read.pods) == (None, None)
    assert (read.took, read.scope_summary) == ("3s", "tenant/acme")


def test_an_unreadable_status_never_hides_a_broken_spec() -> None:
    with pytest.raises(InvalidObjectError, match=r"spec\.mode"):
        CacheInvalidation.parse(
            changed(valid("CacheInvalidation"), {"spec.mode": "Odd", "status": {"phase": "Levitating"}})
        )


def test_an_empty_domain_has_the_documented_defaults() -> None:
    spec = CacheDomain.parse({**valid("CacheDomain"), "spec": None}).spec
    assert (spec.stale_after.in_seconds, spec.drain_timeout.in_seconds) == (300, 30)
    assert spec.max_request_duration.in_seconds == 900
    assert spec.on_stale is OnStale.FENCE
    assert spec.key_custody is KeyCustody.SECRET
    assert spec.unknown_tenants is UnknownTenants.NO_REUSE
    assert spec.public_budgets == ()
    assert CacheDomainSpec().to_kubernetes() == {}


def test_a_tier_without_encryption_requires_it_where_blocks_are_at_rest() -> None:
    silent = CacheTier.parse(changed(valid("CacheTier"), {"spec.encryption": REMOVE})).spec
    assert silent.encryption_required
    assert not CacheTier.parse(valid("CacheTier")).spec.encryption_required
    in_memory = CacheTier.parse({**valid("CacheTier"), "spec": {"medium": "CPU", "capacityPerPod": "2Gi"}}).spec
    assert not in_memory.encryption_required
    assert in_memory.capacity_bytes == 2 * 2**30
    assert in_memory.per_pod
    assert in_memory.high_watermark_percent == 90


def test_a_managed_redis_is_one_shard_with_issued_certificates_unless_told_otherwise() -> None:
    spec = CacheTier.parse(valid("CacheTier")).spec
    assert spec.redis is not None
    assert spec.redis.managed is not None
    managed = spec.redis.managed
    assert (managed.shards, managed.replicas_per_shard) == (1, 0)
    assert managed.tls.mode is TlsMode.ISSUED
    assert not spec.per_pod


def test_a_model_has_the_documented_defaults() -> None:
    model = CachedModel.parse(valid("CachedModel"))
    spec = model.spec
    assert spec.cache_image == spec.engine.image
    assert spec.cache_server.chunk_size == 256
    assert spec.engine.startup_timeout.in_seconds == 1800
    assert spec.engine.tensor_parallel_size == 1
    assert spec.model.dtype is DType.AUTO
    assert spec.reuse.mode is ReuseMode.PREFIX
    assert spec.probe.interval.in_seconds == 300
    assert spec.gate.tls.mode is TlsMode.ISSUED
    assert model.tier_names == ("cpu",)
    assert spec.cache_generation == 0


def test_a_policy_has_the_documented_defaults_and_gives_its_budgets_in_bytes() -> None:
    spec = TenantCachePolicy.parse(valid("TenantCachePolicy")).spec
    assert spec.effective_classification is Classification.RESTRICTED
    assert spec.deletion_policy is DeletionPolicy.ERASE
    assert not spec.suspend
    (budget,) = spec.budgets
    assert (budget.guaranteed_bytes, budget.limit_bytes, budget.retention_s) == (2**30, 2 * 2**30, 43200)
    unbounded = Budget(tier="shared")
    assert (unbounded.guaranteed_bytes, unbounded.limit_bytes, unbounded.retention_s) == (0, None, None)


def test_a_limit_of_zero_is_a_limit() -> None:
    assert Budget.model_validate({"tier": "shared", "limit": 0}).limit_bytes == 0


@pytest.mark.parametrize(
    ("models", "covered"),
    [
        (None, {"a", "b"}),
        ({"names": ["a"]}, {"a"}),
        ({"selector": {"matchLabels": {"tier": "gold"}}}, {"b"}),
        ({"selector": {}}, {"a", "b"}),
    ],
)
def test_a_policy_covers_models_by_name_or_label(models: dict[str, Any] | None, covered: set[str]) -> None:
    change = {"spec.models": models} if models is not None else {}
    spec = TenantCachePolicy.parse(changed(valid("TenantCachePolicy"), change)).spec
    labels = {"a": {"tier": "silver"}, "b": {"tier": "gold"}}
    assert {name for name in labels if spec.covers(name, labels[name])} == covered


@pytest.mark.parametrize(
    ("operator", "values", "matching"),
    [
        ("In", ["x"], [{"k": "x"}]),
        ("NotIn", ["x"], [{"k": "y"}, {}]),
        ("Exists", [], [{"k": "x"}, {"k": "y"}]),
        ("DoesNotExist", [], [{}]),
    ],
)
def test_label_requirements_match_as_in_kubernetes(
    operator: str, values: list[str], matching: list[dict[str, str]]
) -> None:
    selector = LabelSelector.model_validate(
        {"matchExpressions": [{"key": "k", "operator": operator, **({"values": values} if values else {})}]}
    )
    assert [labels for labels in ({"k": "x"}, {"k": "y"}, {}) if selector.matches(labels)] == matching


def test_classifications_rank_in_their_order() -> None:
    levels = list(Classification)
    assert sorted(levels, key=lambda one: one.level) == levels


def test_groups_pools_and_invalidations_have_the_documented_defaults() -> None:
    assert TenantGroup.parse(valid("TenantGroup")).spec.sharing is Sharing.FULL
    pool = PrefixPool.parse(valid("PrefixPool")).spec
    assert (pool.invalidation, pool.pinned) == ("Lazy", False)
    order = CacheInvalidation.parse(valid("CacheInvalidation")).spec
    assert (order.hbm, order.deadline_s, order.allow_residue) == (Hbm.ROLL_SCOPES, None, False)


@pytest.mark.parametrize(
    ("scope", "summary"),
    [
        ({"tenant": "acme"}, "tenant/acme"),
        ({"group": "research"}, "group/research"),
        ({"pool": "p"}, "pool/p"),
        ({"model": "m"}, "model/m"),
        ({"prefix": {"modelRef": {"name": "m"}, "content": {"text": "x"}}}, "prefix/m"),
        ({"all": True}, "all"),
    ],
)
def test_every_scope_has_a_short_form(scope: dict[str, Any], summary: str) -> None:
    assert InvalidationScope.model_validate(scope).summary == summary


def test_only_complete_and_failed_are_final() -> None:
    assert {phase for phase in Phase if phase.finished} == {Phase.COMPLETE, Phase.FAILED}


@given(st.sampled_from(sorted(OWNED_FLAGS)), st.sampled_from(["", "=x", ".key", ".key=x"]), st.booleans())
def test_an_owned_flag_is_found_in_every_spelling(flag: str, suffix: str, underscores: bool) -> None:
    body = flag.lstrip("-")
    dashes = flag[: len(flag) - len(body)]
    spelled = dashes + (body.replace("-", "_") if underscores else body) + suffix
    found = owned_flag(spelled)
    assert found is not None
    assert found.startswith(flag)


@given(st.sampled_from(sorted(OWNED_FLAGS)), st.data())
def test_an_abbreviation_of_an_owned_flag_is_found(flag: str, data: st.DataObject) -> None:
    length = data.draw(st.integers(1, len(flag)))
    assert owned_flag(flag[:length]) is not None


@pytest.mark.parametrize("argument", ["8", "x", "./a.jinja", "--max-num-seqs", "--model-impl", "-1", "--enforce-eager"])
def test_other_arguments_are_left_alone(argument: str) -> None:
    assert owned_flag(argument) is None
