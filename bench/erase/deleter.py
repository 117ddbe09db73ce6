"""The process that deletes and looks: `python -m bench.erase.deleter JOB`, with the product's own code.

JOB is a file of JSON with the deletion's order and, by port, the process of each server. One line of JSON on standard
output holds the duration, the findings, and for each exchange with a server its duration as seen from here and the
processor time that the server used meanwhile, in the thread that serves and beside it. The former processor time is
the need of the commands themselves: such a clock stands still while the thread waits for a processor.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.erase.clocks import Exchange, ServerClock
from kvstrata.clients.redis.probe import Access, endpoint_of
from kvstrata.clients.redis.verifier import TierLook, TierVerifier
from kvstrata.contract.messages.erase_report import Erased, Line
from kvstrata_sidecar.adapter.params import TierParams
from kvstrata_sidecar.adapter.redis.client.resp import Command
from kvstrata_sidecar.delete_job.delete import Deletion
from kvstrata_sidecar.delete_job.order import Order
from kvstrata_sidecar.delete_job.servers import Primary, Servers

CONTROL_EVERY = 8
"""Every so many exchanges one is a PING, which measures the waiting alone."""


class WatchedServers(Servers):
    """Servers whose processor time is read before and after each exchange."""

    def __init__(self, tier: TierParams, pids: dict[int, int]) -> None:
        super().__init__(tier)
        self._clocks = {one: ServerClock(pids[one.address.port]) for one in self.layout.primaries}
        self.exchanges: list[Exchange] = []
        self.controls: list[Exchange] = []

    def ask_one(self, primary: Primary, commands: Sequence[Command]) -> list[Any]:
        """Ask, and note seconds of either kind."""
        answers: list[Any] = []

        def ask() -> None:
            answers[:] = super(WatchedServers, self).ask_one(primary, commands)

        self.exchanges.append(self._timed(primary, ask)._replace(commands=len(commands)))
        if len(self.exchanges) % CONTROL_EVERY == 0:
            ping = Command(b"", (b"PING",))
            self.controls.append(self._timed(primary, lambda: super(WatchedServers, self).ask_one(primary, [ping])))
        return answers

    def _timed(self, primary: Primary, do: Callable[[], object]) -> Exchange:
        clock = self._clocks[primary]
        before, began_s = clock.read(), time.perf_counter()
        do()
        took_s = time.perf_counter() - began_s
        used = clock.read().since(before)
        return Exchange(took_s, used.serving_s, used.beside_s)


def main(path: Path) -> None:
    """Carry the job out."""
    job = json.loads(path.read_bytes())
    order = Order.from_json(job["order"])
    pids = {int(port): pid for port, pid in job["pids"].items()}
    lines: list[Line] = []
    slept: list[float] = []
    began_s = time.perf_counter()
    servers = WatchedServers(order.tier, pids)

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        time.sleep(seconds)

    whole = Deletion(order, servers, lines.append, clock=time.monotonic, sleep=sleep).run()
    servers.close()
    deleted_s = time.perf_counter() - began_s
    server_cpu_s = sum(one.serving_s + one.beside_s for one in servers.exchanges)
    used = resource.getrusage(resource.RUSAGE_SELF)
    look = _look(order)
    print(
        json.dumps(
            {
                "whole": whole,
                "end": str(lines[-1]),
                "empty": look.empty,
                "problems": [one.message for one in look.problems],
                "deleted": sum(line.deleted.keys for line in lines if isinstance(line, Erased)),
                "deleted_s": deleted_s,
                # The deletion waits so long for values that were on their way; the longest sleep of all is that one.
                "window_s": max(slept, default=0.0),
                "verified_s": time.perf_counter() - began_s - deleted_s,
                "client_cpu_s": used.ru_utime + used.ru_stime,
                "server_cpu_s": server_cpu_s,
                "exchanges": servers.exchanges,
                "controls": servers.controls,
            }
        )
    )


def _look(order: Order) -> TierLook:
    first = order.tier.endpoints[0]
    endpoint = endpoint_of(first.host, first.port)
    verifier = TierVerifier(endpoint, first.host, Access(None, None), cluster=order.tier.cluster)
    return asyncio.run(verifier.look(order.domain, order.keyspaces))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
