"""Facts from the API server's dictionaries: owners, versions, and typed pods of gates and of managed Redis servers."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from itertools import pairwise
from typing import Any

from kvstrata.api.base import Resource
from kvstrata.api.cachedmodel import CachedModel
from kvstrata.api.cachedomain import CacheDomain
from kvstrata.api.cacheinvalidation import CacheInvalidation
from kvstrata.api.cachetier import CacheTier
from kvstrata.api.prefixpool import PrefixPool
from kvstrata.api.tenantcachepolicy import TenantCachePolicy
from kvstrata.api.tenantgroup import TenantGroup
from kvstrata.model.pods import Pod, Unreadable
from kvstrata.model.redis.cluster import ServerPod
from kvstrata.model.refs import Key
from kvstrata.objects import labels, names
from kvstrata.plan.ownership import controllers

OWN_KINDS: Mapping[str, type[Resource]] = {
    cls.INFO.kind: cls
    for cls in (CacheDomain, CacheTier, CachedModel, TenantCachePolicy, TenantGroup, PrefixPool, CacheInvalidation)
}
GATE = "gate"


def owners(raw: Mapping[str, Any]) -> frozenset[Key]:
    metadata = raw["metadata"]
    return frozenset(
        Key(owner["kind"], metadata["namespace"], owner["name"])
        for owner in metadata.get("ownerReferences") or ()
        if owner["kind"] in OWN_KINDS
    )


def parse_pod(raw: Mapping[str, Any]) -> Pod | None:
    metadata, spec, status = raw["metadata"], raw.get("spec") or {}, raw.get("status") or {}
    model = (metadata.get("labels") or {}).get(labels.MODEL)
    if not model:
        return None
    containers = [
        *(status.get("initContainerStatuses") or ()),
        *(status.get("containerStatuses") or ()),
    ]
    return Pod(
        name=metadata["name"],
        uid=metadata["uid"],
        model=model,
        ip=status.get("podIP"),
        scheduled=bool(spec.get("nodeName")),
        finished=_finished(containers, deleting="deletionTimestamp" in metadata),
        ever_ran=any(_ever_ran(container) for container in containers),
        ready=_serves(status, containers),
        deleting="deletionTimestamp" in metadata,
        identity=(metadata.get("labels") or {}).get(labels.IDENTITY, ""),
        render_id=(metadata.get("labels") or {}).get(labels.RENDER, ""),
    )


def unreadable(raw: Mapping[str, Any], problem: str) -> Unreadable:
    metadata = raw["metadata"]
    generation = int(metadata.get("generation") or 0)
    conditions = (raw.get("status") or {}).get("conditions") or ()
    reported = any(
        c.get("type") == "Stalled" and c.get("reason") == "InvalidSpec" and c.get("observedGeneration") == generation
        for c in conditions
    )
    return Unreadable(problem, generation, metadata.get("resourceVersion", ""), reported)


def resource_version(raw: Mapping[str, Any]) -> int:
    """Return an object's resourceVersion as a number, which clients may compare (KEP-5504)."""
    try:
        return int(raw["metadata"].get("resourceVersion") or 0)
    except ValueError:
        return 0


def _finished(containers: list[Mapping[str, Any]], *, deleting: bool) -> bool:
    """Whether the kubelet reported every container as ended, or as never started in a pod that is being deleted. The
    phase is unreliable: the control plane marks pods of an unreachable node as Failed. A pod deleted before its
    engine starts ends with the engine waiting forever."""
    ended = [
        "terminated" in (container.get("state") or {}) or (deleting and not _ever_ran(container))
        for container in containers
    ]
    return bool(ended) and all(ended)


def _serves(status: Mapping[str, Any], containers: list[Mapping[str, Any]]) -> bool:
    """Whether the pod is ready, or its gate was when its node last reported. The control plane clears Ready on an
    unreachable node, while the pod may serve on; container states stay as the kubelet last reported them."""
    if any(c.get("type") == "Ready" and c.get("status") == "True" for c in status.get("conditions") or ()):
        return True
    return any(container.get("name") == GATE and container.get("ready") for container in containers)


def _ever_ran(container: Mapping[str, Any]) -> bool:
    state, last = container.get("state") or {}, container.get("lastState") or {}
    return "running" in state or "terminated" in state or "terminated" in last


MAX_WORDS = 200

_BACKING_OFF = "CrashLoopBackOff"
"""The first restart is immediate and needs no help."""

_ON_ITS_WAY = ("ContainerCreating", "PodInitializing")
_PULLING = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable")


def parse_server_pod(raw: Mapping[str, Any]) -> tuple[str, ServerPod | None]:
    """Return a pod's tier, and the managed server, or None for any other pod."""
    metadata, spec, status = raw["metadata"], raw.get("spec") or {}, raw.get("status") or {}
    own = metadata.get("labels") or {}
    tier = own.get(labels.TIER, "")
    place = names.place_in_cluster(tier, metadata["name"]) if tier else None
    if place is None:
        return tier, None
    shard, ordinal = place
    containers = status.get("containerStatuses") or ()
    ready = any(c.get("type") == "Ready" and c.get("status") == "True" for c in status.get("conditions") or ())
    return tier, ServerPod(
        name=metadata["name"],
        uid=metadata["uid"],
        shard=shard,
        ordinal=ordinal,
        ip=status.get("podIP"),
        ready=ready,
        deleting="deletionTimestamp" in metadata,
        revision=own.get(labels.STATEFULSET_REVISION, ""),
        node=spec.get("nodeName"),
        started=sum(int(container.get("restartCount") or 0) for container in containers),
        starting=bool(containers) and not any(container.get("started") for container in containers),
        trouble="" if ready else trouble(status),
        made_for_bytes=_made_for_bytes(spec),
        ends_by=_ends_by(metadata),
        controller=next(iter(controllers(raw)), ""),
    )


def _ends_by(metadata: Mapping[str, Any]) -> datetime | None:
    deleted_at = metadata.get("deletionTimestamp")
    return datetime.fromisoformat(deleted_at) if deleted_at else None


def trouble(status: Mapping[str, Any]) -> str:
    """Return why a pod does not come up, in words that stay the same while that does; empty if nothing is known.
    Kubernetes' own messages state the time until its next attempt, and change with it."""
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return f"it cannot be scheduled: {_words(condition.get('message')) or condition.get('reason')}"
    for container in status.get("containerStatuses") or ():
        waiting = (container.get("state") or {}).get("waiting") or {}
        reason, ended = waiting.get("reason"), (container.get("lastState") or {}).get("terminated")
        if reason in _PULLING:
            return f"its image {container.get('image')} cannot be pulled"
        if reason == _BACKING_OFF and ended:
            how = f"{ended.get('reason') or 'Error'}, exit code {ended.get('exitCode')}"
            return f"its container ends again and again, with {how}: {_last_line(ended.get('message'))}"
        if reason and reason not in _ON_ITS_WAY:
            return f"its container is not started, {reason}: {_words(waiting.get('message'))}"
    return ""


def _made_for_bytes(spec: Mapping[str, Any]) -> int:
    arguments = [word for container in spec.get("containers") or () for word in container.get("args") or ()]
    found = (int(size) for name, size in pairwise(arguments) if name == "--maxmemory" and size.isdecimal())
    return next(found, 0)


def _last_line(message: str | None) -> str:
    lines = [line.strip() for line in (message or "").splitlines() if line.strip()]
    return _words(lines[-1]) if lines else "see its log"


def _words(message: str | None) -> str:
    return (message or "").strip()[:MAX_WORDS]
