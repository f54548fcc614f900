"""A user's files at the start: the functions of a model.py, and a parser of tool calls."""

from __future__ import annotations

import importlib.util
import logging
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from handler.config.loader import read_config
from handler.core.errors import ConfigError
from handler.core.text import Vocabulary
from handler.plugins.functions import Decorated, Formatters, Style, check_model_py, find_formatters
from handler.plugins.tool_parser import load_tool_format
from handler.protocols.assistant.events import Arguments, CallEnd, CallStart
from handler.protocols.assistant.tools.grammar import write_calls
from handler.protocols.assistant.tools.request import read_tools
from handler.serving.user_code import model_formatters
from tests.unit.protocols.answers import CAPABLE
from tests.user_files import LEGACY, LINES, OWN, PAYLOADS, write_model

# -- which functions of a model.py are found, and what is said at start of those that cannot be used -------------------


def find(directory: Path, text: str) -> Decorated:
    write_model(directory, text)
    return find_formatters(directory)


def refused(directory: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        find(directory, text)
    return str(caught.value)


def launched(directory: Path, text: str | None, *options: str) -> Formatters:
    if text is not None:
        write_model(directory, text)
    (directory / "serving.properties").write_text("\n".join(options))
    return model_formatters(read_config(properties=directory / "serving.properties", environ={}).checked())


def test_without_a_model_py_there_are_none(tmp_path: Path) -> None:
    assert find_formatters(tmp_path) == find_formatters(None) == Decorated({}, {})


def test_decorated_functions_are_found(tmp_path: Path) -> None:
    found = find(tmp_path, OWN + LINES)
    assert list(found.inputs) == ["read_question"]
    assert not found.inputs["read_question"].takes_payload
    assert [(name, one.style) for name, one in found.outputs.items()] == [("write_lines", Style.OUTPUT)]


@pytest.mark.parametrize(
    ("text", "style"),
    [
        (LEGACY, Style.LEGACY),
        (PAYLOADS, Style.VALUE),
        ("def f(request_output): ...\nf.is_output_formatter = True", Style.OUTPUT),
        ("def f(x: 'RequestOutput', more=None, **others): ...\nf.is_output_formatter = True", Style.OUTPUT),
        ("def f(output): ...\nf.is_output_formatter = True", Style.RESPONSE),
        ("def f(output, more=None, **others): ...\nf.is_output_formatter = True", Style.RESPONSE),
        ("from typing import Dict, Any\ndef f(x: Dict[str, Any]): ...\nf.is_output_formatter = True", Style.VALUE),
        ("def f(x: 'dict[str, str]'): ...\nf.is_output_formatter = True", Style.VALUE),
    ],
)
def test_styles_are_told_apart_by_signature(tmp_path: Path, text: str, style: Style) -> None:
    assert [one.style for one in find(tmp_path, text).outputs.values()] == [style]


def test_a_payloads_formatter_is_told_apart(tmp_path: Path) -> None:
    assert find(tmp_path, PAYLOADS).inputs["rename"].takes_payload


@pytest.mark.parametrize(
    ("argument", "rolling", "asynchronous"),
    [("x", False, True), ("x: Input", False, False), ("x: dict", True, True), ("decoded_payload", True, True)],
)
def test_an_argument_without_annotation_is_the_payload_in_async_mode(
    tmp_path: Path, argument: str, rolling: bool, asynchronous: bool
) -> None:
    (found,) = find(tmp_path, f"{OWN}@input_formatter\ndef f({argument}): ...\n").inputs.values()
    assert [found.as_in(asynchronous=mode).takes_payload for mode in (False, True)] == [rolling, asynchronous]


def test_a_function_under_two_names_is_one(tmp_path: Path) -> None:
    assert list(find(tmp_path, LEGACY + "again = write_legacy\n").outputs) == ["write_legacy"]


def test_what_somebody_has_imported_is_used(tmp_path: Path) -> None:
    """DJL imports model.py as its entry point: state in it must not exist twice."""
    write_model(tmp_path, LEGACY)
    spec = importlib.util.spec_from_file_location("djl_hash_of_path", tmp_path / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["djl_hash_of_path"] = module
    spec.loader.exec_module(module)
    assert find_formatters(tmp_path).outputs["write_legacy"].function is module.write_legacy
    assert "model" not in sys.modules


def test_it_is_imported_once_and_may_import_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "beside_model.py").write_text("WORD = 'x'\n")
    text = "from beside_model import WORD\nassert WORD == 'x'\n" + LEGACY
    first = find(tmp_path, text)
    assert sys.modules["model"].write_legacy is first.outputs["write_legacy"].function
    assert find_formatters(tmp_path).outputs["write_legacy"].function is first.outputs["write_legacy"].function


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a = 1\nb = a +\n", ", line 2: SyntaxError"),
        ("\n\nimport nowhere_at_all\n", ", line 3: ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("def f():\n    raise KeyError('x')\nf()\n", ", line 2: KeyError: 'x'"),
        ("import sys\nsys.exit(3)\n", ", line 2: SystemExit: 3"),
        ("from djl_python_not import x", "line 1"),
        ("async def f(x): ...\nf.is_output_formatter = True", "line 1: formatter 'f' must be a plain function"),
        ("def f(x): yield\nf.is_input_formatter = True", "must be a plain function"),
        ("\ndef f(a, b): ...\nf.is_output_formatter = True", "line 2: output formatter 'f' takes 2 arguments"),
        ("def f(): ...\nf.is_input_formatter = True", "must have the signature"),
        ("def f(a, b): ...\nf.is_input_formatter = True", "must have the signature"),
    ],
)
def test_what_cannot_be_used_is_named_with_file_and_line(tmp_path: Path, text: str, wanted: str) -> None:
    message = refused(tmp_path, text)
    assert message.startswith(str(tmp_path / "model.py"))
    assert wanted in message


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("@output_formatter\ndef f(a, b: Nowhere = nowhere()) -> X: ...\n", None),
        ("@output_formatter\ndef f(a, b): raise KeyError\n", "line 3: output formatter 'f' takes 2 arguments"),
        ("@input_formatter\ndef f(): ...\n", "line 3: input formatter 'f' must have the signature (input, **kwargs)"),
        ("from aws import input_formatter as theirs\n@theirs\nasync def f(x, y): ...\n", None),
        ("@input_formatter\ndef f(x):\n    yield x\n", "line 3: formatter 'f' must be a plain function"),
        ("@input_formatter\nasync def f(x): ...\n", "line 3: formatter 'f' must be a plain function"),
        ("@mine\n@input_formatter\ndef f(a, b): ...\n", None),
    ],
)
def test_a_signature_is_checked_without_running_the_file(tmp_path: Path, text: str, wanted: str | None) -> None:
    path = tmp_path / "model.py"
    path.write_text(f"from handler.formatters import input_formatter, output_formatter; 1 / 0\n{text}")
    if wanted is None:
        return check_model_py(path)
    with pytest.raises(ConfigError, match=re.escape(f"{path}, {wanted}")):
        check_model_py(path)


@pytest.mark.parametrize(("taken", "unpacks_index"), [("token, first, last", False), ("token, *rest", True)])
def test_a_file_that_takes_three_values_gets_no_index(tmp_path: Path, taken: str, unpacks_index: bool) -> None:
    text = f"def f(request_output):\n    {taken} = request_output.sequences[0].get_next_token()\n"
    (found,) = find(tmp_path, text + "f.is_output_formatter = True\n").outputs.values()
    assert found.unpacks_index is unpacks_index


TWO = LEGACY + "\n@output_formatter\ndef other(output): ...\n"


def test_options_choose(tmp_path: Path) -> None:
    found = launched(tmp_path, TWO, "option.output_formatter=other")
    assert found.output is not None
    assert found.output.name == "other"


@pytest.mark.parametrize("name", ["json", "jsonlines", "sse"])
def test_a_built_in_formatter_by_option_beats_model_py(tmp_path: Path, name: str) -> None:
    assert launched(tmp_path, LEGACY, f"option.output_formatter={name}").output is None


@pytest.mark.parametrize(
    ("text", "option", "wanted"),
    [
        (None, "option.output_formatter=xml", "must be json, jsonlines, sse, or the name of an @output_formatter"),
        (LEGACY, "option.output_formatter=xml", "of model.py, which has write_legacy"),
        (LEGACY, "option.input_formatter=xml", "of model.py, which has none"),
        (TWO, "", "model.py has several output formatters, write_legacy, other: choose one of them"),
        (LEGACY, "option.rolling_batch=disable", "'write_legacy' requires rolling batch"),
    ],
)
def test_a_wrong_choice_says_what_there_is(tmp_path: Path, text: str | None, option: str, wanted: str) -> None:
    with pytest.raises(ConfigError) as caught:
        launched(tmp_path, text, option)
    assert wanted in str(caught.value)
    assert ("serving.properties, line 1" in str(caught.value)) == bool(option)


def test_model_py_is_in_the_model_directory_without_serving_properties(tmp_path: Path) -> None:
    write_model(tmp_path, LEGACY)
    config = read_config(overrides=[f"option.model_id={tmp_path}"], environ={}).checked()
    assert model_formatters(config).output is not None
    file = read_config(overrides=[f"option.model_id={tmp_path / 'x.gguf'}"], environ={}).checked()
    assert model_formatters(file).output is None


# -- `option.tool_parser_plugin`: a user's own parser of tool calls ----------------------------------------------------


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
        ("x = 1", r"the file must define a function make_parser\(tools\)"),
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
