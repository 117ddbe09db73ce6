"""What a scope may hold in a tier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class TierBudget:
    """What a scope may hold in one tier. None means that the policy sets no bound of that kind.

    `denied` is whether the scope's data may not be on the tier at all: nothing is stored, looked up or loaded there,
    and what is there has to go. Then `limit_bytes` is 0, which pods of the version before obey, too.
    """

    tier: str
    limit_bytes: int | None = None
    guaranteed_bytes: int | None = None
    retention_s: int | None = None
    denied: bool = False

    @classmethod
    def denying(cls, tier: str, retention_s: int | None = None) -> TierBudget:
        """Return what keeps a scope off a tier; `retention_s` is how long what is there may live in the meantime."""
        return cls(tier, limit_bytes=0, retention_s=retention_s, denied=True)

    def to_json(self) -> dict[str, Any]:
        """Return the wire form."""
        fields = {
            "tier": self.tier,
            "limitBytes": self.limit_bytes,
            "guaranteedBytes": self.guaranteed_bytes,
            "retentionSeconds": self.retention_s,
            "denied": self.denied or None,
        }
        return {name: value for name, value in fields.items() if value is not None}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> TierBudget:
        """Read the wire form. What is denied has no bound but 0, whatever else is said."""
        if raw.get("denied", False):
            return cls.denying(raw["tier"], raw.get("retentionSeconds"))
        return cls(raw["tier"], raw.get("limitBytes"), raw.get("guaranteedBytes"), raw.get("retentionSeconds"))
