"""The structure of the documents in a response: types, event names, indexes, equal IDs, order, and new values.

Every function runs in linear time, because a response may be malicious.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

from proof.replay.content import is_number, name_of, public_name, scalars_by_path, type_of, without_indexes

_INDEXES = frozenset(("index", "output_index", "content_index", "sequence_index"))
_ID = re.compile(r"(\w*_)?id")
_EVENT = re.compile(r"^event ?: ?(.*?)\r?$", re.MULTILINE)
_CHOICE = re.compile(r"\[[0-9]+\]")


def types(documents: Iterable[Any]) -> set[str]:
    """Return the types of the documents."""
    return {type_of(document) for document in documents}


def event_names(documents: Sequence[Any], glue: Sequence[str]) -> dict[str, list[str]]:
    """Return the names of server-sent events without repetitions, by the type of their documents.

    Args:
        glue: the texts before the documents.
    """
    names_by_type: dict[str, list[str]] = {}
    for document, text in zip(documents, glue, strict=False):
        names = names_by_type.setdefault(type_of(document), [])
        name = (_EVENT.findall(text) or [""])[-1]
        if names[-1:] != [name]:
            names.append(name)
    return names_by_type


def indexes(scalars: Mapping[str, Sequence[Any]]) -> dict[str, list[int]]:
    """Return the distinct indexes of choices, blocks, tool calls and events, in ascending order."""
    numbers_of: dict[str, set[int]] = {}
    for path, values in scalars.items():
        if name_of(path) in _INDEXES:
            numbers_of.setdefault(without_indexes(path), set()).update(n for n in values if isinstance(n, int))
    return {path: sorted(numbers) for path, numbers in numbers_of.items()}


def num_items(documents: Iterable[Any]) -> Counter[str]:
    """Return the total length of the lists at each JSON path over all documents."""
    counts: Counter[str] = Counter()
    left = [(type_of(document), document) for document in documents]
    while left:
        path, value = left.pop()
        if isinstance(value, list):
            counts[path] += len(value)
        parts = value.items() if isinstance(value, dict) else ((None, part) for part in value)
        for name, part in parts:
            if isinstance(part, (dict, list)):
                left.append((f"{path}[]" if name is None else f"{path}.{public_name(name)}", part))
    return counts


def links(places: Mapping[str, Sequence[Any]], common: Iterable[str], *, first: bool) -> dict[str, list[int]]:
    """Replace IDs with numbers in the order of their first occurrence, so that equal IDs have equal numbers.

    Args:
        common: the JSON paths that both responses have.
        first: whether to number only the first ID at each path. For the ID of a stream itself, the first number then
            shows whether the ID changes.
    """
    numbers: dict[str, int] = {}
    result: dict[str, list[int]] = {}
    for path in sorted(common):
        values = [value for value in places[path] if isinstance(value, str)] if _ID.fullmatch(name_of(path)) else []
        if values:
            several = [int(len(values) > 1)] if first and path == "$.id" else []
            result[path] = several + [
                numbers.setdefault(value, len(numbers)) for value in values[: 1 if first else None]
            ]
    return result


class Fresh(Enum):
    """Kinds of values that a server makes anew for each response."""

    ID = "id"
    TIME = "time"


_NEW_ID = re.compile(r"(\w*_)?ids?|\w+I[dD]|encrypted_content|signature|obfuscation")
_OWN_ID = re.compile(r"(model|adapter|custom|token|label|class|index|lora)_?ids?", re.IGNORECASE)
"""Matches the names of ids that depend on the request or the model."""
_NEW_TIME = re.compile(
    r"(\w+_)?(created|updated|modified|expires|timestamp|datetime|time)(_at|_on|_ms|_us|_ns)?"
    r"|\w+_(at|on|ms|us|ns|duration|per_second)|ns|\w+(At|Time|Timestamp)"
)
_UUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_ISO_TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}(:[0-9]{2})?\S*")
AT_TOP = re.compile(r"\$(\([^)]*\))?\.[^.]*")
"""Matches the JSON path of a field of the response itself."""
_EPOCH = range(1_000_000_000, 4_100_000_000)  # seconds, from 2001 to 2099
_AT_ONCE = 3600  # seconds between two responses that were recorded together


def kind_of_fresh(path: str, values: Sequence[Any]) -> Fresh | None:
    """Return the kind of the values at a JSON path if each may be an id or a time, or None.

    Fractions, numbers in lists, tokens and labels are neither.

    Args:
        path: the path without indexes.
        values: the values of both responses. Nulls are ignored.
    """
    present = [value for value in values if value is not None]
    name = name_of(path)
    if not present or (path.endswith("[]") and not all(isinstance(value, str) for value in present)):
        return None
    if all(isinstance(value, str) for value in present):
        if all(map(_ISO_TIME.fullmatch, present)) or _NEW_TIME.fullmatch(name):
            return Fresh.TIME
        is_id = _NEW_ID.fullmatch(name) and not _OWN_ID.fullmatch(name)
        return Fresh.ID if is_id or all(map(_UUID.fullmatch, present)) else None
    if not all(is_number(value) for value in present):
        return None
    if _NEW_TIME.fullmatch(name) or (set(map(type, present)) == {int} and _are_together(present)):
        return Fresh.TIME
    return Fresh.ID if name == "seed" or (name == "id" and AT_TOP.fullmatch(path)) else None


def _are_together(numbers: Sequence[int]) -> bool:
    """Return whether the numbers are times of responses that were recorded together."""
    return all(number in _EPOCH for number in numbers) and max(numbers) - min(numbers) <= _AT_ONCE


def spans(documents: Sequence[Any]) -> dict[str, tuple[int, int]]:
    """Return the indexes of the first and the last document that contain each JSON path."""
    result: dict[str, tuple[int, int]] = {}
    for number, document in enumerate(documents):
        for path in scalars_by_path([document], by_index=True):
            result[path] = result.get(path, (number, 0))[0], number
    return result


def misplaced(reference: Mapping[str, tuple[int, int]], target: Mapping[str, tuple[int, int]]) -> str | None:
    """Return a JSON path that begins or ends before another path in only one of the responses, or None.

    Choices of a stream may arrive in any order.
    """
    groups: dict[str, list[str]] = {}
    for path in sorted(reference.keys() & target.keys()):
        choice = _CHOICE.search(path) if path.startswith("$.") else None
        groups.setdefault(choice.group() if choice else "", []).append(path)
    for places in groups.values():
        for end in (0, 1):
            pair = [_ranks([spans[path][end] for path in places]) for spans in (reference, target)]
            for path, *ranks in zip(places, pair[0], pair[1], strict=True):
                if ranks[0] != ranks[1]:
                    return path
    return None


def _ranks(numbers: Sequence[int]) -> list[int]:
    """Return the rank of each number. Equal numbers have equal ranks."""
    rank = {number: at for at, number in enumerate(sorted(set(numbers)))}
    return [rank[number] for number in numbers]
