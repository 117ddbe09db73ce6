"""Watching objects, to see when a write took effect.

The clock is read when the bytes of an event have arrived and before they are decoded. Where only names and versions
matter a watch asks for metadata alone, which keeps its cost away from the measurement.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from bench.apiserver import ApiAccess, Connection, Request
from kvstrata.clients.resources import Resource

METADATA_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
EVENT_METADATA_ONLY = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"

Seen = Mapping[str, Any]


@dataclass(slots=True)
class _Waiter:
    holds: Callable[[Seen], bool]
    seen_at: asyncio.Future[float]


@dataclass(slots=True)
class Watch:
    """Follows one collection. Use it as an asynchronous context manager.

    `objects` holds the last state by name, `added_at` when a name appeared first (in seconds of `time.monotonic`),
    `events` how many events there were since the start, `last_at` when the last one came.
    """

    server: ApiAccess
    resource: Resource
    namespace: str
    metadata_only: bool = False
    objects: dict[str, Seen] = field(default_factory=dict)
    added_at: dict[str, float] = field(default_factory=dict)
    events: int = 0
    last_at: float = 0.0
    on_event: Callable[[str, float], None] | None = None
    """Called with an object's name and the time, for every event."""
    _waiters: dict[str, list[_Waiter]] = field(default_factory=dict)
    _task: asyncio.Task[None] | None = None
    _connection: Connection | None = None

    async def __aenter__(self) -> Watch:
        accept = METADATA_ONLY if self.metadata_only else "application/json"
        self._connection = await self.server.connect()
        listed = await self._connection.send(Request("GET", self.resource.path(self.namespace), accept=accept))
        for item in listed["items"] or ():
            self._take(item, time.monotonic())
        self._task = asyncio.create_task(self._follow(self._connection, listed["metadata"]["resourceVersion"]))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._connection is not None:
            await self._connection.close()

    async def seen(self, name: str, holds: Callable[[Seen], bool], timeout_s: float) -> float:
        """Return the time at which `holds(object)` was first seen to be true. Raises TimeoutError."""
        found = self.objects.get(name)
        if found is not None and holds(found):
            return time.monotonic()
        waiter = _Waiter(holds, asyncio.get_running_loop().create_future())
        self._waiters.setdefault(name, []).append(waiter)
        try:
            async with asyncio.timeout(timeout_s):
                return await waiter.seen_at
        except TimeoutError:
            status = json.dumps((self.objects.get(name) or {}).get("status"))[:2000]
            raise TimeoutError(
                f"{self.resource.kind} {name} is not as expected after {timeout_s:g} s: {status}"
            ) from None

    async def _follow(self, connection: Connection, version: str) -> None:
        path = f"{self.resource.path(self.namespace)}?watch=1&resourceVersion={version}&timeoutSeconds=3600"
        accept = EVENT_METADATA_ONLY if self.metadata_only else "application/json"
        try:
            async for line in connection.lines(Request("GET", path, accept=accept)):
                at = time.monotonic()
                event = json.loads(line)
                if event["type"] == "ERROR":
                    raise ConnectionError(f"the watch of {self.resource.plural} ended: {event['object']}")
                if event["type"] == "DELETED":
                    self.objects.pop(event["object"]["metadata"]["name"], None)
                    continue
                self.events += 1
                self.last_at = at
                self._take(event["object"], at)
        except (OSError, ValueError, aiohttp.ClientError) as error:
            for waiters in self._waiters.values():
                for waiter in waiters:
                    if not waiter.seen_at.done():
                        waiter.seen_at.set_exception(error)
            raise

    def _take(self, found: Seen, at: float) -> None:
        name = found["metadata"]["name"]
        self.objects[name] = found
        self.added_at.setdefault(name, at)
        if self.on_event is not None:
            self.on_event(name, at)
        waiters = self._waiters.get(name)
        if not waiters:
            return
        for waiter in tuple(waiters):
            if waiter.seen_at.done():
                waiters.remove(waiter)
            elif waiter.holds(found):
                waiter.seen_at.set_result(at)
                waiters.remove(waiter)


def condition_is_true(found: Seen, name: str) -> bool:
    """Whether an object's status has this condition with status True."""
    conditions = (found.get("status") or {}).get("conditions") or ()
    return any(c["type"] == name and c["status"] == "True" for c in conditions)
