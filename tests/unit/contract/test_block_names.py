"""Names of blocks in tiers are read as they were written."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstrata.contract.store.block_file import key_of, parts_of
from kvstrata.contract.store.redis_keys import member_of, parse_member

KEYSPACE, IDENTITY = "a" * 32, "1" * 16


@given(st.integers(0, 2**32 - 1), st.integers(0, 9), st.binary(min_size=1, max_size=40))
def test_a_members_name_is_read_as_it_was_written(rank: int, group: int, chunk_hash: bytes) -> None:
    assert parse_member(member_of(IDENTITY, rank, group, chunk_hash)) == (IDENTITY, rank, group, chunk_hash)


@given(st.text(max_size=60))
def test_no_other_name_is_read(text: str) -> None:
    found = parse_member(text)
    assert found is None or member_of(*found) == text


@given(st.integers(0, 2**32 - 1), st.integers(0, 9), st.binary(min_size=1, max_size=40))
def test_a_files_key_is_read_as_it_was_made(rank: int, group: int, chunk_hash: bytes) -> None:
    assert parts_of(key_of(KEYSPACE, IDENTITY, rank, group, chunk_hash)) == (IDENTITY, rank, group, chunk_hash)
