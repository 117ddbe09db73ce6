"""The script that starts an engine passes on how it is asked to end and how it ended."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvstrata.objects.pod.engine import START_SCRIPT

IN_TIME_S = 30

GRACEFUL = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.2), print("drained", flush=True), sys.exit(3)))
print("up", flush=True)
while True: time.sleep(0.05)
"""


def _started(socket: Path, program: str) -> subprocess.Popen[str]:
    command = ("sh", "-c", START_SCRIPT, str(socket), sys.executable, "-c", program)
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_the_socket_of_an_earlier_start_is_removed(tmp_path: Path) -> None:
    socket = tmp_path / "engine.sock"
    socket.touch()
    with _started(socket, "pass") as shell:
        assert shell.wait(IN_TIME_S) == 0
    assert not socket.exists()


@pytest.mark.parametrize("code", [0, 7])
def test_it_ends_as_the_engine_ends(tmp_path: Path, code: int) -> None:
    with _started(tmp_path / "engine.sock", f"raise SystemExit({code})") as shell:
        assert shell.wait(IN_TIME_S) == code


def test_an_engine_that_drains_is_waited_for(tmp_path: Path) -> None:
    with _started(tmp_path / "engine.sock", GRACEFUL) as shell:
        assert shell.stdout is not None
        assert shell.stdout.readline() == "up\n"
        shell.terminate()
        assert shell.wait(IN_TIME_S) == 3
        assert shell.stdout.read() == "drained\n"


def test_an_engine_that_still_initialises_ends_at_once(tmp_path: Path) -> None:
    with _started(tmp_path / "engine.sock", "import time; print('up', flush=True); time.sleep(3600)") as shell:
        assert shell.stdout is not None
        assert shell.stdout.readline() == "up\n"
        shell.terminate()
        assert shell.wait(IN_TIME_S) == 128 + signal.SIGTERM
