"""How the cache server names chunks of tokens.

Asked of LMCache's own hasher, so that chunk size and algorithm are those in force and not those that were configured.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable

from kvstrata.contract import ContractError
from kvstrata.contract.messages.adapter import TOKEN_BYTES
from kvstrata.contract.policy.pools import CHUNK_HASH_BYTES


class Hasher:
    """Names chunks of `chunk_tokens` by `compute`, which takes token ids and returns a name for each whole chunk."""

    def __init__(self, chunk_tokens: int, compute: Callable[[list[int]], Iterable[bytes]]) -> None:
        self.chunk_tokens = chunk_tokens
        self._compute = compute

    def hashes(self, tokens: bytes) -> bytes:
        """Return the names of the whole chunks, one after the other; `tokens` are `TOKEN_BYTES` each.

        Raises ContractError if the server's names are no hashes of 32 bytes, as those of its other algorithms.
        """
        count = len(tokens) // TOKEN_BYTES // self.chunk_tokens * self.chunk_tokens
        ids = list(struct.unpack(f"<{count}I", tokens[: count * TOKEN_BYTES]))
        names = list(self._compute(ids)) if ids else []
        whole = count // self.chunk_tokens
        if len(names) != whole or not all(isinstance(one, bytes) and len(one) == CHUNK_HASH_BYTES for one in names):
            raise ContractError("this cache server names chunks in a way that pools cannot use")
        return b"".join(names)
