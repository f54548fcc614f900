"""Code blocks of a page in Markdown: the comments above them, commands and their outputs. Pure.

CONTRIBUTING.md has the convention.
"""

from __future__ import annotations

import difflib
import json
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tests.docs.pages import lines

RUN = ("console", "sh", "python", "js")
LANGUAGES = (*RUN, "java", "go", "properties", "yaml", "json", "toml", "text")
SERVERS = ("demo", "echo", "emulator", "aws")
REASONS = (
    "a GPU",
    "AWS",
    "DJL Serving",
    "a download",
    "Docker",
    "Kubernetes",
    "another client",
    "it does not end",
)
ANY = "…"

_COMMENT = re.compile(r" *<!-- *(.*?) *-->")
_HERE_DOCUMENT = re.compile(r"(?<!<)<<-?(?!<) *(['\"]?)(\w+)\1")
_ASSIGNMENT = re.compile(r"\w+=.*", re.DOTALL)
_BEFORE_COMMANDS = ("exec", "sudo", "time", "nohup", "do", "then", "{")


class Command(NamedTuple):
    """A command of a `console` block and its output."""

    line: int
    text: str
    output: str


class Server(NamedTuple):
    """The server of all following blocks, of `<!-- server: KIND ARGUMENTS -->`."""

    line: int
    kind: str
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Block:
    """A code block. `line` is that of its fence.

    Attributes:
        file: the file that it is written to, of `<!-- file: NAME -->`.
        output: it shows the output of the block before, by `<!-- output -->`.
        reason: why it is not run, of `<!-- not run: REASON -->`.
    """

    line: int
    language: str
    text: str
    file: str = ""
    output: bool = False
    reason: str = ""

    @property
    def runs(self) -> bool:
        return self.language in RUN and not (self.file or self.reason)

    @property
    def commands(self) -> list[Command]:
        """Those of a `console` block with their outputs; the logical lines of an `sh` block."""
        found: list[Command] = []
        lines = self.text.splitlines()
        prompt = "$ " if self.language == "console" else ""
        start = 0
        while start < len(lines):
            end = start + _extent([lines[start].removeprefix(prompt), *lines[start + 1 :]])
            command = "\n".join(lines[start:end]).removeprefix(prompt)
            start, first = end, self.line + 1 + start
            while prompt and end < len(lines) and not lines[end].startswith(prompt):
                end += 1
            found.append(Command(first, command, "\n".join(lines[start:end]).rstrip()))
            start = end
        return found


class Page(NamedTuple):
    """Servers and blocks in their order, and what breaks the convention, as `LINE: fault`."""

    items: list[Server | Block]
    faults: list[str]


def parse(text: str) -> Page:
    """Read a page."""
    page = Page([], [])
    begin, inner, kind = 0, list[str](), "text"
    above: list[tuple[int, str]] = []  # comments, whose next line is this one
    for line, (content, kind, fence) in enumerate(lines(text.removesuffix("\n")), 1):
        if fence and kind == "begin":
            begin, inner = line, []
        elif fence and kind == "code":
            inner.append(content.removeprefix(fence[1]))
        elif fence:
            page.items.append(_block(page, begin, fence[3].strip(), "\n".join(inner), above))
            above = []
        elif comment := _COMMENT.fullmatch(content):
            name, _, value = comment[1].partition(":")
            if name == "server":
                page.items.append(_server(page, line, value))
            else:
                above.append((line, comment[1]))
        else:
            page.faults.extend(f"{at}: no block follows {comment!r}" for at, comment in above if _known(comment))
            above = []
    if kind in ("begin", "code"):
        page.faults.append(f"{begin}: the block has no end")
    return page


def _known(comment: str) -> bool:
    return comment.partition(":")[0] in ("file", "output", "not run")


def _server(page: Page, line: int, value: str) -> Server:
    kind, *arguments = shlex.split(value) or [""]
    if kind not in SERVERS:
        page.faults.append(f"{line}: unknown server {kind!r}: must be one of {', '.join(SERVERS)}")
    return Server(line, kind, tuple(arguments))


def _block(page: Page, line: int, language: str, text: str, above: Sequence[tuple[int, str]]) -> Block:
    fields: dict[str, Any] = {}
    for at, comment in above:
        name, _, value = comment.partition(":")
        value = value.strip()
        match name, value:
            case "file", str(value) if value:
                fields["file"] = value
            case "output", "":
                fields["output"] = True
            case "not run", reason if reason in REASONS:
                fields["reason"] = reason
            case "not run", reason:
                page.faults.append(f"{at}: unknown reason {reason!r}: must be one of {', '.join(REASONS)}")
                fields["reason"] = reason
            case _:
                page.faults.append(f"{at}: unknown comment {comment!r}")
    block = Block(line, language, text, **fields)
    before = page.items[-1] if page.items else None
    if language not in LANGUAGES:
        page.faults.append(f"{line}: the language {language!r} must be one of {', '.join(LANGUAGES)}")
    elif language == "console" and not text.startswith("$ "):
        page.faults.append(f"{line}: a console block begins with '$ '")
    elif block.output and not (language in ("json", "text") and isinstance(before, Block) and before.language in RUN):
        page.faults.append(f"{line}: an output is json or text, and follows a block that runs")
    return block


def _extent(lines: Sequence[str]) -> int:
    """Count the lines of the first command: a backslash, an open quote and a here-document continue it."""
    for count in range(1, len(lines)):
        if not _is_open("\n".join(lines[:count])):
            return count
    return len(lines)


def _is_open(command: str) -> bool:
    if here := _HERE_DOCUMENT.search(command):
        return command.splitlines()[-1].strip() != here[2]
    if command.endswith("\\"):
        return True
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return True
    return False


def programs(command: str) -> Iterator[list[str]]:
    """Yield the words of each program that a command of the shell calls; what stands in $(…) is not read."""
    if here := _HERE_DOCUMENT.search(command):
        command = command[: here.start()]
    lexer = shlex.shlex(command.replace("\\\n", " "), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if set(word) <= set("();<>|&"):
            if words:
                yield words
            words = []
        elif words or not (_ASSIGNMENT.fullmatch(word) or word in _BEFORE_COMMANDS):
            words.append(word)


def difference(expected: str, actual: str) -> str:
    """Compare an output with the page's; return "" or a diff. `…` is any text of a line, alone any lines."""
    wanted, found = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (expected, actual))
    if re.fullmatch("".join(map(_pattern, wanted)), "".join(f"{line}\n" for line in found)):
        return ""
    masks = [line for line in wanted if ANY in line and line.strip() != ANY]
    known = [next((mask for mask in masks if re.fullmatch(_pattern(mask), f"{line}\n")), line) for line in found]
    return "\n".join(difflib.unified_diff(wanted, known, "the page", "the output", lineterm="", n=1))


def _pattern(line: str) -> str:
    if line.strip() == ANY:
        return r"(?:[^\n]*\n)*"
    return "[^\n]*".join(map(re.escape, line.split(ANY))) + "\n"


def json_difference(expected: str, actual: str) -> str:
    """Compare two JSON values, however they are laid out.

    The string `…` is any value, and `…` in a string any text. As a name, or as a list's last item, it is any others.
    """
    try:
        found = json.loads(actual)
    except ValueError:
        return f"the output is not JSON:\n{actual}"
    wanted = json.loads(expected)
    texts = (json.dumps(value, indent=1, ensure_ascii=False) for value in (wanted, _masked(wanted, found)))
    return difference(*texts)


def _masked(expected: Any, actual: Any) -> Any:
    """Return `actual` with the expected value in the place of what it allows."""
    match expected, actual:
        case str(), _ if ANY in expected:
            text = actual if isinstance(actual, str) else json.dumps(actual)
            return expected if re.fullmatch(".*".join(map(re.escape, expected.split(ANY))), text, re.DOTALL) else actual
        case dict(), dict():
            more = {name for name in actual if name not in expected} if ANY in expected else set()
            kept = {name: _masked(expected[name], actual[name]) for name in expected if name in actual}
            others = {name: value for name, value in actual.items() if name not in expected and name not in more}
            return {**kept, **others, **({ANY: expected[ANY]} if ANY in expected else {})}
        case [*wanted, "…"], [*found] if len(found) >= len(wanted):
            return [*map(_masked, wanted, found), ANY]
        case list(), list():
            return [*map(_masked, expected, actual), *actual[len(expected) :]]
    return actual
