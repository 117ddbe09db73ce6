"""Which tests are run, and how much they try, which each run says first."""

from __future__ import annotations

from hypothesis import settings

from e2e.claims import leave_out_others as pytest_collection_modifyitems
from tests.support.amounts import amount_lines, examples

__all__ = ["pytest_collection_modifyitems"]

if examples(1) > 1:
    settings.register_profile("soak", max_examples=examples(100), deadline=None)
    settings.load_profile("soak")


def pytest_report_header() -> list[str]:
    """State the amounts."""
    return list(amount_lines())
