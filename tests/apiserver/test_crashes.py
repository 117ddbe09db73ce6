"""The real operator is killed (SIGKILL) at writes to the real API server, again and again, and nothing happens twice.

A sample of what `tests/property/test_crashes.py` does at every write of every plan: a proxy holds the n-th write,
either before the API server has it or after, so that the answer is lost, and every later one; then the process is
killed, and another goes on.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from kvstrata.clients.resources import BY_KIND, SECRET
from tests.apiserver.faulty import MODEL, NAMESPACE, NOT_THE_LEASE, TENANTS, FaultyWorld
from tests.apiserver.operator_process import OperatorProcess
from tests.support import objects
from tests.support.amounts import CLAIMS
from tests.support.api_proxy_faults import WRITES, Delay, Hang, Held, Hold

AT_CREATION = ((5, True),) if CLAIMS else ((2, False), (3, True), (5, True), (7, False), (6, True))
AT_INVALIDATION = ((3, False),) if CLAIMS else ((1, True), (3, False), (5, True))
"""At which write of its own each operator dies, and whether the API server has carried it out."""
KILLED_WITHIN_S = 90.0
SCOPES = (("CacheDomain", "default"), *(("TenantCachePolicy", tenant) for tenant in TENANTS))


class Witness:
    """What was once seen may not change any more, whoever leads."""

    def __init__(self, world: FaultyWorld) -> None:
        self._world = world
        self._material: dict[str, Any] = {}
        self._epochs: dict[tuple[str, str], list[str]] = {}
        self._bundle = (0, 0)

    def look(self) -> None:
        """Look at everything now, and compare with what was there before."""
        found = self._world.api.get(SECRET.path(NAMESPACE))["items"]
        for secret in found:
            name = secret["metadata"]["name"]
            if "-bundle" not in name:
                kept = (secret["metadata"]["uid"], secret["data"])
                assert self._material.setdefault(name, kept) == kept, f"Secret {name} was written twice"
        for kind, name in SCOPES:
            scope = (self._world.get(kind, name).get("status") or {}).get("scope")
            epochs = self._epochs.setdefault((kind, name), [])
            if scope and scope["epoch"] not in epochs[-1:]:
                assert scope["epoch"] not in epochs, f"an epoch of {kind} {name} came back"
                epochs.append(scope["epoch"])
                assert scope["rolls"] == len(epochs) - 1
        if any(secret["metadata"]["name"] == f"kvs-{MODEL}-bundle" for secret in found):
            root = self._world.bundle().root
            assert root.revision >= self._bundle[0]
            assert root.term >= self._bundle[1]
            self._bundle = (root.revision, root.term)

    def epochs(self) -> dict[tuple[str, str], int]:
        """Return how many epochs each scope has had."""
        return {scope: len(epochs) for scope, epochs in self._epochs.items()}


def die_at(world: FaultyWorld, number: int, *, after: bool) -> None:
    """Start an operator and kill it at its write of this number."""
    aim = {"path": NOT_THE_LEASE, "methods": WRITES}
    proxy, began, carried_out = world.proxy, time.monotonic(), list[Held]()

    def carry_out(write: Held) -> None:
        write.mute = True
        write.goes.set()
        carried_out.append(write)

    def are_carried_out() -> bool:
        """Whether the API server has answered each write that it is given."""
        passed = [e for e in proxy.requests(NOT_THE_LEASE, methods=WRITES, since=began) if isinstance(e.fault, Delay)]
        return len(passed) == number - 1 and (not after or any(write.done.is_set() for write in carried_out))

    with (
        proxy.fault(Delay(0), times=number - 1, **aim),  # type: ignore[arg-type]
        proxy.fault(Hold(carry_out) if after else Hang(), times=1, **aim) as held,  # type: ignore[arg-type]
        proxy.fault(Hang(), **aim),  # type: ignore[arg-type]
    ):
        running = world.operators.start(f"dies-at-{number}", KUBECONFIG=str(proxy.kubeconfig))
        world.wait(f"write {number}", lambda: held.hits == 1, KILLED_WITHIN_S)
        world.wait("the writes to be carried out", are_carried_out)
        kill(world, running)


def kill(world: FaultyWorld, running: OperatorProcess) -> None:
    """Let a process vanish; its Lease would run out by itself, which is tested elsewhere and takes a while."""
    running.kill()
    lease = BY_KIND["Lease"].path(world.operators.namespace)
    for found in world.api.get(lease)["items"]:
        world.api.delete_path(f"{lease}/{found['metadata']['name']}")


@pytest.mark.claim("an operator that is killed at a write to the real API server does nothing twice")
def test_an_operator_killed_again_and_again_ends_where_it_would_have_without(faulty: FaultyWorld) -> None:
    witness = Witness(faulty)
    for number, after in AT_CREATION:
        die_at(faulty, number, after=after)
        witness.look()
    last = faulty.start("survivor-1")
    witness.look()
    assert witness.epochs() == dict.fromkeys(SCOPES, 1)
    before = faulty.bundle().keyspaces
    kill(faulty, last)
    faulty.api.create(objects.invalidation("now", scope={"all": True}))
    for number, after in AT_INVALIDATION:
        die_at(faulty, number, after=after)
        witness.look()
    faulty.start("survivor-2")
    faulty.wait("the invalidation", lambda: faulty.condition("CacheInvalidation", "now", "Complete") == "True")
    faulty.wait("the operator to come to rest", faulty.at_rest)
    witness.look()
    assert witness.epochs() == dict.fromkeys(SCOPES, 2), "every scope was rolled once, and once only"
    bundle = faulty.bundle()
    assert set(bundle.entries) == set(TENANTS)
    assert not before & bundle.keyspaces
    faulty.wait("all to settle", lambda: all(faulty.settled("TenantCachePolicy", tenant) for tenant in TENANTS))
    faulty.wait("the operator to stay at rest", faulty.at_rest)
