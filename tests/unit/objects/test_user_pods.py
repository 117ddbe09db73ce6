"""Settings of users and of the installation in pods and other objects, and those that would break isolation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvstrata.api.base import InvalidObjectError
from kvstrata.objects.children import model_children, redis_tier_children
from kvstrata.objects.erasure.delete_job import TierDeletion, build_deletion_job
from kvstrata.objects.pod.access import build_serviceaccount
from kvstrata.objects.pod.identity import cache_identity, render_id
from kvstrata.objects.pod.pod import pod_template
from kvstrata.settings import Settings, SettingsError
from tests.unit.objects.builders import CONTEXT, DOMAIN_ID, IDENTITY, model, redis_tier

PODS = {
    "schedulerName": "other",
    "dnsPolicy": "None",
    "dnsConfig": {"nameservers": ["192.0.2.1"]},
    "hostAliases": [{"ip": "192.0.2.2", "hostnames": ["proxy.invalid"]}],
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
    assert servers(podTemplate={"serviceAccountName": "team"})["serviceAccountName"] == "team"
    with pytest.raises(InvalidObjectError, match="serviceAccountName"):
        model(engine={"podTemplate": {"serviceAccountName": "team"}})
    account = build_serviceaccount(model(engine={"serviceAccountAnnotations": {"example.com/role": "reader"}}))
    assert account["metadata"]["annotations"] == {"example.com/role": "reader"}


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
        {"emptyDir": {}, "configMap": {"name": "a"}},
        {},
    ],
    ids=["hostPath", "token", "own-secret", "two", "none"],
)
def test_a_volume_that_would_break_isolation_is_refused(source: dict[str, Any]) -> None:
    with pytest.raises(InvalidObjectError, match=r"volumes\[0\]"):
        model(engine={"volumes": [{"name": "a", **source}]})


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


def test_a_mount_of_no_volume_is_refused() -> None:
    with pytest.raises(InvalidObjectError, match="every mount must name one of volumes"):
        model(engine={"volumeMounts": [{"name": "other", "mountPath": "/opt/x"}]})


def test_every_child_has_the_marks_of_the_installation_and_keeps_its_own() -> None:
    ctx = replace(CONTEXT, child_labels={"cost": "a", "team": "x"}, child_annotations={"example.com/note": "b"})
    chosen = {"labels": {"team": "kitchen"}, "annotations": {"example.com/note": "own"}}
    children = (
        *model_children(ctx, DOMAIN_ID, model(engine={"podTemplate": chosen}), (), IDENTITY),
        *redis_tier_children(ctx, redis_tier(podTemplate=chosen)),
    )
    for child in children:
        assert {"cost": "a", "team": "kitchen"}.items() <= child["metadata"]["labels"].items(), child["kind"]
        assert child["metadata"]["annotations"]["example.com/note"] == "b", child["kind"]
    templates = [child["spec"]["template"]["metadata"] for child in children if "template" in child.get("spec", {})]
    assert len(templates) == 2
    for pods in templates:
        assert {"cost": "a", "team": "kitchen"}.items() <= pods["labels"].items()
        assert pods["annotations"]["example.com/note"] == "own"
    job = build_deletion_job(ctx, TierDeletion("order-1", redis_tier(), 1, "d", 1, ("0" * 32,)))
    assert job["spec"]["template"]["metadata"]["labels"]["cost"] == "a"
    assert job["metadata"]["annotations"] == {"example.com/note": "b"}


def settings(**variables: str) -> Settings:
    names = ("KVSTRATA_NAMESPACE", "KVSTRATA_POD_NAME", "KVSTRATA_SIDECAR_IMAGE", "KVSTRATA_REDIS_IMAGE")
    return Settings.from_environment({**dict.fromkeys(names, "x"), **variables})


def test_the_installation_sets_no_label_of_the_operator() -> None:
    build = settings(KVSTRATA_CHILD_LABELS='{"cost": "a"}', KVSTRATA_CHILD_ANNOTATIONS='{"note": "b"}').build
    assert (build.child_labels, build.child_annotations) == ({"cost": "a"}, {"note": "b"})
    for wrong in ('{"kvstrata.io/model": "a"}', '{"cost": 1}', "[]"):
        with pytest.raises(SettingsError, match="KVSTRATA_CHILD_LABELS"):
            settings(KVSTRATA_CHILD_LABELS=wrong)
