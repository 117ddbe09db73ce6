"""The operator process: watch always, act while leading, end when leadership ends."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import kopf
import uvloop
from aiohttp import web

from kvstrata.api.cachedomain import Installation
from kvstrata.cli.logs import configure, configure_audit
from kvstrata.clients.gate import GateClient
from kvstrata.clients.kube import Kube, KubeError, NotLeadingError
from kvstrata.clients.lease import LEASE_NAME, Leadership, Lease
from kvstrata.clients.resources import OWN_RESOURCES, SERVICE_MONITOR
from kvstrata.plan import actions
from kvstrata.reconcile import metrics
from kvstrata.reconcile.background import clock_problem, since_boot_s, utc_now
from kvstrata.reconcile.erasure.deps import ErasureDeps
from kvstrata.reconcile.erasure.former_identities import Reclaims
from kvstrata.reconcile.erasure.jobs import Jobs
from kvstrata.reconcile.erasure.key_rotation import KeyRotation
from kvstrata.reconcile.erasure.keys import KeyRevoker
from kvstrata.reconcile.erasure.pods import Pods
from kvstrata.reconcile.erasure.receipt_chain import Chains
from kvstrata.reconcile.erasure.record_store import RecordStore
from kvstrata.reconcile.erasure.tasks import Erasures
from kvstrata.reconcile.erasure.tiers import Looks
from kvstrata.reconcile.events import EventReader, Events
from kvstrata.reconcile.keys.delivery import KeyDelivery
from kvstrata.reconcile.keys.key_ring import KeyRing
from kvstrata.reconcile.keys.kms_domains import KmsDomains
from kvstrata.reconcile.keys.kms_services import KmsServices, by_service_account
from kvstrata.reconcile.keys.kms_worker import KmsKeys
from kvstrata.reconcile.loop import Loop
from kvstrata.reconcile.metrics import build_app
from kvstrata.reconcile.pod_states import AckListener
from kvstrata.reconcile.pools import Warming
from kvstrata.reconcile.probe import Probing
from kvstrata.reconcile.queue import WorkQueue
from kvstrata.reconcile.redis.backends import Backends
from kvstrata.reconcile.redis.credentials import CredentialWorker
from kvstrata.reconcile.redis.topology import Topologies
from kvstrata.reconcile.resync import Resync
from kvstrata.reconcile.secret_watch import SecretWatch
from kvstrata.reconcile.secrets import SecretStore
from kvstrata.reconcile.store import Store
from kvstrata.reconcile.watch import Lists, Watches, build_settings, expected_watchers, live_watchers
from kvstrata.reconcile.writer import Worker, Writer
from kvstrata.settings import Settings, SettingsError

from . import garbage

log = logging.getLogger(__name__)

SECONDS_PER_DAY = 86_400
API_RETRY_S = 2.0
API_TIMEOUT_S = 5.0
WATCHERS_GRACE_S = 60.0
"""How long a watch may be missing before the process counts as unhealthy."""

LEASE_AT_ONCE_S = 1.0
"""How long the watches wait for the Lease: lists that start after it is taken serve the leader as its first lists."""
FIRST_LISTS_S = 20.0
"""How long a leader waits for the watches' lists before it lists everything itself."""

LISTED_PAUSE_S = 2.0
"""Delay between a relisted watch and the resync; other watches often relist within that time."""
STOP_WITHIN_S = 5.0
RETRY_S = 5.0


class Operator:
    def __init__(self, settings: Settings, kube: Kube) -> None:
        self._settings, self._kube = settings, kube
        self._store = Store(lambda: secrets.token_bytes(64), utc_now)
        self._store.allowed_servers, self._store.allowed_folders = settings.external_redis, settings.host_paths
        self._queue = WorkQueue(time.monotonic)
        self._secret_store = SecretStore(kube, settings.namespace, secrets.token_bytes, utc_now)
        self._ring = KeyRing()
        services = KmsServices(kube, settings.kms_services, by_service_account(Path(settings.kms_token_file)))
        word = (settings.pod_name, utc_now, self._may_write)
        kms_domains = KmsDomains(kube, settings.namespace, self._store, services, *word)
        self._kms = KmsKeys(self._store, self._queue, self._ring, kms_domains)
        own = settings.namespace, LEASE_NAME, settings.pod_name, since_boot_s
        self._lease = Leadership(Kube.connect, lambda kube, fit: Lease(kube, *own, fit, settings.release), since_boot_s)
        kube.may_write = lambda: self._lease.held
        self._met = asyncio.Event()
        self._elected = asyncio.Event()
        self._first_lists: asyncio.Future[Lists | None] = asyncio.get_running_loop().create_future()
        self._watching = asyncio.Event()
        self._leading = False
        self._synced = False
        self._listed = asyncio.Event()
        self._watchers_seen_at = time.monotonic()
        self._service_monitors = False

    async def run(self) -> None:
        stop = asyncio.Event()
        await self._serve_http()
        started = asyncio.create_task(garbage.resume_after_start(lambda: self._synced and self._queue.idle))
        parts = {
            asyncio.create_task(self._watch(), name="kopf"),
            asyncio.create_task(self._supervise_watchers(), name="watchers"),
            asyncio.create_task(self._lead(), name="lead"),
            asyncio.create_task(self._until_stopped(stop), name="stop"),
        }
        done, pending = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        self._leading = False
        started.cancel()
        for task in pending:
            task.cancel()
        # A part that ignores its cancellation must not hold up the end.
        await asyncio.wait(pending, timeout=STOP_WITHIN_S)
        await self._lease.release()
        for task in done:
            error = task.exception()
            if error is not None:
                raise error
            log.info("ending", extra={"because": task.get_name()})

    async def _until_stopped(self, stop: asyncio.Event) -> None:
        """Wait for a signal. kopf replaces the handlers when it starts, so they are installed again afterwards. The
        first process of a container ignores SIGTERM without a handler."""
        loop = asyncio.get_running_loop()
        stopped = asyncio.create_task(stop.wait())
        for started in (asyncio.create_task(self._watching.wait()), stopped):
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, stop.set)
            await asyncio.wait({started, stopped}, return_when=asyncio.FIRST_COMPLETED)

    async def _meet_api_server(self) -> None:
        """Wait until the API server serves every kind of ours, and find out whether it has ServiceMonitors. Neither
        this nor kopf asks again while the process lives. Exiting instead would run into the restart back-off."""
        logged = ""
        while True:
            self._watchers_seen_at = time.monotonic()
            try:
                missing = {kind.plural for kind in OWN_RESOURCES} - await self._served(OWN_RESOURCES[0].api_version)
                if not missing:
                    self._service_monitors = SERVICE_MONITOR.plural in await self._served(SERVICE_MONITOR.api_version)
                    return
                problem = f"not served: {', '.join(sorted(missing))}"
            except KubeError as error:
                problem = str(error)
            if problem != logged:
                log.warning("waiting for the API server", extra={"problem": problem})
                logged = problem
            await asyncio.sleep(API_RETRY_S)

    async def _served(self, group_version: str) -> set[str]:
        try:
            group = await self._kube.request("GET", f"/apis/{group_version}", timeout_s=API_TIMEOUT_S)
        except KubeError as error:
            if error.is_not_found:
                return set()
            raise
        return {str(resource.get("name")) for resource in group.get("resources") or ()}

    async def _watch(self) -> None:
        await self._meet_api_server()
        watches = Watches(
            self._store,
            SecretWatch(self._store, self._secret_store),
            self._queue.add_all,
            self._service_monitors,
            self._listed.set,
            self._settings.watch_namespaces,
        )
        self._met.set()
        self._first_lists.set_result(watches.lists if await _set_within(LEASE_AT_ONCE_S, self._elected) else None)
        await kopf.operator(
            registry=watches.registry(),
            settings=build_settings(self._settings.watch_silence_s, self._settings.watch_namespaces),
            standalone=True,
            identity=self._settings.pod_name,  # type: ignore[arg-type]  # a NewType that kopf does not export
            ready_flag=self._watching,
            clusterwide=not self._settings.watch_namespaces,
            namespaces=self._settings.watch_namespaces,
        )

    async def _lead(self) -> None:
        await self._met.wait()
        self._store.term = await self._lease.acquire()
        self._elected.set()
        holding = asyncio.create_task(self._lease.hold(), name="lease")
        acting = asyncio.create_task(self._act(), name="act")
        try:
            await asyncio.wait({holding, acting}, return_when=asyncio.FIRST_COMPLETED)
            if acting.done():
                try:
                    acting.result()
                except* NotLeadingError:
                    log.error("this process no longer leads; nothing was written after that")
        finally:
            self._leading = False
            metrics.LEADING.set(0)
            for task in (holding, acting):
                task.cancel()
            # A part that ignores its cancellation must not hold up the end.
            await asyncio.wait({holding, acting}, timeout=STOP_WITHIN_S)
            if not acting.done():
                cancelled = (task.get_coro() for task in asyncio.all_tasks() if task.cancelling())
                log.warning("tasks ignore their cancellation", extra={"tasks": sorted(map(str, cancelled))})

    async def _act(self) -> None:
        """The leader's work. Nothing is planned before the world is complete."""
        client = await self._secret_store.open()
        self._store.take_mark_key(self._secret_store.mark_key)
        own = self._secret_store.installation_uid, self._settings.namespace, self._settings.release
        self._store.installation = Installation(uid=own[0], namespace=own[1], release=own[2])
        resync = Resync(
            self._kube, self._store, self._secret_store, self._settings.watch_namespaces, self._service_monitors
        )
        await self._first_look(resync)
        self._kms.begin()
        self._leading = True
        metrics.LEADING.set(1)
        authority = self._secret_store.authority
        async with (
            GateClient(authority.certificate_pem, client.certificate_pem, client.key_pem) as gates,
            Warming(self._kube, gates, self._store, self._queue) as warming,
            Probing(self._kube, gates, self._store, self._queue, self._may_write) as probing,
            EventReader(self._kube, self._store, self._queue) as events,
        ):
            acting = (self._kube, self._store, self._queue, self._secret_store)
            context = replace(self._settings.build, service_monitors=self._service_monitors)
            chains = Chains(self._kube, self._settings.namespace, utc_now)
            rotation = KeyRotation(self._kube, self._store, chains, self._settings.receipts_key_days * SECONDS_PER_DAY)
            delivery = KeyDelivery(self._kube, gates, self._store, self._ring, self._may_write)
            name = self._settings.pod_name
            jobs = Jobs(self._kube, context, utc_now, lambda: self._store.allowed_servers)
            erasures = Erasures(
                ErasureDeps(
                    kube=self._kube,
                    store=self._store,
                    queue=self._queue,
                    events=Events(self._kube),
                    record_store=RecordStore(self._kube, self._settings.namespace),
                    keys=KeyRevoker(*acting, name, utc_now, self._kube.require_lead, self._kms),
                    looks=Looks(self._kube, name, utc_now, allowed=lambda: self._store.allowed_servers),
                    pods=Pods(self._kube, gates, utc_now),
                    jobs=jobs,
                    chains=chains,
                    may_write=self._kube.require_lead,
                    now=utc_now,
                )
            )
            reclaims = Reclaims(self._store, self._queue, jobs, utc_now)
            backends = Backends(self._kube, self._store, self._queue)
            topologies = Topologies(self._kube, self._store, self._queue, self._may_write)
            credentials = CredentialWorker(*acting, self._may_write)
            workers: dict[type[Any], Worker] = {
                **dict.fromkeys((actions.CarryOutErasure, actions.EndErasure), erasures.take),
                actions.ReclaimFormer: reclaims.ask,
                actions.EndReclaim: reclaims.end,
                actions.KeepInKms: self._kms.keep,
                actions.ProbeBackend: backends.begin,
                actions.ReconcileCluster: topologies.tend,
                actions.TendServers: credentials.begin,
                actions.ReadEvents: events.begin,
                actions.ReadSource: warming.read,
                actions.RenderPool: warming.render,
                actions.WarmPool: warming.warm,
                actions.InspectPool: warming.inspect,
                actions.ProbePod: probing.probe,
            }
            followers = {
                "CacheTier": (backends.forget_unasked, credentials.forget_unmanaged, topologies.forget_untended),
                "CachedModel": (probing.show, reclaims.show),
            }
            writer = Writer(*acting, workers, followers)
            listener = AckListener(self._kube, gates, self._store, self._queue)
            loop = Loop(self._store, self._queue, writer, context, self._settings.workers)
            await listener.first_round()
            async with backends, credentials, topologies, erasures, reclaims, self._kms, asyncio.TaskGroup() as group:
                # Without its erasure, a policy would be removed without a receipt.
                await erasures.recall(self._settings.watch_namespaces)
                self._enqueue_all()
                self._synced = True
                group.create_task(listener.run(), name="acks")
                group.create_task(listener.follow_nodes(), name="nodes")
                group.create_task(delivery.run(), name="keys")
                group.create_task(loop.run(), name="loop")
                group.create_task(rotation.run(), name="key of receipts")
                group.create_task(self._resync_for_ever(resync), name="resync")

    async def _first_look(self, resync: Resync) -> None:
        while True:
            try:
                lists = await self._first_lists
                if lists is None or not await _set_within(FIRST_LISTS_S, lists.complete):
                    await resync.objects(lambda _: None)
                self._store.recall_departures()
                await resync.api_server(self._settings.external_redis)
                await resync.secrets()
            except KubeError as error:
                delay_s = max(RETRY_S, error.retry_after_s or 0.0)
                log.warning("the first list of the world failed", extra={"error": str(error), "again_in_s": delay_s})
                await asyncio.sleep(delay_s)
            else:
                return

    async def _resync_for_ever(self, resync: Resync) -> None:
        delay_s = self._settings.resync_s
        while True:
            if await _set_within(delay_s, self._listed):
                # Watches tend to be relisted together.
                await asyncio.sleep(LISTED_PAUSE_S)
            self._listed.clear()
            delay_s = self._settings.resync_s
            try:
                await resync.api_server(self._settings.external_redis)
                await resync.objects(self._queue.add)
                await resync.secrets()
                self._enqueue_all()
            except KubeError as error:
                delay_s = min(delay_s, max(RETRY_S, error.retry_after_s or 0.0))
                log.warning("the list-and-diff pass failed", extra={"error": str(error), "again_in_s": delay_s})

    def _may_write(self) -> bool:
        """Whether this process leads. After a freeze, the Lease has expired by its clock."""
        return self._leading and self._lease.held

    def _enqueue_all(self) -> None:
        for key in self._store.all_keys():
            self._queue.add(key)

    async def _supervise_watchers(self) -> None:
        await self._met.wait()
        while True:
            running = live_watchers()
            metrics.WATCHERS.set(running)
            expected = expected_watchers(len(self._settings.watch_namespaces), self._service_monitors)
            if running >= expected:
                self._watchers_seen_at = time.monotonic()
            await asyncio.sleep(2)

    def _watchers_problem(self) -> str | None:
        missing_s = time.monotonic() - self._watchers_seen_at
        return f"a watch has been missing for {missing_s:.0f} s" if missing_s > WATCHERS_GRACE_S else None

    def _sync_problem(self) -> str | None:
        return None if self._synced or not self._leading else "the first list of the world is not complete"

    async def _serve_http(self) -> None:
        app = build_app({"watchers": self._watchers_problem, "clock": clock_problem}, {"sync": self._sync_problem})
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, port=self._settings.http_port).start()


async def _set_within(timeout_s: float, event: asyncio.Event) -> bool:
    """Wait for an event; return whether it was set in time."""
    try:
        async with asyncio.timeout(timeout_s):
            return await event.wait()
    except TimeoutError:
        return False


async def _run(settings: Settings) -> NoReturn:
    code = 0
    kube = await Kube.connect()
    try:
        await Operator(settings, kube).run()
    except asyncio.CancelledError:
        log.info("ending", extra={"because": "cancelled"})
    except Exception:
        log.exception("the operator failed")
        code = 1
    # Closing the loop waits for all tasks; one that hangs would keep the process alive.
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)


def main() -> None:
    """Run the operator; exit with 1 after an error, so that Kubernetes counts the restart."""
    try:
        settings = Settings.from_environment()
    except SettingsError as error:
        sys.exit(str(error))
    configure(settings.log_level)
    configure_audit(settings.pod_name)
    garbage.rest()
    try:
        uvloop.run(_run(settings))
    except Exception:
        log.exception("the operator failed")
        sys.exit(1)


if __name__ == "__main__":
    main()
