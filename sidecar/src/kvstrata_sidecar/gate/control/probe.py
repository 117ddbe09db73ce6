"""The isolation probe: whether a scope can reuse another's blocks, tested the way requests go.

Tenants get salts by the same decision as their requests, the engine computes a chunk of random tokens, and the cache
server looks for it in each tier. Lookups for other scopes are made between two control lookups for the storing scope: a
miss counts only where a hit was possible. No tenant's figures count the probe, which costs four prompts of one chunk.
"""

from __future__ import annotations

import asyncio
import secrets
from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice

from kvstrata.contract import ContractError
from kvstrata.contract.messages.adapter import MAX_HASHED_TOKENS
from kvstrata.contract.messages.erase import AdapterVerified, VerifyRequest
from kvstrata.contract.messages.probe import (
    ENGINE,
    ForgetRequest,
    Forgotten,
    Probed,
    ProbedTier,
    ProbeOutcome,
    ProbeRequest,
    outcome_of,
)
from kvstrata.contract.policy.bundle import Bundle
from kvstrata.contract.policy.keyspace import Scope
from kvstrata_sidecar.gate import log
from kvstrata_sidecar.gate.control.engine_calls import AbortedError, EngineAwayError, EngineCalls, RefusedError, packed
from kvstrata_sidecar.gate.control.parts import Parts, until
from kvstrata_sidecar.gate.http.errors import Refusal
from kvstrata_sidecar.gate.policy.grants import Grant, decide

STORED_WITHIN_S = 15.0
"""Time for tiers to store the chunk; longer than any of their deadlines."""

LOOK_S = 0.1
ANSWERED_WITHIN_S = 60.0


@dataclass(eq=False)
class _EndedError(Exception):
    """Ends the probe with this outcome, regardless of findings."""

    outcome: ProbeOutcome


@dataclass(slots=True)
class _Findings:
    rows: dict[tuple[str, str], Counter[str]] = field(default_factory=dict)
    culprits: tuple[str, ...] = ()

    def count(self, verified: AdapterVerified, kind: str) -> bool:
        """Count a lookup in each tier as a control, foreign or altered; return whether any tier found the chunk. A
        control hit needs the whole chunk; for other scopes one part is a hit, even if it is stored and not served."""
        found_any = False
        for tier in verified.tiers:
            found = tier.found == tier.asked if kind == "control" else bool(tier.found or tier.kept)
            refused = bool(kind == "foreign" and tier.refusal and not found)
            found_any = found_any or found
            self.add(tier.tier, tier.medium, kind, found=found, refused=refused)
        return found_any

    def add(self, tier: str, medium: str, kind: str, *, found: bool, refused: bool = False) -> None:
        row = self.rows.setdefault((tier, medium), Counter())
        row["controls" if kind == "control" else kind] += 1
        row[f"{kind}_hits"] += found
        row["refused"] += refused

    @property
    def tiers(self) -> tuple[ProbedTier, ...]:
        """Memory that belongs to no tier holds blocks by chance: its row counts only with a foreign or altered hit."""
        rows = (ProbedTier(tier, medium, **row) for (tier, medium), row in sorted(self.rows.items()))
        return tuple(row for row in rows if row.tier or row.medium == ENGINE or row.foreign_hits or row.altered_hits)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A chunk of random tokens and one more, and the names of the chunk and of one that differs in a token."""

    ids: array[int]
    name: bytes
    altered: bytes


class Prober:
    """Runs one probe at a time; `below(n)` returns a random number below n."""

    def __init__(self, parts: Parts, calls: EngineCalls, below: Callable[[int], int] = secrets.randbelow) -> None:
        self._boot, self._enforcement, self._link = parts.boot, parts.enforcement, parts.link
        self._random_salt, self._draining = parts.random_salt, parts.draining
        self._calls = calls
        self._below = below
        self._one_at_a_time = asyncio.Lock()
        self._tidying: set[asyncio.Task[None]] = set()

    async def probe(self, request: ProbeRequest) -> Probed:
        async with self._one_at_a_time:
            probed = await self._probe(request)
        write = log.warning if probed.outcome.failed else log.info
        write("isolation was probed", outcome=str(probed.outcome), lookups=probed.lookups, controls=probed.controls)
        return probed

    async def _probe(self, request: ProbeRequest) -> Probed:
        enforcement = self._enforcement
        probed = Probed(
            self._boot, enforcement.cache_boot, enforcement.revision, enforcement.term, ProbeOutcome.UNREADY
        )
        bundle = enforcement.bundle
        if bundle is None or not enforcement.cache_boot or self._draining():
            return probed
        if enforcement.acked < request.revision:
            return replace(probed, outcome=ProbeOutcome.MOVED)
        players = cast(bundle, request.readers, self._below)
        if players is None or not self._decide(bundle, players.writer).keyspace:
            return replace(probed, outcome=ProbeOutcome.NO_REUSE)
        probed = replace(probed, scopes=players.scopes, looked=len(players.readers), clashes=players.clashes)
        if not players.readers:
            return replace(probed, outcome=ProbeOutcome.ONE_SCOPE)
        found, ended = _Findings(), None
        try:
            await self._look(bundle, players, found)
        except _EndedError as end:
            ended = end.outcome
        except ContractError:
            ended = ProbeOutcome.UNREADY
        if enforcement.cache_boot != probed.cache_boot:
            ended = ProbeOutcome.UNREADY
        outcome = outcome_of(found.tiers, clashes=players.clashes)
        # A hit counts however the probe ended; misses count only if it ended well.
        if ended is not None and not outcome.failed:
            return replace(probed, outcome=ended, clashes=False)
        culprits = found.culprits
        if players.clashes and not culprits:
            culprits = (players.scope, players.readers[0].scope)
        return replace(probed, outcome=outcome, tiers=found.tiers, culprits=culprits)

    async def _look(self, bundle: Bundle, players: Cast, found: _Findings) -> None:
        """Store a chunk, and look for it. Raises _EndedError and ContractError."""
        chunk = await self._random_chunk()
        own = self._keyspace(bundle, players.writer)
        try:
            await self._compute(bundle, players.writer, chunk.ids)
            found.count(await self._stored(own, chunk.name), "control")
            for reader in players.readers:
                keyspace = reader.keyspace or self._keyspace(bundle, reader.tenant or "")
                if found.count(await self._verify(keyspace, chunk.name), "foreign"):
                    found.culprits = found.culprits or (players.scope, reader.scope)
            found.count(await self._verify(own, chunk.altered), "altered")
            await self._look_in_engine(bundle, players, chunk, found)
            again = self._keyspace(bundle, players.second)
            found.count(await self._verify(again, chunk.name), "control")
        finally:
            # Also when the caller has gone.
            task = asyncio.get_running_loop().create_task(self._forget(own, chunk.name))
            self._tidying.add(task)
            task.add_done_callback(self._tidying.discard)
        await task
        # A control that missed because the policy changed is no failure.
        for tenant in (players.writer, players.second):
            self._require_same(bundle, tenant)

    async def _look_in_engine(self, bundle: Bundle, players: Cast, chunk: _Chunk, found: _Findings) -> None:
        """Ask the engine for the chunk without its last token, which is no whole chunk that tiers could store."""
        part = chunk.ids[:-2]
        reader = next((one for one in players.readers if one.tenant is not None), None)
        if reader is None or reader.tenant is None or not part:
            return
        steps: tuple[tuple[str, str], ...] = (
            ("control", players.second), ("foreign", reader.tenant), ("control", players.writer),
        )  # fmt: skip
        for kind, tenant in steps:
            hit = await self._compute(bundle, tenant, part) > 0
            found.add("", ENGINE, kind, found=hit)
            if hit and kind == "foreign":
                found.culprits = found.culprits or (players.scope, reader.scope)

    async def _random_chunk(self) -> _Chunk:
        """Return random tokens and the cache server's names of them. Raises _EndedError."""
        size = (await self._link.hash(b"")).chunk_tokens
        if not 1 < size < MAX_HASHED_TOKENS:
            raise _EndedError(ProbeOutcome.UNREADY)
        try:
            # About two hexadecimal digits make a token; a tokenizer with longer tokens gives too few of them.
            made = await self._calls.tokenize({"prompt": secrets.token_hex(4 * size), "add_special_tokens": False})
        except (RefusedError, EngineAwayError):
            raise _EndedError(ProbeOutcome.UNREADY) from None
        ids = made.ids[: size + 1]
        others = [one for one in ids if one != ids[0]]
        if len(ids) <= size or not others:
            raise _EndedError(ProbeOutcome.UNREADY)
        altered = array("I", [others[0], *ids[1:size]])
        names = [(await self._link.hash(packed(tokens))).hashes for tokens in (ids[:size], altered)]
        return _Chunk(ids, *names)

    async def _stored(self, keyspace: str, name: bytes) -> AdapterVerified:
        """Return tiers' holdings once every tier that accepts the scope has the whole chunk, or after a timeout."""

        def whole(verified: AdapterVerified) -> bool:
            return all(tier.found == tier.asked for tier in verified.tiers if tier.tier and not tier.refusal)

        return await until(whole, partial(self._verify, keyspace, name), STORED_WITHIN_S, LOOK_S)

    async def _verify(self, keyspace: str, name: bytes) -> AdapterVerified:
        verified = await self._link.ask(VerifyRequest(keyspace, name), AdapterVerified)
        if not verified.known:
            raise _EndedError(ProbeOutcome.UNREADY)
        return verified

    async def _forget(self, keyspace: str, name: bytes) -> None:
        """Delete the chunk everywhere; blocks in use are retried, and finally left to expire."""
        for _ in range(20):
            try:
                if not (await self._link.ask(ForgetRequest(keyspace, name), Forgotten)).in_use:
                    return
            except ContractError:
                return
            await asyncio.sleep(LOOK_S)

    def _decide(self, bundle: Bundle, tenant: str) -> Grant:
        enforcement = self._enforcement
        return decide(bundle, tenant, enforcement.fresh(), enforcement.withheld, self._random_salt)

    def _keyspace(self, bundle: Bundle, tenant: str) -> str:
        """Return the salt of the tenant's requests under `bundle`. Raises _EndedError if that is no keyspace."""
        grant = self._decide(bundle, tenant)
        if not grant.keyspace:
            raise _EndedError(ProbeOutcome.NO_REUSE)
        return grant.salt

    def _require_same(self, bundle: Bundle, tenant: str) -> None:
        """Raise _EndedError unless the policy in force gives the tenant the same keyspace as `bundle`."""
        now = self._enforcement.bundle
        if now is None or self._draining():
            raise _EndedError(ProbeOutcome.UNREADY)
        try:
            same = self._keyspace(now, tenant) == self._keyspace(bundle, tenant)
        except Refusal:
            same = False
        if not same:
            raise _EndedError(ProbeOutcome.MOVED)

    async def _compute(self, bundle: Bundle, tenant: str, ids: Iterable[int]) -> int:
        """Have the engine compute a prompt as the tenant; return its cached tokens. Raises _EndedError."""
        self._require_same(bundle, tenant)
        salt = self._keyspace(bundle, tenant)
        body = {"prompt": list(ids), "max_tokens": 1, "temperature": 0}
        try:
            completion = await self._calls.compute("/v1/completions", body, tenant, salt, ANSWERED_WITHIN_S)
            return int((completion["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        except AbortedError:
            raise _EndedError(ProbeOutcome.MOVED) from None
        except (RefusedError, EngineAwayError, KeyError, AttributeError, TypeError, ValueError):
            raise _EndedError(ProbeOutcome.UNREADY) from None


@dataclass(frozen=True, slots=True)
class Reader:
    """A reader that must not find the chunk: a scope by one of its tenants, or a pool, which sends no requests."""

    scope: str
    tenant: str | None = None
    keyspace: str = ""


@dataclass(frozen=True, slots=True)
class Cast:
    """`writer` stores; `second`, of the same scope, must find it. `clashes`: the first reader has its keyspace."""

    scopes: int
    scope: str
    writer: str
    second: str
    readers: tuple[Reader, ...]
    clashes: bool = False


def cast(bundle: Bundle, readers: int, below: Callable[[int], int]) -> Cast | None:
    """Return a cast with at most `readers` tenants' scopes, None if no scope reuses anything.

    `below` returns a random number below its argument. Two scopes with one keyspace are always chosen; otherwise scopes
    are drawn uniformly, and the one with the lowest cost writes. Pools that the writer may read are left out.
    """
    tenants: dict[Scope, list[str]] = {}
    owners: dict[str, Scope] = {}
    clash: tuple[Scope, Scope] | None = None
    if bundle.root.rules.reuse == "Disabled":
        return None
    for entry in bundle.entries.values():
        if entry.suspended:
            continue
        tenants.setdefault(entry.scope, []).append(entry.tenant)
        if (owner := owners.setdefault(entry.keyspace, entry.scope)) != entry.scope:
            clash = owner, entry.scope
    if not tenants:
        return None
    scopes = list(tenants)
    drawn = _drawn(scopes, readers + 1, below)
    if clash is not None:
        drawn = [*clash, *(scope for scope in drawn if scope not in clash)][: max(2, readers + 1)]
    own = min(drawn[: 2 if clash else None], key=lambda scope: _cost(bundle, tenants[scope]))
    others = [scope for scope in drawn if scope is not own]
    writer = tenants[own][below(len(tenants[own]))]
    members = [tenant for tenant in tenants[own] if tenant != writer] or [writer]
    beyond = [shard for name, shard in bundle.pools.items() if name not in bundle.entries[writer].pools]
    kept = islice(((shard.pool, version.keyspace) for shard in beyond for version in shard.versions), 2)
    pools = (Reader(f"Pool/{name}", keyspace=keyspace) for name, keyspace in kept)
    looking = [Reader(str(scope), tenants[scope][below(len(tenants[scope]))]) for scope in others]
    second = members[below(len(members))]
    return Cast(len(scopes), str(own), writer, second, (*looking, *pools), clash is not None)


def _drawn(scopes: list[Scope], most: int, below: Callable[[int], int]) -> list[Scope]:
    """Return different scopes in random order, without shuffling all."""
    left = list(scopes)
    count = min(most, len(left))
    for at in range(count):
        other = at + below(len(left) - at)
        left[at], left[other] = left[other], left[at]
    return left[:count]


def _cost(bundle: Bundle, tenants: list[str]) -> tuple[int, float]:
    """Return the cost of a scope as the writer: the number of tiers it is denied, where nothing would be shown, then
    the tightness of its tightest limit, because the chunk may evict one of its blocks."""
    budgets = [budget for tenant in tenants for budget in bundle.entries[tenant].budgets]
    limits = [budget.limit_bytes for budget in budgets if budget.limit_bytes]
    return sum(budget.limit_bytes == 0 for budget in budgets), 1 / min(limits) if limits else 0.0
