"""The gate of a pod, in a process of its own, and the operator's part: bundles, and the pool's warm-up."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench.benefit.http import Address, ask
from bench.benefit.policy import Policy, tenant_name
from bench.benefit.programs import MODEL, environment
from bench.environment import ROOT
from bench.gate.processes import Process
from bench.gate.proxies import gate_command
from e2e.cluster.ports import free_port
from e2e.cluster.progress import ClusterError
from kvstrata.contract.messages.engine_reset import RESET_PATH, EngineResetAnswer, ResetOutcome, ResetRequest
from kvstrata.contract.messages.pod_state import STATE_PATH, PodState, gate_server_name
from kvstrata.contract.messages.pools import (
    RENDER_PATH,
    WARM_PATH,
    Rendered,
    RenderRequest,
    Warmed,
    WarmOutcome,
    WarmRequest,
    manifest_hashes,
)
from kvstrata.contract.messages.prefix import PrefixSource
from kvstrata.contract.policy.bundle import Rules
from kvstrata.contract.policy.keyspace import SCOPE_DIGITS
from kvstrata.contract.policy.pools import PoolShard, PoolState
from tests.gate import pki
from tests.gate.world import MODEL as CACHED_MODEL
from tests.gate.world import World
from tests.tiers.gate_stand_in import DOMAIN

READY_TIMEOUT_S = 1800.0
RULES = Rules(drain_timeout_s=1)


def key_of(tenant: int) -> str:
    """Return a tenant's API key."""
    return f"key-of-{tenant_name(tenant)}"


class PodGate:
    """A gate with its bundle in a stand-in of the API server, which serves it Secrets and nothing else."""

    def __init__(self, directory: Path, policy: Policy, tenants: int, *, tls: bool) -> None:
        self.world = World(directory)
        self.world.root = replace(self.world.root, domain=DOMAIN, rules=RULES)
        self._policy, self._tenants = policy, tenants
        self._log = directory / "gate.log"
        self._tls = tls
        self._settings = self.world.settings(
            served_model=MODEL, https_port=free_port() if tls else -1, http_port=-1 if tls else free_port(),
            control_port=free_port(), health_port=free_port(),
        )  # fmt: skip
        self.process: Process | None = None

    async def start(self) -> Process:
        """Start it; it reads the policy without a pool first."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.world.gate_tls / "tls.crt", self.world.gate_tls / "tls.key")
        await self.world.api.start(context)
        settings = replace(self._settings, kube_port=self.world.api.port)
        await self.world.publish_keys(**{tenant_name(one): key_of(one) for one in range(self._tenants)})
        await self.world.publish(self._policy.entries())
        paths = environment(self.world.directory) | {"PYTHONPATH": f"{ROOT}:{ROOT}/operator/src:{ROOT}/sidecar/src"}
        self.process = Process(gate_command(settings), core=None, log=self._log, environment=paths)
        return self.process

    @property
    def callers(self) -> Address:
        """Where callers connect."""
        if not self._tls:
            return Address(self._settings.http_port)
        context = pki.client_context(self.world.gate_tls, present=False)
        return Address(self._settings.https_port, context=context, server_name="localhost")

    async def wait_until_ready(self) -> None:
        """Wait until it has put the newest policy in force, its engine is ready and its tiers answer."""
        give_up_at_s = time.monotonic() + READY_TIMEOUT_S
        seen = "it does not answer"
        while time.monotonic() < give_up_at_s:
            if self.process is not None:
                self.process.require_alive()
            try:
                state = PodState.decode(await self._ask(STATE_PATH))
                unready = [tier.name for tier in state.tiers if tier.breaker != "closed"]
                if state.acked >= self.world.root.revision and state.engine_ready and not unready:
                    return
                seen = f"acked {state.acked}, engine ready {state.engine_ready}, tiers {unready}, {state.problem}"
            except OSError:
                pass
            await asyncio.sleep(0.1)
        raise ClusterError(f"a gate did not become ready: {seen}", log=self._log)

    async def render(self, text: str) -> Rendered:
        """Return the chunks of a prefix, as this pod makes them."""
        return Rendered.decode(await self._ask(RENDER_PATH, RenderRequest(PrefixSource(text=text)).encode()))

    async def publish(self, pool: PoolShard) -> None:
        """Put a pool's state in force."""
        await self.world.publish(self._policy.entries(), pools={0: pool})
        await self.wait_until_ready()

    async def warm(self, pool: PoolShard, text: str) -> None:
        """Have the pod hold a pool's chunks. Raises ClusterError if it does not."""
        (version,) = pool.versions
        request = WarmRequest(pool.uid, version.keyspace[:SCOPE_DIGITS], version.manifest, PrefixSource(text=text))
        outcome = Warmed.decode(await self._ask(WARM_PATH, request.encode())).outcome
        if outcome is not WarmOutcome.STORED:
            raise ClusterError(f"the pool was not warmed: {outcome}", log=self._log)

    async def reset_engine(self) -> None:
        """Have the engine forget its own blocks. Raises ClusterError if it does not."""
        answer = EngineResetAnswer.decode(await self._ask(RESET_PATH, ResetRequest(60_000).encode()))
        if answer.outcome is not ResetOutcome.RESET:
            raise ClusterError(f"the engine was not reset: {answer.outcome}", log=self._log)

    async def stop(self) -> None:
        """End it and its API server."""
        if self.process is not None:
            await asyncio.to_thread(self.process.stop)
        await self.world.api.stop()

    async def _ask(self, path: str, body: bytes | None = None) -> bytes:
        context = pki.client_context(self.world.operator_tls, present=True)
        name = gate_server_name(CACHED_MODEL, "ns")
        return await ask(Address(self._settings.control_port, context=context, server_name=name), path, body)


async def share(gates: Sequence[PodGate], policy: Policy, text: str) -> None:
    """Render a pool's prefix, warm it on every pod and publish it, as the operator does."""
    rendered = await gates[0].render(text)
    hashes = manifest_hashes([rendered])
    warming = policy.pool(hashes, rendered.render_id or "r", PoolState.WARMING)
    for gate in gates:
        await gate.publish(warming)
    for gate in gates:
        await gate.warm(warming, text)
    for gate in gates:
        await gate.publish(policy.pool(hashes, rendered.render_id or "r", PoolState.PUBLISHED))
