"""The link to the policy adapter in the cache container: applies revisions and reads state."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from kvstrata.contract import ContractError
from kvstrata.contract.messages.adapter import (
    MAX_LINE_BYTES,
    AdapterAck,
    AdapterState,
    ApplyRequest,
    ChunkHashes,
    HashRequest,
    MetricsPage,
    MetricsRequest,
    Request,
    ScopeUsage,
    StateRequest,
    TierState,
    decode_answer,
    encode_request,
)
from kvstrata.contract.messages.erase import AdapterErased, AdapterVerified, EraseRequest, VerifyRequest
from kvstrata.contract.messages.pools import PoolHolding, PoolQuestion
from kvstrata.contract.messages.probe import ForgetRequest, Forgotten
from kvstrata_sidecar.gate import log
from kvstrata_sidecar.gate.policy.enforcement import Enforcement

ERASE_TIMEOUT_S = 30.0
"""Time for one step of an erasure, which takes a few seconds for each tier."""

HASH_TIMEOUT_S = 10.0
POOL_TIMEOUT_S = 10.0

T = TypeVar("T")

MEMORY_COUNTER = "memory.enforced"
"""An adapter counter that exists once the cache server's own memory is governed."""

_GOVERNED_PAUSE_S = 0.05
_STATE_TIMEOUT_S = 5.0
METRICS_EVERY_S = 15.0
_REFUSED_PAUSE_S = 0.5
_RETRY_S = (0.1, 0.2, 0.5, 1.0, 2.0)


class AdapterLink:
    """Keeps one connection to the adapter. Requests raise ContractError if it refuses or does not answer.

    A starting cache server has its adapters before the module that governs its memory. The first revision waits
    `memory_patience_s` for the module, so that the pod enforces nothing before its memory can; an older server without
    the module is used nevertheless.
    """

    def __init__(
        self,
        socket_path: Path,
        enforcement: Enforcement,
        *,
        apply_timeout_s: float = 60.0,
        poll_s: float = 1.0,
        memory_patience_s: float = 0.0,
    ) -> None:
        self.tiers: tuple[TierState, ...] = ()
        self.usage: tuple[ScopeUsage, ...] = ()
        self.usage_left_out = 0
        self.tier_usage: tuple[ScopeUsage, ...] = ()
        self.warming = False
        self.metrics = ""
        self.problem = "the cache server has not answered yet"
        self._socket_path = socket_path
        self._enforcement = enforcement
        self._apply_timeout_s = apply_timeout_s
        self._poll_s = poll_s
        self._memory_patience_s = memory_patience_s

    async def run(self) -> None:
        """Connect, converse, and repeat until cancelled. A break loses the cache server's acknowledgement."""
        failures = 0
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(str(self._socket_path), limit=MAX_LINE_BYTES)
            except OSError as error:
                self.problem = f"the cache server does not answer ({error.strerror or 'no socket'})"
            else:
                try:
                    failures = 0
                    await self._converse(reader, writer)
                except (OSError, ContractError, TimeoutError, ValueError, EOFError) as error:
                    self.problem = f"the cache server's answer failed: {error or type(error).__name__}"
                    log.warning("the link to the cache server broke", problem=self.problem)
                finally:
                    writer.close()
                self.tiers, self.usage, self.usage_left_out, self.tier_usage = (), (), 0, ()
                self.warming = False
                self._enforcement.adapter_lost()
            await asyncio.sleep(_RETRY_S[min(failures, len(_RETRY_S) - 1)])
            failures += 1

    async def watch_metrics(self, every_s: float = METRICS_EVERY_S) -> None:
        while True:
            try:
                async with asyncio.timeout(_STATE_TIMEOUT_S):
                    self.metrics = await self._fetch_metrics()
            except (OSError, ContractError, TimeoutError, ValueError, EOFError):
                self.metrics = ""  # away, or an older version without metrics: `problem` reports which
            await asyncio.sleep(every_s)

    async def _fetch_metrics(self) -> str:
        reader, writer = await asyncio.open_unix_connection(str(self._socket_path), limit=MAX_LINE_BYTES)
        try:
            return (await _ask(reader, writer, MetricsRequest(), MetricsPage)).page
        finally:
            writer.close()

    async def hash(self, tokens: bytes) -> ChunkHashes:
        """Return the cache server's names of the whole chunks of tokens."""
        return await self._once(HashRequest(tokens), ChunkHashes, HASH_TIMEOUT_S)

    async def pool(self, keyspace: str, hashes: bytes | None = None) -> PoolHolding:
        """Return the tiers' holdings of chunks under a pool's keyspace."""
        return await self._once(PoolQuestion(keyspace, hashes), PoolHolding, POOL_TIMEOUT_S)

    async def erase(self, question: EraseRequest) -> AdapterErased:
        """Have the cache server erase keyspaces, and return the remainder. After an error it still continues, and
        asking again is safe."""
        return await self._once(question, AdapterErased, ERASE_TIMEOUT_S)

    async def verify(self, question: VerifyRequest) -> AdapterVerified:
        """Return the cache server's findings."""
        return await self._once(question, AdapterVerified, ERASE_TIMEOUT_S)

    async def forget(self, question: ForgetRequest) -> Forgotten:
        """Have the cache server delete chunks of a keyspace."""
        return await self._once(question, Forgotten, ERASE_TIMEOUT_S)

    async def _once(self, question: Request, kind: type[T], timeout_s: float) -> T:
        try:
            async with asyncio.timeout(timeout_s):
                reader, writer = await asyncio.open_unix_connection(str(self._socket_path), limit=MAX_LINE_BYTES)
                try:
                    return await _ask(reader, writer, question, kind)
                finally:
                    writer.close()
        except TimeoutError as error:
            raise ContractError("the cache server did not answer in time") from error
        except (OSError, EOFError, ValueError) as error:
            if isinstance(error, ContractError):
                raise
            raise ContractError("the cache server does not answer") from error

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        enforcement = self._enforcement
        boot = await self._governed(reader, writer)
        applied = 0
        while True:
            if applied < enforcement.revision or enforcement.keys_brought:
                brought, enforcement.keys_brought = enforcement.keys_brought, False
                enforcement.revision_wanted.clear()
                done = await self._apply(reader, writer, boot)
                applied = done or applied
                enforcement.keys_brought |= brought and not done
                continue
            try:
                async with asyncio.timeout(self._poll_s):
                    await enforcement.revision_wanted.wait()
            except TimeoutError:
                state = await self._state(reader, writer)
                if state.boot != boot:
                    raise ContractError("the cache server changed behind the link") from None
            else:
                enforcement.revision_wanted.clear()

    async def _governed(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        """Wait up to the patience for the cache server's memory to be governed; return the server's boot id."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._memory_patience_s
        while True:
            state = await self._state(reader, writer)
            if MEMORY_COUNTER in state.counters:
                return state.boot
            if loop.time() >= deadline:
                if self._memory_patience_s:
                    log.warning("the cache server's own memory is not governed: it keeps removed blocks")
                return state.boot
            await asyncio.sleep(_GOVERNED_PAUSE_S)

    async def _apply(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, boot: str) -> int:
        """Request the revision in force; return the acknowledged one, 0 for a refusal. The adapter reads policy.json
        itself and may acknowledge a newer revision."""
        asked, term = self._enforcement.revision, self._enforcement.term
        try:
            async with asyncio.timeout(self._apply_timeout_s):
                answer = await _ask(reader, writer, ApplyRequest(asked, term), AdapterAck)
        except ContractError as error:
            if str(error) != self.problem:
                log.warning("the cache server did not take the revision", revision=asked, problem=str(error))
            self.problem = str(error)
            await asyncio.sleep(_REFUSED_PAUSE_S)
            return 0
        if answer.revision < asked or answer.term < term:
            raise ContractError("the adapter acknowledged something else than it was asked")
        if answer.boot != boot:
            raise ContractError("the cache server changed behind the link")
        self.problem = ""
        self._enforcement.adapter_applied(answer.revision, boot)
        return answer.revision

    async def _state(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> AdapterState:
        async with asyncio.timeout(_STATE_TIMEOUT_S):
            answer = await _ask(reader, writer, StateRequest(), AdapterState)
        changed = list(map(_urgent_part, answer.tiers)) != list(map(_urgent_part, self.tiers))
        self.tiers, self.usage, self.usage_left_out = answer.tiers, answer.usage, answer.usage_left_out
        self.tier_usage, self.warming = answer.tier_usage, answer.warming
        self.problem = ""
        if changed:
            for callback in tuple(self._enforcement.changed):
                callback()
        return answer


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, question: Request, kind: type[T]) -> T:
    writer.write(encode_request(question))
    await writer.drain()
    line = await reader.readline()
    if not line:
        raise EOFError("the cache server closed the link")
    return decode_answer(kind, line)


def _urgent_part(tier: TierState) -> TierState:
    """Return the part whose changes are reported at once: no counts or details."""
    return replace(tier, detail="", stored=0, loaded=0, refused=0, errors=0, settling=0, used_bytes=0)
