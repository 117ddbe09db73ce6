"""Reports of receipts as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from kvstrata.cli.text import plain
from kvstrata.contract.receipt.chain import Chain
from kvstrata.contract.receipt.claims import claims
from kvstrata.contract.receipt.facts import IMAGE_OF, Erasure, Statement, Subject
from kvstrata.contract.receipt.record import HandOverKind, Receipt
from kvstrata.contract.receipt.residue import ReceiptClaim
from kvstrata.contract.receipt.vocabulary import Standing, SubjectKind

COLUMNS = ("DOMAIN", "NAMESPACE", "NUMBER", "WHAT", "NAME", "SCOPE", "PROVEN", "LEFT", "ISSUED", "DIGEST")
_STANDINGS = {
    Standing.ACKED: "acknowledged",
    Standing.ENDED: "ended",
    Standing.FENCED: "could not be reached and were waited for",
    Standing.OPEN: "open",
}


def describe(file: str, receipt: Receipt, *, vouched: bool) -> str:
    return "".join(f"{line}\n" for line in _lines(file, receipt, vouched))


def describe_chain(chain: Chain, *, ends_as_expected: bool) -> str:
    newest = chain.receipts[-1].link
    head = newest.head
    lines = [f"CHAIN of domain {head.domain} holds: numbers 1 to {head.sequence}, each follows the one before"]
    lines.append(f"  its newest digest is {newest.digest}")
    if ends_as_expected:
        lines.append("  that is the one it has to end with: no later receipt is missing")
    else:
        lines.append("  NOT PROVEN that no later receipt is missing: give its newest digest with --head")
    lines += [f"  NOT PROVEN whose key {key[:16]} is" for key in dict.fromkeys(chain.unvouched)]
    return "".join(f"{line}\n" for line in lines)


def row(receipt: Receipt) -> tuple[str, ...]:
    head, erasure, change = receipt.link.head, receipt.record.erasure, receipt.record.hand_over
    place = (head.domain, plain(head.namespace), str(head.sequence))
    digest = receipt.link.digest[:16]
    if erasure is None:
        at = change.at if change else ""
        return (*place, "KeyHandOver", "", "", "", "", at, digest)
    proven = ",".join(receipt.record.claimed) or "nothing"
    left = ",".join(dict.fromkeys(item.kind for item in erasure.residue)) or "nothing"
    what, name = str(erasure.subject.kind), plain(erasure.subject.name)
    return (*place, what, name, _scope(erasure.subject), proven, left, erasure.timings.issued, digest)


def _lines(file: str, receipt: Receipt, vouched: bool) -> Iterator[str]:
    head, erasure = receipt.link.head, receipt.record.erasure
    yield f"HOLDS {plain(file)}: number {head.sequence} of domain {head.domain}, namespace {plain(head.namespace)}"
    yield f"  digest     {receipt.link.digest}"
    pinned = "vouched for by a given key" if vouched else "NOT PROVEN whose key that is: give one with --public-key"
    yield f"  signed by  key {head.signer}"
    yield f"             {pinned}"
    if erasure is None:
        yield from _hand_over(receipt)
        return
    yield from _order(erasure.subject)
    yield "  proven, for the listed revoked blocks:"
    for claim in receipt.record.claimed:
        yield f"    {claim}: {claim.meaning}"
        yield from (f"      {line}" for line in _by_whom(claim, erasure))
    if not receipt.record.claimed:
        yield "    nothing"
    yield from _not_proven(receipt.record.claimed, erasure)
    yield "  left:"
    for item in erasure.residue:
        about = f" {plain(item.about)}" if item.about else ""
        count = f" ({item.count})" if item.count else ""
        yield f"    {item.kind}{about}{count}: {item.kind.meaning}"
    if not erasure.residue:
        yield "    nothing that the receipt knows of"
    models = [one for one in erasure.versions if one.name.startswith(f"{SubjectKind.MODEL} ")]
    images = [one for one in erasure.versions if one.name.startswith(IMAGE_OF)]
    others = [f"{plain(one.name)} {plain(one.version)}" for one in erasure.versions if one not in (*models, *images)]
    by = ", ".join(others) or "unknown versions"
    for one in models:
        yield f"  computed by {plain(one.name)}, identity {plain(one.version)}, {one.count} pods at the beginning"
    yield from (f"  {plain(one.name)}, {plain(one.version)}, {one.count} pods" for one in images)
    yield f"  from {erasure.timings.started} to {erasure.timings.issued}, by {by}"


def _hand_over(receipt: Receipt) -> Iterator[str]:
    change = receipt.record.hand_over
    if change is None:
        return
    yield f"  from number {receipt.link.head.sequence + 1} on key {change.new_key} signs, in use since {change.at}"
    if change.kind is HandOverKind.ROTATED:
        yield "  both keys signed this"
    else:
        yield "  the previous key was lost and did not sign this: distribute the new key to those who trusted it"


def _order(subject: Subject) -> Iterator[str]:
    yield f"  order      {subject.kind} {plain(subject.name)} ({subject.uid}): {_scope(subject)}, {subject.mode}"
    if subject.tenants:
        yield f"  tenants    {', '.join(map(plain, subject.tenants))}"
    if subject.tiers:
        yield f"  tiers      only {', '.join(map(plain, subject.tiers))}"
    if subject.reason:
        yield f"  reason     {plain(subject.reason)}"


def _by_whom(claim: ReceiptClaim, erasure: Erasure) -> Iterator[str]:
    nodes = [node for tier in erasure.tiers for node in tier.nodes]
    match claim:
        case ReceiptClaim.UNREACHABLE:
            standings = Counter(pod.standing for pod in erasure.pods)
            pods = ", ".join(f"{standings[one]} {_STANDINGS[one]}" for one in Standing if standings[one])
            yield f"{len(erasure.revoked)} revoked; pods, each by its own token: {pods or 'there was none'}"
        case ReceiptClaim.KEYS_REVOKED:
            yield f"{len(erasure.keys)} keys; {_stated_by(key.removed for key in erasure.keys)}"
        case ReceiptClaim.KEYS_DESTROYED:
            yield _stated_by(key.destroyed for key in erasure.keys)
        case ReceiptClaim.ERASED:
            keys, size = sum(node.deleted.keys for node in nodes), sum(node.deleted.bytes for node in nodes)
            stated = _stated_by(node.erased for node in nodes)
            yield f"{len(nodes)} servers: {keys} keys, {size} bytes deleted; {stated}"
            inside = [one.erased for pod in erasure.pods for one in pod.tiers if one.erased]
            blocks, size = sum(one.erased for one in inside), sum(one.bytes for one in inside)
            yield f"{len(inside)} tiers inside pods, as the pods report: {blocks} blocks, {size} bytes"
        case ReceiptClaim.VERIFIED:
            look = erasure.verification
            probes = [pod.probes for pod in erasure.pods if pod.probes]
            asked, missed = sum(one.asked for one in probes), sum(one.missed for one in probes)
            if look:
                yield f"{_stated_by([look.by])}: {len(nodes)} servers empty, the same slots before and after"
            yield f"{len(probes)} pods asked for {asked} keys that they could have read before: {missed} missed"


def _stated_by(statements: Iterable[Statement | None]) -> str:
    parties = {f"{one.by} {one.name}" for one in statements if one}
    return "stated by " + (", ".join(sorted(parties)) or "no party")


def _not_proven(claimed: Sequence[ReceiptClaim], erasure: Erasure) -> Iterator[str]:
    missing = [claim for claim in ReceiptClaim if claim not in claimed]
    if not missing:
        return
    yield "  not proven:"
    able = claims(erasure)
    for claim in missing:
        why = [str(item.kind) for item in erasure.residue if claim in item.kind.denies]
        because = f" (because of {', '.join(dict.fromkeys(why))})" if why else ""
        modest = " (the facts would bear it)" if claim in able else ""
        yield f"    {claim}: that {claim.meaning}{because}{modest}"


def _scope(subject: Subject) -> str:
    return f"{subject.scope}/{plain(subject.scope_name)}" if subject.scope_name else str(subject.scope)
