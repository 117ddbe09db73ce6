"""All files of a keyspace go, plain ones overwritten before that."""

from __future__ import annotations

import os
from pathlib import Path

from kvstrata.contract.messages.erase import Amount
from tests.files.file_driver import FILE_BYTES, FileDriver, block, blocks, file_of, files_in, purge
from tests.tiers.gate_stand_in import KEYSPACE_A, KEYSPACE_B


class TestPurge:
    def test_all_files_of_a_keyspace_go_and_nobody_elses(self, driver: FileDriver, directory: Path) -> None:
        driver.store([*blocks(KEYSPACE_A, 1, 2, 3), block(KEYSPACE_B, 1)])
        stray = file_of(directory, block()).parent / ".left.behind"
        stray.write_bytes(b"plain")
        purged = purge(driver.tier._eraser, [KEYSPACE_A])
        assert purged is not None
        assert (purged.gone, purged.held_blocks) == (Amount(3, 3 * FILE_BYTES), 0)
        assert "flash keeps earlier copies" in purged.residue
        assert "before were removed without being overwritten" in purged.residue
        assert files_in(directory) == [file_of(directory, block(KEYSPACE_B, 1))]
        assert not stray.parent.exists()
        again = purge(driver.tier._eraser, [KEYSPACE_A])
        assert again is not None
        assert again.gone.blocks == 3

    def test_plain_files_are_overwritten_before_they_go(self, driver: FileDriver, directory: Path) -> None:
        driver.store([block()], fill=9)
        kept = os.open(file_of(directory, block()), os.O_RDONLY)
        purge(driver.tier._eraser, [KEYSPACE_A])
        assert os.fstat(kept).st_nlink == 0
        assert os.pread(kept, 1 << 20, 0) == bytes(FILE_BYTES)
        os.close(kept)

    def test_what_comes_after_a_purge_stays(self, driver: FileDriver) -> None:
        driver.store([block()])
        purge(driver.tier._eraser, [KEYSPACE_A])
        driver.store([block()])
        assert driver.load([block()])[0] == [1]
