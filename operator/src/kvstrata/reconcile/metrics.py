"""The operator's metrics and their HTTP server. docs/reference/metrics.md lists the names, which are stable."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, Counter, Gauge, Histogram, generate_latest

from kvstrata.api.base import Resource
from kvstrata.api.cachedmodel import CachedModel
from kvstrata.api.cacheinvalidation import CacheInvalidation, Phase
from kvstrata.contract.receipt.facts import Erasure
from kvstrata.contract.receipt.vocabulary import Mode, moment_in_s
from kvstrata.model.erasure.facts import Deletion, JobState, Look
from kvstrata.model.refs import Key

log = logging.getLogger(__name__)

_FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_SLOW = (1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 21600.0, 86400.0)
_TIER = ["namespace", "tier"]
_MODEL = ["namespace", "model"]

LEADING = Gauge("kvstrata_leading", "1 while this process holds the Lease")
SERVED_BY_ANOTHER = Gauge(
    "kvstrata_namespaces_served_by_another", "Namespaces that this process leaves to another installation"
)
QUEUE_DEPTH = Gauge("kvstrata_queue_depth", "Keys that are due and wait for a worker")
RECONCILES = Histogram(
    "kvstrata_reconcile_seconds", "Time from taking a key to its last write", ["kind"], buckets=_FAST
)
FAILURES = Counter("kvstrata_reconcile_failures_total", "Reconciles that ended in an error", ["kind", "reason"])
WRITES = Counter("kvstrata_writes_total", "Writes to the API server", ["kind", "verb"])
COMMITS = Histogram("kvstrata_bundle_commit_seconds", "Time to write a bundle's shards and root", buckets=_FAST)
ACK_LATENCY = Histogram(
    "kvstrata_ack_seconds", "Time from a bundle's commit to a pod's acknowledgement of it", buckets=_FAST
)
ACKS_REFUSED = Counter("kvstrata_acks_refused_total", "Acknowledgements that were not believed", ["reason"])
GATE_ERRORS = Counter("kvstrata_gate_errors_total", "Failed requests to gates", ["reason"])
BACKEND_UP = Gauge("kvstrata_backend_up", "1 while a Redis tier answers the operator", _TIER)
ADMISSIONS = Counter("kvstrata_admissions_total", "Outcomes of declared guarantees", ["kind", "outcome"])
AUDIT_EVENTS = Counter("kvstrata_audit_events_total", "Events for the audit log", ["event"])
AUDIT_DROPPED = Counter("kvstrata_audit_dropped_total", "Events that have no line, because lines were not taken")
BACKEND_SUITABLE = Gauge(
    "kvstrata_backend_suitable",
    "1 while the external servers of a Redis tier pass the checks that are required, as they last answered",
    _TIER,
)
SLOTS_UNCOVERED = Gauge(
    "kvstrata_backend_slots_uncovered",
    "Slots of a Redis tier's cluster without a server that answers the operator",
    _TIER,
)
REPLICAS_MISSING = Gauge(
    "kvstrata_tier_replicas_missing", "Replicas that a managed cluster should have and that are not in step", _TIER
)
SLOTS_TO_MOVE = Gauge(
    "kvstrata_tier_slots_to_move", "Slots of a managed cluster that are to go to another shard", _TIER
)
PODS_TO_REPLACE = Gauge("kvstrata_tier_pods_to_replace", "Pods of a managed cluster of a former template", _TIER)
FAILOVERS = Counter(
    "kvstrata_tier_failovers_total", "Servers of a managed cluster that took over the slots of another", [*_TIER, "by"]
)
REPLACEMENTS = Counter(
    "kvstrata_tier_replacements_total", "Pods of a managed cluster that the operator replaced", _TIER
)
FORMATIONS = Counter(
    "kvstrata_tier_formations_total", "Times that all slots of a managed cluster were given to empty servers", _TIER
)
SLOTS_MOVED = Counter("kvstrata_tier_slots_moved_total", "Slots moved between shards", _TIER)
MOVE_DROPPED = Counter(
    "kvstrata_tier_moved_values_dropped_total", "Values dropped because they were too large to move", _TIER
)
SLOTS_LOST = Counter("kvstrata_tier_slots_lost_total", "Slots whose values were lost with a server", _TIER)
RESTORES = Counter(
    "kvstrata_restores_total", "Times that pods were found to hold newer bundles than the API server", ["namespace"]
)
PROBES = Counter("kvstrata_isolation_probes_total", "Outcomes of probes of isolation", [*_MODEL, "outcome"])
ISOLATION_BROKEN = Gauge("kvstrata_isolation_broken", "1 while a model's status reports a failure of isolation", _MODEL)
ERASURES_OPEN = Gauge("kvstrata_erasures_open", "Eager invalidations that this process carries out")
ERASURES = Counter("kvstrata_erasures_total", "Erasures that were judged", ["outcome"])
INVALIDATIONS = Histogram(
    "kvstrata_invalidation_seconds",
    "From the order to a step of an invalidation that is over",
    ["mode", "step"],
    buckets=_SLOW,
)
ORPHANS = Counter("kvstrata_erasure_orphans_total", "Blocks that a look found after a deletion", ["outcome"])
KMS_DOMAINS_OPEN = Gauge(
    "kvstrata_kms_deleted_domains", "Deleted domains whose keys a key management service still has, or may have"
)
RECEIPT_KEY_ROTATIONS = Counter(
    "kvstrata_receipts_key_rotations_total", "Times that another key began to sign receipts"
)
RECEIPT_CHAINS_STUCK = Gauge(
    "kvstrata_receipt_chains_not_handed_over", "Chains of receipts that could not be handed over to the current key"
)
KEYS_NOT_ENDED = Counter("kvstrata_data_keys_not_ended_total", "Unused data keys that a KMS did not end", ["reason"])
FORMER_IDENTITIES = Gauge(
    "kvstrata_former_identities",
    "Identities that a model had before, whose blocks wait to be deleted from Redis tiers",
    _MODEL,
)
RECLAIMS = Counter("kvstrata_reclaims_total", "Rounds of deletions of former caches that ended", [*_MODEL, "outcome"])
RECLAIMED_BLOCKS = Counter("kvstrata_reclaimed_blocks_total", "Blocks of former identities that were deleted", _MODEL)
RECLAIMED_BYTES = Counter("kvstrata_reclaimed_bytes_total", "Bytes of these blocks", _MODEL)
WATCH_FAILING = Gauge(
    "kvstrata_watch_failing", "1 while a watch is not answered, refused or unreadable", ["namespace", "resource"]
)
WATCHERS = Gauge("kvstrata_watchers", "Watches that run")
RESYNCS = Counter("kvstrata_resyncs_total", "Complete list-and-diff passes")
MISSED = Counter("kvstrata_missed_changes_total", "Changes that a list showed and no event had", ["kind"])

STEPS = ("unreachable", "keys_revoked", "erased", "verified")
"""Steps of an erasure with a moment in its receipt."""


def count_lazy(before: Resource | None, after: Resource | None) -> None:
    if not isinstance(after, CacheInvalidation) or after.spec.mode is not Mode.LAZY:
        return
    known = isinstance(before, CacheInvalidation) and before.uid == after.uid and before.status.phase is Phase.COMPLETE
    began, ended = after.status.start_time, after.status.completion_time
    if after.status.phase is Phase.COMPLETE and not known and began is not None and ended is not None:
        INVALIDATIONS.labels("Lazy", "unreachable").observe(max(0.0, (ended - began).total_seconds()))


def count_reclaimed(key: Key, before: Resource | None, after: Resource | None) -> None:
    """Count and log a former cache that the status of `after` reports as deleted first."""
    if not isinstance(after, CachedModel) or after.status.reclaimed is None:
        return
    known, reported = before.status.reclaimed if isinstance(before, CachedModel) else None, after.status.reclaimed
    if known == reported:
        return
    RECLAIMED_BLOCKS.labels(key.namespace, key.name).inc(reported.blocks)
    RECLAIMED_BYTES.labels(key.namespace, key.name).inc(reported.bytes)
    facts = {"identity": reported.identity, "blocks": reported.blocks, "bytes": reported.bytes}
    log.info("a former cache was deleted", extra={"key": str(key), **facts})


def count_erasure(facts: Erasure) -> None:
    began_s = moment_in_s(facts.timings.started)
    for step in STEPS:
        at = getattr(facts.timings, step)
        if at is not None:
            INVALIDATIONS.labels("Eager", step).observe(max(0, moment_in_s(at) - began_s))


def count_look(fact: object) -> None:
    """Count the blocks of a look, or of a deletion after the first round, that is a new fact of an erasure."""
    if isinstance(fact, Look):
        ORPHANS.labels("found").inc(sum(amount.keys for amount in fact.left.values()))
    elif isinstance(fact, Deletion) and fact.state is JobState.DONE and fact.round > 1:
        ORPHANS.labels("removed").inc(fact.deleted.keys)


Check = Callable[[], str | None]
"""Returns a problem, or None."""


def build_app(alive: Mapping[str, Check], ready: Mapping[str, Check]) -> web.Application:
    """Return an application with /livez, /readyz and /metrics; a 503 names failing checks."""

    def serve(checks: Mapping[str, Check]) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def answer(_: web.Request) -> web.Response:
            problems = {name: problem for name, check in checks.items() if (problem := check())}
            text = "".join(f"{name}: {problem}\n" for name, problem in problems.items()) or "ok\n"
            return web.Response(text=text, status=503 if problems else 200)

        return answer

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.router.add_get("/livez", serve(alive))
    app.router.add_get("/readyz", serve(ready))
    app.router.add_get("/metrics", metrics)
    return app
