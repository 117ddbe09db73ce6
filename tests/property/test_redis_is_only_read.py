"""A question writes nothing to Redis, so there is no write there at which the operator could die.

What else is sent, and by which modules, is named below.

A server that records every command stands in for Redis, because what is sent is the point and not what is answered.
"""

from __future__ import annotations

import ast
import asyncio
from pathlib import Path

import pytest

from kvstrata.clients.redis import probe
from kvstrata.clients.redis.probe import Access, Failure, ask

pytestmark = pytest.mark.claim("the operator's questions to a Redis server write nothing, and nothing else of it asks")

REPOSITORY = Path(__file__).resolve().parents[2]
OPERATOR = REPOSITORY / "operator" / "src" / "kvstrata"
OF_THE_CONNECTION = {"AUTH", "HELLO", "CLIENT SETINFO", "CLIENT SETNAME"}
PATIENCE_S = 60.0
INFO = b"redis_version:8.0.0\r\nused_memory:1\r\nmaxmemory:2\r\nrole:master\r\n"


class Recorder:
    """Answers as a Redis server would, and keeps what it was asked."""

    def __init__(self) -> None:
        self.commands: list[str] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        while head := await reader.readline():
            words = []
            for _ in range(int(head[1:])):
                size = int((await reader.readline())[1:])
                words.append((await reader.readexactly(size + 2))[:-2].decode())
            command = words[0].upper()
            self.commands.append(f"{command} {words[1].upper()}" if command == "CLIENT" else command)
            if command == "INFO":
                writer.write(b"$%d\r\n%s\r\n" % (len(INFO), INFO))
            else:
                writer.write(b"+OK\r\n")
        writer.close()


@pytest.mark.parametrize(("username", "password"), [(None, None), (None, "secret"), ("operator", "secret")])
async def test_a_question_sends_nothing_that_writes(
    username: str | None, password: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "CONNECT_TIMEOUT_S", PATIENCE_S)
    recorder = Recorder()
    server = await asyncio.start_server(recorder.serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    access = Access(password, None, username)
    figures = await ask(f"{host}:{port}", access, lambda client: client.info(), timeout_s=PATIENCE_S)
    server.close()
    assert not isinstance(figures, Failure), figures
    assert "INFO" in recorder.commands
    assert set(recorder.commands) <= {"INFO"} | OF_THE_CONNECTION


SPEAKERS = {
    "clients/redis/probe.py": "this file",
    "clients/redis/external.py": "tests/tiers/test_external_checks.py",
    "clients/redis/nodes.py": "tests/topology",
    "clients/redis/connection.py": "tests/topology",
    "clients/redis/slot_keys.py": "tests/topology",
    "clients/redis/slot_mover.py": "tests/topology",
    "clients/redis/admin.py": "tests/tiers/test_credentials.py",
    "clients/redis/verifier.py": "tests/tiers/test_erase.py",
}
"""Which module speaks to Redis, and where it is shown what it sends, and that it may be ended anywhere."""


def test_nothing_else_of_the_operator_speaks_to_redis() -> None:
    speakers = {
        path.relative_to(OPERATOR).as_posix()
        for path in OPERATOR.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Import) and any(alias.name.split(".")[0] == "redis" for alias in node.names))
        or (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "redis" and not node.level)
    }
    assert speakers == SPEAKERS.keys()
    assert all((REPOSITORY / tests).exists() for tests in SPEAKERS.values() if tests != "this file")
