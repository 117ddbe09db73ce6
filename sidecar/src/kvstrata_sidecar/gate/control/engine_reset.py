"""Empties the engine's prefix cache, for all tenants, at the operator's request.

An engine forgets its blocks only while none is in use, which a busy pod may never reach. So after `IDLE_S` running
requests are preempted: the engine queues and recomputes them, and their callers notice a pause.
"""

from __future__ import annotations

import asyncio

from kvstrata.contract import ContractError
from kvstrata.contract.messages.engine_reset import EngineResetAnswer, ResetOutcome, ResetRequest
from kvstrata_sidecar.connector.reset import ENGINE_RESET_PATH, PREEMPT
from kvstrata_sidecar.gate import log
from kvstrata_sidecar.gate.control.engine_calls import WholeAnswer, judged, request_bytes
from kvstrata_sidecar.gate.http.engine_client import EnginePool
from kvstrata_sidecar.gate.http.errors import Reason, bad_request
from kvstrata_sidecar.gate.rendering.render import EngineAwayError, RefusedError

LOOK_S = 0.25

IDLE_S = 2.0
"""How long an engine may become idle by itself, before running requests are recomputed."""

ANSWER_TIMEOUT_S = 30.0
CANNOT = frozenset({404, 405, 501})
"""Statuses of an engine without this endpoint."""


class EngineResetter:
    def __init__(self, *, boot: str, engine: EnginePool) -> None:
        self._boot, self._engine = boot, engine

    async def reset(self, body: bytes) -> bytes:
        """Answer when the engine has forgotten its blocks, when it cannot, or after the operator's wait. Raises Refusal
        (400) for a malformed request."""
        try:
            request = ResetRequest.decode(body)
        except ContractError:
            raise bad_request(Reason.BAD_VALUE, "the body is no request to reset") from None
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        while True:
            outcome = await self._try(preempt=loop.time() - began_s >= IDLE_S)
            waited_s = loop.time() - began_s
            if outcome in (ResetOutcome.RESET, ResetOutcome.CANNOT) or waited_s >= request.wait_s:
                log.info("the engine was asked to empty its prefix cache", outcome=str(outcome))
                return EngineResetAnswer(self._boot, outcome).encode()
            await asyncio.sleep(min(LOOK_S, request.wait_s - waited_s))

    async def _try(self, *, preempt: bool) -> ResetOutcome:
        answer = WholeAnswer(asyncio.get_running_loop())
        path = f"{ENGINE_RESET_PATH}?{PREEMPT}" if preempt else ENGINE_RESET_PATH
        answer.call = self._engine.send(request_bytes(path, {}), answer)
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                status, data = await answer.future
        except TimeoutError:
            return ResetOutcome.AWAY
        finally:
            answer.drop()
        if status in CANNOT:
            return ResetOutcome.CANNOT
        try:
            success = judged(status, data).get("success")
        except (EngineAwayError, RefusedError):
            return ResetOutcome.AWAY
        return ResetOutcome.RESET if success is True else ResetOutcome.BUSY
