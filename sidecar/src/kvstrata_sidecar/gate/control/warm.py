"""Computes one prefix of a pool under a version's keyspace, at the operator's request.

Pools' keyspaces are minted only here: for a version of the bundle in force, while the policy is fresh, and for the
version's manifest. The request drains like a tenant's; a draining pod aborts it at once.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import parse_qs

from kvstrata.contract import ContractError
from kvstrata.contract.messages.pools import PoolReport, PoolVersionState, Rendered, Warmed, WarmOutcome, WarmRequest
from kvstrata.contract.messages.prefix import PrefixSource
from kvstrata.contract.policy.keyspace import SCOPE_DIGITS
from kvstrata.contract.policy.pools import PoolShard, PoolVersion, split_hashes
from kvstrata_sidecar.gate import log
from kvstrata_sidecar.gate.control.engine_calls import AbortedError, EngineAwayError, EngineCalls, RefusedError
from kvstrata_sidecar.gate.control.parts import Parts, later, until
from kvstrata_sidecar.gate.control.render import Renderings, is_a_beginning
from kvstrata_sidecar.gate.http.errors import Reason, bad_request
from kvstrata_sidecar.gate.policy.grants import PoolSubject, warming_version

STORED_WITHIN_S = 15.0
"""Time for tiers to store the chunks; longer than any of their deadlines."""

LOOK_S = 0.25
WAIT_LOOK_S = 0.5


@dataclass(eq=False)
class _EndedError(Exception):
    outcome: WarmOutcome


class Warmer:
    def __init__(self, parts: Parts, calls: EngineCalls, renderings: Renderings) -> None:
        self._boot, self._enforcement, self._link = parts.boot, parts.enforcement, parts.link
        self._draining = parts.draining
        self._calls = calls
        self._renderings = renderings

    async def warm(self, request: WarmRequest) -> Warmed:
        """Raises Refusal (503) to retry."""
        try:
            outcome = await self._warm(request)
        except _EndedError as end:
            outcome = end.outcome
        log.info("a prefix was warmed", outcome=str(outcome))
        return Warmed(self._boot, self._enforcement.cache_boot, outcome)

    async def inspect(self, query: bytes) -> PoolReport:
        """Return this pod's holdings of the pool `uid`. Raises Refusal: 400 without one, 503 to retry."""
        uid = parse_qs(query.decode("latin-1")).get("uid", [""])[0]
        if not uid:
            raise bad_request(Reason.BAD_VALUE, "'uid' is that of a pool")
        bundle, fingerprint = self._enforcement.bundle, self._enforcement.identity.fingerprint
        shards = bundle.pools.values() if bundle is not None else ()
        versions = [version for shard in shards if shard.uid == uid for version in shard.versions]
        try:
            states = tuple([await self._state_of(version) for version in versions])
        except ContractError as error:
            raise later(str(error)) from None
        return PoolReport(self._boot, self._enforcement.cache_boot, states, fingerprint)

    async def _state_of(self, version: PoolVersion) -> PoolVersionState:
        holding = await self._link.pool(version.keyspace)
        scope = version.keyspace[:SCOPE_DIGITS]
        return PoolVersionState(scope, version.manifest, holding.known, holding.tiers, holding.missing)

    async def _warm(self, request: WarmRequest) -> WarmOutcome:
        """Raises _EndedError, and Refusal with status 503."""
        version = self._granted(request)
        rendered = await self._renderings.rendered(request.prefix)
        if rendered.refused is not None or not rendered.hashes:
            return WarmOutcome.REFUSED
        if not {*split_hashes(rendered.hashes)} <= {*split_hashes(version.hashes)}:
            return WarmOutcome.DISAGREE
        ids = await self._renderings.tokens(request.prefix, rendered)
        if ids is None:
            return WarmOutcome.DISAGREE
        prompt = {"prompt": ids.tolist(), "max_tokens": 1, "temperature": 0}
        await self._compute(request, "/v1/completions", prompt)
        if request.prefix.chat is not None and not await self._proven(request, request.prefix, ids):
            return WarmOutcome.MISMATCH
        return await self._stored(version, rendered)

    def _granted(self, request: WarmRequest) -> PoolVersion:
        """Return the version whose keyspace may be used now. Raises _EndedError."""
        enforcement = self._enforcement
        version = warming_version(enforcement.bundle, request.pool_uid, request.scope, request.manifest)
        if self._draining():
            raise _EndedError(WarmOutcome.ABORTED)
        if version is None or enforcement.bundle is None:
            raise _EndedError(WarmOutcome.NO_VERSION)
        fenced = enforcement.bundle.root.rules.on_stale == "Fence" and not enforcement.fresh()
        if fenced or enforcement.withheld:
            raise _EndedError(WarmOutcome.STALE)
        return version

    async def _proven(self, request: WarmRequest, source: PrefixSource, ids: array[int]) -> bool:
        """Whether a caller's chat begins with these tokens: some models tokenize it otherwise than at /tokenize."""
        chat = {key: value for key, value in (source.chat or {}).items() if value}
        if chat["messages"][-1].get("role") != "user":
            chat["messages"] = [*chat["messages"], {"role": "user", "content": "a"}]
        body = {**chat, "max_tokens": 1, "temperature": 0, "return_token_ids": True}
        refused = 0
        choices: tuple[dict[str, str], ...] = ({"tool_choice": "none"}, {}) if "tools" in chat else ({},)
        for choice in choices:
            try:
                answer = await self._compute(request, "/v1/chat/completions", {**body, **choice})
                made = array("I", answer["prompt_token_ids"])
            except _EndedError as end:
                if end.outcome is not WarmOutcome.REFUSED or refused == len(choices) - 1:
                    raise
                refused += 1
            except (KeyError, TypeError, ValueError, OverflowError):
                raise _EndedError(WarmOutcome.ENGINE) from None
            else:
                if is_a_beginning(ids, made):
                    return True
        return False

    async def _compute(self, request: WarmRequest, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request under the version's keyspace and return its answer. Raises _EndedError."""
        version = self._granted(request)
        try:
            return await self._calls.compute(path, body, PoolSubject(request.pool_uid), version.keyspace)
        except AbortedError:
            raise _EndedError(WarmOutcome.ABORTED) from None
        except RefusedError:
            raise _EndedError(WarmOutcome.REFUSED) from None
        except EngineAwayError:
            raise _EndedError(WarmOutcome.ENGINE) from None

    async def _stored(self, version: PoolVersion, rendered: Rendered) -> WarmOutcome:
        """Wait for tiers to store the prefix's chunks, which happens after the answer."""
        look = partial(self._link.pool, version.keyspace, b"".join(sorted({*split_hashes(rendered.hashes)})))
        try:
            holding = await until(lambda one: one.complete, look, STORED_WITHIN_S, LOOK_S)
        except ContractError:
            return WarmOutcome.INCOMPLETE
        return WarmOutcome.STORED if holding.complete else WarmOutcome.INCOMPLETE


class PoolWait:
    """Pools that a new pod waits for: it is ready once its own memory holds their chunks, or their time is over.

    The operator has them computed in every pod that acknowledged the policy. A pod that was ready once never waits
    again.
    """

    def __init__(self, parts: Parts) -> None:
        self._render_id, self._enforcement, self._link = parts.render_id, parts.enforcement, parts.link
        self._whole: set[tuple[str, str]] = set()  # complete pools: boot ids of cache servers and keyspaces
        self._over = False

    def awaited(self, waited_s: float) -> str:
        """Return the name of a pool to wait for after `waited_s` seconds; once it was empty, it stays empty."""
        if not self._over:
            for pool, version in self._missing():
                if waited_s < version.before_ready_s:
                    return pool
            self._over = True
        return ""

    async def run(self) -> None:
        while True:
            if not self._over:
                for _, version in tuple(self._missing()):
                    await self._look(version)
            await asyncio.sleep(WAIT_LOOK_S)

    def _missing(self) -> Iterator[tuple[str, PoolVersion]]:
        bundle, boot = self._enforcement.bundle, self._enforcement.cache_boot
        for shard in bundle.pools.values() if bundle is not None else ():
            for version in _of_use(shard, self._render_id):
                if version.before_ready_s and (boot, version.keyspace) not in self._whole:
                    yield shard.pool, version

    async def _look(self, version: PoolVersion) -> None:
        memory = {tier.name for tier in self._link.state.tiers if tier.medium == "CPU"}
        try:
            holding = await self._link.pool(version.keyspace)
        except ContractError:
            return  # the cache server is away, or does not know the pool yet
        rows = [row for row in holding.tiers if row.name in memory]
        if holding.known and rows and all(0 < row.expected == row.stored for row in rows):
            self._whole.add((holding.boot, version.keyspace))


def _of_use(shard: PoolShard, render_id: str) -> tuple[PoolVersion, ...]:
    """Return the versions that requests here may hit: those rendered as this pod renders; without any, as while pods
    are replaced, the published ones: most templates make the same tokens as before."""
    own = tuple(version for version in shard.versions if version.render_id == render_id)
    return own or tuple(version for version in shard.versions if version.published)
