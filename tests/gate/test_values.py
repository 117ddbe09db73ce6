"""Bounds of a body's keys: every forwarded key has one, and the reasons of keys that are not forwarded."""

from __future__ import annotations

from typing import Any

import pytest

from kvstrata_sidecar.gate.http.errors import Reason, Refusal
from kvstrata_sidecar.gate.proxy import bodies
from kvstrata_sidecar.gate.proxy.schemas import MAX_ALTERNATIVES, MAX_SCHEMA_BYTES, MAX_SCHEMA_DEPTH

BIG = 2**31
LONG = "x" * 200_000
MANY = list(range(5000))
PLAIN = {"messages": [{"role": "user", "content": "x"}]}


def nested(depth: int) -> dict[str, Any]:
    """Return a schema of this many levels of objects."""
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


EXCESSIVE_SCHEMAS: list[dict[str, Any]] = [
    {"description": "x" * MAX_SCHEMA_BYTES},
    nested(MAX_SCHEMA_DEPTH + 1),
    {"anyOf": [{"type": "null"}] * (MAX_ALTERNATIVES + 1)},
    {"properties": {"a": {"oneOf": [{}] * 600}, "b": {"enum": [*range(600)]}}},
    {"type": "string", "pattern": "a" * 1025},
    {"patternProperties": {"a" * 1025: {}}},
    {"pattern": "(a{1000}){1000}"},
    {"properties": {"b": {"$ref": "#/properties/b"}}},
    {"properties": {f"p{number}": True for number in range(501)}},
]
FORMATS = [{"type": "json_schema", "json_schema": {"name": "n", "schema": schema}} for schema in EXCESSIVE_SCHEMAS]
CHAT_TOOLS = [[{"type": "function", "function": {"name": "f", "parameters": schema}}] for schema in EXCESSIVE_SCHEMAS]
TOOLS = [[{"name": "f", "input_schema": schema}] for schema in EXCESSIVE_SCHEMAS]
FLAGS = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens",
         "add_special_tokens", "echo", "stream", "return_tokens_as_token_ids", "return_token_ids", "include_reasoning",
         "parallel_tool_calls", "add_generation_prompt", "continue_final_message")  # fmt: skip
EXCESSIVE: dict[str, list[Any]] = {
    **{key: [2, -1, 1.5, "true", [], {}] for key in FLAGS},
    "frequency_penalty": [-2.1, 2.1, "1", True],
    "presence_penalty": [-2.1, 2.1],
    "repetition_penalty": [-1, 101],
    "length_penalty": [-101, 101],
    "temperature": [-0.1, 2.1, "0"],
    "top_p": [-0.1, 1.1],
    "top_k": [-2, BIG, 1.5],
    "min_p": [-0.1, 1.1],
    "seed": [2**63, -(2**63) - 1, "1"],
    "stop": [["x"] * 17, "x" * 1025, ["x", 1], 1],
    "stop_sequences": [["x"] * 17, ["x" * 1025], "x"],
    "stop_token_ids": [MANY, [True], ["1"], 1],
    "max_tokens": [-1, BIG, "1"],
    "max_completion_tokens": [-1, BIG, "1"],
    "min_tokens": [-1, BIG],
    "n": [0, 65, True, 1.5, "1"],
    "logit_bias": [{str(token): 1 for token in range(301)}, {"01": 1}, {"+1": 1}, {" 1": 1}, {"1_0": 1}, {"-1": 1},
                   {"\u0661": 1}, {"1": 101}, {"1": True}, {"1": None}, [1]],
    "logprobs": [-1, 21, "1"],
    "top_logprobs": [-1, 21],
    "prompt_logprobs": [-1, 21],
    "logprob_token_ids": [MANY],
    "allowed_token_ids": [MANY],
    "bad_words": [["x"] * 129, ["x" * 257], "x"],
    "truncate_prompt_tokens": [-2, BIG],
    "truncation_side": ["middle", 1],
    "thinking_token_budget": [-2, BIG],
    "stream_options": [[], {"include_usage": 2}, {"other": True}],
    "response_format": [*FORMATS, {"type": "structural_tag", "format": EXCESSIVE_SCHEMAS[2]},
                        {"type": "structural_tag", "structures": [{"schema": EXCESSIVE_SCHEMAS[4]}]},
                        {"type": "other"}, "json"],
    "structured_outputs": [*({"json": schema} for schema in EXCESSIVE_SCHEMAS), {"json": '{"pattern":"' + LONG + '"}'},
                           {"json": "{"}, {"json": "[]"},
                           {"json": '{"a":' + "[" * 500 + "]" * 500 + "}"}, {"regex": "a" * 1025},
                           {"choice": ["x"] * 1001}, {"choice": ["x" * 1000] * 66}, {"regex": "((a{100}){100}){100}"},
                           {"json": '{"$ref":"#"}'}, {"grammar": LONG},
                           {"structural_tag": LONG}, {"json_object": 2}],
    "messages": [[], "x", [{"role": "user", "content": 1}]],
    "prompt": [[], {}, [1, "x"]],
    "tools": [*CHAT_TOOLS, *TOOLS, [{}] * 513, {}],
    "tool_choice": ["all", {"type": "function", "function": {"name": LONG}}, {"type": "tool", "name": LONG}, 1],
    "reasoning_effort": [LONG, 1],
    "chat_template_kwargs": [[], {"a": LONG}, {f"k{number}": 1 for number in range(65)}, {"chat_template": "x"}],
    "system": [1, [{"type": "image"}]],
    "thinking": [{"type": "enabled", "budget_tokens": -1}, {"type": "other"}, True],
    "output_config": [{"format": {"type": "json_schema", "schema": schema}} for schema in EXCESSIVE_SCHEMAS],
}  # fmt: skip
"""Values beyond the bound of each key."""

SMALLEST: dict[bytes, dict[str, Any]] = {
    bodies.CHAT.path: PLAIN, bodies.COMPLETIONS.path: {"prompt": "x"}, bodies.MESSAGES.path: PLAIN,
    bodies.COUNT_TOKENS.path: PLAIN,
}  # fmt: skip
FORWARDED = [(endpoint, key) for endpoint in bodies.ENDPOINTS.values() for key in endpoint.forwarded]


@pytest.mark.parametrize(("endpoint", "key"), FORWARDED, ids=lambda part: getattr(part, "path", part))
def test_every_forwarded_key_refuses_what_is_beyond_its_bound(endpoint: bodies.Endpoint, key: str) -> None:
    for value in EXCESSIVE[key]:
        with pytest.raises(Refusal) as refusal:
            bodies.rewrite(endpoint, {**SMALLEST[endpoint.path], key: value})
        assert refusal.value.status == 400
        assert str(refusal.value.param).startswith(key)
        assert len(refusal.value.message) < 300


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": "x"}, {"stop": ["x"] * 16}, {"stop": []}, {"top_k": -1}, {"temperature": 0}, {"seed": -(2**63)},
        {"logit_bias": {"0": -100, "128000": 100.0}}, {"logit_bias": {}}, {"bad_words": ["x"]},
        {"allowed_token_ids": [1, 2]}, {"tool_choice": "required"}, {"truncate_prompt_tokens": -1},
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"response_format": {"type": "text"}}, {"structured_outputs": {"json": '{"type":"object"}'}},
        {"structured_outputs": {"choice": ["a", "b"]}}, {"structured_outputs": {"json": nested(MAX_SCHEMA_DEPTH)}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [1, None]}}}},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"pattern": {
            "enum": ["x"] * MAX_ALTERNATIVES}, "enum": {"type": "string"}}}}}]},
    ],
    ids=lambda fields: next(iter(fields)),
)  # fmt: skip
def test_values_within_the_bounds_reach_the_engine_unchanged(fields: dict[str, Any]) -> None:
    assert bodies.rewrite(bodies.CHAT, {**PLAIN, **fields})[0] == {**PLAIN, **fields}


@pytest.mark.parametrize("key", sorted(bodies.UNSERVED))
@pytest.mark.parametrize("endpoint", bodies.ENDPOINTS.values(), ids=lambda endpoint: endpoint.path.decode())
def test_an_unserved_key_is_refused_with_its_reason_unless_it_changes_nothing(
    endpoint: bodies.Endpoint, key: str
) -> None:
    body = SMALLEST[endpoint.path]
    with pytest.raises(Refusal) as refusal:
        bodies.rewrite(endpoint, {**body, key: {"other": 1}})
    assert (refusal.value.reason, refusal.value.param) == (Reason.FORBIDDEN_KEY, key)
    reason, accepted = bodies.UNSERVED[key]
    assert reason in refusal.value.message
    for value in (None, accepted):
        assert bodies.rewrite(endpoint, {**body, key: value})[0] == body


def test_each_key_is_in_one_table() -> None:
    forwarded = {key for _, key in FORWARDED}
    tables = [forwarded, set(bodies.FORBIDDEN), set(bodies.UNSERVED), set(bodies.IGNORED)]
    assert sum(map(len, tables)) == len(set().union(*tables))


@pytest.mark.parametrize("endpoint", [bodies.CHAT, bodies.MESSAGES], ids=["chat", "messages"])
def test_hints_are_dropped_at_every_level(endpoint: bodies.Endpoint) -> None:
    def hinted(value: Any) -> Any:
        if isinstance(value, list):
            return [hinted(item) for item in value]
        if isinstance(value, dict):
            inner = {key: hinted(item) for key, item in value.items() if key != "parameters"}
            return {**value, **inner, "cache_control": {"type": "ephemeral"}, "defer_loading": False}
        return value

    function = {"name": "f", "parameters": {"cache_control": "a property"}}
    body: dict[str, Any] = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
            {"role": "assistant", "content": "x"},
        ],
        "tools": [{"type": "function", "function": function} if endpoint is bodies.CHAT else {"name": "f"}],
    }
    hints = {**dict.fromkeys(bodies.IGNORED, "x"), "prompt_cache_options": {"mode": "explicit"}, "verbosity": "low"}
    assert bodies.rewrite(endpoint, {**hinted(body), **hints})[0] == body


@pytest.mark.parametrize("count", [65, 500, 2000])
@pytest.mark.parametrize("endpoint", [bodies.CHAT, bodies.MESSAGES], ids=["chat", "messages"])
def test_a_chat_may_have_many_messages(endpoint: bodies.Endpoint, count: int) -> None:
    kinds: list[Any] = [f"turn {count}", [{"type": "text", "text": "x"}]]
    messages = [{"role": ("user", "assistant")[at % 2], "content": kinds[at // 2 % 2]} for at in range(count)]
    made, shape = bodies.rewrite(endpoint, {"messages": messages})
    assert (made, shape.sequences) == ({"messages": messages}, 1)


@pytest.mark.parametrize(("prompt", "n", "sequences"), [("x", 3, 3), (["x", "y"], 3, 6), ([1, 2], 1, 1), ([[1]], 2, 2)])
def test_a_rewritten_body_knows_its_sequences(prompt: Any, n: int, sequences: int) -> None:
    assert bodies.rewrite(bodies.COMPLETIONS, {"prompt": prompt, "n": n})[1].sequences == sequences
