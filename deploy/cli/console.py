"""The console: colours and width on a terminal, plain wide lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table

from deploy.errors import Refused

_WIDE = 180  # columns of a table without a terminal


def out() -> Console:
    return Console(emoji=False, markup=False, width=None if sys.stdout.isatty() else _WIDE)


def say(console: Console, line: str, style: str = "") -> None:
    """Print a line without markup and without line breaks."""
    console.print(line, style=style or None, markup=False, highlight=False, soft_wrap=True)


def table(columns: Sequence[str], rows: Iterable[Sequence[RenderableType]], **look: Any) -> Table:
    """Return a table. `look`: further arguments of rich's."""
    made = Table(title_justify="left", caption_justify="left", **look)
    for column in columns:
        made.add_column(column, overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


def confirm(question: str, *, yes: bool, needed: bool) -> bool:
    """Ask the user on the terminal.

    Args:
        yes: `--yes` is set.
        needed: whether to stop if there is no terminal.

    Raises:
        Refused: there is no terminal, and an answer is needed.
    """
    if yes:
        return True
    if not sys.stdin.isatty():
        if needed:
            raise Refused(f"{question} Nobody is there to be asked.", "Say --yes.")
        return True
    return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
