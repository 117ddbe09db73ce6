"""The password in a Secret of a tier, as operator and pods read it."""

from __future__ import annotations

import pytest

from kvstrata.contract.policy.tiers import password_in


@pytest.mark.parametrize("stored", [b"pa$ss^w0rd!", b"pa$ss^w0rd!\n", b"pa$ss^w0rd!\r\n"])
def test_a_line_end_is_no_part_of_a_password(stored: bytes) -> None:
    assert password_in(stored) == b"pa$ss^w0rd!"


def test_blanks_and_line_ends_within_are_part_of_it() -> None:
    assert password_in(b" a\nb \n") == b" a\nb "
