"""An engine that starts although its cache server is away.

LMCache's connector (0.5.6) asks the server for its chunk size before anything else, and fails without an answer. Told
the chunk size beforehand, it can do without; what is then promised for the server is checked when it appears.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lmcache.integration.vllm import vllm_multi_process_adapter as lmcache_adapter

from .failures import logger

CHECK_TIMEOUT_S = 3.0


@contextmanager
def chunk_size_promised(tokens: int | None) -> Iterator[list[Any]]:
    """While the block runs, connectors that get no answer take `tokens` for the server's chunk size.

    Yields the clients whose server did not answer, as they are found out. With None, nothing is changed.
    """
    absent: list[Any] = []
    ask = lmcache_adapter.get_lmcache_chunk_size
    if tokens is None:
        yield absent
        return

    def promised(client: Any, timeout: float = CHECK_TIMEOUT_S) -> int:
        try:
            return int(ask(client, timeout=timeout))
        except (TimeoutError, ConnectionError):
            logger.warning("The cache server does not answer; the engine starts without it")
            absent.append(client)
            return tokens

    lmcache_adapter.get_lmcache_chunk_size = promised
    try:
        yield absent
    finally:
        lmcache_adapter.get_lmcache_chunk_size = ask


def keeps_promise(client: Any, tokens: int) -> bool:
    """Return whether a server that has appeared has this chunk size. With another its blocks would be misread."""
    try:
        found = int(lmcache_adapter.get_lmcache_chunk_size(client, timeout=CHECK_TIMEOUT_S))
    except Exception as error:
        # LMCache's heartbeat calls this with every beat until it is True, and forbids it to raise.
        logger.warning("The cache server has appeared and does not tell its chunk size yet: %r", error)
        return False
    if found != tokens:
        logger.error(
            "The cache server's chunks are of %d tokens, and the engine was started for %d: it is not used",
            found,
            tokens,
        )
    return found == tokens
