"""Names of ours that a later release removes: options, variables, commands and flags (docs/decisions.md)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple


class Deprecation(NamedTuple):
    """When a name leaves, and what replaces it.

    Attributes:
        since: the release that announces it, such as `2.1.0`.
        removed: the release without the name.
        instead: what to use instead, as users write it.
    """

    since: str
    removed: str
    instead: str


DEPRECATIONS: Mapping[str, Deprecation] = {}
"""The deprecated names: `option.x`, `LMI_X`, `lmi command` or `lmi command --flag`.

Nothing is deprecated in 2.0.0. The release that removes a name also removes its row.
"""


def warnings(names: Iterable[str], shown: Mapping[str, str] | None = None) -> Iterator[str]:
    """Yield a warning for each deprecated name among `names`, once.

    Args:
        names: names that are used.
        shown: maps names to texts for the user, such as a name with its origin. Other names are shown as they are.
    """
    for name in dict.fromkeys(names):
        if row := DEPRECATIONS.get(name):
            used = (shown or {}).get(name, name)
            yield f"deprecated: {used}; {row.removed} removes it, use {row.instead} instead"
