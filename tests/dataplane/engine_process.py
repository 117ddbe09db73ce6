"""A real vLLM engine on the CPU with a tiny model, connected to a cache server by the guarded connector."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.request
import zlib
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from e2e.cluster.ports import free_port
from tests.dataplane.lmcache_server import ROOT

MAKER = ROOT / "e2e/images/engine-cpu/make_tiny_llama.py"
MADE = ROOT / ".local/engine"
"""Models, and what vLLM finds out about their classes: a third of what a start costs otherwise."""

START_TIMEOUT_S = 600.0
MODEL = "tiny"
CHUNK_TOKENS = 64
"""The chunk size of the cache server that it is told to expect."""

PATIENT: dict[str, object] = {
    "lmcache.mp.mq_timeout": 60.0, "lmcache.mp.heartbeat_interval": 10.0, "kvstrata.lookup_patience_s": 60.0,
}  # fmt: skip
"""Time limits with which a cache server that lives counts as well on a busy machine, too."""

LOST = ("The cache server does not answer; the engine starts without it", "LMCache server is unhealthy")
FOUND = "resuming normal operation"
"""What the guard and LMCache say when the server is away, and when it is back."""


def engine_python() -> Path | None:
    """Return the interpreter that has vLLM for CPUs and LMCache, None if there is none (see test_engine_guard.py)."""
    named = os.environ.get("KVSTRATA_ENGINE_PYTHON")
    candidate = Path(named) if named else ROOT / ".local/venv-engine/bin/python"
    return candidate if candidate.exists() else None


def _model(python: Path, environment: dict[str, str], *options: str) -> Path:
    """Return the folder of a tiny model, which is made once."""
    made = MADE / f"model-{zlib.crc32(MAKER.read_bytes() + ' '.join(options).encode()):08x}"
    if not made.exists():
        MADE.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=MADE) as folder:
            making = [str(python), str(MAKER), f"{folder}/model", *options]
            subprocess.run(making, env=environment, check=True, capture_output=True)
            with suppress(OSError):  # another worker was faster
                Path(folder, "model").rename(made)
    return made


class EngineProcess:
    """The engine with its own prefix cache off, so that every prompt is looked up in the cache server.

    With `socket_path` it listens there instead of on a port, and its model's tokenizer merges. With `prefix_caching`
    its own prefix cache is on.
    """

    def __init__(
        self,
        python: Path,
        directory: Path,
        cache_port: int,
        extra: dict[str, object] | None = None,
        *,
        socket_path: Path | None = None,
        prefix_caching: bool = False,
    ) -> None:
        self.port = free_port()
        self._socket_path = socket_path
        self.log_file = directory / "engine.log"
        self._environment = os.environ | {
            "PYTHONPATH": f"{ROOT}/operator/src:{ROOT}/sidecar/src",
            "PYTHONHASHSEED": "0",
            "HOME": str(directory),
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "LMCACHE_TRACK_USAGE": "false",
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "TORCHDYNAMO_DISABLE": "1",
            "VLLM_CACHE_ROOT": str(MADE / "vllm-cache"),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
        model = _model(python, self._environment, *(["--merges"] if socket_path is not None else []))
        timing = {"lmcache.mp.mq_timeout": 3.0, "lmcache.mp.heartbeat_interval": 1.0}
        transfer = {
            "kv_connector": "GuardedConnector",
            "kv_connector_module_path": "kvstrata_sidecar.connector.guard",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": cache_port,
                "kvstrata.chunk_tokens": CHUNK_TOKENS,
                **timing,
                **(extra or {}),
            },
        }
        flags = {
            "--model": str(model),
            "--served-model-name": MODEL,
            "--host": "127.0.0.1",
            "--port": str(self.port),
            "--dtype": "bfloat16",
            "--max-model-len": "2048",
            "--max-num-seqs": "8",
            "--block-size": "32",
            "--kv-transfer-config": json.dumps(transfer),
            "--middleware": "kvstrata_sidecar.connector.reset.EngineReset",
        }
        if socket_path is not None:
            flags["--uds"] = str(socket_path)
        caching = "--enable-prefix-caching" if prefix_caching else "--no-enable-prefix-caching"
        words = ["--enforce-eager", caching, "--enable-prompt-tokens-details"]
        words += [word for flag in flags.items() for word in flag]
        with self.log_file.open("wb") as log:
            self._process = subprocess.Popen(
                [str(python), "-m", "vllm.entrypoints.openai.api_server", *words],
                env=self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def wait_until_ready(self) -> None:
        """Wait until it answers."""
        give_up_at_s = time.monotonic() + START_TIMEOUT_S
        while True:
            assert self._process.poll() is None, self.log_file.read_text()[-6000:]
            assert time.monotonic() < give_up_at_s, self.log_file.read_text()[-6000:]
            try:
                if self._is_healthy():
                    return
            except OSError:
                pass
            time.sleep(0.5)

    def wait_until_connected(self) -> None:
        """Wait until it is ready and uses its cache server, which was late to answer if the machine is busy."""
        self.wait_until_ready()
        give_up_at_s = time.monotonic() + START_TIMEOUT_S
        while sum(map((said := self.log_file.read_text()).count, LOST)) > said.count(FOUND):
            assert time.monotonic() < give_up_at_s, said[-6000:]
            time.sleep(0.5)

    def _is_healthy(self) -> bool:
        if self._socket_path is None:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                return True
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(5)
            connection.connect(str(self._socket_path))
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: engine\r\nConnection: close\r\n\r\n")
            return connection.recv(64).startswith(b"HTTP/1.1 200")

    def complete(self, prompt: str, salt: str) -> float:
        """Have a few tokens generated; return the seconds that it took. Raises OSError if it fails."""
        started_s = time.monotonic()
        assert self.completion(prompt=prompt, cache_salt=salt, max_tokens=4)["choices"]
        return time.monotonic() - started_s

    def completion(self, **body: Any) -> dict[str, Any]:
        """Return the engine's answer to a completion request, greedily sampled. Raises OSError if it fails."""
        answer: dict[str, Any] = self._post("/v1/completions", {"model": MODEL, "temperature": 0} | body)
        return answer

    def tokens(self, prompt: str) -> list[int]:
        """Return a prompt's token ids, as a completion has them."""
        return [int(token) for token in self._post("/tokenize", {"model": MODEL, "prompt": prompt})["tokens"]]

    def logprobs(self, prompt: str, salt: str, top: int = 5) -> list[dict[str, float]]:
        """Return for each of a few generated tokens the likeliest ones with their log probabilities."""
        choice = self.completion(prompt=prompt, cache_salt=salt, max_tokens=4, logprobs=top)["choices"][0]
        found: list[dict[str, float]] = choice["logprobs"]["top_logprobs"]
        return found

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:  # noqa: S310
            return json.load(response)

    def external_hits(self) -> float:
        """Return how many tokens came from the cache server so far."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=60) as response:
            lines = response.read().decode().splitlines()
        return sum(
            float(line.split()[-1]) for line in lines if line.startswith("vllm:external_prefix_cache_hits_total")
        )

    def stop(self) -> None:
        """End it."""
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
