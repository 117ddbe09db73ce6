"""The nested half of the allow-list: messages, parts, tools and prompts.

Text and inline media pass. Anything that makes the engine fetch an address, read a file or look up a caller's own name
is refused: those caches and rights are shared by all tenants.

Callers send answers back unchanged, so every part of an answer is accepted. Answers use null for absent values: nulls
are removed from messages, parts and tool calls, but not from a tool's schema or input.
"""

from __future__ import annotations

from typing import Any

from kvstrata_sidecar.gate.http.errors import Reason, bad_request

Json = dict[str, Any]

_CHAT_MESSAGE = frozenset(
    {
        "role",
        "content",
        "name",
        "tool_calls",
        "tool_call_id",
        "refusal",
        "reasoning",
        "reasoning_content",
        "function_call",
    }
)
_ANSWERED_ONLY = ("annotations", "audio")
"""Keys of an answer's message that no engine reads: accepted, and not forwarded."""

_CHAT_PARTS: dict[str, frozenset[str]] = {
    "text": frozenset({"type", "text"}),
    "refusal": frozenset({"type", "refusal"}),
    "image_url": frozenset({"type", "image_url"}),
    "video_url": frozenset({"type", "video_url"}),
    "audio_url": frozenset({"type", "audio_url"}),
    "input_audio": frozenset({"type", "input_audio"}),
}
_INLINE_URL_PARTS = frozenset({"image_url", "video_url", "audio_url"})
_TOOL_CALL = frozenset({"id", "type", "function", "index"})
_FUNCTION_CALL = frozenset({"name", "arguments"})
_TOOL = frozenset({"type", "function"})
_FUNCTION = frozenset({"name", "description", "parameters", "strict"})

_ANTHROPIC_MESSAGE = frozenset({"role", "content"})
_ANTHROPIC_BLOCKS: dict[str, frozenset[str]] = {
    "text": frozenset({"type", "text", "citations"}),
    "image": frozenset({"type", "source"}),
    "tool_use": frozenset({"type", "id", "name", "input", "caller"}),
    "tool_result": frozenset({"type", "tool_use_id", "content", "is_error"}),
    "thinking": frozenset({"type", "thinking", "signature"}),
    "redacted_thinking": frozenset({"type", "data"}),
}
_ANTHROPIC_SOURCE = frozenset({"type", "media_type", "data"})
_ANTHROPIC_TOOL = frozenset({"name", "description", "input_schema", "strict", "type"})


def require_keys(value: object, allowed: frozenset[str], where: str) -> Json:
    """Return `value` if it is an object with allowed keys only; raise Refusal naming the first other one."""
    if not isinstance(value, dict):
        raise bad_request(Reason.BAD_VALUE, f"'{where}' is an object", where)
    for key in value:
        if key not in allowed:
            name = f"{where}.{key.encode('utf-8', 'replace').decode()[:64]}"
            reason = Reason.FORBIDDEN_KEY if key in ("uuid", "cache_salt") else Reason.UNKNOWN_KEY
            hint = ": it names an entry in a cache that all tenants share" if key == "uuid" else ""
            raise bad_request(reason, f"'{name}' is not accepted{hint}", name)
    return value


def check_chat_messages(fields: Json) -> None:
    """Raise Refusal unless `messages` is a list of messages whose parts are text or inline media.

    Removes nulls and unused keys of answers. Renames `reasoning_content`, as the engine does for a chat but not when it
    renders one: the tokens of a prefix would differ from those of requests that begin so.
    """
    for index, message in enumerate(_items(fields, "messages", required=True)):
        if len(message) == 2 and type(message.get("role")) is str and type(message.get("content")) is str:
            continue  # nearly every message; the checks below cost more
        where = f"messages[{index}]"
        for key in _ANSWERED_ONLY:
            message.pop(key, None)
        _prune(message, _CHAT_MESSAGE, where)
        former = message.pop("reasoning_content", None)
        if former is not None:
            message.setdefault("reasoning", former)
        _role(message, where)
        _check_parts(message.get("content"), f"{where}.content")
        for number, call in enumerate(_items(message, "tool_calls", where=where)):
            place = f"{where}.tool_calls[{number}]"
            _prune(call, _TOOL_CALL, place)
            _prune(call.get("function"), _FUNCTION_CALL, f"{place}.function")
        if "function_call" in message:
            _prune(message["function_call"], _FUNCTION_CALL, f"{where}.function_call")


def check_chat_tools(fields: Json) -> None:
    """Raise Refusal unless `tools` are plain function definitions (their JSON schemas are free)."""
    for index, tool in enumerate(_items(fields, "tools")):
        require_keys(tool, _TOOL, f"tools[{index}]")
        require_keys(tool.get("function"), _FUNCTION, f"tools[{index}].function")


def check_prompt(fields: Json) -> None:
    """Raise Refusal unless `prompt` is text or token ids, one or a list of them."""
    prompt = fields.get("prompt")
    if isinstance(prompt, str):
        return
    if isinstance(prompt, list) and prompt:
        kinds = set(map(type, prompt))
        if kinds in ({str}, {int}):
            return
        if kinds == {list} and all(item and set(map(type, item)) == {int} for item in prompt):
            return
    raise bad_request(Reason.BAD_VALUE, "'prompt' is text, a list of texts, token ids or a list of token ids", "prompt")


def check_anthropic_messages(fields: Json) -> None:
    """Raise Refusal unless messages, system and tools hold text, inline images and tool traffic only. Removes nulls,
    and `cache_control`: the engine caches every prefix anyway."""
    for index, message in enumerate(_items(fields, "messages", required=True)):
        if len(message) == 2 and type(message.get("role")) is str and type(message.get("content")) is str:
            continue
        where = f"messages[{index}]"
        _prune(message, _ANTHROPIC_MESSAGE, where)
        _role(message, where)
        _check_blocks(message.get("content"), f"{where}.content")
    _check_blocks(fields.get("system"), "system")
    for index, tool in enumerate(_items(fields, "tools")):
        _drop_cache_control(tool)
        require_keys(tool, _ANTHROPIC_TOOL, f"tools[{index}]")
        if tool.get("type", "custom") != "custom":
            raise bad_request(Reason.BAD_VALUE, "tools that a provider runs are not offered here", f"tools[{index}]")


def _prune(value: object, allowed: frozenset[str], where: str) -> Json:
    """Remove the nulls of an object, and return it. Raises Refusal for keys that are not allowed."""
    if isinstance(value, dict):
        for key in [key for key, inner in value.items() if inner is None]:
            del value[key]
    return require_keys(value, allowed, where)


def _items(fields: Json, key: str, *, where: str = "", required: bool = False) -> list[Json]:
    name = f"{where}.{key}" if where else key
    value = fields.get(key)
    if value is None and not required:
        return []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value) or (required and not value):
        raise bad_request(Reason.BAD_VALUE, f"'{name}' is a list of objects", name)
    return value


def _role(message: Json, where: str) -> None:
    if not isinstance(message.get("role"), str):
        raise bad_request(Reason.BAD_VALUE, f"'{where}.role' is missing", f"{where}.role")


def _check_parts(value: object, where: str) -> None:
    if value is None or isinstance(value, str):
        return
    if not isinstance(value, list):
        raise bad_request(Reason.BAD_VALUE, f"'{where}' is text or a list of parts", where)
    for index, part in enumerate(value):
        place = f"{where}[{index}]"
        kind = _kind(part, place, _CHAT_PARTS)
        _prune(part, _CHAT_PARTS[kind], place)
        if kind in _INLINE_URL_PARTS:
            _check_inline_url(part.get(kind), f"{place}.{kind}")
        elif kind == "input_audio":
            _prune(part.get(kind), frozenset({"data", "format"}), f"{place}.{kind}")
        elif not isinstance(part.get(kind), str):
            raise bad_request(Reason.BAD_VALUE, f"'{place}.{kind}' is text", f"{place}.{kind}")


def _check_inline_url(value: object, where: str) -> None:
    reference = _prune(value, frozenset({"url", "detail"}), where)
    url = reference.get("url")
    if not isinstance(url, str) or not url.startswith("data:"):
        raise bad_request(Reason.BAD_VALUE, f"'{where}.url' is a data: URL; engines fetch no addresses", f"{where}.url")


def _check_blocks(value: object, where: str) -> None:
    if value is None or isinstance(value, str):
        return
    if not isinstance(value, list):
        raise bad_request(Reason.BAD_VALUE, f"'{where}' is text or a list of blocks", where)
    for index, block in enumerate(value):
        place = f"{where}[{index}]"
        kind = _kind(block, place, _ANTHROPIC_BLOCKS)
        _drop_cache_control(block)
        _prune(block, _ANTHROPIC_BLOCKS[kind], place)
        if kind == "image":
            source = _prune(block.get("source"), _ANTHROPIC_SOURCE, f"{place}.source")
            if source.get("type") != "base64":
                raise bad_request(Reason.BAD_VALUE, "images are sent inline, as base64", f"{place}.source.type")
        elif kind == "tool_result":
            _check_blocks(block.get("content"), f"{place}.content")


def _kind(part: object, where: str, known: dict[str, frozenset[str]]) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in known:
        raise bad_request(Reason.BAD_VALUE, f"'{where}.type' is one of {', '.join(known)}", f"{where}.type")
    return kind


def _drop_cache_control(value: object) -> None:
    if isinstance(value, dict):
        value.pop("cache_control", None)
