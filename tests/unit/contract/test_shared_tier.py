"""Names, value headers and scripts of a shared tier, without a server."""

from __future__ import annotations

import hashlib
import itertools
import re
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from e2e.cluster.ignorefile import context_files, read_patterns
from e2e.cluster.settings import REPOSITORY
from kvstrata.contract.store import redis_scripts as scripts
from kvstrata.contract.store.block_value import (
    HEADER_BYTES,
    Header,
    is_of_later_version,
    pack_header,
    seal,
    unpack_header,
    value_bytes,
)
from kvstrata.contract.store.redis_keys import (
    BUCKETS,
    BlockKey,
    bucket_of,
    bucket_prefix,
    claim_key,
    declared,
    ledger_key,
    parse_block_key,
    resolved,
    revoked_key,
)

DOMAIN, KEYSPACE = "d" * 16, "a" * 32
ALL = tuple(name for family in scripts.ARGUMENTS.values() for name in family)
COMMON = ("_common", "_bucket", "_ledger", "_capacity")
FOLDER = REPOSITORY / "operator/src/kvstrata/contract/store/scripts"

headers = st.builds(
    Header,
    st.integers(0, 2**32 - 1),
    st.booleans(),
    st.integers(0, 255),
    st.binary(min_size=12, max_size=12),
    st.integers(0, 2**64 - 1),
)
keys = st.binary(min_size=1, max_size=80)


def slot_tag(name: str) -> str:
    """What a cluster hashes of a name."""
    return name[name.index("{") + 1 : name.index("}")]


class TestNames:
    @given(st.binary(min_size=1, max_size=32))
    def test_a_block_lies_in_the_slot_of_its_buckets_index(self, chunk_hash: bytes) -> None:
        key = BlockKey(DOMAIN, KEYSPACE, "b" * 16, 1, 2, chunk_hash)
        assert str(key) == f"{key.bucket}:{key.member}"
        assert slot_tag(str(key)) == slot_tag(f"{key.bucket}:#s")
        assert key.bucket == bucket_prefix(DOMAIN, KEYSPACE, bucket_of(chunk_hash))

    def test_buckets_are_used_evenly(self) -> None:
        counts = [0] * BUCKETS
        for number in range(256):
            counts[bucket_of(bytes([number]))] += 1
        assert set(counts) == {256 // BUCKETS}

    def test_no_name_of_the_index_is_taken_for_a_block(self) -> None:
        base = bucket_prefix(DOMAIN, KEYSPACE, 3)
        own = [f"{base}:{name}" for name in ("#x", "#a", "#m", "#r", "#s")]
        for name in (*own, ledger_key(DOMAIN, KEYSPACE), claim_key(DOMAIN, KEYSPACE), revoked_key(DOMAIN)):
            assert parse_block_key(name) is None
            assert name.startswith(f"kvs1:{DOMAIN}:")

    def test_ledger_and_claim_lie_in_one_slot(self) -> None:
        assert slot_tag(ledger_key(DOMAIN, KEYSPACE)) == slot_tag(claim_key(DOMAIN, KEYSPACE)) == KEYSPACE


class TestValues:
    @given(keys, headers)
    def test_a_header_is_read_as_it_was_written(self, key: bytes, header: Header) -> None:
        data = pack_header(key, header)
        assert len(data) == HEADER_BYTES == 48
        assert unpack_header(key, data) == header

    @given(keys, keys, headers)
    def test_a_header_of_another_name_is_none(self, key: bytes, other: bytes, header: Header) -> None:
        assert (unpack_header(other, pack_header(key, header)) is None) is (key != other)

    @given(keys, headers, st.integers(0, 8 * 48 - 1))
    def test_no_flipped_bit_goes_unnoticed(self, key: bytes, header: Header, bit: int) -> None:
        data = bytearray(pack_header(key, header))
        data[bit // 8] ^= 1 << bit % 8
        assert unpack_header(key, bytes(data)) != header

    @given(keys, st.binary(max_size=60))
    def test_anything_else_is_none(self, key: bytes, data: bytes) -> None:
        assert unpack_header(key, data) is None

    @pytest.mark.parametrize("header", [Header(2**32), Header(-1), Header(1, generation=256), Header(1, nonce=b"")])
    def test_what_does_not_fit_is_refused(self, header: Header) -> None:
        with pytest.raises(ValueError, match=r"header|nonce"):
            pack_header(b"key", header)

    def test_lengths_are_those_of_the_stored_form(self) -> None:
        assert value_bytes(100) == 164

    def test_associated_data_covers_name_codec_length_and_age(self) -> None:
        fields = itertools.product((b"a", b"b"), (1, 2), (0, 9), (0, 1))
        made = {
            Header(size, computed_ms=computed_ms, codec=codec).associated_data(key)
            for key, size, computed_ms, codec in fields
        }
        assert len(made) == 16

    def test_values_of_earlier_versions_and_with_unknown_codecs_are_none(self) -> None:
        earlier = struct.pack(">4sBBHI16s12s", b"kvs2", 0, 0, 0, 1, seal(b"key"), bytes(12))
        for data in (earlier, earlier + bytes(8), pack_header(b"key", Header(1, codec=1))):
            assert unpack_header(b"key", data) is None

    def test_damage_is_no_later_version(self) -> None:
        later, other_codec = b"kvs4" + bytes(60), pack_header(b"key", Header(1, codec=1))
        assert is_of_later_version(b"key", later)
        assert is_of_later_version(b"key", other_codec)
        damaged = (bytes(48), b"", b"kvs", b"kvs2" + bytes(44), b"kvs\xff" + bytes(44), other_codec[:-1])
        for data in (*damaged, pack_header(b"key", Header(1)), pack_header(b"other", Header(1, codec=1))):
            assert not is_of_later_version(b"key", data)

    def test_names_of_earlier_versions_are_read_and_written_as_they_are(self) -> None:
        for identity in ("b" * 16, resolved("b" * 16, "f" * 16)):
            key = BlockKey(DOMAIN, KEYSPACE, identity, 1, 2, b"\1" * 32)
            assert parse_block_key(str(key)) == key
            assert declared(key.identity) == "b" * 16


class TestScripts:
    def test_every_file_is_a_script_or_what_scripts_have_in_common(self) -> None:
        assert {path.stem for path in FOLDER.glob("*.lua")} == {*ALL, *COMMON}

    @pytest.mark.parametrize("name", ALL)
    def test_a_script_is_known_by_the_digest_of_what_is_sent(self, name: str) -> None:
        loaded = scripts.script(name)
        assert loaded.sha == hashlib.sha1(loaded.text, usedforsecurity=False).hexdigest().encode()
        assert loaded.text.endswith((FOLDER / f"{name}.lua").read_bytes())

    def test_arguments_are_sent_in_the_order_in_which_the_text_reads_them(self) -> None:
        loaded = scripts.script("cull")
        assert loaded.words({"identities": [b"x", b"y"], "count": 3, "cursor": 0}) == [b"0", b"3", b"x", b"y"]
        assert b"local cursor, count, identities = ARGV[1], tonumber(ARGV[2]), {unpack(ARGV, 3)}\n" in loaded.text
        assert b"?limited" not in scripts.script("reserve").text
        assert b"ARGV[7] == '1'" in scripts.script("reserve").text

    @pytest.mark.parametrize("arguments", [{"token": b"t"}, {"token": b"t", "life_ms": 1, "more": 1}])
    def test_a_script_is_not_called_with_other_arguments_than_its_own(self, arguments: dict[str, bytes | int]) -> None:
        with pytest.raises((KeyError, TypeError)):
            scripts.script("claim").words(arguments)

    def test_the_data_user_may_run_what_is_run_and_nothing_else(self) -> None:
        called = {
            found.lower()
            for name in (*ALL, *COMMON)
            for found in re.findall(r"redis\.p?call\('(\w+)'", scripts.source(name).decode())
        }
        sent = set()
        modules = sorted((REPOSITORY / "sidecar/src/kvstrata_sidecar/adapter/redis").rglob("*.py"))
        assert len(modules) >= 20
        for module in modules:
            text = module.read_text()
            sent |= {found.lower() for found in re.findall(r'[(,] ?b"([A-Z]{3,})"[,)]', text)}
            sent |= {found.lower() for found in re.findall(r"\\r\\n([A-Z]{3})\\r\\n", text)}
        assert "cluster" in sent
        sent = sent - {"withscores", "rev", "count", "cluster"} | {"cluster|slots"}
        assert called | sent == set(scripts.COMMANDS)

    def test_no_script_reads_a_value_but_the_byte_that_says_whether_it_is_encrypted(self) -> None:
        for name in (*scripts.ARGUMENTS["bucket"], "_bucket"):
            text = scripts.source(name).decode().replace("'GETRANGE', base .. member, '4', '4'", "")
            assert not re.search(r"'(GET|GETRANGE|SET|APPEND|DUMP)'", text), name

    def test_scripts_find_the_byte_that_says_whether_a_value_is_encrypted(self) -> None:
        assert pack_header(b"k", Header(1))[4:5] == b"\0"
        assert pack_header(b"k", Header(1, True))[4:5] == b"\1"

    def test_no_script_takes_another_clock_than_the_servers(self) -> None:
        for name in (*ALL, *COMMON):
            assert "os." not in scripts.source(name).decode()

    @pytest.mark.parametrize("image", ["operator", "sidecar"])
    def test_both_images_are_built_with_the_scripts(self, image: str) -> None:
        patterns = read_patterns(REPOSITORY / f"{image}/Dockerfile.dockerignore")
        admitted = {path for path in context_files(REPOSITORY, patterns) if path.suffix == ".lua"}
        assert admitted == set(FOLDER.glob("*.lua"))
