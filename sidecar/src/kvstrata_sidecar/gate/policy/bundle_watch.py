"""Reads the bundle: the root by quorum reads, shards when their digest changed; and the API keys.

A watch on the root only triggers a read: applied revisions and freshness always come from a GET. A root is adopted when
it supersedes the one in force and every shard that it names was read and matches its digest; any failure leaves the
revision in force unchanged, and the pod grows stale instead of wrong.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import random
from collections.abc import Callable
from typing import Any

from kvstrata.contract import ContractError
from kvstrata.contract.messages.audit import Action
from kvstrata.contract.policy.bundle import ROOT_DATA_KEY, SHARD_DATA_KEY, Bundle, Entry, Root, ShardRef, decode_shard
from kvstrata.contract.policy.pools import PoolRef, PoolShard, shard_name
from kvstrata.contract.wire import digest_bytes
from kvstrata_sidecar.gate import log
from kvstrata_sidecar.gate.audit import Audit
from kvstrata_sidecar.gate.policy.api_keys import KEYS_DATA_KEY, KeyRing, Keys, MalformedKeysError
from kvstrata_sidecar.gate.policy.enforcement import Enforcement
from kvstrata_sidecar.gate.policy.freshness import Freshness
from kvstrata_sidecar.gate.policy.kube_api import ApiError, KubeApi

_READ_ERRORS = (OSError, TimeoutError, EOFError, ApiError, ContractError, ValueError)
_WATCH_S = 300
_MIN_PERIOD_S = 1.0
_MAX_PERIOD_S = 30.0
_READS_PER_STALENESS = 6


class BundleWatch:
    def __init__(
        self,
        api: KubeApi,
        enforcement: Enforcement,
        freshness: Freshness,
        *,
        root_name: str,
        model: str,
        floor: tuple[int, int] = (0, 0),
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.problem = "the bundle has not been read yet"
        self.seen = 0
        """The newest complete revision that was read."""
        self.root_digest = ""
        """Digest of the root in force, as read."""
        self._api = api
        self._enforcement = enforcement
        self._freshness = freshness
        self._root_name = root_name
        self._model = model
        self._floor = floor
        """Revision and term that this pod has enforced before; kept by the policy volume across restarts."""
        self._jitter = jitter
        self._doorbell = asyncio.Event()
        self._version = ""
        self._root: Root | None = None
        self._shards: dict[int, tuple[str, tuple[Entry, ...]]] = {}
        self._pools: dict[int, tuple[str, PoolShard]] = {}
        self._failures = 0

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
                async for event in self._api.watch_secret(self._root_name, self._version, _WATCH_S):
                    pause_s = 1.0
                    if event.get("type") in ("ADDED", "MODIFIED", "DELETED"):
                        version = event.get("object", {}).get("metadata", {}).get("resourceVersion")
                        if version != self._version:
                            self._doorbell.set()
            except ApiError as error:
                if error.status == 410:
                    self._version = ""
                pause_s = min(pause_s * 2, _MAX_PERIOD_S)
            except (OSError, TimeoutError, EOFError, ValueError):
                pause_s = min(pause_s * 2, _MAX_PERIOD_S)
            await asyncio.sleep(pause_s * (0.5 + self._jitter() / 2))

    def pause_s(self) -> float:
        """Return the delay until the next read: several within `staleAfter`, sooner after failures."""
        stale_after_s = self._root.rules.stale_after_s if self._root is not None else _READS_PER_STALENESS
        period_s = min(max(stale_after_s / _READS_PER_STALENESS, _MIN_PERIOD_S), _MAX_PERIOD_S)
        if self._failures:
            period_s = min(period_s, 0.5 * 2 ** min(self._failures, 6))
        return float(period_s * (0.75 + self._jitter() / 4))

    async def refresh(self) -> bool:
        """Read the root and its changed shards; return whether the revision in force was confirmed."""
        sent_ns = self._freshness.now_ns()
        try:
            secret = await self._api.get_secret(self._root_name)
            if secret is None:
                raise ContractError(f"the bundle Secret {self._root_name} does not exist")
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
        self._enforcement.confirm(sent_ns)
        return True

    async def _adopt(self, root: Root, digest: str) -> None:
        if root.model != self._model:
            raise ContractError(f"the bundle belongs to the model {root.model!r}")
        held = (self._root.revision, self._root.term) if self._root is not None else self._floor
        if not root.supersedes(self._root) or root.revision < held[0] or root.term < held[1]:
            raise ContractError(
                f"the bundle went back: read revision {root.revision} of term {root.term}, "
                f"holding revision {held[0]} of term {held[1]}"
            )
        shards: dict[int, tuple[str, tuple[Entry, ...]]] = {}
        for reference in root.shards:
            known = self._shards.get(reference.index)
            if known is None or known[0] != reference.digest:
                known = (reference.digest, await self._read_shard(reference))
            shards[reference.index] = known
        pools: dict[int, tuple[str, PoolShard]] = {}
        for pool in root.pools:
            held_pool = self._pools.get(pool.index)
            if held_pool is None or held_pool[0] != pool.digest:
                held_pool = (pool.digest, await self._read_pool(pool))
            pools[pool.index] = held_pool
        entries = (entry for _, shard in shards.values() for entry in shard)
        bundle = Bundle.assemble(root, entries, (shard for _, shard in pools.values()))
        self.seen = root.revision
        self.root_digest = digest
        self._enforcement.apply(bundle)
        # Only now: a root that could not be put in force is tried again.
        self._root, self._shards, self._pools = root, shards, pools

    async def _read_shard(self, reference: ShardRef) -> tuple[Entry, ...]:
        data = await self._read(f"{self._root_name}-{reference.index}{reference.slot}")
        return decode_shard(data, reference.digest)

    async def _read_pool(self, reference: PoolRef) -> PoolShard:
        return PoolShard.decode(
            await self._read(shard_name(self._root_name, reference.index, reference.slot)), reference.digest
        )

    async def _read(self, name: str) -> bytes:
        secret = await self._api.get_secret(name)
        if secret is None:
            raise ContractError(f"the bundle shard {name} does not exist")
        return _data(secret, SHARD_DATA_KEY)


class KeyWatch:
    def __init__(self, api: KubeApi, keys: Keys, *, secret_name: str, audit: Audit, period_s: float = 30.0) -> None:
        self.problem = "the API keys have not been read yet"
        self.loaded = False
        """Whether the keys were read once, or found missing."""
        self._api = api
        self._keys = keys
        self._secret_name = secret_name
        self._audit = audit
        self._period_s = period_s
        self._version = ""

    async def run(self) -> None:
        while True:
            await self.refresh()
            if not self._secret_name:
                await asyncio.Event().wait()
            try:
                async with asyncio.timeout(self._period_s if not self.problem else 2.0):
                    await self._changed()
            except (*_READ_ERRORS, KeyError):
                await asyncio.sleep(1.0)

    async def _changed(self) -> None:
        async for event in self._api.watch_secret(self._secret_name, self._version, _WATCH_S):
            if event.get("type") != "BOOKMARK" and event["object"]["metadata"]["resourceVersion"] != self._version:
                return

    async def refresh(self) -> None:
        """A missing Secret revokes all keys; a malformed one leaves the last good ring in force."""
        problem, before = "", self._keys.ring
        try:
            secret = await self._api.get_secret(self._secret_name) if self._secret_name else None
            if secret is None:
                self._keys.ring = KeyRing()
                self.loaded = True
                problem = f"the API-key Secret {self._secret_name} does not exist"
                if not self._secret_name:
                    problem = "no API-key Secret is configured: no caller can be authenticated"
            else:
                self._version = secret["metadata"]["resourceVersion"]
                self._keys.ring = KeyRing.decode(_data(secret, KEYS_DATA_KEY))
                self.loaded = True
        except (*_READ_ERRORS, MalformedKeysError, KeyError, TypeError) as error:
            problem = f"the API keys cannot be read: {error or type(error).__name__}"
        if not self._keys.ring.is_as(before):
            self._audit.record(Action.API_KEYS_HELD, count=len(self._keys.ring))
        if problem != self.problem:
            log.event("warning" if problem else "info", "API keys", problem=problem, keys=len(self._keys.ring))
        self.problem = problem


def _data(secret: dict[str, Any], key: str) -> bytes:
    encoded = (secret.get("data") or {}).get(key)
    if not isinstance(encoded, str):
        raise ContractError(f"the Secret {secret.get('metadata', {}).get('name')} has no key {key}")
    try:
        return base64.b64decode(encoded, validate=True)
    except binascii.Error as error:
        raise ContractError(f"the Secret's key {key} is not base64") from error
