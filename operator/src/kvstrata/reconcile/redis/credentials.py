"""Passwords and certificates of managed servers, maintained beside the loop. The store keeps the password of pods and
no other."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime

from kvstrata.api.cachetier import CacheTier
from kvstrata.api.reasons import SharedReason
from kvstrata.clients import pki
from kvstrata.clients.kube import Kube, KubeError
from kvstrata.clients.redis.admin import CERTIFICATE_FILES, Admin, Users, tend
from kvstrata.clients.redis.probe import Access
from kvstrata.clients.resources import SECRET
from kvstrata.contract.policy.tiers import MAX_AUTHORITY_BYTES, MAX_PASSWORD_BYTES
from kvstrata.model.redis.credentials import CredentialLook, ServerCredentials, TlsFacts
from kvstrata.model.refs import Key
from kvstrata.objects import names
from kvstrata.objects.redis import passwords
from kvstrata.objects.redis.users import ADMIN_USER, REPLICATION_USER, user_words
from kvstrata.plan.actions import ManagedServer, Order, TendServers
from kvstrata.reconcile.background import Background, utc_now
from kvstrata.reconcile.queue import WorkQueue
from kvstrata.reconcile.secrets import SecretStore, decode
from kvstrata.reconcile.store import Store

log = logging.getLogger(__name__)

Values = Mapping[str, bytes]


class CredentialWorker(Background):
    """Tends the servers of managed tiers, one round at a time for each tier. `leading` is whether this process may
    give orders. `files` are the servers' certificate files, `now` is the wall clock in UTC."""

    def __init__(
        self,
        kube: Kube,
        store: Store,
        queue: WorkQueue,
        secret_store: SecretStore,
        leading: Callable[[], bool],
        *,
        files: Mapping[str, str] = CERTIFICATE_FILES,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        super().__init__(queue)
        self._kube, self._store, self._secret_store = kube, store, secret_store
        self._leading, self._files, self._now = leading, files, now

    def begin(self, namespace: str, order: TendServers) -> None:
        """Start a round for a tier, unless one is running: its look asks for the rest."""
        slot = (namespace, order.tier)
        self._begin(slot, self.tend(namespace, order), "a round over credentials failed", Key("CacheTier", *slot))

    async def tend(self, namespace: str, order: TendServers) -> None:
        tls: TlsFacts | None = None
        unread = ""
        try:
            users = await self._values(namespace, order.users_secret)
            certificate = await self._values(namespace, order.tls_secret) if order.tls_secret else None
            if certificate is not None and order.foreign_tls:
                tls = pki.describe(certificate, self._secret_store.authority.certificate_pem, self._now())
        except (KubeError, LookupError) as error:
            unread = str(error)
            looks = [ServerCredentials(one.name, SharedReason.SECRET_NOT_FOUND, unread) for one in order.servers]
        else:
            questions = (self._one(one, order, users, certificate) for one in order.servers)
            looks = list(await asyncio.gather(*questions))
        if not self._is_managed(namespace, order.tier):
            return
        if not unread:
            # An authority of a Secret that no server can use would replace one that works.
            usable = certificate if tls is None or not tls.problem else None
            read = _for_pods(order, users, usable or {})
            self._queue.add_all(self._store.take_access(namespace, order.tier, read))
        look = CredentialLook(
            {one.server: one for one in looks}, self._now(), tls, updated=bool(order.orders), unread=unread
        )
        self._store.domain(namespace).credentials[order.tier] = look
        self._queue.add(Key(CacheTier.INFO.kind, namespace, order.tier))

    def forget_unmanaged(self, namespace: str, tier: str) -> None:
        if not self._is_managed(namespace, tier):
            self._store.domain(namespace).credentials.pop(tier, None)

    async def _one(
        self, server: ManagedServer, order: TendServers, users: Values, certificate: Values | None
    ) -> ServerCredentials:
        rules = user_words(users.get(names.ACL_FILE_KEY, b""))
        authority = certificate.get(names.AUTHORITY_KEY, b"") if certificate is not None else None
        accesses = [Access(one, authority, ADMIN_USER) for one in passwords.to_try(users, ADMIN_USER)]
        orders = order.orders.get(server.name, ()) if self._leading() else ()
        for one in orders:
            log.info("server updated", extra={"tier": order.tier, "server": server.name, "order": str(one)})
        calls = [self._call(one, rules, users) for one in orders]
        seen = await tend(server, accesses, rules, calls)
        if orders and not seen.answered:
            log.warning("server not updated", extra={"tier": order.tier, "reason": seen.reason, "error": seen.message})
        return seen

    def _call(self, order: Order, rules: Users, users: Values) -> Callable[[Admin], Awaitable[None]]:
        match order:
            case Order.SET_USERS:
                return lambda server: server.set_users(rules)
            case Order.FOLLOW:
                password = users.get(names.REPLICATION_PASSWORD_KEY, b"").decode("ascii", "replace")
                return lambda server: server.follow(REPLICATION_USER, password)
            case Order.LOAD_CERTIFICATE:
                return lambda server: server.load_certificate(self._files)

    async def _values(self, namespace: str, name: str) -> dict[str, bytes]:
        raw = await self._kube.get(SECRET, namespace, name)
        if raw is None:
            raise LookupError(f"Secret {name} does not exist")
        return decode(raw)

    def _is_managed(self, namespace: str, tier: str) -> bool:
        found = self._store.domain(namespace).tiers.get(tier)
        return found is not None and not found.metadata.deleting and found.spec.managed is not None


def _for_pods(order: TendServers, users: Values, certificate: Values) -> dict[tuple[str, str], bytes]:
    """Return the password and the authority of pods, by Secret and key."""
    found = (
        (order.users_secret, names.PASSWORD_KEY, users.get(names.PASSWORD_KEY, b""), MAX_PASSWORD_BYTES),
        (order.tls_secret or "", names.AUTHORITY_KEY, certificate.get(names.AUTHORITY_KEY, b""), MAX_AUTHORITY_BYTES),
    )
    return {(secret, key): value for secret, key, value, most in found if 0 < len(value) <= most}
