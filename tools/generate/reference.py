"""The API reference: one page of Markdown for each kind, from the same models as the CRDs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from kvstrata.api import KINDS
from kvstrata.api.base import API_VERSION, Resource
from kvstrata.api.engine_flags import OWNED_ENV, OWNED_FLAGS
from kvstrata.api.scalars import VALIDATIONS
from tools.generate.conditions import REASONS, condition_types
from tools.generate.crd import root_schema
from tools.generate.openapi import is_untyped
from tools.generate.restarts import RESTARTS, restart_of

HEADER = "<!-- Generated from the models in operator/src/kvstrata/api by `make generate`. Do not edit. -->"


PATTERN = re.compile(r"\^\S+\$")
"""A regular expression in a rule's message. Markdown would take its brackets for a link."""


def build_reference() -> dict[str, str]:
    """Every page by file name, the index among them."""
    pages = {f"{kind.INFO.kind.lower()}.md": _page(kind) for kind in KINDS}
    pages["README.md"] = _index()
    pages["edits.md"] = _edits()
    return pages


def _index() -> str:
    lines = [HEADER, "", "# API reference", "", f"Group and version: `{API_VERSION}`. All kinds are namespaced.", ""]
    lines += ["| Kind | Short name | Description |", "|---|---|---|"]
    for kind in KINDS:
        info = kind.INFO
        link = f"[{info.kind}]({info.kind.lower()}.md)"
        lines.append(f"| {link} | {', '.join(info.short_names)} | {_first_sentence(kind.__doc__ or '')} |")
    lines += ["", "`kubectl get cache-status` lists all of them; `kubectl get kvstrata` is the same.", ""]
    return "\n".join(lines)


def _edits() -> str:
    lines = [HEADER, "", "# Restarts by edits", ""]
    lines.append(
        "Pods are restarted one at a time. New contents of a Secret that a tier names, and edits of other kinds, "
        "restart no pod. Neither does a Redis tier that a model lists or no longer lists: the pods join or leave it."
    )
    for kind in (one for one in KINDS if one.INFO.kind in RESTARTS):
        name = kind.INFO.kind
        lines += ["", f"## {name}", "", "| Field | An edit restarts |", "|---|---|"]
        lines += [f"| `{path}` | {restart_of(name, path)} |" for path in leaves_of_spec(kind)]
    return "\n".join([*lines, ""])


def leaves_of_spec(kind: type[Resource]) -> list[str]:
    """Return the fields of a kind's spec that contain no others; a list counts as one field."""
    paths = [path for path, *_ in _fields(root_schema(kind)["properties"]["spec"], "spec") if "[]" not in path]
    return [path for path in paths if not any(one.startswith(f"{path}.") for one in paths)]


def _page(kind: type[Resource]) -> str:
    schema, info = root_schema(kind), kind.INFO
    lines = [HEADER, "", f"# {kind.INFO.kind}", "", schema["description"], ""]
    lines += [f"`apiVersion: {API_VERSION}`, `kind: {kind.INFO.kind}`, short name `{kind.INFO.short_names[0]}`.", ""]
    for part in ("spec", "status"):
        lines += [f"## {part}", "", "| Field | Type | Meaning |", "|---|---|---|"]
        lines += [_row(path, field, required) for path, field, required in _fields(schema["properties"][part], part)]
        lines.append("")
    lines += ["## Rules", "", "The apiserver refuses an object that breaks one of these.", ""]
    lines += [f"- `{path}`: {message}" for path, message in _rules(schema, "")]
    lines.append("")
    if kind.INFO.kind == "CachedModel":
        lines += _engine_section()
    lines += ["## Conditions", "", "| Condition | True means | Present |", "|---|---|---|"]
    lines += [f"| {one} | {one.meaning} | {when or 'always'} |" for one, when in condition_types(info.kind).items()]
    lines += ["", "## Reasons", "", "| Reason | Meaning |", "|---|---|"]
    lines += [f"| {one.value} | {one.meaning} |" for one in sorted(REASONS[kind.INFO.kind])]
    lines.append("")
    return "\n".join(lines)


def _engine_section() -> list[str]:
    lines = ["## Arguments and variables that belong to the operator", ""]
    lines += ["`engine.args` may not contain these flags, in any spelling that the engine accepts:", ""]
    lines += ["| Flag | Instead |", "|---|---|"]
    lines += [f"| `{flag}` | {instead} |" for flag, instead in OWNED_FLAGS.items()]
    names = ", ".join(f"`{name}`" for name in sorted(OWNED_ENV))
    return [*lines, "", f"`engine.env` may not contain {names}.", ""]


def _fields(schema: Mapping[str, Any], path: str) -> Iterator[tuple[str, Mapping[str, Any], bool]]:
    """Every field below `schema`, depth first, with its path and whether it is required."""
    required = schema.get("required", ())
    for name, child in schema.get("properties", {}).items():
        here = f"{path}.{name}"
        yield here, child, name in required
        inner, suffix = (child.get("items", {}), "[]") if child.get("type") == "array" else (child, "")
        yield from _fields(inner, here + suffix)


def _row(path: str, field: Mapping[str, Any], required: bool) -> str:
    meaning = str(field.get("description", "")).replace("|", "\\|")
    return f"| `{path}` | {_type_name(field)}{', required' if required else ''} | {meaning} |"


def _type_name(field: Mapping[str, Any]) -> str:
    if field.get("x-kubernetes-int-or-string") or is_untyped(field):
        return "quantity"
    if "enum" in field:
        return " \\| ".join(f"`{str(value).lower() if value is True else value}`" for value in field["enum"])
    kind = str(field.get("type", ""))
    if kind == "array":
        return f"list of {_type_name(field['items'])}"
    if kind == "object" and "additionalProperties" in field:
        return f"map of {_type_name(field['additionalProperties'])}"
    if field.get("format") == "date-time":
        return "time"
    if "minimum" in field and "maximum" in field and field["maximum"] < 2**31:
        return f"{kind} {field['minimum']} to {field['maximum']}"
    return kind


def _rules(schema: Mapping[str, Any], path: str) -> Iterator[tuple[str, str]]:
    for rule in schema.get(VALIDATIONS, ()):
        yield (path + rule.get("fieldPath", "")).lstrip(".") or "(object)", PATTERN.sub(r"`\g<0>`", rule["message"])
    for name, child in schema.get("properties", {}).items():
        yield from _rules(child, f"{path}.{name}")
    if "items" in schema:
        yield from _rules(schema["items"], f"{path}[]")


def _first_sentence(text: str) -> str:
    return " ".join(text.split()).split(". ")[0].rstrip(".") + "."
