"""Renders a prefix to the tokens that no continuation changes, by calls to an engine.

Tokenizers merge across the end of a text, and chat templates may append anything or change earlier parts. So a prefix
is tried with very different continuations, and the common beginning of all results is kept, less a margin. Merges reach
only over a few tokens: in 2,800 random cuts of mixed text and code, with a tokenizer of 131,072 merges and a
sentencepiece model, continuations alone were wrong in up to 17 of 100 cuts, by three tokens at most. An error is never
unsafe: a chunk with other tokens than a caller's has another name, and is never looked up.

A template that inserts today's date makes another prefix tomorrow: such a prefix is refused.
"""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any

from kvstrata.contract.messages.pools import MAX_PREFIX_TOKENS, RenderRefusal
from kvstrata.contract.messages.prefix import PrefixSource
from kvstrata_sidecar.gate.control.engine_calls import EngineCalls, RefusedError

PAUSE_S = 1.1
"""Pause between two renderings that must be equal: templates with the time write seconds."""

FEWEST_CONTINUATIONS = 2
"""Minimum of accepted continuations; fewer prove nothing about the stable part."""

MARGIN_TOKENS = 8

_TAILS = (
    "a", "Z", "0", " a", " The", " 7", "\n", "\n\n", "\t", "  ", ".", ",", ")", "\"", "'s", "-", "_", "/", "<", "ing",
    "é", "漢", "🙂", "\u200d",
)  # fmt: skip
_RUNS = (1, 2, 3, 7, 16, 64)

_CHATS: tuple[tuple[dict[str, str], ...], ...] = (
    ({"role": "user", "content": "a"},),
    ({"role": "user", "content": " 0\n"},),
    ({"role": "user", "content": "é漢"},),
    ({"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}),
)


def continued_texts(text: str) -> tuple[str, ...]:
    """Return the text with each tried continuation, also with its last character repeated: runs are merged again."""
    return tuple(text + tail for tail in (*_TAILS, *(text[-1:] * count for count in _RUNS)))


def continued_chats(messages: Sequence[Any]) -> tuple[tuple[list[Any], bool], ...]:
    """Return the messages with each tried continuation, and whether the template adds the beginning of an answer."""
    return (([*messages], True), *(([*messages, *tail], True) for tail in _CHATS), ([*messages, *_CHATS[0]], False))


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    shorter = min(len(one), len(other))
    # Slices compare much faster than a loop: prefixes are long, and mostly equal.
    low, high = 0, shorter
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def stable_tokens(common: Iterable[int]) -> int:
    """Return how many tokens no continuation changes: the least that a prefix has in `common` with one, less a
    margin."""
    return max(0, min(common) - MARGIN_TOKENS)


def is_a_beginning(shorter: Sequence[int], longer: Sequence[int]) -> bool:
    return common_length(shorter, longer) == len(shorter)


def whole_chunks(tokens: int, chunk_tokens: int) -> int:
    return tokens // chunk_tokens * chunk_tokens


@dataclass(frozen=True, slots=True)
class Draft:
    """A prefix's tokens, how many of them stay (0 for a prefix that is too long), and the engine's maximum."""

    ids: array[int]
    stable: int
    max_model_tokens: int

    @property
    def too_long(self) -> bool:
        """Whether no request can begin with it, or no pool hold it."""
        return len(self.ids) >= self.max_model_tokens or len(self.ids) > MAX_PREFIX_TOKENS


async def render(
    engine: EngineCalls, source: PrefixSource, today: date, pause: Callable[[float], Awaitable[None]]
) -> Draft | RenderRefusal:
    """Return the rendering, or why it is never possible. Raises EngineAwayError."""
    try:
        if source.text is not None:
            return await _text(engine, source.text)
        if source.token_ids is not None:
            return await _token_ids(engine, source.token_ids)
        return await _chat(engine, source.chat or {}, today, pause)
    except RefusedError:
        return RenderRefusal.SOURCE_REFUSED


async def tokens_of(engine: EngineCalls, source: PrefixSource) -> array[int]:
    """Return the tokens of a prefix that was rendered. Raises RefusedError or EngineAwayError."""
    if source.token_ids is not None:
        return array("I", source.token_ids)
    if source.text is not None:
        return (await engine.tokenize(_prompt(source.text))).ids
    chat = source.chat or {}
    refused = RefusedError()
    for messages, generation_prompt in ((chat["messages"], False), *continued_chats(chat["messages"])):
        try:
            question = _question(chat, messages, generation_prompt=generation_prompt)
            return (await engine.tokenize(question)).ids
        except RefusedError as error:
            refused = error
    raise refused


async def _text(engine: EngineCalls, text: str) -> Draft:
    whole = await engine.tokenize(_prompt(text))
    draft = Draft(whole.ids, 0, whole.max_model_tokens)
    if draft.too_long:
        return draft
    common = [common_length(whole.ids, (await engine.tokenize(_prompt(one))).ids) for one in continued_texts(text)]
    return Draft(whole.ids, stable_tokens(common), whole.max_model_tokens)


async def _token_ids(engine: EngineCalls, token_ids: tuple[int, ...]) -> Draft:
    ids = array("I", token_ids)
    # Token ids are not merged, so no continuation has to be tried.
    draft = Draft(ids, len(ids), (await engine.tokenize(_prompt("a"))).max_model_tokens)
    if not draft.too_long:
        await engine.check_token(max(ids))
    return draft


async def _chat(
    engine: EngineCalls, chat: Mapping[str, Any], today: date, pause: Callable[[float], Awaitable[None]]
) -> Draft | RenderRefusal:
    tried = ((chat["messages"], False), *continued_chats(chat["messages"]))
    asked, whole, common = None, None, list[int]()
    for messages, generation_prompt in tried:
        question = _question(chat, messages, generation_prompt=generation_prompt)
        try:
            result = await engine.tokenize(question)
        except RefusedError:
            # The template refuses these messages: roles may have to alternate.
            continue
        if whole is None:
            asked, whole = question, result
            draft = Draft(whole.ids, 0, whole.max_model_tokens)
            if draft.too_long:
                return draft
        else:
            common.append(common_length(whole.ids, result.ids))
    if asked is None or whole is None or len(common) < FEWEST_CONTINUATIONS:
        return RenderRefusal.SOURCE_REFUSED
    await pause(PAUSE_S)
    if (await engine.tokenize(asked)).ids != whole.ids:
        return RenderRefusal.CHANGING
    stable = stable_tokens(common)
    if dated(await engine.detokenize(whole.ids[:stable]), _texts(chat), today):
        return RenderRefusal.DATED
    return Draft(whole.ids, stable, whole.max_model_tokens)


def _question(chat: Mapping[str, Any], messages: list[Any], *, generation_prompt: bool) -> dict[str, Any]:
    given = {key: value for key, value in chat.items() if value}
    return given | {"messages": messages, "add_generation_prompt": generation_prompt}


def _prompt(text: str) -> dict[str, Any]:
    return {"prompt": text, "add_special_tokens": True}


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for inner in value.values() for text in _texts(inner)]
    if isinstance(value, (list, tuple)):
        return [text for inner in value for text in _texts(inner)]
    return []


_MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip


def written_as(day: date) -> frozenset[str]:
    """Return how templates and people write a day, in English names of months regardless of the locale."""
    year, month, number = day.year, day.month, day.day
    name = _MONTHS[month - 1]
    short = name[:3]
    return frozenset(
        {
            f"{year}-{month:02}-{number:02}", f"{year}/{month:02}/{number:02}", f"{year}.{month:02}.{number:02}",
            f"{year}{month:02}{number:02}", f"{number:02}/{month:02}/{year}", f"{month:02}/{number:02}/{year}",
            f"{number:02}.{month:02}.{year}", f"{number:02}-{month:02}-{year}", f"{number:02}-{short}-{year}",
            f"{number:02} {short} {year}", f"{number} {short} {year}", f"{number:02} {name} {year}",
            f"{number} {name} {year}", f"{name} {number:02}, {year}", f"{name} {number}, {year}",
            f"{short} {number:02}, {year}", f"{short} {number}, {year}", f"{year}年{month}月{number}日",
        }
    )  # fmt: skip


def dated(made: str, own_texts: Iterable[str], today: date) -> bool:
    """Whether `made` holds a date of today, or of the day before or after, that is not in `own_texts`. The engine's
    clock may be in another time zone. A date written by the prefix's author does not change."""
    days = (today + timedelta(days=offset) for offset in (-1, 0, 1))
    found = {text for day in days for text in written_as(day) if text in made}
    sources = tuple(own_texts)
    return any(not any(text in source for source in sources) for text in found)
