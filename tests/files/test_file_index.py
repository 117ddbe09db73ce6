"""The index against a model of the disk: whatever happens in whatever order, bounds hold at every instant."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from kvstrata.contract.policy.budget import EnforcedBudget
from kvstrata.contract.policy.bundle import Rules
from kvstrata.contract.policy.cache_view import CacheView
from kvstrata.contract.policy.keyspace import SCOPE_DIGITS
from kvstrata.contract.store.block_file import key_of, keyspace_of
from kvstrata_sidecar.adapter.files.file_index import FileIndex
from kvstrata_sidecar.adapter.files.space import LOOK_S, MOST_AT_ONCE, Policy, Reservation
from kvstrata_sidecar.adapter.index import Cause
from tests.support.amounts import examples
from tests.tiers.gate_stand_in import DOMAIN, RESOLVED

CAPACITY_BYTES = 40
MAX_BLOCKS = 12
LARGEST = 8
KEYSPACES = ["a" * 32, "b" * 32, "c" * 32]

keys = st.builds(
    lambda keyspace, number: key_of(keyspace, RESOLVED, 0, 0, bytes([number]) * 32),
    st.sampled_from(KEYSPACES),
    st.integers(0, 9),
)
bounds = st.builds(
    lambda limit, guaranteed, retention: EnforcedBudget(
        "disk", guaranteed_bytes=min(guaranteed, limit or 99), limit_bytes=limit, retention_s=retention
    ),
    st.none() | st.integers(0, 30),
    st.sampled_from([0, 0, 8, 12]),
    st.none() | st.integers(1, 20),
)


class FileIndexMachine(RuleBasedStateMachine):
    """Plays workers and housekeeper; `disk` is what is really there, by block, and `spares` what is there beside."""

    writing = Bundle("writing")
    reading = Bundle("reading")

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0
        self.disk: dict[bytes, int] = {}
        self.spares: dict[str, int] = {}
        self.spares_made = 0
        self.computed_s: dict[bytes, float] = {}
        self.to_remove: list[bytes] = []
        self.staged = dict.fromkeys(KEYSPACES, 0)
        self.readers: list[bytes] = []
        self.revision = 0
        self.policy: dict[str, EnforcedBudget] = {}
        self.index = FileIndex(
            Policy("disk", None),
            capacity_bytes=CAPACITY_BYTES,
            max_blocks=MAX_BLOCKS,
            clock=lambda: self.now_s,
        )

    @initialize(budgets=st.lists(bounds, min_size=3, max_size=3))
    def begin(self, budgets: list[EnforcedBudget]) -> None:
        self.change(dict(zip(KEYSPACES, budgets, strict=True)))

    @rule(chosen=st.dictionaries(st.sampled_from(KEYSPACES), bounds, min_size=1))
    def change(self, chosen: dict[str, EnforcedBudget]) -> None:
        self.revision += 1
        self.policy = chosen
        view = {name: (budget,) for name, budget in chosen.items()}
        self.index.follow(CacheView(DOMAIN, self.revision, 1, Rules(stale_after_s=30), view))

    @rule(target=writing, key=keys, size=st.integers(1, LARGEST), age_s=st.sampled_from([0.0, 0.0, 5.0]))
    def admit(self, key: bytes, size: int, age_s: float) -> Any:
        # What is about to be written counts as held, as in the server's own memory.
        held = {name: self.held(name) + self.staged[name] for name in KEYSPACES}
        admitted = self.index.admit(key, size, age_s)
        if not isinstance(admitted, Reservation):
            return None
        for victim, (cause, freed, _) in admitted.victims.items():
            assert self.disk[victim] == freed
            assert victim not in self.readers, "a block that is being read makes no room"
            name = keyspace_of(victim)
            if cause is Cause.ROOM and name != keyspace_of(key):
                held[name] -= freed
                guaranteed = self.guaranteed(name)
                assert held[name] + LARGEST > guaranteed, "a guarantee is kept but for less than a block"
        self.to_remove += admitted.victims
        self.staged[keyspace_of(key)] += size
        return admitted

    @rule(reservation=consumes(writing), succeeds=st.booleans())
    def write(self, reservation: Any, succeeds: bool) -> None:
        if reservation is None:
            return
        self.staged[reservation.keyspace] -= reservation.size_bytes
        if not self.index.claim(reservation, 0.0):
            self.index.end(reservation, stored=False)
            return
        name = reservation.keyspace
        assert reservation.key not in self.disk
        if reservation.spare is not None:
            assert self.spares.pop(reservation.spare.name) == reservation.size_bytes
        self.disk[reservation.key] = reservation.size_bytes
        assert self.on_disk() <= CAPACITY_BYTES
        if (budget := self.policy.get(name)) is not None and budget.limit_bytes is not None:
            assert self.held(name) <= budget.limit_bytes
        if succeeds:
            self.computed_s[reservation.key] = reservation.computed_s
        else:
            del self.disk[reservation.key]
        self.index.end(reservation, stored=succeeds)

    @rule(blocks=st.lists(st.tuples(keys, st.integers(1, LARGEST)), min_size=4, max_size=12))
    def fill(self, blocks: list[tuple[bytes, int]]) -> None:
        """Store one after the other, so that there is something that has to make room."""
        for key, size in blocks:
            reservation = self.admit(key, size, 0.0)
            self.remove(20, "is removed")
            self.write(reservation, succeeds=True)

    @rule(count=st.integers(1, 20), how=st.sampled_from(["fails", "is removed", "becomes a spare"]))
    def remove(self, count: int, how: str) -> None:
        for key in self.to_remove[:count]:
            if how == "fails":
                self.index.stranded(key)
            elif how == "is removed":
                del self.disk[key]
                self.index.gone(key)
            else:
                self.spares_made += 1
                name = str(self.spares_made)
                self.spares[name] = self.disk.pop(key)
                self.index.gone(key, name)
        del self.to_remove[:count]
        if how == "fails":
            self.to_remove += self.index.take_stranded(100)

    @rule(but_bytes=st.integers(0, LARGEST), idle_s=st.sampled_from([0.0, 5.0]), removed=st.booleans())
    def remove_spares(self, but_bytes: int, idle_s: float, removed: bool) -> None:
        for spare in self.index.take_spares(but_bytes=but_bytes, idle_s=idle_s):
            assert self.spares[spare.name] == spare.size_bytes != but_bytes
            if removed:
                del self.spares[spare.name]
            self.index.spare_gone(spare, removed=removed)

    @rule(target=reading, key=keys)
    def begin_read(self, key: bytes) -> bytes | None:
        kept = self.index.begin_read(key)
        if kept is None:
            return None
        assert self.disk[key] == kept.size_bytes
        budget = self.policy[kept.keyspace]
        assert budget.retention_s is None or self.now_s - self.computed_s[key] < budget.retention_s
        self.readers.append(key)
        return key

    @rule(key=consumes(reading), damaged=st.booleans())
    def end_read(self, key: bytes | None, damaged: bool) -> None:
        if key is not None:
            self.readers.remove(key)
            self.index.end_read(key)
            if damaged and self.index.drop(key):
                self.to_remove.append(key)

    @rule(seconds=st.integers(1, 15))
    def wait(self, seconds: int) -> None:
        self.now_s += seconds

    @rule()
    def look(self) -> None:
        self.now_s += LOOK_S  # what was being read is looked at again after as long
        victims = self.index.due(10)
        assert not set(victims) & set(self.readers)
        self.to_remove += victims
        for name, budget in self.policy.items():
            idle = [
                key for key in self.disk if keyspace_of(key) == name and key not in (*self.readers, *self.to_remove)
            ]
            known = set(self.index.known(idle))
            if budget.retention_s is not None:
                assert all(self.now_s - self.computed_s[key] < budget.retention_s for key in idle if key in known)

    @rule(names=st.sets(st.sampled_from(KEYSPACES), min_size=1))
    def purge(self, names: set[str]) -> None:
        taken = self.index.take_unused(self.index.condemned(names))
        self.to_remove += taken
        left = {key for key in self.disk if keyspace_of(key) in names} - set(self.to_remove)
        assert left <= set(self.readers)

    @rule(asked=st.lists(keys, max_size=8))
    def look_up(self, asked: list[bytes]) -> None:
        for key, there in zip(asked, self.index.present(asked), strict=True):
            if there:
                assert key in self.disk
                assert keyspace_of(key) in self.policy

    @invariant()
    def accounts_are_right(self) -> None:
        assert self.index.used_bytes == self.on_disk() <= CAPACITY_BYTES
        assert len(self.index) <= MAX_BLOCKS
        told = {row.scope: row.used_bytes for row in self.index.usage("disk")}
        for name in self.policy:
            leaving = sum(self.disk[key] for key in set(self.to_remove) if keyspace_of(key) == name)
            assert told.get(name[:SCOPE_DIGITS], 0) == self.held(name) - leaving

    def on_disk(self) -> int:
        return sum(self.disk.values()) + sum(self.spares.values())

    def held(self, keyspace: str) -> int:
        return sum(size for key, size in self.disk.items() if keyspace_of(key) == keyspace)

    def guaranteed(self, keyspace: str) -> float:
        promised = sum(budget.guaranteed_bytes or 0 for budget in self.policy.values())
        share = min(1.0, CAPACITY_BYTES / promised) if promised else 1.0
        budget = self.policy.get(keyspace)
        return (budget.guaranteed_bytes or 0) * share if budget is not None else 0.0


TestFileIndex = FileIndexMachine.TestCase
TestFileIndex.settings = settings(max_examples=examples(60), stateful_step_count=40)


def test_a_file_is_not_written_before_what_has_to_go_for_it_is_removed() -> None:
    index = FileIndex(Policy("disk", None), capacity_bytes=100, max_blocks=99, clock=lambda: 0.0)
    budget = EnforcedBudget("disk", limit_bytes=10)
    index.follow(CacheView(DOMAIN, 1, 1, Rules(stale_after_s=30), {KEYSPACES[0]: (budget,)}))
    old, new = (key_of(KEYSPACES[0], RESOLVED, 0, 0, bytes([number]) * 32) for number in (1, 2))
    first = index.admit(old, 10, 0.0)
    assert isinstance(first, Reservation)
    assert index.claim(first, 0.0)
    index.end(first, stored=True)
    second = index.admit(new, 10, 0.0)
    assert isinstance(second, Reservation)
    assert list(second.victims) == [old]
    assert not index.claim(second, 0.0), "the limit holds on the disk, too"
    index.gone(old)
    assert index.claim(second, 0.0)


def test_many_blocks_go_in_steps_so_that_lookups_come_in_between() -> None:
    now_s = 0.0
    index = FileIndex(Policy("disk", None), capacity_bytes=10**6, max_blocks=10**6, clock=lambda: now_s)
    keyspace = KEYSPACES[0]

    def follow(revision: int, budget: EnforcedBudget) -> None:
        index.follow(CacheView(DOMAIN, revision, 1, Rules(stale_after_s=30), {keyspace: (budget,)}))

    def steps() -> list[int]:
        sizes = []
        while victims := index.due(10):
            for key in victims:
                index.gone(key)
            sizes.append(len(victims))
        return sizes

    numbers = range(3 * MOST_AT_ONCE + 10)
    follow(1, EnforcedBudget("disk"))
    index.found((key_of(keyspace, RESOLVED, 0, 0, number.to_bytes(32, "big")), 1, 0.0) for number in numbers)
    follow(2, EnforcedBudget("disk", limit_bytes=2 * MOST_AT_ONCE))
    assert steps() == [MOST_AT_ONCE, 10]
    follow(3, EnforcedBudget("disk", retention_s=10))
    now_s = 11.0
    assert steps() == [MOST_AT_ONCE, MOST_AT_ONCE]
    assert len(index) == 0
