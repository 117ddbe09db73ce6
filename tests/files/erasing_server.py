"""A cache server of stand-ins that can be killed: the real policy over files and over a played LMCache memory.

    python -m tests.files.erasing_server DIRECTORY

`DIRECTORY` has what a gate writes (`policy`, `link`), the tier's files (`disk`) and the file `memory`, which is the
server's pool of blocks, as LMCache's is a shared memory segment: whoever may read the file sees every byte. It takes
lines on standard input, and answers each with a line: `store KEYSPACE NUMBER` puts a block into memory and, while that
has it, into a file; `read KEYSPACE NUMBER` and `release KEYSPACE NUMBER` are a reader's.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import time
from pathlib import Path

from kvstrata.contract.policy.bundle import Rules
from kvstrata.contract.policy.cache_view import CacheView
from kvstrata_sidecar.adapter.files.tier import FileTier
from kvstrata_sidecar.adapter.params import AdapterParams, FileTierParams
from kvstrata_sidecar.adapter.runtime import acquire
from kvstrata_sidecar.adapter.tier.interface import Block
from kvstrata_sidecar.adapter.tier.tasks import Task
from tests.adapter.memory_server import Server
from tests.adapter.memory_stand_in import BLOCK_BYTES, Key
from tests.tiers.gate_stand_in import DOMAIN, FINGERPRINT, IDENTITY

BLOCKS = 16
POLL_S = 0.01


def main(directory: Path) -> None:
    """Serve until standard input ends."""
    server = Server(blocks=BLOCKS)
    pool = server.manager._memory_manager
    with (directory / "memory").open("w+b") as file:
        file.truncate(BLOCKS * BLOCK_BYTES)
        shared = mmap.mmap(file.fileno(), 0)
    pool.base = ctypes.addressof((ctypes.c_char * len(shared)).from_buffer(shared))
    tier = FileTierParams("disk", directory / "disk", 1 << 30, 4096, free_floor_percent=0)
    params = AdapterParams(DOMAIN, IDENTITY, tier, directory / "policy", directory / "link")
    runtime = acquire(params)
    answers: list[Task] = []
    files = FileTier(params, tier, runtime.enforcement, answers.append, spans=runtime.spans, guarded=lambda: True)
    runtime.add(files)
    runtime.memory = server.memory
    runtime.names = lambda keyspace, chunks: [[Key(keyspace, int.from_bytes(chunk))] for chunk in chunks]
    while files.state().recovering:
        time.sleep(POLL_S)
    print("ready", flush=True)
    for line in sys.stdin:
        what, keyspace, number = line.split()
        key = Key(keyspace, int(number))
        # The memory's policy is played, and follows what the gate says.
        view = runtime.enforcement.view
        server.enforcement.view = view or CacheView(DOMAIN, 1, 1, Rules(), {})
        if what == "store":
            server.manager.store(key)
            view_of = memoryview(server.manager._objects[key].memory_obj.byte_array).cast("B")
            task = files.store([Block(key, keyspace, 0, 0, key.chunk_hash, FINGERPRINT)], [view_of])
            while task not in files.pop_stores():
                time.sleep(POLL_S)
        elif what == "read":
            server.manager.read(key)
        else:
            server.manager.release(key)
        print(what, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
