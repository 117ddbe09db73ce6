"""The nested half of the allow-list: messages, parts, tools and prompts.

Text and inline media pass. Anything that makes the engine fetch an address, read a file or look up a caller's own name
is refused: those caches and rights are shared by all tenants.

Callers send answers back unchanged, so every part of an answer is accepted. Answers use null for absent values: nulls
and hints are removed from messages, parts, tools and tool calls, but not from a tool's schema or input.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from kvstrata_sidecar.gate.proxy.pictures import PixelBudget
from kvstrata_sidecar.gate.proxy.schemas import SchemaBudget
from kvstrata_sidecar.gate.proxy.values import (
    MAX_NAME_CHARACTERS,
    Bound,
    Json,
    are_whole,
    by_type,
    flag,
    kind_of,
    known_keys,
    record,
    text,
    unserved,
    word_or,
    wrong,
)

MAX_TOOLS = 512

_CHAT_MESSAGE = frozenset(
    {"role", "content", "name", "tool_calls", "tool_call_id", "refusal", "reasoning", "reasoning_content",
     "function_call"}
)  # fmt: skip
_ANSWERED_ONLY = (
    "annotations", "audio", "citations", "provider_specific_fields", "reasoning_details", "thinking_blocks",
)  # fmt: skip
"""Keys of an answer's message, of any provider, that no engine reads: accepted, and not forwarded."""

_ANSWERED_ONLY_IN_PARTS = ("annotations", "id", "index", "logprobs")
"""The same of its parts, as clients keep an answer's content."""

_CHAT_PARTS = ("text", "refusal", "image_url", "video_url", "audio_url", "input_audio")
"""Types of a message's parts; each has its content under the key of its type."""

_REFUSED_PARTS = {"file": "engines read no files; send text or an inline picture"}
_TOOL_CALL = frozenset({"id", "type", "function", "index"})
_FUNCTION_CALL = frozenset({"name", "arguments"})
_CUSTOM_TOOLS = "the engine calls functions only; use a tool of type 'function'"

_NAME = text(MAX_NAME_CHARACTERS)
_DESCRIPTION = text(64 * 1024)

chat_tool_choice = word_or(
    ("none", "auto", "required"),
    by_type(
        {"function": record({"type": _NAME, "function": record({"name": _NAME})})},
        {"custom": _CUSTOM_TOOLS, "allowed_tools": "leave the other tools out of 'tools'"},
    ),
)
"""The bound of a chat's `tool_choice`."""

_ANTHROPIC_MESSAGE = frozenset({"role", "content"})
_ANSWERED_ONLY_BY_MESSAGES = (
    "id", "type", "model", "stop_reason", "stop_sequence", "stop_details", "usage", "container", "context_management",
)  # fmt: skip
"""Keys of a whole answer that a caller sends back as a message: accepted, and not forwarded."""

_REFUSED_OF_MESSAGES = {
    "clear_at": "the engine edits no context; leave the message out",
    "output_config": "use 'output_config' of the request",
}
_ANTHROPIC_BLOCKS: Mapping[str, frozenset[str]] = {
    "text": frozenset({"type", "text", "citations"}),
    "image": frozenset({"type", "source"}),
    "tool_use": frozenset({"type", "id", "name", "input", "caller"}),
    "tool_result": frozenset({"type", "tool_use_id", "content", "is_error"}),
    "thinking": frozenset({"type", "thinking", "signature"}),
    "redacted_thinking": frozenset({"type", "data"}),
}
_SYSTEM_BLOCKS: Mapping[str, frozenset[str]] = {"text": _ANTHROPIC_BLOCKS["text"]}
_REFUSED_OF_BLOCKS = {
    "transformations": "the engine scales pictures itself",
    "toolset_name": "the engine has no toolsets of a provider",
}
_BY_PROVIDER = "the engine runs no tools of a provider"
_REFUSED_BLOCKS = {
    **dict.fromkeys(
        ("server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "advisor_tool_result",
         "code_execution_tool_result", "bash_code_execution_tool_result", "text_editor_code_execution_tool_result",
         "tool_search_tool_result", "mcp_tool_use", "mcp_tool_result", "mcp_tool_listing", "browser_state"),
        _BY_PROVIDER,
    ),
    **dict.fromkeys(("tool_reference", "tool_addition", "tool_removal"), "all of 'tools' are offered from the start"),
    "document": "the engine reads no documents; send text or an inline picture",
    "search_result": "the engine cites no sources; send text",
    "container_upload": "the engine has no containers",
    "compaction": "the engine compacts no context",
    "fallback": "this gate serves one model",
}  # fmt: skip
_ANTHROPIC_SOURCE = frozenset({"type", "media_type", "data"})
_REFUSED_SOURCES = dict.fromkeys(("url", "file_id"), "images are sent inline, as base64")
_REFUSED_OF_TOOLS = {
    "input_examples": "the engine does not know it; describe examples in 'description'",
    "allowed_callers": "the model alone calls tools",
}
_PROVIDERS_TOOL = re.compile(
    "(advisor|bash|browser_toolset|code_execution|computer|computer_toolset|mcp_toolset|memory|text_editor"
    "|tool_search_tool_bm25|tool_search_tool_regex|web_fetch|web_search)(_[0-9]{8})?"
)

anthropic_tool_choice = by_type(
    dict.fromkeys(
        ("auto", "any", "tool", "none"), record({"type": _NAME, "name": _NAME, "disable_parallel_tool_use": flag})
    )
)
"""The bound of `tool_choice` in Anthropic's API."""


def chat_messages(value: object, where: str) -> None:
    """Raise Refusal unless this is a list of messages whose parts are text or inline media. Removes nulls and unused
    keys of answers. Renames `reasoning_content`, as the engine does for a chat but not when it renders one: the tokens
    of a prefix would differ from those of requests that begin so."""
    budget = PixelBudget()
    for message, place in _messages(value, where):
        for key in _ANSWERED_ONLY:
            message.pop(key, None)
        known_keys(message, _CHAT_MESSAGE, place)
        if "reasoning_content" in message:
            message.setdefault("reasoning", message.pop("reasoning_content"))
        _role(message, place)
        _check_parts(message.get("content"), f"{place}.content", budget)
        for number, call in enumerate(_objects(message.get("tool_calls", []), f"{place}.tool_calls")):
            call_place = f"{place}.tool_calls[{number}]"
            if call.get("type") == "custom":
                raise unserved(f"{call_place}.type", _CUSTOM_TOOLS)
            known_keys(call, _TOOL_CALL, call_place)
            known_keys(call.get("function"), _FUNCTION_CALL, f"{call_place}.function")
        if "function_call" in message:
            known_keys(message["function_call"], _FUNCTION_CALL, f"{place}.function_call")


def chat_tools(budget: SchemaBudget) -> Bound:
    """Return the bound of plain function definitions with bounded schemas."""
    function = {"name": _NAME, "description": _DESCRIPTION, "parameters": budget.take, "strict": flag}
    bound = record({"type": _NAME, "function": record(function)})

    def check(tool: Json, place: str) -> None:
        if tool.get("type") == "custom":
            raise unserved(f"{place}.type", _CUSTOM_TOOLS)
        bound(tool, place)
        if "function" not in tool:
            raise wrong(f"{place}.function", "an object")

    return _each_tool(check)


def prompt(value: object, where: str) -> None:
    """Raise Refusal unless this is text or token ids, one or a list of them."""
    if isinstance(value, str):
        return
    if isinstance(value, list) and value:
        kinds = set(map(type, value))
        if kinds == {str} or are_whole(value):
            return
        if kinds == {list} and all(item and are_whole(item) for item in value):
            return
    raise wrong(where, "text, a list of texts, token ids or a list of token ids")


def anthropic_messages(value: object, where: str) -> None:
    """Raise Refusal unless messages hold text, inline images and tool traffic only. Removes nulls and hints."""
    budget = PixelBudget()
    for message, place in _messages(value, where):
        for key in _ANSWERED_ONLY_BY_MESSAGES:
            message.pop(key, None)
        known_keys(message, _ANTHROPIC_MESSAGE, place, _REFUSED_OF_MESSAGES)
        _role(message, place)
        _check_blocks(message.get("content"), f"{place}.content", budget)


def anthropic_system(value: object, where: str) -> None:
    """Raise Refusal unless this is text, or a list of blocks of text."""
    _check_blocks(value, where, PixelBudget(), _SYSTEM_BLOCKS)


def anthropic_tools(budget: SchemaBudget) -> Bound:
    """Return the bound of tools that the caller runs, with bounded schemas."""
    own = {"name": _NAME, "description": _DESCRIPTION, "input_schema": budget.take, "strict": flag}
    bound = record({**own, "type": _NAME}, _REFUSED_OF_TOOLS)

    def check(tool: Json, place: str) -> None:
        kind = tool.get("type")
        if kind is not None and kind != "custom":
            if isinstance(kind, str) and _PROVIDERS_TOOL.fullmatch(kind):
                raise unserved(place, _BY_PROVIDER)
            raise wrong(place, "a tool of type 'custom'")
        if tool.get("allowed_callers") == ["direct"]:
            del tool["allowed_callers"]
        bound(tool, place)

    return _each_tool(check)


def _each_tool(check: Bound) -> Bound:
    def check_all(value: object, where: str) -> None:
        tools = _objects(value, where)
        if len(tools) > MAX_TOOLS:
            raise wrong(where, f"a list of at most {MAX_TOOLS} tools")
        for index, tool in enumerate(tools):
            check(tool, f"{where}[{index}]")

    return check_all


def _objects(value: object, where: str, *, required: bool = False) -> list[Json]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value) or (required and not value):
        raise wrong(where, "a list of objects")
    return value


def _messages(value: object, where: str) -> Iterator[tuple[Json, str]]:
    """Yield the messages that are more than a role and a text, each with its place."""
    for index, message in enumerate(_objects(value, where, required=True)):
        # Nearly every message is plain, and further checks cost more than this one.
        if len(message) != 2 or type(message.get("role")) is not str or type(message.get("content")) is not str:
            yield message, f"{where}[{index}]"


def _role(message: Json, where: str) -> None:
    if not isinstance(message.get("role"), str):
        raise wrong(f"{where}.role", "missing")


def _pieces(value: object, where: str, name: str) -> Iterator[tuple[Any, str]]:
    """Yield the parts or blocks of a message, each with its place; none of a text."""
    if value is None or isinstance(value, str):
        return
    if not isinstance(value, list):
        raise wrong(where, f"text or a list of {name}")
    for index, piece in enumerate(value):
        yield piece, f"{where}[{index}]"


def _check_parts(value: object, where: str, budget: PixelBudget) -> None:
    for part, place in _pieces(value, where, "parts"):
        kind = kind_of(part, place, _CHAT_PARTS, _REFUSED_PARTS)
        for key in _ANSWERED_ONLY_IN_PARTS:
            part.pop(key, None)
        known_keys(part, ("type", kind), place)
        if kind.endswith("_url"):
            _check_inline_url(part.get(kind), f"{place}.{kind}", kind, budget)
        elif kind == "input_audio":
            known_keys(part.get(kind), frozenset({"data", "format"}), f"{place}.{kind}")
        elif not isinstance(part.get(kind), str):
            raise wrong(f"{place}.{kind}", "text")


def _check_inline_url(value: object, where: str, kind: str, budget: PixelBudget) -> None:
    url = known_keys(value, frozenset({"url", "detail"}), where).get("url")
    place = f"{where}.url"
    if not isinstance(url, str) or not url.startswith("data:"):
        raise wrong(place, "a data: URL; engines fetch no addresses")
    if kind == "image_url":
        budget.take_url(url, place)
    elif kind == "video_url":
        budget.take_frames(url, place)


def _check_blocks(
    value: object, where: str, budget: PixelBudget, known: Mapping[str, frozenset[str]] = _ANTHROPIC_BLOCKS
) -> None:
    for block, place in _pieces(value, where, "blocks"):
        kind = kind_of(block, place, known, _REFUSED_BLOCKS)
        known_keys(block, known[kind], place, _REFUSED_OF_BLOCKS)
        if kind == "image":
            source = block.get("source")
            known_keys(source, _ANTHROPIC_SOURCE, f"{place}.source", _REFUSED_SOURCES)
            kind_of(source, f"{place}.source", ("base64",))
            budget.take(source.get("data"), f"{place}.source.data")
        elif kind == "tool_result":
            _check_blocks(block.get("content"), f"{place}.content", budget)
