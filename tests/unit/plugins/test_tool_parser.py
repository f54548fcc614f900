"""`option.tool_parser_plugin`: a user's own parser of tool calls."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from handler.config.loader import read_config
from handler.core.errors import ConfigError
from handler.core.text import Vocabulary
from handler.plugins.tool_parser import load_tool_format
from handler.protocols.assistant.events import Arguments, CallEnd, CallStart
from handler.protocols.assistant.tools.grammar import write_calls
from handler.protocols.assistant.tools.request import read_tools
from handler.serving.user_code import model_formatters
from tests.unit.protocols.answers import CAPABLE

DOCUMENT = Path(__file__).parents[3] / "docs" / "models.md"
TOOL = {"type": "function", "function": {"name": "shout"}}

PLUGIN = """
from handler.protocols.assistant.events import Arguments, CallEnd, CallStart

MARKS = ["!"]


class Shouts:
    def __init__(self, names):
        self.names, self.held = names, ""

    def feed(self, text):
        self.held += text
        return []

    def flush(self):
        if self.held == "!":
            return [CallStart(0, self.names[0]), Arguments(0, "{}"), CallEnd(0)]
        return [self.held] if self.held else []


def make_parser(tools):
    return Shouts([tool["function"]["name"] for tool in tools])
"""


def write(directory: Path, text: str, name: str = "shouts.py") -> str:
    (directory / name).write_text(text)
    return name


def test_calls_are_read_by_a_users_parser(tmp_path: Path) -> None:
    option = f"option.tool_parser_plugin={tmp_path / write(tmp_path, PLUGIN)}"
    format = model_formatters(read_config(overrides=[option], environ={}).checked()).tool_format
    assert format is not None
    assert format.special(Vocabulary([b"!", b"?"], special={0, 1})) == {"!"}
    parser = read_tools({"tools": [TOOL]}, replace(CAPABLE, tool_format=format)).parser()
    assert parser is not None
    assert parser.feed("!") == []
    assert parser.flush() == [CallStart(0, "shout"), Arguments(0, "{}"), CallEnd(0)]


def test_the_documents_example_reads_calls(tmp_path: Path) -> None:
    example = DOCUMENT.read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
    format = load_tool_format(write(tmp_path, example), [tmp_path])
    notation, parser = format.notation(""), format.make([TOOL])
    assert notation is not None
    assert write_calls(notation, [("shout", {"a": 1})]) == '<call>shout {"a": 1}'
    assert [*parser.feed('<call>shout {"a"'), *parser.feed(": 1}")] == []
    assert parser.flush() == [CallStart(0, "shout"), Arguments(0, '{"a": 1}'), CallEnd(0)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def make_parser(tools): raise OSError", "make_parser failed"),
        ("def make_parser(tools): return None", "no attribute 'feed'"),
        (
            "class P:\n def feed(self, text): return [1]\n flush = feed\nmake_parser = lambda tools: P()",
            "feed returned a int",
        ),
    ],
)
def test_the_answer_of_a_parser_that_fails_is_text(
    text: str, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        parser = load_tool_format(write(tmp_path, text, "fails.py"), [None, tmp_path]).make([TOOL])
        assert [parser.feed("a"), parser.feed("b"), parser.flush()] == [["a"], ["b"], []]
    assert said in caplog.text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, r"option\.tool_parser_plugin=wrong\.py: there is no such file"),
        ("x = 1", r"has no function make_parser\(tools\)"),
        ("MARKS = 'a'\ndef make_parser(tools): ...", "MARKS must be a list of strings"),
        ("NOTATION = 'a'\ndef make_parser(tools): ...", "NOTATION must be a Notation"),
        ("x = 1\nimport nothing_of_the_kind", r"wrong\.py, line 2: ModuleNotFoundError"),
    ],
)
def test_a_file_that_defines_no_parser_stops_the_start(text: str | None, said: str, tmp_path: Path) -> None:
    if text is not None:
        write(tmp_path, text, "wrong.py")
    with pytest.raises(ConfigError, match=said):
        load_tool_format("wrong.py", [tmp_path])
