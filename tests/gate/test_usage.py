"""Token counts of answers, and the usage event that only the gate asked for."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_sidecar.gate.proxy.usage import DocumentUsage, EventUsage, Usage

MEGABYTE = 1 << 20


def counts(usage: Usage) -> tuple[int, int, int]:
    return usage.prompt, usage.completion, usage.cached


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}, (7, 2, 4)),
        ({"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": None}, (7, 2, -1)),
        ({"prompt_tokens": 7, "prompt_tokens_details": {}}, (7, -1, -1)),
        ({"prompt_tokens": 0, "completion_tokens": 0, "prompt_tokens_details": {"cached_tokens": 0}}, (0, 0, 0)),
        ({"input_tokens": 7, "output_tokens": 2, "cache_creation_input_tokens": 3, "cache_read_input_tokens": 4},
         (14, 2, 4)),
        ({"input_tokens": 7, "output_tokens": 2, "cache_read_input_tokens": 4}, (11, 2, 4)),
        ({"input_tokens": 7, "cache_creation_input_tokens": 3, "cache_read_input_tokens": None}, (10, -1, -1)),
        ({"input_tokens": 0}, (0, -1, -1)),
        ({"prompt_tokens": 5, "input_tokens": 7}, (5, -1, -1)),
        ({"output_tokens": 3}, (-1, 3, -1)),
        ({"completion_tokens": 2, "output_tokens": 3}, (-1, 2, -1)),
        ({"prompt_tokens": -1, "completion_tokens": True, "cache_read_input_tokens": "4"}, (-1, -1, -1)),
        ({"prompt_tokens": 1.5}, (-1, -1, -1)),
        ({}, (-1, -1, -1)),
        (None, (-1, -1, -1)),
        ([1], (-1, -1, -1)),
    ],
    ids=str,
)  # fmt: skip
def test_counts_of_both_apis_are_read(raw: Any, expected: tuple[int, int, int]) -> None:
    usage = Usage()
    usage.take(raw)
    assert counts(usage) == expected


def test_what_a_later_report_leaves_out_stays() -> None:
    usage = Usage()
    usage.take({"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}})
    usage.take({"completion_tokens": 3})
    usage.take({"prompt_tokens": None, "completion_tokens": None})
    assert counts(usage) == (7, 3, 4)


class TestDocument:
    def test_a_document_is_forwarded_unchanged_and_read_at_its_end(self) -> None:
        reader, data = DocumentUsage(), json.dumps({"usage": {"prompt_tokens": 7}}).encode()
        assert [reader.feed(data[:5]), reader.feed(data[5:])] == [data[:5], data[5:]]
        assert counts(reader.usage) == (-1, -1, -1)
        assert reader.end() == b""
        assert counts(reader.usage) == (7, -1, -1)

    @pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"{}", b'{"usage":7}'])
    def test_what_holds_no_usage_is_forwarded_and_not_counted(self, data: bytes) -> None:
        reader = DocumentUsage()
        assert reader.feed(data) + reader.end() == data
        assert counts(reader.usage) == (-1, -1, -1)

    @given(st.lists(st.integers(1, 60), max_size=20), st.sampled_from([None, 0, 1]))
    def test_a_document_is_read_in_pieces_of_any_size(self, cuts: list[int], indent: int | None) -> None:
        usage = {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
        data = json.dumps({"choices": [{"text": "x"}], "usage": usage, "prompt_token_ids": [1] * 50}, indent=indent)
        reader, at = DocumentUsage(), 0
        for size in (*cuts, len(data)):
            reader.feed(data[at : at + size].encode())
            at += size
        reader.end()
        assert (counts(reader.usage), reader.is_final) == ((7, 2, 4), True)

    def test_a_document_of_many_megabytes_is_read_and_not_kept(self) -> None:
        reader, piece = DocumentUsage(), b"x" * (MEGABYTE // 4)
        usage = b'"usage":{"prompt_tokens":7,"completion_tokens":2}'
        tracemalloc.start()
        for data in (
            b'{"choices":[{"text":"',
            *[piece] * 40,
            b'"}],' + usage + b',"prompt_text":"',
            *[piece] * 40,
            b'"}',
        ):
            assert reader.feed(data) is data
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        reader.end()
        assert (counts(reader.usage), reader.is_final) == ((7, 2, -1), True)
        assert peak < 2 * MEGABYTE

    @pytest.mark.parametrize(
        "text",
        [
            '"usage":{"prompt_tokens":1,"completion_tokens":1}',
            '{"usage": {"prompt_tokens":1,"completion_tokens":1}}',
            '\\"usage":{"prompt_tokens":1,"completion_tokens":1}',
            "usage",
            '"usage',
        ],
    )
    @pytest.mark.parametrize("size", [1, 7, 4096])
    def test_generated_text_does_not_pass_for_usage(self, text: str, size: int) -> None:
        usage = {"prompt_tokens": 7, "completion_tokens": 2}
        own = {"choices": [{"text": text, "logprobs": {"top_logprobs": [{text: -1.0, "usage": -2.0}]}}]}
        for document, expected in (
            (own | {"usage": usage, "prompt_text": text}, (7, 2, -1)),
            (own, (-1, -1, -1)),
            ({"content": [{"type": "tool_use", "input": {"usage": {"input_tokens": 1, "output_tokens": 1}}}],
              "usage": {"input_tokens": 7, "output_tokens": 2}}, (7, 2, -1)),
        ):  # fmt: skip
            reader, data = DocumentUsage(), json.dumps(document, separators=(",", ":")).encode()
            for at in range(0, len(data), size):
                reader.feed(data[at : at + size])
            reader.end()
            assert counts(reader.usage) == expected
            assert reader.is_final is (expected[0] == 7)

    @pytest.mark.parametrize(
        "rest", ["", "{", '{"prompt_tokens":7', '{"prompt_tokens":7}', '{"x":"' + "x" * 5000 + '"}']
    )
    def test_usage_that_is_cut_or_lacks_a_count_is_not_final(self, rest: str) -> None:
        reader = DocumentUsage()
        reader.feed(b'{"usage":' + rest.encode())
        reader.end()
        assert not reader.is_final


DETAILS: list[dict[str, Any]] = [
    {"cached_tokens": 4},
    {"cached_tokens": 4, "created_cache_tokens": 12345, "multimodal_tokens": {"image": 7}},
    {"cached_tokens": 0, "created_cache_tokens": None, "multimodal_tokens": None},
]


class TestSeveralSequences:
    """The engine reports the cached tokens of one of them."""

    @pytest.mark.parametrize("details", DETAILS)
    @pytest.mark.parametrize("indent", [None, 1])
    @pytest.mark.parametrize("size", [1, 7, 1024, 1 << 20])
    def test_a_document_keeps_its_length_and_loses_the_details_of_its_prompts(
        self, details: dict[str, Any], indent: int | None, size: int
    ) -> None:
        text = '"prompt_tokens_details":{"cached_tokens":9}'
        usage: dict[str, Any] = {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": details}
        own: dict[str, Any] = {
            "choices": [{"text": text, "logprobs": {"top_logprobs": [{"prompt_tokens_details": -1.0}]}}] * 40
        }
        data = json.dumps({**own, "usage": usage, "prompt_text": text * 100}, indent=indent).encode()
        reader = DocumentUsage(several=True)
        out = b"".join(reader.feed(data[at : at + size]) for at in range(0, len(data), size)) + reader.end()
        assert len(out) == len(data)
        assert json.loads(out) == {
            **own, "usage": {**usage, "prompt_tokens_details": None}, "prompt_text": text * 100,
        }  # fmt: skip
        assert (reader.usage.prompt, reader.usage.completion, reader.is_final) == (7, 2, True)

    @pytest.mark.parametrize("details", DETAILS)
    def test_events_lose_them_too(self, details: dict[str, Any]) -> None:
        usage: dict[str, Any] = {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": details}
        reader = EventUsage(strip=False, several=True)
        out = reader.feed(DELTA + event(choices=[], usage=usage) + DONE) + reader.end()
        first, second, last, _ = out.split(b"\n\n")
        assert (first + b"\n\n", last + b"\n\n") == (DELTA, DONE)
        seen = json.loads(second.removeprefix(b"data: "))
        assert seen == {"choices": [], "usage": {**usage, "prompt_tokens_details": None}}

    def test_those_of_one_sequence_stay(self) -> None:
        data = json.dumps({"usage": {"prompt_tokens_details": {"cached_tokens": 4}}}).encode()
        assert DocumentUsage().feed(data) == data
        single = event(choices=[], usage={"prompt_tokens_details": {"cached_tokens": 4}})
        assert EventUsage(strip=False).feed(single) == single


def event(**document: Any) -> bytes:
    return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"


DELTA = event(choices=[{"delta": {"content": "x"}}])
SURPLUS = event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 2})
LAST = event(choices=[{"delta": {}}], usage={"prompt_tokens": 7, "completion_tokens": 2})
NULL = event(choices=[], usage=None)
DONE = b"data: [DONE]\n\n"


class TestEvents:
    @pytest.mark.parametrize(
        ("data", "stripped"),
        [
            (DELTA + SURPLUS + DONE, DELTA + DONE),
            (SURPLUS, b""),
            (DELTA + LAST + DONE, DELTA + LAST + DONE),
            (NULL + DONE, NULL + DONE),
            (event(usage={"prompt_tokens": 7}), event(usage={"prompt_tokens": 7})),
            (b'data: "usage"\n\n' + DONE, b'data: "usage"\n\n' + DONE),
            (b'data: {"usage"\n\n', b'data: {"usage"\n\n'),
            (b': "usage"\n\n', b': "usage"\n\n'),
            (b'{"choices":[],"usage":{"prompt_tokens":7}}\n\n', b'{"choices":[],"usage":{"prompt_tokens":7}}\n\n'),
        ],
    )
    @pytest.mark.parametrize("strip", [True, False])
    def test_only_the_event_with_usage_and_no_choices_is_removed(
        self, data: bytes, stripped: bytes, strip: bool
    ) -> None:
        reader = EventUsage(strip)
        assert reader.feed(data) + reader.end() == (stripped if strip else data)

    @pytest.mark.parametrize("strip", [True, False])
    @pytest.mark.parametrize("data", [SURPLUS, LAST, b"event: message_delta\n" + LAST])
    def test_usage_is_counted_whether_or_not_it_is_removed(self, data: bytes, strip: bool) -> None:
        reader = EventUsage(strip)
        reader.feed(data)
        assert counts(reader.usage) == (7, 2, -1)

    @pytest.mark.parametrize(
        ("data", "final_before_its_end", "final"),
        [
            (DELTA + SURPLUS + DONE, True, True),
            (DELTA + LAST + DONE, False, True),
            (DELTA + DONE, False, False),
            (event(type="message_start", message={"usage": {"input_tokens": 7, "output_tokens": 1}}), False, False),
            (event(type="message_delta", usage={"input_tokens": 7, "output_tokens": 5}), True, True),
        ],
    )
    def test_the_usage_of_a_broken_stream_is_final_only_after_its_last_report(
        self, data: bytes, final_before_its_end: bool, final: bool
    ) -> None:
        reader = EventUsage(strip=True)
        reader.feed(data)
        assert reader.is_final is final_before_its_end
        assert reader.events == data.count(b"\n\n")
        reader.end()
        assert reader.is_final is final

    def test_anthropic_tells_usage_in_two_events(self) -> None:
        reader = EventUsage(strip=True)
        begin = event(type="message_start", message={"usage": {"input_tokens": 7, "output_tokens": 1}})
        end = event(type="message_delta", usage={"output_tokens": 5})
        assert reader.feed(begin + end) == begin + end
        assert counts(reader.usage) == (7, 5, -1)

    @given(st.lists(st.integers(1, 200), max_size=8), st.booleans())
    def test_pieces_of_any_size_are_forwarded_in_order(self, cuts: list[int], strip: bool) -> None:
        data, reader = DELTA + DELTA + SURPLUS + DELTA + DONE + b"data: unfin", EventUsage(strip)
        out, at = b"", 0
        for size in (*cuts, len(data)):
            piece = data[at : at + size]
            at += size
            out += reader.feed(piece) if piece else b""
            assert bool(reader.held) == (not data[:at].endswith(b"\n\n") if piece else bool(reader.held))
        out += reader.end()
        assert out == (data.replace(SURPLUS, b"") if strip else data)
        assert reader.usage.prompt == 7
        assert not reader.held

    def test_an_unfinished_event_is_held_back_and_whole_ones_before_it_are_not(self) -> None:
        reader = EventUsage(strip=False)
        assert reader.feed(DELTA + b"data: half") == DELTA
        assert reader.held
        assert reader.feed(b" of it\n\n") == b"data: half of it\n\n"
        assert not reader.held
        assert reader.end() == b""

    @pytest.mark.parametrize(("size", "held"), [(MEGABYTE, True), (MEGABYTE + 1, False)])
    def test_at_most_a_megabyte_is_held_back(self, size: int, held: bool) -> None:
        reader = EventUsage(strip=False)
        assert reader.feed(DELTA + b"x" * size) == DELTA + (b"" if held else b"x" * size)
        assert bool(reader.held) is held
        assert reader.end() == (b"x" * size if held else b"")
        assert not reader.held
