"""Which changes of a CRD would break stored objects."""

from __future__ import annotations

from typing import Any

import pytest

from tools.generate.compatibility import breaking_changes, reduced

BASE: dict[str, Any] = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "maxLength": 10, "description": "A name."},
        "mode": {"type": "string", "enum": ["A", "B"]},
        "rows": {"type": "array", "maxItems": 3, "items": {"type": "integer", "minimum": 1}},
    },
}


def changed(name: str, **fields: Any) -> dict[str, Any]:
    """BASE with other keys in one property."""
    properties = {**BASE["properties"], name: {**BASE["properties"].get(name, {}), **fields}}
    return {**BASE, "properties": properties}


def found(after: dict[str, Any]) -> list[str]:
    return list(breaking_changes(reduced(BASE), reduced(after), "Kind"))


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        ({**BASE, "properties": {"name": BASE["properties"]["name"]}}, "Kind.mode: was removed"),
        (changed("name", type="integer"), "Kind.name: type string became integer"),
        (changed("mode", enum=["A"]), "Kind.mode: no longer accepts B"),
        (changed("name", enum=["A"]), "Kind.name: is limited to"),
        ({**BASE, "required": ["name", "mode"]}, "Kind: requires mode"),
        (changed("name", pattern="^a$"), "Kind.name: pattern became"),
        (changed("name", maxLength=9), "Kind.name: maxLength was lowered to 9"),
        (changed("name", minLength=1), "Kind.name: minLength was raised to 1"),
        (changed("rows", items={"type": "integer", "minimum": 2}), "Kind.rows[]: minimum was raised to 2"),
        (
            changed("name", **{"x-kubernetes-validations": [{"rule": "self != 'a'", "message": "not a"}]}),
            "Kind.name: has the new rule self != 'a'",
        ),
    ],
)
def test_a_change_that_refuses_or_drops_what_is_stored_is_named(after: dict[str, Any], expected: str) -> None:
    assert any(line.startswith(expected) for line in found(after)), found(after)


@pytest.mark.parametrize(
    "after",
    [
        BASE,
        changed("more", type="string", maxLength=3),
        changed("mode", enum=["A", "B", "C"]),
        changed("name", maxLength=11, description="Another text."),
        {**BASE, "required": []},
    ],
)
def test_a_change_that_accepts_more_breaks_nothing(after: dict[str, Any]) -> None:
    assert found(after) == []


def test_an_amount_that_may_also_be_a_fraction_breaks_nothing() -> None:
    rule = {"rule": "string(self).matches('^[0-9]+$')", "message": "a number"}
    before = {"x-kubernetes-int-or-string": True, "maxLength": 32, "x-kubernetes-validations": [rule]}
    after = {"x-kubernetes-preserve-unknown-fields": True, "maxLength": 32, "pattern": "^[0-9]+$", "minimum": 0}
    assert list(breaking_changes(reduced(before), reduced(after), "Kind")) == []
    assert list(breaking_changes(reduced({"type": "string"}), reduced(after), "Kind"))


def test_a_rule_about_a_new_field_breaks_nothing() -> None:
    before = {"type": "object", "properties": {"a": {"type": "string"}}}
    rules = {name: [{"rule": f"!has(self.{name}) || self.a == 'x'", "message": "m"}] for name in ("a", "b")}
    properties = {**before["properties"], "b": {"type": "string"}}
    for name, found in (("a", 1), ("b", 0)):
        after = {"type": "object", "properties": properties, "x-kubernetes-validations": rules[name]}
        assert len(list(breaking_changes(reduced(before), reduced(after), "Kind"))) == found
