"""How a Redis tier is reached: address, TLS, and the Secrets with password and certificate authority.

Pods and operator use the same link, so that the operator probes the same server as pods.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstrata.api.cachetier import CacheTier, Medium
from kvstrata.api.common import TlsMode
from kvstrata.objects import names, paths
from kvstrata.objects.redis.users import ADMIN_USER, DATA_USER


@dataclass(frozen=True, slots=True)
class RedisLink:
    """Addresses (host, port) of a tier, and its Secrets as (Secret, key) or None. `ca` None means plain text,
    `username` None the default user. The operator's own user is set on managed servers only."""

    endpoints: tuple[tuple[str, int], ...]
    ca: tuple[str, str] | None
    password: tuple[str, str] | None
    username: str | None = None
    operator_username: str | None = None
    operator_password: tuple[str, str] | None = None


def redis_link(tier: CacheTier) -> RedisLink | None:
    """Return how a Redis tier is reached, or None for any other medium."""
    redis = tier.spec.redis
    if tier.spec.medium is not Medium.REDIS or redis is None:
        return None
    if redis.managed is not None:
        host = names.redis_host(tier.name, tier.namespace)
        secret = redis_tls_secret(tier)
        auth = names.redis_auth(tier.name)
        return RedisLink(
            endpoints=((host, paths.REDIS_PORT),),
            ca=(secret, names.AUTHORITY_KEY) if secret is not None else None,
            password=(auth, names.PASSWORD_KEY),
            username=DATA_USER,
            operator_username=ADMIN_USER,
            operator_password=(auth, names.ADMIN_PASSWORD_KEY),
        )
    external = redis.external
    if external is None:
        return None
    return RedisLink(
        endpoints=tuple(_address(endpoint) for endpoint in external.endpoints),
        ca=(external.tls.ca_secret_ref.name, external.tls.ca_secret_ref.key) if external.tls is not None else None,
        password=(external.auth_secret_ref.name, names.PASSWORD_KEY) if external.auth_secret_ref is not None else None,
        username=external.username,
    )


def servers(tier: CacheTier) -> frozenset[tuple[tuple[str, ...], int]]:
    """Return the servers that a tier names, as (labels of the host, port), so that equal ones are equal.

    A Service has several names, recognised by their form, since only a cluster knows its own domain. Pods of managed
    servers count as their Service.
    """
    link = redis_link(tier)
    if link is None:
        return frozenset()
    found = {(_labels(host, tier.namespace), port) for host, port in link.endpoints}
    pods = {((pod, *labels), port) for labels, port in found for pod in _pods(tier)}
    return frozenset(found | pods)


def _pods(tier: CacheTier) -> list[str]:
    managed = tier.spec.managed
    if managed is None:
        return []
    ordinals = range(1 + managed.replicas_per_shard)
    return [f"{names.redis_shard(tier.name, n)}-{m}" for n in range(managed.shards) for m in ordinals]


def _labels(host: str, namespace: str) -> tuple[str, ...]:
    """Return a host's labels; for a Service only its name and namespace."""
    if ":" in host or host.replace(".", "").isdigit():
        return (host.lower(),)
    labels = host.lower().rstrip(".").split(".")
    if "svc" in labels[2:4]:
        labels = labels[: labels.index("svc", 2)]
    return tuple(labels) if len(labels) > 1 else (*labels, namespace)


def redis_tls_secret(tier: CacheTier) -> str | None:
    """Return the Secret with the certificate of a managed tier's servers; None for plain text or other tiers."""
    managed = tier.spec.managed
    if managed is None or managed.tls.mode is TlsMode.DISABLED:
        return None
    if managed.tls.secret_ref is not None:
        return managed.tls.secret_ref.name
    return names.redis_tls(tier.name)


def _address(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.rpartition(":")
    return host.strip("[]"), int(port)
