"""An erasure as an order and what was heard of it since: a set of facts that only grows, whoever gathers them.

A fact is what somebody said, with who and when. Of two facts about the same (`key`) one stands, always the same one,
so it makes no difference in which order they arrive, how often, or between which of them the operator died. How far an
erasure is follows from its facts (`model.erasure.evidence`) and is written nowhere. When it is judged (`Verdict`) its
facts are closed: the receipt that is issued then is the same from wherever one starts again.

`Surroundings` are what is so at this moment and proves nothing: whom one could ask, and which servers a tier has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TypeVar

from kvstrata.contract.policy.keyspace import ScopeKind
from kvstrata.contract.receipt.facts import Component, Subject
from kvstrata.model.erasure.facts import Fact, HeldKey, ReceiptWritten, Verdict


@dataclass(frozen=True, slots=True)
class SharedTier:
    """A shared tier that the order concerns."""

    name: str
    encrypted: bool


@dataclass(frozen=True, slots=True)
class ErasedPrefix:
    """Chunks of one prefix. Their keyspaces live on: nobody may use them until the erasure is over
    (`plan.bundle.paused`).

    `chunks` are the chunk hashes as the pods of the model named them, in hexadecimal digits. `commitment` stands for
    the prefix in the receipt, by the domain's key of when the erasure began; records of earlier versions lack it.
    """

    model: str
    chunks: tuple[str, ...] = field(repr=False)
    commitment: str = ""


@dataclass(frozen=True, slots=True)
class ErasureOrder:
    """What was ordered. Nothing of it changes.

    `keyspaces` are those that are revoked; they stay inside the cluster and are in no receipt. `tiers` are the shared
    tiers concerned, `excluded_tiers` and `excluded_scopes` (names of groups, or `Public`) what is left as ordered.
    `prefix` is set for a prefix only.
    """

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

    @property
    def uid(self) -> str:
        """The uid of the object that ordered it: an order is carried out once."""
        return self.subject.uid


F = TypeVar("F")


@dataclass(frozen=True, slots=True)
class Erasure:
    """An order and its facts, by kind and key."""

    order: ErasureOrder
    facts: Mapping[tuple[str, ...], Fact] = field(default_factory=dict)

    def hearing(self, *heard: Fact) -> Erasure:
        """Return the erasure with these facts, too. After its verdict only its receipt is news."""
        facts = dict(self.facts)
        for fact in heard:
            if (Verdict.__name__,) in facts and not isinstance(fact, ReceiptWritten):
                continue
            standing = facts.get(fact.key)
            if standing is None or fact.stands_over(standing):
                facts[fact.key] = fact
        return replace(self, facts=facts)

    def of(self, kind: type[F]) -> tuple[F, ...]:
        """Return the facts of one kind, in the order of their keys."""
        found = [(key, fact) for key, fact in self.facts.items() if type(fact) is kind]
        return tuple(fact for _, fact in sorted(found, key=lambda item: item[0]))

    def only(self, kind: type[F]) -> F | None:
        """Return the fact of a kind of which there is one."""
        return next(iter(self.of(kind)), None)


@dataclass(frozen=True, slots=True)
class TierNow:
    """A shared tier at this moment. `message` says what is the matter if not all of its primaries answer."""

    primaries: tuple[str, ...]
    slots: str
    reachable: bool = True
    message: str = ""


@dataclass(frozen=True, slots=True)
class PodNow:
    """A pod that can be asked at this moment."""

    uid: str
    gate_boot: str
    cache_boot: str


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What is so at this moment, as far as it matters to what can be ordered.

    `heirs` names by (uid, tier) the pod that has taken over files of one that is gone. `deletions_elsewhere` are Jobs
    of other erasures that run. `custody_problem` says why keys cannot be removed, `receipt_problem` why no receipt can
    be written, `abandoned` is the reason of a person who gives the erasure up; each may be empty. `unattended` is
    since when the namespace goes, and with it whoever could decide what is to become of what is left; None if it stays.
    """

    operator: str
    tiers: Mapping[str, TierNow] = field(default_factory=dict)
    pods: Mapping[str, PodNow] = field(default_factory=dict)
    heirs: Mapping[tuple[str, str], str] = field(default_factory=dict)
    deletions_elsewhere: int = 0
    custody_problem: str = ""
    receipt_problem: str = ""
    abandoned: str = ""
    unattended: datetime | None = None


@dataclass(frozen=True, slots=True)
class LeftEpoch:
    """An epoch that a scope leaves, and the one that it gets, empty if it ends with it. Neither is told to anybody."""

    kind: ScopeKind
    name: str
    old: str = field(repr=False)
    new: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class ErasureRecord:
    """All that is kept of an erasure. Who has it can go on from there.

    `namespace` and `invalidation` name the object that ordered it, which is a policy that was deleted where the order's
    subject says so; `domain` is the domain's id. `epochs` and `keys` were written down before any epoch was rolled,
    because afterwards nobody knows them. `named` gives by keyspace the names of chunks, as hexadecimal digits, which
    tiers had before they were emptied: they are asked for afterwards. `named_tiers` are the tiers that were looked at
    for that.
    """

    namespace: str
    invalidation: str
    domain: str
    epochs: tuple[LeftEpoch, ...]
    keys: tuple[HeldKey, ...]
    erasure: Erasure
    named: Mapping[str, tuple[str, ...]] = field(default_factory=dict, repr=False)
    named_tiers: tuple[str, ...] = ()

    def hearing(self, *heard: Fact) -> ErasureRecord:
        """Return the record with these facts, too; itself if none of them is news."""
        after = self.erasure.hearing(*heard)
        return self if after.facts == self.erasure.facts else replace(self, erasure=after)


@dataclass(frozen=True, slots=True)
class ErasureNow:
    """An erasure as the leading process has it: what is kept, and what is so at this moment.

    `troubles` says what orders have come to that are not carried out yet and are given again, `still` names the tiers
    whose slots are not to move meanwhile.
    """

    record: ErasureRecord
    seen: Surroundings
    troubles: tuple[str, ...] = ()
    still: frozenset[str] = frozenset()
