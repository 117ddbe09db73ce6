"""The checked-in CRDs on a real apiserver: accepted whole, and every part of the surface works."""

from __future__ import annotations

from typing import Any

import pytest

from kvstrata.api import KINDS
from kvstrata.api.base import GROUP, VERSION
from kvstrata.api.status import Condition, ConditionStatus
from kvstrata.api.tenantcachepolicy import TenantCachePolicy
from tests.api.apiserver import ApiServer, RefusedError
from tests.api.objects import valid


def test_no_schema_is_refused_as_non_structural(installed_crds: dict[str, Any]) -> None:
    assert sorted(installed_crds) == sorted(f"{kind.INFO.plural}.{GROUP}" for kind in KINDS)
    for name, crd in installed_crds.items():
        conditions = {one["type"]: one["status"] for one in crd["status"]["conditions"]}
        assert conditions["Established"] == "True", name
        assert conditions["NamesAccepted"] == "True", name
        assert conditions.get("NonStructuralSchema", "False") == "False", name


@pytest.mark.parametrize("category", ["cache-status", "kvstrata"])
def test_every_kind_is_in_the_category(api: ApiServer, category: str) -> None:
    resources = api.get(f"/apis/{GROUP}/{VERSION}")["resources"]
    kinds = {one["kind"] for one in resources if category in one.get("categories", [])}
    assert kinds == {kind.INFO.kind for kind in KINDS}


def test_the_apiserver_keeps_an_object_as_it_was_written(api: ApiServer) -> None:
    for kind in KINDS:
        written = valid(kind.INFO.kind)
        assert api.create(written, dry_run=True).get("spec", {}) == written.get("spec", {})


def test_replicas_is_the_only_field_that_is_filled_in(api: ApiServer) -> None:
    model = valid("CachedModel")
    del model["spec"]["engine"]["replicas"]
    stored = api.create(model, dry_run=True)["spec"]
    assert stored["engine"].pop("replicas") == 1
    assert stored == model["spec"]


def test_scale_reads_and_writes_replicas(api: ApiServer) -> None:
    model = valid("CachedModel", name="scaled")
    api.create(model)
    api.merge_patch(model, {"status": {"replicas": 2, "selector": "kvstrata.io/model=scaled"}}, "/status")
    assert api.get_object(model, "/scale")["status"] == {"replicas": 2, "selector": "kvstrata.io/model=scaled"}
    api.merge_patch(model, {"spec": {"replicas": 7}}, "/scale")
    assert api.get_object(model)["spec"]["engine"]["replicas"] == 7
    api.delete(model)


def test_columns_of_a_policy_show_tenant_budget_and_conditions(api: ApiServer) -> None:
    policy = valid("TenantCachePolicy", name="columns")
    api.create(policy)
    condition = {"reason": "AllPodsAcknowledged", "message": "x", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    status = {
        "summary": {"guaranteed": "1024Mi", "limit": "2048Mi", "used": "512Mi"},
        "enforcedBy": "2/3",
        "conditions": [{"type": "Ready", "status": "False", **condition}],
    }
    api.merge_patch(policy, {"status": status}, "/status")
    row = api.columns("tenantcachepolicies", "default")["columns"]
    visible = {"Tenant": "acme", "Isolation": "Isolated", "Guaranteed": "1024Mi", "Limit": "2048Mi", "Used": "512Mi"}
    assert {name: row[name] for name in visible} == visible
    assert (row["Enforced"], row["Ready"], row["Reason"]) == ("2/3", "False", "AllPodsAcknowledged")
    api.delete(policy)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("CacheTier", ["Medium", "Capacity", "Used", "Ready", "Reason", "Age"]),
        ("TenantCachePolicy", ["Tenant", "Used", "Limit", "Enforced", "Ready", "Reason", "Age"]),
        ("CacheInvalidation", ["Scope", "Mode", "Took", "Ready", "Reason", "Age"]),
    ],
)
def test_the_columns_are_those_that_are_promised(installed_crds: dict[str, Any], kind: str, names: list[str]) -> None:
    info = next(one.INFO for one in KINDS if one.INFO.kind == kind)
    columns = installed_crds[f"{info.plural}.{GROUP}"]["spec"]["versions"][0]["additionalPrinterColumns"]
    assert [column["name"] for column in columns if not column.get("priority")] == names


def test_policies_can_be_selected_by_tenant(api: ApiServer) -> None:
    mine, other = valid("TenantCachePolicy", name="mine"), valid("TenantCachePolicy", name="other")
    mine["spec"]["tenant"] = "selected"
    for policy in (mine, other):
        api.create(policy)
    path = f"/apis/{GROUP}/{VERSION}/namespaces/default/tenantcachepolicies"
    found = api.get(path, fieldSelector="spec.tenant=selected")["items"]
    assert [one["metadata"]["name"] for one in found] == ["mine"]
    for policy in (mine, other):
        api.delete(policy)


STORE = {"tier": "shared", "places": ["redis.example:6379"]}


def test_a_status_that_the_models_write_is_stored_whole(api: ApiServer) -> None:
    policy = valid("TenantCachePolicy", name="statused")
    api.create(policy)
    status = {
        "observedGeneration": 1,
        "enforcedGeneration": 1,
        "digest": "abc",
        "cacheGeneration": 0,
        "scope": {"kind": "Tenant", "name": "acme", "epoch": "0" * 32, "rolls": 3, "stores": [STORE]},
        "conditions": [
            Condition(
                type="Ready",
                status=ConditionStatus.TRUE,
                reason="AllPodsAcknowledged",
                message="2 of 2",
                observed_generation=1,
                last_transition_time="2026-01-01T00:00:00Z",
            ).to_kubernetes()
        ],
    }
    stored = api.merge_patch(policy, {"status": status}, "/status")
    assert stored["status"] == status
    read = TenantCachePolicy.parse(stored)
    assert read.status.is_true("Ready")
    assert read.status.scope is not None
    assert read.status.scope.rolls == 3
    assert {**read.status.to_kubernetes()} == {**status, "formerScopes": []}
    api.delete(policy)


def test_a_second_condition_of_one_type_is_refused(api: ApiServer) -> None:
    policy = valid("TenantCachePolicy", name="twice")
    api.create(policy)
    condition = {
        "type": "Ready",
        "status": "True",
        "reason": "X",
        "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    with pytest.raises(RefusedError) as refused:
        api.merge_patch(policy, {"status": {"conditions": [condition, condition]}}, "/status")
    assert refused.value.causes[0].field == "status.conditions[1]"
    api.delete(policy)
