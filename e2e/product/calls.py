"""Calls as a tenant makes them: HTTPS to one pod's gate, checked against the model's own authority."""

from __future__ import annotations

import base64
import http.client
import json
import socket
import ssl
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .kubectl import LIMIT_S, Kubectl

HTTPS_PORT = 8443
HITS = "vllm:external_prefix_cache_hits_total"
LOCAL_HITS = "vllm:prefix_cache_hits_total"

_READ_METRICS = """
import socket, sys
c = socket.socket(socket.AF_UNIX); c.settimeout(60); c.connect('/run/kvstrata/engine/engine.sock')
c.sendall(b'GET /metrics HTTP/1.0\\r\\nHost: engine\\r\\n\\r\\n')
while (d := c.recv(65536)): sys.stdout.buffer.write(d)
"""


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer of a gate."""

    status: int
    body: dict[str, Any]
    took_s: float

    @property
    def error(self) -> str:
        """The error's message, or nothing."""
        return str((self.body.get("error") or {}).get("message", ""))

    @property
    def text(self) -> str:
        """The text of a completion."""
        return str(self.body["choices"][0]["text"])

    @property
    def prompt_tokens(self) -> int:
        """How many tokens the prompt has."""
        return int(self.body["usage"]["prompt_tokens"])

    @property
    def cached_tokens(self) -> int:
        """How many tokens of the prompt the engine found instead of computing them, by its own account."""
        details = (self.body.get("usage") or {}).get("prompt_tokens_details") or {}
        return int(details.get("cached_tokens") or 0)


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """A streamed answer to a chat, with the engine's own count of tokens and the seconds until its first text came."""

    text: str
    prompt_tokens: int
    cached_tokens: int
    first_text_s: float


@dataclass(frozen=True, slots=True)
class Hits:
    """Tokens that an engine did not compute: found in its own memory, or in the tiers behind it."""

    local: int
    external: int

    def __sub__(self, other: Hits) -> Hits:
        return Hits(self.local - other.local, self.external - other.external)


class Replica:
    """One pod of a model, reached through its gate."""

    def __init__(self, kubectl: Kubectl, namespace: str, model: str, pod: str, port: int, tls: ssl.SSLContext) -> None:
        self.pod, self.port = pod, port
        self._kubectl, self._namespace, self._model, self._tls = kubectl, namespace, model, tls

    def complete(self, key: str, prompt: str, **fields: Any) -> Answer:
        """Ask for a short completion of `prompt` with an API key; `fields` are further keys of the body."""
        body = {"model": self._model, "prompt": prompt, "max_tokens": 2, "temperature": 0, **fields}
        return self.post("/v1/completions", json.dumps(body).encode(), key)

    def ask(self, key: str, prompt: str, **fields: Any) -> Answer:
        """Ask as `complete` does. Raises AssertionError if there is no answer."""
        answer = self.complete(key, prompt, **fields)
        assert answer.status == 200, f"{self.pod} answered {answer.status}: {answer.body}"
        return answer

    def found(self, key: str, prompt: str) -> int:
        """Ask for a prompt and return how many of its tokens the engine found cached."""
        return self.ask(key, prompt).cached_tokens

    def found_by_place(self, key: str, prompt: str) -> Hits:
        """Ask for a prompt and return where its cached tokens were."""
        before = self.hits()
        return self.placed(self.ask(key, prompt).cached_tokens, before)

    def placed(self, cached_tokens: int, before: Hits) -> Hits:
        """Return where an answer's cached tokens were, by the engine's counters now and `before` its request.

        The counters alone include other requests meanwhile: pools are warmed, and isolation is probed.
        """
        external = min(cached_tokens, (self.hits() - before).external)
        return Hits(cached_tokens - external, external)

    def chat(self, key: str, *messages: Mapping[str, str], max_tokens: int = 24) -> ChatAnswer:
        """Ask for the answer to a chat, streamed, which the model's chat template renders."""
        body = {
            "model": self._model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began_s, first_text_s, text, usage = time.monotonic(), 0.0, "", dict[str, Any]()
        for line in self.stream("/v1/chat/completions", json.dumps(body).encode(), key):
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
            first_text_s = first_text_s or (time.monotonic() - began_s if text else 0.0)
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return ChatAnswer(text.strip(), int(usage["prompt_tokens"]), int(cached), first_text_s)

    def post(self, path: str, body: bytes, key: str | None, headers: Mapping[str, str] | None = None) -> Answer:
        """Send raw bytes."""
        started = time.monotonic()
        connection = self._connect()
        sent = {"Content-Type": "application/json", **(headers or {})}
        if key is not None:
            sent["Authorization"] = f"Bearer {key}"
        try:
            connection.request("POST", path, body, sent)
            response = connection.getresponse()
            raw = response.read()
        finally:
            connection.close()
        try:
            decoded = json.loads(raw)
        except ValueError:
            decoded = {"raw": raw.decode("utf-8", "replace")}
        return Answer(response.status, decoded, time.monotonic() - started)

    def stream(self, path: str, body: bytes, key: str) -> Generator[bytes]:
        """Send raw bytes and yield the lines of the answer as they come; closing the iterator hangs up."""
        connection = self._connect()
        try:
            connection.request(
                "POST", path, body, {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
            )
            response = connection.getresponse()
            if response.status != 200:
                raise AssertionError(f"{self.pod} answered {response.status}: {response.read()!r}")
            while line := response.readline():
                if line.strip():
                    yield line
        finally:
            connection.close()

    def hits(self) -> Hits:
        """Return the engine's own counters of tokens that it did not compute."""
        return Hits(int(self.metric(LOCAL_HITS)), int(self.metric(HITS)))

    def metric(self, name: str) -> float:
        """Return the sum of one of the engine's own metrics."""
        text = self._kubectl.exec(self.pod, self._namespace, "engine", "python3", "-S", "-c", _READ_METRICS)
        found = (line.partition("{") for line in text.splitlines())
        return sum(float(rest.rpartition(" ")[2]) for metric, _, rest in found if metric == name)

    def _connect(self) -> _Connection:
        return _Connection(self.port, self._tls, f"kvs-{self._model}.{self._namespace}.svc")


@contextmanager
def replica(kubectl: Kubectl, namespace: str, model: str, pod: str) -> Iterator[Replica]:
    """Open a way to one pod's gate while the block runs."""
    secret = kubectl.get("secret", f"kvs-{model}-gate-tls", namespace)
    authority = base64.b64decode(secret["data"]["ca.crt"]).decode()
    tls = ssl.create_default_context(cadata=authority)
    with kubectl.forward(namespace, f"pod/{pod}", HTTPS_PORT) as port:
        yield Replica(kubectl, namespace, model, pod, port, tls)


class _Connection(http.client.HTTPSConnection):
    """A connection to a forwarded port whose certificate is checked against the Service's name."""

    def __init__(self, port: int, tls: ssl.SSLContext, server_name: str) -> None:
        super().__init__("127.0.0.1", port, context=tls, timeout=LIMIT_S)
        self._tls, self._server_name = tls, server_name

    def connect(self) -> None:
        """Connect and check the certificate."""
        plain = socket.create_connection((self.host, self.port), self.timeout)
        self.sock = self._tls.wrap_socket(plain, server_hostname=self._server_name)
