"""The reference of receipts: one page of Markdown, from the dataclasses that read and write them."""

from __future__ import annotations

from kvstrata.cli.generate.fieldtable import table
from kvstrata.contract.receipt.facts import Erasure
from kvstrata.contract.receipt.record import RECEIPT_VERSION, Fault, HandOver, Head
from kvstrata.contract.receipt.residue import Claim, Residue

HEADER = "<!-- Generated from operator/src/kvstrata/contract/receipt*.py by `make generate`. Do not edit. -->"


def build_receipt_reference() -> str:
    """Return the page."""
    lines = [HEADER, "", "# Receipts", ""]
    lines += [f"Version {RECEIPT_VERSION}. What it means, and how to verify one: [guide](../guides/receipts.md).", ""]
    lines += [
        'A file is `{"record": …, "signatures": [{"publicKey": …, "value": …}]}` as canonical JSON: UTF-8, keys in',
        "order, no white space. Signed with ed25519 are the bytes `kvstrata receipt`, a line feed, and the record's",
        "canonical JSON; the digest of a record is the SHA-256 of the latter. Every field is there, null where it says",
        "nothing.",
        "",
    ]
    lines += ["## Record", "", *table(Head)]
    lines += ["`receipt` is the version. Beside these a record has `erasure` and `claims`, or `handOver`.", ""]
    lines += ["## handOver", "", *table(HandOver)]
    lines += ["## erasure", "", *table(Erasure)]
    lines += ["## Claims", "", "Derived from the facts, in this order.", "", "| Claim | It says that |", "|---|---|"]
    lines += [f"| {claim.value} | {claim.meaning} |" for claim in Claim]
    lines += ["", "## Residue", "", "| Residue | What is left | Beside it nobody can claim |", "|---|---|---|"]
    for kind in Residue:
        denied = ", ".join(claim for claim in Claim if claim in kind.denies) or ("(ordered)" if kind.asked else "")
        lines.append(f"| {kind.value} | {kind.meaning} | {denied} |")
    lines += ["", "## Why a receipt or a chain is refused", "", "| Word | Meaning |", "|---|---|"]
    lines += [f"| {fault.value} | {fault.meaning} |" for fault in Fault]
    return "\n".join([*lines, ""])
