"""A deletion as its Job runs it, on real servers, and the operator's look afterwards."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstrata.clients.redis.probe import Access
from kvstrata.clients.redis.verifier import TierLook, TierVerifier
from kvstrata.contract.messages.erase_report import End, Erased, Line, PrimaryEnd, decode_line, totals
from kvstrata.contract.receipt.facts import Amount
from kvstrata.contract.store.redis_keys import bucket_of, bucket_prefix, member_of
from kvstrata_sidecar.adapter.params import TierParams
from kvstrata_sidecar.adapter.redis.client.commands import Demand, Place, Terms, call, read_text, reservation, state_key
from kvstrata_sidecar.adapter.redis.client.connection import Connection
from kvstrata_sidecar.adapter.redis.client.resp import PING, Command, Parts, ReplyError, Write
from kvstrata_sidecar.delete_job.chunks import ChunkDeletion
from kvstrata_sidecar.delete_job.delete import Deletion
from kvstrata_sidecar.delete_job.order import Order
from kvstrata_sidecar.delete_job.reclaim import Reclaim
from kvstrata_sidecar.delete_job.servers import Primary, Servers
from tests.tiers.gate_stand_in import DOMAIN, KEYSPACE_A, RESOLVED

ROOT = Path(__file__).resolve().parents[2]
VALUE = b"x" * 300
KEEP_MS, LIFE_MS = 7_200_000, 3_600_000


class KilledError(BaseException):
    """Ends a deletion where it stands, as a kill does: nothing of it runs afterwards."""


class MortalServers(Servers):
    """Sends command by command, and is killed after so many."""

    def __init__(self, tier: TierParams, commands: int) -> None:
        self.left = commands
        super().__init__(tier)

    def ask_one(self, primary: Primary, commands: Sequence[Command]) -> list[Any]:
        answers: list[Any] = []
        for command in commands:
            answers += super().ask_one(primary, [command])
            self.left -= 1
            if self.left <= 0:
                raise KilledError
        return answers


@dataclass
class Report:
    """What a deletion told."""

    lines: list[Line] = field(default_factory=list)

    @property
    def end(self) -> End:
        """The last line."""
        assert isinstance(self.lines[-1], End)
        return self.lines[-1]

    @property
    def primaries(self) -> list[PrimaryEnd]:
        """How each primary was left."""
        return [line for line in self.lines if isinstance(line, PrimaryEnd)]

    @property
    def sums(self) -> tuple[Amount, Amount, Amount]:
        """What was found, deleted and left of all keyspaces on all primaries."""
        erased = [line for line in self.lines if isinstance(line, Erased)]
        parts = [totals(erased, one.node) for one in self.primaries]
        found, deleted, left = (
            Amount(sum(one[number].keys for one in parts), sum(one[number].bytes for one in parts))
            for number in range(3)
        )
        return found, deleted, left


def summed(amounts: Sequence[Amount]) -> Amount:
    """Return all of these together."""
    return Amount(sum(one.keys for one in amounts), sum(one.bytes for one in amounts))


def order(port: int, *keyspaces: str, cluster: bool = False, **options: Any) -> Order:
    """Return an order for a tier at a port; without the wait for late values unless `window_ms` says otherwise."""
    tier = {"name": "shared", "endpoints": [{"host": "127.0.0.1", "port": port}], "cluster": cluster}
    patience = {"io_timeout_ms": 5000, "connect_timeout_ms": 5000}
    asked = {"domain": DOMAIN, "revision": 7, "keyspaces": list(keyspaces or (KEYSPACE_A,)), "window_ms": 0}
    return Order.from_json(asked | {"tier": tier | patience | options.pop("tier", {})} | options)


def erase(
    asked: Order,
    servers: Callable[[TierParams], Servers] = Servers,
    sleeps: list[float] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Report:
    """Carry an order out; the time that it would wait goes into `sleeps` if that is given."""
    report = Report()
    opened = servers(asked.tier)
    sleep = time.sleep if sleeps is None else sleeps.append
    try:
        work = Reclaim if asked.identities else ChunkDeletion if asked.chunks else Deletion
        work(asked, opened, report.lines.append, clock=clock, sleep=sleep).run()
    finally:
        opened.close()
    return report


def start_program(
    path: Path, asked: dict[str, Any], environment: dict[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start the program that a Job runs, in another environment that of another version."""
    path.write_text(json.dumps(asked))
    environment = environment or os.environ | {"PYTHONPATH": f"{ROOT}/operator/src:{ROOT}/sidecar/src"}
    command = [sys.executable, "-m", "kvstrata_sidecar.delete_job", str(path)]
    return subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def report_of(output: bytes) -> Report:
    """Read what the program printed."""
    return Report([decode_line(line) for line in output.splitlines(keepends=True)])


def look(
    port: int,
    *keyspaces: str,
    cluster: bool = False,
    access: Access | None = None,
    chunks: Sequence[str] = (),
    domain: str = DOMAIN,
    **options: Any,
) -> TierLook:
    """Look at a tier as the operator does."""

    async def at_once(_: float) -> None:
        return

    entered = access or Access(password=None, ca_pem=None)
    verifier = TierVerifier(f"127.0.0.1:{port}", "127.0.0.1", entered, cluster=cluster, pause=at_once, **options)
    return asyncio.run(verifier.look(domain, keyspaces or (KEYSPACE_A,), chunks))


def chunk_of(number: int) -> bytes:
    """Return the name of the chunk of a number."""
    return bytes([number * 16 % 256]) + number.to_bytes(31, "big")


def name_of(keyspace: str, number: int, domain: str = DOMAIN, identity: str = RESOLVED) -> tuple[bytes, bytes]:
    """Return bucket and member of the block of a number."""
    chunk = chunk_of(number)
    member = member_of(identity, 0x01000100, 0, chunk)
    return bucket_prefix(domain, keyspace, bucket_of(chunk)).encode(), member.encode()


def reserve(
    keyspace: str, number: int, window_ms: int = 30_000, domain: str = DOMAIN, identity: str = RESOLVED
) -> Command:
    """What a writer sends first."""
    return reserve_at(*name_of(keyspace, number, domain, identity), window_ms)


def reserve_at(base: bytes, member: bytes, window_ms: int = 30_000) -> Command:
    demand = Demand(Place("", 0, base, member), len(VALUE), b"t", Terms(LIFE_MS))
    return reservation(demand, window_ms)


def write(
    connection: Connection,
    keyspace: str,
    number: int,
    window_ms: int = 30_000,
    domain: str = DOMAIN,
    identity: str = RESOLVED,
) -> str:
    """Send what a writer sends then: the value, and its commit; return what came of it."""
    base, member = name_of(keyspace, number, domain, identity)
    commit = call(
        "commit", state_key(base), read_text, member=member, token=b"t", ttl_ms=LIFE_MS, age_ms=0, keep_ms=KEEP_MS
    )
    return str(set_value(connection, base + b":" + member, [VALUE], window_ms, commit))


def set_value(connection: Connection, key: bytes, parts: Parts, ttl_ms: int, after: Command = PING) -> Any:
    """Write one value; return the result of the command behind it."""
    asked = Write(key, lambda: parts, ttl_ms, after)
    connection.set_each([asked])
    if isinstance(asked.answer, ReplyError):
        raise asked.answer
    return asked.answer


def put(connection: Connection, keyspace: str, numbers: Sequence[int], identity: str = RESOLVED) -> None:
    """Store blocks of one server."""
    for number in numbers:
        assert connection.ask([reserve(keyspace, number, identity=identity)])[0].outcome is True
        assert write(connection, keyspace, number, identity=identity) == "ok"
