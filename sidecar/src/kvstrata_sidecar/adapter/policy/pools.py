"""Chunks of pools, and their readers. Pure, except for reading manifest files.

A chunk's hash is a function of its tokens alone, so a tenant that sends a pool's tokens asks for the same hashes. Only
the place is redirected, never the name: a block is kept, sealed and checked under the pool's own keyspace.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from kvstrata.contract import ContractError
from kvstrata.contract.policy.cache_view import CacheView
from kvstrata.contract.policy.pools import read_manifest

logger = logging.getLogger(__name__)

MAX_CANDIDATES = 8
"""Versions of pools that one chunk is asked for at most."""


@dataclass(frozen=True, slots=True, eq=False)
class Readable:
    """Pools' chunks under one view. Immutable. A pool whose manifest is unknown has no chunks."""

    _reads: Mapping[str, tuple[str, ...]]
    chunks: Mapping[str, frozenset[bytes]]
    """The hashes of each pool's keyspace, warming or published."""
    _tiers: Mapping[str, frozenset[str]]

    @classmethod
    def of(cls, view: CacheView, files: Mapping[str, frozenset[bytes]]) -> Readable:
        """Build it from `view`; `files` are the hashes of manifests, by digest."""
        chunks = {keyspace: files.get(pool.manifest, frozenset()) for keyspace, pool in view.pools.items()}
        tiers = {keyspace: frozenset(pool.tiers) for keyspace, pool in view.pools.items()}
        return cls(view.reads, chunks, tiers)

    def candidates(self, reader: str, chunk_hash: bytes, tier: str | None = None) -> tuple[str, ...]:
        """Return the pools' keyspaces that may have a chunk for `reader`, in order; with `tier`, of pools in it."""
        reads = self._reads.get(reader)
        if reads is None:
            return ()
        chunks, tiers = self.chunks, self._tiers
        found = (pool for pool in reads if chunk_hash in chunks[pool] and (tier is None or tier in tiers[pool]))
        return tuple(islice(found, MAX_CANDIDATES))

    def admits(self, keyspace: str, chunk_hash: bytes, tier: str | None = None) -> bool:
        """Whether a chunk may be written under `keyspace`: under a pool's only its own, and only in its tiers."""
        own = self.chunks.get(keyspace)
        if own is None:
            return True
        return chunk_hash in own and (tier is None or tier in self._tiers[keyspace])


NOTHING_READABLE = Readable({}, {}, {})


class Manifests:
    """The manifest files in `directory`, each read once for as long as a view names it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known: dict[str, frozenset[bytes]] = {}

    def of(self, view: CacheView) -> Readable:
        """Read the manifests of `view`. One that is unreadable or does not match its name has no chunks."""
        known: dict[str, frozenset[bytes]] = {}
        for digest in {pool.manifest for pool in view.pools.values()}:
            if (found := self._known.get(digest) or self._read(digest)) is not None:
                known[digest] = found
        self._known = known
        return Readable.of(view, known)

    def _read(self, digest: str) -> frozenset[bytes] | None:
        try:
            return frozenset(read_manifest((self._directory / digest).read_bytes(), digest))
        except (OSError, ContractError) as error:
            logger.warning("The manifest %.12s of a pool cannot be read, so the pool is not used: %s", digest, error)
            return None
