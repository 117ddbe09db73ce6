"""Reads the bundle: the root by quorum reads, shards when their digest changed; and the API keys.

A watch on the root only triggers a read: applied revisions and freshness always come from a GET. A root is adopted when
it supersedes the one in force and every shard that it names was read and matches its digest; any failure leaves the
revision in force unchanged, and the pod grows stale instead of wrong. A root that was deleted, or is that of another
CachedModel of this name, makes it stale at once.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import random
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvstrata.contract import ContractError
from kvstrata.contract.messages.audit import Action
from kvstrata.contract.policy.api_keys import KEYS_DATA_KEY
from kvstrata.contract.policy.bundle import ROOT_DATA_KEY, SHARD_DATA_KEY, Bundle, Entry, Root, ShardRef, decode_shard
from kvstrata.contract.policy.pools import PoolRef, PoolShard, shard_name
from kvstrata.contract.wire import digest_bytes
from kvstrata_sidecar.gate import log
from kvstrata_sidecar.gate.audit import Audit
from kvstrata_sidecar.gate.policy.api_keys import KeyRing, MalformedKeysError
from kvstrata_sidecar.gate.policy.enforcement import Enforcement, Freshness
from kvstrata_sidecar.gate.policy.kube_api import ApiError, KubeApi

_READ_ERRORS = (OSError, EOFError, ApiError, ValueError)
_WATCH_S = 300
_MIN_PERIOD_S = 1.0
_MAX_PERIOD_S = 30.0
_READS_PER_STALENESS = 6

Ref = TypeVar("Ref", ShardRef, PoolRef)
Shard = TypeVar("Shard")
_Held = dict[int, tuple[str, Shard]]
"""Shards as read, by index, each with its digest."""


@dataclass(eq=False)
class BundleWatch:
    """`floor` is the revision and the term that this pod has enforced before; the policy volume keeps them across
    restarts. `seen` is the newest complete revision that was read, `root_digest` that of the root in force, as read."""

    api: KubeApi
    enforcement: Enforcement
    freshness: Freshness
    root_name: str
    model: str
    floor: tuple[int, int] = (0, 0)
    jitter: Callable[[], float] = random.random
    problem: str = "the bundle has not been read yet"
    seen: int = 0
    root_digest: str = ""
    _doorbell: asyncio.Event = field(default_factory=asyncio.Event)
    _version: str = ""
    _root: Root | None = None
    _shards: _Held[tuple[Entry, ...]] = field(default_factory=dict)
    _pools: _Held[PoolShard] = field(default_factory=dict)
    _failures: int = 0

    async def run(self) -> None:
        while True:
            self._doorbell.clear()
            await self.refresh()
            try:
                async with asyncio.timeout(self.pause_s()):
                    await self._doorbell.wait()
            except TimeoutError:
                pass

    async def watch(self) -> None:
        pause_s = 1.0
        while True:
            try:
                async for event in self.api.watch_secret(self.root_name, self._version, _WATCH_S):
                    pause_s = 1.0
                    if event.get("type") in ("ADDED", "MODIFIED", "DELETED"):
                        version = event.get("object", {}).get("metadata", {}).get("resourceVersion")
                        if version != self._version:
                            self._doorbell.set()
            except _READ_ERRORS as error:
                if isinstance(error, ApiError) and error.status == 410:
                    self._version = ""
                pause_s = min(pause_s * 2, _MAX_PERIOD_S)
            await asyncio.sleep(pause_s * (0.5 + self.jitter() / 2))

    def pause_s(self) -> float:
        """Return the delay until the next read: several within `staleAfter`, sooner after failures."""
        stale_after_s = self._root.rules.stale_after_s if self._root is not None else _READS_PER_STALENESS
        period_s = min(max(stale_after_s / _READS_PER_STALENESS, _MIN_PERIOD_S), _MAX_PERIOD_S)
        if self._failures:
            period_s = min(period_s, 0.5 * 2 ** min(self._failures, 6))
        return float(period_s * (0.75 + self.jitter() / 4))

    async def refresh(self) -> bool:
        """Read the root and its changed shards; return whether the revision in force was confirmed."""
        sent_ns = self.freshness.now_ns()
        try:
            secret = await self.api.get_secret(self.root_name)
            if secret is None:
                raise self._deleted(f"the bundle Secret {self.root_name} does not exist")
            self._version = secret["metadata"]["resourceVersion"]
            data = _data(secret, ROOT_DATA_KEY)
            root = Root.decode(data)
            if root != self._root:
                await self._adopt(root, digest_bytes(data))
        except (*_READ_ERRORS, KeyError, TypeError) as error:
            self._failures += 1
            problem = str(error) or type(error).__name__
            if problem != self.problem:
                log.warning("the bundle cannot be read", problem=problem)
            self.problem = problem
            return False
        self._failures = 0
        self.problem = ""
        self.enforcement.confirm(sent_ns)
        return True

    async def _adopt(self, root: Root, digest: str) -> None:
        if root.model != self.model:
            raise ContractError(f"the bundle belongs to the model {root.model!r}")
        if self._root is not None and root.model_uid != self._root.model_uid:
            raise self._deleted("the bundle belongs to another CachedModel of this name")
        held = (self._root.revision, self._root.term) if self._root is not None else self.floor
        if not root.supersedes(self._root) or root.revision < held[0] or root.term < held[1]:
            raise ContractError(
                f"the bundle went back: read revision {root.revision} of term {root.term}, "
                f"holding revision {held[0]} of term {held[1]}"
            )
        shards = await _read_changed(root.shards, self._shards, self._read_shard)
        pools = await _read_changed(root.pools, self._pools, self._read_pool)
        entries = (entry for _, shard in shards.values() for entry in shard)
        bundle = Bundle.assemble(root, entries, (shard for _, shard in pools.values()))
        self.seen = root.revision
        self.root_digest = digest
        self.enforcement.apply(bundle)
        # Only now: a root that could not be put in force is tried again.
        self._root, self._shards, self._pools = root, shards, pools

    def _deleted(self, problem: str) -> ContractError:
        if self._root is not None:
            self.enforcement.lose()
        return ContractError(problem)

    async def _read_shard(self, reference: ShardRef) -> tuple[Entry, ...]:
        data = await self._read(f"{self.root_name}-{reference.index}{reference.slot}")
        return decode_shard(data, reference.digest)

    async def _read_pool(self, reference: PoolRef) -> PoolShard:
        data = await self._read(shard_name(self.root_name, reference.index, reference.slot))
        return PoolShard.decode(data, reference.digest)

    async def _read(self, name: str) -> bytes:
        secret = await self.api.get_secret(name)
        if secret is None:
            raise ContractError(f"the bundle shard {name} does not exist")
        return _data(secret, SHARD_DATA_KEY)


async def _read_changed(
    references: Iterable[Ref], held: _Held[Shard], read: Callable[[Ref], Awaitable[Shard]]
) -> _Held[Shard]:
    found: _Held[Shard] = {}
    for reference in references:
        known = held.get(reference.index)
        if known is None or known[0] != reference.digest:
            known = (reference.digest, await read(reference))
        found[reference.index] = known
    return found


@dataclass(eq=False)
class KeyWatch:
    """`ring` has the keys in force. `loaded`: they were read once, or found missing. `lasting`: only a person ends the
    problem."""

    api: KubeApi
    secret_name: str
    audit: Audit
    ring: KeyRing = field(default_factory=KeyRing)
    problem: str = "the API keys have not been read yet"
    loaded: bool = False
    lasting: bool = False
    _version: str = ""

    async def run(self) -> None:
        while True:
            await self.refresh()
            if not self.secret_name:
                await asyncio.Event().wait()
            try:
                async with asyncio.timeout(2.0 if self.problem else _MAX_PERIOD_S):
                    async for event in self.api.watch_secret(self.secret_name, self._version, _WATCH_S):
                        version = event["object"]["metadata"]["resourceVersion"]
                        if event.get("type") != "BOOKMARK" and version != self._version:
                            break
            except (*_READ_ERRORS, KeyError):
                await asyncio.sleep(1.0)

    async def refresh(self) -> None:
        """A missing Secret revokes all keys; a malformed one leaves the last good ring in force."""
        problem, away, before = "", False, self.ring
        try:
            secret = await self.api.get_secret(self.secret_name) if self.secret_name else None
            if secret is None:
                self.ring = KeyRing()
                self.loaded = True
                problem = f"the API-key Secret {self.secret_name} does not exist: `kubectl kvstrata keys add` makes it"
                if not self.secret_name:
                    problem = "no API-key Secret is configured: no caller can be authenticated"
            else:
                self._version = secret["metadata"]["resourceVersion"]
                self.ring = KeyRing.decode(_data(secret, KEYS_DATA_KEY))
                self.loaded = True
        except (*_READ_ERRORS, MalformedKeysError, KeyError, TypeError) as error:
            problem = f"the API keys cannot be read: {error or type(error).__name__}"
            away = isinstance(error, OSError | EOFError | ApiError)
        if self.ring != before:
            self.audit.record(Action.API_KEYS_HELD, count=len(self.ring))
        if problem != self.problem:
            log.event("warning" if problem else "info", "API keys", problem=problem, keys=len(self.ring))
        self.problem, self.lasting = problem, bool(problem) and not away


def _data(secret: dict[str, Any], key: str) -> bytes:
    encoded = (secret.get("data") or {}).get(key)
    if not isinstance(encoded, str):
        raise ContractError(f"the Secret {secret.get('metadata', {}).get('name')} has no key {key}")
    try:
        return base64.b64decode(encoded, validate=True)
    except binascii.Error as error:
        raise ContractError(f"the Secret's key {key} is not base64") from error
