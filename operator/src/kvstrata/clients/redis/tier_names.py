"""Names of keyspaces in a tier: in which slots they are, and which of a server's names are theirs. Pure."""

from __future__ import annotations

import binascii
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from kvstrata.contract.store.redis_keys import BUCKETS, KEY_PREFIX, bucket_prefix, ledger_key
from kvstrata.model.redis.cluster import SLOTS

_TAG = re.compile(r"\{([^}]+)\}")
STATE = "#s"


@dataclass
class Sorted:
    """Names that were found: each once, although a walk may tell some twice."""

    names: Names
    values: set[str] = field(default_factory=set)
    states: set[str] = field(default_factory=set)
    others: set[str] = field(default_factory=set)

    @property
    def index(self) -> int:
        """How many names there are besides values and states."""
        return len(self.others)

    def add(self, listed: Iterable[str]) -> None:
        """Take what is of the keyspaces."""
        for name in listed:
            part = self.names.part_of(name)
            if part is None:
                continue
            if self.names.chunks and part.rpartition(":")[2] not in self.names.chunks:
                continue
            kind = self.states if part == STATE else self.others if part.startswith("#") else self.values
            kind.add(name)


@dataclass(frozen=True)
class Names:
    """The names below some keyspaces' prefixes; with `chunks`, by the digits of their hashes, blocks of these alone."""

    domain: str
    keyspaces: frozenset[str]
    chunks: frozenset[str] = frozenset()

    @cached_property
    def slots(self) -> frozenset[int]:
        """The slots in which they can be: 17 for each keyspace."""
        buckets = (bucket_prefix(self.domain, one, bucket) for one in self.keyspaces for bucket in range(BUCKETS))
        return frozenset(map(slot_of, [*buckets, *(ledger_key(self.domain, one) for one in self.keyspaces)]))

    @property
    def pattern(self) -> str:
        """A pattern that all of them match; of more than one keyspace others of the domain match it, too."""
        first = next(iter(self.keyspaces)) if len(self.keyspaces) == 1 else ""
        return f"{KEY_PREFIX}:{self.domain}:{{{first}*"

    def part_of(self, name: str) -> str | None:
        """Return what a name is called below its keyspace's or bucket's prefix, None if it is of no such keyspace."""
        prefix = f"{KEY_PREFIX}:{self.domain}:{{"
        keyspace = name[len(prefix) : len(prefix) + 32]
        if not name.startswith(prefix) or keyspace not in self.keyspaces:
            return None
        rest = name[len(prefix) + 32 :]
        tag, brace, part = rest.partition("}:")
        # Whatever else begins like one of theirs is theirs, too: it was stored under it.
        return part if brace and (not tag or tag.startswith(":")) else rest

    def sorted(self) -> Sorted:
        """Return none of them yet."""
        return Sorted(self)


def slot_of(name: str) -> int:
    """Return a name's slot: CRC-16/XMODEM of its hash tag, or of all of it without one."""
    found = _TAG.search(name)
    return binascii.crc_hqx((found[1] if found else name).encode(), 0) % SLOTS
