"""Data keys in a process: how they are used, and that no byte of them stays when they go."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvstrata.contract.policy.data_key import KEYS_DIRECTORY, DataKey
from kvstrata.contract.store.block_value import Header, pack_header, unpack_header
from kvstrata_sidecar.adapter.policy import data_keys as datakeys
from kvstrata_sidecar.adapter.policy.data_keys import DataKeys
from kvstrata_sidecar.adapter.tier.encryption import GcmSealer, NoKeyError, SealedOpening
from kvstrata_sidecar.gate.policy.volume import KeyFiles
from tests.adapter.memory_server import until
from tests.dataplane import memory_scan
from tests.tiers.data_keys import FIRST, SECOND, held
from tests.tiers.gate_stand_in import KEYSPACE_A


def test_a_key_in_use_is_overwritten_when_its_last_user_lets_go_and_nobody_gets_it_meanwhile(tmp_path: Path) -> None:
    keys = held(tmp_path, FIRST)
    one = keys.sealing(KEYSPACE_A)
    assert one is not None
    with one.use() as cipher:
        assert cipher is not None
        keys.retire({})
        assert bytes(one._secret) == FIRST.secret
        with one.use() as second:
            assert second is None
    assert bytes(one._secret) == bytes(32)
    assert one._cipher is None
    assert keys.sealing(KEYSPACE_A) is None


def test_a_spent_key_seals_no_more_but_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datakeys, "MAX_SEALS", 2)
    sealer = GcmSealer(held(tmp_path, FIRST))
    body = memoryview(bytes(100))
    for _ in range(2):
        assert sealer.refusal(KEYSPACE_A, seals=True) is None
        header, sealed = sealer.seal(KEYSPACE_A, b"name", body, 0)
    assert sealer.refusal(KEYSPACE_A, seals=True) == "key_spent"
    with pytest.raises(NoKeyError):
        sealer.seal(KEYSPACE_A, b"name", body, 0)
    assert sealer.refusal(KEYSPACE_A) is None
    kept = bytes(sealed)
    opening = sealer.open_into(KEYSPACE_A, b"name", memoryview(bytearray(100)))
    opening.parts[0][:], opening.parts[1][:] = header, kept
    assert opening.finish()


def test_a_process_repeats_no_nonce_and_shares_none_with_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound on nonces counts processes, not their writes."""
    one, other = (held(tmp_path, FIRST).sealing(KEYSPACE_A) for _ in range(2))
    assert one is not None
    assert other is not None
    drawn = [nonce for key in (one, other) for _ in range(100) if (nonce := key.nonce())]
    assert {len(nonce) for nonce in drawn} == {12}
    assert [int.from_bytes(nonce[8:], "big") for nonce in drawn] == [*range(100), *range(100)]
    assert len({nonce[:8] for nonce in drawn}) == 2
    monkeypatch.setattr(os, "getpid", lambda: 123_456)
    forked = one.nonce()
    assert forked is not None
    assert forked[:8] not in {nonce[:8] for nonce in drawn}


def test_blocks_are_sealed_with_nonces_of_the_key(tmp_path: Path) -> None:
    sealer, body = GcmSealer(held(tmp_path, FIRST)), memoryview(b"body")
    headers = [unpack_header(b"name", bytes(sealer.seal(KEYSPACE_A, b"name", body, 0)[0])) for _ in range(3)]
    found = [header.nonce for header in headers if header is not None]
    assert [nonce[8:] for nonce in found] == [number.to_bytes(4, "big") for number in range(3)]
    assert len({nonce[:8] for nonce in found}) == 1


def test_a_gate_that_starts_anew_does_not_reset_what_a_key_may_seal(tmp_path: Path) -> None:
    keys = held(tmp_path, FIRST)
    before = keys.sealing(KEYSPACE_A)
    GcmSealer(keys).seal(KEYSPACE_A, b"name", memoryview(b"body"), 0)
    KeyFiles(tmp_path).write({KEYSPACE_A: (FIRST,)})
    keys.follow(tmp_path / KEYS_DIRECTORY, {KEYSPACE_A: (1,)})
    assert keys.sealing(KEYSPACE_A) is before
    assert before is not None
    assert before._seals == 1
    assert bytes(before._secret) == FIRST.secret
    KeyFiles(tmp_path).write({KEYSPACE_A: (DataKey(1, SECOND.secret),)})
    keys.follow(tmp_path / KEYS_DIRECTORY, {KEYSPACE_A: (1,)})
    assert keys.sealing(KEYSPACE_A) is not before
    assert bytes(before._secret) == bytes(32)


@pytest.mark.parametrize("content", [b"", b"short", bytes(32), b"x" * 33])
def test_a_file_that_holds_no_key_gives_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / f"{KEYSPACE_A}.1").write_bytes(content)
    keys = DataKeys()
    keys.follow(tmp_path, {KEYSPACE_A: (1,)})
    assert keys.sealing(KEYSPACE_A) is None


def test_an_older_generation_never_stands_in_for_the_one_that_seals(tmp_path: Path) -> None:
    keys = held(tmp_path, FIRST)
    keys.follow(tmp_path / KEYS_DIRECTORY, {KEYSPACE_A: (2, 1)})
    assert keys.sealing(KEYSPACE_A) is None
    assert keys.opening(KEYSPACE_A, 1) is not None


def test_the_staging_buffer_is_one_for_all_blocks_and_holds_no_plaintext(tmp_path: Path) -> None:
    sealer = GcmSealer(held(tmp_path, FIRST))
    body = b"plaintext of a block" * 50
    sealer.seal(KEYSPACE_A, b"name", memoryview(body), 0)
    staging = sealer.staging._memory
    view = memoryview(bytearray(len(body)))
    opening = sealer.open_into(KEYSPACE_A, b"name", view)
    assert isinstance(opening, SealedOpening)
    sealer.seal(KEYSPACE_A, b"other", memoryview(body[:100]), 0)
    assert sealer.staging._memory is staging
    assert b"plaintext" not in bytes(staging)


@pytest.mark.parametrize(
    ("header", "damaged"),
    [
        (pack_header(b"name", Header(4, True, 1, bytes(12), codec=1)), False),
        (b"kvs9" + pack_header(b"name", Header(4, True, 1, bytes(12)))[4:], False),
        (pack_header(b"another", Header(4, True, 1, bytes(12))), True),
    ],
    ids=["with another codec", "of another format", "of another name"],
)
def test_a_value_that_a_later_version_wrote_is_a_miss_and_stays(tmp_path: Path, header: bytes, damaged: bool) -> None:
    opening = GcmSealer(held(tmp_path, FIRST)).open_into(KEYSPACE_A, b"name", memoryview(bytearray(4)))
    opening.parts[0][:] = header
    assert (opening.finish(), opening.damaged) == (False, damaged)


def test_threads_that_seal_while_keys_rotate_never_seal_with_zeros(tmp_path: Path) -> None:
    """What is sealed by then can be opened with the key of the generation that it names."""
    files, keys = KeyFiles(tmp_path), DataKeys()
    rings = [(FIRST,), (SECOND,), (FIRST, SECOND)]
    files.write({KEYSPACE_A: (FIRST, SECOND)})
    keys.follow(tmp_path / KEYS_DIRECTORY, {KEYSPACE_A: (1, 2)})
    made: list[tuple[bytes, bytes]] = []
    over = threading.Event()

    def seal() -> None:
        sealer, body = GcmSealer(keys), memoryview(b"b" * 5000)
        while not over.is_set() and len(made) < 5000:
            try:
                header, sealed = sealer.seal(KEYSPACE_A, b"name", body, 0)
            except NoKeyError:
                continue
            made.append((bytes(header), bytes(sealed)))

    threads = [threading.Thread(target=seal) for _ in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: len(made) > 0)
    for turn in range(60):
        ring = rings[turn % 3]
        generations = {KEYSPACE_A: tuple(key.generation for key in ring)}
        keys.follow(tmp_path / KEYS_DIRECTORY, generations)
        keys.retire(generations)
    over.set()
    for thread in threads:
        thread.join()
    keys.follow(tmp_path / KEYS_DIRECTORY, {KEYSPACE_A: (1, 2)})
    opener = GcmSealer(keys)
    assert made
    for header, sealed in made:
        opening = opener.open_into(KEYSPACE_A, b"name", memoryview(bytearray(5000)))
        opening.parts[0][:], opening.parts[1][:] = header, sealed
        assert opening.finish()


CHILD = """
import sys
from pathlib import Path
from kvstrata_sidecar.adapter.policy.data_keys import DataKeys
from kvstrata_sidecar.adapter.tier.encryption import GcmSealer
keyspace, directory = sys.argv[1], Path(sys.argv[2])
keys = DataKeys()
keys.follow(directory, {keyspace: (2, 1)})
sealer, body, name = GcmSealer(keys), memoryview(bytes(100_000)), b"name"
for _ in range(20):
    header, sealed = sealer.seal(keyspace, name, body, 0)
    kept = bytes(sealed)
    opening = sealer.open_into(keyspace, name, memoryview(bytearray(len(body))))
    opening.parts[0][:], opening.parts[1][:] = header, kept
    assert opening.finish()
steps = ({keyspace: (2, 1)}, {keyspace: (2,)}, {})
for generations in steps:
    keys.follow(directory, generations)
    keys.retire(generations)
    print("done", flush=True)
    sys.stdin.readline()
"""


def test_no_byte_of_a_key_is_left_in_the_process_when_its_generation_or_keyspace_goes(tmp_path: Path) -> None:
    first, second = DataKey(1, os.urandom(32)), DataKey(2, os.urandom(32))
    KeyFiles(tmp_path).write({KEYSPACE_A: (second, first)})
    # Halves as well: nothing may keep a part.
    patterns = [part for key in (first, second) for part in (key.secret[:16], key.secret[16:])]
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, KEYSPACE_A, str(tmp_path / KEYS_DIRECTORY)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert child.stdin
    assert child.stdout
    found = []
    try:
        for _ in range(3):
            assert child.stdout.readline() == "done\n"
            found.append(memory_scan.in_process(child.pid, patterns))
            child.stdin.write("\n")
            child.stdin.flush()
    finally:
        child.kill()
        child.wait()
    both, newest, none = found
    assert all(both), "the search finds keys that are held"
    assert newest[:2] == [0, 0]
    assert all(newest[2:])
    assert none == [0, 0, 0, 0]


def test_a_key_is_left_until_it_is_overwritten(tmp_path: Path) -> None:
    keys = held(tmp_path, FIRST, SECOND)
    assert (keys.left([KEYSPACE_A]), keys.left(["f" * 32])) == (2, 0)
    one = keys.sealing(KEYSPACE_A)
    assert one is not None
    with one.use():
        keys.retire({})
        assert keys.left([KEYSPACE_A]) == 1, "somebody uses one of them"
    assert keys.left([KEYSPACE_A]) == 0
