"""Start programs, wait for conditions, and end exactly the processes that were started here."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from e2e.cluster.progress import ClusterError


def run_logged(
    command: Sequence[str | Path],
    *,
    log: Path,
    what: str,
    advice: str = "",
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> None:
    """Run a program to its end with its output in ``log``.

    Raises:
        ClusterError: the program failed or does not exist; carries the log and ``advice``.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        try:
            finished = subprocess.run(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=cwd,
                env=None if env is None else dict(env),
                check=False,
            )
        except FileNotFoundError as error:
            raise ClusterError(f"{what}: {error.filename} is not there", advice=advice) from error
    if finished.returncode != 0:
        raise ClusterError(f"{what} failed with exit code {finished.returncode}", advice=advice, log=log)


def in_own_namespaces(command: Sequence[str | Path]) -> list[str | Path]:
    """A command line that gives a program mount and PID namespaces of its own.

    Its mounts vanish with it, and all of its descendants end when this process does, however either is ended.
    """
    return [
        *("setpriv", "--pdeathsig", "KILL"),
        *("unshare", "--mount", "--pid", "--fork", "--kill-child"),
        *command,
    ]


def output_of(command: Sequence[str | Path], *, env: Mapping[str, str] | None = None, stdin: str = "") -> str:
    """The standard output of a program that is expected to succeed quickly.

    Raises:
        ClusterError: the program failed; carries its standard error.
    """
    finished = subprocess.run(
        [str(part) for part in command],
        input=stdin,
        capture_output=True,
        text=True,
        env=None if env is None else dict(env),
        check=False,
    )
    if finished.returncode != 0:
        program = " ".join(str(part) for part in command[:3])
        raise ClusterError(f"{program} ... failed: {(finished.stderr or finished.stdout).strip()[-2000:]}")
    return finished.stdout


def spawn(
    command: Sequence[str | Path], *, log: Path, pid_file: Path, env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a program that outlives this one, in a session of its own, and record its identity in ``pid_file``."""
    log.parent.mkdir(parents=True, exist_ok=True)
    pid_file.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=None if env is None else dict(env),
            start_new_session=True,
        )
    record_pid(pid_file, process.pid)
    return process


def record_pid(pid_file: Path, pid: int) -> None:
    """Write a process' identity: its id and its start time, because ids are used again."""
    pid_file.write_text(f"{pid} {_start_time(pid) or 0}\n")


def recorded_pid(pid_file: Path) -> int | None:
    """The recorded process' id if that very process still runs, else None."""
    try:
        pid_text, started_text = pid_file.read_text().split()
    except (OSError, ValueError):
        return None
    pid = int(pid_text)
    return pid if _start_time(pid) == int(started_text) else None


def kill_recorded(pid_file: Path, *, timeout_s: float = 5.0) -> None:
    """End the recorded process at once (SIGKILL), wait until it is gone, and forget it."""
    pid = recorded_pid(pid_file)
    if pid is not None:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        wait_until(lambda: not _runs(pid), timeout_s=timeout_s)
    pid_file.unlink(missing_ok=True)


def wait_until(condition: Callable[[], bool], *, timeout_s: float, interval_s: float = 0.05) -> bool:
    """Poll ``condition`` until it holds; False when it did not within ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(interval_s)
    return True


def children_of(pid: int) -> list[int]:
    """Ids of the direct children of a process."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [int(child) for child in text.split()]


def _runs(pid: int) -> bool:
    """True while the process exists and is no zombie. A zombie child of ours is reaped on the way."""
    fields = _stat_fields(pid)
    if fields is None or fields[0] != "Z":
        return fields is not None
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    return False


def _start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None when it does not run."""
    fields = _stat_fields(pid)
    if fields is None or fields[0] == "Z":
        return None
    return int(fields[19])


def _stat_fields(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat after the command's name, which may itself hold spaces and brackets."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return text.rpartition(")")[2].split()
