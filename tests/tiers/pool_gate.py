"""A gate that brings pools with its policies, written by the gate's own code."""

from __future__ import annotations

from collections.abc import Iterable

from kvstrata.contract.messages.adapter import AdapterAck, ApplyRequest
from kvstrata.contract.policy.bundle import Bundle, Entry, Root, Rules
from kvstrata.contract.policy.cache_view import MANIFESTS_DIRECTORY, CacheView, data_keys, manifests
from kvstrata.contract.policy.data_key import DataKey
from kvstrata.contract.policy.keyspace import Scope, ScopeKind
from kvstrata.contract.policy.pools import PoolShard, PoolState, PoolVersion, pack_hashes
from kvstrata_sidecar.gate.policy.volume import KeyFiles, NamedFiles
from tests.tiers.gate_stand_in import DOMAIN, STALE_AFTER_S, GateStandIn

POOL, OLD_POOL = "f" * 32, "e" * 32
"""Keyspaces of pools."""


def chunk(number: int) -> bytes:
    """The hash that `tier_driver.block` gives its blocks."""
    return bytes([number]) * 32


def reader_space(number: int) -> str:
    """A tenant's keyspace."""
    return f"{number:02x}" * 16


def reader(number: int, *pools: str, keys: tuple[DataKey, ...] = (), suspended: bool = False) -> Entry:
    """A tenant that may read these pools."""
    name = f"tenant-{number}"
    return Entry(
        name, reader_space(number), Scope(ScopeKind.TENANT, name), f"uid-{number}",
        keys=keys, pools=pools, suspended=suspended,
    )  # fmt: skip


def content(
    keyspace: str, numbers: Iterable[int], *, warming: bool = False, keys: tuple[DataKey, ...] = ()
) -> PoolVersion:
    """A version of a pool that is kept in the tier of the tests."""
    state = PoolState.WARMING if warming else PoolState.PUBLISHED
    return PoolVersion(keyspace, "render", state, pack_hashes(map(chunk, numbers)), ("shared",), keys=keys)


class PoolGate:
    """Asks `gate`'s adapter to apply what it writes."""

    def __init__(self, gate: GateStandIn) -> None:
        self._gate = gate
        self._keys = KeyFiles(gate.policy_dir)
        self._manifests = NamedFiles(gate.policy_dir / MANIFESTS_DIRECTORY)

    def publish(self, entries: Iterable[Entry], **pools: tuple[PoolVersion, ...]) -> AdapterAck:
        """Put a policy of these tenants and pools, by name, in force, and return the acknowledgement."""
        gate = self._gate
        gate.revision += 1
        root = Root(DOMAIN, "tiny", "uid", gate.revision, 1, Rules(stale_after_s=STALE_AFTER_S), ())
        bundle = Bundle.assemble(
            root, entries, [PoolShard(name, f"uid-{name}", versions) for name, versions in pools.items()]
        )
        gate.write_freshness()
        self._manifests.add(manifests(bundle))
        self._keys.write(data_keys(bundle))
        gate.write_policy(CacheView.of(bundle))
        ack = gate.put(ApplyRequest(gate.revision, 1), AdapterAck)
        assert isinstance(ack, AdapterAck)
        self._manifests.retain()
        return ack
