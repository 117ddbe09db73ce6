"""An engine without a model that treats each prompt as vLLM's connector does: look up, load, store the rest.

Run by the interpreter that has LMCache: `python engine.py RPC_PORT HTTP_PORT CHUNK_TOKENS BYTES_PER_TOKEN`. Reads one
JSON object a line and answers each with one. A prompt is named by its chunks; equal names are equal tokens. The values
of a chunk are a number derived from its name, so that every loaded chunk can be checked.

    {"op": "serve", "salt": "…", "prompts": [[1, 2, 3], …]}   -> {"hits": [2, …], "wrong": 0}
    {"op": "read", "salt": "…", "prompts": [[1, 2, 3], …]}    -> the same, but nothing is stored
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
import uuid
from typing import Any

import torch
from lmcache.cli.commands.bench.server_bench import client, config, helpers

LOOKUP_TIMEOUT_S = 30.0
MAX_CHUNKS = 256
HEADS, PLANES, HALF_BYTES = 1, 2, 2
DISTINCT = 2039
"""Contents are whole numbers that a half float can distinguish."""


class Engine:
    """One simulated worker whose pages are as large as chunks."""

    def __init__(self, rpc_port: int, http_port: int, chunk_tokens: int, bytes_per_token: int) -> None:
        head_size = bytes_per_token // (HEADS * PLANES * HALF_BYTES)
        self._chunk_tokens = chunk_tokens
        self._client = client.ServerBenchClient(
            config.BenchConfig(
                rpc_url=f"tcp://127.0.0.1:{rpc_port}",
                http_url=f"http://127.0.0.1:{http_port}",
                mode="cpu",
                transfer_mode="engine_driven",
                tp_size=1,
                use_mla=False,
                num_tokens=chunk_tokens,
                kvcache_shape_spec=f"({PLANES},{MAX_CHUNKS},{chunk_tokens},{HEADS},{head_size}):float16:1",
                num_blocks=MAX_CHUNKS,
                block_size=chunk_tokens,
            ),
            lambda _: None,
        )
        self._client.start()
        self._rpc = self._client._require_started()

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Carry out one request."""
        global _current_salt
        _current_salt = request["salt"]
        hits, wrong = [], 0
        for chunks in request["prompts"]:
            found, bad = self._serve(chunks, stores=request["op"] == "serve")
            hits.append(found)
            wrong += bad
        return {"hits": hits, "wrong": wrong}

    def _serve(self, chunks: list[int], stores: bool) -> tuple[int, int]:
        size = self._chunk_tokens
        context = client.RequestContext(
            sequence_id=0,
            request_id=uuid.uuid4().hex,
            request_kind="prompt",
            token_ids=tuple(name for name in chunks for _ in range(size)),
            num_full_tokens=size * len(chunks),
            total_chunks=len(chunks),
            chunk_size=size,
            block_offset=0,
            num_blocks=len(chunks),
        )
        wrong = 0
        try:
            hits = self._lookup(context)
            expected = torch.tensor([1 + name % DISTINCT for name in chunks], dtype=torch.float16)
            pages = self._pages()[:, : len(chunks)]
            if hits:
                pages[:, :hits].zero_()
                if not self._client.retrieve(context, 0, hits * size).succeeded:
                    raise RuntimeError("chunks were found but could not be loaded")
                flat = pages[:, :hits].reshape(PLANES, hits, -1)
                wrong = int((flat != expected[:hits, None]).any(dim=2).any(dim=0).sum())
            if stores and hits < len(chunks):
                pages[:, hits:] = expected[hits:, None, None, None]
                stored = self._client.store(context, hits * size, (len(chunks) - hits) * size)
                if not stored.succeeded:
                    raise RuntimeError("a store failed")
            return hits, wrong
        finally:
            self._client.end_session(context)

    def _lookup(self, context: Any) -> int:
        """Return how many chunks the server has from the beginning on, however long its answer takes."""
        key = helpers._make_key(context.token_ids, context.request_id, start=0, end=context.num_full_tokens)
        self._rpc.lookup(key, 1).result(timeout=LOOKUP_TIMEOUT_S)
        give_up_at_s = time.monotonic() + LOOKUP_TIMEOUT_S
        while time.monotonic() < give_up_at_s:
            hits = self._rpc.query_prefetch_status(context.request_id).result(timeout=LOOKUP_TIMEOUT_S)
            if hits is not None:
                return int(hits)
            time.sleep(0.003)
        raise TimeoutError("the lookup was never answered")

    def _pages(self) -> Any:
        (tensor,) = self._client._workers[0].kv_caches.values()
        return tensor


helpers._MODEL_NAME = client._MODEL_NAME = f"test-model#{'f1' * 8}"

_current_salt = ""
_make_unsalted_key = helpers._make_key


def _make_salted_key(*arguments: Any, **options: Any) -> Any:
    return dataclasses.replace(_make_unsalted_key(*arguments, **options), cache_salt=_current_salt)


helpers._make_key = _make_salted_key


def main() -> None:
    """Answer requests until the input ends."""
    engine = Engine(*map(int, sys.argv[1:5]))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        try:
            answer = engine.answer(json.loads(line))
        except Exception as error:
            answer = {"error": repr(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
