"""Fixtures: one real OpenBao for all tests of a run, and a client with a token of the operator's policy."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from kvstrata.clients import transit
from kvstrata.clients.transit import TransitClient
from tests.custody.bao_server import MOUNT, BaoServer
from tests.custody.token_file import OpenedClient, TokenFile


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients connect in time on a machine that does nothing for seconds."""
    monkeypatch.setattr(transit, "CONNECT_TIMEOUT", aiohttp.ClientTimeout(total=None, sock_connect=60.0))


@pytest.fixture(scope="session")
def bao(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BaoServer]:
    server = BaoServer(tmp_path_factory.mktemp("bao"))
    yield server
    server.stop()


@pytest.fixture
def token_file(bao: BaoServer, tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text(bao.token() + "\n")
    return file


@pytest.fixture
async def client(bao: BaoServer, token_file: Path) -> AsyncIterator[TransitClient]:
    async with OpenedClient(bao.address, bao.authority_pem, TokenFile(token_file), mount=MOUNT) as found:
        yield found
