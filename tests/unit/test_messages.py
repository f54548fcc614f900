"""What users of an installed wheel read: no message names a directory, or a program, of the checkout."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import yaml

from tests.one_test import in_one_test

ROOT = Path(__file__).parents[2]
CAUSES = ROOT / "deploy" / "data" / "causes.yaml"
FILES = [path for name in ("handler", "deploy", "proof") for path in sorted((ROOT / name).rglob("*.py"))]

CHECKOUT = re.compile(
    r"\b(docs|tests|examples|proof|docker)/"
    r"|`make |^make [a-z]+$|: make [a-z-]+|(?<!\w)-e \.|\.\[\w+\]'|lmi-handler's\s+directory|\.venv\b"
)

_URL = re.compile(r"https://\S+")
"""Another project's page may lie in a folder of such a name."""


def texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the strings that are no docstrings, with their lines."""
    told = {
        id(statement.value)
        for node in ast.walk(tree)
        if isinstance(body := getattr(node, "body", None), list)
        for statement in body
        if isinstance(statement, ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told:
            yield node.lineno, node.value


@functools.cache
def all_texts() -> list[tuple[str, str]]:
    """Return the strings of all files, with their places, and the advice for causes of failures."""
    in_code = [
        (f"{path.relative_to(ROOT)}:{line}", text)
        for path in FILES
        for line, text in texts(ast.parse(path.read_text()))
    ]
    return in_code + [(f"causes.yaml: {cause['name']}", cause["says"]) for cause in yaml.safe_load(CAUSES.read_text())]


def test_no_message_names_a_place_of_the_checkout() -> None:
    found = [f"{place}: {text[:120]!r}" for place, text in all_texts() if CHECKOUT.search(_URL.sub("", text))]
    assert found == []


@in_one_test(
    "text",
    ["see docs/djl.md", "run `make dev`", "pip install -e .", "pip install '.[cpu]'", "in lmi-handler's directory"],
)
def test_such_a_message_is_noticed(text: str) -> None:
    assert CHECKOUT.search(text)


def test_the_documents_that_messages_name_exist() -> None:
    named = {name for _, text in all_texts() for name in re.findall(r"\bdocuments: ([\w/-]+)", text)}
    assert {"djl", "scaling"} & named
    assert [name for name in sorted(named) if not (ROOT / "docs" / f"{name}.md").is_file()] == []
