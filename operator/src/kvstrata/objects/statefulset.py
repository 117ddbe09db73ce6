"""The StatefulSet of a managed Redis tier: one primary, in memory only.

Passwords are in an ACL file and never in arguments or environment, where everyone who may read the pod sees them.
Nothing is written to disk: blocks can be computed again, and a copy on a disk would have to be erased.
"""

from __future__ import annotations

from typing import Any

from kvstrata.api.cachetier import CacheTier, RedisManaged
from kvstrata.api.podtemplate import PodTemplate

from . import labels, names, paths, sizing
from .container import SECURITY, amounts, chosen_amounts, exec_probe, mount
from .context import BuildContext
from .meta import metadata, without_empty
from .pod import SECRET_FILE_MODE, placement, pod_security
from .quantities import binary
from .tierlinks import redis_tls_secret

TERMINATION_GRACE_S = 10
"""There is nothing to save at the end."""


def build_redis_statefulset(
    ctx: BuildContext, tier: CacheTier, tls_revision: str | None = None
) -> dict[str, Any] | None:
    """Return the StatefulSet of a managed Redis tier; None for any other tier.

    `tls_revision` is any text that changes with the servers' certificate: Redis reads it at its start only, so a new
    one replaces the pod.
    """
    managed = tier.spec.redis.managed if tier.spec.redis is not None else None
    if managed is None:
        return None
    chosen = managed.pod_template or PodTemplate()
    annotations = {labels.TLS_REVISION: tls_revision} if tls_revision is not None else {}
    template_metadata = without_empty(
        {
            "labels": labels.merged(chosen.labels, labels.of_tier(tier.name)),
            "annotations": labels.merged(chosen.annotations, annotations),
        }
    )
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": metadata(names.redis(tier.name), tier.namespace, labels.of_tier(tier.name), tier.owner_reference()),
        "spec": {
            "replicas": 1,
            "serviceName": names.redis(tier.name),
            "podManagementPolicy": "Parallel",
            "revisionHistoryLimit": 3,
            "updateStrategy": {"type": "RollingUpdate"},
            "selector": {"matchLabels": labels.selector_of_tier(tier.name)},
            "template": {
                "metadata": template_metadata,
                "spec": {
                    "automountServiceAccountToken": False,
                    "enableServiceLinks": False,
                    "terminationGracePeriodSeconds": TERMINATION_GRACE_S,
                    "securityContext": pod_security(),
                    "containers": [_container(ctx, tier, managed, chosen)],
                    "volumes": _volumes(tier),
                    **placement(chosen, labels.selector_of_tier(tier.name)),
                },
            },
        },
    }


def redis_arguments(tier: CacheTier) -> list[str]:
    """Return the arguments of redis-server. They are visible to all who may read the pod, and hold no secret."""
    tls = redis_tls_secret(tier) is not None
    ports = (
        [
            *("--port", "0", "--tls-port", str(paths.REDIS_PORT)),
            *("--tls-cert-file", f"{paths.REDIS_TLS}/{names.CERTIFICATE_KEY}"),
            *("--tls-key-file", f"{paths.REDIS_TLS}/{names.PRIVATE_KEY_KEY}"),
            *("--tls-ca-cert-file", f"{paths.REDIS_TLS}/{names.AUTHORITY_KEY}"),
            *("--tls-auth-clients", "no"),
        ]
        if tls
        else ["--port", str(paths.REDIS_PORT)]
    )
    return [
        *ports,
        *("--aclfile", f"{paths.REDIS_AUTH}/{names.ACL_FILE_KEY}"),
        *("--maxmemory", str(tier.spec.capacity_bytes or 0), "--maxmemory-policy", "noeviction"),
        *("--save", "", "--appendonly", "no", "--dir", paths.TEMPORARY),
    ]


def _container(ctx: BuildContext, tier: CacheTier, managed: RedisManaged, chosen: PodTemplate) -> dict[str, Any]:
    probe = ("sh", "-c", _ping(redis_tls_secret(tier) is not None))
    pull_policy = chosen.image_pull_policy or (ctx.image_pull_policy if managed.image is None else None)
    return without_empty(
        {
            "name": "redis",
            "image": managed.image or ctx.redis_image,
            "imagePullPolicy": pull_policy,
            "command": ["redis-server"],
            "args": redis_arguments(tier),
            "ports": [{"name": "redis", "containerPort": paths.REDIS_PORT, "protocol": "TCP"}],
            "startupProbe": exec_probe(probe, period_s=1, timeout_s=2, failures=60),
            "livenessProbe": exec_probe(probe, period_s=10, timeout_s=5, failures=6),
            "readinessProbe": exec_probe(probe, period_s=5, timeout_s=3, failures=2),
            "resources": chosen_amounts(managed.resources, _default_resources(tier)),
            "securityContext": SECURITY,
            "volumeMounts": [
                mount("tmp", paths.TEMPORARY),
                mount("auth", paths.REDIS_AUTH, read_only=True),
                *([mount("tls", paths.REDIS_TLS, read_only=True)] if redis_tls_secret(tier) is not None else []),
            ],
        }
    )


def _ping(tls: bool) -> str:
    """Return a probe without a password: a server that asks for one is alive and guards its data."""
    options = f" --tls --cacert {paths.REDIS_TLS}/{names.AUTHORITY_KEY}" if tls else ""
    return f"redis-cli -h 127.0.0.1 -p {paths.REDIS_PORT}{options} ping 2>&1 | grep -q -e PONG -e NOAUTH"


def _volumes(tier: CacheTier) -> list[dict[str, Any]]:
    volumes: list[dict[str, Any]] = [
        {"name": "tmp", "emptyDir": {}},
        {
            "name": "auth",
            "secret": {
                "secretName": names.redis_auth(tier.name),
                "defaultMode": SECRET_FILE_MODE,
                "items": [{"key": names.ACL_FILE_KEY, "path": names.ACL_FILE_KEY}],
            },
        },
    ]
    secret = redis_tls_secret(tier)
    if secret is not None:
        volumes.append({"name": "tls", "secret": {"secretName": secret, "defaultMode": SECRET_FILE_MODE}})
    return volumes


def _default_resources(tier: CacheTier) -> dict[str, Any]:
    size = tier.spec.capacity_bytes or 0
    memory = binary(sizing.redis_memory_limit_bytes(size))
    return amounts(requests={"cpu": "100m", "memory": memory}, limits={"memory": memory})
