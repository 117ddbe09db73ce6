"""A real vLLM engine on the CPU, connected to a cache server by the guarded connector."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

from e2e.cluster.ports import free_port
from e2e.engine.launch import environment, guarded
from e2e.engine.models import RANDOM, Model
from kvstrata_sidecar.connector.reset import ENGINE_RESET_PATH
from kvstrata_sidecar.upstream.resolved_identity import IDENTITY_DIRECTORY_KEY
from tests.dataplane.lmcache_server import ROOT

START_TIMEOUT_S = 1000.0
MODEL = "model"
"""The name under which engines serve whatever model they have."""

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


class EngineProcess:
    """The engine with its own prefix cache off, so that every prompt is looked up in the cache server.

    With `socket_path` it listens there instead of on a port, and reports to the gate beside it. With `prefix_caching`
    its own prefix cache is on. `flags` are further ones of vLLM's, with their values (empty: a flag alone), or other
    values of those below. Python looks for packages in `packages` first.
    """

    def __init__(
        self,
        python: Path,
        directory: Path,
        cache_port: int,
        extra: dict[str, object] | None = None,
        *,
        model: Model = RANDOM,
        flags: dict[str, str] | None = None,
        socket_path: Path | None = None,
        prefix_caching: bool = False,
        packages: Path | None = None,
    ) -> None:
        self.port = free_port()
        self._socket_path = socket_path
        self.log_file = directory / "engine.log"
        self._environment = os.environ | environment(directory)
        if packages is not None:
            self._environment["PYTHONPATH"] = f"{packages}:{self._environment['PYTHONPATH']}"
        beside = {IDENTITY_DIRECTORY_KEY: str(socket_path.parent)} if socket_path is not None else {}
        transfer = guarded(cache_port, CHUNK_TOKENS, beside | (extra or {}))
        given = {
            "--model": str(model.folder(python)),
            "--served-model-name": MODEL,
            "--host": "127.0.0.1",
            "--port": str(self.port),
            "--dtype": model.dtype,
            "--max-model-len": "2048",
            "--max-num-seqs": "8",
            "--block-size": "32",
            "--kv-transfer-config": json.dumps(transfer),
            "--middleware": "kvstrata_sidecar.connector.reset.EngineReset",
            **({"--uds": str(socket_path)} if socket_path is not None else {}),
            **(flags or {}),
        }
        caching = "--enable-prefix-caching" if prefix_caching else "--no-enable-prefix-caching"
        words = ["--enforce-eager", caching, "--enable-prompt-tokens-details", "--disable-hybrid-kv-cache-manager"]
        words += [word for flag in given.items() for word in flag if word]
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

    def forget(self) -> None:
        """Empty its own prefix cache."""
        assert self._post(ENGINE_RESET_PATH, {})["success"]

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as response:  # noqa: S310
            return json.load(response)

    def external_hits(self) -> float:
        """Return how many tokens came from the cache server so far."""
        return self.counter("vllm:external_prefix_cache_hits_total")

    def counter(self, name: str) -> float:
        """Return the sum of a metric of the engine."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=60) as response:
            lines = response.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    def stop(self) -> None:
        """End it."""
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
