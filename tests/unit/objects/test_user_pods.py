"""Settings of users and of the installation in pods and other objects, and those that would break isolation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvstrata.api.base import InvalidObjectError
from kvstrata.api.cachedmodel import CachedModel
from kvstrata.objects.children import model_children, redis_tier_children
from kvstrata.objects.erasure.delete_job import TierDeletion, build_deletion_job
from kvstrata.objects.pod.access import build_model_networkpolicy, build_redis_networkpolicy
from kvstrata.objects.pod.identity import cache_identity, render_id
from kvstrata.objects.pod.pod import pod_template
from tests.unit.objects.builders import CONTEXT, DOMAIN_ID, IDENTITY, model, redis_tier

PODS = {
    "schedulerName": "other",
    "dnsPolicy": "None",
    "dnsConfig": {"nameservers": ["192.0.2.1"]},
}
MOUNTED = {
    "volumes": [{"name": "plugin", "configMap": {"name": "templates"}}],
    "volumeMounts": [{"name": "plugin", "mountPath": "/etc/templates", "readOnly": True}],
}


def servers(**managed: Any) -> dict[str, Any]:
    children = redis_tier_children(CONTEXT, redis_tier(**managed))
    (built,) = [one["spec"]["template"]["spec"] for one in children if one["kind"] == "StatefulSet"]
    return dict(built)


def test_settings_of_pods_reach_models_and_servers() -> None:
    for spec in (
        pod_template(CONTEXT, DOMAIN_ID, model(engine={"podTemplate": PODS}), (), IDENTITY)["spec"],
        servers(podTemplate=PODS),
    ):
        assert {name: spec[name] for name in PODS} == PODS
        assert not spec["automountServiceAccountToken"]


def test_servers_take_a_service_account_and_pods_of_models_keep_their_own() -> None:
    assert servers(serviceAccountName="team")["serviceAccountName"] == "team"
    for wrong in ({"serviceAccountName": "team"}, {"podTemplate": {"serviceAccountName": "team"}}):
        with pytest.raises(InvalidObjectError, match="serviceAccountName"):
            model(engine=wrong)


def test_a_volume_is_mounted_in_the_engine_alone_under_a_name_that_is_not_ours() -> None:
    spec = pod_template(CONTEXT, DOMAIN_ID, model(engine=MOUNTED), (), IDENTITY)["spec"]
    assert {"name": "user-plugin", "configMap": {"name": "templates"}} in spec["volumes"]
    assert len({volume["name"] for volume in spec["volumes"]}) == len(spec["volumes"])
    mounts = {
        container["name"]: [one for one in container["volumeMounts"] if one["name"] == "user-plugin"]
        for container in [*spec["initContainers"], *spec["containers"]]
    }
    expected = [{"name": "user-plugin", "mountPath": "/etc/templates", "readOnly": True}]
    assert mounts == {"plugin": [], "gate": [], "cache": [], "engine": expected}


def test_files_of_a_volume_count_for_both_identities() -> None:
    plain, mounted = model(), model(engine=MOUNTED)
    assert cache_identity(plain) != cache_identity(mounted)
    assert render_id(plain) != render_id(mounted)


@pytest.mark.parametrize(
    "source",
    [
        {"hostPath": {"path": "/var/lib"}},
        {"projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]}},
        {"secret": {"secretName": "kvs-tiny-bundle"}},
        {"csi": {"driver": "a", "nodePublishSecretRef": {"name": "kvs-tiny-bundle"}}},
        {"emptyDir": {}, "configMap": {"name": "a"}},
        {},
    ],
    ids=["hostPath", "token", "own-secret", "own-secret-for-a-driver", "two", "none"],
)
def test_a_volume_that_would_break_isolation_is_refused(source: dict[str, Any]) -> None:
    with pytest.raises(InvalidObjectError, match=r"volumes\[0\]"):
        model(engine={"volumes": [{"name": "a", **source}]})


def test_a_volume_of_a_driver_is_passed_on_as_it_is() -> None:
    source = {"driver": "a", "readOnly": True, "volumeAttributes": {"x": "y"}, "nodePublishSecretRef": {"name": "b"}}
    (built,) = model(engine={"volumes": [{"name": "a", "csi": source}]}).spec.engine.volumes
    assert built.to_kubernetes() == {"name": "a", "csi": source}


@pytest.mark.parametrize(
    ("path", "is_taken"),
    [
        ("/", False),
        ("/tmp", False),
        ("/run/", False),
        ("/run/kvstrata", False),
        ("/var/run/kvstrata/engine", False),
        ("/kvstrata/plugin/x", False),
        ("/dev/shm", False),
        ("/opt/../run/kvstrata", False),
        ("/opt//x", False),
        ("/tmp/compiled", True),
        ("/run/secrets/store", True),
        ("/root/.cache", True),
    ],
)
def test_a_volume_shadows_no_directory_of_ours(path: str, is_taken: bool) -> None:
    engine = {**MOUNTED, "volumeMounts": [{"name": "plugin", "mountPath": path}]}
    if is_taken:
        assert model(engine=engine).spec.engine.volume_mounts[0].mount_path == path
    else:
        with pytest.raises(InvalidObjectError, match="belongs to the operator"):
            model(engine=engine)


def test_every_child_has_the_labels_and_annotations_of_the_installation_and_of_its_parent() -> None:
    ctx = replace(CONTEXT, child_labels={"cost": "a", "team": "x"}, child_annotations={"example.com/note": "b"})
    chosen = {"labels": {"team": "kitchen"}, "annotations": {"example.com/role": "reader"}}
    children = (
        *model_children(ctx, DOMAIN_ID, model(engine={"podTemplate": chosen}), (), IDENTITY),
        *redis_tier_children(ctx, redis_tier(podTemplate=chosen)),
    )
    for child in children:
        assert {"cost": "a", "team": "kitchen"}.items() <= child["metadata"]["labels"].items(), child["kind"]
        expected = {"example.com/note": "b", "example.com/role": "reader"}
        assert expected.items() <= child["metadata"]["annotations"].items(), child["kind"]
    templates = [child["spec"]["template"]["metadata"] for child in children if "template" in child.get("spec", {})]
    assert len(templates) == 2
    for pods in templates:
        assert {"cost": "a", "team": "kitchen"}.items() <= pods["labels"].items()
        assert expected.items() <= pods["annotations"].items()
    job = build_deletion_job(ctx, TierDeletion("order-1", redis_tier(), 1, "d", 1, ("0" * 32,)))
    assert job["spec"]["template"]["metadata"]["labels"]["cost"] == "a"
    assert job["metadata"]["annotations"] == {"example.com/note": "b"}


def volumes(built: CachedModel) -> dict[str, dict[str, Any]]:
    spec = pod_template(CONTEXT, DOMAIN_ID, built, (), IDENTITY)["spec"]
    return {volume["name"]: volume.get("emptyDir", {}) for volume in spec["volumes"] if "emptyDir" in volume}


def engine(built: CachedModel) -> dict[str, Any]:
    (container,) = pod_template(CONTEXT, DOMAIN_ID, built, (), IDENTITY)["spec"]["containers"]
    return dict(container)


def test_every_volume_of_the_node_can_have_a_size_limit() -> None:
    source = {"hub": {"repository": "a/b", "cacheSize": "20Gi"}}
    built = model(source=source, engine={"temporarySize": "2048Mi"})
    assert all("sizeLimit" in volume for volume in volumes(built).values())
    assert volumes(built)["engine-tmp"]["sizeLimit"] == "2Gi"
    assert volumes(model(source={"hub": {"repository": "a/b"}}))["weights-cache"] == {}
    assert all("sizeLimit" in one["emptyDir"] for one in servers()["volumes"] if "emptyDir" in one)


def test_a_variable_may_come_from_elsewhere_and_its_source_counts_for_the_identity() -> None:
    source = {"secretKeyRef": {"name": "store", "key": "token"}}
    built = model(engine={"env": [{"name": "STORE_TOKEN", "valueFrom": source}]})
    assert {"name": "STORE_TOKEN", "valueFrom": source} in engine(built)["env"]
    assert cache_identity(built) != cache_identity(model(engine={"env": [{"name": "STORE_TOKEN"}]}))


@pytest.mark.parametrize(
    ("variable", "complaint"),
    [
        ({"name": "A", "valueFrom": {"secretKeyRef": {"name": "kvs-tiny-bundle", "key": "root.json"}}}, "belong to"),
        ({"name": "A", "valueFrom": {}}, "exactly one of"),
        ({"name": "A", "value": "b", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}, "replaces value"),
        ({"name": "VLLM_X", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}, "VLLM, LMCACHE, TORCH"),
    ],
)
def test_a_variable_that_would_break_isolation_or_identity_is_refused(variable: Any, complaint: str) -> None:
    with pytest.raises(InvalidObjectError, match=complaint):
        model(engine={"env": [variable]})


def test_the_engine_trusts_the_authority_of_a_private_hub() -> None:
    hub = {"repository": "a/b", "authorityConfigMapRef": {"name": "trust", "key": "bundle.pem"}}
    spec = pod_template(CONTEXT, DOMAIN_ID, model(source={"hub": hub}), (), IDENTITY)["spec"]
    (built,) = spec["containers"]
    (place,) = [one["mountPath"] for one in built["volumeMounts"] if one["name"] == "hub-authority"]
    items = [{"key": "bundle.pem", "path": "ca.crt"}]
    assert {"name": "hub-authority", "configMap": {"name": "trust", "items": items}} in spec["volumes"]
    trusted = {one["name"]: one["value"] for one in built["env"] if one.get("value", "").startswith(place)}
    assert trusted == dict.fromkeys(("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"), f"{place}/ca.crt")
    assert cache_identity(model(source={"hub": hub})) == cache_identity(model(source={"hub": {"repository": "a/b"}}))


def test_the_platform_may_choose_user_and_group_of_all_pods() -> None:
    job = TierDeletion("order-1", redis_tier(), 1, "d", 1, ("0" * 32,))
    for ctx, ids in ((CONTEXT, {65532}), (replace(CONTEXT, run_as=None), {None})):
        (shard,) = [one for one in redis_tier_children(ctx, redis_tier()) if one["kind"] == "StatefulSet"]
        for spec in (
            pod_template(ctx, DOMAIN_ID, model(), (), IDENTITY)["spec"],
            shard["spec"]["template"]["spec"],
            build_deletion_job(ctx, job)["spec"]["template"]["spec"],
        ):
            security = spec["securityContext"]
            assert security["runAsNonRoot"]
            assert {security.get(name) for name in ("runAsUser", "runAsGroup", "fsGroup")} == ids


def test_servers_reach_each_other_and_dns_where_egress_is_denied_and_nothing_else() -> None:
    policy = build_redis_networkpolicy(CONTEXT, redis_tier("shared"))
    assert policy is not None
    dns, servers_of_tier = policy["spec"]["egress"]
    assert {port["port"] for port in dns["ports"]} == {53, 5353}
    assert servers_of_tier["to"] == [{"podSelector": policy["spec"]["podSelector"]}]
    assert {port["port"] for port in servers_of_tier["ports"]} == {6379, 16379}
    assert set(policy["spec"]["policyTypes"]) == {"Ingress", "Egress"}


def test_pods_of_models_reach_dns_servers_and_the_named_ports_if_there_are_any() -> None:
    assert build_model_networkpolicy(CONTEXT, model())["spec"]["policyTypes"] == ["Ingress"]
    spec = build_model_networkpolicy(replace(CONTEXT, egress_ports=(443, 6443)), model())["spec"]
    dns, anywhere, to_servers = spec["egress"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    assert ("to" in dns, [port["port"] for port in anywhere["ports"]]) == (False, [443, 6443])
    (shard,) = [one for one in redis_tier_children(CONTEXT, redis_tier()) if one["kind"] == "StatefulSet"]
    selected = to_servers["to"][0]["podSelector"]["matchLabels"]
    assert selected.items() <= shard["spec"]["template"]["metadata"]["labels"].items()
