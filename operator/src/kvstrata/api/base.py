"""Base classes of all kinds: models with rules, metadata, and the resource that joins spec and status.

A `Rule` states one cross-field invariant twice, as CEL for the apiserver and as a predicate for Python, with one
message for both. So an object that reaches a planner satisfies the same invariants even when it came from a file or
from a cluster whose CRDs are of another version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import core_schema

from kvstrata.api.docstrings import field_docstrings
from kvstrata.api.scalars import VALIDATIONS, Timestamp

GROUP = "kvstrata.io"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"


@dataclass(frozen=True, slots=True)
class Rule:
    """One invariant of a model.

    cel: the expression that the apiserver evaluates (``self`` is the model).
    message: one sentence for the user.
    field_path: the field that the error names, relative to the model (``.capacity``); the model itself when None.
    holds: the same invariant in Python, or None for a transition rule, which needs the old object.
    """

    cel: str
    message: str
    field_path: str | None = None
    holds: Callable[[Any], bool] | None = None

    def to_schema(self) -> dict[str, str]:
        """The entry of x-kubernetes-validations."""
        entry = {"rule": self.cel, "message": self.message}
        if self.field_path:
            entry["fieldPath"] = self.field_path
        return entry


def exactly_one_of(fields: Sequence[str], message: str) -> Rule:
    """Exactly one of the named (API-cased) fields must be present."""
    present = ", ".join(f"has(self.{name})" for name in fields)
    return Rule(
        cel=f"[{present}].filter(x, x).size() == 1",
        message=message,
        holds=lambda model: count_present(model, fields) == 1,
    )


def count_present(model: ApiModel, aliases: Sequence[str]) -> int:
    """How many of the API-cased fields of `model` are present."""
    by_alias = {field.alias or name: name for name, field in type(model).model_fields.items()}
    return sum(getattr(model, by_alias[alias]) is not None for alias in aliases)


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

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        produced = handler(schema)
        resolved = handler.resolve_ref_schema(produced)
        for name, text in field_docstrings(cls).items():
            field = cls.model_fields.get(name)
            if field is not None and field.description is None:
                resolved["properties"][field.alias or name].setdefault("description", text)
        if cls.RULES:
            resolved[VALIDATIONS] = [rule.to_schema() for rule in cls.RULES]
        return produced

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


class OwnerReference(StatusModel):
    """Entry of metadata.ownerReferences."""

    api_version: str
    kind: str
    name: str
    uid: str
    controller: bool | None = None


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
    owner_references: tuple[OwnerReference, ...] = ()

    @property
    def deleting(self) -> bool:
        """Whether deletion has been asked for."""
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


@dataclass(frozen=True, slots=True)
class Scale:
    """Paths of the /scale subresource."""

    spec_replicas: str
    status_replicas: str
    label_selector: str


@dataclass(frozen=True, slots=True)
class KindInfo:
    """How a kind appears in the Kubernetes API."""

    kind: str
    plural: str
    short_names: tuple[str, ...]
    columns: tuple[Column, ...]
    selectable_fields: tuple[str, ...] = ()
    scale: Scale | None = None

    @property
    def singular(self) -> str:
        """Lower-case name of one object."""
        return self.kind.lower()

    @property
    def crd_name(self) -> str:
        """Name of the CustomResourceDefinition."""
        return f"{self.plural}.{GROUP}"


AGE = Column("Age", ".metadata.creationTimestamp", "date")


def condition_column(name: str, condition: str, field: str = "status", priority: int = 0) -> Column:
    """A column that shows `field` of the condition of type `condition`."""
    return Column(name, f'.status.conditions[?(@.type=="{condition}")].{field}', priority=priority)


ENFORCED_BY = Column("Enforced", ".status.enforcedBy", description="Serving pods that enforce the spec, out of all")
READY = (condition_column("Ready", "Ready"), condition_column("Reason", "Ready", "reason"))
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

    def __init__(self, kind: str, problems: Sequence[Problem]) -> None:
        self.kind = kind
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

    Subclasses declare `INFO`, `spec` and `status`.
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

    @classmethod
    def parse(cls, obj: Mapping[str, Any]) -> Self:
        """Read an object as the apiserver returns it.

        Spec is read strictly. A status field that cannot be read counts as absent: losing an observation is safe,
        refusing the object is not. Raises InvalidObjectError.
        """
        kind = obj.get("kind", cls.INFO.kind)
        if kind != cls.INFO.kind:
            raise InvalidObjectError(cls.INFO.kind, [Problem("kind", f"is {kind!r}, expected {cls.INFO.kind!r}")])
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
                    raise InvalidObjectError(cls.INFO.kind, _problems(error)) from error
                status = {key: value for key, value in status.items() if key not in unreadable}

    @property
    def name(self) -> str:
        """metadata.name."""
        return self.metadata.name

    @property
    def namespace(self) -> str:
        """metadata.namespace: the domain that the object belongs to."""
        return self.metadata.namespace

    @property
    def uid(self) -> str:
        """metadata.uid."""
        return self.metadata.uid

    @property
    def generation(self) -> int:
        """metadata.generation: grows with every change of spec."""
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
