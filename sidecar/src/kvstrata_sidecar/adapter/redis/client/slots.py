"""Slots of a Redis Cluster: hash slots of keys, slot maps and redirections. Pure.

A map is one server's view; a server that knows better redirects.
"""

from __future__ import annotations

import binascii
from collections.abc import Iterable
from dataclasses import dataclass

from kvstrata_sidecar.adapter.redis.client.resp import FramingError, Reply, ReplyError

SLOTS = 16_384
MAX_NODES = 1_000
MAX_HOST_BYTES = 255


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server of a cluster listens. `name` is the host name that it announces beside an IP address."""

    host: str
    port: int
    name: str | None = None

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def proves(self) -> str:
        """The name that the server's certificate must hold, unless the parameters name another."""
        return self.name or self.host

    @property
    def where(self) -> tuple[str, int]:
        """Host and port, by which redirections name servers."""
        return self.host, self.port


@dataclass(frozen=True, slots=True)
class SlotMap:
    """Owners of slots: `owners[slot]` is an index into `primaries`, -1 for a slot without a server."""

    primaries: tuple[Address, ...]
    owners: tuple[int, ...]
    replicas: tuple[Address, ...] = ()

    @property
    def served(self) -> int:
        return SLOTS - self.owners.count(-1)


@dataclass(frozen=True, slots=True)
class Redirection:
    """Ask `address` instead: for this question (`for_good` False) or for everything in `slot`."""

    slot: int
    address: Address
    for_good: bool


def slot_of(key: bytes) -> int:
    """Return a key's slot: CRC-16/XMODEM of its hash tag, or of all of it without one, modulo 16384."""
    start = key.find(b"{")
    if start >= 0:
        end = key.find(b"}", start + 1)
        if end > start + 1:
            key = key[start + 1 : end]
    return binascii.crc_hqx(key, 0) % SLOTS


def read_slots(reply: Reply, asked: Address) -> SlotMap:
    """Read the answer of `asked` to CLUSTER SLOTS. Raises FramingError for anything that is no map. A server may omit
    its host (it is the one asked) or announce no name (`?`): then its IP address is used, or without one its slots have
    no owner."""
    if not isinstance(reply, list):
        raise FramingError("CLUSTER SLOTS was not answered with an array")
    primaries: dict[Address, int] = {}
    replicas: dict[Address, None] = {}
    owners = [-1] * SLOTS
    for entry in reply:
        if not isinstance(entry, list) or len(entry) < 3:
            raise FramingError("a range of slots has no server")
        first, last, primary, *others = entry
        if not isinstance(first, int) or not isinstance(last, int) or not 0 <= first <= last < SLOTS:
            raise FramingError("a range of slots is out of bounds")
        address = _server(primary, asked)
        replicas |= dict.fromkeys(one for one in (_server(other, asked) for other in others) if one is not None)
        if address is not None:
            index = primaries.setdefault(address, len(primaries))
            owners[first : last + 1] = [index] * (last + 1 - first)
    if len(primaries) > MAX_NODES or len(replicas) > MAX_NODES:
        raise FramingError("a cluster of more servers than there can be")
    return SlotMap(tuple(primaries), tuple(owners), tuple(replicas))


def redirection(error: ReplyError, asked: Address, known: Iterable[Address]) -> Redirection | None:
    """Return an error reply's redirection, None without a valid one; one of `known` keeps its announced name."""
    words = str(error).split(" ")
    # `str` accepts non-ASCII digits, which are no valid numbers here.
    if len(words) != 3 or words[0] not in ("MOVED", "ASK") or not str(error).isascii():
        return None
    host, separator, port = words[2].rpartition(":")
    if not separator or not words[1].isdigit() or not port.isdigit() or len(port) > 5 or len(words[1]) > 5:
        return None
    slot = int(words[1])
    if slot >= SLOTS or not 0 < int(port) < 65_536 or host == "?" or not _plausible(host):
        return None
    where = (host or asked.host, int(port))
    address = next((one for one in known if one.where == where), Address(*where))
    return Redirection(slot, address, words[0] == "MOVED")


def _server(entry: Reply, asked: Address) -> Address | None:
    if not isinstance(entry, list) or len(entry) < 2:
        raise FramingError("a server of the cluster has no address")
    host, port, *rest = entry
    if not isinstance(port, int) or not isinstance(host, bytes | None):
        raise FramingError("a server of the cluster has a malformed address")
    about = _pairs(rest[1]) if len(rest) > 1 else {}
    if port == 0:  # a server that does not know its own port yet
        return None
    named = (host or b"").decode("ascii", "replace")
    name = about.get("hostname") or None
    if named == "?":
        named = about.get("ip", "")
        if not named:
            return None
    if not named:
        return Address(asked.host, port, asked.name)
    if not 0 < port < 65_536 or not _plausible(named) or (name is not None and not _plausible(name)):
        raise FramingError("a server of the cluster has a malformed address")
    return Address(named, port, name if name != named else None)


def _pairs(reply: Reply) -> dict[str, str]:
    if not isinstance(reply, list) or not all(isinstance(text, bytes) for text in reply):
        return {}
    words = [text.decode("ascii", "replace") for text in reply if isinstance(text, bytes)]
    return dict(zip(words[::2], words[1::2], strict=False))


def _plausible(host: str) -> bool:
    """Whether a host is plausible: the resolver receives hosts that servers report."""
    return len(host) <= MAX_HOST_BYTES and all(c.isalnum() or c in "-_.:%" for c in host) and host.isascii()
