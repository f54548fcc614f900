"""Sizes in bytes, formatted for messages."""

from __future__ import annotations

_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
_ROUNDS_UP = 0.99995  # from this fraction of a unit on, the smaller unit would show 1000.0


def format_size(size: int) -> str:
    """Format a number of bytes in decimal units, as AWS does: `16.1 GB`."""
    for unit, value in _UNITS:
        if size >= value * _ROUNDS_UP:
            return f"{size / value:.1f} {unit}"
    return f"{size} B"
