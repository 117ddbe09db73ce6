"""The pod of a CachedModel: gate, cache server and engine, start order, volumes and placement.

`plugin` copies the product's packages into a volume, so that upstream images of engine and cache run unmodified. `gate`
and `cache` are native sidecars: they start before the engine and end after it, so a rollout breaks no stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvstrata.api.cachedmodel import CachedModel
from kvstrata.api.cachetier import CacheTier
from kvstrata.api.pod_template import PodTemplate
from kvstrata.contract.messages.pod_state import ACK_AUDIENCE
from kvstrata.objects import labels, names, paths, sizing
from kvstrata.objects.applied import without_empty
from kvstrata.objects.container import SECURITY, amounts, empty_dir, mount
from kvstrata.objects.context import BuildContext
from kvstrata.objects.pod import cache, engine, gate, nvme
from kvstrata.objects.pod.identity import render_id
from kvstrata.objects.quantities import MIB, binary

SECRET_FILE_MODE = 0o440
ACK_TOKEN_LIFETIME_S = 3600
KUBE_TOKEN_LIFETIME_S = 3607
"""Kubernetes' lifetime of its own tokens; it extends such a token when the kubelet renews late."""

TERMINATION_MARGIN_S = 30


def pod_template(
    ctx: BuildContext,
    domain_id: str,
    model: CachedModel,
    tiers: Sequence[CacheTier],
    identity: str,
    shard_count: int = 1,
) -> dict[str, Any]:
    """`tiers` are the ones to use, from fast to slow; Redis tiers change nothing here. `shard_count` counts the
    bundle's shards."""
    chosen = model.spec.engine.pod_template or PodTemplate()
    own_labels = labels.of_model(model.name) | {labels.IDENTITY: identity, labels.RENDER: render_id(model)}
    spec: dict[str, Any] = {
        "serviceAccountName": names.model_child(model.name),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": engine.DRAIN_TIMEOUT_S + TERMINATION_MARGIN_S,
        "securityContext": pod_security(ctx),
        "initContainers": [
            plugin_container(ctx, model),
            gate.build_container(ctx, model, identity, sizing.gate_limit_bytes(model, shard_count)),
            cache.build_container(domain_id, model, tiers, identity, ctx.nodefs_reserve_percent),
        ],
        "containers": [engine.build_container(model, tiers)],
        "volumes": _volumes(model, tiers, shard_count),
        **placement(chosen, labels.selector_of_model(model.name)),
    }
    return {
        "metadata": {
            "labels": labels.merged(chosen.labels, own_labels),
            "annotations": labels.merged(chosen.annotations, {labels.IDENTITY: identity}),
        },
        "spec": spec,
    }


_PLAIN = ("cpu", "memory", "ephemeral-storage")


def plugin_container(ctx: BuildContext, model: CachedModel) -> dict[str, Any]:
    """It ends before the others start, so it gets the engine's requests and limits, which pass where the engine's do
    (LimitRange, ResourceQuota), and a pod asks for no more; but no devices."""
    chosen = model.spec.engine.resources
    parts = (chosen.requests, chosen.limits) if chosen is not None else ({}, {})
    requests, limits = ({name: part[name] for name in part if name in _PLAIN} for part in parts)
    default = amounts(requests={"cpu": "10m", "memory": "16Mi"}, limits={"memory": "64Mi"})
    return {
        "name": "plugin",
        "image": ctx.sidecar_image,
        "imagePullPolicy": ctx.image_pull_policy,
        "command": ["cp", "-R", f"{paths.PLUGIN_SOURCE}/.", paths.PLUGIN],
        "resources": amounts(requests, limits) or default,
        "securityContext": SECURITY,
        "volumeMounts": [mount("plugin", paths.PLUGIN)],
    }


def pod_security(ctx: BuildContext) -> dict[str, Any]:
    """Return the pod's part of the restricted Pod Security Standard; one user id, because sockets are shared. A
    platform that chooses ids gives all containers of a pod the same."""
    ids = dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), ctx.run_as) if ctx.run_as is not None else {}
    return {"runAsNonRoot": True, **ids, "seccompProfile": {"type": "RuntimeDefault"}}


def placement(chosen: PodTemplate, selector: Mapping[str, str]) -> dict[str, Any]:
    spread = [dict(constraint) for constraint in chosen.topology_spread_constraints] or [
        {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": dict(selector)},
        }
    ]
    return without_empty(
        {
            "nodeSelector": dict(chosen.node_selector),
            "tolerations": [without_empty(toleration.to_kubernetes()) for toleration in chosen.tolerations],
            "affinity": chosen.affinity,
            "topologySpreadConstraints": spread,
            "priorityClassName": chosen.priority_class_name,
            "runtimeClassName": chosen.runtime_class_name,
            "imagePullSecrets": [{"name": reference.name} for reference in chosen.image_pull_secrets],
            "schedulerName": chosen.scheduler_name,
            "dnsPolicy": chosen.dns_policy,
            "dnsConfig": chosen.dns_config,
        }
    )


def _volumes(model: CachedModel, tiers: Sequence[CacheTier], shard_count: int) -> list[dict[str, Any]]:
    namespace = {"apiVersion": "v1", "fieldPath": "metadata.namespace"}
    volumes = [
        {"name": "plugin", "emptyDir": {"sizeLimit": "16Mi"}},
        _memory("policy", sizing.policy_volume_bytes(shard_count)),
        _memory("link", MIB),
        _memory("engine-socket", MIB),
        _memory("shm", sizing.shared_memory_bytes(model, tiers)),
        empty_dir("gate-tmp", "64Mi"),
        empty_dir("cache-tmp", "1Gi"),
        empty_dir("engine-tmp", model.spec.engine.temporary_size),
        {"name": "gate-tls", "secret": _secret_files(names.gate_tls(model.name))},
        _projected("ack-token", _token(ACK_TOKEN_LIFETIME_S, audience=ACK_AUDIENCE)),
        _projected(
            "kube-token",
            _token(KUBE_TOKEN_LIFETIME_S),
            {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
            {"downwardAPI": {"items": [{"path": "namespace", "fieldRef": namespace}]}},
        ),
    ]
    if model.spec.gate.tls.secret_ref is not None:
        volumes.append({"name": "caller-tls", "secret": _secret_files(model.spec.gate.tls.secret_ref.name)})
    return [*volumes, *nvme.volumes(tiers), *engine.weight_volumes(model), *engine.user_volumes(model)]


def _memory(name: str, size_bytes: int) -> dict[str, Any]:
    return {"name": name, "emptyDir": {"medium": "Memory", "sizeLimit": binary(size_bytes)}}


def _secret_files(secret: str) -> dict[str, Any]:
    return {"secretName": secret, "defaultMode": SECRET_FILE_MODE}


def _projected(name: str, *sources: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, "projected": {"defaultMode": SECRET_FILE_MODE, "sources": list(sources)}}


def _token(lifetime_s: int, **fields: str) -> dict[str, Any]:
    return {"serviceAccountToken": {**fields, "expirationSeconds": lifetime_s, "path": "token"}}
