"""Receipts that were issued once are read for ever, and the same facts give the same bytes.

The files of a version are never rewritten when the next one comes: its readers have to take them.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvstrata.clients.signing import is_signed
from kvstrata.contract.receipt.chain import check_chain
from kvstrata.contract.receipt.record import RECEIPT_VERSION, read_receipt
from kvstrata.contract.receipt.residue import ReceiptClaim
from tests.support.receipts import keys, rotated_chain

HERE = Path(__file__).parent
VERSIONS = range(1, RECEIPT_VERSION + 1)


def files(version: int) -> list[Path]:
    """A version's chain."""
    return sorted((HERE / f"v{version}").glob("*.json"))


@pytest.mark.parametrize("version", VERSIONS)
def test_a_chain_of_every_version_holds_and_proves_what_it_proved(version: int) -> None:
    receipts = [read_receipt(path.read_bytes()) for path in files(version)]
    chain = check_chain(receipts, is_signed, {keys(1).current_id})
    assert [one.link.version for one in chain.receipts] == [version] * 4
    assert [len(one.record.claimed) for one in chain.receipts] == [len(ReceiptClaim), 2, 0, len(ReceiptClaim)]


def test_the_same_facts_give_the_same_bytes_as_ever() -> None:
    made = rotated_chain()
    folder = HERE / f"v{RECEIPT_VERSION}"
    if os.environ.get("KVSTRATA_UPDATE_GOLDEN"):
        folder.mkdir(exist_ok=True)
        for number, data in enumerate(made, 1):
            (folder / f"{number}.json").write_bytes(data + b"\n")
    assert [path.read_bytes().removesuffix(b"\n") for path in files(RECEIPT_VERSION)] == made
