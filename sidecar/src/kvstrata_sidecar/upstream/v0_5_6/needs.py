"""The names of LMCache 0.5.6 and vLLM that this package's modules rely on; see `upstream.names`."""

from __future__ import annotations


def _of(owner: str, *needs: str) -> tuple[str, ...]:
    return tuple(owner + need for need in needs)


SERVER = (
    "lmcache.lmcache_native:Bitmap.batched_set",
    *_of("lmcache.lmcache_native:TTLLock", ".is_locked", ".lock", ".unlock"),
    *_of("lmcache.v1.distributed.error:L1Error", ".SUCCESS", ".KEY_IS_LOCKED", ".KEY_NOT_EXIST", ".OUT_OF_MEMORY"),
    "lmcache.v1.distributed.internal_api:L1ManagerListener{on_l1_keys_reserved_read, on_l1_keys_read_finished,"
    " on_l1_keys_reserved_write, on_l1_keys_write_finished, on_l1_keys_finish_write_and_reserve_read,"
    " on_l1_keys_deleted_by_manager, on_l1_keys_accessed}",
    "lmcache.v1.distributed.internal_api:L2StoreResult",
    *_of("lmcache.v1.distributed.l1_manager:L1Manager",
         "#_lock", "#_memory_manager", "#_objects", "#_read_ttl_seconds", "#_registered_listeners", "#_staging",
         ".delete(keys, force)", ".get_memory_usage()",
         ".register_listener(listener)", ".reserve_read(keys, read_locks)",
         ".reserve_write(keys, is_temporary, layout_desc, tag)"),
    # Exactly these: loans get an entry that we make.
    "lmcache.v1.distributed.l1_manager:L1ObjectState{memory_obj, write_lock, read_lock, is_temporary}",
    "lmcache.v1.distributed.memory_manager:L1MemoryManager.free(mem_objs)",
    *_of("lmcache.v1.memory_management:TensorMemoryObj",
         ".byte_array", ".data_ptr", ".get_physical_size", ".is_valid"),
    "lmcache.v1.distributed.storage_controllers.store_controller:StoreListener.on_l1_keys_write_finished",
    "lmcache.v1.distributed.storage_manager:_L1_WRITE_TAG",
    *_of("lmcache.v1.distributed.storage_manager:StorageManager",
         "#_eviction_controllers", "#_l1_managers_by_id",
         ".add_l2_adapter(config)", ".delete_l2_adapter(adapter_id, timeout)"),
    *_of("lmcache.v1.distributed.api:",
         "ObjectKey{chunk_hash, model_name, kv_rank, object_group_id, cache_salt}",
         "ObjectKey.ComputeKVRank"),
    "lmcache.v1.distributed.l2_adapters.base:AdapterUsage{total_bytes_used, total_capacity_bytes, bytes_by_cache_salt}",
    *_of("lmcache.v1.distributed.l2_adapters.base:L2AdapterInterface",
         "._notify_keys_accessed(keys)", "._notify_keys_deleted(keys, sizes)", "._notify_keys_stored(keys, sizes)",
         ".query_load_result(task_id)", ".query_lookup_and_lock_result(task_id)", ".submit_load_task(keys, objects)",
         ".submit_lookup_and_lock_task(keys, group_layout_descs)", ".submit_store_task(keys, objects)",
         ".submit_unlock(keys)"),
    "lmcache.v1.distributed.l2_adapters.plugin_l2_adapter:PluginL2AdapterConfig",
    "lmcache.v1.multiprocess.ext_server_module:ExtServerModuleSpec",
)  # fmt: skip

_ENGINE_ADAPTER = "lmcache.integration.vllm.vllm_multi_process_adapter:"

CONNECTOR = (
    *_of("lmcache.integration.vllm.lmcache_mp_connector:LMCacheMPConnector",
         "#_can_store", "#scheduler_adapter", "#worker_adapter",
         "._get_connector_metadata()", "._get_or_create_request_tracker(request)",
         "._report_block_allocation_deltas(scheduler_output)", ".get_finished(finished_req_ids)",
         ".get_num_new_matched_tokens(request, num_computed_tokens)", ".handle_preemptions(kv_connector_metadata)",
         ".on_new_request(request)", ".register_kv_caches(kv_caches)", ".request_finished(request, block_ids)",
         ".update_connector_output(connector_output)",
         ".update_state_after_alloc(request, blocks, num_external_tokens)"),
    "lmcache.integration.vllm.lmcache_mp_connector:get_dcp_decorated_model_name(vllm_config, kv_cache_config)",
    *_of("lmcache.integration.vllm.lmcache_mp_metadata:LMCacheMPRequest",
         "State.BYPASS_LMCACHE", "Tracker#lookup_started_at", "Tracker.num_lmcache_hit_tokens"),
    *_of(_ENGINE_ADAPTER,
         "HeartbeatThread(req_client, health_event, interval, instance_id)",
         "HeartbeatThread.register_recover_callback",
         "get_lmcache_chunk_size(req_client, timeout)",
         "_LookupAck{futures, submitted_at}"),
    *_of(f"{_ENGINE_ADAPTER}LMCacheMPSchedulerAdapter",
         "#_finished_lookup_results", "#_health_events", "#_heartbeat_interval", "#_heartbeats", "#_lookup_params",
         "#_lookup_status", "#_per_server_hits", "#_unacked_lookups", "#lmcache_tokens_per_chunk", "#req_clients",
         "._create_key(token_ids, start, end, request_id, cache_salt, request_configs)",
         ".cleanup_lookup_result(request_id)", ".end_session(request_id)", ".is_healthy", ".tp_size",
         ".maybe_submit_lookup_request(request_id, token_ids, cache_salt, request_configs, reserve_last_token)"),
    *_of(f"{_ENGINE_ADAPTER}LMCacheMPWorkerAdapter",
         "#_dropped_retrieves", "#_failed_request_ids", "#_health_event", "#error_block_ids",
         "#lmcache_tokens_per_chunk", "#req_client", "#retrieve_futures", "#transfer_ctx",
         "._ensure_heartbeat_started()", "._reregister_kv_caches_callback()", ".is_healthy"),
    "lmcache.v1.multiprocess.transport.zmq_impl.client:ZmqMultiprocessClient#_message_queue_client",
    *_of("lmcache.v1.multiprocess.transport.zmq_impl.mq:MessageQueueClient",
         "#input_queue", "#pending_futures", "#socket",
         ".cancel_streams()", ".process_outbound_task()", ".submit_request(operation, request_payloads)"),
    "lmcache.v1.multiprocess.custom_types:IPCCacheServerKey.no_worker_id_version()",
    *_of("lmcache.v1.multiprocess.futures:MessagingFuture",
         ".query", ".result(timeout)", ".set_exception", ".set_result"),
    "lmcache.v1.multiprocess.rpc:get_rpc_spec(operation)",
    *_of("lmcache.v1.multiprocess.transport.base:RequestClient",
         ".end_session(request_id)", ".free_lookup_locks(key, tp_size)", ".query_prefetch_status(request_id)"),
    "vllm.config:set_current_vllm_config",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorRole.SCHEDULER",
    "vllm.v1.attention.selector:get_attn_backend",
    *_of("vllm.v1.outputs:KVConnectorOutput", ".finished_recving", ".finished_sending"),
    "vllm.v1.request:Request#skip_reading_prefix_cache",
)  # fmt: skip
