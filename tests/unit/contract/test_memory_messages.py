"""What the adapter says of the use of the cache server's own memory."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from kvstrata.contract import ContractError
from kvstrata.contract.messages.adapter import (
    MAX_LINE_BYTES,
    MAX_USAGE_ROWS,
    AdapterState,
    ScopeUsage,
    decode_answer,
    encode_answer,
)
from kvstrata.contract.policy.keyspace import SCOPE_DIGITS
from tests.unit.contract.documents import counts, junk

bounds = st.none() | counts
scopes, tiers = st.text("0123456789abcdef", max_size=SCOPE_DIGITS), st.sampled_from(["", "dram"])
usages = st.lists(st.builds(ScopeUsage, scopes, tiers, counts, counts, bounds, bounds), max_size=4).map(tuple)
STATE = AdapterState("boot", 1, 1, True, 0)


@given(usages, counts)
def test_the_use_of_memory_is_read_as_it_was_written(usage: tuple[ScopeUsage, ...], left_out: int) -> None:
    state = AdapterState("boot", 1, 1, True, 0, usage=usage, usage_left_out=left_out)
    assert decode_answer(AdapterState, encode_answer(state)) == state


def test_an_adapter_of_the_version_before_tells_no_use() -> None:
    raw = json.loads(encode_answer(STATE))
    del raw["state"]["usage"], raw["state"]["usageLeftOut"]
    assert decode_answer(AdapterState, json.dumps(raw).encode()) == STATE


def test_what_a_later_version_adds_to_a_row_is_left_out() -> None:
    raw = json.loads(encode_answer(STATE))
    raw["state"]["usage"] = [["a", "dram", 1, 2, None, 3, "more"]]
    state = decode_answer(AdapterState, json.dumps(raw).encode())
    assert state.usage == (ScopeUsage("a", "dram", 1, 2, None, 3),)


@given(junk)
def test_a_row_of_anything_else_is_refused_or_of_the_declared_types(row: object) -> None:
    raw = json.loads(encode_answer(STATE))
    raw["state"]["usage"] = [row]
    try:
        state = decode_answer(AdapterState, json.dumps(raw).encode())
    except ContractError:
        return
    for usage in state.usage:
        assert isinstance(usage.scope, str)
        assert isinstance(usage.used_bytes, int)


def test_the_largest_state_fits_into_a_line() -> None:
    row = ScopeUsage("f" * SCOPE_DIGITS, "t" * 63, 2**53, 2**53, 2**53, 2**53)
    assert len(encode_answer(AdapterState("b", 1, 1, True, 0, usage=(row,) * MAX_USAGE_ROWS))) < MAX_LINE_BYTES
