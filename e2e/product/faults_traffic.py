"""Requests during a fault: of two tenants on two replicas, so that blocks are computed, stored and loaded."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from .calls import Replica
from .chapters import ACME_KEY, GLOBEX_KEY, MODEL, Stage
from .faults import Life, lives
from .install import DEMO_NAMESPACE, SYSTEM_NAMESPACE, unsettled
from .kubectl import Kubectl, wait_until
from .prompts import STORE_SETTLES_S, WHOLE_CHUNKS, fresh_prompt
from .traffic import Account, Caller, Traffic, traffic

TENANTS = (("acme", ACME_KEY), ("globex", GLOBEX_KEY))

NEW_PROMPT_EVERY_S = 4.0
"""A prompt is 9 MB in the demo's shared tier of 512: asked without a pause, new ones fill it within a story."""


@dataclass(slots=True)
class Ordeal:
    """Requests that run on, and when the fault began, in monotonic seconds."""

    running: Traffic
    began_at: float = 0.0

    def begins(self) -> None:
        """Take note that the fault begins now."""
        self.began_at = time.monotonic()

    def lasts_for(self, requests: int) -> None:
        """Wait until that many more requests have been answered or failed. Raises AssertionError if they hang."""
        self.running.wait_for(requests)

    @property
    def before(self) -> Account:
        """The requests that had ended before the fault."""
        return self.running.account.until(self.began_at)

    @property
    def since(self) -> Account:
        """The requests that were in flight when the fault began, and those that came after."""
        served = self.running.account.served
        return Account([one for one in served if one.began_at + one.took_s > self.began_at])


@contextmanager
def tenants_ask(stage: Stage) -> Iterator[Ordeal]:
    """Let two tenants ask both replicas before, during and after a fault that the block makes.

    In the end all must have been answered. The benchmark `outages` judges how late.
    """
    callers = []
    for (tenant, key), (leads, follows) in zip(
        TENANTS, ((stage.first, stage.second), (stage.second, stage.first)), strict=True
    ):
        # One replica computes, the other loads its stored blocks: lookups, loads and stores are all under way.
        trail = Trail()
        callers += [Caller(leads, tenant, key, trail.fresh), Caller(follows, tenant, key, trail.last)]
    with traffic(*callers) as running:
        ordeal = Ordeal(running)
        ordeal.lasts_for(16)
        ordeal.begins()
        yield ordeal
        ordeal.lasts_for(8)
    stage.report(f"before the fault: {ordeal.before}; since: {ordeal.since}")
    assert not running.account.failed, str(running.account)


class Trail:
    """Prompts that no tenant sent before, a new one every few seconds, for a leading and a following caller."""

    def __init__(self) -> None:
        self._last = fresh_prompt()
        self._made_at = time.monotonic()
        self._lock = threading.Lock()

    def fresh(self) -> str:
        """Return a new prompt, or the newest again if it is only just new."""
        with self._lock:
            if time.monotonic() - self._made_at >= NEW_PROMPT_EVERY_S:
                self._last, self._made_at = fresh_prompt(), time.monotonic()
            return self._last

    def last(self) -> str:
        """Return the newest prompt again."""
        with self._lock:
            return self._last


def found_across(leads: Replica, follows: Replica, key: str) -> bool:
    """Whether one replica finds all the whole chunks of a new prompt that another has just computed."""
    prompt = fresh_prompt()
    leads.ask(key, prompt)
    time.sleep(STORE_SETTLES_S)
    return follows.found(key, prompt) == WHOLE_CHUNKS


def readiness(kubectl: Kubectl) -> dict[str, tuple[str, str]]:
    """Return whether each pod of the model takes requests, and since when, by its UID."""
    conditions = {
        pod["metadata"]["uid"]: next(one for one in pod["status"]["conditions"] if one["type"] == "Ready")
        for pod in kubectl.list("pod", DEMO_NAMESPACE, f"kvstrata.io/model={MODEL}")
    }
    return {uid: (one["status"], one["lastTransitionTime"]) for uid, one in conditions.items()}


def product_lives(kubectl: Kubectl, *except_for: tuple[str, str]) -> frozenset[Life]:
    """Return the runs of all containers of the model and of the operator, but those of some (pod UID, container)."""
    pods = kubectl.list("pod", DEMO_NAMESPACE, f"kvstrata.io/model={MODEL}")
    found = lives([*pods, *kubectl.list("pod", SYSTEM_NAMESPACE, "app.kubernetes.io/name=kvstrata")])
    return frozenset(life for life in found if (life.pod_uid, life.container) not in except_for)


def wait_until_well(kubectl: Kubectl) -> None:
    """Wait until every object of the demo is ready and enforced."""
    wait_until("everything is ready and enforced again", lambda: not unsettled(kubectl), every_s=1)
