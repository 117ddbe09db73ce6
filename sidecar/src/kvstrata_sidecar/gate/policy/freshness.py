"""Freshness: the age of the policy in force.

Freshness is the moment, on CLOCK_BOOTTIME, at which the last quorum read of the bundle root in force was *sent*. The
send time counts, because later commits may be missing. CLOCK_BOOTTIME includes suspension, and no time service changes
it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from pathlib import Path

from kvstrata.contract import ContractError
from kvstrata.contract.messages.erase import LeftKeys
from kvstrata.contract.policy.bundle import Bundle
from kvstrata.contract.policy.cache_view import (
    FRESHNESS_FILE,
    FRESHNESS_FORMAT,
    POLICY_FILE,
    CacheView,
    data_keys,
    manifests,
)
from kvstrata_sidecar.gate import log
from kvstrata_sidecar.gate.policy.volume import KeyFiles, ManifestFiles


def boottime_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class Freshness:
    """The send time of the last good read; 0 before the first."""

    __slots__ = ("_clock_ns", "sent_ns")

    def __init__(self, clock_ns: Callable[[], int] = boottime_ns) -> None:
        self._clock_ns = clock_ns
        self.sent_ns = 0

    def now_ns(self) -> int:
        """Taken just before a read is sent."""
        return self._clock_ns()

    def confirm(self, sent_ns: int) -> None:
        """Record an answered read; an older one than known changes nothing."""
        self.sent_ns = max(self.sent_ns, sent_ns)

    def age_ms(self) -> int:
        """Return the age in milliseconds, or -1 before the first read."""
        return (self._clock_ns() - self.sent_ns) // 1_000_000 if self.sent_ns else -1

    def fresh(self, stale_after_s: int) -> bool:
        """Whether the last read was sent within `stale_after_s`. A clock that ran backwards is not fresh."""
        return bool(self.sent_ns) and 0 <= self._clock_ns() - self.sent_ns <= stale_after_s * 1_000_000_000


class PolicyVolume:
    """The memory volume that the cache server reads: the policy by atomic rename, freshness in place, data keys and
    manifests."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.keys = KeyFiles(directory)
        self._manifests = ManifestFiles(directory)
        self._named: frozenset[str] = frozenset()
        path = directory / FRESHNESS_FILE
        self._freshness = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        # A started gate has confirmed nothing yet, whatever its predecessor wrote.
        os.pwrite(self._freshness, FRESHNESS_FORMAT.pack(0), 0)

    def enforced_before(self) -> tuple[int, int]:
        """Return revision and term of the policy of a predecessor in this pod, or zeros."""
        try:
            view = CacheView.decode((self._directory / POLICY_FILE).read_bytes())
        except (OSError, ContractError):
            return (0, 0)
        return (view.revision, view.term)

    def write_policy(self, bundle: Bundle) -> None:
        named = manifests(bundle)
        self._manifests.add(named)
        self.keys.write(data_keys(bundle))
        target = self._directory / POLICY_FILE
        draft = target.with_suffix(".tmp")
        draft.write_bytes(CacheView.of(bundle).encode())
        draft.chmod(0o644)
        draft.replace(target)
        self._named = frozenset(named)

    def keys_left(self, keyspaces: Collection[str]) -> LeftKeys:
        return self.keys.left(keyspaces)

    def policy_applied(self) -> None:
        """Remove manifests that the applied policy does not name."""
        try:
            self._manifests.retain(self._named)
        except OSError as error:
            # They only take room in the volume; the next revision tries again.
            log.warning("manifests that no policy names were not removed", problem=str(error))

    def write_freshness(self, sent_ns: int) -> None:
        """Eight aligned bytes, so no reader sees half of them."""
        os.pwrite(self._freshness, FRESHNESS_FORMAT.pack(sent_ns), 0)

    def close(self) -> None:
        os.close(self._freshness)
