"""Classification of a slot's keys by name: index or value, and of which bucket.

A bucket's index moves before its values and atomically, `#s` first. Scripts run on `#s`: while it is at the source they
run there, afterwards they are redirected, so they never see half an index. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

_NAME = re.compile(rb"(?P<prefix>[^{]*\{[^}]*\}):(?P<part>.*)", re.DOTALL)
_BUCKET = re.compile(rb"[^{]*\{[^}:]*:[^}]*\}", re.DOTALL)
_STATE = b"#s"


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
