"""The allow-list against the request types of the clients' packages that are installed beside the engine.

Needs vLLM for CPUs: `python tests/dataplane/install_lmcache.py --engine`, or KVSTRATA_ENGINE_PYTHON.
"""

from __future__ import annotations

import copy
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstrata_sidecar.gate.http.errors import Reason, Refusal
from kvstrata_sidecar.gate.proxy import bodies
from tests.dataplane.engine_process import engine_python

pytestmark = pytest.mark.lmcache

Request = dict[str, Any]


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    """A request for every key of the types, at every place."""
    python = engine_python()
    if python is None:
        pytest.skip("no engine: run tests/dataplane/install_lmcache.py --engine or set KVSTRATA_ENGINE_PYTHON")
    program = Path(__file__).with_name("client_types.py")
    printed = subprocess.run([str(python), str(program)], capture_output=True, check=True).stdout
    return [json.loads(line) for line in printed.splitlines()]


def place(path: list[str | int]) -> str:
    """Return a path as refusals name it."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)[1:]


def refusal(request: Request, body: Any) -> Refusal | None:
    try:
        bodies.rewrite(bodies.ENDPOINTS[request["endpoint"].encode()], copy.deepcopy(body))
    except Refusal as refused:
        return refused
    return None


def is_judged(request: Request, refused: Refusal | None) -> bool:
    """Whether a key passes, or is refused with a reason: its own, or that of a required key of an object around it."""
    if refused is None:
        return True
    named, asked = str(refused.param), place(request["path"])
    around = named.rpartition(".")[0] or named
    return refused.reason is Reason.FORBIDDEN_KEY and (asked == named or asked.startswith((f"{around}.", f"{around}[")))


def unjudged(requests: list[Request]) -> Iterator[str]:
    for request in requests:
        refused = refusal(request, request["body"])
        if not is_judged(request, refused):
            yield f"{request['endpoint']} {place(request['path'])}: {refused}"


@pytest.mark.claim("every key of the clients' request types passes or is refused with a reason")
def test_every_key_of_the_clients_types_passes_or_is_refused_with_a_reason(requests: list[Request]) -> None:
    assert {request["endpoint"].encode() for request in requests} == set(bodies.ENDPOINTS)
    assert {"web_search_options", "best_of", "container", "mcp_servers"} <= {request["path"][0] for request in requests}
    assert sorted(set(unjudged(requests))) == []


def test_a_null_is_absent_for_every_key_of_the_clients_types(requests: list[Request]) -> None:
    refused_nulls = set()
    for request in requests:
        if request["required"]:
            continue
        *steps, key = request["path"]
        body = copy.deepcopy(request["body"])
        inner = body
        for step in steps:
            inner = inner[step]
        inner[key] = None
        refused = refusal(request, body)
        if refused is not None and not (is_judged(request, refused) and refused.param != place(request["path"])):
            refused_nulls.add(f"{request['endpoint']} {place(request['path'])}: {refused}")
    assert sorted(refused_nulls) == []


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"messages": [{"role": "user", "content": "x"}], "invented": 1}, ["invented"]),
        ({"messages": [{"role": "user", "content": [{"type": "invented"}]}]}, ["messages", 0, "content", 0, "type"]),
        ({"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "x"}]}, ["tools", 0, "type"]),
    ],
)
def test_a_key_that_nobody_has_judged_is_found(body: Any, path: list[str | int]) -> None:
    assert list(unjudged([{"endpoint": "/v1/messages", "path": path, "body": body}]))
