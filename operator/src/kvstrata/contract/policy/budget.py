"""A scope's bounds in a tier."""

from __future__ import annotations

from kvstrata.contract.wire import wired


@wired(
    "a budget",
    camel=True,
    omit=("limit_bytes", "guaranteed_bytes", "retention_s", "denied"),
    names={"retention_s": "retentionSeconds"},
)
class EnforcedBudget:
    """A scope's bounds in one tier. None: the policy sets no such bound.

    `denied`: the scope's data may not be on the tier. Nothing is stored, looked up or loaded there, and existing blocks
    are deleted. `limit_bytes` is then 0, which pods of the previous version obey, too.
    """

    tier: str
    limit_bytes: int | None = None
    guaranteed_bytes: int | None = None
    retention_s: int | None = None
    denied: bool = False

    def __post_init__(self) -> None:
        if self.denied:
            object.__setattr__(self, "limit_bytes", 0)
            object.__setattr__(self, "guaranteed_bytes", None)

    @classmethod
    def denying(cls, tier: str, retention_s: int | None = None) -> EnforcedBudget:
        """Keep a scope off a tier; `retention_s` bounds the life of existing blocks until they are deleted."""
        return cls(tier, retention_s=retention_s, denied=True)
