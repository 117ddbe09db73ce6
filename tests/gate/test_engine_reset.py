"""The engine's prefix cache at the operator's port: it is emptied while idle, else requests that run make way."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from kvstrata.contract.messages.engine_reset import RESET_PATH, EngineResetAnswer, ResetOutcome, ResetRequest
from kvstrata.contract.messages.pod_state import ACK_TOKEN_HEADER
from kvstrata_sidecar.connector.reset import ENGINE_RESET_PATH, PREEMPT, EngineReset
from kvstrata_sidecar.gate.control import engine_calls as enginereset

from . import pki
from .stand_ins import EngineRequest, whole
from .test_rendering import posted, say
from .world import World

BODY = ResetRequest().encode()


def answering(gate: World, *answers: tuple[int, object]) -> None:
    """Have the engine answer so, one after another, and with the last one from then on."""
    left = list(answers)

    async def answer(request: EngineRequest, writer: asyncio.StreamWriter) -> None:
        status, said = left.pop(0) if len(left) > 1 else left[0]
        await whole(writer, status, json.dumps(said).encode())

    gate.engine.handler = answer


async def reset(gate: World, wait_s: float = 0.0) -> ResetOutcome:
    answer = await say(gate, posted(RESET_PATH, ResetRequest(round(1000 * wait_s)).encode()))
    assert answer.status == 200, answer.body
    assert answer.headers[ACK_TOKEN_HEADER.lower()] == "the-pods-token"
    said = EngineResetAnswer.decode(answer.body)
    assert said.gate_boot == gate.gate.boot
    return said.outcome


async def test_only_the_operators_certificate_may_ask(gate: World) -> None:
    answering(gate, (200, {"success": True}))
    for name in ("kvstrata-gate", "kvstrata-operator.evil", "acme"):
        other = gate.authority.issue(gate.directory / name, name, server=False)
        assert (await say(gate, posted(RESET_PATH, BODY), pki.client_context(other, present=True))).status == 403
    assert gate.engine.requests == []
    assert await reset(gate) is ResetOutcome.RESET


@pytest.mark.parametrize("path", [RESET_PATH, ENGINE_RESET_PATH])
async def test_tenants_reach_neither_the_gates_path_nor_the_engines(gate: World, path: str) -> None:
    assert (await gate.ask(posted(path, BODY))).status in (401, 404)
    assert (await gate.ask(posted(path, BODY), "health")).status in (404, 413)
    assert gate.engine.requests == []


@pytest.mark.parametrize("body", [b"", b"{}", b"\xff", BODY.replace(b":0", b":-1"), ResetRequest(9000).encode()[:-2]])
async def test_a_body_that_is_no_request_reaches_no_engine(gate: World, body: bytes) -> None:
    assert (await say(gate, posted(RESET_PATH, body))).status == 400
    assert gate.engine.requests == []


async def test_an_engine_that_is_busy_is_asked_until_it_is_idle(gate: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enginereset, "IDLE_S", 3600.0)
    answering(gate, (200, {"success": False}), (200, {"success": False}), (200, {"success": True}))
    assert await reset(gate, wait_s=60) is ResetOutcome.RESET
    assert [request.path for request in gate.engine.requests] == [ENGINE_RESET_PATH] * 3


async def test_requests_that_run_on_make_way_after_a_while(gate: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enginereset, "IDLE_S", 0.3)

    async def answer(request: EngineRequest, writer: asyncio.StreamWriter) -> None:
        await whole(writer, 200, json.dumps({"success": request.path.endswith(PREEMPT)}).encode())

    gate.engine.handler = answer
    assert await reset(gate, wait_s=60) is ResetOutcome.RESET
    first, *_, last = [request.path for request in gate.engine.requests]
    assert (first, last) == (ENGINE_RESET_PATH, f"{ENGINE_RESET_PATH}?{PREEMPT}")


@pytest.mark.parametrize(
    ("status", "said", "outcome"),
    [
        (200, {"success": False}, ResetOutcome.BUSY),
        (200, {}, ResetOutcome.BUSY),
        (200, {"success": 1}, ResetOutcome.BUSY),
        (200, [], ResetOutcome.AWAY),
        (500, {"success": True}, ResetOutcome.AWAY),
        (503, {}, ResetOutcome.AWAY),
        (404, {"detail": "Not Found"}, ResetOutcome.CANNOT),
        (405, {}, ResetOutcome.CANNOT),
        (501, {}, ResetOutcome.CANNOT),
    ],
)
async def test_only_an_engine_that_says_so_was_reset(
    gate: World, status: int, said: object, outcome: ResetOutcome
) -> None:
    answering(gate, (status, said))
    assert await reset(gate) is outcome


async def test_an_engine_that_is_gone_is_away(gate: World) -> None:
    await gate.engine.stop()
    assert await reset(gate, wait_s=0.3) is ResetOutcome.AWAY


class Engine:
    """vLLM's client of its engine, as the middleware finds it."""

    def __init__(self, said: object) -> None:
        self.said, self.asked = said, list[bool]()

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> object:
        """Note how it was asked."""
        self.asked.append(reset_running_requests)
        if isinstance(self.said, Exception):
            raise self.said
        return self.said


class Application:
    """What the middleware is around. `state` is as Starlette's."""

    def __init__(self, engine: object = None) -> None:
        self.state = type("State", (), {"engine_client": engine})()
        self.passed: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Note what came through."""
        self.passed.append(scope.get("path", scope["type"]))


async def asked(app: Application, path: str = ENGINE_RESET_PATH, method: str = "POST", query: str = "") -> Any:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("its body says nothing")

    scope = {"type": "http", "path": path, "method": method, "query_string": query.encode(), "app": app}
    await EngineReset(app)(scope, receive, send)
    return (sent[0]["status"], json.loads(sent[1]["body"])) if sent else None


async def test_in_the_engine_every_other_path_passes_through() -> None:
    app = Application(Engine(True))
    for path in ("/v1/completions", "/kvstrata", ENGINE_RESET_PATH + "/", "/reset_prefix_cache"):
        assert await asked(app, path) is None
    await EngineReset(app)({"type": "lifespan"}, None, None)  # type: ignore[arg-type]
    assert app.passed == ["/v1/completions", "/kvstrata", ENGINE_RESET_PATH + "/", "/reset_prefix_cache", "lifespan"]


@pytest.mark.parametrize("query", ["", PREEMPT])
@pytest.mark.parametrize("said", [True, False])
async def test_in_the_engine_requests_make_way_only_when_told_to(query: str, said: bool) -> None:
    engine = Engine(said)
    assert await asked(Application(engine), query=query) == (200, {"success": said})
    assert engine.asked == [query == PREEMPT]


@pytest.mark.parametrize(("said", "status"), [(None, 501), (RuntimeError("blocks are held"), 503), (TypeError(), 501)])
async def test_an_engine_that_does_not_say_that_it_forgot_is_not_believed_to_have(said: object, status: int) -> None:
    found, body = await asked(Application(Engine(said)))
    assert found == status
    assert "success" not in body


async def test_an_engine_without_such_a_cache_says_that_it_cannot() -> None:
    assert (await asked(Application()))[0] == 501
    assert (await asked(Application(Engine(True)), method="GET"))[0] == 405
