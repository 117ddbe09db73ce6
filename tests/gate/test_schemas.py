"""Schemas and patterns of a request: bounds of each, and of all together."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kvstrata_sidecar.gate.http.errors import Refusal
from kvstrata_sidecar.gate.proxy import bodies
from kvstrata_sidecar.gate.proxy.schemas import (
    MAX_PROPERTY_PAIRS,
    MAX_SCHEMA_BYTES,
    MAX_SCHEMAS_BYTES,
    MAX_WRITTEN_OUT,
    SchemaBudget,
    written_out,
)

PLAIN = {"messages": [{"role": "user", "content": "x"}]}
LARGE = {"description": "x" * (MAX_SCHEMA_BYTES - 20)}
TOOLS: dict[bytes, Any] = {
    bodies.CHAT.path: lambda value: {"type": "function", "function": {"name": "f", "parameters": value}},
    bodies.MESSAGES.path: lambda value: {"name": "f", "input_schema": value},
}


@pytest.mark.parametrize(
    ("pattern", "size"),
    [
        ("", 0),
        ("^[0-9a-f]{8}-[0-9a-f]{4}$", 15),
        ("a{3}", 3),
        ("a{2,}b", 3),
        ("a{,5}", 5),
        ("a{ 2 , 7 }", 7),
        ("(a{10}b){10}", 110),
        ("(?:(a{100}){100}){100}", 1_000_000),
        ("a{1000}{1000}", 1_000_000),
        ("(a{1000})*{1000}", 1_000_000),
        ("a{1000}?{1000}", 1_000_000),
        ("[(]{3}[)]{2}", 5),
        (r"\({3}\)", 4),
        (r"\{1000}", 6),
        ("x{a}", 4),
        ("{}", 1),
        (")a{1000}){1000}", 1_000_000),
    ],
)
def test_a_patterns_repetitions_are_written_out(pattern: str, size: int) -> None:
    assert written_out(pattern) >= size
    assert written_out(pattern) <= max(2 * size, size + 1000)


@pytest.mark.parametrize("pattern", ["{" + " " * 1023, "{" + "1" * 1023, "[" * 1024, "(" * 1024, "[^" + "\\]" * 511])
def test_a_pattern_takes_time_by_its_length_alone(pattern: str) -> None:
    begun_s = time.thread_time()
    written_out(pattern[:256])
    assert time.thread_time() - begun_s < 0.05
    written_out(pattern)
    assert time.thread_time() - begun_s < 0.1


def test_patterns_without_repetitions_take_next_to_no_time() -> None:
    took_s = []
    for _ in range(3):
        begun_s = time.thread_time()
        assert {written_out("(a[b]c*)" * 128) for _ in range(100)} == {1024}
        took_s.append(time.thread_time() - begun_s)
    assert min(took_s) < 0.01


@pytest.mark.parametrize(
    "pattern",
    [
        "((a{1000}){1000})",
        "(a{1000}[])][](]b){1000}",  # a class that begins with a bracket
        "(a{1000}[b[c])]d[[](]e){1000}",  # a class inside a class
        r"(a{1000}[b\](c[d]){1000}",  # a class with both brackets
        "(?x)a{1000} {1000}",  # spaces that mean nothing
        "(a{000000000000001000}){1000}",
        "a{99999999999999999999}",
        "|".join(["(a{100}){100}"] * 11),
    ],
)
def test_a_pattern_that_is_large_when_written_out_is_refused(pattern: str) -> None:
    values: list[dict[str, Any]] = [{"pattern": pattern}, {"items": [{"patternProperties": {pattern: {}}}]}]
    for value in values:
        with pytest.raises(Refusal) as refusal:
            SchemaBudget().take(value, "schema")
        assert (refusal.value.status, refusal.value.param) == (400, "schema")
        assert str(MAX_WRITTEN_OUT) in refusal.value.message


def test_ordinary_patterns_pass() -> None:
    for pattern in (
        "^[0-9a-f]{8}-[0-9a-f]{4}-[1-5][0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$",
        r"^[\s\S]{1,51200}$",
        r"^([A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.){1,126}[A-Za-z]{2,63}$",
        "^[[:alpha:]]{1,64}$",
    ):
        SchemaBudget().take({"pattern": pattern}, "schema")


@pytest.mark.parametrize("endpoint", [bodies.CHAT, bodies.MESSAGES], ids=["chat", "messages"])
@pytest.mark.parametrize(
    ("value", "count"),
    [
        (LARGE, MAX_SCHEMAS_BYTES // MAX_SCHEMA_BYTES),
        ({"pattern": "a{1000}"}, MAX_WRITTEN_OUT // 1000),
        ({"properties": {f"p{number}": True for number in range(100)}}, MAX_PROPERTY_PAIRS // 100**2),
    ],
    ids=["bytes", "patterns", "properties"],
)
def test_the_schemas_of_all_tools_have_a_bound_together(
    endpoint: bodies.Endpoint, value: dict[str, Any], count: int
) -> None:
    def rewritten(tools: int) -> dict[str, Any]:
        return bodies.rewrite(endpoint, {**PLAIN, "tools": [TOOLS[endpoint.path](dict(value))] * tools})[0]

    for _ in range(2):  # a budget is a request's own
        assert len(rewritten(count)["tools"]) == count
    with pytest.raises(Refusal) as refusal:
        rewritten(count + 1)
    assert str(refusal.value.param).startswith(f"tools[{count}].")


LISTED = {"type": "structural_tag", "structures": [LARGE] * 8, "triggers": ["<"]}


@pytest.mark.parametrize(
    ("endpoint", "fields", "place"),
    [
        (bodies.CHAT, {"response_format": LISTED}, "tools[8]."),
        (bodies.CHAT, {"structured_outputs": {"json": "{" + " " * 65000 + "}", "regex": "a{1000}"}}, "tools[15]."),
        (bodies.MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": LARGE}}}, "tools[15]."),
    ],
    ids=["format", "text", "messages"],
)
def test_schemas_under_all_keys_of_a_request_have_a_bound_together(
    endpoint: bodies.Endpoint, fields: dict[str, Any], place: str
) -> None:
    body = {**PLAIN, **fields, "tools": [TOOLS[endpoint.path](LARGE)] * int(place[6:-2])}
    assert bodies.rewrite(endpoint, body)[0] == body
    body["tools"] = [*body["tools"], TOOLS[endpoint.path](LARGE)]
    with pytest.raises(Refusal) as refusal:
        bodies.rewrite(endpoint, body)
    assert str(refusal.value.param).startswith(place)


def test_patterns_under_all_keys_of_a_request_have_a_bound_together() -> None:
    half = "a{" + str(MAX_WRITTEN_OUT // 2) + "}"
    format_ = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"pattern": half}}}
    body = {**PLAIN, "structured_outputs": {"regex": half}, "response_format": format_}
    assert bodies.rewrite(bodies.CHAT, body)[0] == body
    with pytest.raises(Refusal) as refusal:
        bodies.rewrite(bodies.CHAT, {**body, "tools": [TOOLS[bodies.CHAT.path]({"pattern": "a"})]})
    assert refusal.value.param == "tools[0].function.parameters"


@pytest.mark.parametrize("pattern", ["a{1}" * 256, "{" * 1024, "a" * 1022 + "{1"], ids=lambda pattern: pattern[:4])
def test_patterns_with_repetitions_have_a_bound_by_their_lengths(pattern: str) -> None:
    """Counting them takes up to half a microsecond a character, on the gate's loop."""
    most = MAX_WRITTEN_OUT // (10 * 1024)
    others = [{"pattern": pattern[:-1] + chr(ord("A") + number)} for number in range(most + 1)]
    SchemaBudget().take({"items": others[:most]}, "schema")
    with pytest.raises(Refusal):
        SchemaBudget().take({"items": others}, "schema")
    SchemaBudget().take({"items": [{"pattern": "a" * 1024}] * (2 * most)}, "schema")


UUID = (
    "^([0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[1-8][0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12}|0{8}(-0{4}){3}-0{12})$"
)


def test_one_pattern_of_many_tools_is_counted_once() -> None:
    """As generators of schemas write one for each identifier and date."""
    many = {f"p{number}": {"type": "string", "pattern": UUID} for number in range(5)}
    tools = [TOOLS[bodies.CHAT.path]({"properties": dict(many)}) for _ in range(100)]
    assert len(bodies.rewrite(bodies.CHAT, {**PLAIN, "tools": tools})[0]["tools"]) == 100
    with pytest.raises(Refusal):
        bodies.rewrite(bodies.CHAT, {**PLAIN, "tools": tools * 5})


def test_the_structures_of_a_tag_have_a_bound_together() -> None:
    count = MAX_SCHEMAS_BYTES // MAX_SCHEMA_BYTES
    tag = {"type": "structural_tag", "structures": [LARGE] * (count + 1), "triggers": ["<"]}
    with pytest.raises(Refusal) as refusal:
        bodies.rewrite(bodies.CHAT, {**PLAIN, "response_format": tag})
    assert refusal.value.param == f"response_format.structures[{count}]"


def endless(**defs: Any) -> dict[str, Any]:
    return {"$defs": defs, "properties": {"x": {"$ref": "#/$defs/a"}}}


@pytest.mark.parametrize(
    "value",
    [
        {"$ref": "#"},
        {"allOf": [{"$ref": "#"}]},
        endless(a={"$ref": "#/$defs/a"}),
        endless(a={"$ref": "#/$defs/b"}, b={"$ref": "#/$defs/a"}),
        endless(a={"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}),
        endless(a={"not": {"$ref": "#/$defs/b"}}, b={"if": {}, "then": {"$ref": "#/$defs/a"}}),
        endless(a={"$ref": "#/$defs/a~1b"}, **{"a/b": {"oneOf": [{}, {"$ref": "#/%24defs/a"}]}}),
        endless(a={"anyOf": [{}, {"$ref": "#/$defs/a/anyOf/1"}]}),
    ],
)
def test_a_schema_that_is_itself_alone_is_the_callers_error(value: dict[str, Any]) -> None:
    body = {**PLAIN, "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": value}}}
    with pytest.raises(Refusal) as refusal:
        bodies.rewrite(bodies.CHAT, body)
    assert (refusal.value.status, refusal.value.param) == (400, "response_format.json_schema.schema")
    assert "#" in refusal.value.message


def test_a_long_chain_of_references_is_followed() -> None:
    chain = {f"n{number}": {"$ref": f"#/$defs/n{number + 1}"} for number in range(1500)}
    chain["n1500"] = {"type": "string"}
    SchemaBudget().take({"$defs": chain, "$ref": "#/$defs/n0"}, "schema")
    chain["n1500"] = {"$ref": "#/$defs/n7"}
    with pytest.raises(Refusal):
        SchemaBudget().take({"$defs": chain, "$ref": "#/$defs/n0"}, "schema")


@pytest.mark.parametrize(
    "value",
    [
        {"type": "object", "properties": {"child": {"$ref": "#"}}},
        {"$defs": {"n": {"properties": {"next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}}}},
         "$ref": "#/$defs/n"},
        {"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}, "allOf": [{"$ref": "#/$defs/n"}]},
        {"properties": {"a": {"$ref": "#/$defs/n"}, "b": {"$ref": "#/$defs/n"}}, "$defs": {"n": {}}},
        {"$ref": "#/$defs/missing"}, {"$ref": "https://example.com/schema"}, {"$ref": "#anchor"}, {"$ref": 1},
        {"$ref": "#/9999999999999999999999/x"}, {"properties": {"$ref": {"type": "string"}, "not": {"type": "string"}}},
    ],
)  # fmt: skip
def test_a_tree_and_other_references_pass(value: dict[str, Any]) -> None:
    budget = SchemaBudget()
    for _ in range(2):
        budget.take(value, "schema")
