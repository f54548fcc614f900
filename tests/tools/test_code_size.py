"""The files that one request walks through: a reader has to follow them all."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.tools.code_size import ROOT, code_lines

MOST = {"LMI by HTTP": 38, "TGI by HTTP": 38, "OpenAI by HTTP": 40, "Anthropic by HTTP": 44, "LMI in DJL Serving": 32}


def test_a_streamed_request_walks_through_few_files() -> None:
    """In a process of its own, where no other server runs."""
    command = [sys.executable, "-m", "tests.tools.code_size", "--json"]
    walks = json.loads(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout)["walks"]
    assert walks.keys() == MOST.keys()
    assert {name: files for name, files in walks.items() if len(files) > MOST[name]} == {}
    assert all("core/text.py" in files and "scheduler/batcher.py" in files for files in walks.values())


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("x = 1\n", 1),
        ('"""A docstring\nof two lines."""\n\nx = 1  # a comment\n', 1),
        ("import os\nfrom a import (\n    b,\n)\nx = os\n", 1),
        ('x = """a text\nof two lines"""\n', 2),
        ("def f():\n    # a comment\n\n    return (\n        1\n    )\n", 4),
    ],
)
def test_code_is_counted_without_imports_comments_and_docstrings(source: str, lines: int) -> None:
    assert code_lines(source) == lines
