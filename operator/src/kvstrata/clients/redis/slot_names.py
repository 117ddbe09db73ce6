"""Keys of a slot, told apart by their names: what is a bucket's index, what a value, and whose.

A bucket's index moves before its values and as one, `#s` in front of all. Scripts run on `#s`: while it is at the
source they run there, and when it is not they are redirected; never do they see half an index. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

_NAME = re.compile(rb"(?P<prefix>[^{]*\{[^}]*\}):(?P<part>.*)", re.DOTALL)
_BUCKET = re.compile(rb"[^{]*\{[^}:]*:[^}]*\}", re.DOTALL)
_STATE = b"#s"


def sorted_out(names: Iterable[bytes]) -> tuple[list[bytes], list[bytes]]:
    """Return names of indexes, in the order in which they have to move, and names of values."""
    index: list[bytes] = []
    values: list[bytes] = []
    for name in names:
        (index if part_of(name).startswith(b"#") else values).append(name)
    return sorted(index, key=lambda name: part_of(name) != _STATE), values


def bucket_of(name: bytes) -> bytes | None:
    """Return the prefix of the bucket that a key belongs to; None of what belongs to none, as a scope's ledger."""
    found = _NAME.fullmatch(name)
    return found["prefix"] if found is not None and _BUCKET.fullmatch(found["prefix"]) else None


def part_of(name: bytes) -> bytes:
    """Return what a key is called within its bucket; of other keys all of the name."""
    found = _NAME.fullmatch(name)
    return name if found is None else found["part"]


def state_of(bucket: bytes) -> bytes:
    """Return the name of a bucket's `#s`, on which its scripts run."""
    return bucket + b":" + _STATE


def whole_buckets(names: Iterable[bytes]) -> set[bytes]:
    """Return the buckets of which the index is here: it comes and goes with `#s`."""
    return {bucket for name in names if part_of(name) == _STATE and (bucket := bucket_of(name)) is not None}


def without_index(names: Iterable[bytes], buckets: set[bytes]) -> list[bytes]:
    """Return what belongs to a bucket whose index is in none of `buckets`: nobody will ever find it."""
    return [name for name in names if (bucket := bucket_of(name)) is not None and bucket not in buckets]


def by_bucket(values: Iterable[bytes]) -> Mapping[bytes, list[bytes]]:
    """Return names of values within their bucket, by the bucket."""
    found: dict[bytes, list[bytes]] = {}
    for name in values:
        if (bucket := bucket_of(name)) is not None:
            found.setdefault(bucket, []).append(part_of(name))
    return found


def batches(sizes: Mapping[bytes, int], bytes_each: int, keys_each: int) -> Iterable[Sequence[bytes]]:
    """Return keys in parts of so many bytes and keys at most, or of one key that is larger."""
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
