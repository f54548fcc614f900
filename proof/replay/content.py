"""The content and the shape of a response.

Content is stored by JSON path, such as `$.choices[0].delta.content`, so that streams that are split differently compare
as equal. The texts of a stream are joined at each path. Other values are stored when they change. Items of a list in a
stream are identified by their own `index`.

A shape is also JSON. The shape of a scalar is the name of its type, or several names such as `null|string`. The shape
of an object is `{"a": …, "b?": …}`, where `b` is optional. The shape of a list is `[…]`, with one shape for all items:
`[]` is always empty, `[…, []]` is sometimes empty. A number is an `integer` if all its values are written without a
fraction or exponent, because typed clients, such as Go's and Rust's, refuse 9.0 for an integer.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from operator import itemgetter
from typing import Any, NamedTuple

import orjson

from handler.core.framing import is_too_deep

_DECODER = json.JSONDecoder()
_BEGIN = re.compile(r"(?!\[DONE\])[{\[]")
_BEGIN_BYTES = re.compile(rb"(?!\[DONE\])[{\[]")


class NotJson(ValueError):
    """The body contains no JSON object or list, or contains invalid JSON."""


class Documents(NamedTuple):
    """The JSON objects and lists in a body, and the texts before, between and after them (`glue`)."""

    values: list[Any]
    glue: list[str]


def read_documents(body: bytes) -> Documents:
    """Read the JSON documents of a body, without keep-alive events.

    Raises:
        NotJson: the body contains no JSON object or list.
    """
    try:
        documents = _by_lines(body)
    except ValueError:  # a document of several lines, NaN, or a number of more than 64 bits
        documents = _embedded(body)
    if not documents.values:
        raise NotJson("not a JSON object or list")
    return documents


def _by_lines(body: bytes) -> Documents:
    """Read at most one document per line, which is 20 times as fast as `_embedded`."""
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
    return _without_pings(Documents(values, [*glue, b"".join(text).decode()]))


def _bounded(value: Any, text: str | bytes) -> Any:
    """Return the value, or raise NotJson if it is nested too deeply for recursive functions."""
    if is_too_deep(value, text):
        raise NotJson("too deep")
    return value


def _embedded(body: bytes) -> Documents:
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
    return _without_pings(Documents(values, [*glue, text[at:]]))


def _without_pings(documents: Documents) -> Documents:
    """Drop Anthropic's keep-alive events, of which a stream may contain any number anywhere."""
    values, glue = documents
    pings = [at for at, value in enumerate(values) if isinstance(value, dict) and value.get("type") == "ping"]
    if len(values) - len(pings) < 1 or not pings:
        return documents
    left = {*pings}
    texts = [text for at, text in enumerate(glue) if at not in left]
    if 0 in left:
        texts[0] = texts[0].lstrip("\r\n")  # the end of the ping before
    return Documents([value for at, value in enumerate(values) if at not in left], texts)


# -- content, by JSON path ---------------------------------------------------------------------------------------------

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
"""Names of fields with generated text, which a stream sends in chunks."""
ARGUMENTS = frozenset(("arguments", "partial_json"))
"""Names of fields with JSON in a string, which a stream also sends in chunks."""
LOGPROBS = frozenset(
    ["logprob", "log_prob", "token_logprobs", "cumulative_logprob", "cumulative_log_prob", "top_logprobs"]
)
_COUNTS = frozenset(("completion_tokens", "output_tokens", "generated_tokens"))
"""Names of fields with the number of generated tokens."""
_FEW = 6  # a stream with fewer tokens does not show how streams are split
_INDEX = re.compile(r"\[[0-9]+\]")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
"""Matches the name of a field in an API. Other names are content, such as tokens in `top_logprobs` of a completion."""
_TYPE = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
"""Matches the type of an event or a message."""


def scalars_by_path(documents: Sequence[Any], *, by_index: bool) -> dict[str, list[Any]]:
    """Return the scalars of a response, in order, by JSON path.

    Args:
        by_index: whether to identify items by their own `index`, because a stream may send them in any order.
            Otherwise, the lists and objects in a list are identified by their positions, and empty ones are scalars.
    """
    scalars: dict[str, list[Any]] = {}
    for document in documents:
        _walk(document, root_of(document), scalars, by_index)
    return scalars


def values_by_path(scalars: Mapping[str, list[Any]], num_documents: int) -> Mapping[str, list[Any]]:
    """Return the values at each JSON path. Values of a stream are joined, so that its chunks may have any size."""
    if num_documents < 2:
        return scalars
    return {path: _joined(path, values) for path, values in scalars.items()}


@functools.lru_cache(maxsize=4096)
def name_of(path: str) -> str:
    """Return the field name at the end of a JSON path."""
    return _INDEX.sub("", path.rpartition(".")[2]).removesuffix("[]")


@functools.lru_cache(maxsize=4096)
def without_indexes(path: str) -> str:
    return _INDEX.sub("[]", path)


def root_of(document: Any) -> str:
    """Return the JSON path of a document, with the type and index of an event of Anthropic's or the Responses API."""
    if isinstance(document, dict) and isinstance(kind := document.get("type"), str):
        index = document.get("index", document.get("output_index"))
        kind = kind if _TYPE.fullmatch(kind) else "<name>"
        return f"$({kind})" + (f"[{index}]" if isinstance(index, int) else "")
    return "$"


def type_of(document: Any) -> str:
    """Return the JSON path of a document without its index, such as `$(content_block_delta)`."""
    return without_indexes(root_of(document)).removesuffix("[]")


def _walk(value: Any, path: str, scalars: dict[str, list[Any]], by_index: bool) -> None:
    """Add the scalars of a value. Names that may be content have one path, and are scalars too."""
    if isinstance(value, dict):
        if value.get("type") == "tool_use" and "input" in value:
            value = {**value, "input": orjson.dumps(value["input"], option=orjson.OPT_SORT_KEYS).decode()}
        parts = [
            (f"{path}.{public_name(name)}", _alternatives_of(name, part))
            for name, part in sorted(value.items(), key=itemgetter(0))
        ]
        parts += [(f"{path}.<names>", name) for name in sorted(value) if not _NAME.fullmatch(name)]
    elif by_index:
        parts = [(_item(part, path) if isinstance(part, dict) else f"{path}[]", part) for part in value]
    else:
        kinds = (dict, list)
        parts = [(f"{path}[{at if isinstance(part, kinds) else ''}]", part) for at, part in enumerate(value)]
    for where, part in parts:
        if not isinstance(part, (dict, list)):
            scalars.setdefault(where, []).append(part)
        elif part or by_index:
            _walk(part, where, scalars, by_index)
        else:
            scalars.setdefault(where, []).append(str(part))


def _alternatives_of(name: str, value: Any) -> Any:
    """Convert `top_logprobs` of a completion, where tokens are names, to the chat form. Pass other values through."""
    if name != "top_logprobs" or not isinstance(value, list):
        return value
    if not any(isinstance(part, dict) and "logprob" not in part for part in value):
        return value
    return [_alternatives_at(part) for part in value]


def _alternatives_at(part: Any) -> Any:
    """Convert the alternatives to one token of a completion. A null, as for the first token of a prompt, keeps its
    position among them.
    """
    if part is None:
        return [{"token": None, "logprob": None}]
    if isinstance(part, dict) and "logprob" not in part:
        return [{"token": token, "logprob": logprob} for token, logprob in part.items()]
    return part


def _item(part: dict[str, Any], of: str) -> str:
    index = part.get("index")
    return f"{of}[{index}]" if isinstance(index, int) else f"{of}[]"


@functools.lru_cache(maxsize=1024)
def public_name(name: str) -> str:
    """Return the name of an API field, or a label if the name may be content."""
    return name if _NAME.fullmatch(name) else "<name>"


def _joined(path: str, values: list[Any]) -> list[Any]:
    """Join the texts of a stream at a JSON path. Drop repetitions of other values, except of log-probabilities."""
    name = name_of(path)
    if name in TEXTS or name in ARGUMENTS:
        return ["".join(value for value in values if isinstance(value, str))]
    if name in LOGPROBS:
        return values
    return [value for at, value in enumerate(values) if at == 0 or value != values[at - 1]]


# -- events ----------------------------------------------------------------------------------------------------------


class Cut(NamedTuple):
    """The number of events with text in a stream, and the number of its tokens."""

    events: int
    tokens: int

    @property
    def is_per_token(self) -> bool | None:
        """Whether each token has its own event, or None if this is unclear (few tokens, or tokens without text)."""
        if self.tokens < _FEW:
            return None
        if self.events <= (self.tokens + 1) // 2:
            return False
        return True if self.events >= 0.8 * (self.tokens - 1) else None


def cut_of(scalars: Mapping[str, list[Any]]) -> Cut | None:
    """Return how the text of a stream is split, or None if the number of tokens is unknown or tools are called."""
    tokens = max(
        (count for path, values in scalars.items() if name_of(path) in _COUNTS for count in _counts(values)),
        default=0,
    )
    if not tokens or any(name_of(path) in ARGUMENTS for path in scalars):
        return None
    events: Counter[str] = Counter()
    for path, values in scalars.items():
        if name_of(path) in TEXTS:
            events[without_indexes(path)] += sum(_events(value) for value in values if isinstance(value, str))
    return Cut(max(events.values(), default=0), tokens)


def _events(text: str) -> int:
    """Return the number of events that may have produced a text. A multi-byte character may be several tokens."""
    return len(text.encode("utf-8", "replace")) - len(text) + 1 if text else 0


def _counts(values: list[Any]) -> Iterator[int]:
    return (value for value in values if isinstance(value, int) and not isinstance(value, bool))


# -- shape -------------------------------------------------------------------------------------------------------------

_ANY_OF = "any of"
_NAMES: Mapping[type, str] = {list: "list", dict: "object"}
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
_EMPTY: list[Any] = []


def frames(values: Sequence[Any]) -> dict[str, Sequence[Any]]:
    """Group the documents of a body by position ("first", "between" or "last"). Omit empty groups."""
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
    """Return the shape of `top_logprobs`, whose objects have tokens as names in a completion."""
    if isinstance(value, list) and any(isinstance(part, dict) and "logprob" not in part for part in value):
        return [merged([_of_token(part) for part in value])]
    return shape(value)


def _of_token(part: Any) -> Any:
    return {"TOKEN": merged([shape(logprob) for logprob in part.values()])} if isinstance(part, dict) else shape(part)


def merged(shapes: Sequence[Any]) -> Any:
    """Return the shape that covers all of `shapes`."""
    if len(shapes := _different(shapes)) == 1:  # most events of a stream have the same shape
        return shapes[0]
    shapes = [part for alternative in shapes for part in _alternatives(alternative)]
    objects = [part for part in shapes if isinstance(part, dict)]
    lists = [part for part in shapes if isinstance(part, list)]
    scalars = {name for part in shapes if isinstance(part, str) for name in part.split("|")}
    if "number" in scalars:  # JavaScript and Go write a whole number among fractions as an integer
        scalars.discard("integer")
    variants: list[Any] = ["|".join(sorted(scalars))] if scalars else []
    if lists:
        items = [part[0] for part in lists if part]
        variants.append([merged(items), *([_EMPTY] if any(len(part) != 1 for part in lists) else [])] if items else [])
    if objects:
        variants.append(_merged_objects(objects))
    return variants[0] if len(variants) == 1 else {_ANY_OF: variants}


def _alternatives(shape: Any) -> list[Any]:
    """Return the alternative shapes of a value: of its scalars, its lists and its objects."""
    return list(shape[_ANY_OF]) if isinstance(shape, dict) and _ANY_OF in shape else [shape]


def _different(shapes: Sequence[Any]) -> Sequence[Any]:
    """Return the shapes without repetitions. Objects with names in a different order count as different."""
    return list({repr(part): part for part in shapes}.values())


def _merged_objects(objects: Sequence[dict[str, Any]]) -> dict[str, Any]:
    always: Counter[str] = Counter()
    fields: dict[str, list[Any]] = {}
    for fields_of_object in objects:
        for key, part in fields_of_object.items():
            fields.setdefault(key.removesuffix("?"), []).append(part)
            always[key] += 1
    return {name if always[name] == len(objects) else f"{name}?": merged(parts) for name, parts in fields.items()}


def differences(reference: Any, target: Any, path: str = "$", *, among_many: bool = False) -> Iterator[str]:
    """Yield the differences in the shape of the target that a client of the reference may notice.

    The target may use fewer types for a value, and integers instead of fractional numbers. Optional fields may remain
    optional.

    Args:
        among_many: whether the shape of the reference covers many responses and that of the target only one. Optional
            fields may then be missing.
    """
    if reference == target:
        return
    alternatives = {type(part): part for part in _alternatives(reference)}
    for part in _alternatives(target):
        alternative = alternatives.get(type(part))
        if isinstance(alternative, dict):
            yield from _object_differences(alternative, part, path, among_many)
        elif isinstance(alternative, list):
            if alternative and part:
                yield from differences(alternative[0], part[0], f"{path}[]", among_many=among_many)
            elif len(alternative) == 1:
                yield f"{path}: list -> empty list"
            elif part and not among_many:
                yield f"{path}: empty list -> list"
        elif alternative is None or not set(part.split("|")) <= _covered(alternative):
            yield f"{path}: {_name(reference)} -> {_name(target)}"


def _covered(scalars: str) -> set[str]:
    """Return the types of values that a shape of scalars allows."""
    names = set(scalars.split("|"))
    return names | {"integer"} if "number" in names else names


def _object_differences(
    reference: dict[str, Any], target: dict[str, Any], path: str, among_many: bool
) -> Iterator[str]:
    here, there = ({name.removesuffix("?"): name for name in fields} for fields in (reference, target))
    for name, key in here.items():
        if name not in there:
            if not (among_many and key.endswith("?")):
                yield f"{path}.{name}: {_name(reference[key])} -> absent"
            continue
        if there[name].endswith("?") and not key.endswith("?"):
            yield f"{path}.{name}: always -> sometimes"
        yield from differences(reference[key], target[there[name]], f"{path}.{name}", among_many=among_many)
    for name, key in there.items():
        if name not in here:
            yield f"{path}.{name}: absent -> {_name(target[key])}"


def _name(shape: Any) -> str:
    names = (part if isinstance(part, str) else _NAMES[type(part)] for part in _alternatives(shape))
    return "|".join(names)


# -- validation of requested JSON --------------------------------------------------------------------------------------


_UNCHECKED = ("pattern", "patternProperties", "unevaluatedItems", "unevaluatedProperties", "uniqueItems")
"""Keywords that are not checked because they may take very long."""
_MAX_STEPS = 20_000
"""Maximum number of steps in a validation. Each keyword and each member that it reads is a step."""


def has_validator() -> bool:
    """Return whether jsonschema is installed, which validates texts against schemas."""
    return importlib.util.find_spec("jsonschema") is not None


def fits(text: str, schema: Mapping[str, Any] | None) -> bool:
    """Return whether a text is JSON and follows the schema.

    Without jsonschema, or if the schema is invalid or takes too many steps, any JSON is accepted.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    if schema is None or not has_validator():
        return True
    return bool(_validator(orjson.dumps(schema, option=orjson.OPT_SORT_KEYS))(value))


@functools.lru_cache(maxsize=256)
def _validator(schema: bytes) -> Any:
    import jsonschema
    import referencing

    steps = 0

    def counted(keyword: str, check: Any) -> Any:
        def spend(validator: Any, rule: Any, value: Any, schema: Any) -> Iterator[Any]:
            nonlocal steps
            steps += 1 + sum(len(item) for item in (rule, value) if isinstance(item, dict | list))
            if steps > _MAX_STEPS:
                raise OverflowError(f"more than {_MAX_STEPS} steps")
            if keyword not in _UNCHECKED and not (keyword == "additionalProperties" and "patternProperties" in schema):
                yield from check(validator, rule, value, schema) or ()

        return spend

    base = jsonschema.Draft202012Validator
    validator = jsonschema.validators.extend(
        base, {name: counted(name, check) for name, check in base.VALIDATORS.items()}
    )(orjson.loads(schema), registry=referencing.Registry())

    def fits(value: Any) -> bool:
        nonlocal steps
        steps = 0
        try:
            return bool(validator.is_valid(value))
        except Exception:  # an invalid schema: a broken reference or an unknown type, for example
            return True

    return fits


# -- generated tokens --------------------------------------------------------------------------------------------------


NEAR = 0.25
"""Maximum difference between nearly equal log-probabilities. Precisions and kernels change them by less than 0.1."""
RELATIVE_LOGPROB = 0.05
"""Maximum relative difference between nearly equal log-probabilities, for very improbable tokens."""


class Token(NamedTuple):
    """A generated token.

    Attributes:
        alternatives: the log-probabilities of the alternative tokens, by text.
    """

    text: str
    logprob: float | None
    alternatives: Mapping[str, float]


def tokens_by_choice(documents: list[Any]) -> dict[int, list[Token]]:
    """Return the generated tokens of each choice, or an empty dict if the response contains no tokens."""
    tokens: dict[int, list[Token]] = {}
    for document in documents:
        for number, response in enumerate(document if isinstance(document, list) else [document]):
            if isinstance(response, dict):
                for choice, token in _tokens(response):
                    tokens.setdefault(number + choice, []).append(token)
    return tokens


def _tokens(response: Mapping[str, Any]) -> Iterator[tuple[int, Token]]:
    if isinstance(token := response.get("token"), dict):  # a stream of LMI or TGI
        yield 0, _native(token, response.get("top_tokens"))
        return
    if isinstance(details := response.get("details"), dict):
        yield from ((0, token) for token in _of_details(details))
    for position, choice in enumerate(_items(response.get("choices"))):
        if not isinstance(choice, dict) or not isinstance(logprobs := choice.get("logprobs"), dict):
            continue
        index = choice.get("index")
        for token in _of_chat(logprobs) if "content" in logprobs else _of_completion(logprobs):
            yield index if isinstance(index, int) else position, token


def _native(token: Mapping[str, Any], top: Any) -> Token:
    return Token(str(token.get("text")), _logprob(token), _top_logprobs(top))


def _of_details(details: Mapping[str, Any]) -> Iterator[Token]:
    tokens, top = _items(details.get("tokens")), _items(details.get("top_tokens"))
    for token, alternatives in zip_longest(tokens, top[: len(tokens)]):
        if isinstance(token, dict):
            yield _native(token, alternatives)


def _of_chat(logprobs: Mapping[str, Any]) -> Iterator[Token]:
    for token in _items(logprobs["content"]):
        if isinstance(token, dict):
            yield Token(str(token.get("token")), _logprob(token), _top_logprobs(token.get("top_logprobs")))


def _of_completion(logprobs: Mapping[str, Any]) -> Iterator[Token]:
    texts, numbers, tops = (_items(logprobs.get(name)) for name in ("tokens", "token_logprobs", "top_logprobs"))
    for text, number, top in zip_longest(texts, numbers[: len(texts)], tops[: len(texts)]):
        alternatives = {name: value for name, value in top.items() if is_number(value)} if isinstance(top, dict) else {}
        yield Token(str(text), number if is_number(number) else None, alternatives)


def _logprob(token: Mapping[str, Any]) -> float | None:
    value = token.get("logprob", token.get("log_prob"))
    return value if is_number(value) else None


def _top_logprobs(top: Any) -> dict[str, float]:
    logprobs = {}
    for other in _items(top):
        if isinstance(other, dict) and (logprob := _logprob(other)) is not None:
            logprobs[str(other.get("text", other.get("token")))] = logprob
    return logprobs


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# -- ties -----------------------------------------------------------------------------------------------------------


class Parted(NamedTuple):
    """The first difference between two texts.

    Attributes:
        same: pairs of tokens before the difference.
        reference, target: the tokens that differ, or None at the end of a text.
    """

    same: Sequence[tuple[Token, Token]]
    reference: Token | None
    target: Token | None

    def is_tie(self, near: float) -> bool:
        """Return whether the difference is a near tie, and the earlier tokens have nearly equal log-probabilities."""
        if self.reference is None or self.target is None or not is_near_tie(self.reference, self.target, near):
            return False
        return all(is_near(reference.logprob, other.logprob, RELATIVE_LOGPROB, near) for reference, other in self.same)


def parted_at(reference: Sequence[Token], target: Sequence[Token]) -> Parted | None:
    """Return the first difference between two texts, or None if they are equal."""
    for at, pair in enumerate(zip_longest(reference, target)):
        if None in pair or pair[0].text != pair[1].text:
            return Parted(list(zip(reference[:at], target[:at], strict=True)), *pair)
    return None


def is_near_tie(reference: Token, target: Token, near: float) -> bool:
    """Return whether two models that differ only by rounding could choose either of the two tokens.

    If the alternatives of one side contain the token of the other side, its log-probability may be at most `near` less
    than that of the chosen token. Otherwise, both tokens must have nearly the same log-probability, and a probability
    of at most about 0.5.
    """
    if reference.logprob is None or target.logprob is None:
        return False
    gaps = []
    if target.text in reference.alternatives:
        gaps.append(reference.logprob - reference.alternatives[target.text])
    if reference.text in target.alternatives:
        gaps.append(target.logprob - target.alternatives[reference.text])
    if gaps:
        return all(gap <= near for gap in gaps)
    maximum = -math.log1p(math.exp(-near))
    return abs(reference.logprob - target.logprob) <= near and max(reference.logprob, target.logprob) <= maximum


def is_near(reference: float | None, target: float | None, relative: float, absolute: float) -> bool:
    """Return whether two numbers are nearly equal. None equals only None."""
    if reference is None or target is None:
        return reference is target
    return math.isclose(reference, target, rel_tol=relative, abs_tol=absolute)
