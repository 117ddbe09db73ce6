"""What operator and gates say to one another about prefix pools, and gates and cache servers about hashes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.contract import ContractError
from kvstrata.contract.messages.adapter import (
    MAX_HASHED_TOKENS,
    MAX_LINE_BYTES,
    TOKEN_BYTES,
    ChunkHashes,
    HashRequest,
    decode_answer,
    decode_request,
    encode_answer,
    encode_request,
    error_answer,
)
from kvstrata.contract.messages.pools import (
    MAX_ANSWER_BYTES,
    MAX_PREFIX_TOKENS,
    MAX_REQUEST_BYTES,
    MAX_SOURCE_BYTES,
    PoolReport,
    PoolTierState,
    PoolVersionState,
    Rendered,
    RenderRefusal,
    RenderRequest,
    Warmed,
    WarmOutcome,
    WarmRequest,
    manifest_hashes,
)
from kvstrata.contract.messages.prefix import RESERVED, PrefixSource, refused_argument
from kvstrata.contract.policy.pools import CHUNK_HASH_BYTES
from kvstrata.contract.wire import digest_bytes, from_wire
from tests.unit.contract.documents import junk

CHAT = {"messages": [{"role": "system", "content": "Be brief."}]}
hashes = st.lists(st.binary(min_size=CHUNK_HASH_BYTES, max_size=CHUNK_HASH_BYTES), max_size=4).map(b"".join)
texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=40)
ids = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6).map(tuple)
sources = (
    st.builds(PrefixSource, text=texts)
    | st.builds(PrefixSource, token_ids=ids)
    | texts.map(lambda text: PrefixSource(chat={"messages": [{"role": "user", "content": text}]}))
)


def rendered(**changes: Any) -> Rendered:
    fields = {"tokens": 9, "total": 12, "chunk_tokens": 4, "max_model_tokens": 64, "hashes": bytes(64)}
    return Rendered("gate", "cache", "0" * 16, **(fields | changes))


@given(sources)
def test_a_prefix_is_read_as_it_was_written(source: PrefixSource) -> None:
    read = RenderRequest.decode(RenderRequest(source).encode()).prefix
    assert read.digest == source.digest
    assert WarmRequest.decode(WarmRequest("uid", "5" * 12, "m" * 64, source).encode()).prefix.digest == source.digest


@given(st.lists(sources, max_size=6))
def test_two_prefixes_with_one_digest_are_one(some: list[PrefixSource]) -> None:
    said = {(s.text, json.dumps(s.chat), s.token_ids) for s in some}
    assert len({source.digest for source in some}) == len(said)


def test_the_order_of_a_tools_keys_makes_another_prefix() -> None:
    one = PrefixSource(chat=CHAT | {"tools": [{"type": "function", "a": 1}]})
    other = PrefixSource(chat=CHAT | {"tools": [{"a": 1, "type": "function"}]})
    assert one.digest != other.digest
    tools = RenderRequest.decode(RenderRequest(one).encode()).prefix.chat["tools"]  # type: ignore[index]
    assert list(tools[0]) == ["type", "a"]


def test_a_chat_with_empty_tools_is_the_one_without() -> None:
    assert PrefixSource(chat=CHAT | {"tools": [], "chat_template_kwargs": {}}).digest == PrefixSource(chat=CHAT).digest


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ("[]", "a chat is a JSON object"),
        ("{}", "list of messages"),
        ('{"messages":[]}', "list of messages"),
        ('{"messages":[{}],"tools":{}}', "list of objects"),
        ('{"messages":[{}],"cache_salt":"x"}', "remove 'cache_salt'"),
        ('{"messages":[{}],"chat_template_kwargs":{"tools":1}}', "remove 'tools'"),
        ('{"messages":[{}],"messages":[{}]}', "a key twice"),
        ('{"messages":[{"a":NaN}]}', "no NaN"),
        ('{"messages":[{"content":[{"type":"image_url"}]}]}', "text only"),
        ('{"messages":[{"content":7}]}', "text only"),
        ("{", "malformed"),
    ],
)
def test_a_document_that_is_no_chat_is_refused(document: str, says: str) -> None:
    with pytest.raises(ContractError, match=says):
        PrefixSource.from_document(document)


def test_a_prefix_beyond_the_bound_is_not_sent() -> None:
    with pytest.raises(ContractError, match="no more than"):
        RenderRequest(PrefixSource(text="x" * MAX_SOURCE_BYTES)).encode()
    assert len(RenderRequest(PrefixSource(text="x" * (MAX_SOURCE_BYTES - 16))).encode()) <= MAX_REQUEST_BYTES


@given(hashes, st.sampled_from([None, *RenderRefusal]))
def test_a_rendering_is_read_as_it_was_written(named: bytes, refused: RenderRefusal | None) -> None:
    tokens = 4 * (len(named) // CHUNK_HASH_BYTES)
    said = rendered(tokens=tokens, hashes=b"" if refused else named, refused=refused)
    assert Rendered.decode(said.encode()) == said


def test_the_largest_rendering_fits_into_an_answer() -> None:
    largest = rendered(tokens=MAX_PREFIX_TOKENS, chunk_tokens=16, hashes=bytes(MAX_PREFIX_TOKENS // 16 * 32))
    assert len(largest.encode()) <= MAX_ANSWER_BYTES


@pytest.mark.parametrize(
    "changes", [{"hashes": bytes(32)}, {"tokens": 3}, {"hashes": bytes(65)}, {"total": -1}, {"chunk_tokens": 0}]
)
def test_a_rendering_whose_chunks_do_not_fit_its_tokens_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ContractError):
        Rendered.decode(rendered(**changes).encode())


def test_no_rendering_shows_its_hashes_when_it_is_printed() -> None:
    assert "hashes" not in repr(rendered())


def test_a_manifest_has_each_chunk_once_in_order() -> None:
    a, b, c = (bytes([n]) * CHUNK_HASH_BYTES for n in (1, 2, 3))
    assert manifest_hashes([rendered(hashes=b + c), rendered(hashes=b + a)]) == a + b + c


@given(junk)
def test_a_body_of_anything_else_is_a_contract_error(body: object) -> None:
    data = json.dumps({"contract": 1, "prefix": body, "versions": body, "pool": "u", "manifest": "m"}).encode()
    for kind in (RenderRequest, WarmRequest, Rendered, Warmed, PoolReport):
        for bytes_of in (data, json.dumps(body).encode()):
            with pytest.raises(ContractError):
                kind.decode(bytes_of)  # type: ignore[attr-defined]


def test_what_tiers_hold_of_a_pool_is_read_as_it_was_written() -> None:
    tiers = (PoolTierState("dram", 1, 2, 300), PoolTierState("shared", 2, 2, 600))
    report = PoolReport("gate", "cache", (PoolVersionState("5" * 12, "m" * 64, True, tiers, ("ab" * 32,)),))
    assert PoolReport.decode(report.encode()) == report
    warmed = Warmed("gate", "cache", WarmOutcome.INCOMPLETE)
    assert Warmed.decode(warmed.encode()) == warmed


def test_a_tier_that_holds_more_than_there_is_is_refused() -> None:
    with pytest.raises(ContractError):
        from_wire(PoolTierState, ["dram", 3, 2, 0])


@given(st.binary(max_size=64).map(lambda data: data[: len(data) // TOKEN_BYTES * TOKEN_BYTES]))
def test_a_question_about_tokens_is_read_as_it_was_asked(tokens: bytes) -> None:
    assert decode_request(encode_request(HashRequest(tokens))) == HashRequest(tokens)


def test_the_longest_question_about_tokens_fits_into_a_line() -> None:
    line = encode_request(HashRequest(bytes(MAX_HASHED_TOKENS * TOKEN_BYTES)))
    assert len(line) <= MAX_LINE_BYTES
    decode_request(line)


@pytest.mark.parametrize("tokens", [bytes(3), bytes(MAX_HASHED_TOKENS * TOKEN_BYTES + 4)])
def test_a_question_about_half_a_token_or_too_many_is_refused(tokens: bytes) -> None:
    with pytest.raises(ContractError, match="parts of 4 bytes"):
        decode_request(encode_request(HashRequest(tokens)))


def test_names_of_chunks_are_read_as_they_were_told() -> None:
    told = ChunkHashes("boot", 16, bytes(64))
    assert decode_answer(ChunkHashes, encode_answer(told)) == told
    for line in (error_answer("no"), b'{"hash":{}}\n', encode_answer(ChunkHashes("boot", 0, b"")), b"[]\n"):
        with pytest.raises(ContractError):
            decode_answer(ChunkHashes, line)


@pytest.mark.parametrize("name", [*sorted(RESERVED)[:3], "A", "a-b", "", "a" * 65])
def test_reserved_and_malformed_names_are_no_arguments_of_a_template(name: str) -> None:
    assert refused_argument({"date_string": "today", name: 1}) == name


def test_an_argument_of_a_template_is_a_simple_value() -> None:
    assert refused_argument({"a": 1, "b": None, "c": "x", "d": True}) is None
    assert refused_argument({"a": 1, "b": [1]}) == "b"


def test_the_manifests_name_is_the_digest_of_its_hashes() -> None:
    assert digest_bytes(manifest_hashes([rendered()])) == digest_bytes(bytes(32))
