"""Comparison of two answers to one request: findings, and the class of the request that follows from them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import cached_property
from itertools import islice, zip_longest
from typing import Any, NamedTuple

import orjson

from handler.core.values import SAMPLED
from proof.replay.content import (
    ARGUMENTS,
    LOGPROBS,
    NEAR,
    RELATIVE_LOGPROB,
    TEXTS,
    NotJson,
    Token,
    cut_of,
    differences,
    fits,
    frames,
    is_near,
    is_number,
    merged,
    name_of,
    parted_at,
    public_name,
    read_documents,
    scalars_by_place,
    shape,
    tokens_by_choice,
    type_of,
    values_by_place,
    without_indexes,
)
from proof.replay.exchange import Answer, Request
from proof.replay.structure import event_names, indexes, links, misplaced, num_items, spans, types


class Class(str, Enum):
    """Classes of requests in order of severity; a request has the class of its most severe finding."""

    EQUAL = "equal"
    TIE = "tie"
    TEXT = "text"
    SHAPE = "shape"
    FRAMING = "framing"
    STATUS = "status"
    LOST = "lost"


CLASSES = tuple(Class)
_RANK = {cls: rank for rank, cls in enumerate(CLASSES)}


class Finding(NamedTuple):
    """Difference between two answers.

    Attributes:
        kind: kind of the difference, such as `usage`.
        where: the JSON path, without names that a client or a model chose.
        change: the old and the new form, without content.
        content: the old and the new content, shown only with `--show`.
        learnable: whether the difference may be volatile for all requests of a kind; otherwise each request is checked
            on its own.
        timed: whether the value may change every second.
    """

    cls: Class
    kind: str
    where: str = ""
    change: str = ""
    content: str = ""
    learnable: bool = True
    timed: bool = False

    @property
    def key(self) -> tuple[str, str, str]:
        return self.cls.value, self.kind, self.where

    @property
    def name(self) -> str:
        return f"{self.kind} {self.where}".strip()


def class_of(findings: Iterable[Finding]) -> Class:
    return max((finding.cls for finding in findings), key=_RANK.__getitem__, default=Class.EQUAL)


_SAMPLING = SAMPLED - {"seed"}


class Traits(NamedTuple):
    """Traits of a request that determine how its answers are compared.

    Attributes:
        greedy: whether a repeated request gets the same answer, by greedy decoding or because nothing is generated.
        schema: requested JSON Schema of the answer's text, or None.
        json: whether JSON was requested, with or without a schema.
    """

    greedy: bool
    streams: bool = False
    schema: Mapping[str, Any] | None = None
    json: bool = False


def traits(request: Request, greedy: bool = False) -> Traits:
    """Return the traits of a request.

    Args:
        greedy: treat the request as decoded greedily.
    """
    try:
        body = orjson.loads(request.body)
    except ValueError:
        return Traits(True)
    if not isinstance(body, dict):
        return Traits(True)
    parameters = body.get("parameters")
    parameters = parameters if isinstance(parameters, dict) else {}
    schema, any_json = _schema(body, parameters)
    streams = body.get("stream") is True or request.path.partition("?")[0].endswith("_stream")
    return Traits(greedy or _is_greedy(body, parameters, request.path), streams, schema, any_json)


def _is_greedy(body: Mapping[str, Any], parameters: Mapping[str, Any], path: str) -> bool:
    values = {**body, **parameters}
    if values.get("do_sample") is False or values.get("top_k") == 1 or values.get("temperature") == 0:
        return True
    if values.get("do_sample") is True:
        return False
    if "messages" in body or "prompt" in body or path.partition("?")[0].endswith("/responses"):
        return False  # OpenAI's and Anthropic's default temperature is 1
    return not any(values.get(name) is not None for name in _SAMPLING)


def _schema(body: Mapping[str, Any], parameters: Mapping[str, Any]) -> tuple[Mapping[str, Any] | None, bool]:
    """Return the requested schema, and whether JSON was requested."""
    for values in (body, parameters):
        for schema in (
            _at(values, "response_format", "json_schema", "schema"),
            _at(values, "response_format", "schema"),
            _at(values, "text", "format", "schema"),
            _at(values, "output_config", "format", "schema"),
            _at(values, "output_format", "schema"),
            _at(values, "structured_outputs", "json"),
            _at(values, "guided_json"),
            _at(values, "grammar", "value") if _at(values, "grammar", "type") == "json" else None,
            _at(values, "response_format", "value"),
        ):
            if isinstance(schema, str):
                try:
                    schema = orjson.loads(schema)
                except ValueError:
                    continue
            if isinstance(schema, dict):
                return schema, True
        if _at(values, "response_format", "type") == "json_object":
            return None, True
    return None, False


def _at(value: Any, *names: str) -> Any:
    for name in names:
        if not isinstance(value, dict):
            return None
        value = value.get(name)
    return value


# -- compare two answers to one request --------------------------------------------------------------------------------


_RELATIVE, _ABSOLUTE = 0.01, 1e-3  # tolerances of other fractional numbers, such as embeddings
_FRAMING_LINE = re.compile(r"[\s:,\[\]]*|((data|event|id|retry) ?:[ \w.-]*)?(\[DONE\])?\s*")
_COMMENT = re.compile(r"^:[^\r\n]*(\r\n|\n){1,2}", re.MULTILINE)
"""Comment in an event stream, and the empty line after it."""
_DIGITS = re.compile(r"[0-9]+")
_USAGE = re.compile(r"\.(\w*usage|generated_tokens|\w+_tokens|\w+_token_count)\b(?!\[)")
_FINISH = {"finish_reason", "stop_reason", "stop_sequence"}
_TOOLS = re.compile(r"\.(tool_calls|function|function_call)\b|\(.*function_call.*\)|tool_use")
_ALTERNATIVES = re.compile(r"\.(top_logprobs|top_tokens|prompt_logprobs)\b")
_WORD = re.compile(r"\S*")
_UNSAMPLED = re.compile(
    r"\.(object|role|model|model_name|model_version|seed|inputs|prompt|input_length|prompt_tokens|input_tokens)$"
    r"|\.prefill\[\]\.(id|text)$|^\$(\([^)]*\))?\.id$"
)
"""JSON paths of values that depend on the request or the model, not on sampling."""
_ANY = re.compile("")
_REQUESTED = re.compile(r"^\$$|\.(choices|best_of_sequences|prefill|data|results)$")
"""JSON paths of lists whose length depends on the request, not on sampling."""
VALUES = ("value", "error's value")
"""Kinds of findings about values of unknown meaning."""
_MAX_SEEN = 20_000  # maximum characters of a shape, which grows with each answer
_MAX_CHECKED = 64  # maximum texts of an answer that are validated
_MAX_TYPES = 256  # maximum types of documents


class _Documents:
    """JSON documents of an answer, and data that several comparisons share.

    Raises:
        NotJson: the body contains no JSON.
    """

    def __init__(self, body: bytes) -> None:
        self.values, self.glue = read_documents(body)

    @cached_property
    def scalars(self) -> dict[str, list[Any]]:
        return scalars_by_place(self.values, by_index=len(self.values) > 1)

    @cached_property
    def places(self) -> Mapping[str, list[Any]]:
        return values_by_place(self.scalars, len(self.values))

    @cached_property
    def shapes(self) -> dict[str, Any]:
        """Shapes of the first document, of the last one, and of each type of documents between them."""
        parts: dict[str, list[Any]] = {}
        for name, part in frames(self.values).items():
            for value in part:
                root = type_of(value) if name == "between" else "$"
                parts.setdefault(f"$({name})" if root == "$" else root, []).append(shape(value))
        return {name: merged(part) for name, part in parts.items()}

    @cached_property
    def types(self) -> set[str]:
        return types(self.values)

    @cached_property
    def spans(self) -> dict[str, tuple[int, int]]:
        return spans(self.values)


class Seen:
    """Types and merged shapes of the reference's answers to one kind of request."""

    def __init__(self) -> None:
        self.types: set[str] = set()
        self.shapes: dict[str, Any] = {}

    def add(self, documents: _Documents) -> None:
        if len(self.types) < _MAX_TYPES:
            self.types |= documents.types
        for part, part_shape in documents.shapes.items():
            known = self.shapes.get(part)
            if known is None:
                if len(self.shapes) < _MAX_TYPES:
                    self.shapes[part] = part_shape
            elif known != part_shape and len(repr(both := merged([known, part_shape]))) < _MAX_SEEN:
                self.shapes[part] = both


def findings(old: Answer, new: Answer, traits: Traits, seen: Seen, near: float = NEAR) -> list[Finding]:
    """Return the differences that a client of the old answer may notice in the new one.

    Args:
        seen: types and shapes of earlier answers to this kind of request.
        near: maximum difference between nearly equal log-probabilities.
    """
    if old.lost or new.lost:
        side = "reference" if old.lost else "target"
        return [Finding(Class.LOST, f"{side}: {old.lost or new.lost}", learnable=False)]
    if old.status != new.status:
        return [Finding(Class.STATUS, "status", change=f"{old.status} -> {new.status}", learnable=False)]
    result = list(_content_type(old.content_type, new.content_type))
    if old.body == new.body:
        return result
    try:
        before, after = _Documents(old.body), _Documents(new.body)
    except NotJson:
        return [*result, *_texts(old.body, new.body, traits)]
    if old.status >= 400:
        return [*result, *_errors(before, after)]
    result += [*_glue(before, after), *_event_names(before, after, strict=traits.greedy)]
    texts = list(_said(before, after, near)) if traits.greedy else []
    if texts or not traits.greedy:
        seen.add(before)
        loose = (*_loose_shapes(before, after, seen), *_cuts(before, after), *_schemas(before, after, traits))
        if len(before.values) == 1 and not traits.streams:
            loose = (*_number(before, after), *_items(before, after, _REQUESTED), *loose)
        return [*result, *loose, *_unsampled(before, after, near), *_places(before, after, strict=False), *texts]
    seen.add(before)
    if wrong := list(_number(before, after)):
        result += wrong
    elif path := misplaced(before.spans, after.spans):
        result.append(Finding(Class.FRAMING, "order", _public(without_indexes(path))))
    strict = (*_strict_shapes(before, after), *_places(before, after, strict=True))
    return [*result, *strict, *_items(before, after), *_values(before, after, near)]


# -- framing ---------------------------------------------------------------------------------------------------------


def _content_type(old: str, new: str) -> Iterator[Finding]:
    one, other = (re.sub(r"\s+", "", value).lower() for value in (old, new))
    if one and other and one != other:
        yield Finding(Class.FRAMING, "content type", change=f"{media_text(old)} -> {media_text(new)}")


def media_text(value: str) -> str:
    """Return the value if it looks like a content type, otherwise a label."""
    return value if re.fullmatch(r"[\w/;=+. -]{1,80}", value) else "<other>"


def _texts(old: bytes, new: bytes, traits: Traits) -> Iterator[Finding]:
    """Compare two bodies of which at least one is not JSON."""
    kinds = [_is_json(body) for body in (old, new)]
    if kinds[0] != kinds[1]:
        names = ["JSON" if kind else "text" if body else "empty" for kind, body in zip(kinds, (old, new), strict=True)]
        yield Finding(Class.SHAPE, "body", change=" -> ".join(names))
    elif traits.greedy:
        yield Finding(Class.TEXT, "body", content=_both(old.decode("utf-8", "replace"), new.decode("utf-8", "replace")))


def _is_json(body: bytes) -> bool:
    try:
        read_documents(body)
    except NotJson:
        return False
    return True


def _glue(old: _Documents, new: _Documents) -> Iterator[Finding]:
    """Compare the text before, between and after the documents."""
    (first, *between, last), (now_first, *now_between, now_last) = (_numberless(one.glue) for one in (old, new))
    for where, was, now in (("beginning", first, now_first), ("end", last, now_last)):
        if was != now:
            yield Finding(Class.FRAMING, where, change=f"{framing_text(was)} -> {framing_text(now)}")
    if between and now_between:
        gone, come = set(between) - set(now_between), set(now_between) - set(between)
        for was, now in zip_longest(sorted(gone), sorted(come)):
            names = [framing_text(one) if one is not None else "absent" for one in (was, now)]
            yield Finding(Class.FRAMING, "separator", " -> ".join(names), " -> ".join(names))


def _number(old: _Documents, new: _Documents) -> Iterator[Finding]:
    """Compare the numbers of documents."""
    if len(old.values) != len(new.values):
        yield Finding(Class.FRAMING, "documents", change=f"{len(old.values)} -> {len(new.values)}")


def _cuts(old: _Documents, new: _Documents) -> Iterator[Finding]:
    """Compare whether two streams have an event for each token, or for several tokens."""
    if len(old.values) < 2 or len(new.values) < 2:
        return
    was, now = cut_of(old.scalars), cut_of(new.scalars)
    if was is None or now is None:
        return
    if {was.has_one_each, now.has_one_each} == {True, False}:
        change = " -> ".join(f"{cut.events} events of {cut.tokens} tokens" for cut in (was, now))
        yield Finding(Class.FRAMING, "events", change=change)


def _event_names(old: _Documents, new: _Documents, *, strict: bool) -> Iterator[Finding]:
    """Compare the names of server-sent events.

    Args:
        strict: require the same names in the same order; otherwise accept any name that the old answer has.
    """
    before, after = (event_names(one.values, one.glue) for one in (old, new))
    for root in sorted(before.keys() & after.keys()):
        was, now = before[root], after[root]
        if was != now if strict else not set(now) <= set(was):
            change = next((pair for pair in zip_longest(was, now) if pair[0] != pair[1]), ("", ""))
            names = [public_name(name) if name else "none" for name in change]
            yield Finding(Class.FRAMING, "event name", _public(root), " -> ".join(names))


def _numberless(glue: Sequence[str]) -> list[str]:
    """Return the text around documents without its numbers and comments; busy servers send comments as keep-alives."""
    texts = (_COMMENT.sub("", text) if text.startswith(":") or "\n:" in text else text for text in glue)
    return [_DIGITS.sub("0", text) for text in texts]


def framing_text(text: str) -> str:
    """Return text around documents if it is only framing, otherwise a label."""
    is_framing = len(text) <= 120 and all(map(_FRAMING_LINE.fullmatch, text.splitlines()))
    return json.dumps(text) if is_framing else f"<{len(text)} characters>"


# -- shape -----------------------------------------------------------------------------------------------------------


def _strict_shapes(old: _Documents, new: _Documents) -> Iterator[Finding]:
    for root in sorted(old.types ^ new.types):
        change = "present -> absent" if root in old.types else "absent -> present"
        yield Finding(Class.SHAPE, "type", _public(root), change)
    yield from _shape_findings(old.shapes, new.shapes)


def _loose_shapes(old: _Documents, new: _Documents, seen: Seen) -> Iterator[Finding]:
    """Compare with the merged shapes of earlier answers, because answers with other content may have other fields."""
    for root in sorted(new.types - seen.types):
        yield Finding(Class.SHAPE, "type", _public(root), "absent -> present")
    yield from _shape_findings(seen.shapes, new.shapes, one_of_many=True)


def _shape_findings(old: Mapping[str, Any], new: Mapping[str, Any], *, one_of_many: bool = False) -> Iterator[Finding]:
    changes = {}
    for part in old.keys() & new.keys():
        for change in differences(old[part], new[part], part, one_of_many=one_of_many):
            where, _, what = change.partition(": ")
            changes[_public(where)] = what
    for where, what in sorted(changes.items()):
        yield Finding(Class.SHAPE, "field", where, what)


def _public(path: str) -> str:
    return ".".join(name if re.fullmatch(r"[\w$()\[\]?-]{1,64}", name) else "<name>" for name in path.split("."))


# -- errors ----------------------------------------------------------------------------------------------------------


def _errors(old: _Documents, new: _Documents) -> Iterator[Finding]:
    """Compare the shape and the codes of two errors, but not their messages."""
    for finding in [*_glue(old, new), *_number(old, new), *_strict_shapes(old, new), *_items(old, new)]:
        yield finding._replace(cls=Class.STATUS, kind=f"error's {finding.kind}")
    before, after = old.places, new.places
    for path in before.keys() & after.keys():
        was, now = before[path], after[path]
        if was != now and not any(_is_prose(value) for value in (*was, *now)):
            yield Finding(Class.STATUS, "error's value", without_indexes(path), content=_both(was, now), timed=True)


def _is_prose(value: Any) -> bool:
    return isinstance(value, str) and not _WORD.fullmatch(value)


# -- generated text ----------------------------------------------------------------------------------------------------


def _said(old: _Documents, new: _Documents, near: float) -> Iterator[Finding]:
    """Compare generated texts, and the arguments of tool calls."""
    before, after = old.places, new.places
    texts = []
    for path in sorted(before.keys() & after.keys()):
        name = name_of(path)
        if before[path] == after[path] or _ALTERNATIVES.search(path):
            continue
        if name in ARGUMENTS and _parsed(before[path]) != _parsed(after[path]):
            yield Finding(
                Class.TEXT,
                "tool calls",
                without_indexes(path),
                content=_both(before[path], after[path]),
                learnable=False,
            )
        elif name in TEXTS and all(isinstance(value, str) for value in (*before[path], *after[path])):
            texts.append(path)  # values of another type are compared by shape
    if texts:
        yield _text_finding(old, new, texts, near)


def _text_finding(old: _Documents, new: _Documents, places: Sequence[str], near: float) -> Finding:
    path = min(places, key=len)
    before, after = tokens_by_choice(old.values), tokens_by_choice(new.values)
    parted = [
        part for choice in sorted(before.keys() & after.keys()) if (part := parted_at(before[choice], after[choice]))
    ]
    is_tie = bool(parted) and all(part.is_tie(near) for part in parted)
    content = [_both(old.places[path], new.places[path])]
    change = ""
    if parted:
        first = min(parted, key=lambda part: len(part.same))
        change = f"first at token {len(first.same) + 1}"
        content += [f"{change}: {_said_token(first.old)} -> {_said_token(first.new)}"]
    cls = Class.TIE if is_tie else Class.TEXT
    return Finding(cls, "text", without_indexes(path), change, "; ".join(content), learnable=False)


def _said_token(token: Token | None) -> str:
    if token is None:
        return "the end"
    return json.dumps(token.text, ensure_ascii=False) + ("" if token.logprob is None else f" ({token.logprob:.3f})")


def _parsed(values: Sequence[Any]) -> list[Any]:
    result = []
    for value in values:
        try:
            result.append(json.loads(value) if isinstance(value, str) else value)
        except (ValueError, RecursionError):
            result.append(value)
    return result


# -- other values ----------------------------------------------------------------------------------------------------


def _values(old: _Documents, new: _Documents, near: float) -> Iterator[Finding]:
    """Compare all values. Those of two streams of equal length are compared one by one, except for texts."""
    aligned = len(old.values) == len(new.values)
    result: dict[tuple[str, str, str], Finding] = {}
    if aligned:  # a field that only one of several choices lost
        for path in sorted(old.places.keys() ^ new.places.keys()):
            if (name := name_of(path)) not in TEXTS and name not in ARGUMENTS:
                change = "present -> absent" if path in old.places else "absent -> present"
                finding = Finding(Class.TEXT, "value", _public(without_indexes(path)), change)
                result.setdefault(finding.key, finding)
    for path in sorted(old.places.keys() & new.places.keys()):
        name = name_of(path)
        one_by_one = aligned and name not in TEXTS and name not in ARGUMENTS
        was, now = ((side.scalars if one_by_one else side.places)[path] for side in (old, new))
        if was == now:
            types = next((pair for pair in zip(was, now, strict=True) if type(pair[0]) is not type(pair[1])), None)
            if types is None:
                continue
            where = _public(without_indexes(path))
            finding = Finding(Class.SHAPE, "field", where, " -> ".join(map(shape, types)))  # 9 and 9.0
        elif name in ARGUMENTS and _parsed(was) == _parsed(now):
            continue
        else:
            finding = _value_finding(path, name, was, now, near)
        result.setdefault(finding.key, finding)
    yield from result.values()


def _items(old: _Documents, new: _Documents, lists: re.Pattern[str] = _ANY) -> Iterator[Finding]:
    """Compare the numbers of items in lists whose JSON path matches the pattern."""
    if len(old.values) != len(new.values):
        return
    before, after = num_items(old.values), num_items(new.values)
    differing = (path for path in before.keys() & after.keys() if before[path] != after[path])
    for path in filter(lists.search, sorted(differing)):
        yield Finding(Class.TEXT, "items", _public(path), f"{before[path]} -> {after[path]}")


def _unsampled(old: _Documents, new: _Documents, near: float) -> Iterator[Finding]:
    """Compare values that do not depend on the generated text, such as the prompt's tokens."""
    before, after = (
        {place: one.places[place] for place in one.places if _UNSAMPLED.search(place)} for one in (old, new)
    )
    for path in sorted(before.keys() & after.keys()):
        was, now = (list(dict.fromkeys(values)) for values in (before[path], after[path]))
        if was != now:
            yield _value_finding(path, name_of(path), was, now, near)


def _places(old: _Documents, new: _Documents, *, strict: bool) -> Iterator[Finding]:
    """Compare the indexes of choices, blocks and tool calls, and which of their ids are equal.

    Args:
        strict: whether both answers have the same text; otherwise one may have more items than the other.
    """
    before, after = indexes(old.scalars), indexes(new.scalars)
    for path in sorted(before.keys() | after.keys() if strict else before.keys() & after.keys()):
        was, now = before.get(path, []), after.get(path, [])
        length = None if strict else min(len(was), len(now))
        if was[:length] != now[:length]:
            yield Finding(Class.TEXT, "index", _public(path), content=_both(was, now))
    common = old.places.keys() & new.places.keys()
    one, other = (links(side.places, common, first=not strict) for side in (old, new))
    differing = {without_indexes(path) for path in one.keys() & other.keys() if one[path] != other[path]}
    for path in sorted(differing):
        yield Finding(Class.TEXT, "links", _public(path))


def changing_values(last: Answer, now: Answer, near: float) -> set[tuple[str, str, str]]:
    """Return the keys of findings about values that differ between two successive answers of one side."""
    try:
        before, after = _Documents(last.body), _Documents(now.body)
    except NotJson:
        return set()
    found = _values(before, after, near) if now.status < 400 else _errors(before, after)
    return {one.key for one in found if one.kind in VALUES}


def _value_finding(path: str, name: str, was: Sequence[Any], now: Sequence[Any], near: float) -> Finding:
    where, content = without_indexes(path), _both(was, now)
    if _are_near(name, was, now, near):
        return Finding(Class.TIE, "number", where, "nearly equal", content)
    if _ALTERNATIVES.search(path) and not _numbers(was):
        return Finding(Class.TIE, "alternatives", where, "", content)
    kind = "value"
    if name in _FINISH:
        kind = "finish reason"
    elif _USAGE.search(path):
        kind = "usage"
    elif _TOOLS.search(path):
        kind = "tool calls"
    return Finding(Class.TEXT, kind, where, content=content, timed=True)


def _are_near(name: str, was: Sequence[Any], now: Sequence[Any], near: float) -> bool:
    """Return whether two lists of fractional numbers are nearly equal. Integers must be equal."""
    if len(was) != len(now) or not _numbers([*was, *now]):
        return False
    if all(isinstance(value, int | None) for value in (*was, *now)):
        return False
    of_tokens = name in LOGPROBS or name == "<name>"
    relative, absolute = (RELATIVE_LOGPROB, near) if of_tokens else (_RELATIVE, _ABSOLUTE)
    return all(is_near(one, other, relative, absolute) for one, other in zip(was, now, strict=True))


def _numbers(values: Sequence[Any]) -> bool:
    return all(value is None or is_number(value) for value in values)


def _schemas(old: _Documents, new: _Documents, traits: Traits) -> Iterator[Finding]:
    """Yield a finding if the old answer follows the requested schema, but the new one does not."""
    if not traits.json:
        return
    before, after = (_answers(documents) for documents in (old, new))
    texts = (
        (path, was, now)
        for path in sorted(before.keys() & after.keys())
        for was, now in zip(before[path], after[path], strict=False)
    )
    for path, was, now in islice(texts, _MAX_CHECKED):
        if fits(was, traits.schema) and not fits(now, traits.schema):
            yield Finding(Class.TEXT, "schema", without_indexes(path), content=_both(was, now), learnable=False)


def _answers(documents: _Documents) -> dict[str, list[str]]:
    """Return the generated texts of an answer, by JSON path."""
    return {
        path: [value for value in values if isinstance(value, str)]
        for path, values in documents.places.items()
        if name_of(path) in TEXTS
    }


def _both(was: Any, now: Any) -> str:
    return f"{_short(was)} -> {_short(now)}"


def _short(value: Any) -> str:
    text = json.dumps(value[0] if isinstance(value, list) and len(value) == 1 else value, ensure_ascii=False)
    return text if len(text) <= 200 else f"{text[:120]} … {text[-60:]}"
