"""Compares two responses to the same request. The result is a list of findings, which determine the request class."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import cached_property, lru_cache
from itertools import chain, islice, zip_longest
from typing import Any, NamedTuple, TypeVar

import orjson

from handler.core.values import SAMPLED
from proof import routes, tensors
from proof.replay.content import (
    ARGUMENTS,
    LOGPROBS,
    NEAR,
    RELATIVE_LOGPROB,
    TEXTS,
    NotJson,
    Parted,
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
    scalars_by_path,
    shape,
    tokens_by_choice,
    type_of,
    values_by_path,
    without_indexes,
)
from proof.replay.exchange import Request, Response
from proof.replay.structure import Fresh, event_names, indexes, kind_of_fresh, links, misplaced, num_items, spans, types


class Class(str, Enum):
    """Classes of requests in order of severity. A request has the class of its most severe finding."""

    EQUAL = "equal"
    TIE = "tie"
    UNKNOWN = "unknown"
    TEXT = "text"
    SHAPE = "shape"
    FRAMING = "framing"
    STATUS = "status"
    LOST = "lost"


CLASSES = tuple(Class)
K = TypeVar("K", int, str)
V = TypeVar("V")
_RANK = {cls: rank for rank, cls in enumerate(CLASSES)}


class Finding(NamedTuple):
    """A difference between two responses.

    Attributes:
        kind: kind of the difference, such as `usage`.
        where: the JSON path, without names that a client or a model chose.
        change: the difference between the two sides, without content.
        content: the content of each side, shown only with `--show`.
        learnable: whether the difference may be volatile for all requests of a kind. Otherwise, each request is checked
            individually.
        timed: whether the value may change every second.
        fresh: the kind of the values if a server may make them anew for each response, or None.
    """

    cls: Class
    kind: str
    where: str = ""
    change: str = ""
    content: str = ""
    learnable: bool = True
    timed: bool = False
    fresh: Fresh | None = None

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
    """The traits of a request that determine how its responses are compared.

    Attributes:
        greedy: whether repeating a request returns the same response, because decoding is greedy or nothing is
            sampled.
        schema: the requested JSON Schema for the text of the response, or None.
        json: whether JSON was requested, with or without a schema.
    """

    greedy: bool
    streams: bool = False
    schema: Mapping[str, Any] | None = None
    json: bool = False


def traits(request: Request, greedy: bool = False) -> Traits:
    """Return the traits of a request.

    Args:
        greedy: whether to treat the request as decoded greedily.
    """
    source = routes.source_of(request.method, request.route)
    try:
        body, _ = tensors.read(request.body)
    except ValueError:
        return Traits(True)
    if not isinstance(body, dict):
        return Traits(True)
    parameters = body.get("parameters")
    parameters = tensors.inputs(body) or (parameters if isinstance(parameters, dict) else {})
    schema, any_json = _schema(body, parameters)
    streams = body.get("stream") is True or request.route.endswith("_stream")
    is_computed = source not in (None, routes.Source.SAMPLING)
    return Traits(greedy or is_computed or _is_greedy(body, parameters, request.route), streams, schema, any_json)


def _is_greedy(body: Mapping[str, Any], parameters: Mapping[str, Any], route: str) -> bool:
    values = {**body, **parameters}
    if values.get("do_sample") is False or values.get("top_k") == 1 or values.get("temperature") == 0:
        return True
    if values.get("do_sample") is True:
        return False
    if "messages" in body or "prompt" in body or route.endswith(("/responses", "/responses/compact")):
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


# -- compare two responses to one request ------------------------------------------------------------------------------


_RELATIVE = 0.01
"""Relative tolerance of fractional numbers other than log-probabilities."""

_OF_EMBEDDING = 0.01
"""Tolerance of the numbers in an embedding, as a fraction of its largest number."""

_OF_SCORE = 1e-9
"""Absolute tolerance of single numbers. Scores of a ranking may be very small, and their order must be detected."""

_RESULTS = "answers"  # the field of a response with decisions, which may be an object or a list
_DECISION = re.compile(rf"^\$\.({_RESULTS}|diagnostics)\b")
"""Matches JSON paths of probabilities in a decision, and of the numbers that are computed from them."""
_PROBABILITY = re.compile(r"\.(noul|probability|label_mass|probabilities(\.[^.]+)?)$")
_DECISION_TYPES = re.compile(
    rf"\$\(first\)\.({_RESULTS}|diagnostics)\b.*\.(choice: (string|boolean)"
    r"|(noul|score|confidence|label_mass|probability|probabilities\.[^.]+): integer -> number)"
)
"""Matches changed types in decisions that depend on the numbers: options may be strings or booleans, and servers in
JavaScript and Go write a probability of 1.0 as 1."""
_OF_PROBABILITY = 5e-5
"""Absolute tolerance of the probabilities in a decision, which some servers round to four decimal digits."""

_FRAMING_LINE = re.compile(r"[\s:,\[\]]*|((data|event|id|retry) ?:[ \w.-]*)?(\[DONE\])?\s*")
_COMMENT = re.compile(r"^:[^\r\n]*(\r\n|\n){1,2}", re.MULTILINE)
"""Matches a comment in an event stream, and the empty line after it."""
_NUMBERED = re.compile(r"^((?:id|retry) ?:.*?)[0-9]+", re.MULTILINE)
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
_MAX_SEEN = 20_000  # maximum characters of a shape, which grows with each response
_MAX_CHECKED = 64  # maximum texts of a response that are validated
_MAX_TYPES = 256  # maximum types of documents


class _Documents:
    """The JSON documents of a response, and data that several comparisons share.

    Raises:
        NotJson: the body contains no JSON.
    """

    def __init__(self, body: bytes) -> None:
        self.values, self.glue = read_documents(tensors.by_name(body))

    @cached_property
    def scalars(self) -> dict[str, list[Any]]:
        return scalars_by_path(self.values, by_index=len(self.values) > 1)

    @cached_property
    def places(self) -> Mapping[str, list[Any]]:
        return values_by_path(self.scalars, len(self.values))

    @cached_property
    def shapes(self) -> dict[str, Any]:
        """The shapes of the first document, the last document, and each type of document between them."""
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
    """The types and merged shapes of the reference responses to one kind of request."""

    def __init__(self) -> None:
        self.types: set[str] = set()
        self.shapes: dict[str, Any] = {}

    def add(self, documents: _Documents) -> None:
        if len(self.types) < _MAX_TYPES:
            self.types |= documents.types
        for part, part_shape in documents.shapes.items():
            seen_shape = self.shapes.get(part)
            if seen_shape is None:
                if len(self.shapes) < _MAX_TYPES:
                    self.shapes[part] = part_shape
            elif seen_shape != part_shape and len(repr(both := merged([seen_shape, part_shape]))) < _MAX_SEEN:
                self.shapes[part] = both


def findings(reference: Response, target: Response, traits: Traits, seen: Seen, near: float = NEAR) -> list[Finding]:
    """Return the differences that a client of the reference may notice in the target response.

    Args:
        seen: types and shapes from earlier responses to this kind of request.
        near: maximum difference between nearly equal log-probabilities.
    """
    if reference.lost or target.lost:
        side = "reference" if reference.lost else "target"
        return [Finding(Class.LOST, f"{side}: {reference.lost or target.lost}", learnable=False)]
    if reference.status != target.status:
        return [Finding(Class.STATUS, "status", change=f"{reference.status} -> {target.status}", learnable=False)]
    result = list(_content_type(reference.content_type, target.content_type))
    if reference.body == target.body:
        return result
    try:
        both = _Documents(reference.body), _Documents(target.body)
    except NotJson:
        return [*result, *_texts(reference.body, target.body, traits)]
    if reference.status >= 400:
        return [*result, *_errors(*both)]
    result += [*_glue(*both), *_event_names(*both, strict=traits.greedy)]
    texts = list(_generated(*both, near)) if traits.greedy else []
    seen.add(both[0])
    if texts or not traits.greedy:
        loose = (*_loose_shapes(both[1], seen), *_cuts(*both), *_schemas(*both, traits))
        if len(both[0].values) == 1 and not traits.streams:
            loose = (*_number(*both), *_items(*both, _REQUESTED), *loose)
        return [*result, *loose, *_unsampled(*both, near), *_places(*both, strict=False), *texts]
    if wrong := list(_number(*both)):
        result += wrong
    elif path := misplaced(both[0].spans, both[1].spans):
        result.append(Finding(Class.FRAMING, "order", _public(without_indexes(path))))
    strict = (*_strict_shapes(*both), *_places(*both, strict=True))
    return [*result, *strict, *_items(*both), *_values(*both, near)]


def _in_both(reference: Mapping[K, V], target: Mapping[K, V]) -> Iterator[tuple[K, V, V]]:
    """Yield the keys that both sides have, in order, with the values of both sides."""
    for key in sorted(reference.keys() & target.keys()):
        yield key, reference[key], target[key]


# -- framing ---------------------------------------------------------------------------------------------------------


def _content_type(reference: str, target: str) -> Iterator[Finding]:
    forms = {re.sub(r"\s+", "", value).lower() for value in (reference, target)}
    if len(forms) > 1 and "" not in forms:
        change = f"{media_text(reference)} -> {media_text(target)}"
        yield Finding(Class.FRAMING, "content type", change=change)


def media_text(value: str) -> str:
    """Return the value if it looks like a content type, otherwise a label."""
    return value if re.fullmatch(r"[\w/;=+. -]{1,80}", value) else "<other>"


def _texts(reference: bytes, target: bytes, traits: Traits) -> Iterator[Finding]:
    """Compare two bodies, at least one of which is not JSON."""
    bodies = (reference, target)
    kinds = [_is_json(body) for body in bodies]
    if kinds[0] != kinds[1]:
        names = ["JSON" if kind else "text" if body else "empty" for kind, body in zip(kinds, bodies, strict=True)]
        yield Finding(Class.SHAPE, "body", change=" -> ".join(names))
    else:
        cls = Class.TEXT if traits.greedy else Class.UNKNOWN
        content = _both(*(body.decode("utf-8", "replace") for body in bodies))
        yield Finding(cls, "body", content=content, learnable=False)


def _is_json(body: bytes) -> bool:
    try:
        read_documents(body)
    except NotJson:
        return False
    return True


def _glue(reference: _Documents, target: _Documents) -> Iterator[Finding]:
    """Compare the text before, between and after the documents."""
    glues = [_numberless(reference.glue), _numberless(target.glue)]
    for where, index in (("beginning", 0), ("end", -1)):
        if glues[0][index] != glues[1][index]:
            yield Finding(Class.FRAMING, where, change=" -> ".join(framing_text(glue[index]) for glue in glues))
    separators = [set(glue[1:-1]) for glue in glues]
    if all(separators):
        for pair in zip_longest(sorted(separators[0] - separators[1]), sorted(separators[1] - separators[0])):
            change = " -> ".join("absent" if text is None else framing_text(text) for text in pair)
            yield Finding(Class.FRAMING, "separator", change, change)


def _number(reference: _Documents, target: _Documents) -> Iterator[Finding]:
    """Compare the numbers of documents in the two responses."""
    if len(reference.values) != len(target.values):
        yield Finding(Class.FRAMING, "documents", change=f"{len(reference.values)} -> {len(target.values)}")


def _cuts(reference: _Documents, target: _Documents) -> Iterator[Finding]:
    """Compare whether each event in the two streams contains one token or several tokens."""
    if len(reference.values) < 2 or len(target.values) < 2:
        return
    cuts = [cut for side in (reference, target) if (cut := cut_of(side.scalars)) is not None]
    if len(cuts) == 2 and {cut.is_per_token for cut in cuts} == {True, False}:
        change = " -> ".join(f"{cut.events} events of {cut.tokens} tokens" for cut in cuts)
        yield Finding(Class.FRAMING, "events", change=change)


def _event_names(reference: _Documents, target: _Documents, *, strict: bool) -> Iterator[Finding]:
    """Compare the names of server-sent events.

    Args:
        strict: whether to require the same names in the same order. Otherwise, any name that the reference has is
            accepted.
    """
    names_by_type = (event_names(side.values, side.glue) for side in (reference, target))
    for root, *names in _in_both(*names_by_type):
        if names[0] != names[1] if strict else not set(names[1]) <= set(names[0]):
            change = next((pair for pair in zip_longest(*names) if pair[0] != pair[1]), ("", ""))
            texts = (public_name(name) if name else "none" for name in change)
            yield Finding(Class.FRAMING, "event name", _public(root), " -> ".join(texts))


def _numberless(glue: Sequence[str]) -> list[str]:
    """Return the texts around documents with 0 for the numbers of events, and without comments, such as keep-alives."""
    texts = (_COMMENT.sub("", text) if text.startswith(":") or "\n:" in text else text for text in glue)
    return [_NUMBERED.sub(r"\g<1>0", text) for text in texts]


def framing_text(text: str) -> str:
    """Return the text around documents if it is only framing, otherwise a label."""
    is_framing = len(text) <= 120 and all(map(_FRAMING_LINE.fullmatch, text.splitlines()))
    return json.dumps(text) if is_framing else f"<{len(text)} characters>"


# -- shape -----------------------------------------------------------------------------------------------------------


def _strict_shapes(reference: _Documents, target: _Documents) -> Iterator[Finding]:
    for root in sorted(reference.types ^ target.types):
        change = "present -> absent" if root in reference.types else "absent -> present"
        yield Finding(Class.SHAPE, "type", _public(root), change)
    yield from _shape_findings(reference.shapes, target.shapes)


def _loose_shapes(target: _Documents, seen: Seen) -> Iterator[Finding]:
    """Compare target shapes with the merged shapes of earlier responses, whose fields may depend on content."""
    for root in sorted(target.types - seen.types):
        yield Finding(Class.SHAPE, "type", _public(root), "absent -> present")
    yield from _shape_findings(seen.shapes, target.shapes, among_many=True)


def _shape_findings(
    reference: Mapping[str, Any], target: Mapping[str, Any], *, among_many: bool = False
) -> Iterator[Finding]:
    changes = {}
    for part, *shapes in _in_both(reference, target):
        for change in differences(shapes[0], shapes[1], part, among_many=among_many):
            if not _DECISION_TYPES.match(change):
                where, _, detail = change.partition(": ")
                changes[_public(where)] = detail
    for where, detail in sorted(changes.items()):
        yield Finding(Class.SHAPE, "field", where, detail)


@lru_cache(maxsize=4096)
def _public(path: str) -> str:
    return ".".join(name if re.fullmatch(r"[\w$()\[\]?-]{1,64}", name) else "<name>" for name in path.split("."))


# -- errors ----------------------------------------------------------------------------------------------------------


def _errors(reference: _Documents, target: _Documents) -> Iterator[Finding]:
    """Compare the shape and the codes of two errors, but not their messages."""
    for compare in (_glue, _number, _strict_shapes, _items):
        for finding in compare(reference, target):
            yield finding._replace(cls=Class.STATUS, kind=f"error's {finding.kind}")
    for path, *values in _in_both(reference.places, target.places):
        if values[0] != values[1] and not any(map(_is_prose, chain(*values))):
            where, content = without_indexes(path), _both(*values)
            kind = kind_of_fresh(where, [*chain(*values)])
            yield Finding(Class.STATUS, "error's value", where, content=content, timed=True, fresh=kind)


def _is_prose(value: Any) -> bool:
    return isinstance(value, str) and not _WORD.fullmatch(value)


# -- generated text ----------------------------------------------------------------------------------------------------


def _generated(reference: _Documents, target: _Documents, near: float) -> Iterator[Finding]:
    """Compare generated texts, and the arguments of tool calls."""
    texts = []
    for path, *values in _in_both(reference.places, target.places):
        name = name_of(path)
        if values[0] == values[1] or _ALTERNATIVES.search(path):
            continue
        if name in ARGUMENTS and not _equal(_parsed(values[0]), _parsed(values[1])):
            yield Finding(Class.TEXT, "tool calls", without_indexes(path), content=_both(*values), learnable=False)
        elif name in TEXTS and all(isinstance(value, str) for value in chain(*values)):
            texts.append(path)  # values of another type are compared by shape
    if texts:
        yield _text_finding(reference, target, min(texts, key=len), near)


def _text_finding(reference: _Documents, target: _Documents, path: str, near: float) -> Finding:
    parted = _parted(reference, target)
    change, content = "", _both(reference.places[path], target.places[path])
    if parted:
        first = min(parted, key=lambda part: len(part.same))
        change = f"first at token {len(first.same) + 1}"
        content += f"; {change}: {_token_text(first.reference)} -> {_token_text(first.target)}"
    cls = Class.TIE if parted and all(part.is_tie(near) for part in parted) else Class.TEXT
    return Finding(cls, "text", without_indexes(path), change, content, learnable=False)


def _parted(reference: _Documents, target: _Documents) -> list[Parted]:
    """Return the first difference in each choice whose texts differ."""
    tokens = _in_both(tokens_by_choice(reference.values), tokens_by_choice(target.values))
    return [part for _, *texts in tokens if (part := parted_at(*texts))]


def _token_text(token: Token | None) -> str:
    if token is None:
        return "the end"
    return json.dumps(token.text, ensure_ascii=False) + ("" if token.logprob is None else f" ({token.logprob:.3f})")


def _equal(reference: Any, target: Any) -> bool:
    """Return whether two JSON values are equal to a client of the reference.

    Objects may have any order of names. A fractional number may become an integer, because JavaScript and Go write
    whole numbers so. An integer may not become a fractional number, which typed clients refuse.
    """
    if isinstance(reference, float) and type(target) is int:
        return reference == target
    if type(reference) is not type(target):
        return False
    if isinstance(reference, dict):
        return reference.keys() == target.keys() and all(_equal(reference[name], target[name]) for name in reference)
    if isinstance(reference, list):
        return len(reference) == len(target) and all(map(_equal, reference, target))
    return bool(reference == target)


def _parsed(values: Sequence[Any]) -> list[Any]:
    result = []
    for value in values:
        try:
            result.append(json.loads(value) if isinstance(value, str) else value)
        except (ValueError, RecursionError):
            result.append(value)
    return result


# -- other values ----------------------------------------------------------------------------------------------------


def _values(reference: _Documents, target: _Documents, near: float) -> Iterator[Finding]:
    """Compare all values. In streams with equal numbers of documents, values except texts are compared one by one."""
    aligned = len(reference.values) == len(target.values)
    result: dict[tuple[str, str, str], Finding] = {}
    if aligned:  # a field that only one of several choices lost
        for path in sorted(reference.places.keys() ^ target.places.keys()):
            if (name := name_of(path)) not in TEXTS and name not in ARGUMENTS:
                change = "present -> absent" if path in reference.places else "absent -> present"
                finding = Finding(Class.TEXT, "value", _public(without_indexes(path)), change)
                result.setdefault(finding.key, finding)
    for path in sorted(reference.places.keys() & target.places.keys()):
        if (difference := _change(reference, target, path, near, aligned=aligned)) is not None:
            earlier = result.setdefault(difference.key, difference)
            if earlier.fresh is not difference.fresh:  # one of several choices has no id or time here
                result[difference.key] = earlier._replace(fresh=None)
    yield from result.values()


def _change(reference: _Documents, target: _Documents, path: str, near: float, *, aligned: bool) -> Finding | None:
    """Return the difference between the values at a path that both sides have, or None."""
    name = name_of(path)
    separately = aligned and name not in TEXTS and name not in ARGUMENTS
    values = [(side.scalars if separately else side.places)[path] for side in (reference, target)]
    if values[0] == values[1]:
        retyped = next((pair for pair in zip(*values, strict=True) if not _equal(*pair)), None)
        if retyped is None:
            return None
        return Finding(Class.SHAPE, "field", _public(without_indexes(path)), " -> ".join(map(shape, retyped)))  # 9, 9.0
    if name in ARGUMENTS and _equal(_parsed(values[0]), _parsed(values[1])):
        return None
    if name == "choice" and _DECISION.search(path):
        flips = _flips(reference.values, target.values)
        cls = Class.TIE if all(_is_near_flip(*flip, near) for flip in flips) else Class.TEXT
        return Finding(cls, name, _public(without_indexes(path)), content=_both(*values), learnable=False)
    return _value_finding(path, name, values[0], values[1], near)


def _items(reference: _Documents, target: _Documents, lists: re.Pattern[str] = _ANY) -> Iterator[Finding]:
    """Compare the lengths of lists whose JSON path matches the pattern."""
    if len(reference.values) != len(target.values):
        return
    for path, *counts in _in_both(num_items(reference.values), num_items(target.values)):
        if counts[0] != counts[1] and lists.search(path):
            yield Finding(Class.TEXT, "items", _public(path), f"{counts[0]} -> {counts[1]}")


def _unsampled(reference: _Documents, target: _Documents, near: float) -> Iterator[Finding]:
    """Compare values that do not depend on the generated text, such as the prompt tokens."""
    for path, *values in _in_both(reference.places, target.places):
        is_chosen = not _UNSAMPLED.search(without_indexes(path))
        distinct = [[], []] if is_chosen else [list(dict.fromkeys(side)) for side in values]
        if distinct[0] != distinct[1]:
            yield _value_finding(path, name_of(path), distinct[0], distinct[1], near)


def _places(reference: _Documents, target: _Documents, *, strict: bool) -> Iterator[Finding]:
    """Compare the indexes of choices, blocks and tool calls, and which of their IDs are equal.

    Args:
        strict: whether both responses have the same text. Otherwise, one of them may have more items.
    """
    numbers = [indexes(side.scalars) for side in (reference, target)]
    paths = numbers[0].keys() | numbers[1].keys() if strict else numbers[0].keys() & numbers[1].keys()
    for path in sorted(paths):
        pair = [side.get(path, []) for side in numbers]
        length = None if strict else min(map(len, pair))
        if pair[0][:length] != pair[1][:length]:
            yield Finding(Class.TEXT, "index", _public(path), content=_both(*pair))
    common = reference.places.keys() & target.places.keys()
    linked = (links(side.places, common, first=not strict) for side in (reference, target))
    differing = {without_indexes(path) for path, *ids in _in_both(*linked) if ids[0] != ids[1]}
    for path in sorted(differing):
        yield Finding(Class.TEXT, "links", _public(path))


def changing_ids(earlier: Response, later: Response, near: float) -> set[tuple[str, str, str]]:
    """Return the keys of findings about ids that differ between two successive responses of one side."""
    try:
        both = _Documents(earlier.body), _Documents(later.body)
    except NotJson:
        return set()
    changes = _values(*both, near) if later.status < 400 else _errors(*both)
    return {finding.key for finding in changes if finding.fresh is Fresh.ID}


def echoed_ids(request: Request, reference: Response) -> set[str]:
    """Return the JSON paths of ids and seeds that a response repeats from its request."""
    try:
        fields = scalars_by_path([tensors.read(request.body)[0]], by_index=False)
        scalars = _Documents(reference.body).scalars
    except (ValueError, AttributeError):
        return set()
    sent = {(name_of(path), repr(value)) for path, values in fields.items() for value in values}
    return {
        without_indexes(path)
        for path, values in scalars.items()
        if any((name_of(path), repr(value)) in sent for value in values)
    }


def is_compared(reference: Response, target: Response, traits: Traits, volatile: Iterable[str]) -> bool:
    """Return whether a comparison of two responses compared a value, a text, or their structure without the values.

    Args:
        volatile: the JSON paths of the volatile values, which were not compared.
    """
    try:
        paths = [{without_indexes(path) for path in _Documents(side.body).scalars} for side in (reference, target)]
    except NotJson:
        return True
    return not traits.greedy or reference.status >= 400 or bool((paths[0] & paths[1]) - set(volatile))


def _value_finding(path: str, name: str, reference: Sequence[Any], target: Sequence[Any], near: float) -> Finding:
    where, content = without_indexes(path), _both(reference, target)
    fresh = kind_of_fresh(where, [*reference, *target])
    if _are_near(where, reference, target, near):
        return Finding(Class.TIE, "number", where, "nearly equal", content, fresh=fresh)
    if _ALTERNATIVES.search(path) and not _numbers(reference):
        return Finding(Class.TIE, "alternatives", where, "", content)
    if name == "argmax_is_label" and _DECISION.search(where):  # the probabilities are compared on their own
        return Finding(Class.TIE, name, where, "", content, learnable=False)
    kind = "value"
    if name in _FINISH:
        kind = "finish reason"
    elif _USAGE.search(path):
        kind = "usage"
    elif _TOOLS.search(path):
        kind = "tool calls"
    is_result = where.endswith("[]") or any(isinstance(value, float) for value in (*reference, *target))
    learnable = fresh is not None or not is_result
    return Finding(Class.TEXT, kind, where, "", content, learnable, timed=True, fresh=fresh)


def _are_near(where: str, reference: Sequence[Any], target: Sequence[Any], near: float) -> bool:
    """Return whether two lists of fractional numbers are nearly equal. Integers must be equal."""
    numbers = [value for value in (*reference, *target) if value is not None]
    if len(reference) != len(target) or not _numbers(numbers):
        return False
    if all(isinstance(value, int) for value in numbers):
        return False
    if _DECISION.search(where):
        return _are_near_decisions(where, reference, target, near)
    name = name_of(where)
    relative, absolute = _RELATIVE, _OF_SCORE
    if name in LOGPROBS:
        relative, absolute = RELATIVE_LOGPROB, near
    elif where.endswith("[]"):
        absolute = _OF_EMBEDDING * max(map(abs, numbers))
    return all(is_near(*pair, relative, absolute) for pair in zip(reference, target, strict=True))


def _are_near_decisions(where: str, reference: Sequence[Any], target: Sequence[Any], near: float) -> bool:
    """Return whether probabilities differ by at most `near` nats, and other numbers of a decision by the same share."""
    part = -math.expm1(-near)
    absolute = _OF_PROBABILITY if _PROBABILITY.search(where) else part
    if where.endswith(".confidence"):
        absolute *= 2  # of two options, it changes by twice as much as their probabilities
    return all(is_near(*pair, part, absolute) for pair in zip(reference, target, strict=True))


def _flips(reference: Sequence[Any], target: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield the decisions on the same question that have different choices."""
    for pair in zip(_decisions(reference), _decisions(target), strict=False):
        if repr(pair[0].get("choice")) != repr(pair[1].get("choice")):
            yield pair


def _decisions(documents: Sequence[Any]) -> Iterator[Mapping[str, Any]]:
    for document in documents:
        results = document.get(_RESULTS) if isinstance(document, dict) else None
        if isinstance(results, dict):
            results = [results[name] for name in sorted(results)]
        if isinstance(results, list):
            yield from (decision for decision in results if isinstance(decision, dict))


def _is_near_flip(reference: Mapping[str, Any], target: Mapping[str, Any], near: float) -> bool:
    """Return whether each of two decisions chose its most likely option, and both have nearly the same probabilities
    of these two options.
    """
    chosen = [repr(side.get("choice")) for side in (reference, target)]
    options = [_options(side.get("probabilities")) for side in (reference, target)]
    if not all(set(chosen) <= side.keys() for side in options):
        return False
    if any(side[choice] < max(side.values()) for side, choice in zip(options, chosen, strict=True)):
        return False
    before, after = ([side[choice] for choice in chosen] for side in options)
    return _are_near_decisions(".probability", before, after, near)


def _options(probabilities: Any) -> dict[str, float]:
    """Return the probability of each option, by a text that tells the option `true` from `"true"`."""
    items: list[tuple[Any, Any]]
    if isinstance(probabilities, list):
        items = [(item.get("value"), item.get("probability")) for item in probabilities if isinstance(item, dict)]
    else:
        items = [*probabilities.items()] if isinstance(probabilities, dict) else []
    return {repr(name): number for name, number in items if is_number(number)}


def _numbers(values: Sequence[Any]) -> bool:
    return all(value is None or is_number(value) for value in values)


def _schemas(reference: _Documents, target: _Documents, traits: Traits) -> Iterator[Finding]:
    """Yield a finding if the reference text follows the requested schema, but the target text does not."""
    if not traits.json:
        return
    texts = (
        (path, *pair)
        for path, *values in _in_both(_responses(reference), _responses(target))
        for pair in zip(*values, strict=False)
    )
    for path, *pair in islice(texts, _MAX_CHECKED):
        if fits(pair[0], traits.schema) and not fits(pair[1], traits.schema):
            yield Finding(Class.TEXT, "schema", without_indexes(path), content=_both(*pair), learnable=False)


def _responses(documents: _Documents) -> dict[str, list[str]]:
    """Return the generated texts of a response, by JSON path."""
    return {
        path: [value for value in values if isinstance(value, str)]
        for path, values in documents.places.items()
        if name_of(path) in TEXTS
    }


def _both(reference: Any, target: Any) -> str:
    return f"{_short(reference)} -> {_short(target)}"


def _short(value: Any) -> str:
    text = json.dumps(value[0] if isinstance(value, list) and len(value) == 1 else value, ensure_ascii=False)
    return text if len(text) <= 200 else f"{text[:120]} … {text[-60:]}"
