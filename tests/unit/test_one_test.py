"""A test of many cases fails as each of them would, and names those that do."""

from __future__ import annotations

import pytest

from tests.one_test import in_one_test


def test_all_cases_run_and_those_that_fail_are_named() -> None:
    seen: list[tuple[int, str]] = []

    @in_one_test("number", [1, 2], ids=["one", "two"])
    @in_one_test("word", ["a", "b", "c"])
    def test(number: int, word: str) -> None:
        seen.append((number, word))
        assert (number, word) != (2, "a")
        if (number, word) == (2, "c"):
            pytest.fail("so")

    with pytest.raises(AssertionError) as told:
        test()
    assert seen == [(number, word) for number in (1, 2) for word in "abc"]
    said = str(told.value)
    assert said.startswith("1 of 2 cases fail:\n[two] AssertionError: 2 of 3 cases fail:\n[a] AssertionError: ")
    assert said.endswith("\n[c] Failed: so")


def test_without_cases_it_is_an_error() -> None:
    with pytest.raises(AssertionError, match="there are no cases"):
        in_one_test("number", [])
