"""Where credentials come from, that a renewed token is used, and that none of them are left behind or logged."""

from __future__ import annotations

import base64
import json
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from aiohttp import web
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.config import incluster_config

from kvstrata.clients.kube_auth import NoCredentialsError, authorization, find_api
from kvstrata.clients.pki import create_authority, generate_key

KEYS = create_authority("an authority", datetime.now(UTC), generate_key())


@pytest.fixture(autouse=True)
def nothing_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[datetime]:
    now = [datetime(2026, 1, 1, tzinfo=UTC)]
    fake = SimpleNamespace(datetime=SimpleNamespace(now=lambda: now[0]), timedelta=timedelta)
    monkeypatch.setattr(incluster_config, "datetime", fake)
    return now


@pytest.fixture
def token_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The service account of the pod that this test seems to run in."""
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    for name, value in (("token", b"old\n"), ("ca.crt", KEYS.certificate_pem)):
        (tmp_path / name).write_bytes(value)
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(tmp_path / "ca.crt"))
    return tmp_path / "token"


@asynccontextmanager
async def found() -> AsyncIterator[ApiClient]:
    api = await find_api()
    yield api
    await api.close()


async def token(api: ApiClient) -> str:
    return (await authorization(api.configuration))["Authorization"].split()[1]


def put(file: Path, text: str | None) -> None:
    file.unlink() if text is None else file.write_text(text)


async def test_a_token_file_is_read_again_after_a_minute_and_not_before(
    token_file: Path, clock: list[datetime]
) -> None:
    async with found() as api:
        assert (api.configuration.host, await token(api)) == ("https://[fd00::1]:443", "old")
        put(token_file, "new\n")
        clock[0] += timedelta(seconds=59)
        assert await token(api) == "old"
        clock[0] += timedelta(seconds=1)
        assert await token(api) == "new"


@pytest.mark.parametrize("text", [None, ""])
async def test_a_token_file_that_is_missing_for_a_moment_leaves_the_token_in_use(
    token_file: Path, clock: list[datetime], text: str | None
) -> None:
    async with found() as api:
        put(token_file, text)
        clock[0] += timedelta(minutes=1)
        assert await token(api) == "old"
        put(token_file, "new")
        assert await token(api) == "new"


def write_kubeconfig(folder: Path, monkeypatch: pytest.MonkeyPatch, user: Any, **cluster: Any) -> None:
    config = {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "one", "user": "me"}}],
        "clusters": [{"name": "one", "cluster": cluster or {"server": "http://127.0.0.1:1/"}}],
        "users": [{"name": "me", "user": user}],
    }
    (folder / "config").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(folder / "config"))


async def test_a_kubeconfig_gives_server_and_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_kubeconfig(tmp_path, monkeypatch, {"token": "secret"})
    async with found() as api:
        assert (api.configuration.host, await token(api)) == ("http://127.0.0.1:1", "secret")


@pytest.mark.parametrize(("lives_s", "runs"), [(60, 3), (3600, 1)])
async def test_a_login_program_runs_again_when_its_token_ends_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lives_s: int, runs: int
) -> None:
    ends = (datetime.now(UTC) + timedelta(seconds=lives_s)).isoformat()
    said = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential"}
    program = tmp_path / "login.py"
    program.write_text(
        f"import json, pathlib\n"
        f"file = pathlib.Path({str(tmp_path / 'runs')!r})\n"
        f"file.write_text((file.read_text() if file.exists() else '') + 'x')\n"
        f"status = {{'token': 'token-' + str(len(file.read_text())), 'expirationTimestamp': {ends!r}}}\n"
        f"print(json.dumps({{**{said!r}, 'status': status}}))\n"
    )
    login = {"apiVersion": said["apiVersion"], "command": sys.executable, "args": [str(program)]}
    write_kubeconfig(tmp_path, monkeypatch, {"exec": login})
    async with found() as api:
        assert [await token(api) for _ in range(2)] == [f"token-{min(run, runs)}" for run in (2, 3)]


async def test_keys_of_a_kubeconfig_are_not_left_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key = (base64.b64encode(pem).decode() for pem in (KEYS.certificate_pem, KEYS.key_pem))
    user = {"client-certificate-data": certificate, "client-key-data": key}
    write_kubeconfig(
        tmp_path, monkeypatch, user, **{"server": "https://127.0.0.1:1", "certificate-authority-data": certificate}
    )
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    for _ in range(2):
        async with found() as api:
            assert [one["subject"] for one in api.rest_client.ssl_context.get_ca_certs()]
            assert not list((tmp_path / "tmp").iterdir())


async def test_a_refresh_token_is_not_sent_to_an_issuer_that_is_not_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    async def handle(request: web.BaseRequest) -> web.Response:
        asked.append(request.path)
        return web.json_response({"token_endpoint": f"{issuer}/token", "id_token": "a.b.c", "refresh_token": "new"})

    runner = web.ServerRunner(web.Server(handle), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    issuer = f"http://127.0.0.1:{runner.addresses[0][1]}"
    claims = base64.b64encode(json.dumps({"exp": 1}).encode()).decode().rstrip("=")
    config = {"id-token": f"a.{claims}.c", "refresh-token": "hidden", "idp-issuer-url": issuer, "client-id": "me"}
    write_kubeconfig(
        tmp_path, monkeypatch, {"auth-provider": {"name": "oidc", "config": {**config, "client-secret": "x"}}}
    )
    with pytest.raises(NoCredentialsError):
        await find_api()
    assert not asked
    await runner.cleanup()


@pytest.mark.parametrize("text", ["", "current-context: gone", "[", "contexts: []"])
async def test_a_kubeconfig_that_names_no_server_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    (tmp_path / "config").write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    with pytest.raises(NoCredentialsError):
        await find_api()


@pytest.mark.parametrize(
    ("user", "cluster"),
    [
        ({"token": "hidden"}, {"insecure-skip-tls-verify": True}),
        ({"token": "hidden", "auth-provider": {"name": "oidc"}}, {"server": "http://127.0.0.1:1"}),
        ("hidden", {"server": "http://127.0.0.1:1"}),
    ],
)
async def test_the_error_about_a_kubeconfig_does_not_quote_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: Any, cluster: dict[str, Any]
) -> None:
    write_kubeconfig(tmp_path, monkeypatch, user, **cluster)
    with pytest.raises(NoCredentialsError) as raised:
        await find_api()
    assert "hidden" not in str(raised.value)
    assert raised.value.__suppress_context__


async def test_without_any_credentials_the_error_says_what_is_missing() -> None:
    with pytest.raises(NoCredentialsError, match="service account"):
        await find_api()
