"""What operator, gates and cache servers say to one another about copies in pods: read as written, and never more."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.contract import ContractError
from kvstrata.contract.messages.adapter import (
    MAX_LINE_BYTES,
    decode_answer,
    decode_request,
    encode_answer,
    encode_request,
    error_answer,
)
from kvstrata.contract.messages.erase import (
    MAX_ERASED_BYTES,
    MAX_ERASED_KEYSPACES,
    MAX_ERASED_TIERS,
    MAX_TEXT,
    MAX_VERIFIED_CHUNKS,
    MAX_WAIT_MS,
    REQUIRED,
    AdapterErased,
    AdapterVerified,
    Amount,
    Check,
    Erased,
    ErasedTier,
    EraseOutcome,
    EraseRequest,
    LeftKeys,
    Verified,
    VerifiedTier,
    VerifyRequest,
)
from kvstrata.contract.policy.pools import CHUNK_HASH_BYTES
from tests.unit.contract.documents import counts, hex32, junk

A = "a" * 32
words = st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), max_size=12)
amounts = st.builds(Amount, counts, counts)
tiers = st.builds(
    ErasedTier, words, st.sampled_from(["CPU", "NVMe", "Tape"]), st.booleans(), amounts, amounts, amounts,
    counts, counts, counts, counts, counts, st.lists(st.sampled_from(Check), unique=True).map(tuple), words, words,
)  # fmt: skip
several = st.lists(tiers, max_size=3).map(tuple)
names = st.lists(words, max_size=3).map(tuple)
erased = st.builds(AdapterErased, words, counts, counts, st.sampled_from(EraseOutcome), counts, counts, several, names)
keys = st.builds(LeftKeys, counts, counts)
DONE = ErasedTier("dram", "CPU", deleted=Amount(2, 8), found=Amount(2, 8), checked=tuple(REQUIRED["CPU"]))
FILES = ErasedTier("disk", "NVMe", checked=tuple(REQUIRED["NVMe"]))
COMPLETE = AdapterErased("cache", 7, 1, EraseOutcome.COMPLETE, tiers=(DONE, FILES))


@given(erased)
def test_what_a_cache_server_says_of_an_erasure_is_read_as_it_was_written(said: AdapterErased) -> None:
    assert encode_answer(said).count(b"\n") == 1
    assert decode_answer(AdapterErased, encode_answer(said)) == said


@given(erased, counts, keys)
def test_what_a_pod_says_of_an_erasure_is_read_as_it_was_written(
    said: AdapterErased, requests: int, left: LeftKeys
) -> None:
    whole = Erased("gate", 7, replace(said, boot="cache"), requests, left)
    assert Erased.decode(whole.encode()) == whole


def test_a_complete_erasure_stays_complete_when_the_gate_holds_nothing_either() -> None:
    whole = Erased("gate", 7, COMPLETE)
    assert (whole.outcome, whole.held_by) == (EraseOutcome.COMPLETE, ())
    assert Erased.decode(whole.encode()) == whole


@pytest.mark.parametrize(
    ("requests", "left", "told"),
    [
        (2, LeftKeys(), "2 requests are in flight in the gate"),
        (0, LeftKeys(gate=1), "1 data keys are held by the gate"),
        (0, LeftKeys(volume=3), "3 data keys are files in the policy volume"),
    ],
)
def test_what_the_gate_still_holds_keeps_an_erasure_from_being_complete(
    requests: int, left: LeftKeys, told: str
) -> None:
    whole = Erased("gate", 7, COMPLETE, requests, left)
    assert (whole.outcome, whole.held_by) == (EraseOutcome.REMAINING, (told,))


def spoiled(tier: ErasedTier, **changes: Any) -> AdapterErased:
    return replace(COMPLETE, tiers=(replace(tier, **changes), FILES))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"remaining": Amount(1, 4), "reading": 1}, "tier dram: 1 blocks are being read"),
        ({"remaining": Amount(1, 4), "writing": 1}, "tier dram: 1 blocks are being written"),
        ({"remaining": Amount(1, 4), "removing": 1}, "tier dram: 1 blocks are not removed yet"),
        ({"remaining": Amount(0, 4)}, "tier dram: not everything was looked at"),
        ({"unoverwritten_bytes": 4}, "tier dram: 4 bytes are freed and not overwritten yet"),
        ({"rewriting": 1}, "tier dram: 1 files that made room are not written over yet"),
        ({"problem": "the disk hangs"}, "tier dram: the disk hangs"),
        ({"checked": (Check.TABLES,)}, "tier dram: not everything was looked at"),
        ({"checked": (Check.OVERWRITTEN, Check.INDEX)}, "tier dram: not everything was looked at"),
        ({"medium": "Tape"}, "tier dram: not everything was looked at"),
    ],
)
def test_an_erasure_is_complete_only_if_every_check_of_every_tier_was_made_and_found_nothing(
    changes: dict[str, Any], told: str
) -> None:
    said = spoiled(DONE, **changes)
    assert not said.nothing_left
    whole = Erased("gate", 7, said)
    assert (whole.outcome, whole.held_by) == (EraseOutcome.REMAINING, (told,))
    assert Erased.decode(whole.encode()).outcome is EraseOutcome.REMAINING, "whatever its cache server claims"


def test_a_complete_erasure_by_no_cache_server_is_refused() -> None:
    raw = json.loads(Erased("gate", 7, COMPLETE).encode())
    raw["cache"]["boot"] = ""
    with pytest.raises(ContractError):
        Erased.decode(json.dumps(raw).encode())


@given(st.sets(hex32, min_size=1, max_size=4), names, st.integers(0, MAX_WAIT_MS))
def test_a_request_to_erase_reaches_the_cache_server_as_it_was_meant(
    keyspaces: set[str], named: tuple[str, ...], wait_ms: int
) -> None:
    request = EraseRequest(tuple(sorted(keyspaces)), named, wait_ms)
    assert EraseRequest.decode(request.encode()) == request
    assert decode_request(encode_request(request)) == request


@pytest.mark.parametrize(
    "changes",
    [
        {"keyspaces": []},
        {"keyspaces": None},
        {"keyspaces": A},
        {"keyspaces": ["acme"]},
        {"keyspaces": [A.upper()]},
        {"keyspaces": [7]},
        {"keyspaces": [A] * (MAX_ERASED_KEYSPACES + 1)},
        {"tiers": "dram"},
        {"tiers": [7]},
        {"tiers": ["d\x00"]},
        {"tiers": ["d"] * (MAX_ERASED_TIERS + 1)},
        {"wait_ms": -1},
        {"wait_ms": 1.5},
        {"wait_ms": True},
        {"wait_ms": MAX_WAIT_MS + 1},
        {"contract": 99},
    ],
)
def test_a_request_to_erase_anything_else_is_refused(changes: dict[str, Any]) -> None:
    raw = json.loads(EraseRequest((A,)).encode())
    with pytest.raises(ContractError):
        EraseRequest.decode(json.dumps(raw | changes).encode())


@given(hex32, st.none() | st.binary(min_size=1, max_size=3).map(lambda one: one[:1] * CHUNK_HASH_BYTES))
def test_a_request_to_verify_reaches_the_cache_server_as_it_was_meant(keyspace: str, chunks: bytes | None) -> None:
    request = VerifyRequest(keyspace, chunks)
    assert VerifyRequest.decode(request.encode()) == request
    assert decode_request(encode_request(request)) == request


@pytest.mark.parametrize("chunks", [b"", b"a", bytes(33), bytes(CHUNK_HASH_BYTES) * (MAX_VERIFIED_CHUNKS + 1)])
def test_a_request_to_verify_names_whole_chunks_and_not_too_many(chunks: bytes) -> None:
    with pytest.raises(ContractError):
        VerifyRequest(A, chunks).encode()


def verified(*found: tuple[int, int]) -> Verified:
    rows = tuple(VerifiedTier(f"t{n}", "CPU", asked, hits) for n, (asked, hits) in enumerate(found))
    return Verified("gate", 7, False, AdapterVerified("cache", 7, 1, True, False, 2, rows))


def test_a_verification_asked_as_many_blocks_as_the_tier_that_was_asked_for_most() -> None:
    assert verified((2, 0), (3, 1)).asked == 3
    assert verified().asked == 0
    assert Verified.decode(verified((2, 1)).encode()) == verified((2, 1))


def test_a_tier_that_finds_more_than_it_was_asked_for_is_not_believed() -> None:
    with pytest.raises(ContractError, match="more blocks than"):
        Verified.decode(verified((2, 3)).encode())


@given(junk, st.sampled_from(["keys", "cache", "acked", "gate_boot", "requests"]))
def test_an_answer_of_anything_else_is_refused_or_of_the_declared_types(value: object, field: str) -> None:
    raw = json.loads(Erased("gate", 7, COMPLETE).encode())
    try:
        said = Erased.decode(json.dumps(raw | {field: value}).encode())
    except ContractError:
        return
    assert isinstance(said.cache.boot, str)
    assert all(type(count) is int for count in (said.requests, said.cache.revision, said.keys.volume))


@given(st.binary(max_size=60) | junk.map(lambda value: json.dumps(value).encode()))
def test_anything_else_is_no_answer_of_a_cache_server(data: bytes) -> None:
    for kind in (AdapterErased, AdapterVerified):
        with pytest.raises(ContractError):
            decode_answer(kind, data)
    with pytest.raises(ContractError, match="refused"):
        decode_answer(AdapterErased, error_answer("no"))


def test_the_largest_questions_and_answers_fit() -> None:
    keyspaces = tuple(f"{number:032x}" for number in range(MAX_ERASED_KEYSPACES))
    assert len(encode_request(EraseRequest(keyspaces, ("t" * 253,) * MAX_ERASED_TIERS))) < MAX_LINE_BYTES
    assert len(encode_request(VerifyRequest(A, bytes(CHUNK_HASH_BYTES * MAX_VERIFIED_CHUNKS)))) < MAX_LINE_BYTES
    row = replace(DONE, tier="t" * 253, problem="p" * 2 * MAX_TEXT, residue="r" * 2 * MAX_TEXT)
    said = Erased("gate", 7, replace(COMPLETE, tiers=(row,) * 64, elsewhere=("t" * 253,) * 64))
    assert len(said.encode()) < MAX_ERASED_BYTES
    assert len(Erased.decode(said.encode()).cache.tiers[0].residue) == MAX_TEXT


def test_what_a_later_version_adds_is_left_out() -> None:
    raw = json.loads(Erased("gate", 7, COMPLETE).encode())
    tier = raw["cache"]["tiers"][0]
    raw["more"] = tier["more"] = 1
    tier["checked"].append("Burnt")
    assert Erased.decode(json.dumps(raw).encode()).cache.tiers[0] == replace(
        DONE, checked=tuple(Check(one) for one in tier["checked"][:-1])
    )
