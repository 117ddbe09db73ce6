"""The CustomResourceDefinitions, built from the models."""

from __future__ import annotations

from typing import Any

from kvstrata.api import KINDS
from kvstrata.api.base import GROUP, VERSION, Column, Resource
from tools.generate.openapi import entries, structural_schema, without_rules

CATEGORIES = ["cache-status", "kvstrata"]
"""`kubectl get cache-status` lists every kind of the group."""

AGE = Column("Age", ".metadata.creationTimestamp", "date")
"""The last column of every kind."""

_API_VERSION_TEXT = "Version of the schema of this object."
_KIND_TEXT = "Kind of this object."


def build_crd(kind: type[Resource]) -> dict[str, Any]:
    """The CustomResourceDefinition of one kind."""
    info = kind.INFO
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{info.plural}.{GROUP}",
            "labels": {"app.kubernetes.io/name": "kvstrata", "app.kubernetes.io/part-of": "kvstrata"},
        },
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": info.kind,
                "listKind": f"{info.kind}List",
                "plural": info.plural,
                "singular": info.kind.lower(),
                "shortNames": list(info.short_names),
                "categories": CATEGORIES,
            },
            "versions": [_version(kind)],
        },
    }


def build_crds() -> dict[str, dict[str, Any]]:
    """Every CustomResourceDefinition by name."""
    return {crd["metadata"]["name"]: crd for crd in map(build_crd, KINDS)}


def _version(kind: type[Resource]) -> dict[str, Any]:
    info = kind.INFO
    version: dict[str, Any] = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": _subresources(kind),
        "additionalPrinterColumns": [_column(column) for column in (*info.columns, AGE)],
        "schema": {"openAPIV3Schema": root_schema(kind)},
    }
    if info.selectable_fields:
        version["selectableFields"] = [{"jsonPath": path} for path in info.selectable_fields]
    return version


def _subresources(kind: type[Resource]) -> dict[str, Any]:
    subresources: dict[str, Any] = {"status": {}}
    if kind.INFO.scale is not None:
        subresources["scale"] = dict(kind.INFO.scale)
    return subresources


def _column(column: Column) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": column.name, "type": column.type, "jsonPath": column.json_path}
    if column.description:
        entry["description"] = column.description
    if column.priority:
        entry["priority"] = column.priority
    return entry


def root_schema(kind: type[Resource]) -> dict[str, Any]:
    """The schema of a whole object. Metadata is the apiserver's own; the rules on names stand at the root."""
    spec = kind.model_fields["spec"]
    schema: dict[str, Any] = {
        "type": "object",
        "description": " ".join((kind.__doc__ or "").split()),
        "x-kubernetes-validations": entries(kind.RULES),
        "properties": {
            "apiVersion": {"type": "string", "description": _API_VERSION_TEXT},
            "kind": {"type": "string", "description": _KIND_TEXT},
            "metadata": {"type": "object", "properties": {"name": {"type": "string"}}},
            "spec": structural_schema(_model_of(kind, "spec")),
            "status": without_rules(structural_schema(_model_of(kind, "status"))),
        },
    }
    if spec.is_required():
        schema["required"] = ["spec"]
    return schema


def _model_of(kind: type[Resource], field: str) -> Any:
    return kind.model_fields[field].annotation
