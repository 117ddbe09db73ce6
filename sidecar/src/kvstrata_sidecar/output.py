"""Keyspaces in the output of processes whose loggers are not ours: the cache server and the engine.

LMCache and vLLM print block keys and requests, for example when a tier is away. A caller that knows a keyspace and
reaches the engine reads the scope's blocks, so logs show no more of it than its first digits.
"""

from __future__ import annotations

import logging
import re
import sys
from functools import cache
from typing import Any

from kvstrata.contract.policy.keyspace import KEYSPACE_HEX_DIGITS, SCOPE_DIGITS

# Longer runs too: a keyspace beside other digits, or its digits as hexadecimal bytes.
_LONG = re.compile(rf"([0-9a-f]{{{SCOPE_DIGITS}}})[0-9a-f]{{{KEYSPACE_HEX_DIGITS - SCOPE_DIGITS},}}")


@cache
def shorten_keyspaces() -> None:
    """Cut hexadecimal numbers as long as a keyspace to `SCOPE_DIGITS`, from now on, in all that this process logs or
    prints: records of all loggers, tracebacks, warnings. Output of native code is not covered."""
    render = logging.Handler.format
    logging.Handler.format = lambda self, record: shortened(render(self, record))  # type: ignore[method-assign]
    # Handlers have these very objects.
    for stream in {sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__} - {None}:
        _shorten(stream)


def shortened(text: str) -> str:
    return _LONG.sub(r"\1", text)


def _shorten(stream: Any) -> None:
    write = stream.write
    stream.write = lambda text: write(shortened(text))
