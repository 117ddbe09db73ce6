"""Passwords and certificates of a managed tier: Secrets, orders to servers, conditions.

The rules are in `passwords` and `certificates`. Servers are updated in rounds that end with a look; orders follow from
the previous look.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from kvstrata.api.cachetier import CacheTier
from kvstrata.api.conditions import ConditionType
from kvstrata.api.reasons import SharedReason, TierReason
from kvstrata.contract.wire import digest
from kvstrata.model.redis.credentials import CredentialLook
from kvstrata.model.world import World
from kvstrata.objects import labels, names
from kvstrata.objects.context import BuildContext
from kvstrata.objects.redis.users import users_acl, what_users_may
from kvstrata.objects.tier_link import redis_tls_secret
from kvstrata.plan.actions import (
    Action,
    Decision,
    EnsureSecret,
    ManagedServer,
    Material,
    Order,
    TendServers,
    TurnSecret,
)
from kvstrata.plan.conditions import Finding, false, unknown
from kvstrata.plan.redis import certificates, passwords
from kvstrata.plan.redis.backend import as_recorded
from kvstrata.plan.redis.certificates import ASK_AGAIN_S, CertificateCase, certificate_finding
from kvstrata.plan.redis.passwords import ROTATE_EVERY_S, PasswordCase, Step, password_finding

LOOK_EVERY_S = 30.0
"""Maximum age of a good look: a server that started with older files is found within this time."""

TURNED_S = 0.2


@dataclass(frozen=True, slots=True)
class Tending:
    """Actions and conditions of a managed tier's credentials. `hindrance` is why servers cannot start with the present
    Secrets, None if unknown."""

    actions: tuple[Action, ...]
    findings: tuple[Finding, ...]
    wake_after_s: float
    hindrance: Decision | None = None


def has_secrets(world: World, tier: CacheTier) -> bool:
    """Whether the operator's Secrets of a managed tier all exist; servers cannot start without them."""
    return all(name in world.secrets for name in own_secrets(tier))


def predecessors_secret(world: World, tier: CacheTier) -> str | None:
    """Return a Secret of this name that belongs to a deleted tier; None if there is none. New servers must not use it:
    Kubernetes removes it, and its passwords are lost."""
    for name in own_secrets(tier):
        found = world.secrets.get(name)
        if found is not None and found.owners and tier.uid not in found.owners:
            return f"Secret {name}"
    return None


def restart_token(world: World, tier: CacheTier) -> str:
    """Return a value that changes when servers must restart: only when lost passwords were recreated. All other changes
    of users and certificates reach running servers."""
    users = world.secrets.get(names.redis_auth(tier.name))
    return digest([users.passwords.made if users and users.passwords else ""])[:12]


def missing_secrets(world: World, ctx: BuildContext, tier: CacheTier, domain_id: str) -> tuple[EnsureSecret, ...]:
    wanted = []
    auth, own = names.redis_auth(tier.name), names.redis_tls(tier.name)
    users, certificate = world.secrets.get(auth), world.secrets.get(own)
    # An earlier version had other rights, and a recreated domain has other keys.
    broken = users is not None and (
        users.users != what_users_may(users_acl(domain_id, {})) or users.passwords is None or not users.passwords.whole
    )
    if users is None or broken:
        about = (auth, Material.REDIS_USERS, *_owned(tier))
        wanted.append(EnsureSecret(*about, renew=broken, domain=domain_id, honours=_asked(tier)))
    broken = certificate is not None and (certificate.tls is None or bool(certificate.tls.problem))
    if redis_tls_secret(tier) == own and (certificate is None or broken):
        about = (own, Material.SERVER_CERTIFICATE, *_owned(tier))
        wanted.append(EnsureSecret(*about, dns_names=_dns_names(ctx, tier), for_peers=True, renew=broken))
    return tuple(wanted)


def tend_credentials(
    world: World, ctx: BuildContext, tier: CacheTier, domain_id: str, servers: tuple[ManagedServer, ...], now: datetime
) -> Tending:
    """Return the actions for passwords and certificate of all running servers. `domain_id` limits the users' keys."""
    look = world.credentials.get(tier.name)
    kept = CredentialLook({}, now) if look is None else look
    running = tuple(server.name for server in servers)
    on_users = _on_users(world, tier, domain_id, running, kept, now)
    on_certificate = _on_certificate(world, ctx, tier, running, kept, now)
    parts = [part for part in (on_users, on_certificate) if part is not None]
    steps = [part.step for part in parts if part.step is not None]
    turns = tuple(part.turn for part in parts if part.turn is not None)
    orders = _merged(steps)
    due_s = _due_s(look, running, orders, now)
    actions: tuple[Action, ...] = turns
    secret = redis_tls_secret(tier)
    foreign = secret is not None and secret != names.redis_tls(tier.name)
    # Without a complete certificate no server starts, so its Secret is read without servers too.
    if due_s <= 0 and (servers or foreign):
        actions += (TendServers(tier.name, servers, names.redis_auth(tier.name), secret, orders, foreign),)
    waits = [step.again_s for step in steps if step.again_s is not None]
    wake = TURNED_S if turns else min([*waits, due_s if due_s > 0 else ASK_AGAIN_S])
    findings = tuple(part.finding for part in parts)
    reported = findings if look is not None else tuple(as_recorded(tier, finding) for finding in findings)
    hindrances = (Decision(one.reason, one.message) for one in reported if one.reason in _HINDER_A_START)
    return Tending(actions, reported, wake, next(hindrances, None))


_HINDER_A_START = (TierReason.INVALID_TLS_SECRET, SharedReason.SECRET_NOT_FOUND)
"""Missing Secrets or keys that prevent a start; running servers continue."""


@dataclass(frozen=True, slots=True)
class _Part:
    finding: Finding
    step: Step | None = None
    turn: TurnSecret | None = None


def _on_users(
    world: World, tier: CacheTier, domain_id: str, running: tuple[str, ...], look: CredentialLook, now: datetime
) -> _Part:
    name = names.redis_auth(tier.name)
    secret = world.secrets.get(name)
    if secret is None or secret.passwords is None:
        return _Part(unknown(ConditionType.PASSWORDS_CURRENT, TierReason.PROGRESSING, f"Secret {name} is being made"))
    every = tier.spec.managed.rotate_passwords_every if tier.spec.managed is not None else None
    every_s = every.in_seconds if every is not None else ROTATE_EVERY_S
    case = PasswordCase(running, look.servers, now, secret.passwords, _asked(tier), every_s)
    step = passwords.next_step(case)
    turn = None
    if step is not None and step.turn is not None:
        about = (name, step.turn, secret.resource_version, *_owned(tier))
        turn = TurnSecret(*about, domain=domain_id, honours=_asked(tier))
    return _Part(password_finding(case, step), step, turn)


def _on_certificate(
    world: World, ctx: BuildContext, tier: CacheTier, running: tuple[str, ...], look: CredentialLook, now: datetime
) -> _Part | None:
    name, kind = redis_tls_secret(tier), ConditionType.CERTIFICATE_CURRENT
    if name is None:
        return None
    issued = name == names.redis_tls(tier.name)
    secret = world.secrets.get(name) if issued else None
    facts = secret.tls if secret is not None else look.tls
    if facts is None and look.unread:
        return _Part(false(kind, SharedReason.SECRET_NOT_FOUND, look.unread))
    if facts is None:
        return _Part(unknown(kind, TierReason.PROGRESSING, f"Secret {name} has not been read yet"))
    case = CertificateCase(running, look.servers, now, facts, name, issued, _dns_names(ctx, tier))
    step = certificates.next_step(case)
    turn = None
    if step is not None and step.turn is not None and secret is not None:
        about = (name, step.turn, secret.resource_version, *_owned(tier))
        turn = TurnSecret(*about, dns_names=case.names, for_peers=True)
    return _Part(certificate_finding(case, step), step, turn)


def _merged(steps: list[Step]) -> dict[str, tuple[Order, ...]]:
    merged: dict[str, tuple[Order, ...]] = {}
    for step in steps:
        for server, orders in step.orders.items():
            merged[server] = (*merged.get(server, ()), *orders)
    return merged


def _due_s(
    look: CredentialLook | None, running: tuple[str, ...], orders: dict[str, tuple[Order, ...]], now: datetime
) -> float:
    """Return the seconds until the next round: 0 for new orders, short while one had no effect or a server is
    silent."""
    if look is None or any(name not in look.servers for name in running):
        return 0.0
    if orders and not look.updated:
        return 0.0
    uneasy = bool(orders) or any(not look.servers[name].answered for name in running)
    return (look.at - now).total_seconds() + (ASK_AGAIN_S if uneasy else LOOK_EVERY_S)


def own_secrets(tier: CacheTier) -> tuple[str, ...]:
    own = names.redis_tls(tier.name)
    return (names.redis_auth(tier.name), *([own] if redis_tls_secret(tier) == own else []))


def _owned(tier: CacheTier) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the labels and the owner of a tier's Secrets."""
    return labels.of_tier(tier.name), tier.owner_reference()


def _asked(tier: CacheTier) -> str:
    return tier.metadata.annotations.get(labels.ROTATE_PASSWORDS, "")


def _dns_names(ctx: BuildContext, tier: CacheTier) -> tuple[str, ...]:
    return ("localhost", *names.redis_dns_names(tier.name, tier.namespace, ctx.cluster_domain))
