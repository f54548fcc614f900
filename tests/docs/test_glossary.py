"""One word for each thing: the words that docs/glossary.md replaces become fewer, in the code and in the pages.

`python -m tests.docs.test_glossary` writes the numbers of today to `house_words.json`, where they are smaller.
"""

from __future__ import annotations

import ast
import functools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.docs.pages import ROOT, pages, prose, section

PACKAGES = ("handler", "deploy", "proof")
PAGES = "pages"
LIMITS = Path(__file__).with_name("house_words.json")
"""Maximum number of each word in each package and in the pages."""

WORDS = {
    "answer": r"answers?",
    "clip": r"clips?",
    "leave out": r"(leaves?|leaving|left) (\w+ )?out",
    "mark": r"(?<!order )(?<!question )marks?",
    "place": r"(?<!in )(?<!take )(?<!takes )places?(?! (of|holder)\b)",
    "rehearsal": r"rehears\w*",
    "sign": r"signs?",
    "thought": r"thoughts?",
    "vector": r"vectors?",
    "without a stream": r"without a stream|not streamed",
}
"""Expressions of words in text, and in names that are split at underscores and capitals."""
IN_NAMES = {"most": r"most", **{word: word for word in ("found", "given", "named", "wanted", "asked", "said", "told")}}
IN_NAMES |= {word: word for word in ("made", "one")}
"""Expressions of words that count only as a name or the beginning or end of a name."""

_COMMENT = re.compile(r"(?:^|\s)# (.*)$", re.MULTILINE)


@functools.cache
def _split(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name).replace("_", " ").strip().lower()


def _names(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the names that a module defines: classes, functions, parameters, variables and attributes."""
    for node in nodes:
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name


def _texts(source: str, nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield a module's strings, docstrings and comments."""
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
    yield from _COMMENT.findall(source)


def in_source(source: str) -> Counter[str]:
    """Count each replaced word in the names and texts of a module."""
    nodes = list(ast.walk(ast.parse(source)))
    names = Counter(map(_split, _names(nodes)))
    texts = "\n".join(_texts(source, nodes)).lower()
    found = Counter({word: _number(expression, texts) for word, expression in WORDS.items()})
    for name, number in names.items():
        found.update({word: number * times for word, times in _in_name(name).items()})
    return found


@functools.cache
def _in_name(name: str) -> dict[str, int]:
    """Count the replaced words in a name that has been split. Most names recur in many modules."""
    found = {word: _number(expression, name) for word, expression in WORDS.items()}
    for word, expression in IN_NAMES.items():
        found[word] = int(re.match(rf"{expression}\b|.*\b{expression}$", name) is not None)
    return {word: number for word, number in found.items() if number}


def in_page(text: str) -> Counter[str]:
    """Count each replaced word in the prose and tables of a page, without code."""
    plain = prose(text).lower()
    return Counter({word: _number(expression, plain) for word, expression in WORDS.items()})


def _number(expression: str, text: str) -> int:
    return len(re.findall(rf"\b(?:{expression})\b", text))


def counts() -> dict[str, dict[str, int]]:
    """Return the number of each word, by package."""
    totals: dict[str, Counter[str]] = {}
    for package in PACKAGES:
        totals[package] = Counter()
        for path in sorted((ROOT / package).rglob("*.py")):
            totals[package].update(in_source(path.read_text()))
    totals[PAGES] = Counter()
    for page in pages():
        if page not in ("CHANGELOG.md", "docs/glossary.md"):
            totals[PAGES].update(in_page((ROOT / page).read_text()))
    return {word: {package: total[word] for package, total in totals.items()} for word in (*WORDS, *IN_NAMES)}


def test_no_replaced_word_is_used_more_often() -> None:
    limits = json.loads(LIMITS.read_text())
    over = {
        f"{word} in {package}: {number}, at most {limits[word][package]}"
        for word, numbers in counts().items()
        for package, number in numbers.items()
        if number > limits[word][package]
    }
    assert over == set(), "use the word of docs/glossary.md"


def test_the_glossary_lists_the_words_that_the_test_counts() -> None:
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", section(_GLOSSARY.read_text(), "One word for each thing"), re.M)
    listed = [word.strip() for _, words in rows[1:] for word in words.split(",") if not set(word) <= {"-"}]
    assert sorted(listed) == sorted((*WORDS, *IN_NAMES))


def test_words_are_counted_in_names_texts_and_comments() -> None:
    source = '"""An answer."""\nclass AnswerReader:\n    def mark(self, most_bytes): self.found = "marks"  # no clip'
    found = {word: number for word, number in in_source(source).items() if number}
    assert found == {"answer": 2, "mark": 2, "most": 1, "found": 1, "clip": 1}
    assert in_page("A byte order mark. `answer` left it out:\n```\nanswer\n```\n") == {
        **dict.fromkeys(WORDS, 0),
        "leave out": 1,
    }


_GLOSSARY = ROOT / "docs" / "glossary.md"

if __name__ == "__main__":
    today, before = counts(), json.loads(LIMITS.read_text()) if LIMITS.exists() else {}
    lower = {
        word: {name: min(number, before.get(word, {}).get(name, number)) for name, number in numbers.items()}
        for word, numbers in today.items()
    }
    LIMITS.write_text(json.dumps(lower, indent=1) + "\n")
