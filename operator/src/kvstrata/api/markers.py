"""Annotations of fields that CRD schemas know and JSON schema does not: list types, immutability, bounds of durations.

Each adds its keys to the CRD schema and, where Python can check it, the same check to the model.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import core_schema

from kvstrata.api.scalars import VALIDATIONS, Duration, Quantity, cel_text

DEFAULT = "x-kvstrata-default"
"""Key of a default that the apiserver fills in; plain defaults of models stay out of CRDs."""

LIST_TYPE = "x-kubernetes-list-type"


def _unchecked(value: Any) -> None:
    """Accept every value."""


@dataclass(frozen=True, slots=True, eq=False)
class Marker:
    """Keys to add to the CRD schema of a field, and a check of its values, which raises ValueError."""

    keys: Mapping[str, Any]
    check: Callable[[Any], None] = _unchecked

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        def checked(value: Any) -> Any:
            self.check(value)
            return value

        return core_schema.no_info_after_validator_function(checked, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        produced = handler(schema)
        for key, value in self.keys.items():
            produced[key] = [*produced.get(key, []), *value] if key == VALIDATIONS else value
        return produced


def _rule(cel: str, message: str) -> dict[str, Any]:
    return {VALIDATIONS: [{"rule": cel, "message": message}]}


def set_list() -> Marker:
    """A list of scalars without repeats."""
    return Marker({LIST_TYPE: "set"}, _refuse_repeats)


def map_list(key: str = "name") -> Marker:
    """A list of objects, each named by the field `key`."""
    keys = {LIST_TYPE: "map", "x-kubernetes-list-map-keys": [key]}
    return Marker(keys, lambda items: _refuse_repeats([getattr(item, key) for item in items]))


def atomic_list() -> Marker:
    """A list that is replaced as a whole."""
    return Marker({LIST_TYPE: "atomic"})


def _refuse_repeats(keys: Sequence[Hashable]) -> None:
    repeated = sorted({str(one) for one in keys if keys.count(one) > 1}) if len(set(keys)) < len(keys) else []
    if repeated:
        raise ValueError(f"names {repeated[0]!r} more than once")


def between(low: str, high: str) -> Marker:
    """Bounds of a duration, both inclusive, in Go form."""
    least_s, most_s = Duration(low).in_seconds, Duration(high).in_seconds
    message = f"must be between {low} and {high}"

    def within(text: str, divisor: int) -> str:
        least, most = (f"duration('{bound_s / divisor:.9f}s')" for bound_s in (least_s, most_s))
        return f"duration({text}) >= {least} && duration({text}) <= {most}"

    def check(value: str) -> None:
        if not least_s <= Duration(value).in_seconds <= most_s:
            raise ValueError(message)

    # CEL knows no days: `7d` is compared as `7h` with a 24th of the bounds.
    days, other = within("self.replace('d', 'h')", 24), within("self", 1)
    cel = f"!self.matches({cel_text(Duration.PATTERN)}) || (self.endsWith('d') ? {days} : {other})"
    return Marker(_rule(cel, message), check)


def at_least(least: str, message: str) -> Marker:
    """A minimum quantity; `message` states it and the cause."""

    def check(value: str) -> None:
        if Quantity(value).in_bytes < Quantity(least).in_bytes:
            raise ValueError(message)

    cel = f"!isQuantity(string(self)) || !quantity(string(self)).isLessThan(quantity('{least}'))"
    return Marker(_rule(cel, message), check)


def immutable(message: str) -> Marker:
    """A field that keeps the value that it was created with; `message` states the alternative."""
    return Marker(_rule("self == oldSelf", message))


def schema_default(value: int | str) -> Marker:
    """A default that the apiserver writes into the object at admission, as it does for a Deployment's replicas."""
    return Marker({DEFAULT: value})
