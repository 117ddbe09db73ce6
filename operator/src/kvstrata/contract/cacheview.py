"""The part of a bundle that the cache server needs: keyspaces without tenants' names, in a memory volume.

The gate writes `policy.json` by atomic rename and `freshness` in place. Freshness is the moment on CLOCK_BOOTTIME
at which the gate *sent* the last quorum read of the bundle root that was answered: 8 bytes, little endian, unsigned
nanoseconds, 0 for never. CLOCK_BOOTTIME is one clock for all containers of a node and counts suspension.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from . import CONTRACT_VERSION, MALFORMED, ContractError, require_version
from .bundle import Bundle, Rules, TierBudget
from .canonical import canonical_json
from .datakey import MAX_GENERATION, DataKey
from .keyspace import is_keyspace

POLICY_FILE = "policy.json"
FRESHNESS_FILE = "freshness"
FRESHNESS_FORMAT = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class CacheView:
    """What the policy adapter enforces. `keyspaces` maps each allowed keyspace to its budgets.

    `generations` maps those that have data keys to the keys' generations: the first encrypts, all decrypt.
    """

    domain: str
    revision: int
    term: int
    rules: Rules
    keyspaces: Mapping[str, tuple[TierBudget, ...]]
    generations: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, bundle: Bundle) -> CacheView:
        """Return the view of `bundle`; tenants of one scope share a keyspace, the last one's budgets stand."""
        allowed = (
            {entry.keyspace: entry.budgets for entry in bundle.entries.values() if not entry.suspended}
            if bundle.root.rules.reuse != "Off"
            else {}
        )
        generations = {name: tuple(key.generation for key in keys) for name, keys in data_keys(bundle).items()}
        root = bundle.root
        return cls(root.domain, root.revision, root.term, root.rules, allowed, generations)

    def encode(self) -> bytes:
        """Return the stored form, canonical JSON."""
        generations = {"generations": {name: list(numbers) for name, numbers in self.generations.items()}}
        return canonical_json(
            (generations if self.generations else {})
            | {
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
            # A gate of the version before knows no data keys.
            generations = {name: tuple(numbers) for name, numbers in raw.get("generations", {}).items()}
            if not all(_are_generations(numbers) for numbers in generations.values()):
                raise ContractError("the cache view holds a malformed generation of a data key")
            return cls(
                raw["domain"],
                int(raw["revision"]),
                int(raw["term"]),
                Rules.from_json(raw["rules"]),
                keyspaces,
                generations,
            )
        except ContractError:
            raise
        except MALFORMED as error:
            raise ContractError(f"the cache view is malformed: {error!r}") from error


def data_keys(bundle: Bundle) -> dict[str, tuple[DataKey, ...]]:
    """Return the data keys of each keyspace that `bundle` allows and has keys for."""
    if bundle.root.rules.reuse == "Off":
        return {}
    return {entry.keyspace: entry.keys for entry in bundle.entries.values() if entry.keys and not entry.suspended}


def _are_generations(numbers: tuple[object, ...]) -> bool:
    return all(type(number) is int and 0 <= number <= MAX_GENERATION for number in numbers)
