"""Agents by the clients' own packages, before a real gate and a real engine: every answer is accepted in the next turn.

Needs vLLM for CPUs: `python tests/dataplane/install_lmcache.py --engine`, or KVSTRATA_ENGINE_PYTHON.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from e2e.engine.models import SMOLLM2
from tests.dataplane.conftest import StartServer
from tests.dataplane.engine_process import CHUNK_TOKENS, MODEL, PATIENT, EngineProcess, engine_python
from tests.gate.stand_in_api import StandInApi
from tests.gate.world import ACME, World, entry, until
from tests.tiers.gate_stand_in import DOMAIN

pytestmark = pytest.mark.lmcache

PROGRAM = Path(__file__).with_name("agent.py")


@pytest.fixture(scope="module")
def python() -> Path:
    found = engine_python()
    if found is None:
        pytest.skip("no engine: run tests/dataplane/install_lmcache.py --engine or set KVSTRATA_ENGINE_PYTHON")
    return found


@pytest.fixture(scope="module")
def pod(python: Path, start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    directory = tmp_path_factory.mktemp("agents")
    with tempfile.TemporaryDirectory(prefix="pod") as name:
        world = World(Path(name))
        folders: Any = SimpleNamespace(policy_dir=world.directory / "policy", link_dir=world.directory / "link")
        server = start_server(directory, folders, [None], CHUNK_TOKENS, memory={"tier": "dram"})
        engine = EngineProcess(
            python,
            directory,
            server.rpc_port,
            PATIENT,
            model=SMOLLM2,
            flags={"--enable-auto-tool-choice": "", "--tool-call-parser": "hermes"},
            socket_path=world.engine.socket_path,
        )
        try:
            engine.wait_until_connected()
            yield world
        finally:
            engine.stop()


@pytest.fixture
async def gate(pod: World) -> AsyncIterator[World]:
    pod.api, pod.root = StandInApi(), replace(pod.root, domain=DOMAIN, shards=(), pools=())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pod.gate_tls / "tls.crt", pod.gate_tls / "tls.key")
    await pod.api.start(context)
    await pod.publish_keys(acme=ACME)
    try:
        async with pod.started(served_model=MODEL):
            await until(lambda: pod.gate.engine_ready)
            await pod.acked(await pod.publish([entry("acme")]))
            yield pod
    finally:
        await pod.api.stop()


@pytest.mark.claim("agents of both clients send every answer back in the next turn")
async def test_agents_of_both_clients_send_every_answer_back(gate: World, python: Path) -> None:
    url = f"http://127.0.0.1:{gate.gate.ports['http']}"
    agent = await asyncio.create_subprocess_exec(
        str(python), str(PROGRAM), url, ACME, MODEL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    printed, errors = await agent.communicate()
    assert agent.returncode == 0, errors.decode()[-3000:]
    talks = [json.loads(line) for line in printed.splitlines()]
    assert [(talk["client"], talk["streamed"]) for talk in talks] == [
        ("openai", False), ("openai", True), ("anthropic", False), ("anthropic", True),
    ]  # fmt: skip
    assert all(talk["calls"] for talk in talks), talks
