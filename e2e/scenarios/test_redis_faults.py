"""A Redis tier that is deleted, frozen or out of memory: requests are answered all the while, the tier reports it, it
heals, and hits return. Only the Redis server itself is restarted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pytest
import redis

from e2e.product.chapters import ACME_KEY, DOCS_KEY, GLOBEX_KEY, SPARE, Stage
from e2e.product.faults import Victim
from e2e.product.faults_traffic import (
    Ordeal,
    found_across,
    product_lives,
    readiness,
    tenants_ask,
    wait_until_well,
)
from e2e.product.install import DEMO_NAMESPACE
from e2e.product.kubectl import LIMIT_S, Kubectl, wait_until
from e2e.product.prompts import finds, shared, stored
from e2e.product.shared_tier import SERVER, TIER, make_room
from e2e.product.tier_contents import tier_contents
from e2e.product.watches import Watch, watch

pytestmark = pytest.mark.cluster

AWAY = {"NoSuchHost", "ConnectionRefused", "Timeout", "Unreachable", "Disconnected", "PodsDisconnected"}
AWAY |= {"ServersDoNotStart"}  # One that ended several times in a short time is started late, which is reported.
AWAY |= {"Progressing"}  # While there is no pod.
FULL = "OutOfMemory"
JUNK_BYTES = 4 << 20
SMALL_JUNK_BYTES = 16 << 10
FILLED_EVERY_S = 0.05


@pytest.fixture
def nothing_else_restarts(stage: Stage) -> Iterator[None]:
    """The test restarts no container of model and operator, takes no pod out of service, and leaves all well.

    The tier has room when it begins, also when earlier tests filled it.
    """
    make_room(stage)
    before, ready = product_lives(stage.kubectl), readiness(stage.kubectl)
    try:
        yield
    finally:
        wait_until_well(stage.kubectl)
    assert product_lives(stage.kubectl) == before
    assert readiness(stage.kubectl) == ready


@pytest.mark.usefixtures("nothing_else_restarts")
class TestAway:
    """The server is gone, or does not answer."""

    @pytest.mark.claim("a Redis that is deleted costs no request, status reports it, and hits return")
    def test_a_deleted_pod(self, stage: Stage) -> None:
        server = _redis(stage).life()
        with requests_around_an_outage(stage) as outage:
            outage.reports_one_of(
                lambda: stage.kubectl.run("-n", DEMO_NAMESPACE, "delete", "pod", SERVER, "--wait=false")
            )
            outage.ends()
        assert _redis(stage).life().pod_uid != server.pod_uid

    def test_a_frozen_server(self, stage: Stage) -> None:
        server = _redis(stage).life()
        with requests_around_an_outage(stage) as outage:
            with _redis(stage).frozen():
                outage.reports_away({"Timeout"})
                outage.lasts_for(requests=12)
                assert not found_across(stage.first, stage.second, ACME_KEY), "a frozen server served a block"
            outage.ends()
        assert _redis(stage).life() == server

    def test_a_server_that_the_kernel_ends_for_its_memory(self, stage: Stage) -> None:
        server = _redis(stage).life()
        with requests_around_an_outage(stage) as outage:
            ends = outage.reports_one_of(lambda: _redis(stage).run_out_of_memory())
            outage.ends()
        after = _redis(stage).life()
        assert (after.pod_uid, after.restarts) == (server.pod_uid, server.restarts + ends)


@pytest.mark.usefixtures("nothing_else_restarts")
class TestFull:
    """The server has no memory left for blocks, and reports it."""

    def test_a_full_server_serves_what_it_has_and_the_tier_says_that_it_takes_no_more(self, stage: Stage) -> None:
        # Of a tenant that asks nothing meanwhile: one at its limit evicts old blocks for those that are then refused.
        known = stored(stage.first, DOCS_KEY, 5)
        # Blocks that came later are there.
        shared(stage.first, stage.second, DOCS_KEY)
        with requests_around_an_outage(stage) as outage:
            with _full(stage.kubectl):
                outage.reports("HasRoom", {FULL})
                outage.lasts_for(requests=12)
                wait_until("it is reachable", lambda: _is_reachable(stage.kubectl))
                finds(stage.second, DOCS_KEY, known)
                # Expired blocks leave room until it is filled again.
                across = (found_across(stage.first, stage.second, ACME_KEY) for _ in range(SPARE))
                assert not all(across), "a full tier stored blocks"
            outage.ends()


@dataclass(slots=True)
class Outage:
    """An outage of the tier while tenants ask: its conditions, and the outcome of the requests."""

    stage: Stage
    ordeal: Ordeal
    tier: Watch

    def reports_away(self, reasons: set[str], timeout_s: float = LIMIT_S) -> None:
        """See the tier report that its server is away, and why."""
        self.reports("BackendReachable", reasons, timeout_s)
        self.tier.wait_for(
            "the tier is not ready", lambda o: _of(o, "Ready").get("status") == "False", self.ordeal.began_at, timeout_s
        )

    def reports_one_of(self, ends_it: Callable[[], object]) -> int:
        """Let the server end until the tier reports it; return how often it did.

        An outage may be over before the operator has looked.
        """
        for times in range(1, SPARE):
            ends_it()
            with suppress(AssertionError):
                self.reports_away(AWAY, timeout_s=60.0)
                return times
        ends_it()
        self.reports_away(AWAY, timeout_s=60.0)
        return SPARE

    def reports(self, condition: str, reasons: set[str], timeout_s: float = LIMIT_S) -> None:
        """See a condition become False for one of these reasons."""
        seen = self.tier.wait_for(
            f"the tier has {condition}=False for one of {sorted(reasons)}",
            lambda o: _of(o, condition).get("status") == "False" and _of(o, condition)["reason"] in reasons,
            self.ordeal.began_at,
            timeout_s,
        )
        found = _of(seen.object, condition)
        self.stage.report(
            f"after {seen.at - self.ordeal.began_at:.1f} s: {condition}=False {found['reason']}: {found['message']}"
        )

    def lasts_for(self, requests: int) -> None:
        """Let that many more requests be answered meanwhile."""
        self.ordeal.lasts_for(requests)

    def ends(self) -> None:
        """See the tier report that it is well, and blocks found across replicas again, for each tenant."""
        since = time.monotonic()
        wait_until("the tier is ready", lambda: _well(self.stage.kubectl))
        self.stage.report(f"{time.monotonic() - since:.1f} s after the fault: the tier reports that it is well")
        for key in (ACME_KEY, GLOBEX_KEY):
            shared(self.stage.first, self.stage.second, key)
        self.stage.report(
            f"{time.monotonic() - since:.1f} s after the fault: hits across replicas are back for both tenants"
        )


@contextmanager
def requests_around_an_outage(stage: Stage) -> Iterator[Outage]:
    """Let two tenants ask both replicas before, during and after an outage that the block makes."""
    with watch(stage.kubectl, "cachetier", DEMO_NAMESPACE, TIER) as tier, tenants_ask(stage) as ordeal:
        yield Outage(stage, ordeal, tier)


@contextmanager
def _full(kubectl: Kubectl) -> Iterator[None]:
    """Keep the server full, with the model's own user, while the block runs; in the end it has its room back.

    Buffers of connections count as well, those of the large pieces too. Memory that they or expired blocks give back is
    filled by small pieces as long as the block runs.
    """
    with tier_contents(kubectl) as tier:
        written: list[str] = []
        over = threading.Event()

        def fill(size: int) -> None:
            try:
                while not over.is_set():
                    written.append(f"kvs1:{tier.domain}:filler:{len(written)}")
                    tier.client.set(written[-1], bytes(size), px=600_000)
            except redis.exceptions.OutOfMemoryError:
                pass

        def keep_full() -> None:
            while not over.wait(FILLED_EVERY_S):
                fill(SMALL_JUNK_BYTES)

        fill(JUNK_BYTES)
        filling = threading.Thread(target=keep_full, daemon=True)
        filling.start()
        try:
            yield
        finally:
            over.set()
            filling.join()
            for name in written:
                tier.client.unlink(name)


def _redis(stage: Stage) -> Victim:
    return Victim(stage.kubectl, DEMO_NAMESPACE, SERVER, "redis")


def _is_reachable(kubectl: Kubectl) -> bool:
    return kubectl.condition("cachetier", TIER, DEMO_NAMESPACE, "BackendReachable").get("status") == "True"


def _of(item: dict[str, Any], condition: str) -> dict[str, Any]:
    conditions = (item.get("status") or {}).get("conditions") or ()
    return next((c for c in conditions if c["type"] == condition), {})


def _well(kubectl: Kubectl) -> bool:
    tier = kubectl.get("cachetier", TIER, DEMO_NAMESPACE)
    return all(_of(tier, name).get("status") == "True" for name in ("Ready", "BackendReachable", "HasRoom"))
