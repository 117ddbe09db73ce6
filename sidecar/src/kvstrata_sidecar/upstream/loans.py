"""A pool's blocks, lent to its readers: one copy in memory, found under each reader's keyspace.

LMCache's keys contain the keyspace, so a reader's lookup of a pool's chunk is a miss. Before it is answered, an entry
with the pool's own memory is put under the reader's key: a *loan*, which its last read frees, like a block loaded for
one request. The memory is freed when the table has neither the pool's own entry, the *lender*, nor any loan of it.

Loans count for no budget, retention or purge: these apply to the lender, which is locked while it is lent.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvstrata_sidecar.adapter.memory.lending import Lending


@dataclass(slots=True, eq=False)
class Lent:
    """A pool's block that was lent: the lender's key and entry, and its loans by reader's key."""

    key: Any
    entry: Any
    loans: dict[Any, Loan] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Loan:
    """One reader's entry. `holds` are its locks on the lender, which expire at `held_until_s`."""

    entry: Any
    lent: Lent
    holds: int = 0
    held_until_s: float = 0.0


class Loans:
    """The loans in the table of one L1Manager, from `begin` to `close`; without any before."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._lock = threading.Lock()
        self._loans: dict[Any, Loan] = {}
        self._by_memory: dict[int, Lent] = {}
        self._kept_back: dict[int, Lent] = {}

    def begin(
        self, lending: Lending, *, entry_of: Callable[[Any], Any], missing: object, clock: Callable[[], float]
    ) -> None:
        """Start lending. `entry_of` and `missing` are as in `v0_5_6.server`."""
        self._lending = lending
        self._entry_of = entry_of
        self._missing = missing
        self._clock = clock
        self._reserve_read: Callable[..., dict[Any, Any]] = self._manager.reserve_read
        self._manager.reserve_read = self.reserve_read

    def __len__(self) -> int:
        return len(self._loans)

    def close(self) -> list[Any]:
        """Stop lending; remove loans from LMCache's table, which would free memory twice. Returns unowned memory."""
        self._manager.__dict__.pop("reserve_read", None)
        with self._manager._lock, self._lock:
            for key, loan in self._loans.items():
                if self._manager._objects.get(key) is loan.entry:
                    del self._manager._objects[key]
            return [lent.entry.memory_obj for lent in list(self._by_memory.values()) if not self._is_owned(lent)]

    def lender(self, key: Hashable) -> Any:
        """Return the key of the pool's block lent under `key`, or `key` if none is."""
        loan = self._loans.get(key)
        return key if loan is None else loan.lent.key

    def has(self, key: Hashable, entry: object) -> bool:
        """Whether an entry of LMCache's table is a loan."""
        loan = self._loans.get(key)
        return loan is not None and loan.entry is entry

    def reserve_read(self, keys: Sequence[Any], read_locks: int | None = None) -> dict[Any, Any]:
        """Replaces LMCache's function. Lookups for requests pass `read_locks`; its store loop does not: no loans."""
        if read_locks is None:
            return self._reserve_without({key for key in keys if key in self._loans}, keys)
        denied = self._lending.withheld(keys)
        withheld, guarded = self._lend_all([key for key in keys if key not in denied] if denied else keys)
        try:
            with self._lending.unlockable([key for key in keys if key not in denied] if denied else keys) as beyond:
                return self._reserve_without(withheld | denied | beyond, keys, read_locks)
        finally:
            for loan in guarded:
                loan.entry.read_lock.unlock()

    def adopt(self, key: Any, keyspace: str | None) -> Any:
        """Turn a block loaded under a reader's key into its pool's block, lent to that reader; return its key, or None
        if the pool has one already, or without `keyspace`: then the block goes with the reader's request. Called under
        LMCache's lock, while the reader has it locked."""
        with self._lock:
            objects = self._manager._objects
            entry = objects.get(key)
            if entry is None or self.has(key, entry):
                return None
            entry.is_temporary = True
            lender_key = None if keyspace is None else replace(key, cache_salt=keyspace)
            if lender_key is None or lender_key in objects:
                return None
            lender = self._entry_of(entry.memory_obj)
            lender.is_temporary = False
            objects[lender_key] = lender
            lent = self._by_memory[id(entry.memory_obj)] = Lent(lender_key, lender)
            loan = self._loans[key] = lent.loans[key] = Loan(entry, lent)
            self._hold(loan, self._clock())
            return lender_key

    def frees(self, memory_object: Any) -> bool:
        """Whether memory that LMCache frees is in its table under no other key. Called under LMCache's lock."""
        lent = self._by_memory.get(id(memory_object))
        if lent is None:
            return True
        with self._lock:
            owned = self._is_owned(lent)
            if owned:
                self._kept_back[id(memory_object)] = lent
            return not owned

    def overdue(self) -> tuple[list[Any], list[Any]]:
        """Return the keys of unread loans, and memory without an owner, freed before it left LMCache's table."""
        if not self._loans and not self._kept_back:
            return [], []
        with self._manager._lock, self._lock:
            unread = [key for key, loan in self._loans.items() if not loan.entry.read_lock.is_locked()]
            kept_back, self._kept_back = self._kept_back, {}
            return unread, [lent.entry.memory_obj for lent in kept_back.values() if not self._is_owned(lent)]

    def outliving(self) -> list[tuple[Any, Any]]:
        """Return lent blocks, as (key, entry), whose lender left LMCache's table; the last loan ends them."""
        with self._manager._lock, self._lock:
            lent, objects = self._by_memory.values(), self._manager._objects
            return [(one.key, one.entry) for one in lent if objects.get(one.key) is not one.entry]

    def _reserve_without(self, withheld: set[Any], keys: Sequence[Any], *read_locks: int) -> dict[Any, Any]:
        found = self._reserve_read([key for key in keys if key not in withheld] if withheld else keys, *read_locks)
        return found | dict.fromkeys(withheld, self._missing)

    def _lend_all(self, keys: Iterable[Any]) -> tuple[set[Any], list[Loan]]:
        """Lend blocks that the keys' readers may read and lack. Return the keys whose loan may not be read now, and the
        readable loans, locked until the lookup: another request of the reader may end its own reading meanwhile."""
        asked = [(key, lenders) for key in keys if (lenders := self._lending.lenders(key)) or key in self._loans]
        withheld: set[Any] = set()
        guarded: list[Loan] = []
        if not asked:
            return withheld, guarded
        with self._manager._lock, self._lock:
            objects, now_s = self._manager._objects, self._clock()
            for key, lenders in asked:
                loan = self._loans.get(key)
                if loan is None or objects.get(key) is not loan.entry:
                    loan = self._lend(key, lenders) if key not in objects else None
                elif not self._may_go_on(loan.lent, lenders):
                    withheld.add(key)
                    continue
                if loan is not None:
                    self._hold(loan, now_s)
                    loan.entry.read_lock.lock()
                    guarded.append(loan)
        return withheld, guarded

    def _may_go_on(self, lent: Lent, lenders: Sequence[str]) -> bool:
        """Whether a loan may be read again. Overlapping readers would otherwise keep a block forever."""
        there = self._manager._objects.get(lent.key) is lent.entry
        return there and lent.key.cache_salt in lenders and self._lending.lendable(lent.key)

    def _lend(self, key: Any, lenders: Sequence[str]) -> Loan | None:
        objects = self._manager._objects
        for keyspace in lenders:
            lender_key = replace(key, cache_salt=keyspace)
            lender = objects.get(lender_key)
            if lender is None or lender.is_temporary or not self._lending.lendable(lender_key):
                continue
            memory_object = lender.memory_obj
            lent = self._by_memory.setdefault(id(memory_object), Lent(lender_key, lender))
            loan = Loan(self._entry_of(memory_object), lent)
            objects[key] = loan.entry
            self._loans[key] = lent.loans[key] = loan
            self._lending.lent(key, int(memory_object.get_physical_size()))
            return loan
        return None

    def _hold(self, loan: Loan, now_s: float) -> None:
        """Lock the lender for as long as LMCache locks the loan, however often that is renewed."""
        loan.lent.entry.read_lock.lock()
        # Expired locks are gone: LMCache counts from one again.
        loan.holds = loan.holds + 1 if now_s < loan.held_until_s else 1
        loan.held_until_s = now_s + self._manager._read_ttl_seconds

    def _is_owned(self, lent: Lent) -> bool:
        """Remove loans that left the table; return whether the lender or another loan remains."""
        objects, now_s = self._manager._objects, self._clock()
        for key, loan in list(lent.loans.items()):
            if objects.get(key) is loan.entry:
                continue
            del lent.loans[key]
            if self._loans.get(key) is loan:
                del self._loans[key]
            # One unlock too many would release another reader's lock.
            for _ in range(loan.holds if now_s < loan.held_until_s else 0):
                lent.entry.read_lock.unlock()
            self._lending.returned(lent.key)
        if lent.loans or objects.get(lent.key) is lent.entry:
            return True
        self._by_memory.pop(id(lent.entry.memory_obj), None)
        return False
