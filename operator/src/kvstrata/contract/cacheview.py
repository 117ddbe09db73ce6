"""The part of a bundle that the cache server needs: keyspaces without tenants' names, in a memory volume.

The gate writes `policy.json` by atomic rename and `freshness` in place. Freshness is the moment on CLOCK_BOOTTIME
at which the gate *sent* the last quorum read of the bundle root that was answered: 8 bytes, little endian, unsigned
nanoseconds, 0 for never. CLOCK_BOOTTIME is one clock for all containers of a node and counts suspension.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from . import CONTRACT_VERSION, MALFORMED, ContractError, require_version
from .bundle import Bundle, Rules, TierBudget
from .canonical import canonical_json
from .keyspace import is_keyspace

POLICY_FILE = "policy.json"
FRESHNESS_FILE = "freshness"
FRESHNESS_FORMAT = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class CacheView:
    """What the policy adapter enforces. `keyspaces` maps each allowed keyspace to its budgets."""

    domain: str
    revision: int
    term: int
    rules: Rules
    keyspaces: Mapping[str, tuple[TierBudget, ...]]

    @classmethod
    def of(cls, bundle: Bundle) -> CacheView:
        """Return the view of `bundle`; tenants of one scope share a keyspace, the last one's budgets stand."""
        allowed = (
            {entry.keyspace: entry.budgets for entry in bundle.entries.values() if not entry.suspended}
            if bundle.root.rules.reuse != "Off"
            else {}
        )
        return cls(bundle.root.domain, bundle.root.revision, bundle.root.term, bundle.root.rules, allowed)

    def encode(self) -> bytes:
        """Return the stored form, canonical JSON."""
        return canonical_json(
            {
                "contract": CONTRACT_VERSION,
                "domain": self.domain,
                "revision": self.revision,
                "term": self.term,
                "rules": self.rules.to_json(),
                "keyspaces": {name: [b.to_json() for b in budgets] for name, budgets in self.keyspaces.items()},
            }
        )

    @classmethod
    def decode(cls, data: bytes) -> CacheView:
        """Read the stored form. Raises ContractError for anything malformed or of an unknown version."""
        try:
            raw: dict[str, Any] = json.loads(data)
            require_version(raw, "the cache view")
            keyspaces = {
                name: tuple(TierBudget.from_json(budget) for budget in budgets)
                for name, budgets in raw["keyspaces"].items()
            }
            if not all(is_keyspace(name) for name in keyspaces):
                raise ContractError("the cache view holds a malformed keyspace")
            return cls(
                raw["domain"],
                int(raw["revision"]),
                int(raw["term"]),
                Rules.from_json(raw["rules"]),
                keyspaces,
            )
        except ContractError:
            raise
        except MALFORMED as error:
            raise ContractError(f"the cache view is malformed: {error!r}") from error
