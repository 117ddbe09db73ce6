"""The Job that deletes keyspaces from one tier, and its Secret and NetworkPolicy.

They are in the operator's namespace, because a namespace under deletion can hold no Job. The Secret holds the order and
copies of the tier's password and certificate authority. The pod has no token and reaches only the tier and DNS. The Job
is created first, suspended, and owns the rest, so that nothing is left behind after a crash.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_network
from typing import Any

from kvstrata.api.cachetier import CacheTier
from kvstrata.api.pod_template import PodTemplate
from kvstrata.contract.policy.tiers import AllowedServers
from kvstrata.contract.wire import canonical_json, to_wire
from kvstrata.objects import labels, names, paths
from kvstrata.objects.applied import without_empty
from kvstrata.objects.container import SECURITY, amounts, environment, mount
from kvstrata.objects.context import BuildContext
from kvstrata.objects.labels import metadata
from kvstrata.objects.pod.access import DNS, pods_in
from kvstrata.objects.pod.pod import SECRET_FILE_MODE, pod_security
from kvstrata.objects.quantities import KIB, MIB, binary
from kvstrata.objects.secret import build_secret
from kvstrata.objects.tier_link import RedisLink, redis_link

CONTAINER = "delete"
ORDER_FILE = "order.json"
PASSWORD_FILE = "password"  # noqa: S105  (a file's name)
AUTHORITY_FILE = "ca.crt"

ACTIVE_DEADLINE_S = 3600
"""Limit of one Job: the next round continues, and no count is lost."""

KEPT_S = 3600
"""How long a finished Job stays if the operator does not remove it."""

PATIENCE_MS = 5_000
"""Timeout of a server: no request waits for a deletion, and one that gives up is repeated."""

MAX_ORDER_BYTES = 900 * KIB
"""Limit of an order, about 26,000 keyspaces; a Secret holds 1 MiB."""

BASE_BYTES = 64 * MIB
BYTES_OF_A_KEYSPACE = 16 * KIB
"""Memory of the program and of each keyspace's buckets (measured: 25 MiB and 10 KiB)."""


@dataclass(frozen=True, slots=True)
class TierDeletion:
    """The deletion of keyspaces from all primaries of a tier by one Job.

    `erasure` is the uid of the order, `round` counts the Jobs for this tier from 1; with the tier's name they name the
    Job. `domain` is the domain's id; since `revision` no bundle of it has the keyspaces. `strays` are names of values
    without an index, found by a look. With `identities` the keyspaces stay in use, and only blocks of these cache
    identities are deleted; with `chunks` they are in use again afterwards, and only these chunks are deleted.
    """

    erasure: str
    tier: CacheTier
    round: int
    domain: str
    revision: int
    keyspaces: tuple[str, ...]
    strays: tuple[str, ...] = ()
    identities: tuple[str, ...] = ()
    chunks: tuple[str, ...] = ()


def deletion_order(deletion: TierDeletion, allowed: AllowedServers | None = None) -> bytes:
    """Return the order file, with as many strays as fit; another look names the rest. `allowed` limits servers that the
    operator does not run. Raises ValueError if the keyspaces do not fit, and for a tier that is not in Redis."""
    order: dict[str, Any] = {
        "domain": deletion.domain,
        "revision": deletion.revision,
        "keyspaces": list(deletion.keyspaces),
        "tier": _tier_params(deletion.tier),
        "sums": True,
    }
    if allowed is not None and deletion.tier.spec.managed is None:
        order["tier"]["allowed"] = to_wire(allowed)
    for name, values in (("chunks", deletion.chunks), ("identities", deletion.identities)):
        if values:
            order[name] = list(values)
    room = MAX_ORDER_BYTES - len(canonical_json(order))
    if room < 0:
        too_many = f"{len(deletion.keyspaces)} keyspaces are more than one deletion"
        raise ValueError(f"{too_many} from CacheTier {deletion.tier.name} takes")
    named: list[str] = []
    for stray in deletion.strays:
        room -= len(stray) + 3
        if room < 0:
            break
        named.append(stray)
    return canonical_json(order | ({"strays": named} if named else {}))


def build_deletion_job(ctx: BuildContext, deletion: TierDeletion) -> dict[str, Any]:
    """Return the suspended Job of a deletion."""
    tier = deletion.tier
    name = names.deletion_job(deletion.erasure, tier.name, deletion.round)
    own_labels = labels.of_deletion(deletion.erasure)
    memory = BASE_BYTES + len(deletion.keyspaces) * BYTES_OF_A_KEYSPACE
    requests = {"cpu": "50m", "memory": binary(memory), **ctx.job_resources.get("requests", {})}
    limits = {"memory": binary(2 * memory), **ctx.job_resources.get("limits", {})}
    container = {
        "name": CONTAINER,
        "image": ctx.sidecar_image,
        "imagePullPolicy": ctx.image_pull_policy,
        "command": ["python3", "-m", "kvstrata_sidecar.delete_job", f"{paths.DELETION}/{ORDER_FILE}"],
        "env": environment({"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": paths.PLUGIN_SOURCE}),
        "resources": amounts(requests, limits),
        "securityContext": SECURITY,
        "volumeMounts": [mount("deletion", paths.DELETION, read_only=True)],
    }
    pod = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        # It can be killed at any moment, and as PID 1 it would ignore SIGTERM.
        "terminationGracePeriodSeconds": 1,
        "securityContext": pod_security(ctx),
        "imagePullSecrets": [{"name": secret} for secret in ctx.image_pull_secrets],
        **ctx.job_placement,
        "containers": [container],
        "volumes": [{"name": "deletion", "secret": {"secretName": name, "defaultMode": SECRET_FILE_MODE}}],
    }
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "namespace": ctx.operator_namespace, "labels": own_labels},
        "spec": {
            "suspend": True,
            # One Job, one pod, one report: the next round retries.
            "backoffLimit": 0,
            "activeDeadlineSeconds": ACTIVE_DEADLINE_S,
            "ttlSecondsAfterFinished": KEPT_S,
            "template": {
                "metadata": {"labels": own_labels | labels.deletes_from(tier.namespace, tier.name)},
                "spec": without_empty(pod),
            },
        },
    }
    return ctx.labelled(job, PodTemplate())


def needed_secrets(tier: CacheTier) -> Mapping[str, tuple[str, str]]:
    link = _link(tier)
    sources = {PASSWORD_FILE: link.password, AUTHORITY_FILE: link.ca}
    return {file: source for file, source in sources.items() if source is not None}


def build_deletion_secret(job: Mapping[str, Any], order: bytes, files: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the Secret that the Job's pod mounts; `files` are the values of `needed_secrets` by file name."""
    data = {**files, ORDER_FILE: order}
    return build_secret(*_about(job), data) | {"immutable": True}


def build_deletion_networkpolicy(job: Mapping[str, Any], tier: CacheTier, allowed: AllowedServers) -> dict[str, Any]:
    """Return the policy of the Job's pod: egress to the tier's servers and DNS, no ingress. External servers have no
    pods to select, so pods and addresses are limited to the tier's ports. For an external cluster any port is allowed,
    because its servers announce their ports."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(*_about(job)),
        "spec": {
            "podSelector": {"matchLabels": job["spec"]["template"]["metadata"]["labels"]},
            "policyTypes": ["Ingress", "Egress"],
            "egress": [DNS, _to_servers(tier, allowed)],
        },
    }


def _to_servers(tier: CacheTier, allowed: AllowedServers) -> dict[str, Any]:
    if tier.spec.managed is not None:
        servers = pods_in(tier.namespace, labels.selector_of_tier(tier.name))
        return {"to": [servers], "ports": [{"protocol": "TCP", "port": paths.REDIS_PORT}]}
    ports = {"port": 1, "endPort": 65535} if tier.spec.is_cluster else {"port": _link(tier).endpoints[0][1]}
    # In some networks, blocks of addresses match no pods.
    to = [{"namespaceSelector": {}}, *({"ipBlock": block} for block in _blocks(tier, allowed))]
    return {"to": to, "ports": [{"protocol": "TCP", **ports}]}


def _blocks(tier: CacheTier, allowed: AllowedServers) -> list[dict[str, Any]]:
    """Return the addresses that external servers may have: that of the tier, the networks of the installation, or all
    but local and reserved ones. A link-local address has a node's credentials in many clouds."""
    (host, port), *_ = _link(tier).endpoints
    with suppress(ValueError):  # a name
        if not tier.spec.is_cluster:
            return [{"cidr": str(ip_network(host))}] if allowed.allows(host, [host], port) else []
    if allowed.networks and not allowed.hosts:
        return [{"cidr": one} for one in allowed.networks]
    reserved = allowed.reserved_at(range(65_536) if tier.spec.is_cluster else (port,))
    barred = [str(ip_network(one)) for one in ("127.0.0.0/8", "169.254.0.0/16", "::1", "fe80::/10", *sorted(reserved))]
    return [{"cidr": c, "except": [one for one in barred if (":" in one) == (":" in c)]} for c in ("0.0.0.0/0", "::/0")]


def _tier_params(tier: CacheTier) -> dict[str, Any]:
    link = _link(tier)
    params = {
        "name": tier.name,
        "endpoints": [{"host": host, "port": port} for host, port in link.endpoints],
        "cluster": tier.spec.is_cluster,
        "connect_timeout_ms": PATIENCE_MS,
        "io_timeout_ms": PATIENCE_MS,
        "tls": {"ca_file": f"{paths.DELETION}/{AUTHORITY_FILE}"} if link.ca is not None else None,
        "username": link.username,
        "password_file": f"{paths.DELETION}/{PASSWORD_FILE}" if link.password is not None else None,
    }
    return {name: value for name, value in params.items() if value is not None}


def _link(tier: CacheTier) -> RedisLink:
    link = redis_link(tier)
    if link is None:
        raise ValueError(f"CacheTier {tier.name} is not in Redis: nothing deletes from it but its pods")
    return link


def _about(job: Mapping[str, Any]) -> tuple[str, str, dict[str, str], dict[str, Any]]:
    """Return name, namespace, labels and owner of the objects that a Job owns."""
    own = job["metadata"]
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": own["name"], "uid": own["uid"]}
    return own["name"], own["namespace"], dict(own["labels"]), owner
