"""Which nodes of a tier had no memory for a block a moment ago."""

from __future__ import annotations

from collections.abc import Callable

from kvstrata_sidecar.adapter.redis.client.commands import Place
from kvstrata_sidecar.adapter.redis.client.nodes import Node, Topology

FULL_PAUSE_S = 1.0
"""How long stores rest after the tier said that it has no memory: its answer costs the transfer of a whole block."""


class FullNodes:
    """Safe to share between threads. `clock` returns seconds."""

    def __init__(self, topology: Topology, clock: Callable[[], float]) -> None:
        self._topology = topology
        self._clock = clock
        self._until_s: dict[Node | None, float] = {}

    def note(self, place: Place, left: bool) -> None:
        """Note whether the node of a block took it or had no memory for it."""
        node = self._topology.node_of(place.base)
        if not left:
            self._until_s[node] = self._clock() + FULL_PAUSE_S
        elif self._until_s:
            self._until_s.pop(node, None)

    def rests(self, node: Node) -> bool:
        """Whether stores rest, because the node had no memory a moment ago."""
        return self._clock() < self._until_s.get(node, 0.0)

    @property
    def detail(self) -> str:
        """What to tell of it, empty if there is nothing."""
        return "the tier is out of memory: it refuses blocks" if self._until_s else ""
