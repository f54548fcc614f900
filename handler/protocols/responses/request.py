"""Requests to OpenAI's endpoints /v1/responses and /v1/responses/input_tokens.

Items, tools and parameters are translated to those of an OpenAI chat, and `OpenAiChat.build` builds the request.
A response is stored if option.responses_store is set and the body does not have `store=false`.
Sources: "Responses" in OpenAI's API reference, and the types in its Python package.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from handler.core.errors import InvalidParameter, InvalidPayload, NotKept
from handler.core.framing import JSON, SSE
from handler.core.media import MediaSource
from handler.core.values import Request, StructuredOutput
from handler.protocols.assistant.summary import (
    PROMPT,
    Summarizing,
    SummaryRequest,
    message_of,
    of_bounded_length,
    unshaped,
)
from handler.protocols.assistant.template import EFFORTS
from handler.protocols.assistant.tools.request import TOOL_FIELDS, read_name
from handler.protocols.kernel.context import RequestContext, ServerContext
from handler.protocols.kernel.dialect import Description, FollowUp, ParsedRequest
from handler.protocols.kernel.messages import (
    MAX_ARGUMENTS,
    PartReader,
    TurnsReader,
    add_to_turn,
    check_role,
    read_arguments,
    string_at,
)
from handler.protocols.kernel.parameters import (
    ROWS,
    STRICT,
    Parameter,
    Table,
    dialect_parameters,
    request_shape,
    unsupported,
)
from handler.protocols.kernel.readers import (
    NamedValue,
    boolean,
    integer,
    metadata,
    only,
    response_format,
    show,
    string,
    unread,
)
from handler.protocols.kernel.schema import FLAG, NULL, TEXT, Shape, accepts, listing, nullable, record
from handler.protocols.kernel.stored import Keeper, Keeping, Wanted, kept_items, too_long
from handler.protocols.openai.api import OpenAiError
from handler.protocols.openai.chat import OpenAiChat, ParsedChat, counted
from handler.protocols.openai.request import CHAT, OPENAI_NAMES, OpenAiDialect, streaming
from handler.protocols.responses import recorded
from handler.protocols.responses.api import (
    CompactedResponse,
    ConversationName,
    OpenAiResponse,
    OpenAiResponseEvent,
    ResponseHead,
    ResponseStart,
    ResponseTokens,
    duplicate_item,
)
from handler.protocols.responses.background import BACKGROUND, detached, read_background, read_options
from handler.protocols.responses.compaction import (
    COMPACTION,
    TRIGGER,
    CompactedDocument,
    CompactingDocument,
    CompactingStream,
    CompactionDocument,
    CompactionStream,
    Summaries,
    after_compaction,
    has_replaceable,
    read_threshold,
)
from handler.protocols.responses.response import (
    CUSTOM,
    NUM_STATES,
    SKIPPED,
    Origin,
    ResponseDocument,
    ResponseSettings,
    ResponseStream,
    encode_head,
    new_id,
    read_head,
    secret_id,
    skipped,
    without_skipped,
    without_strict,
)

_SEND_ALL = "send all items as input"


@accepts(type="object", properties={"format": {"type": ["object", "null"]}, "verbosity": {}})
def _text(value: Any) -> StructuredOutput | None:
    """Read `text`. Its `format` follows the Responses API, and its `verbosity` has no effect."""
    if not isinstance(value, dict):
        raise ValueError("must be an object with 'format', 'verbosity' or both")
    only(value, "format", "verbosity")
    format = value.get("format")
    if isinstance(format, dict) and format.get("type") == "json_schema":
        return response_format({"type": "json_schema", "json_schema": {k: v for k, v in format.items() if k != "type"}})
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


@accepts(type="string", maxLength=_ID)
def _identifier(value: Any) -> None:
    if len(string(value)) > _ID:
        raise ValueError(f"must have at most {_ID} characters")


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
        "previous_response_id": unsupported(f"responses are not stored (option.responses_store); {_SEND_ALL}"),
        "conversation": unsupported(f"conversations are not stored; {_SEND_ALL}"),
        "prompt": unsupported("the server does not store prompts"),
        "store": unsupported(
            "responses are not stored (option.responses_store); send store=false, or omit store", False
        ),
        "background": unsupported("responses are not stored (option.responses_store); omit background", False),
        "background_options": Parameter("", read_options),
        "truncation": unsupported("the input is never truncated", "disabled"),
        "top_logprobs": unsupported("use top_logprobs on /v1/chat/completions", 0),
        "include": Parameter("", _include),
        "max_tool_calls": Parameter("", integer(1)),
        "metadata": Parameter("", metadata),
        **{name: Parameter("", _identifier) for name in ("prompt_cache_key", "safety_identifier", "user")},
        "service_tier": Parameter("", string),
        "max_tokens": unsupported("use max_output_tokens"),
        "max_completion_tokens": unsupported("use max_output_tokens"),
        "response_format": unsupported("use text.format"),
        "n": unsupported("a request has exactly one response", 1),
    }
)

NO_EFFECT = frozenset(
    {
        "client_metadata", "metadata", "mm_payload", "prompt_cache_key", "prompt_cache_options",
        "prompt_cache_retention", "request_id", "return_mm_kwargs", "safety_identifier", "service_tier", "session_id",
        "stream_options", "user",
    }
)  # fmt: skip
"""Fields that clients send but that have no effect here. They are reported as ignored, but not refused."""


# -- `instructions` and `input`, translated to messages of a chat ------------------------------------------------------


_ROLES = ("user", "assistant", "system", "developer")
_ITEMS = {
    "message": {"type", "role", "content", "id", "status", "phase"},
    "function_call": {"type", "id", "call_id", "name", "namespace", "arguments", "status", "caller"},
    "function_call_output": {"type", "id", "call_id", "output", "status", "name", "namespace", "caller"},
    "custom_tool_call": {"type", "id", "call_id", "name", "namespace", "input", "status", "caller"},
    "custom_tool_call_output": {"type", "id", "call_id", "output", "status", "name", "namespace", "caller"},
    "reasoning": {"type", "id", "summary", "content", "status", "encrypted_content"},
    "agent_message": {"type", "id", "author", "recipient", "content", "status"},
    COMPACTION: {"type", "id", "encrypted_content", "created_by", "status"},
    TRIGGER: {"type", "id"},
}
"""Maps each item type to its known fields, some of which never affect the response."""

_PREFIXES = {
    "message": "msg", "function_call": "fc", "function_call_output": "fco", "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco", "reasoning": "rs", "agent_message": "amsg", COMPACTION: "cmp", TRIGGER: "cmpt",
}  # fmt: skip
"""Maps an item type to the prefix of item ids."""

INPUT: Mapping[str, Shape] = {
    "input": {
        "anyOf": [
            {**TEXT, "minLength": 1},
            listing(record({}, {"type": {"enum": [*_ITEMS, *recorded.TYPES, None]}}), minItems=1),
        ]
    },
    "instructions": nullable(TEXT),
}
"""The schemas of the fields that `InputReader` reads."""


def full_name(namespace: Any, name: str) -> str:
    """Return the name of a tool in the prompt, which includes its namespace, if any."""
    return f"{namespace}.{name}" if isinstance(namespace, str) and namespace else name


NO_CALLS: Mapping[str, str] = MappingProxyType({})


class InputReader(TurnsReader):
    """Reads the input of one request, and translates it to chat messages.

    Attributes:
        field: the name of the field with the items, for reports of names without effect.
        items: the items of `input`, with references replaced by the stored items.
        compacts: whether the request asks for a summary of its conversation.
        summaries: writes and reads summaries.
        last_summary: the last summary in the conversation, or "" if there is none.

    Args:
        calls: the types of calls that come before the items, by their ids, the latest last.
    """

    field = "input"

    def __init__(
        self, context: ServerContext, request_context: RequestContext, calls: Mapping[str, str] = NO_CALLS
    ) -> None:
        super().__init__(context)
        self._request_context = request_context
        self._parts = PartReader(context, f"{self.field}[].content[]", self.unknown)
        self.summaries = Summaries(context.sealer, request_context.owner)
        self.items: list[Any] = []
        self._read_items: Sequence[tuple[str, Any]] = ()  # items that the model reads
        self.compacts = False
        self.last_summary = ""
        self._calls = {**calls}

    def read(self, body: Mapping[str, Any]) -> None:
        """Read `instructions`, the items of previous responses, and `input`.

        Raises:
            InvalidPayload: an item is invalid. The error states its path and a valid form, but quotes no text.
            NotKept: an item that `input` refers to is not stored.
        """
        instructions, input = body.get("instructions"), body.get("input")
        if instructions is not None:
            if not isinstance(instructions, str):
                raise InvalidPayload("'instructions' must be a string")
            add_to_turn(self.chat, "system", content=instructions)
        if isinstance(input, str) and input:
            input = [_user_message(input)]
        if not isinstance(input, list) or not input:
            raise InvalidPayload("'input' must be a non-empty string or list of items")
        field = "previous_response_id" if body.get("conversation") is None else "conversation"
        stored = [(f"{field}: item {index}", item) for index, item in enumerate(self.history) if not _is_skipped(item)]
        sent = [(f"input[{index}]", self._resolved(item, f"input[{index}]")) for index, item in enumerate(input)]
        self._read_items = after_compaction([*stored, *sent])
        for at, item in self._read_items:
            self._item(item, at)
        self._add_shown()
        if not self.chat:
            raise InvalidPayload("'input' must contain at least one item that is part of the prompt")
        self._join_turns()

    def _resolved(self, item: Any, at: str) -> Any:
        """Return the stored item if `item` is a reference, or else `item` unchanged.

        Raises:
            NotKept: the stored item does not exist.
        """
        if self._request_context.keeper is not None and (id := referenced(item)) is not None:
            item = self._request_context.recalled.items.get(id)
            if item is None:
                reason = (
                    "no item with this id is stored: it has expired, was deleted, or was created with store=false; "
                    "send the item itself"
                )
                raise NotKept(f"{at}.id={show(id)}: {reason}", "input")
        self.items.append(item)
        return item

    def _item(self, item: Any, at: str) -> None:
        kind = type_of(item)
        if not isinstance(kind, str):
            raise InvalidPayload(f"{at} must be an object with 'type', or with 'role' and 'content'")
        if kind == "item_reference":
            raise InvalidPayload(
                f"{at}: 'item_reference' is not supported: responses are not stored (option.responses_store); "
                "send the item itself"
            )
        if self.compacts:
            raise InvalidPayload(f"{at}: {TRIGGER} must be the last item")
        if kind in recorded.TYPES:
            return self._recorded(item, kind, at)
        if kind not in _ITEMS:
            reason = recorded.REFUSED.get(kind, f"the type must be {' or '.join(_ITEMS)}")
            raise InvalidPayload(f"{at}: {kind[:64]!r} is not supported: {reason}")
        self.unknown |= unread(item, f"{self.field}[]", _ITEMS[kind])
        if kind.endswith("_output"):
            return self._output(item, at)
        self._add_shown()
        if kind == TRIGGER:
            return self._compact()
        if kind == "message":
            self._message(item, at)
        elif kind == "reasoning":
            self._reasoning(item, at)
        elif kind == "agent_message":
            self._agent_message(item, at)
        elif kind == COMPACTION:
            self.last_summary = self.summaries.read(item, at)
            add_to_turn(self.chat, "user", content=message_of(self.last_summary, self._context.vocabulary))
        else:
            add_to_turn(self.chat, "assistant", tool_calls=self._call(item, at))

    @property
    def history(self) -> Sequence[Any]:
        """The stored items before those of `input`."""
        return self._request_context.recalled.history

    @property
    def may_compact(self) -> bool:
        """Whether a summary could replace items of the conversation before the response."""
        return not self.compacts and has_replaceable(self._read_items)

    def user_messages(self) -> list[Any]:
        """Return the user messages of the conversation."""
        items = [*self.history, *self.items]
        return [item for item in items if type_of(item) == "message" and item["role"] == "user"]

    def _compact(self) -> None:
        """Ask for a summary of the conversation.

        Raises:
            InvalidPayload: there is nothing to summarize.
        """
        if not any(message["role"] != "system" for message in self.chat):
            raise InvalidPayload("'input' has nothing to summarize")
        add_to_turn(self.chat, "user", content=PROMPT)
        self.compacts = True

    def _message(self, item: Mapping[str, Any], at: str) -> None:
        content, path = item.get("content"), f"{at}.content"
        role = check_role(item.get("role"), at, _ROLES, self._context)
        parts = self._parts.read(content, path, media=True) if role == "user" else [self._text(content, path)]
        for part in parts or [""]:
            add_to_turn(self.chat, "system" if role == "developer" else role, content=part)

    def _agent_message(self, item: Mapping[str, Any], at: str) -> None:
        """Read what an agent says to another agent, such as Codex' sub-agents, as a user message with tags."""
        author, recipient = (string_at(item.get(name), f"{at}.{name}") for name in ("author", "recipient"))
        content = item.get("content")
        if isinstance(content, list):
            content = [self._readable(part) for part in content]
        text = self._text(content, f"{at}.content")
        tag = f"<agent_message author={json.dumps(author)} recipient={json.dumps(recipient)}>"
        add_to_turn(self.chat, "user", content=f"{tag}\n{text}\n</agent_message>")

    def _readable(self, part: Any) -> Any:
        """Return a part of an agent's message, or words in place of one that only OpenAI can decrypt."""
        if not isinstance(part, dict) or part.get("type") != "encrypted_content":
            return part
        self.unknown[f"{self.field}[].content[].encrypted_content"] = None
        return {"type": "input_text", "text": "[encrypted]"}

    def _reasoning(self, item: Mapping[str, Any], at: str) -> None:
        field = "content" if item.get("content") else "summary"
        parts = item.get(field)
        if not parts and item.get("encrypted_content"):  # only OpenAI can decrypt it
            self.unknown[f"{self.field}[].encrypted_content"] = None
        if parts:
            add_to_turn(self.chat, "assistant", reasoning_content=self._text(parts, f"{at}.{field}"))

    def _output(self, item: Mapping[str, Any], at: str) -> None:
        """Read the output of a tool call. Its images are added to the chat after all adjacent outputs."""
        id = string_at(item.get("call_id"), f"{at}.call_id")
        if id not in self._calls:
            call = item["type"].removesuffix("_output")
            raise InvalidPayload(f"{at}.call_id={show(id)}: no earlier {call} has this id")
        parts = self._parts.read(item.get("output"), f"{at}.output", media=True)
        output = "\n".join([part for part in parts if isinstance(part, str)])
        self._shown += [part for part in parts if isinstance(part, MediaSource)]
        self.chat.append({"role": "tool", "tool_call_id": id, "content": output})

    def _recorded(self, item: Mapping[str, Any], kind: str, at: str) -> None:
        """Read a call of a tool that another server hosts, or its output, as a function call or its output."""
        if kind in recorded.OUTPUTS:
            ids, text = recorded.read_output(item)
            latest = [id for id, call_kind in self._calls.items() if call_kind == recorded.OUTPUTS[kind]][-1:]
            id = next((id for id in [*ids, *latest] if id in self._calls), None)
            if id is None:
                raise InvalidPayload(f"{at}: no earlier {recorded.OUTPUTS[kind]} has the id of this output")
            self.chat.append({"role": "tool", "tool_call_id": id, "content": text})
            return
        self._add_shown()
        call = recorded.read_call(item)
        id = call.id or f"{kind}_{len(self._calls)}"
        self._calls[id] = kind
        function = {"name": call.name, "arguments": call.arguments}
        add_to_turn(self.chat, "assistant", tool_calls={"id": id, "type": "function", "function": function})
        if call.output is not None:
            self.chat.append({"role": "tool", "tool_call_id": id, "content": call.output})

    def _text(self, content: Any, at: str) -> str:
        """Read a string or a list of text parts. Return the text, with parts joined by newlines."""
        return "\n".join([part for part in self._parts.read(content, at, media=False) if isinstance(part, str)])

    def _call(self, item: Mapping[str, Any], at: str) -> dict[str, Any]:
        field = "input" if item["type"] == "custom_tool_call" else "arguments"
        id, text_value = string_at(item.get("call_id"), f"{at}.call_id"), item.get(field)
        text = "" if text_value is None or text_value == [] else string_at(text_value, f"{at}.{field}")
        name = full_name(item.get("namespace"), string_at(item.get("name"), f"{at}.name"))
        if len(text) > MAX_ARGUMENTS:
            raise InvalidPayload(f"{at}.{field} has {len(text)} characters; the maximum is {MAX_ARGUMENTS}")
        value = {field: text} if field == "input" else read_arguments(text, f"{self.field}[].arguments", self.unknown)
        self._calls[id] = item["type"]
        return {"id": id, "type": "function", "function": {"name": name, "arguments": value}}


def _is_skipped(item: Mapping[str, Any]) -> bool:
    """Return whether a stored item is not part of the prompt: a request for a summary, or a truncated call."""
    if item["type"] in ("function_call", "custom_tool_call"):
        return bool(item.get("status") == "incomplete")
    return bool(item["type"] == TRIGGER)


def _user_message(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": text}


def referenced(item: Any) -> str | None:
    """Return the id in an item reference, or None if the item is not a reference."""
    return item["id"] if type_of(item) == "item_reference" and isinstance(item.get("id"), str) else None


def with_ids(items: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return items in the form in which they are stored, with ids and with the text of messages as parts."""
    return [_with_id(item) for item in items]


def _with_id(item: Mapping[str, Any]) -> dict[str, Any]:
    kind = item.get("type") or "message"
    id = item.get("id")
    stored = {**item, "type": kind, "id": id if isinstance(id, str) and id else secret_id(_PREFIXES.get(kind, "item"))}
    if kind == "message" and isinstance(text := item.get("content") or "", str):
        part = {"type": "output_text", "annotations": []} if item["role"] == "assistant" else {"type": "input_text"}
        stored["content"] = [{**part, "text": text}]
    return stored if item.get("status") else {**stored, "status": "completed"}


def type_of(item: Any) -> Any:
    """Return the type of an item. Without `type`, items that have only an id are references, and others messages."""
    if not isinstance(item, dict):
        return None
    implied = "item_reference" if "id" in item and item.keys() <= {"id", "type"} else "message"
    return implied if item.get("type") is None else item["type"]


# -- `tools` and `tool_choice`, translated to those of a chat ----------------------------------------------------------


_HOSTED = ("web_search", "file_search", "code_interpreter", "image_generation", "mcp", "computer", "tool_search")
"""Prefixes of the `type` of tools that run on OpenAI's servers."""

_TOOL_FIELDS: Mapping[str, Shape] = {
    "type": {"enum": ["function", "namespace", CUSTOM, *SKIPPED]},
    "name": TEXT,
    "description": nullable(TEXT),
    "parameters": {"type": ["object", "null"]},
    "strict": nullable(FLAG),
    "format": {"type": ["object", "null"]},
}
TOOLS: Mapping[str, Shape] = {
    "tools": nullable(listing({**record(_TOOL_FIELDS), "required": ["type"]})),
    "tool_choice": TOOL_FIELDS["tool_choice"],
}
"""The schemas of the fields that `ToolsReader` and `read_choice` read."""

_CHOSEN = ("type", "name", "namespace")
_NAMESPACE = ("type", "name", "description", "tools")
"""The known names of a tool that `tool_choice` names, and of a namespace."""


class ToolsReader:
    """Reads the tools of one request, and translates them to chat tools.

    Attributes:
        tools: the tools in the format of a chat request, or the unchanged field if it is not a list. The chat reader
            checks names and schemas.
        origins: maps a tool's name in the prompt to its declaration, for custom tools and tools of a namespace.
        ignored: the reasons for omitting tools and the paths of unknown names, for `x-lmi-ignored-parameters`.
        left_out: maps the names of omitted custom tools to these reasons.
        formats: the names of custom tools whose text must match a regular expression.
    """

    def __init__(self) -> None:
        self.tools: Any = None
        self.ignored: dict[str, None] = {}
        self.left_out: dict[str, str] = {}
        self.origins: dict[str, Origin] = {}
        self.formats: list[str] = []

    def read(self, value: Any) -> None:
        """Read the tools. The names of tools in a namespace are prefixed with the namespace.

        Raises:
            InvalidParameter: a tool is neither a function nor a custom tool, or is malformed.
        """
        self.tools = value if not isinstance(value, list) else []
        for index, tool in enumerate(value if isinstance(value, list) else ()):
            self._tool(tool, f"tools[{index}]", "")

    def _tool(self, tool: Any, at: str, namespace: str) -> None:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(tool, dict) and (reason := skipped(tool)):
            self.ignored[reason] = None
            if kind == CUSTOM:
                self.left_out[full_name(namespace, str(tool.get("name")))] = reason
            return
        if kind == "namespace" and not namespace and isinstance(tool.get("tools"), list):
            if not isinstance(tool.get("name"), str) or not tool["name"]:
                raise InvalidParameter(f"{at}.name: must be a non-empty string")
            self.ignored |= unread(tool, "tools[]", _NAMESPACE)
            for index, member in enumerate(tool["tools"]):
                self._tool(member, f"{at}.tools[{index}]", tool["name"])
            return
        if kind not in ("function", CUSTOM):
            hosted = isinstance(kind, str) and kind.startswith(_HOSTED)
            reason = "hosted tools only run on OpenAI's servers" if hosted else f"the type must be function or {CUSTOM}"
            raise InvalidParameter(f"{at}.type={show(kind)}: is not supported: {reason}")
        self._add(tool, kind, at, namespace)

    def _add(self, tool: Mapping[str, Any], kind: str, at: str, namespace: str) -> None:
        short_name = read_name(tool.get("name"), f"{at}.name")
        name = read_name(full_name(namespace, short_name), f"{at}.name with its namespace")
        if namespace or kind == CUSTOM:
            self.origins[name] = Origin(namespace, short_name, kind == CUSTOM)
        fields = _TOOL_FIELDS.keys() - ({"format"} if kind == "function" else {"parameters", "strict"})
        unknown_fields = {key: item for key, item in tool.items() if key not in fields}
        source = NamedValue(f"{at}.format", tool.get("format")).read(_of_custom) if kind == CUSTOM else tool
        function = {"name": name, "description": tool.get("description"), "parameters": source.get("parameters")}
        function |= {"strict": source["strict"]} if "strict" in source else {}
        if kind == CUSTOM and function["strict"]:
            self.formats.append(name)
        self.tools.append({"type": "function", "function": {**unknown_fields, **function}})

    def named(self, request: Request, choice: Any) -> Request:
        """Return the request with the field that the error names if the engine refuses its structured output.

        The error names the formats of custom tools if no schema of another tool can be the reason.

        Args:
            choice: `tool_choice` in the format of a chat request.
        """
        rule, field = request.sampling.structured_output, request.names.structured_output
        with_text = field == "text" and rule is not None and rule.kind == "structural_tag"
        if field != "tools" and not with_text:
            return request
        compiled = self._compiled(choice, with_text=with_text)
        custom = [name for name in compiled if name in self.formats]
        if not custom:
            return request
        if custom == compiled:
            blamed = f"tools: the format of {' or '.join(custom)}"
        else:
            blamed = "tools: a schema or a format" if with_text else "tools"
        blamed += ", or text" if with_text else ""
        return request._replace(names=request.names._replace(structured_output=blamed))

    def _compiled(self, choice: Any, *, with_text: bool) -> list[str]:
        """Return the names of the tools whose schemas are part of the structured output.

        Args:
            with_text: whether the structured output also contains a schema for the text.
        """
        functions, called = [tool["function"] for tool in self.tools], choice not in (None, "auto")
        if isinstance(choice, dict):
            allowed = choice.get("allowed_tools", {"mode": "required", "tools": [choice]})
            names = [tool["function"]["name"] for tool in allowed["tools"]]
            functions = [function for function in functions if function["name"] in names]
            called = allowed["mode"] == "required"
        return [function["name"] for function in functions if called or with_text or function.get("strict")]


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


def read_choice(value: Any, reader: ToolsReader) -> Any:
    """Return `tool_choice` in the format of a chat request.

    Raises:
        InvalidParameter: the value is malformed, or names an unknown or omitted tool.
    """
    if not isinstance(value, dict):
        return value
    names = [tool["function"]["name"] for tool in reader.tools] if isinstance(reader.tools, list) else []
    if value.get("type") == "allowed_tools":
        return _allowed(value, names, reader.ignored)
    reader.ignored |= unread(value, "tool_choice", _CHOSEN)
    name = _name(value)
    if name not in names and (reason := reader.left_out.get(name)):
        raise NamedValue("tool_choice", value).refused(f"{name} is omitted, because {reason} is not supported")
    if value.get("type") not in ("function", CUSTOM) or name not in names:
        raise NamedValue("tool_choice", value).refused(
            "must be none, auto, required, or an object with 'type': 'allowed_tools', or with 'type': 'function' or "
            "'custom' and the 'name' of one of the tools"
        )
    return {"type": "function", "function": {"name": name}}


def _allowed(value: Mapping[str, Any], names: Sequence[str], ignored: dict[str, None]) -> Any:
    """Return the allowed tools in the format of a chat, without omitted tools. The chat reader checks them."""
    ignored |= unread(value, "tool_choice", ("type", "mode", "tools"))
    tools = value.get("tools")
    if isinstance(tools, list):
        present = [tool for tool in without_skipped(tools) if not _is_custom(tool) or _name(tool) in names]
        for tool in present:
            ignored |= unread(tool, "tool_choice.tools[]", _CHOSEN)
        tools = [_function(tool) if isinstance(tool, dict) else tool for tool in present]
    return {"type": "allowed_tools", "allowed_tools": {"mode": value.get("mode"), "tools": tools}}


def _is_custom(tool: Any) -> bool:
    return isinstance(tool, dict) and tool.get("type") == CUSTOM


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    kind = "function" if _is_custom(tool) else tool.get("type")
    return {"type": kind, "function": {"name": _name(tool)}}


def _name(tool: Mapping[str, Any]) -> str:
    return full_name(tool.get("namespace"), str(tool.get("name")))


# -- stored responses: `store`, `previous_response_id` and references to items -----------------------------------------


STORED_FIELDS = ("store", "previous_response_id", "conversation", BACKGROUND)
"""The fields that are supported only if responses are stored."""

_ITEM_ID = re.compile(r"[\w.-]{1,64}", re.ASCII)

MAX_REFERENCES = 1000
"""The maximum number of item references in a request."""


def read_wanted(body: Any, *, keeps: bool) -> Wanted | None:
    """Return the stored responses and items that a body refers to. `parse` reports other errors in the body.

    Args:
        keeps: whether the server stores the response unless the body has `store=false` without `background`.

    Raises:
        InvalidPayload: the body has too many references.
    """
    if not isinstance(body, dict):
        return None
    previous, input, conversation = body.get("previous_response_id"), body.get("input"), conversation_in(body)
    items = dict.fromkeys(filter(None, map(referenced, input))) if isinstance(input, list) else {}
    if len(items) > MAX_REFERENCES:
        raise InvalidPayload(f"'input' refers to {len(items)} stored items; the maximum is {MAX_REFERENCES}")
    keeps = keeps and (body.get("store") is not False or bool(conversation) or body.get(BACKGROUND) is True)
    if previous is not None and conversation:
        previous = conversation = ""  # `read_store` refuses this
    return Wanted(
        "response", keeps, previous if isinstance(previous, str) else "", [*items], conversation,
        appends=keeps and bool(conversation), detaches=body.get(BACKGROUND) is True,
    )  # fmt: skip


def conversation_in(body: Mapping[str, Any]) -> str:
    """Return the id of the conversation in a body, or "" if there is none, or if `read_store` refuses it."""
    value = body.get("conversation")
    id = value["id"] if isinstance(value, dict) and value.keys() == {"id"} else value
    return id if isinstance(id, str) else ""


def read_store(body: Mapping[str, Any], context: ServerContext, request_context: RequestContext) -> bool:
    """Read `store`, `previous_response_id` and `conversation`. Return whether the response should be stored.

    Raises:
        InvalidParameter, NotKept: a field is invalid, or the stored responses are missing, unusable or too large.
    """
    if request_context.keeper is None:
        return False
    store = NamedValue("store", body.get("store")).optional(boolean)
    previous = NamedValue("previous_response_id", body.get("previous_response_id"))
    if previous.value is not None and (not isinstance(previous.value, str) or not previous.value):
        raise previous.refused("must be the id of a response")
    _check_conversation(body)
    state = request_context.recalled.state
    if state == "in_conversation":
        raise previous.refused("this response is part of a conversation; continue it with 'conversation'")
    if state == "missing":
        raise NotKept(
            f"{previous}: no such response is stored: it expired, was deleted, or was never stored", STORED_FIELDS[1]
        )
    if state == "broken":
        raise NotKept(f"{previous}: an earlier response is no longer stored; {_SEND_ALL}", STORED_FIELDS[1])
    if state == "in_progress":
        raise previous.refused("this response is still in progress; wait until it has ended")
    if state == "failed":
        raise previous.refused("this response failed; continue from the response before it")
    if state == "too_long":
        conversation = NamedValue("conversation", conversation_in(body))
        field = previous if previous.value else conversation if conversation.value else "input"
        raise too_long(field, "the referenced stored items", context.config.max_request_size)
    return store is not False


def _check_conversation(body: Mapping[str, Any]) -> None:
    """Check `conversation`.

    Raises:
        InvalidParameter: it is not the id of a conversation, or cannot be combined with another field.
    """
    conversation = NamedValue("conversation", body.get("conversation"))
    if conversation.value is None:
        return
    if not conversation_in(body):
        raise conversation.refused("must be the id of a conversation, or an object with its 'id'")
    if body.get("previous_response_id") is not None:
        raise conversation.refused("cannot be combined with previous_response_id; omit one of them")


def make_keeping(keeper: Keeper, head: ResponseHead, items: Sequence[Any], *, stores: bool) -> Keeping:
    """Return the object that stores a response, or appends it to its conversation.

    Args:
        items: the input items of the request.
        stores: whether the response itself is stored.
    """
    conversation = head.get("conversation")
    if conversation is None:
        return Keeping(keeper, "response", head["previous_response_id"] or "", kept_items(with_ids(items)))
    stored = kept_items(with_ids(item for item in items if type_of(item) != TRIGGER))
    return Keeping(keeper, "response", conversation["id"], stored, stores=stores)


def check_ids(items: Iterable[Any], field: str, taken: Iterable[Any] = ()) -> None:
    """Check the ids of items that are appended to a conversation.

    Args:
        field: name of the field with the items.
        taken: the items that are in the conversation.

    Raises:
        InvalidPayload: an id is invalid, or two items have the same id.
    """
    ids = {item["id"] for item in taken}
    for index, item in enumerate(items):
        id = item.get("id")
        if id is None or id == "":
            continue
        if not isinstance(id, str) or not _ITEM_ID.fullmatch(id):
            raise InvalidPayload(f"{field}[{index}].id={show(id)}: must have 1 to 64 letters, digits, '_', '-', '.'")
        if id in ids:
            raise duplicate_item(id)
        ids.add(id)


# -- the dialect -------------------------------------------------------------------------------------------------------


_RENAMED = {"messages": "input", "reasoning_effort": "reasoning.effort"}
"""Maps the field names of a chat to those of the Responses API, where they differ."""

_OF_CHAT = {name: OpenAiChat.fields[name] for name in ("model", "stream", "parallel_tool_calls")}
_SAME = (TABLE.parameters.keys() - _RENAMED.keys()) | _OF_CHAT.keys()
"""The fields that are passed to the chat unchanged."""

_NAMES = OPENAI_NAMES._replace(
    prompt="input", function="", message_reasoning="input[].reasoning", reasoning_effort="reasoning.effort"
)
_ONLY = {"context": "auto", "mode": "standard"}
"""The fields of `reasoning` that have only one supported value. The chat template decides which reasoning it shows."""

_REASONING: Mapping[str, Shape] = {
    "effort": {"enum": [*EFFORTS, None]},
    "summary": {},
    "generate_summary": {},
    **{name: {"enum": [value, None]} for name, value in _ONLY.items()},
}

_MANAGEMENT = record(
    {"type": {"enum": [COMPACTION]}}, {"compact_threshold": nullable({"type": "integer", "minimum": 1})}
)

FIELDS: Mapping[str, Shape] = {
    **INPUT,
    **_OF_CHAT,
    **TOOLS,
    "context_management": nullable(listing({**_MANAGEMENT, "additionalProperties": NULL}, maxItems=1)),
    "reasoning": nullable(record({}, _REASONING, additionalProperties=NULL)),
}
_UNHEEDED = "tools[].strict"
"""The field that the chat reader reports as ignored if nothing enforces the schemas of tools."""

_WITHOUT_STORE = request_shape(FIELDS, TABLE, "input")


def _body(context: ServerContext) -> Shape:
    """Return the schema of a body. It includes the fields of stored responses if the server stores responses."""
    shape = _WITHOUT_STORE(context)
    if not context.config.stores_responses:
        return shape
    conversation = nullable({"anyOf": [TEXT, record({"id": TEXT}, additionalProperties=False)]})
    flags = {name: nullable(FLAG) for name in ("store", BACKGROUND)}
    stored = {**flags, "previous_response_id": nullable(TEXT), "conversation": conversation}
    reference = {"anyOf": [record({"id": TEXT}), *shape["properties"]["input"]["anyOf"]]}
    return {**shape, "properties": {**shape["properties"], **stored, "input": reference}}


class OpenAiResponses(OpenAiDialect):
    """The dialect of OpenAI's Responses API. Tokens are sampled unless `temperature` is 0.

    Without `max_output_tokens`, the length of a response is limited by the model's default limit or its context.
    """

    name = "openai_responses"
    needed = "a JSON object with 'input'"
    table, fields, harmless = TABLE, FIELDS, NO_EFFECT
    appends = True
    """Whether a response is appended to its conversation."""

    description = Description(
        title="OpenAI responses",
        request="OpenAiResponsesRequest",
        request_shape=_body,
        error=OpenAiError,
        example={"model": "", "input": "Name the capital of France.", "max_output_tokens": 16},
        response=OpenAiResponse,
        chunk=OpenAiResponseEvent,
        streams=(SSE.content_type,),
    )

    def wanted(self, body: Any) -> Wanted | None:
        references = read_wanted(self._relax()(body), keeps=self.computes)
        return references if references is None or self.appends else references._replace(appends=False)

    def read(self, body: Mapping[str, Any], context: ServerContext, request_context: RequestContext) -> ParsedRequest:
        _check_names(body)
        keeps = read_store(body, context, request_context) and self.computes
        in_background = self.computes and read_background(body, request_context)
        threshold = NamedValue("context_management", body.get("context_management")).optional(
            partial(read_threshold, context_length=context.most_tokens())
        )
        translated = _translate(body, context, request_context)
        ignored = self.unknown(body, context, *translated.input.unknown, *translated.tools.ignored)
        head = read_head(body, context.generation, store=keeps, background=in_background)
        if request_context.keeper and conversation_in(body):
            head["conversation"] = ConversationName(id=conversation_in(body))
        keeping = self._keeping(head, translated.input, request_context.keeper, stores=keeps or in_background)
        if _UNHEEDED in translated.chat.ignored:
            head["tools"] = [*map(without_strict, head["tools"])]
            ignored += ["tools[].format"] if translated.tools.formats else []
        ignored += [*translated.chat.ignored, *self.no_effect(body)]
        translated = translated._replace(chat=translated.chat._replace(ignored=ignored))
        summarizing = None
        if threshold is not None and self.computes and translated.input.may_compact:
            summarizing = _summarizing(threshold, body, translated.input, context, request_context)
        return self._respond(translated, head, keeping, summarizing)

    def _keeping(
        self, head: ResponseHead, reader: InputReader, keeper: Keeper | None, *, stores: bool
    ) -> Keeping | None:
        """Return the object that stores the response or appends it to its conversation, or None."""
        appends = self.appends and "conversation" in head
        if keeper is None or not (stores or appends):
            return None
        if appends:
            check_ids(reader.items, "input", reader.history)
        return make_keeping(keeper, head, reader.items, stores=stores)

    def _respond(
        self,
        translated: _Translated,
        repeated: ResponseHead,
        keeping: Keeping | None,
        summarizing: Summarizing | None,
    ) -> ParsedRequest:
        """Return the parsed request with its reply.

        Args:
            repeated: the fields of the request that the response repeats.
            keeping: the object that stores the response, or None if it is not stored.
            summarizing: summarizes a conversation that has become too long, or None if this is not requested.
        """
        chat, reader = translated.chat, translated.input
        head: ResponseStart = {
            "id": new_id("resp") if keeping is None else secret_id("resp"),
            "object": "response",
            "created_at": chat.head.created,
            "model": chat.head.model,
            **encode_head(repeated),
        }
        in_background = repeated["background"]
        settings = ResponseSettings(
            head, chat.format.form, translated.tools.origins, None if in_background else keeping
        )
        requests = (chat.request if summarizing is None else chat.request._replace(edit=summarizing.edit),)
        if chat.framing is JSON and not in_background:
            parsed = ParsedRequest(requests, self._document(settings, reader, summarizing), self.errors, chat.ignored)
            times = 1
        else:
            parsed = streaming(requests, _stream(settings, reader, summarizing), self.errors, chat.ignored)
            times = NUM_STATES
        if in_background and keeping is not None:
            parsed = _detached(parsed, settings, keeping, streams=chat.framing is not JSON)
        if summarizing is not None:
            parsed = parsed._replace(course=FollowUp(summarizing.follow_up))
        repeated_size = (1 + times) * len(JSON.encode(head))  # one copy is kept until the reply is rendered
        return parsed._replace(keeps=settings.keeping is not None, num_repeated=repeated_size)

    def _document(
        self, settings: ResponseSettings, reader: InputReader, summarizing: Summarizing | None
    ) -> ResponseDocument:
        if summarizing is not None:
            return CompactingDocument(settings, reader.summaries, summarizing)
        return CompactionDocument(settings, reader.summaries) if reader.compacts else ResponseDocument(settings)


class _Translated(NamedTuple):
    """A body that has been translated to a chat.

    Attributes:
        input: reader that has read the input.
        tools: reader that has read the tools.
    """

    chat: ParsedChat
    input: InputReader
    tools: ToolsReader


def _translate(body: Mapping[str, Any], context: ServerContext, request_context: RequestContext) -> _Translated:
    """Translate a body to a chat."""
    reader, tools = InputReader(context, request_context), ToolsReader()
    effort = NamedValue("reasoning", body.get("reasoning")).optional(_effort)
    reader.read(body)
    tools.read(body.get("tools"))
    choice = "none" if reader.compacts else read_choice(body.get("tool_choice"), tools)
    same = _SAME.difference(STORED_FIELDS if request_context.keeper else ())
    fields = {
        **{name: body[name] for name in same if name in body},
        "reasoning_effort": effort,
    }
    tool_fields = {
        "tools": tools.tools,
        "tool_choice": choice,
        "parallel_tool_calls": body.get("parallel_tool_calls"),
    }
    if reader.compacts:
        fields["text"] = None  # the client's format is for the response, not for the summary
    chat = _CHAT.translate(body, fields, reader.conversation(), tool_fields, context, request_context)
    if reader.compacts and body.get("max_output_tokens") is None:
        chat = chat._replace(request=of_bounded_length(chat.request))
    if tools.formats:
        chat = chat._replace(request=tools.named(chat.request, choice))
    return _Translated(chat, reader, tools)


def _check_names(body: Mapping[str, Any]) -> None:
    """Raise InvalidParameter if a body uses a field name of the chat API instead of its own."""
    for name, own in _RENAMED.items():
        if body.get(name) is not None:
            raise InvalidParameter(f"{name}: is not supported: use {own}")


def _summarizing(
    threshold: int,
    body: Mapping[str, Any],
    reader: InputReader,
    context: ServerContext,
    request_context: RequestContext,
) -> Summarizing:
    """Return the object that summarizes the conversation if its prompt exceeds a threshold.

    Args:
        reader: reader that has read the input of the body.
    """

    def chat(item: Mapping[str, Any], **fields: Any) -> ParsedChat:
        return _translate({**body, "input": [*reader.items, item], **fields}, context, request_context).chat

    def ask() -> SummaryRequest:
        asking = chat({"type": TRIGGER}, max_output_tokens=None)  # it limits the response after the summary
        return SummaryRequest(unshaped(asking.request), asking.format.form)

    def go_on(summary: str) -> Request:
        return chat(reader.summaries.item("", summary)).request

    return Summarizing(threshold, context.most_tokens, ask, go_on, reader.last_summary)


def _detached(parsed: ParsedRequest, settings: ResponseSettings, keeping: Keeping, *, streams: bool) -> ParsedRequest:
    """Return a request whose response is generated in the background."""
    requests = [request._replace(time_limit=math.inf) for request in parsed.requests]  # its host has a limit
    return parsed._replace(requests=requests, detached=detached(settings.response(), keeping, streams=streams))


def _stream(settings: ResponseSettings, reader: InputReader, summarizing: Summarizing | None) -> ResponseStream:
    if summarizing is not None:
        return CompactingStream(settings, reader.summaries, summarizing)
    return CompactionStream(settings, reader.summaries) if reader.compacts else ResponseStream(settings)


class ResponsesCount(OpenAiResponses):
    """The dialect of OpenAI's token counts. Fields that affect only a response are checked, but have no effect."""

    name = "openai_responses_count"
    computes = appends = False
    description = Description(
        title="OpenAI response token count",
        request="OpenAiResponsesCountRequest",
        request_shape=_body,
        error=OpenAiError,
        example={"model": "", "input": "Name the capital of France."},
        response=ResponseTokens,
    )

    def _respond(
        self,
        translated: _Translated,
        repeated: ResponseHead,
        keeping: Keeping | None,
        summarizing: Summarizing | None,
    ) -> ParsedRequest:
        return counted(
            translated.chat,
            self.errors,
            lambda number: ResponseTokens(object="response.input_tokens", input_tokens=number),
        )


class ResponsesCompaction(OpenAiResponses):
    """The dialect of OpenAI's compaction, whose response replaces the conversation in later requests."""

    name = "openai_responses_compact"
    needed = "a JSON object with 'input', 'previous_response_id' or both"
    appends = False
    description = Description(
        title="OpenAI compaction",
        request="OpenAiCompactionRequest",
        request_shape=_body,
        error=OpenAiError,
        example={"model": "", "input": "Name the capital of France."},
        response=CompactedResponse,
    )

    def read(self, body: Mapping[str, Any], context: ServerContext, request_context: RequestContext) -> ParsedRequest:
        if body.get("stream"):
            raise InvalidParameter("stream: is not supported: the response is one document; omit stream")
        if body.get(BACKGROUND):
            raise InvalidParameter("background: is not supported for summaries; omit background")
        input = body.get("input")
        if input is None and any(body.get(name) is not None for name in STORED_FIELDS[1:]):
            input = []
        items = [_user_message(input)] if isinstance(input, str) and input else input
        if isinstance(items, list):
            input = [*items, {"type": TRIGGER}]
        return super().read({**body, "input": input, "store": False}, context, request_context)

    def _document(
        self, settings: ResponseSettings, reader: InputReader, summarizing: Summarizing | None
    ) -> ResponseDocument:
        return CompactedDocument(settings, reader.summaries, with_ids(reader.user_messages()))


class _Chat(OpenAiChat):
    """The chat dialect with the parameters of the Responses API."""

    table = Table(
        {name: parameter for name, parameter in TABLE.parameters.items() if name not in _RENAMED}
        | {"reasoning_effort": CHAT.parameters["reasoning_effort"]},
        translated={"reasoning_effort": _NAMES.reasoning_effort, STRICT: _UNHEEDED},
    )
    fields: Mapping[str, Shape] = {name: shape for name, shape in OpenAiChat.fields.items() if name != "stream_options"}
    field_names = _NAMES


_CHAT = _Chat()


def _effort(reasoning: Any) -> Any:
    """Read `reasoning`, and return its effort."""
    if not isinstance(reasoning, dict):
        raise ValueError("must be an object with 'effort', 'summary' or both")
    only(reasoning, *_REASONING)
    if (effort := reasoning.get("effort")) is not None and effort not in EFFORTS:
        raise ValueError(f"'effort' must be one of {', '.join(EFFORTS)}")
    for name, supported in _ONLY.items():
        if reasoning.get(name) not in (supported, None):
            raise ValueError(f"{name!r} must be {supported}, the only supported value")
    return effort
