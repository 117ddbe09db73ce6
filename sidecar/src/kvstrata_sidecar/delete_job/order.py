"""Order of a deletion: a JSON file, which names files with secrets and never contains one."""

from __future__ import annotations

from typing import Annotated, Any

from kvstrata.contract import ContractError
from kvstrata.contract.policy.keyspace import Keyspace
from kvstrata.contract.store.redis_keys import IDENTITY_PATTERN, parse_block_key
from kvstrata.contract.wire import MAX_EXACT_NUMBER, Form, HexDigest, Items, Range, wired
from kvstrata_sidecar.adapter.params import Hex16, TierParams, read
from kvstrata_sidecar.adapter.redis.client.commands import WRITE_WINDOW_MS

MAX_STRAYS = 4_096

Identity = Annotated[str, Form(IDENTITY_PATTERN, "cache identity, with or without a fingerprint")]


@wired("the order")
class Order:
    """Delete `keyspaces`, which no bundle since `revision` has, from one tier of a domain, or only their `chunks`, or
    only blocks of cache `identities`, of which one without a fingerprint stands for all of that identity. Given ones
    must be at least one: none would mean all blocks.

    `parallelism` bounds the primaries in work at once. Indexes are checked for the last time `window_ms` after the
    revocation: until then values reserved before may arrive. `strays` are names of values without an index, from a
    verification, because only a user that may list names finds them. `sums` reports all keyspaces of a primary in one
    line, since thousands of keyspaces on many primaries exceed a container's log.
    """

    domain: Hex16
    revision: Annotated[int, Range(0, MAX_EXACT_NUMBER)]
    keyspaces: Annotated[tuple[Keyspace, ...], Items(1, 65_536, distinct=True)]
    tier: TierParams
    parallelism: Annotated[int, Range(1, 64)] = 4
    window_ms: Annotated[int, Range(0, 10 * WRITE_WINDOW_MS)] = WRITE_WINDOW_MS
    strays: Annotated[tuple[str, ...], Items(most=MAX_STRAYS)] = ()
    sums: bool = False
    identities: Annotated[tuple[Identity, ...], Items(1, 64)] = ()
    chunks: Annotated[tuple[HexDigest, ...], Items(most=4_096, distinct=True)] = ()

    def __post_init__(self) -> None:
        for name in self.strays:
            key = parse_block_key(name)
            if key is None or key.domain != self.domain or key.keyspace not in self.keyspaces:
                raise ContractError("strays must be names of blocks in one of the keyspaces")
        if self.identities and self.strays:
            raise ContractError("strays go with whole keyspaces, not with identities")
        if self.identities and self.chunks:
            raise ContractError("chunks are deleted regardless of identity: leave identities out")

    @classmethod
    def from_json(cls, raw: Any) -> Order:
        """Raises ValueError, which names the field, for anything missing, unknown or malformed."""
        return read(cls, raw)
