"""A cache server that is killed at any moment leaves right blocks, or none."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.files.dying_writer import LIMIT_BLOCKS
from tests.files.file_driver import BLOCK_BYTES, FILE_BYTES, FileDriver, block, files_in, on_disk_bytes
from tests.tiers.gate_stand_in import KEYSPACE_A, KEYSPACE_B, GateStandIn

ROOT = Path(__file__).parents[2]


def test_a_writer_that_is_killed_at_any_step_leaves_nothing_wrong_behind(
    start: Callable[..., FileDriver], gate: GateStandIn, tmp_path: Path
) -> None:
    directory = tmp_path / "steps"
    directory.mkdir()
    path = os.pathsep.join(str(ROOT / part) for part in ("operator/src", "sidecar/src", "."))
    ended = subprocess.run(
        [sys.executable, "-m", "tests.files.dying_writer", str(directory)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    steps = int(ended.stdout)
    assert steps > 40
    left_behind = 0
    for step in range(1, steps + 1):
        path_of_step = directory / str(step)
        of_a = [file for file in files_in(path_of_step) if file.parent.name == KEYSPACE_A]
        assert len(of_a) <= LIMIT_BLOCKS, "the limit held at the moment of death, what was being written included"
        left_behind += any(file.name.startswith(".") for file in of_a)
        driver = start(path_of_step)
        driver.until_ready()
        gate.allow(KEYSPACE_A, KEYSPACE_B)
        wanted = [block(keyspace, number) for keyspace in (KEYSPACE_A, KEYSPACE_B) for number in (1, 2, 3, 4)]
        there = driver.lookup(wanted)
        hits, views = driver.load(wanted)
        assert hits[:4] == there[:4], "what is found is whole"
        half_purged = sum(there) - sum(hits)
        assert half_purged in (0, 1), "but for the one that a purge was just overwriting"
        for one, hit, view in zip(wanted, hits, views, strict=True):
            assert not hit or bytes(view) == bytes([one.chunk_hash[3]]) * BLOCK_BYTES
        assert len(files_in(path_of_step)) == sum(hits)
        assert driver.tier.state().used_bytes == on_disk_bytes(path_of_step) == sum(hits) * FILE_BYTES
        driver.close()
    assert left_behind, "some deaths left a temporary file, which the next start removed"
