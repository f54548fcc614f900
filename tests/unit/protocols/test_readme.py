"""handler/protocols/README.md: the dialect that it shows answers, and refuses, as one of the registry does."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, TypedDict
from unittest.mock import ANY

import pytest

from handler import protocols
from handler.core.errors import PromptTooLong, ServingError
from handler.protocols.kernel.dialect import Dialect
from handler.protocols.kernel.errors import ErrorFormat
from handler.protocols.kernel.texts import NON_EMPTY
from handler.protocols.operations import example_response
from tests.unit.protocols.answers import CONTEXT, answer, refused, with_options

README = Path(protocols.__path__[0]) / "README.md"


class ShoutAnswer(TypedDict):
    loud: str
    tokens: int


class ShoutError(TypedDict):
    error: str


class ShoutEvent(TypedDict):
    loud: str


class ShoutErrors(ErrorFormat):
    def body(self, error: ServingError) -> ShoutError:
        return {"error": error.message}


@pytest.fixture
def shout(monkeypatch: pytest.MonkeyPatch) -> Dialect:
    """The dialect of the page's code, beside the files that the page leaves to the reader."""
    folder = f"{protocols.__name__}.shout"
    api = ModuleType(f"{folder}.api")
    vars(api).update(ShoutAnswer=ShoutAnswer, ShoutError=ShoutError, ShoutEvent=ShoutEvent, ERRORS=ShoutErrors())
    monkeypatch.setitem(sys.modules, api.__name__, api)
    code = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert code is not None, f"{README} shows no code"
    values: dict[str, Any] = {"__name__": f"{folder}.request"}
    exec(compile(code[1], str(README), "exec"), values)
    dialect = values["Shout"]()
    assert isinstance(dialect, Dialect)
    return dialect


def test_it_is_described(shout: Dialect) -> None:
    described = shout.description
    shape = {"type": "object", "required": ["say"], "properties": {"say": NON_EMPTY, "max_tokens": ANY, "stream": ANY}}
    assert described.request_shape(CONTEXT) == shape
    assert example_response(shout) == {"loud": " PARIS.", "tokens": 2}


def test_the_dialect_of_the_readme_answers(shout: Dialect) -> None:
    found = answer(shout, {"say": "What is", "max_tokens": 5, "whisper": True, "hum": None})
    assert (found.status, json.loads(found.body)) == (200, {"loud": 'DEEP "LEARNING" 😀\n', "tokens": 5})


def test_the_dialect_of_the_readme_streams(shout: Dialect) -> None:
    found = answer(shout, {"say": "What is", "max_tokens": 5, "stream": True})
    events = [json.loads(line.removeprefix(b"data:")) for line in found.body.split(b"\n\n") if line]
    assert "".join(event["loud"] for event in events) == 'DEEP "LEARNING" 😀\n'
    assert len(events) == 5


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ([], "the body must be a JSON object with 'say'"),
        ({}, "'say' must be a non-empty string"),
        ({"say": "a", "max_tokens": 0}, "max_tokens=0: must be an integer from 1 to 2147483647"),
        ({"say": "a", "whisper": True, "hum": None}, "unknown names: whisper (option.unknown_parameters=refuse)"),
    ],
)
def test_it_refuses_by_name(shout: Dialect, body: Any, message: str) -> None:
    found = answer(shout, body, context=with_options(CONTEXT, unknown_parameters="refuse"))
    assert (found.status, json.loads(found.body)) == (400, {"error": message})


def test_it_names_the_field_of_a_prompt_that_is_too_long(shout: Dialect) -> None:
    (request,) = shout.parse({"say": "a"}, CONTEXT).requests
    found = answer(shout, {"say": "a"}, refused(PromptTooLong(request.names.prompt, 9, 8)))
    assert json.loads(found.body)["error"].startswith("'say' has 9 tokens; the model accepts at most 8. ")
