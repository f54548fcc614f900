"""Read a body's bytes as strict JSON, and report its unknown names."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import orjson

from handler.core.errors import InvalidParameter, InvalidPayload, NotJson
from handler.core.nesting import MAX_DEPTH, is_too_deep
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.validation import show

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
