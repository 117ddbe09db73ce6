"""Properties of the rewriter: whatever a caller sends, the engine gets one salt and one model, and both are ours."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata_sidecar.gate.http.errors import Reason, Refusal
from kvstrata_sidecar.gate.proxy import bodies, parsing
from kvstrata_sidecar.gate.proxy import strict_json as strictjson
from tests.support.amounts import examples

from .stand_ins import PICTURE, chat_message, whole_answer

SALT = "0123456789abcdef0123456789abcdef"

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
forwarded = {key for endpoint in bodies.ENDPOINTS.values() for key in endpoint.forwarded}
known = sorted(forwarded | set(bodies.FORBIDDEN) | set(bodies.UNSERVED) | bodies.IGNORED)
keys = st.sampled_from(["model", "cache_salt", "Cache_Salt", "stream", "user", *known]) | st.text(max_size=12)
messages = st.just([{"role": "user", "content": "x"}])


@st.composite
def documents(draw: st.DrawFn) -> bytes:
    """JSON text of an object, with repeated keys, odd escapes and values of every kind."""
    pairs: list[tuple[str, Any]] = draw(st.lists(st.tuples(keys, values), max_size=5))
    if draw(st.booleans()):
        pairs.append(("messages", draw(messages)))
    if draw(st.booleans()):
        pairs.append(("prompt", "x"))
    members = []
    for key, value in draw(st.permutations(pairs)):
        name = json.dumps(key)
        if draw(st.booleans()):
            name = '"' + "".join(f"\\u{ord(c):04x}" if ord(c) < 0x10000 else c for c in key) + '"'
        members.append(f"{name}:{json.dumps(value, ensure_ascii=draw(st.booleans()))}")
    return ("{" + ",".join(members) + "}").encode("utf-8", "surrogatepass")


def engine_sees(endpoint: bodies.Endpoint, data: bytes) -> bytes | None:
    """Return the bytes that the engine gets, or None for a refusal."""
    try:
        return bytes(parsing.parse(endpoint, "tiny", data).seal(SALT))
    except Refusal as error:
        refusal = error
    assert 400 <= refusal.status < 500
    assert json.loads(refusal.body())["error"]["message"]
    return None


@pytest.mark.parametrize("endpoint", bodies.ENDPOINTS.values(), ids=lambda e: e.path.decode())
@settings(max_examples=examples(150))
@given(data=documents())
def test_the_engine_sees_one_salt_and_one_model_and_both_are_ours(endpoint: bodies.Endpoint, data: bytes) -> None:
    seen = engine_sees(endpoint, data)
    if seen is None:
        return
    pairs: list[tuple[str, Any]] = json.loads(seen, object_pairs_hook=lambda members: members)
    names = [name for name, _ in pairs]
    assert len(names) == len(set(names))
    assert dict(pairs)["cache_salt"] == SALT
    assert dict(pairs)["model"] == "tiny"
    assert set(names) <= set(endpoint.forwarded) | {"cache_salt", "model"}


@settings(max_examples=examples(150))
@given(data=st.binary(max_size=200) | documents().map(lambda d: d[:-1]) | documents().map(lambda d: d + d))
def test_no_bytes_make_the_rewriter_fail(data: bytes) -> None:
    for endpoint in bodies.ENDPOINTS.values():
        engine_sees(endpoint, data)


@settings(max_examples=examples(100))
@given(text=st.text(), temperature=st.floats(0, 2), seed=st.integers(-(2**63), 2**63 - 1))
def test_what_is_forwarded_is_what_was_sent(text: str, temperature: float, seed: int) -> None:
    body = {"messages": [{"role": "user", "content": text}], "temperature": temperature, "seed": seed}
    for ascii_only in (True, False):
        seen = engine_sees(bodies.CHAT, json.dumps(body, ensure_ascii=ascii_only).encode())
        assert seen is not None
        assert json.loads(seen) == {**body, "model": "tiny", "cache_salt": SALT}


def read(data: bytes) -> str:
    """Return what the gate reads, with the kinds of all values, or the reason of its refusal."""
    try:
        return repr(strictjson.parse_object(data))
    except Refusal as refusal:
        return refusal.reason


@settings(max_examples=examples(200))
@given(
    data=st.dictionaries(st.text(max_size=12), values, max_size=5).map(
        lambda value: json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    )
    | documents()
)
def test_a_body_without_spaces_is_read_as_one_with_them_though_faster(data: bytes) -> None:
    if read(b" " + data) != Reason.MALFORMED_JSON:  # with a space in front nothing is as the gate would write it
        assert read(data) == read(b" " + data)
    else:
        assert engine_sees(bodies.CHAT, data) is None


@pytest.mark.parametrize(
    "data",
    [b'{"a":1,"a":1}', b'{"a":{"b":1,"b":2}}', b'{"a":"\\ud800"}', b'{"a":1e999}', b'{"a":NaN}', b'\xef\xbb\xbf{"a":1}',
     b'{"a":123456789012345678901234567890}', b'{"a":"\xff"}', b"[1]", b"null",
     b'{"a":' + b"[" * 70 + b"]" * 70 + b"}"],
)  # fmt: skip
def test_a_body_without_spaces_is_refused_as_well(data: bytes) -> None:
    with pytest.raises(Refusal):
        strictjson.emit(strictjson.parse_object(data))


def nested(depth: int, kinds: str, beside: list[Any], filler: int) -> dict[str, Any]:
    """Return an object that is `depth` levels deep, lists and objects in turn, beside other lists and a text."""
    value: Any = 0
    for level in range(depth - 1):
        value = [value] if kinds[level % len(kinds)] == "[" else {"a": value}
    return {"a": value, "b": beside, "text": "x" * filler}


@pytest.mark.parametrize("filler", [0, 50_000], ids=["short", "long"])
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")], ids=["as the gate writes", "with spaces"])
@pytest.mark.parametrize("beside", [[], [[[]]] * 100], ids=["alone", "beside others"])
@pytest.mark.parametrize("kinds", ["[", "{", "[{"])
def test_a_body_may_be_64_levels_deep_and_no_deeper(
    kinds: str, beside: list[Any], separators: tuple[str, str], filler: int
) -> None:
    deepest, deeper = (nested(depth, kinds, beside, filler) for depth in (64, 65))
    assert strictjson.parse_object(json.dumps(deepest, separators=separators).encode()) == deepest
    with pytest.raises(Refusal) as refusal:
        strictjson.parse_object(json.dumps(deeper, separators=separators).encode())
    assert (refusal.value.status, refusal.value.reason) == (400, Reason.TOO_LARGE)


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")], ids=["as the gate writes", "with spaces"])
def test_what_stands_side_by_side_or_in_a_text_makes_no_body_deeper(separators: tuple[str, str]) -> None:
    wide = {"a": [[]] * 500, "b": [{}] * 500, "text": "[{" * 100}
    assert strictjson.parse_object(json.dumps(wide, separators=separators).encode()) == wide


@settings(max_examples=examples(100))
@given(value=values, depth=st.integers(0, 3))
def test_a_repeated_key_is_refused_at_any_depth(value: object, depth: int) -> None:
    text = '{"a":' + json.dumps(value) + ',"\\u0061":1}'
    for _ in range(depth):
        text = '{"x":[' + text + "]}"
    with pytest.raises(Refusal):
        strictjson.parse_object(text.encode())


@pytest.mark.parametrize("key", sorted(bodies.FORBIDDEN))
@pytest.mark.parametrize("endpoint", bodies.ENDPOINTS.values(), ids=lambda e: e.path.decode())
def test_every_forbidden_key_is_refused_on_every_endpoint_with_a_reason(endpoint: bodies.Endpoint, key: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "prompt": "x", key: None}
    del body["prompt" if endpoint is not bodies.COMPLETIONS else "messages"]
    with pytest.raises(Refusal) as refusal:
        bodies.rewrite(endpoint, body)
    assert refusal.value.param == key
    assert bodies.FORBIDDEN[key] in refusal.value.message
    assert key not in {*endpoint.forwarded, *bodies.IGNORED, *bodies.UNSERVED}


def test_ordinary_bodies_of_the_usual_clients_pass() -> None:
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PICTURE}", "detail": "low"}}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    chat = {
        "model": "tiny", "user": "u", "store": False, "n": 1, "stop": ["x"], "stream": True, "max_tokens": 5,
        "stream_options": {"include_usage": True}, "response_format": {"type": "json_schema", "json_schema": {}},
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}],
        "tool_choice": "auto", "parallel_tool_calls": False, "logprobs": True, "top_logprobs": 2,
        "chat_template_kwargs": {"enable_thinking": False},
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "t"}, image], "name": "n"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "r"}]},
        ],
    }  # fmt: skip
    seen = engine_sees(bodies.CHAT, json.dumps(chat).encode())
    assert seen is not None
    dropped = {"user", "store"}
    assert json.loads(seen)["messages"][1] == chat["messages"][1]  # type: ignore[index]
    assert not dropped & set(json.loads(seen))
    for prompt in ("x", ["x", "y"], [1, 2, 3], [[1, 2], [3]]):
        assert engine_sees(bodies.COMPLETIONS, json.dumps({"prompt": prompt}).encode()) is not None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options"),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": True, "include_usage": False}},
            "stream_options",
        ),
        ({"stream": True, "stream_options": {"include_usage": 2}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"other": True}}, "stream_options.other"),
        ({"stream": True, "stream_options": []}, "stream_options"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": False, "stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": "true"}, "stream"),
        ({"structured_outputs": {"other": 1}}, "structured_outputs.other"),
        ({"structured_outputs": []}, "structured_outputs"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"n": 65}, "n"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
    ],
    ids=str,
)
def test_options_that_are_refused_are_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(Refusal) as refusal:
        bodies.rewrite(bodies.CHAT, {"messages": [{"role": "user", "content": "x"}], **fields})
    assert (refusal.value.status, refusal.value.param) == (400, param)


@pytest.mark.parametrize(
    ("fields", "seen", "stripped"),
    [
        ({}, {}, False),
        ({"stream": False}, {"stream": False}, False),
        ({"stream": 0, "logprobs": 0}, {"stream": 0, "logprobs": 0}, False),
        ({"stream": False, "stream_options": {"include_usage": None}}, {"stream": False, "stream_options": {}}, False),
        ({"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}, True),
        ({"stream": 1}, {"stream": 1, "stream_options": {"include_usage": True}}, True),
        ({"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
         {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}, False),
        ({"stream": True, "stream_options": {"include_usage": None, "continuous_usage_stats": False}},
         {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": False}}, True),
        ({"n": 64}, {"n": 64}, False),
    ],
    ids=str,
)  # fmt: skip
def test_options_that_pass_reach_the_engine(fields: dict[str, Any], seen: dict[str, Any], stripped: bool) -> None:
    asked = {"messages": [{"role": "user", "content": "x"}]}
    made, shape = bodies.rewrite(bodies.CHAT, {**asked, **fields})
    assert (made, shape.strip_usage) == ({**asked, **seen}, stripped)


def test_an_endpoint_without_the_option_is_not_asked_for_usage() -> None:
    asked = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "stream": True}
    made, shape = bodies.rewrite(bodies.MESSAGES, dict(asked))
    assert (made, shape.strip_usage) == (asked, False)


@pytest.mark.parametrize(("prompt", "n", "passes"), [(["x"] * 64, 1, True), (["x"] * 65, 1, False),
    (["x"] * 2, 32, True), (["x"] * 2, 33, False), ([1] * 100, 64, True), ([[1]] * 65, 1, False)])  # fmt: skip
def test_sequences_of_a_request_are_prompts_times_n(prompt: list[Any], n: int, passes: bool) -> None:
    data = json.dumps({"prompt": prompt, "n": n}).encode()
    assert (engine_sees(bodies.COMPLETIONS, data) is not None) is passes


def test_too_many_prompts_are_refused_by_their_name() -> None:
    for body, named in (({"prompt": ["x"] * 65}, "prompt"), ({"prompt": ["x"] * 2, "n": 33}, "n")):
        with pytest.raises(Refusal) as refusal:
            bodies.rewrite(bodies.COMPLETIONS, dict(body))
        assert refusal.value.param == named


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        ({"prompt": "x", "n": 2.0}, {"n": 2.0}),
        ({"prompt": "x", "max_tokens": 2.0, "top_k": 5.0, "seed": 3.0}, {"max_tokens": 2, "top_k": 5, "seed": 3}),
        ({"prompt": [1.0, 2]}, {"prompt": [1, 2]}),
        ({"prompt": [[1], [2.0, 3.0]]}, {"prompt": [[1], [2, 3]]}),
        ({"prompt": "x", "stop_token_ids": [1.0]}, {"stop_token_ids": [1]}),
    ],
)
def test_whole_numbers_may_be_written_with_a_point(given: dict[str, Any], seen: dict[str, Any]) -> None:
    fields, shape = bodies.rewrite(bodies.COMPLETIONS, given)
    assert {name: fields[name] for name in seen} == seen
    assert type(shape.sequences) is int


@pytest.mark.parametrize("given", [{"prompt": [1.5]}, {"prompt": [1.0, "x"]}, {"prompt": "x", "n": 1.5},
                                   {"prompt": "x", "max_tokens": "2"}, {"prompt": "x", "seed": 1e300}])  # fmt: skip
def test_other_numbers_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(Refusal):
        bodies.rewrite(bodies.COMPLETIONS, given)


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":null}'}}
STREAMED_CALL = {**CALL, "index": 0, "function": {**CALL["function"], "parsed_arguments": None}}  # type: ignore[dict-item]


def turn_of(endpoint: bodies.Endpoint, message: dict[str, Any], **fields: Any) -> dict[str, Any] | None:
    """Return a message as the engine gets it between two others; None if it is refused."""
    asked = {"role": "user", "content": "x"}
    seen = engine_sees(endpoint, json.dumps({"messages": [asked, message, asked], **fields}).encode())
    if seen is None:
        return None
    before, middle, after = json.loads(seen)["messages"]
    assert before == after == asked
    return dict(middle)


@pytest.mark.parametrize(
    ("answered", "seen"),
    [
        (chat_message(content="hi"), {"content": "hi"}),
        (chat_message(content="hi", reasoning="so"), {"content": "hi", "reasoning": "so"}),
        (chat_message(refusal="no"), {"refusal": "no"}),
        (chat_message(tool_calls=[CALL]), {"tool_calls": [CALL]}),
        (chat_message(function_call=CALL["function"]), {"function_call": CALL["function"]}),
        ({"role": "assistant", "content": "hi", "reasoning_content": "so"}, {"content": "hi", "reasoning": "so"}),
        (chat_message(reasoning="so", reasoning_content="former"), {"reasoning": "so"}),
        # As clients keep it: with what their own types have, and gathered from a stream.
        (chat_message(content="hi", tool_calls=None, parsed=None), {"content": "hi"}),
        (chat_message(tool_calls=[STREAMED_CALL]), {"tool_calls": [{**CALL, "index": 0}]}),
        # As `.parse()` of openai-python makes them, and Google's, with a signature for the thought.
        (chat_message(content='{"a":1}', parsed={"a": 1}), {"content": '{"a":1}'}),
        (
            chat_message(
                tool_calls=[
                    {**CALL, "extra_content": {"google": {"thought_signature": "x"}},
                     "function": {**CALL["function"], "parsed_arguments": {"a": None}}}  # type: ignore[dict-item]
                ],
                extra_content={"google": {}},
            ),
            {"tool_calls": [CALL]},
        ),
        (
            chat_message(content=[{"type": "text", "text": "t", "extra_content": {"google": {}}}]),
            {"content": [{"type": "text", "text": "t"}]},
        ),
        # What no engine reads when it comes back.
        (chat_message(content="hi", annotations=[{"type": "url_citation", "url_citation": {}}]), {"content": "hi"}),
        (chat_message(content="hi", audio={"id": "of another tenant"}), {"content": "hi"}),
        # What other providers' answers have, in a conversation that was begun there.
        (
            {"role": "assistant", "content": "hi", "reasoning_details": [{"type": "reasoning.text", "text": "so"}],
             "thinking_blocks": [], "provider_specific_fields": {"a": 1}, "citations": ["x"]},
            {"content": "hi"},
        ),
    ],
)  # fmt: skip
def test_an_answers_message_is_taken_back_and_the_engine_sees_what_it_said(
    answered: dict[str, Any], seen: dict[str, Any]
) -> None:
    assert turn_of(bodies.CHAT, answered) == {"role": "assistant", **seen}


def test_a_whole_answer_of_messages_is_taken_back_as_a_message() -> None:
    answer = {
        **whole_answer("/v1/messages"), "container": {"id": "c", "expires_at": "x"}, "stop_sequence": "x",
        "stop_details": {"type": "refusal"}, "context_management": {"applied_edits": []},
        "content": [{"type": "text", "text": "hi", "parsed_output": {"a": 1}}],
    }  # fmt: skip
    seen = turn_of(bodies.MESSAGES, answer, max_tokens=1)
    assert seen == {"role": "assistant", "content": [{"type": "text", "text": "hi"}]}


@pytest.mark.parametrize("key", ["tools", "task", "uuid", "cache_salt", "prompt_embeds", "thinking"])
@pytest.mark.parametrize("endpoint", [bodies.CHAT, bodies.MESSAGES], ids=["chat", "messages"])
def test_an_unknown_key_of_a_message_is_refused_unless_it_is_null(endpoint: bodies.Endpoint, key: str) -> None:
    message = {"role": "assistant", "content": "hi"}
    for value in ("", 0, False, [], {}, "x"):
        assert turn_of(endpoint, {**message, key: value}) is None
    assert turn_of(endpoint, {**message, key: None}) == message


def test_nulls_in_parts_and_blocks_are_absent_and_those_that_a_caller_means_stay() -> None:
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PICTURE}"}}
    given = [
        {"type": "text", "text": "t", "image_url": None},
        {**image, "image_url": {**image["image_url"], "detail": None}},
    ]  # type: ignore[dict-item]
    seen = turn_of(bodies.CHAT, {"role": "user", "name": None, "content": given})
    assert seen == {"role": "user", "content": [{"type": "text", "text": "t"}, image]}

    used = {"type": "tool_use", "id": "c", "name": "f", "input": {"a": None}}
    found = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "t"}]}
    blocks = [
        {"type": "text", "text": "t", "citations": None},
        {**used, "caller": None},
        {**found, "is_error": None, "content": [{"type": "text", "text": "t", "citations": None}]},
        {"type": "thinking", "thinking": "so", "signature": None},
    ]
    answered = turn_of(bodies.MESSAGES, {"role": "assistant", "content": blocks}, max_tokens=1)
    assert answered == {
        "role": "assistant",
        "content": [{"type": "text", "text": "t"}, used, found, {"type": "thinking", "thinking": "so"}],
    }

    schema = {"type": "object", "default": None, "enum": [None]}
    for endpoint, tool in (
        (bodies.CHAT, {"type": "function", "function": {"name": "f", "parameters": schema}}),
        (bodies.MESSAGES, {"name": "f", "input_schema": schema}),
    ):
        data = engine_sees(
            endpoint, json.dumps({"messages": [{"role": "user", "content": "x"}], "tools": [tool]}).encode()
        )
        assert data is not None
        assert json.loads(data)["tools"] == [tool]


@pytest.mark.parametrize(
    "message",
    [
        {"role": None, "content": "x"},
        {"role": "user", "content": [{"type": "image_url", "image_url": None}]},
        {"role": "user", "content": [{"type": "text", "text": None}]},
        {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": None}]},
        {"role": "assistant", "tool_calls": [None]},
        {"role": "user", "content": [None]},
    ],
)
def test_a_null_in_the_place_of_what_has_to_be_there_is_refused(message: dict[str, Any]) -> None:
    assert turn_of(bodies.CHAT, message) is None
