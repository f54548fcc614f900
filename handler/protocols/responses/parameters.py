"""A response's fields that set parameters, one a line, and those that have no effect."""

from __future__ import annotations

from typing import Any

from handler.core.values import StructuredOutput
from handler.protocols.kernel.parameters import Parameter, Table, named, unsupported
from handler.protocols.kernel.readers.structured_output import response_format
from handler.protocols.kernel.readers.values import integer, string
from handler.protocols.kernel.schema.readers import accepts
from handler.protocols.openai.parameters import CHAT

_KEPT = "nothing is kept between requests, which several instances may answer: send all items as input"


@accepts(type="object", properties={"format": {"type": ["object", "null"]}, "verbosity": {}})
def _text(value: Any) -> StructuredOutput | None:
    """Read `text`: a `format` in the Responses API's form. `verbosity` has no effect."""
    if not isinstance(value, dict) or value.keys() - {"format", "verbosity"}:
        raise ValueError("must be an object with 'format', 'verbosity' or both")
    format = value.get("format")
    if isinstance(format, dict) and format.get("type") == "json_schema":
        return response_format({"type": "json_schema", "json_schema": {k: v for k, v in format.items() if k != "type"}})
    return None if format is None else response_format(format)


_LOGPROBS = "message.output_text.logprobs"
_INCLUDED = (
    "reasoning.encrypted_content", "message.input_image.image_url", "file_search_call.results",
    "web_search_call.results", "web_search_call.action.sources", "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
)  # fmt: skip
"""What a response may be asked to include, and has where there is any: nothing is encrypted or left out here."""


@accepts(type="array", items={"enum": [*_INCLUDED]})
def _include(value: Any) -> None:
    if not isinstance(value, list) or any(name not in _INCLUDED for name in value if name != _LOGPROBS):
        raise ValueError(f"must be a list of {', '.join(_INCLUDED)}")
    if _LOGPROBS in value:
        raise ValueError(f"{_LOGPROBS!r} is not supported: ask for logprobs on /v1/chat/completions")


_PAIRS, _KEY, _VALUE = 16, 64, 512
_ID = 64  # characters


@accepts(
    type="object",
    maxProperties=_PAIRS,
    propertyNames={"maxLength": _KEY},
    additionalProperties={"type": "string", "maxLength": _VALUE},
)
def _metadata(value: Any) -> None:
    if not isinstance(value, dict) or len(value) > _PAIRS:
        raise ValueError(f"must be an object of at most {_PAIRS} pairs")
    for key, item in value.items():
        if len(key) > _KEY or not isinstance(item, str) or len(item) > _VALUE:
            raise ValueError(f"must have keys of at most {_KEY} characters, and strings of at most {_VALUE}")


@accepts(type="string", maxLength=_ID)
def _identifier(value: Any) -> None:
    if len(string(value)) > _ID:
        raise ValueError(f"must have at most {_ID} characters")


TABLE = Table(
    {
        **named("responses"),
        "temperature": CHAT.parameters["temperature"],
        "text": Parameter("structured_output", _text),
        "previous_response_id": unsupported(f"{_KEPT} (option.responses_store)"),
        "conversation": unsupported(_KEPT),
        "context_management": unsupported("the input is not cut or summarized", []),
        "prompt": unsupported("no prompts are kept here"),
        "store": unsupported("nothing is kept (option.responses_store); send store=false, or leave it out", False),
        "background": unsupported("an answer comes with its request", False),
        "truncation": unsupported("the input is not cut", "disabled"),
        "top_logprobs": unsupported("ask for them on /v1/chat/completions", 0),
        "include": Parameter("", _include),
        "max_tool_calls": Parameter("", integer(1)),
        "metadata": Parameter("", _metadata),
        **{name: Parameter("", _identifier) for name in ("prompt_cache_key", "safety_identifier", "user")},
        "service_tier": Parameter("", string),
        "max_tokens": unsupported("write max_output_tokens"),
        "max_completion_tokens": unsupported("write max_output_tokens"),
        "response_format": unsupported("write text.format"),
        "n": unsupported("there is one response", 1),
        "stop": unsupported("the Responses API has no such field", [], ""),
    }
)

NO_EFFECT = frozenset(
    {
        "client_metadata", "metadata", "prompt_cache_key", "prompt_cache_options",
        "prompt_cache_retention", "safety_identifier", "service_tier", "stream_options", "user",
    }
)  # fmt: skip
"""Names that clients send and that change no answer here: listed in a header, never refused."""
