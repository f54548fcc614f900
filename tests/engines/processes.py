"""Who is there, as the kernel knows it."""

from __future__ import annotations

import subprocess


def in_session(leader: int) -> dict[int, str]:
    """Of each process of a session that has not ended: its command line."""
    shown = subprocess.run(
        ["ps", "-Aww", "-o", "pid=,sid=,stat=,args="], capture_output=True, text=True, check=True
    ).stdout
    rows = [line.split(None, 3) for line in shown.splitlines()]
    return {int(pid): args for pid, session, state, args in rows if int(session) == leader and state[0] != "Z"}
