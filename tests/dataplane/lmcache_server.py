"""A real LMCache server with the policy adapter, and the engine stand-in that drives it, as child processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from e2e.cluster.ports import free_port
from tests.tiers.gate_stand_in import DOMAIN, IDENTITY, GateStandIn

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 300.0


def lmcache_python() -> Path | None:
    """Return the interpreter that has the real LMCache, None if there is none (see install_lmcache.py)."""
    named = os.environ.get("KVSTRATA_LMCACHE_PYTHON")
    candidate = Path(named) if named else ROOT / ".local/venv-lmcache/bin/python"
    return candidate if candidate.exists() else None


class LMCacheServer:
    """The server as a pod runs it, on loopback, with one adapter for each tier; `tiers` are TierParams or None.

    With `memory` (its parameters beside the pod's) the server's own memory, `memory_gb` of it, is under the policy too.
    `read_ttl_s` is after how long the locks of a reader that died end.
    """

    def __init__(
        self,
        python: Path,
        directory: Path,
        gate: GateStandIn,
        tiers: list[dict[str, Any] | None],
        chunk_tokens: int = 16,
        memory: dict[str, Any] | None = None,
        read_ttl_s: int = 300,
        memory_gb: float = 0.05,
    ) -> None:
        self.rpc_port, self.http_port = free_port(), free_port()
        self.log_file = directory / "lmcache.log"
        adapters: list[str] = []
        for tier in tiers:
            adapters += ["--l2-adapter", json.dumps(adapter(gate, tier))]
        environment = os.environ | {
            "PYTHONPATH": f"{ROOT}/operator/src:{ROOT}/sidecar/src",
            "LMCACHE_TRACK_USAGE": "false",
            "LMCACHE_DISABLE_BANNER": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "HOME": str(directory),
        }
        if memory is not None:
            adapters += ["--server-module", json.dumps(memory_module(gate, memory))]
        self._chunk_tokens, self._read_ttl_s = chunk_tokens, read_ttl_s
        self._memory_gb = memory_gb
        self._eviction = "LRU" if memory is None else "noop"
        self._prefetch = "retain" if memory is not None and memory["tier"] else "default"
        self._shm_name = f"kvs-test-{self.rpc_port}"
        self.command = [str(python), "-m", "kvstrata_sidecar.adapter.start", *self._flags(), *adapters]
        self._python, self.environment = python, environment
        self._engine: subprocess.Popen[str] | None = None
        self.process = self._start()

    def wait_until_ready(self) -> None:
        """Wait until the server answers over HTTP."""
        give_up_at_s = time.monotonic() + START_TIMEOUT_S
        while True:
            assert self.process.poll() is None, self.log_file.read_text()[-4000:]
            assert time.monotonic() < give_up_at_s, self.log_file.read_text()[-4000:]
            try:
                self.get("/healthcheck")
                return
            except OSError:
                time.sleep(0.1)

    def attach_engine_stand_in(self, program: Path | None = None, *arguments: str) -> None:
        """Start the engine stand-in, or another `program` of its kind, and wait until it is registered."""
        engine = program or Path(__file__).with_name("engine_stand_in.py")
        self._engine = subprocess.Popen(
            [str(self._python), str(engine), str(self.rpc_port), str(self.http_port), *arguments],
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log_file.with_name("engine.log").open("wb"),
            text=True,
        )
        assert self._answer() == {"ready": True}

    @property
    def segment(self) -> Path:
        """The shared memory that the server and the engine exchange blocks in."""
        return Path("/dev/shm") / f"lmcache_l1_pool_{self._shm_name}"

    def store_marked(self, sequence: int, salt: str, marker: bytes) -> dict[str, Any]:
        """Store a sequence's chunks filled with `marker` (an even number of bytes)."""
        return self.ask_engine(op="store", sequence=sequence, salt=salt, marker=marker.hex())

    def hold(self, sequence: int, salt: str) -> int:
        """Look a sequence up and keep what was found locked, until `let_go`; return how many chunks that is."""
        return int(self.ask_engine(op="hold", sequence=sequence, salt=salt)["hits"])

    def let_go(self, sequence: int, salt: str) -> None:
        """Unlock what `hold` locked."""
        self.ask_engine(op="let_go", sequence=sequence, salt=salt)

    def store(self, sequence: int, salt: str, fill: int) -> dict[str, Any]:
        """Store a sequence's chunks with every element set to `fill`."""
        return self.ask_engine(op="store", sequence=sequence, salt=salt, fill=fill)

    def lookup(self, sequence: int, salt: str) -> dict[str, Any]:
        """Return `hits` and `ms`."""
        return self.ask_engine(op="lookup", sequence=sequence, salt=salt)

    def read(self, sequence: int, salt: str) -> dict[str, Any]:
        """Return `hits`, `values` and `ms`."""
        return self.ask_engine(op="read", sequence=sequence, salt=salt)

    def lookups(self, asked: list[tuple[int, str]]) -> list[bool]:
        """Look sequences up at once, each under a salt of its own; return for each whether its first chunk is there."""
        return [hits > 0 for hits in self.ask_engine(op="lookups", asked=asked)["hits"]]

    def tokens(self, sequence: int) -> list[int]:
        """Return a sequence's tokens."""
        return [int(token) for token in self.ask_engine(op="tokens", sequence=sequence)["tokens"]]

    def forget_memory(self) -> None:
        """Empty the server's own memory, so that only the tiers can answer."""
        self.post("/cache/clear", {"tier": "l1", "force": True})

    def get(self, path: str) -> Any:
        """Ask the server's HTTP port."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http_port}{path}", timeout=60) as response:
            return json.load(response)

    def post(self, path: str, body: dict[str, Any], method: str = "POST") -> Any:
        """Tell the server's HTTP port."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.http_port}{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
            method=method,
        )
        with urllib.request.urlopen(request, timeout=60) as response:  # noqa: S310
            return json.load(response)

    def freeze_engine(self, **request: Any) -> None:
        """Stop the engine stand-in with a request before it, or in the middle of one that says where (`freeze`)."""
        assert self._engine is not None
        if "freeze" not in request:
            self._engine.send_signal(signal.SIGSTOP)
        self._tell(request)
        give_up_at_s = time.monotonic() + START_TIMEOUT_S
        while Path(f"/proc/{self._engine.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
            assert time.monotonic() < give_up_at_s, self.log_file.with_name("engine.log").read_text()[-4000:]
            time.sleep(0.02)

    def thaw_engine(self) -> dict[str, Any]:
        """Let it go on; return its answer to the request."""
        assert self._engine is not None
        self._engine.send_signal(signal.SIGCONT)
        return self._answer()

    def kill_engine(self) -> None:
        """Kill the engine stand-in, whatever it holds."""
        assert self._engine is not None
        self._engine.kill()
        self._engine.wait()

    def kill_server(self, what: signal.Signals = signal.SIGKILL) -> None:
        """Kill the server alone, and return when it has ended."""
        self.process.send_signal(what)
        self.process.wait()

    def start_server_again(self) -> None:
        """Start the server on what it left behind, with whoever is connected to it."""
        self.process = self._start()
        self.wait_until_ready()

    def kill_and_start_again(self) -> None:
        """Kill both processes, as a node short of memory would, and start them on what they left behind."""
        self._kill()
        self.start_server_again()
        self.attach_engine_stand_in()

    def stop(self) -> None:
        """End both processes and remove what they leave behind."""
        self._kill()
        for segment in Path("/dev/shm").glob(f"*{self._shm_name}*"):
            segment.unlink(missing_ok=True)

    def _start(self) -> subprocess.Popen[bytes]:
        with self.log_file.open("ab") as log:
            return subprocess.Popen(self.command, env=self.environment, stdout=log, stderr=subprocess.STDOUT)

    def _kill(self) -> None:
        for process in (self._engine, self.process):
            if process is not None:
                process.kill()
                process.wait()

    def _flags(self) -> list[str]:
        """The flags that a pod's cache container gets, but for ports, sizes and the chunk size."""
        flags = {
            "--host": "127.0.0.1",
            "--port": str(self.rpc_port),
            "--http-host": "127.0.0.1",
            "--http-port": str(self.http_port),
            "--chunk-size": str(self._chunk_tokens),
            "--l1-size-gb": str(self._memory_gb),
            "--eviction-policy": self._eviction,
            "--l2-prefetch-policy": self._prefetch,
            "--supported-transfer-mode": "engine_driven",
            "--shm-name": self._shm_name,
            "--l1-read-ttl-seconds": str(self._read_ttl_s),
        }
        return ["--no-l1-use-lazy", *(word for flag in flags.items() for word in flag)]

    def ask_engine(self, **request: Any) -> dict[str, Any]:
        """Have the engine stand-in do something and return its answer."""
        self._tell(request)
        answer = self._answer()
        assert "error" not in answer, answer
        return answer

    def _tell(self, request: dict[str, Any]) -> None:
        assert self._engine is not None
        assert self._engine.stdin is not None
        self._engine.stdin.write(json.dumps(request) + "\n")
        self._engine.stdin.flush()

    def _answer(self) -> dict[str, Any]:
        assert self._engine is not None
        assert self._engine.stdout is not None
        line = self._engine.stdout.readline()
        assert line, self.log_file.with_name("engine.log").read_text()[-4000:]
        answer: dict[str, Any] = json.loads(line)
        return answer


def adapter(gate: GateStandIn, tier: dict[str, Any] | None) -> dict[str, Any]:
    """Return the value of `--l2-adapter` for one tier."""
    return {
        "type": "plugin",
        "module_path": "kvstrata_sidecar.adapter.plugin",
        "class_name": "PolicyAdapter",
        "adapter_params": {
            "domain": DOMAIN,
            "identity": IDENTITY,
            "policy_dir": str(gate.policy_dir),
            "link_dir": str(gate.link_dir),
            "tier": tier,
        },
    }


def memory_module(gate: GateStandIn, memory: dict[str, Any]) -> dict[str, Any]:
    """Return the value of `--server-module` for the policy of the server's own memory."""
    pod = {name: value for name, value in adapter(gate, None)["adapter_params"].items() if name != "tier"}
    return {"module_path": "kvstrata_sidecar.adapter.memory.module", "config": pod | memory}
