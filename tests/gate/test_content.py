"""Messages, parts and tools: what passes, what is left out, and which place of the body a refusal names."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from kvstrata_sidecar.gate.http.errors import Reason, Refusal
from kvstrata_sidecar.gate.proxy import bodies

from .stand_ins import PICTURE

URL = f"data:image/png;base64,{PICTURE}"
IMAGE = {"type": "image_url", "image_url": {"url": URL, "detail": "low"}}
CALL = {"id": "c", "type": "function", "index": 0, "function": {"name": "f", "arguments": "{}"}}
USER = {"role": "user", "content": "x"}


def check(endpoint: bodies.Endpoint, fields: dict[str, Any]) -> None:
    """Apply the bounds of an endpoint to some keys of a body, and to the required one."""
    for key, value in {endpoint.required: None, **fields}.items():
        endpoint.forwarded[key](value, key)


def check_chat_messages(fields: dict[str, Any]) -> None:
    check(bodies.CHAT, fields)


def check_anthropic_messages(fields: dict[str, Any]) -> None:
    check(bodies.MESSAGES, fields)


def check_chat_tools(fields: dict[str, Any]) -> None:
    check(bodies.CHAT, {"messages": [USER], **fields})


def check_prompt(fields: dict[str, Any]) -> None:
    check(bodies.COMPLETIONS, fields)


def refusal_of(check: Any, fields: dict[str, Any]) -> tuple[Reason, str | None]:
    with pytest.raises(Refusal) as refusal:
        check(copy.deepcopy(fields))
    assert refusal.value.status == 400
    return refusal.value.reason, refusal.value.param


def chat(*messages: Any) -> dict[str, Any]:
    return {"messages": [USER, *messages]}


def parts(*content: Any) -> dict[str, Any]:
    return chat({"role": "user", "content": list(content)})


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "x", "name": "n"},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "assistant", "content": "x", "refusal": "r", "reasoning": "because"},
        {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "tool", "content": "x", "tool_call_id": "c"},
        {"role": "user", "content": [{"type": "text", "text": "t"}, IMAGE]},
        {"role": "user", "content": [{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AA"}}]},
        {"role": "user", "content": [{"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,AA"}}]},
        {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    ],
    ids=str,
)
def test_a_message_of_a_chat_passes_as_it_is(message: dict[str, Any]) -> None:
    fields = chat(message, USER)
    check_chat_messages(fields)
    assert fields == chat(message, USER)


@pytest.mark.parametrize(
    ("message", "passed"),
    [
        ({"role": "assistant", "content": None, "refusal": None, "tool_calls": None}, {"role": "assistant"}),
        ({**USER, "annotations": [1], "audio": {"id": 1}}, USER),
        ({**USER, "annotations": None, "audio": None}, USER),
        ({**USER, "reasoning_content": "why"}, {**USER, "reasoning": "why"}),
        ({**USER, "reasoning_content": None}, USER),
        ({**USER, "reasoning_content": "later", "reasoning": "first"}, {**USER, "reasoning": "first"}),
        ({"role": "assistant", "tool_calls": [{**CALL, "index": None, "function": {"name": "f", "arguments": None}}]},
         {"role": "assistant", "tool_calls": [
             {"id": "c", "type": "function", "function": {"name": "f"}}]}),
        ({"role": "assistant", "function_call": {"name": "f", "arguments": None}},
         {"role": "assistant", "function_call": {"name": "f"}}),
        ({"role": "assistant", "function_call": None}, {"role": "assistant"}),
        ({"role": "assistant", "content": [
            {"type": "text", "text": "t", "annotations": [{}], "id": "msg_1", "index": 0, "logprobs": []},
            {"type": "refusal", "refusal": "r", "id": "msg_2"}]},
         {"role": "assistant", "content": [{"type": "text", "text": "t"}, {"type": "refusal", "refusal": "r"}]}),
        ({"role": "user", "content": [{"type": "text", "text": "t", "x": None}]},
         {"role": "user", "content": [{"type": "text", "text": "t"}]}),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": URL, "detail": None}}]},
         {"role": "user", "content": [{"type": "image_url", "image_url": {"url": URL}}]}),
        ({"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "AA", "format": None}}]},
         {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "AA"}}]}),
    ],
    ids=str,
)  # fmt: skip
def test_what_an_answer_holds_for_nothing_is_left_out(message: dict[str, Any], passed: dict[str, Any]) -> None:
    fields = chat(copy.deepcopy(message))
    check_chat_messages(fields)
    assert fields == chat(passed)


CALLING = {"role": "assistant", "tool_calls": [CALL]}


@pytest.mark.parametrize(
    ("fields", "reason", "param"),
    [
        ({}, Reason.BAD_VALUE, "messages"),
        ({"messages": []}, Reason.BAD_VALUE, "messages"),
        ({"messages": None}, Reason.BAD_VALUE, "messages"),
        ({"messages": USER}, Reason.BAD_VALUE, "messages"),
        ({"messages": [USER, "x"]}, Reason.BAD_VALUE, "messages"),
        (chat({**USER, "more": 1}), Reason.UNKNOWN_KEY, "messages[1].more"),
        (chat({**USER, "cache_salt": "s"}), Reason.FORBIDDEN_KEY, "messages[1].cache_salt"),
        (chat({**USER, "uuid": "s"}), Reason.FORBIDDEN_KEY, "messages[1].uuid"),
        (chat({**USER, "k" * 100: 1}), Reason.UNKNOWN_KEY, "messages[1]." + "k" * 64),
        (chat({"content": "x"}), Reason.BAD_VALUE, "messages[1].role"),
        (chat({"role": 1, "content": "x"}), Reason.BAD_VALUE, "messages[1].role"),
        (chat({"role": "user", "content": 1}), Reason.BAD_VALUE, "messages[1].content"),
        (chat({"role": "user", "content": {}}), Reason.BAD_VALUE, "messages[1].content"),
        (parts("x"), Reason.BAD_VALUE, "messages[1].content[0].type"),
        (parts({"type": "text", "text": "x"}, {"text": "x"}), Reason.BAD_VALUE, "messages[1].content[1].type"),
        (parts({"type": "image_embeds"}), Reason.BAD_VALUE, "messages[1].content[0].type"),
        (parts({"type": ["text"]}), Reason.BAD_VALUE, "messages[1].content[0].type"),
        (parts({"type": "text", "text": 1}), Reason.BAD_VALUE, "messages[1].content[0].text"),
        (parts({"type": "text"}), Reason.BAD_VALUE, "messages[1].content[0].text"),
        (parts({"type": "refusal"}), Reason.BAD_VALUE, "messages[1].content[0].refusal"),
        (parts({"type": "text", "text": "x", "uuid": "u"}), Reason.FORBIDDEN_KEY, "messages[1].content[0].uuid"),
        (parts({"type": "image_url", "image_url": "data:,"}), Reason.BAD_VALUE, "messages[1].content[0].image_url"),
        (parts({"type": "image_url"}), Reason.BAD_VALUE, "messages[1].content[0].image_url"),
        (parts({"type": "image_url", "image_url": {}}), Reason.BAD_VALUE, "messages[1].content[0].image_url.url"),
        (parts({"type": "image_url", "image_url": {"url": 1}}), Reason.BAD_VALUE,
         "messages[1].content[0].image_url.url"),
        (parts({"type": "video_url", "video_url": {"url": "http://x/data:"}}), Reason.BAD_VALUE,
         "messages[1].content[0].video_url.url"),
        (parts({"type": "audio_url", "audio_url": {"url": "data:,", "uuid": "u"}}), Reason.FORBIDDEN_KEY,
         "messages[1].content[0].audio_url.uuid"),
        (parts({"type": "input_audio"}), Reason.BAD_VALUE, "messages[1].content[0].input_audio"),
        (parts({"type": "input_audio", "input_audio": {"path": "x"}}), Reason.UNKNOWN_KEY,
         "messages[1].content[0].input_audio.path"),
        (chat({"role": "assistant", "tool_calls": CALL}), Reason.BAD_VALUE, "messages[1].tool_calls"),
        (chat({"role": "assistant", "tool_calls": [CALL, 1]}), Reason.BAD_VALUE, "messages[1].tool_calls"),
        (chat({"role": "assistant", "tool_calls": [CALL, {**CALL, "x": 1}]}), Reason.UNKNOWN_KEY,
         "messages[1].tool_calls[1].x"),
        (chat({"role": "assistant", "tool_calls": [{"id": "c"}]}), Reason.BAD_VALUE,
         "messages[1].tool_calls[0].function"),
        (chat({"role": "assistant", "tool_calls": [{**CALL, "function": {"x": 1}}]}), Reason.UNKNOWN_KEY,
         "messages[1].tool_calls[0].function.x"),
        (chat({"role": "assistant", "function_call": "f"}), Reason.BAD_VALUE, "messages[1].function_call"),
        (chat({"role": "assistant", "function_call": {"x": 1}}), Reason.UNKNOWN_KEY, "messages[1].function_call.x"),
    ],
    ids=str,
)  # fmt: skip
def test_a_refusal_of_a_chat_names_the_place(fields: dict[str, Any], reason: Reason, param: str) -> None:
    assert refusal_of(check_chat_messages, fields) == (reason, param)


def test_a_message_is_checked_though_those_before_it_are_plain() -> None:
    assert refusal_of(check_chat_messages, {"messages": [USER, USER, {**USER, "x": 1}]})[1] == "messages[2].x"
    assert refusal_of(check_anthropic_messages, {"messages": [USER, USER, {**USER, "x": 1}]})[1] == "messages[2].x"


TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"x": None}, "strict": True}}


def test_tools_of_a_chat_pass_with_any_schema() -> None:
    fields: dict[str, Any] = {"tools": [TOOL]}
    check_chat_tools(fields)
    assert fields == {"tools": [TOOL]}
    check_chat_tools({})
    check_chat_tools({"tools": []})


@pytest.mark.parametrize(
    ("tools", "reason", "param"),
    [
        (TOOL, Reason.BAD_VALUE, "tools"),
        ([TOOL, "x"], Reason.BAD_VALUE, "tools"),
        ([TOOL, {**TOOL, "x": 1}], Reason.UNKNOWN_KEY, "tools[1].x"),
        ([{"type": "function"}], Reason.BAD_VALUE, "tools[0].function"),
        ([{"type": "function", "function": {"url": "x"}}], Reason.UNKNOWN_KEY, "tools[0].function.url"),
    ],
)
def test_a_refusal_of_a_tool_names_the_place(tools: Any, reason: Reason, param: str) -> None:
    assert refusal_of(check_chat_tools, {"tools": tools}) == (reason, param)


@pytest.mark.parametrize("prompt", ["", "x", ["x", "y"], [1, 2], [[1], [2, 3]]])
def test_a_prompt_is_text_or_tokens(prompt: Any) -> None:
    check_prompt({"prompt": prompt})


@pytest.mark.parametrize("prompt", [None, [], {}, 1, [1, "x"], [True], [[]], [[1], []], [[1], ["x"]], [[True]], [None]])
def test_any_other_prompt_is_refused(prompt: Any) -> None:
    assert refusal_of(check_prompt, {"prompt": prompt}) == (Reason.BAD_VALUE, "prompt")


CACHED = {"cache_control": {"type": "ephemeral"}}
SOURCE = {"type": "base64", "media_type": "image/png", "data": PICTURE}
BLOCKS = [
    {"type": "text", "text": "t"},
    {"type": "image", "source": SOURCE},
    {"type": "tool_use", "id": "t", "name": "f", "input": {"x": None}, "caller": {"type": "direct"}},
    {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "t"}], "is_error": False},
    {"type": "thinking", "thinking": "t", "signature": "s"},
    {"type": "redacted_thinking", "data": "d"},
]


def test_blocks_of_anthropic_pass_without_nulls_and_cache_control() -> None:
    def dressed(blocks: list[Any]) -> list[Any]:
        return [{**block, **CACHED, "citations": None, "signature": block.get("signature")} for block in blocks]

    tool = {"name": "f", "description": "d", "input_schema": {"x": None}, "strict": True, "type": "custom"}
    inner = dressed([*BLOCKS[:3], {**BLOCKS[3], "content": dressed(BLOCKS[:1])}, *BLOCKS[4:]])
    fields = {
        "messages": [USER, {"role": "user", "content": inner}, {"role": "assistant", "content": "x"}],
        "system": dressed(BLOCKS[:1]), "tools": [{**tool, **CACHED}, {"name": "g", "input_schema": {}}],
    }  # fmt: skip
    check_anthropic_messages(fields)
    assert fields == {
        "messages": [USER, {"role": "user", "content": BLOCKS}, {"role": "assistant", "content": "x"}],
        "system": BLOCKS[:1], "tools": [tool, {"name": "g", "input_schema": {}}],
    }  # fmt: skip


def blocks(*content: Any) -> dict[str, Any]:
    return {"messages": [USER, {"role": "user", "content": list(content)}]}


@pytest.mark.parametrize(
    ("fields", "reason", "param"),
    [
        ({}, Reason.BAD_VALUE, "messages"),
        ({"messages": []}, Reason.BAD_VALUE, "messages"),
        ({"messages": [USER, {**USER, "name": "n"}]}, Reason.UNKNOWN_KEY, "messages[1].name"),
        ({"messages": [{"content": "x"}]}, Reason.BAD_VALUE, "messages[0].role"),
        ({"messages": [{"role": None, "content": "x"}]}, Reason.BAD_VALUE, "messages[0].role"),
        (blocks("x"), Reason.BAD_VALUE, "messages[1].content[0].type"),
        (blocks(BLOCKS[0], {"type": "document"}), Reason.FORBIDDEN_KEY, "messages[1].content[1].type"),
        ({"messages": [{"role": "user", "content": 1}]}, Reason.BAD_VALUE, "messages[0].content"),
        (blocks({"type": "text", "text": "x", "uuid": "u"}), Reason.FORBIDDEN_KEY, "messages[1].content[0].uuid"),
        (blocks({"type": "image"}), Reason.BAD_VALUE, "messages[1].content[0].source"),
        (blocks({"type": "image", "source": {**SOURCE, "url": "x"}}), Reason.FORBIDDEN_KEY,
         "messages[1].content[0].source.url"),
        (blocks({"type": "image", "source": {"type": "file"}}), Reason.BAD_VALUE,
         "messages[1].content[0].source.type"),
        (blocks({"type": "image", "source": {"data": "AA"}}), Reason.BAD_VALUE,
         "messages[1].content[0].source.type"),
        (blocks({"type": "tool_result", "content": [{"type": "x"}]}), Reason.BAD_VALUE,
         "messages[1].content[0].content[0].type"),
        (blocks({"type": "tool_result", "content": 1}), Reason.BAD_VALUE, "messages[1].content[0].content"),
        ({"messages": [USER], "system": {}}, Reason.BAD_VALUE, "system"),
        ({"messages": [USER], "system": [{"type": "x"}]}, Reason.BAD_VALUE, "system[0].type"),
        ({"messages": [USER], "tools": {}}, Reason.BAD_VALUE, "tools"),
        ({"messages": [USER], "tools": [{"name": "a"}, {"url": "x"}]}, Reason.UNKNOWN_KEY, "tools[1].url"),
        ({"messages": [USER], "tools": [{"name": "a"}, {"type": "bash_20250124"}]}, Reason.FORBIDDEN_KEY,
         "tools[1]"),
        ({"messages": [USER], "tools": [{"type": "shell"}]}, Reason.BAD_VALUE, "tools[0]"),
        ({"messages": [USER], "system": [BLOCKS[1]]}, Reason.BAD_VALUE, "system[0].type"),
    ],
    ids=str,
)  # fmt: skip
def test_a_refusal_of_anthropics_messages_names_the_place(fields: dict[str, Any], reason: Reason, param: str) -> None:
    assert refusal_of(check_anthropic_messages, fields) == (reason, param)
