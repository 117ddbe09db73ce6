"""Every message has the bytes that it has always had, and its reader takes and refuses what it always did.

`messages` holds the bytes of every message; `taken` says what each reader makes of a message in which one thing is
otherwise. Both are written anew with KVSTRATA_UPDATE_GOLDEN=1.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, get_args

import pytest

import kvstrata.contract
from kvstrata.contract import ContractError
from kvstrata.model.erasure.facts import Fact

from .cases import Case, canonical, cases, error

HERE = Path(__file__).parent
ALL = tuple(cases())
PARTS = {part: tuple(group) for part, group in groupby(sorted(ALL, key=lambda case: case.part), lambda case: case.part)}

NOT_SENT = {
    "BlockKey", "Bundle", "Chain", "Emitter", "Form", "Happened", "Header", "Link", "Receipt", "Script",
    "_ErasureBody", "_HandOverBody", "_Shard", "_Signed",
}  # fmt: skip
"""Dataclasses of the contract that are no part of a message by themselves."""

ABSENT, MORE = object(), object()
VALUES: Mapping[str, Any] = {
    "absent": ABSENT, "more": MORE, "null": None, "true": True, "0": 0, "-1": -1, "1.5": 1.5, "2^53+1": (1 << 53) + 1,
    "2^63": 1 << 63, "10^400": 10**400, '""': "", '"x"': "x", "control": "\u0007", "long": "x" * 5000, "[]": [],
    "{}": {}, "[1]": [1],
}  # fmt: skip
"""What is put in the place of each part of a message; `more` is a field that no version knows."""

LISTS = {"twice": 2, "many": 5000}
"""How often the first row of a list is repeated."""


def recorded(kind: str, part: str, text: str) -> str:
    """Return the golden file, after it was written anew if that is asked for."""
    path = HERE / kind / f"{part}.txt"
    if os.environ.get("KVSTRATA_UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize("part", PARTS)
def test_every_message_has_the_bytes_that_it_always_had(part: str) -> None:
    rows = [f"{case.name}: {case.encode().decode().removesuffix(chr(10))}" for case in PARTS[part]]
    assert recorded("messages", part, "".join(f"{row}\n" for row in rows)).removesuffix("\n").split("\n") == rows


@pytest.mark.parametrize("case", ALL, ids=lambda case: f"{case.part} {case.name}")
def test_every_message_is_read_as_it_was_meant(case: Case) -> None:
    data = case.encode()
    assert case.decode(data) == case.value
    assert data.endswith(b"\n") == (case.part in ("link", "audit", "erasereport")), "only lines end"
    assert data.count(b"\n") == data.endswith(b"\n")


def test_an_adapters_refusal_is_one_line_of_ascii() -> None:
    assert error() == b'{"error":"tier \\"one\\": sp\\u00e4\\u0165\\u2028"}\n'


@pytest.mark.parametrize("part", PARTS)
def test_readers_take_and_refuse_what_they_always_did(part: str) -> None:
    width = max(len(place) for case in whole(part) for place, _ in places(case)) + 2
    text = "".join(f"{row}\n" for case in whole(part) for row in table(case, width))
    assert recorded("taken", part, text).split("\n") == text.split("\n")
    assert "!" not in text, "a reader raises something else than ContractError"


def test_every_class_of_a_message_is_covered() -> None:
    known = {
        f"{module.rpartition('.')[2]}.{name}"
        for module in (found.name for found in pkgutil.walk_packages(kvstrata.contract.__path__, "kvstrata.contract."))
        if module != "kvstrata.contract.wire"
        for name, kind in vars(importlib.import_module(module)).items()
        if isinstance(kind, type) and is_dataclass(kind) and kind.__module__ == module and name not in NOT_SENT
    }
    covered = {
        f"{kind.__module__.rpartition('.')[2]}.{kind.__name__}"
        for case in ALL
        for kind in kinds(case.value)
        if kind.__module__.startswith("kvstrata.contract.")
    }
    assert covered == known
    assert len(known) == 86


def test_every_kind_of_fact_is_in_a_record() -> None:
    kept = next(case.value for case in PARTS["record"])
    assert {type(fact) for fact in kept.erasure.facts.values()} == set(get_args(Fact))
    assert len(get_args(Fact)) == 15


def kinds(value: Any) -> Iterator[type[Any]]:
    """Yield the classes of everything that a message consists of."""
    if is_dataclass(value) and not isinstance(value, type):
        yield type(value)
        for field in fields(value):
            yield from kinds(getattr(value, field.name))
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from kinds(one)
    elif isinstance(value, tuple | list):
        for one in value:
            yield from kinds(one)


def whole(part: str) -> Iterator[Case]:
    """Yield the messages of a file that have everything that they can have."""
    for case in PARTS[part]:
        if not case.name.endswith(("minimal", "empty", "nothing", "whole", "all", "erased", "away", "text")):
            yield case


def table(case: Case, width: int) -> Iterator[str]:
    """Yield what the reader makes of each change, a row for each place of the message."""
    columns = (*VALUES, *LISTS)
    yield f"{case.name:{width}}{' '.join(columns)}"
    for place, path in places(case):
        cells = [f"{outcome(case, path, column):{len(column)}}" for column in columns]
        yield f"{place:{width}}{' '.join(cells)}".rstrip()


def places(case: Case) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield each place of a message, and how to get there; of lists the first row, of maps the first name."""

    def walk(value: Any, name: str, path: tuple[Any, ...]) -> Iterator[tuple[str, tuple[Any, ...]]]:
        if path:
            yield name, path
        if isinstance(value, dict):
            for key, one in sorted(value.items()):
                yield from walk(one, f"{name}.{key}".lstrip("."), (*path, key))
        elif isinstance(value, list) and value:
            yield from walk(value[0], f"{name}[0]", (*path, 0))

    yield from walk(json.loads(case.encode()), "", ())


def outcome(case: Case, path: tuple[Any, ...], column: str) -> str:
    """Return `.` for a change that is taken, `x` for one that is refused, and nothing for what is no change."""
    message = json.loads(case.encode())
    *way, last = path
    parent = message
    for step in way:
        parent = parent[step]
    was = parent[last]
    if column in LISTS:
        if not isinstance(was, list) or not was:
            return ""
        parent[last] = was[:1] * LISTS[column]
    elif VALUES[column] is MORE:
        if not isinstance(was, dict):
            return ""
        was["later"] = 1
    elif VALUES[column] is ABSENT:
        if isinstance(parent, list):
            return ""
        del parent[last]
    else:
        parent[last] = VALUES[column]
    try:
        case.decode(canonical(message))
    except ContractError:
        return "x"
    except Exception:
        return "!"
    return "."
