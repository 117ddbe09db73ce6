"""What the operator's audit log says, by the records that a test caught."""

from __future__ import annotations

import pytest

from kvstrata.contract.messages.audit import LOGGER, Emitter, Line, Source, read_line

TELLER = Emitter(Source.OPERATOR, "kvstrata-0", "b007")


def lines(caplog: pytest.LogCaptureFixture) -> list[Line]:
    """Return the lines, written and read: what a reader would refuse fails the test."""
    told = [record.__dict__["audit"] for record in caplog.records if record.name == LOGGER]
    read = [read_line(TELLER.line(number, 0.0, one)) for number, one in enumerate(told, start=1)]
    assert all(Source.OPERATOR in line.action.sources for line in read)
    return read
