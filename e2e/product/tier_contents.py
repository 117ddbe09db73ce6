"""What the server of a Redis tier holds, read with the model's own user: blocks and what they count for."""

from __future__ import annotations

import base64
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import redis

from kvstrata.contract.store.redis_keys import BUCKETS, bucket_prefix
from kvstrata.objects.redis.users import DATA_USER

from .install import DEMO_NAMESPACE
from .kubectl import Kubectl
from .shared_tier import TIER

_HELD = """
local held = 0
for i = 1, #KEYS do
  local told = redis.call('HMGET', KEYS[i], 'used', 'held')
  held = held + tonumber(told[1] or '0') + tonumber(told[2] or '0')
end
return held
"""
"""One script, so that all buckets are seen at one instant."""


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block as it lies in the server. `expires_in_ms` is what the server says of it."""

    name: str
    value: bytes
    expires_in_ms: int


class TierContents:
    """The server while a way to it is open."""

    def __init__(self, client: redis.Redis, domain: str) -> None:
        self.client, self.domain = client, domain

    def blocks(self, keyspace: str) -> list[StoredBlock]:
        """Return the blocks of a keyspace that can be found."""
        found = []
        for bucket in range(BUCKETS):
            prefix = bucket_prefix(self.domain, keyspace, bucket)
            for member in cast(list[bytes], self.client.zrange(f"{prefix}:#x", 0, -1)):
                name = f"{prefix}:{member.decode()}"
                value, ttl_ms = cast(bytes | None, self.client.get(name)), self.client.pttl(name)
                if value is not None:
                    found.append(StoredBlock(name, value, ttl_ms))
        return found

    def held_bytes(self, keyspace: str) -> int:
        """Return what a keyspace has stored and reserved, in bytes, at one instant."""
        keys = [f"{bucket_prefix(self.domain, keyspace, bucket)}:#s" for bucket in range(BUCKETS)]
        return cast(int, self.client.eval(_HELD, len(keys), *keys))


@contextmanager
def tier_contents(kubectl: Kubectl, tier: str = TIER) -> Iterator[TierContents]:
    """Open a way to the one server of a managed tier while the block runs."""
    domain = kubectl.get("cachedomain", "default", DEMO_NAMESPACE)["status"]["domainID"]
    secret = kubectl.get("secret", f"kvs-{tier}-redis-auth", DEMO_NAMESPACE)["data"]
    authority = base64.b64decode(kubectl.get("secret", f"kvs-{tier}-redis-tls", DEMO_NAMESPACE)["data"]["ca.crt"])
    with kubectl.forward(DEMO_NAMESPACE, f"pod/kvs-{tier}-redis-0", 6379) as port:
        client = redis.Redis(
            host="localhost",
            port=port,
            username=DATA_USER,
            password=base64.b64decode(secret["password"]).decode(),
            ssl=True,
            ssl_ca_data=authority.decode(),
            ssl_min_version=ssl.TLSVersion.TLSv1_2,
        )
        try:
            yield TierContents(client, str(domain))
        finally:
            client.close()
