"""Files that Kubernetes replaces under a running gate: the API server's authority and the service account's token."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvstrata_sidecar.gate.policy.kube_api import ApiAuthority, KubeApi

from . import pki
from .stand_in_api import StandInApi

NAME = "api"


class Cluster:
    """An API server that is started again with another certificate, and the files of a pod."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.server = directory, StandInApi()
        self.authority = pki.Authority("first")
        self.token, self.file = directory / "token", directory / "ca.crt"
        self.token.write_text("kube-token\n")

    async def present(self, authority: pki.Authority) -> None:
        await self.server.stop()
        files = authority.issue(self.directory / "server", NAME, server=True)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(files / "tls.crt", files / "tls.key")
        await self.server.start(context)

    def trust(self, *authorities: pki.Authority) -> None:
        """Replace the file as a kubelet does."""
        draft = self.directory / "draft"
        draft.write_bytes(b"".join(one.issue(self.directory / "any", NAME, server=True).joinpath("ca.crt").read_bytes()
                                   for one in authorities) or b"no authority")  # fmt: skip
        draft.replace(self.file)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    made = Cluster(tmp_path)
    await made.present(made.authority)
    made.trust(made.authority)
    await made.server.put("one", {"a": b"b"})
    yield made
    await made.server.stop()


async def read(api: KubeApi) -> None:
    """Read a Secret over another connection."""
    api.close()
    api._kept = None
    assert (await api.get_secret("one") or {})["metadata"]["name"] == "one"


def client(cluster: Cluster) -> KubeApi:
    return KubeApi("127.0.0.1", cluster.server.port, "ns", cluster.token, ApiAuthority(cluster.file))


async def test_another_authority_is_trusted_once_the_server_shows_its_certificate(cluster: Cluster) -> None:
    api, other = client(cluster), pki.Authority("second")
    assert api.authority is not None
    await read(api)
    cluster.trust(other)
    await read(api)
    assert "cannot be used, and the former is" in api.authority.problem
    await cluster.present(other)
    await read(api)
    assert api.authority.problem == ""
    await cluster.present(cluster.authority)
    with pytest.raises(ssl.SSLCertVerificationError):
        await read(api)
    api.close()


async def test_a_file_that_is_no_authority_leaves_the_former_in_use(cluster: Cluster) -> None:
    api = client(cluster)
    assert api.authority is not None
    cluster.trust()
    await read(api)
    assert "cannot be used, and the former is" in api.authority.problem
    cluster.file.unlink()
    await read(api)
    assert "cannot be used, and the former is: there is no ca.crt" in api.authority.problem
    cluster.trust(cluster.authority)
    await read(api)
    assert api.authority.problem == ""
    api.close()


async def test_a_server_that_is_away_says_nothing_about_its_authority(cluster: Cluster) -> None:
    api = client(cluster)
    assert api.authority is not None
    cluster.trust(cluster.authority)
    await cluster.server.stop()
    with pytest.raises(OSError, match="Connect"):
        await api.get_secret("one")
    assert api.authority.problem == ""


async def test_a_token_is_used_until_its_file_has_another(cluster: Cluster) -> None:
    api = client(cluster)
    await read(api)
    for spoil in (lambda: cluster.token.write_text(""), cluster.token.unlink):
        spoil()
        await read(api)
    assert not cluster.server.unauthorized
    cluster.token.write_text("another")
    cluster.server.token = "another"
    await read(api)
    assert not cluster.server.unauthorized
    api.close()


async def test_without_any_token_nothing_is_asked(cluster: Cluster) -> None:
    cluster.token.unlink()
    with pytest.raises(FileNotFoundError):
        await client(cluster).get_secret("one")
    await asyncio.sleep(0)
    assert not cluster.server.gets
