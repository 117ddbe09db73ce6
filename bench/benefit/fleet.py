"""The pods of one run with the Redis behind them, started for it and stopped after it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import redis

from bench.adapter.stand import Redis
from bench.benefit import gates
from bench.benefit.arms import Arm, Settings
from bench.benefit.gates import PodGate
from bench.benefit.http import Address, ask
from bench.benefit.meter import Meter
from bench.benefit.policy import MEMORY, SHARED, SHARED_BYTES, Policy
from bench.benefit.programs import connector, start_engine, start_upstream_cache
from bench.gate.processes import Process
from e2e.cluster.ports import free_port
from e2e.cluster.progress import ClusterError
from kvstrata_sidecar.upstream.resolved_identity import IDENTITY_DIRECTORY_KEY
from tests.dataplane.lmcache_server import LMCacheServer
from tests.tiers.certificates import Authority

START_TIMEOUT_S = 1800.0
REST_TIMEOUT_S = 300.0
ENGINE, CACHE, GATE, REDIS = "engine", "cache server", "gate", "redis"
"""Parts that processor time is reported by."""

POD_BYTES = 3_800 << 20
"""Memory that a pod takes, its engine's and its cache server's."""

SPARE_BYTES = 1 << 30


@dataclass
class Folders:
    """Folders that the parameters of a cache server name, as of a gate that stands in."""

    policy_dir: Path
    link_dir: Path


@dataclass
class Pod:
    """An engine, and its cache server and gate where the arm has them. `callers` connect to one of them."""

    engine: Process
    engine_address: Address
    callers: Address
    cache: LMCacheServer | Process | None = None
    cache_http: Address | None = None
    gate: PodGate | None = None

    async def engine_metrics(self) -> str:
        """Return the engine's metrics page."""
        return (await ask(self.engine_address, "/metrics")).decode()

    async def memory_bytes(self) -> int:
        """Return how many bytes the cache server has in its memory."""
        return sum(int(one["memory_used_bytes"]) for one in (await self._status("l1_managers")).values())

    async def stores(self) -> bool:
        """Whether the cache server has blocks that it is still about to store in its tier."""
        controllers = (await self._status("store_controllers")).values()
        return any(one["pending_keys_count"] or one["in_flight_task_count"] for one in controllers)

    async def _status(self, part: str) -> dict[str, Any]:
        if self.cache_http is None:
            return {}
        found: dict[str, Any] = json.loads(await ask(self.cache_http, "/status"))["storage_manager"][part]
        return found

    async def forget_memory(self) -> None:
        """Empty the cache server's memory, and wait until it is empty."""
        if self.cache_http is None:
            return
        async with asyncio.timeout(60):
            while True:
                await ask(self.cache_http, "/cache/clear", b'{"tier": "l1"}')
                if not await self.memory_bytes():
                    return
                await asyncio.sleep(0.05)


@dataclass
class Fleet:
    """All of them, running."""

    pods: list[Pod]
    redis: Redis | None
    meter: Meter
    policy: Policy | None = field(default=None, repr=False)

    async def rest(self) -> None:
        """Wait until nothing is computed or stored any more.

        Processes that others keep off the processors look as if they rested, so cache servers are asked, too.
        """
        async with asyncio.timeout(REST_TIMEOUT_S):
            while True:
                await self.meter.rest()
                if not any([await pod.stores() for pod in self.pods]):
                    return

    def redis_counts(self) -> dict[str, int]:
        """Return bytes that Redis received and sent so far, that its data takes, and its keys."""
        if self.redis is None:
            return {"in": 0, "out": 0, "used": 0, "keys": 0}
        with redis.Redis(port=self.redis.port) as admin:
            facts: dict[str, Any] = admin.info()
            keys = int(admin.dbsize())
        return {
            "in": facts["total_net_input_bytes"], "out": facts["total_net_output_bytes"],
            "used": facts["used_memory_dataset"], "keys": keys,
        }  # fmt: skip

    async def share(self, text: str) -> None:
        """Have a pool of this text on all pods."""
        if self.policy is None:
            raise ClusterError("only the product has pools")
        await gates.share([pod.gate for pod in self.pods if pod.gate], self.policy, text)


@dataclass(frozen=True, slots=True)
class Installed:
    """Installed parts: the interpreter with vLLM and LMCache, and the model's folder."""

    python: Path
    model: Path


@contextlib.asynccontextmanager
async def running(
    arm: Arm, pods: int, tenants: int, settings: Settings, installed: Installed, directory: Path,
    tier: dict[str, Any] | None = None,
) -> AsyncIterator[Fleet]:  # fmt: skip
    """Start the pods of an arm; `tier` takes the place of the product's tier in Redis."""
    async with contextlib.AsyncExitStack() as stack:
        starter = _Starter(arm, settings, installed, directory, stack)
        server = starter.redis() if arm.caches and tier is None else None
        policy = Policy(arm, tenants, settings) if arm.product else None
        shared = tier or (starter.tier(server) if server else None)
        started = []
        for number in range(pods):
            folder = directory / f"p{number}"
            folder.mkdir()
            started.append(await starter.pod(folder, server, policy, tenants, shared))
        await asyncio.gather(*(starter.ready(pod) for pod in started))
        parts: dict[str, list[int]] = {ENGINE: [pod.engine.pid for pod in started]}
        caches = [pod.cache for pod in started if pod.cache is not None]
        parts[CACHE] = [one.process.pid if isinstance(one, LMCacheServer) else one.pid for one in caches]
        parts[GATE] = [pod.gate.process.pid for pod in started if pod.gate and pod.gate.process]
        parts[REDIS] = [server.pid] if server else []
        fleet = Fleet(started, server, Meter(parts), policy)
        await fleet.rest()
        yield fleet


class _Starter:
    """Starts the parts of one arm's pods; the stack stops them."""

    def __init__(
        self, arm: Arm, settings: Settings, installed: Installed, directory: Path, stack: contextlib.AsyncExitStack
    ) -> None:
        self._arm, self._settings, self._installed = arm, settings, installed
        self._directory, self._stack = directory, stack
        self._tls_port = free_port()

    def redis(self) -> Redis:
        options: list[str] = []
        if self._arm is Arm.TLS:
            certificates = Authority(self._directory).issue("127.0.0.1")
            options = ["--tls-port", str(self._tls_port), *certificates.redis_options]
        server = Redis(self._directory, *options)
        self._stack.callback(server.kill)
        return server

    def tier(self, server: Redis) -> dict[str, Any]:
        """Return the parameters of the product's tier in Redis: with encryption, and TLS if the arm has it."""
        tls = self._arm is Arm.TLS
        return {
            "name": SHARED, "endpoints": [{"host": "127.0.0.1", "port": self._tls_port if tls else server.port}],
            "encryption": "Required", "capacity_bytes": SHARED_BYTES,
            **({"tls": {"ca_file": str(self._directory / "ca.crt")}} if tls else {}),
        }  # fmt: skip

    async def pod(
        self, folder: Path, server: Redis | None, policy: Policy | None, tenants: int, tier: dict[str, Any] | None
    ) -> Pod:
        """Start the processes of a pod; its engine starts last, when its cache server answers."""
        python, settings = self._installed.python, self._settings
        engine = partial(
            start_engine, python, self._installed.model, folder, settings, prefix_caching=self._arm is not Arm.NO_REUSE
        )
        if policy is not None:
            return await self._product_pod(folder, policy, tenants, tier, engine)
        if server is None:
            process, port = engine(connector=None, socket=None)
            self._stack.callback(process.stop)
            return Pod(process, Address(port), Address(port))
        cache, cache_port, http_port = start_upstream_cache(python, folder, settings, server.port)
        self._stack.callback(cache.stop)
        await _answering(Address(http_port), "/healthcheck", cache)
        link = connector(cache_port, guarded=False, chunk_tokens=settings.chunk_tokens)
        process, port = engine(connector=link, socket=None)
        self._stack.callback(process.stop)
        return Pod(process, Address(port), Address(port), cache, Address(http_port))

    async def _product_pod(
        self, folder: Path, policy: Policy, tenants: int, tier: dict[str, Any] | None, engine: Any
    ) -> Pod:
        settings = self._settings
        gate = PodGate(folder, policy, tenants, tls=self._arm is Arm.TLS)
        self._stack.push_async_callback(gate.stop)
        await gate.start()
        world = gate.world
        folders: Any = Folders(world.directory / "policy", world.directory / "link")
        cache = LMCacheServer(
            self._installed.python, folder, folders, [tier], settings.chunk_tokens, {"tier": MEMORY},
            memory_gb=settings.memory_gb,
        )  # fmt: skip
        self._stack.callback(cache.stop)
        await asyncio.to_thread(cache.wait_until_ready)
        link = connector(cache.rpc_port, guarded=True, chunk_tokens=settings.chunk_tokens)
        link["kv_connector_extra_config"][IDENTITY_DIRECTORY_KEY] = str(world.engine.socket_path.parent)
        process, _ = engine(connector=link, socket=world.engine.socket_path)
        self._stack.callback(process.stop)
        address = Address(socket=world.engine.socket_path)
        return Pod(process, address, gate.callers, cache, Address(cache.http_port), gate)

    async def ready(self, pod: Pod) -> None:
        """Wait until a pod serves."""
        await _answering(pod.engine_address, "/health", pod.engine)
        if pod.gate is not None:
            await pod.gate.wait_until_ready()


async def _answering(address: Address, path: str, process: Process) -> None:
    async with asyncio.timeout(START_TIMEOUT_S):
        while True:
            process.require_alive()
            with contextlib.suppress(OSError, TimeoutError, ClusterError):
                await ask(address, path, timeout_s=5)
                return
            await asyncio.sleep(0.2)
