"""Read a body's bytes as strict JSON, and report its unknown names."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import orjson

from handler.core.errors import InvalidParameter, InvalidPayload, NotJson
from handler.core.framing import MAX_DEPTH, is_too_deep
from handler.core.values import SAMPLED, Adapter, Nature, Request, Sampling, StructuredOutput, Task, fields_of
from handler.protocols.kernel.dialect import ServerContext
from handler.protocols.kernel.schema import NULL, TEXT, Shape, accepts, listing

_ONLY_WITH_BEAMS = fields_of(Nature.ONLY_BEAMS)
_WITH_BEAMS = frozenset(fields_of(~Nature(0)))

DEFAULTS = Sampling._field_defaults


_ROUTES = {
    Task.GENERATION: "/v1/chat/completions, /generate and their like",
    Task.EMBEDDING: "/v1/embeddings, /embed and their like",
    Task.CLASSIFICATION: "/predict",
    Task.RERANK: "/rerank and its like",
    Task.TRANSCRIPTION: "/v1/audio/transcriptions, /v1/audio/translations",
}
_KINDS = {"embed": Task.EMBEDDING, "score": Task.RERANK, "classify": Task.CLASSIFICATION}


def check_task(request: Request, task: Task) -> None:
    """Raise InvalidPayload where the model computes something else than is asked for."""
    generated = Task.TRANSCRIPTION if request.transcribes else Task.GENERATION
    wanted = generated if request.pooling is None else _KINDS[request.pooling.kind]
    if wanted is not task:
        raise InvalidPayload(
            f"this server is for {task.value} (option.task): it answers {_ROUTES[task]}; this is {wanted.value}"
        )


class Named(NamedTuple):
    """A parameter as the client gave it."""

    name: str
    value: Any

    def __str__(self) -> str:
        return f"{self.name}={show(self.value)}"

    def refused(self, why: str) -> InvalidParameter:
        return InvalidParameter(f"{self}: {why}")


def check_agreement(sampling: Sampling, names: Mapping[str, Named], context: ServerContext) -> None:
    """Check parameters against each other."""

    def named(field: str) -> Named:
        if field == "structured_output" and field not in names:
            return Named("tools[].function.strict", True)  # which alone sets it without a name
        return names.get(field) or Named(field, getattr(sampling, field))

    if sampling.min_new_tokens > sampling.max_new_tokens:
        raise named("min_new_tokens").refused(f"must be at most max_new_tokens={sampling.max_new_tokens}")
    if "best_of" in names and sampling.best_of < sampling.n:
        raise named("best_of").refused(f"must be at least n={sampling.n}")
    most = context.config.max_rolling_batch_size
    for field in ("n", "best_of", "num_beams"):
        if getattr(sampling, field) > most:
            raise named(field).refused(f"must be at most {most} (option.max_rolling_batch_size)")
    if sampling.structured_output is not None:
        for field in ("ignore_eos", "min_new_tokens"):
            if getattr(sampling, field) != DEFAULTS[field]:
                raise named(field).refused(
                    f"structured output decides where the answer ends; leave out {named('structured_output').name}"
                )
    refuse: Collection[str]
    if sampling.num_beams > 1:
        if sampling.do_sample:
            raise named("num_beams").refused(f"beam search does not sample; leave out {named('do_sample')}")
        if max(sampling.n, sampling.best_of) > sampling.num_beams:
            raise named("num_beams").refused(f"must be at least n={sampling.n} and best_of={sampling.best_of}")
        refuse, why = [name for name in DEFAULTS if name not in _WITH_BEAMS], "is not available with num_beams > 1"
    else:
        refuse, why = _ONLY_WITH_BEAMS, "has an effect only with num_beams > 1"
    for field in refuse:
        if getattr(sampling, field) != DEFAULTS[field]:
            raise named(field).refused(why)


def check_support(
    sampling: Sampling, given: Collection[str], names: Mapping[str, Named], context: ServerContext
) -> None:
    """Refuse what the engine does not support.

    Args:
        given: the fields that the client or the dialect has set.
    """
    for field, why in context.unsupported.items():
        if field not in given:
            continue
        value = getattr(sampling, field)
        greedy = field in SAMPLED and not sampling.do_sample
        # The chosen token's own log-probability comes with every answer: one "alternative" asks for no more than that.
        neutral = value == DEFAULTS[field] or (field == "top_logprobs" and value <= 1)
        if not greedy and not neutral:
            raise names.get(field, Named(field, value)).refused(f"the engine {context.engine} lacks it: {why}")

    for field, most in context.limits.items():
        value = getattr(sampling, field)
        if value > most and not (field in SAMPLED and not sampling.do_sample):
            raise names.get(field, Named(field, value)).refused(f"the engine {context.engine} takes at most {most:g}")


_ENCODER = json.JSONEncoder(ensure_ascii=False)


def show(value: Any) -> str:
    """Render a value for a message, at most 80 characters."""
    text = ""
    for piece in _ENCODER.iterencode(value[:100] if isinstance(value, str) else value):  # millions would take seconds
        text += piece
        if len(text) > 80:
            return text[:77] + "..."
    return text


_TO_ZERO = bytes.maketrans(b"123456789", b"000000000")
_CONTINUATION = bytes(range(0x80, 0xC0))
"""Bytes of UTF-8 that begin no character."""
_MEMBER, _OBJECT = 88, 240  # bytes that an empty list takes in a list, and an object with one name
_LONG_NUMBER = b"0" * 19
"""The shortest integer that orjson may read as a float."""


def decoded_size(body: bytes) -> int:
    """Return how many bytes the value of a body of JSON takes in memory, at most, about.

    One wide character makes all of a text wide, and an escape of six bytes is one character, or half of one.
    """
    num_escapes = body.count(b"\\u")
    num_characters = len(body.translate(None, _CONTINUATION)) - 5 * num_escapes
    width = 1 if body.isascii() and not num_escapes else 4
    num_members = body.count(b",") + body.count(b"[")
    return width * num_characters + _MEMBER * num_members + _OBJECT * body.count(b"{")


def decode(body: bytes, *, unique_keys: bool = True) -> Any:
    """Decode strict JSON: no NaN, no lone surrogates, nothing after the document, and at most MAX_DEPTH levels.

    Args:
        unique_keys: refuse an object that has a key twice; else the last one counts.

    Raises:
        NotJson: naming what is wrong, and where.
    """
    if not unique_keys and _LONG_NUMBER not in body.translate(_TO_ZERO):
        try:
            value = orjson.loads(body)
        except orjson.JSONDecodeError:
            pass  # or Python's json reads it: a number beyond floats, a byte order mark
        else:
            if is_too_deep(value, body):
                raise _too_deep()
            return value
    return decode_in_python(body, unique_keys=unique_keys)


def decode_in_python(body: bytes | memoryview, *, unique_keys: bool = True) -> Any:
    """Do as `decode`, by the standard library: slower, in less memory, and it says what is wrong."""
    text = decode_text(body, "utf-8-sig")
    if not text or text.isspace():
        raise NotJson("the body is empty")
    try:
        value = (_UNIQUE_KEYS if unique_keys else _LAST_KEYS).decode(text)
        if is_too_deep(value, text):
            raise _too_deep()
        if "\\u" in text:  # only an escape can bring half a surrogate pair in
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise NotJson(f"the body is not valid JSON: {error.msg.removesuffix(' at')} at {where}") from None
    except UnicodeEncodeError:
        raise NotJson("the body is not valid JSON: a lone surrogate in a string") from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise NotJson(f"the body is not valid JSON: {error}") from None
    return value


def _too_deep() -> NotJson:
    return NotJson(f"the body is not valid JSON: nested too deeply; at most {MAX_DEPTH} levels are read")


def decode_text(body: bytes | memoryview, encoding: str = "utf-8") -> str:
    """Decode text.

    Raises:
        NotJson: the bytes are not valid in the encoding.
    """
    try:
        return str(body, encoding)
    except UnicodeDecodeError as error:
        raise NotJson(f"the body is not UTF-8: {error.reason} at byte {error.start}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"the key {show(counts.most_common(1)[0][0])} is there twice")
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


_UNIQUE_KEYS = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)
_LAST_KEYS = json.JSONDecoder(parse_constant=_no_constant)


_ELSEWHERE = frozenset(
    {
        "assistant_id", "cachedContent", "cached_content", "container", "context_management",
        "conversation", "conversation_id", "data_sources", "disaggregated_params", "ec_transfer_params", "file_id",
        "file_ids", "kv_transfer_params", "mcp_servers", "previous_input_messages", "previous_interaction_id",
        "previous_message_id", "previous_response_id", "sequence_end", "sequence_id", "sequence_start",
        "session_params", "thread", "thread_id", "vector_store_ids",
    }
)  # fmt: skip
"""Names that say: a part of this request is on the server. Without it the answer would be another one."""


_NEUTRAL: Mapping[str, Collection[Any]] = {
    **dict.fromkeys(("repetition_penalty", "length_penalty", "top_p", "typical_p"), (1,)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "min_p"), (0,)),
    **dict.fromkeys(("n", "best_of", "num_beams", "beam_width", "num_return_sequences"), (1,)),
    **dict.fromkeys(("min_length", "min_tokens", "no_repeat_ngram_size", "top_n_tokens"), (0,)),
    **dict.fromkeys(("early_stopping", "use_beam_search", "watermark", "decoder_input_details"), (False,)),
    **dict.fromkeys(("ignore_eos", "ignore_eos_token", "include_stop_str_in_output"), (False,)),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), (True,)),
    **dict.fromkeys(("stop", "stop_sequences", "stop_token_ids", "bad_words", "bad_sequences"), ([],)),
    "top_k": (0, -1),
    "logit_bias": ({},),
}
"""Sampling parameters of some dialects, and their values that ask for nothing."""


def report_unknown(names: list[str], body: Mapping[str, Any], context: ServerContext) -> list[str]:
    """Return unknown names for the answer's header, or refuse them (option.unknown_parameters=refuse).

    A sampling parameter of another dialect whose value asks for nothing is none.

    Raises:
        InvalidParameter: one says that the rest of the request is on the server.
    """
    found = []
    for name in names:
        place, _, key = name.rpartition(".")
        values = body if not place else body.get(place)
        value = values.get(key, True) if isinstance(values, Mapping) else True
        if key in _ELSEWHERE and value:  # falsy values say nothing
            raise InvalidParameter(
                f"{name}: is not supported: nothing is kept between requests; send the whole request"
            )
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in _NEUTRAL.get(key, ())):
            found.append(name)
    names = found
    if names and context.config.unknown_parameters == "refuse":
        some = ", ".join(name[:64] for name in names[:8])
        raise InvalidPayload(f"unknown names: {some} (option.unknown_parameters=refuse)")
    return names


# -- readers of plain JSON values. Each returns a Python value, or raises ValueError with what would be right ----------


INT32 = (1 << 31) - 1
INT64 = (1 << 63) - 1

MAX_NAME = 256  # characters of what an answer repeats all the time: a model's name, a request's id
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 2048

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


def integer(least: int, most: int = INT32) -> Callable[[Any], int]:
    @accepts(type="integer", minimum=least, maximum=most)
    def read(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ValueError(f"must be an integer from {least} to {most}")
        return value

    return read


def number(least: float, most: float = math.inf, *, above: bool = False, below: bool = False) -> Callable[[Any], float]:
    """Read a finite number in [least, most], without `least` when `above`, without `most` when `below`.

    Engines compute in 32 bits: a number that is 0 there, such as 1e-50, is 0 here too.
    """
    wanted = f"must be a number {'above' if above else 'of at least'} {least:g}"
    if most < math.inf:
        wanted += f" and {'below' if below else 'at most'} {most:g}"
    bounds = {"exclusiveMinimum" if above else "minimum": least, "exclusiveMaximum" if below else "maximum": most}

    @accepts(type="number", **{name: bound for name, bound in bounds.items() if math.isfinite(bound)})
    def read(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(wanted)
        try:
            result = float(value)
        except OverflowError:
            result = math.inf
        result = 0.0 if abs(result) < _LEAST_NORMAL else result
        if not math.isfinite(result) or abs(result) > _MOST or result < least or result > most:
            raise ValueError(wanted)
        if (above and result == least) or (below and result == most):
            raise ValueError(wanted)
        return result

    return read


@accepts(anyOf=STRING_OR_STRINGS)
def strings(value: Any) -> tuple[str, ...]:
    """Read a list of strings; one string stands for a list of one."""
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or len(items) > MAX_STOPS:
        raise ValueError(f"must be a string or a list of at most {MAX_STOPS} strings")
    for item in items:
        if not isinstance(item, str) or not 0 < len(item) <= MAX_STOP_CHARACTERS:
            raise ValueError(f"must hold non-empty strings of at most {MAX_STOP_CHARACTERS} characters")
    return tuple(items)


@accepts(type="array", maxItems=MAX_STOPS, items={"type": "integer", "minimum": 0, "maximum": INT32})
def token_ids(value: Any) -> tuple[int, ...]:
    read = integer(0)
    if not isinstance(value, list) or len(value) > MAX_STOPS:
        raise ValueError(f"must be a list of at most {MAX_STOPS} token ids")
    try:
        return tuple(read(item) for item in value)
    except ValueError:
        raise ValueError("must hold token ids, which are integers of at least 0") from None


@accepts(type="object", additionalProperties={"type": "number", "minimum": -100, "maximum": 100})
def logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    """Read {"token id": number to add to its logit}, as OpenAI and vLLM have it; zeros are dropped."""
    wanted = "must be an object of token ids, each with a number from -100 to 100"
    if not isinstance(value, dict):
        raise ValueError(wanted)
    bias = number(-100, 100)
    try:
        biases = {integer(0)(int(id)): bias(item) for id, item in value.items() if id.isascii() and id.isdecimal()}
    except ValueError:
        raise ValueError(wanted) from None
    if len(biases) < len(value):
        raise ValueError(f"{wanted}, none of them twice")
    return tuple((id, item) for id, item in sorted(biases.items()) if item)


# -- values that are not of the field's own JSON type, as a dialect's original reads them: `8.0`, `"8"`, `1` for true --
# The readers of values take JSON's own types alone, and that is the rule of the dialects whose originals are strict:
# TGI, TEI and MindIE (serde), and Triton (RapidJSON, but for the texts that its vLLM backend reads). Before them, the
# others put the values of their fields right by a rule:
#
# * pydantic's lax mode (docs.pydantic.dev, "Conversion Table"): vLLM's routes, and with them OpenAI's and Anthropic's;
#   LMI's chats and its async mode.
# * Python's: the prompts of LMI's rolling and dynamic batch, whose handlers check no types.
#
# A value that the rule cannot put right stays as it is, for the reader to refuse by name.

Convert = Callable[[Any], Any]

_MAX_CHARACTERS = 4300  # of a number: Python's own limit, and pydantic's
_INTEGER = re.compile(r"([+-]?[0-9]+(?:_[0-9]+)*)(?:\.0+)?")
_FLAGS = {
    **dict.fromkeys(("true", "t", "yes", "y", "on", "1"), True),
    **dict.fromkeys(("false", "f", "no", "n", "off", "0"), False),
}


class Rule(NamedTuple):
    """Conversions of values to those of a JSON type; each returns what it cannot convert."""

    boolean: Convert
    integer: Convert
    number: Convert


# -- Python's ----------------------------------------------------------------------------------------------------


def _truth(value: Any) -> Any:
    return bool(value) if isinstance(value, int | float) and value in (0, 1) else value


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < INT64 else value


def as_int(value: Any) -> Any:
    """Do as Python's `int`, which LMI's handlers call on a prompt's `seed` alone."""
    if not isinstance(value, str | float | bool):
        return value
    try:
        return int(value)
    except (ValueError, OverflowError):
        return value


PYTHON = Rule(_truth, _whole, lambda value: value)
"""Text is left as it is, and so refused: it cannot be compared with a number, and "false" would be true."""


# -- pydantic's --------------------------------------------------------------------------------------------------


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
    rule: Rule, shapes: Mapping[str, Shape], own: Mapping[str, Convert] = MappingProxyType({})
) -> Callable[[Any], Any]:
    """Return a function that puts the values of an object's fields right; anything else it returns as it is.

    Args:
        shapes: the fields' JSON schemas. It looks at numbers and flags, and at lists and objects of them, no deeper.
        own: fields with a conversion of their own.
    """
    converts = {**{name: found for name, shape in shapes.items() if (found := _of_shape(rule, shape))}, **own}

    def relax(body: Any) -> Any:
        return _convert_items(body, converts) if isinstance(body, dict) else body

    return relax


def _convert_items(values: dict[str, Any], converts: Mapping[str, Convert]) -> dict[str, Any]:
    changed = {}
    for name, value in values.items():
        if (convert := converts.get(name)) is not None and (found := convert(value)) is not value:
            changed[name] = found
    return {**values, **changed} if changed else values


def _of_shape(rule: Rule, shape: Shape) -> Convert | None:
    if (plain := _of_scalar(rule, shape)) is not None:
        return plain
    if (item := _of_scalar(rule, shape.get("items", {}))) is not None:
        return lambda value: _convert_list(value, item) if isinstance(value, list) else value
    fields = {name: found for name, one in shape.get("properties", {}).items() if (found := _of_scalar(rule, one))}
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
    named = [kinds] if isinstance(kinds, str) else kinds
    return next((getattr(rule, kind) for kind in named if kind in Rule._fields), None)


# -- readers of the LoRA adapter that a request names: in `adapters`, in a parameter, or in a header -------------------


@accepts(type="string", description="The name of a LoRA adapter")
def named_adapter(value: Any, context: ServerContext) -> Adapter | None:
    """Find the adapter of that name; "" means the model itself.

    Raises:
        ValueError: naming what is wrong.
    """
    if not isinstance(value, str):
        raise ValueError("must be the name of an adapter")
    if not value:
        return None
    check_adapters(context)
    adapter = context.adapters.find(value)
    if adapter is None:
        raise ValueError("no adapter of that name is registered")
    return adapter


def numbered_adapter(number: int, context: ServerContext) -> Adapter:
    """Find the adapter of that number.

    Raises:
        ValueError: no adapter has that number.
    """
    check_adapters(context)
    adapter = context.adapters.by_number(number)
    if adapter is None:
        raise ValueError("no adapter of that number is registered")
    return adapter


def check_adapters(context: ServerContext) -> None:
    """Raise ValueError where the engine serves no adapters."""
    if context.no_adapters:
        raise ValueError(f"the engine {context.engine} serves no LoRA adapters: {context.no_adapters}")


ADAPTERS: Mapping[str, Shape] = {
    "adapters": {
        "anyOf": [TEXT, listing(TEXT), NULL],
        "description": "The name of a LoRA adapter, or one for each prompt",
    }
}
"""What `read_adapters` reads."""


def read_adapters(body: Mapping[str, Any], num_prompts: int, context: ServerContext) -> Sequence[Adapter | None]:
    """Read a body's `adapters`, one for each prompt: a name for all of them, or a list of as many (LMI).

    Without it the adapter is that of the headers.

    Raises:
        InvalidPayload: no such adapter, another one than the headers', or a list of another length.
    """
    given = body.get("adapters")
    if given in (None, "", []):
        return [context.adapter] * num_prompts
    names = given if isinstance(given, list) else [given] * num_prompts
    if len(names) != num_prompts:
        raise InvalidPayload(
            f"'adapters' names {len(names)} for {num_prompts} prompts; it must be one name, or as many"
        )
    return [merge_adapters(context.adapter, _adapter(name, context), "the body") for name in names]


def _adapter(name: Any, context: ServerContext) -> Adapter | None:
    try:
        return named_adapter(name, context)
    except ValueError as error:
        raise InvalidPayload(f"'adapters': {quote(name) if isinstance(name, str) else 'one'}: {error}") from None


def quote(name: str) -> str:
    """Quote a client's text in a message, at most 80 characters of it."""
    return repr(name if len(name) <= 80 else f"{name[:80]}...")


def merge_adapters(first: Adapter | None, second: Adapter | None, what: str) -> Adapter | None:
    """Return the adapter that two places of a request name; either may name none.

    Raises:
        InvalidPayload: they contradict each other; the message begins with `what`, the second place.
    """
    if first is not None and second is not None and first != second:
        raise InvalidPayload(f"{what}: {second.name!r} contradicts the adapter {first.name!r}")
    return second if first is None else first


# -- structured output in the words of LMI and vLLM, TGI and OpenAI's clients ------------------------------------------
# Only cheap checks run here. `engines/structured_output/validator.py` compiles them in a process apart.


MAX_CHARACTERS = 1 << 14  # of a schema as JSON, an expression, a grammar, or all choices together
MAX_CHOICES = 256


@accepts(anyOf=[{"type": "object"}, {"type": "string"}], description="A JSON schema, or the text of one")
def json_schema(value: Any) -> StructuredOutput:
    """Read a JSON schema, as an object or as text."""
    if isinstance(value, str):
        value = _parse(_check_length(value))
    if not isinstance(value, dict):
        raise ValueError("must be a JSON schema, which is an object")
    return StructuredOutput("json_schema", _json(value))


def _parse(text: str) -> Any:
    def constant(name: str) -> None:
        raise ValueError(name)

    try:
        return json.loads(text, parse_constant=constant)
    except (ValueError, RecursionError):
        raise ValueError("must be a JSON schema: its text is not JSON") from None


def structural_tag(value: Mapping[str, Any], *, allows_text: bool = False) -> StructuredOutput:
    """Return the rule of a structural tag, which is made here of clients' schemas."""
    return StructuredOutput("structural_tag", _json({"type": "structural_tag", "format": value}), allows_text)


@accepts(type="boolean", description="Any JSON object")
def json_object(value: Any) -> StructuredOutput | None:
    """Read true: any JSON object."""
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return StructuredOutput("json_object", "") if value else None


@accepts(type="string", description="A regular expression")
def regex(value: Any) -> StructuredOutput:
    """Read a regular expression for the whole answer; its dialect is the engine's.

    Its form is not checked: `re.compile` can hold the GIL for seconds, while other requests wait.
    """
    return StructuredOutput("regex", _text(value, "a regular expression"))


@accepts(type="string", description="A grammar in EBNF")
def grammar(value: Any) -> StructuredOutput:
    """Read a grammar in EBNF."""
    return StructuredOutput("grammar", _text(value, "a grammar in EBNF"))


@accepts(type="array", items={"type": "string", "minLength": 1}, minItems=1, maxItems=MAX_CHOICES)
def choice(value: Any) -> StructuredOutput:
    """Read the list of possible answers."""
    if not isinstance(value, list) or not 0 < len(value) <= MAX_CHOICES:
        raise ValueError(f"must be a list of 1 to {MAX_CHOICES} strings")
    if not all(isinstance(item, str) and item for item in value):
        raise ValueError("must hold non-empty strings")
    return StructuredOutput("choice", _json(value))


@accepts(
    type="object",
    required=["type"],
    properties={"type": {"enum": ["json", "json_object", "json_schema", "regex"]}, "value": {}},
)
def tgi_grammar(value: Any) -> StructuredOutput:
    """Read TGI's `{"type", "value"}` (text-generation-inference 3, router/src/lib.rs)."""
    if not isinstance(value, dict):
        raise ValueError("must be an object with 'type' and 'value'")
    kind, content = value.get("type"), value.get("value")
    _only(value, "type", "value")
    if kind == "json" or (kind == "json_object" and content is not None):
        return json_schema(content)
    if kind == "json_object":
        return StructuredOutput("json_object", "")
    if kind == "json_schema":
        if not isinstance(content, dict) or "schema" not in content:
            raise ValueError("must have a 'value' with 'schema'")
        _only(content, "schema", "name")
        return json_schema(content["schema"])
    if kind == "regex":
        return regex(content)
    raise ValueError("must have a 'type' that is json, json_object, json_schema or regex")


@accepts(
    type="object",
    required=["type"],
    properties={"type": {"enum": ["text", "json_object", "json_schema"]}, "json_schema": {"type": "object"}},
)
def response_format(value: Any) -> StructuredOutput | None:
    """Read OpenAI's `response_format`. `strict` changes nothing: engines always follow a schema as far as they can."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        _only(value, "type")
        return None
    if kind == "json_object":
        _only(value, "type")
        return StructuredOutput("json_object", "")
    if kind != "json_schema":
        raise ValueError("must be an object with a 'type' that is text, json_object or json_schema")
    _only(value, "type", "json_schema")
    content = value.get("json_schema")
    if not isinstance(content, dict) or not isinstance(content.get("schema"), dict):
        raise ValueError("must have a 'json_schema' with 'schema', which is an object")
    _only(content, "schema", "name", "description", "strict")
    return json_schema(content["schema"])


def _only(value: dict[str, Any], *known: str) -> None:
    for name in value:
        if name not in known:
            raise ValueError(f"holds an unknown name {name[:64]!r}")


def _json(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
        text.encode()
    except (UnicodeEncodeError, RecursionError):  # half a surrogate pair, which only an escape can bring in
        raise ValueError("must be JSON without lone surrogates, and not nested too deeply") from None
    return _check_length(text)


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"must be {what}, a non-empty string")
    return _check_length(value)


def _check_length(text: str) -> str:
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"must have at most {MAX_CHARACTERS} characters; it has {len(text)}")
    return text
