"""Deletions as Jobs over an API server in memory, and what is said of them by controller, kubelet and program."""

from __future__ import annotations

import base64
from datetime import UTC, datetime, timedelta
from typing import Any

from kvstrata.api.cachetier import CacheTier
from kvstrata.clients.resources import JOB
from kvstrata.contract.messages.erase_report import End, Erased, Line, Outcome, PrimaryEnd, StopReason, encode_line
from kvstrata.contract.receipt.facts import Amount
from kvstrata.objects import names
from kvstrata.objects.context import BuildContext
from kvstrata.objects.erasure.delete_job import CONTAINER, TierDeletion
from kvstrata.plan.erasure.deletions import DeletionRun
from kvstrata.reconcile.erasure.jobs import Jobs
from tests.support.memory_kube import MemoryKube
from tests.support.objects import NAMESPACE, redis_tier

CONTEXT = BuildContext(sidecar_image="sidecar:1", redis_image="redis:7")
WHERE = CONTEXT.operator_namespace
NOW = datetime(2026, 11, 22, 10, 0, tzinfo=UTC)
ENDED = NOW - timedelta(seconds=5)
ERASURE, KEYSPACE, NODE = "order-1", "0" * 31 + "1", "n" * 40
PASSWORD, AUTHORITY = b"the password", b"the authority"
JOB_NAME = names.deletion_job(ERASURE, "shared", 1)
SOME, NOTHING = Amount(5, 500), Amount(0, 0)

WHOLE: tuple[Line, ...] = (
    Erased(None, NODE, SOME, SOME, NOTHING),
    PrimaryEnd(NODE, 1, 1, 0),
    End(Outcome.ERASED, StopReason.NONE, "", "5" * 64, 30_000),
)


def stopped(reason: StopReason, message: str = "kvs-shared-redis:6379: it does not answer") -> tuple[Line, ...]:
    return (End(Outcome.STOPPED, reason, message, None, 0),)


def tier(**spec: Any) -> CacheTier:
    raw = redis_tier(**spec)
    return CacheTier.parse({**raw, "metadata": {**raw["metadata"], "uid": "uid-shared"}})


def order(turn: int = 1, **changes: Any) -> TierDeletion:
    return TierDeletion(
        **{
            "erasure": ERASURE, "tier": tier(), "round": turn, "domain": "00112233445566aa", "revision": 7,
            "keyspaces": (KEYSPACE,), **changes,
        }
    )  # fmt: skip


def secret(name: str, **data: bytes) -> dict[str, Any]:
    values = {key.replace("_", "."): base64.b64encode(value).decode() for key, value in data.items()}
    metadata = {"name": name, "namespace": NAMESPACE}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque", "data": values}


def server_of_a_tier() -> MemoryKube:
    """An API server that has the Secrets of a tier."""
    found = MemoryKube()
    found.put(secret(names.redis_auth("shared"), password=PASSWORD))
    found.put(secret(names.redis_tls("shared"), ca_crt=AUTHORITY))
    return found


def jobs_of(kube: MemoryKube) -> Jobs:
    return Jobs(kube, CONTEXT, lambda: NOW)


def the_job(kube: MemoryKube, name: str = JOB_NAME) -> dict[str, Any]:
    return kube.objects[(JOB.kind, WHERE, name)]


def ends(
    kube: MemoryKube, code: int, lines: tuple[Line, ...] | None, *, reason: str = "Error", log: bytes = b""
) -> None:
    """Have the Job's pod end, as the kubelet says it does."""
    finished = {"exitCode": code, "reason": reason, "finishedAt": ENDED.strftime("%Y-%m-%dT%H:%M:%SZ")}
    has_pod(kube, {"phase": "Failed" if code else "Succeeded"}, {"terminated": finished})
    if lines is not None:
        kube.logs["pod"] = log + b"".join(encode_line(line) for line in lines)


def has_pod(
    kube: MemoryKube, status: dict[str, Any], state: dict[str, Any] | None = None, owner: str | None = None
) -> None:
    """Have the Job's controller make its pod, and the kubelet say how it is."""
    job = the_job(kube)
    controller = {"apiVersion": "batch/v1", "kind": "Job", "name": JOB_NAME, "uid": owner or job["metadata"]["uid"]}
    metadata = {
        "name": "pod",
        "namespace": WHERE,
        "labels": job["spec"]["template"]["metadata"]["labels"],
        "ownerReferences": [controller],
    }
    told = {"containerStatuses": [{"name": CONTAINER, "state": state}]} if state is not None else {}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": job["spec"]["template"]["spec"]}
    kube.put({**pod, "status": {**status, **told}})


def is_over(kube: MemoryKube, kind: str, reason: str, message: str) -> None:
    """Have the Job's controller say that it is over."""
    condition = {"type": kind, "status": "True", "reason": reason, "message": message}
    kube.put({**the_job(kube), "status": {"conditions": [condition]}})


async def seen(jobs: Jobs) -> DeletionRun:
    run = await jobs.look(ERASURE, "shared", 1)
    assert run is not None
    return run
