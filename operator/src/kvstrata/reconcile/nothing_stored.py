"""Storages for kopf that hold nothing.

kopf keeps what its change handlers saw last, and how far they came, in annotations of the object; to compare, it copies
every object of every event several times. The operator has no change handlers, so there is nothing to keep or compare:
without the copies an event costs a third.
"""

from __future__ import annotations

from typing import Any

import kopf


class NoDiffBase(kopf.DiffBaseStorage):
    """Remembers no earlier form of an object."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        """Return the same nothing for every object."""
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> kopf.BodyEssence | None:
        """Return that nothing was stored."""
        return None

    def store(self, **_: Any) -> None:
        """Store nothing."""


class NoProgress(kopf.ProgressStorage):
    """Remembers no progress of handlers."""

    def fetch(self, **_: Any) -> None:
        """Return that nothing was stored."""
        return

    def store(self, **_: Any) -> None:
        """Store nothing."""

    def purge(self, **_: Any) -> None:
        """Remove nothing."""

    def touch(self, **_: Any) -> None:
        """Touch nothing."""

    def clear(self, *, essence: kopf.BodyEssence) -> kopf.BodyEssence:
        """Return `essence` as it is: no progress is in it."""
        return essence
