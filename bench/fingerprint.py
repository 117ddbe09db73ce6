"""`fingerprint`: cost of the fingerprint that an engine computes before its first lookup.

A real engine starts with SmolLM2 and logs time and bytes of its fingerprint. For a large model the files are sparse,
with the headers of Llama 3.1 70B: the kernel counts the bytes that are read, and a hole takes no time of a disk.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from bench.machine import Busyness
from bench.result import OTHER_LOAD, Figure, Result
from bench.sharing.stand import engine_python
from e2e.cluster.ports import free_port
from e2e.cluster.progress import ClusterError, Progress
from e2e.engine.models import SMOLLM2
from kvstrata_sidecar.connector.model_files import ModelFiles
from tests.dataplane.engine_process import EngineProcess

NAME = "fingerprint"
MB = 1_000_000
SHARD_BYTES = 5_000_000_000
LAYERS, HIDDEN, INTERMEDIATE, KV, WORDS = 80, 8192, 28_672, 1024, 128_256
LOGGED = re.compile(r"The engine's fingerprint is \w+: (?P<bytes>\d+) bytes read in (?P<ms>\d+) ms")

Tensor = tuple[str, tuple[int, ...]]
"""Name and shape; all are of bfloat16."""


async def measure() -> Result:
    """Measure all of it."""
    return await asyncio.to_thread(_measure, Progress())


def _measure(progress: Progress) -> Result:
    python = engine_python(progress)
    with tempfile.TemporaryDirectory(prefix=NAME) as name, Busyness() as machine:
        directory = Path(name)
        with progress.step("an engine with SmolLM2 starts"):
            engine_bytes, engine_s = _of_an_engine(python, directory)
        with progress.step("the digest of 140 GB of sparse files"):
            shards = _make(directory / "model")
            read_bytes, large_s = _of_files(directory / "model")
    whole_bytes = sum(_bytes_of(tensors) for tensors in shards)
    large = Figure(read_bytes / MB, "MB", baseline=whole_bytes / MB)
    return Result(
        name=NAME,
        figures={
            "engine_took": Figure(engine_s, "s"),
            "engine_read": Figure(engine_bytes / MB, "MB"),
            "large_read": large,
            "large_took": Figure(large_s, "s"),
        },
        baseline={"whole_large": Figure(whole_bytes / MB, "MB")},
        ratio=read_bytes / whole_bytes,
        reproduce=f"make bench BENCH={NAME}",
        conditions={"files": len(shards), "tensors": sum(map(len, shards)), OTHER_LOAD: round(machine.others_percent)},
    )


def _of_an_engine(python: Path, directory: Path) -> tuple[int, float]:
    """Return bytes and seconds of the longest fingerprint: scheduler and worker compute one each.

    A cache server is not needed: the engine knows the size of its chunks. Raises ClusterError if it logged none.
    """
    engine = EngineProcess(python, directory, free_port(), model=SMOLLM2)
    try:
        engine.wait_until_ready()
    finally:
        engine.stop()
    text = engine.log_file.read_text()
    logged = [(int(found["bytes"]), int(found["ms"]) / 1000) for found in LOGGED.finditer(text)]
    if not logged:
        raise ClusterError(f"the engine has no fingerprint:\n{text[-2000:]}")
    return max(logged, key=lambda one: one[1])


def _of_files(directory: Path) -> tuple[int, float]:
    """Return bytes that this process read, by the kernel's account, and seconds."""
    before, began_s = _read_bytes(), time.monotonic()
    ModelFiles().digest(directory)
    return _read_bytes() - before, time.monotonic() - began_s


def _read_bytes() -> int:
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["rchar"])


def _make(directory: Path) -> list[list[Tensor]]:
    """Write the sparse files of a model, and return the tensors of each."""
    directory.mkdir()
    shards: list[list[Tensor]] = [[]]
    for tensor in _tensors():
        if _bytes_of([*shards[-1], tensor]) > SHARD_BYTES:
            shards.append([])
        shards[-1].append(tensor)
    for number, tensors in enumerate(shards, 1):
        header = _header(tensors)
        path = directory / f"model-{number:05}-of-{len(shards):05}.safetensors"
        path.write_bytes(len(header).to_bytes(8, "little") + header)
        os.truncate(path, 8 + len(header) + _bytes_of(tensors))
    return shards


def _header(tensors: list[Tensor]) -> bytes:
    header, offset = {}, 0
    for tensor in tensors:
        end = offset + _bytes_of([tensor])
        header[tensor[0]] = {"dtype": "BF16", "shape": tensor[1], "data_offsets": [offset, end]}
        offset = end
    return json.dumps({"__metadata__": {"format": "pt"}, **header}, separators=(",", ":")).encode()


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(2 * math.prod(shape) for _, shape in tensors)


def _tensors() -> Iterator[Tensor]:
    """Yield the tensors of Llama 3.1 70B."""
    yield "model.embed_tokens.weight", (WORDS, HIDDEN)
    for number in range(LAYERS):
        layer = f"model.layers.{number}"
        yield f"{layer}.input_layernorm.weight", (HIDDEN,)
        yield f"{layer}.mlp.down_proj.weight", (HIDDEN, INTERMEDIATE)
        yield f"{layer}.mlp.gate_proj.weight", (INTERMEDIATE, HIDDEN)
        yield f"{layer}.mlp.up_proj.weight", (INTERMEDIATE, HIDDEN)
        yield f"{layer}.post_attention_layernorm.weight", (HIDDEN,)
        yield f"{layer}.self_attn.k_proj.weight", (KV, HIDDEN)
        yield f"{layer}.self_attn.o_proj.weight", (HIDDEN, HIDDEN)
        yield f"{layer}.self_attn.q_proj.weight", (HIDDEN, HIDDEN)
        yield f"{layer}.self_attn.v_proj.weight", (KV, HIDDEN)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (WORDS, HIDDEN)
