"""Anthropic's request fields that set parameters, one a line, and those that have no effect."""

from __future__ import annotations

from typing import Any

from handler.core.values import StructuredOutput
from handler.protocols.kernel.parameters import Parameter, Table, named, unsupported
from handler.protocols.kernel.readers.structured_output import json_schema
from handler.protocols.kernel.readers.values import integer
from handler.protocols.kernel.schema.readers import accepts
from handler.protocols.openai.parameters import CHAT

EFFORTS = ("low", "medium", "high", "xhigh", "max")


@accepts(
    type="object",
    properties={
        "format": {"type": ["object", "null"], "required": ["type", "schema"]},
        "effort": {"enum": [*EFFORTS, None]},
    },
    additionalProperties=False,
)
def _output_config(value: Any) -> StructuredOutput | None:
    """Read `format`, a JSON schema for the whole answer; `read_effort` reads the other name."""
    if not isinstance(value, dict) or value.keys() - {"format", "effort"}:
        raise ValueError("must be an object with 'format', 'effort' or both")
    if value.get("effort") is not None and value["effort"] not in EFFORTS:
        raise ValueError(f"must have an 'effort' that is one of {', '.join(EFFORTS)}")
    if (format := value.get("format")) is None:
        return None
    if not isinstance(format, dict) or format.keys() != {"type", "schema"} or format["type"] != "json_schema":
        raise ValueError("must have a 'format' with 'type': 'json_schema' and 'schema'")
    return json_schema(format["schema"])


TABLE = Table(
    {
        **named("anthropic"),
        "max_tokens": Parameter("max_new_tokens", integer(0)),
        "temperature": CHAT.parameters["temperature"],
        "output_config": Parameter("structured_output", _output_config),
        "speed": unsupported("there is one speed", "standard"),
        "compaction": unsupported("no conversation is summarized here"),
        "container": unsupported("there are no containers"),
        "mcp_servers": unsupported("tools run at the client", []),
        "n": unsupported("an answer is one message", 1),
        "stop": unsupported("write stop_sequences", [], ""),
        "max_new_tokens": unsupported("write max_tokens"),
        "max_completion_tokens": unsupported("write max_tokens"),
        "response_format": unsupported("write output_config.format"),
        "functions": unsupported("write tools", []),
    }
)

NO_EFFECT = frozenset(
    {
        "anthropic_beta",
        "betas",
        "diagnostics",
        "inference_geo",
        "metadata",
        "service_tier",
        "user_profile_id",
        "workspace_id",
    }
)
"""Names that Anthropic's clients send and that change no answer here: listed in a header, never refused."""

ACCEPTED = frozenset({"anthropic_version", "cache_control"})
"""Names that mean nothing for an answer, and are not listed: the version of Bedrock's bodies, and a cache's advice."""
