"""Rendering for the operator: names of a prefix's chunks.

One prefix is rendered at a time: it takes some thirty requests to the engine. Only outcomes are logged.
"""

from __future__ import annotations

import asyncio
import copy
from array import array
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime

from kvstrata.contract import ContractError
from kvstrata.contract.messages.pools import Rendered, RenderRefusal, RenderRequest
from kvstrata.contract.messages.prefix import PrefixSource
from kvstrata_sidecar.gate import log
from kvstrata_sidecar.gate.control.engine_calls import EngineAwayError, EngineCalls, RefusedError, packed
from kvstrata_sidecar.gate.control.parts import Parts, later
from kvstrata_sidecar.gate.control.stable_prefix import Draft, render, tokens_of, whole_chunks
from kvstrata_sidecar.gate.http.errors import Refusal
from kvstrata_sidecar.gate.proxy import bodies

KEPT = 256
"""Renderings kept: those of four pools with the maximum number of prefixes."""

KEPT_S = 5.5 * 3600.0
"""The operator asks again after six hours, to detect a template that changes by itself."""


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
