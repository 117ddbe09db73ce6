"""The process that is measured: it holds tiers of files, LMCache's adapter for files, and memory as LMCache's is.

    python -m bench.files.client DIRECTORY

Runs with the interpreter that has LMCache. All adapters live in this one process and use the same buffers, so that they
differ in nothing else.
"""

from __future__ import annotations

import mmap
import sys
from pathlib import Path
from typing import Any

import torch
from lmcache.lmcache_fs import LMCacheFSClient
from lmcache.v1.distributed.l2_adapters.native_connector_l2_adapter import NativeConnectorL2Adapter

from bench.adapter.answers import serve
from bench.adapter.client import Client, block_of

MAX_BLOCKS = 1 << 16


class FilesClient(Client):
    """Answers questions until standard input ends."""

    def new_buffer(self, size: int) -> Any:
        """Return page-aligned shared memory with random bytes, as LMCache's blocks are."""
        return block_of(torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8))

    def _peer(self, name: str, path: str, workers: int) -> dict[str, Any]:
        """Open LMCache's own adapter for files past the page cache, as its type `fs_native` does."""
        client = LMCacheFSClient(path, workers, "", True, 0)
        self._adapters[name] = NativeConnectorL2Adapter(client, type_name="fs_native", pad_buffers_to_alignment=True)
        return {}

    def _file_tier(self, name: str, path: str, workers: int, **options: Any) -> dict[str, Any]:
        """Open the policy adapter on a tier of files, and wait until it is in use."""
        self.open_tier({
            "name": name, "medium": "NVMe", "directory": path, "max_blocks": MAX_BLOCKS, "free_floor_percent": 0,
            "workers": workers, **options,
        })  # fmt: skip
        return {}


def main() -> None:
    """Answer questions until there are no more."""
    serve(FilesClient(Path(sys.argv[1])).answer)


if __name__ == "__main__":
    main()
