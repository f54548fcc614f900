"""Escapes what a terminal would execute in the text that commands print, whoever wrote the text.

Names and values of files, servers and models may contain control characters, which would set the title of a terminal,
its clipboard, or the direction of the text.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TextIO, cast

# Controls except line feeds and tabs, controls of the text's direction, line separators and surrogates.
_EXECUTED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]|\U000e0001|[\U000e0020-\U000e007f]"
)


def escaped(text: str, encoding: str = "utf-8") -> str:
    r"""Return text in a form that is safe to print: controls are written as in JSON, such as \u001b.

    Args:
        encoding: encoding of the stream. Characters that it cannot represent are escaped too.
    """
    text = _EXECUTED.sub(lambda match: _escape(match[0]), text)
    return text if text.isascii() else text.encode(encoding, "backslashreplace").decode(encoding)


def _escape(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[index : index + 2].hex()}" for index in range(0, len(units), 2))


@contextlib.contextmanager
def escaping() -> Iterator[None]:
    """Escape everything that this process prints to standard output and standard error."""
    streams = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    mine = {
        name: cast(TextIO, _Escaping(stream)) for name, stream in streams.items() if not isinstance(stream, _Escaping)
    }
    for name, stream in mine.items():
        setattr(sys, name, stream)
    try:
        yield
    finally:
        for name, stream in mine.items():
            if getattr(sys, name) is stream:
                setattr(sys, name, streams[name])


def unescaped(stream: TextIO) -> TextIO:
    """Return the stream behind `escaping`, for colours, for the cursor, and for bytes that another program reads."""
    return stream.behind if isinstance(stream, _Escaping) else stream


class _Escaping:
    """A text stream that escapes what is written to another one."""

    def __init__(self, behind: TextIO) -> None:
        self.behind = behind

    def write(self, text: str) -> int:
        self.behind.write(escaped(text, self.behind.encoding or "utf-8"))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.behind, name)
