"""Who dies while a tenant is erased: each story is one erasure, and somebody dies in it at every step.

A story returns the steps at which its victims died.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kvstrata.clients.lease import LEASE_NAME
from kvstrata.contract.store.redis_scripts import script
from kvstrata.objects import names
from tests.api.apiserver import ApiServer, RefusedError
from tests.apiserver.erasure_steps import ENDED, Step, Steps
from tests.apiserver.erasure_ward import PATIENCE_S, Ward
from tests.apiserver.kubelet import Kubelet, wait
from tests.apiserver.operator_process import OperatorProcess, Operators
from tests.support.api_proxy import ApiProxy
from tests.support.api_proxy_faults import READS, WRITES, Answer
from tests.tiers.faulty_proxy import FaultyProxy, Trigger
from tests.tiers.redis_cluster import ClusterNode, RedisCluster, text, until

Died = Mapping[str, frozenset[str]]
"""By victim, the steps at which it died."""

LEASES = "/leases"


class Shift:
    """Operators of one Lease, each behind a proxy of its own. Who ends is started again, as a kubelet would: who was
    killed, who lost the Lease to another, and who could not renew it on a machine that is too busy."""

    def __init__(self, api: ApiServer, operators: Operators, proxies: list[ApiProxy], **variables: str) -> None:
        self._api, self._operators, self.proxies, self._variables = api, operators, proxies, variables
        self._lease = f"/apis/coordination.k8s.io/v1/namespaces/{operators.namespace}/leases/{LEASE_NAME}"
        self._started = 0
        self._on: dict[ApiProxy, OperatorProcess] = {}
        self._over = threading.Event()
        self._keeper = threading.Thread(target=self._keep, daemon=True)

    def __enter__(self) -> Shift:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._keeper.is_alive():
            self._keeper.join(20)
        for one in self._operators.running():
            one.kill()

    def begin(self) -> None:
        """Start one behind each proxy; return when one of them leads."""
        for proxy in self.proxies:
            self._start(proxy)
        self._keeper.start()
        wait("somebody to lead", lambda: self._holder, PATIENCE_S)

    def kill(self, proxy: ApiProxy) -> None:
        """Kill who is behind a proxy; another leads at once, not when the Lease has run out."""
        killed = self._on[proxy]
        killed.kill()
        self._let_go(_name(killed))

    def depose(self, proxy: ApiProxy) -> None:
        """Have another take the Lease from who is behind a proxy, who learns that as late as from a slow network."""
        name = _name(self._on[proxy])
        with proxy.fault(Answer(503), path=LEASES, methods=WRITES | READS):
            self._let_go(name)
            wait("another to lead", lambda: self._holder not in ("", name), PATIENCE_S)

    def defects(self) -> list[str]:
        """What those that ran logged of defects of their own."""
        logs = [one.log for one in self._operators.started]
        return [line for log in logs for line in log.read_text().splitlines() if "this is a defect" in line]

    def _start(self, proxy: ApiProxy) -> None:
        self._started += 1
        variables = {"KUBECONFIG": str(proxy.kubeconfig), **self._variables}
        self._on[proxy] = self._operators.start(f"{self._operators.namespace}-{self._started}", **variables)

    def _keep(self) -> None:
        while not self._over.wait(0.2):
            for proxy, running in list(self._on.items()):
                if running.process.poll() is not None:
                    self._start(proxy)

    @property
    def _holder(self) -> str:
        try:
            return str(self._api.get(self._lease)["spec"].get("holderIdentity") or "")
        except RefusedError:
            return ""

    def _let_go(self, name: str) -> None:
        """Write the Lease as its holder would that gives it up, unless somebody else holds it."""

        def let_go() -> bool:
            lease = self._api.get(self._lease)
            if lease["spec"].get("holderIdentity") != name:
                return True
            lease["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1}
            try:
                self._api._call("PUT", self._lease, lease, {})
            except RefusedError:
                return False
            return True

        wait("the Lease to be let go", let_go, PATIENCE_S)


def _name(operator: OperatorProcess) -> str:
    return operator.log.stem.rsplit("-", 1)[0]


def nobody(ward: Ward) -> Died:
    """Nobody dies."""
    ward.order()
    return {}


def operators(ward: Ward, shift: Shift) -> Died:
    """At each step the Lease is taken from who leads while it writes, and who leads then is killed as soon as it wrote.

    What the first has written arrives late: in turns before and after the second writes the same.
    """
    steps, deposed, killed, overtakes = Steps(ward.namespace), set[str](), set[str](), False
    with steps.holding(*shift.proxies):
        ward.order()
        while ENDED not in steps.passed:
            first = steps.next()
            shift.depose(first.proxy)
            second = steps.next(but=first.proxy)
            if overtakes:
                _carry_out(steps, first)
            steps.passing(second, mute=True)
            second.held.done.wait(PATIENCE_S)
            _carry_out(steps, first)
            shift.kill(second.proxy)
            deposed |= first.words
            killed |= second.words
            overtakes = not overtakes
    return {"the leader is another": frozenset(deposed), "the operator": frozenset(killed)}


def pods(ward: Ward, proxy: ApiProxy) -> Died:
    """At each step the gate of one pod is killed, and the cache server of the other begins anew, its memory empty."""
    died = set[str]()
    with ThreadPoolExecutor(1) as beside:
        for step in _each_step(ward, proxy):
            gate = beside.submit(ward.pods[0].restart_gate)
            ward.pods[1].restart_cache_server()
            gate.result()
            died |= step.words
    return {"the gate": frozenset(died), "the cache server": frozenset(died)}


def servers(ward: Ward, proxy: ApiProxy, cluster: RedisCluster) -> Died:
    """At each step a primary of the cluster dies and its replica takes over, and the other tier's server comes back
    without its data."""
    died = set[str]()
    pair = (cluster.primaries[0], cluster.replicas[0])
    for step in _each_step(ward, proxy):
        ward.opened.kill()
        _fail_over(*sorted(pair, key=lambda one: "role:master" not in _replication(one)))
        ward.opened.start()
        died |= step.words
    return {"the primary": frozenset(died), "a server's data": frozenset(died)}


def deletions(ward: Ward, kubelet: Kubelet, proxy: FaultyProxy) -> Died:
    """The deletion from the encrypted tier is killed as it says each of these for the first time."""
    ward.order()
    for word, trigger in DELETION_SAYS.items():
        proxy.holding.clear()
        proxy.hold_from = trigger
        assert proxy.holding.wait(PATIENCE_S), f"the deletion does not say {word}: {ward.status}"
        jobs = [names.deletion_job(ward.uid, "shared", round) for round in range(1, 10)]
        # A process may say it before the kubelet knows it.
        wait(f"the deletion that says {word}", lambda jobs=jobs: any(map(kubelet.kill, jobs)))
        proxy.release()
    return {"the deletion": frozenset(DELETION_SAYS)}


def _says(pattern: bytes) -> Trigger:
    return lambda data: re.search(pattern, data, re.DOTALL) is not None


def _after(first: Trigger) -> Callable[[bytes], bool]:
    """Whether it is said for the second time."""
    times = iter(range(1_000_000))
    return lambda data: first(data) and next(times) > 0


_TAKES = script("drop").sha + rb"\r\n\$1\r\n1\r\n\$\d+\r\n[^\r]*\r\n\$\d+\r\n[1-9]"
"""A step in one bucket that takes more than nothing."""
DELETION_SAYS: Mapping[str, Trigger] = {
    "revoke": _says(script("revoke").sha),
    "leave tombstones": _says(script("drop").sha),
    "delete": _says(_TAKES),
    "delete more": _after(_says(_TAKES)),
    "forget": _says(rb"UNLINK\r\n\$\d+\r\n[^\r]*:#l"),
}
"""What a deletion tells a server, in the order in which it does."""


def _each_step(ward: Ward, proxy: ApiProxy) -> Iterator[Step]:
    steps = Steps(ward.namespace)
    with steps.holding(proxy):
        ward.order()
        while ENDED not in steps.passed:
            step = steps.next()
            yield step
            steps.passing(step)
            steps.release(proxy)


def _carry_out(steps: Steps, late: Step) -> None:
    steps.release(late.proxy)
    late.held.done.wait(PATIENCE_S)


def _fail_over(primary: ClusterNode, replica: ClusterNode) -> None:
    """Kill a primary whose replica has all of its data; return when that is the primary, and has a replica.

    It is ordered to take over, because the other servers would vote for it much later only.
    """
    until(lambda: primary.admin().execute_command("WAIT", 1, 1000) == 1, "the replica is not in step", PATIENCE_S)
    primary.kill()
    replica.ask("CLUSTER", "FAILOVER", "TAKEOVER")
    until(lambda: "role:master" in _replication(replica), "nobody takes over", PATIENCE_S)
    primary.start()
    until(lambda: "master_link_status:up" in _replication(primary), "no replication", PATIENCE_S)


def _replication(node: ClusterNode) -> str:
    return text(node.ask("INFO", "replication"))


def proxies(stack: ExitStack, plane: Any, folder: Path, count: int) -> list[ApiProxy]:
    """Start proxies in front of a control plane."""
    found = []
    for number in range(count):
        own = folder / f"proxy-{number}"
        own.mkdir(parents=True)
        found.append(
            stack.enter_context(ApiProxy(plane.kubeconfig, own, plane.pki.crt("apiserver"), plane.pki.key("apiserver")))
        )
    return found
