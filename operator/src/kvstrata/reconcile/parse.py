"""Facts from the API server's dictionaries: owners, versions, and typed pods of gates and of managed Redis servers."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from itertools import pairwise
from typing import Any

from kvstrata.api import KINDS
from kvstrata.api.base import Resource
from kvstrata.model.pods import Pod, Unreadable
from kvstrata.model.redis.cluster import ServerPod
from kvstrata.model.refs import Key
from kvstrata.objects import labels, names
from kvstrata.objects.mark import parent_of
from kvstrata.plan.ownership import controllers
from kvstrata.plan.pod_trouble import of_status

OWN_KINDS: Mapping[str, type[Resource]] = {kind.INFO.kind: kind for kind in KINDS}


def owners(raw: Mapping[str, Any]) -> frozenset[Key]:
    """Return the objects of this API group that own a child, or of which its mark reports that."""
    metadata = raw["metadata"]
    named = {(owner["kind"], owner["name"]) for owner in metadata.get("ownerReferences") or ()} | {parent_of(raw)}
    return frozenset(Key(one[0], metadata["namespace"], one[1]) for one in named if one and one[0] in OWN_KINDS)


def parse_pod(raw: Mapping[str, Any]) -> Pod | None:
    metadata, spec, status = raw["metadata"], raw.get("spec") or {}, raw.get("status") or {}
    own = metadata.get("labels") or {}
    model = own.get(labels.MODEL)
    if not model:
        return None
    containers = [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
    scheduled = [one for one in status.get("conditions") or () if one.get("type") == "PodScheduled"]
    # The control plane clears Ready on an unreachable node, while the pod may serve on; container states stay as the
    # kubelet last reported them.
    ready = _is_ready(status) or any(one.get("name") == "gate" and one.get("ready") for one in containers)
    deleting = "deletionTimestamp" in metadata
    # The kubelet reports a pod that it rejects without containers, but with the time at which it saw it.
    only_seen = not containers and "startTime" in status
    return Pod(
        name=metadata["name"],
        uid=metadata["uid"],
        model=model,
        ip=status.get("podIP"),
        scheduled=bool(spec.get("nodeName")),
        finished=_finished(containers, deleting=deleting) or (only_seen and status.get("phase") == "Failed"),
        ever_ran=any(map(_ever_ran, containers)),
        reported=bool(containers) or only_seen,
        ready=ready,
        deleting=deleting,
        identity=own.get(labels.IDENTITY, ""),
        render_id=own.get(labels.RENDER, ""),
        scheduled_at=_moment(scheduled[0].get("lastTransitionTime")) if scheduled else None,
        trouble=None if ready else of_status(status),
        images=tuple((one["name"], image_digest(one)) for one in containers if one.get("imageID")),
        node=spec.get("nodeName") or "",
    )


def image_digest(container: Mapping[str, Any]) -> str:
    """Return the digest of a container's image from its status; empty before the kubelet reports it."""
    return "".join((container.get("imageID") or "").rpartition("sha256:")[1:])[:128]


def unreadable(raw: Mapping[str, Any], problem: str) -> Unreadable:
    metadata = raw["metadata"]
    generation = int(metadata.get("generation") or 0)
    conditions = (raw.get("status") or {}).get("conditions") or ()
    reported = any(
        c.get("type") == "Stalled" and c.get("reason") == "InvalidSpec" and c.get("observedGeneration") == generation
        for c in conditions
    )
    finalizers = tuple(metadata.get("finalizers") or ()) if "deletionTimestamp" in metadata else ()
    return Unreadable(problem, generation, metadata.get("resourceVersion", ""), reported, finalizers)


def resource_version(raw: Mapping[str, Any]) -> int:
    """Return an object's resourceVersion as a number, which clients may compare (KEP-5504)."""
    try:
        return int(raw["metadata"].get("resourceVersion") or 0)
    except ValueError:
        return 0


def _finished(containers: list[Mapping[str, Any]], *, deleting: bool) -> bool:
    """Whether the kubelet reported every container as ended. Of a pod that is being deleted some may never have
    started: it ends with its engine waiting forever. The phase is unreliable where containers ran: the control plane
    marks pods of an unreachable node as Failed."""
    ended = [one for one in containers if "terminated" in (one.get("state") or {})]
    return bool(ended) and all(one in ended or (deleting and not _ever_ran(one)) for one in containers)


def _is_ready(status: Mapping[str, Any]) -> bool:
    return any(c.get("type") == "Ready" and c.get("status") == "True" for c in status.get("conditions") or ())


def _ever_ran(container: Mapping[str, Any]) -> bool:
    state, last = container.get("state") or {}, container.get("lastState") or {}
    ran = "running" in state or "terminated" in state or "terminated" in last
    return ran or bool(container.get("restartCount"))


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
    ready = _is_ready(status)
    found = None if ready else of_status(status)
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
        trouble=found.message if found is not None else "",
        lasting=found is not None and found.lasting,
        down_since=_down_since(status),
        ever_ran=any(map(_ever_ran, containers)),
        ended=_finished(list(containers), deleting=False),
        made_for_bytes=_made_for_bytes(spec),
        ends_by=_moment(metadata.get("deletionTimestamp")),
        controller=next(iter(controllers(raw)), ""),
    )


def _down_since(status: Mapping[str, Any]) -> datetime | None:
    """Return since when a pod is not ready, or not scheduled."""
    conditions = (one for one in status.get("conditions") or () if one.get("status") == "False")
    named = (one.get("lastTransitionTime") for one in conditions if one.get("type") in ("PodScheduled", "Ready"))
    return max((moment for one in named if (moment := _moment(one))), default=None)


def _moment(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None


def _made_for_bytes(spec: Mapping[str, Any]) -> int:
    arguments = [word for container in spec.get("containers") or () for word in container.get("args") or ()]
    found = (int(size) for name, size in pairwise(arguments) if name == "--maxmemory" and size.isdecimal())
    return next(found, 0)
