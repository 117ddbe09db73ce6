"""Network access to gates and managed Redis servers, and the gate's rights at the API server.

Servers open connections to one another and to DNS only. Egress of models' pods is limited only where the installation
names ports: no NetworkPolicy rule names the API server on every cluster and still protects. A gate reads its own bundle
and its callers' keys, by name, nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvstrata.api.cachedmodel import CachedModel
from kvstrata.api.cachetier import CacheTier
from kvstrata.contract.messages.pod_state import CONTROL_PORT
from kvstrata.contract.policy.pools import MAX_POOLS
from kvstrata.contract.policy.shard_slots import SLOTS
from kvstrata.objects import labels, names, paths
from kvstrata.objects.context import BuildContext
from kvstrata.objects.owned import model_object, tier_object
from kvstrata.objects.pod import gate

DNS = {"ports": [{"protocol": protocol, "port": port} for port in (53, 5353) for protocol in ("UDP", "TCP")]}
"""Egress to the cluster's DNS: rules apply to the pods behind its Service, some of which listen on the second port."""


def build_model_networkpolicy(ctx: BuildContext, model: CachedModel) -> dict[str, Any]:
    """Return the policy of a model's pods: callers from the namespace, the operator for control, and the
    installation's peers for metrics. The kubelet's probes come from the pod's own node, which is always admitted."""
    # Without a namespace, a peer of the installation is in the operator's.
    here = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": ctx.operator_namespace}}}
    peers = [{**(here if "podSelector" in peer else {}), **peer} for peer in ctx.metrics_from]
    spec = {
        "podSelector": {"matchLabels": labels.selector_of_model(model.name)},
        "policyTypes": ["Ingress"],
        "ingress": [
            {"from": [{"podSelector": {}}], "ports": [_tcp(gate.caller_port(model))]},
            {"from": [_operator(ctx)], "ports": [_tcp(CONTROL_PORT)]},
            {**({"from": peers} if peers else {}), "ports": [_tcp(paths.HEALTH_PORT)]},
        ],
    }
    if ctx.egress_ports:
        servers = {"podSelector": {"matchLabels": labels.OWNED | {labels.COMPONENT: "redis"}}}
        anywhere = {"ports": [_tcp(port) for port in ctx.egress_ports]}
        to_servers = {"to": [servers], "ports": [_tcp(paths.REDIS_PORT)]}
        spec |= {"policyTypes": ["Ingress", "Egress"], "egress": [DNS, anywhere, to_servers]}
    return model_object("networking.k8s.io/v1", "NetworkPolicy", model, spec=spec)


def build_redis_networkpolicy(ctx: BuildContext, tier: CacheTier, models: Sequence[str] = ()) -> dict[str, Any] | None:
    """Return the policy of a managed Redis tier; None for other tiers. Admitted are pods of `models`, the operator, and
    pods of the tier's deletion Jobs. Only the servers reach the cluster bus."""
    if tier.spec.managed is None:
        return None
    servers = {"podSelector": {"matchLabels": labels.selector_of_tier(tier.name)}}
    deletions = pods_in(ctx.operator_namespace, labels.deletes_from(tier.namespace, tier.name))
    named = {"matchExpressions": [{"key": labels.MODEL, "operator": "In", "values": sorted(models)}]}
    callers = [*([{"podSelector": named}] if models else []), _operator(ctx), deletions]
    among_servers = [_tcp(paths.REDIS_PORT), _tcp(paths.REDIS_BUS_PORT)]
    ingress = [
        {"from": callers, "ports": [_tcp(paths.REDIS_PORT)]},
        {"from": [servers], "ports": among_servers},
    ]
    egress = [DNS, {"to": [servers], "ports": among_servers}]
    spec = {**servers, "policyTypes": ["Ingress", "Egress"], "ingress": ingress, "egress": egress}
    return tier_object("networking.k8s.io/v1", "NetworkPolicy", tier, spec=spec)


def _operator(ctx: BuildContext) -> dict[str, Any]:
    return pods_in(ctx.operator_namespace, ctx.operator_labels)


def pods_in(namespace: str, pods: Mapping[str, str]) -> dict[str, Any]:
    return {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "podSelector": {"matchLabels": dict(pods)},
    }


def _tcp(port: int) -> dict[str, Any]:
    return {"protocol": "TCP", "port": port}


RBAC = "rbac.authorization.k8s.io"


def build_serviceaccount(model: CachedModel) -> dict[str, Any]:
    """Return the ServiceAccount of a model's pods. Its token is mounted only in the gate."""
    return model_object("v1", "ServiceAccount", model, automountServiceAccountToken=False)


def build_role(model: CachedModel, shard_count: int, *, has_pools: bool = False) -> dict[str, Any]:
    """Return the Role. Apply it before the root: gates cannot read a shard that it does not name. `shard_count` counts
    the bundle's present and imminent shards. With `has_pools` all possible pool shards are named."""
    shards = [names.bundle_shard(model.name, index, slot) for index in range(shard_count) for slot in SLOTS]
    if has_pools:
        shards += [names.pool_shard(model.name, index, slot) for index in range(MAX_POOLS) for slot in SLOTS]
    watched = [names.bundle_root(model.name), model.api_keys_secret]
    rules = [{"apiGroups": [""], "resources": ["secrets"], "resourceNames": watched, "verbs": ["get", "watch"]}]
    if shards:
        rules.append({"apiGroups": [""], "resources": ["secrets"], "resourceNames": shards, "verbs": ["get"]})
    return model_object(f"{RBAC}/v1", "Role", model, rules=rules)


def build_rolebinding(model: CachedModel) -> dict[str, Any]:
    name = names.model_child(model.name)
    role = {"apiGroup": RBAC, "kind": "Role", "name": name}
    subjects = [{"kind": "ServiceAccount", "name": name, "namespace": model.namespace}]
    return model_object(f"{RBAC}/v1", "RoleBinding", model, roleRef=role, subjects=subjects)
