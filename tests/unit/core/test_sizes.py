"""Sizes in messages."""

from __future__ import annotations

import pytest

from handler.core.sizes import format_size


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (4_200, "4.2 kB"),
        (999_949, "999.9 kB"),
        (999_950, "1.0 MB"),
        (5_000_000, "5.0 MB"),
        (999_960_000, "1.0 GB"),
        (16_100_000_000, "16.1 GB"),
    ],
)
def test_a_size_has_one_decimal_and_less_than_a_thousand_units(size: int, text: str) -> None:
    assert format_size(size) == text
