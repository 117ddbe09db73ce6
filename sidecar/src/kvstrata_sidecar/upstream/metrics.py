"""LMCache's metrics without salts.

LMCache (0.5.6) labels lookups, blocks and reuse with the salt, which gives access to a scope's blocks; and each random
salt would be a series for as long as the server lives. A view removes the label before anything is counted.
"""

from __future__ import annotations

import logging

from opentelemetry import metrics
from opentelemetry.sdk.metrics.view import View

logger = logging.getLogger(__name__)


class _AllButSalt(frozenset[str]):
    def __contains__(self, label: object) -> bool:
        return label != "cache_salt"


def remove_salts() -> None:
    """Remove the label from all metrics, before the first request: a metric that has counted keeps its labels."""
    settings = getattr(metrics.get_meter_provider(), "_sdk_config", None)
    if settings is None:
        logger.warning("LMCache's metrics are off or unknown; the gate leaves out lines with salts")
        return
    settings.views = (*settings.views, View(instrument_name="*", attribute_keys=_AllButSalt()))
