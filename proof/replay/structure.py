"""Structure of an answer's documents: types, names of events, indexes, ids that link, and order.

Each function takes time in proportion to the answer, which may be hostile.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from proof.replay.content import name_of, scalars_by_place, type_of, without_indexes

_INDEXES = frozenset(("index", "output_index", "content_index", "sequence_index"))
_ID = re.compile(r"(\w*_)?id")
_EVENT = re.compile(r"^event ?: ?(.*?)\r?$", re.MULTILINE)
_CHOICE = re.compile(r"\[\d+\]")
_PING = "$(ping)"
"""The root of Anthropic's keep-alive events, which may come at any time."""


def types(documents: Iterable[Any]) -> set[str]:
    """Return the roots of the documents, which name their types."""
    return {type_of(document) for document in documents} - {_PING}


def event_names(documents: Sequence[Any], glue: Sequence[str]) -> dict[str, list[str]]:
    """Return the names of server-sent events, by the type of their documents; repeated ones once.

    Args:
        glue: the text before each document.
    """
    found: dict[str, list[str]] = {}
    for document, text in zip(documents, glue, strict=False):
        names = found.setdefault(type_of(document), [])
        name = (_EVENT.findall(text) or [""])[-1]
        if names[-1:] != [name]:
            names.append(name)
    return found


def indexes(scalars: Mapping[str, Sequence[Any]]) -> dict[str, list[int]]:
    """Return the indexes that choices, blocks, tool calls and events have, each once and in ascending order."""
    found: dict[str, set[int]] = {}
    for place, values in scalars.items():
        if name_of(place) in _INDEXES:
            found.setdefault(without_indexes(place), set()).update(one for one in values if isinstance(one, int))
    return {place: sorted(numbers) for place, numbers in found.items()}


def links(places: Mapping[str, Sequence[Any]], common: Iterable[str], *, first: bool) -> dict[str, list[int]]:
    """Return which ids are equal: each is numbered by the first place where it occurs.

    Args:
        common: places that both answers have.
        first: only the first id of a place, and whether a stream keeps it.
    """
    numbers: dict[str, int] = {}
    found: dict[str, list[int]] = {}
    for place in sorted(common):
        values = [value for value in places[place] if isinstance(value, str)] if _ID.fullmatch(name_of(place)) else []
        if values:
            several = [int(len(values) > 1)] if first and place == "$.id" else []
            found[place] = several + [
                numbers.setdefault(value, len(numbers)) for value in values[: 1 if first else None]
            ]
    return found


def spans(documents: Sequence[Any]) -> dict[str, tuple[int, int]]:
    """Return the numbers of the first and the last document that has each place."""
    found: dict[str, tuple[int, int]] = {}
    for number, document in enumerate(documents):
        for place in scalars_by_place([document], by_index=True):
            found[place] = found.get(place, (number, 0))[0], number
    return found


def misplaced(old: Mapping[str, tuple[int, int]], new: Mapping[str, tuple[int, int]]) -> str | None:
    """Return a place whose beginning or end has changed its order with another place's; None: there is none.

    Choices of a stream may come in any order.
    """
    groups: dict[str, list[str]] = {}
    for place in sorted(old.keys() & new.keys()):
        if not place.startswith(_PING):
            choice = _CHOICE.search(place) if place.startswith("$.") else None
            groups.setdefault(choice.group() if choice else "", []).append(place)
    for places in groups.values():
        for end in (0, 1):
            was, now = (_ranks([spans[place][end] for place in places]) for spans in (old, new))
            if found := next(
                (place for place, *ranks in zip(places, was, now, strict=True) if ranks[0] != ranks[1]), ""
            ):
                return found
    return None


def _ranks(numbers: Sequence[int]) -> list[int]:
    """Return each number's place among all of them; equal numbers have one."""
    rank = {number: at for at, number in enumerate(sorted(set(numbers)))}
    return [rank[number] for number in numbers]
