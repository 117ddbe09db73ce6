"""How lists and maps of each kind merge: from the checked-in CRDs, and from the API server's own OpenAPI document.

`kubernetes.json` holds the second, cut down to the parts that merging needs; a test compares it with a real API server.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).resolve().parents[3]
KUBERNETES = Path(__file__).with_name("kubernetes.json")
OBJECT_META = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"
LIST_TYPE, LIST_KEYS, MAP_TYPE = "x-kubernetes-list-type", "x-kubernetes-list-map-keys", "x-kubernetes-map-type"
GROUP_VERSIONS = (
    "api/v1",
    "apis/apps/v1",
    "apis/policy/v1",
    "apis/networking.k8s.io/v1",
    "apis/rbac.authorization.k8s.io/v1",
    "apis/coordination.k8s.io/v1",
)
"""The OpenAPI documents that describe the kinds which the operator writes."""
BUILT_IN = (
    "io.k8s.api.core.v1.Pod",
    "io.k8s.api.core.v1.Secret",
    "io.k8s.api.core.v1.Service",
    "io.k8s.api.core.v1.ServiceAccount",
    "io.k8s.api.apps.v1.Deployment",
    "io.k8s.api.apps.v1.StatefulSet",
    "io.k8s.api.policy.v1.PodDisruptionBudget",
    "io.k8s.api.networking.v1.NetworkPolicy",
    "io.k8s.api.rbac.v1.Role",
    "io.k8s.api.rbac.v1.RoleBinding",
    "io.k8s.api.coordination.v1.Lease",
)

FAST = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
Schema = Mapping[str, Any]
ANYTHING: Schema = {}
"""Of a value without a schema maps merge and lists are replaced, as the API server deduces it."""


@cache
def components() -> dict[str, Schema]:
    """Return the types of Kubernetes itself by name."""
    loaded: dict[str, Schema] = json.loads(KUBERNETES.read_text())
    return loaded


@cache
def schema_of(kind: str) -> Schema:
    """Return the schema of a kind; `ANYTHING` with Kubernetes' metadata for one that is not known here."""
    for name in BUILT_IN:
        if name.rsplit(".", 1)[1] == kind:
            return components()[name]
    known = _own_kinds().get(kind, ANYTHING)
    return {**known, "properties": {**known.get("properties", {}), "metadata": components()[OBJECT_META]}}


@cache
def is_own(kind: str) -> bool:
    """Whether a CRD of this project defines the kind."""
    return kind in _own_kinds()


@cache
def _own_kinds() -> dict[str, Schema]:
    found = {}
    for path in sorted((REPOSITORY / "crds").glob("*.yaml")):
        crd = yaml.load(path.read_text(), Loader=FAST)  # noqa: S506  (a safe one, in C where there is one)
        found[crd["spec"]["names"]["kind"]] = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return found


def resolved(schema: Schema) -> Schema:
    """Follow a reference to another type."""
    reference = schema.get("$ref")
    return components().get(reference, ANYTHING) if reference else schema


def child(schema: Schema, name: str) -> Schema:
    """Return the schema of a field of a struct or of a value of a map."""
    found = schema.get("properties", {}).get(name)
    if found is None:
        values = schema.get("additionalProperties")
        found = values if isinstance(values, Mapping) else ANYTHING
    return resolved(found)


def is_named(schema: Schema, name: str) -> bool:
    """Whether a field is declared, and not a key of a map."""
    return name in schema.get("properties", {})


def is_atomic(schema: Schema, value: Any) -> bool:
    """Whether a list or map is owned and replaced as a whole."""
    if isinstance(value, list):
        return bool(schema.get(LIST_TYPE, "atomic") == "atomic")
    return bool(schema.get(MAP_TYPE) == "atomic")


def item_of(schema: Schema) -> Schema:
    """Return the schema of a list's items."""
    return resolved(schema.get("items") or ANYTHING)


def element(schema: Schema, item: Any) -> str:
    """Return the path element of an item of a set, or of a list with map keys, as managedFields writes it."""
    if schema.get(LIST_TYPE) == "set":
        return "v:" + json.dumps(item, separators=(",", ":"))
    fields = item_of(schema).get("properties", {})
    keys = {name: item.get(name, fields.get(name, {}).get("default")) for name in sorted(schema[LIST_KEYS])}
    present = {name: value for name, value in keys.items() if value is not None}
    return "k:" + json.dumps(present, separators=(",", ":"))


def pruned(schema: Schema, value: Any) -> Any:
    """Return `value` without the fields that the schema of a CRD does not know, which the API server drops."""
    if isinstance(value, Mapping):
        if schema.get("x-kubernetes-preserve-unknown-fields") or not (
            "properties" in schema or "additionalProperties" in schema
        ):
            return value
        closed = not isinstance(schema.get("additionalProperties"), Mapping)
        return {
            name: pruned(child(schema, name), kept)
            for name, kept in value.items()
            if not closed or is_named(schema, name)
        }
    if isinstance(value, list):
        return [pruned(item_of(schema), item) for item in value]
    return value


def cut_down(documents: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the parts of OpenAPI documents that merging needs: the built-in kinds and all types that they reach."""
    types: dict[str, Any] = {}
    for document in documents:
        types |= document["components"]["schemas"]
    kept: dict[str, Any] = {}
    waiting = [*BUILT_IN, OBJECT_META]
    while waiting:
        name = waiting.pop()
        if name not in kept:
            kept[name] = _cut(types[name], waiting)
    return dict(sorted(kept.items()))


def written(types: Mapping[str, Any]) -> str:
    """Return the text of `kubernetes.json`: one line for each type."""
    lines = (f"{json.dumps(name)}: {json.dumps(types[name], sort_keys=True)}" for name in sorted(types))
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _cut(schema: Mapping[str, Any], reached: list[str]) -> dict[str, Any]:
    references = [part["$ref"] for part in (schema, *schema.get("allOf", ())) if "$ref" in part]
    if references:
        name = references[0].rsplit("/", 1)[1]
        reached.append(name)
        return {"$ref": name}
    result = {field: schema[field] for field in (LIST_TYPE, LIST_KEYS, MAP_TYPE) if field in schema}
    if "items" in schema:
        result["items"] = _cut(schema["items"], reached)
    if isinstance(schema.get("additionalProperties"), Mapping):
        result["additionalProperties"] = _cut(schema["additionalProperties"], reached)
    if "properties" in schema:
        fields = schema["properties"]
        result["properties"] = {name: _cut(fields[name], reached) for name in sorted(fields)}
    if isinstance(schema.get("default"), str) and schema["default"]:
        result["default"] = schema["default"]
    return result
