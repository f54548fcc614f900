"""Readers of options' values."""

from __future__ import annotations

from typing import Any

import pytest

from handler.config.options.option import dotted_value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1k", 1000),
        ("1K", 1024),
        ("1.5k", 1500),
        ("2G", 2 << 30),
        (" 3m ", 3_000_000),
        ("01", 1),
        ("1.5K", "1.5K"),  # vLLM's powers of two have no fractions
        ("k", "k"),
        ('{"a": 1}', {"a": 1}),
    ],
)
def test_a_dotted_names_value_is_json_or_a_readable_number_or_text(text: str, value: Any) -> None:
    assert dotted_value(text, is_list=False) == value


def test_a_dotted_list_is_split_at_its_commas() -> None:
    assert dotted_value("1k,2", is_list=True) == ["1k", "2"]
