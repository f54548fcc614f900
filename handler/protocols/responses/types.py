"""What requests to the Responses API contain: items, tools and settings, each declared once.

Sources: "Responses" in OpenAI's API reference, and the types in its Python package, 3.57.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from handler.core.values import StructuredOutput
from handler.protocols.assistant.template import EFFORTS
from handler.protocols.assistant.tools.request import DESCRIPTION, SCHEMA, STRICT_FLAG, TOOL_FIELDS, TOOL_NAME
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.messages import MAX_ARGUMENTS
from handler.protocols.kernel.objects import (
    AS_IS,
    IGNORED,
    Declaration,
    Leaf,
    Obj,
    Optional,
    Variant,
    WithValue,
    among,
    leaf,
    members,
)
from handler.protocols.kernel.parameters import ROWS, Parameter, Table, dialect_parameters, request_shape, unsupported
from handler.protocols.kernel.readers import integer, metadata, only, response_format, string, string_up_to
from handler.protocols.kernel.schema import (
    FLAG,
    NULL,
    TEXT,
    Shape,
    accepts,
    listing,
    nullable,
    record,
    schema_of_reader,
)
from handler.protocols.openai.chat import OpenAiChat
from handler.protocols.openai.request import CHAT

SEND_ALL = "send all items as input"

# -- items -------------------------------------------------------------------------------------------------------------


COMPACTION, TRIGGER = "compaction", "compaction_trigger"
"""The types of an item with a summary, and of the last item in a request for a summary."""


class Written(NamedTuple):
    """How a response contains items of a type that the model writes.

    Attributes:
        event: the beginning of the types of the events with its text.
        field: the field of the last event that contains the whole text. Without a part, it is also that of the item.
        part: the type of the part of the item's content that contains the text, or "" if the text is in a field.
        of_part: other fields of the part.
        more: other fields of the events.
        repeated: fields of the item that the last event repeats.
    """

    event: str
    field: str
    part: str = ""
    of_part: Mapping[str, Any] = MappingProxyType({})
    more: Mapping[str, Any] = MappingProxyType({})
    repeated: Collection[str] = ()

    def content(self, text: str) -> dict[str, Any]:
        """Return the part with a text."""
        return {"type": self.part, "text": text, **self.of_part}


class ItemType(NamedTuple):
    """A type of items in `input`, in responses and in stored conversations.

    Attributes:
        meaning: what an item is in the chat. `InputReader` has a method for each meaning.
        fields: the fields that are read or have no effect. Items that only other servers write may have any.
        prefix: the prefix of ids.
        of: the type of the call to which an output belongs, or the name of the function as which a recorded call is
            read.
        written: how items that the model writes are written.
    """

    meaning: str
    fields: Obj | None = None
    prefix: str = "item"
    of: str = ""
    written: Written = Written("", "")


def _item(**fields: Declaration) -> Obj:
    return Obj({**dict.fromkeys(("id", "status"), IGNORED), **fields})


def _of_call(**fields: Declaration) -> Obj:
    name = Leaf(lambda value: value if isinstance(value, str) else "", {})
    return _item(call_id=_STRING, **fields, namespace=name, caller=IGNORED)


def _call_text(value: Any) -> str:
    text = "" if value is None or value == [] else string(value)
    if len(text) > MAX_ARGUMENTS:
        raise ValueError(f"has {len(text)} characters; the maximum is {MAX_ARGUMENTS}")
    return text


_STRING = leaf(string)
_TEXT = Leaf(_call_text, {"anyOf": [TEXT, NULL, listing({}, maxItems=0)]})
_CONTENT = AS_IS
"""Content parts, which `InputReader` reads, because the role of a message decides whether they may be media."""

CALLS: Mapping[str, str] = {
    "apply_patch_call": "apply_patch",
    "computer_call": "computer",
    "local_shell_call": "local_shell",
    "mcp_approval_request": "mcp_approval",
    "program": "program",
    "shell_call": "shell",
    "tool_search_call": "tool_search",
}
"""Maps types of recorded calls to names of functions, for calls whose output is a separate item."""

OUTPUTS: Mapping[str, str] = {
    "apply_patch_call_output": "apply_patch_call",
    "computer_call_output": "computer_call",
    "local_shell_call_output": "local_shell_call",
    "mcp_approval_response": "mcp_approval_request",
    "program_output": "program",
    "shell_call_output": "shell_call",
    "tool_search_output": "tool_search_call",
}
"""Maps the types of recorded outputs to those of their calls."""

WITH_RESULTS: Mapping[str, str] = {
    "code_interpreter_call": "code_interpreter",
    "file_search_call": "file_search",
    "image_generation_call": "image_generation",
    "mcp_call": "mcp",
    "mcp_list_tools": "mcp_list_tools",
    "web_search_call": "web_search",
}
"""Maps types of recorded calls to names of functions, for calls that contain their results."""

ITEMS: Mapping[str, ItemType] = {
    "message": ItemType(
        "message",
        _item(role=_CONTENT, content=_CONTENT, phase=IGNORED),
        "msg",
        written=Written(
            "response.output_text", "text", "output_text", {"annotations": [], "logprobs": []}, {"logprobs": []}
        ),
    ),
    "function_call": ItemType(
        "call",
        _of_call(arguments=_TEXT, name=_STRING),
        "fc",
        written=Written("response.function_call_arguments", "arguments", repeated=("name",)),
    ),
    "function_call_output": ItemType("output", _of_call(output=_CONTENT, name=IGNORED), "fco", "function_call"),
    "custom_tool_call": ItemType(
        "call",
        _of_call(input=_TEXT, name=_STRING),
        "ctc",
        written=Written("response.custom_tool_call_input", "input"),
    ),
    "custom_tool_call_output": ItemType("output", _of_call(output=_CONTENT, name=IGNORED), "ctco", "custom_tool_call"),
    "reasoning": ItemType(
        "reasoning",
        _item(summary=_CONTENT, content=_CONTENT, encrypted_content=_CONTENT),
        "rs",
        written=Written("response.reasoning_text", "text", "reasoning_text"),
    ),
    "agent_message": ItemType("agent_message", _item(author=_STRING, recipient=_STRING, content=_CONTENT), "amsg"),
    COMPACTION: ItemType("summary", _item(encrypted_content=_CONTENT, created_by=IGNORED), "cmp"),
    TRIGGER: ItemType("trigger", Obj({"id": IGNORED}), "cmpt"),
    **{kind: ItemType("recorded_call", of=name) for kind, name in CALLS.items()},
    **{kind: ItemType("recorded_output", of=call) for kind, call in OUTPUTS.items()},
    **{kind: ItemType("recorded_result", of=name) for kind, name in WITH_RESULTS.items()},
}

ITEM = Variant("type", {kind: known.fields for kind, known in ITEMS.items() if known.fields}, default="message")
"""An item of one of the types whose fields are read."""

REFUSED: Mapping[str, str] = {
    "additional_tools": "is not supported: send all tools in 'tools'",
    "configuration_update": "is not supported: send 'reasoning' and 'text' in the request",
    "item_reference": ("is not supported: responses are not stored (option.responses_store); send the item itself"),
}
"""What is said of items of other types: those that change how the model responds, which cannot be read as history, and
references, which are replaced before if responses are stored.
"""

INPUT: Mapping[str, Shape] = {
    "input": {"anyOf": [{**TEXT, "minLength": 1}, listing(record({}, {"type": {"enum": [*ITEMS, None]}}), minItems=1)]},
    "instructions": nullable(TEXT),
}
"""The schemas of the fields that `InputReader` reads."""


def type_of(item: Any) -> Any:
    """Return the type of an item. Without `type`, items that have only an id are references, and others messages."""
    if not isinstance(item, dict):
        return None
    if item.get("type") is not None:
        return item["type"]
    return "item_reference" if "id" in item and item.keys() <= {"id", "type"} else "message"


def meaning_of(item: Any) -> str:
    """Return the meaning of an item, or "" if it has none."""
    kind = type_of(item)
    return ITEMS[kind].meaning if isinstance(kind, str) and kind in ITEMS else ""


def referenced(item: Any) -> str | None:
    """Return the id in an item reference, or None if the item is not a reference."""
    return item["id"] if type_of(item) == "item_reference" and isinstance(item.get("id"), str) else None


def user_message(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": text}


# -- `tools` and `tool_choice` -----------------------------------------------------------------------------------------


CUSTOM = "custom"
"""The type of tools that accept text instead of JSON."""

SKIPPED = (
    "web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11",
)  # fmt: skip
"""Types of tools that are omitted from the prompt and the response. Codex sends these tools with its functions."""

HOSTED = ("web_search", "file_search", "code_interpreter", "image_generation", "mcp", "computer", "tool_search")
"""Prefixes of the `type` of tools that run on OpenAI's servers."""


def _of_custom(format: Any) -> dict[str, Any]:
    """Return the parameters of the function that replaces a custom tool. Its only parameter, `input`, is the text.

    Raises:
        ValueError: the format is neither text nor a regular expression.
    """
    text: dict[str, Any] = {"type": "string"}
    only(format, "type", "syntax", "definition")
    match format:
        case None | {"type": "text"}:
            pass
        case {"type": "grammar", "syntax": "regex", "definition": str(expression)}:
            text["pattern"] = f"^(?:{expression})$"
        case _:
            raise ValueError("must have 'type': 'text', or 'type': 'grammar' with 'syntax': 'regex' and 'definition'")
    schema = {"type": "object", "properties": {"input": text}, "required": ["input"], "additionalProperties": False}
    return {"parameters": schema, "strict": "pattern" in text}


_ABOUT: Mapping[str, Declaration] = {"type": IGNORED, "name": TOOL_NAME, "description": DESCRIPTION}
TOOLS_BY_TYPE: Mapping[str, Obj] = {
    "function": Obj({**_ABOUT, "parameters": Optional(SCHEMA), "strict": STRICT_FLAG}),
    CUSTOM: Obj({**_ABOUT, "format": WithValue(Leaf(_of_custom, {"type": ["object", "null"]}))}),
}
"""Tools by type. The parameters and `strict` of a custom tool are in its `format`."""

NAMESPACE = ("type", "name", "description", "tools")
"""The known names of a namespace of tools."""

TOOL: Mapping[str, Shape] = {
    **{name: field.shape for tool in TOOLS_BY_TYPE.values() for name, field in tool.fields.items()},
    "type": {"enum": ["function", "namespace", CUSTOM, *SKIPPED]},
}
"""The schemas of the fields of functions and custom tools."""

TOOLS: Mapping[str, Shape] = {
    "tools": nullable(listing({**record(TOOL), "required": ["type"]})),
    "tool_choice": TOOL_FIELDS["tool_choice"],
}
"""The schemas of the fields that `ToolsReader` reads."""

CHOSEN = ("type", "name", "namespace")
"""The known names of a tool in `tool_choice`."""


def full_name(namespace: Any, name: str) -> str:
    """Return the name of a tool in the prompt, which includes its namespace, if any."""
    return f"{namespace}.{name}" if isinstance(namespace, str) and namespace else name


def skipped(tool: Mapping[str, Any]) -> str:
    """Return the reason for omitting a tool, as a field for `x-lmi-ignored-parameters`, or "" if it is not omitted."""
    kind, format = tool.get("type"), tool.get("format")
    if kind == CUSTOM and isinstance(format, dict) and format.get("syntax") == "lark":
        return "tools[].format.syntax=lark"  # no engine supports it
    return f"tools[].type={kind}" if kind in SKIPPED else ""


def without_skipped(tools: list[Any]) -> list[Any]:
    """Return the tools that are not omitted. The response repeats these tools, and a choice may name them."""
    return [tool for tool in tools if not isinstance(tool, dict) or not skipped(tool)]


# -- settings ----------------------------------------------------------------------------------------------------------


@accepts(type="object", properties={"format": {"type": ["object", "null"]}, "verbosity": {}})
def _text(value: Any) -> StructuredOutput | None:
    """Read `text`. Its `format` follows the Responses API, and its `verbosity` has no effect."""
    if not isinstance(value, dict):
        raise ValueError("must be an object with 'format', 'verbosity' or both")
    only(value, "format", "verbosity")
    format = value.get("format")
    if isinstance(format, dict) and format.get("type") == "json_schema":
        format = {"type": "json_schema", "json_schema": {k: v for k, v in format.items() if k != "type"}}
    return None if format is None else response_format(format)


_LOGPROBS = "message.output_text.logprobs"
INCLUDED = (
    "reasoning.encrypted_content", "message.input_image.image_url", "file_search_call.results",
    "web_search_call.results", "web_search_call.action.sources", "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
)  # fmt: skip
"""The known values of `include`. They have no effect, because responses always include all available data."""


@accepts(type="array", items={"enum": [*INCLUDED]})
def _include(value: Any) -> None:
    if not isinstance(value, list) or any(name not in INCLUDED for name in value if name != _LOGPROBS):
        raise ValueError(f"must be a list of {', '.join(INCLUDED)}")
    if _LOGPROBS in value:
        raise ValueError(f"{_LOGPROBS!r} is not supported: use logprobs on /v1/chat/completions")


_ID = 64  # characters


BACKGROUND = "background"


def _always(value: str) -> Leaf:
    return among(value, None, must=f"must be {value}, the only supported value")


_background_options = members(
    "must be an object",
    completion_window=_always("soonest"),
    continuation_id=Optional(_STRING),
)
"""Reads `background_options`. They have no effect, because a response is always generated as soon as possible."""


read_reasoning = members(
    "must be an object with 'effort', 'summary' or both",
    effort=among(*EFFORTS, None, must=f"must be one of {', '.join(EFFORTS)}"),
    summary=IGNORED,
    generate_summary=IGNORED,
    context=_always("auto"),
    mode=_always("standard"),
)
"""Reads `reasoning`. The chat template decides which reasoning of the conversation it shows."""


_OF_VLLM = (
    "chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs", "structured_outputs", "vllm_xargs",
    "watermarking", *(row.openai for row in ROWS if row.vllm_responses),
)  # fmt: skip
"""vLLM's fields of responses that are read as in chats (vllm/entrypoints/openai/responses/protocol.py, 0.33)."""

TABLE = Table(
    {
        **dialect_parameters("responses"),
        **{name: CHAT.parameters[name] for name in sorted(_OF_VLLM)},
        "include_reasoning": unsupported("a response always contains the reasoning", True),
        "enable_response_messages": unsupported("send the messages to /tokenize to see the prompt", False),
        "temperature": CHAT.parameters["temperature"],
        "text": Parameter("structured_output", _text),
        "previous_response_id": unsupported(f"responses are not stored (option.responses_store); {SEND_ALL}"),
        "conversation": unsupported(f"conversations are not stored; {SEND_ALL}"),
        "prompt": unsupported("the server does not store prompts"),
        "store": unsupported(
            "responses are not stored (option.responses_store); send store=false, or omit store", False
        ),
        "background": unsupported("responses are not stored (option.responses_store); omit background", False),
        "background_options": Parameter("", _background_options),
        "truncation": unsupported("the input is never truncated", "disabled"),
        "top_logprobs": unsupported("use top_logprobs on /v1/chat/completions", 0),
        "include": Parameter("", _include),
        "max_tool_calls": Parameter("", integer(1)),
        "metadata": Parameter("", metadata),
        **{name: Parameter("", string_up_to(_ID)) for name in ("prompt_cache_key", "safety_identifier", "user")},
        "service_tier": Parameter("", string),
        "max_tokens": unsupported("use max_output_tokens"),
        "max_completion_tokens": unsupported("use max_output_tokens"),
        "response_format": unsupported("use text.format"),
        "n": unsupported("a request has exactly one response", 1),
    }
)

STORED_FIELDS = ("store", "previous_response_id", "conversation", BACKGROUND)
"""The fields that are supported only if responses are stored."""

NO_EFFECT = frozenset(
    {
        "client_metadata", "metadata", "mm_payload", "prompt_cache_key", "prompt_cache_options",
        "prompt_cache_retention", "request_id", "return_mm_kwargs", "safety_identifier", "service_tier", "session_id",
        "stream_options", "user",
    }
)  # fmt: skip
"""Fields that clients send but that have no effect here. They are reported as ignored, but not refused."""

OF_CHAT = {name: OpenAiChat.fields[name] for name in ("model", "stream", "parallel_tool_calls")}
_MANAGEMENT = record(
    {"type": {"enum": [COMPACTION]}}, {"compact_threshold": nullable({"type": "integer", "minimum": 1})}
)

FIELDS: Mapping[str, Shape] = {
    **INPUT,
    **OF_CHAT,
    **TOOLS,
    "context_management": nullable(listing({**_MANAGEMENT, "additionalProperties": NULL}, maxItems=1)),
    "reasoning": nullable({**schema_of_reader(read_reasoning), "additionalProperties": NULL}),
}

_WITHOUT_STORE = request_shape(FIELDS, TABLE, "input")


def body_shape(context: ServerContext) -> Shape:
    """Return the schema of a body. It includes the fields of stored responses if the server stores responses."""
    shape = _WITHOUT_STORE(context)
    if not context.config.stores_responses:
        return shape
    conversation = nullable({"anyOf": [TEXT, record({"id": TEXT}, additionalProperties=False)]})
    flags = {name: nullable(FLAG) for name in ("store", BACKGROUND)}
    stored = {**flags, "previous_response_id": nullable(TEXT), "conversation": conversation}
    reference = {"anyOf": [record({"id": TEXT}), *shape["properties"]["input"]["anyOf"]]}
    return {**shape, "properties": {**shape["properties"], **stored, "input": reference}}
