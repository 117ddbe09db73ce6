"""The life of a managed tier's certificate: renewed, reloaded without a restart, verified by handshakes.

Kubelets update a Secret's files within a minute or two; a server that reloads earlier must repeat it. A new authority
is trusted before it issues anything, and the former one until every server shows the new certificate: clients read
`ca.crt` at each connect, with delay. For a user's own Secret, the user lists both authorities in `ca.crt`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvstrata.api.conditions import ConditionType
from kvstrata.api.reasons import TierReason
from kvstrata.api.scalars import format_timestamp
from kvstrata.model.redis.credentials import TlsFacts
from kvstrata.plan.actions import Decision, Order, Turn
from kvstrata.plan.conditions import Finding, false, listed, true
from kvstrata.plan.redis.passwords import OVERLAP_S, SETTLE_S, ServersCase, Step, unheard

ASK_AGAIN_S = 5.0


@dataclass(frozen=True, slots=True)
class CertificateCase(ServersCase):
    """`issued`: the operator issues the certificate in `secret`; `names` are its required subjects."""

    facts: TlsFacts
    secret: str
    issued: bool
    names: tuple[str, ...] = ()

    @property
    def others(self) -> tuple[str, ...]:
        return tuple(one.server for one in self.answering if one.certificate != self.facts.fingerprint)


def next_step(case: CertificateCase) -> Step | None:
    """Return the next step for a tier's certificate, or None if there is nothing to do or to wait for."""
    if case.facts.problem:
        return None
    rules = RULES if case.issued else (load,)
    return next((step for rule in rules if (step := rule(case)) is not None), None)


def trust(case: CertificateCase) -> Step | None:
    """Clients trust the operator's authority before a server shows a certificate that it issued."""
    if case.facts.authority in case.facts.trusted:
        return None
    why = "clients come to trust the operator's new authority beside the former"
    return Step(Decision(TierReason.CHANGING_AUTHORITY, why), turn=Turn.TRUST)


def issue(case: CertificateCase) -> Step | None:
    """A certificate is replaced when it expires soon, lacks a name, or has another authority. A valid one waits until
    clients trust the new authority; an expired one does not."""
    facts = case.facts
    lacking = bool(facts.names) and not facts.names.issuperset(case.names)
    old = facts.renew_at is not None and facts.renew_at <= case.now
    if facts.issued_by_it and not old and not lacking:
        return None
    left_s = _left_s(case, SETTLE_S)
    if not facts.issued_by_it and not _has_ended(case) and left_s > 0:
        why = "clients are given time to read the operator's new authority"
        return Step(Decision(TierReason.CHANGING_AUTHORITY, why), again_s=left_s)
    return Step(Decision(TierReason.LOADING_CERTIFICATE, "a new certificate is issued"), turn=Turn.ISSUE)


def load(case: CertificateCase) -> Step | None:
    if not case.others:
        return None
    why = Decision(
        TierReason.LOADING_CERTIFICATE,
        f"{listed(case.others)} do not show the certificate of Secret {case.secret} yet; its files reach pods "
        "within two minutes",
    )
    return Step(why, dict.fromkeys(case.others, (Order.LOAD_CERTIFICATE,)), again_s=ASK_AGAIN_S)


def distrust(case: CertificateCase) -> Step | None:
    """Former authorities are removed when no server needs them and clients have had time to see the new certificate."""
    if case.facts.trusted == {case.facts.authority}:
        return None
    left_s = _left_s(case, OVERLAP_S)
    why = Decision(TierReason.CHANGING_AUTHORITY, "clients still trust the operator's former authority, too")
    if left_s > 0 or case.silent:
        return Step(why, again_s=left_s if left_s > 0 else None)
    return Step(why, turn=Turn.DISTRUST)


RULES: tuple[Callable[[CertificateCase], Step | None], ...] = (trust, issue, load, distrust)


def certificate_finding(case: CertificateCase, step: Step | None) -> Finding:
    """Return the condition CertificateCurrent; `step` is the next one. It holds when every server shows the Secret's
    valid certificate, even if clients still trust a former authority."""
    condition, secret, facts = ConditionType.CERTIFICATE_CURRENT, case.secret, case.facts
    if facts.problem:
        return false(
            condition,
            TierReason.INVALID_TLS_SECRET,
            f"Secret {secret} {facts.problem}; servers that run keep the certificate that they have",
        )
    if _has_ended(case):
        ended = f"the certificate in Secret {secret} ended at {format_timestamp(facts.not_after or case.now)}"
        return false(condition, TierReason.CERTIFICATE_EXPIRED, ended)
    if step is not None and step.decision.reason == TierReason.LOADING_CERTIFICATE:
        return false(condition, step.decision.reason, step.decision.message)
    if case.silent:
        return unheard(condition, case)
    until = f", which is valid until {format_timestamp(facts.not_after)}" if facts.not_after else ""
    sentence = f"every server shows the certificate of Secret {secret}{until}"
    if step is not None:
        return true(condition, TierReason.CHANGING_AUTHORITY, f"{sentence}; {step.decision.message}")
    return true(condition, TierReason.CERTIFICATE_SHOWN, sentence)


def _has_ended(case: CertificateCase) -> bool:
    return case.facts.not_after is not None and case.facts.not_after <= case.now


def _left_s(case: CertificateCase, pause_s: int) -> float:
    since = case.facts.changed_at
    return (since - case.now).total_seconds() + pause_s if since is not None else 0.0
