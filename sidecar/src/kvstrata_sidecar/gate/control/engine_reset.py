"""The engine's own memory, as the operator asks: its prefix cache is emptied, for all tenants.

An engine forgets its blocks only while none is held. A pod that is never idle would never be done, so after a while
requests that run let go of theirs: the engine puts them back into its queue and computes them anew, which their callers
notice as a pause.
"""

from __future__ import annotations

import asyncio

from kvstrata.contract import ContractError
from kvstrata.contract.messages.engine_reset import EngineSaid, ResetOutcome, ResetRequest
from kvstrata_sidecar.connector.reset import ENGINE_RESET_PATH, PREEMPT
from kvstrata_sidecar.gate import log
from kvstrata_sidecar.gate.control.engine_calls import WholeAnswer, judged, request_bytes
from kvstrata_sidecar.gate.http.engine_client import EnginePool
from kvstrata_sidecar.gate.http.errors import Reason, bad_request
from kvstrata_sidecar.gate.rendering.render import EngineAwayError, RefusedError

LOOK_S = 0.25
"""How long until it is tried again, for as long as the operator waits."""

IDLE_S = 2.0
"""How long an engine is given to be idle by itself, before requests that run are computed anew."""

ANSWER_TIMEOUT_S = 30.0
CANNOT = frozenset({404, 405, 501})
"""What an engine answers that has no way to do it."""


class EngineResetter:
    """Answers the operator. `boot` is the gate's."""

    def __init__(self, *, boot: str, engine: EnginePool) -> None:
        self._boot, self._engine = boot, engine

    async def reset(self, body: bytes) -> bytes:
        """Answer when the engine has forgotten its blocks, when it cannot, or when the operator waited long enough.

        Raises Refusal: 400 for what is no request.
        """
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
                log.info("the engine was told to forget its blocks", outcome=str(outcome))
                return EngineSaid(self._boot, outcome).encode()
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
            said = judged(status, data).get("success")
        except (EngineAwayError, RefusedError):
            return ResetOutcome.AWAY
        return ResetOutcome.RESET if said is True else ResetOutcome.BUSY
