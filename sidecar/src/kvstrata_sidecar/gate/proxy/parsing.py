"""From a caller's body to the engine's: parse, check, re-serialise. Also the program of a parser process.

A parser process serves one gate over an inherited socket, one body at a time, and ends when that socket is closed. It
has low priority and bounds of memory and CPU time, because its input is hostile.
"""

from __future__ import annotations

import os
import resource
import socket
import struct
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import orjson

from kvstrata_sidecar.gate.http.errors import Reason, Refusal, bad_request
from kvstrata_sidecar.gate.proxy import bodies, strict_json

REQUEST = struct.Struct("!IB")
"""Head of a request to a parser process: bytes of the body that follows, index of its endpoint."""

REPLY = struct.Struct("!II")
"""Head of a reply: bytes of the JSON object with its facts, bytes of the payload. Both follow."""

ENDPOINTS = tuple(bodies.ENDPOINTS.values())
MAX_BODY_CPU_S = 5
"""CPU time for one body, after which its process is killed. The worst bodies of 8 MiB take 0.5 s."""

MAX_IDLE_BYTES = 40 * 1024 * 1024
"""A process that keeps more memory than this after a body is replaced: the next body may need it."""


@dataclass(frozen=True, slots=True)
class ParsedBody:
    """A checked body: the engine's JSON object without `cache_salt`, which is decided when the request is sent."""

    payload: bytes | bytearray
    shape: bodies.Shape

    def seal(self, salt: str | None) -> bytearray:
        """Return the body for the engine, with None for one that computes no tokens. Call it once: copying a large
        payload would stop the loop for 8 ms."""
        body = self.payload if isinstance(self.payload, bytearray) else bytearray(self.payload)
        if salt is not None:
            body[-1:] = b',"cache_salt":%b}' % orjson.dumps(salt)
        return body


def parse(endpoint: bodies.Endpoint, model: str, data: bytes | bytearray) -> ParsedBody:
    """Raises Refusal for a body that the gate does not accept, or for another model than `model`."""
    body = strict_json.parse_object(data)
    require_model(body.get("model"), model)
    fields, shape = bodies.rewrite(endpoint, body)
    return ParsedBody(strict_json.emit({**fields, "model": model}), shape)


def require_model(asked: object, model: str) -> None:
    """Raises Refusal (404) unless `asked` is `model` or None."""
    if asked is not None and asked != model:
        named = f"the model {asked[:128]!r}" if isinstance(asked, str) else "a model that is no text"
        raise Refusal(
            404, Reason.MODEL, f"{named} is not served here: use {model!r}, or leave `model` out",
            param="model", code="model_not_found",
        )  # fmt: skip


def parsed_reply(facts: Mapping[str, Any], payload: bytearray) -> ParsedBody:
    """Return the body of a parser's reply. Raises Refusal if the parser refused it."""
    if refusal := facts.get("refusal"):
        raise Refusal(**refusal | {"reason": Reason(refusal["reason"])})
    return ParsedBody(payload, bodies.Shape(**facts["shape"]))


def _answer(endpoint: bodies.Endpoint, model: str, data: bytearray) -> tuple[dict[str, Any], bytes | bytearray]:
    try:
        parsed = parse(endpoint, model, data)
    except MemoryError:
        return _refused(bad_request(Reason.TOO_LARGE, "the body takes too much memory to parse")), b""
    except Refusal as refusal:  # no other variable: with its traceback it keeps the body in memory
        return _refused(refusal), b""
    return {"shape": asdict(parsed.shape)}, parsed.payload


def _refused(refusal: Refusal) -> dict[str, Any]:
    return {"refusal": {name: getattr(refusal, name) for name in ("status", "reason", "message", "param", "code")}}


def _serve(gate: socket.socket, model: str) -> None:
    begun_s = 0.0  # the first body pays for the start of the process
    while True:
        length, index = REQUEST.unpack(_receive(gate, REQUEST.size))
        data = _receive(gate, length)
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + 1 + MAX_BODY_CPU_S, hard))
        facts, payload = _answer(ENDPOINTS[index], model, data)
        del data
        facts["cpu_s"] = time.process_time() - begun_s
        facts["used_up"] = _resident_bytes() - len(payload) > MAX_IDLE_BYTES
        begun_s = time.process_time()
        encoded = orjson.dumps(facts)
        gate.sendall(REPLY.pack(len(encoded), len(payload)) + encoded)
        gate.sendall(payload)
        del payload


def _resident_bytes() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _receive(gate: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        received = gate.recv_into(view)
        if not received:
            sys.exit(0)
        view = view[received:]
    return data


def main() -> None:
    """Serve the gate at the other end of a socket. Arguments: its descriptor, the model, the bound of memory."""
    descriptor, model, memory_bytes = sys.argv[1:]
    os.nice(10)  # a tenth of the event loop's weight when both want the same core
    resource.setrlimit(resource.RLIMIT_DATA, (int(memory_bytes), int(memory_bytes)))
    with socket.socket(fileno=int(descriptor)) as gate:
        _serve(gate, model)


if __name__ == "__main__":
    main()
