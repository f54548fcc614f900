"""Lists living processes, as the kernel knows them. Those that have ended and wait for their parents are left out."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    pid: int
    parent: int
    session: int
    command: str


def in_session(leader: int) -> dict[int, str]:
    """Command lines by pid."""
    return {one.pid: one.command for one in _all() if one.session == leader}


def descendants(parent: int) -> dict[int, str]:
    """Command lines by pid, the parent's own left out."""
    found: dict[int, str] = {}
    everybody, parents = _all(), {parent}
    while parents:
        children = {one.pid: one.command for one in everybody if one.parent in parents}
        found |= children
        parents = set(children)
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _all() -> list[Process]:
    command = ["ps", "-Aww", "-o", "pid=,ppid=,sid=,stat=,args="]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 4) for line in shown.splitlines()]
    return [
        Process(int(pid), int(parent), int(session), args.strip())
        for pid, parent, session, state, args in rows
        if state[0] != "Z"
    ]
