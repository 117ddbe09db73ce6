"""What a sweeper needs of its tier."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from kvstrata_sidecar.adapter.redis.client.commands import Bounds, Transport


class SweeperConnection(Transport, Protocol):
    """A transport that can be cut off and closed."""

    @property
    def usable(self) -> bool:
        """Whether it is open and in step as far as is known."""

    def abort(self) -> None:
        """Make whatever uses this connection fail at once."""

    def close(self) -> None:
        """Close it."""


@dataclass(frozen=True, slots=True)
class SweeperHooks:
    """What a sweeper needs of its tier. `life_ms` and `bounds` are a keyspace's under the policy.

    `learn` asks which of the policy's keyspaces the tier knows as revoked.
    """

    connect: Callable[[], SweeperConnection]
    usable: Callable[[], bool]
    life_ms: Callable[[str], int | None]
    bounds: Callable[[str], Bounds | None]
    count: Callable[[str, int, str], None]
    learn: Callable[[Transport, Collection[str]], None]
