"""The part of a bundle that the cache server needs: keyspaces without tenants' names, in a memory volume.

The gate writes `policy.json` by atomic rename and `freshness` in place. Freshness is the moment at which the gate
*sent* its last successful quorum read of the bundle root: 8 bytes, little endian, unsigned nanoseconds of
CLOCK_BOOTTIME, 0 for never. CLOCK_BOOTTIME is one clock for all containers of a node and counts suspension.

`policy.json` is rewritten at each change, so the chunks of pools are in files of their own: each manifest is in
`MANIFESTS_DIRECTORY`, the hashes one after the other, named by their SHA-256. It exists before a policy names it and is
removed after the adapter applied one that does not.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated

from kvstrata.contract import ContractError
from kvstrata.contract.policy.budget import EnforcedBudget
from kvstrata.contract.policy.bundle import Bundle, Entry, Rules
from kvstrata.contract.policy.data_key import BundledKey, Generation
from kvstrata.contract.policy.keyspace import Keyspace
from kvstrata.contract.policy.pools import MAX_POOLS, MAX_VERSIONS
from kvstrata.contract.policy.tiers import TierRules
from kvstrata.contract.wire import HexDigest, Items, Message, wired

POLICY_FILE = "policy.json"
FRESHNESS_FILE = "freshness"
FRESHNESS_FORMAT = struct.Struct("<Q")
MANIFESTS_DIRECTORY = "pools"
MAX_READS = MAX_POOLS * MAX_VERSIONS
"""Versions of pools that one keyspace may read."""


@dataclass(frozen=True, slots=True)
class PoolView:
    """A pool's version as the adapter sees it: the digest of its manifest, whether it may be read, where it is."""

    manifest: HexDigest
    published: bool
    tiers: tuple[str, ...] = ()


@wired("the cache view", versioned=True, omit=("generations", "pools", "reads", "tiers"))
class CacheView(Message):
    """The policy that the adapter enforces. `keyspaces` maps each allowed keyspace to its budgets.

    `generations` are those of the data keys: the first encrypts, all decrypt. `pools` are the keyspaces that belong to
    pools; `reads` lists the published ones that a tenant's keyspace may read, in the order of lookup. `tiers` are the
    model's Redis tiers from fast to slow.
    """

    domain: str
    revision: int
    term: int
    rules: Rules
    keyspaces: Mapping[Keyspace, tuple[EnforcedBudget, ...]]
    generations: Mapping[Keyspace, tuple[Generation, ...]] = field(default_factory=dict)
    pools: Mapping[Keyspace, PoolView] = field(default_factory=dict)
    reads: Mapping[Keyspace, Annotated[tuple[Keyspace, ...], Items(most=MAX_READS, distinct=True)]] = field(
        default_factory=dict
    )
    tiers: tuple[TierRules, ...] = ()

    def __post_init__(self) -> None:
        if not self.pools.keys() <= self.keyspaces.keys() or not all(
            reader in self.keyspaces
            and reader not in self.pools
            and all(name in self.pools and self.pools[name].published for name in named)
            for reader, named in self.reads.items()
        ):
            raise ContractError("the cache view holds pools that fit nothing else in it")

    @classmethod
    def of(cls, bundle: Bundle) -> CacheView:
        """Tenants of one scope share a keyspace: the last tenant's budgets apply, and denials of any tenant apply to
        all."""
        root, allowed, pools = bundle.root, dict[str, tuple[EnforcedBudget, ...]](), dict[str, PoolView]()
        if root.rules.reuse != "Disabled":
            for entry in bundle.entries.values():
                if not entry.suspended:
                    allowed[entry.keyspace] = _with_denials_of(allowed.get(entry.keyspace, ()), entry.budgets)
            for shard in bundle.pools.values():
                for version in shard.versions:
                    allowed[version.keyspace] = version.budgets
                    pools[version.keyspace] = PoolView(version.manifest, version.published, version.tiers)
        generations = {name: tuple(key.generation for key in keys) for name, keys in data_keys(bundle).items()}
        return cls(
            root.domain, root.revision, root.term, root.rules, allowed, generations, pools, reads_of(bundle), root.tiers
        )

    def tier(self, name: str) -> TierRules | None:
        return next((one for one in self.tiers if one.name == name), None)


def data_keys(bundle: Bundle) -> dict[str, tuple[BundledKey, ...]]:
    if bundle.root.rules.reuse == "Disabled":
        return {}
    keys = {entry.keyspace: entry.keys for entry in bundle.entries.values() if entry.keys and not entry.suspended}
    versions = (version for shard in bundle.pools.values() for version in shard.versions)
    return keys | {version.keyspace: version.keys for version in versions if version.keys}


def manifests(bundle: Bundle) -> dict[str, bytes]:
    if bundle.root.rules.reuse == "Disabled":
        return {}
    versions = (version for shard in bundle.pools.values() for version in shard.versions)
    return {version.manifest: version.hashes for version in versions}


def effective_pools(entries: Iterable[Entry]) -> dict[str, tuple[str, ...]]:
    """Return the names of the pools that each keyspace may read, without the keyspaces that read none.

    The adapter sees keyspaces, not tenants. Tenants that share a keyspace read a pool only if each of them may;
    otherwise a tenant would use its neighbour's right. Suspended tenants are ignored. The order is that of the tenant
    whose name comes first.
    """
    members: dict[str, list[Entry]] = {}
    for entry in entries:
        if not entry.suspended:
            members.setdefault(entry.keyspace, []).append(entry)
    effective: dict[str, tuple[str, ...]] = {}
    for keyspace, sharing in members.items():
        first = min(sharing, key=lambda entry: entry.tenant)
        common = frozenset(first.pools).intersection(*(entry.pools for entry in sharing))
        if common:
            effective[keyspace] = tuple(name for name in first.pools if name in common)
    return effective


def reads_of(bundle: Bundle) -> dict[str, tuple[str, ...]]:
    """Return the keyspaces of published versions that each tenant's keyspace may read, in the order of lookup."""
    if bundle.root.rules.reuse == "Disabled" or not bundle.pools:
        return {}
    published = {
        name: tuple(version.keyspace for version in shard.versions if version.published)
        for name, shard in bundle.pools.items()
    }
    reads = {
        keyspace: tuple(one for name in names for one in published.get(name, ()))
        for keyspace, names in effective_pools(bundle.entries.values()).items()
    }
    return {keyspace: named for keyspace, named in reads.items() if named}


def _with_denials_of(
    others: tuple[EnforcedBudget, ...], budgets: tuple[EnforcedBudget, ...]
) -> tuple[EnforcedBudget, ...]:
    if others == budgets:
        return budgets
    denied = {budget.tier: budget for budget in others if budget.denied}
    kept = tuple(budget for budget in budgets if budget.tier not in denied)
    return (*kept, *denied.values()) if denied else budgets
