"""Checks of a running server's objects. `names` has compared the classes, with their methods, before it starts.

The configuration decides which objects there are. Every doubt stops the start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn


class IncompatibleServerError(RuntimeError):
    """LMCache has other objects or another configuration than the memory policy needs."""


def the_manager(storage_manager: Any, manager_class: type, memory_class: type) -> Any:
    """Return the one manager of the server's memory, or raise IncompatibleServerError, also if LMCache evicts."""
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
    _require_no_eviction(storage_manager)
    return manager


def the_store_listener(manager: Any, listener_class: type) -> Any:
    """Return the one listener that notifies LMCache's store loop, or raise IncompatibleServerError."""
    listeners = getattr(manager, "_registered_listeners", None)
    found = [one for one in listeners if isinstance(one, listener_class)] if isinstance(listeners, list) else []
    if len(found) != 1:
        _refuse(type(manager).__name__, [f"_registered_listeners: one {listener_class.__name__}"])
    return found[0]


def the_hasher(server_context: Any) -> tuple[int, Callable[[list[int]], Iterable[bytes]]]:
    """Return the tokens of a chunk, and the function that hashes whole chunks, or raise IncompatibleServerError."""
    hasher = getattr(server_context, "token_hasher", None)
    chunk_tokens = getattr(hasher, "chunk_size", None)
    compute = getattr(hasher, "compute_chunk_hashes", None)
    if type(chunk_tokens) is not int or chunk_tokens < 1 or not callable(compute):
        _refuse(type(server_context).__name__, ["token_hasher"])
    return chunk_tokens, compute


def the_layouts(server_context: Any) -> dict[Any, Any]:
    """Return LMCache's live registry of engines' block layouts. Raises IncompatibleServerError without one."""
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
        f"this LMCache is not the one that the policy of its memory is made for: {where} lacks {', '.join(names)}"
    )
