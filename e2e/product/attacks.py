"""Ways in which a tenant might try to read another's blocks, with the answer that the gate must give."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

Headers = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Attack:
    """One attempt. `body` gets model, prompt and the victim's salt; `status` is the answer that it must get."""

    name: str
    status: int
    body: Callable[[str, str, str], bytes]
    path: str = "/v1/completions"
    headers: Headers = field(default_factory=dict)

    def build(self, model: str, prompt: str, salt: str) -> tuple[str, bytes, Headers]:
        """Return path, body and headers."""
        return self.path, self.body(model, prompt, salt), self.headers


def _plain(model: str, prompt: str, **more: object) -> dict[str, object]:
    return {"model": model, "prompt": prompt, "max_tokens": 1, **more}


def _json(model: str, prompt: str, **more: object) -> bytes:
    return json.dumps(_plain(model, prompt, **more)).encode()


def _appended(model: str, prompt: str, raw: str) -> bytes:
    """Return a body with `raw` as its last member, as no JSON library would write it."""
    return json.dumps(_plain(model, prompt)).encode()[:-1] + b"," + raw.encode() + b"}"


ATTACKS = (
    Attack("acme's salt", 400, lambda m, p, s: _json(m, p, cache_salt=s)),
    Attack("the salt twice", 400, lambda m, p, s: _appended(m, p, f'"cache_salt":"x","cache_salt":"{s}"')),
    Attack("the salt by an escaped key", 400, lambda m, p, s: _appended(m, p, f'"cache\\u005fsalt":"{s}"')),
    Attack("the prompt twice", 400, lambda m, p, _: _appended(m, p, f'"prompt":{json.dumps(p)}')),
    Attack("a body in UTF-16", 400, lambda m, p, s: json.dumps(_plain(m, p, cache_salt=s)).encode("utf-16")),
    Attack("a byte order mark", 400, lambda m, p, _: b"\xef\xbb\xbf" + _json(m, p)),
    Attack(
        "its own kv_transfer_params",
        400,
        lambda m, p, s: _json(m, p, kv_transfer_params={"do_remote_prefill": True, "s": s}),
    ),
    Attack("vllm_xargs", 400, lambda m, p, s: _json(m, p, vllm_xargs={"cache_salt": s})),
    Attack("a request id of acme's", 400, lambda m, p, _: _json(m, p, request_id="acme-1")),
    Attack("the pooling endpoint", 404, lambda m, p, s: _json(m, p, cache_salt=s), "/pooling"),
    Attack("the invocations endpoint", 404, lambda m, p, s: _json(m, p, cache_salt=s), "/invocations"),
    Attack("the responses endpoint", 404, lambda m, p, s: _json(m, p, cache_salt=s), "/v1/responses"),
    Attack("another model", 404, lambda _, p, __: _json("acme-private", p)),
    Attack(
        "headers of the engine",
        200,
        lambda m, p, _: _json(m, p),
        headers={"X-Request-Id": "acme-1", "X-Session-Id": "a"},
    ),
)
