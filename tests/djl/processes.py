"""Processes by parent and by group, as /proc tells them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    pid: int
    parent: int
    group: int
    command: str


def only(text: str, *, parent: int | None = None, group: int | None = None) -> int:
    """The one process with `text` in its command line among a parent's children or in a group."""
    found = [
        process.pid
        for process in _living()
        if text in process.command and parent in (None, process.parent) and group in (None, process.group)
    ]
    assert len(found) == 1, f"{len(found)} processes of {parent or group} are {text}"
    return found[0]


def group_members(group: int) -> dict[int, str]:
    """Pid and command line of each."""
    return {process.pid: process.command for process in _living() if process.group == group}


def _living() -> Iterator[Process]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has just ended
                state, parent, group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
                if state != "Z":
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    yield Process(int(entry.name), int(parent), int(group), command)
