"""Facts of an erasure. Each names its source and time; of two about the same subject always the same one stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, ClassVar

from kvstrata.api.reasons import InvalidationReason
from kvstrata.contract.receipt.facts import NOTHING, Amount, Copies, Fence, Revoked, Statement, Target
from kvstrata.contract.receipt.vocabulary import KeyCustody, PodMedium, Standing
from kvstrata.contract.wire import Wire


@dataclass(frozen=True, slots=True)
class HeldTier:
    """`outlives_pod`: whether the data stays when the pod is gone; `place` is its node and folder then."""

    name: str
    medium: PodMedium
    encrypted: bool
    outlives_pod: bool
    place: str = ""


class _Fact:
    """`ABOUT` names the fields that identify a fact among those of its kind."""

    __slots__ = ()
    WIRE: ClassVar[Wire] = Wire("a fact of an erasure", camel=True)
    ABOUT: ClassVar[tuple[str, ...]] = ()

    @property
    def key(self) -> tuple[str, ...]:
        return (type(self).__name__, *(str(getattr(self, name)) for name in self.ABOUT))

    @property
    def boots(self) -> tuple[str, str]:
        """Boot ids of the processes that reported a fact about a pod."""
        return getattr(self, "gate_boot"), getattr(self, "cache_boot")  # noqa: B009

    def _rank(self) -> float:
        return -_seconds(getattr(self, "at"))  # noqa: B009  (declared by each kind that does not rank otherwise)

    def stands_over(self, other: _Fact) -> bool:
        """Whether this fact replaces `other`: by default the earlier one stands. The result does not depend on arrival
        order."""
        return (self._rank(), repr(self)) > (other._rank(), repr(other))


_LATER_S = 1e11
"""Larger than any timestamp in seconds."""


def _seconds(at: Any) -> float:
    return (at if isinstance(at, datetime) else datetime.fromisoformat(at)).timestamp()


@dataclass(frozen=True, slots=True)
class Witness:
    model: str
    uid: str
    name: str
    tiers: tuple[HeldTier, ...]


@dataclass(frozen=True, slots=True)
class HeldKey:
    """A data key of revoked blocks. `revoked` is the commitment of their keyspace."""

    fingerprint: str
    revoked: str
    custody: KeyCustody


@dataclass(frozen=True, slots=True)
class Rolled(_Fact):
    """Every scope has its new epoch and every bundle carries it. `witnesses`: every pod that existed then or had
    vanished unfenced. Pods that start later never read an old epoch."""

    at: datetime
    revoked: tuple[Revoked, ...]
    targets: tuple[Target, ...]
    witnesses: tuple[Witness, ...]
    keys: tuple[HeldKey, ...]


@dataclass(frozen=True, slots=True)
class PodSeen(_Fact):
    """State of a witness, as in a receipt (`PodFact`); the first report of the same processes stands. `joins`: it began
    after the roll and uses a folder with files of one that ended."""

    WIRE = Wire("a fact of an erasure", camel=True, omit=("joins",))
    ABOUT = ("uid", "standing", "gate_boot", "cache_boot", "revision")
    uid: str
    standing: Standing
    at: datetime
    gate_boot: str = ""
    cache_boot: str = ""
    revision: int = 0
    fence: Fence | None = None
    joins: Witness | None = None


@dataclass(frozen=True, slots=True)
class PodErased(_Fact):
    """A pod's answer to the erase order. `copies` is by tier, `round` counts the orders. `folders` are tiers of which
    no pod's place in the node's folder has a file."""

    WIRE = Wire("a fact of an erasure", camel=True, omit=("folders",))
    ABOUT = ("uid", "round", "gate_boot", "cache_boot")
    uid: str
    round: int
    gate_boot: str
    cache_boot: str
    at: datetime
    copies: Mapping[str, Copies]
    folders: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineReset(_Fact):
    ABOUT = ("uid",)
    uid: str
    at: datetime


@dataclass(frozen=True, slots=True)
class EngineKept(EngineReset):
    """A pod's engine has no way to empty its prefix cache."""


@dataclass(frozen=True, slots=True)
class PodProbed(_Fact):
    ABOUT = ("uid", "round")
    uid: str
    round: int
    gate_boot: str
    cache_boot: str
    at: datetime
    known: int
    asked: int
    missed: int

    def _rank(self) -> float:
        return _seconds(self.at)  # a question that came too early is repeated


@dataclass(frozen=True, slots=True)
class KeyRemoved(_Fact):
    """A data key left its custody and every bundle."""

    ABOUT = ("fingerprint",)
    fingerprint: str
    by: Statement

    def _rank(self) -> float:
        return -_seconds(self.by.at)


@dataclass(frozen=True, slots=True)
class KeyDestroyed(KeyRemoved):
    """The KMS confirms that no copy of a data key exists."""


@dataclass(frozen=True, slots=True)
class KeyNotDestroyed(_Fact):
    """The KMS cannot confirm that no copy of a data key exists; `why` is for people."""

    ABOUT = ("fingerprint", "why")
    fingerprint: str
    why: str
    at: datetime


class JobState(StrEnum):
    """Later states replace earlier ones."""

    RUNNING = "Running"
    FAILED = "Failed"
    DONE = "Done"


@dataclass(frozen=True, slots=True)
class Deletion(_Fact):
    """The deletion from one primary by one Job, and its report. `round` counts the Jobs for this primary, `primaries`
    those of the tier. `image` is the digest of the Job's image, empty if unknown."""

    WIRE = Wire("a fact of an erasure", camel=True, omit=("image",))
    ABOUT = ("tier", "node", "round")
    tier: str
    node: str
    round: int
    job: str
    state: JobState
    began: datetime
    primaries: int
    ended: datetime | None = None
    found: Amount = NOTHING
    deleted: Amount = NOTHING
    remaining: Amount = NOTHING
    replicas: int = 0
    replicas_in_step: int = 0
    problem: str = ""
    image: str = ""

    def _rank(self) -> float:
        # A Job's result may be observed twice before it is recorded: the first observation stands.
        return list(JobState).index(self.state) * _LATER_S - (_seconds(self.ended) if self.ended is not None else 0.0)


@dataclass(frozen=True, slots=True)
class Look(_Fact):
    """One verification of a tier: digests of the slot map before and after, the number of primaries, and the remainder
    on each that answered. `others` are the keyspaces' blocks of chunks that are not erased; None if not counted."""

    WIRE = Wire("a fact of an erasure", camel=True, omit=("others",))
    ABOUT = ("tier",)
    tier: str
    by: str
    began: datetime
    ended: datetime
    slots_before: str
    slots_after: str
    primaries: int
    left: Mapping[str, Amount]
    others: int | None = None

    def _rank(self) -> float:
        return _seconds(self.began)


@dataclass(frozen=True, slots=True)
class ServersSeen(_Fact):
    """Versions of a tier's servers, by the first regular check of them that an operator knew."""

    ABOUT = ("tier",)
    tier: str
    software: str
    version: str
    at: datetime


@dataclass(frozen=True, slots=True)
class TierLost(_Fact):
    """A tier was removed, or its name is another's, before it was erased; with `server`, only that server of it is
    lost: its pod vanished and its end was not reported, or it is one of the tier's former servers. `unused`: no pod
    ever used the tier, so it held nothing. Earlier versions read each as a lost tier."""

    WIRE = Wire("a fact of an erasure", camel=True, omit=("unused", "server"))
    ABOUT = ("tier", "server")
    tier: str
    at: datetime
    unused: bool = False
    server: str = ""


@dataclass(frozen=True, slots=True)
class Verdict(_Fact):
    """The result; no fact but the receipt is added after it. `abandoned` is the reason given by the person who
    abandoned it."""

    complete: bool
    reason: str
    message: str
    at: datetime
    abandoned: str = ""

    @property
    def proves(self) -> bool:
        return self.reason in (InvalidationReason.ERASED_AND_VERIFIED, InvalidationReason.NOTHING_HELD)


@dataclass(frozen=True, slots=True)
class ReceiptWritten(_Fact):
    digest: str

    def _rank(self) -> float:
        return 0.0


Fact = (
    Rolled | PodSeen | PodErased | EngineReset | EngineKept | PodProbed | KeyRemoved | KeyDestroyed | KeyNotDestroyed
    | Deletion | Look | ServersSeen | TierLost | Verdict | ReceiptWritten
)  # fmt: skip
