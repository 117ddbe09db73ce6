"""Agreement of engine and cache server on the engine's fingerprint. The gate computes no fingerprint.

The engine's report lies beside its socket before the engine is ready; the cache server reports the fingerprints of the
engines that have registered with it. Without an agreement, as with an ungoverned LMCache, requests get no reuse.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from kvstrata.contract import ContractError
from kvstrata.contract.messages.engine_identity import MAX_IDENTITY_BYTES, NO_FINGERPRINT, UNGOVERNED, EngineIdentity
from kvstrata.contract.wire import decode
from kvstrata_sidecar.gate import log

NOT_REPORTED = "the engine has not reported its fingerprint"


class ResolvedIdentity:
    """`engine` is the engine's last report. A cache server without a registered engine leaves an agreement as it is."""

    def __init__(self, path: Path) -> None:
        self.engine = EngineIdentity(problem=NOT_REPORTED)
        self._path = path
        self._version: tuple[int, int] | None = None
        self._cache: tuple[str, ...] = ()
        self._cache_ungoverned = ""
        self.fingerprint = ""  # agreed between engine and cache server, empty without an agreement

    @property
    def problem(self) -> str:
        """Return why there is no agreement, empty with one."""
        if self.fingerprint:
            return ""
        engine = self.engine.problem if self.engine.ungoverned else ""
        versions = (("cache", self._cache_ungoverned), ("engine", engine))
        if ungoverned := "; ".join(f"{container}: {why}" for container, why in versions if why):
            return ungoverned
        if not self.engine.fingerprint:
            return self.engine.problem or NOT_REPORTED
        if not self._cache:
            return "no engine has registered with the cache server"
        return f"the engine has the fingerprint {self.engine.fingerprint}, the cache server {', '.join(self._cache)}"

    @property
    def withheld(self) -> str:
        """The reason without an agreement, for the audit log."""
        if self.fingerprint:
            return ""
        return UNGOVERNED if self.engine.ungoverned or self._cache_ungoverned else NO_FINGERPRINT

    def read(self) -> bool:
        """Read the engine's report if it was replaced; return whether it was."""
        try:
            about = self._path.stat()
            version = about.st_ino, about.st_mtime_ns
        except OSError:
            version = None
        if version == self._version:
            return False
        self._version = version
        self.engine = EngineIdentity(problem=NOT_REPORTED) if version is None else self._report()
        log.info("the engine reports its identity", fingerprint=self.engine.fingerprint, problem=self.engine.problem)
        self._agree()
        return True

    def cache_reports(self, fingerprints: Sequence[str], ungoverned: str = "") -> bool:
        """Take the cache server's report; return whether the agreement, or the problem, changed."""
        before = self.fingerprint, self.problem
        self._cache, self._cache_ungoverned = tuple(fingerprints), ungoverned
        self._agree()
        return (self.fingerprint, self.problem) != before

    def _agree(self) -> None:
        own = self.engine.fingerprint
        if self._cache_ungoverned or (own not in self._cache and (self._cache or own != self.fingerprint)):
            own = ""
        self.fingerprint = own

    def _report(self) -> EngineIdentity:
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                return decode(EngineIdentity, os.read(descriptor, MAX_IDENTITY_BYTES))
            finally:
                os.close(descriptor)
        except (OSError, ContractError) as error:
            return EngineIdentity(problem=f"the engine's report cannot be read: {error}")
