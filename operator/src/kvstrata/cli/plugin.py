"""`kubectl kvstrata`: asks clusters by kubectl, with the caller's rights. Receipts need `cryptography`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from kvstrata.cli.text import CommandError, plain

COMMANDS = {
    "keys": ("keys", "API keys of a model's callers"),
    "receipt": ("receipt", "receipts of erasures"),
    "report": ("report.command", "an HTML file about the use of the cache"),
    "size": ("size.command", "sizes of a model's KV cache, and when restoring it pays"),
}
"""By name: the module with `add_to`, and its subject. `add_to` sets `run`, and `failed`, its exit code for a
CommandError."""

IMPOSSIBLE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        prog="kubectl kvstrata", description="Manage callers of kvstrata, query it, and verify its receipts."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (module, subject) in COMMANDS.items():
        command = commands.add_parser(name, help=subject)
        if given[:1] != [name]:
            continue
        # Only the named one is imported: the others may need packages that are not installed.
        try:
            import_module(f"kvstrata.cli.{module}").add_to(command)
        except ModuleNotFoundError as missing:
            sys.stderr.write(f"{name} needs the Python package {missing.name}: pip install '.[plugin]' in a checkout\n")
            return IMPOSSIBLE
    options = parser.parse_args(given)
    try:
        code: int = options.run(options)
    except CommandError as error:
        sys.stderr.write("".join(f"{plain(line)}\n" for line in str(error).splitlines()))
        return int(options.failed if error.code is None else error.code)
    return code


if __name__ == "__main__":
    sys.exit(main())
