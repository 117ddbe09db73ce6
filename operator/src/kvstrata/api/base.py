"""Base classes of all kinds: models with rules, metadata, and the resource that joins spec and status.

A `Rule` states one cross-field invariant twice, as CEL for the apiserver and as a predicate for Python, with one
message for both. So an object that reaches a planner satisfies the same invariants even when it came from a file or
from a cluster whose CRDs are of another version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.alias_generators import to_camel

from kvstrata.api.scalars import Timestamp

GROUP = "kvstrata.io"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"


@dataclass(frozen=True, slots=True)
class Rule:
    """One invariant of a model.

    `cel` is the expression that the apiserver evaluates (`self` is the model), `message` one sentence for the user.
    `field_path` is the field that the error names, relative to the model (`.capacity`); None for the model itself.
    `holds` is the same invariant in Python, or None for a transition rule, which needs the old object.
    """

    cel: str
    message: str
    field_path: str | None = None
    holds: Callable[[Any], bool] | None = None


def exactly_one_of(fields: Sequence[str], message: str) -> Rule:
    """Exactly one of the named (API-cased) fields must be present."""
    present = ", ".join(f"has(self.{name})" for name in fields)

    def holds(model: ApiModel) -> bool:
        declared = type(model).model_fields
        return sum(value is not None for name, value in model if declared[name].alias in fields) == 1

    return Rule(f"[{present}].filter(x, x).size() == 1", message, holds=holds)


class ApiModel(BaseModel):
    """Base of all spec parts: immutable, camelCase outside, unknown fields refused, rules checked."""

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True)

    RULES: ClassVar[tuple[Rule, ...]] = ()

    @model_validator(mode="after")
    def _rules_hold(self) -> Self:
        for rule in self.RULES:
            if rule.holds is not None and not rule.holds(self):
                raise ValueError(rule.message)
        return self

    def to_kubernetes(self) -> dict[str, Any]:
        """The model as a Kubernetes object fragment: camelCase, without fields that were not given, so that defaults
        are not written into objects."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_unset=True)


class StatusModel(ApiModel):
    """Base of all status parts: unknown fields are ignored, because a newer operator may have written them."""

    model_config = ConfigDict(extra="ignore")

    def to_kubernetes(self) -> dict[str, Any]:
        """The status as a Kubernetes object fragment: camelCase, absent fields left out, counters always written."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class ObjectMeta(StatusModel):
    """The part of metadata that this project reads."""

    name: str
    namespace: str = ""
    uid: str = ""
    generation: int = 0
    resource_version: str = ""
    creation_timestamp: Timestamp | None = None
    deletion_timestamp: Timestamp | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)
    finalizers: tuple[str, ...] = ()

    @property
    def deleting(self) -> bool:
        return self.deletion_timestamp is not None


@dataclass(frozen=True, slots=True)
class Column:
    """One column of `kubectl get`; those of priority 1 appear with `-o wide`. The others are few and narrow, so that
    `kubectl get cache-status -A` stays readable."""

    name: str
    json_path: str
    type: str = "string"
    description: str = ""
    priority: int = 0

    @classmethod
    def of_condition(cls, name: str, condition: str, field: str = "status", priority: int = 0) -> Self:
        """Return a column that shows `field` of the condition of type `condition`."""
        return cls(name, f'.status.conditions[?(@.type=="{condition}")].{field}', priority=priority)


@dataclass(frozen=True, slots=True)
class KindInfo:
    """How a kind appears in the Kubernetes API. Its last column is always the age, which is not listed here; `scale`
    has the paths of the subresource."""

    kind: str
    plural: str
    short_names: tuple[str, ...]
    columns: tuple[Column, ...]
    selectable_fields: tuple[str, ...] = ()
    scale: Mapping[str, str] | None = None


ENFORCED = Column("Enforced", ".status.enforcedBy", description="Serving pods that enforce the spec, out of all")
READY = (Column.of_condition("Ready", "Ready"), Column.of_condition("Reason", "Ready", "reason"))
"""The columns of every kind; Reason is the reason of condition Ready."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with an object: the field in API form (``spec.budgets[0].limit``) and a sentence."""

    field: str
    message: str

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message


class InvalidObjectError(ValueError):
    """An object cannot be read as its kind; `problems` has a sentence for each invalid field."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(str(problem) for problem in self.problems))


def _problems(error: ValidationError, prefix: str = "") -> list[Problem]:
    found = []
    for detail in error.errors(include_url=False, include_context=False, include_input=False):
        path = prefix
        for step in detail["loc"]:
            path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else str(step)
        found.append(Problem(path, detail["msg"].removeprefix("Value error, ")))
    return found


class Resource(ApiModel):
    """Base of the kinds: metadata, spec and status of one object of this API group.

    Subclasses declare `INFO`, and the types of `spec` and `status`.
    """

    model_config = ConfigDict(extra="ignore")

    INFO: ClassVar[KindInfo]
    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.metadata.name.size() <= 40",
            message="the name must have at most 40 characters, so that the names derived from it fit into 63",
            field_path=".metadata.name",
            holds=lambda resource: len(resource.metadata.name) <= 40,
        ),
        Rule(
            cel="!self.metadata.name.contains('.')",
            message="the name must not contain dots, because Services and Secrets are named after it",
            field_path=".metadata.name",
            holds=lambda resource: "." not in resource.metadata.name,
        ),
    )

    metadata: ObjectMeta
    spec: Any
    status: Any

    @classmethod
    def parse(cls, obj: Mapping[str, Any]) -> Self:
        """Read an object as the apiserver returns it.

        Spec is read strictly. A status field that cannot be read counts as absent: losing an observation is safe,
        refusing the object is not. Raises InvalidObjectError.
        """
        kind = obj.get("kind", cls.INFO.kind)
        if kind != cls.INFO.kind:
            raise InvalidObjectError([Problem("kind", f"is {kind!r}, expected {cls.INFO.kind!r}")])
        status = dict(obj.get("status") or {})
        parts = {"metadata": obj.get("metadata"), "spec": obj.get("spec") or {}}
        while True:
            try:
                return cls.model_validate({**parts, "status": status})
            except ValidationError as error:
                unreadable = {
                    str(e["loc"][1]) for e in error.errors() if e["loc"][0:1] == ("status",) and len(e["loc"]) > 1
                }
                if not unreadable & status.keys():
                    raise InvalidObjectError(_problems(error)) from error
                status = {key: value for key, value in status.items() if key not in unreadable}

    @property
    def name(self) -> str:
        return self.metadata.name

    @property
    def namespace(self) -> str:
        return self.metadata.namespace

    @property
    def uid(self) -> str:
        return self.metadata.uid

    @property
    def generation(self) -> int:
        return self.metadata.generation

    def owner_reference(self) -> dict[str, Any]:
        """The ownerReferences entry that makes this object the controller of a child."""
        return {
            "apiVersion": API_VERSION,
            "kind": self.INFO.kind,
            "name": self.metadata.name,
            "uid": self.metadata.uid,
            "controller": True,
            "blockOwnerDeletion": True,
        }
