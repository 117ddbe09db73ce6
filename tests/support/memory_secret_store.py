"""A SecretStore without certificates' cryptography."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from kvstrata.api.scalars import format_timestamp
from kvstrata.clients.pki import KeyPair
from kvstrata.contract.wire import digest_bytes
from kvstrata.model.pods import SecretFacts
from kvstrata.model.redis.credentials import TlsFacts
from kvstrata.objects import names
from kvstrata.objects.redis.users import what_users_may
from kvstrata.plan.actions import EnsureSecret, Turn, TurnSecret
from kvstrata.reconcile.secrets import SecretStore

CERTIFICATE_LIFE = timedelta(days=240)


class MemorySecretStore(SecretStore):
    """Makes Secrets whose certificates are a date, a number and names, which these tests never look into further."""

    is_open = True

    def _facts(self, raw: Mapping[str, Any], values: Mapping[str, bytes]) -> SecretFacts:
        certificate = values.get(names.CERTIFICATE_KEY, b"")
        renew_at = datetime.fromisoformat(certificate.decode().split()[0]) if certificate else None
        authority = digest_bytes(self.authority.certificate_pem)
        return SecretFacts(
            frozenset(values),
            raw["metadata"]["resourceVersion"],
            users=what_users_may(values.get(names.ACL_FILE_KEY, b"")),
            renewal_due=renew_at is not None and self._now() >= renew_at,
            passwords=self._passwords(raw, values) if names.ACL_FILE_KEY in values else None,
            tls=TlsFacts(
                digest_bytes(certificate),
                trusted=frozenset({authority}),
                names=frozenset(certificate.decode().split()[2:]),
                authority=authority,
                renew_at=renew_at,
            )
            if certificate
            else None,
        )

    @property
    def authority(self) -> KeyPair:
        return KeyPair(b"authority", b"key")

    def _issued(self, order: EnsureSecret | TurnSecret) -> dict[str, bytes]:
        renewed_at = format_timestamp(self._now() + CERTIFICATE_LIFE)
        return {
            names.CERTIFICATE_KEY: " ".join((renewed_at, self._entropy(8).hex(), *order.dns_names)).encode(),
            names.PRIVATE_KEY_KEY: self._entropy(8),
        }

    def _material(self, order: EnsureSecret, there: Mapping[str, bytes]) -> dict[str, bytes]:
        made = super()._material(order, there)
        return {key: value for key, value in made.items() if key != names.AUTHORITY_KEY}

    def _turned(self, order: TurnSecret, there: Mapping[str, bytes]) -> dict[str, bytes]:
        return self._issued(order) if order.turn is Turn.ISSUE else super()._turned(order, there)
