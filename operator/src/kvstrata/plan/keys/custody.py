"""Key custody: where a domain's data keys are kept, and when that may change.

A key cannot move: copies may remain in the former custody. Rolling all epochs instead would empty the domain's cache at
once. So a change is refused while there are keys.

The custody in force is in the CacheDomain's status, written before the first key is drawn.
"""

from __future__ import annotations

from kvstrata.api.cachedomain import CacheDomain
from kvstrata.api.conditions import ConditionType
from kvstrata.api.reasons import DomainReason
from kvstrata.contract.receipt.vocabulary import KeyCustody
from kvstrata.model.world import World
from kvstrata.plan.actions import Decision
from kvstrata.plan.conditions import Finding, false, true


def active_custody(domain: CacheDomain) -> KeyCustody:
    return domain.status.key_custody or KeyCustody.SECRET


def to_adopt(world: World, domain: CacheDomain) -> KeyCustody | None:
    wanted = domain.spec.key_custody
    return wanted if wanted is not active_custody(domain) and not world.data_keys else None


def refused_change(world: World, domain: CacheDomain) -> Decision | None:
    """Return why the spec's custody cannot be adopted, None if it can."""
    wanted, present = domain.spec.key_custody, active_custody(domain)
    if wanted is present or not world.data_keys:
        return None
    count = f"{len(world.data_keys)} data key{'s are' if len(world.data_keys) > 1 else ' is'}"
    back = f"{present} with spec.kms as it was" if present is KeyCustody.KMS else str(present)
    return Decision(
        DomainReason.KEY_CUSTODY_IN_USE,
        f"spec.keyCustody cannot become {wanted} while {count} in custody {present}: a key cannot move, and to roll "
        f"all of their epochs would empty the cache of namespace {world.namespace}; set it back to {back}, or set up a "
        f"namespace with {wanted} and move tenants there",
    )


def keys_at_hand(world: World, domain: CacheDomain, lost: int) -> Finding | None:
    """Return whether the operator has every key, None for keys in Secrets; `lost` counts unrecoverable ones."""
    if active_custody(domain) is KeyCustody.SECRET:
        return None
    kind = ConditionType.KEYS_AT_HAND
    if world.keys_problem:
        return false(kind, DomainReason.KEY_CUSTODY_AWAY, world.keys_problem)
    if world.keys_unwrapping:
        message = f"{len(world.keys_unwrapping)} data keys are being unwrapped, because the operator restarted"
        return false(kind, DomainReason.KEYS_UNWRAPPING, message)
    if lost:
        message = f"the KMS cannot unwrap the data keys of {lost} epochs any more: they get new epochs and a cold cache"
        return false(kind, DomainReason.KEYS_LOST, message)
    return true(kind, DomainReason.KEYS_AT_HAND, f"the operator has all {len(world.data_keys)} data keys")
