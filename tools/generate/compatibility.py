"""Changes of CRDs after which stored objects would be refused or lose fields.

`breaking_changes` compares the schemas of two versions of one CRD. `baseline.json` beside this file has those that the
next release has to accept: objects that passed them are stored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from tools.generate.openapi import is_untyped

Schema = Mapping[str, Any]

LOWER_BOUNDS = ("minimum", "minLength", "minItems", "minProperties")
UPPER_BOUNDS = ("maximum", "maxLength", "maxItems", "maxProperties")
FIXED = ("type", "format", "x-kubernetes-int-or-string", "x-kubernetes-list-type", "x-kubernetes-list-map-keys")
KEPT = (
    *LOWER_BOUNDS, *UPPER_BOUNDS, *FIXED, "enum", "pattern", "required", "multipleOf",
    "x-kubernetes-preserve-unknown-fields",
)  # fmt: skip


def reduced(schema: Schema) -> dict[str, Any]:
    """`schema` without the parts on which no stored object depends: descriptions and the sentences of rules."""
    result: dict[str, Any] = {key: schema[key] for key in KEPT if key in schema}
    if rules := [rule["rule"] for rule in schema.get("x-kubernetes-validations", ())]:
        result["rules"] = rules
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), Mapping):
            result[key] = reduced(schema[key])
    if "properties" in schema:
        result["properties"] = {name: reduced(child) for name, child in schema["properties"].items()}
    return result


def breaking_changes(before: Schema, after: Schema, path: str) -> Iterator[str]:
    """Name each change from `before` to `after`, two reduced schemas, that a stored object may not survive."""
    if "x-kubernetes-int-or-string" in before and is_untyped(after):
        return  # the same texts and integers, and numbers with a fraction
    for key in FIXED:
        if before.get(key) != after.get(key):
            yield f"{path}: {key} {before.get(key)} became {after.get(key)}"
    for key in LOWER_BOUNDS:
        if key in after and (key not in before or after[key] > before[key]):
            yield f"{path}: {key} was raised to {after[key]}"
    for key in UPPER_BOUNDS:
        if key in after and (key not in before or after[key] < before[key]):
            yield f"{path}: {key} was lowered to {after[key]}"
    for key in ("pattern", "multipleOf"):
        if key in after and after[key] != before.get(key):
            yield f"{path}: {key} became {after[key]}"
    for rule in after.get("rules", ()):
        unknown = re.match(r"!has\(self\.(\w+)\) \|\| ", rule)
        if unknown and unknown[1] not in before.get("properties", {}):
            continue  # stored objects lack the field that the rule is about
        if rule not in before.get("rules", ()):
            yield f"{path}: has the new rule {rule}"
    if "enum" in after and "enum" not in before:
        yield f"{path}: is limited to {after['enum']}"
    for value in before.get("enum", ()):
        if "enum" in after and value not in after["enum"]:
            yield f"{path}: no longer accepts {value}"
    for name in after.get("required", ()):
        if name not in before.get("required", ()):
            yield f"{path}: requires {name}"
    if before.get("x-kubernetes-preserve-unknown-fields") and not after.get("x-kubernetes-preserve-unknown-fields"):
        yield f"{path}: no longer keeps unknown fields"
    for key, step in (("items", "[]"), ("additionalProperties", "{}")):
        if key in before and key in after:
            yield from breaking_changes(before[key], after[key], path + step)
        elif key in before:
            yield f"{path}: {key} were removed"
    for name, child in before.get("properties", {}).items():
        if name not in after.get("properties", {}):
            yield f"{path}.{name}: was removed"
        else:
            yield from breaking_changes(child, after["properties"][name], f"{path}.{name}")
