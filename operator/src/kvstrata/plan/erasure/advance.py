"""State transitions of an erasure: from an event to effects. `advance` is pure, and no other function decides them.

Facts are stored before any effect follows from them: while `known` has more facts than the stored `record`, the only
effect is to write it. So a new leader reads the same record and reaches the same effects, all of which may be repeated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime

from kvstrata.contract.store.redis_keys import parse_block_key
from kvstrata.model.erasure import evidence
from kvstrata.model.erasure.facts import Fact, ReceiptWritten, Verdict
from kvstrata.model.erasure.record import ErasureNow, ErasureRecord, Observed, StoredRecord, TierNow
from kvstrata.plan.erasure import orders
from kvstrata.plan.erasure.deletions import begun, running
from kvstrata.plan.erasure.next_step import ErasureStep, next_step

RETRY_S = 1.0
"""Pause after a failure, and between looks at a running Job."""

LOOK_AGAIN_S = 5.0
"""Pause before the custody of keys is asked again."""

SERVERS_EVERY_S = 5.0
SHORTEST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 15.0
"""The pause grows to this while nothing changes: an erasure may wait for days."""

MAX_NAMED = 64
"""Chunk names kept for each keyspace and tier."""


@dataclass(frozen=True, slots=True)
class Woken:
    """`facts` and `observed` are read from the present world."""

    facts: tuple[Fact, ...]
    observed: Observed


@dataclass(frozen=True, slots=True)
class OrderDone:
    """`names` of values were found in a tier. `problem` is why a running Job does not get on. The order is not repeated
    for `pause_s`, if given."""

    order: orders.Order
    facts: tuple[Fact, ...] = ()
    names: tuple[str, ...] = field(default=(), repr=False)
    servers: TierNow | None = None
    problem: str = ""
    pause_s: float = 0.0


@dataclass(frozen=True, slots=True)
class OrderFailed:
    """`problem` is empty for a defect. `refused`: by the custody of keys or the chain of receipts."""

    order: orders.Order
    problem: str
    refused: bool = False


Event = Woken | OrderDone | OrderFailed | StoredRecord


@dataclass(frozen=True, slots=True)
class Effects:
    """What to do, in this order. A record to `write` comes alone, and only that may fail. `show` is for plans."""

    write: ErasureRecord | None = None
    show: ErasureNow | None = None
    start: tuple[orders.Order, ...] = ()
    wake_after_s: float | None = None
    announce: Verdict | None = None


@dataclass(frozen=True, slots=True)
class ErasureState:
    """An erasure in the leading process.

    `record` is stored; `known` has the facts reported since, too. `running` orders are being executed.
    `pauses` have the start and the seconds of an order's pause before it is repeated. `problems` are results of orders
    that did not succeed, with whether the custody or the chain refused them. `strays` are names of values without an
    index that a look found, by tier. `shown` is the last published state, and `announced` whether the verdict was
    published.
    """

    stored: StoredRecord
    known: ErasureRecord
    observed: Observed
    running: frozenset[orders.Order] = frozenset()
    pauses: Mapping[orders.Order, tuple[datetime, float]] = field(default_factory=dict)
    problems: Mapping[orders.Order, tuple[str, bool]] = field(default_factory=dict)
    servers: Mapping[str, TierNow] = field(default_factory=dict)
    strays: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    shown: object = None
    announced: bool = False
    idle_s: float = SHORTEST_PAUSE_S

    @classmethod
    def of(cls, stored: StoredRecord, observed: Observed) -> ErasureState:
        """Return the state of a stored record. Its verdict, if any, was announced by the process that reached it."""
        announced = stored.record.erasure.only(Verdict) is not None
        return cls(stored, stored.record, observed, announced=announced)

    @property
    def record(self) -> ErasureRecord:
        return self.stored.record

    @property
    def over(self) -> bool:
        return self.shown is not None and self.record.erasure.only(ReceiptWritten) is not None


def advance(state: ErasureState, event: Event, now: datetime) -> tuple[ErasureState, Effects]:
    """Return the state after an event, and the effects to execute."""
    match event:
        case OrderDone():
            return _done(state, event, now), Effects()
        case OrderFailed():
            return _over(state, event.order, now, RETRY_S, event.problem, refused=event.refused), Effects()
        case Woken():
            observed, going = event.observed, event.observed.unattended and state.observed.unattended
            observed = replace(observed, unattended=going or observed.unattended)
            state = replace(state, known=state.known.with_facts(*event.facts), observed=observed)
        case StoredRecord(record):
            state = replace(state, stored=event, known=record.merged_with(state.known))
    state, effects = _follow(state, now)
    if state.known != state.record and effects != Effects(write=state.known):
        raise RuntimeError("something would follow from facts that are not stored")
    return state, effects


def _follow(state: ErasureState, now: datetime) -> tuple[ErasureState, Effects]:
    if state.known != state.record:
        return state, Effects(write=state.known)
    observed = _with_problems(state)
    # A chain that refused a receipt is tried again: it may have been repaired.
    step = next_step(state.record.erasure, replace(observed, receipt_problem=""), now)
    known = state.known.with_facts(*_concluded(state, step, now))
    if known is not state.known:
        return replace(state, known=known), Effects(write=known)
    wanted = tuple(_wanted(state, step))
    pauses = {order: state.pauses[order] for order in wanted if order in state.pauses}
    left_s = {order: max(0.0, pause_s - (now - since).total_seconds()) for order, (since, pause_s) in pauses.items()}
    due = tuple(order for order in wanted if order not in state.running and not left_s.get(order))
    problems = {order: reported for order, reported in state.problems.items() if order in {*wanted, *state.running}}
    troubles = tuple(sorted({text for text, refused in problems.values() if text and not refused}))
    erasure = ErasureNow(state.record, observed, troubles, step.pinned_tiers)
    news = (shown := (erasure, step.phase, step.decision)) != state.shown
    idle_s = SHORTEST_PAUSE_S if news else min(LONGEST_PAUSE_S, 2 * state.idle_s)
    # Some changes cause no wake-up.
    waits_s = [idle_s, *(rest_s for rest_s in (*left_s.values(), step.again_s) if rest_s)]
    verdict = state.record.erasure.only(Verdict)
    announced = None if state.announced else verdict
    effects = Effects(show=erasure if news else None, start=due, announce=announced, wake_after_s=min(waits_s))
    state = replace(state, running=state.running | set(due), pauses=pauses, problems=problems)
    return replace(state, shown=shown, announced=verdict is not None, idle_s=idle_s), effects


def _with_problems(state: ErasureState) -> Observed:
    refusals = {type(order): text for order, (text, refused) in state.problems.items() if refused}
    return replace(
        state.observed,
        tiers=state.servers,
        custody_problem=refusals.get(orders.RevokeKeys) or refusals.get(orders.DestroyKeys, ""),
        receipt_problem=refusals.get(orders.IssueReceipt, ""),
    )


def _concluded(state: ErasureState, step: ErasureStep, now: datetime) -> Iterator[Fact]:
    """Yield facts that follow from the step itself: a verdict, or deletions whose Jobs are to be created."""
    if step.verdict is not None:
        yield step.verdict
    named = {tier for tier in _emptied(step) if _is_named(state, tier)}
    yield from begun(state.record.erasure, named, state.servers, now)


def _emptied(step: ErasureStep) -> list[str]:
    return sorted({order.tier for order in step.orders if isinstance(order, orders.StartDeletion)})


def _is_named(state: ErasureState, tier: str) -> bool:
    """Whether names in a tier were noted before its deletion: chunks for probes, strays that a look found."""
    is_known = tier in state.strays or not evidence.found_again(state.record.erasure, tier)
    return tier in state.record.named_tiers and is_known


def _wanted(state: ErasureState, step: ErasureStep) -> Iterator[orders.Order]:
    erasure = state.record.erasure
    yield from (order for order in step.orders if not isinstance(order, orders.StartDeletion))
    yield from (orders.NameChunks(tier) for tier in _emptied(step) if not _is_named(state, tier))
    if erasure.only(Verdict) is not None:
        return
    yield from (orders.FollowDeletion(tier, round) for tier, round in running(erasure))
    if evidence.unreachable_at(erasure) is not None:
        yield from (orders.ReadServers(tier.name) for tier in evidence.tiers_at_hand(erasure))


def _done(state: ErasureState, event: OrderDone, now: datetime) -> ErasureState:
    order, known = event.order, state.known.with_facts(*event.facts)
    pause_s, servers, strays = event.pause_s, dict(state.servers), dict(state.strays)
    match order:
        case orders.ReadServers(tier) if event.servers is not None:
            found, before = event.servers, state.servers.get(tier)
            # Primaries that were read before stay known while servers are away.
            primaries = before.primaries if before and not found.reachable and not found.primaries else found.primaries
            servers[tier] = replace(found, primaries=primaries)
            pause_s = pause_s or max(SERVERS_EVERY_S, state.idle_s)
        case orders.NameChunks(tier):
            known = known.with_names(_chunks(event.names), tier)
            if tier in state.record.named_tiers:
                strays[tier] = event.names
        case orders.VerifyTier(tier):
            strays[tier] = event.names
    if known is state.known and not pause_s:
        # Repeated at once it would bring no news either.
        pause_s = LOOK_AGAIN_S if isinstance(order, orders.RevokeKeys | orders.DestroyKeys) else RETRY_S
    state = _over(state, order, now, pause_s, event.problem)
    return replace(state, known=known, servers=servers, strays=strays)


def _over(
    state: ErasureState, order: orders.Order, now: datetime, pause_s: float, problem: str, *, refused: bool = False
) -> ErasureState:
    pauses, problems = {**state.pauses, order: (now, pause_s)}, {**state.problems, order: (problem, refused)}
    return replace(state, running=state.running - {order}, pauses=pauses, problems=problems)


def _chunks(names: Iterable[str]) -> Mapping[str, tuple[str, ...]]:
    """Return some of the chunks with blocks of these names, by keyspace."""
    found: dict[str, set[str]] = {}
    for name in names:
        if (key := parse_block_key(name)) is not None:
            found.setdefault(key.keyspace, set()).add(key.chunk_hash.hex())
    return {keyspace: tuple(sorted(chunks)[:MAX_NAMED]) for keyspace, chunks in found.items()}
