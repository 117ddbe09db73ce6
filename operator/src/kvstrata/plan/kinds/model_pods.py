"""Why the pods of a CachedModel do not come up, and when to read the events about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from kvstrata.api.cachedmodel import CachedModel
from kvstrata.api.cachetier import CacheTier, Medium
from kvstrata.api.reasons import ModelReason
from kvstrata.model.pods import Pod, Trouble
from kvstrata.model.world import World
from kvstrata.objects.quantities import readable
from kvstrata.plan.actions import ReadEvents, key_of
from kvstrata.plan.pod_trouble import looks_due, of_deployment, of_events, requested

_PULL_SECRETS = "FailedToRetrieveImagePullSecret"


def why_not_up(world: World, model: CachedModel, deployment: Mapping[str, Any]) -> Trouble | None:
    """Return which pod does not come up, why, and how many more; None if no cause is known. A lasting one is first."""
    refused = of_deployment(deployment.get("status") or {})
    if refused is not None:
        return refused
    volumes = _secrets_of_volumes(deployment["spec"]["template"]["spec"])
    known = ((pod, _trouble(world, pod, volumes)) for pod in _not_up(world, model))
    found = [(pod, trouble) for pod, trouble in known if trouble is not None]
    if not found:
        return None
    pod, trouble = min(found, key=lambda one: not one[1].lasting)
    more = f" ({len(found) - 1} more do not come up)" if len(found) > 1 else ""
    size = ""
    if trouble.reason == ModelReason.UNSCHEDULABLE:
        size = _size(world, model, deployment, trouble) + _room(world, model)
    return replace(trouble, message=f"pod {pod.name}: {trouble.message}{size}{more}")


def not_running(world: World, model: CachedModel) -> int:
    """Return the number of pods of which no container has started; they have the newest template, as a rule."""
    return sum(not pod.ever_ran for pod in _not_up(world, model))


def event_questions(world: World, model: CachedModel, now: datetime) -> tuple[tuple[ReadEvents, ...], float | None]:
    """Return the looks at events that are due, and after how many seconds the next one is. The status of a pod
    whose volumes cannot be mounted does not show it."""
    waiting = {pod.uid: pod.scheduled_at for pod in _not_up(world, model) if _needs_events(pod)}
    return looks_due(world, waiting, key_of(model), now)


def _not_up(world: World, model: CachedModel) -> list[Pod]:
    pods = sorted((world.pods.get(model.name) or {}).items())
    return [pod for _, pod in pods if not (pod.ready or pod.deleting or pod.finished)]


def _needs_events(pod: Pod) -> bool:
    if pod.trouble is not None:
        return pod.trouble.reason == ModelReason.IMAGE_NOT_PULLED
    return pod.scheduled and not pod.ever_ran


def _trouble(world: World, pod: Pod, volumes: Mapping[str, str]) -> Trouble | None:
    look = world.event_looks.get(pod.uid) if _needs_events(pod) else None
    warnings = look.warnings if look is not None else ()
    if pod.trouble is None:
        return of_events(warnings, volumes)
    if any(warning.reason == _PULL_SECRETS for warning in warnings):
        more = "; a Secret of podTemplate.imagePullSecrets does not exist: create it, or correct its name"
        return Trouble(pod.trouble.reason, pod.trouble.message + more, lasting=True)
    return pod.trouble


def _size(world: World, model: CachedModel, deployment: Mapping[str, Any], trouble: Trouble) -> str:
    """Return the size that a pod asks for, and the tiers' part of it."""
    asked = requested(deployment["spec"]["template"], trouble.message)
    listed = (world.tiers[name] for name in model.tier_names if name in world.tiers)
    parts = [
        f"{readable(tier.spec.capacity_bytes)} of that for CacheTier {tier.name}"
        for tier in listed
        if _takes(tier, asked)
    ]
    remedy = "lower its capacityPerPod or" if parts else "lower the resources of spec.engine, or"
    return f". {', '.join([asked[:1].upper() + asked[1:], *parts])}: {remedy} add a node with room" if asked else ""


def _room(world: World, model: CachedModel) -> str:
    """Return the remedy for a new pod that waits for the room that an old pod takes; empty if it cannot be that."""
    surge = model.spec.engine.rollout.max_surge
    if (surge is not None and surge.is_zero) or not any(pod.ready for pod in world.live_pods(model.name)):
        return ""
    return ". If old pods take the room, set engine.rollout.maxSurge to 0: an old pod then ends before a new one starts"


def _takes(tier: CacheTier, asked: str) -> bool:
    if asked.endswith(" memory"):
        return tier.spec.medium is Medium.CPU
    nvme = tier.spec.nvme
    return asked.endswith(" ephemeral-storage") and nvme is not None and nvme.empty_dir is not None


def _secrets_of_volumes(spec: Mapping[str, Any]) -> dict[str, str]:
    found = dict[str, str]()
    for volume in spec.get("volumes") or ():
        sources = ({"secret": volume.get("secret")}, *((volume.get("projected") or {}).get("sources") or ()))
        secrets = [source["secret"] for source in sources if source.get("secret")]
        named = [secret.get("secretName") or secret.get("name") for secret in secrets]
        if named:
            found[volume["name"]] = f"Secret {' or '.join(named)}"
    return found
