"""The gate before the real engine: streams, chat, messages, cancellation, metrics by tenant."""

from __future__ import annotations

import json
import re
import socket
import time

import pytest

from e2e.product.chapters import ACME_KEY, MODEL, Stage, fresh_prompt
from e2e.product.install import DEMO_NAMESPACE
from e2e.product.kubectl import Kubectl, wait_until

pytestmark = pytest.mark.cluster


def test_a_stream_arrives_in_pieces_and_ends_as_openai_says(stage: Stage) -> None:
    pieces = []
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 16, "stream": True}
    for line in stage.first.stream("/v1/chat/completions", json.dumps(body).encode(), ACME_KEY):
        pieces.append(line)
    events = [piece for piece in pieces if piece.startswith(b"data: ")]
    assert len(events) > 4
    assert events[-1].strip() == b"data: [DONE]"
    first = json.loads(events[0][6:])
    assert first["object"] == "chat.completion.chunk"


def test_chat_and_messages_are_served(stage: Stage) -> None:
    messages = [{"role": "user", "content": "hello"}]
    chat = stage.first.post(
        "/v1/chat/completions", json.dumps({"model": MODEL, "messages": messages, "max_tokens": 4}).encode(), ACME_KEY
    )
    assert chat.status == 200
    assert chat.body["object"] == "chat.completion"
    anthropic = stage.first.post(
        "/v1/messages", json.dumps({"model": MODEL, "messages": messages, "max_tokens": 4}).encode(), ACME_KEY
    )
    assert anthropic.status == 200, anthropic.body
    assert anthropic.body["type"] == "message"


def test_a_caller_that_goes_away_frees_the_engine(near: Stage) -> None:
    # Without the API server between: asking through it takes as long as an engine needs for the whole answer.
    body = json.dumps(
        {
            "model": MODEL,
            "prompt": fresh_prompt("cancel"),
            "max_tokens": 1000,
            "ignore_eos": True,
            "n": 8,
            "stream": True,
        }
    )
    stream = near.first.stream("/v1/completions", body.encode(), ACME_KEY)
    next(stream)
    wait_until("the engine runs it", lambda: _running(near) >= 1, 10)
    stream.close()
    wait_until("the engine runs nothing any more", lambda: _running(near) == 0, 10)


def test_metrics_tell_a_tenants_requests_tokens_and_cached_tokens(stage: Stage, kubectl: Kubectl) -> None:
    prompt = fresh_prompt("metrics")
    stage.ask(stage.first, ACME_KEY, prompt)
    before = _gate_metrics(kubectl, stage.first.pod)
    stage.ask(stage.first, ACME_KEY, prompt)
    after = _gate_metrics(kubectl, stage.first.pod)
    grown = {name: after[name] - before.get(name, 0.0) for name in after if 'tenant="acme"' in name}
    assert sum(v for n, v in grown.items() if "requests_total" in n) == 1
    assert sum(v for n, v in grown.items() if "prompt_tokens_total" in n) >= len(prompt)
    assert not any('tenant="globex"' in name and after[name] != before.get(name, 0.0) for name in after)


def test_a_slow_caller_is_cut_off_and_serves_nobody_else_worse(stage: Stage) -> None:
    with socket.create_connection(("127.0.0.1", stage.first.port)) as idle:
        idle.sendall(b"\x16\x03")  # half a TLS record, and then nothing
        started = time.monotonic()
        answer = stage.first.complete(ACME_KEY, "hello")
        assert answer.status == 200
        assert time.monotonic() - started < 10


def _running(stage: Stage) -> float:
    return stage.first.metric("vllm:num_requests_running")


def _gate_metrics(kubectl: Kubectl, pod: str) -> dict[str, float]:
    code = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8081/metrics', timeout=5).read().decode())"
    text = kubectl.exec(pod, DEMO_NAMESPACE, "gate", "python3", "-c", code)
    return {name: float(value) for name, value in re.findall(r"^(\S+) ([0-9.eE+-]+)$", text, re.M)}
