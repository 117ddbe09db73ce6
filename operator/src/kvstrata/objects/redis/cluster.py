"""The StatefulSets of a managed Redis Cluster, one per shard.

Pods start as empty nodes; the operator forms the cluster and replaces pods when their template changes. A node gets a
new identity at each start, because its data is gone and the old name would mislead the others. The primary of a shard
may change at any time, so all pods of a shard are alike.

Passwords are in an ACL file, never in arguments or environment, which are visible in the pod. Nothing is on a disk:
blocks can be recomputed, and a copy on disk would have to be erased.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

from kvstrata.api.cachetier import CacheTier
from kvstrata.api.cachetier_managed import RedisManaged
from kvstrata.api.pod_template import PodTemplate, ResourceRequirements
from kvstrata.api.scalars import ResourceQuantity
from kvstrata.objects import labels, names, paths, sizing
from kvstrata.objects.applied import without_empty
from kvstrata.objects.container import (
    LAST_OF_LOG,
    SECURITY,
    amounts,
    chosen_amounts,
    empty_dir,
    exec_probe,
    field_environment,
    mount,
)
from kvstrata.objects.context import BuildContext
from kvstrata.objects.labels import metadata
from kvstrata.objects.pod.pod import SECRET_FILE_MODE, placement, pod_security
from kvstrata.objects.quantities import binary
from kvstrata.objects.tier_link import redis_tls_secret

NODE_TIMEOUT_MS = 5000
"""Silence after which a server is suspected; when a majority agrees, its replica is promoted."""

START_OVER_WAIT_S = 2 * NODE_TIMEOUT_MS // 1000
"""How long a restarted server stays silent. Before a replica is promoted in place of its former self (node timeout plus
some two seconds), it would load from the old address, which is empty."""

HAND_OVER_PATIENCE_S = 5
"""How long a stopping primary waits for its replica to take over; servers give up such an attempt after that."""

SHUTDOWN_TIMEOUT_S = 5
TERMINATION_GRACE_S = 30
"""Time for the handover, and for replicas to read the last writes on a busy machine."""

MIN_CORES_FOR_THREADS = 4
MAX_IO_THREADS = 8
"""Redis' advice: no threads below four cores, leave one free, and more than eight hardly help."""

AUTH_FILES = (names.ACL_FILE_KEY, names.ADMIN_PASSWORD_KEY, names.REPLICATION_PASSWORD_KEY)
"""Keys of the tier's Secret that a server's pod mounts; it does not need the data user's password."""


def build_shard_statefulset(
    ctx: BuildContext, tier: CacheTier, shard: int, restart_token: str | None = None, servers: int | None = None
) -> dict[str, Any] | None:
    """Return the StatefulSet of one shard of a managed Redis Cluster; None for any other tier. A changed
    `restart_token` replaces every pod. `servers` is the shard's present size, where it differs from spec."""
    managed = tier.spec.managed
    if managed is None:
        return None
    chosen = managed.pod_template or PodTemplate()
    own_labels, selector = labels.of_shard(tier.name, shard), labels.selector_of_shard(tier.name, shard)
    annotations = {labels.TLS_REVISION: restart_token} if restart_token is not None else {}
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": metadata(names.redis_shard(tier.name, shard), tier.namespace, own_labels, tier.owner_reference()),
        "spec": {
            "serviceName": names.redis(tier.name),
            "podManagementPolicy": "Parallel",
            "revisionHistoryLimit": 3,
            "selector": {"matchLabels": selector},
            "replicas": servers if servers is not None else 1 + managed.replicas_per_shard,
            "updateStrategy": {"type": "OnDelete"},
            "template": {
                "metadata": without_empty(
                    {
                        "labels": labels.merged(chosen.labels, own_labels),
                        "annotations": labels.merged(chosen.annotations, annotations),
                    }
                ),
                "spec": {
                    "automountServiceAccountToken": False,
                    "enableServiceLinks": False,
                    "securityContext": pod_security(ctx),
                    "terminationGracePeriodSeconds": TERMINATION_GRACE_S,
                    "containers": [_container(ctx, tier, managed)],
                    "volumes": _volumes(tier),
                    "affinity": _apart(selector),
                    **placement(chosen, labels.selector_of_tier(tier.name)),
                    **without_empty({"serviceAccountName": managed.service_account_name}),
                },
            },
        },
    }


def cluster_arguments(tier: CacheTier) -> list[str]:
    """Return the arguments of a cluster's servers. They appear in the pod spec and hold no secret."""
    part_bytes = sizing.shard_bytes(tier.spec)
    buffer_bytes = sizing.replication_buffer_bytes(part_bytes)
    return [
        *_listening(tier),
        *("--aclfile", f"{paths.REDIS_AUTH}/{names.ACL_FILE_KEY}"),
        *(("--tls-cluster", "yes", "--tls-replication", "yes") if redis_tls_secret(tier) is not None else ()),
        # Adapters evict, not servers.
        *("--maxmemory", str(sizing.redis_maxmemory_bytes(tier.spec)), "--maxmemory-policy", "noeviction"),
        *("--save", "", "--appendonly", "no", "--dir", paths.TEMPORARY),
        *("--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf"),
        *("--cluster-node-timeout", str(NODE_TIMEOUT_MS)),
        # Lost slots are misses: serve the rest, and promote a replica however old it is.
        *("--cluster-require-full-coverage", "no", "--cluster-replica-validity-factor", "0"),
        # The operator places replicas.
        *("--cluster-allow-replica-migration", "no"),
        *("--cluster-announce-ip", "$(POD_IP)", "--replica-announce-ip", "$(POD_IP)"),
        *("--cluster-announce-hostname", f"$(POD_NAME).{names.redis_host(tier.name, tier.namespace)}"),
        *("--cluster-preferred-endpoint-type", "hostname"),
        *("--repl-diskless-sync", "yes", "--repl-diskless-sync-delay", "0"),
        # A replica that reloads over its data would need twice the memory without a file; the file is deleted.
        *("--repl-diskless-load", "on-empty-db", "--rdb-del-sync-files", "yes"),
        *("--repl-backlog-size", str(sizing.replication_backlog_bytes(part_bytes))),
        *("--client-output-buffer-limit", f"replica {buffer_bytes} 0 0"),
        *("--shutdown-timeout", str(SHUTDOWN_TIMEOUT_S)),
        *_threads(tier.spec.managed.resources if tier.spec.managed is not None else None),
    ]


def _listening(tier: CacheTier) -> list[str]:
    if redis_tls_secret(tier) is None:
        return ["--port", str(paths.REDIS_PORT)]
    return [
        *("--port", "0", "--tls-port", str(paths.REDIS_PORT)),
        *("--tls-cert-file", f"{paths.REDIS_TLS}/{names.CERTIFICATE_KEY}"),
        *("--tls-key-file", f"{paths.REDIS_TLS}/{names.PRIVATE_KEY_KEY}"),
        *("--tls-ca-cert-file", f"{paths.REDIS_TLS}/{names.AUTHORITY_KEY}"),
        *("--tls-auth-clients", "no"),
    ]


def _container(ctx: BuildContext, tier: CacheTier, managed: RedisManaged) -> dict[str, Any]:
    chosen = managed.pod_template or PodTemplate()
    has_tls = redis_tls_secret(tier) is not None
    client = ["--tls", "--cacert", f"{paths.REDIS_TLS}/{names.AUTHORITY_KEY}"] if has_tls else []
    probe = _run("redis_ping", paths.REDIS_PORT, *client)
    stop = _run("redis_stop", HAND_OVER_PATIENCE_S, paths.REDIS_AUTH, "127.0.0.1", paths.REDIS_PORT, *client)
    start_over_wait_s = START_OVER_WAIT_S if tier.spec.has_several_primaries else 0
    return without_empty(
        {
            "name": "redis",
            "image": managed.image or ctx.redis_image,
            "imagePullPolicy": chosen.image_pull_policy or (ctx.image_pull_policy if managed.image is None else None),
            "startupProbe": exec_probe(probe, period_s=1, timeout_s=2, failures=60),
            "livenessProbe": exec_probe(probe, period_s=20, timeout_s=5, failures=3),
            "readinessProbe": exec_probe(probe, period_s=10, timeout_s=3, failures=2),
            "resources": dict(chosen_amounts(managed.resources, _default_resources(tier))),
            "securityContext": SECURITY,
            "volumeMounts": [
                mount("tmp", paths.TEMPORARY),
                mount("auth", paths.REDIS_AUTH, read_only=True),
                *([mount("tls", paths.REDIS_TLS, read_only=True)] if has_tls else []),
            ],
            "command": _run("redis_start", start_over_wait_s, paths.TEMPORARY, paths.REDIS_AUTH),
            "args": cluster_arguments(tier),
            "env": [field_environment("POD_IP", "status.podIP"), field_environment("POD_NAME", "metadata.name")],
            "ports": [
                {"name": "redis", "containerPort": paths.REDIS_PORT, "protocol": "TCP"},
                {"name": "bus", "containerPort": paths.REDIS_BUS_PORT, "protocol": "TCP"},
            ],
            "lifecycle": {"preStop": {"exec": {"command": stop}}},
            "terminationMessagePolicy": LAST_OF_LOG,
        }
    )


def _run(name: str, *arguments: object) -> list[str]:
    return ["sh", "-c", _script(name), name.replace("_", "-"), *map(str, arguments)]


@cache
def _script(name: str) -> str:
    """Return a shell script for a server's container, without comments: a changed comment would restart every
    server."""
    text = resources.files(__package__).joinpath("scripts", f"{name}.sh").read_text()
    return "".join(
        line for line in text.splitlines(keepends=True) if line.strip() and not line.lstrip().startswith("#")
    )


def _volumes(tier: CacheTier) -> list[dict[str, Any]]:
    auth = {
        "secretName": names.redis_auth(tier.name),
        "defaultMode": SECRET_FILE_MODE,
        "items": [{"key": key, "path": key} for key in AUTH_FILES],
    }
    volumes: list[dict[str, Any]] = [
        # A replica that loads over its blocks writes them to a file first.
        empty_dir("tmp", binary(sizing.redis_memory_limit_bytes(tier.spec))),
        {"name": "auth", "secret": auth},
    ]
    secret = redis_tls_secret(tier)
    if secret is not None:
        volumes.append({"name": "tls", "secret": {"secretName": secret, "defaultMode": SECRET_FILE_MODE}})
    return volumes


def _apart(selector: dict[str, str]) -> dict[str, Any]:
    term = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": selector}}
    weighted = {"weight": 100, "podAffinityTerm": term}
    return {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [weighted]}}


def _threads(resources: ResourceRequirements | None) -> list[str]:
    """Return the arguments for threads, by the CPU limit or else the request."""
    cpu = (resources.limits.get("cpu") or resources.requests.get("cpu")) if resources is not None else None
    cores = ResourceQuantity(cpu or "0").in_units
    if cores < MIN_CORES_FOR_THREADS:
        return []
    return ["--io-threads", str(min(MAX_IO_THREADS, int(cores) - 1)), "--io-threads-do-reads", "yes"]


def _default_resources(tier: CacheTier) -> dict[str, Any]:
    memory = binary(sizing.redis_memory_limit_bytes(tier.spec))
    return amounts(requests={"cpu": "100m", "memory": memory}, limits={"memory": memory})
