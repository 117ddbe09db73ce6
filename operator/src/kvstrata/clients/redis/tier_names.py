"""Names of keyspaces in a tier: their slots, and which of a server's names are theirs. Pure."""

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
    """Names found, without the duplicates that SCAN may return."""

    names: Names
    values: set[str] = field(default_factory=set)
    states: set[str] = field(default_factory=set)
    others: set[str] = field(default_factory=set)

    @property
    def index(self) -> int:
        return len(self.others)

    def add(self, listed: Iterable[str]) -> None:
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
    """The names below the prefixes of keyspaces, restricted to blocks of `chunks` (hex digests) if given."""

    domain: str
    keyspaces: frozenset[str]
    chunks: frozenset[str] = frozenset()

    @cached_property
    def slots(self) -> frozenset[int]:
        """17 slots for each keyspace."""
        buckets = (bucket_prefix(self.domain, one, bucket) for one in self.keyspaces for bucket in range(BUCKETS))
        return frozenset(map(slot_of, [*buckets, *(ledger_key(self.domain, one) for one in self.keyspaces)]))

    @property
    def pattern(self) -> str:
        """A pattern that matches all of them; with several keyspaces it matches others of the domain, too."""
        first = next(iter(self.keyspaces)) if len(self.keyspaces) == 1 else ""
        return f"{KEY_PREFIX}:{self.domain}:{{{first}*"

    def part_of(self, name: str) -> str | None:
        """Return a name below its keyspace's or bucket's prefix, or None if it is of no such keyspace."""
        prefix = f"{KEY_PREFIX}:{self.domain}:{{"
        keyspace = name[len(prefix) : len(prefix) + 32]
        if not name.startswith(prefix) or keyspace not in self.keyspaces:
            return None
        rest = name[len(prefix) + 32 :]
        tag, brace, part = rest.partition("}:")
        # Any other name with the prefix counts as theirs.
        return part if brace and (not tag or tag.startswith(":")) else rest

    def sorted(self) -> Sorted:
        return Sorted(self)


def slot_of(name: str) -> int:
    """CRC-16/XMODEM of the hash tag, or of the whole name without one."""
    found = _TAG.search(name)
    return binascii.crc_hqx((found[1] if found else name).encode(), 0) % SLOTS
