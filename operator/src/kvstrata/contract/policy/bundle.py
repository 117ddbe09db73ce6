"""The bundle: the compiled policy of one CachedModel, which its pods watch.

A small *root* carries the revision, the leader's term and the digests of hash *shards*; shards carry one entry per
tenant. Each shard has two slots, `a` and `b`: a writer fills the slot that the root does not name and then flips the
root by one conditional write. So a writer that dies in between leaves a whole bundle, and a reader of a root can read
every shard that it names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from itertools import pairwise
from operator import attrgetter
from typing import Annotated

from kvstrata.contract import ContractError
from kvstrata.contract.policy.budget import EnforcedBudget as EnforcedBudget
from kvstrata.contract.policy.data_key import BundledKey, check_keys
from kvstrata.contract.policy.keyspace import Keyspace, Scope
from kvstrata.contract.policy.pools import MAX_ENTRY_POOLS, PoolName, PoolRef, PoolShard
from kvstrata.contract.policy.rate import UNLIMITED, RateLimit
from kvstrata.contract.policy.shard_slots import Slot, other_slot
from kvstrata.contract.policy.tiers import TierAccess, TierName, TierRules
from kvstrata.contract.wire import Form, Items, Message, decode, digest, digest_bytes, encode, to_wire, wired

MAX_SHARD_BYTES = 64 * 1024
ROOT_DATA_KEY = "root.json"
SHARD_DATA_KEY = "shard.json"


@wired("a bundle entry", camel=True, omit=("keys", "pools", "resumes", "rate"))
class Entry:
    """The policy of one tenant.

    `policy` is the UID of its TenantCachePolicy, `since` the bundle revision of its last change: the policy is enforced
    once every live pod has acknowledged that revision. Of `keys` the first encrypts, the others only decrypt; none
    where nothing is encrypted. `pools` are pools of this model that the tenant may read, in its policy's order; names
    without a pool are ignored. `resumes`: it is suspended for an erasure only, and will be in use again as before.
    `rate` precedes the rate limits of the rules.
    """

    tenant: str
    keyspace: Keyspace
    scope: Scope
    policy: str
    since: int = 0
    suspended: bool = False
    budgets: tuple[EnforcedBudget, ...] = ()
    keys: tuple[BundledKey, ...] = ()
    pools: Annotated[tuple[PoolName, ...], Items(most=MAX_ENTRY_POOLS, distinct=True)] = ()
    resumes: bool = False
    rate: RateLimit = UNLIMITED

    def __post_init__(self) -> None:
        if len(self.keys) > 1:
            check_keys(self.keys)

    def enforces_the_same_as(self, other: Entry) -> bool:
        """Whether nothing but `since` differs."""
        return _ENFORCED(self) == _ENFORCED(other)

    def content_digest(self) -> str:
        """Return a digest of everything but `since`: equal digests enforce the same. Shown in status, so of data keys
        it covers the generations only."""
        content = to_wire(replace(self, since=0, keys=()))
        generations = [key.generation for key in self.keys]
        return digest(content | {"generations": generations} if generations else content)

    def paused(self, paused: bool) -> Entry:
        """Return the entry with or without a pause of its scope for an erasure."""
        own = self.suspended and not self.resumes
        return replace(self, suspended=own or paused, resumes=paused and not own)


_ENFORCED = attrgetter(*(one.name for one in fields(Entry) if one.name != "since"))


@wired(
    "the bundle's rules",
    complete=True,
    camel=True,
    omit=("audit_tenants", "rate", "max_request_s"),
    names={
        "stale_after_s": "staleAfterSeconds",
        "drain_timeout_s": "drainTimeoutSeconds",
        "max_request_s": "maxRequestSeconds",
    },
)
class Rules:
    """Rules for all tenants of a model. `audit_tenants`: the audit log may have tenants' names. `rate` is for tenants
    without limits of their own, unknown ones too. `max_request_s`: how long requests with reuse may run on once the
    policy is stale."""

    stale_after_s: int = 300
    drain_timeout_s: int = 30
    on_stale: Annotated[str, Form("Fence|ServeStale", "mode that this version knows")] = "Fence"
    unknown_tenants: Annotated[str, Form("NoReuse|Refuse", "mode that this version knows")] = "NoReuse"
    reuse: Annotated[str, Form("Prefix|Disabled", "mode that this version knows")] = "Prefix"
    audit_tenants: bool = False
    rate: RateLimit = UNLIMITED
    max_request_s: int = 900

    @property
    def fence_s(self) -> int | None:
        """How long requests may begin with reuse without the API server; None: without bound."""
        return self.stale_after_s if self.on_stale == "Fence" else None

    @property
    def end_s(self) -> int | None:
        """How long such requests may run; None: without bound."""
        return self.longest_s if self.on_stale == "Fence" else None

    @property
    def longest_s(self) -> int:
        """From the last reading of a policy to the end of requests on it. A gate of the version before `max_request_s`
        lets them run for `drain_timeout_s`."""
        return self.stale_after_s + max(self.max_request_s, self.drain_timeout_s)


@dataclass(frozen=True, slots=True)
class ShardRef:
    index: int
    slot: Slot
    digest: str

    @property
    def other_slot(self) -> str:
        return other_slot(self.slot)


@wired("the bundle root", versioned=True, camel=True, omit=("pools", "tiers", "access", "fence_s", "end_s"))
class Root(Message):
    """The head of a bundle. Revisions grow by one a commit; readers refuse a lower revision or term. `tiers` are the
    model's Redis tiers from fast to slow, `access` their credentials by name. `fence_s`, `end_s`: the longest of
    those rules and of others that pods may still have; None: without bound."""

    domain: str
    model: str
    model_uid: str
    revision: int
    term: int
    rules: Rules
    shards: tuple[ShardRef, ...]
    rules_since: int = 0
    pools: tuple[PoolRef, ...] = ()
    tiers: tuple[TierRules, ...] = ()
    access: Mapping[TierName, TierAccess] = field(default_factory=dict)
    fence_s: int | None = None
    end_s: int | None = None

    def __post_init__(self) -> None:
        if any(shard.index != index for index, shard in enumerate(self.shards)):
            raise ContractError("the bundle root names shards out of order")
        if any(one.index >= following.index for one, following in pairwise(self.pools)):
            raise ContractError("the bundle root names pools out of order")

    def supersedes(self, other: Root | None) -> bool:
        if other is None:
            return True
        return self.model_uid == other.model_uid and self.term >= other.term and self.revision > other.revision


@wired("a bundle shard", versioned=True)
class _Shard:
    entries: tuple[Entry, ...]


def encode_shard(entries: Iterable[Entry]) -> bytes:
    ordered = sorted(entries, key=lambda entry: entry.tenant)
    head = encode(_Shard(())).removesuffix(b"]}")
    return head + b",".join(map(_encoded, ordered)) + b"]}"


@lru_cache(maxsize=16_384)
def _encoded(entry: Entry) -> bytes:
    """Cached: most entries of a shard are unchanged when it is written."""
    return encode(entry)


def decode_shard(data: bytes, expected_digest: str) -> tuple[Entry, ...]:
    """Raises ContractError if the bytes do not hash to `expected_digest`."""
    if digest_bytes(data) != expected_digest:
        raise ContractError("a bundle shard does not match the digest in its root")
    return decode(_Shard, data).entries


@lru_cache(maxsize=65_536)
def shard_of(tenant: str, shard_count: int) -> int:
    return int.from_bytes(hashlib.sha256(tenant.encode()).digest()[:8], "big") % shard_count


@dataclass(frozen=True, slots=True)
class Bundle:
    root: Root
    entries: Mapping[str, Entry] = field(default_factory=dict)
    pools: Mapping[str, PoolShard] = field(default_factory=dict)

    @property
    def keyspaces(self) -> frozenset[str]:
        """All keyspaces that the data plane may use under this bundle, including pools'."""
        tenants = (entry.keyspace for entry in self.entries.values() if not entry.suspended)
        return frozenset(tenants) | self.pool_keyspaces

    @property
    def pool_keyspaces(self) -> frozenset[str]:
        """The keyspaces of pools: only a warmer writes under them."""
        return frozenset(version.keyspace for shard in self.pools.values() for version in shard.versions)

    @classmethod
    def assemble(cls, root: Root, entries: Iterable[Entry], pools: Iterable[PoolShard]) -> Bundle:
        """Raises ContractError if two pools share a name, or a pool's keyspace is used twice."""
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

    Callers pass the current number as the minimum, so that one tenant less does not move all others. Raises
    ContractError if a single tenant's entry exceeds a shard.
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
