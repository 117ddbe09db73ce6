"""Messages of another version that this one does not read: `python -m tests.golden.wire.unread FOLDER` prints them."""

from __future__ import annotations

import sys
from pathlib import Path

from kvstrata.contract import ContractError
from tests.golden.wire.cases import cases


def unread(folder: Path) -> list[str]:
    """Decode the messages in a folder of golden files; return those that are refused, and how many were read."""
    known = {(case.part, case.name): case for case in cases()}
    refused, read = [], 0
    for path in sorted(folder.glob("*.txt")):
        for line in path.read_text(encoding="utf-8").split("\n"):
            name, _, text = line.partition(": ")
            if (case := known.get((path.stem, name))) is not None:
                try:
                    case.decode(text.encode())
                    read += 1
                except ContractError as error:
                    refused.append(f"{path.stem} {name}: {error}")
    return [*refused, f"{read} read"]


if __name__ == "__main__":
    print("\n".join(unread(Path(sys.argv[1]))))
