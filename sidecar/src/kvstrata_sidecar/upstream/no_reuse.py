"""vLLM's connector for an engine whose LMCache cannot be governed: it stores and finds nothing."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata


class NoReuse(KVConnectorBase_V1):  # type: ignore[misc]
    def save_kv_layer(self, *_: Any, **__: Any) -> None:
        """No operation."""

    start_load_kv = wait_for_layer_load = wait_for_save = update_state_after_alloc = save_kv_layer

    def get_num_new_matched_tokens(self, *_: Any) -> tuple[int, bool]:
        return 0, False

    def build_connector_meta(self, *_: Any, **__: Any) -> Any:
        return KVConnectorMetadata()
