"""Converts schemas to EBNF and tests grammars with the installed xgrammar, and finds keywords that xgrammar ignores."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from handler.core.json_pointer import target_of
from handler.core.values import StructuredOutput
from handler.engines.huggingface.tokenizer import auto_tokenizer
from handler.engines.structured_output.abridged import MARKER
from handler.engines.structured_output.ebnf import acyclic, cycles
from handler.engines.structured_output.formats import FORMATS
from handler.engines.structured_output.keywords import (
    HEADS,
    LIMITING,
    NEVER,
    OF_TYPE,
    Types,
    implied_type,
    is_idle,
    mapped,
    names_in,
)
from handler.engines.structured_output.regex import is_written_unescaped, rewritten

Tag = Mapping[str, Any]

ENFORCES_LIMITS_SINCE = (0, 2)  # see `ignored`; measured with 0.2.8
_TAGS_SINCE = (0, 1, 25)  # older releases have structural tags of another form
_LOCATION = re.compile(r"^(\[[0-9:]+\] \S+: )?")
_FAILED = re.compile(r"Check failed: .*? is false: ?", re.DOTALL)


def ebnf(kind: str, text: str) -> str:
    """Convert a schema, regular expression, grammar or structural tag to xgrammar's EBNF.

    Args:
        kind: vLLM's name for the kind of text: JSON, JSON_OBJECT, REGEX, GRAMMAR or STRUCTURAL_TAG; or EBNF, for a
            GRAMMAR that is not Lark's.
        text: the schema, regular expression, grammar or structural tag.

    Raises:
        ValueError: xgrammar does not support the text.
    """
    from xgrammar import Grammar

    try:
        match kind:
            case "EBNF":
                return text
            case "GRAMMAR":
                return text if "::=" in text else _printed(Grammar.from_lark(text))
            case "REGEX":
                return _printed(Grammar.from_regex(text))
            case "STRUCTURAL_TAG" if release() < _TAGS_SINCE:
                raise ValueError(f"xgrammar {version('xgrammar')} does not support structural tags, which tools need")
            case "STRUCTURAL_TAG":
                tag = json.loads(text)
                return _printed(Grammar.from_structural_tag(tag))
        return _printed(Grammar.from_json_schema(text if kind == "JSON" else '{"type": "object"}'))
    except Exception as error:
        raise ValueError(error_message(error)) from None


_TWO_DIGITS = re.compile(r"\\\\|\\x([0-9a-f]{2})")


def _printed(grammar: Any) -> str:
    """Print a grammar so that xgrammar can read it again. Its own `\\x` has two digits, but it reads any number."""
    return _TWO_DIGITS.sub(lambda match: f"\\U000000{match[1]}" if match[1] else match[0], str(grammar))


def has_client_rules(kind: str, text: str) -> bool:
    """Return whether a text contains a client's rules, which may be costly, unlike xgrammar's rules for schemas."""
    return kind in ("REGEX", "GRAMMAR", "EBNF") or any(name in text for name in ('"pattern', '"grammar"', '"regex"'))


def error_message(error: Exception) -> str:
    """Return xgrammar's message without timestamp and source location, or a generic message if nothing remains."""
    text = _FAILED.sub("", _LOCATION.sub("", str(error).strip()))
    if "Check failed" in str(error) and not text.strip():
        return "xgrammar cannot compile the schema or grammar"
    return text


class XgrammarCheck:
    """A check that compiles a schema or grammar and computes the masks of the first tokens, as an engine would.

    Args:
        model: a directory with a tokenizer.
        trust_remote_code: whether to run Python code from this directory.
    """

    def __init__(self, model: Path, *, trust_remote_code: bool = False) -> None:
        import xgrammar

        tokenizer = auto_tokenizer().from_pretrained(str(model), trust_remote_code=trust_remote_code)
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer)
        self._xgrammar = xgrammar
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._walker = Walker(
            tokenizer.get_vocab(),
            info.vocab_size,
            xgrammar.allocate_token_bitmask(1, info.vocab_size),
            lambda matcher, mask: matcher.fill_next_token_bitmask(mask),
            lambda matcher, id: matcher.accept_token(id) and not matcher.is_terminated(),
        )

    def __call__(self, kind: str, text: str) -> None:
        """Check a schema, regular expression, grammar or structural tag.

        Args:
            kind: the kind of text, as in `ebnf`.
            text: the schema, regular expression, grammar or structural tag.

        Raises:
            ValueError: a rule is cyclic, xgrammar does not support the text, or a step takes too long.
        """
        written = ebnf(kind, text)
        rules = acyclic(written)
        self._walker.start(self._matchers(written))
        if has_client_rules(kind, text):
            for abridged in rules.abridged():
                self._walker.abridged(self._matchers(abridged))

    def _matchers(self, rules: str) -> Any:
        try:
            return partial(self._xgrammar.GrammarMatcher, self._compiler.compile_grammar(rules))
        except Exception as error:
            raise ValueError(error_message(error)) from None


# -- rewrite what the installed xgrammar would misread -----------------------------------------------------------------
# Measured with 0.1.34, 0.2.0, 0.2.3 and 0.2.9: xgrammar reads `\A` and `\Z` as letters, and all digits after `\x` as
# one number. In 0.2.3 it writes quotes and line breaks into JSON strings unescaped, and in 0.2.9 if a pattern
# names them. Some of its formats allow strings that are wrong (`formats.py`).

_REWRITTEN_SINCE = (0, 1, 31)  # older releases misread classes of characters beyond ASCII, however these are written
_PATTERNED = ("date", "date-time", "ipv4", "ipv6", "json-pointer", "relative-json-pointer")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "unevaluatedItems", "additionalProperties", "unevaluatedProperties", "propertyNames")


def release() -> tuple[int, ...]:
    """Return the version of the installed xgrammar."""
    return tuple(map(int, re.findall(r"[0-9]+", version("xgrammar"))[:3]))


@lru_cache(maxsize=256)
def for_xgrammar(structured_output: StructuredOutput) -> StructuredOutput:
    """Return the same structured output with expressions that the installed xgrammar reads as they are meant."""
    if release() < _REWRITTEN_SINCE:
        return structured_output
    return rewrite(structured_output)


def rewrite(structured_output: StructuredOutput) -> StructuredOutput:
    """Rewrite the expressions in a schema, regular expression or structural tag. Others are returned unchanged."""
    kind, text = structured_output.kind, structured_output.value
    match kind:
        case "regex":
            return structured_output._replace(value=_rewritten(text))
        case "json_schema" if '"pattern' in text or '"format"' in text:
            value = json.dumps(_rewritten_schema(json.loads(text)), ensure_ascii=False)
            return structured_output._replace(value=value)
        case "structural_tag":
            tag = json.loads(text)
            tag["format"] = with_parts(tag["format"], _rewritten_part)
            return structured_output._replace(value=json.dumps(tag, ensure_ascii=False))
    return structured_output


def _rewritten(expression: str, *, in_json: bool = False) -> str:
    """Return the expression unchanged if our parser does not support it: xgrammar may, or reports the error."""
    try:
        return rewritten(expression, in_json=in_json)
    except ValueError:
        return expression


def _rewritten_part(part: Tag) -> Tag:
    match part["type"]:
        case "regex":
            return {**part, "pattern": _rewritten(part["pattern"])}
        case "json_schema" if "style" not in part:
            return {**part, "json_schema": _rewritten_schema(part["json_schema"])}
    return part


def _rewritten_schema(schema: Any) -> Any:
    with contextlib.suppress(RecursionError):  # no engine accepts such a schema
        return mapped(schema, _rewritten_subschema)
    return schema


def _rewritten_subschema(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    result = dict(schema)
    if isinstance(pattern := schema.get("pattern"), str):
        result["pattern"] = _rewritten(pattern, in_json=True)
    elif "pattern" not in schema and schema.get("type") == "string" and schema.get("format") in _PATTERNED:
        result["pattern"] = _rewritten(FORMATS[result.pop("format")], in_json=True)
    if isinstance(patterns := schema.get("patternProperties"), dict):
        result["patternProperties"] = {_rewritten(key, in_json=True): below for key, below in patterns.items()}
    return result


# -- the parts of structural tags (xgrammar's documentation) -----------------------------------------------------------


def with_parts(tag: Tag, replace: Callable[[Tag], Tag]) -> Tag:
    """Return the format of a structural tag, with `replace` applied to each part that has no parts of its own."""
    parts: dict[str, Any] = {
        name: [with_parts(part, replace) for part in tag[name]] for name in ("elements", "tags") if name in tag
    }
    if "content" in tag:
        parts["content"] = with_parts(tag["content"], replace)
    return {**tag, **parts} if parts else replace(tag)


def with_schemas(tag: Tag, replace: Callable[[Tag], Tag]) -> Tag:
    """Return the format of a structural tag, with `replace` applied to each part that is a JSON schema."""
    return with_parts(tag, lambda part: replace(part) if part["type"] == "json_schema" else part)


def contents(structured_output: StructuredOutput) -> Iterator[StructuredOutput]:
    """Yield each schema, regular expression and grammar in a structural tag as a separate structured output."""
    waiting = [json.loads(structured_output.value)["format"]]
    while waiting:
        tag = waiting.pop()
        match tag["type"]:
            case "json_schema" | "qwen_xml_parameter":
                yield StructuredOutput("json_schema", json.dumps(tag["json_schema"], ensure_ascii=False))
            case "regex":
                yield StructuredOutput("regex", tag["pattern"])
            case "grammar":
                yield StructuredOutput("grammar", tag["grammar"])
        waiting += [part for name in ("elements", "tags") for part in tag.get(name, ())]
        waiting += [tag["content"]] if "content" in tag else []


def without_text(structured_output: StructuredOutput) -> StructuredOutput:
    """Return the structured output without any free text that it allows at the beginning."""
    if not structured_output.allows_text:
        return structured_output
    tag = json.loads(structured_output.value)
    tag["format"]["at_least_one"] = True
    return StructuredOutput(structured_output.kind, json.dumps(tag, ensure_ascii=False))


# -- walk through possible responses, and refuse a grammar whose steps take too long -----------------------------------
# In each step a matcher computes the allowed tokens, while all requests of the engine wait. Some grammars need most of
# their time only then. So a check draws tokens as a model might, and measures CPU time.

STEP_SECONDS = 0.01
"""Limit on a step's average CPU time, in seconds. A single step may take eight times as much. In measurements, a
step of an ordinary grammar took up to 0.0003 s, with one exception of 0.01 s. A step of an ambiguous grammar takes
seconds after ten or twenty tokens."""

LATE_SECONDS = 0.05
"""Limit on the predicted CPU time, in seconds, of a step late in a long response."""

_WINDOW = 8  # steps over which times are averaged
_STEPS = 64  # steps with many allowed tokens in a walk, unless they become slower and slower
_MAX_STEPS = 200  # steps with many allowed tokens in any walk
_FORCED_STEPS = 512  # steps with few allowed tokens in any walk; they cost little, as in a literal
_FEW = 64
_WALK_SECONDS = 0.5
_ANSWER = 2000  # number of the token in a long response for which the duration of a step is predicted
_ABRIDGED = 3  # factor of the limits for an abridged grammar, which is more ambiguous than its original
_SHARES = (0.5, 0.9)  # fractions of steps that choose the marker if it is allowed, one for each walk


class Pace:
    """The CPU times of the steps of a walk.

    Args:
        limit: limit on a step's average CPU time, in seconds.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._seconds: list[float] = []

    def __len__(self) -> int:
        return len(self._seconds)

    def add(self, seconds: float) -> None:
        self._seconds.append(seconds)

    @property
    def is_slow(self) -> bool:
        """Whether the last steps took too long."""
        return sum(self._seconds[-_WINDOW:]) > _WINDOW * self._limit

    @property
    def gets_slow(self) -> bool:
        """Whether a step late in a long response is predicted to take too long."""
        return forecast(self._seconds, _ANSWER) > LATE_SECONDS

    def check(self, *, to_end: bool) -> None:
        """Raise ValueError if the steps are too slow.

        Args:
            to_end: whether the walk has reached its maximum number of steps. The prediction is checked only in this
                case.
        """
        if self.is_slow:
            raise ValueError(f"each token takes the engine more than {self._limit:g} s")
        if to_end and self.gets_slow:
            raise ValueError(
                f"after {_ANSWER} tokens, each further token takes the engine more than {LATE_SECONDS:g} s"
            )


class Walker:
    """Walks through possible responses, and measures the CPU time of each step.

    Args:
        vocabulary: maps each token's text to its id.
        size: number of ids in a mask.
        mask: a torch tensor with a single row that has a bit for each id.
        fill: function that sets the mask to the tokens that a matcher currently allows.
        accept: function that advances a matcher by a token, and returns False if the response ends.
    """

    def __init__(
        self,
        vocabulary: Mapping[str, int],
        size: int,
        mask: Any,
        fill: Callable[[Any, Any], object],
        accept: Callable[[Any, int], bool],
    ) -> None:
        import numpy as np

        self._mask, self._fill, self._accept = mask, fill, accept
        self._lengths = np.zeros(size, np.int32)
        for token, id in vocabulary.items():
            if id < size:
                self._lengths[id] = len(token)
        self._marker = vocabulary.get(MARKER)

    def start(self, make: Callable[[], Any]) -> None:
        """Walk through the first tokens of two responses, one with random tokens and one with the longest tokens.

        Args:
            make: function that returns a matcher in its initial state.

        Raises:
            ValueError: the steps take too long.
        """
        for longest in (False, True):
            self._walk(make(), longest=longest)

    def abridged(self, make: Callable[[], Any]) -> None:
        """Walk through responses that an abridged grammar allows, and skip many of its long parts. See `start`."""
        for share in _SHARES:
            self._walk(make(), marker_share=share, steps=_MAX_STEPS)

    def _walk(self, matcher: Any, *, longest: bool = False, marker_share: float = 0.0, steps: int = _STEPS) -> None:
        """Compute the masks of a response's first tokens, and measure the time.

        Args:
            longest: whether to choose the longest of many allowed tokens instead of a random token.
            marker_share: fraction of the steps in which the marker is chosen if it is allowed.
            steps: number of steps with many allowed tokens. More steps follow if they are getting slower.
        """
        import numpy as np

        draw, pace = np.random.default_rng(0), Pace(STEP_SECONDS * (_ABRIDGED if marker_share else 1))
        began, free, forced = time.process_time(), 0, 0
        while free < _MAX_STEPS and forced < _FORCED_STEPS and time.process_time() - began < _WALK_SECONDS:
            before = time.process_time()
            self._fill(matcher, self._mask)
            spent = time.process_time() - before
            bits = np.unpackbits(self._mask[0].numpy().view(np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits[: len(self._lengths)])
            if not len(allowed) or (free == steps and not pace.gets_slow):
                return
            few = len(allowed) <= _FEW
            forced, free = forced + few, free + (not few)
            if self._marker is not None and marker_share and bits[self._marker] and draw.random() < marker_share:
                id = self._marker
            elif few or longest:
                id = allowed[self._lengths[allowed].argmax()]
            else:
                id = draw.choice(allowed)
            before = time.process_time()
            goes_on = self._accept(matcher, int(id))
            pace.add(spent + time.process_time() - before)
            pace.check(to_end=False)
            if not goes_on:
                return
        pace.check(to_end=free == _MAX_STEPS)


def forecast(seconds: Sequence[float], number: int) -> float:
    """Predict the duration of step `number` from a line through the medians of the second and last quarters."""
    quarter = len(seconds) // 4
    early, late = median(seconds[quarter : 2 * quarter]), median(seconds[-quarter:])
    return late + (late - early) / (2 * quarter) * (number - len(seconds))


# -- find keywords of a JSON schema that xgrammar silently ignores, so that the schema can be refused ------------------
# xgrammar converts a subschema by its first keyword of `$ref`, `const`, `enum`, `anyOf`, `oneOf` and `allOf`, and
# ignores all other keywords. Without any of these it uses `type`, and ignores some combinations of a type's keywords.
# The rules here are measured (`tests/unit/engines/schema_cases.py`). Unknown keywords and annotations are accepted, as
# JSON Schema requires, and `oneOf` is accepted although its branches may overlap. A grammar may allow less than the
# schema, for example no unnamed properties. docs/decisions.md explains why these rules exist.


_ADDITIONAL = ("additionalProperties", "unevaluatedProperties")

_FORMATS = frozenset((
    "date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uri-reference",
    "uri-template", "uuid", "json-pointer", "relative-json-pointer",
))  # fmt: skip

_MAX_PATH = 150  # characters


class _Subschema(NamedTuple):
    schema: Any
    path: tuple[str, ...] = ()
    default: str | None = None  # type if the subschema does not state one
    rebased: bool = False  # whether its references refer to another document


def ignored(schema: Any, recent: bool) -> str | None:
    """Return the path of the first keyword in a decoded schema that xgrammar ignores, or None if there is none.

    Args:
        recent: whether xgrammar enforces `minimum` and `maximum`, and distinguishes named properties from all others.
    """
    types = Types(schema)
    return _first_keyword(schema, lambda subschema: _ignored(subschema, types, recent))


def ignored_keyword(structured_output: StructuredOutput) -> str | None:
    """Return the path of the first keyword that the installed xgrammar ignores in any schema of a structured output."""
    match structured_output.kind:
        case "json_schema":
            schemas = [json.loads(structured_output.value)]
        case "structural_tag":
            schemas = [json.loads(part.value) for part in contents(structured_output) if part.kind == "json_schema"]
        case _:
            schemas = []
    recent = release() >= ENFORCES_LIMITS_SINCE
    return next((keyword for schema in schemas if (keyword := ignored(schema, recent))), None)


def unescaped_pattern(schema: Any) -> str | None:
    """Return the path of the first pattern with which xgrammar may write an invalid JSON string, or None.

    Such a pattern allows a quote, a backslash or a control character, which xgrammar does not escape.
    """

    def find(subschema: _Subschema) -> str | None:
        patterns = {"pattern": [subschema.schema.get("pattern")], "patternProperties": []}
        if isinstance(properties := subschema.schema.get("patternProperties"), dict):
            patterns["patternProperties"] = list(properties)
        names = (name for name, expressions in patterns.items() if any(map(_is_written_unescaped, expressions)))
        name = next(names, None)
        return name and f"{name} that allows a quote, a backslash or a control character"

    return _first_keyword(schema, find)


def _is_written_unescaped(pattern: Any) -> bool:
    if not isinstance(pattern, str):
        return False
    try:
        return is_written_unescaped(pattern)
    except ValueError:
        return False  # xgrammar refuses the pattern, or supports more than our own parser


def _first_keyword(schema: Any, find: Callable[[_Subschema], str | None]) -> str | None:
    """Return the path of the first keyword that `find` returns for one of a schema's subschemas, or None."""
    places, seen = [_Subschema(schema)], set[int]()
    while places:
        subschema = places.pop()
        if not isinstance(subschema.schema, dict) or id(subschema.schema) in seen:
            continue
        seen.add(id(subschema.schema))
        keyword = find(subschema)
        if keyword is not None:
            path = ".".join((*subschema.path, keyword))
            return path if len(path) <= _MAX_PATH else f"...{path[-_MAX_PATH:]}"
        places += reversed(list(_below(subschema, schema)))
    return None


def cyclic_reference(schema: Any) -> str | None:
    """Return a reference that leads back to itself only through references, or None if there is none."""
    edges: dict[str, set[str]] = {}
    waiting = ["#"]
    while waiting:
        reference = waiting.pop()
        if reference not in edges:
            edges[reference] = set(_alone(target_of(reference, schema)))
            waiting += edges[reference]
    cycle = next(cycles(edges), ())
    return min(cycle) if cycle else None


def _alone(schema: Any) -> Iterator[str]:
    """Yield the references that can be the only constraint on a value: the schema itself, or branches of it."""
    waiting = [schema]
    while waiting:
        match waiting.pop():
            case {"$ref": str(reference)}:
                yield reference
            case {"anyOf": list(branches)} | {"oneOf": list(branches)} | {"allOf": list(branches)}:
                waiting += branches


def _below(subschema: _Subschema, root: Any) -> Iterator[_Subschema]:
    """Yield the subschemas that xgrammar reads."""
    schema, path = subschema.schema, subschema.path
    rebased = subschema.rebased or bool(path and "$id" in schema)
    if isinstance(reference := schema.get("$ref"), str):
        yield _Subschema(target_of(reference, root), tuple(reference.split("/")[1:]))
    for name in ("properties", "patternProperties"):
        if isinstance(schema.get(name), dict):
            yield from (_Subschema(below, (*path, name, key), None, rebased) for key, below in schema[name].items())
    for name in _LISTS:
        if isinstance(schema.get(name), list):
            yield from (_Subschema(below, (*path, name, str(n)), None, rebased) for n, below in enumerate(schema[name]))
    for name in _SINGLE:
        yield _Subschema(schema.get(name), (*path, name), "string" if name == "propertyNames" else None, rebased)


def _ignored(subschema: _Subschema, lookup: Types, recent: bool) -> str | None:
    """Return a keyword in this subschema that xgrammar ignores, with the reason, or None if there is none."""
    schema = {name: value for name, value in subschema.schema.items() if name in LIMITING and not is_idle(name, value)}
    for name in NEVER:
        if name in schema:
            return name
    for head in HEADS:
        if head in schema:
            return _ignored_beside(head, schema, lookup) or _ignored_of(head, schema[head], subschema)
    types = schema.pop("type", subschema.default or implied_type(schema))
    if types is None:
        return next((f"{name} without type" for name in schema), None)
    if types == []:
        return "type"
    for kind in names_in(types):
        keywords = {name: value for name, value in schema.items() if name in OF_TYPE.get(kind, ())}
        keyword = _IGNORED[kind](keywords, recent) if keywords else None
        if keyword is not None:
            return keyword
    return None


# -- keywords beside a leading one -----------------------------------------------------------------------------------


def _ignored_beside(head: str, schema: Mapping[str, Any], lookup: Types) -> str | None:
    for name in schema:
        if name != head and not (name == "type" and lookup.are(schema[head], head, schema["type"])):
            return f"{name} beside {head}"
    return None


def _ignored_of(head: str, value: Any, subschema: _Subschema) -> str | None:
    if head == "$ref":
        rebased = subschema.rebased or (subschema.path and "$id" in subschema.schema)
        return None if _is_plain(value) and not rebased else "$ref"
    if isinstance(value, list) and (not value or (head == "allOf" and len(value) > 1)):
        return head
    return None


def _is_plain(reference: Any) -> bool:
    """Return whether xgrammar can resolve a reference. It cannot unescape names or read other documents."""
    if not isinstance(reference, str) or any(character in reference for character in "~%"):
        return False
    start, *names = reference.split("/")
    return start == "#" and all(names)


# -- keywords of a type -----------------------------------------------------------------------------------------------


def _ignored_of_string(schema: Mapping[str, Any], _: bool) -> str | None:
    """Return an ignored keyword or None. Of a known format, a pattern and lengths, xgrammar enforces only the first."""
    if isinstance(schema.get("format"), str) and schema["format"] not in _FORMATS:
        return "format"
    first = next((name for name in ("format", "pattern") if name in schema), None)
    return next((f"{name} beside {first}" for name in schema if first and name != first), None)


def _ignored_of_number(schema: Mapping[str, Any], recent: bool) -> str | None:
    return next((name for name in schema if name == "multipleOf" or not recent), None)


def _ignored_of_array(schema: Mapping[str, Any], _: bool) -> str | None:
    return next((name for name in ("uniqueItems", "contains") if name in schema), None)


def _ignored_of_object(schema: Mapping[str, Any], recent: bool) -> str | None:
    for name in ("dependentRequired", "dependentSchemas", "dependencies"):
        if name in schema:
            return name
    declared, required = schema.get("properties", {}), schema.get("required", [])
    both = isinstance(declared, dict) and isinstance(required, list)
    if both and any(name not in declared for name in names_in(required)):
        return "required with names that are not in properties"
    return _ignored_of_patterns(schema) or _ignored_of_names(schema, recent) or _ignored_of_additional(schema, recent)


def _ignored_of_patterns(schema: Mapping[str, Any]) -> str | None:
    """Return a conflict or None. If several subschemas may apply to a property, xgrammar enforces only one of them."""
    if "patternProperties" not in schema:
        return None
    if schema.get("properties"):
        return "patternProperties beside properties"
    several = isinstance(schema["patternProperties"], dict) and len(schema["patternProperties"]) > 1
    return "patternProperties with several patterns" if several else None


def _ignored_of_names(schema: Mapping[str, Any], recent: bool) -> str | None:
    if "propertyNames" not in schema:
        return None
    for name in ("properties", "patternProperties"):
        if schema.get(name):
            return f"propertyNames beside {name}"
    additional = next((name for name in _ADDITIONAL if name in schema), None)
    if additional and (schema[additional] is False or not (recent or schema[additional] in (True, {}))):
        return f"{additional} beside propertyNames"
    return None


def _ignored_of_additional(schema: Mapping[str, Any], recent: bool) -> str | None:
    additional = next((name for name in _ADDITIONAL if name in schema), None)
    is_open = additional is not None and schema[additional] is not False
    if is_open and schema.get("properties") and not recent:
        return f"{additional} beside properties"
    if is_open or "patternProperties" in schema or "propertyNames" in schema:
        least = schema.get("minProperties", 0)
        if isinstance(least, int) and least > 1:  # xgrammar counts a repeated name twice
            return "minProperties with names that are not fixed"
    return None


_IGNORED: Mapping[str, Callable[[Mapping[str, Any], bool], str | None]] = {
    "string": _ignored_of_string,
    "number": _ignored_of_number,
    "integer": _ignored_of_number,
    "array": _ignored_of_array,
    "object": _ignored_of_object,
}
