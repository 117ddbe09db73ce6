"""The part of a bundle that the cache server needs: keyspaces without tenants' names, in a memory volume.

The gate writes `policy.json` by atomic rename and `freshness` in place. Freshness is the moment on CLOCK_BOOTTIME
at which the gate *sent* the last quorum read of the bundle root that was answered: 8 bytes, little endian, unsigned
nanoseconds, 0 for never. CLOCK_BOOTTIME is one clock for all containers of a node and counts suspension.

The chunks of pools are not in `policy.json`, which is rewritten at each change: each manifest is a file of its own in
`MANIFESTS_DIRECTORY`, the hashes one after the other, named by their SHA-256. It is there before a policy names it and
goes after the adapter applied one that does not.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvstrata.contract import CONTRACT_VERSION, MALFORMED, ContractError, require_version
from kvstrata.contract.policy.budget import TierBudget
from kvstrata.contract.policy.bundle import Bundle, Entry, Rules
from kvstrata.contract.policy.data_key import MAX_GENERATION, BundledKey
from kvstrata.contract.policy.keyspace import is_keyspace
from kvstrata.contract.policy.pools import MAX_POOLS, MAX_VERSIONS
from kvstrata.contract.wire import canonical_json

POLICY_FILE = "policy.json"
FRESHNESS_FILE = "freshness"
FRESHNESS_FORMAT = struct.Struct("<Q")
MANIFESTS_DIRECTORY = "pools"
MAX_READS = MAX_POOLS * MAX_VERSIONS
"""Versions of pools that one keyspace may read."""

_MANIFEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class PoolView:
    """What the adapter knows of a pool's version: the digest of its manifest, whether it may be read, where it is."""

    manifest: str
    published: bool
    tiers: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the wire form."""
        return {"manifest": self.manifest, "published": self.published, "tiers": list(self.tiers)}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> PoolView:
        """Read the wire form. Raises ContractError for a malformed digest."""
        if not is_manifest(raw["manifest"]) or type(raw["published"]) is not bool:
            raise ContractError("the cache view holds a malformed pool")
        return cls(raw["manifest"], raw["published"], tuple(raw["tiers"]))


@dataclass(frozen=True, slots=True)
class CacheView:
    """What the policy adapter enforces. `keyspaces` maps each allowed keyspace to its budgets.

    `generations` maps those that have data keys to the keys' generations: the first encrypts, all decrypt.
    `pools` says which of the keyspaces are pools', `reads` which published ones of these a tenant's keyspace may read,
    in the order in which they are asked.
    """

    domain: str
    revision: int
    term: int
    rules: Rules
    keyspaces: Mapping[str, tuple[TierBudget, ...]]
    generations: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    pools: Mapping[str, PoolView] = field(default_factory=dict)
    reads: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, bundle: Bundle) -> CacheView:
        """Return the view of `bundle`.

        Tenants of one scope share a keyspace: the last one's budgets stand, and what is denied to one of them is
        denied to all.
        """
        root, allowed, pools = bundle.root, dict[str, tuple[TierBudget, ...]](), dict[str, PoolView]()
        if root.rules.reuse != "Off":
            for entry in bundle.entries.values():
                if not entry.suspended:
                    allowed[entry.keyspace] = _with_denials_of(allowed.get(entry.keyspace, ()), entry.budgets)
            for shard in bundle.pools.values():
                for version in shard.versions:
                    allowed[version.keyspace] = version.budgets
                    pools[version.keyspace] = PoolView(version.manifest, version.published, version.tiers)
        generations = {name: tuple(key.generation for key in keys) for name, keys in data_keys(bundle).items()}
        return cls(root.domain, root.revision, root.term, root.rules, allowed, generations, pools, reads_of(bundle))

    def encode(self) -> bytes:
        """Return the stored form, canonical JSON."""
        generations = {"generations": {name: list(numbers) for name, numbers in self.generations.items()}}
        pools = {
            "pools": {name: pool.to_json() for name, pool in self.pools.items()},
            "reads": {name: list(keyspaces) for name, keyspaces in self.reads.items()},
        }
        return canonical_json(
            (generations if self.generations else {})
            | (pools if self.pools else {})
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
            # Nor does it know pools.
            pools = {name: PoolView.from_json(pool) for name, pool in raw.get("pools", {}).items()}
            reads = {name: tuple(read) for name, read in raw.get("reads", {}).items()}
            if not pools.keys() <= keyspaces.keys() or not _may_be_read(pools, reads, keyspaces):
                raise ContractError("the cache view holds pools that fit nothing else in it")
            return cls(
                raw["domain"],
                int(raw["revision"]),
                int(raw["term"]),
                Rules.from_json(raw["rules"]),
                keyspaces,
                generations,
                pools,
                reads,
            )
        except ContractError:
            raise
        except MALFORMED as error:
            raise ContractError(f"the cache view is malformed: {error!r}") from error


def data_keys(bundle: Bundle) -> dict[str, tuple[BundledKey, ...]]:
    """Return the data keys of each keyspace that `bundle` allows and has or names keys for, pools' among them."""
    if bundle.root.rules.reuse == "Off":
        return {}
    keys = {entry.keyspace: entry.keys for entry in bundle.entries.values() if entry.keys and not entry.suspended}
    versions = (version for shard in bundle.pools.values() for version in shard.versions)
    return keys | {version.keyspace: version.keys for version in versions if version.keys}


def manifests(bundle: Bundle) -> dict[str, bytes]:
    """Return the manifests that the view of `bundle` names, by digest."""
    if bundle.root.rules.reuse == "Off":
        return {}
    versions = (version for shard in bundle.pools.values() for version in shard.versions)
    return {version.manifest: version.hashes for version in versions}


def is_manifest(name: object) -> bool:
    """Whether `name` has the form of a manifest's digest, which is its file's name."""
    return isinstance(name, str) and _MANIFEST.fullmatch(name) is not None


def effective_pools(entries: Iterable[Entry]) -> dict[str, tuple[str, ...]]:
    """Return the names of the pools that each keyspace may read, without the keyspaces that read none.

    The adapter sees keyspaces and no tenants. So of tenants that share a keyspace each must be allowed to read a pool,
    or none does: else those who may not would be served by a neighbour's right. Suspended tenants are not asked. The
    order is that of the tenant whose name comes first.
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
    """Return the keyspaces of published versions that each tenant's keyspace may read, in the order of asking."""
    if bundle.root.rules.reuse == "Off" or not bundle.pools:
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


def _with_denials_of(others: tuple[TierBudget, ...], budgets: tuple[TierBudget, ...]) -> tuple[TierBudget, ...]:
    """Return `budgets`, and denied what is denied in `others`."""
    if others == budgets:
        return budgets
    denied = {budget.tier: budget for budget in others if budget.denied}
    kept = tuple(budget for budget in budgets if budget.tier not in denied)
    return (*kept, *denied.values()) if denied else budgets


def _may_be_read(
    pools: Mapping[str, PoolView], reads: Mapping[str, tuple[str, ...]], keyspaces: Mapping[str, object]
) -> bool:
    """Whether tenants' keyspaces, and no pool's, read published pools, each once."""
    return all(
        reader in keyspaces
        and reader not in pools
        and len(named) == len(set(named)) <= MAX_READS
        and all(name in pools and pools[name].published for name in named)
        for reader, named in reads.items()
    )


def _are_generations(numbers: tuple[object, ...]) -> bool:
    return all(type(number) is int and 0 <= number <= MAX_GENERATION for number in numbers)
