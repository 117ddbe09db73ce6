"""pydantic models -> structural OpenAPI v3 schemas, as CustomResourceDefinitions want them.

The apiserver knows neither references nor null, wants every node typed, and estimates the cost of CEL rules from the
bounds of strings, lists and maps. So references are inlined, an optional field is one that may be absent, titles and
defaults are dropped, and unbounded values are refused here, before an apiserver can refuse them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from kvstrata.api.base import Rule
from kvstrata.api.markers import DEFAULT
from kvstrata.api.scalars import VALIDATIONS
from tools.generate.docstrings import field_docstrings

_DROPPED = frozenset({"title", "default", "$defs", "discriminator"})
_FORBIDDEN = (
    "$ref", "anyOf", "allOf", "oneOf", "not", "const", "prefixItems", "exclusiveMinimum", "exclusiveMaximum", "pattern",
)  # fmt: skip
"""A pattern would be refused by its expression alone: `Pattern` has a sentence, too."""


class UnstructuralSchemaError(ValueError):
    """A structural schema cannot express a model; the message names the path within the model."""


class _WithRules(GenerateJsonSchema):
    """Adds the models' rules, and the docstrings of their fields."""

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        model: Any = schema["cls"]
        produced = super().model_schema(schema)
        for name, text in field_docstrings(model).items():
            field = model.model_fields.get(name)
            if field is not None and field.description is None:
                produced["properties"][field.alias or name].setdefault("description", text)
        if model.RULES:
            produced[VALIDATIONS] = entries(model.RULES)
        return produced


def entries(rules: Sequence[Rule]) -> list[dict[str, str]]:
    """The entries of x-kubernetes-validations."""
    whole = ({"rule": rule.cel, "message": rule.message, "fieldPath": rule.field_path} for rule in rules)
    return [{key: text for key, text in entry.items() if text} for entry in whole]


def structural_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The structural schema of `model`. Raises UnstructuralSchemaError."""
    document = model.model_json_schema(by_alias=True, schema_generator=_WithRules)
    schema = _convert(document, document.get("$defs", {}))
    problems = list(structural_problems(schema))
    if problems:
        raise UnstructuralSchemaError(f"{model.__name__}: {'; '.join(problems)}")
    return schema


def without_rules(schema: Mapping[str, Any]) -> dict[str, Any]:
    """`schema` without CEL rules, for status, which the operator alone writes: the API server would spend time on them
    at each write."""
    return {
        key: {name: without_rules(child) for name, child in value.items()}
        if key == "properties"
        else without_rules(value)
        if key in ("items", "additionalProperties") and isinstance(value, Mapping)
        else value
        for key, value in schema.items()
        if key != VALIDATIONS
    }


def _convert(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> dict[str, Any]:
    """One node with references inlined and everything dropped that a CRD does not know."""
    node = _rules_of_keys(_resolve(node, definitions))
    result: dict[str, Any] = {}
    for key, value in node.items():
        if key in _DROPPED:
            continue
        if key == DEFAULT:
            result["default"] = value
        elif key == "description":
            result[key] = " ".join(value.split())
        elif key == "const":
            result["enum"] = [value]
        elif key == "properties":
            result[key] = {name: _convert(child, definitions) for name, child in value.items()}
        elif key == "items":
            result[key] = _convert(value, definitions)
        elif key == "additionalProperties":
            if isinstance(value, Mapping):
                result[key] = _convert(value, definitions)
        else:
            result[key] = value
    if result.get("type") == "integer":
        result["format"] = "int64"
    if result.get("x-kubernetes-preserve-unknown-fields"):
        result.pop("additionalProperties", None)
    return result


def _rules_of_keys(node: dict[str, Any]) -> dict[str, Any]:
    """Make rules of a map's keys rules of the map: structural schemas have no propertyNames."""
    if "propertyNames" not in node:
        return node
    rest = {key: value for key, value in node.items() if key != "propertyNames"}
    rules = [
        {
            "rule": f"self.all(key, {rule['rule'].replace('self', 'key', 1)})",
            "message": f"every key {rule['message']}",
        }
        for rule in node["propertyNames"].get(VALIDATIONS, ())
    ]
    return {**rest, VALIDATIONS: [*rules, *node.get(VALIDATIONS, ())]} if rules else rest


def _resolve(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> dict[str, Any]:
    """`node` without reference and without null; keys beside a reference override those of its target."""
    merged = dict(node)
    while True:
        if "$ref" in merged:
            target = definitions[str(merged.pop("$ref")).rsplit("/", 1)[-1]]
            merged = _merge(target, merged)
        elif "anyOf" in merged and any(option.get("type") == "null" for option in merged["anyOf"]):
            options = [option for option in merged.pop("anyOf") if option.get("type") != "null"]
            if len(options) != 1:
                raise UnstructuralSchemaError(f"a union of {len(options)} types")
            merged = _merge(options[0], merged)
        else:
            return merged


def _merge(inner: Mapping[str, Any], outer: Mapping[str, Any]) -> dict[str, Any]:
    """Both, with `outer` winning, and validation rules of both."""
    merged = {**inner, **outer}
    rules = [*inner.get(VALIDATIONS, ()), *outer.get(VALIDATIONS, ())]
    if rules:
        merged[VALIDATIONS] = rules
    return merged


def is_untyped(schema: Mapping[str, Any]) -> bool:
    """Whether it is of a quantity that may also be a number with a fraction: no type, and no CEL rule."""
    return "type" not in schema and bool(schema.get("x-kubernetes-preserve-unknown-fields")) and "pattern" in schema


def structural_problems(schema: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Yield a sentence for each node that is not structural or not bounded."""
    here = path or "(root)"
    int_or_string = schema.get("x-kubernetes-int-or-string") is True
    untyped = is_untyped(schema)
    for key in _FORBIDDEN:
        if key in schema and not (key == "anyOf" and int_or_string) and not (key == "pattern" and untyped):
            yield f"{here}: {key} is not allowed"
    kind = schema.get("type")
    if kind is None and not int_or_string and not untyped:
        yield f"{here}: has no type"
    if kind == "number":
        yield f"{here}: floating point numbers are not allowed in Kubernetes APIs"
    if kind == "string" and not schema.keys() & {"maxLength", "enum", "format"}:
        yield f"{here}: a string needs maxLength, enum or format"
    if kind == "array":
        if "maxItems" not in schema:
            yield f"{here}: a list needs maxItems"
        if "x-kubernetes-list-type" not in schema:
            yield f"{here}: a list needs x-kubernetes-list-type"
        yield from structural_problems(schema.get("items", {}), f"{path}[]")
    if kind == "object":
        if isinstance(schema.get("additionalProperties"), Mapping):
            if "maxProperties" not in schema:
                yield f"{here}: a map needs maxProperties"
            yield from structural_problems(schema["additionalProperties"], f"{path}{{}}")
        elif "maxProperties" in schema:
            yield f"{here}: a map needs a schema of its values"
    for name, child in schema.get("properties", {}).items():
        yield from structural_problems(child, f"{path}.{name}")
