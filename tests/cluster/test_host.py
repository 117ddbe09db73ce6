"""What the package reads from the host, runs on it and tells its user."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from e2e.cluster.cgroups import Hierarchy, parse_hierarchies
from e2e.cluster.processes import kill_recorded, record_pid, recorded_pid, spawn, wait_until
from e2e.cluster.progress import QUIET_BELOW_S, ClusterError, Durations, Progress, describe
from e2e.cluster.progress import main as run_step
from e2e.cluster.rootfs import fio_command, server_command
from e2e.cluster.settings import Paths

pytestmark = pytest.mark.claim("a step of the local cluster tells what it does, and ends what it started")

JOINT_V1 = """\
24 18 0:20 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd
25 18 0:21 / /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct
26 18 0:22 /outer /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
27 18 0:23 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
28 18 0:24 / /proc rw - proc proc rw
"""


def test_every_mounted_hierarchy_is_found_with_our_own_group_in_it() -> None:
    own = "4:cpu,cpuacct:/user\n3:memory:/outer/inner\n2:hugetlb:/\n1:name=systemd:/\n0::/session\n"
    assert parse_hierarchies(own, JOINT_V1) == [
        Hierarchy("cpu,cpuacct", Path("/sys/fs/cgroup/cpu,cpuacct/user")),
        Hierarchy("memory", Path("/sys/fs/cgroup/memory/inner")),
        Hierarchy("none,name=systemd", Path("/sys/fs/cgroup/systemd")),
        Hierarchy("", Path("/sys/fs/cgroup/unified/session")),
    ]


def test_a_recorded_process_is_ended_and_forgotten(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    process = spawn(["sleep", "60"], log=tmp_path / "log", pid_file=pid_file)
    assert recorded_pid(pid_file) == process.pid
    kill_recorded(pid_file)
    assert recorded_pid(pid_file) is None
    assert not pid_file.exists()
    assert not Path(f"/proc/{process.pid}").exists()


def test_a_process_that_got_the_recorded_id_later_is_left_alone(tmp_path: Path) -> None:
    innocent = subprocess.Popen(["sleep", "60"])
    try:
        pid_file = tmp_path / "pid"
        record_pid(pid_file, innocent.pid)
        pid, started = pid_file.read_text().split()
        pid_file.write_text(f"{pid} {int(started) - 1}\n")
        kill_recorded(pid_file)
        assert innocent.poll() is None
    finally:
        innocent.kill()
        innocent.wait()


def test_an_error_tells_the_end_of_the_log_and_what_to_do(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("\n".join(f"line {number}" for number in range(100)))
    text = describe(ClusterError("it failed", advice="do this", log=log))
    assert "it failed" in text
    assert "line 99" in text
    assert "line 50" not in text
    assert "do this" in text


def test_a_failed_step_is_not_reported_as_done() -> None:
    stream = io.StringIO()
    with pytest.raises(ValueError, match="x"), Progress(stream).step("work"):
        raise ValueError("x")
    assert stream.getvalue().startswith("work: failed (")


def test_a_step_says_that_it_still_runs_after_two_seconds() -> None:
    stream = io.StringIO()
    with Progress(stream).step("work"):
        wait_until(lambda: bool(stream.getvalue()), timeout_s=60)
    shown = re.fullmatch(r"work \.\.\. (\d+) s", stream.getvalue().splitlines()[0])
    assert shown is not None
    assert 2 <= int(shown[1]) < 10


@pytest.mark.redis
@pytest.mark.parametrize(
    ("image", "program", "version"),
    [
        ("redis", "redis-server", "Redis server v=8.0."),
        ("redis-7", "redis-server", "Redis server v=7.0."),
        ("valkey", "valkey-server", "Valkey server v=8.1."),
        ("valkey", "valkey-cli", "valkey-cli 8.1."),
    ],
)
def test_the_programs_of_a_servers_image_run_on_the_host(image: str, program: str, version: str) -> None:
    if not Paths().unpacked(image).is_dir():
        pytest.skip(f"not built: `python3 -m e2e.images build {image}`")
    shown = subprocess.run([*server_command(image, program), "--version"], capture_output=True, text=True, check=True)
    assert shown.stdout.startswith(version)


@pytest.mark.skipif(
    not (Paths().rootfs / "usr/bin/fio").exists(),
    reason="needs the root file system of `python3 -m e2e.cluster build`, made since fio is in it",
)
def test_the_fio_of_the_root_file_system_runs_on_the_host() -> None:
    shown = subprocess.run([*fio_command(), "--version"], capture_output=True, text=True, check=True)
    assert shown.stdout.startswith("fio-3.")


def test_the_command_line_explains_itself_without_touching_anything() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "e2e.cluster", "--help"],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    for verb in ("up", "down", "build", "load", "image", "control-plane"):
        assert re.search(rf"^    {verb}\b", shown.stdout, re.MULTILINE), verb


def first_line(durations: Durations, step: str) -> str:
    """What a step says as soon as it says something."""
    stream = io.StringIO()
    with Progress(stream, durations).step(step):
        wait_until(lambda: "\n" in stream.getvalue(), timeout_s=60)
    return stream.getvalue().splitlines()[0]


def test_a_long_step_shows_how_long_it_took_the_last_time(tmp_path: Path) -> None:
    typical = tmp_path / "typical.toml"
    typical.write_text('"build" = 170\n"pull" = 5\n')
    durations = Durations(tmp_path / "durations.json", typical)
    assert durations.estimate_s("build (3 MiB)") == 170
    assert re.fullmatch(r"build \(4 MiB\) \.\.\. \d+ s of about 170 s", first_line(durations, "build (4 MiB)"))
    assert 2 <= (durations.estimate_s("build") or 0) < 170, "what it took here"
    durations.record("load localhost/one:0.1.0 into the cluster (2 MiB)", 40.0)
    assert durations.estimate_s("load localhost/one:local into the cluster (9 MiB)") == 40.0
    assert re.fullmatch(r"pull \.\.\. \d+ s", first_line(durations, "pull")), "a short step needs no estimate"


def _fail_late() -> None:
    time.sleep(QUIET_BELOW_S + 0.1)
    raise ValueError("x")


def test_only_steps_that_succeed_are_recorded_and_only_while_their_folder_is_there(tmp_path: Path) -> None:
    durations = Durations(tmp_path / "gone" / "durations.json", tmp_path / "typical.toml")
    durations.record("build", 40.0)
    assert durations.estimate_s("build") is None
    assert not (tmp_path / "gone").exists()
    (tmp_path / "durations.json").write_text("{damaged")
    durations = Durations(tmp_path / "durations.json", tmp_path / "typical.toml")
    with pytest.raises(ValueError, match="x"), Progress(io.StringIO(), durations).step("work"):
        _fail_late()
    assert durations.estimate_s("work") is None
    durations.record("work", 31.0)
    assert durations.estimate_s("work") == 31.0


def test_a_command_is_run_as_a_step(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_step(["words", sys.executable, "-c", "print('fine')"]) == 0
    assert run_step(["words", sys.executable, "-c", "print('wrong'); raise SystemExit(3)"]) == 3
    shown = capfd.readouterr()
    assert shown.out.splitlines() == ["fine", "wrong"]
    assert [line.partition(" (")[0] for line in shown.err.splitlines()] == ["words: done", "words: failed"]
