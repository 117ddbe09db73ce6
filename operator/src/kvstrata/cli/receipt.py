"""`kubectl kvstrata receipt verify|list|export|keys`.

`verify` needs no cluster and no network. Exit codes: 0 everything holds and a pinned key vouches for it; 1 something is
refused; 2 the command line or a file cannot be read; 3 everything holds, and no pinned key vouches for the signing key;
4 it holds and is vouched for, and less is proven than was required.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvstrata.cli import kubectl
from kvstrata.cli.kubectl import Cluster
from kvstrata.cli.receipt_report import COLUMNS, describe, describe_chain, row
from kvstrata.cli.text import CommandError, table
from kvstrata.clients.signing import SigningError, is_signed, read_public_pem
from kvstrata.contract.receipt.chain import Chain, check_chain, check_one
from kvstrata.contract.receipt.record import MAX_RECEIPT_BYTES, Fault, Receipt, ReceiptError, key_id, read_receipt
from kvstrata.contract.receipt.residue import ReceiptClaim
from kvstrata.objects import labels, names
from kvstrata.objects.erasure.receipts import read_receipt_objects

HOLDS, REFUSED, UNUSABLE, UNVOUCHED, LACKING = range(5)
DIGEST = re.compile("[0-9a-f]{64}")


def add_to(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="subcommand", required=True)
    verify = commands.add_parser(
        "verify", help="check receipts offline", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    verify.add_argument("files", nargs="+", type=Path, metavar="FILE", help="receipts, or folders of them (*.json)")
    verify.add_argument(
        "--public-key", action="append", type=Path, default=[], metavar="PEM", help="a key that you trust; repeatable"
    )
    verify.add_argument("--chain", action="store_true", help="the files are one domain's whole chain")
    verify.add_argument("--head", metavar="DIGEST", help="the digest that the chain must end with")
    verify.add_argument(
        "--require", action="append", choices=[str(claim) for claim in ReceiptClaim], default=[], metavar="CLAIM",
        help=f"fail unless every erasure proves it; repeatable: {', '.join(ReceiptClaim)}",
    )  # fmt: skip
    verify.add_argument("--no-residue", action="store_true", help="fail if an erasure left anything")
    verify.set_defaults(run=_verify, failed=UNUSABLE)
    for name, run, what in (
        ("list", _list, "list the receipts in a cluster"),
        ("export", _export, "write receipts out of a cluster into files, unchanged"),
        ("keys", _keys, "write the public keys out of a cluster, for those who pin them"),
    ):
        command = commands.add_parser(name, help=what, description=what)
        kubectl.add_cluster(command, "kvstrata-system", "the operator's namespace")
        if name != "keys":
            command.add_argument("--domain", metavar="ID", help="of this domain only")
        if name != "list":
            command.add_argument("--to", type=Path, default=Path(), metavar="FOLDER", help="where to (default: here)")
        command.set_defaults(run=run, failed=UNUSABLE)


def _verify(options: argparse.Namespace) -> int:
    pinned = frozenset(map(_pinned, options.public_key))
    if options.head is not None and not (options.chain and DIGEST.fullmatch(options.head)):
        raise CommandError("--head is a digest of 64 hexadecimal digits, and only for --chain")
    code = HOLDS
    receipts: list[tuple[Path, Receipt, bool]] = []
    for path in _files(options.files):
        try:
            receipt = read_receipt(_bytes(path))
            # Keys of a chain may be vouched for by a hand-over from a pinned key.
            vouched = check_one(receipt, is_signed, frozenset() if options.chain else pinned)
        except ReceiptError as error:
            sys.stdout.write(f"REFUSED {path}: {error}\n")
            code = REFUSED
        else:
            receipts.append((path, receipt, vouched))
    if options.chain:
        # Without the refused receipts, the chain would be reported as having a gap.
        if code == REFUSED:
            return REFUSED
        try:
            chain = check_chain([receipt for _, receipt, _ in receipts], is_signed, pinned, options.head)
        except ReceiptError as error:
            sys.stdout.write(f"REFUSED as a chain: {error}\n")
            return REFUSED
        return _report_chain(options, receipts, chain)
    for path, receipt, vouched in receipts:
        sys.stdout.write(describe(str(path), receipt, vouched=vouched))
        code = code or (HOLDS if vouched else UNVOUCHED)
    return code or _lacking(options, [receipt for _, receipt, _ in receipts])


def _report_chain(options: argparse.Namespace, receipts: Sequence[tuple[Path, Receipt, bool]], chain: Chain) -> int:
    paths = {receipt.link.digest: path for path, receipt, _ in receipts}
    for receipt in chain.receipts:
        vouched = receipt.link.head.signer not in chain.unvouched
        sys.stdout.write(describe(str(paths[receipt.link.digest]), receipt, vouched=vouched))
    sys.stdout.write(describe_chain(chain, ends_as_expected=options.head is not None))
    return UNVOUCHED if chain.unvouched else _lacking(options, chain.receipts)


def _lacking(options: argparse.Namespace, receipts: Sequence[Receipt]) -> int:
    erasures = [(one.record.claimed, one.record.erasure, one.link.head.sequence) for one in receipts]
    code = HOLDS
    for claimed, erasure, number in erasures:
        if erasure is None:
            continue
        missing = [claim for claim in options.require if claim not in claimed]
        left = [item.kind for item in erasure.residue] if options.no_residue else []
        if missing or left:
            what = [f"does not prove {', '.join(missing)}"] if missing else []
            what += [f"leaves {', '.join(dict.fromkeys(left))}"] if left else []
            sys.stdout.write(f"NOT ENOUGH receipt {number} {' and '.join(what)}\n")
            code = LACKING
    if options.require and not any(erasure for _, erasure, _ in erasures):
        sys.stdout.write("NOT ENOUGH there is no erasure among these\n")
        return LACKING
    return code


def _list(options: argparse.Namespace) -> int:
    rows, code = [], HOLDS
    for name, found in receipts(kubectl.cluster(options), options.domain):
        try:
            if isinstance(found, ReceiptError):
                raise found
            receipt = read_receipt(found)
            check_one(receipt, is_signed, ())
            rows.append(row(receipt))
        except ReceiptError as error:
            sys.stderr.write(f"REFUSED {name}: {error}\n")
            code = REFUSED
    sys.stdout.write(table(COLUMNS, *rows))
    return code


def _export(options: argparse.Namespace) -> int:
    code = HOLDS
    options.to.mkdir(parents=True, exist_ok=True)
    for name, found in receipts(kubectl.cluster(options), options.domain):
        if isinstance(found, ReceiptError):
            sys.stderr.write(f"REFUSED {name}: {found}\n")
            code = REFUSED
            continue
        path = options.to / f"{name}.json"
        path.write_bytes(found)
        sys.stdout.write(f"{path}\n")
    return code


def _keys(options: argparse.Namespace) -> int:
    options.to.mkdir(parents=True, exist_ok=True)
    published = kubectl.cluster(options).get("configmap", names.RECEIPT_PUBLIC_KEYS).get("data") or {}
    for name, pem in sorted(published.items()):
        identifier = name.removesuffix(".pem")
        try:
            matches = key_id(read_public_pem(pem.encode())) == identifier
        except SigningError:
            matches = False
        if not matches:
            raise CommandError(f"the key published as {identifier[:16]} is another, or missing")
        path = options.to / f"{identifier}.pem"
        path.write_text(pem, encoding="utf-8")
        sys.stdout.write(f"{path}\n")
    return HOLDS


def _pinned(path: Path) -> str:
    try:
        return key_id(read_public_pem(_bytes(path)))
    except (SigningError, ReceiptError) as error:
        raise CommandError(f"{path}: {error}") from None


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        inside = sorted(path.glob("*.json"))
        if not inside:
            raise CommandError(f"{path} holds no *.json")
        yield from inside


def _bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_RECEIPT_BYTES + 2)
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error.strerror}") from None
    if len(data) > MAX_RECEIPT_BYTES + 1:
        raise ReceiptError(Fault.MALFORMED, f"{path} has more than {MAX_RECEIPT_BYTES} bytes")
    return data


def receipts(cluster: Cluster, domain: str | None = None) -> Iterator[tuple[str, bytes | ReceiptError]]:
    """Yield every receipt by the name of its object: its bytes, or its error."""
    selector = f"{labels.NAME}={labels.of_receipts(labels.RECEIPT)[labels.NAME]}"
    selector += f",{labels.DOMAIN}={domain}" if domain else ""
    items = cluster.get("configmaps", f"--selector={selector}")["items"]
    yield from read_receipt_objects({item["metadata"]["name"]: item for item in items})
