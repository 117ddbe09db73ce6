"""An erasure ends the same wherever its operator dies, and no condition is true before it is so in the world."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from random import Random

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kvstrata.api.cacheinvalidation import Phase as ErasurePhase
from kvstrata.api.reasons import InvalidationReason as R
from kvstrata.api.status import ConditionStatus
from kvstrata.contract.receipt.facts import Component
from kvstrata.contract.receipt.facts import Erasure as ReceiptFacts
from kvstrata.contract.receipt.record import Record
from kvstrata.contract.receipt.vocabulary import KeyCustody
from kvstrata.contract.wire import to_wire
from kvstrata.model.erasure.facts import (
    Deletion,
    Fact,
    JobState,
    KeyRemoved,
    Look,
    PodErased,
    PodProbed,
    PodSeen,
    Verdict,
)
from kvstrata.model.erasure.record import Erasure
from kvstrata.plan.erasure.next_step import ErasureStep, next_step
from kvstrata.plan.erasure.receipt import facts_of
from tests.support.amounts import examples

from .erasures import SimulatedPod, Simulation, around, at, order, until_verified
from .test_erasure import HEAD


def what_is_not_so(world: Simulation, step: ErasureStep) -> str | None:
    """The checker: compares what is called true with the world itself, and knows nothing of facts."""
    called = {one.type for one in step.findings if one.status is ConditionStatus.TRUE}
    now = world.now_s
    alive = [pod for pod in world.pods if not pod.is_over(now)]
    if "LogicallyInvalid" in called and any(
        now < 330 if pod.silent else now < pod.acks_s for pod in alive if pod.vanishes_s is None
    ):
        return "a pod reuses the data"
    if "KeysRevoked" in called and world.has_key:
        return "the key is in its custody"
    may_be_destroyed = world.custody is KeyCustody.KMS and world.custody_confirms
    if "KeysDestroyed" in called and (world.has_key or not may_be_destroyed):
        return "a copy of the key may exist"
    # Late copies come when somebody looks, so that what was emptied may hold something again until that is heard.
    if "Erased" in called and any(not pod.answers and pod.boot(now) == 1 for pod in alive):
        return "a pod was not emptied"
    if "Erased" in called and len(world.emptied_s) < len(world.contents):
        return "a server was not emptied"
    if "Verified" in called and (any(world.contents.values()) or any(pod.holds for pod in alive if pod.boot(now) == 1)):
        return "something is left"
    if "Verified" in called and (world.looked_s is None or world.looked_s < max(world.emptied_s.values())):
        return "nobody looked since the last deletion"
    if {"Complete", "Failed"} & called and not world.receipts:
        return "there is no receipt"
    return None


def run(world: Simulation) -> tuple[ErasureStep, ReceiptFacts]:
    """Run a world to its end under the checker; return the last step and what the receipt says."""
    step = None
    for step in world.run():
        wrong = what_is_not_so(world, step)
        assert wrong is None, f"{wrong} at {world.now_s} s: {step}"
    assert step is not None
    assert step.phase.finished, f"it does not end: {step}"
    assert len(world.receipts) == 1
    facts = world.receipts[0]
    assert isinstance(facts, ReceiptFacts)
    Record.of_erasure(HEAD, facts)
    return step, facts


def but_for_the_clock(facts: ReceiptFacts) -> str:
    """The facts without moments, and without which operator looked: who goes on does so at once, and is another."""
    text = re.sub(r"\d{4}-\d\d-\d\dT[\d:]+Z", "then", json.dumps(to_wire(facts)))
    return re.sub(r"operator-\d+", "operator", re.sub(r'"waitedS": \d+', "", text))


def worlds(**changes: object) -> Simulation:
    """A world with two pods in which something goes wrong on the way."""
    pods = (SimulatedPod("p1"), SimulatedPod("p2", acks_s=7))
    whole = {"order": order(), "pods": pods, "jobs_fail": 1, "late_copies": 1, "away": (35, 60)}
    return Simulation(**{**whole, **changes})  # type: ignore[arg-type]


def test_wherever_the_operator_dies_the_receipt_is_the_same() -> None:
    quiet = worlds()
    _, expected = run(quiet)
    assert quiet.writes > 20
    for number in range(1, quiet.writes + 1):
        world = worlds(dies_at=frozenset({number}))
        step, facts = run(world)
        assert step.phase is ErasurePhase.COMPLETE
        assert world.lives == 2, f"it did not die at {number}"
        assert but_for_the_clock(facts) == but_for_the_clock(expected), f"it died at {number}"


MOMENTS = st.none() | st.integers(0, 120)
PODS = st.builds(
    SimulatedPod,
    st.just(""),
    acks_s=st.integers(2, 60),
    restarts_s=MOMENTS,
    ends_s=MOMENTS,
    vanishes_s=MOMENTS,
    silent=st.booleans(),
    finds_late=st.integers(0, 4),
)


@st.composite
def anything(draw: st.DrawFn) -> Simulation:
    """A world in which anything may go wrong; whoever vanishes after all is taken to be over an hour later."""
    pods = []
    for number, pod in enumerate(draw(st.lists(PODS, min_size=1, max_size=3))):
        over = 900 if pod.vanishes_s is not None and pod.ends_s is None else pod.ends_s
        acks_s = pod.acks_s
        pods.append(replace(pod, uid=f"p{number}", ends_s=over, acks_s=acks_s, answers={}))
    seed = draw(st.integers(0, 1000))
    began = draw(st.integers(0, 90))
    return Simulation(
        order=order(deadline_s=draw(st.sampled_from([None, 30, 200, 1500])), allow_residue=draw(st.booleans())),
        pods=tuple(pods),
        away=(began, began + draw(st.integers(0, 200))),
        slots_move_until_s=draw(st.integers(0, 150)),
        jobs_fail=draw(st.integers(0, 4)),
        late_copies=draw(st.integers(0, 4)),
        custody=draw(st.sampled_from(list(KeyCustody))),
        custody_confirms=draw(st.booleans()),
        dies_at=draw(st.frozensets(st.integers(1, 60), max_size=8)),
        shuffle=lambda facts: Random(f"{seed} {len(facts)}").sample(facts, len(facts)),
    )


@settings(max_examples=examples(25), phases=[Phase.explicit, Phase.generate])
@given(anything())
def test_whatever_goes_wrong_it_ends_and_says_nothing_before_it_is_so(world: Simulation) -> None:
    step, facts = run(world)
    if step.decision.reason == R.ERASED_AND_VERIFIED:
        assert facts.versions == (Component("tiers on Redis", "8.0.0", 1),), "servers that were looked at are named"
    if step.phase is ErasurePhase.COMPLETE and not world.order.allow_residue:
        assert step.decision.reason == R.ERASED_AND_VERIFIED
        assert not any(item.kind.denies & {"Erased", "Verified"} for item in facts.residue)
    assert facts == facts_of(world.erasure), "the receipt is what the record says afterwards, too"


def before_its_facts(step: ErasureStep, heard: list[Fact]) -> str | None:
    """The checker of facts: what is called true although a fact for it is missing, by what there has to be."""
    called = {one.type for one in step.findings if one.status is ConditionStatus.TRUE}
    kinds = [type(fact) for fact in heard]
    emptied = {fact.node for fact in heard if isinstance(fact, Deletion) and fact.state is JobState.DONE}
    acks = {fact.uid for fact in heard if isinstance(fact, PodSeen)}
    asked = {fact.uid for fact in heard if isinstance(fact, PodProbed)}
    answers = {fact.uid for fact in heard if isinstance(fact, PodErased)}
    needed = {
        "LogicallyInvalid": acks == {"p1", "p2"},
        "KeysRevoked": acks == {"p1", "p2"} and KeyRemoved in kinds,
        "Erased": emptied == {"n1", "n2"} and answers == {"p1", "p2"},
        "Verified": Look in kinds and asked == {"p1", "p2"} and emptied == {"n1", "n2"},
        "Complete": False,
        "Failed": False,
    }
    return next((kind for kind, there in needed.items() if kind in called and not there), None)


@settings(max_examples=examples(15), phases=[Phase.explicit, Phase.generate])
@given(st.permutations(until_verified()), st.data())
def test_in_whatever_order_facts_arrive_they_amount_to_the_same(facts: list[Fact], data: st.DataObject) -> None:
    again = data.draw(st.lists(st.sampled_from(facts), max_size=4))
    erasure, heard = Erasure(order()), []
    for fact in [*facts, *again]:
        erasure = erasure.with_facts(fact)
        heard.append(fact)
        early = before_its_facts(next_step(erasure, around(), at(60)), heard)
        assert early is None, f"{early} after {heard}"
    assert erasure.facts == Erasure(order()).with_facts(*until_verified()).facts


@settings(max_examples=examples(15))
@given(st.lists(st.builds(Verdict, st.booleans(), st.just("A"), st.text(max_size=3), st.integers(0, 9).map(at))))
def test_of_facts_about_the_same_one_stands_in_any_order(verdicts: list[Verdict]) -> None:
    words = [replace(fact, at=one.at) for one in verdicts for fact in until_verified() if isinstance(fact, PodSeen)]
    forward, backward = Erasure(order()).with_facts(*words), Erasure(order()).with_facts(*reversed(words))
    assert forward.facts == backward.facts
