"""A document of frozen dataclasses has one form, and whatever is not that form is refused with its place."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import pytest

from kvstrata.contract import ContractError
from kvstrata.contract.wire import MAX_NUMBER, MAX_TEXT, HexDigest, Moment, Name, moment_in_s, read, write


class Colour(StrEnum):
    RED = "Red"


@dataclass(frozen=True)
class Inner:
    a_number: int


@dataclass(frozen=True)
class Outer:
    text: str
    name: Name
    colour: Colour
    flag: bool
    digest: HexDigest | None
    at: Moment
    rows: tuple[Inner, ...]


GOOD: dict[str, Any] = {
    "text": "a\nb",
    "name": "n",
    "colour": "Red",
    "flag": False,
    "digest": None,
    "at": "2026-02-28T23:59:59Z",
    "rows": [{"aNumber": 0}, {"aNumber": MAX_NUMBER}],
}


def test_what_is_written_is_read() -> None:
    found = read(Outer, GOOD, "it")
    assert found.rows == (Inner(0), Inner(MAX_NUMBER))
    assert write(found) == GOOD


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"more": 1}, "it has a field"),
        ({"text": 1}, "it.text"),
        ({"text": "x" * (MAX_TEXT + 1)}, "it.text"),
        ({"name": "x" * 257}, "it.name"),
        ({"name": "a\nb"}, "it.name"),
        ({"name": None}, "it.name"),
        ({"colour": "Blue"}, "it.colour"),
        ({"colour": ["Red"]}, "it.colour"),
        ({"flag": 0}, "it.flag"),
        ({"digest": ""}, "it.digest"),
        ({"digest": "A" * 64}, "it.digest"),
        ({"digest": "a" * 64 + "\n"}, "it.digest"),
        ({"at": "2026-02-29T00:00:00Z"}, "it.at"),
        ({"at": "2026-02-28T24:00:00Z"}, "it.at"),
        ({"at": "2026-02-28T00:00:00+00:00"}, "it.at"),
        ({"at": "٢٠٢٦-02-28T00:00:00Z"}, "it.at"),
        ({"rows": {}}, "it.rows"),
        ({"rows": [None]}, "it.rows[0]"),
        ({"rows": [{"aNumber": 1}, {"aNumber": True}]}, "it.rows[1].aNumber"),
        ({"rows": [{"aNumber": 1.0}]}, "it.rows[0].aNumber"),
        ({"rows": [{"aNumber": -1}]}, "it.rows[0].aNumber"),
        ({"rows": [{"aNumber": MAX_NUMBER + 1}]}, "it.rows[0].aNumber"),
        ({"rows": [{}]}, "it.rows[0] lacks aNumber"),
        ({"rows": [{"a_number": 1}]}, "it.rows[0] lacks aNumber"),
    ],
)
def test_any_other_form_is_refused_with_its_place(change: dict[str, Any], place: str) -> None:
    with pytest.raises(ContractError) as refused:
        read(Outer, GOOD | change, "it")
    assert str(refused.value).startswith(place)


@pytest.mark.parametrize("name", list(GOOD))
def test_no_field_may_be_left_out(name: str) -> None:
    with pytest.raises(ContractError, match=f"lacks {name}"):
        read(Outer, {key: value for key, value in GOOD.items() if key != name}, "it")


def test_moments_are_seconds_of_utc() -> None:
    assert moment_in_s("1970-01-02T00:00:01Z") == 86401
