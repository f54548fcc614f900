"""The content parsers and transforms of a response template, which convert text to values and tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from handler.core.framing import refuse_constant
from handler.protocols.assistant.events import pieces
from handler.protocols.assistant.response_template.pattern import Attempt, Pattern, may_try

_DEEPEST = 8  # nested value parsers, and nested lists and objects in a transform

Arguments = Mapping[str, Any]


class ContentParser:
    """Reads the text of one region, which arrives in pieces.

    Args:
        parse: parses the complete text.
    """

    def __init__(self, parse: Callable[[str], Any]) -> None:
        self._parse = parse
        self._pieces: list[str] = []

    def feed(self, text: str) -> None:
        self._pieces.append(text)

    @property
    def text(self) -> str:
        self._pieces = ["".join(self._pieces)]
        return self._pieces[0]

    def value(self) -> Any:
        """Return the value of the complete text.

        Raises:
            ValueError, RecursionError: the text does not have the expected format, or is nested too deeply.
        """
        return self._parse(self.text)


class TagsParser(ContentParser):
    """Reads the tags in a text into an object. The tags are parsed as the text arrives, rather than at its end.

    Args:
        parse: parses the value of one tag.
    """

    def __init__(self, pattern: Pattern, parse: Callable[[str], Any], *, merges: bool) -> None:
        super().__init__(parse)
        self._pattern = pattern
        self._firsts = re.compile("|".join(pattern.firsts), re.DOTALL)
        self._merges = merges
        self._attempt: Attempt | None = None
        self._held: list[str] = []  # the text since the start of the attempt
        self._size = 0  # characters read before `_held`
        self._before = ""
        self._in_vain = 0
        self._found: dict[str, Any] = {}
        self._failure: Exception | None = None

    def feed(self, text: str) -> None:
        super().feed(text)
        self._read(text, final=False)

    def value(self) -> dict[str, Any]:
        self._read("", final=True)
        if self._failure is not None:
            raise self._failure
        return self._found

    def _read(self, text: str, *, final: bool) -> None:
        while text or final:
            if self._attempt is None:
                if not may_try(self._in_vain, self._size):
                    return
                first = self._firsts.search(text)
                start = len(text) if first is None else first.start()
                self._pass(text[:start])
                text = text[start:]
                if not text:
                    return
                self._attempt = Attempt(self._pattern, self._before)
            self._attempt.feed(text, final=final)
            self._held.append(text)
            if self._attempt.is_open:
                return
            text = self._end(self._attempt)

    def _end(self, attempt: Attempt) -> str:
        """Store the tag that an attempt has matched, and return the text after it."""
        held = "".join(self._held)
        self._attempt, self._held = None, []
        match = attempt.match(held)
        if match is None or not match.size:
            self._in_vain += attempt.work
            self._pass(held[:1])
            return held[1:]
        self._pass(held[: match.size])
        try:
            self._add(match.groups.get("key"), self._parse(match.groups.get("value", "")))
        except (ValueError, RecursionError) as error:
            self._failure = error
        return held[match.size :]

    def _add(self, key: str | None, value: Any) -> None:
        if key is None:
            raise ValueError("a tag without a key")
        if self._merges and key in self._found:
            before = self._found[key]
            if not isinstance(before, list):
                before = self._found[key] = [before]
            before.append(value)
        else:
            self._found[key] = value

    def _pass(self, text: str) -> None:
        if text:
            self._before = text[-1]
            self._size += len(text)


# -- the parsers by name -----------------------------------------------------------------------------------------------

MakeContent = Callable[[], ContentParser]


def content_parser(name: Any, arguments: Any, depth: int = 0) -> MakeContent:
    """Return a function that creates a parser for the text of one region.

    Raises:
        ValueError: the name or an argument is invalid.
    """
    if not isinstance(name, str) or name not in _PARSERS:
        raise ValueError(f"content: {name!r} is not one of {', '.join(_PARSERS)}")
    if not isinstance(arguments, dict):
        raise ValueError("content_args: must be an object")
    if depth > _DEEPEST:
        raise ValueError(f"value_parser: at most {_DEEPEST} value parsers may be nested")
    names, make = _PARSERS[name]
    for key, value in arguments.items():
        if key not in names:
            raise ValueError(f"content_args.{key}: is unknown; the arguments of {name} are {', '.join(names)}")
        if not names[key](value):
            raise ValueError(f"content_args.{key}: has an invalid value for {name}")
    return make(arguments, depth)


def parse_text(arguments: Arguments, text: str) -> str:
    return text.strip() if arguments.get("strip", True) else text


def _plain(parse: Callable[[Arguments, str], Any]) -> Callable[[Arguments, int], MakeContent]:
    def make(arguments: Arguments, depth: int) -> MakeContent:
        return lambda: ContentParser(lambda text: parse(arguments, text))

    return make


_KEY = re.compile(r"([{,]\s*)(\w+)(?=\s*:)")


def _parse_json(arguments: Arguments, text: str) -> Any:
    """Parse JSON whose strings may have the model's own delimiters, and whose keys may be unquoted."""
    delimiters = [(open, close) for open, close in arguments.get("string_delims", [])]
    unquoted = arguments.get("unquoted_keys", False)
    working = text
    if delimiters or unquoted:
        parts = [
            json.dumps(part) if is_string else _KEY.sub(r'\1"\2"', part) if unquoted else part
            for part, is_string in _strings(text, delimiters)
        ]
        working = "".join(parts)
    try:
        return json.loads(working, strict=False, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        if arguments.get("allow_non_json"):
            return parse_text(arguments, text)
        raise


_QUOTED = r'"(?:[^"\\]|\\.)*"?'


def _strings(text: str, delimiters: list[tuple[str, str]]) -> Iterator[tuple[str, bool]]:
    """Yield the parts of a text, each with a flag that is true for a string between delimiters.

    The delimiters are dropped. A string in JSON quotes is a separate part, so that it is not searched for keys.
    """
    closes, at, start = dict(delimiters), 0, 0
    opens = re.compile("|".join([*map(re.escape, closes), _QUOTED]), re.DOTALL)
    while (match := opens.search(text, at)) is not None:
        at, close = match.end(), closes.get(match[0])
        if close is None:
            if text[start : match.start()]:
                yield text[start : match.start()], False
            yield match[0], False
            start = at
        elif (end := text.find(close, at)) >= 0:
            yield text[start : match.start()], False
            yield text[at:end], True
            start = at = end + len(close)
        else:
            break  # the string never ends: the rest is yielded unchanged
    yield text[start:], False


def _value_parser(arguments: Arguments, depth: int) -> Callable[[str], Any]:
    options = arguments.get("value_parser")
    if options is None:
        return lambda text: text
    try:
        make = content_parser(options.get("name", "text"), options.get("args", {}), depth + 1)
    except ValueError as error:
        raise ValueError(f"content_args.value_parser: {error}") from None

    def parse(text: str) -> Any:
        content = make()
        for piece in pieces(text):  # the work for a piece may grow with the square of its length
            content.feed(piece)
        return content.value()

    return parse


def _make_tags(arguments: Arguments, depth: int) -> MakeContent:
    if (text := arguments.get("tag_pattern")) is None:
        raise ValueError("content_args.tag_pattern: is required by xml-inline")
    try:
        pattern = Pattern(text)
    except ValueError as error:
        raise ValueError(f"content_args.tag_pattern: {text[:200]!r} {error}") from None
    if "key" not in pattern.groups:
        raise ValueError("content_args.tag_pattern: has no group 'key'")
    parse, merges = _value_parser(arguments, depth), arguments.get("merge_duplicates", False)
    return lambda: TagsParser(pattern, parse, merges=merges)


def _make_lines(arguments: Arguments, depth: int) -> MakeContent:
    line_end, separator = arguments.get("line_sep", "\n"), arguments.get("kv_sep", ":")
    parse = _value_parser(arguments, depth)

    def parse_lines(text: str) -> dict[str, Any]:
        values = {}
        for line in text.split(line_end):
            key, between, value = parse_text(arguments, line).partition(separator)
            if between:
                values[parse_text(arguments, key)] = parse(parse_text(arguments, value))
        return values

    return lambda: ContentParser(parse_lines)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_pairs(value: Any) -> bool:
    pairs = value if isinstance(value, list) and len(value) <= 16 else [None]
    return all(isinstance(pair, list) and len(pair) == 2 and all(map(_is_text, pair)) for pair in pairs)


def _is_parser(value: Any) -> bool:
    return value is None or (isinstance(value, dict) and not value.keys() - {"name", "args"})


_Checks = Mapping[str, Callable[[Any], bool]]

_STRIP: _Checks = {"strip": _is_flag}
_JSON: _Checks = {**_STRIP, "unquoted_keys": _is_flag, "string_delims": _is_pairs, "allow_non_json": _is_flag}
_TAGS: _Checks = {"tag_pattern": _is_text, "value_parser": _is_parser, "merge_duplicates": _is_flag}
_LINES: _Checks = {**_STRIP, "line_sep": _is_text, "kv_sep": _is_text, "value_parser": _is_parser}

_PARSERS: Mapping[str, tuple[_Checks, Callable[[Arguments, int], MakeContent]]] = {
    "text": (_STRIP, _plain(parse_text)),
    "int": (_STRIP, _plain(lambda arguments, text: int(text.strip()))),
    "float": (_STRIP, _plain(lambda arguments, text: float(text.strip()))),
    "bool": (_STRIP, _plain(lambda arguments, text: text.strip().lower() in ("true", "1"))),
    "json": (_JSON, _plain(_parse_json)),
    "xml-inline": (_TAGS, _make_tags),
    "kv-lines": (_LINES, _make_lines),
}


def literals(arguments: Arguments) -> Iterator[str]:
    """Yield the literal strings that a content parser with these arguments looks for."""
    for pair in arguments.get("string_delims", []):
        yield from pair
    yield from (arguments[key] for key in ("line_sep", "kv_sep") if key in arguments)
    if "tag_pattern" in arguments:
        yield from Pattern(arguments["tag_pattern"]).literals
    if arguments.get("value_parser"):
        yield from literals(arguments["value_parser"].get("args", {}))


# -- transforms --------------------------------------------------------------------------------------------------------

_PLACEHOLDER = re.compile(r"\{(\w+(?:\.\w+)*)\}")


class Placeholder(NamedTuple):
    """A placeholder in a transform. Its path is the name of a value, followed by keys into the value."""

    path: tuple[str, ...]

    def find(self, scope: Mapping[str, Any]) -> Any:
        value: Any = scope
        for key in self.path:
            if not isinstance(value, Mapping) or key not in value:
                raise ValueError(f"has no {key!r}")
            value = value[key]
        return value


def read_transform(value: Any, depth: int = 0) -> Any:
    """Return a transform with each placeholder parsed into a `Placeholder`.

    Raises:
        ValueError: a placeholder is not the whole string, or the transform is nested too deeply.
    """
    if depth > _DEEPEST:
        raise ValueError("transform: is nested too deeply")
    if isinstance(value, dict):
        return {key: read_transform(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [read_transform(item, depth + 1) for item in value]
    if not isinstance(value, str) or not _PLACEHOLDER.search(value):
        return value
    if (match := _PLACEHOLDER.fullmatch(value)) is None:
        raise ValueError(f"transform: {value[:200]!r} has text next to a placeholder")
    return Placeholder(tuple(match[1].split(".")))


def roots(transform: Any) -> Iterator[str]:
    """Yield the names that the placeholders of a transform refer to."""
    if isinstance(transform, Placeholder):
        yield transform.path[0]
    elif isinstance(transform, (dict, list)):
        for item in transform.values() if isinstance(transform, dict) else transform:
            yield from roots(item)


def apply(transform: Any, scope: Mapping[str, Any]) -> Any:
    """Return a transform with its placeholders replaced by values.

    Args:
        scope: the values by name.

    Raises:
        ValueError: a value is missing.
    """
    if isinstance(transform, Placeholder):
        return transform.find(scope)
    if isinstance(transform, dict):
        return {key: apply(item, scope) for key, item in transform.items()}
    return [apply(item, scope) for item in transform] if isinstance(transform, list) else transform
