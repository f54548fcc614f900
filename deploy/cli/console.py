"""Where and how is printed: colours and the terminal's width on a terminal, plain wide lines elsewhere."""

from __future__ import annotations

import sys

from rich.console import Console

from deploy.errors import Refused

_WIDE = 180  # columns of a table that no terminal limits


def out() -> Console:
    return Console(emoji=False, markup=False, width=None if sys.stdout.isatty() else _WIDE)


def say(console: Console, line: str, style: str = "") -> None:
    """A line as it is: nothing in it is markup, and it is not broken."""
    console.print(line, style=style or None, markup=False, highlight=False, soft_wrap=True)


def confirm(question: str, *, yes: bool, needed: bool) -> bool:
    """Ask on the terminal.

    Args:
        yes: it was said on the command line.
        needed: without a terminal to ask on, not to go on.

    Raises:
        Refused: there is none.
    """
    if yes:
        return True
    if not sys.stdin.isatty():
        if needed:
            raise Refused(f"{question} Nobody is there to be asked.", "Say --yes.")
        return True
    return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
