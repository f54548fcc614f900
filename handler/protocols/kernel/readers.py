"""Readers of values in a body, which return a Python value or raise ValueError with a description of valid values."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from handler.core.errors import InvalidParameter, InvalidPayload
from handler.core.framing import refuse_constant
from handler.core.numbers import is_digits
from handler.core.values import Adapter, StructuredOutput
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.schema import NULL, TEXT, Shape, accepts, listing

T = TypeVar("T")


class NamedValue(NamedTuple):
    """A parameter, with the name and the value that the client sent."""

    name: str
    value: Any

    def __str__(self) -> str:
        return f"{self.name}={show(self.value)}"

    def refused(self, reason: str) -> InvalidParameter:
        return InvalidParameter(f"{self}: {reason}")

    def read(self, reader: Callable[[Any], T]) -> T:
        """Convert the value with a reader.

        Raises:
            InvalidParameter: the reader refuses the value.
        """
        try:
            return reader(self.value)
        except ValueError as error:
            raise self.refused(str(error)) from None

    def optional(self, reader: Callable[[Any], T]) -> T | None:
        """Convert the value as `read` does, or return None if the value is absent."""
        return None if self.value is None else self.read(reader)


_ENCODER = json.JSONEncoder(ensure_ascii=False)


def show(value: Any) -> str:
    """Render a value for an error message, in at most 80 characters."""
    text = ""
    for piece in _ENCODER.iterencode(value[:100] if isinstance(value, str) else value):  # long strings take seconds
        text += piece
        if len(text) > 80:
            return text[:77] + "..."
    return text


# -- plain JSON values -------------------------------------------------------------------------------------------------


INT32 = (1 << 31) - 1
INT64 = (1 << 63) - 1

MAX_NAME = 256  # characters of a value that every chunk of a stream repeats: a model's name, a request's id
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 2048

_PAIRS, _KEY, _VALUE = 16, 64, 512  # maximum pairs of metadata, characters of a key, characters of a value

_STRINGS = {
    "type": "array",
    "maxItems": MAX_STOPS,
    "items": {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS},
}
STRING_OR_STRINGS = [_STRINGS["items"], _STRINGS]

_LEAST_NORMAL, _MOST = 1.1754943508222875e-38, 3.4028234663852886e38  # of 32-bit floats


@accepts(type="boolean")
def boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


@accepts(type="string")
def string(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("must be a string")
    return value


def string_up_to(maximum: int) -> Callable[[Any], str]:
    """Return a reader of strings of up to `maximum` characters."""

    @accepts(type="string", maxLength=maximum)
    def read(value: Any) -> str:
        if len(string(value)) > maximum:
            raise ValueError(f"must have at most {maximum} characters")
        return str(value)

    return read


@accepts(
    type="object",
    maxProperties=_PAIRS,
    propertyNames={"maxLength": _KEY},
    additionalProperties={"type": "string", "maxLength": _VALUE},
)
def metadata(value: Any) -> None:
    if not isinstance(value, dict) or len(value) > _PAIRS:
        raise ValueError(f"must be an object of at most {_PAIRS} pairs")
    for key, item in value.items():
        if len(key) > _KEY or not isinstance(item, str) or len(item) > _VALUE:
            raise ValueError(f"must have keys of at most {_KEY} characters, and string values of at most {_VALUE}")


def integer(least: int, most: int = INT32) -> Callable[[Any], int]:
    @accepts(type="integer", minimum=least, maximum=most)
    def read(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ValueError(f"must be an integer from {least} to {most}")
        return value

    return read


def digits(least: int, most: int) -> Callable[[str], int]:
    """Return a reader of integers that are sent as text of at most nine digits, as in a query."""
    plain = integer(least, most)

    def read(text: str) -> int:
        return plain(int(text) if is_digits(text) and len(text) < 10 else text)

    return read


def number(least: float, most: float = math.inf, *, above: bool = False, below: bool = False) -> Callable[[Any], float]:
    """Return a reader of finite numbers from `least` to `most`.

    Engines compute with 32-bit floats. A number below the smallest normal float, such as 1e-50, is read as 0.

    Args:
        above: whether to exclude `least` itself.
        below: whether to exclude `most` itself.
    """
    expected = f"must be a number {'above' if above else 'of at least'} {least:g}"
    if most < math.inf:
        expected += f" and {'below' if below else 'at most'} {most:g}"
    bounds = {"exclusiveMinimum" if above else "minimum": least, "exclusiveMaximum" if below else "maximum": most}

    @accepts(type="number", **{name: bound for name, bound in bounds.items() if math.isfinite(bound)})
    def read(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(expected)
        try:
            result = float(value)
        except OverflowError:
            result = math.inf
        result = 0.0 if abs(result) < _LEAST_NORMAL else result
        if not math.isfinite(result) or abs(result) > _MOST or result < least or result > most:
            raise ValueError(expected)
        if (above and result == least) or (below and result == most):
            raise ValueError(expected)
        return result

    return read


@accepts(anyOf=STRING_OR_STRINGS)
def strings(value: Any) -> tuple[str, ...]:
    """Read a list of strings. A single string is read as a list with one item."""
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or len(items) > MAX_STOPS:
        raise ValueError(f"must be a string or a list of at most {MAX_STOPS} strings")
    for item in items:
        if not isinstance(item, str) or not 0 < len(item) <= MAX_STOP_CHARACTERS:
            raise ValueError(f"must contain non-empty strings of at most {MAX_STOP_CHARACTERS} characters")
    return tuple(items)


@accepts(type="array", maxItems=MAX_STOPS, items={"type": "integer", "minimum": 0, "maximum": INT32})
def token_ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > MAX_STOPS:
        raise ValueError(f"must be a list of at most {MAX_STOPS} token ids")
    if not all(map(is_token_id, value)):
        raise ValueError("must contain token ids, which are integers of at least 0")
    return tuple(value)


_ALLOWED = 1 << 14


@accepts(type="array", minItems=1, maxItems=_ALLOWED, items={"type": "integer", "minimum": 0, "maximum": INT32})
def allowed_token_ids(value: Any) -> tuple[int, ...]:
    """Read the ids of the tokens to which a response is restricted. As in vLLM, an empty list is refused."""
    if not isinstance(value, list) or not 0 < len(value) <= _ALLOWED or not all(map(is_token_id, value)):
        raise ValueError(f"must be a list of 1 to {_ALLOWED} token ids, which are integers of at least 0")
    return tuple(value)


def is_token_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= INT32


_SALT = 128


@accepts(type="string", minLength=1, maxLength=_SALT)
def cache_salt(value: Any) -> str:
    """Read the cache salt, within vLLM 0.33's limits. Only requests with the same salt share the prefix cache."""
    if not isinstance(value, str) or not 0 < len(value) <= _SALT or not frozenset("@/\\\0").isdisjoint(value):
        raise ValueError(f"must be a string of 1 to {_SALT} characters without @, /, \\ and NUL")
    return value


@accepts(type="object", additionalProperties={"type": "number", "minimum": -100, "maximum": 100})
def logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    """Read an object that maps token ids to the bias of their logits, as in OpenAI's API. Zeros are dropped."""
    expected = "must be an object that maps token ids to numbers from -100 to 100"
    if not isinstance(value, dict):
        raise ValueError(expected)
    bias = number(-100, 100)
    try:
        biases = {integer(0)(int(id)): bias(item) for id, item in value.items() if is_digits(id)}
    except ValueError:
        raise ValueError(expected) from None
    if len(biases) < len(value):
        raise ValueError(f"{expected}, without duplicates")
    return tuple((id, item) for id, item in sorted(biases.items()) if item)


# -- readers of the LoRA adapter that a request names in `adapters`, a parameter or a header ---------------------------


@accepts(type="string", description="The name of a LoRA adapter")
def named_adapter(value: Any, context: ServerContext) -> Adapter | None:
    """Return the adapter with this name, or None for "", which means the model itself.

    Raises:
        ValueError: the engine serves no adapters, or no adapter with this name is registered.
    """
    if not isinstance(value, str):
        raise ValueError("must be the name of an adapter")
    if not value:
        return None
    return _registered(context.adapters.find, value, "name", context)


def numbered_adapter(number: int, context: ServerContext) -> Adapter:
    """Return the adapter with this registration number.

    Raises:
        ValueError: the engine serves no adapters, or no adapter with this number is registered.
    """
    return _registered(context.adapters.by_number, number, "number", context)


def _registered(find: Callable[[T], Adapter | None], key: T, key_kind: str, context: ServerContext) -> Adapter:
    if context.no_adapters:
        raise ValueError(f"the engine {context.engine} serves no LoRA adapters: {context.no_adapters}")
    adapter = find(key)
    if adapter is None:
        raise ValueError(f"no adapter with that {key_kind} is registered")
    return adapter


ADAPTERS: Mapping[str, Shape] = {
    "adapters": {
        "anyOf": [TEXT, listing(TEXT), NULL],
        "description": "The name of a LoRA adapter, or a list with a name for each prompt",
    }
}
"""The schema of the field that `read_adapters` reads."""


def read_adapters(
    body: Mapping[str, Any], num_prompts: int, context: ServerContext, in_headers: Adapter | None
) -> Sequence[Adapter | None]:
    """Return the adapter for each prompt of a body.

    The `adapters` field is one name for all prompts, or a list with a name for each prompt (LMI). If it is missing, the
    adapter in the headers is used.

    Raises:
        InvalidPayload: an adapter is unknown or contradicts the headers, or the list has the wrong length.
    """
    value = body.get("adapters")
    if value in (None, "", []):
        return [in_headers] * num_prompts
    names = value if isinstance(value, list) else [value] * num_prompts
    if len(names) != num_prompts:
        raise InvalidPayload(
            f"'adapters' must be a name, or a list with a name per prompt (names: {len(names)}, prompts: {num_prompts})"
        )
    return [merge_adapters(in_headers, _adapter(name, context), "the body") for name in names]


def _adapter(name: Any, context: ServerContext) -> Adapter | None:
    try:
        return named_adapter(name, context)
    except ValueError as error:
        prefix = f"{quote(name)}: " if isinstance(name, str) else ""
        raise InvalidPayload(f"'adapters': {prefix}{error}") from None


def quote(name: str) -> str:
    """Quote text from a client for a message, truncated to 80 characters."""
    return repr(name if len(name) <= 80 else f"{name[:80]}...")


def merge_adapters(first: Adapter | None, second: Adapter | None, source: str) -> Adapter | None:
    """Combine the adapters that two parts of a request name. Either may be None.

    Args:
        source: the part of the request that names the second adapter. The error message begins with it.

    Raises:
        InvalidPayload: the two adapters differ.
    """
    if first is not None and second is not None and first != second:
        raise InvalidPayload(f"{source}: {second.name!r} contradicts the adapter {first.name!r}")
    return second if first is None else first


# -- readers of structured output as clients of LMI, vLLM, TGI and OpenAI request it -----------------------------------
# Only cheap checks run here. `engines/structured_output/validator.py` compiles the values in a separate process.


MAX_CHARACTERS = 1 << 14  # of a schema as JSON, an expression, a grammar, or all choices together
MAX_CHOICES = 256


@accepts(anyOf=[{"type": "object"}, {"type": "string"}], description="A JSON schema, as an object or as text")
def json_schema(value: Any) -> StructuredOutput:
    """Read a JSON schema, which is an object or a string."""
    if isinstance(value, str):
        value = _parse(_check_length(value))
    if not isinstance(value, dict):
        raise ValueError("must be a JSON schema object")
    return StructuredOutput("json_schema", _json(value))


def _parse(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        raise ValueError("must be a JSON schema, but its text is not JSON") from None


def structural_tag(value: Mapping[str, Any], *, allows_text: bool = False) -> StructuredOutput:
    """Return structured output for an xgrammar structural tag whose schemas come from a client.

    Args:
        value: the format of the tag.
        allows_text: whether any text may precede the part that the tag governs.
    """
    return StructuredOutput("structural_tag", _json({"type": "structural_tag", "format": value}), allows_text)


@accepts(type="boolean", description="Any JSON object")
def json_object(value: Any) -> StructuredOutput | None:
    """Read a boolean. True requires the response to be a JSON object."""
    return StructuredOutput("json_object", "") if boolean(value) else None


@accepts(type="string", description="A regular expression")
def regex(value: Any) -> StructuredOutput:
    """Read a regular expression that the whole response must match, in the syntax of the engine.

    It is not compiled here, because `re.compile` can hold the GIL for seconds while other requests wait.
    """
    return StructuredOutput("regex", _text(value, "a regular expression"))


@accepts(type="string", description="A grammar in EBNF")
def grammar(value: Any) -> StructuredOutput:
    """Read a grammar in EBNF."""
    return StructuredOutput("grammar", _text(value, "a grammar in EBNF"))


@accepts(type="array", items={"type": "string", "minLength": 1}, minItems=1, maxItems=MAX_CHOICES)
def choice(value: Any) -> StructuredOutput:
    """Read the list of possible responses."""
    if not isinstance(value, list) or not 0 < len(value) <= MAX_CHOICES:
        raise ValueError(f"must be a list of 1 to {MAX_CHOICES} strings")
    if not all(isinstance(item, str) and item for item in value):
        raise ValueError("must contain non-empty strings")
    return StructuredOutput("choice", _json(value))


@accepts(
    type="object",
    required=["type"],
    properties={"type": {"enum": ["json", "json_object", "json_schema", "regex"]}, "value": {}},
)
def tgi_grammar(value: Any) -> StructuredOutput:
    """Read TGI's `grammar`, an object with `type` and `value` (text-generation-inference 3, router/src/lib.rs)."""
    if not isinstance(value, dict):
        raise ValueError("must be an object with 'type' and 'value'")
    kind, content = value.get("type"), value.get("value")
    only(value, "type", "value")
    if kind == "json" or (kind == "json_object" and content is not None):
        return json_schema(content)
    if kind == "json_object":
        return StructuredOutput("json_object", "")
    if kind == "json_schema":
        if not isinstance(content, dict) or "schema" not in content:
            raise ValueError("must have a 'value' with 'schema'")
        only(content, "schema", "name", "strict")
        return json_schema(content["schema"])
    if kind == "regex":
        return regex(content)
    raise ValueError("must have a 'type' that is json, json_object, json_schema or regex")


@accepts(
    type="object",
    required=["type"],
    properties={
        "type": {"enum": ["text", "json_object", "json_schema"]},
        "json_schema": {"type": "object"},
        "schema": {"type": "object"},
    },
)
def response_format(value: Any) -> StructuredOutput | None:
    """Read OpenAI's `response_format`. `strict` has no effect: engines always enforce a schema as far as they can.

    With both types of JSON, llama.cpp and its clients may send the schema alone, as `schema`.
    """
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        only(value, "type")
        return None
    if kind not in ("json_object", "json_schema"):
        raise ValueError("must be an object with a 'type' that is text, json_object or json_schema")
    if (schema := value.get("schema")) is not None:
        only(value, "type", "schema")
        return json_schema(schema)
    if kind == "json_object":
        only(value, "type", "schema")
        return StructuredOutput("json_object", "")
    only(value, "type", "json_schema")
    content = value.get("json_schema")
    if not isinstance(content, dict) or not isinstance(content.get("schema"), dict):
        raise ValueError("must have a 'json_schema' with an object as its 'schema'")
    only(content, "schema", "name", "description", "strict")
    return json_schema(content["schema"])


def only(value: Any, *names: str) -> None:
    """Raise ValueError if the value is an object with an unknown name that is not null. The message names it."""
    for name, item in value.items() if isinstance(value, dict) else ():
        if name not in names and item is not None:
            raise ValueError(f"has an unknown name {name[:64]!r}; the names are {', '.join(names)}")


def unread(value: Any, at: str, names: Collection[str]) -> dict[str, None]:
    """Return the paths of an object's unknown names. Null, false, an empty list and "auto" request nothing.

    Args:
        value: the object. Any other value has no names.
        at: the path of the value, such as `tools[]`.
    """
    items = value.items() if isinstance(value, dict) else ()
    return {f"{at}.{name}": None for name, item in items if name not in names and item not in _NOTHING}


_NOTHING: tuple[Any, ...] = (None, False, [], "auto")


def _json(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
        text.encode()
    except (UnicodeEncodeError, RecursionError):  # a lone surrogate, which only an escape can produce
        raise ValueError("must be JSON without lone surrogates, and not nested too deeply") from None
    return _check_length(text)


def _text(value: Any, expected: str) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"must be {expected} as a non-empty string")
    return _check_length(value)


def _check_length(text: str) -> str:
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"must have at most {MAX_CHARACTERS} characters; it has {len(text)}")
    return text
