"""Names and contents of block files: what was written is read, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvstrata.contract.store.block_file import (
    PAGE_BYTES,
    block_name,
    file_bytes,
    file_name,
    key_of,
    keyspace_of,
    parse_file_name,
)
from kvstrata.contract.store.block_value import HEADER_BYTES, is_of_later_version
from kvstrata.contract.store.redis_keys import parse_block_key
from kvstrata_sidecar.adapter.files.file_format import GcmPages, Pages, PlainPages, Verdict
from kvstrata_sidecar.adapter.policy.data_keys import DataKeys
from tests.files.file_driver import aligned
from tests.support.amounts import examples
from tests.tiers.data_keys import FIRST, OTHER, SECOND, held
from tests.tiers.gate_stand_in import DOMAIN, KEYSPACE_A, KEYSPACE_B, RESOLVED

KEY = key_of(KEYSPACE_A, RESOLVED, 1, 0, b"\x17" * 32)
NAME = block_name(DOMAIN, KEY)
BODY_BYTES = 5000

keyspaces = st.text("0123456789abcdef", min_size=32, max_size=32)
identities = st.text("0123456789abcdef", min_size=16, max_size=16)
numbers = st.integers(0, 2**32 - 1)
hashes = st.binary(min_size=1, max_size=64)


@given(keyspaces, identities, numbers, numbers, hashes, st.booleans())
def test_a_files_name_says_which_block_it_holds(
    keyspace: str, identity: str, rank: int, group: int, chunk_hash: bytes, encrypted: bool
) -> None:
    key = key_of(keyspace, identity, rank, group, chunk_hash)
    assert keyspace_of(key) == keyspace
    assert parse_file_name(keyspace, file_name(key, encrypted=encrypted)) == (key, encrypted)
    named = parse_block_key(block_name(DOMAIN, key).decode())
    assert named is not None
    assert (named.keyspace, named.identity, named.rank, named.group, named.chunk_hash) == (
        keyspace, identity, rank, group, chunk_hash,
    )  # fmt: skip


@given(st.text(max_size=120))
def test_no_other_name_is_taken_for_a_blocks(name: str) -> None:
    parsed = parse_file_name(KEYSPACE_A, name)
    assert parsed is None or file_name(parsed[0], encrypted=parsed[1]) == name


@given(st.integers(0, 1 << 24))
def test_a_file_is_of_whole_pages_and_no_longer_than_need_be(body_bytes: int) -> None:
    assert file_bytes(body_bytes) % PAGE_BYTES == 0
    assert body_bytes + 64 <= file_bytes(body_bytes) < body_bytes + 64 + PAGE_BYTES


@pytest.fixture(params=["plain", "encrypted"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Pages]:
    if request.param == "plain":
        return PlainPages
    keys = held(tmp_path, FIRST)
    return lambda: GcmPages(keys)


def content(pages: Pages, body: memoryview) -> bytearray:
    return bytearray(b"".join(pages.seal(KEYSPACE_A, NAME, body, 7)))


def opened(
    pages: Pages, data: bytes | bytearray, keyspace: str = KEYSPACE_A, name: bytes = NAME
) -> tuple[Verdict, bytes]:
    view, start = aligned(BODY_BYTES, 0xEE), 0
    for part in pages.room(view):
        part[:] = data[start : start + len(part)]
        start += len(part)
    verdict = pages.open(keyspace, name, view)
    pages.wipe()
    return verdict, bytes(view)


class TestContents:
    def test_what_was_sealed_is_opened(self, make: Callable[[], Pages]) -> None:
        pages, body = make(), aligned(BODY_BYTES, 3)
        data = content(pages, body)
        assert len(data) == file_bytes(BODY_BYTES)
        assert opened(make(), data) == (Verdict.GOOD, bytes(body))

    def test_every_flipped_bit_is_noticed_and_leaves_zeros(self, make: Callable[[], Pages]) -> None:
        pages = make()
        good = bytes(content(pages, aligned(BODY_BYTES, 3)))
        places = [*range(0, BODY_BYTES, 501), *range(BODY_BYTES, len(good), 97), *range(len(good) - 60, len(good))]
        for place in places:
            for bit in range(8):
                data = bytearray(good)
                data[place] ^= 1 << bit
                verdict, view = opened(pages, data)
                assert verdict is not Verdict.GOOD, (place, bit)
                assert view == bytes(BODY_BYTES)

    def test_pages_that_a_loss_of_power_left_out_are_noticed(self, make: Callable[[], Pages]) -> None:
        pages = make()
        good = bytes(content(pages, aligned(BODY_BYTES, 3)))
        for start in range(0, len(good), PAGE_BYTES):
            data = bytearray(good)
            data[start : start + PAGE_BYTES] = bytes(PAGE_BYTES)
            assert opened(pages, data) == (Verdict.DAMAGED, bytes(BODY_BYTES))
        assert opened(pages, bytes(len(good)))[0] is Verdict.DAMAGED

    @settings(max_examples=examples(50))
    @given(st.binary(min_size=1, max_size=300))
    def test_no_junk_is_a_block(self, junk: bytes) -> None:
        data = (junk * 2 * PAGE_BYTES)[-2 * PAGE_BYTES :]
        assume(not is_of_later_version(NAME, data[-HEADER_BYTES:]))
        assert opened(PlainPages(), data) == (Verdict.DAMAGED, bytes(BODY_BYTES))

    def test_a_file_under_another_name_is_no_block(self, make: Callable[[], Pages]) -> None:
        data = content(make(), aligned(BODY_BYTES, 3))
        other = key_of(KEYSPACE_A, RESOLVED, 1, 0, b"\x18" * 32)
        assert opened(make(), data, name=block_name(DOMAIN, other))[0] is Verdict.DAMAGED

    def test_a_file_of_a_later_version_is_left_to_it(self, make: Callable[[], Pages]) -> None:
        data = content(make(), aligned(BODY_BYTES, 3))
        data[-HEADER_BYTES:] = b"kvs4".ljust(HEADER_BYTES, b"?")
        assert opened(make(), data) == (Verdict.LATER, bytes(BODY_BYTES))

    def test_a_plain_file_is_no_encrypted_one_and_the_other_way_round(self, tmp_path: Path) -> None:
        plain, encrypted = PlainPages(), GcmPages(held(tmp_path, FIRST))
        body = aligned(BODY_BYTES, 3)
        assert opened(encrypted, content(plain, body))[0] is not Verdict.GOOD
        assert opened(plain, content(encrypted, body))[0] is not Verdict.GOOD


class TestEncryption:
    def test_the_body_is_nowhere_in_the_file(self, tmp_path: Path) -> None:
        body = aligned(BODY_BYTES)
        body[:] = (b"the prompt of a tenant " * BODY_BYTES)[:BODY_BYTES]
        assert b"the prompt" not in content(GcmPages(held(tmp_path, FIRST)), body)

    def test_a_file_under_an_unknown_generation_is_left_to_those_who_know_it(self, tmp_path: Path) -> None:
        data = content(GcmPages(held(tmp_path, SECOND)), aligned(BODY_BYTES, 3))
        only_first = tmp_path / "first"
        only_first.mkdir()
        assert opened(GcmPages(held(only_first, FIRST)), data) == (Verdict.FOREIGN, bytes(BODY_BYTES))

    def test_another_keyspaces_key_opens_nothing(self, tmp_path: Path) -> None:
        data = content(GcmPages(held(tmp_path, FIRST)), aligned(BODY_BYTES, 3))
        other = tmp_path / "other"
        other.mkdir()
        keys = held(other, OTHER, keyspace=KEYSPACE_B)
        assert opened(GcmPages(keys), data, keyspace=KEYSPACE_B)[0] is Verdict.DAMAGED

    def test_without_a_key_nothing_is_done(self) -> None:
        assert GcmPages(DataKeys()).refusal(KEYSPACE_A) == "no_key"


def test_no_plaintext_stays_in_memory_of_ours() -> None:
    pages, body = PlainPages(), memoryview(bytearray(b"secret" * 1000))[1:]
    pages.seal(KEYSPACE_A, NAME, body, 7)
    pages.wipe()
    assert b"secret" not in bytes(pages._staging._memory)
