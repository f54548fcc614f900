"""Readers of OpenAI's `tools`, `tool_choice` and `parallel_tool_calls`."""

from __future__ import annotations

import functools
import itertools
import re
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from handler.core.errors import InvalidParameter
from handler.core.values import StructuredOutput
from handler.protocols.assistant.events import EventParser
from handler.protocols.assistant.template import REASONING_FIELDS
from handler.protocols.assistant.tools.formats import find, get_format
from handler.protocols.assistant.tools.formats.json_calls import SMOLLM2, List
from handler.protocols.assistant.tools.grammar import Notation, calls, calls_in_text, calls_or_response, write_calls
from handler.protocols.assistant.tools.json_text import dumps
from handler.protocols.assistant.tools.parsing import HF, MAX_NAME, NAME, CallsOrText, Format, NamedCall
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.objects import Obj, Optional, Scope, leaf
from handler.protocols.kernel.parameters import STRICT
from handler.protocols.kernel.path import ParameterPath, Path
from handler.protocols.kernel.readers import NamedValue, boolean, json_schema, string, structural_tag, unread
from handler.protocols.kernel.schema import FLAG, NULL, TEXT, Shape, accepts, listing, nullable, record

Message = Mapping[str, Any]

_INSTRUCTED = SMOLLM2.notations[""]
"""The notation that prompts request if the model's own notation is unknown."""

_TOOLS = re.compile(r"\btools\b")

_SHORT_ID = re.compile(r"id\|length != 9")
"""Matches Mistral's templates, which require tool call ids of nine characters."""

_INDEXED_ID = re.compile(r"<\|tool_calls_section_begin\|>")
"""Kimi K2's templates write the call id, which contains the tool name, before the arguments and before the result."""

_FIRST_CALL = re.compile(r"\A(?s:(?!.* in (?:message|m)(?:\.|\[['\"])tool_calls).*)tool_calls\[0\]")
"""The templates of GigaChat 3, gpt-oss and Llama 3 write only the first tool call, or refuse several tool calls."""

_SINGLE_TEXT = re.compile(r"\.content and \w+\.thinking\b[^{}]*%\}\s*\{\{-?\s*raise_exception")
"""gpt-oss's template refuses messages with tool calls, reasoning and text, as it writes the latter two as analysis."""

_CALLS = re.compile(r"\btool_calls\b")
"""The templates of LFM2 and Granite 3.3 do not mention tool calls, and write only the role and text of a message."""

_DESCRIPTION = re.compile(r"[+~]\s*(?:(?:\w+\.)+description|\(\w+\.description \| tojson)")
"""The templates of gpt-oss and Muse Glimmer, and some others, fail for a tool without a description."""


def lay_out(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], template: str, format: Format | None = None
) -> tuple[tuple[Message, ...], tuple[Mapping[str, Any], ...]]:
    """Arrange messages and tools as the model's chat template expects them.

    Args:
        format: the format in which calls are read from responses and written as text, or None for the format that the
            template shows.
    """
    messages = _results_in_order(messages)
    if not takes_tools(template):
        return tuple(_plain_messages(messages, tools, _notation(template, format) or _INSTRUCTED)), ()
    if _shows(_SHORT_ID, template):
        messages = [_with_short_ids(message) for message in messages]
    elif _shows(_INDEXED_ID, template):
        messages = _with_indexed_ids(messages)
    elif _shows(_FIRST_CALL, template):
        messages = _split_calls(messages)
        if _shows(_SINGLE_TEXT, template):
            messages = [_with_single_text(message) for message in messages]
    elif not _shows(_CALLS, template) and (notation := _notation(template, format, find(template))) is not None:
        messages = [_with_written_calls(message, notation) for message in messages]
    if _shows(_DESCRIPTION, template):
        tools = [{**tool, "function": {"description": "", **tool["function"]}} for tool in tools]
    return tuple(messages), tuple(tools)


def _with_short_ids(message: Message) -> Message:
    if "tool_call_id" in message:
        message = {**message, "tool_call_id": _short(message["tool_call_id"])}
    if "tool_calls" in message:
        message = {
            **message,
            "tool_calls": [{**call, "id": _short(call.get("id", ""))} for call in message["tool_calls"]],
        }
    return message


def _with_indexed_ids(messages: Sequence[Message]) -> list[Message]:
    """Set the ids of tool calls and their results to Kimi K2's `functions.NAME:INDEX`, counted over all messages."""
    ids: dict[str, str] = {}
    count = 0
    result = []
    for message in messages:
        if message.get("tool_calls"):
            calls: list[Any] = []
            for call in message["tool_calls"]:
                id = f"functions.{call['function']['name']}:{count}"
                ids[call.get("id", "")] = id
                calls.append({**call, "id": id})
                count += 1
            message = {**message, "tool_calls": calls}
        if message.get("tool_call_id", "") in ids:
            message = {**message, "tool_call_id": ids[message["tool_call_id"]]}
        result.append(message)
    return result


def _split_calls(messages: Sequence[Message]) -> list[Message]:
    """Move each tool call to its own message, followed by its results. Results that belong to no call come last."""
    separated: list[Message] = []
    waiting = deque(messages)
    while waiting:
        message = waiting.popleft()
        if len(message.get("tool_calls") or ()) < 2:
            separated.append(message)
            continue
        results: dict[str, list[Message]] = {}
        while waiting and waiting[0]["role"] == "tool":
            result = waiting.popleft()
            results.setdefault(result.get("tool_call_id", ""), []).append(result)
        for number, call in enumerate(message["tool_calls"]):
            whole = {"role": message["role"], "content": ""} if number else message
            separated += [{**whole, "tool_calls": [call]}, *results.pop(call.get("id", ""), ())]
        separated += itertools.chain(*results.values())
    return separated


def _with_single_text(message: Message) -> Message:
    """Append the text of a message with tool calls to its reasoning."""
    if not (message.get("tool_calls") and message.get("content") and message.get("thinking")):
        return message
    joined = f"{message['thinking']}\n{message['content']}"
    return {**message, "content": "", **{name: joined for name in REASONING_FIELDS if name in message}}


def _with_written_calls(message: Message, notation: Notation, between: str = "") -> Message:
    """Append the tool calls of a message to its text, for templates that do not write calls."""
    if not message.get("tool_calls"):
        return message
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
    fields = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**fields, "content": between.join(filter(None, (message["content"], write_calls(notation, calls))))}


def _short(id: str) -> str:
    """Shorten an id to its last nine letters and digits, which differ in all ids that this server creates."""
    return "".join(sign for sign in id if sign.isascii() and sign.isalnum())[-9:].rjust(9, "0")


def takes_tools(template: str) -> bool:
    """Return whether a chat template shows the tools of a request."""
    return _shows(_TOOLS, template)


@functools.lru_cache
def _shows(part: re.Pattern[str], template: str) -> bool:
    return part.search(template) is not None


def _notation(template: str, *formats: Format | None) -> Notation | None:
    """Return the first notation that any of the formats has for this template, or None."""
    notations = (format.notation(template) for format in formats if format is not None)
    return next((notation for notation in notations if notation is not None), None)


def _plain_messages(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], notation: Notation
) -> list[Message]:
    """Convert tools, tool calls and results to text, for templates that do not show tools."""
    plain = [_plain(message, notation) for message in messages]
    if tools:
        instructions = _instructions(tools, notation)
        if plain[0]["role"] == "system":
            plain[0] = {"role": "system", "content": f"{plain[0]['content']}\n\n{instructions}"}
        else:
            plain.insert(0, {"role": "system", "content": instructions})
    return plain


def _plain(message: Message, notation: Notation) -> Message:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    return _with_written_calls(message, notation, "\n")


def _instructions(tools: Sequence[Mapping[str, Any]], notation: Notation) -> str:
    form = "a JSON list of the calls between these marks" if notation == _INSTRUCTED else "the calls, each in this form"
    example = write_calls(notation, [("NAME", {"ARGUMENT": "VALUE"})])
    return (
        f"These functions can be called:\n<tools>{dumps([tool['function'] for tool in tools])}</tools>\n"
        f"To call some, answer with nothing but {form}:\n{example}\n"
        "If none is of use, or an argument that is needed is missing, answer in words."
    )


def _results_in_order(messages: Sequence[Message]) -> list[Message]:
    """Sort tool results in the order of the calls in the message that they belong to.

    Agents send results as tools finish, and most templates write no ids by which a model could match results to calls.
    """
    ordered: list[Message] = []
    for are_results, run in itertools.groupby(messages, lambda message: message["role"] == "tool"):
        together = list(run)
        if are_results and ordered:
            places = {call.get("id"): index for index, call in enumerate(ordered[-1].get("tool_calls") or ())}
            together.sort(key=lambda result: places.get(result.get("tool_call_id"), len(places)))
        ordered += together
    return ordered


MAX_TOOLS = 1024  # OpenAI allows 128, but coding agents send more, and no other API has a limit

AUTO, NONE = "auto", "none"
"""Values of the parser options that are not names of parsers."""

_CHOICES = (
    "must be none, auto, required, the name of a tool, or an object with the 'type' function or allowed_tools that "
    "names tools of the request"
)
_ALLOWED = "must be an object with a 'mode' of auto or required, and with 'tools' that name tools of the request"
_REFERENCE = re.compile(r'"\$ref": "(?!#/(?:\$defs|definitions)/)([^"]{0,64})')
"""Matches a reference in the JSON of a schema that would resolve differently once it is nested in another schema."""

_NO_ARGUMENTS = {"type": "object", "properties": {}}


@accepts(type="object")
def _schema(value: Any) -> Any:
    if not isinstance(value, dict):
        raise ValueError("must be a JSON schema object")
    return value


@accepts(type="string")
def _name(value: Any) -> str:
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise ValueError(f"must be 1 to {MAX_NAME} letters, digits, '_', '-' or '.'")
    return value


TOOL_NAME = leaf(_name)
DESCRIPTION, SCHEMA, STRICT_FLAG = Optional(leaf(string)), leaf(_schema), Optional(leaf(boolean))

_FUNCTION = Obj(
    {
        "name": leaf(_name, pattern=f"^{NAME.pattern}$"),
        "description": DESCRIPTION,
        "parameters": Optional(SCHEMA),
        "strict": STRICT_FLAG,
    }
)
_TOOL: Mapping[str, Shape] = {"type": {"enum": ["function", None]}, "function": _FUNCTION.shape}
TOOL_FIELDS: Mapping[str, Shape] = {
    "tools": nullable(listing({**record(_TOOL), "required": ["function"]}, maxItems=MAX_TOOLS)),
    "tool_choice": {
        "anyOf": [TEXT, {"type": "object"}, NULL],
        "description": "none, auto, required, the name of a tool, or an object that names a tool or the allowed tools",
    },
    "parallel_tool_calls": nullable(FLAG),
}
"""The schemas of the fields that `read_tools` reads."""


class Tool(NamedTuple):
    """A tool that a request defines.

    Attributes:
        shown: the tool as chat templates expect it.
        strict: whether the arguments of calls must match the schema.
        unknown: the paths of names in the definition that have no effect.
    """

    shown: Mapping[str, Any]
    strict: bool = False
    unknown: Collection[str] = ()

    @property
    def name(self) -> str:
        return str(self.shown["function"]["name"])


def make_tool(
    name: str, description: str | None, parameters: Any, strict: bool | None, unknown: Collection[str] = ()
) -> Tool:
    about = {} if description is None else {"description": description}
    function = {"name": name, **about, "parameters": parameters or _NO_ARGUMENTS}
    return Tool({"type": "function", "function": function}, strict is True, unknown)


class Choice(NamedTuple):
    """Which tools the model must or may call.

    Attributes:
        mode: none, auto, required, named, or "" if the request does not say it.
        name: the name of the tool that must be called, or "".
        allowed: the names of the tools that may be called, or None if the request does not restrict them.
    """

    mode: str = ""
    name: str = ""
    allowed: frozenset[str] | None = None


class ChatTools(NamedTuple):
    """What a request says about tools, in the format of no API.

    Attributes:
        tools: the tools, in the client's order.
        sent: the client's `tool_choice`, for errors.
        parallel: whether several calls are allowed, or None if the request does not say it.
        unknown: the paths of unknown fields.
    """

    tools: Sequence[Tool]
    sent: NamedValue
    choice: Choice = Choice()
    parallel: bool | None = None
    unknown: Sequence[str] = ()


class Tools(NamedTuple):
    """The tools of a request.

    Attributes:
        shown: the tools in the prompt, in OpenAI's format.
        choice: auto, required, named, or "" if no tool may be called.
        name: the name of the tool that must be called, or "" if no particular tool is required.
        single: whether at most one call is allowed.
        allowed: the names of the tools that may be called, or None if the request does not restrict them.
        format: the format in which the model writes calls, or None if structured output enforces JSON instead.
        notation: the notation of calls in structured output, or None if the format or the engine does not support
            structured output.
        structured_output: the structured output that enforces calls. With the choice auto, it applies only within
            calls, unless `with_response` has set it.
        unknown: the paths of unknown fields.
        unheeded: the paths of known fields that have no effect.
    """

    shown: Sequence[Mapping[str, Any]] = ()
    choice: str = ""
    name: str = ""
    single: bool = False
    allowed: frozenset[str] | None = None
    format: Format | None = None
    notation: Notation | None = None
    structured_output: StructuredOutput | None = None
    unknown: Sequence[str] = ()
    unheeded: Sequence[str] = ()

    def parser(self) -> EventParser | None:
        """Return a new parser for one response, or None if the response contains no tool calls."""
        if self.format is not None:
            return self.format.make(self.shown)
        if self.name:
            return NamedCall(self.name)
        return None if self.structured_output is None else List(self.shown)

    def with_response(self, rule: StructuredOutput, name: str) -> Tools:
        """Return tools whose structured output requires either tool calls or a response that matches a rule.

        `tool_choice` must be `auto`. The arguments of calls must match the schemas of the tools.

        Args:
            rule: the structured output for a response without calls.
            name: the client's name for the rule.

        Raises:
            InvalidParameter: structured output cannot enforce calls in this format, or cannot distinguish calls from
                other responses.
        """
        if self.format is None:
            return self
        notation = self.notation
        if notation is None or not notation.mark:
            raise InvalidParameter(
                f"{name}: the engine cannot combine structured output with tool calls in the model's format; "
                "set tool_choice to none or required"
            )
        tag = calls_or_response(notation, self.shown, rule, single=self.single)
        ruled = _rule(f"with {name}", lambda: structural_tag(tag))
        format, begin = self.format, notation.begin
        either = format._replace(make=lambda tools: CallsOrText(begin, format.make(tools)))
        return self._replace(format=either, structured_output=ruled, unheeded=())


def read_tools(body: Mapping[str, Any], context: ServerContext) -> Tools:
    """Read the `tools`, `tool_choice` and `parallel_tool_calls` of a body in OpenAI's format.

    Raises:
        InvalidParameter: a field is invalid. The message names it.
    """
    if body.keys().isdisjoint(TOOL_FIELDS):
        return Tools()
    unknown = dict[str, None]()
    tools = _tools(check_tools(body.get("tools")), Scope(context, unknown))
    parallel = NamedValue("parallel_tool_calls", body.get("parallel_tool_calls")).optional(boolean)
    sent = NamedValue("tool_choice", body.get("tool_choice"))
    choice = _choice(sent, names_of(tools), unknown)
    return arrange(ChatTools(tools, sent, choice, parallel, [*unknown]), context)


def check_tools(value: Any) -> Sequence[Any]:
    """Check that a value is a list of tools, or null, and return the list."""
    if not isinstance(value, list | None) or len(value or ()) > MAX_TOOLS:
        raise NamedValue("tools", value).refused(f"must be a list of at most {MAX_TOOLS} tools")
    return value or ()


def names_of(tools: Sequence[Tool]) -> Sequence[str]:
    """Return the names of tools.

    Raises:
        InvalidParameter: two tools have the same name.
    """
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise InvalidParameter("tools: two tools have the same name")
    return names


def arrange(chat_tools: ChatTools, context: ServerContext, strict_path: str = STRICT) -> Tools:
    """Return the tools of a chat, with the structured output that enforces the client's choice.

    Args:
        strict_path: the path that is reported if nothing enforces the schemas of tools.

    Raises:
        InvalidParameter: the choice needs tools, or the engine cannot enforce it.
    """
    sent_choice, (mode, name, allowed) = chat_tools.sent, chat_tools.choice
    tools = [tool.shown for tool in chat_tools.tools if allowed is None or tool.name in allowed]
    if not tools:
        if mode not in ("", "auto", "none"):
            raise sent_choice.refused("requires tools")
        return Tools()
    if mode == "none":  # tools that the prompt does not show are not called
        return Tools(unknown=chat_tools.unknown)
    result = Tools(tools, mode or "auto", name, chat_tools.parallel is False, allowed, unknown=chat_tools.unknown)
    format = choose_format(context)
    notation = _notation(context.chat_template, format)
    if notation is not None and notation.style not in context.structural_tags:
        notation = None
    if result.choice == "auto":
        if format is None and context.config.tool_call_parser != NONE:
            raise InvalidParameter(
                "tools: the model's chat template shows tool calls in an unknown format; "
                "set option.tool_call_parser to the name of a format"
            )
        strict = {tool.name for tool in chat_tools.tools if tool.strict}
        return _with_strict(result._replace(format=format, notation=notation), strict, strict_path)
    called = [tool for tool in tools if name in ("", tool["function"]["name"])]
    if notation is not None:
        rule = calls(notation, called, single=result.single or bool(name))
        return result._replace(
            format=format, structured_output=_rule(f"for {sent_choice}", lambda: structural_tag(rule))
        )
    schema = called[0]["function"]["parameters"] if name else _calls(tools, sent_choice, single=result.single)
    listed = _rule(f"for {sent_choice}", lambda: json_schema(schema))
    if not name and (lost := _REFERENCE.search(listed.value)):
        raise sent_choice.refused(f"a tool's $ref {lost[1]!r} must begin with '#/$defs/' or '#/definitions/'")
    return result._replace(structured_output=listed)


def _with_strict(tools: Tools, strict: Collection[str], path: str) -> Tools:
    """Return tools with structured output for the tool calls of strict tools.

    If structured output cannot enforce the schemas, `strict` is reported as having no effect.

    Args:
        strict: the names of the strict tools.
        path: the path of `strict` in a tool.
    """
    if not strict:
        return tools
    notation = tools.notation
    if notation is None or not notation.mark:
        return tools._replace(unheeded=[path])
    rule = calls_in_text(notation, tools.shown, strict, single=tools.single)
    return tools._replace(structured_output=_rule("with strict", lambda: structural_tag(rule, allows_text=True)))


def choose_format(context: ServerContext) -> Format | None:
    """Return the format of tool calls in responses.

    A plugin takes precedence over `option.tool_call_parser`, which takes precedence over the templates of the model.
    The result is None if the templates show no known format, or if the option leaves calls in the text.
    """
    plugin: Format | None = context.tool_format
    if plugin is not None:
        return plugin
    name = context.config.tool_call_parser
    if name == NONE:
        return None
    if name == AUTO and not takes_tools(context.chat_template):
        return SMOLLM2  # the format that our instructions in the prompt ask for
    if context.response_template is not None and context.response_template.calls is not None:
        return HF
    return find(context.chat_template) if name == AUTO else get_format(name)


def _function(value: Any) -> Any:
    """Return `function` of an object in OpenAI's format. Its type may be missing, as in vLLM and in TGI's client."""
    return value.get("function") if isinstance(value, dict) and value.get("type") in (None, "function") else None


def _function_name(value: Any, at: str, unknown: dict[str, None]) -> str | None:
    """Return the function name in an object in OpenAI's format, or None if there is none."""
    function = _function(value)
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        return None
    unknown |= unread(value, at, ("type", "function")) | unread(function, f"{at}.function", ("name",))
    return name


def _choice(sent: NamedValue, names: Sequence[str], unknown: dict[str, None]) -> Choice:
    """Read a choice in OpenAI's format."""
    value = sent.value
    if not isinstance(value, dict):
        return read_choice(sent, names)
    if value.get("type") != "allowed_tools":
        return read_choice(sent._replace(value=_function_name(value, sent.name, unknown)), names, sent)
    allowed, at = value.get("allowed_tools"), "tool_choice.allowed_tools"
    fields = allowed if isinstance(allowed, dict) else {}
    listed = fields.get("tools")
    chosen = [_function_name(tool, f"{at}.tools[]", unknown) for tool in listed] if isinstance(listed, list) else []
    unknown |= unread(value, "tool_choice", ("type", "allowed_tools")) | unread(allowed, at, ("mode", "tools"))
    return allowing(fields.get("mode"), chosen, names, NamedValue(at, allowed))


def read_choice(choice: NamedValue, names: Sequence[str], sent: NamedValue | None = None) -> Choice:
    """Read a choice that is none, auto, required, or the name of a tool, as in TGI.

    Args:
        names: the names of the tools.
        sent: the client's choice, for errors, if `choice` is only the name in it.
    """
    value = choice.value
    if sent is None and value in (None, "none", "auto", "required"):
        return Choice(value or "")
    if not isinstance(value, str) or value not in names:
        raise (sent or choice).refused(_CHOICES)
    return Choice("named", value)


def allowing(mode: Any, chosen: Sequence[str | None], names: Sequence[str], sent: NamedValue) -> Choice:
    """Return the choice that restricts which tools may be called. The model may know other tools from the messages.

    Args:
        chosen: the names of these tools, or None for what names no tool.
        names: the names of all tools.
        sent: the client's value, for errors.
    """
    if mode not in ("auto", "required") or not chosen or not set(names).issuperset(chosen):
        raise sent.refused(_ALLOWED)
    return Choice(mode, "", frozenset(filter(None, chosen)))


def _tools(values: Sequence[Any], scope: Scope) -> list[Tool]:
    return [_tool(tool, ParameterPath(("tools", index)), scope) for index, tool in enumerate(values)]


def _tool(tool: Any, at: Path, scope: Scope) -> Tool:
    """Read a tool in OpenAI's format."""
    function = _function(tool)
    if not isinstance(function, dict):
        raise at.refused("must be an object with 'type': 'function' and 'function'")
    scope.unknown.update(unread(tool, "tools[]", _TOOL))
    return make_tool(**_FUNCTION.read(function, at.at("function"), scope))


def _calls(tools: Sequence[Mapping[str, Any]], choice: NamedValue, *, single: bool) -> dict[str, Any]:
    """Return the schema of a list of tool calls. Definitions are moved to its root, where references are resolved."""
    definitions: dict[str, dict[str, Any]] = {}
    items = []
    for tool in tools:
        parameters = dict(tool["function"]["parameters"])
        _move_definitions(parameters, definitions, choice)
        properties = {"name": {"const": tool["function"]["name"]}, "arguments": parameters}
        items.append(
            {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
        )
    calls = items[0] if len(items) == 1 else {"anyOf": items}
    return {**definitions, "type": "array", "minItems": 1, **({"maxItems": 1} if single else {}), "items": calls}


def _move_definitions(parameters: dict[str, Any], definitions: dict[str, dict[str, Any]], choice: NamedValue) -> None:
    for keyword in ("$defs", "definitions"):
        schemas = parameters.pop(keyword, {})
        if not isinstance(schemas, dict):
            raise choice.refused(f"a tool's {keyword} must be an object")
        for name, schema in schemas.items():
            if definitions.setdefault(keyword, {}).setdefault(name, schema) != schema:
                raise choice.refused(f"two tools define {name[:64]!r} differently")


def _rule(purpose: str, make: Callable[[], StructuredOutput]) -> StructuredOutput:
    try:
        return make()
    except ValueError as error:
        raise InvalidParameter(f"tools: {purpose}, their schemas {error}") from None
