"""Common parts of the pods of managed Redis servers, single and clustered.

Passwords are in an ACL file, never in arguments or environment, which are visible in the pod. Nothing is on a disk:
blocks can be recomputed, and a copy on disk would have to be erased.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

from kvstrata.api.cachetier import CacheTier
from kvstrata.api.cachetier_managed import RedisManaged
from kvstrata.api.pod_template import PodTemplate
from kvstrata.objects import labels, names, paths
from kvstrata.objects.container import SECURITY, exec_probe, mount
from kvstrata.objects.context import BuildContext
from kvstrata.objects.meta import metadata, without_empty
from kvstrata.objects.pod.pod import SECRET_FILE_MODE, pod_security
from kvstrata.objects.tier_link import redis_tls_secret


def managed_by_us(tier: CacheTier) -> RedisManaged | None:
    """Return the spec of servers that the operator runs; None for any other tier."""
    return tier.spec.redis.managed if tier.spec.redis is not None else None


@cache
def script(name: str) -> str:
    """Return a shell script for a server's container, without comments: a changed comment would restart every
    server."""
    text = resources.files(__package__).joinpath("scripts", f"{name}.sh").read_text()
    return "".join(
        line for line in text.splitlines(keepends=True) if line.strip() and not line.lstrip().startswith("#")
    )


def run(name: str, *arguments: object) -> list[str]:
    return ["sh", "-c", script(name), name.replace("_", "-"), *map(str, arguments)]


def listening_arguments(tier: CacheTier) -> list[str]:
    ports = ["--port", str(paths.REDIS_PORT)]
    if redis_tls_secret(tier) is not None:
        ports = [
            *("--port", "0", "--tls-port", str(paths.REDIS_PORT)),
            *("--tls-cert-file", f"{paths.REDIS_TLS}/{names.CERTIFICATE_KEY}"),
            *("--tls-key-file", f"{paths.REDIS_TLS}/{names.PRIVATE_KEY_KEY}"),
            *("--tls-ca-cert-file", f"{paths.REDIS_TLS}/{names.AUTHORITY_KEY}"),
            *("--tls-auth-clients", "no"),
        ]
    return [*ports, "--aclfile", f"{paths.REDIS_AUTH}/{names.ACL_FILE_KEY}"]


def memory_arguments(maxmemory_bytes: int) -> list[str]:
    """Return the arguments for memory-only storage. Adapters evict, not servers."""
    return [
        *("--maxmemory", str(maxmemory_bytes), "--maxmemory-policy", "noeviction"),
        *("--save", "", "--appendonly", "no", "--dir", paths.TEMPORARY),
    ]


def client_options(tier: CacheTier) -> list[str]:
    if redis_tls_secret(tier) is None:
        return []
    return ["--tls", "--cacert", f"{paths.REDIS_TLS}/{names.AUTHORITY_KEY}"]


def server_container(
    ctx: BuildContext, tier: CacheTier, managed: RedisManaged, amounts: Mapping[str, Any], own: Mapping[str, Any]
) -> dict[str, Any]:
    """`amounts` are its resources, `own` the fields of this kind of server."""
    chosen = managed.pod_template or PodTemplate()
    probe = run("redis_ping", paths.REDIS_PORT, *client_options(tier))
    pull_policy = chosen.image_pull_policy or (ctx.image_pull_policy if managed.image is None else None)
    return without_empty(
        {
            "name": "redis",
            "image": managed.image or ctx.redis_image,
            "imagePullPolicy": pull_policy,
            "startupProbe": exec_probe(probe, period_s=1, timeout_s=2, failures=60),
            "livenessProbe": exec_probe(probe, period_s=10, timeout_s=5, failures=6),
            "readinessProbe": exec_probe(probe, period_s=5, timeout_s=3, failures=2),
            "resources": dict(amounts),
            "securityContext": SECURITY,
            "volumeMounts": [
                mount("tmp", paths.TEMPORARY),
                mount("auth", paths.REDIS_AUTH, read_only=True),
                *([mount("tls", paths.REDIS_TLS, read_only=True)] if redis_tls_secret(tier) is not None else []),
            ],
            **own,
        }
    )


def server_volumes(tier: CacheTier, auth_keys: Sequence[str]) -> list[dict[str, Any]]:
    """Return a server's volumes; it gets only `auth_keys` of the tier's Secret."""
    volumes: list[dict[str, Any]] = [
        {"name": "tmp", "emptyDir": {}},
        {
            "name": "auth",
            "secret": {
                "secretName": names.redis_auth(tier.name),
                "defaultMode": SECRET_FILE_MODE,
                "items": [{"key": key, "path": key} for key in auth_keys],
            },
        },
    ]
    secret = redis_tls_secret(tier)
    if secret is not None:
        volumes.append({"name": "tls", "secret": {"secretName": secret, "defaultMode": SECRET_FILE_MODE}})
    return volumes


def server_pod(
    chosen: PodTemplate, own_labels: Mapping[str, str], restart_token: str | None, spec: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the template of a server's pod. A changed `restart_token` replaces the pods."""
    annotations = {labels.TLS_REVISION: restart_token} if restart_token is not None else {}
    return {
        "metadata": without_empty(
            {
                "labels": labels.merged(chosen.labels, own_labels),
                "annotations": labels.merged(chosen.annotations, annotations),
            }
        ),
        "spec": {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": pod_security(),
            **spec,
        },
    }


def stateful_set(
    tier: CacheTier, name: str, own_labels: Mapping[str, str], selector: Mapping[str, str], spec: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": metadata(name, tier.namespace, own_labels, tier.owner_reference()),
        "spec": {
            "serviceName": names.redis(tier.name),
            "podManagementPolicy": "Parallel",
            "revisionHistoryLimit": 3,
            "selector": {"matchLabels": dict(selector)},
            **spec,
        },
    }
