"""A server's processor time, told apart by who used it."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from bench.erase.clocks import ServerClock, Used

SPIN = """
import sys, threading, time
def spin(seconds):
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass
def beside():
    go.wait()
    spin(0.05)
    print("beside", flush=True)
    end.wait()
go, end = threading.Event(), threading.Event()
threading.Thread(target=beside).start()
print("ready", flush=True)
sys.stdin.readline()
go.set()
sys.stdin.readline()
spin(0.05)
print("serving", flush=True)
sys.stdin.readline()
end.set()
"""


def test_what_threads_beside_use_is_not_the_serving_threads() -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", SPIN], text=True, **pipes) as server:  # type: ignore[call-overload]
        until_told(server, "ready")
        clock = ServerClock(server.pid)
        ready = clock.read()
        tell(server)
        until_told(server, "beside")
        beside = settled(clock, ready, 0.05)
        tell(server)
        until_told(server, "serving")
        serving = clock.read().since(ready).since(beside)
        tell(server)
    assert beside.beside_s >= 0.05
    assert beside.serving_s < 0.05
    assert serving.serving_s >= 0.05
    assert serving.beside_s < 0.05


def settled(clock: ServerClock, before: Used, least_s: float) -> Used:
    """Return what was used since `before`, when the kernel has brought a waiting thread's account up to date."""
    give_up_at_s = time.monotonic() + 120
    while (used := clock.read().since(before)).beside_s < least_s and time.monotonic() < give_up_at_s:
        os.sched_yield()
    return used


def until_told(server: subprocess.Popen[str], word: str) -> None:
    assert server.stdout is not None
    assert server.stdout.readline() == word + "\n"


def tell(server: subprocess.Popen[str]) -> None:
    assert server.stdin is not None
    server.stdin.write("\n")
    server.stdin.flush()
