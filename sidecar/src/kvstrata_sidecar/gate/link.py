"""The link to the policy adapter in the cache container: apply a revision, hear that it holds, watch over tiers."""

from __future__ import annotations

import asyncio
from pathlib import Path

from kvstrata.contract import ContractError
from kvstrata.contract.link import (
    MAX_LINE_BYTES,
    AdapterAck,
    AdapterState,
    TierState,
    apply_request,
    decode_answer,
    state_request,
)

from . import log
from .enforcement import Enforcement

_STATE_TIMEOUT_S = 5.0
_REFUSED_PAUSE_S = 0.5
_RETRY_S = (0.1, 0.2, 0.5, 1.0, 2.0)


class AdapterLink:
    """Keeps one connection to the adapter and one conversation on it, for as long as the gate runs."""

    def __init__(
        self, socket_path: Path, enforcement: Enforcement, *, apply_timeout_s: float = 60.0, poll_s: float = 1.0
    ) -> None:
        self.tiers: tuple[TierState, ...] = ()
        self.problem = "the cache server has not answered yet"
        self._socket_path = socket_path
        self._enforcement = enforcement
        self._apply_timeout_s = apply_timeout_s
        self._poll_s = poll_s

    async def run(self) -> None:
        """Connect, converse, and start over for ever. A break loses the acknowledgement of the cache server."""
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
                self.tiers = ()
                self._enforcement.adapter_lost()
            await asyncio.sleep(_RETRY_S[min(failures, len(_RETRY_S) - 1)])
            failures += 1

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        enforcement = self._enforcement
        boot = (await self._state(reader, writer)).boot
        applied = 0
        while True:
            if applied < enforcement.revision:
                enforcement.revision_wanted.clear()
                applied = await self._apply(reader, writer, boot) or applied
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

    async def _apply(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, boot: str) -> int:
        """Ask for the revision in force; return what the adapter acknowledged, 0 if it refused for now.

        The adapter reads policy.json itself and may acknowledge a newer revision than it was asked for.
        """
        asked, term = self._enforcement.revision, self._enforcement.term
        try:
            answer = await _ask(reader, writer, apply_request(asked, term), self._apply_timeout_s)
        except ContractError as error:
            if str(error) != self.problem:
                log.warning("the cache server did not take the revision", revision=asked, problem=str(error))
            self.problem = str(error)
            await asyncio.sleep(_REFUSED_PAUSE_S)
            return 0
        if not isinstance(answer, AdapterAck) or answer.revision < asked or answer.term < term:
            raise ContractError("the adapter acknowledged something else than it was asked")
        if answer.boot != boot:
            raise ContractError("the cache server changed behind the link")
        self.problem = ""
        self._enforcement.adapter_applied(answer.revision, boot)
        return answer.revision

    async def _state(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> AdapterState:
        answer = await _ask(reader, writer, state_request(), _STATE_TIMEOUT_S)
        if not isinstance(answer, AdapterState):
            raise ContractError("the adapter answered a question about its state with something else")
        changed = [(tier.name, tier.breaker) for tier in answer.tiers] != [(t.name, t.breaker) for t in self.tiers]
        self.tiers = answer.tiers
        self.problem = ""
        if changed:
            for callback in tuple(self._enforcement.changed):
                callback()
        return answer


async def _ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, question: bytes, timeout_s: float
) -> AdapterAck | AdapterState:
    writer.write(question)
    async with asyncio.timeout(timeout_s):
        await writer.drain()
        line = await reader.readline()
    if not line:
        raise EOFError("the cache server closed the link")
    return decode_answer(line)
