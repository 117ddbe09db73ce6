"""The hook that Helm runs before it uninstalls the operator's chart."""

from __future__ import annotations

from typing import Any

from kvstrata.cli.uninstall import parse

from .rendering import NAMESPACE, OPERATOR_CHART, render

NAME = "kvstrata-uninstall"
VALUES: dict[str, Any] = {"watchNamespaces": ["team-b", "team-a"], "replicas": 3, "uninstall": {"releaseObjects": True}}


def hook(values: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    found = render(OPERATOR_CHART, values)
    return {slot: made for slot, made in found.items() if "helm.sh/hook" in made["metadata"].get("annotations", {})}


def pod(values: dict[str, Any]) -> dict[str, Any]:
    return dict(hook(values)["Job", NAME]["spec"]["template"])


def test_the_command_is_one_that_the_operators_program_accepts() -> None:
    (container,) = pod(VALUES)["spec"]["containers"]
    options = parse(container["args"])
    labels = render(OPERATOR_CHART)["Deployment", "kvstrata"]["spec"]["selector"]["matchLabels"]
    assert dict(one.split("=") for one in options.selector.split(",")) == labels
    assert (options.release, options.namespace, options.revision) == ("kvstrata", NAMESPACE, "1")
    assert (options.deployment, options.replicas, options.watch_namespaces) == ("kvstrata", 3, "team-a,team-b")
    assert options.release_objects
    (container,) = pod({"clusterWide": True})["spec"]["containers"]
    options = parse(container["args"])
    assert (options.watch_namespaces, options.release_objects) == ("", False)


def test_its_pod_is_as_restricted_as_the_operators_and_none_of_the_operators() -> None:
    template = render(OPERATOR_CHART)["Deployment", "kvstrata"]["spec"]["template"]
    (own,), (operators,) = pod({})["spec"]["containers"], template["spec"]["containers"]
    assert (own["securityContext"], own["resources"]) == (operators["securityContext"], operators["resources"])
    restricted = {name: value for name, value in template["spec"]["securityContext"].items() if name != "fsGroup"}
    assert pod({})["spec"]["securityContext"] == restricted
    assert pod({})["metadata"]["labels"]["app.kubernetes.io/component"] == "uninstall"


def test_it_may_change_objects_only_when_it_is_to_release_them() -> None:
    for values, verbs in (({}, ["list"]), (VALUES, ["list", "patch"])):
        rule, domains, status = hook(values)["ClusterRole", f"{NAME}-{NAMESPACE}"]["rules"]
        held = ["cachedmodels", "cacheinvalidations", "cachetiers", "tenantcachepolicies"]
        assert (rule["resources"], rule["verbs"]) == (held, verbs)
        assert (domains["resources"], domains["verbs"]) == (["cachedomains"], ["list"])
        assert (status["resources"], status["verbs"]) == (["cachedomains/status"], ["patch"])
    account = hook({})["Job", NAME]["spec"]["template"]["spec"]["serviceAccountName"]
    assert account == NAME
    assert pod({"rbac": {"create": False}})["spec"]["serviceAccountName"] == "kvstrata"


def test_every_part_runs_before_the_uninstall_only_and_goes_with_it() -> None:
    parts = hook({})
    assert {kind for kind, _ in parts} == {
        "Job", "ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding",
    }  # fmt: skip
    for made in parts.values():
        annotations = made["metadata"]["annotations"]
        assert annotations["helm.sh/hook"] == "pre-delete"
        assert annotations["helm.sh/hook-delete-policy"] == "before-hook-creation,hook-succeeded"
    assert not hook({"uninstall": {"check": False}})


def test_values_of_a_chart_without_the_hook_are_reused_and_it_runs() -> None:
    for reused in (None, {"check": None, "releaseObjects": None}):
        assert hook({"uninstall": reused}) == hook({})
