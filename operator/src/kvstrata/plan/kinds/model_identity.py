"""Fingerprints of a model's engines: which pods have which, and whether pods with one declared identity agree."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from kvstrata.api.cachedmodel import CachedModel
from kvstrata.api.cachedmodel_status import MAX_FINGERPRINTS
from kvstrata.api.conditions import ConditionType
from kvstrata.api.reasons import ModelReason, SharedReason
from kvstrata.contract.messages.pod_state import PodState
from kvstrata.contract.store.redis_keys import resolved
from kvstrata.model.pods import Pod
from kvstrata.model.world import World
from kvstrata.objects import names
from kvstrata.plan.conditions import Finding, false, true, unknown

KIND = ConditionType.IDENTITY_RESOLVED


def identity_of(world: World, pod: Pod) -> str:
    """Return the resolved identity of a pod's blocks, empty if it has none or is not known."""
    reported = world.states.get(pod.uid)
    if reported is None or not reported.state.fingerprint:
        return ""
    return resolved(reported.state.identity, reported.state.fingerprint)


def why_without_reuse(state: PodState) -> str:
    return state.unresolved or "it runs a version without fingerprints, or has just started"


def resolution(world: World, model: CachedModel) -> Finding | None:
    """Judge whether every serving pod has a fingerprint, and the same as all others with its declared identity; None
    without serving pods."""
    if not world.serving_pods(model.name):
        return None
    reported = _reported(world, model)
    if not reported:
        return unknown(KIND, SharedReason.NO_LIVE_PODS, "no pod serves: there is no engine with an identity")
    for pod, state in reported:
        if not state.fingerprint:
            why = f"pod {pod.name} serves without reuse: {why_without_reuse(state)}"
            return false(KIND, SharedReason.FINGERPRINT_MISSING, why)
    groups = _groups(reported)
    for ((identity, fingerprint), members), ((other_identity, other), others) in pairwise(groups.items()):
        if identity == other_identity:
            first, second = members[0], others[0]
            return false(
                KIND,
                ModelReason.FINGERPRINTS_DIFFER,
                f"pods {first[0].name} ({fingerprint}) and {second[0].name} ({other}) share no blocks: they differ"
                f" in {_differences(first[1].facts, second[1].facts)}; to restart all: kubectl -n "
                f"{model.namespace} rollout restart deployment {names.model_child(model.name)}",
            )
    agreed = ", ".join(fingerprint for _, fingerprint in groups)
    return true(KIND, ModelReason.IDENTITY_RESOLVED, f"engines and cache servers agree on {agreed}")


def fingerprints(world: World, model: CachedModel) -> list[dict[str, Any]]:
    """Return status.fingerprints, those of most pods first, and the others that status has, with no pods."""
    groups = sorted(_groups(_reported(world, model)).items(), key=lambda group: -len(group[1]))
    rows = [
        {
            "identity": identity,
            "fingerprint": fingerprint,
            "pods": len(members),
            "facts": [{"name": name, "value": value} for name, value in sorted(members[0][1].facts.items()) if value],
        }
        for (identity, fingerprint), members in groups
        if fingerprint
    ]
    known = {(row["identity"], row["fingerprint"]) for row in rows}
    before = (row for row in model.status.fingerprints if (row.identity, row.fingerprint) not in known)
    return [*rows, *(row.to_kubernetes() | {"pods": 0} for row in before)][:MAX_FINGERPRINTS]


def left_fingerprints(world: World, model: CachedModel, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return those of `rows` (`fingerprints`) that no pod has; none before every serving pod has reported its own."""
    pods = world.serving_pods(model.name)
    known = bool(pods) and all(identity_of(world, pod) for pod in pods)
    return [row for row in rows if known and not row["pods"]]


def _reported(world: World, model: CachedModel) -> list[tuple[Pod, PodState]]:
    pods = world.serving_pods(model.name)
    return [(pod, reported.state) for pod in pods if (reported := world.states.get(pod.uid)) is not None]


def _groups(reported: Sequence[tuple[Pod, PodState]]) -> Mapping[tuple[str, str], list[tuple[Pod, PodState]]]:
    """Return the pods by declared identity and fingerprint, in this order."""
    groups: dict[tuple[str, str], list[tuple[Pod, PodState]]] = defaultdict(list)
    for pod, state in reported:
        groups[state.identity, state.fingerprint].append((pod, state))
    return dict(sorted(groups.items()))


def _differences(first: Mapping[str, str], second: Mapping[str, str]) -> str:
    names = sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))
    shown = [f"{name} ({first.get(name, '-')}, {second.get(name, '-')})" for name in names]
    return ", ".join(shown) or "nothing reported"
