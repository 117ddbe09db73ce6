from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest
from aiohttp import web

from kvstrata.adapters import pki
from kvstrata.adapters.gate_client import MAX_STATE_BYTES, GateClient, GateError, GateFailure
from kvstrata.contract.ack import ACK_TOKEN_HEADER, OPERATOR_COMMON_NAME, STATE_PATH, PodState, gate_server_name
from kvstrata.contract.link import TierState

NAME = gate_server_name("chat", "team-a")
STATE = PodState(
    pod="kvs-chat-0",
    pod_uid="uid",
    namespace="team-a",
    model="chat",
    identity="0123456789abcdef",
    gate_boot="g",
    cache_boot="c",
    term=3,
    acked=7,
    seen=7,
    fresh=True,
    fresh_age_ms=12,
    engine_ready=True,
    tiers=(TierState("redis", "Redis", "closed"),),
)


@dataclass
class Pki:
    ca: pki.KeyPair
    client: pki.KeyPair
    directory: Path

    def server_context(self, name: str = NAME) -> ssl.SSLContext:
        pair = pki.issue_server(self.ca, [name], datetime.now(UTC), pki.generate_key())
        path = self.directory / "server.pem"
        path.write_bytes(pair.certificate_pem + pair.key_pem)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(path)
        context.load_verify_locations(cadata=self.ca.certificate_pem.decode())
        context.verify_mode = ssl.CERT_REQUIRED
        return context


@pytest.fixture
def certificates(tmp_path: Path) -> Pki:
    now = datetime.now(UTC)
    ca = pki.create_authority("kvstrata", now, pki.generate_key())
    return Pki(ca, pki.issue_client(ca, OPERATOR_COMMON_NAME, now, pki.generate_key()), tmp_path)


@asynccontextmanager
async def _gate(
    certificates: Pki,
    answer: Callable[[web.Request], web.StreamResponse] | None = None,
    *,
    name: str = NAME,
    delay_s: float = 0.0,
) -> AsyncIterator[tuple[GateClient, list[web.Request]]]:
    seen: list[web.Request] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        seen.append(request)
        await asyncio.sleep(delay_s)
        if answer is not None:
            return answer(request)
        return web.Response(body=STATE.encode(), headers={ACK_TOKEN_HEADER: "token"})

    application = web.Application()
    application.router.add_get(STATE_PATH, handle)
    runner = web.AppRunner(application)
    await runner.setup()
    listener = socket.create_server(("127.0.0.1", 0))
    await web.SockSite(runner, listener, ssl_context=certificates.server_context(name)).start()
    pair = certificates.client
    try:
        async with GateClient(
            certificates.ca.certificate_pem, pair.certificate_pem, pair.key_pem, port=listener.getsockname()[1]
        ) as client:
            yield client, seen
    finally:
        await runner.cleanup()


async def _failure(client: GateClient, name: str = NAME, wait_s: float = 0) -> GateError:
    with pytest.raises(GateError) as caught:
        await client.state("127.0.0.1", name, 0, wait_s)
    return caught.value


async def test_a_gate_answers_with_its_state_and_token(certificates: Pki) -> None:
    async with _gate(certificates) as (client, seen):
        assert await client.state("127.0.0.1", NAME, 6, 20) == (STATE, "token")
        assert dict(seen[0].query) == {"after": "6", "wait": "20"}


async def test_two_questions_to_one_pod_share_a_connection(certificates: Pki) -> None:
    async with _gate(certificates) as (client, seen):
        await client.state("127.0.0.1", NAME, 0, 0)
        await client.state("127.0.0.1", NAME, 0, 0)
        first, second = (request.transport for request in seen)
        assert first is second


async def test_the_gate_sees_the_operators_certificate(certificates: Pki) -> None:
    subjects: list[object] = []

    def answer(request: web.Request) -> web.Response:
        assert request.transport is not None
        subjects.append(request.transport.get_extra_info("peercert")["subject"])
        return web.Response(body=STATE.encode(), headers={ACK_TOKEN_HEADER: "token"})

    async with _gate(certificates, answer) as (client, _):
        await client.state("127.0.0.1", NAME, 0, 0)
    assert subjects == [((("commonName", OPERATOR_COMMON_NAME),),)]


async def test_the_gate_of_another_model_is_not_believed(certificates: Pki) -> None:
    async with _gate(certificates, name=gate_server_name("other", "team-a")) as (client, seen):
        assert (await _failure(client)).reason is GateFailure.TLS_FAILED
        assert seen == []


async def test_a_kept_connection_is_not_reused_under_another_name(certificates: Pki) -> None:
    async with _gate(certificates) as (client, _):
        await client.state("127.0.0.1", NAME, 0, 0)
        error = await _failure(client, gate_server_name("other", "team-a"))
        assert error.reason is GateFailure.TLS_FAILED


async def test_a_gate_of_another_authority_is_not_believed(certificates: Pki) -> None:
    other = pki.create_authority("kvstrata", datetime.now(UTC), pki.generate_key())
    foreign = Pki(other, certificates.client, certificates.directory)
    async with _gate(foreign) as (client, _):
        trusting_first = GateClient(
            certificates.ca.certificate_pem,
            certificates.client.certificate_pem,
            certificates.client.key_pem,
            port=client._port,
        )
        async with trusting_first:
            assert (await _failure(trusting_first)).reason is GateFailure.TLS_FAILED


async def test_a_client_that_the_gate_refuses_learns_so(certificates: Pki) -> None:
    other = pki.create_authority("kvstrata", datetime.now(UTC), pki.generate_key())
    stranger = pki.issue_client(other, OPERATOR_COMMON_NAME, datetime.now(UTC), pki.generate_key())
    async with _gate(certificates) as (client, seen):
        async with GateClient(
            certificates.ca.certificate_pem, stranger.certificate_pem, stranger.key_pem, port=client._port
        ) as unknown:
            assert (await _failure(unknown)).reason in (GateFailure.TLS_FAILED, GateFailure.DISCONNECTED)
        assert seen == []


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (web.Response(status=503), GateFailure.REFUSED),
        (web.Response(status=302, headers={"Location": "https://elsewhere.example/"}), GateFailure.REFUSED),
        (web.Response(body=STATE.encode()), GateFailure.NO_TOKEN),
        (web.Response(body=b"{}", headers={ACK_TOKEN_HEADER: "t"}), GateFailure.MALFORMED),
        (web.Response(body=b"[]", headers={ACK_TOKEN_HEADER: "t"}), GateFailure.MALFORMED),
        (web.Response(body=b" " * (MAX_STATE_BYTES + 1), headers={ACK_TOKEN_HEADER: "t"}), GateFailure.TOO_LARGE),
    ],
    ids=["503", "redirect", "no-token", "empty", "list", "too-large"],
)
async def test_an_answer_that_is_not_a_state_has_a_named_reason(
    certificates: Pki, answer: web.Response, reason: GateFailure
) -> None:
    async with _gate(certificates, lambda _: answer) as (client, _):
        assert (await _failure(client)).reason is reason


async def test_a_gate_that_does_not_answer_in_time_is_a_timeout(
    certificates: Pki, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstrata.adapters.gate_client.ANSWER_GRACE_S", 0.3)
    async with _gate(certificates, delay_s=2) as (client, _):
        assert (await _failure(client)).reason is GateFailure.TIMEOUT


async def test_a_pod_without_a_gate_refuses_the_connection(certificates: Pki) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    pair = certificates.client
    async with GateClient(certificates.ca.certificate_pem, pair.certificate_pem, pair.key_pem, port=port) as client:
        assert (await _failure(client)).reason is GateFailure.CONNECTION_REFUSED


async def test_the_client_works_again_after_a_gate_restarted(certificates: Pki) -> None:
    async with _gate(certificates) as (client, seen):
        await client.state("127.0.0.1", NAME, 0, 0)
        assert seen[0].transport is not None
        seen[0].transport.abort()
        await asyncio.sleep(0.05)
        assert (await client.state("127.0.0.1", NAME, 0, 0))[0] == STATE
