"""From bytes to the parts of a body that LMI's dialects share: strict JSON, `inputs`, `parameters`, unknown names."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from handler.core.errors import InvalidParameter, InvalidPayload, NotJson
from handler.protocols.base import ServerContext
from handler.protocols.parameters import REQUEST_FIELDS, show
from handler.protocols.tensors.inputs import TABLE

_TOP_LEVEL = {"inputs", "parameters", "stream", "adapters"}
_KNOWN = TABLE.parameters.keys() | REQUEST_FIELDS.keys()


def decode(body: bytes | memoryview) -> Any:
    """JSON, strictly: no duplicate keys, NaN, lone surrogates, or anything after the document.

    Raises:
        NotJson: saying what is wrong, and where.
    """
    text = decode_text(body, "utf-8-sig")
    if not text or text.isspace():
        raise NotJson("the body is empty")
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
        if "\\u" in text:  # only an escape can bring half a surrogate pair in
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise NotJson(f"the body is not valid JSON: {error.msg.removesuffix(' at')} at {where}") from None
    except UnicodeEncodeError:
        raise NotJson("the body is not valid JSON: a lone surrogate in a string") from None
    except RecursionError:
        raise NotJson("the body is not valid JSON: nested too deeply") from None
    except ValueError as error:
        raise NotJson(f"the body is not valid JSON: {error}") from None
    return value


def decode_text(body: bytes | memoryview, encoding: str = "utf-8") -> str:
    """Raises NotJson where it is not UTF-8."""
    try:
        return str(body, encoding)
    except UnicodeDecodeError as error:
        raise NotJson(f"the body is not UTF-8: {error.reason} at byte {error.start}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"the key {show(counts.most_common(1)[0][0])} stands twice")
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def read_object(body: Any) -> Mapping[str, Any]:
    if not isinstance(body, dict):
        raise InvalidPayload("the body must be a JSON object with 'inputs'")
    if body.get("inputs") is None:
        parameters = body.get("parameters")
        if not isinstance(parameters, dict) or parameters.get("input_ids") is None:
            raise InvalidPayload("the body has no 'inputs'")
    return body


def read_parameters_field(body: Mapping[str, Any]) -> Mapping[str, Any]:
    found = body.get("parameters")
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise InvalidPayload("'parameters' must be an object")
    return found


def read_field(parameters: Mapping[str, Any], name: str) -> Any:
    """One of the names under `parameters` that are not sampling; None when absent."""
    value = parameters.get(name)
    if value is None:
        return None
    try:
        return REQUEST_FIELDS[name](value)
    except ValueError as error:
        raise InvalidParameter(f"parameters.{name}={show(value)}: {error}") from None


def read_stream(body: Mapping[str, Any], parameters: Mapping[str, Any], streaming: bool | None = None) -> bool:
    """`stream`, of which the top level's beats the one among the parameters; GptManager's must not contradict them."""
    inner = read_field(parameters, "stream")
    outer = body.get("stream")
    if outer is not None and not isinstance(outer, bool):
        raise InvalidPayload("'stream' must be true or false")
    stream = inner if outer is None else outer
    if streaming is not None and stream is not None and streaming != stream:
        raise InvalidParameter(f"parameters.streaming={show(streaming)} contradicts 'stream'")
    return bool(streaming if stream is None else stream)


def unknown_names(body: Mapping[str, Any], parameters: Mapping[str, Any], context: ServerContext) -> list[str]:
    """Names that mean nothing here: never silently dropped."""
    found = [name for name in body if name not in _TOP_LEVEL]
    found += [f"parameters.{name}" for name in parameters if name not in _KNOWN]
    return reported(found, body, context)


def reported(found: list[str], body: Mapping[str, Any], context: ServerContext) -> list[str]:
    """The names that no one has read, to be named in the answer, unless they are refused."""
    if found and context.refuse_unknown:
        some = ", ".join(name[:64] for name in found[:8])
        raise InvalidPayload(f"unknown names: {some} (option.unknown_parameters=refuse)")
    return found
