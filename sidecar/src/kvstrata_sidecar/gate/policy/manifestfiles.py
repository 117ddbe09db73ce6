"""The manifests' files: one for each content of a pool that the policy names, for the cache server.

They are named by what they hold, so one is written once however often the policy changes. A manifest is there before a
policy names it, and goes when the cache server has applied one that does not: until then it may be reading the policy
before.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Set
from pathlib import Path

from kvstrata.contract.policy.cache_view import MANIFESTS_DIRECTORY
from kvstrata_sidecar.gate.policy.wholefiles import write_whole


class ManifestFiles:
    """Keeps the files in `directory` / pools. Raises OSError where it cannot: a policy without them is not applied.

    What a predecessor in this pod left is replaced, or goes with the first removal.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory / MANIFESTS_DIRECTORY
        self._written: set[str] = set()
        self._left = self._directory.exists()
        """Whether there may be files that the policy does not name."""

    def add(self, manifests: Mapping[str, bytes]) -> None:
        """Write those that are not there; all others stay for now."""
        if manifests:
            self._directory.mkdir(mode=0o700, exist_ok=True)
        for digest, hashes in manifests.items():
            if digest not in self._written:
                self._write(digest, hashes)
        self._left = self._left or not self._written <= manifests.keys()

    def retain(self, digests: Set[str]) -> None:
        """Remove all but these."""
        if not self._left:
            return
        for name in set(os.listdir(self._directory)) - digests:
            (self._directory / name).unlink(missing_ok=True)
        self._written &= digests
        self._left = False

    def _write(self, digest: str, hashes: bytes) -> None:
        write_whole(self._directory, digest, hashes)
        self._written.add(digest)
