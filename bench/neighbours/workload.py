"""The replayed load: a public trace's prompts as those of several tenants, and one that scans beside them. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.sharing.trace import PREFIX, Request, tenants_of

TENANTS = 16
SCANNER = TENANTS
"""The number of the tenant that scans; its neighbours are 0 to TENANTS - 1."""

SCAN_RATE = 5
"""Blocks that the scanner sends for each block that all its neighbours together send."""


TRACE_BLOCKS = 2
"""Blocks of the trace, 512 tokens each, that are one block here: half as many steps, and as much to keep."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: its tenant, and the names of its whole blocks in order, from 0. `at_s` is seconds from the first."""

    tenant: int
    blocks: tuple[int, ...]
    at_s: float


def prompts_of(requests: Sequence[Request], starts_s: Sequence[float]) -> list[Prompt]:
    """Return the neighbours' prompts, conversations dealt to them in turn; a block is named by the last of its parts.

    The block that all requests of the trace begin with is left out: every tenant would find it all the time.
    """
    owners = tenants_of(requests, TENANTS)
    return [
        Prompt(owner, request.chunks[len(PREFIX) :][TRACE_BLOCKS - 1 :: TRACE_BLOCKS], at_s - starts_s[0])
        for owner, request, at_s in zip(owners, requests, starts_s, strict=True)
    ]


def with_scanner(prompts: Sequence[Prompt], rate: int = SCAN_RATE) -> Iterator[Prompt]:
    """Return the prompts, each followed by one that is `rate` times as long, of blocks that no tenant sent before."""
    fresh = 0
    for prompt in prompts:
        yield prompt
        length = rate * len(prompt.blocks)
        yield Prompt(SCANNER, tuple(range(fresh, fresh + length)), prompt.at_s)
        fresh += length


def distinct_blocks(prompts: Sequence[Prompt]) -> int:
    """Return how many blocks a memory without bounds would hold in the end: tenants share none."""
    return len({(prompt.tenant, block) for prompt in prompts for block in prompt.blocks})


def chunk_hash(tenant: int, block: int) -> bytes:
    """Return the 32 bytes that a tenant's block is named by."""
    return hashlib.sha256(b"%d %d" % (tenant, block)).digest()
