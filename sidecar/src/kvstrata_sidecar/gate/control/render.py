"""Rendering for the operator: names of a prefix's chunks, of the tokens that no continuation changes.

One prefix is rendered at a time: it takes some thirty requests to the engine. Only outcomes are logged.

Tokenizers merge across the end of a text, and chat templates may append anything or change earlier parts. So a prefix
is tried with very different continuations, and the common beginning of all results is kept, less a margin. Merges reach
only over a few tokens: in 2,800 random cuts of mixed text and code, with a tokenizer of 131,072 merges and a
sentencepiece model, continuations alone were wrong in up to 17 of 100 cuts, by three tokens at most. An error is never
unsafe: a chunk with other tokens than a caller's has another name, and is never looked up.

A template that inserts today's date makes another prefix tomorrow: such a prefix is refused.
"""

from __future__ import annotations

import asyncio
import copy
from array import array
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from typing import Any

from kvstrata.contract import ContractError
from kvstrata.contract.messages.pools import MAX_PREFIX_TOKENS, Rendered, RenderRefusal, RenderRequest
from kvstrata.contract.messages.prefix import PrefixSource
from kvstrata_sidecar.gate import log
from kvstrata_sidecar.gate.control.engine_calls import EngineAwayError, EngineCalls, RefusedError, packed
from kvstrata_sidecar.gate.control.parts import Parts, later
from kvstrata_sidecar.gate.http.errors import Refusal
from kvstrata_sidecar.gate.proxy import bodies

KEPT = 256
"""Renderings kept: those of four pools with the maximum number of prefixes."""

KEPT_S = 5.5 * 3600.0
"""The operator asks again after six hours, to detect a template that changes by itself."""

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


class Renderings:
    def __init__(self, parts: Parts, calls: EngineCalls, clock: Callable[[], float]) -> None:
        self._boot, self._enforcement, self._link = parts.boot, parts.enforcement, parts.link
        self._render_id = parts.render_id
        self._calls = calls
        self._clock = clock
        self._known: dict[str, tuple[float, Rendered]] = {}  # by the prefix's digest, each with its end of use
        self._one_at_a_time = asyncio.Lock()

    async def render(self, request: RenderRequest) -> Rendered:
        """Raises Refusal (503) to retry."""
        return await self.rendered(request.prefix)

    def forget(self) -> None:
        self._known.clear()

    async def rendered(self, source: PrefixSource) -> Rendered:
        """Return a rendering, cached or made. Raises Refusal with status 503."""
        async with self._one_at_a_time:
            cache_boot = self._enforcement.cache_boot
            until_s, known = self._known.get(source.digest, (0.0, None))
            if known and until_s > self._clock() and known.cache_boot == cache_boot:
                return known
            if not cache_boot:
                raise later("the cache server does not answer")
            rendered = await self._make(source, cache_boot)
            self._known.pop(source.digest, None)
            self._known[source.digest] = self._clock() + KEPT_S, rendered
            while len(self._known) > KEPT:
                del self._known[next(iter(self._known))]
            return rendered

    async def tokens(self, source: PrefixSource, rendered: Rendered) -> array[int] | None:
        """Return the tokens of a prefix's whole chunks, None if they differ from the rendered. Raises Refusal (503)."""
        sent = _as_sent(source)
        if sent is None:
            return None
        try:
            ids = await tokens_of(self._calls, sent)
            named = await self._link.hash(packed(ids[: rendered.tokens]))
        except RefusedError:
            return None
        except EngineAwayError:
            raise later("the engine does not answer") from None
        except ContractError as error:
            raise later(str(error)) from None
        if named.boot != rendered.cache_boot:
            raise later("the cache server changed meanwhile")
        if named.hashes != rendered.hashes:
            return None
        return ids[: whole_chunks(rendered.tokens, rendered.chunk_tokens)]

    async def _make(self, source: PrefixSource, cache_boot: str) -> Rendered:
        nothing = Rendered(self._boot, cache_boot, self._render_id)
        sent = _as_sent(source)
        if sent is None:
            return replace(nothing, refused=RenderRefusal.SOURCE_REFUSED)
        try:
            draft = await render(self._calls, sent, datetime.now(UTC).date(), asyncio.sleep)
            if isinstance(draft, RenderRefusal):
                log.info("a prefix was not rendered", reason=str(draft))
                return replace(nothing, refused=draft)
            return await self._named(nothing, draft)
        except EngineAwayError:
            raise later("the engine does not answer") from None
        except ContractError as error:
            raise later(str(error)) from None

    async def _named(self, nothing: Rendered, draft: Draft) -> Rendered:
        size = replace(nothing, total=len(draft.ids), max_model_tokens=draft.max_model_tokens)
        if draft.too_long:
            return size
        named = await self._link.hash(packed(draft.ids[: draft.stable]))
        if named.boot != nothing.cache_boot:
            raise ContractError("the cache server changed meanwhile")
        log.info("a prefix was rendered", tokens=len(draft.ids), stable=draft.stable, chunk_tokens=named.chunk_tokens)
        return replace(size, tokens=draft.stable, chunk_tokens=named.chunk_tokens, hashes=named.hashes)


def _as_sent(source: PrefixSource) -> PrefixSource | None:
    """Return the engine's part of a request with this beginning; None if no caller may send one."""
    try:
        if source.chat is not None:
            chat = copy.deepcopy({key: value for key, value in source.chat.items() if value})
            return PrefixSource(chat=bodies.rewrite(bodies.CHAT, chat)[0])
        prompt = source.text if source.text is not None else list(source.token_ids or ())
        bodies.rewrite(bodies.COMPLETIONS, {"prompt": prompt})
        return source
    except Refusal:
        return None


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
