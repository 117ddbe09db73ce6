"""The gate before the real engine: streams, chat, messages, cancellation, metrics by tenant."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Generator
from contextlib import closing

import pytest

from e2e.product.chapters import ACME_KEY, MODEL, Stage
from e2e.product.install import DEMO_NAMESPACE
from e2e.product.kubectl import Kubectl, wait_until
from e2e.product.prompts import PROMPT_TOKENS, WHOLE_CHUNKS, fresh_prompt

pytestmark = pytest.mark.cluster

ANSWER_TOKENS, SEQUENCES = 250, 8
"""An answer that keeps the engine busy for about half a minute."""

GENERATED = "vllm:generation_tokens_total"
PROMPT_TOKENS_COUNTED = 'kvstrata_gate_prompt_tokens_total{tenant="acme"}'


@pytest.mark.claim("a stream arrives in pieces")
def test_a_stream_arrives_in_pieces_and_ends_as_openai_says(stage: Stage, near: Stage) -> None:
    pieces = []
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 16, "stream": True}
    for line in stage.first.stream("/v1/chat/completions", json.dumps(body).encode(), ACME_KEY):
        pieces.append(line)
    events = [piece for piece in pieces if piece.startswith(b"data: ")]
    assert len(events) > 4
    assert events[-1].strip() == b"data: [DONE]"
    first = json.loads(events[0][6:])
    assert first["object"] == "chat.completion.chunk"
    with closing(_long_stream(near)):
        # Not at once: the engine counts its requests a moment after it has answered.
        wait_until("it runs still when its first piece has come", lambda: _running(near) >= 1, timeout_s=30)
    wait_until("the engine runs nothing any more", lambda: _running(near) == 0)


@pytest.mark.claim("chat and messages are answered")
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
    with closing(_long_stream(near)):
        wait_until("the engine runs it", lambda: _running(near) >= 1)
        computed, gone_at = near.first.metric(GENERATED), time.monotonic()
    wait_until("the engine runs nothing any more", lambda: _running(near) == 0)
    freed_s = time.monotonic() - gone_at
    computed = near.first.metric(GENERATED) - computed
    assert computed < SEQUENCES * ANSWER_TOKENS / 2, f"{computed:.0f} tokens were computed without a caller"
    # The control: the engine needs longer than that for the whole answer, so it did not just come to its end.
    with closing(_long_stream(near)) as stream:
        began_at = time.monotonic()
        for _ in stream:
            if time.monotonic() - began_at > freed_s:
                break
        assert _running(near) >= 1, f"the whole answer takes less than {freed_s:.1f} s, so nothing was shown"


def test_metrics_tell_a_tenants_requests_tokens_and_cached_tokens(stage: Stage, kubectl: Kubectl) -> None:
    prompt, pod = fresh_prompt(), stage.first.pod
    began = _gate_metrics(kubectl, pod)

    def counted(requests: int) -> dict[str, float] | None:
        """The metrics once so many requests and their tokens are counted, which is not before they are answered."""
        page = _gate_metrics(kubectl, pod)
        tokens = page.get(PROMPT_TOKENS_COUNTED, 0.0) - began.get(PROMPT_TOKENS_COUNTED, 0.0)
        whole = _asked_by_acme(page) - _asked_by_acme(began) >= requests and tokens >= requests * PROMPT_TOKENS
        return page if whole else None

    stage.first.ask(ACME_KEY, prompt)
    before = wait_until("the first request is counted", lambda: counted(1))
    stage.first.ask(ACME_KEY, prompt)
    after = wait_until("the second request is counted", lambda: counted(2))
    grown = {name: after[name] - before.get(name, 0.0) for name in after if 'tenant="acme"' in name}
    assert _asked_by_acme(grown) == 1
    assert grown[PROMPT_TOKENS_COUNTED] == PROMPT_TOKENS
    cached = grown['kvstrata_gate_cached_prompt_tokens_total{tenant="acme"}']
    assert WHOLE_CHUNKS <= cached < PROMPT_TOKENS, "all whole chunks of a prompt that was asked before are cached"
    assert not any('tenant="globex"' in name and after[name] != before.get(name, 0.0) for name in after)


def test_a_slow_caller_is_cut_off_and_serves_nobody_else_worse(stage: Stage) -> None:
    with socket.create_connection(("127.0.0.1", stage.first.port)) as idle:
        idle.sendall(b"\x16\x03")  # half a TLS record, and then nothing
        assert stage.first.ask(ACME_KEY, "hello").took_s < 10


def _long_stream(stage: Stage) -> Generator[bytes]:
    """Ask the first pod for an answer that takes its engine long; return when the first token has come."""
    body = {
        "model": MODEL,
        "prompt": fresh_prompt(),
        "max_tokens": ANSWER_TOKENS,
        "ignore_eos": True,
        "n": SEQUENCES,
        "stream": True,
    }
    stream = stage.first.stream("/v1/completions", json.dumps(body).encode(), ACME_KEY)
    next(stream)
    return stream


def _running(stage: Stage) -> float:
    return stage.first.metric("vllm:num_requests_running")


def _asked_by_acme(metrics: dict[str, float]) -> float:
    return sum(value for name, value in metrics.items() if "requests_total" in name and 'tenant="acme"' in name)


def _gate_metrics(kubectl: Kubectl, pod: str) -> dict[str, float]:
    code = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8081/metrics', timeout=60).read().decode())"
    text = kubectl.exec(pod, DEMO_NAMESPACE, "gate", "python3", "-c", code)
    return {name: float(value) for name, value in re.findall(r"^(\S+) ([0-9.eE+-]+)$", text, re.M)}
