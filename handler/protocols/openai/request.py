"""Readers that OpenAI's chat and text completions share."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from handler.core.errors import InvalidParameter
from handler.core.framing import KEEP_ALIVE, SSE_DONE, Framing
from handler.core.values import FieldNames, Request
from handler.protocols.kernel.base import ParsedRequest, Reply
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.errors import ErrorFormat
from handler.protocols.kernel.parameters import ParsedParameters
from handler.protocols.kernel.schema.readers import accepts, schema_of_reader
from handler.protocols.kernel.schema.shapes import FLAG, Shape, nullable
from handler.protocols.kernel.validation import show
from handler.protocols.openai.parameters import HARMLESS
from handler.protocols.openai.response import Usage

_STREAM_OPTIONS = ("include_usage", "continuous_usage_stats", "include_obfuscation")
"""`include_obfuscation` has no effect: this server pads no chunk."""


def unknown_fields(body: Mapping[str, Any], read: Collection[str]) -> list[str]:
    """List the body's names that no table knows; null means absent."""
    return [name for name, value in body.items() if value is not None and name not in read and name not in HARMLESS]


def names(prompt: str, parameters: ParsedParameters) -> FieldNames:
    """Return the client's names of the fields that later checks refuse."""
    ruled = parameters.sampling.structured_output is not None  # without a name by the tools' schemas
    structured_output = parameters.names.get("structured_output", "tools" if ruled else "response_format")
    if structured_output == "tool_choice":
        structured_output = "tools"
    return FieldNames(
        prompt=prompt,
        max_new_tokens=parameters.names.get("max_new_tokens", "max_tokens"),
        stop_token_ids="stop_token_ids",
        bad_token_ids="bad_words",
        logit_bias="logit_bias",
        structured_output=structured_output,
    )


def read_stream(body: Mapping[str, Any], context: ServerContext) -> tuple[bool, Usage]:
    """Read `stream` and `stream_options`."""
    stream, options = body.get("stream"), body.get("stream_options")
    if stream is not None and not isinstance(stream, bool):
        raise InvalidParameter(f"stream={show(stream)}: must be true or false")
    stream = bool(stream)
    if options is None:
        return stream, read_usage({}, force=context.config.enable_force_include_usage)
    if not stream:
        raise InvalidParameter(f"stream_options={show(options)}: needs stream=true")
    try:
        return True, read_usage(options, force=context.config.enable_force_include_usage)
    except ValueError as error:
        raise InvalidParameter(f"stream_options={show(options)}: {error}") from None


@accepts(
    type="object",
    properties={name: {"type": ["boolean", "null"]} for name in _STREAM_OPTIONS},
    additionalProperties=False,
)
def read_usage(options: Any, *, force: bool = False) -> Usage:
    """Read `stream_options`.

    Args:
        force: counts come at the end whatever the options say.
    """
    if not isinstance(options, dict):
        raise ValueError("must be an object")
    for name, value in options.items():
        if name not in _STREAM_OPTIONS:
            raise ValueError(f"{name[:64]!r} is not known")
        if value is not None and not isinstance(value, bool):
            raise ValueError(f"{name!r} must be true or false")
    at_end = force or bool(options.get("include_usage"))
    return Usage(at_end, at_end and bool(options.get("continuous_usage_stats")), null=at_end)


STREAM: Mapping[str, Shape] = {"stream": nullable(FLAG), "stream_options": nullable(schema_of_reader(read_usage))}
"""What `read_stream` reads."""


def streaming(
    requests: tuple[Request, ...],
    reply: Reply,
    errors: ErrorFormat,
    ignored: Sequence[str],
    framing: Framing = SSE_DONE,
) -> ParsedRequest:
    """Return the request of a stream. Only server-sent events have comments, which keep a connection open."""
    keep_alive = KEEP_ALIVE if framing.content_type == SSE_DONE.content_type else b""
    return ParsedRequest(requests, reply, errors, ignored, streams=True, keep_alive=keep_alive)
