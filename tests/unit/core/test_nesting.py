"""The levels that JSON may have are the same on each version of Python."""

from __future__ import annotations

import json

from handler.core.framing import MAX_DEPTH, is_too_deep
from tests.one_test import in_one_test


@in_one_test(("begin", "end"), [("[", "]"), ('{"a":', "}")])
@in_one_test("levels", [1, MAX_DEPTH, MAX_DEPTH + 1, 2 * MAX_DEPTH])
def test_levels_are_counted(begin: str, end: str, levels: int) -> None:
    text = begin * levels + "1" + end * levels
    assert is_too_deep(json.loads(text), text) == (levels > MAX_DEPTH)


def test_brackets_beside_each_other_or_in_a_string_are_no_levels() -> None:
    for text in (json.dumps([[] for _ in range(MAX_DEPTH + 1)]), json.dumps("[" * (MAX_DEPTH + 1))):
        assert not is_too_deep(json.loads(text), text)
