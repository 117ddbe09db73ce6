"""How much all tests try, which each run says first."""

from __future__ import annotations

from hypothesis import settings

from tests.support.amounts import examples, sampled_lines

if examples(1) > 1:
    settings.register_profile("soak", max_examples=examples(100), deadline=None)
    settings.load_profile("soak")


def pytest_report_header() -> list[str]:
    """Say what is sampled."""
    return list(sampled_lines())
