"""The servers of a managed cluster: their states, and commands to each.

A look asks all pods at once; every pod answers in time or has a reason why not. Before a command the server confirms
its node id: a restarted server has another one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import redis.asyncio as redis
from redis import exceptions

from kvstrata.api.reasons import TierReason
from kvstrata.clients.redis.node_answers import NotAnAnswerError, parse_server
from kvstrata.clients.redis.probe import Access, answers, close, dial, reason_of, sentence_of
from kvstrata.model.redis.cluster import Cluster, Command, Server, ServerPod

LOOK_TIMEOUT_S = 1.0
"""For all answers of a server to one look. Healing waits for the slowest server; a slow one counts as silent."""

TIMEOUT_S = 2.0
"""For the commands of one step to one server: far below the time in which the Lease may change hands."""

QUESTIONS = (
    ("CLUSTER", "NODES"),
    ("INFO", "server", "memory", "replication", "keyspace"),
    ("CLUSTER", "INFO"),
    ("CONFIG", "GET", "cluster-node-timeout"),
    ("CLUSTER", "GETSLOTMIGRATIONS"),
)

IDENTITY_CHANGED = "IdentityChanged"
REFUSED = "Refused"
NOT_SENT = "NotSent"


@dataclass(frozen=True, slots=True)
class Sent:
    """`failure` is empty on success, else its reason. A command that timed out may still be carried out."""

    command: Command
    failure: str = ""
    answer: str = ""


class RedisNodes:
    """Connections to the servers of one cluster, all at `port`, with certificates for `server_name`."""

    def __init__(
        self,
        port: int,
        access: Access,
        server_name: str | None = None,
        *,
        look_timeout_s: float = LOOK_TIMEOUT_S,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._port, self.access, self._server_name = port, access, server_name
        self._look_timeout_s, self._timeout_s = look_timeout_s, timeout_s
        self._connections: dict[str, tuple[str, redis.Connection]] = {}

    async def look(self, pods: Iterable[ServerPod]) -> Cluster:
        """Ask the servers of all pods at once. Never raises, except for the cancellation of the caller."""
        known = {pod.uid: pod for pod in pods}
        for uid in self._connections.keys() - known.keys():
            await close(self._connections.pop(uid)[1])
        reports = await asyncio.gather(*(self._ask(pod) for pod in known.values()))
        found = dict(zip(known, reports, strict=True))
        return Cluster(
            pods=known,
            servers={uid: report for uid, report in found.items() if isinstance(report, Server)},
            silent={uid: report for uid, report in found.items() if not isinstance(report, Server)},
            at_s=time.monotonic(),
        )

    async def send(
        self, commands: Sequence[Command], pods: Mapping[str, ServerPod], permitted: Callable[[], bool]
    ) -> tuple[Sent, ...]:
        """Send commands, in parallel to different servers; after a failure a server gets no further ones.
        `permitted` is asked before each; once it returns False, nothing more is sent."""
        by_pod: dict[str, list[Command]] = {}
        for command in commands:
            by_pod.setdefault(command.pod_uid, []).append(command)
        results = await asyncio.gather(
            *(self._send_to(pods.get(uid), reported, permitted) for uid, reported in by_pod.items())
        )
        return tuple(sent for result in results for sent in result)

    async def close(self) -> None:
        while self._connections:
            await close(self._connections.popitem()[1][1])

    async def _ask(self, pod: ServerPod) -> Server | tuple[str, str]:
        if pod.ip is None:
            return TierReason.NO_SUCH_HOST, f"{pod.name} has no address yet"
        try:
            async with asyncio.timeout(self._look_timeout_s), self._connected(pod, pod.ip) as connection:
                nodes, info, cluster, timeout, jobs = await answers(connection, QUESTIONS)
                for answer in (nodes, info, cluster, timeout):
                    if isinstance(answer, Exception):
                        raise answer
                known_jobs = None if isinstance(jobs, Exception) else jobs
                return parse_server(pod.uid, nodes, info, cluster, int(timeout[1]), known_jobs)
        except NotAnAnswerError as error:
            return TierReason.NOT_REDIS, f"{sentence_of(pod.name, TierReason.NOT_REDIS)}: {error}"
        except Exception as error:
            reason = reason_of(error)
            return reason, sentence_of(pod.name, reason)

    async def _send_to(
        self, pod: ServerPod | None, commands: Sequence[Command], permitted: Callable[[], bool]
    ) -> list[Sent]:
        sent: list[Sent] = []
        if pod is None or pod.ip is None:
            return [Sent(command, NOT_SENT, "its pod is gone") for command in commands]
        try:
            async with asyncio.timeout(self._timeout_s), self._connected(pod, pod.ip) as connection:
                for command in commands:
                    if not permitted():
                        break
                    (identity,) = await answers(connection, [("CLUSTER", "MYID")])
                    if identity != command.node_id:
                        sent.append(Sent(command, IDENTITY_CHANGED, f"{pod.name} is {identity} now"))
                        break
                    (answer,) = await answers(connection, [command.words])
                    failed = isinstance(answer, exceptions.RedisError)
                    sent.append(Sent(command, REFUSED if failed else "", str(answer)))
                    if failed:
                        break
        except Exception as error:
            reason = reason_of(error)
            sent.append(Sent(commands[len(sent)], reason, sentence_of(pod.name, reason)))
        return sent + [Sent(command, NOT_SENT) for command in commands[len(sent) :]]

    @asynccontextmanager
    async def _connected(self, pod: ServerPod, ip: str) -> AsyncIterator[redis.Connection]:
        """Lend the connection to a pod. It is kept unless the block raises: it may then hold old answers."""
        address, connection = self._connections.pop(pod.uid, ("", None))
        if connection is not None and (address != ip or not connection.is_connected):
            await close(connection)
            connection = None
        connection = connection or self.dial(ip, self._port)
        try:
            await connection.connect()  # type: ignore[no-untyped-call]
            yield connection
        except BaseException:
            await close(connection)
            raise
        self._connections[pod.uid] = ip, connection

    def dial(self, ip: str, port: int) -> redis.Connection:
        return dial((ip, port), self.access, self._server_name, self._timeout_s, decode=True)
