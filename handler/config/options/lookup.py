"""Find an option by one of its names, or suggest the nearest."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from handler.config.options import KNOWN
from handler.config.options.option import Gone, Option


def find_option(key: str, engine: str) -> Option | None:
    """Find the option that an engine means by a name, else another engine's; None where nobody has it.

    Args:
        engine: "" where it is not known.
    """
    options = KNOWN.get(key, [])
    return next((option for option in options if engine in option.engines), options[0] if options else None)


def option_key(name: str) -> str | None:
    """Find the key of an option by DJL's name, which has no prefix."""
    key = next((name for name in (f"option.{name}", name) if name in KNOWN), None)
    if key is None:
        return None
    keys = {option.key for option in KNOWN[key]}
    return keys.pop() if len(keys) == 1 else key  # two engines' own: find_option knows which


def unknown_option(key: str, engine: str) -> str:
    """Say that nobody has the option, with the nearest name that this engine accepts."""
    bare = {name.removeprefix("option."): name for name, options in KNOWN.items() if _is_accepted(options, engine)}
    near = difflib.get_close_matches(key.removeprefix("option."), bare, n=1, cutoff=0.75)
    hint = f"did you mean {bare[near[0]]!r}?" if near else "docs/options.md lists those there are"
    return f"unknown option {key!r}; {hint}"


def _is_accepted(options: Iterable[Option], engine: str) -> bool:
    return any(
        (not engine or not option.engines or engine in option.engines or option.idle)
        and not isinstance(option.parse, Gone)
        for option in options
    )
