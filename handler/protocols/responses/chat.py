"""What a request to the Responses API means: its items and tools, translated to those of a chat."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from handler.core.errors import InvalidParameter, InvalidPayload, NotKept
from handler.core.media import MediaSource
from handler.core.values import Request
from handler.protocols.assistant.summary import PROMPT, message_of, of_bounded_length
from handler.protocols.assistant.tools.request import (
    TOOL_NAME,
    ChatTools,
    Choice,
    Tool,
    allowing,
    check_tools,
    make_tool,
    names_of,
    read_choice,
)
from handler.protocols.kernel.context import RequestContext, ServerContext
from handler.protocols.kernel.messages import (
    PartReader,
    TurnsReader,
    add_to_turn,
    check_role,
    read_arguments,
)
from handler.protocols.kernel.objects import Scope
from handler.protocols.kernel.parameters import STRICT, Table
from handler.protocols.kernel.path import ParameterPath, Path
from handler.protocols.kernel.readers import NamedValue, boolean, show, unread
from handler.protocols.kernel.schema import Shape
from handler.protocols.openai.chat import OpenAiChat, ParsedChat
from handler.protocols.openai.request import CHAT, OPENAI_NAMES
from handler.protocols.responses import recorded
from handler.protocols.responses.compaction import Summaries, after_compaction, has_replaceable
from handler.protocols.responses.response import Origin
from handler.protocols.responses.types import (
    CHOSEN,
    CUSTOM,
    HOSTED,
    ITEM,
    ITEMS,
    NAMESPACE,
    OF_CHAT,
    REFUSED,
    STORED_FIELDS,
    TABLE,
    TOOLS_BY_TYPE,
    TRIGGER,
    full_name,
    meaning_of,
    read_reasoning,
    referenced,
    skipped,
    type_of,
    user_message,
    without_skipped,
)

# -- `instructions` and `input` ----------------------------------------------------------------------------------------


_ROLES = ("user", "assistant", "system", "developer")
_READ = [kind for kind, known in ITEMS.items() if known.fields is not None]


class InputReader(TurnsReader):
    """Reads the input of one request, and translates it to chat messages.

    Attributes:
        field: the name of the field with the items, for reports of names without effect.
        refused: what is said of items of types that are refused.
        history: the stored items before those of `input`.
        items: the items of `input`, with references replaced by the stored items.
        compacts: whether the request asks for a summary of its conversation.
        summaries: writes and reads summaries.
        last_summary: the last summary in the conversation, or "" if there is none.

    Args:
        calls: the types of calls that come before the items, by their ids, the latest last.
    """

    field = "input"
    refused = REFUSED

    def __init__(
        self, context: ServerContext, request_context: RequestContext, calls: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        super().__init__(context)
        self._request_context = request_context
        self.history = request_context.recalled.history
        self._scope = Scope(context, self.unknown)
        self._parts = PartReader(context, f"{self.field}[].content[]", self.unknown)
        self.summaries = Summaries(context.sealer, request_context.owner)
        self.items: list[Any] = []
        self._read_items: Sequence[tuple[Path, Any]] = ()  # items that the model reads
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
            input = [user_message(input)]
        if not isinstance(input, list) or not input:
            raise InvalidPayload("'input' must be a non-empty string or list of items")
        field = "previous_response_id" if body.get("conversation") is None else "conversation"
        stored = [
            (item_path(self.field, f"{field}: item {index}"), item)
            for index, item in enumerate(self.history)
            if not _is_skipped(item)
        ]
        paths = [item_path(self.field, index) for index in range(len(input))]
        sent = [(path, self._resolved(item, path)) for path, item in zip(paths, input, strict=True)]
        self._read_items = after_compaction([*stored, *sent])
        for at, item in self._read_items:
            self._item(item, at)
        if len(self._read_items) < len(stored) + len(sent):  # items that a summary replaces are stored, too
            for at, item in sent:
                _check_type(item, at)
        self._add_shown()
        if not self.chat:
            raise InvalidPayload("'input' must contain at least one item that is part of the prompt")
        self._join_turns()

    def _resolved(self, item: Any, at: Path) -> Any:
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

    def _item(self, item: Any, at: Path) -> None:
        kind = _check_type(item, at)
        if self.compacts:
            raise InvalidPayload(f"{at}: {TRIGGER} must be the last item")
        if kind in self.refused or kind not in ITEMS:
            reason = self.refused.get(kind, f"is not supported: the type must be {' or '.join(_READ)}")
            raise InvalidPayload(f"{at}: {kind[:64]!r} {reason}")
        known = ITEMS[kind]
        if known.fields is not None:
            item = ITEM.read(item, at, self._scope)
        if not known.meaning.endswith("output"):
            self._add_shown()
        getattr(self, f"_{known.meaning}")(item, at)

    @property
    def may_compact(self) -> bool:
        """Whether a summary could replace items of the conversation before the response."""
        return not self.compacts and has_replaceable(self._read_items)

    def user_messages(self) -> list[Any]:
        """Return the user messages of the conversation."""
        return [item for item in (*self.history, *self.items) if type_of(item) == "message" and item["role"] == "user"]

    def _trigger(self, item: Mapping[str, Any], at: Path) -> None:
        """Ask for a summary of the conversation.

        Raises:
            InvalidPayload: there is nothing to summarize.
        """
        if not any(message["role"] != "system" for message in self.chat):
            raise InvalidPayload("'input' has nothing to summarize")
        add_to_turn(self.chat, "user", content=PROMPT)
        self.compacts = True

    def _summary(self, item: Mapping[str, Any], at: Path) -> None:
        self.last_summary = self.summaries.read(item, str(at))
        add_to_turn(self.chat, "user", content=message_of(self.last_summary, self._context.vocabulary))

    def _message(self, item: Mapping[str, Any], at: Path) -> None:
        path, content = at.at("content"), item["content"]
        role = check_role(item["role"], at, _ROLES, self._context)
        parts = self._parts.read(content, path, media=True) if role == "user" else [self._text(content, path)]
        for part in parts or [""]:
            add_to_turn(self.chat, "system" if role == "developer" else role, content=part)

    def _agent_message(self, item: Mapping[str, Any], at: Path) -> None:
        """Read what an agent says to another agent, such as Codex' sub-agents, as a user message with tags."""
        content = item["content"]
        if isinstance(content, list):
            content = [self._readable(part) for part in content]
        text = self._text(content, at.at("content"))
        author, recipient = json.dumps(item["author"]), json.dumps(item["recipient"])
        tag = f"<agent_message author={author} recipient={recipient}>"
        add_to_turn(self.chat, "user", content=f"{tag}\n{text}\n</agent_message>")

    def _readable(self, part: Any) -> Any:
        """Return a part of an agent's message, or words in place of one that only OpenAI can decrypt."""
        if not isinstance(part, dict) or part.get("type") != "encrypted_content":
            return part
        self.unknown[f"{self.field}[].content[].encrypted_content"] = None
        return {"type": "input_text", "text": "[encrypted]"}

    def _reasoning(self, item: Mapping[str, Any], at: Path) -> None:
        field = "content" if item["content"] else "summary"
        if item[field]:
            add_to_turn(self.chat, "assistant", reasoning_content=self._text(item[field], at.at(field)))
        elif item["encrypted_content"]:  # only OpenAI can decrypt it
            self.unknown[f"{self.field}[].encrypted_content"] = None

    def _output(self, item: Mapping[str, Any], at: Path) -> None:
        """Read the output of a tool call. Its images are added to the chat after all adjacent outputs."""
        id = item["call_id"]
        if id not in self._calls:
            raise InvalidPayload(f"{at}.call_id={show(id)}: no earlier {ITEMS[item['type']].of} has this id")
        parts = self._parts.read(item["output"], at.at("output"), media=True)
        self._shown += [part for part in parts if isinstance(part, MediaSource)]
        self._add_output(id, "\n".join([part for part in parts if isinstance(part, str)]))

    def _recorded_output(self, item: Mapping[str, Any], at: Path) -> None:
        """Read the output of a tool that another server hosts."""
        call = ITEMS[item["type"]].of
        ids, text = recorded.read_output(item)
        ids += [id for id, kind in self._calls.items() if kind == call][-1:]
        id = next((id for id in ids if id in self._calls), None)
        if id is None:
            raise InvalidPayload(f"{at}: no earlier {call} has the id of this output")
        self._add_output(id, text)

    def _recorded_call(self, item: Mapping[str, Any], at: Path) -> str:
        """Read a call of a tool that another server hosts as a call of a function. Return its id."""
        id = recorded.id_of(item) or f"{item['type']}_{len(self._calls)}"
        self._add_call(id, item["type"], ITEMS[item["type"]].of, recorded.read_arguments(item))
        return id

    def _recorded_result(self, item: Mapping[str, Any], at: Path) -> None:
        """Read such a call with its results."""
        self._add_output(self._recorded_call(item, at), recorded.read_results(item))

    def _call(self, item: Mapping[str, Any], at: Path) -> None:
        name = full_name(item["namespace"], item["name"])
        if "input" in item:
            arguments = {"input": item["input"]}
        else:
            arguments = read_arguments(item["arguments"], f"{self.field}[].arguments", self.unknown)
        self._add_call(item["call_id"], item["type"], name, arguments)

    def _add_call(self, id: str, kind: str, name: str, arguments: Mapping[str, Any]) -> None:
        self._calls[id] = kind
        function = {"name": name, "arguments": arguments}
        add_to_turn(self.chat, "assistant", tool_calls={"id": id, "type": "function", "function": function})

    def _add_output(self, id: str, text: str) -> None:
        self.chat.append({"role": "tool", "tool_call_id": id, "content": text})

    def _text(self, content: Any, at: Path) -> str:
        """Read a string or a list of text parts. Return the text, with parts joined by newlines."""
        parts = self._parts.read(content, at, media=False)
        return "\n".join([part for part in parts if isinstance(part, str)])


class ItemPath(Path):
    """The path of a value in an item. Its second key is the item's index, or words for an item elsewhere."""

    def __str__(self) -> str:
        return str(Path(self.keys[1:])) if isinstance(self.keys[1], str) else super().__str__()

    @property
    def general(self) -> str:
        return Path((self.keys[0], 0, *self.keys[2:])).general


def item_path(field: str, position: int | str) -> Path:
    """Return the path of an item. In the errors for items, no colon follows a path."""
    return ItemPath((field, position), _without_colon)


def _without_colon(path: Path, reason: str) -> str:
    return f"{path} {reason}"


def _check_type(item: Any, at: Path) -> str:
    """Return the type of an item.

    Raises:
        InvalidPayload: it has none.
    """
    kind = type_of(item)
    if not isinstance(kind, str):
        raise InvalidPayload(f"{at} must be an object with 'type', or with 'role' and 'content'")
    return kind


def _is_skipped(item: Mapping[str, Any]) -> bool:
    """Return whether a stored item is not part of the prompt: a request for a summary, or a truncated call."""
    meaning = meaning_of(item)
    return meaning == "trigger" or (meaning == "call" and item.get("status") == "incomplete")


# -- `tools` and `tool_choice` -----------------------------------------------------------------------------------------


class ToolsReader:
    """Reads the tools of one request, and the choice among them.

    Attributes:
        tools: the tools, those in namespaces under their full names.
        origins: maps a tool's name in the prompt to its declaration, for custom tools and tools of a namespace.
        ignored: the reasons for omitting tools and the paths of unknown names, for `x-lmi-ignored-parameters`.
        left_out: maps the names of omitted custom tools to these reasons.
        formats: the names of custom tools whose text must match a regular expression.
    """

    def __init__(self, context: ServerContext) -> None:
        self.tools: list[Tool] = []
        self.ignored: dict[str, None] = {}
        self._scope = Scope(context, self.ignored)
        self.left_out: dict[str, str] = {}
        self.origins: dict[str, Origin] = {}
        self.formats: list[str] = []

    def read(self, value: Any) -> Sequence[str]:
        """Read the tools, and return their names. Those of tools in a namespace are prefixed with the namespace.

        Raises:
            InvalidParameter: a tool is neither a function nor a custom tool, or is malformed.
        """
        for index, tool in enumerate(check_tools(value)):
            self._tool(tool, ParameterPath(("tools", index)), "")
        return names_of(self.tools)

    def _tool(self, value: Any, at: Path, namespace: str) -> None:
        tool = value if isinstance(value, dict) else {}
        kind = tool.get("type")
        if reason := skipped(tool):
            self.ignored[reason] = None
            if kind == CUSTOM:
                self.left_out[full_name(namespace, str(tool.get("name")))] = reason
            return
        if kind == "namespace" and not namespace and isinstance(tool.get("tools"), list):
            if not isinstance(tool.get("name"), str) or not tool["name"]:
                raise at.at("name").refused("must be a non-empty string")
            self.ignored |= unread(tool, "tools[]", NAMESPACE)
            for index, member in enumerate(tool["tools"]):
                self._tool(member, at.at("tools", index), tool["name"])
            return
        if not isinstance(kind, str) or kind not in TOOLS_BY_TYPE:
            hosted = isinstance(kind, str) and kind.startswith(HOSTED)
            reason = "hosted tools only run on OpenAI's servers" if hosted else f"the type must be function or {CUSTOM}"
            raise NamedValue(f"{at}.type", kind).refused(f"is not supported: {reason}")
        self._add(TOOLS_BY_TYPE[kind].read(tool, at, self._scope), kind, at, namespace)

    def _add(self, fields: dict[str, Any], kind: str, at: Path, namespace: str) -> None:
        short_name = fields["name"]
        name = TOOL_NAME.read(full_name(namespace, short_name), at.at("name with its namespace"), self._scope)
        if namespace or kind == CUSTOM:
            self.origins[name] = Origin(namespace, short_name, kind == CUSTOM)
        source = fields["format"] if kind == CUSTOM else fields
        if kind == CUSTOM and source["strict"]:
            self.formats.append(name)
        self.tools.append(make_tool(name, fields["description"], source["parameters"], source["strict"]))

    def choose(self, value: Any, names: Sequence[str]) -> Choice:
        """Read `tool_choice`.

        Args:
            names: the names of the tools.

        Raises:
            InvalidParameter: the value is malformed, or names an unknown or omitted tool.
        """
        sent = NamedValue("tool_choice", value)
        if not isinstance(value, dict):
            return read_choice(sent, names)
        kind = value.get("type")
        if kind == "allowed_tools":
            self.ignored |= unread(value, "tool_choice", ("type", "mode", "tools"))
            listed = value.get("tools")
            tools = without_skipped(listed) if isinstance(listed, list) else []
            chosen = [self._chosen(tool) for tool in tools if not self._is_missing(tool, names)]
            return allowing(value.get("mode"), chosen, names, sent)
        self.ignored |= unread(value, "tool_choice", CHOSEN)
        name = _name(value)
        if name not in names and (reason := self.left_out.get(name)):
            raise sent.refused(f"{name} is omitted, because {reason} is not supported")
        if kind not in ("function", CUSTOM) or name not in names:
            raise sent.refused(
                "must be none, auto, required, or an object with 'type': 'allowed_tools', or with 'type': 'function' "
                "or 'custom' and the 'name' of one of the tools"
            )
        return Choice("named", name)

    def _chosen(self, tool: Any) -> str | None:
        """Return the name of an allowed tool, or None for what names none."""
        self.ignored |= unread(tool, "tool_choice.tools[]", CHOSEN)
        return _name(tool) if isinstance(tool, dict) and tool.get("type") in (None, "function", CUSTOM) else None

    def _is_missing(self, tool: Any, names: Sequence[str]) -> bool:
        """Return whether an allowed tool is a custom tool that is not among the tools, as it may have been omitted."""
        return isinstance(tool, dict) and tool.get("type") == CUSTOM and _name(tool) not in names

    def named(self, request: Request, choice: Choice) -> Request:
        """Return the request with the field that the error names if the engine refuses its structured output.

        The error names the formats of custom tools if no schema of another tool can be the reason.
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
        if with_text:
            blamed += ", or text"
        return request._replace(names=request.names._replace(structured_output=blamed))

    def _compiled(self, choice: Choice, *, with_text: bool) -> list[str]:
        """Return the names of the tools whose schemas are part of the structured output.

        Args:
            with_text: whether the structured output also contains a schema for the text.
        """
        mode, name, allowed = choice
        callable = [
            tool for tool in self.tools if name in ("", tool.name) and (allowed is None or tool.name in allowed)
        ]
        return [tool.name for tool in callable if mode in ("required", "named") or with_text or tool.strict]


def _name(tool: Mapping[str, Any]) -> str:
    return full_name(tool.get("namespace"), str(tool.get("name")))


# -- the chat ----------------------------------------------------------------------------------------------------------


_RENAMED = {"messages": "input", "reasoning_effort": "reasoning.effort"}
"""Maps the field names of a chat to those of the Responses API, where they differ."""

_SAME = (TABLE.parameters.keys() - _RENAMED.keys()) | OF_CHAT.keys()
"""The fields that are passed to the chat unchanged."""

UNHEEDED = "tools[].strict"
"""The field that the chat reader reports as ignored if nothing enforces the schemas of tools."""

_NAMES = OPENAI_NAMES._replace(
    prompt="input", message_reasoning="input[].reasoning", reasoning_effort="reasoning.effort"
)


class _Chat(OpenAiChat):
    """The chat dialect with the parameters of the Responses API."""

    table = Table(
        {name: parameter for name, parameter in TABLE.parameters.items() if name not in _RENAMED}
        | {"reasoning_effort": CHAT.parameters["reasoning_effort"]},
        translated={"reasoning_effort": _NAMES.reasoning_effort, STRICT: UNHEEDED},
    )
    fields: Mapping[str, Shape] = {name: shape for name, shape in OpenAiChat.fields.items() if name != "stream_options"}
    field_names = _NAMES


_CHAT = _Chat()


class Translated(NamedTuple):
    """A body that has been translated to a chat.

    Attributes:
        input: reader that has read the input.
        tools: reader that has read the tools.
    """

    chat: ParsedChat
    input: InputReader
    tools: ToolsReader


def translate(body: Mapping[str, Any], context: ServerContext, request_context: RequestContext) -> Translated:
    """Translate a body to a chat."""
    reader, tools = InputReader(context, request_context), ToolsReader(context)
    reasoning = NamedValue("reasoning", body.get("reasoning")).optional(read_reasoning)
    reader.read(body)
    names, sent = tools.read(body.get("tools")), body.get("tool_choice")
    parallel = NamedValue("parallel_tool_calls", body.get("parallel_tool_calls")).optional(boolean)
    choice = Choice("none") if reader.compacts else tools.choose(sent, names)
    chat_tools = ChatTools(tools.tools, NamedValue("tool_choice", sent), choice, parallel)
    same = _SAME.difference(STORED_FIELDS if request_context.keeper else ())
    fields = {
        **{name: body[name] for name in same if name in body},
        "reasoning_effort": reasoning and reasoning["effort"],
    }
    if reader.compacts:
        fields["text"] = None  # the client's format is for the response, not for the summary
    chat = _CHAT.translate(body, fields, reader.conversation(), chat_tools, context, request_context)
    if reader.compacts and body.get("max_output_tokens") is None:
        chat = chat._replace(request=of_bounded_length(chat.request))
    if tools.formats:
        chat = chat._replace(request=tools.named(chat.request, choice))
    return Translated(chat, reader, tools)


def check_names(body: Mapping[str, Any]) -> None:
    """Raise InvalidParameter if a body uses a field name of the chat API instead of its own."""
    for name, own in _RENAMED.items():
        if body.get(name) is not None:
            raise InvalidParameter(f"{name}: is not supported: use {own}")
