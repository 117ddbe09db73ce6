"""The life of a managed tier's passwords: rotation without a server that lacks the one in use.

The Secret gives the `Stage`; every step is one write of the Secret or idempotent commands, so a new leader continues:

1. current: one password for each user;
2. staged: the next ones are in the Secret's ACL file and on every server, but not used yet, while kubelets bring the
   file to the pods for servers that restart;
3. overlap: the next ones are in use, and the previous are still admitted, because pods read the file at each connect
   and get it late;
4. current: the previous ones are no longer admitted.

A server with users that differ from the Secret is updated at every stage, which also repairs one that started with an
older file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from kvstrata.api.conditions import ConditionType
from kvstrata.api.reasons import TierReason
from kvstrata.api.scalars import format_timestamp
from kvstrata.model.redis.credentials import PasswordFacts, ServerCredentials, Stage
from kvstrata.objects.redis.users import REPLICATION_USER
from kvstrata.plan.actions import Decision, Order, Turn
from kvstrata.plan.conditions import Finding, false, listed, true, unknown

SETTLE_S = 120
"""Time for files of Secrets to reach all pods: kubelets sync once a minute, with jitter and a cache."""

OVERLAP_S = 600
"""How long the previous passwords stay admitted."""

ROTATE_EVERY_S = 90 * 24 * 3600


@dataclass(frozen=True, slots=True)
class Step:
    """The next step: orders to servers or one turn of the Secret, and when to check again without events. Without both,
    `decision` is the reason for waiting."""

    decision: Decision
    orders: Mapping[str, tuple[Order, ...]] = field(default_factory=dict)
    turn: Turn | None = None
    again_s: float | None = None


@dataclass(frozen=True, slots=True)
class ServersCase:
    """`servers` are the running ones, `looks` their reports by name."""

    servers: tuple[str, ...]
    looks: Mapping[str, ServerCredentials]
    now: datetime

    @property
    def answering(self) -> tuple[ServerCredentials, ...]:
        return tuple(self.looks[name] for name in self.servers if name in self.looks and self.looks[name].answered)

    @property
    def silent(self) -> tuple[str, ...]:
        return tuple(name for name in self.servers if name not in self.looks or not self.looks[name].answered)


@dataclass(frozen=True, slots=True)
class PasswordCase(ServersCase):
    """`asked` is the present rotation request, empty for none."""

    facts: PasswordFacts
    asked: str = ""
    rotate_every_s: int = ROTATE_EVERY_S

    @property
    def due_at(self) -> datetime:
        return self.facts.rotated_at + timedelta(seconds=self.rotate_every_s)


def next_step(case: PasswordCase) -> Step | None:
    """Return the next step for a tier's passwords, or None if there is nothing to do or to wait for."""
    return next((step for rule in RULES if (step := rule(case)) is not None), None)


def send_to_servers(case: PasswordCase) -> Step | None:
    differing = [server.server for server in case.answering if not _has_users(case.facts, server)]
    return _send(differing, Order.SET_USERS, "the users and passwords of the Secret")


def send_to_followers(case: PasswordCase) -> Step | None:
    """Servers follow their primary with the current password, which every server admits at this step."""
    wanted = case.facts.current.get(REPLICATION_USER)
    behind = [server.server for server in case.answering if server.master != wanted]
    return _send(behind, Order.FOLLOW, "the password for following a primary")


def _send(servers: list[str], order: Order, what: str) -> Step | None:
    if not servers:
        return None
    why = Decision(TierReason.SETTING_USERS, f"{listed(servers)} get {what}")
    return Step(why, dict.fromkeys(servers, (order,)))


def promote(case: PasswordCase) -> Step | None:
    """The next passwords are used once every server admits them, in memory and in its file."""
    if case.facts.stage is not Stage.STAGED:
        return None
    why = "the following passwords are admitted beside the current ones, and used once every server has them"
    return _turn(case, Turn.PROMOTE, Decision(TierReason.ROTATING_PASSWORDS, why), SETTLE_S)


def retire(case: PasswordCase) -> Step | None:
    """The previous passwords are dropped after every pod had time to read the new ones, and no server lacks these."""
    if case.facts.stage is not Stage.OVERLAP:
        return None
    why = "the previous passwords are still admitted, because pods read the new ones late"
    return _turn(case, Turn.RETIRE, Decision(TierReason.PASSWORDS_OVERLAP, why), OVERLAP_S)


def begin(case: PasswordCase) -> Step | None:
    if case.asked and case.asked != case.facts.honoured:
        why = "a rotation of the passwords was asked for"
    elif case.due_at <= case.now:
        why = f"the passwords are older than {case.rotate_every_s // 3600} h"
    else:
        return None
    if case.silent:
        waiting = f"{why}; a rotation begins when {listed(case.silent)} can be reached"
        return Step(Decision(TierReason.PASSWORDS_OVERDUE, waiting))
    return Step(Decision(TierReason.ROTATING_PASSWORDS, why), turn=Turn.STAGE)


RULES: tuple[Callable[[PasswordCase], Step | None], ...] = (send_to_servers, send_to_followers, promote, retire, begin)


def password_finding(case: PasswordCase, step: Step | None) -> Finding:
    """Return the condition PasswordsCurrent; `step` is the next one. It holds when every server has the Secret's
    passwords and they are not overdue, even if the previous are still admitted."""
    condition = ConditionType.PASSWORDS_CURRENT
    lost = [name for name, server in case.looks.items() if server.reason == TierReason.WRONG_PASSWORD]
    if lost:
        return false(
            condition,
            TierReason.PASSWORDS_LOST,
            f"{listed(lost)} were started with passwords that no Secret holds any more: their pods are replaced, and "
            "their blocks are lost, as misses",
        )
    if step is not None and step.decision.reason != TierReason.PASSWORDS_OVERLAP:
        return false(condition, step.decision.reason, step.decision.message)
    if case.silent:
        return unheard(condition, case)
    current = f"every server has the passwords of {format_timestamp(case.facts.rotated_at)}"
    if step is not None:
        return true(condition, TierReason.PASSWORDS_OVERLAP, f"{current}; {step.decision.message}")
    return true(condition, TierReason.PASSWORDS_SET, f"{current}; the next are due at {format_timestamp(case.due_at)}")


def unheard(condition: ConditionType, case: ServersCase) -> Finding:
    failed = [case.looks[name] for name in sorted(case.silent) if name in case.looks]
    if not failed:
        return unknown(condition, TierReason.PROGRESSING, f"{listed(case.silent)} has not been asked yet")
    return unknown(condition, failed[0].reason, f"{failed[0].server}: {failed[0].message}")


def _turn(case: PasswordCase, turn: Turn, why: Decision, pause_s: int) -> Step:
    """Return the turn if its time has come and every server answered, else the reason for waiting."""
    left_s = (case.facts.changed_at - case.now).total_seconds() + pause_s
    if left_s > 0:
        return Step(why, again_s=left_s)
    if case.silent:
        waiting = f"{why.message}; the rotation continues when {listed(case.silent)} can be reached"
        return Step(Decision(TierReason.ROTATING_PASSWORDS, waiting))
    return Step(why, turn=turn)


def _has_users(facts: PasswordFacts, server: ServerCredentials) -> bool:
    return server.marked and all(server.admitted.get(user) == digests for user, digests in facts.admitted.items())
