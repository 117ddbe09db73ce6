"""Tenants, groups and pools whose policies change while they are asked for what others have.

A `Play` knows at every moment what is in force and who may find what, and draws pairs of lookups from that: one that
must hit now, and one by somebody else that must miss. What a change touches counts for nobody until it is acknowledged.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum

from kvstrata.contract.policy.bundle import EnforcedBudget, Entry
from kvstrata.contract.policy.data_key import DataKey
from kvstrata.contract.policy.keyspace import DOMAIN_KEY_BYTES, Scope, ScopeKind, derive_keyspace
from kvstrata.contract.policy.pools import PoolState, PoolVersion

TIERS = ("dram", "disk", "shared")
KEPT = 32
"""How many keyspaces of former epochs are asked for."""


class Fault(Enum):
    """A policy that is wrong: what a play says of it is not what it puts in force."""

    ONE_KEYSPACE = "two tenants have one keyspace"
    FORMER_EPOCH = "a former epoch stays in force"
    FORMER_READER = "who was taken off a pool's list still reads it"


@dataclass(frozen=True)
class Caller:
    """A tenant: whose scope it is in, the pools that it reads, and the tiers that it is kept off."""

    name: str
    scope: Scope
    pools: frozenset[str] = frozenset()
    denied: frozenset[str] = frozenset()


def tenant(name: str, *, pools: Iterable[str] = (), denied: Iterable[str] = ()) -> Caller:
    """A tenant that shares with nobody."""
    return Caller(name, Scope(ScopeKind.TENANT, name), frozenset(pools), frozenset(denied))


def member(name: str, group: str, **fields: frozenset[str]) -> Caller:
    """A tenant that shares with a group."""
    return Caller(name, Scope(ScopeKind.GROUP, group), **fields)


def pool(name: str) -> Scope:
    """The scope of a pool."""
    return Scope(ScopeKind.POOL, name)


@dataclass(frozen=True)
class Cast:
    """Who is who at one moment. `pools` has those that are there, and whether they may be read."""

    key: bytes
    """The domain's."""
    callers: Mapping[str, Caller]
    pools: Mapping[str, bool]
    epochs: Mapping[Scope, int] = field(default_factory=dict)

    def space(self, scope: Scope) -> str:
        """A scope's keyspace."""
        return derive_keyspace(self.key, scope, f"{self.epochs.get(scope, 0):032x}")

    def scopes(self) -> set[Scope]:
        """Whoever may store something now."""
        return {one.scope for one in self.callers.values()} | {pool(name) for name in self.pools}

    def readers(self, scope: Scope) -> list[Caller]:
        """Whoever has to find what a scope has stored."""
        if scope.kind is ScopeKind.POOL:
            return [one for one in self.callers.values() if scope.name in one.pools and self.pools.get(scope.name)]
        return [one for one in self.callers.values() if one.scope == scope]

    def rolled(self, scope: Scope) -> Cast:
        """The same with a new epoch of a scope."""
        return replace(self, epochs={**self.epochs, scope: self.epochs.get(scope, 0) + 1})

    def having(self, caller: Caller) -> Cast:
        """The same with a tenant whose policy is another."""
        return replace(self, callers={**self.callers, caller.name: caller})


def opening(key: bytes) -> Cast:
    """Tenants that stay as they are, in each tier at least one, and those that something happens to."""
    standing, listed = frozenset({"standing"}), frozenset({"standing", "visiting"})
    callers = [
        tenant("everywhere", pools=listed), tenant("not-in-redis", denied=["shared"]),
        tenant("not-on-disk", denied=["disk"]), tenant("plain"),
        member("ann", "lab", pools=standing), member("bob", "lab", pools=standing),
        member("cid", "club"), member("dan", "crew"), member("eve", "crew"),
        tenant("rolled"), tenant("joiner"), tenant("reader", pools=standing),
        tenant("off-disk"), tenant("off-redis"), tenant("other"),
    ]  # fmt: skip
    return Cast(key, {one.name: one for one in callers}, {"standing": False, "visiting": False})


Move = tuple[Cast, frozenset[Scope]]
"""What comes next, and the scopes that it touches."""


def moves(chance: random.Random) -> dict[str, Callable[[Cast], Move]]:
    """Return what may happen, by name; each returns what comes next."""

    def roll(scope: Scope) -> Callable[[Cast], Move]:
        return lambda cast: (cast.rolled(scope), frozenset({scope}))

    def join_or_leave(cast: Cast) -> Move:
        joiner, own = cast.callers["joiner"], Scope(ScopeKind.TENANT, "joiner")
        if joiner.scope == own:
            group = Scope(ScopeKind.GROUP, chance.choice(("club", "crew")))
            return cast.having(replace(joiner, scope=group)), frozenset({own})
        return cast.having(replace(joiner, scope=own)).rolled(own), frozenset({own})

    def list_or_strike(cast: Cast) -> Move:
        reader = cast.callers["reader"]
        return cast.having(replace(reader, pools=reader.pools ^ {"standing"})), frozenset({reader.scope})

    def come_or_go(cast: Cast) -> Move:
        scope = pool("visiting")
        if "visiting" in cast.pools:
            rest = {name: read for name, read in cast.pools.items() if name != "visiting"}
            return replace(cast, pools=rest), frozenset({scope})
        return replace(cast, pools={**cast.pools, "visiting": False}).rolled(scope), frozenset({scope})

    def deny_or_open(name: str, *tiers: str) -> Callable[[Cast], Move]:
        def other(cast: Cast) -> Move:
            caller = cast.callers[name]
            denied = frozenset() if caller.denied else frozenset({chance.choice(tiers)})
            return cast.having(replace(caller, denied=denied)), frozenset({caller.scope})

        return other

    return {
        "a tenant's epoch": roll(Scope(ScopeKind.TENANT, "rolled")),
        "a group's epoch": roll(Scope(ScopeKind.GROUP, "crew")),
        "a member": join_or_leave,
        "a pool's reader": list_or_strike,
        "a pool": come_or_go,
        "files": deny_or_open("off-disk", "disk"),
        "Redis": deny_or_open("off-redis", "shared"),
    }


@dataclass(frozen=True)
class Asked:
    """One lookup: somebody's keyspace, or nobody's any more, and whose prompt it is."""

    keyspace: str
    owner: Scope
    prompt: int


@dataclass(frozen=True)
class Pair:
    """A lookup that must hit and one that must miss, for the same prompt; `relies_on` has not to change meanwhile."""

    own: Asked
    other: Asked
    kind: str
    relies_on: Mapping[Scope, int]


class Play:
    """What is in force, what was, and what is stored: so many prompts of each scope.

    Pairs may be looked up, and `counts` be asked, while another thread is in the block of `change`; all else is for one
    thread.
    """

    def __init__(self, chance: random.Random, prompts: int = 0, fault: Fault | None = None) -> None:
        self.now = opening(chance.randbytes(DOMAIN_KEY_BYTES))
        self.moved = Counter[str]()
        self._prompts = prompts
        self._chance = chance
        self._fault = fault
        self._moves = moves(chance)
        self._next: list[str] = []
        self._begun = Counter[Scope]()
        """How many changes have begun that touch a scope."""
        self._stored: set[tuple[Scope, str]] = set()
        self._former: list[tuple[Scope, str]] = []
        self._were: set[tuple[str, Scope]] = set()
        """Who could find what a group or a pool has at some time."""
        self._remember()

    def entries(self, cast: Cast, keys: Callable[[str], tuple[DataKey, ...]] = lambda _: ()) -> list[Entry]:
        """The tenants of a policy as they are put in force; `keys` returns the data keys of a keyspace."""
        made = [
            Entry(
                one.name, self.space(cast, one.scope), one.scope, f"uid-{one.name}",
                budgets=tuple(EnforcedBudget.denying(name) for name in sorted(one.denied)),
                keys=keys(self.space(cast, one.scope)), pools=tuple(sorted(self._pools(one))),
            )
            for one in cast.callers.values()
        ]  # fmt: skip
        if self._fault is Fault.FORMER_EPOCH:
            made += [
                Entry(f"was-{number}", space, Scope(ScopeKind.TENANT, f"was-{number}"), "uid-was")
                for number, (scope, space) in enumerate(self._former)
                if scope.kind is not ScopeKind.POOL
            ]
        return made

    def versions(
        self,
        cast: Cast,
        hashes: Callable[[Scope], bytes],
        keys: Callable[[str], tuple[DataKey, ...]] = lambda _: (),
    ) -> dict[str, tuple[PoolVersion, ...]]:
        """The pools of a policy; `hashes` returns what a pool's chunks are named."""
        return {
            name: (
                PoolVersion(
                    cast.space(pool(name)), "r", PoolState.PUBLISHED if readable else PoolState.WARMING,
                    hashes(pool(name)), TIERS, keys=keys(cast.space(pool(name))),
                ),
            )
            for name, readable in cast.pools.items()
        }  # fmt: skip

    @contextmanager
    def change(self) -> Iterator[Cast]:
        """Have something happen, which the block puts in force; everything happens before something does again."""
        if not self._next:
            self._next = self._chance.sample(list(self._moves), len(self._moves))
        name = self._next.pop()
        cast, touched = self._moves[name](self.now)
        with self._changing(cast, touched):
            yield cast
        self.moved[name] += 1

    @contextmanager
    def publish(self) -> Iterator[Cast | None]:
        """Open a pool that is warm, None if there is none."""
        warm = [name for name, read in self.now.pools.items() if not read and self._has(self.now, pool(name))]
        if not warm:
            yield None
            return
        cast = replace(self.now, pools={**self.now.pools, **dict.fromkeys(warm, True)})
        with self._changing(cast, frozenset(map(pool, warm))):
            yield cast

    def missing(self) -> list[tuple[Scope, str]]:
        """Return whose prompts are not stored, and under which keyspace: of who has just come, or has a new epoch."""
        return [(one, self.space(self.now, one)) for one in sorted(self.now.scopes()) if not self._has(self.now, one)]

    def stored(self, scope: Scope, space: str) -> None:
        """Say that a scope's prompts are in all its tiers."""
        self._stored.add((scope, space))

    def tiers(self, scope: Scope) -> set[str]:
        """Where a scope's blocks are kept."""
        denied = {name for one in self.now.readers(scope) if one.scope == scope for name in one.denied}
        return set(TIERS) - denied

    def draw(self, count: int) -> list[Pair]:
        """Draw pairs for what is in force now; no two have the same prompt."""
        owners = [one for one in sorted(self.now.scopes()) if self._has(self.now, one)]
        prompts = [(one, number) for one in owners for number in range(self._prompts)]
        pairs = [self._pair(self.now, *prompt) for prompt in self._chance.sample(prompts, min(count, len(prompts)))]
        return [pair for pair in pairs if pair is not None]

    def kind(self, asks: Caller, owner: Scope) -> str:
        """Return who it is that must not find what a scope has."""
        if (asks.name, owner) in self._were:
            return f"Former {'reader' if owner.kind is ScopeKind.POOL else 'member'} / {owner.kind}"
        return f"{asks.scope.kind} / {owner.kind}"

    def begun(self, *scopes: Scope) -> dict[Scope, int]:
        """Return how many changes have begun that touch these scopes."""
        return {one: self._begun[one] for one in scopes}

    def counts(self, relies_on: Mapping[Scope, int]) -> bool:
        """Whether nothing that a pair relies on has changed since it was drawn, nor is about to."""
        return self.begun(*relies_on) == relies_on

    def _pair(self, cast: Cast, owner: Scope, prompt: int) -> Pair | None:
        readers = cast.readers(owner)
        if not readers:
            return None
        reader = self._chance.choice(readers)
        own = Asked(self.space(cast, reader.scope), owner, prompt)
        others = self._others(cast, owner)
        kind = self._chance.choice(sorted(others))
        keyspace, relied = self._chance.choice(others[kind])
        return Pair(own, Asked(keyspace, owner, prompt), kind, self.begun(owner, reader.scope, *relied))

    def _others(self, cast: Cast, owner: Scope) -> dict[str, list[tuple[str, tuple[Scope, ...]]]]:
        """Return who must not find what a scope has, by kind: a keyspace, and the scopes that this relies on."""
        found: dict[str, list[tuple[str, tuple[Scope, ...]]]] = {}
        may = {one.scope for one in cast.readers(owner)}
        for one in cast.callers.values():
            if one.scope in may:
                continue
            found.setdefault(self.kind(one, owner), []).append((self.space(cast, one.scope), (one.scope,)))
        for name in cast.pools:
            if pool(name) != owner:
                found.setdefault(f"Pool / {owner.kind}", []).append((cast.space(pool(name)), ()))
        for scope, space in self._former:
            if scope == owner:
                found.setdefault(f"Former epoch / {owner.kind}", []).append((space, ()))
        return found

    def space(self, cast: Cast, scope: Scope) -> str:
        """The keyspace that a scope has in force."""
        if self._fault is Fault.ONE_KEYSPACE and scope == Scope(ScopeKind.TENANT, "other"):
            return cast.space(Scope(ScopeKind.TENANT, "plain"))
        return cast.space(scope)

    def _has(self, cast: Cast, scope: Scope) -> bool:
        return (scope, self.space(cast, scope)) in self._stored

    @contextmanager
    def _changing(self, cast: Cast, touched: frozenset[Scope]) -> Iterator[None]:
        self._begun.update(touched)
        left = [
            (scope, self.space(self.now, scope))
            for scope in touched
            if self._has(self.now, scope)
            if scope not in cast.scopes() or cast.space(scope) != self.now.space(scope)
        ]
        former = [*dict.fromkeys(self._former + left)][-KEPT:]
        if self._fault is Fault.FORMER_EPOCH:
            self._former = former
        yield
        self.now, self._former = cast, former
        self._remember()

    def _remember(self) -> None:
        for scope in self.now.scopes():
            if scope.kind is not ScopeKind.TENANT:
                self._were |= {(one.name, scope) for one in self.now.readers(scope)}

    def _pools(self, caller: Caller) -> frozenset[str]:
        if self._fault is Fault.FORMER_READER and caller.name == "reader":
            return caller.pools | {"standing"}
        return caller.pools
