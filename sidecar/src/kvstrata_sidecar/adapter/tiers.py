"""Starts the tier that an adapter's parameters name."""

from __future__ import annotations

from collections.abc import Callable

from kvstrata_sidecar.adapter.files.tier import FileTier
from kvstrata_sidecar.adapter.params import AdapterParams, FileTierParams, TierParams
from kvstrata_sidecar.adapter.redis.tier import Tier
from kvstrata_sidecar.adapter.runtime import Runtime
from kvstrata_sidecar.adapter.tier.base import AnyTier
from kvstrata_sidecar.adapter.tier.tasks import Task


def start_tier(
    runtime: Runtime, params: AdapterParams, tier: TierParams | FileTierParams, answered: Callable[[Task], None]
) -> AnyTier:
    """`answered` is called for each answered task."""
    if isinstance(tier, TierParams):
        return Tier(params, tier, runtime.enforcement, answered, held_faster=runtime.held_faster())
    return FileTier(
        params,
        tier,
        runtime.enforcement,
        answered,
        spans=runtime.spans,
        # The memory's evictor keeps back buffers that a disk may still touch.
        guarded=lambda: runtime.memory is not None,
    )
