"""The gate's entry point: wires the parts together and runs them until a signal."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
import time
import traceback
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import uvloop

from kvstrata.contract.messages.audit import Action, Emitter, Source
from kvstrata.contract.messages.engine_identity import IDENTITY_FILE
from kvstrata.contract.messages.engine_reset import RESET_PATH, ResetRequest
from kvstrata.contract.messages.erase import ERASE_PATH, VERIFY_PATH, EraseRequest, VerifyRequest
from kvstrata.contract.messages.key_delivery import KEYS_PATH
from kvstrata.contract.messages.pod_state import PodState
from kvstrata.contract.messages.pools import POOL_PATH, RENDER_PATH, WARM_PATH, RenderRequest, WarmRequest
from kvstrata.contract.messages.probe import PROBE_PATH, ProbeRequest
from kvstrata_sidecar.gate import log
from kvstrata_sidecar.gate.adapter_link import AdapterLink
from kvstrata_sidecar.gate.control.engine_calls import EngineCalls
from kvstrata_sidecar.gate.control.erase import PodEraser
from kvstrata_sidecar.gate.control.keys import PodKeys
from kvstrata_sidecar.gate.control.parts import Parts
from kvstrata_sidecar.gate.control.probe import Prober
from kvstrata_sidecar.gate.control.render import Renderings
from kvstrata_sidecar.gate.control.service import CONTROL_LIMITS, ControlService, Route
from kvstrata_sidecar.gate.control.warm import PoolWait, Warmer
from kvstrata_sidecar.gate.http.drain import POLL_S, Drain
from kvstrata_sidecar.gate.http.engine_client import EnginePool
from kvstrata_sidecar.gate.http.messages import Limits
from kvstrata_sidecar.gate.http.server import HttpServer
from kvstrata_sidecar.gate.http.tls import CHECK_S, RETRY_S, OwnPort, ServerTls
from kvstrata_sidecar.gate.policy.bundle_watch import BundleWatch, KeyWatch
from kvstrata_sidecar.gate.policy.enforcement import Enforcement, Freshness
from kvstrata_sidecar.gate.policy.identity import ResolvedIdentity
from kvstrata_sidecar.gate.policy.kube_api import ApiAuthority, KubeApi
from kvstrata_sidecar.gate.policy.volume import PolicyVolume
from kvstrata_sidecar.gate.proxy.parser_pool import ParserPool
from kvstrata_sidecar.gate.proxy.service import TenantService, random_salt

from .audit import Audit, write_whole
from .metrics import HEALTH_LIMITS, HealthService, Metrics
from .prefill import PrefillCost
from .relay import CACHE_NAMES, ENGINE_NAMES, Relay, Upstream
from .settings import Settings, SettingsError, load


class Gate:
    """One running gate. `run` returns after `stop`, once nothing is in flight or after a timeout."""

    def __init__(self, settings: Settings, loop: asyncio.AbstractEventLoop) -> None:
        self.settings = settings
        self.loop = loop
        self.boot = secrets.token_hex(8)
        self.engine_ready = False
        self._engine_ready_s = 0.0
        self.ports: dict[str, int] = {}
        self.started = asyncio.Event()
        self._stopping = asyncio.Event()
        self.freshness = Freshness()
        self.volume = PolicyVolume(settings.policy_dir)
        self.enforcement = Enforcement(
            self.volume, self.freshness, loop, ResolvedIdentity(settings.engine_socket.with_name(IDENTITY_FILE))
        )
        self.enforcement.identity.read()
        self.metrics = Metrics(settings.metrics_tenants)
        emitter = Emitter(Source.GATE, settings.pod_name, self.boot)
        self.audit = Audit(emitter, namespace=settings.pod_namespace, model=settings.model, write=write_whole)
        self.engine = EnginePool(str(settings.engine_socket), loop)
        self.cache = EnginePool(settings.cache_http_port, loop)
        self.prefill = PrefillCost()
        sources = Upstream("engine", self.engine, ENGINE_NAMES), Upstream("cache", self.cache, CACHE_NAMES)
        self.relay = Relay(*sources, self.prefill.observe, loop.time)
        self.authority = ApiAuthority(settings.kube_ca_file) if settings.kube_tls else None
        self.api = KubeApi(
            settings.kube_host, settings.kube_port, settings.pod_namespace, settings.kube_token_file, self.authority
        )
        floor = self.volume.enforced_before()
        self.bundles = BundleWatch(
            self.api, self.enforcement, self.freshness, settings.bundle_secret, settings.model, floor
        )
        self.keys = KeyWatch(self.api, settings.api_keys_secret, self.audit)
        self.link = AdapterLink(
            settings.adapter_socket, self.enforcement, settings.memory_patience_s, self.prefill.by_length
        )
        self.drain = Drain(settings.engine_socket, grace_s=settings.drain_grace_s, clock=loop.time)
        self.parser = ParserPool(settings.served_model, settings.max_body_bytes, loop)
        self.tenants = TenantService(
            model=settings.served_model, keys=self.keys, enforcement=self.enforcement, engine=self.engine,
            parser=self.parser, metrics=self.metrics, audit=self.audit, clock=loop.time, now_s=time.time,
            max_in_flight=settings.max_in_flight, max_in_flight_per_tenant=settings.max_in_flight_per_tenant,
        )  # fmt: skip
        limits = Limits(
            connections=settings.max_connections, connections_per_address=settings.max_connections_per_address,
            handshakes=settings.max_handshakes, body_bytes=settings.max_body_bytes, idle_s=settings.idle_timeout_s,
        )  # fmt: skip
        origins = [origin.encode() for origin in settings.cors_origins.split(",") if origin]
        self.tenant_server = HttpServer(self.tenants, limits, loop, origins)
        self.metrics.turned_away = self.tenant_server.turned_away
        parts = Parts(
            model=settings.served_model, render_id=settings.render_id, boot=self.boot, enforcement=self.enforcement,
            engine=self.engine, link=self.link, random_salt=random_salt,
            draining=lambda: self._stopping.is_set() or self.drain.active,
        )  # fmt: skip
        self.calls = EngineCalls(parts)
        self.warming = Renderings(parts, self.calls, loop.time)
        self.warmer = Warmer(parts, self.calls, self.warming)
        self.pools = PoolWait(parts)
        self.eraser = PodEraser(parts, self.audit, self.volume.keys.left)
        self.prober = Prober(parts, self.calls)
        self.data_keys = PodKeys(self.enforcement, self.volume)
        routes = {
            (b"POST", RENDER_PATH): Route(RenderRequest.decode, self.warming.render),
            (b"POST", WARM_PATH): Route(WarmRequest.decode, self.warmer.warm),
            (b"GET", POOL_PATH): Route(bytes, self.warmer.inspect),
            (b"POST", ERASE_PATH): Route(EraseRequest.decode, self.eraser.erase),
            (b"POST", VERIFY_PATH): Route(VerifyRequest.decode, self.eraser.verify),
            (b"POST", RESET_PATH): Route(ResetRequest.decode, self.calls.reset),
            (b"POST", PROBE_PATH): Route(ProbeRequest.decode, self.prober.probe),
            (b"GET", KEYS_PATH): Route(bytes, self.data_keys.list_missing),
            (b"POST", KEYS_PATH): Route(None, self.data_keys.take),
        }
        self.control = ControlService(self.state, settings.ack_token_file, loop, routes, self.audit)
        self.control_server = HttpServer(self.control, CONTROL_LIMITS, loop)
        health = HealthService(self.not_ready, self.scraped_page)
        self.health_server = HttpServer(health, HEALTH_LIMITS, loop, closing_after_response=True, serves_probes=True)
        self.enforcement.changed.append(self.control.changed)
        self._certificates: dict[str, ServerTls] = {}
        self.own_port = OwnPort()

    def stop(self) -> None:
        """Turn unready at once, then finish requests in flight."""
        self._stopping.set()

    def state(self) -> PodState:
        settings, enforcement, identity = self.settings, self.enforcement, self.enforcement.identity
        cache = self.link.state
        certificates = {port: certificate.problem for port, certificate in self._certificates.items()}
        control = certificates.get("control", "")
        authority = self.authority.problem if self.authority is not None else ""
        problems = (self.bundles.problem, self.keys.problem, self.link.problem, control, authority)
        return PodState(
            pod=settings.pod_name,
            pod_uid=settings.pod_uid,
            namespace=settings.pod_namespace,
            model=settings.model,
            identity=settings.identity,
            gate_boot=self.boot,
            cache_boot=enforcement.cache_boot,
            term=enforcement.term,
            acked=enforcement.acked,
            seen=self.bundles.seen,
            fresh=enforcement.fresh(),
            fresh_age_ms=self.freshness.age_ms(),
            engine_ready=self.engine_ready,
            problem="; ".join(problem for problem in problems if problem),
            tiers=cache.tiers,
            usage=cache.usage,
            usage_left_out=cache.usage_left_out,
            tier_usage=cache.tier_usage,
            revision=enforcement.revision,
            root=self.bundles.root_digest,
            model_uid=enforcement.bundle.root.model_uid if enforcement.bundle is not None else "",
            keys_lacking=len(self.volume.keys.lacking),
            fingerprint=identity.fingerprint,
            facts=identity.engine.facts,
            unresolved=identity.problem,
            withheld=identity.withheld,
            certificate=certificates.get("https", ""),
            lasting=self.keys.lasting,
        )

    def not_ready(self) -> str:
        """Return why no caller should be sent here, or an empty string."""
        if self._stopping.is_set() or self.drain.active:
            return "draining"
        if self.enforcement.bundle is None:
            return f"no policy: {self.bundles.problem}"
        if not self.keys.loaded:
            return f"no API keys: {self.keys.problem}"
        if not self.enforcement.acked:
            return f"the first revision is not acknowledged: {self.link.problem or 'requests are draining'}"
        if not self.engine_ready:
            return "the engine is not ready"
        if self.own_port.problem:
            return f"callers cannot connect: {self.own_port.problem}"
        pool = self.pools.awaited(self.loop.time() - self._engine_ready_s)
        return f"warming: the pool {pool} is not in this pod's memory yet" if pool else ""

    def metrics_page(self) -> bytes:
        enforcement = self.enforcement
        self.metrics.gauges.update(
            kvstrata_gate_bundle_revision=enforcement.revision,
            kvstrata_gate_acked_revision=enforcement.acked,
            kvstrata_gate_seen_revision=self.bundles.seen,
            kvstrata_gate_policy_fresh=enforcement.fresh(),
            kvstrata_gate_policy_age_seconds=self.freshness.age_ms() / 1000,
            kvstrata_gate_cache_linked=bool(enforcement.cache_boot),
            kvstrata_gate_engine_ready=self.engine_ready,
            kvstrata_gate_connections=len(self.tenant_server.connections) + len(self.tenant_server.opening),
            kvstrata_gate_buffered_bytes=self.tenant_server.buffered.total,
            kvstrata_gate_api_keys=len(self.keys.ring),
            kvstrata_gate_api_keys_current=not self.keys.problem,
            kvstrata_gate_certificate_current=not any(one.problem for one in self._certificates.values()),
        )
        self.metrics.counters.update(
            kvstrata_gate_audit_events_total=self.audit.events, kvstrata_gate_audit_dropped_total=self.audit.dropped
        )
        self.metrics.usage, self.metrics.usage_left_out = self.link.state.usage, self.link.state.usage_left_out
        return self.metrics.page() + self.prefill.page() + self.link.metrics.encode() + self.relay.page()

    async def scraped_page(self) -> bytes:
        """Return the page with new ones of the engine and LMCache, where these answer in time."""
        await self.relay.refresh()
        return self.metrics_page()

    async def run(self) -> None:
        """Run until stopped. A failed background task ends the process, which is then restarted."""
        self._listen()
        background: tuple[Callable[[], Coroutine[Any, Any, None]], ...] = (
            self.bundles.run, self.bundles.watch, self.keys.run, self.link.run,
            self.link.watch_metrics, self.relay.run, self.pools.run, self.audit.run,
            self._watch_engine, self._watch_drain, self._watch_certificates,
        )  # fmt: skip
        tasks = [self.loop.create_task(start(), name=start.__qualname__) for start in background]
        stopping = self.loop.create_task(self._stopping.wait())
        self.started.set()
        log.info("the gate listens", ports=self.ports, boot=self.boot)
        try:
            done, _ = await asyncio.wait([stopping, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stopping}:
                task.result()
                raise RuntimeError(f"{task.get_name()} ended")
            await self._finish_in_flight()
        finally:
            stopping.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.parser.close()
            self._close()

    def _listen(self) -> None:
        settings = self.settings
        if settings.https_port >= 0:
            tls = ServerTls(settings.tls_dir, client_authority=False)
            self._open("https", self.tenant_server, settings.https_port, tls)
        if settings.http_port >= 0:
            self._open("http", self.tenant_server, settings.http_port)
        if settings.control_port >= 0:
            tls = ServerTls(settings.control_tls_dir, client_authority=True)
            self._open("control", self.control_server, settings.control_port, tls)
        self._open("health", self.health_server, settings.health_port)

    def _open(self, name: str, server: HttpServer, port: int, tls: ServerTls | None = None) -> None:
        if tls is not None:
            self._certificates[name] = tls
        self.ports[name] = server.listen(self.settings.bind, port, tls)

    async def _watch_engine(self) -> None:
        while True:
            ready = (await self.engine.get("/health"))[0] == 200
            # Its connector writes the file before the engine is ready.
            if self.enforcement.identity.read():
                self.control.changed()
            if ready != self.engine_ready:
                self.engine_ready, self._engine_ready_s = ready, self.loop.time()
                # A restarted engine may have another tokenizer.
                self.warming.forget()
                if ready:
                    self.tenants.describe((await self.engine.get("/v1/models"))[1])
                log.info("the engine is ready" if ready else "the engine is not ready")
                self.control.changed()
            await asyncio.sleep(1.0)

    async def _watch_drain(self) -> None:
        keys, noted = self.volume.keys, 0
        while True:
            if keys.changes != noted:
                noted = keys.changes
                self.audit.record(Action.DATA_KEYS_HELD, count=len(keys), revision=self.enforcement.revision)
            self.enforcement.fence()
            self.drain.poll(in_flight=self.tenants.in_flight, engine_ready=self.engine_ready)
            self.tenant_server.closing_after_response = self.drain.active
            if self.drain.active:
                self.calls.abort_all()
            await asyncio.sleep(POLL_S)

    async def _watch_certificates(self) -> None:
        callers, known = ("https" if "https" in self.ports else "http"), [""] * len(self._certificates)
        while True:
            for certificate in self._certificates.values():
                certificate.reload_if_changed()
            if (problems := [one.problem for one in self._certificates.values()]) != known:
                known = problems
                self.control.changed()
            address = self.settings.bind, self.ports.get(callers, -1)
            connects = await self.own_port.try_now(address, self._certificates.get(callers))
            await asyncio.sleep(CHECK_S if connects else RETRY_S)

    async def _finish_in_flight(self) -> None:
        self.drain.begin()
        self.calls.abort_all()
        self.tenant_server.closing_after_response = True
        log.info("stopping", in_flight=self.tenants.in_flight)
        deadline = self.loop.time() + self.settings.shutdown_s
        while self.tenants.in_flight and self.loop.time() < deadline:  # noqa: ASYNC110  (a deadline of seconds)
            await asyncio.sleep(POLL_S)

    def _close(self) -> None:
        self.control.close()
        for server in (self.tenant_server, self.control_server, self.health_server):
            server.close()
        self.engine.close()
        self.cache.close()
        self.api.close()
        self.volume.close()
        self.audit.close()


async def _run(settings: Settings) -> None:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(log_unexpected)
    gate = Gate(settings, loop)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, gate.stop)
    await gate.run()


def log_unexpected(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an exception's type and place, not its text, which may quote a request."""
    error = context.get("exception")
    frames = traceback.extract_tb(error.__traceback__)[-3:] if error is not None else []
    places = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames]
    log.warning("unexpected", what=context.get("message"), error=type(error).__name__, places=places)


def main() -> None:
    """Exit codes: 0 after a signal, 2 for bad settings, 1 for anything else."""
    try:
        settings = load(sys.argv[1:], os.environ)
    except SettingsError as error:
        log.event("error", "bad settings", problem=str(error))
        sys.exit(2)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(settings))
