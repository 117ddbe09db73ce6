"""Secrets: bundles, keys, passwords and certificates."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from kvstrata.objects.redis.users import ADMIN_USER, DATA_USER, REPLICATION_USER, Passwords, users_acl

from . import labels, names
from .labels import metadata

PASSWORD_KEYS: Mapping[str, str] = {
    DATA_USER: names.PASSWORD_KEY,
    ADMIN_USER: names.ADMIN_PASSWORD_KEY,
    REPLICATION_USER: names.REPLICATION_PASSWORD_KEY,
}


def build_secret(
    name: str,
    namespace: str,
    own_labels: Mapping[str, str],
    owner: Mapping[str, Any] | None,
    data: Mapping[str, bytes],
    annotations: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(name, namespace, own_labels, owner, annotations),
        "type": "Opaque",
        "data": {key: base64.b64encode(value).decode("ascii") for key, value in sorted(data.items())},
    }


def build_signing_key(operator_namespace: str, data: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the Secret of the receipts' signing key. It has no owner, because its chains may have to be continued."""
    return build_secret(names.RECEIPTS_KEY_SECRET, operator_namespace, labels.of_receipts("signing-key"), None, data)


def redis_auth_data(domain_id: str, passwords: Passwords) -> dict[str, bytes]:
    """Return the data of a managed Redis tier's Secret: each user's current password, and the ACL file that admits
    all."""
    to_use = {key: passwords[user][0].encode() for user, key in PASSWORD_KEYS.items()}
    return to_use | {names.ACL_FILE_KEY: users_acl(domain_id, passwords)}
