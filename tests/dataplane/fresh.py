"""What every test of a real LMCache server has of its own, so that tests may share the server; and waiting for it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

CHUNKS = 4
"""Chunks of the prompts that the engine stand-in stores and reads."""

BOUND_MS = 20_000
"""No request may wait longer for a tier that says nothing, which would be waited for without end. The deadlines of a
lookup and a load are a part of it, and the rest is for a busy machine."""

WITHIN_S = 120.0
_sequences = itertools.count(1)
_keyspaces = itertools.count(0xF11E)


def fresh_sequence() -> int:
    """Return the number of a prompt that no other test has, nor any of the 999 that follow it."""
    return next(_sequences) * 1000


def fresh_keyspace() -> str:
    """Return a keyspace that no other test has, told apart by the digits that name its scope."""
    return f"{next(_keyspaces):012x}".ljust(32, "0")


def until(condition: Callable[[], object], what: Callable[[], object] = lambda: "") -> None:
    """Wait until a condition holds; `what` returns what to show if it never does."""
    give_up_at_s = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < give_up_at_s, what()
        time.sleep(0.02)
