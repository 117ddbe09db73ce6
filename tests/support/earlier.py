"""The last version before fingerprints, out of this repository's history: its code in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

HISTORY = (Path(__file__).resolve().parents[2] / ".local").resolve().parent
"""The repository: a copy of its work tree, in which a planted defect is tested, has its `.local` and no history."""

VERSION = "9fda0e5f5773"
"""The commit: blocks have no fingerprint in their names, and values begin with `kvs2`."""

_KEPT: list[tempfile.TemporaryDirectory[str]] = []


@cache
def code() -> Path:
    """Return a folder with its files, which goes with this process."""
    archive = subprocess.run(["git", "archive", VERSION], cwd=HISTORY, check=True, stdout=subprocess.PIPE).stdout
    folder = tempfile.TemporaryDirectory(prefix="kvs-earlier-")
    _KEPT.append(folder)
    with tarfile.open(fileobj=BytesIO(archive)) as tar:
        tar.extractall(folder.name, filter="data")
    return Path(folder.name)


def environment() -> dict[str, str]:
    """Return an environment in which Python finds its packages, and none of ours."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(str(code() / part) for part in ("operator/src", "sidecar/src", "."))
    }


class EarlierPod:
    """A cache server's tier of that version, with the gate stand-in of its tests; it allows keyspaces A and B.

    `place` is a Redis server's port or a directory. With `encrypted` blocks are encrypted under the tests' keys.
    """

    def __init__(self, place: int | Path, scratch: Path, *, encrypted: bool = False) -> None:
        scratch.mkdir()
        self._log = scratch / "log"
        kind = "redis" if isinstance(place, int) else "files"
        program = str(Path(__file__).with_name("earlier_pod.py"))
        self._process = subprocess.Popen(
            [sys.executable, program, kind, str(place), str(scratch), "Required" if encrypted else "Disabled"],
            cwd=code(),
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log.open("wb"),
        )

    def ask(self, do: str, **more: Any) -> Any:
        """Have it do something (see `earlier_pod.py`); returns the answer. Fails with its log if it ended."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps({"do": do, **more}).encode() + b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, self._log.read_text()[-4000:]
        return json.loads(line)

    def close(self) -> None:
        """End it, and fail if it logged an error."""
        self._process.communicate()
        log = self._log.read_text()
        assert self._process.returncode == 0, log[-4000:]
        assert "Traceback" not in log, log[-4000:]
