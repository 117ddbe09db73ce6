"""The bundle: the compiled policy of one CachedModel, which its pods watch.

A small *root* carries the revision, the leader's term and the digests of hash *shards*; the shards carry one entry
a tenant. Each shard has two slots, `a` and `b`: a writer fills the slot that the root does not name and then flips
the root by one conditional write. So a writer that dies between two writes leaves a whole bundle behind, and a
reader that holds a root can read every shard that it names.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from kvstrata.contract import CONTRACT_VERSION, ContractError, contract_errors, require_version
from kvstrata.contract.policy.budget import TierBudget as TierBudget
from kvstrata.contract.policy.data_key import BundledKey, keys_from_json, keys_to_json
from kvstrata.contract.policy.keyspace import Scope, ScopeKind, is_keyspace
from kvstrata.contract.policy.pools import MAX_ENTRY_POOLS, MAX_POOLS, PoolRef, PoolShard
from kvstrata.contract.policy.shard_slots import SLOTS, other_slot
from kvstrata.contract.wire import canonical_json, digest, digest_bytes

MAX_SHARD_BYTES = 64 * 1024
ROOT_DATA_KEY = "root.json"
SHARD_DATA_KEY = "shard.json"


@dataclass(frozen=True, slots=True)
class Entry:
    """What the data plane enforces for one tenant.

    `policy` is the UID of the TenantCachePolicy that it was compiled from, `since` the bundle revision in which it
    last changed: the policy is enforced once every live pod has acknowledged that revision. `keys` are the data keys of
    the keyspace, or their names: the first encrypts, the others only decrypt; none where nothing is encrypted. `pools`
    names the pools of this model that the tenant may read, in its policy's order; a name that the bundle has no pool
    for means nothing. `resumes` is whether it is suspended for an erasure only, and will be in use again as it was.
    """

    tenant: str
    keyspace: str
    scope: Scope
    policy: str
    since: int = 0
    suspended: bool = False
    budgets: tuple[TierBudget, ...] = ()
    keys: tuple[BundledKey, ...] = ()
    pools: tuple[str, ...] = ()
    resumes: bool = False

    def enforces_the_same_as(self, other: Entry) -> bool:
        """Whether nothing but the revision of the last change differs."""
        return (
            self.keyspace == other.keyspace
            and self.policy == other.policy
            and self.suspended == other.suspended
            and self.resumes == other.resumes
            and self.budgets == other.budgets
            and self.scope == other.scope
            and self.tenant == other.tenant
            and self.keys == other.keys
            and self.pools == other.pools
        )

    def content_digest(self) -> str:
        """Return a digest of everything but `since`: equal digests enforce the same thing.

        It is shown in status, so it knows the generations of data keys and nothing else of them.
        """
        content = replace(self, since=0, keys=()).to_json()
        generations = [key.generation for key in self.keys]
        return digest(content | {"generations": generations} if generations else content)

    def to_json(self) -> dict[str, Any]:
        """Return the wire form, which holds data keys: it belongs into Secrets only."""
        pools = {"pools": list(self.pools)} if self.pools else {}
        return (
            keys_to_json(self.keys)
            | pools
            | ({"resumes": True} if self.resumes else {})
            | {
                "tenant": self.tenant,
                "keyspace": self.keyspace,
                "scope": {"kind": str(self.scope.kind), "name": self.scope.name},
                "policy": self.policy,
                "since": self.since,
                "suspended": self.suspended,
                "budgets": [budget.to_json() for budget in self.budgets],
            }
        )

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Entry:
        """Read the wire form. Raises ContractError for a malformed keyspace."""
        if not is_keyspace(raw["keyspace"]):
            raise ContractError("a bundle entry holds a malformed keyspace")
        return cls(
            tenant=raw["tenant"],
            keyspace=raw["keyspace"],
            scope=Scope(ScopeKind(raw["scope"]["kind"]), raw["scope"]["name"]),
            policy=raw["policy"],
            since=int(raw["since"]),
            suspended=bool(raw.get("suspended", False)),
            budgets=tuple(TierBudget.from_json(budget) for budget in raw.get("budgets", ())),
            keys=keys_from_json(raw),
            # An operator of the version before knows no pools: its tenants read none.
            pools=_pool_names(raw.get("pools", [])),
            resumes=bool(raw.get("resumes", False)),
        )

    def paused(self, paused: bool) -> Entry:
        """Return the entry as it is while its scope pauses for an erasure, or as it is without that."""
        own = self.suspended and not self.resumes
        return replace(self, suspended=own or paused, resumes=paused and not own)


@dataclass(frozen=True, slots=True)
class Rules:
    """What holds for all tenants of a model; durations in whole seconds.

    `on_stale` is `Fence` or `ServeStale`, `unknown_tenants` `NoReuse` or `Refuse`, `reuse` `Prefix` or `Off`;
    `audit_tenants` is whether the audit log may have tenants' names.
    """

    stale_after_s: int = 300
    drain_timeout_s: int = 30
    on_stale: str = "Fence"
    unknown_tenants: str = "NoReuse"
    reuse: str = "Prefix"
    audit_tenants: bool = False

    def __post_init__(self) -> None:
        """Refuse modes that readers do not know: neither side may guess. Raises ContractError."""
        if (
            self.on_stale not in ("Fence", "ServeStale")
            or self.unknown_tenants not in ("NoReuse", "Refuse")
            or self.reuse not in ("Prefix", "Off")
        ):
            raise ContractError("the bundle's rules hold a mode that readers do not know")

    def to_json(self) -> dict[str, Any]:
        """Return the wire form."""
        return {
            "staleAfterSeconds": self.stale_after_s,
            "drainTimeoutSeconds": self.drain_timeout_s,
            "onStale": self.on_stale,
            "unknownTenants": self.unknown_tenants,
            "reuse": self.reuse,
            **({"auditTenants": True} if self.audit_tenants else {}),
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Rules:
        """Read the wire form. Unknown modes are refused: a reader must not guess what it does not know."""
        return cls(
            int(raw["staleAfterSeconds"]),
            int(raw["drainTimeoutSeconds"]),
            raw["onStale"],
            raw["unknownTenants"],
            raw["reuse"],
            # An operator of the version before allows no names.
            raw.get("auditTenants") is True,
        )


@dataclass(frozen=True, slots=True)
class ShardRef:
    """Where a shard is (its slot) and what it must hash to."""

    index: int
    slot: str
    digest: str

    @property
    def other_slot(self) -> str:
        """The slot that a writer may fill while readers use this one."""
        return other_slot(self.slot)


@dataclass(frozen=True, slots=True)
class Root:
    """The head of a bundle. Revisions grow by one a commit; a lower revision or term is refused by readers."""

    domain: str
    model: str
    model_uid: str
    revision: int
    term: int
    rules: Rules
    shards: tuple[ShardRef, ...]
    rules_since: int = 0
    pools: tuple[PoolRef, ...] = ()

    def encode(self) -> bytes:
        """Return the stored form, canonical JSON."""
        pools = {"pools": [reference.to_json() for reference in self.pools]} if self.pools else {}
        return canonical_json(
            pools
            | {
                "contract": CONTRACT_VERSION,
                "domain": self.domain,
                "model": self.model,
                "modelUid": self.model_uid,
                "revision": self.revision,
                "term": self.term,
                "rules": self.rules.to_json(),
                "rulesSince": self.rules_since,
                "shards": [{"index": s.index, "slot": s.slot, "digest": s.digest} for s in self.shards],
            }
        )

    @classmethod
    def decode(cls, data: bytes) -> Root:
        """Read the stored form. Raises ContractError for anything malformed or of an unknown version."""
        with contract_errors("the bundle root"):
            raw = json.loads(data)
            require_version(raw, "the bundle root")
            shards = tuple(ShardRef(int(s["index"]), s["slot"], s["digest"]) for s in raw["shards"])
            if [s.index for s in shards] != list(range(len(shards))) or any(s.slot not in SLOTS for s in shards):
                raise ContractError("the bundle root names shards out of order or in unknown slots")
            # An operator of the version before knows no pools, and a gate of that version reads none.
            pools = tuple(PoolRef.from_json(reference) for reference in raw.get("pools", ()))
            indexes = [reference.index for reference in pools]
            if indexes != sorted(set(indexes)) or not set(indexes) <= set(range(MAX_POOLS)):
                raise ContractError(f"the bundle root names pools out of order or beyond {MAX_POOLS}")
            return cls(
                domain=raw["domain"],
                model=raw["model"],
                model_uid=raw["modelUid"],
                revision=int(raw["revision"]),
                term=int(raw["term"]),
                rules=Rules.from_json(raw["rules"]),
                shards=shards,
                rules_since=int(raw.get("rulesSince", 0)),
                pools=pools,
            )

    def supersedes(self, other: Root | None) -> bool:
        """Whether a reader that holds `other` may go on to this root."""
        if other is None:
            return True
        return self.model_uid == other.model_uid and self.term >= other.term and self.revision > other.revision


def encode_shard(entries: Iterable[Entry]) -> bytes:
    """Return the stored form of a shard, canonical JSON with the entries in tenant order."""
    ordered = sorted(entries, key=lambda entry: entry.tenant)
    head = canonical_json({"contract": CONTRACT_VERSION, "entries": []}).removesuffix(b"]}")
    return head + b",".join(map(_encoded, ordered)) + b"]}"


@lru_cache(maxsize=16_384)
def _encoded(entry: Entry) -> bytes:
    """Return an entry's canonical JSON; most entries of a shard that is written are as they were."""
    return canonical_json(entry.to_json())


def decode_shard(data: bytes, expected_digest: str) -> tuple[Entry, ...]:
    """Return a shard's entries. Raises ContractError if the bytes do not hash to `expected_digest`."""
    if digest_bytes(data) != expected_digest:
        raise ContractError("a bundle shard does not match the digest in its root")
    with contract_errors("a bundle shard"):
        raw = json.loads(data)
        require_version(raw, "a bundle shard")
        return tuple(Entry.from_json(entry) for entry in raw["entries"])


@lru_cache(maxsize=65_536)
def shard_of(tenant: str, shard_count: int) -> int:
    """Return the index of the shard that holds `tenant`."""
    return int.from_bytes(hashlib.sha256(tenant.encode()).digest()[:8], "big") % shard_count


@dataclass(frozen=True, slots=True)
class Bundle:
    """A root with all entries of its shards, by tenant, and its pools, by name."""

    root: Root
    entries: Mapping[str, Entry] = field(default_factory=dict)
    pools: Mapping[str, PoolShard] = field(default_factory=dict)

    @property
    def keyspaces(self) -> frozenset[str]:
        """Every keyspace that the data plane may use under this bundle, those of pools among them."""
        tenants = (entry.keyspace for entry in self.entries.values() if not entry.suspended)
        return frozenset(tenants) | self.pool_keyspaces

    @property
    def pool_keyspaces(self) -> frozenset[str]:
        """The keyspaces of pools: nobody but a warmer writes under them."""
        return frozenset(version.keyspace for shard in self.pools.values() for version in shard.versions)

    @classmethod
    def assemble(cls, root: Root, entries: Iterable[Entry], pools: Iterable[PoolShard]) -> Bundle:
        """Put together what was read. Raises ContractError if two pools have a name or anybody else's keyspace."""
        shards = tuple(pools)
        bundle = cls(root, {entry.tenant: entry for entry in entries}, {shard.pool: shard for shard in shards})
        count = sum(len(shard.versions) for shard in shards)
        if len(bundle.pools) != len(shards) or len(bundle.pool_keyspaces) != count:
            raise ContractError("two pools of the bundle have one name or one keyspace")
        if shards and not bundle.pool_keyspaces.isdisjoint(entry.keyspace for entry in bundle.entries.values()):
            raise ContractError("a pool of the bundle has a tenant's keyspace")
        return bundle


def split_into_shards(entries: Iterable[Entry], minimum_count: int = 1) -> tuple[bytes, ...]:
    """Return encoded shards of at most 64 KiB each, their number a power of two and at least `minimum_count`.

    The number never shrinks below the caller's minimum (the current number), so that one tenant more or less does
    not move all others. Raises ContractError if a single tenant's entry exceeds a shard.
    """
    all_entries = tuple(entries)
    count = max(1, minimum_count)
    while True:
        groups: list[list[Entry]] = [[] for _ in range(count)]
        for entry in all_entries:
            groups[shard_of(entry.tenant, count)].append(entry)
        shards = tuple(encode_shard(group) for group in groups)
        oversized = [group for group, shard in zip(groups, shards, strict=True) if len(shard) > MAX_SHARD_BYTES]
        if not oversized:
            return shards
        if any(len(group) == 1 for group in oversized):
            raise ContractError("the policy of a single tenant exceeds a bundle shard")
        count *= 2


def _pool_names(raw: Any) -> tuple[str, ...]:
    names = tuple(raw) if isinstance(raw, list) else None
    if names is None or not all(isinstance(name, str) and name for name in names) or len(set(names)) != len(names):
        raise ContractError("a bundle entry names pools in an unknown form")
    if len(names) > MAX_ENTRY_POOLS:
        raise ContractError(f"a bundle entry names more than {MAX_ENTRY_POOLS} pools")
    return names
