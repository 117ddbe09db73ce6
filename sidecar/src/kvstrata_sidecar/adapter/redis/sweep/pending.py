"""Work that other threads queue for a tier's sweeper."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvstrata_sidecar.adapter.redis.client.commands import Place, call, read_number, state_key
from kvstrata_sidecar.adapter.redis.client.resp import Command

MAX_PENDING = 65_536
MEMBERS_PER_TOUCH = 500


@dataclass(slots=True)
class Pending:
    """Touches of blocks, abandoned reservations, and scopes that must be swept before use."""

    touches: dict[Place, None] = field(default_factory=dict)
    abandoned: deque[tuple[Place, bytes]] = field(default_factory=lambda: deque(maxlen=MAX_PENDING))
    urgent: dict[str, None] = field(default_factory=dict)

    def commands(self) -> Iterator[tuple[str, Command]]:
        """Yield the commands for touches and abandoned reservations, with their keyspace."""
        by_bucket: dict[tuple[str, bytes], list[bytes]] = {}
        for place in self.touches:
            by_bucket.setdefault((place.keyspace, place.base), []).append(place.member)
        for (keyspace, base), members in by_bucket.items():
            for start in range(0, len(members), MEMBERS_PER_TOUCH):
                batch = members[start : start + MEMBERS_PER_TOUCH]
                yield keyspace, call("touch", state_key(base), *batch, read=read_number)
        for place, token in self.abandoned:
            key = state_key(place.base)
            yield place.keyspace, call("abandon", key, place.member, token, read=read_number)
