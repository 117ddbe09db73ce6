"""Scalar types of the API: quantities, durations, names.

Each type accepts in Python exactly the values that its CRD schema accepts, keeps the user's text (so that a round trip
changes nothing) and gives its number. Patterns use only syntax that both Go's RE2 and pydantic's regular expressions
know.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from fractions import Fraction
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, PlainSerializer, StringConstraints
from pydantic.annotated_handlers import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import core_schema

from kvstrata.quantity import quantity_bytes, read_quantity

VALIDATIONS = "x-kubernetes-validations"
"""Key under which a CRD schema holds its CEL rules."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """Text that matches the regular expression `regex`; `message` states the form in words.

    The schema has a CEL rule instead of the keyword `pattern`, with which the API server's refusal would show the
    expression alone.
    """

    regex: str
    message: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        matched = core_schema.custom_error_schema(
            core_schema.str_schema(pattern=self.regex), "pattern", custom_error_message=self.message
        )
        return core_schema.chain_schema([handler(source), matched])

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        produced = handler(schema)
        rule = {"rule": f"self.matches({cel_text(self.regex)})", "message": self.message}
        return {**produced, VALIDATIONS: [*produced.get(VALIDATIONS, ()), rule]}


def cel_text(text: str) -> str:
    """`text` as a literal of CEL."""
    quoted = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{quoted}'"


class _CheckedText(str):
    """Text that matches a pattern; `EXPECTED` states the form in words. Values of `TAKEN` become their text."""

    PATTERN = ""
    MAX_LENGTH = 32
    EXPECTED = ""
    TAKEN: tuple[type, ...] = (str,)

    __slots__ = ()

    @classmethod
    def _validate(cls, value: object) -> Self:
        text = str(value) if isinstance(value, cls.TAKEN) and not isinstance(value, bool) else ""
        if not text or len(text) > cls.MAX_LENGTH or not re.fullmatch(cls.PATTERN, text):
            raise ValueError(cls.EXPECTED)
        return cls(text)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls._validate,
            serialization=core_schema.plain_serializer_function_ser_schema(str, return_schema=core_schema.str_schema()),
        )


class _IntOrText(_CheckedText):
    """Text, or an integer, which is kept as its decimal text."""

    TAKEN: tuple[type, ...] = (int, str)

    __slots__ = ()

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {
            "x-kubernetes-int-or-string": True,
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "maxLength": cls.MAX_LENGTH,
            VALIDATIONS: [{"rule": f"string(self).matches({cel_text(cls.PATTERN)})", "message": cls.EXPECTED}],
        }


class PodShare(_IntOrText):
    """A number of pods, or a share of a model's pods: ``1`` or ``25%``."""

    PATTERN = r"^(0|[1-9][0-9]{0,4}|(0|[1-9][0-9]?|100)%)$"
    EXPECTED = "must be a number of pods such as 1, or a share of them such as 25%"

    __slots__ = ()

    @property
    def is_zero(self) -> bool:
        return self in ("0", "0%")

    @property
    def as_int_or_string(self) -> int | str:
        return str(self) if self.endswith("%") else int(self)


class _QuantityText(_IntOrText):
    """Text of a Kubernetes quantity."""

    __slots__ = ()

    @property
    def in_bytes(self) -> int:
        """The amount in bytes, rounded up as Kubernetes does; meaningful for memory and storage only."""
        return quantity_bytes(self)


class Quantity(_QuantityText):
    """An amount of memory or storage, for example ``512Mi``, ``1.5Gi`` or ``1048576``.

    Fractions of a byte (``100m``) are refused: they are always a slip for ``100M``.
    """

    PATTERN = r"^[0-9]{1,18}(\.[0-9]{1,9})?(k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?$"
    EXPECTED = "must be a size such as 512Mi, 10Gi or 1048576, not negative, without fractions of a byte"

    __slots__ = ()


class ResourceQuantity(_QuantityText):
    """An amount of a container resource in Kubernetes form, for example ``250m`` of cpu or ``2Gi`` of memory.

    As in a Pod, a number with a fraction (``cpu: 0.5``) is taken. No type of a structural schema has texts and such
    numbers: the field has none, and so its form is no CEL rule.
    """

    TAKEN = (int, float, str)

    PATTERN = r"^([0-9]{1,18}(\.[0-9]{0,9})?|\.[0-9]{1,9})([numkMGTPE]|[KMGTPE]i|[eE][+-]?[0-9]{1,2})?$"
    EXPECTED = "must be a Kubernetes quantity such as 250m, 2 or 4Gi, and not negative"

    __slots__ = ()

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        form = {"maxLength": cls.MAX_LENGTH, "pattern": cls.PATTERN, "minimum": 0, "maxProperties": 0, "maxItems": 0}
        return {"x-kubernetes-preserve-unknown-fields": True, **form}

    @property
    def in_units(self) -> Fraction:
        """The exact amount in the resource's own unit (cores, bytes, devices)."""
        return read_quantity(self)[0]


class Duration(_CheckedText):
    """A length of time in whole seconds, as Go writes it, or in days of 24 hours: ``45s``, ``1h30m``, ``1.5h``, ``7d``.

    Fractions have no more digits than keep the sum whole.
    """

    PATTERN = r"^([0-9]{1,4}(\.[0-9]{1,2})?d|([0-9]{1,6}(\.[0-9]{1,2})?h)?([0-9]{1,6}(\.[0-9][05]?)?m)?([0-9]{1,6}s)?)$"
    EXPECTED = "must be a duration of whole seconds such as 45s, 5m, 1h30m, 1.5h or 7d"

    __slots__ = ()

    @property
    def in_seconds(self) -> int:
        parts = re.findall(r"([0-9.]+)([dhms])", self)
        return int(sum(Fraction(number) * _SECONDS[unit] for number, unit in parts))

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        rule = {"rule": f"self.matches({cel_text(cls.PATTERN)})", "message": cls.EXPECTED}
        return {"type": "string", "minLength": 2, "maxLength": cls.MAX_LENGTH, VALIDATIONS: [rule]}


_SECONDS = {"d": 86_400, "h": 3600, "m": 60, "s": 1}


def _whole_seconds_utc(value: datetime) -> datetime:
    aware = value if value.tzinfo else value.replace(tzinfo=UTC)
    return aware.astimezone(UTC).replace(microsecond=0)


def format_timestamp(value: datetime) -> str:
    """RFC 3339 in UTC with whole seconds, the form of ``metav1.Time``."""
    return _whole_seconds_utc(value).strftime("%Y-%m-%dT%H:%M:%SZ")


Timestamp = Annotated[
    datetime,
    AfterValidator(_whole_seconds_utc),
    PlainSerializer(format_timestamp, return_type=str, when_used="json"),
    Field(json_schema_extra={"format": "date-time"}),
]
"""A point in time in UTC with whole seconds."""

ObjectName = Annotated[
    str,
    StringConstraints(min_length=1, max_length=40),
    Pattern(
        r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$",
        "must be lower-case letters, digits and hyphens, with a letter or digit at both ends",
    ),
]
"""Name of an object of this API group: a DNS label of at most 40 characters, so that derived names fit 63."""

ForeignName = Annotated[
    str,
    StringConstraints(min_length=1, max_length=253),
    Pattern(
        r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$",
        "must be lower-case letters, digits, hyphens and dots, with a letter or digit at both ends of each part",
    ),
]
"""Name of an object of another kind (Secret, ConfigMap, claim, class): a DNS subdomain."""

DataKey = Annotated[
    str,
    StringConstraints(min_length=1, max_length=253),
    Pattern(r"^[-._a-zA-Z0-9]+$", "must be letters, digits, hyphens, underscores and dots"),
]
"""Key within a Secret or ConfigMap."""

TenantName = Annotated[
    str,
    StringConstraints(min_length=1, max_length=128),
    Pattern(
        r"^[^\p{Z}\p{C}]([^\p{C}\p{Zl}\p{Zp}]*[^\p{Z}\p{C}])?$",
        "must be printable characters, without white space at the ends",
    ),
]
"""Identity of a caller: 1 to 128 printable characters, no white space at the ends."""

Image = Annotated[
    str,
    StringConstraints(min_length=1, max_length=512),
    Pattern(
        r"^[a-zA-Z0-9][-a-zA-Z0-9._/:@]*$", "must be a reference of an image such as registry.example.com/engine:1.0"
    ),
]
"""Reference of a container image."""

AbsolutePath = Annotated[
    str,
    StringConstraints(min_length=1, max_length=1024),
    Pattern(r"^/[^\p{C}]*$", "must be an absolute path such as /opt/model"),
]
"""Absolute path of a file or folder."""

ModelName = Annotated[
    str,
    StringConstraints(min_length=1, max_length=128),
    Pattern(
        r"^[A-Za-z0-9]([-A-Za-z0-9._/]*[A-Za-z0-9])?$", "must be the name of a model such as meta-llama/Llama-3.1-8B"
    ),
]
"""Name of a model or repository, for example ``meta-llama/Llama-3.1-8B``."""

Generation = Annotated[int, Field(ge=0, le=2**53)]
"""A counter that users raise; the bound keeps it exact in every JSON implementation."""

Count = Annotated[int, Field(ge=0, le=2**53)]
"""A number of things, never negative."""

ShortText = Annotated[str, StringConstraints(max_length=256)]
"""A short text in status."""

Text = Annotated[str, StringConstraints(max_length=32768)]
"""A sentence or more in status."""

LabelValue = Annotated[
    str,
    StringConstraints(max_length=63),
    Pattern(
        r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$",
        "must be empty, or letters, digits, hyphens, underscores and dots with a letter or digit at both ends",
    ),
]
LabelKey = Annotated[
    str,
    StringConstraints(min_length=1, max_length=317),
    Pattern(
        r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$",
        "must be the key of a label such as team or example.com/team",
    ),
]

AnnotationValue = Annotated[str, StringConstraints(max_length=4096)]
