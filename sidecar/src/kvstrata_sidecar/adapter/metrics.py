"""The cache server's metrics in Prometheus' text format; the gate serves them beside its own.

Scopes appear under the first digits of their keyspace, which identify no tenant. Their number is bounded (`counts`), so
that the page fits into one line of the link.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from kvstrata.contract.messages.adapter import MAX_LINE_BYTES, AdapterState, ScopeUsage, TierState
from kvstrata_sidecar.adapter.tier.base import AnyTier
from kvstrata_sidecar.adapter.tier.counts import MAX_SCOPES
from kvstrata_sidecar.adapter.tier.interface import FILES, PodTier, ServerMemory
from kvstrata_sidecar.prometheus_text import Row, family

OPERATIONS = ("stored", "loaded", "evicted")
FAILURES = (
    "errors", "late_lookup", "late_load", "late_store", "load_misses", "unreadable", "stores_present", "sweep_errors",
    "reservations_reaped", "ledgers_rebuilt", "recounts_repeated",
)  # fmt: skip
SCOPED: tuple[tuple[str, str, str, Mapping[str, str]], ...] = (
    ("lookups_total", "Blocks that a tier was asked for, by result.", "result",
     {"lookup_hits": "hit", "lookup_misses": "miss"}),
    ("shadowed_total", "Blocks that a tier was not asked for, because a faster one has them.", "use",
     {"shadowed": "all", "hints": "passed_on"}),
    ("blocks_total", "Blocks that came to or left a tier.", "operation",
     {name: name for name in (*OPERATIONS, "expired")}),
    ("loads_total", "Blocks that were loaded from a shared tier, by the cache server that wrote them.", "writer",
     {"loads_own": "own", "loads_other": "other"}),
    ("bytes_total", "Bytes of these blocks.", "operation", {f"{name}_bytes": name for name in OPERATIONS}),
    ("pool_blocks_total", "Blocks that a reader had from pools, or did not keep because a pool has them.", "outcome",
     {"pool_hits": "loaded", "stores_in_pool": "not_stored", "copies_discarded": "discarded"}),
    ("pool_bytes_total", "Bytes of the blocks that were loaded from pools.", "outcome", {"pool_bytes": "loaded"}),
)  # fmt: skip
"""Families of counters by scope: name, help, label, and the label's value by counter."""

ORPHANS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "Redis": {
        "entries": ("drift_entries", "drift_entries"),
        "reservations": ("reservations_reaped", "reservations_reaped"),
        "departed": ("departed_evicted", "departed_evicted"),
    },
    FILES: {"files": ("orphan_files", "files_removed")},
}
"""By medium and kind of orphan: the counters of those found and of those removed."""

PREFIX = "kvstrata_cache"
Rows = Iterable[tuple[Mapping[str, str], Any]]

DRIFTS = ("drift_entries", "drift_bytes", "drift_leases", "drift_rooms")

BREAKERS = ("closed", "half-open", "open")
FILES_STATES = ("full", "read_only", "recovering", "floor_reached")
RESTORES = ("restored", "declined", "given_up")
RESTORE_SPEEDS = (
    ("restore_bytes_per_second", "Speed of loads.", "bytes_per_s"),
    ("restore_tokens_per_second", "The same in tokens.", "tokens_per_s"),
    ("prefill_tokens_per_second", "Speed of prefill.", "prefill_tokens_per_s"),
)

MEMORY_TRAFFIC = {
    "promoted_blocks": "Blocks that came from slower tiers and stay in memory.",
    "promoted_bytes": "Their bytes.",
    "lent_blocks": "Blocks of pools that memory lent to a scope that reads them.",
    "lent_bytes": "Their bytes.",
}


def page(state: AdapterState, tiers: Sequence[AnyTier], memory: ServerMemory | None) -> str:
    """Return the page; `memory` is None unless the server's own memory is governed. A page that would be too long, with
    very many tiers, leaves out the series of scopes."""
    whole = ""
    for scopes in (True, False):
        families = _families(state, tiers, memory, scopes=scopes)
        lines = (family(f"{PREFIX}_{name}", kind, text, rows) for name, kind, text, rows in families)
        whole = "\n".join(chain.from_iterable(lines)) + "\n"
        if len(whole) + whole.count('"') + whole.count("\n") < MAX_LINE_BYTES - 1024:
            break
    return whole


def _families(
    state: AdapterState, tiers: Sequence[AnyTier], memory: ServerMemory | None, *, scopes: bool
) -> Iterator[tuple[str, str, str, Rows]]:
    """Yield name, kind, help and rows of each family."""
    yield "policy_revision", "gauge", "The revision that the cache server enforces.", [({}, state.revision)]
    yield "policy_fresh", "gauge", "1 while the policy is fresh, else 0.", [({}, int(state.fresh))]
    yield "policy_scopes", "gauge", "Keyspaces of the policy in force.", [({}, state.keyspaces)]
    named = [(tier.state(), tier) for tier in tiers]
    own = [] if memory is None else [(memory.state().name, memory)]
    breakers = ((one.name, [text.partition(":")[0] for text in tier.nodes().values()]) for one, tier in named)
    rows = _each("breaker", ((name, {state: states.count(state) for state in BREAKERS}) for name, states in breakers))
    yield "tier_servers", "gauge", "Servers of a tier by the state of their breaker.", rows
    rows = [({"tier": one.name}, one.settling) for one, _ in named]
    text = "Scopes for which a changed limit or retention is not put through yet."
    yield "tier_settling_scopes", "gauge", text, rows
    usage = _rows(state, named) if scopes else []
    text = "Bytes that a scope holds in a tier, as last seen by this pod's sweeps."
    yield "tier_used_bytes", "gauge", text, [(_place(row), row.used_bytes) for row in usage]
    limits = [(_place(row), row.limit_bytes) for row in usage if row.limit_bytes is not None]
    yield "tier_limit_bytes", "gauge", "Maximum for a scope in a tier, if it has one.", limits
    files = [one for one, _ in named if one.medium == FILES]
    rows = [({"tier": one.name}, one.used_bytes) for one in files]
    yield "files_bytes", "gauge", "Bytes that the files of a tier take on the disk.", rows
    rows = _each("state", ((one.name, {name: int(getattr(one, name)) for name in FILES_STATES}) for one in files))
    yield "files_state", "gauge", "1 for each current state of a tier's files, else 0.", rows
    memory_counts = _by_tier(own)
    scoped = [*_by_tier((one.name, tier) for one, tier in named), *memory_counts] if scopes else []
    for name, text, label, shown in SCOPED:
        yield name, "counter", text, _by_scope(scoped, label, shown)
    reasons = sorted({name for _, _, counts in scoped for name in counts if name.startswith("refused_")})
    rows = _by_scope(scoped, "reason", {name: name.removeprefix("refused_") for name in reasons})
    yield "refused_total", "counter", "Blocks that a tier was not used for, by reason.", rows
    counted = [(one.name, tier.counters()) for one, tier in named]
    for name, kinds, text in (
        ("tier_events_total", FAILURES, "Failures and repairs of a tier, by kind."),
        ("tier_drift_total", DRIFTS, "Differences between values, index and accounting that were repaired."),
    ):
        rows = _each("kind", ((tier, {kind: counts.get(kind, 0) for kind in kinds}) for tier, counts in counted))
        yield name, "counter", text, rows
    rows = [({"tier": name}, counts.get("orphan_scans", 0)) for name, counts in counted]
    yield "orphan_scans_total", "counter", "Searches of a tier for values without an owner.", rows
    yield "orphans_total", "counter", "Values without an owner, found and removed.", _orphans(named)
    rows = _each("operation", ((one.name, tier.counts.latencies()) for one, tier in named))
    yield "operation_seconds", "histogram", "From LMCache's question to the answer.", rows
    loads = [(one.name, one.restore) for one in state.tiers if one.restore is not None]
    rows = _each("outcome", ((name, {key: getattr(one, key) for key in RESTORES}) for name, one in loads))
    yield "restores_total", "counter", "Hits of requests, by whether they were loaded, declined or given up.", rows
    gains_ms = ((name, {"saved": one.saved_ms, "avoided": one.avoided_ms, "lost": one.lost_ms}) for name, one in loads)
    rows = [(labels, gain_ms / 1000) for labels, gain_ms in _each("outcome", gains_ms)]
    text = "Seconds of prefill and loads that these decisions saved, or cost."
    yield "restore_seconds_total", "counter", text, rows
    for name, text, figure in RESTORE_SPEEDS:
        yield name, "gauge", text, [({"tier": tier}, getattr(one, figure)) for tier, one in loads]
    ages = [*((name, one.counts.ages()) for name, one in own), *((one.name, tier.counts.ages()) for one, tier in named)]
    yield "block_age_seconds", "histogram", "How long ago a block's tokens were computed.", _each("at", ages)
    rows = [
        ({"scope": scope, "cause": name.removeprefix("evicted_")}, count)
        for _, scope, counts in memory_counts
        for name, count in sorted(counts.items())
        if name.startswith("evicted_")
    ]
    yield "memory_evicted_total", "counter", "Blocks that had to leave the cache server's own memory, by cause.", rows
    for name, text in MEMORY_TRAFFIC.items():
        rows = [({"scope": scope}, counts[name]) for _, scope, counts in memory_counts if name in counts]
        yield f"memory_{name}_total", "counter", text, rows
    rows = [
        ({"state": name}, count)
        for used_bytes, all_bytes in [one.fill() for _, one in own]
        for name, count in (("used", used_bytes), ("free", all_bytes - used_bytes))
    ]
    yield "memory_bytes", "gauge", "Bytes of the cache server's own memory.", rows
    text = "Bytes in use in LMCache's memory, as it reports them, beyond counted blocks."
    yield "memory_drift_bytes", "gauge", text, [({}, one.drift_bytes()) for _, one in own]


def _rows(state: AdapterState, named: Iterable[tuple[TierState, AnyTier]]) -> list[ScopeUsage]:
    """Return usage of scopes in shared tiers and in files; the server's own status has that of memory."""
    files = {one.name for one, _ in named if one.medium == FILES}
    own = [row for row in state.usage if row.tier in files and row.scope]
    return [*state.tier_usage[:MAX_SCOPES], *own[:MAX_SCOPES]]


def _each(label: str, by_tier: Iterable[tuple[str, Mapping[str, Any]]]) -> Rows:
    """Return a row for each tier and entry, whose key is the value of `label`."""
    return [({"tier": tier, label: key}, value) for tier, one in by_tier for key, value in sorted(one.items())]


def _orphans(named: Iterable[tuple[TierState, AnyTier]]) -> Iterator[Row]:
    for one, tier in named:
        counts = tier.counters()
        for kind, (found, removed) in ORPHANS.get(one.medium, {}).items():
            for outcome, count in (("found", found), ("removed", removed)):
                yield {"tier": one.name, "kind": kind, "outcome": outcome}, counts.get(count, 0)


def _place(row: ScopeUsage) -> Mapping[str, str]:
    return {"tier": row.tier, "scope": row.scope}


def _by_tier(tiers: Iterable[tuple[str, PodTier]]) -> list[tuple[str, str, Mapping[str, int]]]:
    """Return the counters of each scope in each tier."""
    return [(name, *row) for name, tier in tiers for row in sorted(tier.counts.by_scope().items())]


def _by_scope(
    scoped: Sequence[tuple[str, str, Mapping[str, int]]], label: str, names: Mapping[str, str]
) -> Iterator[Row]:
    for tier, scope, counts in scoped:
        for name, shown in names.items():
            if name in counts:
                yield {"tier": tier, "scope": scope, label: shown}, counts[name]
