"""Dependencies of a sweeper on its tier."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from kvstrata_sidecar.adapter.redis.client.commands import Bounds, Transport


class SweeperConnection(Transport, Protocol):
    @property
    def usable(self) -> bool:
        """Whether it is open and in step as far as known."""

    def abort(self) -> None:
        """Make the command under way fail at once."""

    def close(self) -> None:
        """Close it."""


@dataclass(frozen=True, slots=True)
class SweeperHooks:
    """`life_ms` and `bounds` are a keyspace's; `learn` asks which of the policy's keyspaces the tier has revoked."""

    connect: Callable[[], SweeperConnection]
    usable: Callable[[], bool]
    life_ms: Callable[[str], int | None]
    bounds: Callable[[str], Bounds | None]
    count: Callable[[str, int, str], None]
    learn: Callable[[Transport, Collection[str]], None]
