"""What Anthropic's clients send: parameters, messages with their blocks, tools and edits. Each object is declared once.

Sources: Anthropic's API reference and documentation ("Messages", "Context editing", "Compaction", "Mid-conversation
system messages and tool changes", "Per-message effort", "Message Batches"); the types of its Python package 2.14.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from handler.core.media import MediaSource
from handler.core.values import StructuredOutput
from handler.protocols.anthropic.api import CompactionRefused
from handler.protocols.assistant.tools.request import DESCRIPTION, MAX_TOOLS, SCHEMA, STRICT_FLAG, TOOL_NAME
from handler.protocols.kernel.messages import check_taken, only_in, read_base64, read_url
from handler.protocols.kernel.objects import (
    AS_IS,
    IGNORED,
    Closed,
    Declaration,
    Leaf,
    ListOf,
    Obj,
    Optional,
    Placed,
    Scope,
    TextOr,
    WithValue,
    among,
    either,
    leaf,
    reader_of,
)
from handler.protocols.kernel.parameters import Parameter, Table, dialect_parameters, unsupported
from handler.protocols.kernel.path import Path
from handler.protocols.kernel.readers import NamedValue, boolean, integer, json_schema, only, string, unread
from handler.protocols.kernel.schema import COUNT, NULL, TEXT, Shape, accepts, listing, nullable, record
from handler.protocols.openai.request import CHAT, MODEL, STREAM

COMPACTION = "compaction"
EFFORTS = ("low", "medium", "high", "xhigh", "max")

_STRING, _FLAG = leaf(string), leaf(boolean)
_CACHED: Mapping[str, Declaration] = {"type": AS_IS, "cache_control": IGNORED}
_EFFORT = among(*EFFORTS, None, must=f"must have an 'effort' that is one of {', '.join(EFFORTS)}")

# -- tools -------------------------------------------------------------------------------------------------------------


_SERVER = ("web_search_", "web_fetch_", "code_execution_", "tool_search_tool_", "mcp_toolset", "advisor_")
"""Prefixes of the `type` of tools that run on Anthropic's servers."""


_RUN_THERE = "server tools only run on Anthropic's servers"


@accepts(enum=["custom", None])
def _custom(value: Any) -> None:
    if value not in (None, "custom"):
        is_of_server = isinstance(value, str) and value.startswith(_SERVER)
        remedy = _RUN_THERE if is_of_server else "send name, description and input_schema"
        raise ValueError(f"is not supported: {remedy}")


@accepts(**listing(TEXT))
def _callers(value: Any) -> None:
    if value != [] and (not isinstance(value, list) or "direct" not in value):
        raise ValueError("must contain 'direct', because only the model calls tools")


_TOOL = Obj(
    {
        "type": WithValue(leaf(_custom)),
        "name": TOOL_NAME,
        "description": DESCRIPTION,
        "input_schema": SCHEMA,
        "cache_control": IGNORED,
        "strict": STRICT_FLAG,
        "defer_loading": Optional(WithValue(_FLAG)),
        "allowed_callers": Optional(WithValue(leaf(_callers))),
    },
    "must be an object with 'name' and 'input_schema'",
)


def _read_tool(tool: Any, at: Path, scope: Scope) -> dict[str, Any]:
    """Return the fields of a tool, and the paths of unknown names, which are reported if the chat shows the tool."""
    fields = _TOOL.read(tool, Path(at.keys), scope._replace(unknown={}))
    return {**fields, "unknown": unread(tool, "tools[]", _TOOL.fields)}


_SHAPES = _TOOL.shape["properties"]
TOOL = Placed(_read_tool, {**_TOOL.shape, "properties": {name: _SHAPES[name] for name in _TOOL.fields}})

CHOICES = {"auto": "auto", "any": "required", "none": "none"}
"""Maps the types of `tool_choice` that name no tool to the values in a chat."""

TOOL_CHOICE = Closed(
    "must be an object with a 'type' that is auto, any, tool or none",
    {"name": Leaf(AS_IS.reader, TEXT), "disable_parallel_tool_use": Optional(_FLAG)},
    (*CHOICES, "tool"),
)

# -- blocks ------------------------------------------------------------------------------------------------------------


def _read_source(value: Any, at: Path, scope: Scope) -> MediaSource:
    check_taken("image", "image", str(at._replace(keys=at.keys[:-1])), scope.context)
    source = value if isinstance(value, dict) else {}
    scope.unknown.update(unread(source, at.general, ("type", "media_type", "data", "url")))
    match source.get("type"):
        case "base64":
            return read_base64("image", source.get("data"), f"{at}.data")
        case "url":
            return read_url("image", source.get("url"), f"{at}.url")
        case "file":
            raise at.refused("'file' is not supported: files are not stored; send base64 or url")
    raise at.refused("must be an object with a 'type' that is base64 or url")


def _check_transformations(value: Any, at: Path, scope: Scope) -> None:
    """Check that an image may be scaled down to the model's maximum size, because it would be."""
    if not isinstance(value, dict) or not value.keys() <= {"oversized_image"}:
        raise at.refused("must be an object with 'oversized_image'")
    WithValue(among(None, "downsize", must="is not supported: a large image is scaled down; send downsize")).read(
        value.get("oversized_image"), at.at("oversized_image"), scope
    )


def _read_arguments(value: Any) -> Any:
    if value is None or value == []:
        return {}
    if not isinstance(value, dict):
        raise ValueError("must be an object")
    return value


def _report(value: Any, at: Path, scope: Scope) -> None:
    """Report a block of encrypted reasoning, which only Anthropic can decrypt."""
    scope.unknown[f"{Path(at.keys[:-1]).general}.redacted_thinking"] = None


def _changed(**forms: Obj) -> Placed:
    """Return the declaration of the tool in a change, which has one of these types."""

    def read(tool: Any, at: Path, scope: Scope) -> Any:
        form = tool.get("type") if isinstance(tool, dict) else None
        if form in ("mcp_tool_reference", "mcp_toolset_reference"):
            raise NamedValue(str(at.at("type")), form).refused("is not supported: tools run on the client")
        if not isinstance(form, str) or form not in forms:
            raise at.refused(f"must be an object with a 'type' that is {' or '.join(forms)}")
        return forms[form].read(tool, at, scope)

    return Placed(read, record({"type": {"enum": [*forms]}}))


_REFERENCE = Obj({"type": IGNORED, "name": _STRING})
_DEFINITION = Obj({"type": IGNORED, "definition": TOOL})

CHANGES = ("tool_addition", "tool_removal")
"""The types of the blocks of system messages that change which tools the model may call."""

_UNSUPPORTED: Mapping[str, str] = {
    "image": only_in("image"),
    "document": "send its text in a block of type 'text'",
    "search_result": "send its text in a block of type 'text'",
    "container_upload": "the server has no containers",
    "tool_reference": "it is allowed only in the results of tools",
    **dict.fromkeys(CHANGES, "it is allowed only in the system messages of 'messages'"),
}
"""Maps types of blocks to the reason why they are refused where they are not allowed."""


class ContentBlock(NamedTuple):
    """A block of one of several types.

    Attributes:
        of_system: whether the block is in the system prompt or a system message.
    """

    kinds: tuple[str, ...]
    of_system: bool = False

    @property
    def shape(self) -> Shape:
        return record({"type": {"enum": [*_BLOCKS]}})

    def read(self, block: Any, at: Path, scope: Scope) -> dict[str, Any]:
        """Return the fields of a block by name, and its path, `at`.

        Raises:
            CompactionRefused: a system message contains a summary.
        """
        kinds, of_system = self
        kind = block.get("type") if isinstance(block, dict) else None
        if kind in kinds:
            fields = _BLOCKS[kind].read(block, at, scope)
            fields["at"] = at
            return fields
        allowed = either(kinds)
        if not isinstance(kind, str):
            raise at.refused(f"must be an object with a 'type' that is {allowed}")
        if kind == COMPACTION and of_system:
            raise CompactionRefused("block_misplaced", f"{at}: a system message cannot contain a summary")
        is_of_server = kind.startswith("server_tool_use") or kind.endswith("_tool_result")
        remedy = _RUN_THERE if is_of_server else f"the type must be {allowed}"
        raise at.refused(f"{kind[:64]!r} is not supported: {_UNSUPPORTED.get(kind, remedy)}")


def _content(*kinds: str, of_system: bool = False) -> Optional:
    return Optional(TextOr(ListOf(ContentBlock(kinds, of_system), "blocks")))


_BLOCKS: Mapping[str, Obj] = {
    "text": Obj({"text": _STRING, **_CACHED}),
    "image": Obj(
        {
            "source": Placed(_read_source, {}),
            "transformations": Optional(Placed(_check_transformations, {})),
            **_CACHED,
        }
    ),
    "thinking": Obj({"type": AS_IS, "thinking": _STRING, "signature": IGNORED}),
    "redacted_thinking": Obj({"type": AS_IS, "data": Placed(_report, {})}),
    "tool_use": Obj(
        {
            "id": _STRING,
            "name": _STRING,
            "input": Leaf(_read_arguments, {}),
            "caller": IGNORED,
            **_CACHED,
        }
    ),
    "tool_result": Obj(
        {
            "tool_use_id": _STRING,
            "content": _content("text", "image", "tool_reference"),
            **_CACHED,
        }
    ),
    "tool_reference": Obj({"tool_name": _STRING, **_CACHED}),
    COMPACTION: Obj(
        {"content": AS_IS, "encrypted_content": IGNORED, "signature": AS_IS, "tool_changes": AS_IS, **_CACHED}
    ),
    "tool_addition": Obj({"tool": _changed(tool_reference=_REFERENCE, tool_definition=_DEFINITION), **_CACHED}),
    "tool_removal": Obj({"tool": _changed(tool_reference=_REFERENCE), **_CACHED}),
}
"""The blocks by type, with all their known names."""

# -- messages ----------------------------------------------------------------------------------------------------------


SYSTEM = _content("text", of_system=True)
"""The system prompt."""

CONTENTS: Mapping[str, Declaration] = {
    "user": _content("text", "image", "tool_result", COMPACTION),
    "assistant": _content("text", "thinking", "redacted_thinking", "tool_use", COMPACTION),
    "system": _content("text", *CHANGES, of_system=True),
}
"""The contents of messages by role."""

NEXT_USER_MESSAGE = "next_user_message"

MESSAGE = Obj(
    {
        "role": among(*CONTENTS, must=f"must be one of {', '.join(CONTENTS)}"),
        "content": Leaf(AS_IS.reader, SYSTEM.shape),
        "clear_at": Optional(WithValue(among(None, NEXT_USER_MESSAGE, "never"))),
        "output_config": Optional(WithValue(Closed("must be an object with 'effort'", {"effort": _EFFORT}))),
    },
    "must be an object with 'role' and 'content'",
)
"""A message, whose content is read later, because the model does not see some messages."""

# -- edits and summaries -----------------------------------------------------------------------------------------------


CLEAR_THINKING: Final = "clear_thinking_20251015"
CLEAR_TOOL_USES: Final = "clear_tool_uses_20250919"
COMPACT: Final = "compact_20260112"

_INSTRUCTIONS = Optional(WithValue(Leaf(lambda value: string(value).strip(), TEXT)), "")


def _quantity(minimum: int, *types: str) -> Closed:
    return Closed(
        f"must be an object with 'type': {' or '.join(map(repr, types))} and a 'value'",
        {"value": WithValue(leaf(integer(minimum)))},
        types,
    )


def _read_turns(value: Any) -> int | None:
    """Return the number of messages that keep their reasoning, or None for all."""
    keep = value or {"type": "thinking_turns", "value": 1}
    only(keep, "type", "value")
    match keep:
        case "all" | {"type": "all"}:
            return None
        case {"type": "thinking_turns", "value": int(turns)} if turns > 0 and turns is not True:
            return turns
    raise ValueError("must be all, or an object with 'type': 'thinking_turns' and a 'value'")


def _read_names(value: Any) -> frozenset[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError("must be a list of tool names")
    return frozenset(value)


def _read_inputs(value: Any) -> bool | frozenset[str]:
    return value if isinstance(value, bool) else _read_names(value)


def _edit(kind: str, **fields: Declaration) -> Closed:
    return Closed(f"must be an object with the type {kind}", fields, (kind,))


EDITS: Mapping[str, Closed] = {
    CLEAR_THINKING: _edit(CLEAR_THINKING, keep=Leaf(_read_turns, {})),
    CLEAR_TOOL_USES: _edit(
        CLEAR_TOOL_USES,
        trigger=Optional(_quantity(1, "input_tokens", "tool_uses"), {"type": "input_tokens", "value": 100_000}),
        keep=Optional(_quantity(0, "tool_uses"), {"value": 3}),
        clear_at_least=Optional(_quantity(0, "input_tokens"), {"value": 0}),
        exclude_tools=Optional(WithValue(Leaf(_read_names, {})), frozenset()),
        clear_tool_inputs=Optional(WithValue(Leaf(_read_inputs, {})), False),
    ),
    COMPACT: _edit(
        COMPACT,
        trigger=Optional(_quantity(1, "input_tokens"), {"value": None}),
        instructions=_INSTRUCTIONS,
        pause_after_compaction=Optional(WithValue(_FLAG), False),
    ),
}
"""The edits by type."""

_CONTEXT_MANAGEMENT: Shape = nullable(
    record({}, {"edits": nullable(listing(record({"type": {"enum": [*EDITS]}})))}, additionalProperties=NULL)
)

SUMMARIZE = Closed("must be an object with 'type': 'summarize'", {"instructions": _INSTRUCTIONS}, ("summarize",))

# -- parameters --------------------------------------------------------------------------------------------------------


@accepts(type="integer", minimum=1)
def _budget(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError("must be an integer of at least 1")
    return value


_MISMATCHES = (None, "error", "drop_block")  # no block mismatches, because signatures are not checked


@accepts(**record({}, {"prefix_mismatch_behavior": {"enum": [*_MISMATCHES]}}, additionalProperties=NULL))
def _binding(value: Any) -> None:
    """Check `block_binding`, which determines what happens to thinking blocks of other conversations."""
    only(value, "prefix_mismatch_behavior")
    if not isinstance(value, dict) or value.get("prefix_mismatch_behavior") not in _MISMATCHES:
        raise ValueError("must be an object whose 'prefix_mismatch_behavior' is error or drop_block")


ENABLED = {"enabled": True, "adaptive": None, "disabled": False}

THINKING = Closed(
    "must be an object whose 'type' is enabled, adaptive or disabled",
    {
        "budget_tokens": Optional(leaf(_budget)),
        "display": among(None, "summarized", "updates", "omitted"),  # all except the last show the whole reasoning
        "block_binding": Optional(leaf(_binding)),
    },
    (*ENABLED,),
)


@accepts(type="object", required=["type", "schema"])
def _output_format(value: Any) -> StructuredOutput:
    """Read the format of the whole response, which the beta of structured outputs had at the top level of the body."""
    if not isinstance(value, dict) or value.get("type") != "json_schema" or "schema" not in value:
        raise ValueError("must be an object with 'type': 'json_schema' and 'schema'")
    only(value, "type", "schema")
    return json_schema(value["schema"])


@accepts(type="object", required=["type", "schema"])
def _config_format(value: Any) -> StructuredOutput:
    try:
        return _output_format(value)
    except ValueError as error:
        raise ValueError(f"has a 'format' that {error}") from None


_COUNT = Placed(lambda count, at, scope: NamedValue(f"output_config.{at}", count).read(integer(0)), COUNT)
_TASK_BUDGET = Closed(
    "must have a 'task_budget' with 'type': 'tokens' and 'total'",
    {"total": _COUNT, "remaining": Placed(Optional(_COUNT).read, COUNT)},
    ("tokens",),
)
OUTPUT_CONFIG = Closed(
    "must be an object with 'format', 'effort' or both",
    {
        "format": Optional(leaf(_config_format)),
        "effort": _EFFORT,
        "task_budget": Optional(Placed(_TASK_BUDGET.read, {"type": "object", "required": ["type", "total"]})),
    },
)

_read_config = reader_of(OUTPUT_CONFIG)


@accepts(**OUTPUT_CONFIG.shape)
def _output_config(value: Any) -> Any:
    """Read `format`, a JSON schema for the whole response. The budget of a whole task has no effect."""
    return _read_config(value)["format"]


TABLE = Table(
    {
        **dialect_parameters("anthropic"),
        "max_tokens": Parameter("max_new_tokens", integer(0)),
        "temperature": CHAT.parameters["temperature"],
        "output_config": Parameter("structured_output", _output_config),
        "output_format": Parameter("structured_output", _output_format),
        **{name: CHAT.parameters[name] for name in ("chat_template_kwargs", "vllm_xargs", "watermarking")},
        "speed": unsupported("only the standard speed is available", "standard"),
        "container": unsupported("the server has no containers"),
        "mcp_servers": unsupported("tools run on the client", []),
        "n": unsupported("a response has exactly one message", 1),
        "stop": unsupported("use stop_sequences", [], ""),
        "max_new_tokens": unsupported("use max_tokens"),
        "max_completion_tokens": unsupported("use max_tokens"),
        "response_format": unsupported("use output_config.format"),
        "functions": unsupported("use tools", []),
    }
)

NO_EFFECT = frozenset(
    {
        "anthropic_beta",
        "betas",
        "billing_policy",
        "diagnostics",
        "fallback_credit_token",
        "fallbacks",
        "metadata",
        "mm_payload",
        "return_mm_kwargs",
        "service_tier",
        "user_profile_id",
        "workspace_id",
    }
)
"""Fields of Anthropic's and vLLM's APIs that have no effect here. They are reported as ignored, but not refused."""

ACCEPTED = frozenset({"anthropic_version", "cache_control"})
"""Fields that have no effect and are not reported as ignored: Bedrock's API version, and caching hints."""

FIELDS: Mapping[str, Shape] = {
    "messages": listing(MESSAGE.shape, minItems=1),
    "system": SYSTEM.shape,
    **MODEL,
    "stream": STREAM["stream"],
    "tools": nullable(listing(TOOL.shape, maxItems=MAX_TOOLS)),
    "tool_choice": nullable(TOOL_CHOICE.shape),
    "thinking": nullable(THINKING.shape),
    "context_management": _CONTEXT_MANAGEMENT,
    COMPACTION: nullable(SUMMARIZE.shape),
}
"""The schemas of the fields that are no parameters."""
