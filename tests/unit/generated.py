"""Generated parts of documents: between `<!-- NAME: begin -->` and `<!-- NAME: end -->`."""

from __future__ import annotations

from collections.abc import Iterable


def fill(text: str, name: str, part: str) -> str:
    """Return a document's text with another part of that name."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
    start = text.index(begin) + len(begin)
    return text[:start] + part + text[text.index(end, start) :]


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Return a table in Markdown."""
    first, *others = (f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |\n" for row in (head, *rows))
    return "".join([first, f"|{'---|' * len(head)}\n", *others])
