"""How many bytes blocks take in a shared tier: asked about pools, whose chunks are counted rather than used."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstrata_sidecar.adapter.policy.enforcement import Refusal
from kvstrata_sidecar.adapter.redis.client.commands import (
    MEMBERS_PER_COMMAND,
    Place,
    Transport,
    read_list,
    read_moment_ms,
    state_key,
)
from kvstrata_sidecar.adapter.redis.client.resp import Command, FramingError, Reply, integer
from kvstrata_sidecar.adapter.redis.client.transport import ClusterTransport
from kvstrata_sidecar.adapter.tier.counts import Counters
from kvstrata_sidecar.adapter.tier.part import Gain, Part
from kvstrata_sidecar.adapter.tier.tasks import Task


def sizes(transport: Transport, places: Sequence[Place]) -> list[int]:
    """Return how many bytes each block takes, 0 for one that is not committed or whose time is over."""
    found = [0] * len(places)
    by_bucket: dict[bytes, list[int]] = defaultdict(list)
    for number, place in enumerate(places):
        by_bucket[place.base].append(number)
    if not by_bucket:
        return found
    first = state_key(next(iter(by_bucket)))
    commands, asked = [Command(first, (b"TIME",), read_moment_ms)], list[list[int]]()
    for base, numbers in by_bucket.items():
        for start in range(0, len(numbers), MEMBERS_PER_COMMAND):
            some = numbers[start : start + MEMBERS_PER_COMMAND]
            members = [places[number].member for number in some]
            key, read = state_key(base), _listed(len(members))
            commands.append(Command(key, (b"ZMSCORE", base + b":#x", *members), read))
            commands.append(Command(key, (b"HMGET", base + b":#m", *members), read))
            asked.append(some)
    now_ms, *answers = transport.ask(commands)
    for numbers, expiries, told in zip(asked, answers[::2], answers[1::2], strict=True):
        for number, expires, text in zip(numbers, expiries, told, strict=True):
            if expires is not None and _moment_ms(expires) > now_ms:
                found[number] = _size_bytes(text)
    return found


@dataclass(slots=True, eq=False)
class SizesPart(Part[ClusterTransport]):
    """Ask what blocks of one keyspace take; `done` is set when it is over and `sizes` says it, if it could be asked."""

    keyspace: str
    places: Sequence[Place]
    counters: Counters
    task: Task | None = None
    urgent: bool = True
    sizes: list[int] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)

    def run(self, transport: ClusterTransport, gain: Gain) -> None:  # noqa: ARG002
        """Ask for all of them in one pipeline."""
        self.sizes = sizes(transport, self.places)

    def refused(self, refusal: Refusal) -> None:
        """Count the blocks."""
        self.counters.refuse(refusal, len(self.places), self.keyspace)

    def over(self, error: Exception | None) -> None:  # noqa: ARG002
        """Release whoever waits."""
        self.done.set()


def _listed(count: int) -> Callable[[Reply], list[Reply]]:
    return lambda reply: read_list(reply, count)


def _moment_ms(score: Reply) -> float:
    try:
        return float(score) if isinstance(score, (bytes, float, int)) else 0.0
    except ValueError as error:
        raise FramingError("a score is no number") from error


def _size_bytes(told: Reply) -> int:
    return integer(told.partition(b":")[0]) if isinstance(told, bytes) else 0
