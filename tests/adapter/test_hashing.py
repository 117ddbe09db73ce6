"""Names of chunks as the cache server gives them."""

from __future__ import annotations

import struct

import pytest

from kvstrata.contract import ContractError
from kvstrata_sidecar.adapter.pool_report import Hasher


def packed(*tokens: int) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


def test_only_whole_chunks_are_named_and_the_rest_is_not_shown_to_the_server() -> None:
    asked: list[list[int]] = []

    def compute(ids: list[int]) -> list[bytes]:
        asked.append(ids)
        return [bytes([ids[at]]) * 32 for at in range(0, len(ids), 2)]

    hasher = Hasher(2, compute)
    assert hasher.hashes(packed(7, 8, 9, 10, 11)) == bytes([7]) * 32 + bytes([9]) * 32
    assert asked == [[7, 8, 9, 10]]
    assert hasher.hashes(packed(7)) == b""


@pytest.mark.parametrize("names", [[b"x" * 8], [], [b"x" * 32, b"y" * 32], [7]])
def test_names_that_are_no_hashes_of_32_bytes_are_an_error(names: list[object]) -> None:
    with pytest.raises(ContractError, match="pools cannot use"):
        Hasher(2, lambda _: names).hashes(packed(1, 2))  # type: ignore[arg-type, return-value]
