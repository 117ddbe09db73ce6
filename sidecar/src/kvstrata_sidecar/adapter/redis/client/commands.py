"""Lookup, load and store of blocks in a shared tier: commands, and the meaning of their replies.

A store reserves its bytes, writes the value with a short life, and commits it, which makes it readable and gives it its
real life; the commit is sent right behind the value. Readers use committed blocks only, so remains of a writer that
died are never read and expire. Time is the server's: a lookup asks for it in the same pipeline.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any, NamedTuple

from kvstrata.contract.store.redis_keys import bucket_of, bucket_prefix
from kvstrata.contract.store.redis_scripts import Argument, script
from kvstrata_sidecar.adapter.policy.limits import SharedBounds
from kvstrata_sidecar.adapter.policy.refusal import Refusal
from kvstrata_sidecar.adapter.redis.client import resp
from kvstrata_sidecar.adapter.tier.sealer import Opening, Sealer

WRITE_WINDOW_MS = 30_000
"""Life of a value that is not committed, and of its reservation."""

INDEX_SLACK_MS = 3_600_000
"""Time that an unused index outlives its blocks."""

MEMBERS_PER_COMMAND = 512
FOR_EVER_MS = 9_007_199_254_740_991
"""Later than every moment, and still exact in a script's numbers."""


class Place(NamedTuple):
    """Where a block is: its bucket's prefix and its name therein. A tuple, because one is made for every block."""

    keyspace: str
    bucket: int
    base: bytes
    member: bytes

    @classmethod
    def at(cls, domain: str, keyspace: str, member: str, chunk_hash: bytes) -> Place:
        bucket = bucket_of(chunk_hash)
        return cls(keyspace, bucket, base_of(domain, keyspace, bucket), member.encode())

    @property
    def name(self) -> bytes:
        return self.base + b":" + self.member


@dataclass(frozen=True, slots=True)
class Terms:
    """Policy for storing a block: a new one's life, this one's age, its scope's bounds, and encryption."""

    life_ms: int
    age_ms: int = 0
    bounds: SharedBounds | None = None
    encrypts: bool = False

    @property
    def keep_ms(self) -> int:
        """Minimum time to keep the index."""
        return self.life_ms + INDEX_SLACK_MS


Outcome = Refusal | bool | Exception
"""Of a reservation: True if made, False if the block is present, else the refusal or error."""

OUTCOMES: dict[str, Outcome | None] = {"ok": True, "present": False, "tombstone": Refusal.TOMBSTONE, "short": None}


class Demand(NamedTuple):
    """A block that needs `size` bytes at a place, under a token that identifies its writer."""

    place: Place
    size: int
    token: bytes
    terms: Terms


class Reserved(NamedTuple):
    """Outcome, None if the lease is short of `missing_bytes`; and the evicted blocks with their ages."""

    outcome: Outcome | None
    missing_bytes: int
    evicted: int
    evicted_bytes: int
    ages_ms: Sequence[int]


class Sought(NamedTuple):
    """Blocks of one bucket to look up: the bucket's prefix, their names therein, and their numbers in the request."""

    base: bytes
    members: list[bytes]
    numbers: list[int]


@dataclass(slots=True)
class Sight:
    """The numbers of the blocks that a lookup found, and how many it may not use by reason."""

    hits: list[int] = field(default_factory=list)
    refused: Counter[Refusal] = field(default_factory=Counter)


def call(name: str, key: bytes, read: Callable[[resp.Reply], Any], /, **arguments: Argument) -> resp.Command:
    """Return the command that runs a script on `key`, by its digest if the server knows it."""
    loaded = script(name)
    rest = (b"1", key, *loaded.words(arguments))
    return resp.Command(key, (b"EVALSHA", loaded.sha, *rest), read, (b"EVAL", loaded.text, *rest))


@lru_cache(maxsize=65_536)
def base_of(domain: str, keyspace: str, bucket: int) -> bytes:
    """Return the prefix of a bucket's keys."""
    return bucket_prefix(domain, keyspace, bucket).encode()


def claim(transport: resp.Transport, key: bytes, token: bytes, ttl_ms: int) -> bool:
    """Claim exclusive work for `ttl_ms`; return whether this process has it."""
    (mine,) = transport.ask([call("claim", key, read_number, token=token, life_ms=ttl_ms)])
    return bool(mine)


def state_key(base: bytes) -> bytes:
    return base + b":#s"


def reservation(demand: Demand, window_ms: int, evict_before_ms: int = 0, passed_ms: int = 0) -> resp.Command:
    """Return the command that reserves a block `passed_ms` after its demand, evicting blocks last used before
    `evict_before_ms` if needed. Answers Reserved."""
    place, size, token, terms = demand
    return call(
        "reserve", state_key(place.base), _read_reserved, member=place.member, size=size, token=token,
        window_ms=window_ms, keep_ms=terms.keep_ms, life_ms=terms.life_ms, limited=terms.bounds is not None,
        evict_before_ms=evict_before_ms, encrypts=terms.encrypts, age_ms=terms.age_ms + passed_ms,
    )  # fmt: skip


def write(place: Place, parts: Callable[[], resp.Parts], token: bytes, terms: Terms, window_ms: int) -> resp.Write:
    """Return the write and commit of a reserved block; the answer is `ok`, or it came too late."""
    commit = call(
        "commit", state_key(place.base), read_text, member=place.member, token=token,
        ttl_ms=terms.life_ms - terms.age_ms, age_ms=terms.age_ms, keep_ms=terms.keep_ms,
    )  # fmt: skip
    return resp.Write(place.name, parts, window_ms, commit)


def lookup_each(transport: resp.Transport, asked: Sequence[tuple[Sequence[Sought], int | None]]) -> list[Sight]:
    """Return which blocks are committed and alive; `asked` has each keyspace's sought blocks and retention in ms. A
    bucket with blocks that may outlive the retention is not used until it was clamped."""
    sights = [Sight() for _ in asked]
    commands: list[resp.Command] = []
    questions: list[tuple[Sight, int | None, list[int]]] = []
    for sight, (sought, retention_ms) in zip(sights, asked, strict=True):
        for base, members, numbers in sought:
            allowed = _allowed(state_key(base))
            for start in range(0, len(members), MEMBERS_PER_COMMAND):
                some = members[start : start + MEMBERS_PER_COMMAND]
                commands.append(allowed)
                commands.append(resp.Command(allowed.key, (b"ZMSCORE", base + b":#x", *some), reads_scores(len(some))))
                questions.append((sight, retention_ms, numbers[start : start + MEMBERS_PER_COMMAND]))
    if not commands:
        return sights
    # One clock for all: if a bucket has moved to another server, that server's clock decides at the load.
    now_ms, *answers = transport.ask([time_at(commands[0].key), *commands])
    for (sight, retention_ms, numbers), state, scores in zip(questions, answers[::2], answers[1::2], strict=True):
        refusal = _bucket_refusal(state, retention_ms)
        if refusal is not None:
            sight.refused[refusal] += len(numbers)
            continue
        latest_ms = _latest_ms(now_ms, state)
        sight.hits += [
            number
            for number, score in zip(numbers, scores, strict=True)
            if score is not None and now_ms < score <= latest_ms
        ]
    return sights


class Loading(resp.Read):
    """A block that is read into `view` if it is committed and alive. Afterwards: `hit`: it was loaded; `age_ms`: since
    it was computed; `refusal`: why it may not be used; `unreadable`: it should have been there; `damaged`: the value is
    no block."""

    def __init__(self, place: Place, view: memoryview, sealer: Sealer, retention_ms: int | None) -> None:
        state = state_key(place.base)
        self.key = place.name
        self.before: Sequence[resp.Command] = (
            time_at(state),
            _allowed(state),
            resp.Command(self.key, (b"ZSCORE", place.base + b":#x", place.member), read_score),
            resp.Command(self.key, (b"HGET", place.base + b":#m", place.member), _read_computed),
        )
        self._place, self._view, self._sealer = place, view, sealer
        self._retention_ms = retention_ms
        self.hit = self.unreadable = self.damaged = False
        self.age_ms = 0
        self.refusal: Refusal | None = None

    def accept(self, answers: Sequence[Any]) -> bool:
        now_ms, state, score, computed_ms = answers
        self.refusal = _bucket_refusal(state, self._retention_ms)
        self.age_ms = 0 if computed_ms is None else max(0, now_ms - computed_ms)
        is_alive = score is not None and now_ms < score <= _latest_ms(now_ms, state)
        self.unreadable = self.refusal is None and is_alive and computed_ms is not None
        return self.unreadable

    def open(self) -> Opening:
        return self._sealer.open_into(self._place.keyspace, self.key, self._view)

    def take(self, opening: Opening) -> bool:
        self.hit = opening.finish()
        self.unreadable, self.damaged = not self.hit, opening.damaged
        return self.hit


def discard(transport: resp.Transport, places: Sequence[Place]) -> list[bool]:
    """Delete blocks; return for each whether it was there."""
    commands = [call("discard", state_key(place.base), reads_numbers(1), members=[place.member]) for place in places]
    return [number == 1 for (number,) in transport.ask(commands)]


def _read_reserved(reply: resp.Reply) -> Reserved:
    status, *sizes, ages = read_list(reply, 5)
    if (name := read_text(status)) not in OUTCOMES:
        raise resp.FramingError("a reservation was not answered as it can be")
    missing, evicted, evicted_bytes = map(read_number, sizes)
    return Reserved(OUTCOMES[name], missing, evicted, evicted_bytes, read_ages(ages))


def read_text(reply: resp.Reply) -> str:
    if not isinstance(reply, bytes):
        raise resp.FramingError("an answer is not a string")
    return reply.decode("utf-8", "replace")


def read_number(reply: resp.Reply) -> int:
    """Return a number, sent as integer or as digits."""
    if isinstance(reply, int):
        return reply
    if not isinstance(reply, bytes):
        raise resp.FramingError("an answer is not a number")
    return -resp.integer(reply[1:]) if reply[:1] == b"-" else resp.integer(reply)


@cache
def reads_numbers(count: int) -> Callable[[resp.Reply], list[int]]:
    return lambda reply: [read_number(one) for one in read_list(reply, count)]


@cache
def reads_fields(count: int) -> Callable[[resp.Reply], list[int]]:
    """Return a reader of numbers in `count` fields of a hash, 0 for missing ones."""
    return lambda reply: [0 if one is None else read_number(one) for one in read_list(reply, count)]


@cache
def reads_status(count: int) -> Callable[[resp.Reply], tuple[str, list[int]]]:
    """Return a reader of a status and `count` numbers."""

    def read(reply: resp.Reply) -> tuple[str, list[int]]:
        status, *rest = read_list(reply, 1 + count)
        return read_text(status), [read_number(one) for one in rest]

    return read


def read_ages(reply: resp.Reply) -> list[int]:
    if not isinstance(reply, bytes):
        raise resp.FramingError("ages are not a string")
    return [resp.integer(one) for one in reply.split()]


def read_list(reply: resp.Reply, *counts: int) -> list[resp.Reply]:
    if not isinstance(reply, list) or len(reply) not in counts:
        raise resp.FramingError("an answer is not an array of the expected length")
    return reply


def _read_moment_ms(reply: resp.Reply) -> int:
    seconds, micros = reads_numbers(2)(reply)
    return seconds * 1000 + micros // 1000


def time_at(key: bytes) -> resp.Command:
    """Return the command that reads the clock of a key's server, in milliseconds."""
    return resp.Command(key, (b"TIME",), _read_moment_ms)


@lru_cache(maxsize=65_536)
def _allowed(state: bytes) -> resp.Command:
    """Return the command that reads whether a bucket may be used."""
    arguments = (b"HMGET", state, b"retention", b"tombstone")
    return resp.Command(state, arguments, _read_optional_pair, encoded=resp.command(*arguments))


def _bucket_refusal(state: tuple[int | None, int | None], retention_ms: int | None) -> Refusal | None:
    longest_ms, tombstone = state
    if tombstone:
        return Refusal.TOMBSTONE
    if retention_ms is not None and longest_ms is not None and longest_ms > retention_ms:
        return Refusal.RETENTION
    return None


def _latest_ms(now_ms: int, state: tuple[int | None, int | None]) -> float:
    """Return the latest expiry of a readable block. One beyond any life given in its bucket dates from before the
    server's clock was set back: its age is unknown."""
    longest_ms, _ = state
    return math.inf if longest_ms is None else now_ms + longest_ms


def _read_optional_pair(reply: resp.Reply) -> tuple[int | None, int | None]:
    first, second = read_list(reply, 2)
    return None if first is None else read_number(first), None if second is None else read_number(second)


def read_score(reply: resp.Reply) -> float | None:
    if reply is None:
        return None
    if not isinstance(reply, bytes):
        raise resp.FramingError("a score is not a string")
    try:
        return float(reply)
    except ValueError as error:
        raise resp.FramingError("a score is no number") from error


@lru_cache(maxsize=MEMBERS_PER_COMMAND)
def reads_scores(count: int) -> Callable[[resp.Reply], list[float | None]]:
    def read(reply: resp.Reply) -> list[float | None]:
        try:
            return [float(one) if isinstance(one, bytes) else read_score(one) for one in read_list(reply, count)]
        except ValueError as error:
            raise resp.FramingError("a score is no number") from error

    return read


def _read_computed(reply: resp.Reply) -> int | None:
    if reply is None:
        return None
    _, _, computed_ms = read_text(reply).partition(":")
    return resp.integer(computed_ms.encode())
