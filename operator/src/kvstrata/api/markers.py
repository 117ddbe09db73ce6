"""Annotations of fields that CRD schemas know and JSON schema does not: list types, immutability, bounds of durations.

Each adds its keys to the CRD schema and, where Python can check it, the same check to the model.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import core_schema

from kvstrata.api.scalars import VALIDATIONS, Duration, Quantity, cel_text

DEFAULT = "x-kvstrata-default"
"""Key of a default that the apiserver fills in; plain defaults of models stay out of CRDs."""


class Marker:
    """Annotation that adds keys to the CRD schema of a field, and optionally a check in Python."""

    def _schema_keys(self) -> dict[str, Any]:
        """Return the keys to add; none unless a subclass has some."""
        return {}

    def _check(self, value: Any) -> None:
        """Raise ValueError when `value` breaks the marker's rule."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        def checked(value: Any) -> Any:
            self._check(value)
            return value

        return core_schema.no_info_after_validator_function(checked, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        produced = handler(schema)
        for key, value in self._schema_keys().items():
            produced[key] = [*produced.get(key, []), *value] if key == VALIDATIONS else value
        return produced


@dataclass(frozen=True, slots=True)
class SetList(Marker):
    """A list of scalars without repeats (listType set)."""

    def _schema_keys(self) -> dict[str, Any]:
        return {"x-kubernetes-list-type": "set"}

    def _check(self, value: Any) -> None:
        _refuse_repeats(value, lambda item: item)


@dataclass(frozen=True, slots=True)
class MapList(Marker):
    """A list of objects, each named by the field `key` (listType map)."""

    key: str = "name"

    def _schema_keys(self) -> dict[str, Any]:
        return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [self.key]}

    def _check(self, value: Any) -> None:
        _refuse_repeats(value, lambda item: getattr(item, self.key))


@dataclass(frozen=True, slots=True)
class AtomicList(Marker):
    """A list that is replaced as a whole (listType atomic)."""

    def _schema_keys(self) -> dict[str, Any]:
        return {"x-kubernetes-list-type": "atomic"}


def _refuse_repeats(items: Sequence[Any], key: Callable[[Any], Hashable]) -> None:
    keys = [key(item) for item in items]
    repeated = sorted({str(one) for one in keys if keys.count(one) > 1}) if len(set(keys)) < len(keys) else []
    if repeated:
        raise ValueError(f"names {repeated[0]!r} more than once")


@dataclass(frozen=True, slots=True)
class Between(Marker):
    """Bounds of a duration, both inclusive, in Go form."""

    low: str
    high: str

    def _schema_keys(self) -> dict[str, Any]:
        malformed = f"!self.matches({cel_text(Duration.PATTERN)})"
        # CEL knows no days: `7d` is compared as `7h` with a 24th of the bounds.
        days, other = self._bounds("self.replace('d', 'h')", 24), self._bounds("self", 1)
        cel = f"{malformed} || (self.endsWith('d') ? {days} : {other})"
        return {VALIDATIONS: [{"rule": cel, "message": self._message}]}

    def _check(self, value: Any) -> None:
        if not Duration(self.low).in_seconds <= Duration(value).in_seconds <= Duration(self.high).in_seconds:
            raise ValueError(self._message)

    def _bounds(self, text: str, divisor: int) -> str:
        low, high = (f"duration('{Duration(bound).in_seconds / divisor:.9f}s')" for bound in (self.low, self.high))
        return f"duration({text}) >= {low} && duration({text}) <= {high}"

    @property
    def _message(self) -> str:
        return f"must be between {self.low} and {self.high}"


@dataclass(frozen=True, slots=True)
class AtLeast(Marker):
    """A minimum quantity; `message` states it and the cause."""

    least: str
    message: str

    def _schema_keys(self) -> dict[str, Any]:
        cel = f"!isQuantity(string(self)) || !quantity(string(self)).isLessThan(quantity('{self.least}'))"
        return {VALIDATIONS: [{"rule": cel, "message": self.message}]}

    def _check(self, value: Any) -> None:
        if Quantity(value).in_bytes < Quantity(self.least).in_bytes:
            raise ValueError(self.message)


@dataclass(frozen=True, slots=True)
class Immutable(Marker):
    """A field that keeps the value that it was created with; `message` states the alternative."""

    message: str

    def _schema_keys(self) -> dict[str, Any]:
        return {VALIDATIONS: [{"rule": "self == oldSelf", "message": self.message}]}


@dataclass(frozen=True, slots=True)
class SchemaDefault(Marker):
    """A default that the apiserver writes into the object at admission, as it does for a Deployment's replicas."""

    value: int | str

    def _schema_keys(self) -> dict[str, Any]:
        return {DEFAULT: self.value}
