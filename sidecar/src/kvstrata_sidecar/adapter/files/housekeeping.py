"""The thread that maintains a tier's directory: opens and scans it, removes expired blocks, probes a failed disk.

Only it and the workers touch the disk, so a hanging disk blocks nothing else.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from contextlib import suppress
from itertools import islice

from kvstrata.contract.store.block_file import PAGE_BYTES, keyspace_of, parse_file_name, parts_of
from kvstrata.contract.store.redis_keys import declared, fingerprint_of
from kvstrata_sidecar.adapter.files.disk import Found
from kvstrata_sidecar.adapter.files.exchanges import Files
from kvstrata_sidecar.adapter.files.file_index import SLICE, in_slices
from kvstrata_sidecar.adapter.files.health import DiskError, Fault
from kvstrata_sidecar.adapter.files.space import SPARE_S
from kvstrata_sidecar.adapter.tier.threads import Upkeep

logger = logging.getLogger(__name__)

TURN_S = 1.0
"""Longest delay until expired blocks are removed and the free space is checked."""

FORMER_AT_ONCE = 500
"""Files of other identities removed in a turn; turns take place at least once a second."""

SCOPES_AT_ONCE = 64
STRANDED_AT_ONCE = 256

REMEMBER_S = 60.0
NOTE_USES_S = 600.0
RECOVER_AGAIN_S = 30.0

FORMER_LIFE_S = 24 * 3600.0
"""How long after this start blocks of other identities are kept: a model that is rolled back finds them again."""

USED_UP_SHARE = 0.9
"""Share of the room from which blocks are reported short of it: each choice frees a little ahead."""

FUTURE_S = 60.0
"""Tolerance for files computed in the future."""


class Housekeeper(Upkeep):
    """Maintains one directory from `start` until `close`."""

    def __init__(self, files: Files) -> None:
        super().__init__(files.tier.name, "housekeeper")
        self._files = files
        self._wake = threading.Event()
        self.wake = self._wake.set
        self._closed = False
        self._opened = False
        self._remember_at_s = 0.0
        self._note_uses_at_s = files.clocks.now_s() + NOTE_USES_S
        self._recover_at_s = 0.0
        self._emptied: set[str] = set()
        self._found: dict[str, list[bytes]] = {}
        self._former: list[bytes] = []
        self._former_go_at_s = files.clocks.now_s() + FORMER_LIFE_S
        self.floor_reached = False

    def close(self) -> None:
        self._closed = True
        self._wake.set()

    def run(self) -> None:
        while not self._closed:
            try:
                self.turn()
            except DiskError as error:
                self._files.health.failed(error)
            except Exception:
                logger.exception("The files of a tier could not be looked after; it is tried again")
            self._wake.wait(self._pause_s())
            self._wake.clear()
        with suppress(DiskError):
            self.note_uses()
        if self._opened and self._files.health.breaker.closed:
            for spare in self._files.index.take_spares():
                self._files.discard(spare)
        self._files.disk.close()

    def turn(self) -> None:
        """Do the work that is due now. Raises DiskError."""
        files = self._files
        files.index.follow(files.enforcement.view)
        if self._opened and not files.disk.still_there():
            self._lose()
        if files.health.breaker.begin_probe():
            self._probe()
        if not self._opened or not files.health.breaker.closed:
            return
        if files.health.recovering and files.clocks.now_s() >= self._recover_at_s:
            self._recover()
        self._measure()
        while not self._closed and (victims := files.index.due(SCOPES_AT_ONCE)):
            self._emptied |= {keyspace_of(key) for key in victims}
            files.evict(victims)
        if files.clocks.now_s() >= self._former_go_at_s:
            self._remove_former()
        for key in files.index.take_stranded(STRANDED_AT_ONCE):
            files.remove(key)
        for spare in files.index.take_spares(idle_s=SPARE_S):
            files.discard(spare)
        self._forget_directories()
        if files.clocks.now_s() >= self._note_uses_at_s:
            self._note_uses_at_s = files.clocks.now_s() + NOTE_USES_S
            self.note_uses()

    def note_uses(self) -> None:
        files, now_s = self._files, self._files.clocks.now_s()
        for key, computed_s in files.index.take_touched():
            to_wall = files.clocks.to_wall
            files.disk.used(keyspace_of(key), files.name(key), to_wall(computed_s), to_wall(now_s))

    def _pause_s(self) -> float:
        health, index = self._files.health, self._files.index
        moments = [TURN_S, health.breaker.probe_in_s()]
        if self._opened:
            moments.append(index.next_due_in_s())
        return min(moment for moment in moments if moment is not None)

    def _probe(self) -> None:
        files = self._files
        try:
            if self._opened:
                files.disk.probe()
            else:
                files.disk.open()
                files.clocks.start(files.disk.remembered_clock())
                self._opened = files.health.recovering = True
        except DiskError as error:
            if error.fault in (Fault.FULL, Fault.READ_ONLY) and self._opened:
                # The disk answers and can be read; only writes fail.
                files.health.failed(error)
                files.health.breaker.probe_succeeded()
                return
            files.health.breaker.probe_failed(str(error))
        else:
            files.health.breaker.probe_succeeded()

    def _lose(self) -> None:
        """Forget everything: the directory was removed or replaced."""
        self._opened = False
        self._files.disk.close()
        self._files.index.empty()
        self._files.health.recovering = True
        self._files.health.breaker.failed("the tier's directory was removed or replaced", fatal=True)

    def _recover(self) -> None:
        """Enter existing blocks and remove other files, a slice at a time; then allow stores."""
        files = self._files
        uses: list[tuple[float, bytes]] = []
        by_identity: dict[str, list[bytes]] = defaultdict(list)
        unremoved: DiskError | None = None
        scan = files.disk.scan()
        while found := list(islice(scan, SLICE)):
            if self._closed:
                return
            files.index.follow(files.enforcement.view)
            entered = []
            for one in found:
                key = self._key_of(one)
                if key is None:
                    unremoved = self._discard(one) or unremoved
                    continue
                entered.append((key, one.size_bytes, files.clocks.from_wall(one.computed_s)))
                uses.append((one.used_s, key))
                by_identity[parts_of(key)[0]].append(key)
            files.index.found(entered)
            files.counters.add("files_found", len(entered))
        self._found = by_identity
        uses.sort()
        for batch in in_slices([key for _, key in uses]):
            files.index.put_in_order(batch)
        # Blocks used during the scan were used last.
        files.index.put_in_order([key for key, _ in files.index.take_touched()])
        self._measure()
        if unremoved is not None:
            # The bytes of an unremoved file are not counted: scan again before anything is stored.
            self._recover_at_s = files.clocks.now_s() + RECOVER_AGAIN_S
            raise unremoved
        files.counters.add("orphan_scans")
        files.health.recovering = False

    def _remove_former(self) -> None:
        """Remove one batch of files of other resolved identities, so that other work is not delayed. Without an engine
        that has reported its fingerprint, those of the model's declared identity stay."""
        found, self._found = self._found, {}
        used = self._files.enforcement.fingerprints()
        for identity, keys in found.items():
            is_own = declared(identity) == self._files.params.identity and fingerprint_of(identity)
            if not is_own or (used and fingerprint_of(identity) not in used):
                self._former += keys
            elif not used:
                self._found[identity] = keys
        if not self._former:
            return
        batch, self._former = self._former[:FORMER_AT_ONCE], self._former[FORMER_AT_ONCE:]
        taken = self._files.index.take_unused(batch)
        self._files.counters.add("former_removed", len(taken))
        for key in taken:
            self._emptied.add(keyspace_of(key))
            self._files.remove(key)

    def _discard(self, found: Found) -> DiskError | None:
        self._files.counters.add("orphan_files")
        try:
            self._files.disk.unlink(found.keyspace, found.name)
        except DiskError as error:
            return error
        self._files.counters.add("files_removed")
        return None

    def _key_of(self, found: Found) -> bytes | None:
        """Return the block of a file, None for an unexpected file."""
        parsed = parse_file_name(found.keyspace, found.name)
        wall_s = self._files.clocks.to_wall(self._files.clocks.now_s())
        if (
            parsed is None
            or parsed[1] is not self._files.tier.encrypts
            or found.size_bytes <= 0
            or found.size_bytes % PAGE_BYTES
            or found.computed_s > wall_s + FUTURE_S
        ):
            return None
        return parsed[0]

    def _measure(self) -> None:
        files = self._files
        free_bytes, all_bytes = files.disk.room()
        room_bytes = files.index.used_bytes + free_bytes - all_bytes * files.tier.free_floor_percent / 100
        used_up = files.index.used_bytes >= room_bytes * USED_UP_SHARE
        self.floor_reached = room_bytes < files.tier.capacity_bytes and used_up
        files.index.set_room(room_bytes)
        now_s = files.clocks.now_s()
        if now_s >= self._remember_at_s:
            self._remember_at_s = now_s + REMEMBER_S
            files.disk.remember_clock(files.clocks.to_wall(now_s))

    def _forget_directories(self) -> None:
        emptied, self._emptied = self._emptied, set()
        for keyspace in emptied:
            if not self._files.index.condemned((keyspace,)):
                self._files.disk.forget(keyspace)
