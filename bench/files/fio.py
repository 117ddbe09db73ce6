"""Throughput of fio in a directory: the limit that the disk, its file system and this machine set."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e.cluster.progress import ClusterError
from e2e.cluster.rootfs import fio_command

ENGINES = ("psync", "io_uring")
"""Threads that transfer a file at a time, as workers do; and one that keeps IODEPTH requests of a MiB under way."""

IODEPTH = 32
REQUEST_BYTES = 1 << 20
LOOPS = 3
"""How often each run goes over all files: its threads do not begin at once, which would make a short run look slow."""

WAYS = {"store": "write", "load": "read"}


def command() -> list[str]:
    """Return the command that runs fio here. Raises ClusterError if there is none."""
    try:
        return fio_command()
    except ClusterError:
        installed = shutil.which("fio")
        if installed is None:
            raise ClusterError("there is no fio", advice="`python3 -m e2e.cluster build` brings one") from None
        return [installed]


@dataclass(frozen=True, slots=True)
class Fio:
    """fio on `count` files of `size` bytes in a directory, which it has to itself."""

    command: list[str]
    directory: Path
    size: int
    count: int
    threads: int

    async def version(self) -> str:
        """Return which fio it is."""
        return (await _output([*self.command, "--version"])).strip()

    async def transfer(self, engine: str) -> dict[str, Any]:
        """Write over all files and read them, past the page cache; return bytes and seconds of either, of one time.

        Files that are not there are laid out first, outside of the seconds.
        """
        answer: dict[str, Any] = {"bytes": self.size * self.count}
        for way, operation in WAYS.items():
            answer[f"{way}_s"] = await self._run(engine, operation)
        return answer

    async def _run(self, engine: str, operation: str) -> float:
        directory = self.directory / engine
        directory.mkdir(exist_ok=True)
        jobs, size = (self.threads, self.size) if engine == "psync" else (1, min(self.size, REQUEST_BYTES))
        text = await _output([
            *self.command, "--name=limit", f"--directory={directory}", f"--rw={operation}", f"--ioengine={engine}",
            f"--iodepth={1 if engine == 'psync' else IODEPTH}", f"--numjobs={jobs}", "--thread", f"--bs={size}",
            f"--filesize={self.size}", f"--nrfiles={self.count // jobs}", f"--openfiles={self.count // jobs}",
            f"--loops={LOOPS}", "--filename_format=$jobnum.$filenum", "--invalidate=0", "--gtod_reduce=1",
            "--file_service_type=sequential", "--direct=1", "--overwrite=1", "--fallocate=none", "--refill_buffers=0",
            "--group_reporting", "--output-format=json",
        ])  # fmt: skip
        done = json.loads(text[text.index("{") :])["jobs"][0][operation]
        if done["io_bytes"] != LOOPS * self.size * self.count:
            raise ClusterError(f"fio's {operation} moved {done['io_bytes']} of {LOOPS * self.size * self.count} bytes")
        return self.size * self.count / float(done["bw_bytes"])


async def _output(argv: list[str]) -> str:
    process = await asyncio.create_subprocess_exec(
        *argv, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        output, errors = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    if process.returncode:
        raise ClusterError(f"fio failed:\n{(errors or output).decode()[-2000:]}")
    return output.decode()
