"""Takes capacity back: from keyspaces in no policy first, then from borrowers when guarantees need it.

Departed: a keyspace leaves the policy whenever its tenant's epoch changes. Its guarantee ends at once, and so does the
part of its grant that its blocks do not take: otherwise frequent epoch changes would hold a whole tier for a quarter of
an hour. The last pod to see the new policy decides.

Unlisted: no reader can use blocks of a keyspace in no policy. When a tier has little left to lend, one pod walks over
the grants of all scopes, finds those that no sweep has renewed, and takes back until enough is free: expired and unused
bytes first, then each bucket's least recently used blocks. A keyspace that returned to a policy meanwhile has a later
change and is left alone.

Borrowers: a tier is overcommitted when a policy guarantees more than is left, or lost grants are charged again. The
holder of the claim has the largest borrowers give back, down to one level, until every guarantee is covered. Two
holders at once cost cached blocks, no more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from functools import partial

from kvstrata.contract.store.redis_keys import capacity_claim_key
from kvstrata_sidecar.adapter.redis.budget.capacity import DEPARTED_GRACE_MS, FREE_SHARE, UnlistedScope
from kvstrata_sidecar.adapter.redis.budget.ledger import Ledgers
from kvstrata_sidecar.adapter.redis.client.commands import claim, read_number
from kvstrata_sidecar.adapter.redis.client.resp import Command, Transport
from kvstrata_sidecar.adapter.redis.deps import TierDeps
from kvstrata_sidecar.adapter.redis.sweep.scopes import PolicyChanges, expire
from kvstrata_sidecar.adapter.redis.sweep.sweeper import Deadline, SweeperConnection

CLAIM_S = 5.0
HELD_S = 4.0
"""Time that a process relies on its claim to borrowers; a step that begins within it ends within the rest of the
claim."""

PATIENCE_S = 60.0
"""Time that loans are taken back after an excess was seen."""

IN_VAIN_S = 15.0
"""Pause of all pods after a walk that did not find enough."""

IN_VAIN = b"-"


class UnlistedScopes:
    """Takes capacity back from scopes that no policy names, when asked to."""

    def __init__(self, deps: TierDeps) -> None:
        self._deps = deps
        # Separate: evictions of these scopes count for no scope.
        self._ledgers = Ledgers(deps.params.domain, self._count, deps.clock, deps.ledgers.window_ms)
        self._key = capacity_claim_key(deps.params.domain, "d").encode()
        self._wanted = False
        self._walking = False
        self._cursor: int | None = None
        self._found: deque[UnlistedScope] = deque()
        self.rest_until_s = 0.0

    def request(self) -> None:
        """Record that capacity may be short."""
        self._wanted = self._wanted or self._deps.clock() >= self.rest_until_s

    def make_room(self, connection: SweeperConnection, deadline: Deadline, capacity_bytes: int) -> bool:
        """Take back until a part of the capacity is free; return whether no more can be taken for now."""
        capacity = self._ledgers.capacity
        if self._wanted and not self._deps.enforcement.serves():
            # Policies of other pods may be stale, too, and then no pod renews their scopes.
            self._rest(DEPARTED_GRACE_MS / 1000)
        while self._wanted and not deadline.is_interrupted():
            missing = capacity_bytes // FREE_SHARE - capacity.free(connection.transport(), capacity_bytes)
            if missing <= 0:
                self._end(connection.transport())
            elif not self._walking:
                if not self._begin(connection.transport()):
                    break
            elif self._found:
                scope = self._found.popleft()
                connection.attempt(scope.keyspace, partial(self._take, scope=scope, missing=missing), listed=False)
            elif self._cursor is not None:
                self._step(connection.transport())
            else:
                self._end(connection.transport())
                claim(connection.transport(), self._key, IN_VAIN, int(IN_VAIN_S * 1000))
                self._rest(IN_VAIN_S)
        return not self._wanted

    def _begin(self, transport: Transport) -> bool:
        """Claim the walk; rest if another's just found too little. Return whether this process has the claim."""
        if claim(transport, self._key, self._deps.token, int(CLAIM_S * 1000)):
            self._walking, self._cursor = True, 0
            return True
        if transport.ask([Command(self._key, (b"GET", self._key))]) == [IN_VAIN]:
            self._rest(IN_VAIN_S)
        return False

    def _step(self, transport: Transport) -> None:
        following, found = self._ledgers.capacity.unlisted(transport, self._cursor or 0)
        self._cursor = following or None
        self._found.extend(one for one in found if one.keyspace not in self._deps.listed())

    def _take(self, transport: Transport, keyspace: str, scope: UnlistedScope, missing: int) -> None:
        ledger = self._ledgers.of(transport, keyspace)
        expired, _ = expire(transport, ledger.view().leasing())
        self._deps.counters.add("expired", expired)
        ledger.release(scope, missing)

    def _end(self, transport: Transport) -> None:
        """Stop, and give up the claim."""
        if self._walking:
            transport.ask([Command(self._key, (b"UNLINK", self._key), read_number)])
        self._wanted = self._walking = False
        self._cursor = None
        self._found.clear()

    def _rest(self, seconds: float) -> None:
        self._wanted, self.rest_until_s = False, self._deps.clock() + seconds

    def _count(self, name: str, amount: int, _: str) -> None:
        self._deps.counters.add(f"departed_{name}" if name.startswith("evicted") else name, amount)


class ReclaimCapacity:
    """The job of a tier whose capacity is divided. Once an interval it also corrects the sum of all charges."""

    def __init__(self, deps: TierDeps, changes: PolicyChanges) -> None:
        self._deps = deps
        self._changes = changes
        self._capacity_bytes = 0
        self._tidy_key = capacity_claim_key(deps.params.domain, "w").encode()
        self._key = capacity_claim_key(deps.params.domain, "g").encode()
        self._until_s = self._look_at_s = self._held_until_s = 0.0
        self._in_vain: set[str] = set()
        self.unlisted = UnlistedScopes(deps)
        self.due_s = 0.0

    def request(self) -> None:
        """Record that guarantees or the capacity changed, or that the tier is overcommitted."""
        self._until_s = self._deps.clock() + PATIENCE_S
        self._in_vain.clear()
        self.unlisted.request()

    def run(self, connection: SweeperConnection, deadline: Deadline) -> bool:
        deps, changes, capacity = self._deps, self._changes, self._deps.ledgers.capacity
        if (capacity_bytes := deps.terms.capacity_bytes) is None:
            return False
        if capacity_bytes != self._capacity_bytes:
            self._capacity_bytes = capacity_bytes
            self.request()
        for keyspace in [*changes.departed]:
            if deadline.is_interrupted():
                break
            if not connection.attempt(keyspace, self._release, listed=False):
                changes.released(keyspace)
        if changes.take_guarantees_changed():
            self.request()
        if deps.clock() >= self.due_s:
            self.due_s = deps.next_round_s()
            self.unlisted.request()
            if claim(connection.transport(), self._tidy_key, deps.token, deps.claim_ms):
                deps.counters.add("drift_rooms", abs(capacity.tidy(connection.transport())))
        if capacity.take_short():
            self.unlisted.request()
        done = self.unlisted.make_room(connection, deadline, capacity_bytes)
        if done and self._look_at_s <= deps.clock() < self._until_s:
            self._take_back(connection, deadline)
        return False

    def _release(self, transport: Transport, keyspace: str) -> None:
        self._deps.ledgers.of(transport, keyspace).release()

    def _take_back(self, connection: SweeperConnection, deadline: Deadline) -> None:
        """Have the largest borrowers give back until the tier is not overcommitted."""
        excess = self._excess(connection.transport())
        lent = self._lent(connection.transport()) if excess > 0 else {}
        if not lent:
            self._until_s = 0.0
            return
        if not self._claimed(connection.transport()):
            self._look_at_s = self._deps.clock() + CLAIM_S
            return
        for keyspace, amount in parts(lent, excess):
            if deadline.is_interrupted() or excess <= 0:
                break
            connection.attempt(keyspace, partial(self._give_back, amount=amount))
            before, excess = excess, self._excess(connection.transport())
            if excess >= before:
                # For example, its server is unreachable: others have to give more.
                self._in_vain.add(keyspace)

    def _excess(self, transport: Transport) -> int:
        return -self._deps.ledgers.capacity.free(transport, self._capacity_bytes)

    def _lent(self, transport: Transport) -> dict[str, int]:
        """Return the bytes that scopes of the policy have beyond their guarantees, without those that have none."""
        bounds = {name: self._deps.terms.bounds(name) for name in self._deps.listed() if name not in self._in_vain}
        kept = {name: one.kept_bytes for name, one in bounds.items() if one is not None}
        granted = self._deps.ledgers.capacity.granted(transport, kept)
        return {name: size - kept[name] for name, size in granted.items() if size > kept[name]}

    def _give_back(self, transport: Transport, keyspace: str, amount: int) -> None:
        self._deps.ledgers.of(transport, keyspace, self._deps.terms.bounds(keyspace)).give_back(amount)

    def _claimed(self, transport: Transport) -> bool:
        now_s = self._deps.clock()
        if now_s >= self._held_until_s and claim(transport, self._key, self._deps.token, int(CLAIM_S * 1000)):
            self._held_until_s = now_s + HELD_S
        return now_s < self._held_until_s


def parts(lent: Mapping[str, int], excess: int) -> list[tuple[str, int]]:
    """Return the bytes that each borrower gives back, largest first: all are cut down to one level."""
    ordered = sorted(lent.items(), key=lambda one: -one[1])
    total = 0
    for number, (_, size) in enumerate(ordered, 1):
        total += size
        following = ordered[number][1] if number < len(ordered) else 0
        if total - number * following >= excess:
            level = (total - excess) // number
            return [(keyspace, one - level) for keyspace, one in ordered[:number] if one > level]
    return ordered
