"""A gate that brings data keys with its policies, for tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kvstrata.contract.messages.adapter import AdapterAck, ApplyRequest
from kvstrata.contract.policy.bundle import EnforcedBudget
from kvstrata.contract.policy.data_key import DataKey
from kvstrata_sidecar.gate.policy.volume import KeyFiles
from tests.tiers.gate_stand_in import GateStandIn


class KeyedGate:
    """Writes keys as a gate does, and then asks `gate`'s adapter to apply."""

    def __init__(self, gate: GateStandIn) -> None:
        self._gate = gate
        self._files = KeyFiles(gate.policy_dir)

    def allow(
        self, keys: Mapping[str, tuple[DataKey, ...]], budgets: Mapping[str, tuple[EnforcedBudget, ...]] | None = None
    ) -> None:
        """Put a policy with these keyspaces, their keys, and budgets of some of them in force."""
        gate = self._gate
        gate.revision += 1
        gate.write_freshness()
        self._files.write(keys)
        generations = {name: tuple(key.generation for key in own) for name, own in keys.items() if own}
        keyspaces = dict.fromkeys(keys, ()) | dict(budgets or {})
        view = gate.view(keys, revision=gate.revision)
        gate.write_policy(replace(view, keyspaces=keyspaces, generations=generations))
        gate.put(ApplyRequest(gate.revision, 1), AdapterAck)
