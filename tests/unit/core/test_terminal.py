"""Text for terminals, and the streams that escape it."""

from __future__ import annotations

import io
import sys

import pytest

from handler.core import terminal


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("plain é日😀\n\ttext", "plain é日😀\n\ttext"),
        ("a\x1b[31m", r"a\u001b[31m"),
        ("\x9b\x7f\r\x00", r"\u009b\u007f\u000d\u0000"),
        ("\u202e\u2066\u061c\u200f", r"\u202e\u2066\u061c\u200f"),
        ("\u2028\ud800", r"\u2028\ud800"),
        ("\U000e0041", r"\udb40\udc41"),
        ("👩\u200d💻", "👩\u200d💻"),
    ],
)
def test_controls_are_written_as_in_json(text: str, printed: str) -> None:
    assert terminal.escaped(text) == printed
    assert terminal.escaped(printed) == printed


def test_what_an_encoding_lacks_is_escaped() -> None:
    assert terminal.escaped("é日", "latin-1") == r"é\u65e5"


def test_streams_are_escaped_once_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    monkeypatch.setattr("sys.stdout", out)
    with terminal.escaping():
        outer = sys.stdout
        with terminal.escaping():
            assert sys.stdout is outer
            print("\x1b", end="")
            sys.stdout.writelines(["\x07", "b"])
        assert sys.stdout is outer
        assert terminal.unescaped(outer) is out
        print("\r", end="", file=terminal.unescaped(sys.stdout), flush=True)
    assert sys.stdout is out
    assert out.buffer.getvalue() == rb"\u001b\u0007b" + b"\r"
