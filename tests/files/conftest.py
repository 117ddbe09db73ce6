"""Fixtures: a gate stand-in, and file tiers on a directory of the machine's own disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.files.file_driver import FileDriver
from tests.tiers.gate_stand_in import KEYSPACE_A, KEYSPACE_B, GateStandIn


@pytest.fixture
def gate(tmp_path: Path) -> GateStandIn:
    return GateStandIn(tmp_path)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "disk"
    path.mkdir()
    return path


@pytest.fixture
def start(gate: GateStandIn, directory: Path) -> Iterator[Callable[..., FileDriver]]:
    """Start a tier on `directory`; what was started before on it has to be closed."""
    drivers: list[FileDriver] = []

    def start(path: Path = directory, **options: Any) -> FileDriver:
        drivers.append(FileDriver(gate, path, **options))
        return drivers[-1]

    yield start
    for driver in drivers:
        if not driver.tier._closed:
            driver.close()


@pytest.fixture
def driver(start: Callable[..., FileDriver], gate: GateStandIn) -> FileDriver:
    driver = start()
    driver.until_ready()
    gate.allow(KEYSPACE_A, KEYSPACE_B)
    return driver
