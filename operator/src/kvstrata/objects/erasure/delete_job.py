"""The Job that deletes keyspaces from one tier, and its Secret and NetworkPolicy.

They are in the operator's namespace, because a namespace under deletion can hold no Job. The Secret holds the order and
copies of the tier's password and certificate authority. The pod has no token and reaches only the tier and DNS. The Job
is created first, suspended, and owns the rest, so that nothing is left behind after a crash.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvstrata.api.cachetier import CacheTier
from kvstrata.contract.wire import canonical_json
from kvstrata.objects import labels, names, paths
from kvstrata.objects.applied import without_empty
from kvstrata.objects.container import SECURITY, amounts, environment, mount
from kvstrata.objects.context import BuildContext
from kvstrata.objects.labels import metadata
from kvstrata.objects.pod.pod import SECRET_FILE_MODE, pod_security
from kvstrata.objects.quantities import KIB, MIB, binary
from kvstrata.objects.secret import build_secret
from kvstrata.objects.tier_link import AUTHORITY_FILE, PASSWORD_FILE, RedisLink, redis_link

CONTAINER = "delete"
ORDER_FILE = "order.json"

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

DNS_PORTS = (53, 5353)
"""Ports of the cluster's DNS: rules apply to the pods behind its Service, some of which listen on the second."""


def deletion_order(
    tier: CacheTier,
    domain: str,
    revision: int,
    keyspaces: tuple[str, ...],
    strays: tuple[str, ...] = (),
    identities: tuple[str, ...] = (),
    chunks: tuple[str, ...] = (),
) -> bytes:
    """Return the order file, with as many `strays` as fit; another look names the rest.

    With `identities`, only blocks computed under these are deleted, and the keyspaces stay in use.

    Raises ValueError if the keyspaces do not fit, and for a tier that is not in Redis.
    """
    order: dict[str, Any] = {
        "domain": domain,
        "revision": revision,
        "keyspaces": list(keyspaces),
        "tier": _tier_params(tier),
        "sums": True,
        **({"chunks": list(chunks)} if chunks else {}),
    }
    if identities:
        order["identities"] = list(identities)
    room = MAX_ORDER_BYTES - len(canonical_json(order))
    if room < 0:
        raise ValueError(f"{len(keyspaces)} keyspaces are more than one deletion from CacheTier {tier.name} takes")
    named: list[str] = []
    for stray in strays:
        room -= len(stray) + 3
        if room < 0:
            break
        named.append(stray)
    return canonical_json(order | ({"strays": named} if named else {}))


def build_deletion_job(ctx: BuildContext, tier: CacheTier, erasure: str, round: int, keyspaces: int) -> dict[str, Any]:
    """Return the suspended Job for an order with this number of keyspaces."""
    name = names.deletion_job(erasure, tier.name, round)
    own_labels = labels.of_deletion(erasure)
    memory = BASE_BYTES + keyspaces * BYTES_OF_A_KEYSPACE
    container = {
        "name": CONTAINER,
        "image": ctx.sidecar_image,
        "imagePullPolicy": ctx.image_pull_policy,
        "command": ["python3", "-m", "kvstrata_sidecar.delete_job", f"{paths.DELETION}/{ORDER_FILE}"],
        "env": environment({"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": paths.PLUGIN_SOURCE}),
        "resources": amounts({"cpu": "50m", "memory": binary(memory)}, {"memory": binary(2 * memory)}),
        "securityContext": SECURITY,
        "volumeMounts": [mount("deletion", paths.DELETION, read_only=True)],
    }
    pod = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        # It can be killed at any moment, and as PID 1 it would ignore SIGTERM.
        "terminationGracePeriodSeconds": 1,
        "securityContext": pod_security(),
        "imagePullSecrets": [{"name": secret} for secret in ctx.image_pull_secrets],
        **ctx.job_placement,
        "containers": [container],
        "volumes": [{"name": "deletion", "secret": {"secretName": name, "defaultMode": SECRET_FILE_MODE}}],
    }
    return {
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


def needed_secrets(tier: CacheTier) -> Mapping[str, tuple[str, str]]:
    link = _link(tier)
    sources = {PASSWORD_FILE: link.password, AUTHORITY_FILE: link.ca}
    return {file: source for file, source in sources.items() if source is not None}


def build_deletion_secret(job: Mapping[str, Any], order: bytes, files: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the Secret that the Job's pod mounts; `files` are the values of `needed_secrets` by file name."""
    data = {**files, ORDER_FILE: order}
    built = build_secret(*_place(job), _own_labels(job), owner_of(job), data)
    return built | {"immutable": True}


def build_deletion_networkpolicy(job: Mapping[str, Any], tier: CacheTier) -> dict[str, Any]:
    """Return the policy of the Job's pod: egress to the tier's servers and DNS, no ingress.

    External servers have no pods to select, so only ports are limited. For an external cluster any port is allowed,
    because its servers announce their ports.
    """
    dns = {"ports": [{"protocol": protocol, "port": port} for port in DNS_PORTS for protocol in ("UDP", "TCP")]}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(*_place(job), _own_labels(job), owner_of(job)),
        "spec": {
            "podSelector": {"matchLabels": job["spec"]["template"]["metadata"]["labels"]},
            "policyTypes": ["Ingress", "Egress"],
            "egress": [dns, _to_servers(tier)],
        },
    }


def owner_of(job: Mapping[str, Any]) -> dict[str, Any]:
    about = job["metadata"]
    return {"apiVersion": "batch/v1", "kind": "Job", "name": about["name"], "uid": about["uid"]}


def _to_servers(tier: CacheTier) -> dict[str, Any]:
    if tier.spec.managed is not None:
        servers = {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": tier.namespace}},
            "podSelector": {"matchLabels": labels.selector_of_tier(tier.name)},
        }
        return {"to": [servers], "ports": [{"protocol": "TCP", "port": paths.REDIS_PORT}]}
    if tier.spec.is_cluster:
        return {"ports": [{"protocol": "TCP", "port": 1, "endPort": 65535}]}
    ports = sorted({port for _, port in _link(tier).endpoints})
    return {"ports": [{"protocol": "TCP", "port": port} for port in ports]}


def _tier_params(tier: CacheTier) -> dict[str, Any]:
    link, files = _link(tier), needed_secrets(tier)
    params: dict[str, Any] = {
        "name": tier.name,
        "endpoints": [{"host": host, "port": port} for host, port in link.endpoints],
        "cluster": tier.spec.is_cluster,
        "connect_timeout_ms": PATIENCE_MS,
        "io_timeout_ms": PATIENCE_MS,
    }
    if AUTHORITY_FILE in files:
        params["tls"] = {"ca_file": f"{paths.DELETION}/{AUTHORITY_FILE}"}
    if link.username is not None:
        params["username"] = link.username
    if PASSWORD_FILE in files:
        params["password_file"] = f"{paths.DELETION}/{PASSWORD_FILE}"
    return params


def _link(tier: CacheTier) -> RedisLink:
    link = redis_link(tier)
    if link is None:
        raise ValueError(f"CacheTier {tier.name} is not in Redis: nothing deletes from it but its pods")
    return link


def _place(job: Mapping[str, Any]) -> tuple[str, str]:
    return job["metadata"]["name"], job["metadata"]["namespace"]


def _own_labels(job: Mapping[str, Any]) -> dict[str, str]:
    return dict(job["metadata"]["labels"])
