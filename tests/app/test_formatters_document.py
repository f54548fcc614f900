"""The examples of docs/formatters.md are found, and do what the text beside them says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.app.server import serve

DOCUMENT = Path(__file__).parents[2] / "docs" / "formatters.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)

ASKED = [
    ({"question": "a?", "loud": True, "stream": True}, '"text": " IS", "finish_reason": "length"}\n'),
    ({"inputPrompt": "a b", "parameters": {"max_new_tokens": 2}}, '{"generated_text":" a b"}'),
    ({"inputs": "a", "parameters": {"max_new_tokens": 1}}, '{"text": " a", "finish_reason": "length"}\n'),
    ({"inputs": "a", "parameters": {"max_new_tokens": 2}}, " a a"),
    ({"inputs": "a", "parameters": {"max_new_tokens": 1}}, '{"generated_text":" a","served_by":"me"}'),
]


def directories(base: Path) -> Iterator[Path]:
    for number, text in enumerate(EXAMPLES):
        directory = base / str(number)
        directory.mkdir()
        # The first example is an input formatter only; the third one's output formatter goes with it.
        (directory / "model.py").write_text(text + EXAMPLES[2] if number == 0 else text)
        (directory / "serving.properties").write_text("")
        yield directory


@pytest.mark.parametrize("number", range(len(ASKED)))
def test_the_examples_do_what_they_say(tmp_path: Path, number: int) -> None:
    assert len(EXAMPLES) == len(ASKED)
    directory = list(directories(tmp_path))[number]
    body, wanted = ASKED[number]
    with serve("--engine", "echo", "--properties", str(directory / "serving.properties")) as server:
        found = server.post(body)
        assert found.status_code == 200
        assert found.text.endswith(wanted)
