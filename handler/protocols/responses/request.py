"""OpenAI's responses at /v1/responses, and their count at /v1/responses/input_tokens.

A body is translated to that of a chat, which the chat's own readers read. A response is stored if the server stores
any and the body does not decline: `request.py`. Source: OpenAI's API reference, "Responses", and the types of its
Python package.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from handler.core.errors import InvalidParameter, InvalidPayload, NotKept
from handler.core.framing import JSON, SSE
from handler.core.media import MediaSource
from handler.core.values import Request, StructuredOutput
from handler.protocols.assistant.template import EFFORTS
from handler.protocols.assistant.tools.request import TOOL_FIELDS
from handler.protocols.kernel.dialect import (
    Description,
    Keeper,
    Keeping,
    ParsedRequest,
    ServerContext,
    Wanted,
    kept_items,
    too_long,
)
from handler.protocols.kernel.messages import (
    MAX_ARGUMENTS,
    PartReader,
    TurnsReader,
    add_to_turn,
    join_turns,
    read_arguments,
    string_at,
)
from handler.protocols.kernel.parameters import Parameter, Table, named, request_shape, unsupported
from handler.protocols.kernel.readers import (
    Named,
    integer,
    metadata,
    response_format,
    show,
    string,
)
from handler.protocols.kernel.schema import FLAG, TEXT, Shape, accepts, listing, nullable, record
from handler.protocols.openai.api import OpenAiError
from handler.protocols.openai.chat import OpenAiChat, ParsedChat, counted
from handler.protocols.openai.request import CHAT, OpenAiDialect, streaming
from handler.protocols.responses.api import (
    OpenAiResponse,
    OpenAiResponseEvent,
    ResponseHead,
    ResponseStart,
    ResponseTokens,
)
from handler.protocols.responses.response import (
    CUSTOM,
    NUM_STATES,
    SKIPPED,
    Origin,
    ResponseDocument,
    ResponseStream,
    Settings,
    encode_head,
    new_id,
    read_head,
    secret_id,
    skipped,
    without_skipped,
    without_strict,
)

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
"""Values that `include` may name; they are included anyway if they exist: nothing is encrypted or left out here."""


@accepts(type="array", items={"enum": [*_INCLUDED]})
def _include(value: Any) -> None:
    if not isinstance(value, list) or any(name not in _INCLUDED for name in value if name != _LOGPROBS):
        raise ValueError(f"must be a list of {', '.join(_INCLUDED)}")
    if _LOGPROBS in value:
        raise ValueError(f"{_LOGPROBS!r} is not supported: ask for logprobs on /v1/chat/completions")


_ID = 64  # characters


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
        "metadata": Parameter("", metadata),
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


# -- a response's `instructions` and `input` as the messages of a chat -------------------------------------------------


_ROLES = ("user", "assistant", "system", "developer")
_ITEMS = {
    "message": {"type", "role", "content", "id", "status", "phase"},
    "function_call": {"type", "id", "call_id", "name", "namespace", "arguments", "status", "caller"},
    "function_call_output": {"type", "id", "call_id", "output", "status", "name", "namespace", "caller"},
    "custom_tool_call": {"type", "id", "call_id", "name", "namespace", "input", "status", "caller"},
    "custom_tool_call_output": {"type", "id", "call_id", "output", "status", "name", "namespace", "caller"},
    "reasoning": {"type", "id", "summary", "content", "status", "encrypted_content"},
}
"""Type of an item -> its names that are read, or have no effect by what they mean."""

_PREFIXES = {
    "message": "msg", "function_call": "fc", "function_call_output": "fco", "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco", "reasoning": "rs",
}  # fmt: skip
"""Type of an item -> how its id begins."""

INPUT: Mapping[str, Shape] = {
    "input": {
        "anyOf": [
            {**TEXT, "minLength": 1},
            listing(record({}, {"type": {"enum": [*_ITEMS, None]}}), minItems=1),
        ]
    },
    "instructions": nullable(TEXT),
}
"""What `InputReader` reads."""


def full_name(namespace: Any, name: str) -> str:
    """Return the name under which the prompt shows a tool."""
    return f"{namespace}.{name}" if isinstance(namespace, str) and namespace else name


class InputReader(TurnsReader):
    """Reads one request's input.

    Attributes:
        items: those of `input`, with references resolved.
    """

    def __init__(self, context: ServerContext) -> None:
        super().__init__(context)
        self._parts = PartReader(context, "input[].content[]", self.unknown)
        self.items: list[Any] = []
        self._calls: set[str] = set()

    def read(self, body: Mapping[str, Any]) -> None:
        """Read `instructions`, the items of the responses before, and `input`.

        Raises:
            InvalidPayload: naming the wrong item and what would be right; it quotes no content.
        """
        instructions, given = body.get("instructions"), body.get("input")
        if instructions is not None:
            if not isinstance(instructions, str):
                raise InvalidPayload("'instructions' must be a string")
            add_to_turn(self.chat, "system", content=instructions)
        if isinstance(given, str) and given:
            given = [{"type": "message", "role": "user", "content": given}]
        if not isinstance(given, list) or not given:
            raise InvalidPayload("'input' must be a non-empty string or list of items")
        for index, item in enumerate(self._context.recalled.history):
            if not _is_half_a_call(item):
                self._item(item, f"previous_response_id: item {index}")
        for index, item in enumerate(given):
            self._item(self._resolved(item, f"input[{index}]"), f"input[{index}]")
        self._add_shown()
        if not self.chat:
            raise InvalidPayload("'input' has nothing that the model reads")
        join_turns(self.chat)

    def _resolved(self, item: Any, at: str) -> Any:
        """Return the item that a reference names; any other as it is.

        Raises:
            NotKept: there is none.
        """
        if self._context.keeper is not None and (id := referenced(item)) is not None:
            item = self._context.recalled.items.get(id)
            if item is None:
                why = (
                    "no item of this id is stored: it has expired, was deleted, or came with store=false; send the item"
                )
                raise NotKept(f"{at}.id={show(id)}: {why}", "input")
        self.items.append(item)
        return item

    def _item(self, item: Any, at: str) -> None:
        kind = (item.get("type") or _implied_type(item)) if isinstance(item, dict) else None
        if not isinstance(kind, str):
            raise InvalidPayload(f"{at} must be an object with 'type', or with 'role' and 'content'")
        if kind == "item_reference":
            raise InvalidPayload(
                f"{at}: 'item_reference' is not supported: nothing is kept (option.responses_store); send the item, as "
                "with store=false"
            )
        if kind not in _ITEMS:
            raise InvalidPayload(f"{at}: {kind[:64]!r} is not supported: it must be {' or '.join(_ITEMS)}")
        self.unknown |= {f"input[].{name}": None for name in item.keys() - _ITEMS[kind] if item[name] is not None}
        if kind.endswith("_output"):
            return self._output(item, at)
        self._add_shown()
        if kind == "message":
            self._message(item, at)
        elif kind == "reasoning":
            self._reasoning(item, at)
        else:
            add_to_turn(self.chat, "assistant", tool_calls=self._call(item, at))

    def _message(self, item: Mapping[str, Any], at: str) -> None:
        if (role := item.get("role")) not in _ROLES:
            raise InvalidPayload(f"{at}.role must be one of {', '.join(_ROLES)}")
        content, place = item.get("content"), f"{at}.content"
        for part in self._parts.read(content, place, media=True) if role == "user" else [self._text(content, place)]:
            add_to_turn(self.chat, "system" if role == "developer" else role, content=part)

    def _reasoning(self, item: Mapping[str, Any], at: str) -> None:
        parts = item.get("content") or item.get("summary") or []
        if not parts and item.get("encrypted_content"):  # only OpenAI can read it
            self.unknown["input[].encrypted_content"] = None
        if parts:
            add_to_turn(self.chat, "assistant", reasoning_content=self._text(parts, f"{at}.content"))

    def _output(self, item: Mapping[str, Any], at: str) -> None:
        """Read the output of a call. Its images follow the adjacent outputs."""
        id = string_at(item.get("call_id"), f"{at}.call_id")
        if id not in self._calls:
            call = item["type"].removesuffix("_output")
            raise InvalidPayload(f"{at}.call_id={show(id)}: no {call} before it has this id")
        parts = self._parts.read(item.get("output"), f"{at}.output", media=True)
        output = "\n".join([part for part in parts if isinstance(part, str)])
        self._shown += [part for part in parts if isinstance(part, MediaSource)]
        self.chat.append({"role": "tool", "tool_call_id": id, "content": output})

    def _text(self, content: Any, at: str) -> str:
        """Read a string, or parts of text, joined with newlines."""
        return "\n".join([part for part in self._parts.read(content, at, media=False) if isinstance(part, str)])

    def _call(self, item: Mapping[str, Any], at: str) -> dict[str, Any]:
        field = "input" if item["type"] == "custom_tool_call" else "arguments"
        id, text = string_at(item.get("call_id"), f"{at}.call_id"), string_at(item.get(field), f"{at}.{field}")
        name = full_name(item.get("namespace"), string_at(item.get("name"), f"{at}.name"))
        if len(text) > MAX_ARGUMENTS:
            raise InvalidPayload(f"{at}.{field} has {len(text)} characters; at most {MAX_ARGUMENTS}")
        value = {field: text} if field == "input" else read_arguments(text, "input[].arguments", self.unknown)
        self._calls.add(id)
        return {"id": id, "type": "function", "function": {"name": name, "arguments": value}}


def referenced(item: Any) -> str | None:
    """Return the id of the item that a reference names; None if it is not a reference."""
    if not isinstance(item, dict) or (item.get("type") or _implied_type(item)) != "item_reference":
        return None
    return item["id"] if isinstance(item.get("id"), str) else None


def with_ids(items: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return items in their stored form: each with an id, a message's text as a part."""
    return [_with_id(item) for item in items]


def _with_id(item: Mapping[str, Any]) -> dict[str, Any]:
    kind = item.get("type") or "message"
    id = item.get("id")
    found = {**item, "type": kind, "id": id if isinstance(id, str) and id else secret_id(_PREFIXES[kind])}
    if kind == "message" and isinstance(item["content"], str):
        part = {"type": "output_text", "annotations": []} if item["role"] == "assistant" else {"type": "input_text"}
        found["content"] = [{**part, "text": item["content"]}]
    return found if item.get("status") else {**found, "status": "completed"}


def _is_half_a_call(item: Any) -> bool:
    """Return whether an item is an incomplete call, at which its response was cut off."""
    return item["type"] in ("function_call", "custom_tool_call") and item.get("status") == "incomplete"


def _implied_type(item: Mapping[str, Any]) -> str:
    """Return the type of an item that names none: a reference has nothing but an id."""
    return "item_reference" if "id" in item and item.keys() <= {"id", "type"} else "message"


# -- a response's `tools` and `tool_choice` as those of a chat ---------------------------------------------------------


_HOSTED = ("web_search", "file_search", "code_interpreter", "image_generation", "mcp", "computer", "tool_search")
"""How the types of tools begin that run at OpenAI."""

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
"""What `ToolsReader` and `read_choice` read."""


class ToolsReader:
    """Reads one request's tools.

    Attributes:
        tools: in the chat's form, whose reader checks names and schemas; as given where it is no list.
        origins: of those that have a namespace or are custom, by their names in the prompt.
        ignored: why tools are left out, as the header `x-lmi-ignored-parameters` says it.
        left_out: those reasons, by the names that custom tools would have in the prompt.
        formats: names of custom tools whose text has to follow an expression.
    """

    def __init__(self) -> None:
        self.tools: Any = None
        self.ignored: dict[str, None] = {}
        self.left_out: dict[str, str] = {}
        self.origins: dict[str, Origin] = {}
        self.formats: list[str] = []

    def read(self, value: Any) -> None:
        """Read the tools; a namespace's get its name as a prefix.

        Raises:
            InvalidParameter: a tool is not a function.
        """
        self.tools = value if not isinstance(value, list) else []
        if isinstance(value, list):
            for index, tool in enumerate(value):
                self._tool(tool, f"tools[{index}]", "")

    def _tool(self, tool: Any, at: str, namespace: str) -> None:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(tool, dict) and (why := skipped(tool)):
            self.ignored[why] = None
            if kind == CUSTOM:
                self.left_out[full_name(namespace, str(tool.get("name")))] = why
            return
        if kind == "namespace" and not namespace and isinstance(tool.get("tools"), list):
            if not isinstance(tool.get("name"), str) or not tool["name"]:
                raise InvalidParameter(f"{at}.name: must be a string")
            for index, own in enumerate(tool["tools"]):
                self._tool(own, f"{at}.tools[{index}]", tool["name"])
            return
        if kind not in ("function", CUSTOM):
            hosted = isinstance(kind, str) and kind.startswith(_HOSTED)
            why = "hosted tools run at OpenAI" if hosted else "it must be a function"
            raise InvalidParameter(f"{at}.type={show(kind)}: is not supported: {why}")
        name = tool.get("name")
        if (namespace or kind == CUSTOM) and isinstance(name, str):
            self.origins[full_name(namespace, name)] = Origin(namespace, name, kind == CUSTOM)
            name = full_name(namespace, name)
        known = _TOOL_FIELDS.keys() - ({"format"} if kind == "function" else {"parameters", "strict"})
        others = {key: item for key, item in tool.items() if key not in known and item not in (None, False)}
        own = _of_custom(tool.get("format"), f"{at}.format") if kind == CUSTOM else tool
        function = {"name": name, "description": tool.get("description"), "parameters": own.get("parameters")}
        function |= {"strict": own["strict"]} if "strict" in own else {}
        if kind == CUSTOM and function["strict"]:
            self.formats.append(function["name"])
        self.tools.append({"type": "function", "function": {**others, **function}})

    def named(self, request: Request, choice: Any) -> Request:
        """Name the custom tools in the engine's refusal, if only their formats can cause it.

        Args:
            choice: `tool_choice` in the form of a chat.
        """
        if request.names.structured_output != "tools":
            return request
        chosen, called = [tool["function"] for tool in self.tools], choice not in (None, "auto")
        if isinstance(choice, dict):
            allowed = choice.get("allowed_tools", {"mode": "required", "tools": [choice]})
            listed = [tool["function"]["name"] for tool in allowed["tools"]]
            chosen = [function for function in chosen if function["name"] in listed]
            called = allowed["mode"] == "required"
        compiled = [function["name"] for function in chosen if called or function.get("strict")]
        if not compiled or not set(compiled) <= set(self.formats):
            return request
        names = request.names._replace(structured_output=f"tools: the format of {' or '.join(compiled)}")
        return request._replace(names=names)


def _of_custom(format: Any, at: str) -> dict[str, Any]:
    """Return the parameters of the function that replaces a custom tool, with its text as `input`.

    Raises:
        InvalidParameter: the format is neither text nor a regex grammar.
    """
    text: dict[str, Any] = {"type": "string"}
    match format:
        case None | {"type": "text"}:
            pass
        case {"type": "grammar", "syntax": "regex", "definition": str(expression)}:
            text["pattern"] = f"^(?:{expression})$"
        case _:
            raise InvalidParameter(
                f"{at}: must be 'type': 'text', or 'grammar' with 'syntax': 'regex' and 'definition'"
            )
    schema = {"type": "object", "properties": {"input": text}, "required": ["input"], "additionalProperties": False}
    return {"parameters": schema, "strict": "pattern" in text}


def read_choice(value: Any, reader: ToolsReader) -> Any:
    """Return `tool_choice` of a chat.

    Raises:
        InvalidParameter: it names no tool, one that is left out, or is of another kind.
    """
    if not isinstance(value, dict):
        return value
    known = [tool["function"]["name"] for tool in reader.tools] if isinstance(reader.tools, list) else []
    if value.get("type") == "allowed_tools":
        return _allowed(value, known)
    name = _name(value)
    if name not in known and (why := reader.left_out.get(name)):
        raise Named("tool_choice", value).refused(f"{name} is left out, as {why} is not supported")
    if value.get("type") not in ("function", CUSTOM) or name not in known:
        raise Named("tool_choice", value).refused(
            "must be none, auto, required, a 'function' or 'custom' with a 'name' in tools, or 'allowed_tools'"
        )
    return {"type": "function", "function": {"name": name}}


def _allowed(value: Mapping[str, Any], known: Sequence[str]) -> Any:
    """Return the allowed tools in the form of a chat, whose reader checks them; skipped custom tools are not known."""
    tools = value.get("tools")
    if isinstance(tools, list):
        kept = [tool for tool in without_skipped(tools) if not _is_custom(tool) or _name(tool) in known]
        tools = [_function(tool) if isinstance(tool, dict) else tool for tool in kept]
    return {"type": "allowed_tools", "allowed_tools": {"mode": value.get("mode"), "tools": tools}}


def _is_custom(tool: Any) -> bool:
    return isinstance(tool, dict) and tool.get("type") == CUSTOM


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    kind = "function" if _is_custom(tool) else tool.get("type")
    return {"type": kind, "function": {"name": _name(tool)}}


def _name(tool: Mapping[str, Any]) -> str:
    return full_name(tool.get("namespace"), str(tool.get("name")))


# -- responses that are kept: `store`, `previous_response_id` and references to items ----------------------------------


KEPT = ("store", "previous_response_id")
"""A body's names that are refused where nothing is kept."""

MAX_REFERENCES = 1000
"""References to items in a request."""


def read_wanted(body: Any, *, keeps: bool) -> Wanted | None:
    """Return the stored responses that a body refers to; `parse` reports its errors.

    Args:
        keeps: its own answer is stored, unless it says otherwise.

    Raises:
        InvalidPayload: it has too many references.
    """
    if not isinstance(body, dict):
        return None
    previous, given = body.get("previous_response_id"), body.get("input")
    items = dict.fromkeys(filter(None, map(referenced, given))) if isinstance(given, list) else {}
    if len(items) > MAX_REFERENCES:
        raise InvalidPayload(f"'input' refers to {len(items)} stored items; at most {MAX_REFERENCES}")
    return Wanted(
        "response", keeps and body.get("store") is not False, previous if isinstance(previous, str) else "", [*items]
    )


def read_kept(body: Mapping[str, Any], context: ServerContext) -> bool:
    """Read `store` and `previous_response_id`; return whether the response is to be kept.

    Raises:
        ServingError: the response before cannot be gone on from.
    """
    if context.keeper is None:
        return False
    store = Named("store", body.get("store"))
    if store.value is not None and not isinstance(store.value, bool):
        raise store.refused("must be true or false")
    previous = Named("previous_response_id", body.get("previous_response_id"))
    if previous.value is not None and (not isinstance(previous.value, str) or not previous.value):
        raise previous.refused("must be the id of a response")
    state = context.recalled.state
    if state == "missing":
        raise NotKept(f"{previous}: no such response is stored: it has expired, or was deleted or not stored", KEPT[1])
    if state == "broken":
        raise NotKept(f"{previous}: a response before it is not stored any more; send all items as input", KEPT[1])
    if state == "in_progress":
        raise previous.refused("this response is still in progress; continue after it has ended")
    if state == "failed":
        raise previous.refused("this response failed; continue from the one before it")
    if state == "too_long":
        field = previous if previous.value else "input"
        raise too_long(field, "the stored items that it names", context.config.max_request_size)
    return store.value is not False


def make_keeping(keeper: Keeper, head: ResponseHead, items: Sequence[Any]) -> Keeping:
    """Return the object that stores a response.

    Args:
        items: those of its request, which were read.
    """
    return Keeping(keeper, "response", head["previous_response_id"] or "", kept_items(with_ids(items)))


# -- the dialect -------------------------------------------------------------------------------------------------------


_OWN = {"messages": "input", "reasoning_effort": "reasoning.effort"}
"""The chat's names of parameters that have another name here."""

_OF_CHAT = {name: OpenAiChat.fields[name] for name in ("model", "stream", "parallel_tool_calls")}
_SAME = (TABLE.parameters.keys() - _OWN.keys()) | _OF_CHAT.keys()
"""Names that the chat reads as they are."""

_WORDS = {"].function.": "].", "reasoning_effort": "reasoning.effort", "messages[].reasoning": "input[].reasoning"}
_REASONING: Mapping[str, Shape] = {"effort": {"enum": [*EFFORTS, None]}, "summary": {}, "generate_summary": {}}

FIELDS: Mapping[str, Shape] = {
    **INPUT,
    **_OF_CHAT,
    **TOOLS,
    "reasoning": nullable(record({}, _REASONING, additionalProperties=False)),
}
_UNHEEDED = "tools[].function.strict"
"""How the chat's reader says that nothing enforces the tools' schemas."""

_WITHOUT_STORE = request_shape(FIELDS, TABLE, "input")


def _body(context: ServerContext) -> Shape:
    """Return the schema of a body, with the fields that are only read if responses are stored."""
    shape = _WITHOUT_STORE(context)
    if not context.config.stores_responses:
        return shape
    stored = {"store": nullable(FLAG), "previous_response_id": nullable(TEXT)}
    reference = {"anyOf": [record({"id": TEXT}), *shape["properties"]["input"]["anyOf"]]}
    return {**shape, "properties": {**shape["properties"], **stored, "input": reference}}


class OpenAiResponses(OpenAiDialect):
    """It samples unless `temperature` is 0. An answer without a limit fills the model's context."""

    name = "openai_responses"
    needed = "a JSON object with 'input'"
    table, fields, harmless = TABLE, FIELDS, NO_EFFECT
    description = Description(
        title="OpenAI responses",
        request="OpenAiResponsesRequest",
        request_shape=_body,
        error=OpenAiError,
        example={"model": "", "input": "Name the capital of France.", "max_output_tokens": 16},
        answer=OpenAiResponse,
        chunk=OpenAiResponseEvent,
        streams=(SSE.content_type,),
    )

    def wanted(self, body: Any) -> Wanted | None:
        return read_wanted(self._relax()(body), keeps=True)

    def read(self, body: Mapping[str, Any], context: ServerContext) -> ParsedRequest:
        return self._translate(body, context, _Chat)

    def _translate(self, body: Mapping[str, Any], context: ServerContext, chat: type[_Chat]) -> ParsedRequest:
        for name, own in _OWN.items():
            if body.get(name) is not None:
                raise InvalidParameter(f"{name}: is not supported: write {own}")
        keeps = read_kept(body, context) and chat is _Chat
        reader, tools, effort = InputReader(context), ToolsReader(), _effort(body)
        reader.read(body)
        tools.read(body.get("tools"))
        translated = {
            **{name: body[name] for name in _SAME if name in body and not (context.keeper and name in KEPT)},
            "messages": reader.chat,
            "tools": (tools.tools or None) if tools.ignored else tools.tools,  # none but skipped ones: no tools
            "tool_choice": (choice := read_choice(body.get("tool_choice"), tools)),
            "reasoning_effort": effort,
        }
        ignored = self.unknown(body, context, *reader.unknown, *tools.ignored)
        try:
            head = read_head(body, context.generation, store=keeps)
            keeping = make_keeping(context.keeper, head, reader.items) if context.keeper and keeps else None
            parsed = chat(head, tools.origins, keeping).parse(translated, context)
        except (InvalidParameter, InvalidPayload) as error:
            raise type(error)(_in_own_words(error.message)) from None
        if tools.formats:
            parsed = parsed._replace(requests=[tools.named(request, choice) for request in parsed.requests])
            ignored = [*ignored, "tools[].format"] if _UNHEEDED in parsed.ignored else ignored
        return parsed._replace(ignored=[*ignored, *map(_in_own_words, parsed.ignored), *self.no_effect(body)])


class ResponsesCount(OpenAiResponses):
    """The tokens of the same prompt; what shapes an answer is checked and has no effect."""

    name = "openai_responses_count"
    description = Description(
        title="OpenAI response's token count",
        request="OpenAiResponsesCountRequest",
        request_shape=_body,
        error=OpenAiError,
        example={"model": "", "input": "Name the capital of France."},
        answer=ResponseTokens,
    )

    def wanted(self, body: Any) -> Wanted | None:
        return read_wanted(body, keeps=False)

    def read(self, body: Mapping[str, Any], context: ServerContext) -> ParsedRequest:
        return self._translate(body, context, _CountedChat)


class _Chat(OpenAiChat):
    """One translated body.

    Args:
        head: the request's fields that a response repeats.
        origins: of tools, by their names in the prompt.
        keeping: stores the response; None if it is not stored.
    """

    table = Table(
        {name: parameter for name, parameter in TABLE.parameters.items() if name not in _OWN}
        | {"reasoning_effort": CHAT.parameters["reasoning_effort"]}
    )
    fields: Mapping[str, Shape] = {name: shape for name, shape in OpenAiChat.fields.items() if name != "stream_options"}

    def __init__(self, head: ResponseHead, origins: Mapping[str, Origin], keeping: Keeping | None = None) -> None:
        self._head = head
        self._origins = origins
        self._keeping = keeping

    def answer(self, chat: ParsedChat) -> ParsedRequest:
        repeated = self._head
        if _UNHEEDED in chat.ignored:
            repeated["tools"] = without_strict(repeated["tools"])
        head: ResponseStart = {
            "id": new_id("resp") if self._keeping is None else secret_id("resp"),
            "object": "response",
            "created_at": chat.head.created,
            "model": chat.head.model,
            **encode_head(repeated),
        }
        settings, requests = Settings(head, chat.format.form, self._origins, self._keeping), (chat.request,)
        if chat.framing is JSON:
            parsed, times = ParsedRequest(requests, ResponseDocument(settings), self.errors, chat.ignored), 1
        else:
            parsed, times = streaming(requests, ResponseStream(settings), self.errors, chat.ignored), NUM_STATES
        repeated_size = (1 + times) * len(JSON.encode(head))  # and once until then
        return parsed._replace(keeps=self._keeping is not None, num_repeated=repeated_size)


class _CountedChat(_Chat):
    def answer(self, chat: ParsedChat) -> ParsedRequest:
        return counted(
            chat, self.errors, lambda number: ResponseTokens(object="response.input_tokens", input_tokens=number)
        )


def _effort(body: Mapping[str, Any]) -> Any:
    """Read `reasoning`; return its effort, which the chat's table checks."""
    reasoning = body.get("reasoning")
    if reasoning is None:
        return None
    if not isinstance(reasoning, dict) or reasoning.keys() - _REASONING.keys():
        raise Named("reasoning", reasoning).refused("must be an object with 'effort', 'summary' or both")
    if (effort := reasoning.get("effort")) is not None and effort not in EFFORTS:
        raise Named("reasoning", reasoning).refused(f"'effort' must be one of {', '.join(EFFORTS)}")
    return effort


def _in_own_words(text: str) -> str:
    """Name the fields of a chat in a message, or in a list of names, as the Responses API does."""
    for name, own in _WORDS.items():
        text = text.replace(name, own)
    return text
