"""The chart of the CustomResourceDefinitions, rendered by the real Helm."""

from __future__ import annotations

import yaml

from .rendering import CRD_CHART, REPOSITORY, render

KEEP = "helm.sh/resource-policy"


def test_the_chart_holds_exactly_the_generated_definitions() -> None:
    generated = {
        path.name: path.read_text()
        for path in (REPOSITORY / "crds").glob("*.yaml")
        if path.name != "kustomization.yaml"
    }
    packaged = {path.name: path.read_text() for path in (CRD_CHART / "files").glob("*.yaml")}
    assert generated
    assert packaged == generated


def test_helm_renders_each_definition_unchanged_but_for_the_annotation_that_keeps_it() -> None:
    rendered = render(CRD_CHART)
    for path in (CRD_CHART / "files").glob("*.yaml"):
        wanted = yaml.safe_load(path.read_text())
        wanted["metadata"]["annotations"] = {KEEP: "keep"}
        assert rendered["CustomResourceDefinition", wanted["metadata"]["name"]] == wanted


def test_definitions_can_be_let_go_on_purpose() -> None:
    rendered = render(CRD_CHART, {"keep": False})
    assert rendered
    assert not any("annotations" in definition["metadata"] for definition in rendered.values())
