"""The client of a key management service, against a real OpenBao: what it does, and what each failure is called."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from aiohttp import web

from kvstrata.clients.transit import AT_ONCE, KmsError, KmsFailure, TransitClient
from kvstrata.clients.transit_tokens import KubernetesLogin
from tests.custody.bao_server import MOUNT, BaoServer
from tests.custody.token_file import OpenedClient, TokenFile
from tests.tiers.certificates import Authority

ACCOUNT = "system:serviceaccount:kvstrata-system:kvstrata"


def put(file: Path, text: str) -> None:
    file.write_text(text)


def said(file: Path) -> str:
    return file.read_text().strip()


@contextlib.contextmanager
def fails(reason: KmsFailure, *secrets: str) -> Iterator[None]:
    """Expect a failure of this name whose message holds none of `secrets`."""
    with pytest.raises(KmsError) as caught:
        yield
    assert caught.value.reason is reason, caught.value
    assert not any(secret in str(caught.value) for secret in secrets)


async def test_a_drawn_key_unwraps_until_the_key_that_wrapped_it_is_deleted(client: TransitClient) -> None:
    await client.make("kvstrata-a")
    drawn = await client.draw("kvstrata-a")
    assert len(drawn.secret) == 32
    assert await client.unwrap("kvstrata-a", drawn.wrapped) == drawn.secret
    await client.delete("kvstrata-a")
    assert await client.is_copyable("kvstrata-a") is None
    with fails(KmsFailure.NO_KEY, drawn.wrapped):
        await client.unwrap("kvstrata-a", drawn.wrapped)


async def test_a_key_of_the_same_name_made_anew_unwraps_nothing_of_the_old_one(client: TransitClient) -> None:
    await client.make("kvstrata-b")
    drawn = await client.draw("kvstrata-b")
    await client.delete("kvstrata-b")
    await client.make("kvstrata-b")
    with fails(KmsFailure.REFUSED, drawn.wrapped):
        await client.unwrap("kvstrata-b", drawn.wrapped)


async def test_keys_are_made_so_that_nobody_can_take_them_out_and_making_twice_changes_nothing(
    client: TransitClient, bao: BaoServer
) -> None:
    assert await client.make("kvstrata-c") is False
    drawn = await client.draw("kvstrata-c")
    assert await client.make("kvstrata-c") is False
    assert await client.unwrap("kvstrata-c", drawn.wrapped) == drawn.secret
    bao.admin("POST", f"{MOUNT}/keys/kvstrata-x", {"exportable": True})
    assert await client.is_copyable("kvstrata-x") is True


async def test_deleting_what_is_not_there_is_done_at_once(client: TransitClient) -> None:
    await client.delete("kvstrata-never")
    assert await client.is_copyable("kvstrata-never") is None


async def test_nothing_that_is_printed_shows_a_key(client: TransitClient) -> None:
    await client.make("kvstrata-d")
    drawn = await client.draw("kvstrata-d")
    shown = repr(drawn)
    assert base64.b64encode(drawn.secret).decode() not in shown
    assert repr(drawn.secret) not in shown


async def test_the_service_says_which_one_it_is(client: TransitClient, bao: BaoServer) -> None:
    found = await client.service()
    assert found.cluster == bao.admin("GET", "sys/health")["cluster_id"]
    assert found.version


class TestFailuresHaveNames:
    """Absence of a key is said by the service only; everything else is something else."""

    async def test_a_mount_that_is_not_there_is_no_absent_key(self, bao: BaoServer, token_file: Path) -> None:
        put(token_file, bao.token(policies=["root"], no_default_policy=False))
        async with OpenedClient(bao.address, bao.authority_pem, TokenFile(token_file), mount="elsewhere") as lost:
            with fails(KmsFailure.NO_MOUNT):
                await lost.is_copyable("kvstrata-a")

    async def test_a_key_that_the_token_may_not_see_is_no_absent_key(
        self, client: TransitClient, token_file: Path
    ) -> None:
        with fails(KmsFailure.DENIED, said(token_file)):
            await client.is_copyable("another-product")

    async def test_a_refused_token_is_read_again_and_a_new_one_used(
        self, client: TransitClient, bao: BaoServer, token_file: Path
    ) -> None:
        await client.make("kvstrata-e")
        bao.admin("POST", "auth/token/revoke", {"token": said(token_file)})
        with fails(KmsFailure.DENIED, said(token_file)):
            await client.is_copyable("kvstrata-e")
        put(token_file, bao.token())
        assert await client.is_copyable("kvstrata-e") is not None

    async def test_no_token(self, bao: BaoServer, tmp_path: Path) -> None:
        put(tmp_path / "empty", "\n")
        for name in ("empty", "absent"):
            async with OpenedClient(bao.address, bao.authority_pem, TokenFile(tmp_path / name), mount=MOUNT) as lost:
                with fails(KmsFailure.NO_TOKEN):
                    await lost.is_copyable("kvstrata-a")

    async def test_a_sealed_service(self, client: TransitClient, bao: BaoServer) -> None:
        await client.make("kvstrata-f")
        bao.seal()
        try:
            with fails(KmsFailure.SEALED):
                await client.service()
            with fails(KmsFailure.SEALED):
                await client.is_copyable("kvstrata-f")
        finally:
            bao.unseal()
        assert await client.is_copyable("kvstrata-f") is not None

    async def test_a_certificate_of_another_authority(self, bao: BaoServer, token_file: Path, tmp_path: Path) -> None:
        other = Authority(tmp_path).file.read_bytes()
        async with OpenedClient(bao.address, other, TokenFile(token_file), mount=MOUNT) as lost:
            with fails(KmsFailure.TLS_FAILED, said(token_file)):
                await lost.is_copyable("kvstrata-a")

    async def test_nobody_listens(self, bao: BaoServer, token_file: Path) -> None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            address = f"https://127.0.0.1:{unused.getsockname()[1]}"
            async with OpenedClient(address, bao.authority_pem, TokenFile(token_file), mount=MOUNT) as lost:
                with fails(KmsFailure.UNREACHABLE):
                    await lost.is_copyable("kvstrata-a")

    async def test_plain_http_is_refused_before_a_token_is_sent(self, bao: BaoServer, token_file: Path) -> None:
        with pytest.raises(ValueError, match="https"):
            TransitClient("http://127.0.0.1:8200", bao.authority_pem, TokenFile(token_file))


@contextlib.asynccontextmanager
async def strange_service(
    directory: Path, answer: Callable[[web.Request], web.StreamResponse], *, never: bool = False
) -> AsyncIterator[tuple[str, bytes]]:
    """Something else with TLS at the service's address: what a real one does not say."""
    certificates = Authority(directory).issue("127.0.0.1")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificates.certificate, certificates.key)

    async def handle(request: web.Request) -> web.StreamResponse:
        if never:
            await asyncio.Event().wait()
        return answer(request)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
    await site.start()
    port = runner.addresses[0][1]
    try:
        yield f"https://127.0.0.1:{port}", certificates.ca.read_bytes()
    finally:
        await runner.cleanup()


STRANGE = {
    "a page instead of JSON": (lambda _: web.Response(text="<html>"), KmsFailure.MALFORMED),
    "a proxy's 404": (lambda _: web.Response(text="not found", status=404), KmsFailure.NO_MOUNT),
    "an answer without end": (lambda _: web.Response(body=b" " * 300_000), KmsFailure.TOO_LARGE),
    "another shape": (lambda _: web.json_response({"data": {"type": 3}}), KmsFailure.MALFORMED),
    "a redirect": (lambda _: web.Response(status=307, headers={"Location": "https://evil"}), KmsFailure.REFUSED),
    "too many requests": (lambda _: web.json_response({"errors": ["slow"]}, status=429), KmsFailure.BUSY),
    "a broken one": (lambda _: web.json_response({"errors": ["broken"]}, status=500), KmsFailure.FAILED),
}


@pytest.mark.parametrize("what", STRANGE)
async def test_what_is_no_such_service_never_says_that_a_key_is_gone(what: str, tmp_path: Path) -> None:
    answer, reason = STRANGE[what]
    put(tmp_path / "token", "s.verysecret")
    async with (
        strange_service(tmp_path, answer) as (address, authority),
        OpenedClient(address, authority, TokenFile(tmp_path / "token")) as client,
    ):
        with fails(reason, "s.verysecret"):
            await client.is_copyable("kvstrata-a")


async def test_one_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    put(tmp_path / "token", "s.verysecret")
    async with (
        strange_service(tmp_path, lambda _: web.Response(), never=True) as (address, authority),
        OpenedClient(address, authority, TokenFile(tmp_path / "token"), timeout_s=0.5) as client,
    ):
        with fails(KmsFailure.TIMEOUT):
            await client.is_copyable("kvstrata-a")


async def test_a_client_that_is_closed_under_a_request_says_so_whatever_it_was_at(tmp_path: Path) -> None:
    put(tmp_path / "token", "s.verysecret")
    async with strange_service(tmp_path, lambda _: web.Response(), never=True) as (address, authority):
        for steps in (0, 1, 2, 5, 20, 100):
            client = TransitClient(address, authority, TokenFile(tmp_path / "token"), timeout_s=60.0)
            asked = asyncio.create_task(client.is_copyable("kvstrata-a"))
            for _ in range(steps):
                await asyncio.sleep(0)
            await client.close()
            with pytest.raises(KmsError) as caught:
                await asked
            assert caught.value.reason in (KmsFailure.DISCONNECTED, KmsFailure.UNREACHABLE)


class Logins:
    """A service in form: each login brings another token, and the last of them is good until it is revoked."""

    def __init__(self) -> None:
        self.count = 0
        self.good = ""
        self.broken = False

    def answer(self, request: web.Request) -> web.StreamResponse:
        if request.path.endswith("/login"):
            self.count += 1
            if self.broken:
                return web.json_response({"errors": ["broken"]}, status=500)
            self.good = f"s.{self.count}"
            return web.json_response({"auth": {"client_token": self.good, "lease_duration": 0}})
        if request.headers.get("X-Vault-Token") != self.good:
            return web.json_response({"errors": ["permission denied"]}, status=403)
        key = {"type": "aes256-gcm96", "exportable": False, "allow_plaintext_backup": False, "deletion_allowed": False}
        return web.json_response({"data": key})


async def test_many_who_ask_at_once_share_one_login_also_after_a_revocation_and_a_failure(tmp_path: Path) -> None:
    put(tmp_path / "account", "account")
    service = Logins()
    async with strange_service(tmp_path, service.answer) as (address, authority):
        login = KubernetesLogin("kvstrata", tmp_path / "account")
        async with OpenedClient(address, authority, login) as client:

            async def ask() -> None:
                await asyncio.gather(*(client.is_copyable("kvstrata-a") for _ in range(AT_ONCE)))

            await ask()
            assert service.count == 1
            service.good = "s.revoked"
            await ask()
            assert service.count == 2
            service.good, service.broken = "s.revoked", True
            asked = [client.is_copyable("kvstrata-a") for _ in range(AT_ONCE)]
            failures = await asyncio.gather(*asked, return_exceptions=True)
            assert all(isinstance(one, KmsError) and one.reason is KmsFailure.FAILED for one in failures)
            assert service.count <= 2 + AT_ONCE
            service.broken, service.count = False, 2
            await ask()
            assert service.count == 3


def account_token() -> str:
    """A service account's token in form; whose it is says the API server's stand-in."""
    claims = {
        "iss": "https://kubernetes.default.svc",
        "sub": ACCOUNT,
        "aud": ["openbao"],
        "iat": 1,
        "nbf": 1,
        "exp": 4_000_000_000,
        "kubernetes.io": {
            "namespace": "kvstrata-system",
            "serviceaccount": {"name": "kvstrata", "uid": "0b6b4ef8-0000-4000-8000-000000000001"},
            "pod": {"name": "kvstrata-0", "uid": "0b6b4ef8-0000-4000-8000-000000000002"},
        },
    }
    parts = ({"alg": "RS256", "kid": "1"}, claims)
    encoded = [base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode() for part in parts]
    return ".".join([*encoded, base64.urlsafe_b64encode(b"signature" * 30).rstrip(b"=").decode()])


async def test_a_service_account_logs_in_and_its_token_is_renewed_in_time(bao: BaoServer, tmp_path: Path) -> None:
    """The real method `kubernetes`. The API server is a stand-in: all that it does here is to review a token."""
    account = account_token()
    put(tmp_path / "account", account)
    reviewed: list[str] = []

    def review(request: web.Request) -> web.StreamResponse:
        reviewed.append(request.path)
        user = {"username": ACCOUNT, "uid": "0b6b4ef8-0000-4000-8000-000000000001", "groups": []}
        status = {"authenticated": True, "user": user, "audiences": ["openbao"]}
        return web.json_response(
            {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "status": status}, status=201
        )

    clock = [0.0]
    async with strange_service(tmp_path, review) as (address, authority):
        bao.admin("POST", "sys/auth/kubernetes", {"type": "kubernetes"})
        host = {"kubernetes_host": address, "kubernetes_ca_cert": authority.decode(), "disable_local_ca_jwt": True}
        await asyncio.to_thread(bao.admin, "POST", "auth/kubernetes/config", host)
        role = {
            "bound_service_account_names": ["kvstrata"],
            "bound_service_account_namespaces": ["kvstrata-system"],
            "audience": "openbao",
            "token_policies": ["kvstrata"],
            "token_ttl": "100s",
        }
        await asyncio.to_thread(bao.admin, "POST", "auth/kubernetes/role/kvstrata", role)
        login = KubernetesLogin("kvstrata", tmp_path / "account", monotonic=lambda: clock[0])
        async with OpenedClient(bao.address, bao.authority_pem, login, mount=MOUNT) as client:
            await client.make("kvstrata-k")
            assert len(reviewed) == 1, "one login serves several requests"
            clock[0] = 61.0
            assert await client.is_copyable("kvstrata-k") is not None
            assert len(reviewed) == 2, "a token is replaced before its lease of 100 s is over"
            first = await login.token(client)
            bao.admin("POST", "auth/token/revoke", {"token": first})
            assert await client.is_copyable("kvstrata-k") is not None
            assert await login.token(client) != first
        stranger = KubernetesLogin("another-role", tmp_path / "account")
        async with OpenedClient(bao.address, bao.authority_pem, stranger, mount=MOUNT) as client:
            with fails(KmsFailure.REFUSED, account):
                await client.is_copyable("kvstrata-k")
