"""External servers to which the operator may connect: namespaces name them, and servers of a cluster name others."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

Network = IPv4Network | IPv6Network


@dataclass(frozen=True, slots=True)
class AllowedServers:
    """Servers by name (`hosts`, of which `*.example` has every name that ends so) or by address (`networks`).

    Without both, every server is allowed. Loopback, link-local, multicast and unspecified addresses, and `reserved`
    ones, such as the API server's, are allowed by `networks` only. `plain_passwords`: passwords may go without TLS.
    """

    hosts: tuple[str, ...] = ()
    networks: tuple[Network, ...] = ()
    reserved: frozenset[str] = frozenset()
    plain_passwords: bool = False

    async def resolved(self, host: str, port: int) -> list[str]:
        """Return the addresses of `host` to connect to; none if one of them is not allowed. Raises OSError."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(place[0]) for *_, place in found))
        return addresses if self.allows(host, addresses) else []

    def allows(self, host: str, addresses: Iterable[str]) -> bool:
        """Whether a connection to `host`, which has these addresses, is allowed."""
        return all(self._allows(host, ip_address(one.partition("%")[0])) for one in addresses)

    def _allows(self, host: str, ip: IPv4Address | IPv6Address) -> bool:
        ip = (ip.ipv4_mapped if isinstance(ip, IPv6Address) else None) or ip
        if any(ip in network for network in self.networks):
            return True
        if ip.is_loopback or ip.is_link_local or ip.is_multicast or ip.is_unspecified or str(ip) in self.reserved:
            return False
        return not (self.hosts or self.networks) or self._names(host.lower().rstrip("."))

    def _names(self, host: str) -> bool:
        return any(host == one or (one.startswith("*.") and host.endswith(one[1:])) for one in self.hosts)
