"""Passwords and certificates of a managed tier: Secrets, orders to servers, conditions.

The rules are in `passwords` and `certificates`. Servers are updated in rounds that end with a look; orders follow from
the previous look.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from kvstrata.api.cachetier import CacheTier
from kvstrata.api.conditions import ConditionType
from kvstrata.api.reasons import TierReason
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
from kvstrata.plan.redis.certificates import ASK_AGAIN_S, CertificateCase, CertificateTerms, certificate_finding
from kvstrata.plan.redis.passwords import ROTATE_EVERY_S, PasswordCase, PasswordTerms, Step, password_finding

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
    return all(name in world.secrets for name in _own_secrets(tier))


def predecessors_secret(world: World, tier: CacheTier) -> str | None:
    """Return a Secret of this name that belongs to a deleted tier; None if there is none. New servers must not use it:
    Kubernetes removes it, and its passwords are lost."""
    for name in _own_secrets(tier):
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
    users = world.secrets.get(names.redis_auth(tier.name))
    # An earlier version had other rights, and a recreated domain has other keys.
    broken = users is not None and (
        users.users != what_users_may(users_acl(domain_id, {})) or users.passwords is None or not users.passwords.whole
    )
    if users is None or broken:
        wanted.append(
            EnsureSecret(
                name=names.redis_auth(tier.name),
                material=Material.REDIS_USERS,
                labels=labels.of_tier(tier.name),
                owner=tier.owner_reference(),
                domain=domain_id,
                renew=broken,
                honours=_asked(tier),
            )
        )
    own = names.redis_tls(tier.name)
    if redis_tls_secret(tier) == own:
        certificate = world.secrets.get(own)
        broken = certificate is not None and (certificate.tls is None or bool(certificate.tls.problem))
        if certificate is None or broken:
            wanted.append(
                EnsureSecret(
                    name=own,
                    material=Material.SERVER_CERTIFICATE,
                    labels=labels.of_tier(tier.name),
                    owner=tier.owner_reference(),
                    dns_names=_dns_names(ctx, tier),
                    for_peers=True,
                    renew=broken,
                )
            )
    return tuple(wanted)


def tend_credentials(
    world: World,
    ctx: BuildContext,
    tier: CacheTier,
    domain_id: str,
    servers: tuple[ManagedServer, ...],
    now: datetime,
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
    reported = findings if look is not None else tuple(_as_recorded(tier, finding) for finding in findings)
    hindrances = (Decision(one.reason, one.message) for one in reported if one.reason in _HINDER_A_START)
    return Tending(actions, reported, wake, next(hindrances, None))


_HINDER_A_START = (TierReason.INVALID_TLS_SECRET, TierReason.SECRET_NOT_FOUND)
"""Missing Secrets or keys that prevent a start; running servers continue."""


@dataclass(frozen=True, slots=True)
class _Part:
    finding: Finding
    step: Step | None = None
    turn: TurnSecret | None = None


def _on_users(
    world: World,
    tier: CacheTier,
    domain_id: str,
    running: tuple[str, ...],
    look: CredentialLook,
    now: datetime,
) -> _Part:
    name = names.redis_auth(tier.name)
    secret = world.secrets.get(name)
    if secret is None or secret.passwords is None:
        return _Part(unknown(ConditionType.PASSWORDS_CURRENT, TierReason.PROGRESSING, f"Secret {name} is being made"))
    every = tier.spec.managed.rotate_passwords_every if tier.spec.managed is not None else None
    terms = PasswordTerms(
        running,
        asked=_asked(tier),
        rotate_every_s=every.in_seconds if every is not None else ROTATE_EVERY_S,
    )
    case = PasswordCase(secret.passwords, terms, look.servers, now)
    step = passwords.next_step(case)
    turn = None
    if step is not None and step.turn is not None:
        turn = TurnSecret(
            name,
            step.turn,
            secret.resource_version,
            labels.of_tier(tier.name),
            tier.owner_reference(),
            domain=domain_id,
            honours=_asked(tier),
        )
    return _Part(password_finding(case, step), step, turn)


def _on_certificate(
    world: World,
    ctx: BuildContext,
    tier: CacheTier,
    running: tuple[str, ...],
    look: CredentialLook,
    now: datetime,
) -> _Part | None:
    name = redis_tls_secret(tier)
    if name is None:
        return None
    issued = name == names.redis_tls(tier.name)
    secret = world.secrets.get(name) if issued else None
    facts = secret.tls if secret is not None else look.tls
    if facts is None:
        reported = _unread(name, look)
        return _Part(reported)
    terms = CertificateTerms(running, name, issued, _dns_names(ctx, tier))
    case = CertificateCase(facts, terms, look.servers, now)
    step = certificates.next_step(case)
    turn = None
    if step is not None and step.turn is not None and secret is not None:
        turn = TurnSecret(
            name,
            step.turn,
            secret.resource_version,
            labels.of_tier(tier.name),
            tier.owner_reference(),
            dns_names=_dns_names(ctx, tier),
            for_peers=True,
        )
    return _Part(certificate_finding(case, step), step, turn)


def _unread(secret: str, look: CredentialLook) -> Finding:
    if look.unread:
        return false(ConditionType.CERTIFICATE_CURRENT, TierReason.SECRET_NOT_FOUND, look.unread)
    sentence = f"Secret {secret} has not been read yet"
    return unknown(ConditionType.CERTIFICATE_CURRENT, TierReason.PROGRESSING, sentence)


def _as_recorded(tier: CacheTier, finding: Finding) -> Finding:
    """Return the last condition: a new leader repeats it until its first look."""
    reported = tier.status.condition(finding.type)
    if reported is None or reported.observed_generation != tier.generation:
        return finding
    return Finding(reported.type, reported.status, reported.reason, reported.message)


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


def _own_secrets(tier: CacheTier) -> tuple[str, ...]:
    own = names.redis_tls(tier.name)
    return (names.redis_auth(tier.name), *([own] if redis_tls_secret(tier) == own else []))


def _asked(tier: CacheTier) -> str:
    return tier.metadata.annotations.get(labels.ROTATE_PASSWORDS, "")


def _dns_names(ctx: BuildContext, tier: CacheTier) -> tuple[str, ...]:
    return ("localhost", *names.redis_dns_names(tier.name, tier.namespace, ctx.cluster_domain))
