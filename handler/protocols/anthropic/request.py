"""Requests to Anthropic's endpoints /v1/messages and /v1/messages/count_tokens.

Messages, tools and parameters are translated to those of an OpenAI chat, and `OpenAiChat.build` builds the request.
Sources: "Messages" in Anthropic's API reference, and the types in its Python package.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from handler.core.errors import InvalidParameter, InvalidPayload
from handler.core.framing import JSON, SSE
from handler.core.media import MediaSource
from handler.core.values import Request, Sampling, StructuredOutput, new_secret
from handler.protocols.anthropic.api import (
    ERRORS,
    AnthropicCount,
    AnthropicError,
    AnthropicMessage,
    CompactionRefused,
    MessageEvent,
)
from handler.protocols.anthropic.compaction import (
    COMPACTION,
    CompactingMessageDocument,
    CompactingMessageStream,
    Signer,
    SummaryDocument,
    SummaryStream,
    check_signed,
    check_summarizable,
    read_summarize,
    read_summary,
)
from handler.protocols.anthropic.edits import (
    CONTEXT_MANAGEMENT,
    Compact,
    ContextEdits,
    Edit,
    EditedMessages,
    read_edits,
)
from handler.protocols.anthropic.response import (
    THREAD,
    MessageDocument,
    MessageSettings,
    MessageStream,
    ThreadKeeping,
    continued,
    encode,
    make_keeping,
    read_wanted,
)
from handler.protocols.anthropic.system import EFFORTS, SYSTEM_FIELDS, effort_of_messages, hidden_messages
from handler.protocols.anthropic.tools import (
    CHANGES,
    TOOLS,
    ToolChange,
    check_positions,
    read_change,
    read_choice,
    read_tools,
)
from handler.protocols.assistant.answer import reasoning_family
from handler.protocols.assistant.summary import (
    PROMPT,
    Summarizing,
    SummaryRequest,
    message_of,
    of_bounded_length,
    unshaped,
)
from handler.protocols.assistant.template import knows
from handler.protocols.kernel.context import RequestContext, RequestShape, ServerContext
from handler.protocols.kernel.dialect import Description, FollowUp, ParsedRequest
from handler.protocols.kernel.messages import (
    ChatMessages,
    TurnsReader,
    add_to_turn,
    check_taken,
    only_in,
    read_base64,
    read_url,
    string_at,
)
from handler.protocols.kernel.parameters import STRICT, Parameter, Table, dialect_parameters, request_shape, unsupported
from handler.protocols.kernel.readers import NamedValue, integer, json_schema, only, show, unread
from handler.protocols.kernel.reply import PromptOnly, Reply
from handler.protocols.kernel.schema import (
    NULL,
    TEXT,
    Shape,
    accepts,
    listing,
    nullable,
    record,
    schema_of_reader,
)
from handler.protocols.kernel.stored import Wanted
from handler.protocols.openai.chat import CHAT_EXAMPLE, OpenAiChat, ParsedChat, counted
from handler.protocols.openai.request import CHAT, OPENAI_NAMES, OpenAiDialect


@accepts(type="object", required=["type", "schema"])
def _output_format(value: Any) -> StructuredOutput:
    """Read the format of the whole response, which the beta of structured outputs had at the top level of the body."""
    if not isinstance(value, dict) or value.get("type") != "json_schema" or "schema" not in value:
        raise ValueError("must be an object with 'type': 'json_schema' and 'schema'")
    only(value, "type", "schema")
    return json_schema(value["schema"])


@accepts(
    type="object",
    properties={
        "format": nullable(schema_of_reader(_output_format)),
        "effort": {"enum": [*EFFORTS, None]},
        "task_budget": {"type": ["object", "null"], "required": ["type", "total"]},
    },
    additionalProperties=NULL,
)
def _output_config(value: Any) -> StructuredOutput | None:
    """Read `format`, a JSON schema for the whole response. `read_effort` reads `effort`. The budget has no effect."""
    if not isinstance(value, dict):
        raise ValueError("must be an object with 'format', 'effort' or both")
    only(value, "format", "effort", _BUDGET)
    if value.get(_BUDGET) is not None:
        _check_budget(value[_BUDGET])
    if value.get("effort") is not None and value["effort"] not in EFFORTS:
        raise ValueError(f"must have an 'effort' that is one of {', '.join(EFFORTS)}")
    if value.get("format") is None:
        return None
    try:
        return _output_format(value["format"])
    except ValueError as error:
        raise ValueError(f"has a 'format' that {error}") from None


_BUDGET = "task_budget"


def _check_budget(value: Any) -> None:
    """Check `output_config.task_budget`, which tells Anthropic's models how many tokens a whole task may take."""
    if not isinstance(value, dict) or value.get("type") != "tokens":
        raise ValueError("must have a 'task_budget' with 'type': 'tokens' and 'total'")
    only(value, "type", "total", "remaining")
    for name in ("total", "remaining"):
        if name == "total" or value.get(name) is not None:
            NamedValue(f"output_config.task_budget.{name}", value.get(name)).read(integer(0))


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


# -- `system` and `messages`, translated into chat messages ------------------------------------------------------------


_ROLES = ("user", "assistant", "system")

_BLOCKS: Mapping[str, tuple[str, ...]] = {
    "user": ("text", "image", "tool_result", COMPACTION),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use", COMPACTION),
    "system": ("text", *CHANGES),
}
"""Maps each role to the types of the blocks that its messages may contain."""

_FIELDS: Mapping[str, frozenset[str]] = {
    "text": frozenset({"type", "text", "cache_control"}),
    "image": frozenset({"type", "source", "transformations", "cache_control"}),
    "thinking": frozenset({"type", "thinking", "signature"}),
    "redacted_thinking": frozenset({"type", "data"}),
    "tool_use": frozenset({"type", "id", "name", "input", "cache_control", "caller"}),
    "tool_result": frozenset({"type", "tool_use_id", "content", "cache_control"}),
    "tool_reference": frozenset({"type", "tool_name", "cache_control"}),
    COMPACTION: frozenset({"type", "content", "encrypted_content", "signature", "tool_changes", "cache_control"}),
    **dict.fromkeys(CHANGES, frozenset({"type", "tool", "cache_control"})),
}
"""Maps each block type to its known fields, some of which never affect the response."""

_MESSAGE = ("role", "content", *SYSTEM_FIELDS)
_SOURCE = frozenset({"type", "media_type", "data", "url"})

_UNSUPPORTED_BLOCKS: Mapping[str, str] = {
    "image": only_in("image"),
    "document": "send its text in a block of type 'text'",
    "search_result": "send its text in a block of type 'text'",
    "container_upload": "the server has no containers",
    "tool_reference": "it is allowed only in the results of tools",
    **dict.fromkeys(CHANGES, "it is allowed only in the system messages of 'messages'"),
}


_HEADER_LINE = re.compile(r"^x-anthropic-[^:\n]*:.*\n?", re.MULTILINE)
"""Matches a line of Claude Code's system prompt that is meant for Anthropic's servers and differs between sessions."""

_BLOCK = record({"type": {"enum": [*_FIELDS]}})
_CONTENT: Shape = {"anyOf": [TEXT, listing(_BLOCK), NULL]}
MESSAGES: Mapping[str, Shape] = {
    "messages": listing(record({"role": {"enum": [*_ROLES]}}, {"content": _CONTENT, **SYSTEM_FIELDS}), minItems=1),
    "system": _CONTENT,
}
"""The schemas of the fields that `MessagesReader` reads."""


class MessagesReader(TurnsReader):
    """Reads the messages of one request, and translates them into chat messages.

    Attributes:
        continues: whether the response continues the last message.
        changes: what the messages say about the tools that the model may call, in the order of the messages.
        effort: the effort that the messages set for the response, or None if they set none.
        signer: the signer of summaries.
        last_summary: the last summary in the messages, or "" if there is none.
    """

    def __init__(self, context: ServerContext, owner: str) -> None:
        super().__init__(context)
        self.signer = Signer(context.sealer, owner)
        self._num_instructions = 0  # messages of the chat that no summary replaces
        self.last_summary = ""
        self.continues = False
        self.changes: list[ToolChange] = []
        self.effort: str | None = None
        self._calls: dict[str, str] = {}  # maps the id of a call to the tool's name

    def read(self, body: Mapping[str, Any], before: Sequence[Any]) -> None:
        """Read `system`, the earlier messages of the thread, and `messages`.

        Args:
            before: the earlier messages of the thread.

        Raises:
            InvalidPayload: a message or a block is invalid. The error states its path and a valid form, but quotes no
                text.
        """
        if body.get("system") is not None:
            self._read_content("system", body["system"], "system")
        self._num_instructions = len(self.chat)
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise InvalidPayload("'messages' must be a non-empty list")
        self._read_messages([*before, *messages], len(before))
        if not self.chat:
            raise InvalidPayload("'messages' must contain text for the model, not x-anthropic-… lines only")
        self._join_turns()
        if len(self.chat) > 1 and self.chat[-1] == {"role": "assistant", "content": ""}:
            self.chat.pop()  # as in Anthropic's API, the last message may be empty
        self.continues = self.chat[-1]["role"] == "assistant"
        if self.continues and ("tool_calls" in self.chat[-1] or not self.chat[-1]["content"].strip()):
            raise InvalidPayload(
                f"messages[{len(messages) - 1}]: the response continues this message, which must have text and no "
                "tool_use"
            )

    @property
    def num_reasoning(self) -> int:
        """The number of messages with reasoning."""
        return sum("reasoning_content" in message for message in self.chat)

    def clear_thinking(self, num_kept: int) -> None:
        """Keep the reasoning of only the last `num_kept` messages that contain any."""
        with_reasoning = [message for message in self.chat if "reasoning_content" in message]
        for message in with_reasoning[: max(0, len(with_reasoning) - num_kept)]:
            del message["reasoning_content"]

    def _read_messages(self, conversation: Sequence[Any], num_before: int) -> None:
        """Read the messages. The first `num_before` are earlier messages of the thread."""
        numbers = range(-num_before, len(conversation) - num_before)
        paths = [f"messages[{number}]" if number >= 0 else f"thread: message {number}" for number in numbers]
        for at, message in zip(paths, conversation, strict=True):
            if not isinstance(message, dict):
                raise InvalidPayload(f"{at} must be an object with 'role' and 'content'")
            if message.get("role") not in _ROLES:
                raise InvalidPayload(f"{at}.role must be one of {', '.join(_ROLES)}")
        hidden = hidden_messages(conversation, paths)
        changing = dict[int, str]()
        for index, (at, message) in enumerate(zip(paths, conversation, strict=True)):
            self.unknown |= unread(message, "messages[]", _MESSAGE)
            if index not in hidden:
                self._read_content(message["role"], message.get("content"), f"{at}.content")
            if message["role"] == "system" and self.changes and self.changes[-1].at.startswith(f"{at}."):
                changing[index] = self.changes[-1].at
        if self.last_summary:
            check_signed(conversation, paths)
        check_positions([message["role"] for message in conversation], changing)
        self.effort = effort_of_messages(conversation)

    def _read_content(self, role: str, content: Any, at: str) -> None:
        if isinstance(content, str) or content is None or content == []:
            return self._add_text(role, content or "")
        if not isinstance(content, list):
            raise InvalidPayload(f"{at} must be a string or a list of blocks")
        for index, block in enumerate(content):
            self._read_block(role, block, f"{at}[{index}]")
        self._add_shown()

    def _read_block(self, role: str, block: Any, at: str) -> None:
        of_prompt = at.startswith("system")
        if role == "system" and isinstance(block, dict) and block.get("type") == COMPACTION:
            raise CompactionRefused("block_misplaced", f"{at}: a system message cannot contain a summary")
        kind = block_type(block, at, ("text",) if of_prompt else _BLOCKS[role])
        path = "system[]" if of_prompt else "messages[].content[]"
        self.unknown |= unread(block, path, _FIELDS[kind])
        if kind != "tool_result":
            self._add_shown()
        if kind == "text":
            self._add_text(role, string_at(block.get("text"), f"{at}.text"))
        elif kind == "image":
            add_to_turn(self.chat, role, content=self._read_image(block, at))
        elif kind == "thinking":
            add_to_turn(self.chat, role, reasoning_content=string_at(block.get("thinking"), f"{at}.thinking"))
        elif kind == "redacted_thinking":  # only Anthropic can decrypt it
            add_to_turn(self.chat, role)
            self.unknown["messages[].content[].redacted_thinking"] = None
        elif kind == "tool_use":
            add_to_turn(self.chat, role, tool_calls=self._read_call(block, at))
        elif kind == COMPACTION:
            self._read_summary(role, block, at)
        elif kind in CHANGES:
            self.changes.append(read_change(block, at, self.unknown))
        else:
            self.chat.append(self._read_result(block, at))

    def _read_summary(self, role: str, block: Mapping[str, Any], at: str) -> None:
        """Read a block with a summary, which replaces all messages before it."""
        summary = read_summary(block, at, self.signer)
        if summary is None:
            return add_to_turn(self.chat, role)
        self.last_summary = summary
        del self.chat[self._num_instructions :]
        add_to_turn(self.chat, "user", content=message_of(summary, self._context.vocabulary))

    def _add_text(self, role: str, text: str) -> None:
        """Add text. Lines of system text for Anthropic's servers are dropped, because they differ between sessions."""
        if role == "system" and not self._context.config.keep_anthropic_lines:
            shorter = _HEADER_LINE.sub("", text)
            if text and not shorter:
                return
            text = shorter
        add_to_turn(self.chat, role, content=text)

    def _read_image(self, block: Mapping[str, Any], at: str) -> MediaSource:
        check_taken("image", "image", at, self._context)
        _check_transformations(block.get("transformations"), f"{at}.transformations")
        source_block, name = block.get("source"), f"{at}.source"
        source = source_block if isinstance(source_block, dict) else {}
        self.unknown |= unread(source, re.sub("[0-9]+", "", name), _SOURCE)
        match source.get("type"):
            case "base64":
                return read_base64("image", source.get("data"), f"{name}.data")
            case "url":
                return read_url("image", source.get("url"), f"{name}.url")
            case "file":
                raise InvalidPayload(f"{name}: 'file' is not supported: files are not stored; send base64 or url")
        raise InvalidPayload(f"{name} must be an object with a 'type' that is base64 or url")

    def _read_call(self, block: Mapping[str, Any], at: str) -> dict[str, Any]:
        id, name = string_at(block.get("id"), f"{at}.id"), string_at(block.get("name"), f"{at}.name")
        arguments = block.get("input")
        if arguments is None or arguments == []:
            arguments = {}
        if not isinstance(arguments, dict):
            raise InvalidPayload(f"{at}.input must be an object")
        self._calls[id] = name
        self.changes.append(ToolChange("found", name, at))
        return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}

    def _read_result(self, block: Mapping[str, Any], at: str) -> dict[str, Any]:
        id, content = string_at(block.get("tool_use_id"), f"{at}.tool_use_id"), block.get("content")
        if id not in self._calls:
            raise InvalidPayload(f"{at}.tool_use_id={show(id)}: no earlier tool_use has this id")
        if isinstance(content, list):
            texts = []
            for index, part in enumerate(content):
                where = f"{at}.content[{index}]"
                kind = block_type(part, where, ("text", "image", "tool_reference"))
                self.unknown |= unread(part, "messages[].content[].content[]", _FIELDS[kind])
                if kind == "image":
                    self._shown.append(self._read_image(part, where))
                elif kind == "tool_reference":
                    texts.append(string_at(part.get("tool_name"), f"{where}.tool_name"))
                    self.changes.append(ToolChange("found", texts[-1], where))
                else:
                    texts.append(string_at(part.get("text"), f"{where}.text"))
            content = "\n".join(texts)
        if not isinstance(content, str | None):
            raise InvalidPayload(f"{at}.content must be a string or a list of blocks")
        return {"role": "tool", "tool_call_id": id, "name": self._calls[id], "content": content or ""}


def _check_transformations(value: Any, at: str) -> None:
    """Raise InvalidPayload if an image must not be scaled down to the model's maximum size, because it would be."""
    if value is None:
        return
    if not isinstance(value, dict) or not value.keys() <= {"oversized_image"}:
        raise InvalidPayload(f"{at} must be an object with 'oversized_image'")
    if value.get("oversized_image") not in (None, "downsize"):
        raise InvalidPayload(
            f"{at}.oversized_image={show(value['oversized_image'])}: is not supported: a large image is scaled down; "
            "send downsize"
        )


def block_type(block: Any, at: str, types: tuple[str, ...]) -> str:
    """Return the type of a block.

    Raises:
        InvalidPayload: the type is missing or not in `types`.
    """
    kind = block.get("type") if isinstance(block, dict) else None
    allowed = " or ".join(filter(None, (", ".join(types[:-1]), types[-1])))
    if not isinstance(kind, str):
        raise InvalidPayload(f"{at} must be an object with a 'type' that is {allowed}")
    if kind not in types:
        server = kind.startswith("server_tool_use") or kind.endswith("_tool_result")
        reason = _UNSUPPORTED_BLOCKS.get(
            kind, "server tools only run on Anthropic's servers" if server else f"the type must be {allowed}"
        )
        raise InvalidPayload(f"{at}: {kind[:64]!r} is not supported: {reason}")
    return kind


# -- `thinking` and `output_config.effort`, translated to arguments of the model's chat template -----------------------


_DISPLAYS = (None, "summarized", "updates", "omitted")  # all except the last show the whole reasoning

_MISMATCHES = (None, "error", "drop_block")  # no block mismatches, because signatures are not checked

_ENABLED = {"enabled": True, "adaptive": None, "disabled": False}
_THINKING_FIELDS: Mapping[str, Shape] = {
    "type": {"enum": [*_ENABLED]},
    "budget_tokens": {"type": ["integer", "null"], "minimum": 1},
    "display": {"enum": [*_DISPLAYS]},
    "block_binding": nullable(
        record({}, {"prefix_mismatch_behavior": {"enum": [*_MISMATCHES]}}, additionalProperties=NULL)
    ),
}
THINKING: Mapping[str, Shape] = {
    "thinking": nullable({**record(_THINKING_FIELDS), "required": ["type"], "additionalProperties": NULL}),
    "context_management": CONTEXT_MANAGEMENT,
}
"""The schemas of the fields that `read_thinking` and `read_edits` read."""

_THINKING = re.compile(r"\{%[^%]*(?<![.\w'\"])thinking\b")
"""Matches a chat template that reads the variable `thinking`."""


class Thinking(NamedTuple):
    """The parsed `thinking` field.

    Attributes:
        enabled: whether the model should reason, or None if its chat template decides.
        budget: the maximum number of reasoning tokens, or None if there is no limit.
        show: whether thinking blocks contain the reasoning.
    """

    enabled: bool | None = None
    budget: int | None = None
    show: bool = True

    def template_arguments(self, context: ServerContext) -> tuple[dict[str, bool], list[str]]:
        """Return the chat template arguments that turn reasoning on or off, and the request fields that have no effect.

        If the template reads no such argument, models of known families always reason, and other models never do.
        """
        unheeded = ["thinking.budget_tokens"] if self.budget != self.token_budget(context) else []
        if self.enabled is None:
            return {}, unheeded
        template = context.chat_template
        if knows(template, "enable_thinking"):
            return {"enable_thinking": self.enabled}, unheeded
        if _THINKING.search(template):
            return {"thinking": self.enabled}, unheeded
        thinks = reasoning_family(context) is not None
        return {}, [*unheeded, "thinking"] if thinks is not self.enabled else unheeded

    def token_budget(self, context: ServerContext) -> int | None:
        """Return the budget, or None if it is not set or is not supported by the engine or the model."""
        family = reasoning_family(context)
        lacks = "thinking_token_budget" in context.unsupported or context.vocabulary is None
        return None if lacks or family is None or not family.closing else self.budget


def read_thinking(value: Any) -> Thinking:
    """Read `thinking`."""
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in _ENABLED:
        raise ValueError("must be an object whose 'type' is enabled, adaptive or disabled")
    only(value, *_THINKING_FIELDS)
    budget = value.get("budget_tokens")
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < 1):
        raise ValueError("'budget_tokens' must be an integer of at least 1")
    if kind == "enabled" and budget is None:
        raise ValueError("'budget_tokens' is required")
    if value.get("display") not in _DISPLAYS:
        raise ValueError("'display' must be summarized, updates or omitted")
    _check_binding(value.get("block_binding"))
    return Thinking(_ENABLED[kind], budget if kind == "enabled" else None, value.get("display") != "omitted")


def _check_binding(value: Any) -> None:
    """Check `block_binding`, which determines what happens to thinking blocks of other conversations."""
    only(value, "prefix_mismatch_behavior")
    if value is not None and (not isinstance(value, dict) or value.get("prefix_mismatch_behavior") not in _MISMATCHES):
        raise ValueError("'block_binding' must be an object whose 'prefix_mismatch_behavior' is error or drop_block")


def read_effort(body: Mapping[str, Any]) -> Any:
    """Return `output_config.effort`. `TABLE` checks its value."""
    config = body.get("output_config")
    return config.get("effort") if isinstance(config, dict) else None


def unheeded_budget(body: Mapping[str, Any]) -> list[str]:
    """Return the path of the task budget if the body contains one. It has no effect."""
    config = body.get("output_config")
    return [f"output_config.{_BUDGET}"] if isinstance(config, dict) and config.get(_BUDGET) is not None else []


_OF_CHAT = {name: OpenAiChat.fields[name] for name in ("model", "stream")}
_SAME = TABLE.parameters.keys() | _OF_CHAT.keys()
"""The fields that are passed to the chat unchanged."""

_COMPACTION = record({"type": {"enum": ["summarize"]}}, {"instructions": nullable(TEXT)}, additionalProperties=NULL)

FIELDS: Mapping[str, Shape] = {**MESSAGES, **_OF_CHAT, **TOOLS, **THINKING, COMPACTION: nullable(_COMPACTION)}

PING = encode({"type": "ping"})
"""The event that keeps a silent stream open."""

_TRANSLATED = ("chat_template_kwargs", "reasoning_effort", "continue_final_message", "thinking_token_budget")
"""The chat parameters that are set from other fields of the Anthropic request body."""


def _body(*required: str) -> RequestShape:
    """Return a function that builds a body's schema. The schema includes `thread` if the server stores responses."""
    with_thread = request_shape({**FIELDS, "thread": THREAD}, TABLE, *required)
    without_thread = request_shape(FIELDS, TABLE, *required)
    return lambda context: (with_thread if context.config.stores_responses else without_thread)(context)


class AnthropicMessages(OpenAiDialect):
    """The dialect of Anthropic's Messages API. Tokens are sampled unless `temperature` is 0.

    A response that does not fit into the context of the model is truncated, and its stop reason says so.
    """

    name = "anthropic_messages"
    errors = ERRORS
    needed = "a JSON object with 'messages' and 'max_tokens'"
    table, fields, harmless, accepted = TABLE, FIELDS, NO_EFFECT, ACCEPTED | {"thread"}
    description = Description(
        title="Anthropic messages",
        request="AnthropicMessagesRequest",
        request_shape=_body("messages", "max_tokens"),
        error=AnthropicError,
        example={"model": "", **CHAT_EXAMPLE, "anthropic_version": "any"},
        response=AnthropicMessage,
        chunk=MessageEvent,
        streams=(SSE.content_type,),
    )
    unique_keys = True

    def wanted(self, body: Any) -> Wanted | None:
        return read_wanted(body, keeps=self.computes)

    def read(self, body: Mapping[str, Any], context: ServerContext, request_context: RequestContext) -> ParsedRequest:
        if not self.computes:
            body = {name: value for name, value in body.items() if name != "max_tokens"}
        elif body.get("max_tokens") is None:
            raise InvalidPayload("'max_tokens' is required")
        sent_body, body = body, continued(body, context, request_context)
        thinking = NamedValue("thinking", body.get("thinking")).optional(read_thinking) or Thinking()
        instructions = NamedValue(COMPACTION, body.get(COMPACTION)).optional(read_summarize)
        summarizes = instructions is not None and self.computes
        if summarizes:
            _check_alone(body)
            body = {**body, "messages": [*body["messages"], _user(instructions or PROMPT)]}
        reader = MessagesReader(context, request_context.owner)
        reader.read(body, request_context.recalled.history)
        edits = NamedValue("context_management", body.get("context_management")).optional(read_edits)
        translator = _Translator(body, thinking, reader, context, request_context)
        ignored = self.unknown(body, context, *reader.unknown, *translator.unheeded, *unheeded_budget(body))
        keeping = make_keeping(sent_body, request_context.keeper) if self.computes else None
        chat = (translator.summary if summarizes else translator.chat)(reader.conversation())
        ignored += [*chat.ignored, *self.no_effect(body)]
        chat = chat._replace(ignored=ignored)
        if summarizes:
            return self._respond(chat, thinking, keeping, signer=reader.signer)
        if edits is None:
            return self._respond(chat, thinking, keeping)
        context_edits = self._context_edits(edits, translator, reader)
        if context_edits.needed:
            chat = chat._replace(request=chat.request._replace(edit=context_edits.edit))
        return self._respond(chat, thinking, keeping, context_edits)

    def _context_edits(self, edits: Sequence[Edit], translator: _Translator, reader: MessagesReader) -> ContextEdits:
        """Return the edits of a request.

        Raises:
            InvalidPayload: there is no response that a summary could precede.
        """
        context_edits = ContextEdits(edits, translator.messages, reader.num_reasoning, translator.edited_request)
        if context_edits.compact is not None and self.computes:
            if translator.body["max_tokens"] == 0:
                raise InvalidPayload("max_tokens=0: there is no response that a summary could precede")
            context_edits.summarizing = _summarizing(
                context_edits, context_edits.compact, translator, reader.last_summary
            )
        return context_edits

    def _respond(
        self,
        chat: ParsedChat,
        thinking: Thinking,
        keeping: ThreadKeeping | None,
        edits: ContextEdits | None = None,
        signer: Signer | None = None,
    ) -> ParsedRequest:
        """Return the parsed request with its reply.

        Args:
            signer: the signer of the summary that is the response, or None if the response is a message.
        """
        sampling = chat.request.sampling
        request = chat.request._replace(sampling=sampling._replace(include_stop=bool(sampling.stop)), min_free_tokens=1)
        id = chat.head.id.replace("chatcmpl-", "msg_") if keeping is None else f"msg_{new_secret()}"
        settings = MessageSettings(
            id, chat.head.model, chat.format.form, sampling.max_new_tokens, sampling.stop, thinking.show, keeping, edits
        )
        streams = chat.framing is not JSON
        reply = _reply(settings, signer, streams=streams)
        if sampling.max_new_tokens == 0:  # the prompt is only put into the engine's prefix cache
            alone = Sampling(max_new_tokens=1, logprobs=False, cache_salt=sampling.cache_salt)
            request = request._replace(sampling=alone, read_prompt=None)
            reply = PromptOnly(reply)
        parsed = ParsedRequest((request,), reply, self.errors, chat.ignored, streams=streams, keeps=keeping is not None)
        if edits is not None and edits.summarizing is not None:
            parsed = parsed._replace(course=FollowUp(edits.summarizing.follow_up))
        return parsed._replace(keep_alive=PING) if streams else parsed


_UNSHAPED = {"output_config": None, "output_format": None, "stop_sequences": None, "continue_final_message": False}
"""The fields of a chat that do not apply to a summary."""


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _check_alone(body: Mapping[str, Any]) -> None:
    """Check a body with `compaction`.

    Raises:
        InvalidParameter: another field contradicts it.
        CompactionRefused: there is nothing to summarize.
    """
    for name in ("context_management", "thread"):
        if body.get(name) is not None:
            raise InvalidParameter(f"{COMPACTION}: cannot be combined with {name}; omit one of them")
    if body["max_tokens"] == 0:
        raise InvalidParameter(f"{COMPACTION}: the summary needs tokens; set max_tokens")
    check_summarizable(body.get("messages"))
    if not isinstance(body.get("messages"), list):
        raise InvalidPayload("'messages' must be a non-empty list")


def _reply(settings: MessageSettings, signer: Signer | None, *, streams: bool) -> Reply:
    if signer is not None:
        return SummaryStream(settings, signer) if streams else SummaryDocument(settings, signer)
    edits = settings.edits
    if edits is not None and edits.compact is not None and edits.summarizing is not None:
        compacting = CompactingMessageStream if streams else CompactingMessageDocument
        return compacting(settings, edits.summarizing, pauses=edits.compact.pauses)
    return MessageStream(settings) if streams else MessageDocument(settings)


class AnthropicCountTokens(AnthropicMessages):
    """The dialect of Anthropic's token counts. Fields that affect only responses are checked, except `max_tokens`."""

    name = "anthropic_count"
    computes = False
    description = Description(
        title="Anthropic token count",
        request="AnthropicCountRequest",
        request_shape=_body("messages"),
        error=AnthropicError,
        example={"model": "", "messages": CHAT_EXAMPLE["messages"]},
        response=AnthropicCount,
    )

    def _respond(
        self,
        chat: ParsedChat,
        thinking: Thinking,
        keeping: ThreadKeeping | None,
        edits: ContextEdits | None = None,
        signer: Signer | None = None,
    ) -> ParsedRequest:
        def document(number: int) -> AnthropicCount:
            if edits is None:
                return {"input_tokens": number}
            original = number if edits.num_original is None else edits.num_original
            return {"input_tokens": number, "context_management": {"original_input_tokens": original}}

        return counted(chat, self.errors, document)


class _Translator:
    """Translates the conversation of one request, edited or not, to a chat.

    Args:
        reader: reader that has read the messages of the body.

    Attributes:
        body: the body, with the fields that its thread repeats.
        unheeded: names of the fields of `thinking` that have no effect.

    Raises:
        InvalidParameter: a field besides the messages is invalid.
    """

    def __init__(
        self,
        body: Mapping[str, Any],
        thinking: Thinking,
        reader: MessagesReader,
        context: ServerContext,
        request_context: RequestContext,
    ) -> None:
        self.body = body
        self.context = context
        self._request_context = request_context
        arguments, self.unheeded = thinking.template_arguments(context)
        kwargs = {} if body.get("chat_template_kwargs") is None else body["chat_template_kwargs"]
        tools = read_tools(body.get("tools"), reader.changes)
        choice = NamedValue("tool_choice", body.get("tool_choice")).optional(partial(read_choice, tools=tools)) or {}
        self._tool_fields: Mapping[str, Any] = {**choice, "tools": tools.shown()}
        self._fields: Mapping[str, Any] = {
            **{name: body[name] for name in _SAME if name in body},
            "chat_template_kwargs": {**kwargs, **arguments} if isinstance(kwargs, dict) else kwargs,
            "reasoning_effort": reader.effort or read_effort(body),
            "continue_final_message": reader.continues,
            "thinking_token_budget": thinking.token_budget(context),
        }

    @property
    def messages(self) -> list[Mapping[str, Any]]:
        """The messages of the conversation. Those of earlier requests of its thread come first."""
        return [*self._request_context.recalled.history, *self.body["messages"]]

    def chat(self, messages: ChatMessages) -> ParsedChat:
        """Return the chat for a response to messages."""
        return self._translate(self._fields, messages, self._tool_fields)

    def summary(self, messages: ChatMessages, **fields: Any) -> ParsedChat:
        """Return the chat for a summary. The last message asks for it.

        Args:
            fields: fields of the chat in place of those of the body.
        """
        tool_fields = {**self._tool_fields, "tool_choice": "none"}
        chat = self._translate({**self._fields, **_UNSHAPED, **fields}, messages, tool_fields)
        return chat._replace(request=of_bounded_length(unshaped(chat.request)))

    def _translate(
        self, fields: Mapping[str, Any], messages: ChatMessages, tool_fields: Mapping[str, Any]
    ) -> ParsedChat:
        return _CHAT.translate(self.body, fields, messages, tool_fields, self.context, self._request_context)

    def edited_request(self, edited: EditedMessages) -> Request:
        """Return the request for a response to an edited conversation."""
        return self.chat(self.read(edited)).request

    def request_after(self, summary: str) -> Request:
        """Return the request for a response to a summary, which replaces the conversation."""
        block = {"type": COMPACTION, "content": summary}
        edited = EditedMessages([{"role": "user", "content": [block]}])
        return self.chat(self._read(edited, 0)).request

    def read(self, edited: EditedMessages) -> ChatMessages:
        """Read an edited conversation. No edit removes messages."""
        return self._read(edited, len(self._request_context.recalled.history))

    def _read(self, edited: EditedMessages, num_before: int) -> ChatMessages:
        """Read an edited conversation. Its first `num_before` messages are earlier messages of its thread."""
        reader = MessagesReader(self.context, self._request_context.owner)
        reader.read({**self.body, "messages": edited.messages[num_before:]}, edited.messages[:num_before])
        if edited.num_reasoning is not None:
            reader.clear_thinking(edited.num_reasoning)
        return reader.conversation()


def _summarizing(edits: ContextEdits, compact: Compact, translator: _Translator, last_summary: str) -> Summarizing:
    """Return the object that summarizes the edited conversation if it is still too long."""

    def ask() -> SummaryRequest:
        question = _user(compact.instructions or PROMPT)
        edited = edits.edited._replace(messages=[*edits.edited.messages, question])
        summary = translator.summary(translator.read(edited), max_tokens=None)
        return SummaryRequest(summary.request, summary.format.form)

    length = translator.context.most_tokens
    return Summarizing(compact.threshold(length()), length, ask, translator.request_after, last_summary)


_NAMES = OPENAI_NAMES._replace(
    function="",
    parameters="input_schema",
    message_reasoning="messages[].content[].thinking",
    reasoning_effort="output_config.effort",
    thinking_token_budget="thinking.budget_tokens",
    without_reasoning='thinking {"type": "disabled"}',
)


class _Chat(OpenAiChat):
    """The chat dialect with the parameters of Anthropic's messages and those translated from other fields."""

    field_names = _NAMES
    table = Table(
        {**TABLE.parameters, **{name: CHAT.parameters[name] for name in _TRANSLATED}},
        translated={
            "reasoning_effort": _NAMES.reasoning_effort,
            "thinking_token_budget": _NAMES.thinking_token_budget,
            STRICT: "tools[].strict",
        },
    )
    fields: Mapping[str, Shape] = {name: shape for name, shape in OpenAiChat.fields.items() if name != "stream_options"}


_CHAT = _Chat()
