"""When the guard gives up on the cache server, and its log. No LMCache, no vLLM."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

# A child of the logger that vLLM configures, so that it appears in the engine's log.
logger = logging.getLogger("vllm.kvstrata.connector")

Result = TypeVar("Result")

START_PATIENCE_KEY = "kvstrata.start_patience_s"
LOOKUP_PATIENCE_KEY = "kvstrata.lookup_patience_s"
CHUNK_TOKENS_KEY = "kvstrata.chunk_tokens"


@dataclass(frozen=True, slots=True)
class Patience:
    """How long the engine waits for an answer to one lookup, and, without a configured chunk size, to start."""

    start_s: float = 600.0
    lookup_s: float = 5.0

    @classmethod
    def from_extra_config(cls, extra: Mapping[str, Any] | None) -> Patience:
        """Read `kv_connector_extra_config`. Raises ValueError for anything but positive numbers."""
        values, default = extra or {}, cls()
        start_s = float(values.get(START_PATIENCE_KEY, default.start_s))
        lookup_s = float(values.get(LOOKUP_PATIENCE_KEY, default.lookup_s))
        if start_s <= 0 or lookup_s <= 0:
            raise ValueError(f"{START_PATIENCE_KEY} and {LOOKUP_PATIENCE_KEY} must be positive")
        return cls(start_s, lookup_s)


def chunk_tokens(extra: Mapping[str, Any] | None) -> int | None:
    """Read the server's chunk size from `kv_connector_extra_config`. Raises ValueError unless it is positive."""
    value: int | None = (extra or {}).get(CHUNK_TOKENS_KEY)
    if value is not None and (type(value) is not int or value <= 0):
        raise ValueError(f"{CHUNK_TOKENS_KEY} must be a positive number of tokens")
    return value


def wait_for_server(
    connect: Callable[[], Result],
    patience_s: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    pause_s: float = 1.0,
) -> Result:
    """Return `connect()`, repeated for `patience_s` while it raises ConnectionError: a restart would take longer."""
    give_up_at_s = clock() + patience_s
    while True:
        try:
            return connect()
        except ConnectionError:
            if clock() >= give_up_at_s:
                raise
            logger.warning("The cache server does not answer yet; the engine waits for it")
            sleep(pause_s)


def absorb(
    subject: str,
    action: Callable[[], Result],
    otherwise: Callable[[], Result],
    *,
    clock: Callable[[], float] = time.monotonic,
) -> Result:
    """Return `action()`; if it raises, log the error and return `otherwise()`."""
    started_s = clock()
    try:
        return action()
    except Exception as error:
        waited_ms = 1000 * (clock() - started_s)
        logger.warning(
            "The cache server failed in %s after %d ms, which counts as a miss: %r", subject, waited_ms, error
        )
        return otherwise()
