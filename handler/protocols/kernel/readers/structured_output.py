"""Readers of structured output in the words of LMI and vLLM (`guided_*`), TGI (`grammar`) and OpenAI's clients.

Only cheap checks run here. `engines/structured_output/validator.py` compiles them in a process apart.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from handler.core.values import StructuredOutput
from handler.protocols.kernel.schema.readers import accepts

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
