"""Appends receipts to their domain's chain, signed by the operator's key.

Observes: the key's Secret, the published keys, a domain's receipts, all in the operator's namespace.
Writes: the Secret, when there never was a key and when the key is rotated; public keys, which are only added; receipts,
which are never overwritten.

The head is the record with the highest number, and the next number's object can be created once: the API server refuses
a second writer, which reads again and appends behind the first. Results are read back after the write.
`plan.erasure.receipt_chain` decides.

A rotation has two repeatable steps: the Secret gets a new current key and keeps the previous one (`rotate`); each
chain gets a record that both keys sign, and then the previous key leaves the Secret (`hand_over`). Public keys stay.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from typing import Any

from kvstrata.api.cachedomain import DOMAIN_NAME, CacheDomain, ReceiptChain
from kvstrata.api.scalars import format_timestamp
from kvstrata.clients.kube import Kube, KubeError
from kvstrata.clients.resources import BY_KIND, CONFIG_MAP, SECRET
from kvstrata.clients.signing import SigningError, SigningKeys, generate, is_signed
from kvstrata.contract.receipt.facts import Erasure
from kvstrata.contract.receipt.record import Link, ReceiptError, check_signatures, read_link
from kvstrata.contract.receipt.vocabulary import moment_in_s
from kvstrata.objects import labels, names
from kvstrata.objects.erasure.receipts import build_public_keys, build_receipt, read_receipt_objects
from kvstrata.objects.secret import build_signing_key
from kvstrata.plan.erasure.receipt_chain import ChainConflictError, ChainState, KeysInUse, next_record
from kvstrata.reconcile.audit import record_secret
from kvstrata.reconcile.claims import NameConflictError
from kvstrata.reconcile.secrets import decode
from kvstrata.reconcile.store import Store

log = logging.getLogger(__name__)

ATTEMPTS = 8
"""Reads of the chain: for the receipt, for a hand-over before it, to check the result, and after other writers."""

_OF_RECEIPTS = f"{labels.NAME}={labels.of_receipts(labels.RECEIPT)[labels.NAME]}"
_WHOLE = f"{labels.COMPONENT}={labels.RECEIPT}"
ConfigMaps = dict[str, Mapping[str, Any]]
"""By name."""


RecordedChain = Callable[[str, str], ReceiptChain | None]
"""Maps namespace and domain id to the chain in the CacheDomain's status."""


class Chains:
    """The chains of all domains. One receipt is written at a time, and none while the previous key leaves the Secret.
    `now` is the wall clock in UTC."""

    def __init__(self, kube: Kube, namespace: str, now: Callable[[], datetime]) -> None:
        self._kube, self._namespace, self._now = kube, namespace, now
        self._lock = asyncio.Lock()

    async def issue(self, namespace: str, domain: str, recorded: ReceiptChain | None, facts: Erasure) -> ChainState:
        """Return the chain of a domain (its id) with an erasure's receipt, which is appended unless it exists.
        `recorded` is the chain in the CacheDomain's status. Raises ChainConflictError if only an administrator can
        help, before any write for a chain to repair; KubeError and NotLeadingError, after which a retry finds the
        written record."""
        async with self._lock:
            return await self._append(domain, lambda *_: recorded, namespace, facts)

    async def rotate(self, max_age_s: float) -> bool:
        """Start a rotation if the current key is older than `max_age_s` (0: at any age), or a new value of the
        annotation requests it; return whether it did. Does nothing before the first receipt, or while the last
        rotation is not over. Raises KubeError, NotLeadingError, and SigningError for a Secret that holds no key."""
        stored = await self._kube.get(SECRET, self._namespace, names.RECEIPTS_KEY_SECRET)
        public = await self._public()
        if stored is None or public is None:
            return False
        keys, wish = SigningKeys.from_secret_data(decode(stored)), _annotations(public).get(labels.ROTATE_RECEIPTS_KEY)
        wished = bool(wish) and wish != _annotations(stored).get(labels.ROTATED_FOR)
        expired = max_age_s > 0 and self._now().timestamp() - moment_in_s(keys.since) >= max_age_s
        if keys.previous is not None or not (wished or expired):
            return False
        rotated = keys.rotated(format_timestamp(self._now()))
        await self._put_key(stored, rotated, {labels.ROTATED_FOR: wish} if wish else {})
        await self._publish(rotated, public)
        record_secret(self._namespace, names.RECEIPTS_KEY_SECRET, "ReceiptsKey", made=1)
        return True

    async def hand_over(
        self, recorded: RecordedChain, publish: Callable[[ChainState], Awaitable[None]]
    ) -> tuple[bool, list[str]]:
        """Give each chain that the previous key signed a record that both keys sign, `publish` chains that end with
        one, and remove the previous key from the Secret. Returns whether it did, and why chains could not be handed
        over: those keep the key. No receipt is written meanwhile: one signed by the previous key could not be
        continued. Does nothing outside a rotation. Raises KubeError, NotLeadingError and SigningError."""
        problems = list[str]()
        async with self._lock:
            stored = await self._kube.get(SECRET, self._namespace, names.RECEIPTS_KEY_SECRET)
            if stored is None or (keys := SigningKeys.from_secret_data(decode(stored))).previous is None:
                return False, problems
            for domain in await self._domains():
                try:
                    chain = await self._append(domain, recorded)
                except ChainConflictError as error:
                    problems.append(str(error))
                else:
                    if chain.newest is not None and chain.newest.subject_uid is None:
                        await publish(chain)
            if problems:
                return False, problems
            await self._put_key(stored, keys.without_previous(), {})
        record_secret(self._namespace, names.RECEIPTS_KEY_SECRET, "ReceiptsKey", made=0, removed=1)
        return True, problems

    async def _append(
        self, domain: str, recorded: RecordedChain, namespace: str = "", facts: Erasure | None = None
    ) -> ChainState:
        """Write the records that the chain lacks, and return it."""
        found: ConfigMaps = {}
        try:
            for _ in range(ATTEMPTS):
                keys, chain = await self._chain(domain, recorded, namespace, found)
                record = next_record(chain, KeysInUse(keys.current_id, keys.since, keys.previous_id), facts)
                if record is None:
                    return chain
                await self._write(keys.sign(record), found)
        except (SigningError, ReceiptError) as error:
            raise ChainConflictError(str(error)) from None
        except KubeError as error:
            if not (error.is_refusal or isinstance(error, NameConflictError)):
                raise
            where = f"namespace {self._namespace} takes no receipt: {error}"
            raise ChainConflictError(where) from error
        raise KubeError(409, "Conflict", f"others write receipts of domain {domain} all the time")

    async def _domains(self) -> list[str]:
        selector = f"{_OF_RECEIPTS},{_WHOLE}"
        found = [raw["metadata"]["name"] async for raw in self._kube.list(CONFIG_MAP, self._namespace, selector)]
        wholes = [name.removeprefix(names.RECEIPT_PREFIX) for name in found if name.startswith(names.RECEIPT_PREFIX)]
        return sorted({name.rpartition("-")[0] for name in wholes})

    async def _put_key(self, stored: Mapping[str, Any], keys: SigningKeys, noted: Mapping[str, str]) -> None:
        metadata = {**stored["metadata"], "annotations": {**_annotations(stored), **noted}}
        body = {**stored, "metadata": metadata, "data": build_signing_key("", keys.secret_data())["data"]}
        await self._kube.replace(SECRET, self._namespace, body)

    async def _keys(self) -> tuple[SigningKeys, frozenset[str]]:
        """Return the signing keys, and the ids of all published ones, including these."""
        stored = await self._kube.get(SECRET, self._namespace, names.RECEIPTS_KEY_SECRET)
        public = await self._public()
        if stored is None:
            await self._require_first(public)
            stored = await self._make_key()
        try:
            keys = SigningKeys.from_secret_data(decode(stored))
        except SigningError as error:
            what = f"Secret {names.RECEIPTS_KEY_SECRET} of namespace {self._namespace}"
            raise ChainConflictError(f"{what}: {error}; put back the one that signed, from a backup") from None
        return keys, await self._publish(keys, public)

    async def _public(self) -> Mapping[str, Any] | None:
        """Return the ConfigMap of published keys, which a person may have created. Raises NameConflictError."""
        found = await self._kube.get(CONFIG_MAP, self._namespace, names.RECEIPT_PUBLIC_KEYS)
        if found is not None and not all(name.endswith(".pem") for name in found.get("data") or ()):
            raise NameConflictError(CONFIG_MAP.kind, names.RECEIPT_PUBLIC_KEYS)
        return found

    async def _require_first(self, public: Mapping[str, Any] | None) -> None:
        """Raise unless there never was a key or its loss is accepted: a new key would hide the loss."""
        if labels.ACCEPT_LOST_KEY in _annotations(public):
            log.warning("a new key signs receipts, because the one before is lost")
            return
        if (public or {}).get("data") or await self._domains():
            raise ChainConflictError(
                f"the key that signs receipts is gone: namespace {self._namespace} has no Secret "
                f"{names.RECEIPTS_KEY_SECRET}. Put it back from a backup; or annotate ConfigMap "
                f"{names.RECEIPT_PUBLIC_KEYS} with {labels.ACCEPT_LOST_KEY}: <reason>, and a new key begins, which "
                "every chain will show"
            )

    async def _make_key(self) -> dict[str, Any]:
        keys = generate(format_timestamp(self._now()))
        body = build_signing_key(self._namespace, keys.secret_data())
        try:
            made = await self._kube.create(SECRET, self._namespace, body)
        except KubeError as error:
            if not error.is_conflict:
                raise
        else:
            record_secret(self._namespace, names.RECEIPTS_KEY_SECRET, "ReceiptsKey", made=1)
            return made
        return await self._kube.get(SECRET, self._namespace, names.RECEIPTS_KEY_SECRET) or {}

    async def _publish(self, keys: SigningKeys, public: Mapping[str, Any] | None) -> frozenset[str]:
        """Publish the keys before they sign; return the ids of all published keys."""
        built = build_public_keys(self._namespace, keys.public_pems())
        if public is None:
            public = await self._kube.create(CONFIG_MAP, self._namespace, built)
        data, annotations = public.get("data") or {}, _annotations(public)
        if not built["data"].items() <= data.items() or labels.ACCEPT_LOST_KEY in annotations:
            kept = {name: text for name, text in annotations.items() if name != labels.ACCEPT_LOST_KEY}
            metadata = {**public["metadata"], "annotations": kept}
            body = {**public, "metadata": metadata, "data": {**data, **built["data"]}}
            public = await self._kube.replace(CONFIG_MAP, self._namespace, body)
        return frozenset(name.removesuffix(".pem") for name in public["data"])

    async def _chain(
        self, domain: str, recorded: RecordedChain, namespace: str = "", found: ConfigMaps | None = None
    ) -> tuple[SigningKeys, ChainState]:
        """Return the signing keys and a domain's stored chain, with `found` objects by name whose labels were changed.
        Its namespace is that of its records, unless given."""
        keys, published = await self._keys()
        objects = dict(found or {})
        async for raw in self._kube.list(CONFIG_MAP, self._namespace, f"{_OF_RECEIPTS},{labels.DOMAIN}={domain}"):
            objects[raw["metadata"]["name"]] = raw
        links: list[Link] = []
        for name, data in read_receipt_objects(objects):
            try:
                if isinstance(data, ReceiptError):
                    raise data
                link = read_link(data)
                check_signatures(link, is_signed)
            except ReceiptError as error:
                raise ChainConflictError(_not_ours(name, str(error))) from None
            links.append(link)
        namespace = namespace or (links[-1].head.namespace if links else "")
        chain = ChainState(domain, namespace, links, recorded(namespace, domain))
        newest = chain.newest
        # It commits to all records before it.
        if newest is not None and newest.next_signer not in published | keys.public_pems().keys():
            name = names.receipt(domain, newest.head.sequence)
            raise ChainConflictError(_not_ours(name, f"key {newest.next_signer[:16]} was never the operator's"))
        return keys, chain

    async def _write(self, receipt: bytes, found: ConfigMaps) -> None:
        """Create a receipt's objects, the decisive one last; record existing ones in `found`."""
        for built in build_receipt(self._namespace, receipt):
            name = built["metadata"]["name"]
            try:
                await self._kube.create(CONFIG_MAP, self._namespace, built)
            except KubeError as error:
                if not error.is_conflict:
                    raise
                raw = await self._kube.get(CONFIG_MAP, self._namespace, name)
                if raw is not None:
                    found[name] = raw


def _annotations(raw: Mapping[str, Any] | None) -> Mapping[str, str]:
    return (raw["metadata"].get("annotations") or {}) if raw is not None else {}


def _not_ours(name: str, why: str) -> str:
    return (
        f"the chain is not continued behind ConfigMap {name}: {why}. Keep a copy as evidence, and delete it: "
        "the chain continues, and shows the gap"
    )


def recorded_chain(store: Store, namespace: str, domain: str) -> ReceiptChain | None:
    """Return the chain in the status of a domain's CacheDomain; None also for an unknown namespace, the empty name."""
    found = _domain(store, namespace, domain) if namespace else None
    return found.status.receipts if found is not None else None


async def record_chain(kube: Kube, store: Store, chain: ChainState) -> CacheDomain | None:
    """Write number and digest of a chain's newest receipt into the status of its CacheDomain. Return that, or None if
    it is gone or counts as much already. Raises KubeError."""
    namespace, newest = chain.namespace, chain.newest
    found, resource = _domain(store, namespace, chain.domain_id), BY_KIND[CacheDomain.INFO.kind]
    if found is None or newest is None or store.is_anothers(namespace):
        return None
    if found.status.receipts is not None and found.status.receipts.count >= newest.head.sequence:
        return None
    status = {"receipts": {"count": newest.head.sequence, "head": newest.digest}}
    try:
        written = await kube.patch_status(resource, namespace, DOMAIN_NAME, status, found.metadata.resource_version)
    except KubeError as error:
        if error.is_not_found:
            return None
        raise
    store.observe(written)
    return found


def _domain(store: Store, namespace: str, domain: str) -> CacheDomain | None:
    """Return the CacheDomain with this domain id; a successor has another chain."""
    found = store.domain(namespace).domain
    return found if found is not None and found.status.domain_id == domain else None
