"""Readers of the fields that LMI's dialects share: `inputs`, `parameters`, `stream`; and of unknown names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from handler.core.errors import InvalidParameter, InvalidPayload
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.parameters import LMI, REQUEST_FIELDS
from handler.protocols.kernel.readers.adapters import ADAPTERS
from handler.protocols.kernel.readers.body import report_unknown
from handler.protocols.kernel.readers.lax import PYTHON, as_int, relaxed_by
from handler.protocols.kernel.schema.readers import schema_of_reader
from handler.protocols.kernel.schema.shapes import FLAG, TEXT, Shape, nullable
from handler.protocols.kernel.validation import show
from handler.protocols.tensors.inputs import TABLE

FIELDS: Mapping[str, Shape] = {
    "inputs": nullable({**TEXT, "minLength": 1}),
    "parameters": {"type": ["object", "null"], "description": "null means absent"},
    "stream": nullable(FLAG),
    **ADAPTERS,
}
"""The body's fields; dynamic batch's `inputs` may be a list."""
_KNOWN = TABLE.parameters.keys() | REQUEST_FIELDS.keys()
_FORMATTER = "output_formatter"
_relax = relaxed_by(PYTHON, FIELDS)
_relax_parameters = relaxed_by(
    PYTHON,
    {**{name: schema_of_reader(read) for name, read in REQUEST_FIELDS.items()}, **LMI.shapes},
    {"seed": as_int},
)


def read_object(body: Any) -> Mapping[str, Any]:
    if not isinstance(body, dict):
        raise InvalidPayload("the body must be a JSON object with 'inputs'")
    if body.get("inputs") is None:
        parameters = body.get("parameters")
        if not isinstance(parameters, dict) or parameters.get("input_ids") is None:
            raise InvalidPayload("the body has no 'inputs'")
    return relaxed(body)


def relaxed(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Put the numbers and flags of a body of rolling or dynamic batch right, as LMI reads them."""
    parameters = body.get("parameters")
    return {**_relax(body), "parameters": _relax_parameters(parameters)} if parameters else _relax(body)


def read_parameters_field(body: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = body.get("parameters")
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        raise InvalidPayload("'parameters' must be an object")
    return parameters


def without_beaten(parameters: Mapping[str, Any], beaten: Mapping[str, str]) -> tuple[Mapping[str, Any], list[str]]:
    """Return the parameters without the names that lose to another of theirs, and those that would say something else.

    Args:
        beaten: names, each with that which replaces it in LMI.
    """
    lost = [name for name, by in beaten.items() if parameters.get(name) is not None and parameters.get(by) is not None]
    if not lost:
        return parameters, []
    kept = {name: value for name, value in parameters.items() if name not in lost}
    return kept, [f"parameters.{name}" for name in lost if parameters[name] != parameters[beaten[name]]]


def read_field(parameters: Mapping[str, Any], name: str) -> Any:
    """Read a name under `parameters` that is not sampling; None when absent."""
    value = parameters.get(name)
    if value is None:
        return None
    try:
        return REQUEST_FIELDS[name](value)
    except ValueError as error:
        raise InvalidParameter(f"parameters.{name}={show(value)}: {error}") from None


def read_stream(body: Mapping[str, Any]) -> bool | None:
    """Read the body's own `stream`; None when absent."""
    stream = body.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise InvalidPayload("'stream' must be true or false")
    return stream


def wants_stream(body: Mapping[str, Any], streaming: bool | None) -> bool:
    """Return whether a body of rolling or dynamic batch asks for a stream; GptManager's `streaming` must agree."""
    stream = read_stream(body)
    if streaming is not None and stream is not None and streaming != stream:
        raise InvalidParameter(f"parameters.streaming={show(streaming)} contradicts 'stream'")
    return bool(streaming if stream is None else stream)


def unknown_names(body: Mapping[str, Any], parameters: Mapping[str, Any], context: ServerContext) -> list[str]:
    """List the body's names that no table knows."""
    names = [name for name in body if name not in FIELDS]
    names += [f"parameters.{name}" for name in parameters if name not in _KNOWN]
    if parameters.get(_FORMATTER) is not None and read_field(parameters, _FORMATTER) is None:
        names.append(f"parameters.{_FORMATTER}")
    if read_field(parameters, "stream") and not body.get("stream"):  # the body's own replaces it
        names.append("parameters.stream")
    return report_unknown(names, body, context)
