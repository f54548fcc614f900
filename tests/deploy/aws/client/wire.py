"""Answers as they go over the wire: those of our own server, out of its golden files, and others'."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

GOLDEN = Path(__file__).parents[3] / "golden"


class Wire(NamedTuple):
    """A streamed answer."""

    content_type: str
    body: bytes


def golden(name: str, status: int = 200) -> Wire:
    """tests/golden/{name}.txt: the request's line, the status line, the body."""
    _, head, body = (GOLDEN / f"{name}.txt").read_bytes().split(b"\n", 2)
    found, content_type = head.removeprefix(b"< ").split(b" ", 1)
    assert int(found) == status
    return Wire(content_type.decode(), body)


def golden_streams() -> list[str]:
    """The names of all whose answer is a stream with status 200."""
    found = []
    for schema in ("lmi", "tgi", "tgi_compat", "triton", "chat", "openai/chat", "openai/completion"):
        for path in sorted((GOLDEN / schema).glob("*stream*.txt")):
            if path.read_bytes().split(b"\n", 2)[1].startswith((b"< 200 text/event", b"< 200 application/jsonl")):
                found.append(f"{schema}/{path.stem}")
    return found
