"""Pods without a kubelet: the real gate program for each, an adapter that agrees, and no engine.

Each gate is the whole gate as it runs in a pod (`kvstrata_sidecar.gate.main.Gate`), with its tenants' port switched
off: it watches the bundle on the API server with its own ServiceAccount's token, fetches changed shards, checks their
digests, writes the policy for a cache server, and answers the operator's long poll over mutual TLS with a token that
the API server bound to its pod. All gates share one process, each on a loopback address of its own; the adapter's part
of the acknowledgement is one socket that agrees at once, because nothing is cached here.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

import uvloop

from kvstrata.contract.messages.adapter import (
    MAX_LINE_BYTES,
    AdapterAck,
    AdapterState,
    ApplyRequest,
    decode_request,
    encode_answer,
)
from kvstrata_sidecar.gate.main import Gate
from kvstrata_sidecar.gate.settings import Settings

BOOT = "stand-in"


async def _agree(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer as an adapter that holds nothing: every revision is enforced as soon as it is named."""
    revision = term = 0
    while line := await reader.readline():
        request = decode_request(line)
        answer: AdapterAck | AdapterState
        if isinstance(request, ApplyRequest):
            revision, term = request.revision, request.term
            answer = AdapterAck(revision, term, BOOT)
        else:
            answer = AdapterState(BOOT, revision, term, fresh=True, keyspaces=0)
        writer.write(encode_answer(answer))


async def run(folder: Path) -> None:
    """Run the gates that `folder/gates.json` lists until a signal."""
    described: dict[str, Any] = json.loads((folder / "gates.json").read_text())
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    adapter_socket = folder / "adapter.sock"
    adapter = await asyncio.start_unix_server(_agree, adapter_socket, limit=MAX_LINE_BYTES)
    gates = [Gate(_settings(folder, described, pod, adapter_socket), loop) for pod in described["pods"]]
    tasks = [asyncio.create_task(gate.run()) for gate in gates]
    stopping = asyncio.create_task(stop.wait())
    done, _ = await asyncio.wait({stopping, *tasks}, return_when=asyncio.FIRST_COMPLETED)
    for gate in gates:
        gate.stop()
    await asyncio.gather(*tasks)
    adapter.close()
    for task in done:
        task.result()


def _settings(folder: Path, described: dict[str, Any], pod: dict[str, str], adapter_socket: Path) -> Settings:
    own = folder / pod["name"]
    return Settings(
        pod_name=pod["name"],
        pod_uid=pod["uid"],
        pod_namespace=described["namespace"],
        model=described["model"],
        identity=pod["identity"],
        bundle_secret=described["bundle_secret"],
        api_keys_secret=described["api_keys_secret"],
        served_model=described["model"],
        engine_socket=folder / "no-engine.sock",
        policy_dir=own,
        adapter_socket=adapter_socket,
        bind=pod["ip"],
        https_port=-1,
        health_port=0,
        control_tls_dir=folder / "gate-tls",
        ack_token_file=own / "ack-token",
        kube_host=described["kube_host"],
        kube_port=described["kube_port"],
        kube_token_file=own / "kube-token",
        kube_ca_file=Path(described["kube_ca_file"]),
        drain_grace_s=0.0,
        shutdown_s=1.0,
        memory_patience_s=0.0,
    )


if __name__ == "__main__":
    uvloop.run(run(Path(sys.argv[1])))
