"""The gate's process: exit codes, listeners, limits, and what is logged of what goes wrong."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import uvloop

from kvstrata_sidecar.gate import main as process
from kvstrata_sidecar.gate.settings import Settings

from .test_settings import REQUIRED
from .world import KEYS, World, entry, post, until


def test_bad_settings_end_it_with_2_and_their_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["kvstrata-gate"])
    for name in REQUIRED:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as end:
        process.main()
    assert end.value.code == 2
    line = json.loads(capsys.readouterr().err)
    assert (line["level"], line["message"]) == ("error", "bad settings")
    assert line["problem"].startswith("not set: POD_NAME")


def test_it_runs_with_its_settings_on_the_fast_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[Settings, Any]] = []

    async def run(settings: Settings) -> None:
        ran.append((settings, asyncio.get_running_loop()))

    monkeypatch.setattr("sys.argv", ["kvstrata-gate", "--pod-name", "from-a-flag"])
    for name, value in REQUIRED.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(process, "_run", run)
    process.main()
    ((settings, loop),) = ran
    assert (settings.pod_name, settings.pod_uid) == ("from-a-flag", "uid-1")
    assert isinstance(loop, uvloop.Loop)


def test_what_is_unexpected_is_logged_by_type_and_place_and_not_by_its_text(
    capsys: pytest.CaptureFixture[str],
) -> None:
    try:
        raise ValueError("a prompt")
    except ValueError as error:
        process.log_unexpected(None, {"message": "it failed", "exception": error})  # type: ignore[arg-type]
    process.log_unexpected(None, {"message": "alone"})  # type: ignore[arg-type]
    told = capsys.readouterr().err
    assert "a prompt" not in told
    first, second = (json.loads(line) for line in told.splitlines())
    assert (first["level"], first["message"], first["what"], first["error"]) == (
        "warning", "unexpected", "it failed", "ValueError",
    )  # fmt: skip
    assert [place.split(":")[0] for place in first["places"]] == [Path(__file__).name]
    assert (second["what"], second["places"]) == ("alone", [])


@pytest.mark.parametrize("port", ["https", "http", "control"])
async def test_a_port_of_minus_one_is_not_opened(world: World, port: str) -> None:
    async with world.started(**{f"{port}_port": -1}):
        assert set(world.gate.ports) == {"https", "http", "control", "health"} - {port}
        assert (await world.get("/livez")).status == 200


async def test_limits_are_those_of_the_settings(world: World) -> None:
    async with world.started(max_connections=7, max_body_bytes=900, metrics_tenants=3, shutdown_s=1.0):
        limits = world.gate.tenant_server.limits
        assert (limits.connections, limits.body_bytes) == (7, 900)
        assert world.gate.metrics.max_tenants == 3
        await until(lambda: len(world.gate.keys.ring) == 3)
        answer = await world.ask(post("/v1/completions", {"prompt": "x" * 1000}))
        assert (answer.status, answer.error["code"]) == (413, "too_large")
        assert "900 bytes" in answer.error["message"]


async def test_it_says_step_by_step_what_is_missing(world: World) -> None:
    world.engine.healthy = False
    world.adapter.gate.clear()
    async with world.started():
        gate = world.gate
        await until(lambda: "no policy: the bundle Secret" in gate.not_ready())
        await world.publish([entry("acme")])
        await until(lambda: gate.not_ready().startswith("the first revision is not acknowledged: "))
        world.adapter.gate.set()
        await until(lambda: gate.not_ready() == "the engine is not ready")
        world.engine.healthy = True
        await until(lambda: gate.not_ready() == "")
        gate.stop()
        assert gate.not_ready() == "draining"


async def test_without_a_list_of_api_keys_it_is_not_ready_and_with_an_empty_one_it_is(world: World) -> None:
    await world.publish([entry("acme")])
    await world.api.put(KEYS, {"keys.json": b"{"})
    async with world.started():
        await until(lambda: world.gate.not_ready().startswith("no API keys: the API keys cannot be read"))
        await world.publish_keys()
        await until(lambda: world.gate.not_ready() == "")
        assert len(world.gate.keys.ring) == 0


async def test_a_request_in_flight_ends_before_the_process_does_or_after_its_time(world: World) -> None:
    release = asyncio.Event()

    async def slow(request: Any, writer: asyncio.StreamWriter) -> None:
        from .stand_ins import plain_answer

        await release.wait()
        await plain_answer(request, writer)

    world.engine.handler = slow
    await world.publish([entry("acme")])
    async with world.started(shutdown_s=20.0):
        await world.acked(1)
        await until(lambda: len(world.gate.keys.ring) == 3)
        running = asyncio.create_task(world.ask(post("/v1/completions", {"prompt": "a"})))
        await until(lambda: world.engine.requests)
        world.gate.stop()
        await asyncio.sleep(0.3)
        assert not running.done()
        release.set()
        answer = await asyncio.wait_for(running, 20)
    assert (answer.status, answer.headers["connection"]) == (200, "close")
    release.clear()
    async with world.started(shutdown_s=0.3):
        await world.acked(1)
        await until(lambda: len(world.gate.keys.ring) == 3)
        running = asyncio.create_task(world.ask(post("/v1/completions", {"prompt": "a"})))
        await until(lambda: len(world.engine.requests) == 2)
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await asyncio.wait_for(running, 20)


async def test_a_part_that_fails_ends_the_process(world: World) -> None:
    async def fails() -> None:
        raise RuntimeError("broken")

    async def ends() -> None:
        return

    for part, message in ((fails, "broken"), (ends, "ended")):
        gate = process.Gate(world.settings(), asyncio.get_running_loop())
        gate.pools.run = part  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match=message):
            await asyncio.wait_for(gate.run(), 20)
