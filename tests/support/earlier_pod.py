"""A tier of an earlier version, driven by lines of JSON: runs with that version's packages and tests (`earlier.py`)."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvstrata.contract.policy.bundle import EnforcedBudget
from kvstrata_sidecar.adapter.params import AdapterParams, Endpoint, TierParams
from kvstrata_sidecar.adapter.runtime import acquire
from tests.files import file_driver
from tests.tiers import tier_driver
from tests.tiers.data_keys import FIRST, OTHER
from tests.tiers.gate_stand_in import DOMAIN, IDENTITY, KEYSPACE_A, KEYSPACE_B, GateStandIn
from tests.tiers.keyed_gate import KeyedGate
from tests.tiers.sweeping import sweep

TIMEOUTS = ("io_timeout_ms", "lookup_deadline_ms", "load_deadline_ms", "store_deadline_ms")


class Pod:
    """Methods are the commands of a test; blocks are those of numbers in keyspace A, as the tests have them."""

    def __init__(self, kind: str, place: str, scratch: Path, encryption: str) -> None:
        self._gate = GateStandIn(scratch)
        self._encryption = encryption
        self._driver: Any
        if kind == "redis":
            self._block = tier_driver.block
            patience = dict.fromkeys(TIMEOUTS, 10_000)
            endpoint = Endpoint("127.0.0.1", int(place))
            tier = TierParams("shared", (endpoint,), workers=1, encryption=encryption, **patience)  # type: ignore[arg-type]
            params = AdapterParams(DOMAIN, IDENTITY, tier, self._gate.policy_dir, self._gate.link_dir)
            self._driver = tier_driver.Driver(acquire(params), params, tier)
            self._driver.until("closed")
        else:
            self._block = file_driver.block
            self._driver = file_driver.FileDriver(self._gate, Path(place), encryption=encryption)
            self._driver.until_ready()
        self.allow()

    def allow(self, limit_bytes: int | None = None) -> None:
        """Put a policy for both keyspaces in force."""
        tier = self._driver.params.name if hasattr(self._driver, "params") else "disk"
        budgets = () if limit_bytes is None else (EnforcedBudget(tier, limit_bytes=limit_bytes),)
        if self._encryption == "Required":
            assert not budgets, "that version's tests have keys or budgets"
            KeyedGate(self._gate).allow({KEYSPACE_A: (FIRST,), KEYSPACE_B: (OTHER,)})
        else:
            self._gate.enforce({KEYSPACE_A: budgets, KEYSPACE_B: ()})

    def store(self, numbers: Sequence[int], fill: int = 1) -> int:
        """Return the bytes that were stored."""
        return int(self._driver.store([self._block(KEYSPACE_A, number) for number in numbers], fill=fill).stored_bytes)

    def lookup(self, numbers: Sequence[int]) -> list[int]:
        """Return for each block whether it is there."""
        return list(self._driver.lookup([self._block(KEYSPACE_A, number) for number in numbers]))

    def load(self, numbers: Sequence[int]) -> list[int]:
        """Return the first byte of each block, -1 for one that was not loaded."""
        hits, views = self._driver.load([self._block(KEYSPACE_A, number) for number in numbers])
        return [view[0] if hit else -1 for hit, view in zip(hits, views, strict=True)]

    def sweep(self) -> None:
        """Sweep keyspace A of a shared tier, and count it again."""
        sweep(self._driver.tier, KEYSPACE_A, audit=True)

    def usage(self) -> list[int]:
        """Return the bytes of each scope that is used."""
        return [row.used_bytes for row in self._driver.tier.usage()]

    def state(self) -> list[object]:
        """Return the breaker's state, and the files that were found and removed as nothing of this version."""
        counters = self._driver.tier.counters()
        return [self._driver.tier.state().breaker, counters.get("files_found", 0), counters.get("orphan_files", 0)]

    def erase(self) -> list[int]:
        """Erase keyspace A, which leaves the policy; returns blocks that were deleted, and that remain."""
        self._gate.allow(KEYSPACE_B)
        erased = self._gate.erased(KEYSPACE_A)
        return [erased.deleted.blocks, erased.remaining.blocks]


def main() -> None:
    logging.basicConfig()
    kind, place, scratch, encryption = sys.argv[1:]
    pod = Pod(kind, place, Path(scratch), encryption)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(getattr(pod, asked.pop("do"))(**asked)), flush=True)
    pod._driver.tier.close()


if __name__ == "__main__":
    main()
