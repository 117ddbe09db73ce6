from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from kvstrata.clients import gate, pki
from kvstrata.clients.gate import MAX_STATE_BYTES, MAX_WORK_PER_POD, GateClient, GateError, GateFailure
from kvstrata.contract import ContractError
from kvstrata.contract.messages.adapter import TierState
from kvstrata.contract.messages.engine_reset import RESET_PATH, EngineResetAnswer, ResetOutcome, ResetRequest
from kvstrata.contract.messages.erase import (
    ERASE_PATH,
    VERIFY_PATH,
    AdapterErased,
    AdapterVerified,
    Erased,
    EraseOutcome,
    EraseRequest,
    Verified,
    VerifyRequest,
)
from kvstrata.contract.messages.pod_state import (
    ACK_TOKEN_HEADER,
    OPERATOR_COMMON_NAME,
    STATE_PATH,
    PodState,
    gate_server_name,
)
from kvstrata.contract.messages.pools import (
    MAX_ANSWER_BYTES,
    POOL_PATH,
    RENDER_PATH,
    WARM_PATH,
    PoolReport,
    Rendered,
    RenderRequest,
    Warmed,
    WarmOutcome,
    WarmRequest,
)
from kvstrata.contract.messages.prefix import PrefixSource

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


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gates of these tests answer, if not always soon."""
    monkeypatch.setattr(gate, "CONNECT_TIMEOUT", aiohttp.ClientTimeout(total=None, sock_connect=60.0))
    monkeypatch.setattr(gate, "ANSWER_GRACE_S", 60.0)


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
    work: Callable[[web.Request], Awaitable[web.StreamResponse]] | None = None,
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
    application.router.add_route("*", "/v1/{work}", work or handle)
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
    monkeypatch.setattr(gate, "ANSWER_GRACE_S", 0.3)
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


MADE = Rendered("g", "c", "r", 16, 16, 16, 64, bytes(32))
TEXT = PrefixSource(text="hello")


async def test_work_for_pools_is_posted_and_answered_with_the_pods_token(certificates: Pki) -> None:
    asked: list[tuple[str, str, bytes]] = []
    warmed, held = Warmed("g", "c", WarmOutcome.STORED), PoolReport("g", "c")
    answers = {RENDER_PATH: MADE.encode(), WARM_PATH: warmed.encode(), POOL_PATH: held.encode()}

    async def work(request: web.Request) -> web.Response:
        asked.append((request.method, str(request.rel_url), await request.read()))
        return web.Response(body=answers[request.path], headers={ACK_TOKEN_HEADER: "token"})

    warm = WarmRequest("uid", "0" * 12, "m", TEXT)
    async with _gate(certificates, work=work) as (client, _):
        assert await client.render("127.0.0.1", NAME, TEXT) == (MADE, "token")
        assert await client.warm("127.0.0.1", NAME, warm, 60.0) == (warmed, "token")
        assert await client.pool("127.0.0.1", NAME, "uid") == (held, "token")
    assert asked == [
        ("POST", RENDER_PATH, RenderRequest(TEXT).encode()),
        ("POST", WARM_PATH, warm.encode()),
        ("GET", f"{POOL_PATH}?uid=uid", b""),
    ]


async def test_work_that_lasts_holds_up_no_acknowledgement(certificates: Pki) -> None:
    over, begun = asyncio.Event(), 0

    async def work(_: web.Request) -> web.Response:
        nonlocal begun
        begun += 1
        await over.wait()
        return web.Response(body=MADE.encode(), headers={ACK_TOKEN_HEADER: "token"})

    async with _gate(certificates, work=work) as (client, _):
        lasting = [asyncio.create_task(client.render("127.0.0.1", NAME, TEXT)) for _ in range(MAX_WORK_PER_POD + 2)]
        async with asyncio.timeout(60):
            while begun < MAX_WORK_PER_POD:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert await client.state("127.0.0.1", NAME, 6, 20) == (STATE, "token")
        assert begun == MAX_WORK_PER_POD
        over.set()
        await asyncio.gather(*lasting)


@pytest.mark.parametrize("status", [404, 413, 503])
async def test_a_refusal_of_work_tells_its_status(certificates: Pki, status: int) -> None:
    async def work(_: web.Request) -> web.Response:
        return web.Response(status=status)

    async with _gate(certificates, work=work) as (client, _):
        with pytest.raises(GateError) as caught:
            await client.render("127.0.0.1", NAME, TEXT)
    assert caught.value.reason is GateFailure.REFUSED


async def test_an_answer_beyond_its_bound_is_not_read_on(certificates: Pki) -> None:
    async def work(_: web.Request) -> web.Response:
        return web.Response(body=bytes(MAX_ANSWER_BYTES + 1), headers={ACK_TOKEN_HEADER: "token"})

    async with _gate(certificates, work=work) as (client, _):
        with pytest.raises(GateError) as caught:
            await client.pool("127.0.0.1", NAME, "uid")
    assert caught.value.reason is GateFailure.TOO_LARGE


ERASED = Erased("g", 7, AdapterErased("c", 7, 3, EraseOutcome.COMPLETE), requests=2)
VERIFIED = Verified("g", 7, False, AdapterVerified("c", 7, 3, True, False))
RESET = EngineResetAnswer("g", ResetOutcome.BUSY)
assert ERASED.outcome is EraseOutcome.REMAINING, "requests are in flight, whatever the cache server claims"
OLD = "0" * 32


async def test_an_erasure_is_posted_and_answered_with_the_pods_token(certificates: Pki) -> None:
    said: dict[str, bytes] = {}

    async def work(request: web.Request) -> web.Response:
        said[request.path] = await request.read()
        answers = {ERASE_PATH: ERASED.encode(), VERIFY_PATH: VERIFIED.encode(), RESET_PATH: RESET.encode()}
        return web.Response(body=answers[request.path], headers={ACK_TOKEN_HEADER: "token"})

    erase, verify, reset = EraseRequest((OLD,), ("dram",), 30_000), VerifyRequest(OLD, bytes(32)), ResetRequest(30_000)
    async with _gate(certificates, work=work) as (client, _):
        assert await client.erase("127.0.0.1", NAME, erase) == (ERASED, "token")
        assert await client.verify("127.0.0.1", NAME, verify) == (VERIFIED, "token")
        assert await client.reset("127.0.0.1", NAME, reset) == (RESET, "token")
    assert said == {ERASE_PATH: erase.encode(), VERIFY_PATH: verify.encode(), RESET_PATH: reset.encode()}


async def test_an_erasure_without_the_pods_token_or_with_a_false_claim_is_not_believed(certificates: Pki) -> None:
    claimed = ERASED.encode().replace(b'"boot":"c"', b'"boot":""')
    answers = iter([({}, ERASED.encode()), ({ACK_TOKEN_HEADER: "token"}, claimed)])

    async def work(_: web.Request) -> web.Response:
        headers, body = next(answers)
        return web.Response(body=body, headers=headers)

    async with _gate(certificates, work=work) as (client, _):
        reasons = []
        for _ in range(2):
            with pytest.raises(GateError) as caught:
                await client.erase("127.0.0.1", NAME, EraseRequest((OLD,)))
            reasons.append(caught.value.reason)
    assert reasons == [GateFailure.NO_TOKEN, GateFailure.MALFORMED]


async def test_a_request_that_no_gate_would_take_is_not_sent(certificates: Pki) -> None:
    async with _gate(certificates) as (client, seen):
        with pytest.raises(ContractError):
            await client.erase("127.0.0.1", NAME, EraseRequest(("acme",)))
    assert seen == []
