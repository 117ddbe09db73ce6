"""What gate and adapter say to one another about the cache server's own memory: its use, and its erasure."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.contract import ContractError
from kvstrata.contract.messages.adapter import (
    MAX_LINE_BYTES,
    MAX_PURGED_KEYSPACES,
    MAX_USAGE_ROWS,
    SCOPE_DIGITS,
    AdapterState,
    PurgeAnswer,
    ScopeUsage,
    decode_answer,
    decode_purge_answer,
    decode_request,
    error_answer,
    purge_request,
)
from tests.unit.contract.documents import counts, hex32, junk, names

bounds = st.none() | counts
usages = st.lists(st.builds(ScopeUsage, names, names, counts, counts, bounds, bounds), max_size=4).map(tuple)
answers = st.builds(PurgeAnswer, names, counts, counts, counts, counts, st.text(max_size=20))
STATE = AdapterState("boot", 1, 1, True, 0)


@given(usages, counts)
def test_the_use_of_memory_is_read_as_it_was_written(usage: tuple[ScopeUsage, ...], left_out: int) -> None:
    state = AdapterState("boot", 1, 1, True, 0, usage=usage, usage_left_out=left_out)
    assert decode_answer(state.encode()) == state


def test_an_adapter_of_the_version_before_tells_no_use() -> None:
    raw = json.loads(STATE.encode())
    del raw["state"]["usage"], raw["state"]["usageLeftOut"]
    assert decode_answer(json.dumps(raw).encode()) == STATE


def test_what_a_later_version_adds_to_a_row_is_left_out() -> None:
    raw = json.loads(STATE.encode())
    raw["state"]["usage"] = [["a", "dram", 1, 2, None, 3, "more"]]
    state = decode_answer(json.dumps(raw).encode())
    assert isinstance(state, AdapterState)
    assert state.usage == (ScopeUsage("a", "dram", 1, 2, None, 3),)


@settings(deadline=None)
@given(junk)
def test_a_row_of_anything_else_is_refused_or_of_the_declared_types(row: object) -> None:
    raw = json.loads(STATE.encode())
    raw["state"]["usage"] = [row]
    try:
        state = decode_answer(json.dumps(raw).encode())
    except ContractError:
        return
    assert isinstance(state, AdapterState)
    for usage in state.usage:
        assert isinstance(usage.scope, str)
        assert isinstance(usage.used_bytes, int)


def test_the_largest_state_and_the_largest_purge_fit_into_a_line() -> None:
    row = ScopeUsage("f" * SCOPE_DIGITS, "t" * 63, 2**53, 2**53, 2**53, 2**53)
    assert len(AdapterState("b", 1, 1, True, 0, usage=(row,) * MAX_USAGE_ROWS).encode()) < MAX_LINE_BYTES
    keyspaces = [f"{number:032x}" for number in range(MAX_PURGED_KEYSPACES)]
    assert len(purge_request(keyspaces)) < MAX_LINE_BYTES
    assert decode_request(purge_request(keyspaces)) == {"op": "purge", "keyspaces": keyspaces}


@given(st.sets(hex32, min_size=1, max_size=5))
def test_a_purge_is_read_as_it_was_written(keyspaces: set[str]) -> None:
    assert decode_request(purge_request(keyspaces)) == {"op": "purge", "keyspaces": sorted(keyspaces)}


@pytest.mark.parametrize(
    "keyspaces", [None, [], "a" * 32, ["acme"], [7], ["a" * 31 + "\n"], ["a" * 32] * (MAX_PURGED_KEYSPACES + 1)]
)
def test_a_purge_of_anything_but_keyspaces_is_refused(keyspaces: object) -> None:
    with pytest.raises(ContractError, match="a purge names"):
        decode_request(json.dumps({"op": "purge", "keyspaces": keyspaces}).encode())


@given(answers)
def test_the_answer_to_a_purge_is_read_as_it_was_written(answer: PurgeAnswer) -> None:
    assert answer.encode().count(b"\n") == 1
    assert decode_purge_answer(answer.encode()) == answer


def test_an_error_is_no_answer_to_a_purge() -> None:
    with pytest.raises(ContractError, match="not governed"):
        decode_purge_answer(error_answer("the memory is not governed"))


@given(st.binary(max_size=60) | junk.map(lambda value: json.dumps(value).encode()))
def test_anything_else_is_no_answer_to_a_purge(data: bytes) -> None:
    with pytest.raises(ContractError):
        decode_purge_answer(data)
