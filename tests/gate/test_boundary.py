"""What of a prefix stays whatever follows, for any tokenizer that merges, and dates that a template writes."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from datetime import date
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvstrata.contract.messages.pools import MAX_PREFIX_TOKENS, RenderRefusal
from kvstrata.contract.messages.prefix import PrefixSource
from kvstrata_sidecar.gate.control.engine_calls import RefusedError, Tokenized
from kvstrata_sidecar.gate.control.render import (
    MARGIN_TOKENS,
    Draft,
    common_length,
    continued_chats,
    continued_texts,
    dated,
    is_a_beginning,
    render,
    stable_tokens,
    whole_chunks,
    written_as,
)
from tests.support.amounts import examples

from .tokenizers import Merges

TODAY = date(2026, 11, 22)
words = st.text(st.sampled_from("ab c-.\n"), max_size=40)
tables = st.lists(st.tuples(st.sampled_from("abc -.\n"), st.sampled_from("abc -.\n")), max_size=8, unique=True)
sequences = st.lists(st.integers(0, 3), max_size=30)


@given(sequences, sequences)
def test_the_common_beginning_is_where_the_first_difference_is(one: list[int], other: list[int]) -> None:
    found = common_length(array("I", one), array("I", other))
    assert one[:found] == other[:found]
    assert found in (len(one), len(other)) or one[found] != other[found]
    assert is_a_beginning(one[:found], other)


def stable_under(tokenizer: Merges, text: str) -> int:
    ids = tokenizer.ids(text)
    return stable_tokens(common_length(ids, tokenizer.ids(continued)) for continued in continued_texts(text))


@settings(max_examples=examples(300))
@given(tables, words, words)
def test_what_is_said_to_stay_stays_in_every_continuation(table: list[tuple[str, str]], text: str, rest: str) -> None:
    assume(text)
    tokenizer = Merges(table)
    stable = stable_under(tokenizer, text)
    assert is_a_beginning(tokenizer.ids(text)[:stable], tokenizer.ids(text + rest))
    assert stable <= max(0, len(tokenizer.ids(text)) - MARGIN_TOKENS)


@given(st.integers(1, 70), st.integers(1, 70))
def test_runs_of_one_character_that_grow_are_found(length: int, more: int) -> None:
    # Dashes are merged in twos and fours, as tokenizers do: the last tokens of a run depend on how long it gets.
    tokenizer = Merges([("-", "-"), ("--", "--"), ("----", "----"), ("--------", "--------")])
    text = "a" + "-" * length
    assert is_a_beginning(tokenizer.ids(text)[: stable_under(tokenizer, text)], tokenizer.ids(text + "-" * more))


def test_continuations_differ_in_what_tokenizers_look_at() -> None:
    tails = {continued[1:] for continued in continued_texts("x")}
    assert len(tails) >= 28
    assert {"a", " a", "\n", "é", "漢", "🙂", "x" * 64} <= tails
    assert {flag for _, flag in continued_chats([])} == {True, False}


def test_only_whole_chunks_are_kept() -> None:
    assert [whole_chunks(tokens, 16) for tokens in (0, 15, 16, 47)] == [0, 0, 16, 32]


class TestDates:
    @pytest.mark.parametrize(
        "text", ["22 Nov 2026", "2026-11-22", "November 22, 2026", "11/22/2026", "22.11.2026", "2026年11月22日"]
    )
    def test_today_is_found_in_the_forms_that_templates_write(self, text: str) -> None:
        assert dated(f"Today Date: {text}.", ["Be brief."], TODAY)

    @pytest.mark.parametrize("day", [date(2026, 11, 21), date(2026, 11, 23)])
    def test_the_clock_of_another_zone_is_found(self, day: date) -> None:
        assert all(dated(text, [], TODAY) for text in written_as(day))

    @pytest.mark.parametrize("day", [date(2026, 11, 20), date(2024, 7, 26)])
    def test_another_day_is_no_date_of_today(self, day: date) -> None:
        assert not any(dated(f"Cutting Knowledge Date: {text}", [], TODAY) for text in written_as(day))

    def test_a_date_that_the_author_wrote_stays(self) -> None:
        assert not dated("Contract of 22 Nov 2026", ["Contract of 22 Nov 2026"], TODAY)
        assert dated("2026-11-22 Contract of 22 Nov 2026", ["Contract of 22 Nov 2026"], TODAY)


class Scripted:
    """An engine whose chat template is a function."""

    def __init__(self, template: Any = None, limit: int = 4096) -> None:
        self.tokenizer = Merges([("a", "b")])
        self.template = template or plain
        self.limit = limit
        self.asked: list[Mapping[str, Any]] = []
        self.vocabulary = 300

    async def tokenize(self, question: Mapping[str, Any]) -> Tokenized:
        self.asked.append(question)
        text = question["prompt"] if "prompt" in question else self.template(self, question)
        return Tokenized(array("I", self.tokenizer.ids(text)), self.limit)

    async def detokenize(self, ids: array[int]) -> str:
        return self.tokenizer.text(ids)

    async def check_token(self, token: int) -> None:
        if token >= self.vocabulary:
            raise RefusedError


def plain(_: Scripted, question: Mapping[str, Any]) -> str:
    said = "".join(f"<{m['role']}>{m['content']}" for m in question["messages"])
    return said + ("<assistant>" if question["add_generation_prompt"] else "")


def strict(_: Scripted, question: Mapping[str, Any]) -> str:
    """Roles have to alternate, beginning with the user, as several published templates want it."""
    roles = [m["role"] for m in question["messages"] if m["role"] != "system"]
    if roles != (["user", "assistant"] * len(roles))[: len(roles)] or not roles:
        raise RefusedError
    return plain(_, question)


def behind(_: Scripted, question: Mapping[str, Any]) -> str:
    """The system message is put into the last message of the user."""
    system, *rest = question["messages"]
    return "".join(f"<{m['role']}>{m['content']}" for m in rest[:-1]) + f"<user>{system['content']}" + str(rest[-1:])


def timed(engine: Scripted, question: Mapping[str, Any]) -> str:
    return f"<{len(engine.asked) // 7}>" + plain(engine, question)


def with_date(_: Scripted, question: Mapping[str, Any]) -> str:
    return "Today Date: 22 Nov 2026 " + plain(_, question)


SYSTEM = {"role": "system", "content": "ab " * 40}
USER = {"role": "user", "content": "hello"}


async def made(engine: Scripted, **source: Any) -> Draft | RenderRefusal:
    async def pause(_: float) -> None:
        return

    return await render(engine, PrefixSource(**source), TODAY, pause)


async def test_a_text_stays_but_for_the_margin() -> None:
    draft = await made(Scripted(), text="ab " * 40)
    assert isinstance(draft, Draft)
    assert len(draft.ids) == 80
    assert draft.stable == 80 - MARGIN_TOKENS


async def test_token_ids_stay_as_they_are_if_the_vocabulary_has_them() -> None:
    draft = await made(Scripted(), token_ids=(7, 8, 299))
    assert isinstance(draft, Draft)
    assert (list(draft.ids), draft.stable) == ([7, 8, 299], 3)
    assert await made(Scripted(), token_ids=(7, 300)) is RenderRefusal.SOURCE_REFUSED


@pytest.mark.parametrize(
    "source", [{"text": "c" * 64}, {"token_ids": tuple(range(64))}, {"chat": {"messages": [SYSTEM]}}]
)
async def test_of_a_prefix_that_is_too_long_nothing_more_is_asked(source: dict[str, Any]) -> None:
    engine = Scripted(limit=64)
    draft = await made(engine, **source)
    assert isinstance(draft, Draft)
    assert draft.too_long
    assert len(engine.asked) == 1


async def test_a_prefix_beyond_what_any_pool_holds_is_too_long() -> None:
    assert Draft(array("I", bytes(4 * (MAX_PREFIX_TOKENS + 1))), 0, 1 << 30).too_long
    assert not Draft(array("I", bytes(4 * MAX_PREFIX_TOKENS)), 0, 1 << 30).too_long


async def test_a_system_message_stays_up_to_what_follows_it() -> None:
    draft = await made(Scripted(), chat={"messages": [SYSTEM]})
    assert isinstance(draft, Draft)
    assert len(draft.ids) - MARGIN_TOKENS <= draft.stable + 1 <= len(draft.ids)


@pytest.mark.parametrize("messages", [[SYSTEM], [SYSTEM, USER], [SYSTEM, USER, {"role": "assistant", "content": "x"}]])
async def test_a_template_that_wants_roles_to_alternate_is_tried_with_what_it_takes(messages: list[Any]) -> None:
    draft = await made(Scripted(strict), chat={"messages": messages})
    assert isinstance(draft, Draft)
    assert draft.stable > 60


async def test_a_template_that_takes_hardly_any_continuation_is_refused() -> None:
    def only(engine: Scripted, question: Mapping[str, Any]) -> str:
        if question["messages"] != [SYSTEM]:
            raise RefusedError
        return plain(engine, question)

    assert await made(Scripted(only), chat={"messages": [SYSTEM]}) is RenderRefusal.SOURCE_REFUSED


async def test_a_prefix_that_the_template_puts_behind_what_follows_stays_nowhere() -> None:
    draft = await made(Scripted(behind), chat={"messages": [SYSTEM]})
    assert isinstance(draft, Draft)
    assert draft.stable == 0


async def test_a_template_that_writes_the_time_is_found() -> None:
    assert await made(Scripted(timed), chat={"messages": [SYSTEM]}) is RenderRefusal.CHANGING


async def test_a_template_that_writes_the_date_is_found_unless_the_author_wrote_it() -> None:
    assert await made(Scripted(with_date), chat={"messages": [SYSTEM]}) is RenderRefusal.DATED
    own = {"role": "system", "content": "On 22 Nov 2026: " + SYSTEM["content"]}
    assert isinstance(await made(Scripted(with_date), chat={"messages": [own]}), Draft)


async def test_tools_and_arguments_are_asked_about_as_callers_send_them() -> None:
    engine = Scripted()
    chat = {"messages": [SYSTEM], "tools": [{"type": "function"}], "chat_template_kwargs": {}}
    await made(engine, chat=chat)
    assert all(question["tools"] == chat["tools"] for question in engine.asked)
    assert all("chat_template_kwargs" not in question for question in engine.asked)
