"""The whole benchmark: a cluster of three primaries is filled, emptied and looked at."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.adapter.stand import ROOT
from bench.erase.clocks import Exchange
from bench.erase.fill import Filling
from bench.machine import Busyness
from bench.result import OTHER_LOAD, Figure, Result, percentile
from e2e.cluster.progress import ClusterError, Progress
from e2e.cluster.rootfs import server_command
from kvstrata_sidecar.adapter.redis.client.slots import SLOTS
from tests.tiers.gate_stand_in import DOMAIN
from tests.tiers.redis_cluster import RedisCluster

NAME = "erase"
PRIMARIES = 3
WHOLE = "KVSTRATA_BENCH_WHOLE"
"""Set to delete as many entries as the goal names, for which filling them in takes its time and 2 GiB of memory."""

ENTRIES, WHOLE_ENTRIES = 200_000, 1_000_000
SLOW_S = 0.01
"""Longest time of a command."""

SLOW_COMMANDS = 10_000
"""Commands that took longer and are remembered by each server: on a busy machine many wait that long."""

AFTER_THE_SERVERS = 5
"""By how much less than the servers' the priority of the process is that deletes, as in a cluster it is elsewhere."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is done: entries, keyspaces that they are spread over, bytes of a value, entries of the baseline."""

    entries: int
    keyspaces: int = 16
    value_bytes: int = 512
    baseline_entries: int = 24_000


async def measure(effort: Effort | None = None) -> Result:
    """Start the servers, fill them, run it, stop them."""
    effort = effort or Effort(WHOLE_ENTRIES if os.environ.get(WHOLE) else ENTRIES)
    return await asyncio.to_thread(_measure, effort, Progress())


def _measure(effort: Effort, progress: Progress) -> Result:
    filling = Filling.of("a", effort.keyspaces, effort.entries, effort.value_bytes)
    with tempfile.TemporaryDirectory(prefix=NAME) as name, _cluster(Path(name), progress) as cluster:
        clients = [node.admin() for node in cluster.primaries]
        owners = _owners()
        with progress.step(f"baseline: UNLINK of {effort.baseline_entries} entries by name"):
            baseline = _unlinked(clients, owners, effort)
        with progress.step(f"{filling.entries} entries of {filling.value_bytes} bytes on {PRIMARIES} primaries"):
            filling.put(clients, owners)
        held = sum(client.dbsize() for client in clients)
        if held < filling.entries:
            raise ClusterError(f"there are {held} keys and not {filling.entries}")
        for client in clients:
            client.config_set("slowlog-log-slower-than", int(SLOW_S * 1e6))
            client.config_set("slowlog-max-len", SLOW_COMMANDS)
            client.slowlog_reset()
        with Busyness() as machine, progress.step("deleted and verified"):
            done = _delete(Path(name), cluster, filling)
        slow = [entry for client in clients for entry in client.slowlog_get(SLOW_COMMANDS)]
    return _result(effort, filling, done, baseline, slow, machine.others_percent)


@contextmanager
def _cluster(directory: Path, progress: Progress) -> Iterator[RedisCluster]:
    # A server without processor time on a busy machine is not taken for dead.
    patient = ("--cluster-node-timeout", "60000")
    cluster = RedisCluster(directory, PRIMARIES, options=lambda _: patient, command=server_command())
    try:
        with progress.step(f"a cluster of {PRIMARIES} servers"):
            cluster.start()
        yield cluster
    finally:
        cluster.kill()


def _owners() -> list[int]:
    # As RedisCluster deals them out.
    bounds = [SLOTS * (number + 1) // PRIMARIES for number in range(PRIMARIES)]
    return [next(number for number, end in enumerate(bounds) if slot < end) for slot in range(SLOTS)]


def _unlinked(clients: list[Any], owners: list[int], effort: Effort) -> float:
    """Return the servers' processor time for an UNLINK of values by name, in seconds for one value."""
    few = Filling.of("b", effort.keyspaces, effort.baseline_entries, effort.value_bytes)
    few.put(clients, owners)
    names = [[one for one in client.scan_iter(count=1000) if b"#" not in one] for client in clients]
    before = sum(map(_cpu_s, clients))
    for client, mine in zip(clients, names, strict=True):
        pipeline = client.pipeline(transaction=False)
        for name in mine:
            pipeline.unlink(name)
        pipeline.execute()
    took_s = sum(map(_cpu_s, clients)) - before
    for client in clients:
        client.flushall()
    return took_s / sum(map(len, names))


def _cpu_s(client: Any) -> float:
    figures = client.info("cpu")
    return float(figures["used_cpu_user"] + figures["used_cpu_sys"])


def _delete(directory: Path, cluster: RedisCluster, filling: Filling) -> dict[str, Any]:
    ports = [node.port for node in cluster.primaries]
    tier = {"name": "shared", "cluster": True, "endpoints": [{"host": "127.0.0.1", "port": ports[0]}]}
    tier |= {"io_timeout_ms": 10_000}
    order = {"domain": DOMAIN, "revision": 7, "keyspaces": list(filling.keyspaces), "tier": tier}
    pids = {str(node.port): node.admin().info("server")["process_id"] for node in cluster.primaries}
    job = directory / "job.json"
    job.write_text(json.dumps({"order": order, "pids": pids}))
    environment = os.environ | {"PYTHONPATH": f"{ROOT}/operator/src:{ROOT}/sidecar/src:{ROOT}"}
    ended = subprocess.run(
        [sys.executable, "-m", "bench.erase.deleter", str(job)],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, check=False, timeout=900,
        preexec_fn=lambda: os.nice(AFTER_THE_SERVERS),
    )  # fmt: skip
    if ended.returncode:
        raise ClusterError(f"the deletion ended with {ended.returncode}")
    done: dict[str, Any] = json.loads(ended.stdout)
    if not done["whole"] or not done["empty"] or done["deleted"] != filling.entries:
        outcome = {name: value for name, value in done.items() if name not in ("exchanges", "controls")}
        raise ClusterError(f"{filling.entries} entries were to be deleted and shown to be gone: {outcome}")
    return done


def _result(
    effort: Effort, filling: Filling, done: dict[str, Any], baseline: float, slow: list[Any], others_percent: float
) -> Result:
    exchanges, pings = ([Exchange(*one) for one in done[name]] for name in ("exchanges", "controls"))
    most = max(exchanges, key=lambda one: one.serving_s)
    entries = filling.entries
    server = done["server_cpu_s"] / entries
    figures = {
        "erased_and_verified": Figure(done["deleted_s"] + done["verified_s"], "s"),
        "deleted_without_window": Figure(done["deleted_s"] - done["window_s"], "s"),
        "verified": Figure(done["verified_s"], "s"),
        "command_cpu_max": Figure(1000 * most.serving_s, "ms"),
        "command_cpu_p99": Figure(1000 * percentile([one.serving_s for one in exchanges], 99), "ms"),
        "beside_cpu_max": Figure(1000 * max(one.beside_s for one in exchanges), "ms"),
        "command_max": Figure(1000 * max(one.took_s for one in exchanges), "ms"),
        "commands_over_10_ms": Figure(len(slow), "commands"),
        "commands": Figure(len(exchanges), "exchanges"),
        "server_cpu_per_entry": Figure(1e6 * server, "us"),
        "client_cpu_per_entry": Figure(1e6 * done["client_cpu_s"] / entries, "us"),
    }
    return Result(
        name=NAME,
        figures=figures,
        baseline={
            "unlink_server_cpu_per_entry": Figure(1e6 * baseline, "us"),
            "ping_max": Figure(1000 * max(one.took_s for one in pings), "ms"),
            "ping_cpu_max": Figure(1000 * max(one.serving_s for one in pings), "ms"),
        },
        ratio=server / baseline,
        reproduce=f"{WHOLE}=1 make bench BENCH=erase" if entries > ENTRIES else "make bench BENCH=erase",
        conditions={
            "entries": entries,
            "value_bytes": filling.value_bytes,
            "keyspaces": effort.keyspaces,
            "primaries": PRIMARIES,
            "commands_in_exchange_of_most_cpu": most.commands,
            "slow_commands": [str(entry["command"][:60]) + f" {entry['duration']} us" for entry in slow[:8]],
            "processors": len(os.sched_getaffinity(0)),
            "kernel": platform.release(),
            OTHER_LOAD: round(others_percent),
            "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        },
    )
