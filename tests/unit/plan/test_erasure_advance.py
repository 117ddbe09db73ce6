"""Whatever order events come in, lost or repeated, nothing follows from a fact before it is stored."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kvstrata.api.reasons import InvalidationReason as R
from kvstrata.contract.policy.keyspace import ScopeKind
from kvstrata.contract.receipt.vocabulary import KeyCustody
from kvstrata.model.erasure.facts import (
    Deletion,
    Fact,
    HeldKey,
    JobState,
    KeyRemoved,
    PodErased,
    PodSeen,
    ReceiptWritten,
    Rolled,
    Verdict,
)
from kvstrata.model.erasure.record import Erasure, ErasureNow, ErasureRecord, LeftEpoch, StoredRecord, TierNow
from kvstrata.plan.erasure.advance import (
    LONGEST_PAUSE_S,
    RETRY_S,
    Effects,
    ErasureState,
    Event,
    OrderDone,
    OrderFailed,
    Woken,
    advance,
)
from kvstrata.plan.erasure.orders import (
    AskPodToErase,
    AskPodToVerify,
    DestroyKeys,
    FollowDeletion,
    IssueReceipt,
    NameChunks,
    Order,
    ReadServers,
    ResetEngine,
    RevokeKeys,
    VerifyTier,
)
from kvstrata.plan.erasure.receipt import facts_of
from tests.support.amounts import examples
from tests.support.receipts import OLD_EPOCH

from .erasures import KEY, SLOTS, acked, around, at, order, removed, rolled, until_verified

SERVERS = TierNow(("n1", "n2"), SLOTS)
SETTLED = (rolled(), acked("p1"), acked("p2", 4))


def record(*facts: Fact) -> ErasureRecord:
    epoch = LeftEpoch(ScopeKind.TENANT, "acme", "1" * 32, "2" * 32)
    keys = (HeldKey(KEY, OLD_EPOCH, KeyCustody.KMS),)
    return ErasureRecord("team-a", "acme-leaves", "d" * 16, (epoch,), keys, Erasure(order()).with_facts(*facts))


class Process:
    """An operator process with a store of its own: writes may fail, and their answers may be lost or come again."""

    def __init__(self, *facts: Fact) -> None:
        self.state = ErasureState.of(StoredRecord(record(*facts), "0"), around())
        self.stored = self.state.record
        self.heard = dict(self.stored.erasure.facts)
        self.now = at(60)
        self.to_write: ErasureRecord | None = None
        self.events: list[Event] = []
        self.started: list[Order] = []
        self.emitted: list[Verdict] = []

    def take(self, event: Event) -> Effects:
        """Advance by an event, and hold its effects against the facts whose write was reported."""
        self.events.append(event)
        if isinstance(event, StoredRecord):
            self.heard |= Erasure(order(), self.heard).with_facts(*event.record.erasure.facts.values()).facts
        self.now += timedelta(milliseconds=1)
        self.state, effects = advance(self.state, event, self.now)
        for effect in (effects.show, effects.announce, *effects.start):
            assert (wrong := self.unfounded(effect)) is None, f"{wrong}: {effect} after {self.events}"
        self.to_write = effects.write or self.to_write
        self.started += effects.start
        self.emitted += [effects.announce] if effects.announce is not None else []
        return effects

    def write(self) -> StoredRecord | None:
        """Store what was last to be written, merged with what is there."""
        if self.to_write is None:
            return None
        self.stored, self.to_write = self.stored.merged_with(self.to_write), None
        return StoredRecord(self.stored, str(len(self.events)))

    def settle(self) -> None:
        """Store until nothing is left to be written."""
        self.take(Woken((), around()))
        while written := self.write():
            self.take(written)

    def unfounded(self, effect: ErasureNow | Verdict | Order | None) -> str | None:
        """The checker: which stored fact an effect lacks. It knows nothing of rules."""
        facts = self.heard
        kinds = {type(fact) for fact in facts.values()}
        acks = {one.uid for one in facts.values() if isinstance(one, PodSeen)}
        erased = {one.uid for one in facts.values() if isinstance(one, PodErased)}
        jobs = [one for one in facts.values() if isinstance(one, Deletion)]
        emptied = {one.node for one in jobs if one.state is JobState.DONE}
        everyone = {"p1", "p2"}
        match effect:
            case None:
                return None
            case ErasureNow(record):
                shown = record.erasure.facts.items()
                return next((f"it shows {key}" for key, fact in shown if facts.get(key) != fact), None)
            case Verdict():
                return None if effect in facts.values() else "the verdict"
            case IssueReceipt(told):
                known = facts_of(Erasure(order(), facts))
                return None if Verdict in kinds and told == known else "the verdict, or another fact of the receipt"
            case FollowDeletion(tier, round):
                return None if any((one.tier, one.round) == (tier, round) for one in jobs) else "the deletion"
            case RevokeKeys() | DestroyKeys() | ReadServers():
                return None if Rolled in kinds and acks == everyone else "an acknowledgement"
            case AskPodToErase(uid) | ResetEngine(uid):
                return None if KeyRemoved in kinds and uid in acks else "an acknowledgement, or that keys are gone"
            case NameChunks():
                return None if KeyRemoved in kinds and acks == everyone else "that keys are gone"
            case VerifyTier() | AskPodToVerify():
                done = emptied == {"n1", "n2"} and erased == everyone
                return None if done else "that all was erased"
        raise AssertionError(effect)


FACTS = st.lists(st.sampled_from(until_verified()), max_size=5).map(tuple)
ORDERS: tuple[Order, ...] = (
    RevokeKeys((KEY,)), AskPodToErase("p1", 1, ("cpu",)), FollowDeletion("redis", 1), NameChunks("redis"),
    ReadServers("redis"), VerifyTier("redis"), AskPodToVerify("p2", 1),
)  # fmt: skip
REPORTS = (
    st.builds(Woken, FACTS, st.sampled_from([around(), around(pods={}), around(deletions_elsewhere=9)]))
    | st.builds(OrderDone, st.sampled_from(ORDERS), FACTS, servers=st.sampled_from([None, SERVERS]))
    | st.builds(OrderFailed, st.sampled_from(ORDERS), st.sampled_from(["", "it is away"]), st.booleans())
)
STEPS = st.lists(REPORTS | st.sampled_from(["written", "answer lost", "write lost", "again"]), max_size=30)


@settings(max_examples=examples(60), phases=[Phase.explicit, Phase.generate, Phase.shrink])
@given(STEPS, st.randoms(use_true_random=False))
def test_nothing_follows_from_a_fact_before_it_is_stored(steps: list[Event | str], chance: object) -> None:
    made = Process()
    for step in steps:
        match step:
            case "written" | "answer lost":
                written = made.write()
                if written is not None and step == "written":
                    made.take(written)
            case "write lost":
                made.to_write = None
            case "again":
                if made.events:
                    made.take(chance.choice(made.events))  # type: ignore[attr-defined]
            case str():
                raise AssertionError(step)
            case _:
                made.take(step)
    end(made)
    assert [type(one) for one in made.started if isinstance(one, IssueReceipt)] == [IssueReceipt]
    assert [one.reason for one in made.emitted] == [R.ERASED_AND_VERIFIED]
    assert all(fact in made.stored.erasure.facts.values() for fact in until_verified())


def end(made: Process) -> None:
    """Let every report come once more, and every write succeed."""
    for fact in until_verified():
        made.take(OrderDone(ORDERS[0], (fact,)))
    made.take(OrderDone(ReadServers("redis"), servers=SERVERS))
    for _ in range(5):
        made.settle()


def pause_s(effects: Effects) -> float:
    assert effects.wake_after_s is not None
    return effects.wake_after_s


def test_a_deletion_is_stored_before_its_job_is_ordered() -> None:
    made = Process(*SETTLED, *removed(5))
    made.take(Woken((), around()))
    assert made.started == [AskPodToErase("p1", 1, ("cpu",)), AskPodToErase("p2", 1, ("cpu",)), ReadServers("redis")]
    made.take(OrderDone(ReadServers("redis"), servers=SERVERS))
    made.take(Woken((), around()))
    assert made.started[-1] == NameChunks("redis"), "names of chunks are gone after the deletion"
    made.take(OrderDone(NameChunks("redis")))
    written = made.take(Woken((), around())).write
    assert written is not None
    assert written.named_tiers == ("redis",)
    made.take(StoredRecord(written, "1"))
    begun = made.state.known.erasure.of(Deletion)
    assert [(one.node, one.round, one.state) for one in begun] == [
        ("n1", 1, JobState.RUNNING),
        ("n2", 1, JobState.RUNNING),
    ]
    assert FollowDeletion("redis", 1) not in made.started
    made.settle()
    assert made.started[-1] == FollowDeletion("redis", 1)


@pytest.mark.parametrize("refused", [True, False])
def test_an_order_that_failed_is_shown_and_repeated_after_a_pause(refused: bool) -> None:
    made = Process(*SETTLED)
    made.take(Woken((), around()))
    revoke = RevokeKeys((KEY,))
    assert made.started.count(revoke) == 1
    made.take(OrderFailed(revoke, "it is sealed", refused))
    effects = made.take(Woken((), around()))
    shown = effects.show
    assert shown is not None
    assert (shown.seen.custody_problem, shown.troubles) == (
        ("it is sealed", ()) if refused else ("", ("it is sealed",))
    )
    assert made.started.count(revoke) == 1
    assert pause_s(effects) <= RETRY_S
    made.now += timedelta(seconds=RETRY_S)
    made.take(Woken((), around()))
    assert made.started.count(revoke) == 2


def test_the_pause_grows_while_nothing_changes() -> None:
    made = Process(rolled())
    pauses = [pause_s(made.take(Woken((), around()))) for _ in range(6)]
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (1.0, LONGEST_PAUSE_S)
    made.take(Woken((acked("p1"),), around()))
    written = made.write()
    assert written is not None
    assert pause_s(made.take(written)) == 1.0


def test_the_moment_from_which_a_namespace_is_known_to_go_stays() -> None:
    made = Process(rolled())
    made.take(Woken((), around(unattended=at(70))))
    made.take(Woken((), around(unattended=at(80))))
    assert made.state.observed.unattended == at(70)
    made.take(Woken((), around()))
    made.take(Woken((), around(unattended=at(90))))
    assert made.state.observed.unattended == at(90)


def test_it_is_over_when_the_receipt_is_stored_and_that_was_shown() -> None:
    verdict = Verdict(True, R.ERASED_AND_VERIFIED, "all is gone", at(50))
    made = Process(*until_verified(), verdict)
    made.settle()
    assert made.emitted == [], "whoever reached the verdict announced it"
    (receipt,) = made.started
    made.take(OrderDone(receipt, (ReceiptWritten("d" * 64),)))
    assert not made.state.over
    made.settle()
    assert made.state.over
