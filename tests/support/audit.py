"""Lines of the operator's audit log, from the records that a test caught."""

from __future__ import annotations

import pytest

from kvstrata.contract.messages.audit import LOGGER, Emitter, Line, Source, read_line

EMITTER = Emitter(Source.OPERATOR, "kvstrata-0", "b007")


def lines(caplog: pytest.LogCaptureFixture) -> list[Line]:
    """Return the lines, written and read: a line that a reader would refuse fails the test."""
    records = [record.__dict__["audit"] for record in caplog.records if record.name == LOGGER]
    read = [read_line(EMITTER.line(number, 0.0, one)) for number, one in enumerate(records, start=1)]
    assert all(Source.OPERATOR in line.action.sources for line in read)
    return read
