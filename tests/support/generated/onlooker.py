"""Looks on at a crowd of objects through watches, and knows at any moment which of them are not settled, and why."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any, Self

import aiohttp
import orjson

from kvstrata.clients.resources import BY_KIND

Raw = dict[str, Any]
Slot = tuple[str, str, str]
"""Kind, namespace and name."""
LINE_LIMIT_BYTES = 16 * 1024 * 1024
GONE = 410
RETRY_S = 0.5


class _TooOldError(Exception):
    """The API server no longer knows what happened since."""


class Onlooker:
    """Watches `kinds` in `namespaces`. `unsettled` returns why an object of a kind is not settled, or None.

    `events` counts the events of the watches, `gone` the objects of each kind that were deleted.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        kinds: Collection[str],
        namespaces: Collection[str],
        unsettled: Callable[[str, Raw], str | None],
    ) -> None:
        self._session, self._kinds, self._namespaces, self._unsettled = session, kinds, namespaces, unsettled
        self._generations: dict[Slot, int] = {}
        self._there: set[Slot] = set()
        self._why: dict[Slot, str] = {}
        self._changed: dict[Slot, asyncio.Event] = {}
        self._watches: list[asyncio.Task[None]] = []
        self.events = 0
        self.gone: Counter[str] = Counter()

    async def __aenter__(self) -> Self:
        for kind in self._kinds:
            version = await self._list(kind)
            self._watches.append(asyncio.create_task(self._watch(kind, version), name=f"watch {kind}"))
        return self

    async def __aexit__(self, *_: object) -> None:
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)

    def expect(self, slot: Slot, generation: int) -> None:
        """Count an object as not settled until an event shows it at `generation` or later."""
        if self._generations.get(slot, 0) < generation:
            self._why[slot] = f"no event showed generation {generation}"

    @property
    def left(self) -> dict[str, list[str]]:
        """Of each kind the objects that are not settled, with why."""
        for watch in self._watches:
            if watch.done():
                watch.result()
        found: dict[str, list[str]] = {}
        for (kind, namespace, name), why in self._why.items():
            found.setdefault(kind, []).append(f"{namespace}/{name}: {why}")
        return found

    async def settled(self, slot: Slot, generation: int, timeout_s: float) -> str | None:
        """Wait until an object is settled at `generation` or later; return why it is not, when the time is over."""
        self.expect(slot, generation)
        changed = self._changed.setdefault(slot, asyncio.Event())
        try:
            async with asyncio.timeout(timeout_s):
                while slot in self._why:
                    changed.clear()
                    await changed.wait()
        except TimeoutError:
            return self._why.get(slot)
        return None

    async def _list(self, kind: str) -> str:
        """Read all objects of a kind; one that is known and not among them is gone."""
        async with self._session.get(BY_KIND[kind].path(None)) as answer:
            assert answer.status == 200, await answer.text()
            listed = orjson.loads(await answer.read())
        for obj in listed["items"]:
            self._observe(kind, obj)
        there = {(kind, obj["metadata"]["namespace"], obj["metadata"]["name"]) for obj in listed["items"]}
        for slot in [slot for slot in self._there if slot[0] == kind and slot not in there]:
            self._there.discard(slot)
            self.gone[kind] += 1
            self._why.pop(slot, None)
        return str(listed["metadata"]["resourceVersion"])

    async def _watch(self, kind: str, version: str) -> None:
        """Watch from `version` on, again and again: a watch that ends is taken up where it was.

        The API server drops a watch that is too slow for it, as on a busy machine, and may have forgotten by then the
        events after its last one: then everything is read again.
        """
        while True:
            try:
                async for event in self._events(kind, version):
                    version = event["object"]["metadata"]["resourceVersion"]
                    if event["type"] != "BOOKMARK":
                        self.events += 1
                        self._observe(kind, event["object"], gone=event["type"] == "DELETED")
            except _TooOldError:
                version = await self._list(kind)
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError):
                await asyncio.sleep(RETRY_S)

    async def _events(self, kind: str, version: str) -> AsyncIterator[Raw]:
        query = {"watch": "1", "resourceVersion": version, "allowWatchBookmarks": "true"}
        async with self._session.get(
            BY_KIND[kind].path(None),
            params=query,
            timeout=aiohttp.ClientTimeout(total=None),
            read_bufsize=LINE_LIMIT_BYTES,
        ) as answer:
            if answer.status == GONE:
                raise _TooOldError
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                event = orjson.loads(line)
                if event["type"] == "ERROR" and event["object"].get("code") == GONE:
                    raise _TooOldError
                assert event["type"] != "ERROR", event
                yield event

    def _observe(self, kind: str, obj: Raw, *, gone: bool = False) -> None:
        metadata = obj["metadata"]
        if metadata["namespace"] not in self._namespaces:
            return
        slot = (kind, metadata["namespace"], metadata["name"])
        self._generations[slot] = metadata["generation"]
        # An invalidation may ask for its deletion when it has ended; its last event must show how it ended.
        why = self._unsettled(kind, obj)
        self.gone[kind] += gone
        (self._there.discard if gone else self._there.add)(slot)
        if why is None:
            self._why.pop(slot, None)
        else:
            self._why[slot] = why
        if slot in self._changed:
            self._changed[slot].set()
