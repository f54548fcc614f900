"""The chat that Anthropic's messages, tools and parameters mean, which `OpenAiChat.build` builds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from handler.core.errors import InvalidParameter, InvalidPayload
from handler.core.values import Request
from handler.protocols.anthropic.api import ToolUnresolved
from handler.protocols.anthropic.compaction import Signer, check_signed, read_summary
from handler.protocols.anthropic.edits import Compact, ContextEdits, EditedMessages
from handler.protocols.anthropic.types import (
    CHOICES,
    COMPACTION,
    CONTENTS,
    ENABLED,
    MESSAGE,
    NEXT_USER_MESSAGE,
    SYSTEM,
    TABLE,
    THINKING,
    TOOL,
    TOOL_CHOICE,
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
from handler.protocols.assistant.tools.request import MAX_TOOLS, ChatTools, Choice, Tool, make_tool
from handler.protocols.kernel.context import RequestContext, ServerContext
from handler.protocols.kernel.messages import ChatMessages, TurnsReader, add_to_turn
from handler.protocols.kernel.objects import Scope, reader_of
from handler.protocols.kernel.parameters import STRICT, Table
from handler.protocols.kernel.path import Path
from handler.protocols.kernel.readers import NamedValue, show
from handler.protocols.kernel.schema import Shape
from handler.protocols.openai.chat import OpenAiChat, ParsedChat
from handler.protocols.openai.request import CHAT, OPENAI_NAMES

# -- system messages: how long they are shown, and the effort that they set --------------------------------------------


def _is_hidden(message: Mapping[str, Any], at: Path, next_role: str, *, precedes_user: bool) -> bool:
    """Return whether the model does not see a message.

    It does not see system messages that a later user message has cleared, and those that only set the effort.

    Args:
        message: the message, as `MESSAGE` has read it.
        next_role: the role of the next message, or "" for the last message.
        precedes_user: whether a user message follows at some point.

    Raises:
        InvalidPayload: a field is in a message of another role, or contradicts others.
    """
    clear_at, config = message["clear_at"], message["output_config"]
    if clear_at is None and config is None:  # as in most messages
        return False
    if message["role"] != "system":
        name = "output_config" if clear_at is None else "clear_at"
        raise at.at(name).refused("is allowed only in messages with the role system")
    if clear_at == NEXT_USER_MESSAGE:
        _check_temporary(message, at)
        if next_role == "user":
            raise at.at("clear_at").refused("the next message clears this one before the model sees it")
        if precedes_user:
            return True
    return config is not None and config["effort"] is not None and not message["content"]


def _check_temporary(message: Mapping[str, Any], at: Path) -> None:
    """Check a message that the next user message clears. It may contain only text."""
    if message["output_config"] is not None:
        raise at.at("output_config").refused("is not allowed with clear_at; send it in a separate message")
    blocks = message["content"] if isinstance(message["content"], list) else []
    if any(not isinstance(block, dict) or block.get("type") != "text" for block in blocks):
        raise at.at("content").refused("a message with clear_at must contain only text")


def _effort_of(messages: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the effort that system messages set for the response, or None if they set none.

    A message directly after new user input sets the effort for the response to this input. Elsewhere, it sets the
    effort from the next user input on. Tool results are not user input.
    """
    effort = next_effort = None
    follows_input = False
    for message in messages:
        if message["role"] == "system":
            next_effort = (message["output_config"] or {}).get("effort") or next_effort
        else:
            follows_input = message["role"] == "user" and (follows_input or _has_input(message["content"]))
        if follows_input:
            effort = next_effort
    return effort


def _has_input(content: Any) -> bool:
    """Return whether a user message contains more than tool results."""
    if not isinstance(content, list):
        return bool(content)
    return any(not isinstance(block, dict) or block.get("type") != "tool_result" for block in content)


# -- tools, and their changes in messages ------------------------------------------------------------------------------


class ToolChange(NamedTuple):
    """A part of a message that changes which tools the model may call.

    Attributes:
        kind: the type of the block, or `found` if the model has found or called the tool.
        name: the tool's name.
        at: the path of the block in the request body.
        tool: the tool's definition, or None if the block refers to an earlier one.
    """

    kind: Literal["tool_addition", "tool_removal", "found"]
    name: str
    at: Path
    tool: Mapping[str, Any] | None = None


class DefinedTools:
    """The tools that a request defines, and which of them the model may call in the response.

    Attributes:
        defined: maps the names of all tools to their definitions.
        deferred: the names of the tools that are withheld until a reference to them.
        removed: the names of the tools that were withdrawn.
    """

    def __init__(self) -> None:
        self.defined: dict[str, Tool] = {}
        self.deferred = set[str]()
        self.removed = set[str]()

    def define(self, tool: Mapping[str, Any]) -> None:
        """Define a tool. An equal definition of a tool that the model may call changes nothing."""
        name, definition = tool["name"], _definition(tool)
        if tool["defer_loading"] and (self.defined.get(name) != definition or name in self.removed):
            self.deferred.add(name)
        elif not tool["defer_loading"]:
            self.deferred.discard(name)
        self.removed.discard(name)
        self.defined[name] = definition

    def change(self, change: ToolChange) -> None:
        """Apply a change. Adding a tool that the model may already call, or removing it twice, has no effect.

        Raises:
            ToolUnresolved: no tool has this name.
        """
        name = change.name
        if change.tool is not None:
            self.define(change.tool)
        elif change.kind == "found":
            self.deferred.discard(name)
        elif name not in self.defined:
            raise ToolUnresolved(f"{change.at}.tool.name={show(name)}: must be the name of a tool defined before it")
        elif change.kind == "tool_removal":
            self.removed.add(name)
        else:
            self.deferred.discard(name)
            self.removed.discard(name)

    def choose(self, value: Any) -> dict[str, Any]:
        """Read the fields of `tool_choice`. A tool that it names is no longer deferred.

        Raises:
            ValueError: the choice is invalid.
        """
        choice: dict[str, Any] = _read_choice(value)
        name = choice["name"]
        if choice["type"] == "tool":
            if not isinstance(name, str) or name not in self.defined:
                raise ValueError("'name' must be the name of one of the tools")
            if name in self.removed:
                raise ValueError("'name' must be the name of a tool that no tool_removal has removed")
            self.deferred.discard(name)
        return choice

    def chat_tools(self, sent: NamedValue) -> ChatTools:
        """Return the tools that the model may call, and the choice among them."""
        choice = sent.optional(self.choose)
        hidden = self.deferred | self.removed
        tools = [tool for name, tool in self.defined.items() if name not in hidden]
        unknown = dict.fromkeys(path for tool in tools for path in tool.unknown)
        if len(tools) > MAX_TOOLS:
            raise InvalidParameter(f"tools: the model may call {len(tools)} tools; the maximum is {MAX_TOOLS}")
        chat_tools = ChatTools(tools, sent, unknown=[*unknown])
        if choice is None:
            return chat_tools
        chosen = Choice("named", choice["name"]) if choice["type"] == "tool" else Choice(CHOICES[choice["type"]])
        single = choice["disable_parallel_tool_use"]
        return chat_tools._replace(choice=chosen, parallel=None if single is None else not single)


_read_choice = reader_of(TOOL_CHOICE)


def _definition(tool: Mapping[str, Any]) -> Tool:
    return make_tool(tool["name"], tool["description"], tool["input_schema"], tool["strict"], tool["unknown"])


def read_tools(value: Any, changes: Iterable[ToolChange], scope: Scope) -> DefinedTools:
    """Read `tools`, and apply the changes in the messages.

    Raises:
        InvalidPayload: a tool does not run on the client, or is malformed.
        InvalidParameter: two tools have the same name.
        ToolUnresolved: a change refers to a tool that is not defined.
    """
    if not isinstance(value, list | None):
        raise NamedValue("tools", value).refused(f"must be a list of at most {MAX_TOOLS} tools")
    tools = DefinedTools()
    for index, item in enumerate(value or ()):
        tool = TOOL.read(item, Path(("tools", index)), scope)
        if tool["name"] in tools.defined:
            raise InvalidParameter("tools: two tools have the same name")
        tools.define(tool)
    for change in changes:
        tools.change(change)
    return tools


# -- `system` and `messages`, translated into chat messages ------------------------------------------------------------


_HEADER_LINE = re.compile(r"^x-anthropic-[^:\n]*:.*\n?", re.MULTILINE)
"""Matches a line of Claude Code's system prompt that is meant for Anthropic's servers and differs between sessions."""


class MessagePath(Path):
    """The path of a value in a message. A negative number is that of an earlier message of a thread."""

    def __str__(self) -> str:
        match self.keys:
            case "messages", int(number), *keys if number < 0:
                return str(Path((f"thread: message {number}", *keys)))
        return super().__str__()


def _path(*keys: str | int) -> Path:
    return MessagePath(keys, _with_verb)


def _with_verb(path: Path, reason: str) -> str:
    return f"{path}{' ' if reason.startswith(('must ', 'is ')) else ': '}{reason}"


class MessagesReader(TurnsReader):
    """Reads the messages of one request, and translates them into chat messages.

    Attributes:
        continues: whether the response continues the last message.
        changes: what the messages say about the tools that the model may call, in the order of the messages.
        effort: the effort that the messages set for the response, or None if they set none.
        signer: the signer of summaries.
        scope: the context, with the names that have no effect.
    """

    def __init__(self, context: ServerContext, owner: str) -> None:
        super().__init__(context)
        self.signer = Signer(context.sealer, owner)
        self.scope = Scope(context, self.unknown)
        self._num_instructions = 0  # messages of the chat that no summary replaces
        self._summaries: list[Mapping[str, Any]] = []
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
            self._add_content("system", SYSTEM.read(body["system"], _path("system"), self.scope))
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
            raise _path("messages", len(messages) - 1).refused(
                "the response continues this message, which must have text and no tool_use"
            )

    @property
    def last_summary(self) -> str:
        """The last summary in the messages, or "" if there is none."""
        return self._summaries[-1]["content"] if self._summaries else ""

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
        paths = [_path("messages", number - num_before) for number in range(len(conversation))]
        messages = [MESSAGE.read(message, at, self.scope) for message, at in zip(conversation, paths, strict=True)]
        roles = [message["role"] for message in messages]
        last_user = max((index for index, role in enumerate(roles) if role == "user"), default=-1)
        previous, change = "", None  # the last role that is not system, and a change since then
        for index, (at, message, next_role) in enumerate(zip(paths, messages, [*roles[1:], ""], strict=True)):
            role, num_changes = message["role"], len(self.changes)
            if not _is_hidden(message, at, next_role, precedes_user=index < last_user):
                content = message["content"]
                is_text = isinstance(content, str)
                self._add_content(
                    role, content if is_text else CONTENTS[role].read(content, at.at("content"), self.scope)
                )
            if role == "system" and len(self.changes) > num_changes:
                change = change or self.changes[-1].at
            is_misplaced = previous != "user" if role == "system" else role != "assistant"
            if change is not None and is_misplaced:
                raise change.refused(
                    "a system message that changes the tools must follow a message of the user, "
                    "and precede one of the assistant or be the last"
                )
            if role != "system":
                previous, change = role, None
        if self._summaries:
            check_signed(self._summaries, paths[0])
        self.effort = _effort_of(messages) if "system" in roles else None

    def _add_content(self, role: str, content: Any) -> None:
        if not content or isinstance(content, str):
            return self._add_text(role, content or "")
        for block in content:
            self._add_block(role, block)
        self._add_shown()

    def _add_block(self, role: str, block: Mapping[str, Any]) -> None:
        kind = block["type"]
        if self._shown and kind != "tool_result":
            self._add_shown()
        match kind:
            case "text":
                self._add_text(role, block["text"])
            case "image":
                add_to_turn(self.chat, role, content=block["source"])
            case "thinking":
                add_to_turn(self.chat, role, reasoning_content=block["thinking"])
            case "redacted_thinking":
                add_to_turn(self.chat, role)
            case "tool_use":
                add_to_turn(self.chat, role, tool_calls=self._call(block))
            case "tool_result":
                self.chat.append(self._result(block))
            case "compaction":
                self._add_summary(role, block)
            case _:
                tool = block["tool"].get("definition")
                self.changes.append(ToolChange(kind, (tool or block["tool"])["name"], block["at"], tool))

    def _add_summary(self, role: str, block: Mapping[str, Any]) -> None:
        """Add the summary in a block, which replaces all messages before it."""
        summary = read_summary(block, self.signer)
        if summary is None:
            return add_to_turn(self.chat, role)
        self._summaries.append(block)
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

    def _call(self, block: Mapping[str, Any]) -> dict[str, Any]:
        id, name = block["id"], block["name"]
        self._calls[id] = name
        self.changes.append(ToolChange("found", name, block["at"]))
        return {"id": id, "type": "function", "function": {"name": name, "arguments": block["input"]}}

    def _result(self, block: Mapping[str, Any]) -> dict[str, Any]:
        id, content = block["tool_use_id"], block["content"]
        if id not in self._calls:
            raise NamedValue(f"{block['at']}.tool_use_id", id).refused("no earlier tool_use has this id")
        if isinstance(content, list):
            self._shown += [part["source"] for part in content if "source" in part]
            self.changes += [
                ToolChange("found", part["tool_name"], part["at"]) for part in content if "tool_name" in part
            ]
            content = "\n".join([part.get("text", part.get("tool_name")) for part in content if "source" not in part])
        return {"role": "tool", "tool_call_id": id, "name": self._calls[id], "content": content or ""}


# -- `thinking` and `output_config.effort`, translated to arguments of the model's chat template -----------------------


_THINKING = re.compile(r"\{%[^%]*(?<![.\w'\"])thinking\b")
"""Matches a chat template that reads the variable `thinking`."""

_read_thinking = reader_of(THINKING)


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
    fields = _read_thinking(value)
    kind, budget = fields["type"], fields["budget_tokens"]
    if kind == "enabled" and budget is None:
        raise ValueError("'budget_tokens' is required")
    return Thinking(ENABLED[kind], budget if kind == "enabled" else None, fields["display"] != "omitted")


# -- the chat ----------------------------------------------------------------------------------------------------------


_TRANSLATED = ("chat_template_kwargs", "reasoning_effort", "continue_final_message", "thinking_token_budget")
"""The chat parameters that are set from other fields of the Anthropic request body."""

_UNSHAPED = {"output_config": None, "output_format": None, "stop_sequences": None, "continue_final_message": False}
"""The fields of a chat that do not apply to a summary."""


def user_message(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


class Translator:
    """Translates the conversation of one request, edited or not, to a chat.

    Args:
        reader: reader that has read the messages of the body.

    Attributes:
        body: the body, with the fields that its thread repeats.
        unheeded: the paths of the fields of `thinking` and `output_config` that have no effect.

    Raises:
        InvalidPayload, InvalidParameter: a field besides the messages is invalid.
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
        tools = read_tools(body.get("tools"), reader.changes, reader.scope)
        self._tools = tools.chat_tools(NamedValue("tool_choice", body.get("tool_choice")))
        config = body["output_config"] if isinstance(body.get("output_config"), dict) else {}  # `TABLE` checks it
        if config.get("task_budget") is not None:
            self.unheeded.append("output_config.task_budget")
        self._fields: Mapping[str, Any] = {
            **{name: body[name] for name in ("model", "stream", *TABLE.parameters) if name in body},
            "chat_template_kwargs": {**kwargs, **arguments} if isinstance(kwargs, dict) else kwargs,
            "reasoning_effort": reader.effort or config.get("effort"),
            "continue_final_message": reader.continues,
            "thinking_token_budget": thinking.token_budget(context),
        }

    @property
    def messages(self) -> list[Mapping[str, Any]]:
        """The messages of the conversation. Those of earlier requests of its thread come first."""
        return [*self._request_context.recalled.history, *self.body["messages"]]

    def chat(self, messages: ChatMessages) -> ParsedChat:
        """Return the chat for a response to messages."""
        return self._translate(self._fields, messages, self._tools)

    def summary(self, messages: ChatMessages, **fields: Any) -> ParsedChat:
        """Return the chat for a summary. The last message asks for it.

        Args:
            fields: fields of the chat in place of those of the body.
        """
        tools = self._tools._replace(choice=Choice("none"))
        chat = self._translate({**self._fields, **_UNSHAPED, **fields}, messages, tools)
        return chat._replace(request=of_bounded_length(unshaped(chat.request)))

    def _translate(self, fields: Mapping[str, Any], messages: ChatMessages, tools: ChatTools) -> ParsedChat:
        return _CHAT.translate(self.body, fields, messages, tools, self.context, self._request_context)

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


def summarizing(edits: ContextEdits, compact: Compact, translator: Translator, last_summary: str) -> Summarizing:
    """Return the object that summarizes the edited conversation if it is still too long."""

    def ask() -> SummaryRequest:
        question = user_message(compact.instructions or PROMPT)
        edited = edits.edited._replace(messages=[*edits.edited.messages, question])
        summary = translator.summary(translator.read(edited), max_tokens=None)
        return SummaryRequest(summary.request, summary.format.form)

    length = translator.context.most_tokens
    return Summarizing(compact.threshold(length()), length, ask, translator.request_after, last_summary)


_NAMES = OPENAI_NAMES._replace(
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
