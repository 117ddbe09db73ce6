"""What a namespace leaves when it is deleted, as far as this process saw it: nothing of its own remembers it then."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstrata.api.cachedmodel import CachedModel
from kvstrata.api.cachetier import CacheTier


@dataclass(slots=True)
class Ending:
    """Objects go in any order when their namespace is deleted, and the last policy to go may need them all.

    `domain_id`, `domain_key`, `tiers` and `models` are what was last known of objects that are gone. `refused` are UIDs
    of policies for which the API server creates nothing any more, `witnessed` those that this process saw before they
    were deleted, so that it also saw what went since.

    It is forgotten when neither an object nor an erasure of the namespace is left: one of the same name that comes
    later is another.
    """

    domain_id: str | None = None
    domain_key: bytes | None = field(default=None, repr=False)
    tiers: dict[str, CacheTier] = field(default_factory=dict)
    models: dict[str, CachedModel] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    witnessed: set[str] = field(default_factory=set)
