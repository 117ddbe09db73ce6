"""Contents of a Redis tier with one shard, read with the model's own user: blocks and their accounting."""

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


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block as it lies in the server. `expires_in_ms` is the server's remaining time to live for it."""

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

    def names(self, keyspace: str) -> set[str]:
        """Return the names of these blocks."""
        return {block.name for block in self.blocks(keyspace)}

    def held_bytes(self, keyspace: str) -> int:
        """Return the stored and reserved bytes of a keyspace.

        Buckets are in different slots, which no script may read together. A server carries out all commands that it
        has read of one client before it turns to another: so they are seen at one instant.
        """
        with self.client.pipeline(transaction=False) as pipeline:
            for bucket in range(BUCKETS):
                pipeline.hmget(f"{bucket_prefix(self.domain, keyspace, bucket)}:#s", "used", "held")
            return sum(int(size or 0) for sizes in pipeline.execute() for size in sizes)


@contextmanager
def tier_contents(kubectl: Kubectl, tier: str = TIER, namespace: str = DEMO_NAMESPACE) -> Iterator[TierContents]:
    """Open a way to the server of a managed tier with one shard while the block runs."""
    domain = kubectl.get("cachedomain", "default", namespace)["status"]["domainID"]
    secret = kubectl.get("secret", f"kvs-{tier}-redis-auth", namespace)["data"]
    authority = base64.b64decode(kubectl.get("secret", f"kvs-{tier}-redis-tls", namespace)["data"]["ca.crt"])
    with kubectl.forward(namespace, f"pod/kvs-{tier}-redis-0-0", 6379) as port:
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
