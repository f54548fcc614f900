"""foreign.json: whoever adds a name to it is told of a slip."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

from handler.config.options import KNOWN
from handler.config.options.foreign import FOREIGN, JAVA, VARIABLES_OF
from handler.config.options.names import _CONVERSIONS, SECRET, VARIABLES, key_of
from tests.one_test import in_one_test

TEXT = (files("handler.config.options") / "foreign.json").read_text(encoding="utf-8")
DATA = json.loads(TEXT)


def lines() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for part in ("options", "variables"):
        for group, names in DATA[part].items():
            for name, line in names.items():
                yield group, name, line


def test_no_name_stands_twice_in_a_group() -> None:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        assert len(set(names)) == len(names), sorted({name for name in names if names.count(name) > 1})
        return dict(pairs)

    json.loads(TEXT, object_pairs_hook=unique)
    assert sum(map(len, VARIABLES_OF.values())) == len(VARIABLES)


def test_each_name_has_a_line_of_its_own() -> None:
    written = {line.strip().rstrip(",") for line in TEXT.splitlines()}
    wanted = {f"{json.dumps(name)}: {json.dumps(line)}" for _, name, line in lines()}
    assert wanted <= written


@in_one_test("group", [*DATA["options"], *DATA["variables"]])
def test_each_line_says_one_thing(group: str) -> None:
    for of, name, line in lines():
        if of == group:
            verdicts = line.keys() & {"refused", "idle", "same", "unread", "heeded"}
            by_engine = isinstance(line.get("same"), dict)
            assert (
                verdicts == {"same", "idle"} if by_engine else len(verdicts) == (group != "java" or "refused" in line)
            ), name
            assert line.get("convert", "") in _CONVERSIONS, name


def test_each_reason_is_used_and_each_that_is_used_is_there() -> None:
    used = {text[1:] for _, _, line in lines() for text in line.values() if isinstance(text, str) and text[:1] == "@"}
    assert used - {"handlers", "middleware", "ping", "throttle"} == DATA["reasons"].keys()


def test_each_variable_that_stands_for_ours_names_an_option() -> None:
    owns = {own for variable in VARIABLES.values() for own in variable.owns.values()}
    wrong = {own for own in owns - SECRET if key_of(own) not in KNOWN}
    assert wrong == {"OPTION_CUDAGRAPH_CAPTURE_SIZES"}  # an argument of vLLM's own


def test_every_name_is_an_option() -> None:
    assert {option.key for option in (*JAVA, *FOREIGN)} == {
        name for names in DATA["options"].values() for name in names
    }
