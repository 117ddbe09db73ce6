"""The link to the policy adapter in the cache container: applies revisions and reads state."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from kvstrata.contract import ContractError
from kvstrata.contract.messages import adapter as messages
from kvstrata.contract.messages.pools import PoolHolding, PoolQuestion
from kvstrata_sidecar.gate import log
from kvstrata_sidecar.gate.policy.enforcement import Enforcement

ERASE_TIMEOUT_S = 30.0
"""Time for one step of an erasure, which takes a few seconds for each tier."""

HASH_TIMEOUT_S = 10.0
POOL_TIMEOUT_S = 10.0

T = TypeVar("T")
_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]

MEMORY_COUNTER = "memory.enforced"
"""An adapter counter that exists once the cache server's own memory is governed."""

_STATE_TIMEOUT_S = 5.0
_APPLY_TIMEOUT_S = 60.0
METRICS_EVERY_S = 15.0
_RETRY_S = (0.1, 0.2, 0.5, 1.0, 2.0)
_NOTHING_REPORTED = messages.AdapterState(boot="", revision=0, term=0, fresh=False, keyspaces=0)


@dataclass(eq=False)
class AdapterLink:
    """Keeps one connection to the adapter. Requests raise ContractError if it refuses or does not answer. The first
    revision waits `memory_patience_s` for the module that governs the cache server's memory, which starts after the
    adapter, so that the pod enforces nothing before its memory can. `prefill` returns the engine's seconds per token by
    the prompt's length. `state` is the newest report, empty while the link is broken."""

    socket_path: Path
    enforcement: Enforcement
    memory_patience_s: float = 0.0
    prefill: Callable[[], Mapping[int, float]] = dict
    poll_s: float = 1.0
    state: messages.AdapterState = _NOTHING_REPORTED
    metrics: str = ""
    problem: str = "the cache server has not answered yet"

    async def run(self) -> None:
        """Connect, converse, and repeat until cancelled. A break loses the cache server's acknowledgement."""
        failures = 0
        while True:
            try:
                streams = await self._connect()
            except OSError as error:
                self.problem = f"the cache server does not answer ({error.strerror or 'no socket'})"
            else:
                try:
                    failures = 0
                    await self._converse(streams)
                except (OSError, ValueError, EOFError) as error:
                    self.problem = f"the cache server's answer failed: {error or type(error).__name__}"
                    log.warning("the link to the cache server broke", problem=self.problem)
                finally:
                    streams[1].close()
                self.state = _NOTHING_REPORTED
                self.enforcement.adapter_lost()
            await asyncio.sleep(_RETRY_S[min(failures, len(_RETRY_S) - 1)])
            failures += 1

    async def watch_metrics(self, every_s: float = METRICS_EVERY_S) -> None:
        while True:
            try:
                answer = await self.ask(messages.MetricsRequest(), messages.MetricsPage, _STATE_TIMEOUT_S)
                self.metrics = answer.page
            except ContractError:
                self.metrics = ""  # away: `problem` reports why
            await asyncio.sleep(every_s)

    async def hash(self, tokens: bytes) -> messages.ChunkHashes:
        """Return the cache server's names of the whole chunks of tokens."""
        return await self.ask(messages.HashRequest(tokens), messages.ChunkHashes, HASH_TIMEOUT_S)

    async def pool(self, keyspace: str, hashes: bytes | None = None) -> PoolHolding:
        """Return the tiers' holdings of chunks under a pool's keyspace, as far as this pod's engine can read them."""
        fingerprint = self.enforcement.identity.fingerprint
        return await self.ask(PoolQuestion(keyspace, hashes, fingerprint), PoolHolding, POOL_TIMEOUT_S)

    async def ask(self, question: messages.Request, kind: type[T], timeout_s: float | None = None) -> T:
        """Return the answer, by default within `ERASE_TIMEOUT_S`. An erasure continues after an error: ask again."""
        try:
            async with asyncio.timeout(ERASE_TIMEOUT_S if timeout_s is None else timeout_s):
                streams = await self._connect()
                try:
                    return await _ask(streams, question, kind)
                finally:
                    streams[1].close()
        except ContractError:
            raise
        except TimeoutError as error:
            raise ContractError("the cache server did not answer in time") from error
        except (OSError, EOFError, ValueError) as error:
            raise ContractError("the cache server does not answer") from error

    async def _connect(self) -> _Streams:
        return await asyncio.open_unix_connection(str(self.socket_path), limit=messages.MAX_LINE_BYTES)

    async def _converse(self, streams: _Streams) -> None:
        enforcement = self.enforcement
        boot = await self._governed(streams)
        applied = 0
        while True:
            if applied < enforcement.revision or enforcement.keys_brought:
                brought, enforcement.keys_brought = enforcement.keys_brought, False
                enforcement.revision_wanted.clear()
                done = await self._apply(streams, boot)
                applied = done or applied
                enforcement.keys_brought |= brought and not done
                continue
            try:
                async with asyncio.timeout(self.poll_s):
                    await enforcement.revision_wanted.wait()
            except TimeoutError:
                if (await self._poll(streams)).boot != boot:
                    raise ContractError("the cache server changed behind the link") from None
            else:
                enforcement.revision_wanted.clear()

    async def _governed(self, streams: _Streams) -> str:
        """Wait up to the patience for the cache server's memory to be governed; return the server's boot id."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.memory_patience_s
        while True:
            state = await self._poll(streams)
            if MEMORY_COUNTER in state.counters or state.ungoverned:
                return state.boot
            if loop.time() >= deadline:
                if self.memory_patience_s:
                    log.warning("the cache server's own memory is not governed: it keeps removed blocks")
                return state.boot
            await asyncio.sleep(0.05)

    async def _apply(self, streams: _Streams, boot: str) -> int:
        """Request the revision in force; return the acknowledged one, which may be newer, or 0 for a refusal."""
        asked, term = self.enforcement.revision, self.enforcement.term
        try:
            async with asyncio.timeout(_APPLY_TIMEOUT_S):
                answer = await _ask(streams, messages.ApplyRequest(asked, term), messages.AdapterAck)
        except ContractError as error:
            if str(error) != self.problem:
                log.warning("the cache server did not take the revision", revision=asked, problem=str(error))
            self.problem = str(error)
            await asyncio.sleep(0.5)
            return 0
        if answer.revision < asked or answer.term < term:
            raise ContractError("the adapter acknowledged something else than it was asked")
        if answer.boot != boot:
            raise ContractError("the cache server changed behind the link")
        # A revision is acknowledged together with the tiers that it joined.
        await self._poll(streams)
        self.enforcement.adapter_applied(answer.revision, boot)
        return answer.revision

    async def _poll(self, streams: _Streams) -> messages.AdapterState:
        async with asyncio.timeout(_STATE_TIMEOUT_S):
            answer = await _ask(streams, messages.StateRequest(_costs(self.prefill())), messages.AdapterState)
        changed = list(map(_urgent_part, answer.tiers)) != list(map(_urgent_part, self.state.tiers))
        self.state, self.problem = answer, ""
        if self.enforcement.identity.cache_reports(answer.fingerprints, answer.ungoverned) or changed:
            self.enforcement.notify()
        return answer


async def _ask(streams: _Streams, question: messages.Request, kind: type[T]) -> T:
    reader, writer = streams
    writer.write(messages.encode_request(question))
    await writer.drain()
    line = await reader.readline()
    if not line:
        raise EOFError("the cache server closed the link")
    return messages.decode_answer(kind, line)


def _costs(by_length: Mapping[int, float]) -> tuple[messages.PrefillCost, ...]:
    return tuple(messages.PrefillCost(tokens, max(1, round(1e9 * seconds))) for tokens, seconds in by_length.items())


def without_counts(tier: messages.TierState) -> messages.TierState:
    return replace(tier, stored=0, loaded=0, refused=0, errors=0, settling=0, used_bytes=0, restore=None)


def _urgent_part(tier: messages.TierState) -> messages.TierState:
    """Return the part whose changes are reported at once: no counts or details."""
    return replace(without_counts(tier), detail="")
