"""Which tests are run, and how much they try, which each run says first."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from e2e.claims import leave_out_others as pytest_collection_modifyitems
from tests.support.amounts import amount_lines, examples

__all__ = ["pytest_collection_modifyitems"]

# A machine that others use, too, is no reason to fail.
settings.register_profile(
    "whole",
    parent=settings.default,
    max_examples=examples(100),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("whole")


def pytest_report_header() -> list[str]:
    """State the amounts."""
    return list(amount_lines())
