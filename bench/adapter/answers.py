"""Commands to a measured process and its answers: JSON objects, one a line, on standard input and output."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any


def serve(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answer questions until standard input ends, then end the process; an error is an answer, too."""
    # Output of libraries goes to the log, not among the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            reply = answer(json.loads(line))
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(reply) + "\n")
    os._exit(0)


def timed(do: Callable[[], None]) -> tuple[float, float]:
    """Return how many seconds something took, and how many processor seconds of this process."""
    begun_cpu_s, begun_s = time.process_time(), time.perf_counter()
    do()
    return time.perf_counter() - begun_s, time.process_time() - begun_cpu_s
