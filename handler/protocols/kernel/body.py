"""Decoding of request bodies: strict JSON, unknown names, and lax conversion of values."""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import orjson

from handler.core.errors import InvalidParameter, InvalidPayload, NotJson
from handler.core.framing import MAX_DEPTH, is_too_deep, refuse_constant
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.parameters import NEUTRAL_VALUES, equals_any
from handler.protocols.kernel.readers import INT64, show
from handler.protocols.kernel.schema import Shape

_TO_ZERO = bytes.maketrans(b"123456789", b"000000000")
_CONTINUATION = bytes(range(0x80, 0xC0))
"""UTF-8 bytes that do not start a character."""
_MEMBER, _OBJECT = 88, 240  # bytes of memory for an empty list in a list, and for an object with one name
_LONG_NUMBER = b"0" * 19
"""The shortest integer that orjson may read as a float, with all digits replaced by zeros."""


_FEW = 1 << 14  # bytes for lists and objects, up to which punctuation inside strings is counted too
_PIECE = 1 << 16  # bytes whose strings are removed at a time


def decoded_size(body: bytes, most: int = sys.maxsize) -> int:
    """Return an upper estimate, in bytes, of the memory that the decoded value of a JSON body needs.

    In CPython, a single wide character makes every character of its string wide. An escape of six bytes is one
    character, or half of a surrogate pair.

    Args:
        most: maximum number of bytes that lists, objects and numbers can need, if the decoder limits them; 0 for text
            that is not JSON.
    """
    num_escapes = body.count(b"\\u")
    num_characters = len(body.translate(None, _CONTINUATION)) - 5 * num_escapes
    width = 1 if body.isascii() and not num_escapes else 4
    if most and (marks := _marks_size(body)) > _FEW:
        marks = sum(map(_marks_size, _outside_strings(body)))
    return width * num_characters + min(marks if most else 0, most)


def _marks_size(body: bytes) -> int:
    return _MEMBER * (body.count(b",") + body.count(b"[")) + _OBJECT * body.count(b"{")


def _outside_strings(body: bytes) -> Iterator[bytes]:
    """Yield the text outside of strings in a JSON body, piece by piece. In an invalid body, only the text before the
    error is certain.
    """
    inside, escape = False, b""
    for start in range(0, len(body), _PIECE):
        piece = (escape + body[start : start + _PIECE]).replace(rb"\\", b"")
        escape = piece[-1:] if piece.endswith(b"\\") else b""
        parts = piece.removesuffix(b"\\").replace(b'\\"', b"").split(b'"')
        yield b"".join(parts[inside::2])
        inside ^= len(parts) % 2 == 0


_PLAIN = {int, float, bool, type(None)}
_NUMBER = 32
"""Maximum memory, in bytes, of a 64-bit integer or a float."""


def value_size(value: Any, most: int = sys.maxsize) -> int:
    """Return the number of bytes of memory that a decoded value and all its members need.

    Args:
        most: maximum number of lists and objects to measure. If the value has more of them, the result is sys.maxsize.
    """
    size, pending = sys.getsizeof(value), [value] if isinstance(value, dict | list) else []
    seen = set[int]()  # a formatter's value may contain itself
    while pending:
        item = pending.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        for members in (item.keys(), item.values()) if isinstance(item, dict) else (item,):
            kinds = set(map(type, members))
            if kinds <= _PLAIN:
                size += _NUMBER * len(members)
                continue
            if not kinds <= _PLAIN | {str}:
                pending += [member for member in members if isinstance(member, dict | list)]
                if len(seen) + len(pending) > most:
                    return sys.maxsize
            size += sum(map(sys.getsizeof, members))
    return size


def decode(body: bytes, *, unique_keys: bool = True) -> Any:
    """Decode strict JSON: no NaN, no lone surrogates, nothing after the document, and at most MAX_DEPTH levels.

    Args:
        unique_keys: whether to refuse an object with a duplicate key. Otherwise the last value is used.

    Raises:
        NotJson: the body is invalid. The message names the cause and its position.
    """
    if not unique_keys and _LONG_NUMBER not in body.translate(_TO_ZERO):
        try:
            value = orjson.loads(body)
        except orjson.JSONDecodeError:
            pass  # Python's json names the cause, or accepts the body: a number beyond floats, a byte order mark
        else:
            if is_too_deep(value, body):
                raise _too_deep()
            return value
    return decode_in_python(body, unique_keys=unique_keys)


def decode_in_python(body: bytes | memoryview, *, unique_keys: bool = True) -> Any:
    """Decode strict JSON as `decode` does, but with the standard library.

    This is slower, but needs less memory, and errors name their cause.
    """
    text = decode_text(body, "utf-8-sig")
    if not text or text.isspace():
        raise NotJson("the body is empty")
    try:
        value = (_UNIQUE_KEYS if unique_keys else _LAST_KEYS).decode(text)
        if is_too_deep(value, text):
            raise _too_deep()
        if "\\u" in text:  # only an escape can be a lone surrogate
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise NotJson(f"the body is not valid JSON: {error.msg.removesuffix(' at')} at {where}") from None
    except UnicodeEncodeError:
        raise NotJson("the body is not valid JSON: a string contains a lone surrogate") from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise NotJson(f"the body is not valid JSON: {error}") from None
    return value


def _too_deep() -> NotJson:
    return NotJson(f"the body is not valid JSON: it is nested too deeply (the maximum is {MAX_DEPTH} levels)")


def decode_text(body: bytes | memoryview, encoding: str = "utf-8") -> str:
    """Decode the text of a body.

    Raises:
        NotJson: the body cannot be decoded with the encoding.
    """
    try:
        return str(body, encoding)
    except UnicodeDecodeError as error:
        raise NotJson(f"the body is not UTF-8: {error.reason} at byte {error.start}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"the key {show(counts.most_common(1)[0][0])} appears twice")
    return value


_UNIQUE_KEYS = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=refuse_constant)
_LAST_KEYS = json.JSONDecoder(parse_constant=refuse_constant)


_ELSEWHERE = frozenset(
    {
        "assistant_id", "bootstrap_host", "bootstrap_port", "bootstrap_room", "cachedContent", "cached_content",
        "container", "context_management",
        "conversation", "conversation_id", "data_sources", "disaggregated_params", "ec_transfer_params", "file_id",
        "file_ids", "kv_transfer_params", "mcp_servers", "previous_input_messages", "previous_interaction_id",
        "previous_message_id", "previous_response_id", "sequence_end", "sequence_id", "sequence_start",
        "session_params", "thread", "thread_id", "vector_store_ids",
    }
)  # fmt: skip
"""Names of parameters that refer to state stored on a server, without which the response would be different."""

_NEVER_IGNORED: Mapping[str, str] = {
    **dict.fromkeys(
        ("cache_salt", "extra_key"),
        "this field does not separate prefix caches; send cache_salt on OpenAI's routes, if the engine supports it",
    ),
    **dict.fromkeys(
        (
            "regex", "ebnf", "json_schema", "structural_tag", "grammar", "response_format", "structured_outputs",
            "guided_json", "guided_json_object", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding",
        ),
        "the response would not be constrained; use this API's own field for structured output",
    ),
    **dict.fromkeys(
        (
            "guardrails", "guardrail_config", "guardrailConfig", "amazon-bedrock-guardrailConfig", "moderation",
            "safe_prompt", "safety_mode", "safety_settings", "safetySettings",
        ),
        "the server does not moderate content",
    ),
    "watermarking": "no engine supports watermarks",
    **dict.fromkeys(("inference_geo", "zdr"), "the server cannot choose where requests are processed or stored"),
}  # fmt: skip
"""Maps parameters for isolation, safety or constraints to the reason why dialects without them refuse them."""


_NEUTRALS: Mapping[str, Collection[Any]] = {
    **NEUTRAL_VALUES,
    **dict.fromkeys(("beam_width", "num_return_sequences"), (1,)),
    **dict.fromkeys(("use_beam_search", "watermarking"), (False,)),
    "no_repeat_ngram_size": (0,),
    "response_format": ({"type": "text"},),
    "safety_mode": ("OFF", "NONE"),
    "inference_geo": ("global",),
}
"""Maps parameters that only some dialects have to their neutral values."""

_CARRIERS = frozenset({"extra_body", "nvext", "parameters", "sampling_params"})
"""Names of objects whose keys are parameters. The user chooses the keys of other objects, such as `metadata`."""


def unknown_parameters(parameters: Iterable[str], known: Container[str]) -> list[str]:
    """List the paths of the names under `parameters` that a dialect does not know."""
    return [f"parameters.{name}" for name in parameters if name not in known]


def report_unknown(
    body: Mapping[str, Any],
    known: Container[str],
    context: ServerContext,
    paths: Iterable[str] = (),
    *,
    generates: bool = True,
) -> list[str]:
    """Return the unknown names in a body that are reported in a response header.

    A parameter of another dialect is not reported if its value is neutral, and no name is if its value is null.

    Args:
        known: the names at the top level that the dialect knows.
        paths: the paths of further names that it does not know.
        generates: whether the request reaches the engine, so that isolation and constraints matter.

    Raises:
        InvalidParameter: a name refers to state stored on the server, or must not be ignored.
        InvalidPayload: unknown names are refused (option.unknown_parameters=refuse).
    """
    reported = []
    for name in (*(name for name in body if name not in known), *paths):
        path, _, key = name.rpartition(".")
        values = body if not path else body.get(path)
        value = values.get(key, True) if isinstance(values, Mapping) else True
        if key in _ELSEWHERE and value:  # falsy values refer to nothing
            raise InvalidParameter(
                f"{name}: is not supported: this route does not read what the field refers to; send the whole request"
            )
        if value is None or _is_neutral(key, value):
            continue
        if generates and isinstance(values, Mapping) and path != "chat_template_kwargs":  # its keys are the template's
            _check_heeded(name, key, value)
        reported.append(name)
    if reported and context.config.unknown_parameters == "refuse":
        first = ", ".join(name[:64] for name in reported[:8])
        raise InvalidPayload(f"unknown names: {first} (option.unknown_parameters=refuse)")
    return reported


def _is_neutral(key: str, value: Any) -> bool:
    return equals_any(value, _NEUTRALS.get(key, ()))


def _check_heeded(name: str, key: str, value: Any) -> None:
    """Raise InvalidParameter if a name must not be ignored, or if an object of parameters contains such a name.

    Falsy values request nothing.
    """
    inner = value if key in _CARRIERS and isinstance(value, Mapping) else {}
    for path, own, item in ((name, key, value), *((f"{name}.{own}", own, item) for own, item in inner.items())):
        if own in _NEVER_IGNORED and item and not _is_neutral(own, item):
            raise InvalidParameter(f"{path[:64]}: is not supported: {_NEVER_IGNORED[own]}")


# -- conversion of values whose JSON type is not their field's, such as `8.0` or `"8"` for 8, and `1` for true ---------
# The readers of values accept only the JSON type of their field. The dialects of strict servers keep to that: TGI, TEI
# and MindIE (serde), and Triton (RapidJSON, except for the texts that its vLLM backend reads). The other dialects first
# convert the values by the rule of their original server:
#
# * pydantic's lax mode (docs.pydantic.dev, "Conversion Table"): vLLM's routes, including OpenAI's and Anthropic's;
#   LMI's chats and its async mode.
# * Python's rule: the prompts of LMI's rolling and dynamic batch, whose handlers check no types.
#
# A value that the rule cannot convert is left unchanged, and its reader refuses it.

Convert = Callable[[Any], Any]

_MAX_CHARACTERS = 4300  # of a number, the limit of Python and pydantic
_INTEGER = re.compile(r"([+-]?[0-9]+(?:_[0-9]+)*)(?:\.0+)?")
_FLAGS = {
    **dict.fromkeys(("true", "t", "yes", "y", "on", "1"), True),
    **dict.fromkeys(("false", "f", "no", "n", "off", "0"), False),
}


class Rule(NamedTuple):
    """Functions that convert a value to a JSON type if possible, and otherwise return the value unchanged."""

    boolean: Convert
    integer: Convert
    number: Convert


# -- Python's rule -----------------------------------------------------------------------------------------------


def _truth(value: Any) -> Any:
    return bool(value) if isinstance(value, int | float) and value in (0, 1) else value


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < INT64 else value


def as_int(value: Any) -> Any:
    """Convert a value with Python's `int`, which LMI's handlers call only for the `seed` of a prompt."""
    if not isinstance(value, str | float | bool):
        return value
    try:
        return int(value)
    except (ValueError, OverflowError):
        return value


PYTHON = Rule(_truth, _whole, lambda value: value)
"""The rule of Python. It leaves strings unchanged, to be refused later, because `bool("false")` would be true."""


# -- pydantic's rule ---------------------------------------------------------------------------------------------


def _flag(value: Any) -> Any:
    return _FLAGS.get(value.lower(), value) if isinstance(value, str) else _truth(value)


def _integer(value: Any) -> Any:
    if isinstance(value, bool):
        return int(value)
    if not isinstance(value, str) or len(value) > _MAX_CHARACTERS:
        return _whole(value)
    match = _INTEGER.fullmatch(value.strip())
    return value if match is None else int(match[1])


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        return float(value)
    if not isinstance(value, str) or len(value) > _MAX_CHARACTERS:
        return value
    text = value.strip()
    if not text.isascii() or "__" in text or text != text.strip("_"):
        return value
    try:
        number = float(text.replace("_", ""))
    except ValueError:
        return value
    return number if math.isfinite(number) else value


PYDANTIC = Rule(_flag, _integer, _number)


# -- bodies ------------------------------------------------------------------------------------------------------


def relaxed_by(
    rule: Rule, shapes: Mapping[str, Shape], converters: Mapping[str, Convert] = MappingProxyType({})
) -> Callable[[Any], Any]:
    """Return a function that converts the field values of an object, and returns other values unchanged.

    Args:
        shapes: the JSON schemas of the fields. Numbers and booleans are converted, even as direct members of a list or
            an object, but not at deeper levels.
        converters: the conversions of fields that do not follow the rule.
    """
    converts = {
        **{name: convert for name, shape in shapes.items() if (convert := _of_shape(rule, shape))},
        **converters,
    }

    def relax(body: Any) -> Any:
        return _convert_items(body, converts) if isinstance(body, dict) else body

    return relax


def _convert_items(values: dict[str, Any], converts: Mapping[str, Convert]) -> dict[str, Any]:
    changed = {}
    for name, value in values.items():
        if (convert := converts.get(name)) is not None and (converted := convert(value)) is not value:
            changed[name] = converted
    return {**values, **changed} if changed else values


def _of_shape(rule: Rule, shape: Shape) -> Convert | None:
    if (plain := _of_scalar(rule, shape)) is not None:
        return plain
    if (item := _of_scalar(rule, shape.get("items", {}))) is not None:
        return lambda value: _convert_list(value, item) if isinstance(value, list) else value
    fields = {
        name: convert
        for name, item_shape in shape.get("properties", {}).items()
        if (convert := _of_scalar(rule, item_shape))
    }
    if fields:
        return lambda value: _convert_items(value, fields) if isinstance(value, dict) else value
    if (each := _of_scalar(rule, shape.get("additionalProperties") or {})) is not None:
        return lambda value: _convert_items(value, dict.fromkeys(value, each)) if isinstance(value, dict) else value
    return None


def _convert_list(values: list[Any], convert: Convert) -> list[Any]:
    converted = [convert(value) for value in values]
    return converted if any(new is not old for new, old in zip(converted, values, strict=True)) else values


def _of_scalar(rule: Rule, shape: Shape) -> Convert | None:
    kinds = shape.get("type", "boolean" if isinstance(shape.get("const"), bool) else [])
    kind_names = [kinds] if isinstance(kinds, str) else kinds
    return next((getattr(rule, kind) for kind in kind_names if kind in Rule._fields), None)
