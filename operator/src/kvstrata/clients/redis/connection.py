"""A connection to one server of a managed cluster; sends nothing to another node id or without leadership."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import redis.asyncio as redis
from redis import exceptions

from kvstrata.clients.redis.probe import CONNECT_TIMEOUT_S, Argument, answers, close

Dial = Callable[[str, int], redis.Connection]
"""Makes an unopened connection to a server's host and port, as the operator's user."""

ANSWER_TIMEOUT_S = 2.0


class MayNotWriteError(Exception):
    """This process does not lead any more; the new leader may be at the same work."""


class ServerAwayError(Exception):
    """A server does not answer, or another answers in its place. The message names it and the cause."""


class MoveFailedError(Exception):
    """A move of slots cannot continue. The message names server and slot; the next look finds the remaining work."""


class ServerLine:
    """A connection to one server. `name` is for messages; `may_write` is checked before anything is sent."""

    def __init__(self, node_id: str, name: str, connection: redis.Connection, may_write: Callable[[], bool]) -> None:
        self.node_id = node_id
        self.name = name
        self._connection = connection
        self._may_write = may_write
        self._open = False

    async def ask(self, commands: Sequence[Sequence[Argument]], timeout_s: float = ANSWER_TIMEOUT_S) -> list[Any]:
        """Send commands in one pipeline; return the answers as bytes, errors among them. Raises ServerAwayError,
        after which the connection may be used again, and MayNotWriteError."""
        if not commands:
            return []
        try:
            if not self._open:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    await self._begin()
            async with asyncio.timeout(timeout_s):
                return await self._exchange(commands)
        except (exceptions.RedisError, OSError, TimeoutError) as error:
            await self.close()
            # The text of a connection error never holds the command.
            raise ServerAwayError(f"{self.name}: {str(error) or type(error).__name__}") from None
        except BaseException:
            await self.close()
            raise

    async def one(self, *words: Argument, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
        """Send one command; raises the ResponseError that it is answered with."""
        (answer,) = await self.ask([words], timeout_s)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def close(self) -> None:
        """Close the connection; commands in flight may still be carried out."""
        self._open = False
        await close(self._connection)

    async def _begin(self) -> None:
        await self._connection.connect()  # type: ignore[no-untyped-call]
        (identity,) = await self._exchange([("CLUSTER", "MYID")])
        if identity != self.node_id.encode():
            raise exceptions.ConnectionError("another server answers in its place")
        self._open = True

    async def _exchange(self, commands: Sequence[Sequence[Argument]]) -> list[Any]:
        if not self._may_write():
            raise MayNotWriteError
        return await answers(self._connection, commands, disable_decoding=True)
