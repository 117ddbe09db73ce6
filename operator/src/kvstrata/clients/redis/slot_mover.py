"""Carries out one order to move slots. It keeps no state; the next look's order continues after an interruption."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from redis import exceptions

from kvstrata.clients.redis.connection import Dial, MayNotWriteError, MoveFailedError, ServerAwayError, ServerLine
from kvstrata.clients.redis.node_answers import ENDED, by_name
from kvstrata.clients.redis.probe import Argument
from kvstrata.clients.redis.slot_keys import Credentials, KeyMover, OnProgress, Pause
from kvstrata.model.redis.cluster import Cluster, Server, SlotRange
from kvstrata.plan.redis.topology.steps import MoveOrder

NOT_LEADING = "another leads"


@dataclass(frozen=True, slots=True)
class SlotMover:
    """Moves slots between servers. `credentials` are those that a source shows to its target; `may_write` is checked
    before anything is sent."""

    dial: Dial
    credentials: Credentials
    may_write: Callable[[], bool]
    pause: Pause = asyncio.sleep

    async def carry_out(self, order: MoveOrder, cluster: Cluster, on_progress: OnProgress = lambda *_: None) -> str:
        """Return why the order was not carried out; empty when it was."""
        try:
            async with AsyncExitStack() as lines:
                await self._carry_out(order, cluster, on_progress, lines)
        except MayNotWriteError:
            return NOT_LEADING
        except (ServerAwayError, MoveFailedError, exceptions.ResponseError) as error:
            return str(error)
        return ""

    async def _carry_out(
        self, order: MoveOrder, cluster: Cluster, on_progress: OnProgress, lines: AsyncExitStack
    ) -> None:
        servers = {server.node_id: server for server in cluster.servers.values()}
        missing = {order.source, order.target} - servers.keys()
        if missing:
            raise ServerAwayError(f"{' and '.join(sorted(missing))} did not answer")
        source, target = servers[order.source], servers[order.target]

        def line(server: Server) -> ServerLine:
            pod = cluster.pods[server.pod_uid]
            connection = self.dial(pod.ip or server.itself.ip, server.itself.port)
            found = ServerLine(server.node_id, pod.name, connection, self.may_write)
            lines.push_async_callback(found.close)
            return found

        if order.atomic:
            await move_at_once(line(source), order.target, order.slots, on_progress, self.pause)
            return
        known = next((peer for peer in source.peers if peer.node_id == order.target), None)
        if known is None:
            raise ServerAwayError(f"{cluster.pods[source.pod_uid].name} does not know {order.target}")
        others = [one for one in servers.values() if one.itself.is_primary and one not in (source, target)]
        mover = KeyMover(
            line(source),
            line(target),
            [line(one) for one in others],
            (known.ip, known.port),
            open_slots=set(source.itself.migrating),
            order=order,
            credentials=self.credentials,
            on_progress=on_progress,
            pause=self.pause,
        )
        slots = [slot for first, last in order.slots for slot in range(first, last + 1)]
        await (mover.close(slots) if source is target else mover.move(slots))


POLL_S = 0.1
HANGS_AFTER_S = 15.0
"""After so long without progress a job counts as hung: a live target acknowledges each second."""


async def move_at_once(
    source: ServerLine, target: str, slots: Sequence[SlotRange], on_progress: OnProgress, pause: Pause
) -> None:
    """Have a server move slots, or watch a job that already does. Raises MoveFailedError."""
    wanted = " ".join(f"{first}-{last}" for first, last in slots)
    known = await _jobs(source)
    under_way = (job for job in known if job["operation"] == "EXPORT" and job["state"] not in ENDED)
    of_slots = (job["name"] for job in under_way if (job["slot_ranges"], job["target_node"]) == (wanted, target))
    name = next(of_slots, None)
    if name is None:
        words: Sequence[Argument] = (*(bound for one in slots for bound in one), "NODE", target)
        before = {job["name"] for job in known}
        try:
            await source.one("CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", *words)
        except exceptions.ResponseError as error:
            raise MoveFailedError(f"{source.name}: CLUSTER MIGRATESLOTS: {error}") from None
        name = next((job["name"] for job in await _jobs(source) if job["name"] not in before), None)
    seen, seen_at_s = "", time.monotonic()
    while True:
        job = next((one for one in await _jobs(source) if one["name"] == name), None)
        if job is None:
            raise MoveFailedError(f"{source.name} forgot the move of slots {wanted}")
        if job["state"] in ENDED:
            break
        shown = str(sorted(job.items()))
        if shown != seen:
            seen, seen_at_s = shown, time.monotonic()
        elif time.monotonic() - seen_at_s > HANGS_AFTER_S:
            await source.one("CLUSTER", "CANCELSLOTMIGRATIONS")
            raise MoveFailedError(f"{source.name}: the move of slots {wanted} hung ({job['state']}) and was given up")
        await pause(POLL_S)
    if job["state"] != "success":
        why = job["message"] or "no reason given"
        raise MoveFailedError(f"{source.name}: the move of slots {wanted} {job['state']}: {why}")
    on_progress(sum(last - first + 1 for first, last in slots), 0)


async def _jobs(source: ServerLine) -> list[Mapping[str, str]]:
    """Newest first."""
    return [_fields(entry) for entry in await source.one("CLUSTER", "GETSLOTMIGRATIONS")]


def _fields(entry: Any) -> Mapping[str, str]:
    return {_text(name): _text(value) for name, value in by_name(entry).items()}


def _text(word: Any) -> str:
    return word.decode(errors="replace") if isinstance(word, bytes) else str(word)
