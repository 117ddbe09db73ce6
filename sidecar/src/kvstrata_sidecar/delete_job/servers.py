"""The primaries of a tier for a deletion: one connection to each, under one slot map.

The map is read once. A server that redirects, or is taking a slot over, shows that it has changed: the deletion stops.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvstrata.contract.messages.erase_report import StopReason
from kvstrata.contract.store.redis_keys import BUCKETS, bucket_prefix
from kvstrata.contract.wire import digest
from kvstrata_sidecar.adapter.params import TierParams
from kvstrata_sidecar.adapter.redis.client import resp
from kvstrata_sidecar.adapter.redis.client.commands import read_text, state_key
from kvstrata_sidecar.adapter.redis.client.connection import Connection
from kvstrata_sidecar.adapter.redis.client.dial import dial
from kvstrata_sidecar.adapter.redis.client.slots import SLOTS, Address, read_slots, slot_of

REDIRECTIONS = frozenset({"MOVED", "ASK", "TRYAGAIN"})


class StoppedError(Exception):
    """The deletion cannot continue now. The message names the server and the reason."""

    def __init__(self, reason: StopReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Primary:
    """A server with slots. `node` is its own id, `replicas` their count in the map."""

    node: str
    address: Address
    replicas: int = 0


class Bucket(NamedTuple):
    keyspace: str
    state: bytes


@dataclass(frozen=True, slots=True)
class Layout:
    """`owners[slot]` is an index into `primaries`."""

    primaries: tuple[Primary, ...]
    owners: tuple[int, ...]

    def of(self, key: bytes) -> Primary:
        return self.primaries[self.owners[slot_of(key)]]

    def buckets(self, domain: str, keyspaces: Iterable[str]) -> dict[Primary, list[Bucket]]:
        found: dict[Primary, list[Bucket]] = {primary: [] for primary in self.primaries}
        for keyspace in keyspaces:
            for number in range(BUCKETS):
                state = state_key(bucket_prefix(domain, keyspace, number).encode())
                found[self.of(state)].append(Bucket(keyspace, state))
        return found

    @property
    def digest(self) -> str:
        """Digest of the slot map without replicas."""
        ranges: list[list[int | str]] = []
        for slot, owner in enumerate(self.owners):
            if not slot or owner != self.owners[slot - 1]:
                ranges.append([slot, self.primaries[owner].node])
        return digest(ranges)


class Servers(resp.Transport):
    """Sends commands to the primaries of a tier. Thread-safe, but one thread at a time per primary. Errors raise
    StoppedError, except a server's error reply to one command in `ask_each`."""

    def __init__(self, tier: TierParams) -> None:
        self._tier = tier
        self._connections: dict[str, Connection] = {}
        self.layout = self._find()
        declared = {(one.host, one.port) for one in tier.endpoints}
        for primary in self.layout.primaries:
            if primary.node not in self._connections:
                named = tier.allowed is not None and primary.address.where not in declared
                with _stopping(primary.address, coarse=named):
                    self._connections[primary.node] = dial(primary.address, self._tier)

    def ask(self, commands: Sequence[resp.Command]) -> list[Any]:
        answers = self.ask_each(commands)
        for command, answer in zip(commands, answers, strict=True):
            if isinstance(answer, resp.ReplyError):
                raise StoppedError(StopReason.REFUSED, f"{self.layout.of(command.key).address}: {answer}")
        return answers

    def ask_each(self, commands: Sequence[resp.Command]) -> list[Any]:
        answers: list[Any] = [None] * len(commands)
        parts: dict[Primary, list[int]] = {}
        for index, one in enumerate(commands):
            parts.setdefault(self.layout.of(one.key), []).append(index)
        for primary, indices in parts.items():
            replies = self.ask_one(primary, [commands[index] for index in indices])
            for index, answer in zip(indices, replies, strict=True):
                answers[index] = answer
        return answers

    def ask_one(self, primary: Primary, commands: Sequence[resp.Command]) -> list[Any]:
        """Send to one primary; return the replies, error replies as ReplyError."""
        with _stopping(primary.address):
            answers = self._connections[primary.node].ask_each(commands)
        for answer in answers:
            if isinstance(answer, resp.ReplyError) and (answer.code in REDIRECTIONS or resp.FOREIGN_KEY in str(answer)):
                raise StoppedError(StopReason.SLOT_MAP_CHANGED, f"{primary.address}: {answer}")
        return answers

    def look_again(self) -> Layout:
        first = self.layout.primaries[0]
        with _stopping(first.address):
            return self._layout_of(self._connections[first.node], first.address)

    def written(self, primary: Primary) -> int:
        return int(self._replication(primary).get("master_repl_offset", "0"))

    def in_step(self, primary: Primary, written: int) -> tuple[int, int]:
        """Return the numbers of a primary's replicas and of those that confirmed `written`: WAIT is not permitted."""
        info = self._replication(primary)
        links = [value for name, value in info.items() if name[:5] == "slave" and name[5:].isdigit()]
        there = [dict(part.split("=", 1) for part in link.split(",") if "=" in part) for link in links]
        confirmed = [one for one in there if one.get("state") == "online" and int(one.get("offset", "0")) >= written]
        return max(primary.replicas, len(there)), len(confirmed)

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()

    def _replication(self, primary: Primary) -> dict[str, str]:
        with _stopping(primary.address):
            return _info(self._connections[primary.node], b"replication")

    def _find(self) -> Layout:
        problems: list[StoppedError] = []
        for address in (Address(one.host, one.port) for one in self._tier.endpoints):
            connection = None
            try:
                with _stopping(address):
                    connection = dial(address, self._tier)
                    if not self._tier.cluster:
                        connection.expect_primary(self._tier.io_timeout_ms / 1000)
                    layout = self._layout_of(connection, address)
            except StoppedError as error:
                problems.append(error)
                if connection is not None:
                    connection.close()
                continue
            if self._tier.cluster:
                connection.close()
            else:
                self._connections[layout.primaries[0].node] = connection
            return layout
        raise next((one for one in problems if one.reason is not StopReason.SERVER_AWAY), problems[0])

    def _layout_of(self, connection: Connection, asked: Address) -> Layout:
        if not self._tier.cluster:
            return Layout((Primary(_info(connection, b"server")["run_id"], asked),), (0,) * SLOTS)
        (reply,) = connection.ask([resp.Command(b"", (b"CLUSTER", b"SLOTS"))])
        return read_layout(reply, asked)


def read_layout(reply: resp.Reply, asked: Address) -> Layout:
    """Read an answer to CLUSTER SLOTS. Raises StoppedError for unserved slots, FramingError for a malformed map."""
    slots = read_slots(reply, asked)
    unserved = slots.owners.count(-1)
    if unserved:
        raise StoppedError(StopReason.SLOTS_UNSERVED, f"{asked}: {unserved} slots have no server")
    found: list[Primary | None] = [None] * len(slots.primaries)
    ranges: Any = reply
    for first, _, primary, *replicas in ranges:
        if len(primary) < 3:
            raise resp.FramingError("a server of the cluster has no id")
        index = slots.owners[first]
        found[index] = Primary(read_text(primary[2]), slots.primaries[index], len(replicas))
    return Layout(tuple(one for one in found if one is not None), slots.owners)


def _info(connection: Connection, section: bytes) -> dict[str, str]:
    (info,) = connection.ask([resp.Command(b"", (b"INFO", section), read_text)])
    lines = (line.partition(":") for line in info.splitlines())
    return {name: value for name, colon, value in lines if colon}


@contextmanager
def _stopping(address: Address, *, coarse: bool = False) -> Iterator[None]:
    try:
        yield
    except resp.TransportError as error:
        by_tls = error.__cause__ is not None and isinstance(error.__cause__.__cause__, ssl.SSLError)
        if isinstance(error, resp.AccessError) and not (coarse and by_tls):
            raise StoppedError(StopReason.ACCESS_REFUSED, f"{address}: {error}") from error
        # The reason would show a network to users of a namespace.
        why = "the server, which the cluster names, does not answer as Redis" if coarse else error
        raise StoppedError(StopReason.SERVER_AWAY, f"{address}: {why}") from error
    except resp.ReplyError as error:
        raise StoppedError(StopReason.REFUSED, f"{address}: {error}") from error
