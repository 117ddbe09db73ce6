"""The converter from models to structural schemas."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, StringConstraints, ValidationError

from kvstrata.api import KINDS
from kvstrata.api.base import ApiModel, Resource, Rule
from kvstrata.api.cachedmodel import CachedModelSpec
from kvstrata.api.markers import VALIDATIONS, atomic_list, immutable, schema_default
from kvstrata.api.scalars import Pattern, ResourceQuantity
from tools.generate.crd import build_crd, build_crds
from tools.generate.openapi import UnstructuralSchemaError, structural_problems, structural_schema

MOST_COLUMNS = 6
"""Shown by default besides name and age, so that `kubectl get cache-status -A` fits a terminal."""

Short = Annotated[str, Field(max_length=5)]
Quoted = Annotated[Short, Pattern(r"^\d+'$", "must be digits")]


class Inner(ApiModel):
    """Inner text."""

    value: Short | None = None
    """A value."""

    RULES = (Rule(cel="has(self.value)", message="value is required"),)


class Outer(ApiModel):
    """Outer text."""

    inner: Inner | None = None
    """Text of the field
    on two lines."""

    fixed: Annotated[Short, immutable("fixed is fixed")]
    """Stays."""

    always: Literal[True] | None = None
    """Only true."""

    amount: Annotated[int, schema_default(3)] = 3
    """Filled in."""

    many: Annotated[tuple[Inner, ...], Field(max_length=2), atomic_list()] = ()
    """Several."""


def test_references_are_inlined_and_the_field_speaks_louder_than_its_type() -> None:
    inner = structural_schema(Outer)["properties"]["inner"]
    assert inner["description"] == "Text of the field on two lines."
    assert inner["properties"]["value"] == {"type": "string", "maxLength": 5, "description": "A value."}
    assert inner[VALIDATIONS] == [{"rule": "has(self.value)", "message": "value is required"}]


def test_a_form_is_refused_with_its_sentence_by_both() -> None:
    rule = {"rule": r"self.matches('^\\d+\'$')", "message": "must be digits"}
    model: Any = type("Formed", (ApiModel,), {"__annotations__": {"field": Quoted}, "__module__": __name__})
    assert structural_schema(model)["properties"]["field"] == {"type": "string", "maxLength": 5, VALIDATIONS: [rule]}
    assert model(field="12'").field == "12'"
    with pytest.raises(ValidationError, match="must be digits"):
        model(field="12")
    keys = {"field": Annotated[dict[Quoted, Short], Field(max_length=2)]}
    mapped = structural_schema(type("Mapped", (ApiModel,), {"__annotations__": keys, "__module__": __name__}))
    expected = {"rule": r"self.all(key, key.matches('^\\d+\'$'))", "message": "every key must be digits"}
    assert mapped["properties"]["field"][VALIDATIONS] == [expected]


def test_an_optional_field_is_one_that_may_be_absent() -> None:
    schema = structural_schema(Outer)
    assert schema["required"] == ["fixed"]
    assert "default" not in schema["properties"]["inner"]
    assert schema["properties"]["always"]["enum"] == [True]


def test_only_declared_defaults_reach_the_schema() -> None:
    assert structural_schema(Outer)["properties"]["amount"]["default"] == 3
    found = [
        path for kind in KINDS for path, node in walk(build_crd(kind)) if isinstance(node, dict) and "default" in node
    ]
    assert len(found) == 1
    assert found[0].endswith("engine.properties.replicas")


def test_immutability_is_a_transition_rule() -> None:
    rule = {"rule": "self == oldSelf", "message": "fixed is fixed"}
    assert structural_schema(Outer)["properties"]["fixed"][VALIDATIONS] == [rule]


@pytest.mark.parametrize(
    ("annotation", "problem"),
    [
        (str, "a string needs maxLength"),
        (float, "floating point"),
        (tuple[Short, ...], "a list needs maxItems"),
        (dict[str, Short], "a map needs maxProperties"),
        (Annotated[tuple[Short, ...], Field(max_length=3)], "x-kubernetes-list-type"),
        (Annotated[int, Field(gt=0)], "exclusiveMinimum is not allowed"),
        (int | Short, "anyOf is not allowed"),
        (Annotated[str, StringConstraints(max_length=3, pattern="^a$")], "pattern is not allowed"),
        (Any, "has no type"),
    ],
)
def test_what_an_apiserver_would_refuse_is_refused_with_its_path(annotation: Any, problem: str) -> None:
    model = type("Broken", (ApiModel,), {"__annotations__": {"field": annotation}, "__module__": __name__})
    with pytest.raises(UnstructuralSchemaError, match=rf"\.field.*{problem}"):
        structural_schema(model)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.INFO.kind)
def test_every_kind_is_structural_documented_and_free_of_private_keys(kind: type[Resource]) -> None:
    schema = build_crd(kind)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for part in ("spec", "status"):
        assert list(structural_problems(schema["properties"][part])) == []
    for path, node in walk(schema["properties"]):
        if path.endswith("]") or not isinstance(node, dict):
            continue
        assert not any(key.startswith("x-kvstrata") for key in node), path
        parent, _, _name = path.rpartition(".")
        if parent.endswith("properties") and "metadata" not in path:
            assert node.get("description", "").endswith("."), f"{path} has no sentence"


def test_names_short_names_and_the_category_are_unique() -> None:
    names = [crd["spec"]["names"] for crd in build_crds().values()]
    spoken = [name for one in names for name in (one["plural"], one["singular"], *one["shortNames"])]
    assert len(spoken) == len(set(spoken))
    assert all(one["categories"] == ["cache-status", "kvstrata"] for one in names)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.INFO.kind)
def test_every_kind_shows_ready_its_reason_and_few_columns_beside(kind: type[Resource]) -> None:
    columns = build_crd(kind)["spec"]["versions"][0]["additionalPrinterColumns"]
    *shown, age = [column["name"] for column in columns if not column.get("priority")]
    assert [*shown[-2:], age] == ["Ready", "Reason", "Age"]
    assert len(shown) <= MOST_COLUMNS


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.INFO.kind)
def test_columns_and_selectable_fields_point_at_fields_that_exist(kind: type[Resource]) -> None:
    schema = build_crd(kind)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    paths = [column.json_path for column in kind.INFO.columns] + list(kind.INFO.selectable_fields)
    for path in paths:
        if path.startswith((".metadata", ".status.conditions[")):
            continue
        node = schema
        for step in path.strip(".").split("."):
            assert step in node["properties"], path
            node = node["properties"][step]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.INFO.kind)
def test_every_message_is_a_sentence_of_its_own(kind: type[Resource]) -> None:
    for path, node in walk(build_crd(kind)):
        if isinstance(node, dict):
            for rule in node.get(VALIDATIONS, ()):
                assert len(rule["message"].split()) >= 3, path
                assert "\n" not in rule["message"], path


def walk(node: Any, path: str = "") -> list[tuple[str, Any]]:
    """Every node below, with its path."""
    found = [(path, node)]
    if isinstance(node, dict):
        for key, value in node.items():
            found += walk(value, f"{path}.{key}")
    elif isinstance(node, list):
        for index, value in enumerate(node):
            found += walk(value, f"{path}[{index}]")
    return found


def test_an_amount_of_a_resource_is_a_text_or_any_number_as_in_a_pod() -> None:
    engine = structural_schema(CachedModelSpec)["properties"]["engine"]["properties"]
    amount = engine["resources"]["properties"]["limits"]["additionalProperties"]
    assert amount == {
        "x-kubernetes-preserve-unknown-fields": True,
        "pattern": ResourceQuantity.PATTERN,
        "maxLength": 32,
        "minimum": 0,
        "maxProperties": 0,
        "maxItems": 0,
    }
    spec = {
        "model": {"name": "m", "source": {"path": "/m"}},
        "engine": {"image": "e", "resources": {"limits": {"cpu": 0.5}}},
    }
    parsed = CachedModelSpec.model_validate(spec)
    assert parsed.to_kubernetes()["engine"]["resources"] == {"limits": {"cpu": "0.5"}}
