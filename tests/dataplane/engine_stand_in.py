"""An engine without a model: drives a real LMCache server through LMCache's own client, with a salt.

Run by the interpreter that has LMCache: `python engine_stand_in.py RPC_PORT HTTP_PORT`. Reads one JSON object a line
and answers each with one. A `sequence` names a prompt of four chunks; its blocks hold `fill` in every element.

    {"op": "store", "sequence": 1, "salt": "…", "fill": 7}    -> {"stored": true, "ms": 3.1}
    {"op": "lookup", "sequence": 1, "salt": "…"}              -> {"hits": 4, "ms": 1.2}
    {"op": "read", "sequence": 1, "salt": "…"}                -> {"hits": 4, "values": [7.0], "ms": 4.5}
    {"op": "hold", "sequence": 1, "salt": "…"}                -> {"hits": 4, "ms": 1.2}
    {"op": "let_go", "sequence": 1, "salt": "…"}              -> {"hits": 4, "ms": 1.2}
    {"op": "lookups", "asked": [[1, "…"], [2, "…"]]}          -> {"hits": [1, 0], "ms": 2.3}
    {"op": "tokens", "sequence": 1}                           -> {"tokens": [1, 9906, …]}

`values` are the distinct elements that a retrieve put into zeroed blocks. `hold` is a lookup whose blocks stay locked
until `let_go`. `lookups` asks for the first chunk of each sequence, for all at once, and lets go what it found. A store
with `"marker": "6b76…"` fills its blocks with these bytes over and over; with `"freeze"` the process stops itself in
the middle of it, as by SIGSTOP: `"reserved"` when it has room in the server's memory and has copied nothing, `"copied"`
when it has not said so yet.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
import uuid
from typing import Any

import torch
from lmcache.cli.commands.bench.server_bench import client, config, helpers

TOKENS = 64
BLOCK_TOKENS = 16
SHAPE = f"(2,64,{BLOCK_TOKENS},4,32):float16:2"
LOOKUP_TIMEOUT_S = 30.0

helpers._MODEL_NAME = client._MODEL_NAME = f"test-model#{'f1' * 8}"
"""With a fingerprint, as the guarded connector names it."""

_current_salt = ""
_make_unsalted_key = helpers._make_key


def _make_salted_key(*arguments: Any, **options: Any) -> Any:
    return dataclasses.replace(_make_unsalted_key(*arguments, **options), cache_salt=_current_salt)


helpers._make_key = _make_salted_key


class Engine:
    """One simulated worker that is registered with the server."""

    def __init__(self, rpc_port: int, http_port: int) -> None:
        self._client = client.ServerBenchClient(
            config.BenchConfig(
                rpc_url=f"tcp://127.0.0.1:{rpc_port}",
                http_url=f"http://127.0.0.1:{http_port}",
                mode="cpu",
                transfer_mode="engine_driven",
                tp_size=1,
                use_mla=False,
                num_tokens=TOKENS,
                kvcache_shape_spec=SHAPE,
                num_blocks=64,
                block_size=BLOCK_TOKENS,
            ),
            lambda _: None,
        )
        self._client.start()
        self._rpc = self._client._require_started()
        self._held: dict[tuple[int, str], tuple[Any, int]] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Carry out one request."""
        global _current_salt
        _current_salt = request.get("salt", "")
        if request["op"] == "tokens":
            return {"tokens": helpers._build_token_ids(request["sequence"], TOKENS)}
        if request["op"] == "lookups":
            return self._lookups(request["asked"])
        if request["op"] in ("hold", "let_go"):
            return self._hold(request)
        context = self._client.create_request(request["sequence"], uuid.uuid4().hex, "test")
        started_s = time.monotonic()
        try:
            if request["op"] == "store":
                if "freeze" in request:
                    self._freeze_once(request["freeze"])
                if "marker" in request:
                    self._mark(context, bytes.fromhex(request["marker"]))
                else:
                    self._fill(context, request["fill"])
                stored = self._client.store(context, 0, context.num_full_tokens).succeeded
                return {"stored": stored, "ms": _ms_since(started_s)}
            hits = self._lookup(context)
            answer: dict[str, Any] = {"hits": hits, "ms": _ms_since(started_s)}
            if request["op"] == "lookup":
                self._free(context, hits)
            elif hits:
                self._fill(context, 0)
                self._client.retrieve(context, 0, hits * BLOCK_TOKENS)
                answer["values"] = self._values(context, hits)
            return answer
        finally:
            self._client.end_session(context)

    def _hold(self, request: dict[str, Any]) -> dict[str, Any]:
        started_s = time.monotonic()
        held = request["sequence"], request["salt"]
        if request["op"] == "hold":
            context = self._client.create_request(request["sequence"], uuid.uuid4().hex, "test")
            hits = self._lookup(context)
            self._held[held] = context, hits
        else:
            context, hits = self._held.pop(held)
            self._free(context, hits)
            self._client.end_session(context)
        return {"hits": hits, "ms": _ms_since(started_s)}

    def _lookups(self, asked: list[tuple[int, str]]) -> dict[str, Any]:
        """Look many sequences up at once, each under a salt of its own."""
        started_s = time.monotonic()
        keys = [self._first_chunk(sequence, salt) for sequence, salt in asked]
        for sent in [self._rpc.lookup(key, 1) for key in keys]:
            sent.result(timeout=LOOKUP_TIMEOUT_S)
        hits = [self._found(key.request_id) for key in keys]
        held = [self._rpc.free_lookup_locks(key, 1) for key, found in zip(keys, hits, strict=True) if found]
        for ended in [*held, *(self._rpc.end_session(key.request_id) for key in keys)]:
            ended.result(timeout=LOOKUP_TIMEOUT_S)
        return {"hits": hits, "ms": _ms_since(started_s)}

    def _first_chunk(self, sequence: int, salt: str) -> Any:
        global _current_salt
        _current_salt = salt
        tokens = helpers._build_token_ids(sequence, TOKENS)
        return helpers._make_key(tokens, uuid.uuid4().hex, start=0, end=BLOCK_TOKENS)

    def _found(self, request_id: str) -> int:
        hits = self._rpc.wait_prefetch_status(request_id, LOOKUP_TIMEOUT_S).result(timeout=2 * LOOKUP_TIMEOUT_S)
        if hits is None:
            raise TimeoutError("the lookup was never answered")
        return int(hits)

    def _freeze_once(self, when: str) -> None:
        """Have the next store stop this process when it is so far."""
        transfer = self._client._workers[0].transfer_context._engine_driven_context
        step = {"reserved": "prepare_store", "copied": "commit_store"}[when]
        carried_out = getattr(transfer, step)

        def frozen(*arguments: Any) -> Any:
            setattr(transfer, step, carried_out)
            if when == "copied":
                os.kill(os.getpid(), signal.SIGSTOP)
            result = carried_out(*arguments)
            if when == "reserved":
                os.kill(os.getpid(), signal.SIGSTOP)
            return result

        setattr(transfer, step, frozen)

    def _lookup(self, context: Any) -> int:
        """Return how many chunks the server has, however long it takes to say so."""
        key = helpers._make_key(context.token_ids, context.request_id, start=0, end=context.num_full_tokens)
        self._rpc.lookup(key, 1).result(timeout=LOOKUP_TIMEOUT_S)
        give_up_at_s = time.monotonic() + LOOKUP_TIMEOUT_S
        while time.monotonic() < give_up_at_s:
            hits = self._rpc.query_prefetch_status(context.request_id).result(timeout=LOOKUP_TIMEOUT_S)
            if hits is not None:
                return int(hits)
            time.sleep(0.001)
        raise TimeoutError("the lookup was never answered")

    def _free(self, context: Any, hits: int) -> None:
        if hits:
            key = helpers._make_key(context.token_ids, context.request_id, start=0, end=hits * BLOCK_TOKENS)
            self._rpc.free_lookup_locks(key, 1).result(timeout=LOOKUP_TIMEOUT_S)

    def _fill(self, context: Any, value: float) -> None:
        for tensor in self._tensors():
            tensor[:, context.block_offset : context.block_offset + context.num_blocks].fill_(value)

    def _mark(self, context: Any, marker: bytes) -> None:
        for tensor in self._tensors():
            blocks = tensor[:, context.block_offset : context.block_offset + context.num_blocks]
            content = (marker * (blocks.nbytes // len(marker) + 1))[: blocks.nbytes]
            blocks.copy_(torch.frombuffer(bytearray(content), dtype=blocks.dtype).view(blocks.shape))

    def _values(self, context: Any, chunks: int) -> list[float]:
        found: set[float] = set()
        for tensor in self._tensors():
            blocks = tensor[:, context.block_offset : context.block_offset + chunks]
            found.update(blocks.unique().tolist())
        return sorted(found)

    def _tensors(self) -> Any:
        return self._client._workers[0].kv_caches.values()


def _ms_since(started_s: float) -> float:
    return round((time.monotonic() - started_s) * 1000, 2)


def main() -> None:
    """Answer requests until the input ends."""
    engine = Engine(int(sys.argv[1]), int(sys.argv[2]))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        try:
            answer = engine.answer(json.loads(line))
        except Exception as error:
            answer = {"error": repr(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
