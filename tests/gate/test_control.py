"""The operator's port: who may ask, and when the answer comes."""

from __future__ import annotations

import asyncio
import ssl
import time
from typing import Any

import pytest

from kvstrata.contract.messages.adapter import TierState
from kvstrata.contract.messages.pod_state import PodState
from kvstrata.contract.wire import digest_bytes

from . import pki
from .world import MODEL, Answer, Connection, World, entry, post, until


async def poll(
    world: World, after: int, wait_s: float, *, tag: str = "", connection: Connection | None = None
) -> Answer:
    used = connection or await world.connect("control", pki.client_context(world.operator_tls, present=True))
    condition = f"If-None-Match: {tag}\r\n" if tag else ""
    await used.send(f"GET /v1/state?after={after}&wait={wait_s} HTTP/1.1\r\nHost: g\r\n{condition}\r\n".encode())
    answer = await asyncio.wait_for(used.answer(), wait_s + 20)
    if connection is None:
        used.close()
    return answer


async def waiting_poll(world: World) -> asyncio.Task[Answer]:
    """Return a poll that has reached the gate, which has nothing new to tell."""
    polled = asyncio.create_task(poll(world, 1, 60))
    await until(lambda: world.gate.control._polls)
    return polled


async def test_the_operator_gets_the_state_and_the_pods_token(gate: World) -> None:
    answer = await poll(gate, 0, 30)
    state = PodState.decode(answer.body)
    assert answer.headers["kvstrata-ack-token"] == "the-pods-token"
    assert (state.pod, state.pod_uid, state.namespace, state.model) == ("pod-1", "pod-uid-1", "ns", MODEL)
    assert (state.acked, state.seen, state.term, state.fresh, state.engine_ready) == (1, 1, 1, True, True)
    assert state.cache_boot == "boot-1"
    assert state.gate_boot == gate.gate.boot
    assert state.problem == ""
    assert [tier.name for tier in state.tiers] == ["shared"]


async def test_the_state_tells_what_the_pod_serves_under_also_when_the_api_server_went_back(gate: World) -> None:
    first = gate.root
    await gate.publish([entry("acme", "acme-2")])
    await gate.acked(2)
    held = gate.root
    gate.root = first
    await gate.publish([entry("acme", "acme-2"), entry("globex")], revision=2)
    await until(lambda: "went back" in gate.gate.bundles.problem)
    state = PodState.decode((await poll(gate, 0, 30)).body)
    assert (state.revision, state.term, state.model_uid) == (2, 1, "model-uid")
    assert state.root == digest_bytes(held.encode()) != digest_bytes(gate.root.encode())


async def test_a_poll_returns_when_the_next_revision_is_acknowledged(gate: World) -> None:
    waiting = await waiting_poll(gate)
    assert not waiting.done()
    await gate.publish([entry("acme", "acme-2")])
    state = PodState.decode((await asyncio.wait_for(waiting, 20)).body)
    if state.acked == 1:  # told of `seen` first
        state = PodState.decode((await poll(gate, 1, 60)).body)
    assert state.acked == 2


async def test_a_poll_returns_after_its_wait(gate: World) -> None:
    begun = time.monotonic()
    state = PodState.decode((await poll(gate, 1, 1)).body)
    assert 0.9 < time.monotonic() - begun < 10
    assert state.acked == 1


async def test_a_poll_returns_when_the_cache_server_goes(gate: World) -> None:
    waiting = await waiting_poll(gate)
    await gate.adapter.stop()
    assert PodState.decode((await asyncio.wait_for(waiting, 20)).body).cache_boot == ""


async def test_a_poll_returns_when_a_breaker_opens(gate: World) -> None:
    waiting = await waiting_poll(gate)
    gate.adapter.breaker = "open"
    assert PodState.decode((await asyncio.wait_for(waiting, 20)).body).tiers[0].breaker == "open"


async def test_what_changed_between_two_polls_is_told_at_once(gate: World) -> None:
    first = await poll(gate, 0, 0)
    gate.adapter.breaker = "open"
    await until(lambda: gate.gate.link.state.tiers[0].breaker == "open")
    begun = time.monotonic()
    second = await poll(gate, 1, 30, tag=first.headers["etag"])
    assert time.monotonic() - begun < 10
    assert PodState.decode(second.body).tiers[0].breaker == "open"


@pytest.mark.parametrize("said", [{"encrypted": True}, {"keyless": 1}, {"capacity_bytes": 1 << 20}])
async def test_what_a_tier_says_of_keys_and_capacity_is_told_at_once(gate: World, said: dict[str, Any]) -> None:
    heard: list[TierState] = []
    gate.gate.enforcement.changed.append(lambda: heard.extend(gate.gate.link.state.tiers))
    first = await poll(gate, 0, 0)
    gate.adapter.tier = said
    await until(lambda: heard != [])
    assert heard == [TierState("shared", "Redis", "closed", **said)]
    second = await poll(gate, 1, 0)
    assert PodState.decode(second.body).tiers == tuple(heard)
    assert second.headers["etag"] != first.headers["etag"]


async def test_one_connection_serves_poll_after_poll(gate: World) -> None:
    connection = await gate.connect("control", pki.client_context(gate.operator_tls, present=True))
    for _ in range(3):
        assert (await poll(gate, 0, 0, connection=connection)).status == 200
    connection.close()


async def test_a_stopping_gate_answers_those_who_wait(world: World) -> None:
    await world.publish([entry("acme")])
    async with world.started():
        await world.acked(1)
        await until(lambda: not world.gate.not_ready())
        waiting = await waiting_poll(world)
    assert (await asyncio.wait_for(waiting, 20)).status == 200


async def refused(world: World, context: ssl.SSLContext) -> int:
    """Return the status that a client with this context gets, 0 when it gets no answer at all."""
    try:
        connection = await world.connect("control", context)
        await connection.send(b"GET /v1/state?after=0&wait=0 HTTP/1.1\r\nHost: g\r\n\r\n")
        return (await asyncio.wait_for(connection.answer(), 20)).status
    except (ssl.SSLError, ConnectionError, asyncio.IncompleteReadError):
        return 0


async def test_a_client_without_certificate_gets_nothing(gate: World) -> None:
    assert await refused(gate, pki.client_context(gate.operator_tls, present=False)) == 0


async def test_a_certificate_of_another_authority_gets_nothing(gate: World) -> None:
    other = pki.Authority("another").issue(gate.directory / "other", "kvstrata-operator", server=False)
    context = pki.client_context(gate.operator_tls, present=False)
    context.load_cert_chain(other / "tls.crt", other / "tls.key")
    assert await refused(gate, context) == 0


async def test_another_name_of_the_same_authority_is_refused(gate: World) -> None:
    other = gate.authority.issue(gate.directory / "other", "kvstrata-gate", server=False)
    assert await refused(gate, pki.client_context(other, present=True)) == 403


async def test_a_gates_own_certificate_does_not_speak_for_the_operator(gate: World) -> None:
    assert await refused(gate, pki.client_context(gate.gate_tls, present=True)) in (0, 403)


async def test_without_the_pods_token_no_state_is_told(gate: World) -> None:
    (gate.directory / "ack-token").unlink()
    answer = await poll(gate, 0, 0)
    assert answer.status == 503
    assert b"pod-uid-1" not in answer.body


@pytest.mark.parametrize("target", ["/", "/v1/erase/", "/metrics", "/v1/state/"])
async def test_there_is_one_path(gate: World, target: str) -> None:
    connection = await gate.connect("control", pki.client_context(gate.operator_tls, present=True))
    await connection.send(f"GET {target} HTTP/1.1\r\nHost: g\r\n\r\n".encode())
    assert (await connection.answer()).status == 404
    connection.close()


async def test_tenants_are_served_over_tls_with_the_operators_certificate(gate: World) -> None:
    connection = await gate.connect("https", pki.client_context(gate.gate_tls, present=False))
    await connection.send(post("/v1/completions", {"prompt": "a"}))
    assert (await connection.answer()).status == 200
    connection.close()


async def test_a_renewed_certificate_is_served_to_new_connections(gate: World) -> None:
    def serial(connection: Connection) -> str:
        return str(connection.writer.get_extra_info("peercert")["serialNumber"])

    context = pki.client_context(gate.gate_tls, present=False)
    first = await gate.connect("https", context)
    gate.authority.issue(gate.gate_tls, f"gate.{MODEL}.ns.kvstrata.internal", server=True)
    for certificate in gate.gate._certificates.values():
        assert certificate.reload_if_changed()
        assert not certificate.problem
    second = await gate.connect("https", context)
    assert serial(first) != serial(second)
    first.close()
    second.close()


@pytest.mark.parametrize("broken", ["no certificate", "a certificate of another key"])
async def test_a_broken_certificate_leaves_the_old_one_in_use_and_is_reported(gate: World, broken: str) -> None:
    other = (gate.operator_tls / "tls.crt").read_text()
    (gate.gate_tls / "tls.crt").write_text(other if broken == "a certificate of another key" else "not a certificate")
    assert not any(certificate.reload_if_changed() for certificate in gate.gate._certificates.values())
    sentence = f"the new certificate in {gate.gate_tls} cannot be used, and the former one is: "
    assert sentence in gate.gate.state().problem, "the control port's"
    assert sentence in gate.gate.state().certificate, "the one for callers"
    connection = await gate.connect("https", pki.client_context(gate.operator_tls, present=False))
    await connection.send(post("/v1/completions", {"prompt": "a"}))
    assert (await connection.answer()).status == 200
    connection.close()
