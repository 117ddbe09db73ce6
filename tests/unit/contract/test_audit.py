"""Lines of the audit log: one form, no free text, and what a reader of this version refuses."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest

from kvstrata.contract import ContractError
from kvstrata.contract.messages.audit import Action, Emitter, Event, Happened, Line, Source
from tests.support.audit import read_line

TELLER = Emitter(Source.OPERATOR, "kvstrata-0", "b007")
ADMITTED = Happened(
    action=Action.GUARANTEE_ADMITTED, namespace="team", object="TenantCachePolicy/a", tier="cpu", bytes=5
)


def test_a_line_is_read_as_what_happened() -> None:
    line = TELLER.line(3, 1_700_000_000.25, ADMITTED)
    assert json.loads(line) == {
        "logger": "kvstrata.audit",
        "version": 1,
        "time": "2023-11-14T22:13:20.250Z",
        "source": "operator",
        "pod": "kvstrata-0",
        "boot": "b007",
        "sequence": 3,
        "event": "Admission",
        "action": "GuaranteeAdmitted",
        "namespace": "team",
        "object": "TenantCachePolicy/a",
        "tier": "cpu",
        "bytes": 5,
    }
    read = read_line(line)
    assert (read.event, read.action, read.bytes, read.model) == (Event.ADMISSION, Action.GUARANTEE_ADMITTED, 5, None)


def test_whatever_a_tenant_is_called_its_line_is_one_line_of_ascii() -> None:
    name = 'a\nb\r"},{\u2028\ud800'
    line = TELLER.line(1, 0.0, Happened(action=Action.GUARANTEE_DENIED, tenant=name, reason="x"))
    assert line.count(b"\n") == 1
    assert len(line.splitlines()) == 1
    assert line.isascii()
    assert read_line(line).tenant == name


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt": "hello"},
        {"action": "Shouted"},
        {"event": "Key"},
        {"phase": "Erasing"},
        {"bytes": -1},
        {"bytes": None},
        {"time": "2023-11-14T22:13:20Z"},
        {"reason": "two words"},
        {"scope": "c" * 32},
        {"object": "two words"},
    ],
)
def test_what_this_version_would_not_write_is_refused(wrong: dict[str, Any]) -> None:
    raw = json.loads(TELLER.line(1, 0.0, ADMITTED))
    with pytest.raises(ContractError):
        read_line(json.dumps(raw | wrong).encode())


def test_no_field_but_the_tenants_name_takes_any_text() -> None:
    hints = get_type_hints(Line, include_extras=True)
    free = []
    for field in fields(Line):
        kinds = [one for one in (hints[field.name], *get_args(hints[field.name])) if get_origin(one) is not Annotated]
        if str in kinds and get_origin(hints[field.name]) is not Annotated:
            free.append(field.name)
    assert free == ["tenant"]


def test_every_field_belongs_to_an_action_and_every_action_has_fields_that_exist() -> None:
    own = {field.name for field in fields(Happened)} - {"action"}
    assert {name for action in Action for name in action.fields} == own
    assert all(action.sources for action in Action)
    assert {action.event for action in Action} == set(Event)
