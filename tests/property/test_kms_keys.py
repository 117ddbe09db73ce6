"""Keys that a KMS wraps, in any order of answers: some are lost, the operator dies anywhere, an erasure revokes a key
while it is unwrapped, the KMS loses keys, records are stolen.

What is there (statuses, bundles, records, the KMS) is modelled; what is due, and what answers come to, is the product's
(`plan.keys.kms`). A turn stops after each request, so that everything else can happen before its answer.
"""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstrata.plan.keys.kms import KeyNeeds, KeyRecords, KeyWork, judge_unwrapped, plan_keys
from tests.support.amounts import examples

which = st.integers(0, 7)
"""Picks an epoch: by its index, among those that there are."""


class KeysOfADomain(RuleBasedStateMachine):
    """One domain; epochs never come back."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.used, self.ending, self.bundled = set[str](), set[str](), set[str]()
        self.records: dict[str, bool] = {}
        """Records of keys, and whether they are wrapped."""
        self.in_kms = set[str]()
        self.broken, self.asked, self.missed = set[str](), set[str](), set[str]()
        """Epochs whose keys cannot be unwrapped for now; that erasures ask about; whose key or record somebody took."""
        self.start()

    def start(self) -> None:
        """Begin as a process that knows only what is stored."""
        self.held, self.settled, self.lost, self.spent = set[str](), set[str](), set[str](), set[str]()
        self.given_up, self.left = set[str](), set[str]()
        """Epochs whose keys this process has ended; unused ones that were refused: the next one asks again."""
        self.named = self.bundled & self.used
        self.turn: Iterator[None] | None = None

    def needs(self) -> KeyNeeds:
        lasting = self.used - self.ending - self.lost
        return KeyNeeds(self.used, lasting, lasting - self.named, self.named, self.spent)

    def due(self) -> KeyWork:
        wrapped = {epoch for epoch, is_wrapped in self.records.items() if is_wrapped}
        records = KeyRecords(wrapped, self.records.keys() - wrapped)
        return plan_keys(self.needs(), records, self.held, self.settled)

    def work(self) -> Iterator[None]:
        """One turn, as the worker does it."""
        due = self.due()
        self.lost |= due.lost
        self.named -= due.lost
        yield
        for epoch in sorted(due.draw):
            assert epoch not in self.bundled, "pods would take a second key for the first"
            assert epoch not in self.records
            self.in_kms.add(epoch)
            yield
            self.records.setdefault(epoch, True)
            yield
        asked = due.draw | due.unwrap
        refused = {epoch for epoch in asked & self.broken if self.records.get(epoch)}
        found = {epoch for epoch in asked - refused if self.records.get(epoch) and epoch in self.in_kms}
        yield
        self.held |= found - self.settled
        lost, settled = judge_unwrapped(due, self.needs(), asked - refused - found, refused)
        self.named = (self.named - lost) | (found & self.held)
        self.lost |= lost
        self.settled |= settled
        self.left |= settled & refused
        for epoch in sorted(due.destroy):
            yield
            if epoch in self.spent and self.records.get(epoch):
                self.records[epoch] = False
            yield
            assert epoch not in self.used, "a key in use is not deleted"
            confirmed = self.records.get(epoch) is False
            if confirmed:
                self.in_kms.discard(epoch)
            yield
            if confirmed and epoch in self.spent - self.asked:
                assert epoch not in self.in_kms, "only the answer of the KMS proves that a key ended"
                self.records.pop(epoch, None)
            self.give_up(epoch)
            self.spent.discard(epoch)

    def give_up(self, epoch: str) -> None:
        self.settled.add(epoch)
        self.given_up.add(epoch)
        self.held.discard(epoch)
        self.named.discard(epoch)

    def pick(self, number: int, among: set[str]) -> str | None:
        return sorted(among)[number % len(among)] if among else None

    @initialize()
    def some_scopes_have_keys(self) -> None:
        for _ in range(4):
            self.a_scope_gets_an_epoch()
        self.all_that_is_due_is_done()
        self.bundles_are_committed()

    @rule()
    def all_that_is_due_is_done(self) -> None:
        for turn in (self.turn or (), self.work()):
            for _ in turn:
                pass
        self.turn = None

    @rule()
    def a_scope_gets_an_epoch(self) -> None:
        self.used.add(f"{self.count:032x}")
        self.count += 1

    @rule(number=which)
    def an_epoch_leaves(self, number: int) -> None:
        if epoch := self.pick(number, self.used):
            self.used.discard(epoch)
            self.ending.discard(epoch)

    @rule(number=which)
    def a_policy_is_deleted(self, number: int) -> None:
        if epoch := self.pick(number, self.used):
            self.ending.add(epoch)

    @rule(number=which)
    def a_backup_brings_a_policy_back(self, number: int) -> None:
        if epoch := self.pick(number, self.ending):
            self.ending.discard(epoch)

    @rule()
    def bundles_are_committed(self) -> None:
        self.bundled = self.named & self.used

    @rule(number=which)
    def no_pod_needs_a_key(self, number: int) -> None:
        if epoch := self.pick(number, self.named - self.used - self.bundled):
            self.spent.add(epoch)

    @rule(number=which)
    def an_erasure_revokes_a_key(self, number: int) -> None:
        gone = self.ending | (self.records.keys() - self.used)
        if epoch := self.pick(number, gone):
            self.give_up(epoch)
            self.asked.add(epoch)
            if epoch in self.records:
                self.records[epoch] = False
            self.missed.add(epoch)

    @rule(number=which)
    def an_erasure_has_a_key_destroyed(self, number: int) -> None:
        if epoch := self.pick(number, self.asked):
            if self.records.get(epoch) is False:
                self.in_kms.discard(epoch)
            self.asked.discard(epoch)

    @rule(number=which)
    def the_kms_loses_a_key(self, number: int) -> None:
        if epoch := self.pick(number, self.in_kms):
            self.in_kms.discard(epoch)
            self.missed.add(epoch)

    @rule(number=which)
    def somebody_deletes_a_record(self, number: int) -> None:
        if epoch := self.pick(number, {*self.records}):
            del self.records[epoch]
            self.missed.add(epoch)

    @rule(number=which)
    def a_key_cannot_be_unwrapped_for_a_while(self, number: int) -> None:
        if epoch := self.pick(number, {*self.records}):
            self.broken ^= {epoch}

    @rule(steps=st.integers(1, 12))
    def the_turn_goes_on(self, steps: int) -> None:
        for _ in range(steps):
            self.turn = self.turn or self.work()
            if next(self.turn, self) is self:
                self.turn = None

    @rule()
    def an_answer_is_lost(self) -> None:
        self.turn = None

    @rule()
    def the_operator_dies(self) -> None:
        self.start()

    @invariant()
    def what_was_given_up_is_not_held(self) -> None:
        assert not self.held & self.given_up

    @invariant()
    def what_is_lost_was_taken(self) -> None:
        assert self.lost <= self.missed

    def teardown(self) -> None:
        """When nothing else happens, all that is due gets done."""
        self.broken -= self.used
        for _ in range(4):
            self.all_that_is_due_is_done()
        due = self.due()
        assert not due.draw | due.unwrap | due.destroy | due.lost
        assert self.used - self.ending - self.lost <= self.held
        assert not self.spent - self.used
        for epoch, is_wrapped in self.records.items():
            if epoch not in self.used and is_wrapped:
                assert epoch in self.named | self.given_up | self.missed | self.left, "a plan knows it, and ends it"
            if epoch not in self.used and not is_wrapped and epoch not in self.given_up:
                assert epoch not in self.in_kms


TestKeysOfADomain = KeysOfADomain.TestCase
TestKeysOfADomain.settings = settings(max_examples=examples(150), stateful_step_count=50)
