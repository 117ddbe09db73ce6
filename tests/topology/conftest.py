"""Fixtures: rigs of real servers, and a cluster that never was."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstrata.clients.redis import connection, slot_keys
from kvstrata.model.redis.cluster import Cluster
from tests.support.amounts import SOAK
from tests.tiers.server_kinds import DEFAULT, KINDS, ServerKind
from tests.topology import looks
from tests.topology.rig import Rig


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    own = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    if "server_kind" in metafunc.fixturenames and "server_kind" not in own:
        marked = metafunc.definition.get_closest_marker("on_every_server") is not None
        metafunc.parametrize("server_kind", KINDS if marked or SOAK else (DEFAULT,), ids=str, scope="session")


PATIENT_S = 30.0


@pytest.fixture(autouse=True)
def patient_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever moves slots waits for servers that a busy machine starves."""
    monkeypatch.setattr(connection, "CONNECT_TIMEOUT_S", PATIENT_S)
    monkeypatch.setattr(connection.ServerLine.ask, "__defaults__", (PATIENT_S,))
    monkeypatch.setattr(connection.ServerLine.one, "__kwdefaults__", {"timeout_s": PATIENT_S})
    monkeypatch.setattr(slot_keys, "MIGRATE_TIMEOUT_MS", int(1000 * PATIENT_S))
    monkeypatch.setattr(slot_keys, "MIGRATE_ANSWER_S", 2 * PATIENT_S)


@pytest.fixture
def make_rig(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    """Make rigs of one's own."""
    made: list[Rig] = []

    def make(kind: ServerKind = DEFAULT, **options: Any) -> Rig:
        made.append(Rig(tmp_path / f"rig-{len(made)}", kind.command(), **{"users": True} | options))
        made[-1].start()
        return made[-1]

    yield make
    for rig in made:
        rig.close()


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, server_kind: ServerKind) -> Iterator[Rig]:
    rig = Rig(tmp_path_factory.mktemp("rig"), server_kind.command(), users=True)
    rig.start()
    yield rig
    rig.close()


@pytest.fixture
async def rig(servers: Rig) -> AsyncIterator[Rig]:
    """Three shards of two servers, settled, which the tests of a module pass on to each other."""
    servers.nodes = servers.connect()
    await servers.settle(until=servers.is_up)
    yield servers
    servers.thaw_all()
    await servers.nodes.close()


@pytest.fixture
def cluster() -> Cluster:
    """Three shards of two, all well."""
    return looks.cluster(looks.even(3), replicas=1)
