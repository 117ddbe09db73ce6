"""Record of an erasure: its order and a set of facts that only grows.

Of two facts with the same `key` always the same one stands, so order, repetition and crashes make no difference.
Progress follows from the facts (`model.erasure.evidence`) and is not stored. A `Verdict` closes them, so the receipt is
the same after any restart. `Observed` is the present state, which proves nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import ClassVar, TypeVar

from kvstrata.contract.policy.keyspace import ScopeKind
from kvstrata.contract.receipt.facts import Component, Subject
from kvstrata.contract.wire import Wire
from kvstrata.model.erasure.facts import Fact, HeldKey, ReceiptWritten, Verdict


@dataclass(frozen=True, slots=True)
class SharedTier:
    name: str
    encrypted: bool
    places: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ErasedPrefix:
    """Chunks of one prefix. Their keyspaces stay in use after the erasure and pause during it (`plan.bundle.compile`).

    `chunks` are hexadecimal chunk hashes as pods named them. `commitment` represents the prefix in the receipt under
    the domain key at the start of the erasure.
    """

    model: str
    chunks: tuple[str, ...] = field(repr=False)
    commitment: str


@dataclass(frozen=True, slots=True)
class ErasureOrder:
    """The order, which never changes. `keyspaces` are revoked; they never leave the cluster and are in no receipt.
    `excluded_scopes` are names of groups, or `Public`. `prefix` is set for a prefix only. `versions` are those
    of the operator that began and of the models. `places` of tiers identify their stores as in a scope's status,
    `folders` are tiers in folders of nodes."""

    WIRE: ClassVar[Wire] = Wire("an order", camel=True, omit=("folders",))
    subject: Subject
    started: datetime
    keyspaces: tuple[str, ...]
    tiers: tuple[SharedTier, ...]
    excluded_tiers: tuple[str, ...] = ()
    excluded_scopes: tuple[str, ...] = ()
    deadline_s: int | None = None
    allow_residue: bool = False
    prefix: ErasedPrefix | None = None
    versions: tuple[Component, ...] = ()
    folders: tuple[str, ...] = ()

    @property
    def uid(self) -> str:
        """The uid of the object that ordered it: an order is carried out once."""
        return self.subject.uid

    @property
    def chunks(self) -> tuple[str, ...]:
        """The chunks to erase; empty for whole keyspaces."""
        return self.prefix.chunks if self.prefix is not None else ()


F = TypeVar("F")


@dataclass(frozen=True, slots=True)
class Erasure:
    order: ErasureOrder
    facts: Mapping[tuple[str, ...], Fact] = field(default_factory=dict)

    def with_facts(self, *added: Fact) -> Erasure:
        """Return the erasure with these facts added. After its verdict it takes only the receipt."""
        facts = dict(self.facts)
        for fact in added:
            if (Verdict.__name__,) in facts and not isinstance(fact, ReceiptWritten):
                continue
            standing = facts.get(fact.key)
            if standing is None or fact.stands_over(standing):
                facts[fact.key] = fact
        return replace(self, facts=facts)

    def of(self, kind: type[F], *about: str) -> tuple[F, ...]:
        """Return the facts of one kind, sorted by key. `about` are the first of the fields that identify them."""
        begins = (kind.__name__, *about)
        found = [(key, fact) for key, fact in self.facts.items() if key[: len(begins)] == begins]
        return tuple(fact for _, fact in sorted(found, key=lambda item: item[0]) if type(fact) is kind)

    def only(self, kind: type[F], *about: str) -> F | None:
        """Return the fact of a kind, or about one subject, that occurs at most once."""
        return next(iter(self.of(kind, *about)), None)


@dataclass(frozen=True, slots=True)
class TierNow:
    """A shared tier now. `message` is the problem if not all of its primaries answer."""

    primaries: tuple[str, ...]
    slots: str
    reachable: bool = True
    message: str = ""


@dataclass(frozen=True, slots=True)
class Observed:
    """The present state that decides which orders are possible.

    `pods` maps each pod that can be asked to the boot ids of its gate and cache server. `deletions_elsewhere` counts
    running Jobs of other erasures. `abandoned` is the reason given by a person, `overdue` that of a
    passed deadline for the object that waits. `unattended` is when the deletion of
    the namespace began; None if it stays.
    """

    tiers: Mapping[str, TierNow] = field(default_factory=dict)
    pods: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    deletions_elsewhere: int = 0
    custody_problem: str = ""
    receipt_problem: str = ""
    abandoned: str = ""
    overdue: str = ""
    unattended: datetime | None = None


@dataclass(frozen=True, slots=True)
class LeftEpoch:
    """An epoch that a scope leaves, and its successor; empty if the scope ends. Both are secret."""

    kind: ScopeKind
    name: str
    old: str = field(repr=False)
    new: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class ErasureRecord:
    """Everything stored about an erasure, enough to resume it.

    `invalidation` names the ordering object: a deleted policy if that is the order's subject. `domain` is the domain's
    id. `epochs` and `keys` are written before any epoch is rolled, because they cannot be found afterwards. `named`
    maps a keyspace to hexadecimal chunk names that tiers held before they were emptied, for probes; `named_tiers` were
    read for it.
    """

    namespace: str
    invalidation: str
    domain: str
    epochs: tuple[LeftEpoch, ...]
    keys: tuple[HeldKey, ...]
    erasure: Erasure
    named: Mapping[str, tuple[str, ...]] = field(default_factory=dict, repr=False)
    named_tiers: tuple[str, ...] = ()

    def with_facts(self, *added: Fact) -> ErasureRecord:
        """Return the record with these facts added; itself if none of them is new."""
        after = self.erasure.with_facts(*added)
        return self if after.facts == self.erasure.facts else replace(self, erasure=after)

    def with_names(self, named: Mapping[str, Iterable[str]], *tiers: str) -> ErasureRecord:
        """Return the record with chunk names that these tiers held, for its own keyspaces."""
        merged = dict(self.named)
        for keyspace in named.keys() & set(self.erasure.order.keyspaces):
            merged[keyspace] = tuple(sorted({*merged.get(keyspace, ()), *named[keyspace]}))
        return replace(self, named=merged, named_tiers=tuple(sorted({*self.named_tiers, *tiers})))

    def merged_with(self, other: ErasureRecord) -> ErasureRecord:
        """Return the record with everything that another operator, or an earlier write, has about the same order."""
        merged = self.with_facts(*other.erasure.facts.values())
        named = {**other.named, **self.named}
        return replace(merged, named=named, named_tiers=tuple(sorted({*self.named_tiers, *other.named_tiers})))


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """A record, and the version of the object that stores it."""

    record: ErasureRecord
    version: str


@dataclass(frozen=True, slots=True)
class ErasureNow:
    """An erasure in the leading process. `troubles` are results of orders that did not succeed and are repeated,
    `pinned_tiers` those with slots that must not move."""

    record: ErasureRecord
    seen: Observed
    troubles: tuple[str, ...] = ()
    pinned_tiers: frozenset[str] = frozenset()
