"""What a scope may hold in a tier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvstrata.contract.wire import Wire


@dataclass(frozen=True, slots=True)
class TierBudget:
    """What a scope may hold in one tier. None means that the policy sets no bound of that kind.

    `denied` is whether the scope's data may not be on the tier at all: nothing is stored, looked up or loaded there,
    and what is there has to go. Then `limit_bytes` is 0, which pods of the version before obey, too.
    """

    WIRE: ClassVar[Wire] = Wire(
        "a budget",
        camel=True,
        omit=("limit_bytes", "guaranteed_bytes", "retention_s", "denied"),
        names={"retention_s": "retentionSeconds"},
    )

    tier: str
    limit_bytes: int | None = None
    guaranteed_bytes: int | None = None
    retention_s: int | None = None
    denied: bool = False

    def __post_init__(self) -> None:
        """What is denied has no bound but 0, whatever else is said."""
        if self.denied:
            object.__setattr__(self, "limit_bytes", 0)
            object.__setattr__(self, "guaranteed_bytes", None)

    @classmethod
    def denying(cls, tier: str, retention_s: int | None = None) -> TierBudget:
        """Return what keeps a scope off a tier; `retention_s` is how long what is there may live in the meantime."""
        return cls(tier, retention_s=retention_s, denied=True)
