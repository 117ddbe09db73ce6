"""The public API of kvstrata as typed models: specs, their rules, and statuses.

One module per kind. Everything here is pure: the CRDs in crds/ and the pages in docs/reference/ are generated from it.
"""

from __future__ import annotations

from kvstrata.api.base import Resource
from kvstrata.api.cachedmodel import CachedModel
from kvstrata.api.cachedomain import CacheDomain
from kvstrata.api.cacheinvalidation import CacheInvalidation
from kvstrata.api.cachetier import CacheTier
from kvstrata.api.prefixpool import PrefixPool
from kvstrata.api.tenantcachepolicy import TenantCachePolicy
from kvstrata.api.tenantgroup import TenantGroup

KINDS: tuple[type[Resource], ...] = (
    CacheDomain,
    CacheTier,
    CachedModel,
    TenantCachePolicy,
    TenantGroup,
    PrefixPool,
    CacheInvalidation,
)
"""Every kind of the group, in the order in which the documentation presents them."""
