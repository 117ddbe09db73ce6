"""What gate, adapter and operator say to one another: round trips, and nothing but ContractError for the rest."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.contract import CONTRACT_VERSION, ContractError
from kvstrata.contract.messages.adapter import (
    AdapterAck,
    AdapterState,
    ApplyRequest,
    ScopeUsage,
    StateRequest,
    TierState,
    decode_answer,
    decode_request,
    encode_answer,
    encode_request,
    error_answer,
)
from kvstrata.contract.messages.pod_state import MAX_PROBLEM_CHARACTERS, MAX_REPORTED_USAGE, PodState
from kvstrata.contract.policy.bundle import Bundle, Entry, Root
from kvstrata.contract.policy.cache_view import FRESHNESS_FORMAT, CacheView
from kvstrata.contract.store.redis_keys import BUCKETS, BlockKey, bucket_of, domain_pattern, parse_block_key
from kvstrata.contract.wire import to_wire
from kvstrata.plan.bundle.restore import contradicts
from tests.support.amounts import examples
from tests.unit.contract.documents import counts, entries, hex32, junk, names, roots

tier_states = st.builds(TierState, names, names, names, names, counts, counts, counts, counts)
tiers = st.lists(tier_states, max_size=3).map(tuple)
scopes = st.text("0123456789abcdef", max_size=12)
usages = st.lists(
    st.builds(
        ScopeUsage, scopes, st.sampled_from(["", "dram"]), counts, counts, st.none() | counts, st.none() | counts
    ),
    max_size=3,
).map(tuple)
pod_states = st.builds(
    PodState, names, names, names, names, names, names, names, counts, counts, counts, st.booleans(), counts,
    st.booleans(), names, tiers, usages, counts, usages,
)  # fmt: skip
adapter_states = st.builds(
    AdapterState, names, counts, counts, st.booleans(), counts, tiers, st.dictionaries(names, counts, max_size=3)
)
STATE = PodState("p", "u", "ns", "m", "i", "g", "c", 1, 2, 3, True, 4, True, "", (TierState("t", "Redis", "closed"),))


@given(pod_states)
def test_a_pods_state_is_read_as_it_was_written(state: PodState) -> None:
    assert PodState.decode(state.encode()) == state
    assert len(state.problem) <= MAX_PROBLEM_CHARACTERS


def test_what_a_pod_says_of_its_problems_is_bounded_before_anybody_shows_it() -> None:
    told = PodState.decode(replace(STATE, problem="\x1b[31m" + "x" * 10_000).encode())
    assert told.problem.startswith("[31mx")
    assert len(told.problem) <= 256


@given(st.builds(AdapterAck, counts, counts, names) | adapter_states)
def test_an_adapters_answer_is_read_as_it_was_written(answer: AdapterAck | AdapterState) -> None:
    line = encode_answer(answer)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert decode_answer(type(answer), line) == answer


def test_a_gates_requests_are_read_as_they_were_written() -> None:
    for request in (ApplyRequest(7, 2), StateRequest()):
        assert decode_request(encode_request(request)) == request


def test_an_error_answer_is_an_error() -> None:
    with pytest.raises(ContractError, match="no room"):
        decode_answer(AdapterAck, error_answer("no room"))


@given(roots, st.lists(entries, max_size=4, unique_by=lambda e: e.tenant))
def test_the_cache_view_holds_the_keyspaces_in_force_and_no_tenants_name(root: Root, group: list[Entry]) -> None:
    view = CacheView.of(Bundle(root, {e.tenant: e for e in group}))
    assert CacheView.decode(view.encode()) == view
    allowed = {e.keyspace for e in group if not e.suspended} if root.rules.reuse == "Prefix" else set()
    assert set(view.keyspaces) == allowed
    assert set(json.loads(view.encode())) == {"contract", "domain", "revision", "term", "rules", "keyspaces"}


@pytest.mark.parametrize("keyspace", ["acme", "0" * 31, "0" * 32 + "\n", "Z" * 32])
def test_a_cache_view_with_a_malformed_keyspace_is_refused(keyspace: str) -> None:
    raw = {
        "contract": CONTRACT_VERSION, "domain": "d", "revision": 1, "term": 1, "keyspaces": {keyspace: []},
        "rules": {"staleAfterSeconds": 1, "drainTimeoutSeconds": 1, "onStale": "Fence", "unknownTenants": "Refuse",
                  "reuse": "Prefix"},
    }  # fmt: skip
    with pytest.raises(ContractError, match="keyspace"):
        CacheView.decode(json.dumps(raw).encode())


READERS = [
    PodState.decode,
    CacheView.decode,
    decode_request,
    partial(decode_answer, AdapterState),
    partial(decode_answer, AdapterAck),
]


@pytest.mark.parametrize("read", READERS)
@given(data=st.binary(max_size=60) | junk.map(lambda value: json.dumps(value).encode()))
def test_anything_else_is_a_contract_error(read: Callable[[bytes], object], data: bytes) -> None:
    with pytest.raises(ContractError):
        read(data)


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(
    "data",
    [
        b"[" * 100_000,
        b'{"ack":1e999,"term":1,"boot":""}',
        b'{"contract":1,"keyspaces":{},"domain":"","revision":1e999}',
    ],
)
def test_deep_and_infinite_documents_are_contract_errors(read: Callable[[bytes], object], data: bytes) -> None:
    with pytest.raises(ContractError):
        read(data)


@settings(max_examples=examples(300))
@given(pod_states, st.sampled_from(sorted(field.name for field in fields(PodState))), junk)
def test_a_pods_state_is_of_the_declared_types_or_refused(state: PodState, field: str, value: object) -> None:
    raw = json.loads(state.encode()) | {field: value}
    try:
        read = PodState.decode(json.dumps(raw).encode())
    except ContractError:
        return
    for name in (one.name for one in fields(PodState)):
        assert type(getattr(read, name)) is type(getattr(STATE, name)), name
    assert read.acked >= 0
    for tier in read.tiers:
        for name in (one.name for one in fields(TierState)):
            assert type(getattr(tier, name)) is type(getattr(STATE.tiers[0], name)), name


def test_a_gate_of_the_version_before_does_not_tell_what_it_holds_and_contradicts_nobody() -> None:
    raw = json.loads(STATE.encode())
    for name in ("revision", "root", "model_uid"):
        del raw[name]
    told = PodState.decode(json.dumps(raw).encode())
    assert (told.revision, told.root, told.model_uid) == (0, "", "")
    assert not contradicts(told, "", None, "")


def test_a_gate_of_the_version_before_tells_no_use_and_is_believed() -> None:
    raw = json.loads(STATE.encode())
    del raw["usage"], raw["usage_left_out"], raw["tier_usage"]
    assert PodState.decode(json.dumps(raw).encode()) == STATE


def test_an_operator_of_the_version_before_finds_all_that_it_reads() -> None:
    told = replace(STATE, usage=(ScopeUsage("a1", "dram", 5, 1),))
    later = {"usage", "usage_left_out", "tier_usage", "certificate", "lasting"}
    before = {"contract", *(one.name for one in fields(PodState))} - later
    raw, known = json.loads(told.encode()), json.loads(STATE.encode())
    assert {name: raw[name] for name in before} == {name: known[name] for name in before}


def test_a_pod_tells_of_so_many_scopes_and_counts_the_rest() -> None:
    rows = tuple(ScopeUsage(f"{n:012x}", "dram", 10_000 - n, 1) for n in range(MAX_REPORTED_USAGE + 3))
    told = PodState.decode(replace(STATE, usage=rows, usage_left_out=4).encode())
    assert (told.usage, told.usage_left_out) == (rows[:MAX_REPORTED_USAGE], 7)
    raw = json.loads(STATE.encode()) | {"usage": [to_wire(row) for row in rows]}
    assert PodState.decode(json.dumps(raw).encode()).usage_left_out == 3


@pytest.mark.parametrize(
    "row",
    [
        ["acme", "dram", 1, 1, None, None],
        ["0" * 13, "dram", 1, 1, None, None],
        ["a1", "d\x1b", 1, 1, None, None],
        ["a1", "d" * 254, 1, 1, None, None],
        ["a1", "dram", -1, 1, None, None],
        ["a1", "dram", 10**999, 1, None, None],
        ["a1", "dram", 1, 1, None, 10**999],
        ["a1", "dram", 1, 1.5, None, None],
        ["a1", "dram", 1, 1, True, None],
        ["a1", "dram", 1],
        "a1",
    ],
)
@pytest.mark.parametrize("rows", ["usage", "tier_usage"])
def test_a_use_that_is_no_use_is_refused(rows: str, row: object) -> None:
    raw = json.loads(STATE.encode()) | {rows: [row]}
    with pytest.raises(ContractError):
        PodState.decode(json.dumps(raw).encode())


@pytest.mark.parametrize("offset", [1, -2])
def test_a_state_of_an_unknown_version_is_refused(offset: int) -> None:
    raw = json.loads(STATE.encode()) | {"contract": CONTRACT_VERSION + offset}
    with pytest.raises(ContractError, match="version"):
        PodState.decode(json.dumps(raw).encode())


def test_freshness_is_eight_bytes_little_endian() -> None:
    assert FRESHNESS_FORMAT.pack(1) == b"\x01" + bytes(7)


block_keys = st.builds(
    BlockKey,
    st.binary(min_size=8, max_size=8).map(bytes.hex),
    hex32,
    st.binary(min_size=8, max_size=8).map(bytes.hex),
    st.integers(0, 2**32 - 1),
    st.integers(0, 1000),
    st.binary(min_size=1, max_size=32),
)


@given(block_keys)
def test_a_block_key_is_read_as_it_was_written(key: BlockKey) -> None:
    assert parse_block_key(str(key)) == key
    assert str(key).startswith(domain_pattern(key.domain)[:-1])
    assert 0 <= bucket_of(key.chunk_hash) < BUCKETS


@given(block_keys)
def test_a_block_key_with_a_bucket_that_its_hash_denies_is_none(key: BlockKey) -> None:
    bucket = f":{bucket_of(key.chunk_hash):02x}}}"
    wrong = f":{(bucket_of(key.chunk_hash) + 1) % BUCKETS:02x}}}"
    assert parse_block_key(str(key).replace(bucket, wrong)) is None


@given(st.text(max_size=40))
def test_other_text_is_no_block_key(text: str) -> None:
    assert parse_block_key(text) is None
