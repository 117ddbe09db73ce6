"""Loans of a pool's blocks whatever happens in whatever order, with a stand-in for LMCache's manager."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstrata.contract.policy.bundle import EnforcedBudget
from tests.adapter.memory_readers import CHUNKS, P, content, found, from_the_pool
from tests.adapter.memory_server import TIER, A, B, Server
from tests.adapter.memory_stand_in import BLOCK_BYTES, READ_TTL_S, Key, MemoryObject, marker
from tests.support.amounts import examples


class LendingMachine(RuleBasedStateMachine):
    """Readers, a pool that comes and goes, locks that run out, and whoever deletes: in any order."""

    keys = st.integers(0, CHUNKS - 1)
    readers = st.sampled_from([A, B])

    def __init__(self) -> None:
        super().__init__()
        self.server = Server(blocks=12)
        self.server.allow(a=None, b=None, p=None)
        self.server.share("p", "ab", range(CHUNKS))
        self.reading: list[tuple[Key, MemoryObject, bytes, float]] = []

    def teardown(self) -> None:
        for key, _, _, _ in self.reading:
            self.server.manager.finish_read([key])
        self.server.now_s += 2 * READ_TTL_S
        self.server.allow()
        for _ in range(3):
            self.server.now_s += 2
            self.server.turn()
        assert self.server.resident() == []
        assert self.server.free_blocks() == self.server.blocks
        assert not any(self.server.manager._memory_manager.buffer.raw)
        assert self.server.pool.loans._by_memory == {}, "nothing is remembered of what is gone"
        self.server.close()

    @rule(number=keys)
    def the_warmer_stores(self, number: int) -> None:
        if Key(P, number) not in self.server.manager._objects:
            self.server.manager.store(Key(P, number))

    @rule(reader=readers, number=keys)
    def a_reader_stores(self, reader: str, number: int) -> None:
        if Key(reader, number) not in self.server.manager._objects:
            self.server.manager.store(Key(reader, number))

    @rule(reader=readers, number=keys)
    def a_reader_asks(self, reader: str, number: int) -> None:
        key = Key(reader, number)
        (memory,) = found(self.server, key)
        if memory is not None:
            self.reading.append((key, memory, content(memory), self.server.now_s))

    @rule(reader=readers, number=keys)
    def another_tier_loads_it_for_a_reader(self, reader: str, number: int) -> None:
        key = Key(reader, number)
        if key not in self.server.manager._objects:
            self.server.manager.load(key, like=Key(P, number), filled=from_the_pool(self.server))
            memory = self.server.manager._objects[key].memory_obj
            self.reading.append((key, memory, content(memory), self.server.now_s))

    @rule(reader=readers, number=keys)
    def a_load_from_the_pool_ends_in_vain(self, reader: str, number: int) -> None:
        self.server.manager.load_in_vain(Key(reader, number), filled=from_the_pool(self.server))

    @rule(reader=readers, number=keys)
    def another_tier_loads_a_readers_own(self, reader: str, number: int) -> None:
        key = Key(reader, number)
        if key not in self.server.manager._objects:
            self.server.manager.load(
                key, filled=lambda key, view: self.server.memory.borrowed.loaded(key, key.cache_salt, view)
            )
            memory = self.server.manager._objects[key].memory_obj
            self.reading.append((key, memory, content(memory), self.server.now_s))

    @precondition(lambda self: self.reading)
    @rule(which=st.integers(0, 99))
    def a_reader_ends(self, which: int) -> None:
        key, _, _, _ = self.reading.pop(which % len(self.reading))
        self.server.manager.finish_read([key])

    @rule(seconds=st.sampled_from([0.5, 2.0, 150.0, 300.0]))
    def time_passes(self, seconds: float) -> None:
        self.server.now_s += seconds
        # Whoever reads for longer than its lock lasts cannot be kept from reading what is somebody else's.
        self.reading = [one for one in self.reading if self.server.now_s < one[3] + READ_TTL_S]

    @rule(readers=st.sampled_from(["", "a", "ab"]), number=keys)
    def the_pool_changes(self, readers: str, number: int) -> None:
        self.server.share("p", readers, range(number + 1))

    @rule(pool=st.booleans())
    def the_policy_changes(self, pool: bool) -> None:
        self.server.allow(a=None, b=EnforcedBudget(TIER, limit_bytes=BLOCK_BYTES), **({"p": None} if pool else {}))

    @rule(number=keys)
    def somebody_deletes(self, number: int) -> None:
        self.server.manager.delete([Key(P, number), Key(A, number)])

    @rule(number=keys)
    def somebody_forces_the_pools_block_out(self, number: int) -> None:
        self.server.manager.delete([Key(P, number)], force=True)

    @rule()
    def somebody_erases(self) -> None:
        self.server.erase(P)

    @rule()
    def the_policy_is_enforced(self) -> None:
        self.server.turn()

    @invariant()
    def who_reads_sees_what_was_there_when_he_asked(self) -> None:
        assert self.server.pool.scrubber.flush(10)
        for _, memory, before, _ in self.reading:
            assert content(memory) == before

    @invariant()
    def every_block_holds_its_own_or_its_pools_bytes(self) -> None:
        loans = self.server.pool.loans
        for key, entry in self.server.manager._objects.items():
            whose = loans.lender(key) if loans.has(key, entry) else key
            # What a tier loaded for a reader while the pool had its own is the reader's until it has read it.
            own = {marker(whose)} | ({marker(Key(P, key.number))} if entry.is_temporary else set())
            assert any(content(entry.memory_obj).startswith(one) for one in own)

    @invariant()
    def a_pools_block_is_locked_while_it_is_lent(self) -> None:
        loans = self.server.pool.loans
        locked: Counter[int] = Counter()
        for key, entry in self.server.manager._objects.items():
            if loans.has(key, entry) and entry.read_lock.is_locked():
                locked[id(entry.memory_obj)] += 1
        for key, entry in self.server.manager._objects.items():
            if key.cache_salt == P and locked[id(entry.memory_obj)]:
                assert entry.read_lock.is_locked()


TestAnyOrder = LendingMachine.TestCase
TestAnyOrder.settings = settings(max_examples=examples(120), stateful_step_count=40)
