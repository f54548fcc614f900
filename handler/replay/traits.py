"""How the answers to a request may be compared: is it decoded greedily, and which schema does it ask for?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import orjson

from handler.replay.request import Request

_SAMPLING = ("temperature", "top_k", "top_p", "typical_p", "min_p")


class Traits(NamedTuple):
    """Args:
    greedy: the same model says the same again: it is decoded greedily, or is no generation.
    schema: JSON Schema of the answer's text; None: none was asked for.
    json: any JSON was asked for.
    """

    greedy: bool
    streams: bool = False
    schema: Mapping[str, Any] | None = None
    json: bool = False


def traits(request: Request, greedy: bool = False) -> Traits:
    """Read a request.

    Args:
        greedy: every request is decoded greedily, whatever it says.
    """
    try:
        body = orjson.loads(request.body)
    except ValueError:
        return Traits(True)
    if not isinstance(body, dict):
        return Traits(True)
    parameters = body.get("parameters")
    parameters = parameters if isinstance(parameters, dict) else {}
    schema, any_json = _schema(body, parameters)
    streams = body.get("stream") is True or request.path.partition("?")[0].endswith("_stream")
    return Traits(greedy or _is_greedy(body, parameters, request.path), streams, schema, any_json)


def _is_greedy(body: Mapping[str, Any], parameters: Mapping[str, Any], path: str) -> bool:
    values = {**body, **parameters}
    if values.get("do_sample") is False or values.get("top_k") == 1 or values.get("temperature") == 0:
        return True
    if values.get("do_sample") is True:
        return False
    if "messages" in body or "prompt" in body or path.partition("?")[0].endswith("/responses"):
        return False  # OpenAI's and Anthropic's APIs sample at temperature 1 where a request has none
    return not any(values.get(name) is not None for name in _SAMPLING)


def _schema(body: Mapping[str, Any], parameters: Mapping[str, Any]) -> tuple[Mapping[str, Any] | None, bool]:
    """Return the schema that was asked for, and whether JSON was."""
    for values in (body, parameters):
        for found in (
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
            if isinstance(found, str):
                try:
                    found = orjson.loads(found)
                except ValueError:
                    continue
            if isinstance(found, dict):
                return found, True
        if _at(values, "response_format", "type") == "json_object":
            return None, True
    return None, False


def _at(value: Any, *names: str) -> Any:
    for name in names:
        if not isinstance(value, dict):
            return None
        value = value.get(name)
    return value
