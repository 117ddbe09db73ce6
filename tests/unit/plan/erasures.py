"""Erasures for tests: orders, single facts, and a world that carries orders out and can be made to go wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from kvstrata.api.scalars import format_timestamp
from kvstrata.contract.policy.data_key import key_id
from kvstrata.contract.receipt.facts import Amount, Copies, Fence, Revoked, Statement, Target
from kvstrata.contract.receipt.vocabulary import Hbm, KeyCustody, Party, PodMedium, RevokedKind, Standing
from kvstrata.model.erasure.facts import (
    Deletion,
    EngineReset,
    Fact,
    HeldKey,
    HeldTier,
    JobState,
    KeyDestroyed,
    KeyNotDestroyed,
    KeyRemoved,
    Look,
    PodErased,
    PodProbed,
    PodSeen,
    ReceiptWritten,
    Rolled,
    ServersSeen,
    Witness,
)
from kvstrata.model.erasure.record import Erasure, ErasureOrder, Observed, SharedTier, TierNow
from kvstrata.plan.erasure.next_step import ErasureStep, next_step
from kvstrata.plan.erasure.orders import (
    AskPodToErase,
    AskPodToVerify,
    DestroyKeys,
    IssueReceipt,
    ResetEngine,
    RevokeKeys,
    StartDeletion,
    VerifyTier,
)
from tests.support.receipts import NEW_EPOCH, OLD_EPOCH, subject

START = datetime(2026, 11, 22, 10, 0, tzinfo=UTC)
KEY = key_id(b"k" * 32)
MEMORY = HeldTier("cpu", PodMedium.CPU, False, False)
FILES = HeldTier("files", PodMedium.NVME, True, True)
SLOTS, OTHER_SLOTS = "5" * 64, "6" * 64
REDIS = SharedTier("redis", True)
NOTHING = Amount(0, 0)
TICK_S = 5
PATIENT_TICK_S = 60
"""Whatever goes wrong is over by then; what follows is waiting."""


def at(seconds: float) -> datetime:
    """A moment after the order was taken up."""
    return START + timedelta(seconds=seconds)


def order(**changes: object) -> ErasureOrder:
    """An order to erase a tenant from a shared tier and from pods."""
    whole = ErasureOrder(subject(hbm=Hbm.ROLL_SCOPES), START, ("ab" * 16,), (REDIS,))
    return replace(whole, **changes)  # type: ignore[arg-type]


def witness(uid: str, *tiers: HeldTier) -> Witness:
    """A pod that may use the data."""
    return Witness("chat", uid, f"chat-{uid}", tiers)


def rolled(*pods: Witness, keys: tuple[HeldKey, ...] | None = None) -> Rolled:
    """New epochs are in every bundle, after a second."""
    held = (HeldKey(KEY, OLD_EPOCH, KeyCustody.KMS),) if keys is None else keys
    revoked = (Revoked(RevokedKind.TENANT, "acme", OLD_EPOCH, NEW_EPOCH),)
    return Rolled(at(1), revoked, (Target("chat", 7),), pods or (witness("p1", MEMORY), witness("p2", MEMORY)), held)


def acked(uid: str, after_s: float = 2, boot: int = 1, revision: int = 7) -> PodSeen:
    """A pod's acknowledgement."""
    return PodSeen(uid, Standing.ACKED, at(after_s), f"g{boot}", f"c{boot}", revision)


def ended(uid: str, after_s: float) -> PodSeen:
    """The kubelet's word that a pod ended."""
    return PodSeen(uid, Standing.ENDED, at(after_s))


def fenced(uid: str, waited_s: int = 330) -> PodSeen:
    """A pod that was away for this long."""
    until = format_timestamp(at(waited_s))
    return PodSeen(uid, Standing.FENCED, at(waited_s), fence=Fence(format_timestamp(START), 300, 30, until))


def removed(after_s: float = 3) -> tuple[KeyRemoved, KeyDestroyed]:
    """The data key is gone, as the operator and the KMS reported."""
    moment = format_timestamp(at(after_s))
    return (
        KeyRemoved(KEY, Statement(Party.OPERATOR, "operator-1", moment)),
        KeyDestroyed(KEY, Statement(Party.CUSTODY, "transit:1", moment)),
    )


def deleted(node: str, began_s: float = 35, ended_s: float = 36, round: int = 1, **changes: object) -> Deletion:
    """A Job that emptied a primary of two."""
    whole = Deletion(
        "redis", node, round, f"job-{node}-{round}", JobState.DONE, at(began_s), 2, at(ended_s), Amount(40, 400),
        Amount(40, 400), replicas=1, replicas_in_step=1,
    )  # fmt: skip
    return replace(whole, **changes)  # type: ignore[arg-type]


def erased(uid: str, after_s: float = 36, boot: int = 1, round: int = 1, remaining: int = 0) -> PodErased:
    """A pod that erased its memory."""
    return PodErased(uid, round, f"g{boot}", f"c{boot}", at(after_s), {"cpu": Copies(5, 5 - remaining, remaining, 500)})


def looked(began_s: float = 40, slots_after: str = SLOTS, **left: Amount) -> Look:
    """The verifier's look at both primaries."""
    return Look(
        "redis",
        "operator-1",
        at(began_s),
        at(began_s + 1),
        SLOTS,
        slots_after,
        2,
        {"n1": NOTHING, "n2": NOTHING, **left},
    )


def probed(uid: str, after_s: float = 41, boot: int = 1, round: int = 1, missed: int = 3) -> PodProbed:
    """A pod that was asked for three keys."""
    return PodProbed(uid, round, f"g{boot}", f"c{boot}", at(after_s), 9, 3, missed)


def around(**changes: object) -> Observed:
    """Everything answers."""
    pods = dict.fromkeys(("p1", "p2"), ("g1", "c1"))
    whole = Observed({"redis": TierNow(("n1", "n2"), SLOTS)}, pods)
    return replace(whole, **changes)  # type: ignore[arg-type]


def servers_seen(after_s: float = 1, version: str = "8.0.0", tier: str = "redis") -> ServersSeen:
    """What an operator's check of a tier's servers told."""
    return ServersSeen(tier, "Redis", version, at(after_s))


def until_erased() -> tuple[Fact, ...]:
    """Facts of an erasure of which only verification is left."""
    done = (deleted("n1"), deleted("n2"), erased("p1"), erased("p2"))
    return (rolled(), servers_seen(), acked("p1"), acked("p2", 4), *removed(5), *done)


def until_verified() -> tuple[Fact, ...]:
    """Facts of an erasure of which only the verdict is left."""
    return (*until_erased(), looked(), probed("p1"), probed("p2"))


@dataclass
class SimulatedPod:
    """A pod of the simulated world, and what becomes of it; moments in seconds from the start, None for never."""

    uid: str
    acks_s: float = 4
    restarts_s: float | None = None
    ends_s: float | None = None
    vanishes_s: float | None = None
    silent: bool = False
    finds_late: int = 0
    answers: dict[tuple[int, int], PodErased] = field(default_factory=dict)
    holds: int = 5
    held_since_boot: int = 1

    def boot(self, now_s: float) -> int:
        """Which start of its processes this is."""
        return 2 if self.restarts_s is not None and now_s >= self.restarts_s else 1

    def acks(self, now_s: float) -> bool:
        """Whether the processes that run have acknowledged."""
        since = self.acks_s if self.boot(now_s) == 1 else max(self.acks_s, (self.restarts_s or 0) + 8)
        return not self.silent and now_s >= since

    def is_over(self, now_s: float) -> bool:
        """Whether the kubelet said that it ended."""
        return self.ends_s is not None and now_s >= self.ends_s

    def can_be_asked(self, now_s: float) -> bool:
        """Whether it answers."""
        gone = self.vanishes_s is not None and now_s >= self.vanishes_s
        return not (self.silent or gone or self.is_over(now_s))


@dataclass
class Simulation:
    """A world in which orders are carried out, an operator that can die at any order and at any fact, and what
    really happened, for a checker that knows nothing of facts."""

    order: ErasureOrder
    pods: tuple[SimulatedPod, ...]
    away: tuple[float, float] = (0, 0)
    slots_move_until_s: float = 0
    jobs_fail: int = 0
    late_copies: int = 0
    custody: KeyCustody = KeyCustody.KMS
    custody_confirms: bool = True
    dies_at: frozenset[int] = frozenset()
    shuffle: Callable[[list[Fact]], list[Fact]] = lambda facts: facts
    now_s: float = 0
    writes: int = 0
    lives: int = 1
    has_key: bool = True
    contents: dict[str, int] = field(default_factory=lambda: {"n1": 40, "n2": 40})
    jobs: dict[tuple[str, str, int], Deletion] = field(default_factory=dict)
    receipts: list[object] = field(default_factory=list)
    emptied_s: dict[str, float] = field(default_factory=dict)
    looked_s: float | None = None
    key_facts: tuple[Fact, ...] = ()
    resets: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.erasure = Erasure(self.order)

    def run(self, ticks: int = 400) -> Iterator[ErasureStep]:
        """Yield each step until it is over."""
        for _ in range(ticks):
            step = self._tick()
            while step is None:
                self.lives += 1
                step = self._tick()
            yield step
            if step.phase.finished:
                return
            self.now_s += TICK_S if self.now_s < 400 else PATIENT_TICK_S

    def _tick(self) -> ErasureStep | None:
        """One round of a leader; None if it died on the way."""
        for fact in self.shuffle(list(self._gathered())):
            if not self._write(fact):
                return None
        step = next_step(self.erasure, self._around(), at(self.now_s))
        for one in step.orders:
            if self._dies():
                return None
            for fact in self._carried_out(one):
                if not self._write(fact):
                    return None
        if step.verdict is not None and (self._dies() or not self._write(step.verdict)):
            return None
        return step

    def _dies(self) -> bool:
        self.writes += 1
        return self.writes in self.dies_at

    def _write(self, fact: Fact) -> bool:
        after = self.erasure.with_facts(fact)
        if after.facts == self.erasure.facts:
            return True
        if self._dies():
            return False
        self.erasure = after
        return not self._dies()

    def _around(self) -> Observed:
        asked = {
            pod.uid: (f"g{pod.boot(self.now_s)}", f"c{pod.boot(self.now_s)}")
            for pod in self.pods
            if pod.can_be_asked(self.now_s)
        }
        away = self.away[0] <= self.now_s < self.away[1]
        tier = TierNow(("n1", "n2"), SLOTS, not away, "n1 is silent" if away else "")
        return Observed({"redis": tier}, asked)

    def _gathered(self) -> Iterator[Fact]:
        if self.now_s < 1:
            return
        keys = (HeldKey(KEY, OLD_EPOCH, self.custody),)
        yield rolled(*(witness(pod.uid, MEMORY) for pod in self.pods), keys=keys)
        if self._around().tiers["redis"].reachable:
            yield servers_seen(self.now_s)
        for pod in self.pods:
            if pod.is_over(self.now_s):
                yield ended(pod.uid, pod.ends_s or 0)
            elif pod.silent and self.now_s >= 330:
                yield fenced(pod.uid)
            elif pod.can_be_asked(self.now_s) and pod.acks(self.now_s):
                boot = pod.boot(self.now_s)
                first = pod.acks_s if boot == 1 else max(pod.acks_s, (pod.restarts_s or 0) + 8)
                yield acked(pod.uid, first, boot)
        for name, job in self.jobs.items():
            if job.state is JobState.RUNNING and at(self.now_s) >= job.began + timedelta(seconds=2 * TICK_S):
                self.jobs[name] = self._job_over(job)
        yield from self.jobs.values()
        yield from self.key_facts
        if self.receipts:
            yield ReceiptWritten("d" * 64)

    def _job_over(self, job: Deletion) -> Deletion:
        if self.jobs_fail:
            self.jobs_fail -= 1
            return replace(job, state=JobState.FAILED, ended=at(self.now_s), problem="the Job's pod was killed")
        found = Amount(self.contents[job.node], self.contents[job.node] * 10)
        self.contents[job.node] = 0
        self.emptied_s[job.node] = self.now_s
        return replace(
            job, state=JobState.DONE, ended=at(self.now_s), found=found, deleted=found, replicas=1, replicas_in_step=1
        )

    def _carried_out(self, one: object) -> Iterator[Fact]:
        match one:
            case RevokeKeys():
                if self.has_key:
                    self.has_key = False
                    self.key_facts = removed(self.now_s)[:1]
            case DestroyKeys():
                told: Fact = KeyNotDestroyed(KEY, "the key can be exported", at(self.now_s))
                if self.custody_confirms:
                    told = removed(self.now_s)[1]
                self.key_facts = (self.key_facts[0], told)
            case StartDeletion(tier=tier, primary=node, round=turn):
                job = Deletion(tier, node, turn, f"job-{node}-{turn}", JobState.RUNNING, at(self.now_s), 2)
                self.jobs.setdefault((tier, node, turn), job)
            case AskPodToErase(uid=uid, round=turn):
                yield self._pod_erases(uid, turn)
            case ResetEngine(uid=uid):
                self.resets.add(uid)
                yield EngineReset(uid, at(self.now_s))
            case VerifyTier():
                moves = self.now_s < self.slots_move_until_s
                if self.late_copies:
                    self.late_copies -= 1
                    self.contents["n1"] = 3
                left = {node: Amount(keys, keys * 10) for node, keys in self.contents.items()}
                self.looked_s = self.now_s
                after = OTHER_SLOTS if moves else SLOTS
                now = at(self.now_s)
                yield Look("redis", f"operator-{self.lives}", now, now, SLOTS, after, len(left), left)
            case AskPodToVerify(uid=uid, round=turn):
                pod = next(pod for pod in self.pods if pod.uid == uid)
                late = pod.finds_late >= turn
                pod.holds = 1 if late else pod.holds
                boot = pod.boot(self.now_s)
                yield probed(uid, self.now_s, boot, turn, missed=2 if late else 3)
            case IssueReceipt(facts=facts):
                if not self.receipts:
                    self.receipts.append(facts)

    def _pod_erases(self, uid: str, turn: int) -> PodErased:
        """Let a pod erase, or say again what it said: a pod remembers its answer as long as its processes run."""
        pod = next(pod for pod in self.pods if pod.uid == uid)
        boot = pod.boot(self.now_s)
        if (turn, boot) not in pod.answers:
            held = pod.holds if boot == pod.held_since_boot else 0
            pod.holds = 0
            pod.answers[turn, boot] = PodErased(
                uid, turn, f"g{boot}", f"c{boot}", at(self.now_s), {"cpu": Copies(held, held, 0, held * 100)}
            )
        return pod.answers[turn, boot]
