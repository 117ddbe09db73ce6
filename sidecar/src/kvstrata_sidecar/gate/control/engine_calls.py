"""Whole answers of the engine to the gate's own requests. Its error texts are dropped: they quote bodies."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from kvstrata_sidecar.gate.http.engine_client import Call, EnginePool
from kvstrata_sidecar.gate.rendering.render import EngineAwayError, RefusedError, Tokenized

MAX_ANSWER_BYTES = 8 * 1024 * 1024
TOKENIZE_TIMEOUT_S = 60.0
REFUSALS = range(400, 500)
OVERLOADED = 429


class EngineCalls:
    def __init__(self, engine: EnginePool, model: str, random_salt: Callable[[], str]) -> None:
        self._engine = engine
        self._model = model
        self._random_salt = random_salt

    async def tokenize(self, question: Mapping[str, Any]) -> Tokenized:
        """Return the tokens of a prompt or a chat. Raises RefusedError or EngineAwayError."""
        answer = await self._ask("/tokenize", dict(question))
        try:
            return Tokenized(array("I", answer["tokens"]), int(answer["max_model_len"]))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise EngineAwayError("the engine's tokens cannot be read") from error

    async def detokenize(self, ids: array[int]) -> str:
        """Raises RefusedError or EngineAwayError."""
        return str((await self._ask("/detokenize", {"tokens": ids.tolist()})).get("prompt", ""))

    async def check_token(self, token: int) -> None:
        """Raises RefusedError if the vocabulary lacks this token, or EngineAwayError. `/detokenize` takes any number,
        so this is a request of one token, under a random salt."""
        salt = self._random_salt()
        await self._ask("/v1/completions", {"prompt": [token], "max_tokens": 1, "cache_salt": salt})

    async def _ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = WholeAnswer(asyncio.get_running_loop())
        answer.call = self._engine.send(request_bytes(path, {**body, "model": self._model}), answer)
        try:
            async with asyncio.timeout(TOKENIZE_TIMEOUT_S):
                status, data = await answer.future
        except TimeoutError:
            raise EngineAwayError("the engine did not answer in time") from None
        finally:
            answer.drop()
        return judged(status, data)


def request_bytes(path: str, body: Mapping[str, Any]) -> bytes:
    data = orjson.dumps(body)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: engine\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


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


class WholeAnswer:
    """Collects an answer: `future` gives its status and body, status 0 if there was none. `aborted`: this side ended
    the call."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.call: Call | None = None
        self.aborted = False
        self.future: asyncio.Future[tuple[int, bytes]] = loop.create_future()
        self._status = 0
        self._body = bytearray()

    def engine_head(self, status: int, content_type: bytes, length: int | None) -> None:  # noqa: ARG002
        self._status = status

    def engine_body(self, data: bytes, last: bool) -> None:
        self._body += data
        if len(self._body) > MAX_ANSWER_BYTES:
            self._status, self._body = 0, bytearray()
            self.drop()
            last = True
        if last:
            self._end(self._status)

    def writer_of_events(self) -> None:
        return

    def engine_failed(self, unreachable: bool) -> None:  # noqa: ARG002
        self._end(0)

    def abort(self) -> None:
        """End the call without an answer: the engine stops computing."""
        self.aborted = self.aborted or not self.future.done()
        self.drop()
        self._end(0)

    def drop(self) -> None:
        if self.call is not None and not self.future.done():
            self.call.cancel()
        self.call = None

    def _end(self, status: int) -> None:
        if not self.future.done():
            self.future.set_result((status, bytes(self._body)))
