"""The data keys of this process: read from the gate's files, used by the workers, overwritten at the end.

A key's bytes are in one bytearray and, while it is held, in OpenSSL's ciphers, which OpenSSL overwrites when they are
freed. A retired key is overwritten only when the last operation that uses it has ended: OpenSSL may read it again for
each operation, and a block must not be sealed with zeros.
"""

from __future__ import annotations

import hmac
import logging
import os
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from pathlib import Path

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvstrata.contract.policy.data_key import DATA_KEY_BYTES, parse_file_name
from kvstrata.contract.store.block_value import NONCE_BYTES

logger = logging.getLogger(__name__)

MAX_SEALS = 2**32
"""Blocks that one process seals with one key.

A nonce is 64 bits that the process draws for the key, and the number of the block. So a process never repeats one, and
P processes in the life of a key share one with a probability below P² / 2^65, however many blocks they seal: 2^-33 for
65,536 starts, 2^-25 for a million. One block of 8 MiB a millisecond gets to this bound in 49 days.
"""

_NUMBER_BITS = 32

_Stamp = tuple[int, int, int]
_Name = tuple[str, int]


class HeldKey:
    """One key and its cipher. `use` lends the cipher; `retire` overwrites the key once no operation uses it. `nonce` is
    for one block."""

    def __init__(self, generation: int, secret: bytearray, stamp: _Stamp) -> None:
        self.generation = generation
        self.stamp = stamp
        self._secret = secret
        self._cipher: AESGCM | None = AESGCM(secret)
        self._lock = threading.Lock()
        self._users = 0
        self._retired = False
        self._seals, self._drawn = 0, int.from_bytes(os.urandom(NONCE_BYTES - _NUMBER_BITS // 8))

    def __repr__(self) -> str:
        return f"HeldKey(generation={self.generation}, secret=***)"

    @property
    def spent(self) -> bool:
        return self._seals >= MAX_SEALS

    @property
    def overwritten(self) -> bool:
        """Whether its bytes are zeros: it was retired and no operation uses it."""
        with self._lock:
            return self._retired and not self._users

    def nonce(self) -> bytes | None:
        """Return the nonce of one more block; None if the key is spent. A forked process has others."""
        with self._lock:
            if self.spent:
                return None
            number, self._seals = self._seals, self._seals + 1
        return ((self._drawn ^ os.getpid()) << _NUMBER_BITS | number).to_bytes(NONCE_BYTES)

    @contextmanager
    def use(self) -> Iterator[AESGCM | None]:
        """Lend the cipher for one operation; None if the key was retired."""
        with self._lock:
            cipher = None if self._retired else self._cipher
            self._users += cipher is not None
        if cipher is None:
            yield None
            return
        try:
            yield cipher
        finally:
            del cipher
            with self._lock:
                self._users -= 1
                self._overwrite_if_over()

    def is_still(self, secret: bytearray, stamp: _Stamp) -> bool:
        """Whether a rewritten file holds this key, which then keeps its count of blocks; overwrites `secret` if so."""
        if not hmac.compare_digest(secret, self._secret):
            return False
        secret[:] = bytes(len(secret))
        self.stamp = stamp
        return True

    def retire(self) -> None:
        """Overwrite the key now, or when the last operation under way has ended."""
        with self._lock:
            self._retired = True
            self._overwrite_if_over()

    def _overwrite_if_over(self) -> None:
        if self._retired and self._users == 0:
            self._cipher = None
            self._secret[:] = bytes(len(self._secret))


class DataKeys:
    """All keys of one process. Thread-safe. Call `retire` only when the I/O on dropped keyspaces has ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[_Name, HeldKey] = {}
        self._sealing: dict[str, HeldKey] = {}
        self._reported: frozenset[_Name] = frozenset()
        self._retiring: list[tuple[str, HeldKey]] = []

    def follow(self, directory: Path, generations: Mapping[str, tuple[int, ...]]) -> None:
        """Read the files of the keys in `generations`, and replaced ones again; missing files are logged."""
        with self._lock:
            named = {(keyspace, number) for keyspace, numbers in generations.items() for number in numbers}
            held = dict(self._held)
            replaced: list[tuple[str, HeldKey]] = []
            for name, path, stamp in _files(directory):
                known = held.get(name)
                if name not in named or (known is not None and known.stamp == stamp):
                    continue
                secret = _read(path)
                if secret is None or (known is not None and known.is_still(secret, stamp)):
                    continue
                held[name] = HeldKey(name[1], secret, stamp)
                if known is not None:
                    replaced.append((name[0], known))
            self._held = held
            self._sealing = _sealing(held, generations)
            self._retire(replaced)
            missing = frozenset(named - held.keys())
            if missing and missing != self._reported:
                logger.warning("Of %d data keys that the policy names there is no file", len(missing))
            self._reported = missing

    def retire(self, generations: Mapping[str, tuple[int, ...]]) -> None:
        """Overwrite every key that is not in `generations`."""
        with self._lock:
            kept = {name: key for name, key in self._held.items() if name[1] in generations.get(name[0], ())}
            gone = [(keyspace, key) for (keyspace, number), key in self._held.items() if (keyspace, number) not in kept]
            self._held, self._sealing = kept, _sealing(kept, generations)
            self._retire(gone)

    def left(self, keyspaces: Collection[str]) -> int:
        """Return how many keys of these keyspaces are held, or retired but not overwritten yet."""
        with self._lock:
            self._retiring = [(keyspace, key) for keyspace, key in self._retiring if not key.overwritten]
            held = sum(keyspace in keyspaces for keyspace, _ in self._held)
            return held + sum(keyspace in keyspaces for keyspace, _ in self._retiring)

    def keyless(self, keyspaces: Set[str]) -> int:
        """Return how many keyspaces have no key to seal with."""
        return len(keyspaces - self._sealing.keys())

    def sealing(self, keyspace: str) -> HeldKey | None:
        """Return the key that seals blocks of `keyspace` now, None if there is none."""
        return self._sealing.get(keyspace)

    def opening(self, keyspace: str, generation: int) -> HeldKey | None:
        return self._held.get((keyspace, generation))

    def _retire(self, keys: Sequence[tuple[str, HeldKey]]) -> None:
        for _, key in keys:
            key.retire()
        self._retiring = [one for one in (*self._retiring, *keys) if not one[1].overwritten]


def _sealing(held: Mapping[_Name, HeldKey], generations: Mapping[str, tuple[int, ...]]) -> dict[str, HeldKey]:
    first = {keyspace: (keyspace, numbers[0]) for keyspace, numbers in generations.items() if numbers}
    return {keyspace: held[name] for keyspace, name in first.items() if name in held}


def _files(directory: Path) -> list[tuple[_Name, str, _Stamp]]:
    """Return name, path and identity of each key's file; a file that is replaced gets another identity."""
    found: list[tuple[_Name, str, _Stamp]] = []
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                name = parse_file_name(entry.name)
                if name is None:
                    continue
                with suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    found.append((name, entry.path, (status.st_ino, status.st_mtime_ns, status.st_ctime_ns)))
    except FileNotFoundError:
        return []
    except OSError as error:
        logger.warning("The data keys cannot be read: %s", error.strerror)
    return found


def _read(path: str) -> bytearray | None:
    """Return a key without a copy of it anywhere else; None for a file that does not hold one."""
    secret = bytearray(DATA_KEY_BYTES + 1)
    try:
        with open(path, "rb", buffering=0) as file:
            count = file.readinto(secret)
    except OSError as error:
        logger.warning("A data key cannot be read: %s", error.strerror)
        return None
    if count != DATA_KEY_BYTES or not any(secret):
        secret[:] = bytes(len(secret))
        logger.warning("A data key's file does not hold %d random bytes", DATA_KEY_BYTES)
        return None
    # Shrinking in place copies nothing: the allocation stays.
    del secret[DATA_KEY_BYTES:]
    return secret
