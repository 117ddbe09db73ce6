"""Pods of managed Redis servers, from the API server's dictionaries."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from itertools import pairwise
from typing import Any

from kvstrata.model.redis.cluster import ServerPod
from kvstrata.objects import labels, names
from kvstrata.plan.ownership import controllers

MAX_WORDS = 200
"""How many characters of others' words are repeated."""

_BACKING_OFF = "CrashLoopBackOff"
"""One that ended once is started at once, and needs nobody's help."""

_ON_ITS_WAY = ("ContainerCreating", "PodInitializing")
_PULLING = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable")


def parse_server_pod(raw: Mapping[str, Any]) -> tuple[str, ServerPod | None]:
    """Return the tier of a managed server's pod, and the pod; None for any other pod."""
    metadata, spec, status = raw["metadata"], raw.get("spec") or {}, raw.get("status") or {}
    own = metadata.get("labels") or {}
    tier = own.get(labels.TIER, "")
    place = _place(tier, metadata["name"]) if tier else None
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
    """Return when a pod that is being deleted should be gone: the API server has added its grace period."""
    told = metadata.get("deletionTimestamp")
    return datetime.fromisoformat(told) if told else None


def trouble(status: Mapping[str, Any]) -> str:
    """Return why a pod does not come up, in words that stay the same while that does; empty if nothing is known.

    Kubernetes' own messages tell how long it will wait until it tries again, and change with that.
    """
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


def _place(tier: str, pod: str) -> tuple[int, int] | None:
    return (0, 0) if names.is_single_server(tier, pod) else names.place_in_cluster(tier, pod)


def _made_for_bytes(spec: Mapping[str, Any]) -> int:
    arguments = [word for container in spec.get("containers") or () for word in container.get("args") or ()]
    found = (int(size) for name, size in pairwise(arguments) if name == "--maxmemory" and size.isdecimal())
    return next(found, 0)


def _last_line(message: str | None) -> str:
    lines = [line.strip() for line in (message or "").splitlines() if line.strip()]
    return _words(lines[-1]) if lines else "see its log"


def _words(message: str | None) -> str:
    return (message or "").strip()[:MAX_WORDS]
