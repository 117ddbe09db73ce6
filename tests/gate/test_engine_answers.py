"""Answers of the engine to the gate's own requests: collected whole, bounded, and judged."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from kvstrata_sidecar.gate.control.engine_calls import EngineAwayError, RefusedError, judged
from kvstrata_sidecar.gate.http.engine_client import WholeAnswer


class Call:
    """A call that only notes its end."""

    def __init__(self) -> None:
        self.cancelled = 0

    def cancel(self) -> None:
        self.cancelled += 1


def answering(max_bytes: int = 1000) -> tuple[WholeAnswer, Call]:
    answer, call = WholeAnswer(asyncio.get_running_loop(), max_bytes), Call()
    answer.call = call  # type: ignore[assignment]
    return answer, call


async def test_an_answer_is_whole_when_its_last_piece_came() -> None:
    answer, call = answering()
    answer.engine_head(200, b"application/json", None)
    answer.engine_body(b"{", False)
    assert not answer.future.done()
    answer.engine_body(b"}", True)
    assert await answer.future == (200, b"{}")
    answer.abort()
    assert (answer.aborted, call.cancelled) == (False, 0)


async def test_an_answer_that_is_too_large_counts_as_none() -> None:
    for size, told in ((4, (200, b"xxxx")), (5, (0, b""))):
        answer, call = answering(max_bytes=4)
        answer.engine_head(200, b"", None)
        answer.engine_body(b"xx", False)
        answer.engine_body(b"x" * (size - 2), size == 4)
        assert await answer.future == told
        assert call.cancelled == int(size == 5)


async def test_a_failed_or_aborted_call_has_no_answer() -> None:
    answer, call = answering()
    answer.engine_head(200, b"", None)
    answer.engine_failed(False)
    assert await answer.future == (0, b"")
    assert (answer.aborted, call.cancelled) == (False, 0)
    answer, call = answering()
    answer.abort()
    answer.abort()
    assert await answer.future == (0, b"")
    assert (answer.aborted, call.cancelled, answer.call) == (True, 1, None)


async def test_a_call_whose_answer_is_not_awaited_any_more_is_ended() -> None:
    answer, call = answering()
    waiting = asyncio.ensure_future(answer.future)
    waiting.cancel()
    answer.drop()
    assert call.cancelled == 1


@pytest.mark.parametrize("status", [400, 404, 413, 422])
def test_a_refusal_stands(status: int) -> None:
    with pytest.raises(RefusedError):
        judged(status, b"{}")


@pytest.mark.parametrize(
    ("status", "data"), [(0, b""), (429, b"{}"), (500, b"{}"), (503, b"{}"), (200, b""), (200, b"[]"), (200, b"null")]
)
def test_any_other_failure_may_pass(status: int, data: bytes) -> None:
    with pytest.raises(EngineAwayError):
        judged(status, data)


def test_an_answer_is_an_object() -> None:
    value: dict[str, Any] = {"a": [1]}
    assert judged(200, json.dumps(value).encode()) == value
