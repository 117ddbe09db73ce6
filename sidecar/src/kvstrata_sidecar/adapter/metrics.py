"""The cache server's metrics in Prometheus' text format; the gate serves them beside its own.

Scopes appear under the first digits of their keyspace, which identify no tenant. Their number is bounded (`counts`), so
that the page fits into one line of the link.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from kvstrata.contract.messages.adapter import MAX_LINE_BYTES, AdapterState, ScopeUsage, TierState
from kvstrata_sidecar.adapter.tier.counts import MAX_SCOPES, Histogram
from kvstrata_sidecar.adapter.tier.interface import FILES, ServerMemory, SlowerTier

Row = tuple[Mapping[str, str], float]

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

DRIFTS = ("drift_entries", "drift_bytes", "drift_leases", "drift_rooms")


MEMORY_TRAFFIC = {
    "promoted_blocks": "Blocks that came from slower tiers and stay in memory.",
    "promoted_bytes": "Their bytes.",
    "warmed_blocks": "Of these, blocks that were loaded when the server started, before any request for them.",
    "warmed_bytes": "Their bytes.",
    "handed_down_blocks": "Blocks that were copied to the next slower tier before they left the memory.",
    "handed_down_bytes": "Their bytes.",
    "left_uncopied_blocks": "Blocks that left the memory and are in no slower tier that could have them.",
    "lent_blocks": "Blocks of pools that memory lent to a scope that reads them.",
    "lent_bytes": "Their bytes.",
}


def page(state: AdapterState, tiers: Sequence[SlowerTier], memory: ServerMemory | None) -> str:
    """Return the page; `memory` is None unless the server's own memory is governed.

    A page that would be too long, with very many tiers, leaves out the series of scopes.
    """
    whole = "\n".join(_lines(state, tiers, memory, scopes=True)) + "\n"
    if len(whole) + whole.count('"') + whole.count("\n") < MAX_LINE_BYTES - 1024:
        return whole
    return "\n".join(_lines(state, tiers, memory, scopes=False)) + "\n"


def _lines(
    state: AdapterState, tiers: Sequence[SlowerTier], memory: ServerMemory | None, *, scopes: bool
) -> Iterator[str]:
    yield from _family(
        "policy_revision", "gauge", "The revision that the cache server enforces.", [({}, state.revision)]
    )
    yield from _family("policy_fresh", "gauge", "1 while the policy is fresh, else 0.", [({}, int(state.fresh))])
    yield from _family("policy_scopes", "gauge", "Keyspaces of the policy in force.", [({}, state.keyspaces)])
    named = [(tier.state(), tier) for tier in tiers]
    own = [] if memory is None else [(memory.state().name, memory)]
    yield from _family(
        "tier_servers", "gauge", "Servers of a tier by the state of their breaker.",
        (row for one, tier in named for row in _servers(one.name, tier.nodes())),
    )  # fmt: skip
    yield from _family(
        "tier_settling_scopes", "gauge", "Scopes for which a changed limit or retention is not put through yet.",
        [({"tier": one.name}, one.settling) for one, _ in named],
    )  # fmt: skip
    for name, figure, text in (
        ("tier_used_bytes", "used_bytes", "Bytes that a scope holds in a tier, as last seen by this pod's sweeps."),
        ("tier_limit_bytes", "limit_bytes", "Maximum for a scope in a tier, if it has one."),
    ):
        yield from _family(name, "gauge", text, _usage(_rows(state, named) if scopes else (), figure))
    files = [one for one, _ in named if one.medium == FILES]
    yield from _family(
        "files_bytes", "gauge", "Bytes that the files of a tier take on the disk.",
        [({"tier": one.name}, one.used_bytes) for one in files],
    )  # fmt: skip
    yield from _family(
        "files_state", "gauge", "1 for each current state of a tier's files, else 0.",
        [
            ({"tier": one.name, "state": name}, int(getattr(one, name)))
            for one in files
            for name in ("full", "read_only", "recovering", "floor_reached")
        ],
    )  # fmt: skip
    memory_counts = [(tier, scope, counts) for tier, one in own for scope, counts in sorted(one.by_scope().items())]
    scoped = [(one.name, scope, counts) for one, tier in named for scope, counts in sorted(tier.by_scope().items())]
    scoped = [*scoped, *memory_counts] if scopes else []
    for name, text, label, shown in SCOPED:
        yield from _family(name, "counter", text, _by_scope(scoped, label, shown))
    reasons = sorted({name for _, _, counts in scoped for name in counts if name.startswith("refused_")})
    yield from _family(
        "refused_total", "counter", "Blocks that a tier was not used for, by reason.",
        _by_scope(scoped, "reason", {name: name.removeprefix("refused_") for name in reasons}),
    )  # fmt: skip
    counted = [(one.name, tier.counters()) for one, tier in named]
    for family, kinds, text in (
        ("tier_events_total", FAILURES, "Failures and repairs of a tier, by kind."),
        ("tier_drift_total", DRIFTS, "Differences between values, index and accounting that were repaired."),
    ):
        rows = [({"tier": name, "kind": kind}, counts.get(kind, 0)) for name, counts in counted for kind in kinds]
        yield from _family(family, "counter", text, rows)
    yield from _family(
        "orphan_scans_total", "counter", "Searches of a tier for values without an owner.",
        [({"tier": name}, counts.get("orphan_scans", 0)) for name, counts in counted],
    )  # fmt: skip
    yield from _family("orphans_total", "counter", "Values without an owner, found and removed.", _orphans(named))
    yield from _family("operation_seconds", "histogram", "From LMCache's question to the answer.", ())
    for one, tier in named:
        for operation, histogram in sorted(tier.latencies().items()):
            yield from _histogram("operation_seconds", {"tier": one.name, "operation": operation}, histogram)
    yield from _family("block_age_seconds", "histogram", "How long ago a block's tokens were computed.", ())
    ages = [*((name, one.ages()) for name, one in own), *((one.name, tier.ages()) for one, tier in named)]
    for name, by_moment in ages:
        for moment, histogram in sorted(by_moment.items()):
            yield from _histogram("block_age_seconds", {"tier": name, "at": moment}, histogram)
    yield from _family(
        "memory_evicted_total", "counter", "Blocks that had to leave the cache server's own memory, by cause.",
        [
            ({"scope": scope, "cause": name.removeprefix("evicted_")}, count)
            for _, scope, counts in memory_counts
            for name, count in sorted(counts.items())
            if name.startswith("evicted_")
        ],
    )  # fmt: skip
    for name, text in MEMORY_TRAFFIC.items():
        rows = [({"scope": scope}, counts[name]) for _, scope, counts in memory_counts if name in counts]
        yield from _family(f"memory_{name}_total", "counter", text, rows)
    yield from _family(
        "memory_drift_bytes", "gauge", "Bytes in use in LMCache's memory, as it reports them, beyond counted blocks.",
        [({}, one.drift_bytes()) for _, one in own],
    )  # fmt: skip
    yield from _family(
        "memory_warming", "gauge", "1 while the memory of a server that started is being warmed up, else 0.",
        [({}, int(state.warming))],
    )  # fmt: skip
    yield from _family(
        "memory_warm_up_seconds", "gauge", "How long that took, or takes by now, from the engine's registration.",
        [({}, round(one.warm_up_s, 3)) for _, one in own if one.warm_up_s is not None],
    )  # fmt: skip


def _rows(state: AdapterState, named: Iterable[tuple[TierState, SlowerTier]]) -> list[ScopeUsage]:
    """Return usage of scopes in shared tiers and in files; the server's own status has that of memory."""
    files = {one.name for one, _ in named if one.medium == FILES}
    own = [row for row in state.usage if row.tier in files and row.scope]
    return [*state.tier_usage[:MAX_SCOPES], *own[:MAX_SCOPES]]


def _servers(tier: str, nodes: Mapping[str, str]) -> Iterator[Row]:
    states = [text.partition(":")[0] for text in nodes.values()]
    for state in ("closed", "half-open", "open"):
        yield {"tier": tier, "breaker": state}, states.count(state)


def _orphans(named: Iterable[tuple[TierState, SlowerTier]]) -> Iterator[Row]:
    for one, tier in named:
        counts = tier.counters()
        for kind, (found, removed) in ORPHANS.get(one.medium, {}).items():
            for outcome, count in (("found", found), ("removed", removed)):
                yield {"tier": one.name, "kind": kind, "outcome": outcome}, counts.get(count, 0)


def _usage(rows: Sequence[ScopeUsage], figure: str) -> Iterator[Row]:
    for row in rows:
        value = getattr(row, figure)
        if value is not None:
            yield {"tier": row.tier, "scope": row.scope}, value


def _by_scope(
    scoped: Sequence[tuple[str, str, Mapping[str, int]]], label: str, names: Mapping[str, str]
) -> Iterator[Row]:
    for tier, scope, counts in scoped:
        for name, shown in names.items():
            if name in counts:
                yield {"tier": tier, "scope": scope, label: shown}, counts[name]


def _histogram(name: str, labels: Mapping[str, str], histogram: Histogram) -> Iterator[str]:
    total = 0
    for bound, count in zip((*map(str, histogram.bounds_s), "+Inf"), histogram.buckets, strict=True):
        total += count
        yield _line(f"{name}_bucket", {**labels, "le": bound}, total)
    yield _line(f"{name}_sum", labels, round(histogram.sum_s, 6))
    yield _line(f"{name}_count", labels, total)


def _family(name: str, kind: str, text: str, rows: Iterable[Row]) -> Iterator[str]:
    yield f"# HELP kvstrata_cache_{name} {text}"
    yield f"# TYPE kvstrata_cache_{name} {kind}"
    for labels, value in rows:
        yield _line(name, labels, value)


def _line(name: str, labels: Mapping[str, str], value: float) -> str:
    shown = ",".join(f'{label}="{_escape(text)}"' for label, text in labels.items())
    return f"kvstrata_cache_{name}{{{shown}}} {value}" if shown else f"kvstrata_cache_{name} {value}"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
