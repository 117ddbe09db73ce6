"""The codec: what is written is read, tolerantly or not, and what does not fit is refused by its place."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any, ClassVar

import pytest
import rfc8785
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.contract import CONTRACT_VERSION, ContractError
from kvstrata.contract.wire import (
    MAX_CLOSED_TEXT,
    MAX_EXACT_NUMBER,
    MAX_NUMBER,
    Base64,
    Form,
    HexDigest,
    Items,
    Printable,
    Range,
    Wire,
    canonical_json,
    decode,
    encode,
    encode_line,
    from_wire,
    to_wire,
)


class Colour(StrEnum):
    RED = "Red"
    BLUE = "Blue"


@dataclass(frozen=True, slots=True)
class Part:
    a_number: int


@dataclass(frozen=True, slots=True)
class Row:
    WIRE: ClassVar[Wire] = Wire("a row", row=True)

    name: str
    count: int
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class Sum:
    a: int
    b: int

    def __post_init__(self) -> None:
        if self.a > self.b:
            raise ContractError("a sum has more than there is")


@dataclass(frozen=True, slots=True)
class Other:
    c: int


@dataclass(frozen=True, slots=True)
class Message:
    WIRE: ClassVar[Wire] = Wire(
        "a message", versioned=True, camel=True, omit=("note", "extra"), names={"took_s": "tookSeconds"}
    )

    text: str
    shown: Annotated[str, Printable(5)]
    formed: Annotated[str, Form("[a-c]+", "word")]
    colour: Colour
    flag: bool
    took_s: Annotated[int, Range(1, 9)]
    packed: Annotated[bytes, Base64(2, 2, 1)] | None
    at: datetime
    parts: Annotated[tuple[Part, ...], Items(1, 2)]
    names: Annotated[tuple[str, ...], Items(distinct=True)]
    colours: Annotated[tuple[Colour, ...], Items(known_only=True)]
    rows: tuple[Row, ...]
    table: Mapping[str, int]
    either: tuple[Sum | Other, ...]
    note: str = ""
    extra: tuple[str, ...] = field(default_factory=tuple)


@dataclass(frozen=True, slots=True)
class Strict:
    WIRE: ClassVar[Wire] = Wire("evidence", complete=True, closed=True, camel=True)

    text: str
    a_number: int
    part: Part | None = None
    digest: HexDigest | None = None


MESSAGE = Message(
    "a\nb", "späť", "abc", Colour.RED, True, 2, b"\0\1\2\3", datetime(2026, 2, 28, tzinfo=UTC), (Part(3),), ("y", "x"),
    (Colour.BLUE,), (Row("cpu", 4), Row("", 0, 5)), {"b": 1}, (Sum(1, 2), Other(3)),
)  # fmt: skip
RAW: dict[str, Any] = {
    "contract": CONTRACT_VERSION, "text": "a\nb", "shown": "späť", "formed": "abc", "colour": "Red", "flag": True,
    "tookSeconds": 2, "packed": "AAECAw==", "at": "2026-02-28T00:00:00+00:00", "parts": [{"aNumber": 3}],
    "names": ["y", "x"], "colours": ["Blue"], "rows": [["cpu", 4, None], ["", 0, 5]], "table": {"b": 1},
    "either": [{"a": 1, "b": 2}, {"c": 3}],
}  # fmt: skip
STRICT: dict[str, Any] = {"text": "a", "aNumber": MAX_EXACT_NUMBER, "part": {"aNumber": 0}, "digest": None}


def test_what_is_written_is_read() -> None:
    assert to_wire(MESSAGE) == RAW
    assert from_wire(Message, RAW) == decode(Message, encode(MESSAGE)) == MESSAGE
    assert to_wire(from_wire(Strict, STRICT)) == STRICT


def test_there_is_one_form_of_it_in_bytes_and_lines_are_of_ascii() -> None:
    assert encode(MESSAGE) == json.dumps(RAW, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    assert encode_line({"b": "ť\ud800\n", "a": 1}) == b'{"b":"\\u0165\\ud800\\n","a":1}\n'


def test_what_is_not_at_its_default_is_written() -> None:
    assert to_wire(from_wire(Message, RAW | {"note": "x", "extra": ["y"]})) == RAW | {"note": "x", "extra": ["y"]}


def test_what_a_later_version_adds_is_ignored() -> None:
    later = RAW | {"later": 1, "parts": [{"aNumber": 3, "later": 1}], "colours": ["Green", "Blue"]}
    assert from_wire(Message, later | {"rows": [["cpu", 4, None, "later"], ["", 0, 5]]}) == MESSAGE


def test_what_an_earlier_version_does_not_write_has_its_default() -> None:
    earlier = RAW | {"contract": CONTRACT_VERSION - 1, "rows": [["cpu", 4], ["", 0, 5]]}
    assert from_wire(Message, earlier) == MESSAGE


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ({"text": 1}, "a message.text is no text"),
        ({"text": None}, "a message.text is no text"),
        ({"shown": "sechs!"}, "a message.shown is no text of at most 5 characters that can be shown"),
        ({"shown": "\u2028"}, "a message.shown is no text"),
        ({"formed": "abc\n"}, "a message.formed is no word"),
        ({"colour": "Green"}, "a message.colour is none of Red, Blue"),
        ({"colour": ["Red"]}, "a message.colour is none of"),
        ({"flag": 0}, "a message.flag is neither true nor false"),
        ({"tookSeconds": 10}, "a message.tookSeconds is no whole number from 1 to 9"),
        ({"tookSeconds": 1.0}, "a message.tookSeconds is no whole number"),
        ({"tookSeconds": True}, "a message.tookSeconds is no whole number"),
        ({"packed": "AA=="}, "a message.packed has not between 1 and 2 parts of 2 bytes"),
        ({"packed": ""}, "a message.packed has not between"),
        ({"packed": "AAECAw==?"}, "a message.packed is no base64"),
        ({"packed": 1}, "a message.packed is no base64"),
        ({"at": "yesterday"}, "a message.at is no time"),
        ({"at": 5}, "a message.at is no time"),
        ({"parts": []}, "a message.parts is no list of 1 to 2 rows"),
        ({"parts": {}}, "a message.parts is no list of 1 to 2 rows"),
        ({"parts": [{"aNumber": 1}] * 3}, "a message.parts is no list of 1 to 2 rows"),
        ({"parts": [None]}, "a message.parts[0] is no object"),
        ({"parts": [{"aNumber": 1}, {"aNumber": True}]}, "a message.parts[1].aNumber is no whole number"),
        ({"parts": [{"aNumber": MAX_NUMBER + 1}]}, "a message.parts[0].aNumber is no whole number"),
        ({"parts": [{"a_number": 1}]}, "a message.parts[0] lacks aNumber"),
        ({"names": ["x", "x"]}, "a message.names names something twice"),
        ({"colours": [[]]}, "a message"),
        ({"rows": [{"name": "x", "count": 1}]}, "a message.rows[0] is no row"),
        ({"rows": [["x"]]}, "a message.rows[0] lacks count"),
        ({"rows": [["x", "y"]]}, "a message.rows[0].count is no whole number"),
        ({"table": []}, "a message.table is no object"),
        ({"table": {"a": "b"}}, "a message.table[0] is no whole number"),
        ({"either": [{"d": 1}]}, "a message.either[0] is none of Sum, Other"),
        ({"either": [{"a": 2, "b": 1}]}, "a sum has more than there is"),
        ({"contract": CONTRACT_VERSION + 1}, "a message is of another version of the contract"),
        ({"contract": CONTRACT_VERSION - 2}, "a message is of another version of the contract"),
        ({"contract": None}, "a message is of another version of the contract"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_place(change: dict[str, Any], refusal: str) -> None:
    with pytest.raises(ContractError) as refused:
        from_wire(Message, RAW | change)
    assert str(refused.value).startswith(refusal)
    assert refused.value.__cause__ is None, "a cause would show values"


@pytest.mark.parametrize("name", ["text", "tookSeconds", "either", "contract"])
def test_a_field_without_a_default_may_not_be_missing(name: str) -> None:
    with pytest.raises(ContractError):
        from_wire(Message, {key: value for key, value in RAW.items() if key != name})


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ({"more": 1}, "it has a field that this version does not know"),
        ({"contract": 1}, "it has a field that this version does not know"),
        ({"part": {"aNumber": 1, "more": 1}}, "it.part has a field that this version does not know"),
        ({"part": {}}, "it.part lacks aNumber"),
        ({"text": "x" * (MAX_CLOSED_TEXT + 1)}, "it.text is no text of at most 1024 characters"),
        ({"aNumber": MAX_EXACT_NUMBER + 1}, "it.aNumber is no whole number"),
        ({"part": {"aNumber": MAX_EXACT_NUMBER + 1}}, "it.part.aNumber is no whole number"),
        ({"part": {"aNumber": -1}}, "it.part.aNumber is no whole number"),
        ({"digest": "A" * 64}, "it.digest is no SHA-256"),
        ({"digest": "a" * 64 + "\n"}, "it.digest is no SHA-256"),
        ({"digest": "٢" * 64}, "it.digest is no SHA-256"),
    ],
)
def test_evidence_has_its_fields_and_no_other(change: dict[str, Any], refusal: str) -> None:
    with pytest.raises(ContractError) as refused:
        from_wire(Strict, STRICT | change, "it")
    assert str(refused.value).startswith(refusal)


@pytest.mark.parametrize("name", list(STRICT))
def test_no_field_of_evidence_may_be_missing_whatever_its_default(name: str) -> None:
    with pytest.raises(ContractError, match=f"lacks {name}"):
        from_wire(Strict, {key: value for key, value in STRICT.items() if key != name})


@pytest.mark.parametrize("data", [b"", b"\xff", b"[" * 100_000, b"[]", b"NaN", b'{"contract":1e999}', b"1" * 5000])
def test_what_is_no_message_at_all_is_refused_and_not_quoted(data: bytes) -> None:
    with pytest.raises(ContractError) as refused:
        decode(Message, data)
    assert str(refused.value).startswith("a message")
    assert len(str(refused.value)) < 200


texts = st.text(st.characters(exclude_categories=["Cs"]))
keys = st.text(st.characters(exclude_categories=["Cs"], max_codepoint=0xFFFF))
numbers = st.integers(-MAX_EXACT_NUMBER + 1, MAX_EXACT_NUMBER - 1)


@given(
    st.recursive(
        st.none() | st.booleans() | numbers | texts, lambda inner: st.lists(inner) | st.dictionaries(keys, inner)
    )
)
def test_canonical_json_is_that_of_rfc_8785(value: Any) -> None:
    """Floats and keys beyond the basic plane are not tried: the standard has its own form and order for them."""
    assert canonical_json(value) == rfc8785.dumps(value)
