"""Redis tiers of a model, as policy: pods join and leave them without a restart.

The gate writes a tier's password and certificate authority to files in `ACCESS_DIRECTORY`, before a policy names the
tier, and removes them after the adapter has applied one that does not. `policy.json` has neither.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import field
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Annotated

from kvstrata.contract.wire import Base64, Form, Items, Positive, Range, ShortText, wired

ACCESS_DIRECTORY = "tiers"
MAX_PASSWORD_BYTES = 4 * 1024
MAX_AUTHORITY_BYTES = 32 * 1024
"""A root holds the access of sixteen tiers, and a Secret at most 1 MiB."""

TierName = Annotated[str, Form("[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", "name of a tier")]


def password_in(value: bytes) -> bytes:
    """Return the password in the value of a Secret: without the line end that `echo` adds, for operator and pods."""
    return value.rstrip(b"\r\n")


@wired("a server's address", row=True)
class Server:
    host: ShortText
    port: Annotated[int, Range(1, 65_535)]


@wired("the allowed servers", camel=True, omit=("hosts", "networks", "reserved", "plain_passwords"))
class AllowedServers:
    """External servers that an installation allows, by name (`hosts`, of which `*.example` has every name that ends so)
    or by address (`networks`): namespaces name them, and servers of a cluster name others.

    Without both, every server is allowed. Loopback, link-local, multicast and unspecified addresses, and `reserved`
    ones, such as the API server's, are allowed by `networks` only. `plain_passwords`: passwords may go without TLS.
    """

    hosts: tuple[ShortText, ...] = ()
    networks: tuple[Annotated[str, Form("[0-9A-Fa-f.:]+/[0-9]{1,3}", "network", ip_network)], ...] = ()
    reserved: tuple[ShortText, ...] = ()
    plain_passwords: bool = False

    def reserved_at(self, ports: Container[int]) -> frozenset[str]:
        """Return the addresses that are reserved at one of these ports; entries are ADDRESS or [ADDRESS]:PORT."""
        entries = (one.strip("[").partition("]:") for one in self.reserved)
        return frozenset(address for address, _, port in entries if not port or int(port) in ports)

    def allows(self, host: str, addresses: Iterable[str], port: int) -> bool:
        """Whether a connection to `host`, which has these addresses, is allowed."""
        name = host.lower().rstrip(".")
        named = any(name == one or (one.startswith("*.") and name.endswith(one[1:])) for one in self.hosts)
        is_named = named or not (self.hosts or self.networks)
        return all(self._allows(ip_address(one.partition("%")[0]), port, is_named=is_named) for one in addresses)

    def _allows(self, ip: IPv4Address | IPv6Address, port: int, *, is_named: bool) -> bool:
        ip = (ip.ipv4_mapped if isinstance(ip, IPv6Address) else None) or ip
        is_local = ip.is_loopback or ip.is_link_local or ip.is_multicast or ip.is_unspecified
        if is_named and not is_local and str(ip) not in self.reserved_at((port,)):
            return True
        return any(ip in ip_network(network) for network in self.networks)


@wired(
    "the rules of a tier",
    complete=True,
    camel=True,
    omit=("retention_s", "cluster", "username", "password", "tls", "encrypts", "allowed"),
    names={"retention_s": "retentionSeconds"},
)
class TierRules:
    """The addresses of a tier's servers, the bytes that the blocks of all scopes may take together, and the life of a
    block without a retention of its own.

    `cluster`: the servers belong to a Redis Cluster and report its other servers. `username` None is the default user.
    `password` and `tls`: whether servers ask for one, and whether they are reached over TLS. `encrypts`: only blocks
    with a data key are stored. `allowed` limits all of its servers, None if the operator runs them.
    """

    name: TierName
    servers: Annotated[tuple[Server, ...], Items(least=1)]
    capacity_bytes: Positive
    retention_s: Positive | None = None
    cluster: bool = False
    username: ShortText | None = None
    password: bool = False
    tls: bool = False
    encrypts: bool = False
    allowed: AllowedServers | None = None


@wired("the access to a tier", omit=("password", "authority"))
class TierAccess:
    """Contents of a tier's Secrets: the user's password, and certificate authorities in PEM. None: there is none, or it
    is unknown yet."""

    password: Annotated[bytes, Base64(1, MAX_PASSWORD_BYTES)] | None = field(default=None, repr=False)
    authority: Annotated[bytes, Base64(1, MAX_AUTHORITY_BYTES)] | None = field(default=None, repr=False)


def password_file(tier: str) -> str:
    return f"{tier}.password"


def authority_file(tier: str) -> str:
    return f"{tier}.ca.crt"


def files_of(access: Mapping[str, TierAccess]) -> dict[str, bytes]:
    """Return the files in `ACCESS_DIRECTORY` by name."""
    passwords = {password_file(tier): one.password for tier, one in access.items()}
    authorities = {authority_file(tier): one.authority for tier, one in access.items()}
    return {name: content for name, content in {**passwords, **authorities}.items() if content is not None}
