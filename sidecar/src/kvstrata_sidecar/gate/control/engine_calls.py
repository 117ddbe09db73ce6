"""Whole answers of the engine to the gate's own requests. Its error texts are dropped: they quote bodies."""

from __future__ import annotations

import asyncio
import struct
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson

from kvstrata.contract.messages.engine_reset import EngineResetAnswer, ResetOutcome, ResetRequest
from kvstrata_sidecar.connector.reset import ENGINE_RESET_PATH, PREEMPT
from kvstrata_sidecar.gate import log
from kvstrata_sidecar.gate.control.parts import Parts, until
from kvstrata_sidecar.gate.http.engine_client import WholeAnswer, post_head
from kvstrata_sidecar.gate.policy.grants import PoolSubject

TOKENIZE_TIMEOUT_S = 60.0
REFUSALS = range(400, 500)
OVERLOADED = 429
RESET_TIMEOUT_S = 30.0
LOOK_S = 0.25

IDLE_S = 2.0
"""How long an engine may become idle by itself, before running requests are recomputed."""


class RefusedError(Exception):
    """The engine refuses the request, and would again."""


class EngineAwayError(Exception):
    """The engine did not answer, or its answer is invalid."""


class AbortedError(EngineAwayError):
    """The request's keyspace left the policy, or the pod terminates."""


@dataclass(frozen=True, slots=True)
class Tokenized:
    """Token ids, and the engine's maximum for one request."""

    ids: array[int]
    max_model_tokens: int


class EngineCalls:
    """`abort_all` ends the requests under way that use a keyspace."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._running: set[WholeAnswer] = set()

    def abort_all(self) -> None:
        for answer in tuple(self._running):
            answer.abort()

    async def compute(
        self, path: str, body: Mapping[str, Any], subject: str | PoolSubject, salt: str, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """Return the answer to a request under a keyspace. Raises RefusedError, EngineAwayError or AbortedError. It
        drains like a tenant's: there is no await between the caller's decision on the keyspace and the admission."""
        parts = self._parts
        answer = WholeAnswer(asyncio.get_running_loop())
        sealed = {**body, "model": parts.model, "cache_salt": salt}
        answer.call = parts.engine.send(request_bytes(path, sealed), answer)
        parts.enforcement.admit(answer, subject, salt)
        self._running.add(answer)
        try:
            status, data = await answer.within(timeout_s)
        finally:
            self._running.discard(answer)
            parts.enforcement.release(answer)
        if answer.aborted:
            raise AbortedError
        return judged(status, data)

    async def tokenize(self, question: Mapping[str, Any]) -> Tokenized:
        """Return the tokens of a prompt or a chat. Raises RefusedError or EngineAwayError."""
        answer = await self._ask("/tokenize", dict(question))
        try:
            return Tokenized(array("I", answer["tokens"]), int(answer["max_model_len"]))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise EngineAwayError("the engine's tokens cannot be read") from error

    async def detokenize(self, ids: array[int]) -> str:
        return str((await self._ask("/detokenize", {"tokens": ids.tolist()})).get("prompt", ""))

    async def check_token(self, token: int) -> None:
        """Raises RefusedError if the vocabulary lacks this token: `/detokenize` takes any. Raises EngineAwayError."""
        salt = self._parts.random_salt()
        await self._ask("/v1/completions", {"prompt": [token], "max_tokens": 1, "cache_salt": salt})

    async def reset(self, request: ResetRequest) -> EngineResetAnswer:
        """Empty the engine's prefix cache, for all tenants. Answer when it has forgotten its blocks, when it cannot, or
        after the operator's wait. It forgets blocks only while none is in use, which a busy pod may never reach: after
        `IDLE_S` running requests are preempted, and their callers notice a pause."""
        final = (ResetOutcome.RESET, ResetOutcome.CANNOT)
        look = partial(self._try_reset, asyncio.get_running_loop().time() + IDLE_S)
        outcome = await until(lambda one: one in final, look, request.wait_s, LOOK_S)
        log.info("the engine was asked to empty its prefix cache", outcome=str(outcome))
        return EngineResetAnswer(self._parts.boot, outcome)

    async def _ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        payload = request_bytes(path, {**body, "model": self._parts.model})
        return judged(*await self._parts.engine.ask(payload, timeout_s=TOKENIZE_TIMEOUT_S))

    async def _try_reset(self, preempt_from_s: float) -> ResetOutcome:
        preempt = asyncio.get_running_loop().time() >= preempt_from_s
        path = f"{ENGINE_RESET_PATH}?{PREEMPT}" if preempt else ENGINE_RESET_PATH
        status, data = await self._parts.engine.ask(request_bytes(path, {}), timeout_s=RESET_TIMEOUT_S)
        if status in (404, 405, 501):  # an engine without this endpoint
            return ResetOutcome.CANNOT
        try:
            success = judged(status, data).get("success")
        except (EngineAwayError, RefusedError):
            return ResetOutcome.AWAY
        return ResetOutcome.RESET if success is True else ResetOutcome.BUSY


def request_bytes(path: str, body: Mapping[str, Any]) -> bytes:
    data = orjson.dumps(body)
    return post_head(path.encode(), len(data)) + data


def judged(status: int, data: bytes) -> dict[str, Any]:
    """Return the engine's answer. Raises RefusedError or EngineAwayError."""
    if status in REFUSALS and status != OVERLOADED:
        raise RefusedError
    if status != 200:
        raise EngineAwayError("the engine failed")
    try:
        value = orjson.loads(data)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise EngineAwayError("the engine's answer cannot be read")
    return value


def packed(ids: array[int]) -> bytes:
    """Return token ids as the cache server hashes them."""
    return struct.pack(f"<{len(ids)}I", *ids)
