"""Lines of the operator's audit log, from the records that a test caught."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest

from kvstrata.contract import MALFORMED, ContractError
from kvstrata.contract.messages.audit import LOGGER, Emitter, Happened, Line, Source
from kvstrata.contract.wire import camel, from_wire

EMITTER = Emitter(Source.OPERATOR, "kvstrata-0", "b007")


def read_line(data: bytes) -> Line:
    """Return a line. Raises ContractError for lines that this version does not write."""
    try:
        raw = json.loads(data)
    except MALFORMED as error:
        raise ContractError("a line of the audit log is malformed") from error
    line = from_wire(Line, raw, "line")
    own = {camel(field.name) for field in fields(Happened)}
    allowed = {camel(name) for name in (*line.action.fields, "action")}
    if None in raw.values() or line.event is not line.action.event or not own & raw.keys() <= allowed:
        raise ContractError(f"{line.action} does not have these fields")
    return line


def lines(caplog: pytest.LogCaptureFixture) -> list[Line]:
    """Return the lines, written and read: a line that a reader would refuse fails the test."""
    records = [record.__dict__["audit"] for record in caplog.records if record.name == LOGGER]
    read = [read_line(EMITTER.line(number, 0.0, one)) for number, one in enumerate(records, start=1)]
    assert all(Source.OPERATOR in line.action.sources for line in read)
    return read
