"""This process' memory of a namespace under deletion."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstrata.api.cachedmodel import CachedModel
from kvstrata.api.cachetier import CacheTier


@dataclass(slots=True)
class Ending:
    """Objects of a deleted namespace go in any order, and the last policy may need them all.

    The first four fields are the last known values of deleted objects. `refused` are UIDs of policies for which the API
    server creates nothing any more, `witnessed` those that this process saw before their deletion. It is dropped when
    neither an object nor an erasure of the namespace is left, so that a later namespace of this name starts afresh.
    """

    domain_id: str | None = None
    domain_key: bytes | None = field(default=None, repr=False)
    tiers: dict[str, CacheTier] = field(default_factory=dict)
    models: dict[str, CachedModel] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    witnessed: set[str] = field(default_factory=set)
