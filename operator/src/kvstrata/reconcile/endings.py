"""What a namespace leaves that is being deleted, taken note of while its objects go (`model.namespace_end`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvstrata.api.base import Resource
from kvstrata.api.cachedmodel import CachedModel
from kvstrata.api.cachedomain import CacheDomain
from kvstrata.api.cachetier import CacheTier
from kvstrata.api.tenantcachepolicy import TenantCachePolicy
from kvstrata.model.namespace_end import Ending
from kvstrata.model.refs import Key
from kvstrata.plan.keys.custody import in_force


def note_presence(ending: Ending, after: Resource) -> None:
    """Take note of an object that is there, so that nothing older is taken for its end."""
    match after:
        case TenantCachePolicy() if not after.metadata.deleting:
            ending.witnessed.add(after.uid)
        case CacheTier():
            ending.tiers.pop(after.name, None)
        case CachedModel():
            ending.models.pop(after.name, None)
        case CacheDomain() if after.status.domain_id is not None:
            ending.domain_id = ending.custody = None


def note_end(ending: Ending, before: Resource | None) -> None:
    """Take note of what an object was that is gone."""
    match before:
        case TenantCachePolicy():
            ending.witnessed.discard(before.uid)
            ending.refused.discard(before.uid)
        case CacheTier():
            ending.tiers[before.name] = before
        case CachedModel():
            ending.models[before.name] = before
        case CacheDomain():
            ending.domain_id = before.status.domain_id or ending.domain_id
            ending.custody = in_force(before)


def keys_of_former(data_keys: Mapping[str, bytes | str], before: Resource | None, after: Resource) -> frozenset[str]:
    """Return the epochs whose keys were another CacheDomain's, if `after` is a new one.

    No Secret that goes with the former tells it of those that no Secret has. Where they are kept, and how they end, is
    not the new domain's to say: its epochs get new ones.
    """
    new = isinstance(after, CacheDomain) and after.status.domain_id is None
    if not new or (before is not None and before.uid == after.uid):
        return frozenset()
    return frozenset(epoch for epoch, kept in data_keys.items() if isinstance(kept, str))


def note_refusal(ending: Ending, policies: Iterable[TenantCachePolicy]) -> frozenset[Key]:
    """Take note that nothing can be created in a namespace any more; return those of its policies that wait for it."""
    news = [policy for policy in policies if policy.metadata.deleting and policy.uid not in ending.refused]
    ending.refused |= {policy.uid for policy in news}
    return frozenset(Key(policy.INFO.kind, policy.namespace, policy.name) for policy in news)
