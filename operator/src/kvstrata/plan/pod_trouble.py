"""Why a pod does not come up: from its status, and from events about it or about the object that creates it.

Sentences stay the same while the cause does. Kubernetes' own texts contain the time until its next attempt, and the
number of earlier ones.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from fractions import Fraction
from typing import Any

from kvstrata.api.reasons import ModelReason as Reason
from kvstrata.api.reasons import SharedReason
from kvstrata.api.scalars import ResourceQuantity
from kvstrata.model.pods import Trouble, Warned
from kvstrata.model.refs import Key
from kvstrata.model.world import World
from kvstrata.objects.quantities import readable
from kvstrata.plan.actions import ReadEvents

FIRST_LOOK_S = 10.0
LOOK_AGAIN_S = 15.0
"""Volumes of most pods are mounted within seconds, so most pods cause no look."""

MAX_WORDS = 300
"""Characters that are quoted."""

STEADY_RESTARTS = 2
"""The first restart is immediate and needs no help; a container that runs again after more is still in trouble."""

LASTING_PAUSE_S = 150.0
"""A pause of the kubelet before a start after which a container is not expected to run by itself. The kubelet reaches
it after five quick ends; a pod's count of restarts covers its whole life."""

STEADY_RUN_S = 600.0
"""After a run that long the kubelet starts a container without a pause, and an end counts as the first."""

_ON_ITS_WAY = ("ContainerCreating", "PodInitializing")
_PULLING = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable")
_NO_HOST = "the registry's host cannot be resolved: correct it"
_WHY_NOT_PULLED = (
    (re.compile(r"ErrImageNeverPull"), "the node has no such image, and imagePullPolicy is Never: load it there"),
    (re.compile(r"InvalidImageName|invalid reference"), "the name is malformed: correct it"),
    (re.compile(r"no such host"), _NO_HOST),
    (
        re.compile(r"40[13]|denied|authori[sz]ation|unauthorized|authenticat", re.IGNORECASE),
        "the registry refuses it: correct the name, or name a Secret with credentials in imagePullSecrets",
    ),
    (re.compile(r"not found|manifest unknown", re.IGNORECASE), "there is no such image or tag: correct the name"),
)
_CHECK_ALL = "check its name and tag, whether nodes reach the registry, and imagePullSecrets"

_MISSING_SECRET = re.compile(r"""(secret|configmap) "([^"]+)" not found""")
_MISSING_KEY = re.compile(r"references non-existent (?:secret|config) key: ([-._a-zA-Z0-9]+)")
_VOLUME = re.compile(r"""for volume "([^"]+)" ?: ?(.*)""", re.DOTALL)
_TRANSIENT = "timed out waiting for the condition"
_NO_CLAIM = re.compile(r'persistentvolumeclaim "[^"]*" not found')
_PASSING = re.compile(
    r"calling webhook|timed? ?out|looking up service account|connection|leader changed", re.IGNORECASE
)
"""Refusals by parts of the cluster that are away, or of an object that is about to be created."""
_PAUSE = re.compile(r"back-off (?:(\d+)m)?(\d+)s\b")
_PREEMPTION = re.compile(r"[.,] (?:no new claims to deallocate, )?preemption: .*", re.DOTALL)

_CONTROL = re.compile(r"\x1b\[[0-9;]*m|[^\S ]|[\x00-\x1f\x7f]")
_LOG_PREFIX = re.compile(r"^(?:\(\S+ pid=\d+\) ?)?(?:[A-Z]+ \d\d-\d\d [\d:.]+ \[[^\]]*\] )?")
_ERROR = re.compile(r"error\b|exception\b|\bfail|refuse|invalid|\bneither\b|\bno such\b|\bcannot\b", re.IGNORECASE)
_POINTER = re.compile(r"see root cause above|see stack trace|frozen |resource_tracker", re.IGNORECASE)
_CONFIDENTIAL = re.compile(
    r"[0-9a-fA-F]{32,}|\b(?:hf|sk|gh[ops]|glpat)[-_][-\w]{8,}|(?<=://)[^\s/@]+(?=@)"
    r"|(?:(?<=token)|(?<=password)|(?<=secret)|(?<=authorization)|(?<=api[-_]key))['\"]?\s*[:=]\s*['\"]?\S+",
    re.IGNORECASE,
)


def of_status(status: Mapping[str, Any]) -> Trouble | None:
    """Return a pod's trouble by its status; None if it has none that is known."""
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            why = _PREEMPTION.sub("", condition.get("message") or "") or condition.get("reason") or ""
            message = f"it cannot be scheduled: {quoted(why).rstrip('.')}"
            return Trouble(Reason.UNSCHEDULABLE, message, lasting=bool(_NO_CLAIM.search(why)))
    containers = (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ()))
    return next((found for one in containers if (found := _of_container(one)) is not None), None)


def of_events(events: Sequence[Warned], secrets: Mapping[str, str] | None = None) -> Trouble | None:
    """Return the newest trouble of events, the newest last. `secrets`: by volume, the Secrets that it is made of."""
    for event in reversed(events):
        if event.reason == "FailedCreate":
            message = f"no pod can be created: {quoted(event.message)}"
            return Trouble(Reason.PODS_REFUSED, message, lasting=not _PASSING.search(event.message))
        if event.reason in ("FailedMount", "FailedAttachVolume") and _TRANSIENT not in event.message:
            return _of_volume(event.message, secrets or {})
        if event.reason == "FailedCreatePodSandBox":
            return Trouble(Reason.CONTAINER_NOT_STARTED, f"its sandbox cannot be made: {quoted(event.message)}")
    return None


def of_deployment(status: Mapping[str, Any]) -> Trouble | None:
    """Return why a Deployment's pods cannot be created; None if they can."""
    for condition in status.get("conditions") or ():
        if condition.get("type") == "ReplicaFailure" and condition.get("status") == "True":
            return of_events([Warned("FailedCreate", condition.get("message") or "")])
    return None


def requested(template: Mapping[str, Any], message: str) -> str:
    """Return a pod's request of the resource that a scheduler's message reports as insufficient; else empty."""
    spec = template["spec"]
    sidecars = (one for one in spec.get("initContainers") or () if one.get("restartPolicy") == "Always")
    for resource in ("memory", "ephemeral-storage", "cpu", "nvidia.com/gpu"):
        if f"Insufficient {resource}" in message:
            asked = sum((_request(one, resource) for one in (*spec["containers"], *sidecars)), Fraction(0))
            size = readable(int(asked)) if resource in ("memory", "ephemeral-storage") else f"{float(asked):g}"
            return f"a pod asks for {size} of {resource}"
    return ""


def looks_due(
    world: World, waiting: Mapping[str, datetime | None], again: Key, now: datetime
) -> tuple[tuple[ReadEvents, ...], float | None]:
    """Return the looks at events that are due, and after how many seconds the next one is. `waiting`: objects by UID,
    and since when they wait, None if unknown."""
    asked, left_s = list[ReadEvents](), list[float]()
    for uid, since in waiting.items():
        look = world.event_looks.get(uid)
        at, pause_s = (look.at, LOOK_AGAIN_S) if look is not None else (since, FIRST_LOOK_S)
        passed_s = (now - at).total_seconds() if at is not None else pause_s
        if passed_s >= pause_s:
            asked.append(ReadEvents(uid, again))
        left_s.append(pause_s - passed_s if passed_s < pause_s else LOOK_AGAIN_S)
    return tuple(asked), min(left_s, default=None)


def quoted(text: str | None) -> str:
    """Return a foreign text for a status: on one line, bounded, and without possible secrets and keyspaces."""
    shown = " ".join(_CONTROL.sub(" ", _CONFIDENTIAL.sub("…", text or "")).split())
    return shown if len(shown) <= MAX_WORDS else f"{shown[: MAX_WORDS - 1]}…"


def last_error(log: str | None) -> str:
    """Return the last line of a log's end that reports an error, or the last line; without time and process."""
    lines = [_LOG_PREFIX.sub("", _CONTROL.sub("", line)).strip() for line in (log or "").splitlines()]
    lines = [line for line in lines if line]
    errors = [line for line in lines if _ERROR.search(line) and not _POINTER.search(line)]
    return quoted((errors or lines)[-1]) if lines else ""


def _of_container(container: Mapping[str, Any]) -> Trouble | None:
    state, name = container.get("state") or {}, container.get("name")
    waiting, image = state.get("waiting") or {}, container.get("image")
    reason = waiting.get("reason")
    if reason in _PULLING:
        text = f"{reason} {waiting.get('message')}"
        why = next((why for sign, why in _WHY_NOT_PULLED if sign.search(text)), _CHECK_ALL)
        message = f"the image {image} of container {name} cannot be pulled: {why}"
        return Trouble(Reason.IMAGE_NOT_PULLED, message, lasting=why not in (_NO_HOST, _CHECK_ALL))
    ended, running = (container.get("lastState") or {}).get("terminated") or {}, state.get("running") or {}
    restarts = "running" in state and not container.get("started") and not container.get("ready")
    restarts = restarts and int(container.get("restartCount") or 0) >= STEADY_RESTARTS
    steady = _between_s(ended.get("startedAt"), ended.get("finishedAt")) >= STEADY_RUN_S
    if ended and ((restarts and not steady) or reason == "CrashLoopBackOff"):
        how = f"{ended.get('reason') or 'Error'}, exit code {ended.get('exitCode')}"
        why = last_error(ended.get("message")) or f"see kubectl logs --previous -c {name}"
        pause = _PAUSE.search(waiting.get("message") or "")
        paused_s = _between_s(ended.get("finishedAt"), running.get("startedAt"))
        more, lasting = "", (60 * int(pause[1] or 0) + int(pause[2]) if pause else paused_s) >= LASTING_PAUSE_S
        if ended.get("reason") == "OOMKilled":
            more = "; raise its memory limit"
        elif name == "engine" and "unrecognized arguments" in why:
            more, lasting = "; correct engine.args of its CachedModel", True
        return Trouble(
            Reason.CONTAINER_EXITS, f"container {name} ends again and again, with {how}: {why}{more}", lasting
        )
    if reason and reason not in _ON_ITS_WAY and reason != "CrashLoopBackOff":
        message = f"container {name} is not started, {reason}: {quoted(waiting.get('message'))}"
        return Trouble(Reason.CONTAINER_NOT_STARTED, message, lasting=reason == "CreateContainerConfigError")
    return None


def _between_s(began: str | None, ended: str | None) -> float:
    return (datetime.fromisoformat(ended) - datetime.fromisoformat(began)).total_seconds() if began and ended else 0.0


def _of_volume(message: str, secrets: Mapping[str, str]) -> Trouble:
    volume, why = found.groups() if (found := _VOLUME.search(message)) else ("", message)
    source = secrets.get(volume, "")
    if missing := _MISSING_SECRET.search(why):
        kind = "Secret" if missing[1] == "secret" else "ConfigMap"
        message = f"{kind} {missing[2]} of its volume {volume} does not exist: create it, or correct its name"
        return Trouble(SharedReason.SECRET_NOT_FOUND, message, lasting=True)
    if missing := _MISSING_KEY.search(why):
        lacks = source or f"a Secret of its volume {volume}"
        message = f"{lacks} has no key {missing[1]}: add it, or correct the key's name"
        return Trouble(SharedReason.SECRET_NOT_FOUND, message, lasting=True)
    where = f"its volume {volume} ({source})" if source else f"its volume {volume}".rstrip()
    return Trouble(Reason.VOLUME_NOT_MOUNTED, f"{where} cannot be mounted: {quoted(why)}")


def _request(container: Mapping[str, Any], resource: str) -> Fraction:
    resources = container.get("resources") or {}
    found = (resources.get("requests") or {}).get(resource) or (resources.get("limits") or {}).get(resource) or "0"
    return ResourceQuantity(found).in_units
