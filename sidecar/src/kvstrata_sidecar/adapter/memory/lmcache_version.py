"""Checks that LMCache is the version that this package supports.

The package relies on private parts that change between versions. A server that only seems compatible must not run, so
every doubt is an error that stops the start.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, NoReturn

LMCACHE_VERSION = "0.5.6"

CALLBACKS = frozenset(
    {
        "on_l1_keys_reserved_read",
        "on_l1_keys_read_finished",
        "on_l1_keys_reserved_write",
        "on_l1_keys_write_finished",
        "on_l1_keys_finish_write_and_reserve_read",
        "on_l1_keys_deleted_by_manager",
        "on_l1_keys_accessed",
    }
)
ENTRY_FIELDS = frozenset({"memory_obj", "read_lock", "write_lock", "is_temporary"})
MEMORY_OBJECT_NAMES = frozenset({"is_valid", "data_ptr", "get_physical_size", "byte_array"})
PREFETCHING = ("submit_prefetch_task", "wait_prefetch_status", "query_prefetch_status")
MANAGER_METHODS = ("register_listener", "delete", "get_memory_usage", "reserve_read", "finish_read")


class IncompatibleServerError(RuntimeError):
    """LMCache has another version or configuration than the memory policy needs."""


def require_version(version: str) -> None:
    """Raise IncompatibleServerError unless `version` is the pinned one; build suffixes are ignored."""
    base = version.split("+")[0].split(".post")[0]
    if base != LMCACHE_VERSION:
        raise IncompatibleServerError(
            f"the policy of LMCache's memory is made for LMCache {LMCACHE_VERSION}, and this is {version}:"
            " use the cache image that belongs to this version of the operator"
        )


def require_names(callbacks: Collection[str], entry_fields: Collection[str], memory_object: type) -> None:
    """Raise IncompatibleServerError unless LMCache's classes have the required names.

    `callbacks` are a listener's required methods, `entry_fields` the fields of a manager's entry, `memory_object` the
    class of an entry's content.
    """
    if frozenset(callbacks) != CALLBACKS:
        _refuse("listener's callbacks", sorted(frozenset(callbacks) ^ CALLBACKS))
    # Exactly these: loans get an entry that we make.
    if fields := sorted(ENTRY_FIELDS ^ frozenset(entry_fields)):
        _refuse("L1ObjectState", fields)
    if names := sorted(name for name in MEMORY_OBJECT_NAMES if not hasattr(memory_object, name)):
        _refuse(memory_object.__name__, names)


def the_manager(storage_manager: Any, manager_class: type, memory_class: type) -> Any:
    """Return the one manager of the server's memory. Raises IncompatibleServerError if there are several, its memory is
    not the CPU's, a required name is missing, or LMCache evicts by itself."""
    managers = getattr(storage_manager, "_l1_managers_by_id", None)
    if not isinstance(managers, dict):
        _refuse("StorageManager", ["_l1_managers_by_id"])
    if len(managers) != 1:
        raise IncompatibleServerError(
            f"the policy of LMCache's memory is for one pool, and this server has {len(managers)}"
        )
    (manager,) = managers.values()
    if not isinstance(manager, manager_class):
        _refuse("StorageManager", [f"{manager_class.__name__}, but {type(manager).__name__}"])
    missing = [name for name in ("_objects", "_staging") if not isinstance(getattr(manager, name, None), dict)]
    missing += [name for name in MANAGER_METHODS if not callable(getattr(manager, name, None))]
    missing += [] if hasattr(getattr(manager, "_lock", None), "acquire") else ["_lock"]
    missing += [] if isinstance(getattr(manager, "_read_ttl_seconds", None), int) else ["_read_ttl_seconds"]
    if missing:
        _refuse(manager_class.__name__, missing)
    memory = getattr(manager, "_memory_manager", None)
    if not isinstance(memory, memory_class):
        raise IncompatibleServerError(
            f"the policy of LMCache's memory is for CPU memory ({memory_class.__name__}),"
            f" and this server's is {type(memory).__name__}: render no GDS and no Device-DAX"
        )
    if not callable(getattr(memory, "free", None)):
        _refuse(memory_class.__name__, ["free"])
    _require_no_eviction(storage_manager)
    return manager


def the_store_listener(manager: Any, listener_class: type) -> Any:
    """Return the listener that notifies LMCache's store loop of written blocks. Raises IncompatibleServerError unless
    there is exactly one, as there is with tiers behind the memory."""
    listeners = getattr(manager, "_registered_listeners", None)
    found = [one for one in listeners if isinstance(one, listener_class)] if isinstance(listeners, list) else []
    if len(found) != 1 or not callable(getattr(found[0], "on_l1_keys_write_finished", None)):
        _refuse(type(manager).__name__, [f"_registered_listeners: one {listener_class.__name__}"])
    return found[0]


def require_prefetching(storage_manager: Any) -> None:
    missing = [name for name in PREFETCHING if not callable(getattr(storage_manager, name, None))]
    if missing:
        _refuse(type(storage_manager).__name__, missing)


def the_hasher(server_context: Any) -> tuple[int, Callable[[list[int]], Iterable[bytes]]]:
    """Return the tokens of a chunk, and the function that hashes whole chunks of token ids. Raises
    IncompatibleServerError if a required name is missing."""
    hasher = getattr(server_context, "token_hasher", None)
    chunk_tokens = getattr(hasher, "chunk_size", None)
    compute = getattr(hasher, "compute_chunk_hashes", None)
    if type(chunk_tokens) is not int or chunk_tokens < 1 or not callable(compute):
        _refuse(type(server_context).__name__, ["token_hasher"])
    return chunk_tokens, compute


def the_layouts(server_context: Any) -> dict[Any, Any]:
    """Return LMCache's live registry of engines' block layouts. Raises IncompatibleServerError if a required name is
    missing."""
    layouts = getattr(getattr(server_context, "layout_desc_registry", None), "_registry", None)
    if not isinstance(layouts, dict):
        _refuse(type(server_context).__name__, ["layout_desc_registry"])
    return layouts


def _require_no_eviction(storage_manager: Any) -> None:
    controllers = getattr(storage_manager, "_eviction_controllers", None)
    if not isinstance(controllers, list) or not controllers:
        _refuse("StorageManager", ["_eviction_controllers"])
    policies = {controller.report_status().get("eviction_policy") for controller in controllers}
    if policies != {"noop"}:
        raise IncompatibleServerError(
            "LMCache must not evict by itself, because it knows no guarantee: start it with --eviction-policy noop,"
            f" not {', '.join(sorted(map(str, policies)))}"
        )


def _refuse(where: str, names: list[str]) -> NoReturn:
    raise IncompatibleServerError(
        f"this LMCache is not the one that the policy of its memory is made for ({LMCACHE_VERSION}): {where} lacks or"
        f" adds {', '.join(names)}"
    )
