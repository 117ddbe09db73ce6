"""`kubectl kvstrata`: what people ask of this product from a terminal.

The file is named `kubectl-kvstrata` on the path, so that kubectl finds it. It runs anywhere with Python and
`cryptography`; what asks a cluster does it by the kubectl that is there, with the rights of who calls it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import receipt


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(prog="kubectl kvstrata", description="Ask kvstrata, and check what it says.")
    commands = parser.add_subparsers(dest="command", required=True)
    receipt.add_to(commands.add_parser("receipt", help="receipts of erasures"))
    options = parser.parse_args(arguments)
    code: int = options.run(options)
    return code


if __name__ == "__main__":
    sys.exit(main())
