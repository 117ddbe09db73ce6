"""The operator's chart, rendered by the real Helm."""

from __future__ import annotations

import os
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvstrata.api import KINDS
from kvstrata.clients.resources import CHILD_RESOURCES, OWN_RESOURCES
from kvstrata.model.keys import AllowedService
from kvstrata.objects.context import BuildContext
from kvstrata.settings import Settings, SettingsError

from .rendering import CRD_CHART, NAMESPACE, OPERATOR_CHART, REPOSITORY, RefusedError, program, render, render_text

GOLDEN = Path(__file__).parent / "expected"
EVERYTHING: dict[str, Any] = {
    "watchNamespaces": ["team-b", "team-a"],
    "metrics": {"serviceMonitor": {"enabled": True}, "prometheusRule": {"enabled": True}},
    "imagePullSecrets": ["registry"],
    "kms": {
        "addresses": [
            "https://openbao.keys.svc:8200",
            {"address": "https://vault:8200", "namespace": "team/a", "authMount": "k8s", "role": "cache"},
        ]
    },
    "image": {"digest": "sha256:" + "0" * 64},
    "priorityClassName": "system-cluster-critical",
    "nodeSelector": {"pool": "control"},
    "tolerations": [{"key": "control", "operator": "Exists"}],
    "networkPolicy": {"metricsFrom": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}]},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "cluster-wide": {"clusterWide": True, "replicas": 1},
    "everything": EVERYTHING,
}
DOMAIN_RULES = ("ClusterRole", "kvstrata-kvstrata-system-domain")


def container(values: dict[str, Any] | None = None) -> dict[str, Any]:
    deployment = render(OPERATOR_CHART, values)["Deployment", "kvstrata"]
    (only,) = deployment["spec"]["template"]["spec"]["containers"]
    return dict(only)


def environment(values: dict[str, Any] | None = None) -> dict[str, str]:
    entries = container(values)["env"]
    return {
        entry["name"]: entry.get("value", entry.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath"))
        for entry in entries
    }


def rules_of(values: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    objects = render(OPERATOR_CHART, values)
    return [rule for (kind, _), obj in objects.items() if kind in ("Role", "ClusterRole") for rule in obj["rules"]]


def verbs(rules: list[dict[str, Any]], group: str, resource: str) -> set[str]:
    return {
        verb
        for rule in rules
        if group in rule["apiGroups"] and resource in rule["resources"] and "resourceNames" not in rule
        for verb in rule["verbs"]
    }


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_rendered_chart_is_what_was_reviewed(variant: str) -> None:
    rendered = render_text(OPERATOR_CHART, VARIANTS[variant])
    golden = GOLDEN / f"{variant}.yaml"
    if os.environ.get("KVSTRATA_UPDATE_GOLDEN"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(rendered)
    assert rendered == golden.read_text(), (
        f"review the change, then rewrite {golden.name} with KVSTRATA_UPDATE_GOLDEN=1"
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_rule_has_a_wildcard(variant: str) -> None:
    for rule in rules_of(VARIANTS[variant]):
        assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]], rule


def test_by_default_the_operator_reaches_secrets_of_its_own_namespace_only() -> None:
    objects = render(OPERATOR_CHART)
    holders = {
        name
        for (kind, name), obj in objects.items()
        if kind in ("Role", "ClusterRole") and verbs(obj["rules"], "", "secrets")
    }
    assert holders == {"kvstrata-kvstrata-system-domain", "kvstrata"}
    bound = [
        (kind, obj["metadata"].get("namespace"))
        for (kind, _), obj in objects.items()
        if kind.endswith("RoleBinding") or kind == "ClusterRoleBinding"
        if obj["roleRef"]["name"] in holders
    ]
    assert bound == [("RoleBinding", NAMESPACE), ("RoleBinding", NAMESPACE)]


def test_each_served_namespace_gets_one_binding_and_the_operator_watches_exactly_those() -> None:
    values = {"watchNamespaces": ["team-b", "team-a"]}
    bound = {
        name.split("/")[0]
        for (kind, name), obj in render(OPERATOR_CHART, values).items()
        if kind == "RoleBinding" and obj["roleRef"] == {
            "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": DOMAIN_RULES[1],
        }
    }  # fmt: skip
    assert bound == {"team-a", "team-b"}
    assert environment(values)["KVSTRATA_WATCH_NAMESPACES"] == "team-a,team-b"


def test_cluster_wide_binds_once_for_all_namespaces() -> None:
    objects = render(OPERATOR_CHART, {"clusterWide": True})
    assert objects["ClusterRoleBinding", DOMAIN_RULES[1]]["roleRef"]["name"] == DOMAIN_RULES[1]
    assert ("RoleBinding", DOMAIN_RULES[1]) not in objects
    assert environment({"clusterWide": True})["KVSTRATA_WATCH_NAMESPACES"] == ""


def test_the_operator_may_do_what_it_does_to_every_kind_it_handles() -> None:
    rules = render(OPERATOR_CHART)[DOMAIN_RULES]["rules"]
    for resource in OWN_RESOURCES:
        assert verbs(rules, "kvstrata.io", resource.plural) >= {"get", "list", "watch", "patch"}, resource
        assert verbs(rules, "kvstrata.io", f"{resource.plural}/status") >= {"patch"}, resource
        assert verbs(rules, "kvstrata.io", f"{resource.plural}/finalizers") == {"update"}, resource
    assert verbs(rules, "kvstrata.io", "cacheinvalidations") >= {"create", "delete"}, "those of deleted policies"
    for resource in CHILD_RESOURCES:
        group = resource.api_version.rpartition("/")[0]
        assert verbs(rules, group, resource.plural) >= {"get", "list", "watch", "create", "patch", "delete"}, resource


def test_every_kind_of_the_api_is_in_the_rules_for_operator_viewers_and_admins() -> None:
    objects = render(OPERATOR_CHART)
    kinds = {kind.INFO.plural for kind in KINDS}
    for name, verb in (("domain", "watch"), ("view", "list"), ("admin", "delete")):
        rules = objects["ClusterRole", f"kvstrata-kvstrata-system-{name}"]["rules"]
        assert {resource for resource in kinds if verb in verbs(rules, "kvstrata.io", resource)} == kinds, name


def test_the_environment_that_the_chart_sets_is_one_that_the_settings_accept() -> None:
    settings = Settings.from_environment(environment({"watchNamespaces": ["team-a"], "logLevel": "DEBUG"}))
    assert settings.watch_namespaces == ("team-a",)
    assert settings.build.sidecar_image == "localhost/kvstrata-sidecar:0.1.0"
    assert settings.log_level == "DEBUG"
    assert settings.resync_s == 600
    assert settings.watch_silence_s == 70


def test_jobs_get_the_operators_placement_and_none_of_its_own_spreading() -> None:
    affinity = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}, "podAntiAffinity": {}}
    tolerations = [{"key": "control", "operator": "Exists", "tolerationSeconds": 300}]
    placed = {"nodeSelector": {"pool": "control"}, "tolerations": tolerations, "priorityClassName": "control"}
    settings = Settings.from_environment(environment({**placed, "affinity": affinity}))
    assert settings.build.job_placement == {**placed, "affinity": {"nodeAffinity": affinity["nodeAffinity"]}}
    assert Settings.from_environment(environment()).build.job_placement == {}
    resources = {"requests": {"cpu": "100m"}, "limits": {"cpu": 1, "memory": "512Mi"}}
    assert Settings.from_environment(environment({"jobResources": resources})).build.job_resources == resources
    with pytest.raises(SettingsError, match="KVSTRATA_JOB_PLACEMENT must be an object with no fields but"):
        Settings.from_environment({**environment(), "KVSTRATA_JOB_PLACEMENT": '{"hostNetwork": true}'})


def test_labels_and_annotations_of_children_reach_the_operator() -> None:
    marks = {"childLabels": {"example.com/cost": "a"}, "childAnnotations": {"note": "b"}}
    build = Settings.from_environment(environment(marks)).build
    assert (build.child_labels, build.child_annotations) == ({"example.com/cost": "a"}, {"note": "b"})
    with pytest.raises(RefusedError, match=r"kvstrata\.io/model"):
        render(OPERATOR_CHART, {"childLabels": {"kvstrata.io/model": "a"}})


def test_a_locked_down_cluster_chooses_ids_and_admits_ports() -> None:
    values = {"runAsUser": None, "networkPolicy": {"egressPorts": [443, 6443]}}
    objects = render(OPERATOR_CHART, values)
    security = objects["Deployment", "kvstrata"]["spec"]["template"]["spec"]["securityContext"]
    assert security == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    assert objects["NetworkPolicy", "kvstrata"]["spec"]["egress"] == [{}]
    build = Settings.from_environment(environment(values)).build
    assert (build.run_as, build.egress_ports) == (None, (443, 6443))
    assert Settings.from_environment(environment({"runAsUser": 1000650000})).build.run_as == 1000650000
    assert Settings.from_environment(environment()).build.run_as == 65532


def test_folders_of_nodes_reach_the_operator_and_are_absolute_paths_without_detours() -> None:
    assert Settings.from_environment(environment()).host_paths == ()
    folders = ["/var/lib/kvstrata", "/disks"]
    assert Settings.from_environment(environment({"hostPaths": folders})).host_paths == tuple(sorted(folders))
    for wrong in ("disks", "/", "/disks/../etc", "/a,b", "/disks/"):
        with pytest.raises(RefusedError, match="hostPaths"):
            render(OPERATOR_CHART, {"hostPaths": [wrong]})


def test_reused_values_of_a_chart_without_a_user_keep_the_user(tmp_path: Path) -> None:
    former = tmp_path / "kvstrata"
    shutil.copytree(OPERATOR_CHART, former)
    values = yaml.safe_load((former / "values.yaml").read_text())
    kept = {
        name: value for name, value in values.items() if name not in ("runAsUser", "childLabels", "childAnnotations")
    }
    (former / "values.yaml").write_text(yaml.safe_dump(kept))
    assert render(former)["Deployment", "kvstrata"] == render(OPERATOR_CHART)["Deployment", "kvstrata"]


def test_a_key_management_service_is_allowed_by_its_address_or_with_where_to_log_in_there() -> None:
    settings = Settings.from_environment(environment({"kms": EVERYTHING["kms"]}))
    assert settings.kms_services == (
        AllowedService("https://openbao.keys.svc:8200"),
        AllowedService("https://vault:8200", "team/a", "k8s", "cache"),
    )
    trusted = {
        "address": "https://bao:8200",
        "authority": "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----",
    }
    settings = Settings.from_environment(environment({"kms": {"addresses": [trusted]}}))
    assert settings.kms_services == (AllowedService(trusted["address"], authority=trusted["authority"]),)
    assert Settings.from_environment(environment()).kms_services == ()
    for wrong in (
        '"https://bao',
        '[{"role": "any"}]',
        '[{"address": "https://bao", "mount": "m"}]',
        '[{"address": 1}]',
    ):
        with pytest.raises(SettingsError, match="KVSTRATA_KMS_ADDRESSES must"):
            Settings.from_environment({**environment(), "KVSTRATA_KMS_ADDRESSES": wrong})


def test_probes_ask_the_port_that_the_operator_listens_on() -> None:
    operator = container()
    (port,) = operator["ports"]
    settings = Settings.from_environment(environment())
    assert port == {"name": "http", "containerPort": settings.http_port}
    assert {operator[probe]["httpGet"]["port"] for probe in ("livenessProbe", "readinessProbe")} == {"http"}


def test_gates_admit_the_pods_of_this_chart() -> None:
    # The operator writes a NetworkPolicy for each model that lets exactly these labels reach the control port.
    admitted = BuildContext(sidecar_image="-", redis_image="-").operator_labels
    template = render(OPERATOR_CHART, {"podLabels": {"app.kubernetes.io/name": "other"}}, "release-x")
    labels = template["Deployment", "release-x-kvstrata"]["spec"]["template"]["metadata"]["labels"]
    assert admitted.items() <= labels.items()


def test_the_pod_satisfies_the_restricted_standard_with_a_read_only_root() -> None:
    pod = render(OPERATOR_CHART)["Deployment", "kvstrata"]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container()["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_a_digest_wins_over_a_tag() -> None:
    digest = "sha256:" + "a" * 64
    assert container({"image": {"tag": "edge", "digest": digest}})["image"] == f"localhost/kvstrata-operator@{digest}"


@pytest.mark.parametrize(
    ("registry", "prefix"), [("registry.example:5000/kvstrata", "registry.example:5000/kvstrata/"), ("", "")]
)
def test_one_registry_holds_all_images_or_each_repository_names_its_own(registry: str, prefix: str) -> None:
    values = {"image": {"registry": registry}}
    names = [
        container(values)["image"],
        *(environment(values)[f"KVSTRATA_{part}_IMAGE"] for part in ("SIDECAR", "REDIS")),
    ]
    assert names == [f"{prefix}kvstrata-{part}:0.1.0" for part in ("operator", "sidecar", "redis")]


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"image": {"registry": "registry.example/"}}, "image/registry"),
        ({"redis": {"image": {"registry": "registry.example"}}}, "redis/image"),
        ({"replicaz": 3}, "replicaz"),
        ({"replicas": "two"}, "replicas"),
        ({"watchNamespaces": ["Team_A"]}, "watchNamespaces/0"),
        ({"watchNamespaces": "team-a"}, "watchNamespaces"),
        ({"watchNamespaces": ["a"], "clusterWide": True}, "watchNamespaces"),
        ({"watchNamespaces": ["a", NAMESPACE]}, "never served: delete its objects"),
        ({"image": {"digest": "latest"}}, "image/digest"),
        ({"image": {"pullPolicy": "always"}}, "image/pullPolicy"),
        ({"sidecar": {"image": {"repository": "x", "pullPolicy": "Always"}}}, "sidecar/image"),
        ({"logLevel": "verbose"}, "logLevel"),
        ({"resyncSeconds": 1}, "resyncSeconds"),
        ({"metrics": {"serviceMonitor": {"interval": "30"}}}, "interval"),
        ({"serviceAccount": {"create": False}}, "serviceAccount.name"),
    ],
)
def test_wrong_values_are_refused_by_name(values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(RefusedError, match=complaint.replace(".", r"\.")):
        render(OPERATOR_CHART, values)


GROUPS = [
    (name, None) if part is None else (name, {part: None})
    for name, value in yaml.safe_load((OPERATOR_CHART / "values.yaml").read_text()).items()
    if isinstance(value, dict)
    for part in (None, *(part for part, inner in value.items() if isinstance(inner, dict) and name != "resources"))
]


@pytest.mark.parametrize(("name", "value"), GROUPS, ids=str)
def test_a_group_that_is_null_has_its_default_values(name: str, value: dict[str, None] | None) -> None:
    assert render_text(OPERATOR_CHART, {name: value}) == render_text(OPERATOR_CHART)


@pytest.mark.parametrize("chart", [OPERATOR_CHART, CRD_CHART], ids=["operator", "crds"])
def test_values_that_a_parent_chart_sets_are_taken(chart: Path) -> None:
    assert render_text(chart, {"enabled": True, "global": {"region": "a"}}) == render_text(chart)


def test_names_with_dots_are_taken() -> None:
    objects = render(OPERATOR_CHART, {"imagePullSecrets": ["registry.example"]}, "team.one")
    assert "team-one-kvstrata-metrics" in {name for kind, name in objects if kind == "Service"}
    (pod,) = [obj["spec"]["template"]["spec"] for (kind, _), obj in objects.items() if kind == "Deployment"]
    assert pod["imagePullSecrets"] == [{"name": "registry.example"}]


def test_every_value_is_in_the_schema_and_the_readme() -> None:
    values = yaml.safe_load((OPERATOR_CHART / "values.yaml").read_text())
    readme = (OPERATOR_CHART / "README.md").read_text()
    for name in values:
        assert f"`{name}" in readme, name


def test_the_charts_version_is_the_projects() -> None:
    version = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
    for chart in ("kvstrata", "kvstrata-crds"):
        described = yaml.safe_load((REPOSITORY / "charts" / chart / "Chart.yaml").read_text())
        assert (described["version"], described["appVersion"]) == (version, version)


def test_the_kustomize_base_is_the_chart_with_its_defaults() -> None:
    finished = subprocess.run(
        [REPOSITORY / "manifests/render.sh", "--check"],
        env={**os.environ, "HELM": program("helm")}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stdout + finished.stderr


@pytest.mark.parametrize(("overlay", "watched"), [("cluster-wide", ""), ("one-namespace", "team-a")])
def test_overlays_change_what_is_watched_and_bound(overlay: str, watched: str) -> None:
    built = subprocess.run(
        [program("kubectl"), "kustomize", str(REPOSITORY / "manifests/overlays" / overlay)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    objects = list(yaml.safe_load_all(built.stdout))
    (deployment,) = [obj for obj in objects if obj["kind"] == "Deployment"]
    (operator,) = deployment["spec"]["template"]["spec"]["containers"]
    values = {entry["name"]: entry.get("value") for entry in operator["env"]}
    assert values["KVSTRATA_WATCH_NAMESPACES"] == watched
    assert values["KVSTRATA_SIDECAR_IMAGE"]
    bindings = {
        (obj["kind"], obj["metadata"].get("namespace"))
        for obj in objects
        if obj["kind"].endswith("RoleBinding") and obj["roleRef"]["name"] == DOMAIN_RULES[1]
    }
    assert (("RoleBinding", watched) if watched else ("ClusterRoleBinding", None)) in bindings
    warnings = [obj for obj in objects if obj["kind"] == "ValidatingAdmissionPolicy"]
    assert [one["spec"]["validations"][0]["expression"] for one in warnings] == [
        f'request.namespace in "{watched}".split(",")' for _ in warnings
    ]
    assert [obj["spec"]["validationActions"] for obj in objects if obj["kind"].endswith("PolicyBinding")] == (
        [["Warn"]] if watched else []
    )
    assert "helm" not in str(warnings)


@pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS)
def test_of_the_endpoints_of_services_the_operator_reads_those_of_the_api_server_alone(values: dict[str, Any]) -> None:
    rules = [rule for rule in rules_of(values) if {"endpoints", "endpointslices"} & set(rule["resources"])]
    assert [(rule["resourceNames"], rule["verbs"]) for rule in rules] == [(["kubernetes"], ["get"])]
