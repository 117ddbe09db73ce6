"""Names of keys in a tier: their slot, keyspace and bucket, and whether they are index or value.

A bucket's index moves before its values and atomically, `#s` first. Scripts run on `#s`: while it is at the source they
run there, afterwards they are redirected, so they never see half an index. Pure.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from kvstrata.contract.store.redis_keys import BUCKETS, KEY_PREFIX, bucket_prefix, ledger_key
from kvstrata.model.redis.cluster import SLOTS

T = TypeVar("T")

_TAG = re.compile(r"\{([^}]+)\}")
STATE = "#s"


@dataclass
class Sorted:
    """Names found, without the duplicates that SCAN may return; `unsought` counts values of other chunks, with them."""

    names: Names
    values: set[str] = field(default_factory=set)
    states: set[str] = field(default_factory=set)
    others: set[str] = field(default_factory=set)
    unsought: int = 0

    def add(self, listed: Iterable[str]) -> None:
        for name in listed:
            part = self.names.part_of(name)
            if part is None:
                continue
            if self.names.chunks and part.rpartition(":")[2] not in self.names.chunks:
                self.unsought += not part.startswith("#")
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


def slot_of(name: str) -> int:
    """CRC-16/XMODEM of the hash tag, or of the whole name without one."""
    found = _TAG.search(name)
    return binascii.crc_hqx((found[1] if found else name).encode(), 0) % SLOTS


_NAME = re.compile(rb"(?P<prefix>[^{]*\{[^}]*\}):(?P<part>.*)", re.DOTALL)
_BUCKET = re.compile(rb"[^{]*\{[^}:]*:[^}]*\}", re.DOTALL)
_STATE = STATE.encode()


def sorted_out(names: Iterable[bytes]) -> tuple[list[bytes], list[bytes]]:
    """Return index names, in the order in which they must move, and value names."""
    index: list[bytes] = []
    values: list[bytes] = []
    for name in names:
        (index if part_of(name).startswith(b"#") else values).append(name)
    return sorted(index, key=lambda name: part_of(name) != _STATE), values


def bucket_of(name: bytes) -> bytes | None:
    """Return the prefix of a key's bucket, or None if it has none, as a scope's ledger."""
    found = _NAME.fullmatch(name)
    return found["prefix"] if found is not None and _BUCKET.fullmatch(found["prefix"]) else None


def part_of(name: bytes) -> bytes:
    """Return a key's name within its bucket; of other keys the whole name."""
    found = _NAME.fullmatch(name)
    return name if found is None else found["part"]


def state_of(bucket: bytes) -> bytes:
    return bucket + b":" + _STATE


def whole_buckets(names: Iterable[bytes]) -> set[bytes]:
    """Return the buckets with an index among `names`: it moves with `#s`."""
    return {bucket for name in names if part_of(name) == _STATE and (bucket := bucket_of(name)) is not None}


def without_index(names: Iterable[bytes], buckets: set[bytes]) -> list[bytes]:
    """Return the names of buckets other than `buckets`: no script finds them."""
    return [name for name in names if (bucket := bucket_of(name)) is not None and bucket not in buckets]


def by_bucket(values: Iterable[bytes]) -> Mapping[bytes, list[bytes]]:
    found: dict[bytes, list[bytes]] = {}
    for name in values:
        if (bucket := bucket_of(name)) is not None:
            found.setdefault(bucket, []).append(part_of(name))
    return found


def parts(rows: Sequence[T], size: int) -> Iterable[Sequence[T]]:
    return (rows[start : start + size] for start in range(0, len(rows), size))


def batches(sizes: Mapping[bytes, int], bytes_each: int, keys_each: int) -> Iterable[Sequence[bytes]]:
    """Split keys into parts within both limits; a larger key is a part of its own."""
    part: list[bytes] = []
    filled = 0
    for name, size in sizes.items():
        if part and (filled + size > bytes_each or len(part) == keys_each):
            yield part
            part, filled = [], 0
        part.append(name)
        filled += size
    if part:
        yield part
