"""Memory of a server for its callers' requests, and each caller's share."""

from __future__ import annotations

from collections.abc import Hashable

from kvstrata_sidecar.gate.http.errors import Reason, Refusal
from kvstrata_sidecar.gate.http.messages import Limits


class Buffered:
    """Bytes of requests in memory, in total and by caller. `check_head` identifies the caller."""

    __slots__ = ("_by_caller", "_limits", "total")

    def __init__(self, limits: Limits) -> None:
        self.total = 0
        self._limits = limits
        self._by_caller: dict[Hashable, int] = {}

    def refusal(self, caller: Hashable, more: int) -> Refusal | None:
        if self._by_caller.get(caller, 0) + more > self._limits.buffered_bytes_per_caller:
            return Refusal(
                429, Reason.TENANT_OVERLOADED, "too many large requests of this tenant at once on this replica",
                retry_after_s=1,
            )  # fmt: skip
        if self.total + more > self._limits.buffered_bytes:
            return Refusal(503, Reason.OVERLOADED, "too many large requests at once", retry_after_s=1)
        return None

    def add(self, caller: Hashable, count: int) -> None:
        if count:
            self.total += count
            self._by_caller[caller] = self._by_caller.get(caller, 0) + count

    def remove(self, caller: Hashable, count: int) -> None:
        """Must have been added for the same caller."""
        if count:
            self.total -= count
            left = self._by_caller.pop(caller) - count
            if left:
                self._by_caller[caller] = left
