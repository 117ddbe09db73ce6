"""Acknowledging a revision: what it waits for, and what loses it."""

from __future__ import annotations

import asyncio
import json

import pytest

from kvstrata.contract.policy.bundle import Rules
from kvstrata.contract.policy.cache_view import CacheView
from kvstrata.objects.pod.engine import DRAIN_SCRIPT
from kvstrata_sidecar.gate.main import log_unexpected

from .stand_ins import EngineRequest, chunk, event, plain_answer, stream_head
from .world import GLOBEX, World, chat, entry, keyspace, post, until


class Held:
    """An engine whose answers wait, and then come by `release`."""

    def __init__(self) -> None:
        self.released = asyncio.Event()

    async def __call__(self, request: EngineRequest, writer: asyncio.StreamWriter) -> None:
        if request.json.get("stream"):
            await stream_head(writer)
            await event(writer, {"choices": [{"delta": {"content": "x"}}]})
            await self.released.wait()
            await chunk(writer, b"data: [DONE]\n\n")
            await chunk(writer, b"")
            return
        await self.released.wait()
        await plain_answer(request, writer)


async def test_a_revision_is_not_acknowledged_before_the_adapter_has(gate: World) -> None:
    gate.adapter.gate.clear()
    revision = await gate.publish([entry("acme", "acme-2")])
    await until(lambda: gate.adapter.applied[-1] == revision)
    assert gate.gate.enforcement.acked == revision - 1
    assert gate.gate.state().seen == revision
    gate.adapter.gate.set()
    await gate.acked(revision)


async def test_new_requests_get_the_new_keyspace_before_anyone_acknowledged(gate: World) -> None:
    gate.adapter.gate.clear()
    revision = await gate.publish([entry("acme", "acme-2")])
    await until(lambda: gate.gate.enforcement.revision == revision)
    await gate.ask(post("/v1/completions", {"prompt": "a"}))
    assert gate.engine.requests[-1].json["cache_salt"] == keyspace("acme-2")
    gate.adapter.gate.set()


async def test_the_cache_server_gets_the_policy_before_it_is_asked(gate: World) -> None:
    revision = await gate.publish([entry("acme", "acme-2"), entry("globex", suspended=True)])
    await until(lambda: gate.adapter.applied[-1] == revision)
    view = CacheView.decode((gate.directory / "policy" / "policy.json").read_bytes())
    assert view.revision == revision
    assert set(view.keyspaces) == {keyspace("acme-2")}


async def test_a_request_on_a_removed_keyspace_may_end_and_holds_the_acknowledgement(gate: World) -> None:
    gate.engine.handler = held = Held()
    running = asyncio.create_task(gate.ask(post("/v1/completions", {"prompt": "a"})))
    await until(lambda: gate.engine.requests)
    revision = await gate.publish([entry("acme", "acme-2"), entry("globex")], Rules(drain_timeout_s=60))
    await until(lambda: gate.adapter.revision == revision)
    await asyncio.sleep(0.1)
    assert gate.gate.enforcement.acked == revision - 1
    held.released.set()
    assert (await running).status == 200
    await gate.acked(revision)


async def test_a_request_that_outlives_the_drain_timeout_is_told_and_ended(gate: World) -> None:
    gate.engine.handler = Held()
    running = asyncio.create_task(gate.ask(post("/v1/completions", {"prompt": "a"})))
    await until(lambda: gate.engine.requests)
    revision = await gate.publish([entry("acme", "acme-2"), entry("globex")], Rules(drain_timeout_s=0))
    answer = await running
    assert (answer.status, answer.error["code"], answer.headers["retry-after"]) == (503, "policy_changed", "0")
    await gate.acked(revision)


async def test_a_stream_that_outlives_the_drain_timeout_is_cut_with_a_reason(gate: World) -> None:
    gate.engine.handler = Held()
    running = asyncio.create_task(gate.ask(post("/v1/chat/completions", chat(stream=True))))
    await until(lambda: gate.engine.requests)
    await asyncio.sleep(0.05)
    revision = await gate.publish([entry("globex")], Rules(drain_timeout_s=0))
    answer = await running
    assert not answer.complete
    assert b"policy_changed" in answer.body
    await gate.acked(revision)


async def test_requests_on_kept_keyspaces_are_left_alone(gate: World) -> None:
    gate.engine.handler = held = Held()
    running = asyncio.create_task(gate.ask(post("/v1/completions", {"prompt": "a"}, GLOBEX)))
    await until(lambda: gate.engine.requests)
    revision = await gate.publish([entry("acme", "acme-2"), entry("globex")], Rules(drain_timeout_s=0))
    await gate.acked(revision)
    held.released.set()
    assert (await running).status == 200


async def test_leaving_a_group_ends_requests_even_while_its_keyspace_lives_on(gate: World) -> None:
    await gate.acked(await gate.publish([entry("acme", "group"), entry("globex", "group")]))
    gate.engine.handler = Held()
    leaver = asyncio.create_task(gate.ask(post("/v1/completions", {"prompt": "a"})))
    await until(lambda: gate.engine.requests)
    revision = await gate.publish([entry("acme", "own"), entry("globex", "group")], Rules(drain_timeout_s=0))
    assert (await leaver).error["code"] == "policy_changed"
    await gate.acked(revision)


async def test_later_revisions_do_not_free_an_earlier_one_from_its_drain(gate: World) -> None:
    gate.engine.handler = held = Held()
    running = asyncio.create_task(gate.ask(post("/v1/completions", {"prompt": "a"})))
    await until(lambda: gate.engine.requests)
    first = await gate.publish([entry("acme", "acme-2"), entry("globex")], Rules(drain_timeout_s=60))
    await until(lambda: gate.adapter.revision == first)
    second = await gate.publish([entry("acme", "acme-3"), entry("globex")])
    await until(lambda: gate.adapter.revision == second)
    assert gate.gate.enforcement.acked == first - 1
    held.released.set()
    await running
    await gate.acked(second)


async def test_a_new_drain_does_not_hold_back_what_came_before_it(gate: World) -> None:
    first = await gate.publish([entry("acme", "acme-2"), entry("globex")])
    await gate.acked(first)
    gate.engine.handler = held = Held()
    running = asyncio.create_task(gate.ask(post("/v1/completions", {"prompt": "a"})))
    await until(lambda: gate.engine.requests)
    second = await gate.publish([entry("acme", "acme-3"), entry("globex")], Rules(drain_timeout_s=60))
    await until(lambda: gate.adapter.revision == second)
    assert gate.gate.enforcement.acked == first
    held.released.set()
    await running


async def test_a_cache_server_that_restarts_has_to_apply_the_revision_again(gate: World) -> None:
    revision = gate.gate.enforcement.acked
    assert gate.gate.state().cache_boot == "boot-1"
    await gate.adapter.stop()
    await until(lambda: gate.gate.state().cache_boot == "")
    assert "cache server" in gate.gate.state().problem
    gate.adapter.applied.clear()
    await gate.adapter.restart("boot-2")
    await until(lambda: gate.gate.state().cache_boot == "boot-2")
    assert gate.adapter.applied == [revision]
    assert gate.gate.state().acked == revision


async def test_while_the_cache_server_is_away_requests_are_answered_and_nothing_new_is_acknowledged(
    gate: World,
) -> None:
    await gate.adapter.stop()
    await until(lambda: gate.gate.state().cache_boot == "")
    revision = await gate.publish([entry("acme", "acme-2")])
    await until(lambda: gate.gate.enforcement.revision == revision)
    assert (await gate.ask(post("/v1/completions", {"prompt": "a"}))).status == 200
    assert (await gate.get("/readyz")).status == 200
    assert gate.gate.state().acked == revision - 1


async def test_ready_needs_a_first_acknowledgement_and_a_healthy_engine(world: World) -> None:
    world.adapter.gate.clear()
    world.engine.healthy = False
    await world.publish([entry("acme")])
    async with world.started():
        await until(lambda: world.adapter.applied)
        answer = await world.get("/readyz")
        assert (answer.status, b"acknowledged" in answer.body) == (503, True)
        world.adapter.gate.set()
        await world.acked(1)
        answer = await world.get("/readyz")
        assert (answer.status, b"engine" in answer.body) == (503, True)
        world.engine.healthy = True
        await until(lambda: world.gate.engine_ready)
        assert (await world.get("/readyz")).status == 200


async def test_the_engines_prestop_waits_for_what_is_in_flight(gate: World) -> None:
    gate.engine.handler = held = Held()
    running = asyncio.create_task(gate.ask(post("/v1/completions", {"prompt": "a"})))
    await until(lambda: gate.engine.requests)
    directory = gate.engine.socket_path.parent
    (directory / "draining").touch()
    await until(lambda: gate.gate.not_ready() == "draining")
    assert (await gate.get("/readyz")).status == 503
    await asyncio.sleep(0.4)
    assert not (directory / "drained").exists()
    held.released.set()
    late = await gate.ask(post("/v1/completions", {"prompt": "late"}))
    assert (late.status, late.headers["connection"]) == (200, "close")
    assert (await running).status == 200
    await until((directory / "drained").exists)


async def test_an_engine_that_comes_back_ends_the_drain(gate: World) -> None:
    directory = gate.engine.socket_path.parent
    (directory / "draining").touch()
    await until((directory / "drained").exists)
    await asyncio.sleep(1.5)
    assert gate.gate.not_ready() == "draining"
    await gate.engine.stop()
    await gate.engine.start()
    await until(lambda: not gate.gate.not_ready())
    assert not (directory / "draining").exists()
    assert not (directory / "drained").exists()


async def test_the_engines_prestop_script_and_the_gate_understand_each_other(gate: World) -> None:
    directory = str(gate.engine.socket_path.parent)
    process = await asyncio.create_subprocess_exec("python3", "-S", "-c", DRAIN_SCRIPT, directory, "120")
    assert await asyncio.wait_for(process.wait(), 60) == 0
    assert (gate.engine.socket_path.parent / "drained").exists()
    assert gate.gate.not_ready() == "draining"


async def test_an_adapter_that_refuses_is_asked_again_on_the_same_link(gate: World) -> None:
    gate.adapter.refusals = 2
    revision = await gate.publish([entry("acme", "acme-2")])
    await until(lambda: gate.gate.link.problem)
    assert "not ended" in gate.gate.state().problem
    assert gate.gate.state().cache_boot == "boot-1"
    assert gate.gate.enforcement.acked == revision - 1
    await gate.acked(revision)
    assert gate.adapter.links == 1
    assert gate.gate.state().problem == ""


@pytest.mark.parametrize(("revision", "term"), [(1, 1), (2, 0)], ids=["older revision", "older term"])
async def test_an_adapter_that_acknowledges_something_older_is_not_believed(
    gate: World, revision: int, term: int
) -> None:
    gate.adapter.acknowledges, gate.adapter.acknowledged_term = revision, term
    await gate.publish([entry("acme", "acme-2")])
    await until(lambda: gate.adapter.links > 1)
    assert gate.gate.enforcement.acked == 1
    assert gate.gate.state().cache_boot == ""


async def test_an_adapter_that_read_a_newer_policy_is_taken_at_its_word(gate: World) -> None:
    gate.adapter.gate.clear()
    first = await gate.publish([entry("acme", "acme-2")])
    await until(lambda: gate.adapter.applied[-1] == first)
    second = await gate.publish([entry("acme", "acme-3")])
    await until(lambda: gate.gate.enforcement.revision == second)
    gate.adapter.acknowledges = second
    gate.adapter.gate.set()
    await gate.acked(second)
    assert gate.adapter.applied[-1] == first
    assert gate.adapter.links == 1


async def test_a_stopping_gate_finishes_what_is_in_flight(world: World) -> None:
    await world.publish([entry("acme")])
    world.engine.handler = held = Held()
    async with world.started(shutdown_s=60.0):
        await world.acked(1)
        await until(lambda: len(world.gate.keys.ring) == 3)
        running = asyncio.create_task(world.ask(post("/v1/completions", {"prompt": "a"})))
        await until(lambda: world.engine.requests)
        world.gate.stop()
        await until(lambda: world.gate.not_ready() == "draining")
        assert (await world.get("/readyz")).status == 503
        held.released.set()
        assert (await running).status == 200


async def test_no_keyspace_and_no_key_is_ever_logged(gate: World, capfd) -> None:  # type: ignore[no-untyped-def]
    await gate.ask(post("/v1/completions", {"prompt": "a very secret prompt"}))
    await gate.ask(post("/v1/completions", {"prompt": "x", "priority": 1}, "wrong-key"))
    await gate.acked(await gate.publish([entry("acme", "acme-2")]))
    lines = capfd.readouterr().err.splitlines()
    assert lines
    for line in lines:
        assert json.loads(line)["component"] == "gate"
        for secret in (keyspace("acme"), keyspace("acme-2"), "secret prompt", "key-of-acme", "wrong-key"):
            assert secret not in line


async def test_an_unexpected_error_is_logged_without_its_words(capfd) -> None:  # type: ignore[no-untyped-def]
    try:
        raise ValueError("the prompt of a tenant")
    except ValueError as error:
        log_unexpected(asyncio.get_running_loop(), {"message": "a callback failed", "exception": error})
    (line,) = capfd.readouterr().err.splitlines()
    logged = json.loads(line)
    assert (logged["error"], logged["what"]) == ("ValueError", "a callback failed")
    assert logged["places"][0].startswith("test_enforcement.py:")
    assert "prompt" not in line


async def test_an_unexpected_error_costs_one_request_only(gate: World) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("a defect")

    gate.gate.tenants.send = fail  # type: ignore[method-assign]
    connection = await gate.connect()
    await connection.send(post("/v1/completions", {"prompt": "a"}))
    assert await connection.closed()
    del gate.gate.tenants.send
    assert not gate.gate.enforcement.in_flight
    assert gate.gate.tenant_server.buffered.total == 0
    assert (await gate.ask(post("/v1/completions", {"prompt": "a"}))).status == 200
