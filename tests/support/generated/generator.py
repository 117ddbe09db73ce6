"""Specs from the CRDs' own schemas: valid ones with interesting values, and mutants of them.

Seeded, so that a run can be repeated: the same seed and schemas give the same objects.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

import yaml

from kvstrata.api.cachetier import LEAST_CAPACITY
from kvstrata.api.scalars import Quantity
from tests.support.generated import values
from tools.generate.openapi import is_untyped

Raw = dict[str, Any]
Schema = Mapping[str, Any]
ONE_OF = re.compile(r"^\[(has\(self\.\w+\)(?:, has\(self\.\w+\))+)\]\.filter\(x, x\)\.size\(\) == 1$")
MATCHES = re.compile(r"(?:self|string\(self\))\.matches\('(.*)'\)")
PREFIX = {
    "CacheTier": "t",
    "CachedModel": "m",
    "TenantCachePolicy": "p",
    "TenantGroup": "g",
    "PrefixPool": "o",
    "CacheInvalidation": "i",
}
"""Names are these and a number, so that references can be to existing objects."""
REFERENCES = {
    "tiers": "CacheTier",
    "tier": "CacheTier",
    "modelRef": "CachedModel",
    "model": "CachedModel",
    "models": "CachedModel",
    "groupRef": "TenantGroup",
    "groups": "TenantGroup",
    "group": "TenantGroup",
    "pools": "PrefixPool",
    "pool": "PrefixPool",
}
ALLOWED_MEDIUM = {
    "CPU": {"capacityPerPod", "eviction"},
    "NVMe": {"capacityPerPod", "eviction", "encryption", "nvme"},
    "Redis": {"capacity", "eviction", "encryption", "redis"},
}
ONLY_OF_A_MEDIUM = {"capacityPerPod", "capacity", "eviction", "encryption", "nvme", "redis"}


def load_schemas(folder: Path) -> dict[str, Schema]:
    """The schema of each kind's spec, from the CRDs."""
    found = {}
    for path in sorted(folder.glob("kvstrata.io_*.yaml")):
        crd = yaml.safe_load(path.read_text())
        schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        found[crd["spec"]["names"]["kind"]] = schema["properties"]["spec"]
    return found


class Generator:
    """Makes specs of one kind. `neighbours` is how many objects of each kind a reference may be to."""

    def __init__(self, kind: str, schema: Schema, neighbours: int, seed: str) -> None:
        self._kind, self._schema, self._neighbours = kind, schema, neighbours
        self._rng = Random(f"{kind}/{seed}")

    def spec(self) -> Raw:
        """A spec that the schema allows; rules between fields, most of which it keeps, may still refuse it."""
        self._richness = self._rng.choice((0.0, 0.1, 0.3, 0.6))
        # A thoughtful user's spec, or one that goes to the limits of each field.
        self._strange = self._rng.random() < 0.25
        return self._settle(self._object(self._schema, ()))

    def odd_name(self) -> str:
        """An unusual name: the longest, numbers only, and such as are refused."""
        longest = "".join(self._rng.choice("abc0") for _ in range(40))
        return str(self._rng.choice((longest, f"{self._rng.randrange(10**9)}", "a.b", longest + "x", "Upper", "-a")))

    def mutant(self) -> Raw:
        """A spec with one or two faults of form."""
        spec = self.spec()
        for _ in range(self._rng.choice((1, 1, 2))):
            self._break(spec)
        return spec

    def _value(self, schema: Schema, path: tuple[str, ...]) -> Any:
        if "enum" in schema:
            return self._rng.choice(schema["enum"])
        if is_untyped(schema):
            return self._rng.choice((self._text(schema, path), self._rng.choice((1, 2, 0.5, 1.25))))
        if schema.get("x-kubernetes-preserve-unknown-fields"):
            return copy.deepcopy(self._rng.choice(self._free(path)))
        if schema.get("x-kubernetes-int-or-string"):
            return self._rng.choice((self._text(schema, path), self._rng.choice((1, 1024, 10**9, 2**40))))
        match schema.get("type"):
            case "object":
                return self._object(schema, path)
            case "array":
                return self._list(schema, path)
            case "integer":
                return self._integer(schema)
            case "boolean":
                return self._rng.random() < 0.5
            case _:
                return self._text(schema, path)

    @staticmethod
    def _free(path: tuple[str, ...]) -> tuple[Any, ...]:
        if path[-1] == "affinity":
            return values.AFFINITY
        return values.SPREAD if "topologySpreadConstraints" in path else values.ANYTHING

    def _object(self, schema: Schema, path: tuple[str, ...]) -> Raw:
        if isinstance(schema.get("additionalProperties"), Mapping):
            keys = self._rng.sample(values.LABEL_KEYS, self._rng.randint(0, min(3, schema.get("maxProperties", 3))))
            return {key: self._value(schema["additionalProperties"], (*path, key)) for key in keys}
        properties: Mapping[str, Schema] = schema.get("properties", {})
        required = set(schema.get("required", ()))
        chosen = {name for name in properties if name in required or self._rng.random() < self._richness}
        for choice in _choices(schema):
            chosen = (chosen - set(choice)) | {self._rng.choice(choice)}
        return {name: self._value(properties[name], (*path, name)) for name in properties if name in chosen}

    def _list(self, schema: Schema, path: tuple[str, ...]) -> list[Any]:
        least, most = schema.get("minItems", 0), schema.get("maxItems", 5)
        length = max(least, min(most, self._rng.choice((0, 1, 1, 2, 3, 7))))
        if self._strange and self._rng.random() < 0.05:
            length = min(most, 64)
        found = [self._value(schema["items"], path) for _ in range(length)]
        keys = schema.get("x-kubernetes-list-map-keys")
        if schema.get("x-kubernetes-list-type") == "atomic":
            return found
        seen: dict[str, Any] = {}
        for item in found:
            seen.setdefault(repr([item.get(key) for key in keys] if keys else item), item)
        return list(seen.values())

    def _integer(self, schema: Schema) -> int:
        low: int = schema.get("minimum", 0)
        high: int = schema.get("maximum", 2**31)
        step: int = schema.get("multipleOf", 1)
        number = self._rng.choice((low, min(low + step, high), min(high, max(low, 2 * step))))
        if self._strange:
            number = self._rng.choice((low, high, number))
        return max(low, number - number % step)

    def _text(self, schema: Schema, path: tuple[str, ...]) -> str:
        most, least = schema.get("maxLength", 200), schema.get("minLength", 0)
        pool = self._pool(schema, path)
        fitting = [text for text in pool if least <= len(text) <= most]
        if not fitting:
            fitting = [(pool[0] * (least + 1))[: max(least, 1)]]
        return str(self._rng.choice(fitting))

    def _pool(self, schema: Schema, path: tuple[str, ...]) -> tuple[str, ...]:
        pattern = _pattern(schema)
        kind = next((REFERENCES[part] for part in reversed(path) if part in REFERENCES), None)
        if path[-1] in ("tenant", "members", "tenants"):
            # Few of them, so that policies conflict and groups find members.
            return (*(f"tenant-{n}" for n in range(self._neighbours)), *(values.UNICODE if self._strange else ()))
        if pattern == values.NAME and kind and self._rng.random() < 0.9:
            return tuple(f"{PREFIX[kind]}-{n}" for n in range(self._neighbours))
        if pattern is None:
            return values.ARGUMENTS if path[-1] in ("args", "command") else values.FREE_TEXT
        if not self._strange and pattern in values.LIKELY:
            return values.LIKELY[pattern]
        return values.BY_PATTERN[pattern]

    def _settle(self, spec: Raw) -> Raw:
        """Keep the rules between fields that would refuse nearly everything otherwise; leave one spec in twenty."""
        if self._rng.random() < 0.05:
            return spec
        match self._kind:
            case "CacheTier":
                medium = spec["medium"]
                for name in ONLY_OF_A_MEDIUM - ALLOWED_MEDIUM[medium]:
                    spec.pop(name, None)
                needed = {
                    "CPU": ("capacityPerPod",),
                    "NVMe": ("capacityPerPod", "nvme"),
                    "Redis": ("capacity", "redis"),
                }
                for name in needed.get(medium, ()):
                    spec.setdefault(name, self._value(self._schema["properties"][name], (name,)))
                for name in spec.keys() & {"capacity", "capacityPerPod"}:
                    if Quantity(spec[name]).in_bytes < Quantity(LEAST_CAPACITY).in_bytes:
                        spec[name] = self._rng.choice((LEAST_CAPACITY, "64Mi", "1Gi"))
                if medium == "Redis" and self._rng.random() < 0.7:
                    spec["encryption"] = "Disabled"
            case "TenantCachePolicy":
                if spec["isolation"] != "Group":
                    spec.pop("groupRef", None)
                else:
                    spec.setdefault("groupRef", {"name": f"g-{self._rng.randrange(self._neighbours)}"})
                if spec["isolation"] != "Isolated":
                    spec.pop("budgets", None)
                    spec.pop("cacheGeneration", None)
            case "TenantGroup":
                if spec.get("sharing") == "PoolsOnly":
                    spec.pop("budgets", None)
            case "PrefixPool":
                if spec["readers"].get("public"):
                    spec["readers"] = {"public": True}
                elif not (spec["readers"].get("groups") or spec["readers"].get("tenants")):
                    spec["readers"] = {"tenants": ["tenant-0"]}
                for prefix in spec["prefixes"]:
                    if "messages" not in prefix:
                        prefix.pop("tools", None)
                        prefix.pop("chatTemplateKwargs", None)
                    if "configMapKeyRef" not in prefix:
                        prefix.pop("format", None)
            case "CacheInvalidation":
                if not spec["scope"].keys() & {"tenant", "prefix"}:
                    spec.pop("sharedScopes", None)
                if "prefix" in spec["scope"]:
                    spec |= {"mode": "Eager", "hbm": "ResetEngine", "tiers": []}
                if spec["mode"] != "Eager":
                    spec.pop("hbm", None)
                    spec.pop("tiers", None)
                    spec.pop("allowResidue", None)
            case "CachedModel":
                pod = spec["engine"].get("podTemplate", {})
                engine = spec["engine"]
                engine["args"] = [text for text in engine.get("args", ()) if text != "--port"]
                engine["env"] = [entry for entry in engine.get("env", ()) if entry["name"] != "HF_TOKEN"]
                pod.pop("labels", None) if self._rng.random() < 0.1 else None
        for holder in _secret_modes(spec):
            if (holder["mode"] == "Secret") != ("secretRef" in holder):
                if holder["mode"] == "Secret":
                    holder["secretRef"] = {"name": "some-tls"}
                else:
                    del holder["secretRef"]
        return spec

    def _break(self, spec: Raw) -> None:
        places = list(_places(spec))
        if not places:
            spec["unexpected"] = {}
            return
        holder, key = self._rng.choice(places)
        value = holder[key]
        fault = self._rng.randrange(9)
        if fault == 0 and isinstance(holder, dict):
            del holder[key]
        elif fault == 1 and isinstance(holder, dict):
            holder[f"{key}X"] = value
        elif fault == 2:
            holder[key] = None
        elif fault == 3:
            holder[key] = [value]
        elif fault == 4:
            holder[key] = {"unexpected": value}
        elif fault == 5:
            holder[key] = f"{value}\u0000\u2028" if isinstance(value, str) else "text"
        elif fault == 6:
            holder[key] = value * 5000 if isinstance(value, str) and value else -1
        elif fault == 7:
            holder[key] = True if not isinstance(value, bool) else 3.5
        else:
            holder[key] = -(2**63) if isinstance(value, int) else "UPPER case!"


def _choices(schema: Schema) -> Iterator[list[str]]:
    """The fields of which the schema's rules want exactly one."""
    for rule in schema.get("x-kubernetes-validations", ()):
        found = ONE_OF.match(" ".join(rule["rule"].split()))
        if found:
            yield re.findall(r"has\(self\.(\w+)\)", found.group(1))


def _pattern(schema: Schema) -> str | None:
    """The regular expression in the rule of a text, or None."""
    rules = (MATCHES.fullmatch(rule["rule"]) for rule in schema.get("x-kubernetes-validations", ()))
    found = next((rule.group(1) for rule in rules if rule), None)
    return found.replace("\\\\", "\\") if found else schema.get("pattern")


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(node, dict | list):
        for key in list(node) if isinstance(node, dict) else range(len(node)):
            yield node, key
            yield from _places(node[key])


def _secret_modes(node: Any) -> Iterator[Raw]:
    if isinstance(node, dict):
        if node.get("mode") in ("Secret", "Issued", "Disabled"):
            yield node
        for value in node.values():
            yield from _secret_modes(value)
    elif isinstance(node, list):
        for value in node:
            yield from _secret_modes(value)
