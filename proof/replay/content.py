"""Content and shape of an answer.

Content is kept by the places of its values, so that streams which are cut otherwise compare as equal. A place is a
path as `$.choices[0].delta.content`. Texts of a stream are joined by place, other values are kept where they change.
Items of a list are told apart by their own `index`.

A shape is JSON itself. A scalar is the name of its type, or several as `null|string`; `{"a": …, "b?": …}` is an object,
where `b` is not always there; `[…]` is a list, of one shape for all its items.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from handler.core.framing import is_too_deep

_DECODER = json.JSONDecoder()
_BEGIN = re.compile(r"(?!\[DONE\])[{\[]")
_BEGIN_BYTES = re.compile(rb"(?!\[DONE\])[{\[]")


class NotJson(ValueError):
    """The body holds no JSON object or list, or a broken one."""


class Documents(NamedTuple):
    """The JSON objects and lists of a body, and the text before, between and after them: one more than documents."""

    values: list[Any]
    glue: list[str]


def read_documents(body: bytes) -> Documents:
    """Read a body.

    Raises:
        NotJson: it is text.
    """
    try:
        found = _by_lines(body)
    except ValueError:  # a document over several lines, NaN, a number of more than 64 bits
        found = _by_place(body)
    if not found.values:
        raise NotJson("no JSON object or list")
    return found


def _by_lines(body: bytes) -> Documents:
    """Read at most one document a line: 20 times as fast as looking for the end of each."""
    values: list[Any] = []
    glue: list[str] = []
    text: list[bytes] = []
    for line in body.splitlines(keepends=True) if b"\n" in body.strip() else [body]:
        begin = _BEGIN_BYTES.search(line)
        if begin is None:
            text.append(line)
            continue
        document = line[begin.start() :].rstrip()
        values.append(_bounded(orjson.loads(document), document))
        glue.append(b"".join([*text, line[: begin.start()]]).decode())
        text = [line[begin.start() + len(document) :]]
    return Documents(values, [*glue, b"".join(text).decode()])


def _bounded(value: Any, text: str | bytes) -> Any:
    """Return the value, which functions that call themselves may follow."""
    if is_too_deep(value, text):
        raise NotJson("too deep")
    return value


def _by_place(body: bytes) -> Documents:
    values: list[Any] = []
    glue: list[str] = []
    try:
        text, at = body.decode(), 0
        while begin := _BEGIN.search(text, at):
            glue.append(text[at : begin.start()])
            value, at = _DECODER.raw_decode(text, begin.start())
            values.append(_bounded(value, text[begin.start() : at]))
    except (ValueError, RecursionError) as error:
        raise NotJson(str(error)) from None
    return Documents(values, [*glue, text[at:]])


# -- what an answer says, by the places of its values, so that streams which are cut otherwise compare as equal --------
# A place is a path as `$.choices[0].delta.content`. Texts of a stream are joined by place, other values of it are kept
# where they change. Items of a list are told apart by their own `index`.

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
    """The cut of a stream's text: so many tokens came in so many events."""

    events: int
    tokens: int

    @property
    def has_one_each(self) -> bool | None:
        """Return whether a token has an event of its own; None: nobody can say, as some tokens have no text."""
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


# -- the shape of an answer: its keys at each level, the JSON types of its values and its framing, whatever was said ---
# A shape is JSON itself. A scalar is the name of its type, or several as `null|string`; `{"a": …, "b?": …}` is an
# object, where `b` is not always there; `[…]` is a list, of one shape for all its items.

_ANY_OF = "any of"
_NAMES: Mapping[type, str] = {list: "list", dict: "object"}
_TYPES = {str: "string", bool: "boolean", int: "number", float: "number", type(None): "null"}


def frames(values: Sequence[Any]) -> dict[str, Sequence[Any]]:
    """Return a body's first document, all between and its last one, as far as there are any."""
    parts = {"first": values[:1], "between": values[1:-1], "last": values[1:][-1:]}
    return {name: part for name, part in parts.items() if part}


def shape(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _TYPES.get(type(part)) or _field(name, part, value) for name, part in value.items()}
    if isinstance(value, list):
        return [merged([_TYPES.get(type(part)) or shape(part) for part in value])] if value else []
    return _TYPES[type(value)]


def _field(name: str, value: Any, of: Mapping[str, Any]) -> Any:
    if name == "top_logprobs":
        return _by_token(value)
    if isinstance(value, dict) and (name == "arguments" or (name == "input" and of.get("type") == "tool_use")):
        return "object"  # the model's own fields
    return shape(value)


def _by_token(value: Any) -> Any:
    """Return the shape of a completion's `top_logprobs`: the names in its objects are what the model could say."""
    if isinstance(value, list) and any(isinstance(part, dict) and "logprob" not in part for part in value):
        return [merged([{"TOKEN": merged([shape(logprob) for logprob in part.values()])} for part in value])]
    return shape(value)


def merged(shapes: Sequence[Any]) -> Any:
    """Return the shape that covers all of them."""
    if len(shapes := _different(shapes)) == 1:  # most events of a stream have one shape
        return shapes[0]
    shapes = [part for one in shapes for part in _alternatives(one)]
    objects = [one for one in shapes if isinstance(one, dict)]
    lists = [one for one in shapes if isinstance(one, list)]
    scalars = sorted({name for one in shapes if isinstance(one, str) for name in one.split("|")})
    found: list[Any] = ["|".join(scalars)] if scalars else []
    if lists:
        items = [one[0] for one in lists if one]
        found.append([merged(items)] if items else [])
    if objects:
        found.append(_merged_objects(objects))
    return found[0] if len(found) == 1 else {_ANY_OF: found}


def _alternatives(shape: Any) -> list[Any]:
    """Return the scalar, the list and the object that a value may be, as far as it may."""
    return list(shape[_ANY_OF]) if isinstance(shape, dict) and _ANY_OF in shape else [shape]


def _different(shapes: Sequence[Any]) -> Sequence[Any]:
    """Return each shape once."""
    found: list[Any] = []
    for one in shapes:
        if one not in found:
            found.append(one)
    return found


def _merged_objects(objects: Sequence[dict[str, Any]]) -> dict[str, Any]:
    names = dict.fromkeys(name.removesuffix("?") for one in objects for name in one)
    always = [name for name in names if all(name in one for one in objects)]
    return {
        name if name in always else f"{name}?": merged(
            [one[key] for one in objects for key in (name, f"{name}?") if key in one]
        )
        for name in names
    }


def differences(old: Any, new: Any, path: str = "$", *, one_of_many: bool = False) -> Iterator[str]:
    """Yield what a client of the old shape finds changed in the new one.

    A value that may be of several types may be of fewer of them. A field that was not always there need not always be.

    Args:
        one_of_many: the old shape is that of many answers, the new one of a single one, which may lack such fields.
    """
    if old == new:
        return
    known = {type(part): part for part in _alternatives(old)}
    for part in _alternatives(new):
        was = known.get(type(part))
        if isinstance(was, dict):
            yield from _object_differences(was, part, path, one_of_many)
        elif isinstance(was, list):
            if was and part:
                yield from differences(was[0], part[0], f"{path}[]", one_of_many=one_of_many)
        elif was is None or not set(part.split("|")) <= set(was.split("|")):
            yield f"{path}: {_name(old)} -> {_name(new)}"


def _object_differences(old: dict[str, Any], new: dict[str, Any], path: str, one_of_many: bool) -> Iterator[str]:
    here, there = ({name.removesuffix("?"): name for name in one} for one in (old, new))
    for name, key in here.items():
        if name not in there:
            if not (one_of_many and key.endswith("?")):
                yield f"{path}.{name}: {_name(old[key])} -> absent"
            continue
        if there[name].endswith("?") and not key.endswith("?"):
            yield f"{path}.{name}: always -> sometimes"
        yield from differences(old[key], new[there[name]], f"{path}.{name}", one_of_many=one_of_many)
    for name, key in there.items():
        if name not in here:
            yield f"{path}.{name}: absent -> {_name(new[key])}"


def _name(shape: Any) -> str:
    names = (part if isinstance(part, str) else _NAMES[type(part)] for part in _alternatives(shape))
    return "|".join(names)


# -- whether a text is the JSON that its request asked for -------------------------------------------------------------


_SLOW = ("pattern", "patternProperties")  # somebody's regular expressions, which may take for ever


def has_validator() -> bool:
    """Return whether schemas are checked; without jsonschema only that a text is JSON."""
    return importlib.util.find_spec("jsonschema") is not None


def fits(text: str, schema: Mapping[str, Any] | None) -> bool:
    """Return whether a text is JSON, and has the schema. Regular expressions in it are not checked; a broken schema
    fits.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    if schema is None or not has_validator():
        return True
    check = _validator(orjson.dumps(schema, option=orjson.OPT_SORT_KEYS))
    return check is None or bool(check(value))


@functools.lru_cache(maxsize=256)
def _validator(schema: bytes) -> Any:
    import jsonschema
    import referencing

    validator = jsonschema.validators.extend(jsonschema.Draft202012Validator, {name: lambda *_: () for name in _SLOW})(
        orjson.loads(schema), registry=referencing.Registry()
    )

    def check(value: Any) -> bool:
        try:
            return bool(validator.is_valid(value))
        except Exception:  # the schema is foreign: a reference that leads nowhere, a type that does not exist
            return True

    return check
