"""`kubectl kvstrata`: needs Python and `cryptography`; asks clusters by kubectl, with the caller's rights."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import receipt


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kubectl kvstrata", description="Query kvstrata, and verify its receipts.")
    commands = parser.add_subparsers(dest="command", required=True)
    receipt.add_to(commands.add_parser("receipt", help="receipts of erasures"))
    options = parser.parse_args(arguments)
    code: int = options.run(options)
    return code


if __name__ == "__main__":
    sys.exit(main())
