"""The connector that vLLM loads: LMCache's, with every failure of the cache server turned into a miss.

    --kv-transfer-config '{"kv_connector": "GuardedConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "kvstrata_sidecar.connector.guard", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {...}}'

If the engine's LMCache cannot be governed, the connector stores and finds nothing, and reports the version to the gate.
"""

from __future__ import annotations

from typing import Any

from kvstrata.contract.messages.engine_identity import EngineIdentity
from kvstrata_sidecar.connector.failures import logger
from kvstrata_sidecar.output import shorten_keyspaces
from kvstrata_sidecar.upstream import versions
from kvstrata_sidecar.upstream.resolved_identity import report


def _choose() -> tuple[Any, str]:
    """Return the connector for the installed LMCache, and why that is not LMCache's."""
    try:
        return versions.load(versions.CONNECTOR).GuardedConnector, ""
    except versions.UngovernedVersionError as error:
        from kvstrata_sidecar.upstream.no_reuse import NoReuse

        return NoReuse, str(error)


Connector: Any
Connector, UNGOVERNED = _choose()


class GuardedConnector(Connector):  # type: ignore[misc]
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        shorten_keyspaces()
        if UNGOVERNED:
            logger.error("The engine serves without reuse: %s", UNGOVERNED)
            identity = EngineIdentity(problem=UNGOVERNED, ungoverned=True)
            report(identity, vllm_config.kv_transfer_config.kv_connector_extra_config)
        super().__init__(vllm_config, role, kv_cache_config)
