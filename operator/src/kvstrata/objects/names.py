"""Names of the operator's objects, derived from the API object that they belong to.

Names of this API group have at most 40 characters, so every derived name fits into the 63 of a DNS label.
"""

from __future__ import annotations

from kvstrata.contract.messages.pod_state import gate_server_name
from kvstrata.contract.policy.pools import shard_name
from kvstrata.contract.wire import digest

PREFIX = "kvs-"
DOMAIN_KEY_SECRET = "kvstrata-domain"  # noqa: S105  (a Secret's name)
DOMAIN_KEY_DATA_KEY = "domain.key"
DATA_KEYS_PREFIX = "kvstrata-data-keys-"
WRAPPED_KEYS_PREFIX = "kvstrata-wrapped-keys-"
KMS_DOMAIN_PREFIX = "kvstrata-kms-"
PASSWORD_KEY = "password"  # noqa: S105  (a key's name)
"""Key of the password that pods use; on managed servers, of the user `data`."""

ADMIN_PASSWORD_KEY = "admin-password"  # noqa: S105  (a key's name)
REPLICATION_PASSWORD_KEY = "replication-password"  # noqa: S105  (a key's name)
ACL_FILE_KEY = "users.acl"
CERTIFICATE_KEY = "tls.crt"
PRIVATE_KEY_KEY = "tls.key"
AUTHORITY_KEY = "ca.crt"

RECEIPTS_KEY_SECRET = "kvstrata-receipts-key"  # noqa: S105  (a Secret's name)
RECEIPT_PUBLIC_KEYS = "kvstrata-receipts-keys"
RECEIPT_PREFIX = "kvstrata-receipt-"


def model_child(model: str) -> str:
    return f"{PREFIX}{model}"


def bundle_root(model: str) -> str:
    return f"{PREFIX}{model}-bundle"


def bundle_shard(model: str, index: int, slot: str) -> str:
    return f"{PREFIX}{model}-bundle-{index}{slot}"


def pool_shard(model: str, index: int, slot: str) -> str:
    return shard_name(bundle_root(model), index, slot)


def gate_tls(model: str) -> str:
    return f"{PREFIX}{model}-gate-tls"


def redis(tier: str) -> str:
    """Return the shared name of a managed Redis tier's Service, NetworkPolicy and PodDisruptionBudget."""
    return f"{PREFIX}{tier}-redis"


def redis_shard(tier: str, shard: int) -> str:
    """Return the StatefulSet name of one shard; at most 52 characters, because pod labels append a hash."""
    return f"{redis(tier)}-{shard}"


def place_in_cluster(tier: str, pod: str) -> tuple[int, int] | None:
    """Return shard and ordinal of a pod of a managed Redis Cluster; None for any other name."""
    before, _, ordinal = pod.removeprefix(f"{redis(tier)}-").rpartition("-")
    if pod.startswith(f"{redis(tier)}-") and before.isdecimal() and ordinal.isdecimal():
        return int(before), int(ordinal)
    return None


def redis_auth(tier: str) -> str:
    return f"{PREFIX}{tier}-redis-auth"


def redis_tls(tier: str) -> str:
    return f"{PREFIX}{tier}-redis-tls"


def service_dns_names(service: str, namespace: str, cluster_domain: str) -> tuple[str, ...]:
    """Return every name under which pods of the cluster reach a Service, the most specific last."""
    local = f"{service}.{namespace}"
    return (service, local, f"{local}.svc", f"{local}.svc.{cluster_domain}")


def gate_dns_names(model: str, namespace: str, cluster_domain: str) -> tuple[str, ...]:
    """Return the names in a gate's certificate: the one that the operator checks, then those of the Service."""
    return (gate_server_name(model, namespace), *service_dns_names(model_child(model), namespace, cluster_domain))


def redis_dns_names(tier: str, namespace: str, cluster_domain: str) -> tuple[str, ...]:
    of_pods = f"*.{redis_host(tier, namespace)}"
    return (*service_dns_names(redis(tier), namespace, cluster_domain), of_pods, f"{of_pods}.{cluster_domain}")


def redis_host(tier: str, namespace: str) -> str:
    """Return the host name of a managed Redis tier, valid from any namespace."""
    return f"{redis(tier)}.{namespace}.svc"


def data_keys_secret(epoch: str) -> str:
    """Return the Secret name of an epoch's data key: one of sixteen, because a Secret holds 1 MiB."""
    return f"{DATA_KEYS_PREFIX}{epoch[:1]}"


def wrapped_keys_secret(domain_id: str, shard: str) -> str:
    """Return the Secret name of a domain's KMS-wrapped keys, of epochs that begin with the digit `shard`."""
    return f"{WRAPPED_KEYS_PREFIX}{domain_id}-{shard}"


def domain_of_wrapped_keys(secret: str) -> str:
    """Return the domain id in a Secret name of wrapped keys; empty for any other name."""
    domain_id, _, shard = secret.removeprefix(WRAPPED_KEYS_PREFIX).rpartition("-")
    return domain_id if domain_id and secret == wrapped_keys_secret(domain_id, shard) else ""


def kms_domain(domain_id: str) -> str:
    return f"{KMS_DOMAIN_PREFIX}{domain_id}"


def receipt(domain_id: str, sequence: int) -> str:
    return f"{RECEIPT_PREFIX}{domain_id}-{sequence:08d}"


def deletion_job(erasure: str, tier: str, round: int) -> str:
    """Return the shared name of an erasure's Job for a tier, its Secret and its NetworkPolicy. `erasure` is a uid."""
    return f"kvstrata-deletion-{digest([erasure, tier])[:16]}-{round}"


def receipt_part(domain_id: str, digest: str, index: int) -> str:
    return f"kvstrata-part-{domain_id}-{digest[:32]}-{index}"
