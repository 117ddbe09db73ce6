"""Metrics of the engine and LMCache, relayed on the gate's own page under the names that dashboards know.

Both listen where only the pod reaches them. A scrape of the gate fetches both pages; scrapes that come together share
one fetch. LMCache labels many metrics with the salt, which gives access to a tenant's blocks: the adapter removes that
label (`remove_salts`), and a line that holds a salt under any label is left out here.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvstrata.contract.policy.keyspace import KEYSPACE_HEX_DIGITS
from kvstrata_sidecar.gate.http.engine_client import EnginePool
from kvstrata_sidecar.prometheus_text import family

PATH = "/metrics"
DEADLINE_S = 2.0
MAX_PAGE_BYTES = 4 * 1024 * 1024
FRESH_S = 0.2
"""Age up to which a page is used again: some endpoint pickers scrape every 50 ms, and a page costs its server CPU."""

READ_EVERY_S = 5.0
"""Interval of reading the engine's page for this gate's own figures, if no one scrapes."""

ENGINE_NAMES = ("vllm:", "http_", "process_", "python_")
CACHE_NAMES = ("lmcache",)
"""Beginnings of the names that each side may use, so that no family is on the page twice."""

_SECRET = re.compile(rb'[{,]cache_salt="|[0-9a-f]{%d}' % KEYSPACE_HEX_DIGITS)


@dataclass(slots=True, eq=False)
class Upstream:
    """One page, and the beginnings of relayed names. `left_out` counts lines that could hold a salt."""

    name: str
    http: EnginePool
    names: Sequence[str]
    up: bool = False
    lines: bytes = b""
    left_out: int = 0

    async def fetch(self) -> bytes:
        """Fetch and keep the page; return it as it came, empty without one."""
        status, page = await self.http.get(PATH, timeout_s=DEADLINE_S, max_bytes=MAX_PAGE_BYTES)
        self.up = status == 200
        self.lines, self.left_out = relayed(page, self.names) if self.up else (b"", 0)
        return page if self.up else b""


@dataclass(eq=False)
class Relay:
    """`read` gets each page of the engine, whether scraped or not."""

    engine: Upstream
    cache: Upstream
    read: Callable[[bytes], None]
    clock: Callable[[], float]
    _fetched_s: float = float("-inf")
    _fetching: asyncio.Task[None] | None = None

    async def run(self) -> None:
        while True:
            await self.refresh(READ_EVERY_S)
            await asyncio.sleep(READ_EVERY_S)

    async def refresh(self, fresh_s: float = FRESH_S) -> None:
        """Fetch both pages, unless that was `fresh_s` ago or less. Takes `DEADLINE_S` at most."""
        if self.clock() - self._fetched_s <= fresh_s:
            return
        if self._fetching is None or self._fetching.done():
            self._fetching = asyncio.create_task(self._fetch())
        await asyncio.shield(self._fetching)  # another scrape may wait for it

    def page(self) -> bytes:
        """Return the newest pages, behind metrics about themselves."""
        return "".join(f"{line}\n" for line in self._about()).encode() + self.engine.lines + self.cache.lines

    async def _fetch(self) -> None:
        page, _ = await asyncio.gather(self.engine.fetch(), self.cache.fetch())
        self._fetched_s = self.clock()
        self.read(page)

    def _about(self) -> Iterator[str]:
        sources = [({"source": one.name}, one) for one in (self.engine, self.cache)]
        text = "1 if the page of engine or cache server was fetched for this one, else 0."
        yield from family("kvstrata_gate_relay_up", "gauge", text, ((source, int(one.up)) for source, one in sources))
        text = "Lines of that page that are not on this one."
        lines = ((source, one.left_out) for source, one in sources)
        yield from family("kvstrata_gate_relay_left_out_lines", "gauge", text, lines)


def relayed(page: bytes, names: Sequence[str]) -> tuple[bytes, int]:
    """Return the lines of metrics that begin with one of `names`, and how many are left out: they may hold a salt."""
    wanted = rf"^(?:# (?:HELP|TYPE) )?(?:{'|'.join(map(re.escape, names))})[^\n]*\n".encode()
    lines: list[bytes] = re.findall(wanted, page if page.endswith(b"\n") else page + b"\n", re.MULTILINE)
    kept = b"".join(lines)
    if _SECRET.search(kept) is None:
        return kept, 0
    harmless = [line for line in lines if _SECRET.search(line) is None]
    return b"".join(harmless), len(lines) - len(harmless)
