"""Secrets that the operator creates. Only facts are kept, except for the domain key: all keyspaces derive from it."""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from kvstrata.api.scalars import format_timestamp
from kvstrata.clients import pki
from kvstrata.clients.kube import Kube, KubeError
from kvstrata.clients.resources import SECRET
from kvstrata.contract.messages.pod_state import OPERATOR_COMMON_NAME
from kvstrata.contract.policy.data_key import DATA_KEY_BYTES
from kvstrata.contract.policy.keyspace import DOMAIN_KEY_BYTES, is_epoch
from kvstrata.contract.wire import digest
from kvstrata.model.pods import SecretFacts
from kvstrata.model.redis.credentials import PasswordFacts
from kvstrata.objects import labels, mark, names
from kvstrata.objects.redis import passwords
from kvstrata.objects.redis.users import ADMIN_USER, what_users_may
from kvstrata.objects.secret import build_secret
from kvstrata.plan.actions import EnsureSecret, Material, TakeBack, Turn, TurnSecret
from kvstrata.reconcile.domain_store import DomainStore

from .audit import record_secret, record_turn
from .background import Clock
from .claims import NameConflictError, claimed
from .parse import resource_version

log = logging.getLogger(__name__)

AUTHORITY_SECRET = "kvstrata-ca"  # noqa: S105  (a name)
_OF_SERVERS = frozenset({Material.REDIS_USERS, Material.SERVER_CERTIFICATE})
"""Material that is created without looking for existing Secrets first: it is dropped if one exists."""


class SecretStore:
    """Creates, renews and reads Secrets. `entropy(n)` returns n random bytes."""

    def __init__(self, kube: Kube, namespace: str, entropy: Callable[[int], bytes], now: Clock) -> None:
        self._kube, self._namespace, self._entropy, self._now = kube, namespace, entropy, now
        self._authority: pki.KeyPair | None = None
        self.installation_uid = ""
        """Id of this installation, once it is open. A backup of the authority's Secret keeps it."""

    @property
    def authority(self) -> pki.KeyPair:
        """`open` must have been awaited."""
        if self._authority is None:
            raise RuntimeError("the authority was not opened")
        return self._authority

    @property
    def is_open(self) -> bool:
        """Whether the authority is known, without which no certificate can be checked."""
        return self._authority is not None

    @property
    def mark_key(self) -> bytes:
        """The key of marks; `open` must have been awaited."""
        return mark.derive_key(self.authority.key_pem)

    async def open(self) -> pki.KeyPair:
        """Read the operator's authority, or create it; return a client certificate for gates. Raises KubeError, and
        ValueError for an authority that issues none, before anything is issued by it."""
        stored = await self._kube.get(SECRET, self._namespace, AUTHORITY_SECRET)
        if stored is None:
            pair = pki.create_authority("kvstrata", self._now(), pki.generate_key())
            own = {"app.kubernetes.io/managed-by": "kvstrata", "app.kubernetes.io/component": "authority"}
            data = {names.CERTIFICATE_KEY: pair.certificate_pem, names.PRIVATE_KEY_KEY: pair.key_pem}
            marked = {labels.INSTALLATION: self._entropy(16).hex()}
            body = build_secret(AUTHORITY_SECRET, self._namespace, own, None, data, marked)
            try:
                stored = await self._kube.create(SECRET, self._namespace, body)
                record_secret(self._namespace, AUTHORITY_SECRET, "Authority", made=1)
            except KubeError as error:
                if not error.is_conflict:
                    raise
                stored = await self._kube.get(SECRET, self._namespace, AUTHORITY_SECRET) or body
        values, metadata = decode(stored), stored["metadata"]
        if not {names.CERTIFICATE_KEY, names.PRIVATE_KEY_KEY} <= values.keys():
            raise NameConflictError(SECRET.kind, AUTHORITY_SECRET)
        mark = (metadata.get("annotations") or {}).get(labels.INSTALLATION) or metadata.get("uid")
        self.installation_uid = digest([mark, self._namespace])[:32]
        authority = pki.KeyPair(values[names.CERTIFICATE_KEY], values[names.PRIVATE_KEY_KEY])
        try:
            client = pki.issue_client(authority, OPERATOR_COMMON_NAME, self._now(), pki.generate_key())
        except ValueError as error:
            where = f"Secret {AUTHORITY_SECRET} of namespace {self._namespace}"
            raise ValueError(f"{where}: {error}; put back the pair that was in use") from error
        self._authority = authority
        return client

    def observe(self, domain: DomainStore, raw: Mapping[str, Any]) -> None:
        """Record a Secret of the operator, unless a newer version or deletion is known. One without owner and without a
        mark that holds is of others, even with the operator's label, and counts as absent."""
        name, slot, version = raw["metadata"]["name"], (SECRET.kind, raw["metadata"]["name"]), resource_version(raw)
        if version and version < domain.versions.of(slot):
            return
        owners = frozenset(owner["uid"] for owner in raw["metadata"].get("ownerReferences") or ())
        parent = mark.parent_of(raw)
        if parent is not None and not mark.holds(domain.mark_key, raw, parent):
            parent = None
        if not owners and parent is None:
            self.forget(domain, name, version)
            return
        domain.versions.seen(slot, version)
        values = decode(raw)
        domain.secrets[name] = replace(
            self._facts(raw, values),
            drawn_for=_drawn_for(raw),
            owners=owners,
            parent=parent,
            uid=raw["metadata"].get("uid", ""),
            of_bundle=(raw["metadata"].get("labels") or {}).get(labels.COMPONENT) == "bundle",
        )
        if name == names.DOMAIN_KEY_SECRET:
            key = values.get(names.DOMAIN_KEY_DATA_KEY, b"")
            domain.domain_key = key if len(key) >= DOMAIN_KEY_BYTES else None
            domain.ending.domain_key = None
        if name.startswith(names.DATA_KEYS_PREFIX):
            _take_data_keys(domain, name, values)

    def forget(self, domain: DomainStore, name: str, version: int = 0) -> bool:
        """Record that a Secret is gone; `version` is that of its deletion, 0 if unknown. Returns False, and changes
        nothing, if it was created again since."""
        slot = (SECRET.kind, name)
        if version and version < domain.versions.of(slot):
            return False
        domain.versions.gone(slot, version)
        domain.secrets.pop(name, None)
        if name == names.DOMAIN_KEY_SECRET:
            domain.ending.domain_key, domain.domain_key = domain.domain_key or domain.ending.domain_key, None
        if name.startswith(names.DATA_KEYS_PREFIX):
            _take_data_keys(domain, name, {})
        domain.forget_ending()
        return True

    async def ensure(self, domain: DomainStore, order: EnsureSecret, *, look: bool = False) -> None:
        """Create the Secret of `order`, or renew certificate or users. Existing keys and passwords stay. Raises
        KubeError if a Secret of data keys was written meanwhile: its keys must be read first; NameConflictError for
        a foreign Secret. `look`: read it first, even if none is known."""
        unseen = not look and order.name not in domain.secrets and order.material in _OF_SERVERS
        stored = None if unseen else await self.read(domain, order.name, order.owner)
        there = decode(stored or {})
        values: Mapping[str, bytes] | None
        if order.material is Material.DATA_KEYS:
            came_back = _drawn_for(stored) != order.drawn_for and bool(order.drawn_for)
            values = self._data_keys(order, {} if came_back else there)
            if values is None and came_back and stored is not None:
                values = {}
        else:
            renew = order.renew and not _drawn_already(order, stored, there)
            values = self._material(order, there) if stored is None or renew else None
        annotations = self._annotations(order, stored, there)
        if values is None and stored is not None:
            if order.labels.items() <= (stored["metadata"].get("labels") or {}).items():
                self.observe(domain, stored)
                return
            values = there  # Lists and watches select by label: without labels it would be missed again and again.
        if values is None:
            return
        written: Mapping[str, Any]
        body = _built(domain, order, values, annotations)
        if stored is None:
            try:
                written = await self._kube.create(SECRET, domain.namespace, body)
            except KubeError as error:
                if not error.is_conflict or order.material is Material.DATA_KEYS:
                    raise
                if unseen:
                    await self.ensure(domain, order, look=True)
                    return
                written = await self.read(domain, order.name, order.owner) or body
        else:
            body["metadata"]["resourceVersion"] = stored["metadata"]["resourceVersion"]
            written = await self._kube.replace(SECRET, domain.namespace, body)
        log.info("secret written", extra={"secret": order.name, "material": str(order.material)})
        if decode(written) == values:  # else another writer was faster, and reports it
            _record_change(domain.namespace, order, there, values)
        self.observe(domain, written)

    async def read(self, domain: DomainStore, name: str, owner: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return a Secret that `owner` needs, or None. Forgets a foreign one, and raises NameConflictError unless it is
        taken over."""
        found = await self._kube.get(SECRET, domain.namespace, name)
        if found is not None and not domain.belongs_to(owner, found):
            self.forget(domain, name)
            return await claimed(self._kube, domain, owner, found)
        return found

    async def take_back(self, domain: DomainStore, order: TakeBack) -> dict[str, Any] | None:
        """Write owner reference and mark of a Secret, and return it; None if it is gone. Raises KubeError,
        NameConflictError for a foreign one."""
        stored = await self.read(domain, order.name, order.owner)
        if stored is None:
            self.forget(domain, order.name)
            return None
        metadata = {**stored["metadata"], "ownerReferences": [dict(order.owner)]}
        written = await self._kube.replace(
            SECRET, domain.namespace, mark.marked(domain.mark_key, {**stored, "metadata": metadata})
        )
        log.info("secret taken back", extra={"secret": order.name, "owner": order.owner["name"]})
        self.observe(domain, written)
        return written

    async def turn(self, domain: DomainStore, order: TurnSecret) -> None:
        """Advance a Secret's credentials by one step, unless it changed since the plan. Raises KubeError."""
        stored = await self.read(domain, order.name, order.owner)
        if stored is None:
            self.forget(domain, order.name)
            return
        if stored["metadata"].get("resourceVersion") != order.resource_version:
            self.observe(domain, stored)
            return
        values, annotations = self._turned(order, decode(stored)), dict(stored["metadata"].get("annotations") or {})
        annotations[labels.CHANGED_AT] = now = format_timestamp(self._now())
        if order.turn is Turn.STAGE:
            annotations[labels.ROTATED_FOR] = order.honours
        if order.turn is Turn.PROMOTE:
            annotations[labels.ROTATED_AT] = now
        body = _built(domain, order, values, annotations)
        body["metadata"]["resourceVersion"] = order.resource_version
        written = await self._kube.replace(SECRET, domain.namespace, body)
        log.info("secret turned", extra={"secret": order.name, "turn": str(order.turn)})
        record_turn(domain.namespace, order.name, str(order.turn))
        self.observe(domain, written)

    def _turned(self, order: TurnSecret, there: Mapping[str, bytes]) -> dict[str, bytes]:
        own = self.authority.certificate_pem
        trusted = {names.AUTHORITY_KEY: pki.together(own, there.get(names.AUTHORITY_KEY, b""))}
        match order.turn:
            case Turn.STAGE:
                return passwords.staged(order.domain, there, self._password)
            case Turn.PROMOTE:
                return passwords.promoted(order.domain, there)
            case Turn.RETIRE:
                return passwords.retired(order.domain, there)
            case Turn.TRUST:
                return {**there, **trusted}
            case Turn.DISTRUST:
                return {**there, names.AUTHORITY_KEY: own}
            case Turn.ISSUE:
                return self._issued(order) | trusted

    def _annotations(
        self, order: EnsureSecret, stored: Mapping[str, Any] | None, there: Mapping[str, bytes]
    ) -> dict[str, str]:
        """Return the annotations of a created or repaired Secret: for passwords, since when they are valid. If the
        operator's own password is lost, a new lineage begins: it cannot log in to servers any more."""
        kept = dict((stored or {}).get("metadata", {}).get("annotations") or {})
        if order.drawn_for:
            kept |= {labels.DRAWN_FOR: order.drawn_for}
        if order.material is not Material.REDIS_USERS or passwords.to_try(there, ADMIN_USER):
            return kept
        now = format_timestamp(self._now())
        return kept | {
            **dict.fromkeys((labels.MADE_AT, labels.CHANGED_AT, labels.ROTATED_AT), now),
            labels.ROTATED_FOR: order.honours,
        }

    def _data_keys(self, order: EnsureSecret, there: Mapping[str, bytes]) -> dict[str, bytes] | None:
        """Return the new content of a Secret of data keys, None if it is unchanged."""
        kept = {epoch: key for epoch, key in there.items() if epoch not in order.spent and _is_key(key)}
        drawn = {epoch: self._entropy(DATA_KEY_BYTES) for epoch in order.epochs if epoch not in kept}
        return None if kept == there and not drawn else kept | drawn

    def _facts(self, raw: Mapping[str, Any], values: Mapping[str, bytes]) -> SecretFacts:
        certificate = values.get(names.CERTIFICATE_KEY)
        return SecretFacts(
            keys=frozenset(values),
            resource_version=raw["metadata"].get("resourceVersion", ""),
            users=what_users_may(values.get(names.ACL_FILE_KEY, b"")),
            renewal_due=bool(certificate) and pki.needs_renewal(certificate or b"", self._now()),
            passwords=self._passwords(raw, values) if names.ACL_FILE_KEY in values else None,
            tls=pki.describe(values, self.authority.certificate_pem, _moment(raw, self._now(), labels.CHANGED_AT))
            if certificate
            else None,
        )

    def _passwords(self, raw: Mapping[str, Any], values: Mapping[str, bytes]) -> PasswordFacts:
        annotations = raw["metadata"].get("annotations") or {}
        return passwords.password_facts(
            values,
            lineage=annotations.get(labels.MADE_AT, ""),
            changed_at=_moment(raw, self._now(), labels.CHANGED_AT),
            rotated_at=_moment(raw, self._now(), labels.ROTATED_AT),
            honoured=annotations.get(labels.ROTATED_FOR, ""),
        )

    def _password(self) -> str:
        return base64.urlsafe_b64encode(self._entropy(32)).rstrip(b"=").decode()

    def _issued(self, order: EnsureSecret | TurnSecret) -> dict[str, bytes]:
        key = pki.generate_key()
        pair = pki.issue_server(self.authority, order.dns_names, self._now(), key, for_peers=order.for_peers)
        return {names.CERTIFICATE_KEY: pair.certificate_pem, names.PRIVATE_KEY_KEY: pair.key_pem}

    def _material(self, order: EnsureSecret, there: Mapping[str, bytes]) -> dict[str, bytes]:
        match order.material:
            case Material.DOMAIN_KEY:
                return {names.DOMAIN_KEY_DATA_KEY: self._entropy(DOMAIN_KEY_BYTES)}
            case Material.DATA_KEYS:
                return self._data_keys(order, there) or {}
            case Material.REDIS_USERS:
                return passwords.made(order.domain, there, self._password)
            case Material.SERVER_CERTIFICATE:
                return self._issued(order) | {names.AUTHORITY_KEY: self.authority.certificate_pem}


def _built(
    domain: DomainStore,
    order: EnsureSecret | TurnSecret,
    values: Mapping[str, bytes],
    annotations: Mapping[str, str] | None,
) -> dict[str, Any]:
    body = build_secret(order.name, domain.namespace, order.labels, order.owner, values, annotations)
    return mark.marked(domain.mark_key, body)


def _record_change(
    namespace: str, order: EnsureSecret, before: Mapping[str, bytes], after: Mapping[str, bytes]
) -> None:
    made = sum(before.get(name) != value for name, value in after.items())
    gone = sum(after.get(name) != value for name, value in before.items())
    if order.material is Material.DATA_KEYS:
        record_secret(namespace, order.name, order.material, made=made, removed=gone)
    else:
        record_secret(namespace, order.name, order.material, made=int(bool(made)))


def _drawn_already(order: EnsureSecret, stored: Mapping[str, Any] | None, there: Mapping[str, bytes]) -> bool:
    """Whether the present domain key was drawn after the restore that the order names."""
    usable = len(there.get(names.DOMAIN_KEY_DATA_KEY, b"")) >= DOMAIN_KEY_BYTES
    return bool(order.drawn_for) and _drawn_for(stored) == order.drawn_for and usable


def _drawn_for(stored: Mapping[str, Any] | None) -> str:
    drawn_for: str = ((stored or {}).get("metadata", {}).get("annotations") or {}).get(labels.DRAWN_FOR, "")
    return drawn_for


def _moment(raw: Mapping[str, Any], now: datetime, annotation: str) -> datetime:
    """Return the moment in an annotation, or else the creation time, or else now."""
    for text in ((raw["metadata"].get("annotations") or {}).get(annotation), raw["metadata"].get("creationTimestamp")):
        try:
            return datetime.fromisoformat(text or "").astimezone(UTC)
        except ValueError:
            continue
    return now


def _is_key(key: bytes) -> bool:
    return len(key) == DATA_KEY_BYTES and any(key)


def _take_data_keys(domain: DomainStore, name: str, values: Mapping[str, bytes]) -> None:
    usable = {epoch: key for epoch, key in values.items() if is_epoch(epoch) and _is_key(key)}
    # A text is the id of a key that no Secret has.
    taken = {
        epoch: key
        for epoch, key in domain.data_keys.items()
        if isinstance(key, str) or names.data_keys_secret(epoch) != name
    } | {epoch: key for epoch, key in usable.items() if names.data_keys_secret(epoch) == name}
    if taken != domain.data_keys:
        domain.data_keys = taken
        domain.judged_epochs.intersection_update(domain.data_keys)


def decode(raw: Mapping[str, Any]) -> dict[str, bytes]:
    """Return a Secret's values; those that are not base64 are left out."""
    values = {}
    for key, text in (raw.get("data") or {}).items():
        try:
            values[key] = base64.b64decode(text, validate=True)
        except ValueError:
            continue
    return values


class SecretMissingError(LookupError):
    """A Secret does not exist, or has no such key. The message names both."""


async def secret_value(kube: Kube, namespace: str, where: tuple[str, str] | None) -> bytes | None:
    """Return a value by (Secret, key), None without these. Raises KubeError and SecretMissingError."""
    if where is None:
        return None
    raw = await kube.get(SECRET, namespace, where[0])
    value = decode(raw).get(where[1]) if raw else None
    if value is None:
        raise SecretMissingError(f"Secret {where[0]} does not exist or has no key {where[1]}")
    return value
