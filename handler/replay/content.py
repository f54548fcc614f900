"""What an answer says, by the places of its values, so that streams which are cut otherwise compare as equal.

A place is a path as `$.choices[0].delta.content`. Texts of a stream are joined by place, other values of it are kept
where they change. Items of a list are told apart by their own `index`.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import orjson

TEXTS = frozenset(
    [
        "generated_text",
        "text_output",
        "content",
        "text",
        "reasoning_content",
        "reasoning",
        "thinking",
        "refusal",
        "delta",
        "transcript",
    ]
)
"""Names of an answer's text in the APIs; a stream has it in pieces."""
ARGUMENTS = frozenset(("arguments", "partial_json"))
"""Names of JSON within a string, which a stream has in pieces too."""
LOGPROBS = frozenset(
    ["logprob", "log_prob", "token_logprobs", "cumulative_logprob", "cumulative_log_prob", "top_logprobs"]
)
_COUNTS = frozenset(("completion_tokens", "output_tokens", "generated_tokens"))
"""Names of the number of generated tokens."""
_FEW = 6  # tokens
_INDEX = re.compile(r"\[\d+\]")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
"""A field's name; others are a client's or a model's words, as in a completion's `top_logprobs`."""


def scalars_by_place(documents: list[Any]) -> dict[str, list[Any]]:
    """Return all scalars of an answer, in order, by place."""
    found: dict[str, list[Any]] = {}
    for document in documents:
        _walk(document, _root(document), found)
    return found


def values_by_place(scalars: Mapping[str, list[Any]], num_documents: int) -> Mapping[str, list[Any]]:
    """Return what an answer of so many documents says at each place, however it was cut."""
    if num_documents < 2:
        return scalars
    return {place: _joined(place, values) for place, values in scalars.items()}


def name_of(place: str) -> str:
    """Return the name at the end of a place."""
    return _INDEX.sub("", place.rpartition(".")[2]).removesuffix("[]")


def without_indexes(place: str) -> str:
    return _INDEX.sub("[]", place)


def _root(document: Any) -> str:
    """Return the place of a document: events of Anthropic and Responses say which part of the answer they belong to."""
    if isinstance(document, dict) and isinstance(document.get("type"), str):
        index = document.get("index", document.get("output_index"))
        return f"$({document['type']})" + (f"[{index}]" if isinstance(index, int) else "")
    return "$"


def _walk(value: Any, place: str, found: dict[str, list[Any]]) -> None:
    if isinstance(value, dict):
        if value.get("type") == "tool_use" and "input" in value:
            value = {**value, "input": orjson.dumps(value["input"], option=orjson.OPT_SORT_KEYS).decode()}
        parts = [(f"{place}.{public_name(name)}", part) for name, part in value.items()]
    else:
        item = f"{place}[]"
        parts = [(_item(part, place) if isinstance(part, dict) else item, part) for part in value]
    for where, part in parts:
        if isinstance(part, (dict, list)):
            _walk(part, where, found)
        elif where in found:
            found[where].append(part)
        else:
            found[where] = [part]


def _item(part: dict[str, Any], of: str) -> str:
    index = part.get("index")
    return f"{of}[{index}]" if isinstance(index, int) else f"{of}[]"


@functools.lru_cache(maxsize=1024)
def public_name(name: str) -> str:
    """Return a field's name, or a label for what may be content."""
    return name if _NAME.fullmatch(name) else "<name>"


def _joined(place: str, values: list[Any]) -> list[Any]:
    """Return the values of a stream: its text whole, other values without what only repeats."""
    name = name_of(place)
    if name in TEXTS or name in ARGUMENTS:
        return ["".join(value for value in values if isinstance(value, str))]
    if name in LOGPROBS:
        return values
    return [value for at, value in enumerate(values) if at == 0 or value != values[at - 1]]


# -- events ----------------------------------------------------------------------------------------------------------


class Cut(NamedTuple):
    """How the text of a stream was cut: so many tokens came in so many events."""

    events: int
    tokens: int

    @property
    def has_one_each(self) -> bool | None:
        """Whether a token has an event of its own; None: nobody can say, as some tokens have no text."""
        if self.tokens < _FEW:
            return None
        if self.events <= (self.tokens + 1) // 2:
            return False
        return True if self.events >= 0.8 * (self.tokens - 1) else None


def cut_of(scalars: Mapping[str, list[Any]]) -> Cut | None:
    """Return how a stream's text was cut; None: it does not say how many tokens it has, or calls tools."""
    tokens = max(
        (count for place, values in scalars.items() if name_of(place) in _COUNTS for count in _counts(values)),
        default=0,
    )
    if not tokens or any(name_of(place) in ARGUMENTS for place in scalars):
        return None
    events: Counter[str] = Counter()
    for place, values in scalars.items():
        if name_of(place) in TEXTS:
            events[without_indexes(place)] += sum(_events(value) for value in values if isinstance(value, str))
    return Cut(max(events.values(), default=0), tokens)


def _events(text: str) -> int:
    """Return for how many events an event's text counts: a character of several bytes may be as many tokens."""
    return len(text.encode("utf-8", "replace")) - len(text) + 1 if text else 0


def _counts(values: list[Any]) -> Iterator[int]:
    return (value for value in values if isinstance(value, int) and not isinstance(value, bool))
