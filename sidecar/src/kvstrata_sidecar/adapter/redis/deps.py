"""State shared by the parts of one Redis tier: terms of the policy, revoked keyspaces, work for the sweeper."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

from kvstrata.contract.policy.tiers import TierRules
from kvstrata.contract.store.redis_keys import member_of, resolved, revoked_key
from kvstrata_sidecar.adapter.params import TierParams
from kvstrata_sidecar.adapter.policy.enforcement import Enforcement, Refusal
from kvstrata_sidecar.adapter.policy.limits import Bounds, SharedBounds, bounds_in
from kvstrata_sidecar.adapter.redis.budget.ledger import Ledgers
from kvstrata_sidecar.adapter.redis.client import commands as protocol
from kvstrata_sidecar.adapter.redis.client.commands import Place, Terms, call, read_number, state_key
from kvstrata_sidecar.adapter.redis.client.nodes import Topology
from kvstrata_sidecar.adapter.redis.client.resp import Command, Transport
from kvstrata_sidecar.adapter.redis.client.slots import Address
from kvstrata_sidecar.adapter.redis.recent import Recent
from kvstrata_sidecar.adapter.tier.interface import Block
from kvstrata_sidecar.adapter.tier.sealer import Sealer
from kvstrata_sidecar.adapter.tier.tasks import Deps

MAX_WAITING = 65_536
MEMBERS_PER_TOUCH = 500


class ScopeTerms:
    """Read at the last moment each time, because another policy may be in force. Thread-safe."""

    def __init__(self, tier: TierParams, enforcement: Enforcement) -> None:
        self._tier = tier
        self._enforcement = enforcement

    @property
    def servers(self) -> tuple[Address, ...]:
        """The addresses of the tier's servers; none while the policy does not name the tier."""
        rules = self._rules()
        return tuple(Address(one.host, one.port) for one in (self._tier.endpoints if rules is None else rules.servers))

    @property
    def capacity_bytes(self) -> int | None:
        """The capacity that scopes divide; None if they do not."""
        rules = self._rules()
        return self._tier.capacity_bytes if rules is None else rules.capacity_bytes

    def of(self, keyspace: str) -> Terms:
        bounds = self._bounds(keyspace)
        return Terms(
            life_ms=1000 * (self._tier.default_ttl_s if bounds.retention_s is None else bounds.retention_s),
            bounds=bounds.shared(self.capacity_bytes),
            encrypts=self._tier.encrypts,
        )

    def retention_ms(self, keyspace: str) -> int | None:
        """None means that neither the policy nor the tier has a retention."""
        return self._bounds(keyspace).retention_ms

    def bounds(self, keyspace: str) -> SharedBounds | None:
        """None means unbounded."""
        return self._bounds(keyspace).shared(self.capacity_bytes)

    def in_tier(self, bounds: Bounds) -> Bounds:
        """Return a scope's bounds with the tier's retention where the scope has none."""
        rules = self._rules()
        if rules is None or bounds.retention_s is not None:
            return bounds
        return replace(bounds, retention_s=rules.retention_s)

    def _bounds(self, keyspace: str) -> Bounds:
        view = self._enforcement.view
        if view is None:
            return Bounds()
        return self.in_tier(bounds_in(view.keyspaces.get(keyspace, ()), self._tier.name))

    def _rules(self) -> TierRules | None:
        view = self._enforcement.view
        return None if view is None or self._tier.endpoints else view.tier(self._tier.name)


class RevokedSet:
    """The keyspaces of a domain that a tier knows as revoked. Thread-safe.

    The set lives in the tier, so that a control plane restored from a backup cannot revive a keyspace. In a cluster one
    node has it. A keyspace is checked before its first use and with every sweep; while the node is away, checked ones
    stay usable and others are refused. A revocation holds while the policy has the keyspace, even if the set is lost.
    """

    def __init__(self, domain: str) -> None:
        self._key = revoked_key(domain).encode()
        self._lock = threading.Lock()
        self._cleared: set[str] = set()
        self.revoked: frozenset[str] = frozenset()

    def refusal(self, transport: Transport, keyspace: str) -> Refusal | None:
        """Return why a keyspace may not be used; asks the tier the first time. Raises as `transport.ask` does."""
        if keyspace in self.revoked:
            return Refusal.REVOKED
        if keyspace in self._cleared:
            return None
        revoked = self._ask(transport, [keyspace])
        with self._lock:
            self.revoked |= revoked
            if not revoked:
                self._cleared.add(keyspace)
        return Refusal.REVOKED if revoked else None

    def learn(self, transport: Transport, keyspaces: Collection[str]) -> None:
        """Ask about all keyspaces of the policy, and drop the others."""
        with self._lock:
            self._cleared.intersection_update(keyspaces)
        revoked = self._ask(transport, keyspaces)
        with self._lock:
            # Revoked keyspaces stay revoked, even if the node came back without the set.
            self.revoked = self.revoked.intersection(keyspaces) | revoked
            self._cleared = set(keyspaces) - self.revoked

    def forget(self) -> None:
        """Ask again about each keyspace before its next use: the tier has other servers."""
        with self._lock:
            self._cleared.clear()

    def _ask(self, transport: Transport, keyspaces: Iterable[str]) -> frozenset[str]:
        names = iter(keyspaces)
        revoked: list[str] = []
        while batch := list(islice(names, protocol.MEMBERS_PER_COMMAND)):
            arguments = (b"ZMSCORE", self._key, *(name.encode() for name in batch))
            ((*scores,),) = transport.ask([Command(self._key, arguments, protocol.reads_scores(len(batch)))])
            revoked += [name for name, score in zip(batch, scores, strict=True) if score is not None]
        return frozenset(revoked)


class Inbox:
    """Work that other threads leave for a tier's sweeper: touches of blocks, abandoned reservations, and scopes that
    must be swept before use. Thread-safe. `wake` is set when the policy changes or the tier is closed: then the present
    turn ends soon."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._touches: dict[Place, None] = {}
        self._abandoned: deque[tuple[Place, bytes]] = deque(maxlen=MAX_WAITING)
        self._urgent: dict[str, None] = {}
        self.wake = threading.Event()
        self.closed = False

    def touch(self, place: Place) -> None:
        """Record that a block was read; sent within about a second, once for all reads until then."""
        with self._lock:
            if len(self._touches) < MAX_WAITING:
                self._touches[place] = None

    def abandon(self, place: Place, token: bytes) -> None:
        """Record that the reservation of a failed store can be released."""
        with self._lock:
            self._abandoned.append((place, token))

    def urge(self, keyspace: str) -> None:
        """Sweep a scope soon: it cannot be used in its present state."""
        with self._lock:
            if len(self._urgent) < MAX_WAITING:
                self._urgent[keyspace] = None

    @property
    def is_urgent(self) -> bool:
        return bool(self._urgent)

    def interrupts(self) -> bool:
        """Whether work has come that goes before all other: a scope that must be swept, or another policy."""
        return self.is_urgent or self.wake.is_set()

    def take_urgent(self) -> Collection[str]:
        with self._lock:
            urgent, self._urgent = self._urgent, {}
        return urgent

    def take_commands(self) -> Iterator[tuple[str, Command]]:
        """Yield the commands for touches and abandoned reservations, with their keyspace."""
        with self._lock:
            touches, self._touches = self._touches, {}
            abandoned, self._abandoned = self._abandoned, deque(maxlen=MAX_WAITING)
        by_bucket: dict[tuple[str, bytes], list[bytes]] = {}
        for place in touches:
            by_bucket.setdefault((place.keyspace, state_key(place.base)), []).append(place.member)
        for (keyspace, state), members in by_bucket.items():
            for start in range(0, len(members), MEMBERS_PER_TOUCH):
                yield keyspace, call("touch", state, read_number, members=members[start : start + MEMBERS_PER_TOUCH])
        for place, token in abandoned:
            yield place.keyspace, call("abandon", state_key(place.base), read_number, member=place.member, token=token)


@dataclass(frozen=True, slots=True)
class TierDeps(Deps[TierParams, Place]):
    """`terms` are read at the last moment, because work may have waited. `sealer` returns the calling thread's own.
    `usage` has bytes and blocks of scopes when this process last swept them; once in `interval_s` it sweeps all.
    `written` has the hashes of places that this process wrote a block to, the last 65,536 of them; `unread` has blocks,
    by keyspace and member, that could not be read just now, as later versions write them. `token` names this process in
    claims and reservations, `jitter` returns a number from 0 to 1."""

    topology: Topology
    terms: ScopeTerms
    ledgers: Ledgers
    revoked: RevokedSet
    inbox: Inbox
    usage: Recent[str, tuple[int, int]]
    written: Recent[int, bool]
    unread: Recent[tuple[str, bytes], bool]
    sealer: Callable[[], Sealer]
    token: bytes
    interval_s: float
    clock: Callable[[], float]
    jitter: Callable[[], float]

    def member(self, block: Block) -> str:
        """Return the block's name in its bucket."""
        identity = resolved(self.params.identity, block.fingerprint)
        return member_of(identity, block.rank, block.group, block.chunk_hash)

    def keyspace_at(self, place: Place) -> str:
        return place.keyspace

    def refusal(self, keyspace: str, *, storing: bool = False) -> Refusal | None:  # noqa: ARG002
        refusal = self.enforcement.refusal(keyspace, tier=self.tier.name)
        if refusal is None and keyspace in self.revoked.revoked:
            return Refusal.REVOKED
        return self.sealer().refusal(keyspace) if refusal is None else refusal

    def refuse(self, keyspace: str, refusal: Refusal, amount: int = 1) -> None:
        """Count blocks that the tier may not be used for; urge a sweep if that can repair the scope."""
        self.counters.refuse(refusal, amount, keyspace)
        if refusal is Refusal.RETENTION:
            self.inbox.urge(keyspace)

    def listed(self) -> Collection[str]:
        """Return the keyspaces of the policy in force."""
        view = self.enforcement.view
        return view.keyspaces.keys() if view is not None else ()

    @property
    def claim_ms(self) -> int:
        """Life of a claim that keeps other pods from the same work for an interval."""
        return int(self.interval_s * 750)

    def next_round_s(self) -> float:
        """Return when work is due that was begun now and is done once an interval."""
        return self.clock() + self.interval_s * (0.8 + 0.4 * self.jitter())
