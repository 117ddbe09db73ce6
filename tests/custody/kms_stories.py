"""A namespace whose keys a real OpenBao wraps, with pods that are brought them."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstrata.objects import names
from kvstrata.reconcile import metrics
from kvstrata.reconcile.keys.kms_custody import KmsCustody
from kvstrata.reconcile.keys.kms_domains_store import KmsDomain
from kvstrata.reconcile.keys.wrapped_keys import SHARDS, WrappedKey, wrapping_key
from tests.custody.bao_server import MOUNT, BaoServer
from tests.custody.token_file import TokenFile
from tests.support.key_pods import KeyPods
from tests.support.objects import NAMESPACE, domain, model, policy, redis_tier
from tests.support.worlds import Simulation

TCP = "TenantCachePolicy"
OPERATORS = "kvstrata-system"
PATIENCE_S = 60.0

Story = Callable[[KeyPods], Awaitable[None]]


@pytest.fixture
def objects(bao: BaoServer) -> tuple[dict[str, Any], ...]:
    """A namespace whose service has nothing from tests before, where domains have the same random ids."""
    bao.clear()
    kms = {
        "address": bao.address,
        "mount": MOUNT,
        "role": "kvstrata",
        "authorityConfigMapRef": {"name": "kms-authority", "key": "ca.crt"},
    }
    own = domain(keyCustody="KMS", kms=kms)
    authority = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "kms-authority", "namespace": NAMESPACE},
        "data": {"ca.crt": bao.authority_pem.decode()},
    }
    tier = redis_tier(encryption="Required")
    return authority, own, tier, model(tiers=("shared",)), policy("acme"), policy("globex")


@pytest.fixture
def told(bao: BaoServer, token_file: Path, objects: tuple[dict[str, Any], ...]) -> Callable[[Story], KeyPods]:
    """Let a story happen to pods of a namespace whose keys the service wraps."""

    def tell(story: Story, *, allowed: bool = True) -> KeyPods:
        async def run() -> KeyPods:
            sim = Simulation()
            sim.kms_addresses = (bao.address,) if allowed else ()
            sim.kms_login = lambda _: TokenFile(token_file)
            sim.restart()
            sim.put(*objects)
            pods = KeyPods(sim)
            sim.settle()
            for name in ("pod-0", "pod-1"):
                pods.start(name)
            sim.come_to_rest()
            pods.lead()
            await asked(pods)
            await pods.turn()
            try:
                await story(pods)
            finally:
                await sim.kms.__aexit__(None, None, None)
            return pods

        return asyncio.run(run())

    return tell


async def unlock(custody: KmsCustody, epochs: Iterable[str]) -> dict[str, bytes]:
    """Have keys unwrapped; raise what kept the custody from it."""
    opened = (await custody.open(epochs)).whole()
    return {epoch: key for epoch, key in opened.items() if key is not None}


async def asked(pods: KeyPods) -> None:
    """Wait until the service was asked everything that it is to be asked, or told why not."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            pods.sim.settle()
            if not busy(pods) or pods.sim.store.domain(NAMESPACE).keys_problem:
                pods.sim.settle()
                return
            await asyncio.sleep(0.01)


def busy(pods: KeyPods) -> bool:
    """Whether the operator is at work on keys, or waits to try again."""
    return any(keys.task and not keys.task.done() for keys in pods.sim.kms._namespaces.values())


async def restart(pods: KeyPods) -> None:
    await pods.sim.kms.__aexit__(None, None, None)
    pods.sim.restart()
    pods.lead()
    await asked(pods)
    await pods.turn()


def complete(pods: KeyPods) -> bool:
    """Whether a pod has the keys that its bundle names; it is brought them later than the operator has them at hand."""
    return {*pods.held["pod-0"]} == pods.named() != set()


def at_hand(pods: KeyPods) -> tuple[str, str]:
    return pods.sim.condition("CacheDomain", "default", "KeysAtHand")


def epochs(pods: KeyPods) -> list[str]:
    return [pods.sim.status(TCP, name)["scope"]["epoch"] for name in ("acme", "globex")]


def wraps(pods: KeyPods, bao: BaoServer, epoch: str) -> bool:
    """Whether the service has what wraps the key of an epoch."""
    return wrapping_key(pods.sim.world.domain_id or "", epoch) in bao.admin("LIST", f"{MOUNT}/keys")["data"]["keys"]


def recorded(pods: KeyPods) -> dict[str, WrappedKey | None]:
    """By epoch, what Secrets have of its key."""
    return {
        epoch: WrappedKey.decode(base64.b64decode(value))
        for shard in SHARDS
        for epoch, value in secret_of(pods, shard).get("data", {}).items()
    }


def secret_of(pods: KeyPods, epoch: str, domain: str = "") -> dict[str, Any]:
    """The Secret that has what is stored of an epoch, empty if there is none; of the domain that is there, or was."""
    name = names.wrapped_keys_secret(domain or pods.sim.world.domain_id or "", epoch[:1])
    found: dict[str, Any] = pods.sim.kube.objects.get(("Secret", OPERATORS, name), {})
    return found


def spoil(pods: KeyPods, epoch: str) -> None:
    """Let the record of an epoch name a service that is not asked."""
    data = secret_of(pods, epoch)["data"]
    record = recorded(pods)[epoch]
    assert record is not None
    data[epoch] = base64.b64encode(replace(record, service="another").encode()).decode()


async def happens(condition: Callable[[], object]) -> None:
    """Wait, in real time, for an answer of the service to have an effect."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def pass_by(pods: KeyPods, until: Callable[[], object], *, listing: bool = True) -> None:
    """Let time pass until `until` holds, with whole lists of all objects unless `listing` is false."""
    async with asyncio.timeout(PATIENCE_S):
        while not until():
            if listing:
                await pods.sim.resync.objects(lambda _: None)
                pods.sim.enqueue_all()
            await pods.turn(61)
            await asyncio.sleep(0.05)


def wrapping(bao: BaoServer, domain: str) -> int:
    """How many keys of a domain the service has."""
    return sum(domain in name for name in bao.key_names())


def left(pods: KeyPods, domain: str) -> list[str]:
    """Secrets in the operator's namespace about a domain's keys."""
    return [
        name for kind, where, name in pods.sim.kube.objects if (kind, where) == ("Secret", OPERATORS) and domain in name
    ]


def waiting() -> float:
    """How many deleted domains the metric tells."""
    return metrics.KMS_DOMAINS_OPEN._value.get()


def domain_of(pods: KeyPods) -> str:
    """The id of the domain that is there."""
    found = pods.sim.world.domain_id
    assert found is not None
    return found


async def noted(pods: KeyPods) -> KmsDomain:
    """What is noted of the only domain."""
    (kms_domain,) = (await pods.sim.kms_domains._stored.all())[0]
    return kms_domain


def forget_policies(pods: KeyPods) -> None:
    """Let policies go as if nobody erased what they had: no status names an epoch any more."""
    for name in ("acme", "globex"):
        pods.sim.delete(TCP, name)
        pods.sim.kube.remove(TCP, NAMESPACE, name)
        pods.sim.store.forget(TCP, NAMESPACE, name)
