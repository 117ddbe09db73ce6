"""An engine whose cache server ends, in three ways: what requests see, by their times and by the engine's own words."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

from tests.dataplane.engine_process import EngineProcess
from tests.dataplane.lmcache_server import LMCacheServer
from tests.dataplane.memory_killer import kill_for_memory
from tests.tiers.gate_stand_in import KEYSPACE_A

PROMPT_BYTES = 600
_NUMBERS = count()
"""Of prompts, so that each is a new one."""

REUSE_IS_BACK_S = 60.0
HEARD_WITHIN_S = 30.0

HEARD = "The cache server is gone"
"""The guard's words, of the scheduler's and of the worker's connection, when they are closed."""

WAITED = re.compile(r"A lookup was given up after (\d+) ms: the cache|The cache server failed in .* after (\d+) ms")
TIMED_OUT = re.compile(r"given up after \d+ ms: no answer|timed out|not available within timeout")
"""What the guard, lookups and transfers say when a timer has run out."""


def kill(server: LMCacheServer) -> None:
    server.kill_server()


def terminate(server: LMCacheServer) -> None:
    server.kill_server(signal.SIGTERM)


def run_out_of_memory(server: LMCacheServer) -> None:
    kill_for_memory(server.process)


@dataclass
class Pod:
    """An engine, and a cache server that ends in some way."""

    server: LMCacheServer
    engine: EngineProcess
    end: Callable[[LMCacheServer], None]

    def ask(self) -> float:
        """Send a new prompt; return the seconds that it took."""
        return self.engine.complete(f"{next(_NUMBERS)} ".ljust(PROMPT_BYTES, "x"), KEYSPACE_A)

    def reuse_is_back(self) -> bool:
        """Whether a prompt that is sent a second time is found in the cache server."""
        text = f"{next(_NUMBERS)} ".ljust(PROMPT_BYTES, "x")
        self.engine.complete(text, KEYSPACE_A)
        time.sleep(0.3)
        before = self.engine.external_hits()
        self.engine.complete(text, KEYSPACE_A)
        return self.engine.external_hits() > before

    def come_back(self) -> None:
        """Start the server and see reuse return, without touching the engine."""
        self.server.start_server_again()
        give_up_at_s = time.monotonic() + REUSE_IS_BACK_S
        while not self.reuse_is_back():
            assert time.monotonic() < give_up_at_s, self.engine.log_file.read_text()[-6000:]

    @contextmanager
    def no_request_waits(self) -> Iterator[list[int]]:
        """See that the engine hears of the server's end in the block, and that no timer runs out.

        Yields a list that holds, in the end, each wait for the server that was in vain, in milliseconds.
        """
        before = len(self.engine.log_file.read_text())
        waits_ms: list[int] = []
        yield waits_ms
        give_up_at_s = time.monotonic() + HEARD_WITHIN_S
        while (said := self.engine.log_file.read_text()[before:]).count(HEARD) < 2:
            assert time.monotonic() < give_up_at_s, said[-6000:]
            time.sleep(0.02)
        assert said.count(HEARD) == 2, said[-6000:]
        assert not TIMED_OUT.findall(said), said[-6000:]
        waits_ms += [int(one or other) for one, other in WAITED.findall(said)]


ENDS = (kill, run_out_of_memory, terminate)
