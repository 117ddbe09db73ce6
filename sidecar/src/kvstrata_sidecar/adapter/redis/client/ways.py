"""How the threads of a tier come to its servers."""

from __future__ import annotations

from kvstrata_sidecar.adapter.params import TierParams
from kvstrata_sidecar.adapter.redis.client.connection import Connection
from kvstrata_sidecar.adapter.redis.client.dial import dial
from kvstrata_sidecar.adapter.redis.client.nodes import Node, Topology
from kvstrata_sidecar.adapter.redis.client.resp import AccessError, ReplyError, TransportError
from kvstrata_sidecar.adapter.redis.client.slots import Address
from kvstrata_sidecar.adapter.redis.client.transport import ClusterTransport


class Ways:
    """Makes a transport for each thread. Safe to share between threads."""

    def __init__(self, tier: TierParams, topology: Topology) -> None:
        self._tier = tier
        self._topology = topology

    def transport(self) -> ClusterTransport:
        """Return one thread's way to all servers."""
        timeout_s = 2 * (self._tier.connect_timeout_ms + self._tier.io_timeout_ms) / 1000
        return ClusterTransport(
            self._topology,
            self._connect,
            strangers=self._tier.tls is not None,
            dial_timeout_s=timeout_s * len(self._tier.endpoints),
        )

    def dial(self, address: Address) -> Connection:
        """Return a connection to a server that let us in. Raises as `dial.dial` does."""
        return dial(
            address,
            tls=self._tier.tls,
            username=self._tier.username,
            password_file=self._tier.password_file,
            connect_timeout_s=self._tier.connect_timeout_ms / 1000,
            io_timeout_s=self._tier.io_timeout_ms / 1000,
        )

    def _connect(self, node: Node) -> Connection:
        problems: list[TransportError | ReplyError] = []
        for address in node.addresses:
            try:
                connection = self.dial(address)
                if not self._tier.cluster:  # in a cluster the map tells
                    connection.expect_primary(self._tier.io_timeout_ms / 1000)
                return connection
            except (TransportError, ReplyError) as error:
                problems.append(error)
        raise next((problem for problem in problems if isinstance(problem, AccessError)), problems[0])
