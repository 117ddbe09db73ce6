"""One replay of the trace: tenants' prompts, in their order, against a cache server under their policies."""

from __future__ import annotations

import itertools
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from bench.sharing.optimum import Mode, Optimum, optimum
from bench.sharing.scopes import Scopes
from bench.sharing.stand import Stand, erase, held
from bench.sharing.trace import CHUNK_TOKENS, PREFIX, PREFIX_TOKENS, Request, tenants_of
from kvstrata.contract.policy.keyspace import SCOPE_DIGITS
from kvstrata.contract.policy.pools import PoolState

REPORT_TIMEOUT_S = 20.0
WARM_UP = Request(-1, PREFIX, PREFIX_TOKENS)


@dataclass(frozen=True, slots=True)
class Replay:
    """Measurements of one replay, and the optimum for it."""

    mode: Mode
    tenants: int
    best: Optimum
    hit_tokens: int
    prefill_tokens: int
    """Tokens without a hit, those of the pool's warm-up included."""
    blocks: int
    stored_bytes: int
    prefix_copies: int | None
    """How many copies of the shared prefix the tier holds; None where it cannot be asked."""
    reported_bytes: int
    """The same bytes in the adapter's usage report."""

    @property
    def hit_rate(self) -> float:
        """Tokens of tenants' prompts that were found, of all."""
        return self.hit_tokens / self.best.prompt_tokens


def replays(stand: Stand, requests: Sequence[Request], cells: Sequence[tuple[Mode, int]]) -> list[Replay]:
    """Replay all requests in each of these modes and numbers of tenants.

    Cells whose requests share in the same way, as one tenant and all tenants of the public scope do, are one
    experiment: it is made once.
    """
    made: dict[Hashable, Replay] = {}
    found = []
    for mode, tenants in cells:
        way = _partition(requests, tenants, mode)
        if way not in made:
            made[way] = replay(stand, requests, tenants, mode)
        found.append(replace(made[way], mode=mode, tenants=tenants))
    return found


def replay(stand: Stand, requests: Sequence[Request], tenants: int, mode: Mode) -> Replay:
    """Replay all requests as those of so many tenants; keyspaces are new, so all is cold but a pool."""
    scopes = Scopes.drawn(mode, tenants)
    owners = tenants_of(requests, tenants)
    warm_up = 0
    if scopes.pool:
        stand.gate.enforce(scopes, PoolState.WARMING)
        warm_up = _prefill(WARM_UP, *stand.serve(scopes.pool, [PREFIX]))
        stand.quiet()
    stand.gate.enforce(scopes)
    hit_tokens = 0
    for owner, some in itertools.groupby(zip(owners, requests, strict=True), key=lambda pair: pair[0]):
        turns = [request for _, request in some]
        found = stand.serve(scopes.keyspaces[owner], [turn.chunks for turn in turns])
        hit_tokens += sum(turn.tokens - _prefill(turn, hits) for turn, hits in zip(turns, found, strict=True))
    stand.quiet()
    best = optimum(requests, owners, mode)
    blocks, stored_bytes, copies = _kept(stand, scopes)
    measured = Replay(
        mode, tenants, best, hit_tokens, best.prompt_tokens - hit_tokens + warm_up, blocks, stored_bytes, copies,
        _reported(stand, scopes, stored_bytes),
    )  # fmt: skip
    if stand.backing:
        erase(stand.backing, scopes.all)
    stand.forget_memory()
    return measured


def _partition(requests: Sequence[Request], tenants: int, mode: Mode) -> Hashable:
    """Return all that a replay depends on: which requests share a scope, and whether there is a pool."""
    numbers: dict[str, int] = {}
    scopes = (mode.scope(tenant) for tenant in tenants_of(requests, tenants))
    return mode is Mode.POOL, tuple(numbers.setdefault(scope, len(numbers)) for scope in scopes)


def _prefill(request: Request, hits: int) -> int:
    """Tokens that an engine computes after finding so many chunks: at least the last one, for its logits."""
    return max(1, request.tokens - hits * CHUNK_TOKENS)


def _kept(stand: Stand, scopes: Scopes) -> tuple[int, int, int | None]:
    """Blocks and bytes in the tier, and copies of the prefix there, read without the product."""
    if stand.backing is None:
        return *stand.in_memory(), None
    kept = held(stand.backing, scopes.all)
    prefix = frozenset(stand.gate.hashes())
    copies = sum(not prefix.isdisjoint(chunks) for chunks in kept.chunks.values())
    return sum(map(len, kept.chunks.values())), sum(kept.value_bytes.values()), copies


def _reported(stand: Stand, scopes: Scopes, expected_bytes: int) -> int:
    """Bytes of these scopes by the adapter's report; of a shared tier it reports its last sweep, a moment later."""
    short = {keyspace[:SCOPE_DIGITS] for keyspace in scopes.all}
    stand.gate.enforce(scopes)
    give_up_at_s = time.monotonic() + REPORT_TIMEOUT_S
    while True:
        state = stand.stand_in.state()
        rows = state.tier_usage if stand.backing else state.usage
        reported = sum(row.used_bytes for row in rows if row.scope in short)
        if reported == expected_bytes or time.monotonic() > give_up_at_s:
            return reported
        time.sleep(0.05)
