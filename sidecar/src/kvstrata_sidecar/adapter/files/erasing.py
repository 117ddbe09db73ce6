"""Erases keyspaces from a tier's directory and says what is left of them there, by a look at the directory itself."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from kvstrata.contract.messages.erase import Amount, Check, ErasedTier
from kvstrata.contract.store.block_file import keyspace_of, parts_of
from kvstrata_sidecar.adapter.files.erase import WAIT_S, Purged, Purger
from kvstrata_sidecar.adapter.files.exchanges import Files

from .faults import DiskError

MEDIUM = "NVMe"
WITHIN_S = 3.0
"""How long one look may take, the removal before it included; whoever wants to wait longer asks again."""


class _Found(NamedTuple):
    """What a removal did, and what a look afterwards found."""

    purged: Purged
    listed: int
    rewriting: int
    problem: str = ""


class FileEraser:
    """Erases from the directory of `files`, which is the tier `name`."""

    def __init__(self, name: str, files: Files, purger: Purger, clock: Callable[[], float]) -> None:
        self._name = name
        self._files = files
        self._purger = purger
        self._clock = clock

    def erase(self, keyspaces: Collection[str], seen: Callable[[str, bytes], None]) -> ErasedTier:
        """Remove what these keyspaces have now, and return what is left. What is in use goes when it is let go.

        `seen` is told the keyspace and the chunk's hash of each block that was there.
        """
        names, shelf, health = frozenset(keyspaces), self._files.shelf, self._files.health
        for key in shelf.condemned(names):
            seen(keyspace_of(key), parts_of(key)[-1])
        found = self._purger.within(WITHIN_S, lambda: self._look(names))
        left = shelf.condemned(names)
        reading, writing = shelf.uses(left)
        remaining = Amount(len(left), sum(left.values()))
        problems, checked, deleted, rewriting, residue = [], list[Check](), Amount(), 0, ""
        if health.recovering:
            problems.append("the files are still being counted")
        if not health.breaker.closed:
            problems.append(f"the disk is not used now: {health.detail or 'it failed or hangs'}")
        if found is None:
            problems.append("the disk has not ended the removal yet")
        else:
            deleted, residue = Amount(found.purged.gone_blocks, found.purged.gone_bytes), found.purged.residue
            rewriting = found.rewriting
            if found.problem:
                problems.append(found.problem)
            elif found.listed > len(left):
                problems.append(f"{found.listed - len(left)} files are in the keyspaces' directories and in no index")
            looked = not problems
            checked += [Check.INDEX] if looked and not left else []
            checked += [Check.DIRECTORY] if looked and not found.listed else []
            checked += [Check.SPARES] if looked and not left and not rewriting else []
        return ErasedTier(
            self._name,
            MEDIUM,
            encrypted=self._files.encrypted,
            found=deleted + remaining,
            deleted=deleted,
            remaining=remaining,
            reading=reading,
            writing=writing,
            removing=max(0, len(left) - reading - writing),
            rewriting=rewriting,
            checked=tuple(checked),
            problem="; ".join(problems),
            residue=residue,
        )

    def _look(self, names: frozenset[str]) -> _Found:
        """Remove and look; on a thread of its own, for as long as the disk takes."""
        files = self._files
        purged = self._purger.purge_now(names, WITHIN_S / 3)
        # Of what is empty no file can make room any more: later ones that are written over are others'.
        rewriting = files.shelf.spare_names()
        give_up_at_s = self._clock() + WITHIN_S / 3
        while rewriting and self._clock() < give_up_at_s:
            files.shelf.wait(WAIT_S)
            rewriting &= files.shelf.spare_names()
        try:
            listed = sum(len(files.disk.names(keyspace)) for keyspace in names)
        except DiskError as error:
            files.health.failed(error)
            return _Found(purged, 0, len(rewriting), str(error))
        return _Found(purged, listed, len(rewriting))
