"""Renders tokens in the format of OpenAI's Responses API: documents, or streams of numbered events."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from handler.core.errors import InvalidPayload, ServingError
from handler.core.framing import JSON_TEXTS, NUMBER, SLOT, encoded, loads, template, typed_event
from handler.core.values import Finish, Token, new_digits, new_secret
from handler.protocols.assistant.answer import BlockStream, ResponseForm, read_whole
from handler.protocols.assistant.events import Arguments, CallStart, Event, Reasoning
from handler.protocols.kernel.context import GenerationDefaults
from handler.protocols.kernel.reply import TokenEncoder, WholeReply
from handler.protocols.kernel.stored import Keeping
from handler.protocols.openai.api import ERRORS
from handler.protocols.responses.api import (
    CompactingEvent,
    CompactionItem,
    Delta,
    Done,
    ItemEvent,
    ItemState,
    OpenAiResponse,
    OpenAiResponseEvent,
    OutputItem,
    PartEvent,
    ResponseEvent,
    ResponseFailure,
    ResponseHead,
    ResponseStart,
    ResponseState,
    ResponseStatus,
    ResponseUsage,
    Status,
)
from handler.protocols.responses.types import CUSTOM, ITEMS, Written, without_skipped


def new_id(prefix: str) -> str:
    return f"{prefix}_{new_digits()}"


def secret_id(prefix: str) -> str:
    """Return an id for a stored object. It cannot be guessed, because anyone who knows it can read the object."""
    return f"{prefix}_{new_secret()}"


class Origin(NamedTuple):
    """The namespace and name under which the client declared a tool. A custom tool accepts text instead of JSON."""

    namespace: str
    name: str
    is_custom: bool = False


class Items:
    """The output items of one response, which are built from parsed events in order.

    Text that is only whitespace is emitted as a message only if there are no other items.

    Args:
        origins: maps a tool's name in the prompt to its declaration. Tools with other names are functions.
        most_calls: the maximum number of tool calls, after which calls are dropped, or None for no maximum.
        secret: whether item ids must be impossible to guess, because the items are stored.
        first: the sequence number of the first event that the reply writes.

    Attributes:
        number: a function that returns the sequence number of the next event.
        output: the items so far. The last item may be open.
        open: the last item while it is open, or None.
        parts: the pieces of text of the open item so far.
        broken: whether a tool call is incomplete.
    """

    def __init__(
        self, origins: Mapping[str, Origin], most_calls: int | None = None, *, secret: bool = False, first: int = 0
    ) -> None:
        self._origins = origins
        self._most_calls = most_calls
        self._new_id = secret_id if secret else new_id
        self._space = ""
        self.number = itertools.count(first).__next__
        self.output: list[Any] = []
        self.open: dict[str, Any] | None = None
        self._delta: Mapping[str, object] = {}  # the delta event of the open item, without text
        self.parts: list[str] = []
        self.broken = False

    def feed(self, events: Iterable[Event]) -> list[OpenAiResponseEvent]:
        response_events: list[OpenAiResponseEvent] = []
        for event in events:
            if isinstance(event, str):
                self._text(event, response_events)
            elif isinstance(event, Reasoning):
                if self.open is None or self.open["type"] != "reasoning":
                    self._begin(self._new("reasoning", summary=[], content=[]), response_events)
                self._add(event.text, response_events)
            elif self._most_calls is not None and event.number >= self._most_calls:
                continue
            elif isinstance(event, CallStart):
                self._begin(self._call(self._origins.get(event.name, Origin("", event.name))), response_events)
            elif isinstance(event, Arguments):
                if self.open is not None and self.open["type"] == "custom_tool_call":
                    self.parts.append(event.text)  # JSON around the text, which is sent at the end
                else:
                    self._add(event.text, response_events)
            else:
                self.broken |= not event.whole
                self._close(response_events, status="completed" if event.whole else "incomplete")
        return response_events

    def end(self, *, complete: bool) -> list[OpenAiResponseEvent]:
        """Return the events that end the last item."""
        events: list[OpenAiResponseEvent] = []
        if self._space and not self.output:
            space = self._space
            self._begin(self._message(), events)
            self._add(space, events)
        self._close(events, status="completed" if complete else "incomplete")
        return events

    def summarizing(self, id: str) -> list[OpenAiResponseEvent]:
        """Return the events for the beginning of a summary, which is the first item and has no parts."""
        empty: CompactionItem = {"id": id, "type": "compaction", "encrypted_content": ""}
        added = self._item_event("response.output_item.added", empty)
        compacting: CompactingEvent = {
            "type": "response.compaction.compacting",
            "sequence_number": self.number(),
            "item_id": id,
            "output_index": 0,
        }
        return [added, compacting]

    def summarized(self, item: CompactionItem) -> ItemEvent:
        """Return the event for a complete summary."""
        return self._item_event("response.output_item.done", item)

    def delta(self, text: str, number: int) -> Delta:
        """Return an event with the next piece of text of the open item."""
        return cast(Delta, {**self._delta, "sequence_number": number, "delta": text})

    def _indices(self, written: Written, number: int) -> dict[str, Any]:
        """Return the fields by which clients find the text of the open item."""
        item = self.output[-1]
        indices = {"sequence_number": number, "item_id": item["id"], "output_index": len(self.output) - 1}
        return {**indices, "content_index": 0} if written.part else indices

    def _item_event(self, type: ItemState, item: Mapping[str, Any]) -> ItemEvent:
        event = {"type": type, "sequence_number": self.number(), "output_index": max(len(self.output) - 1, 0)}
        return cast(ItemEvent, {**event, "item": {**item}})

    def _part_event(self, state: str, written: Written, part: Mapping[str, Any]) -> PartEvent:
        indices = self._indices(written, self.number())
        return cast(PartEvent, {"type": f"response.content_part.{state}", **indices, "part": part})

    def _text(self, text: str, events: list[OpenAiResponseEvent]) -> None:
        if self.open is None or self.open["type"] != "message":
            self._space += text
            if not self._space.strip():
                return
            text = self._space
            self._begin(self._message(), events)
        self._add(text, events)

    def _begin(self, item: dict[str, Any], events: list[OpenAiResponseEvent]) -> None:
        self._close(events)
        self.open, self._space, self.parts = item, "", []
        self.output.append(item)
        written = ITEMS[item["type"]].written
        self._delta = {"type": f"{written.event}.delta", **self._indices(written, 0), "delta": "", **written.more}
        events.append(self._item_event("response.output_item.added", item))
        if written.part:
            events.append(self._part_event("added", written, written.content("")))

    def _add(self, text: str, events: list[OpenAiResponseEvent]) -> None:
        assert self.open is not None, "text always belongs to an open item"
        self.parts.append(text)
        events.append(self.delta(text, self.number()))

    def _close(self, events: list[OpenAiResponseEvent], *, status: Status = "completed") -> None:
        """End the open item, if there is one: put the whole text into it, and add the events that end its content."""
        item = self.open
        if item is None:
            return
        item["status"] = status
        written, text = ITEMS[item["type"]].written, "".join(self.parts)
        is_custom = item["type"] == "custom_tool_call"
        if is_custom:
            text = _custom_input(text)
        if written.part or status == "completed":  # clients execute a call when they get its last event
            if is_custom:
                events.append(self.delta(text, self.number()))
            indices = self._indices(written, self.number())
            repeated = {name: item[name] for name in written.repeated}
            done = {"type": f"{written.event}.done", **indices, **repeated, written.field: text, **written.more}
            events.append(cast(Done, done))
        if written.part:
            part = written.content(text)
            item["content"] = [part]
            events.append(self._part_event("done", written, part))
        else:
            item[written.field] = text
        events.append(self._item_event("response.output_item.done", item))
        self.open = None

    def _new(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"id": self._new_id(ITEMS[kind].prefix), "type": kind, "status": "in_progress", **fields}

    def _message(self) -> dict[str, Any]:
        return self._new("message", role="assistant", content=[])

    def _call(self, tool: Origin) -> dict[str, Any]:
        kind, field = ("custom_tool_call", "input") if tool.is_custom else ("function_call", "arguments")
        namespace = {"namespace": tool.namespace} if tool.namespace else {}
        return self._new(kind, **{field: ""}, call_id=new_id("call"), name=tool.name, **namespace)


def _custom_input(arguments: str) -> str:
    """Return the text in the arguments of a custom tool, or the unchanged arguments if their format is unexpected."""
    try:
        value = loads(arguments)
    except ValueError:
        return arguments
    text = value.get("input") if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


NUM_STATES = 3
"""The number of events in a stream that contain the response object."""

NUM_QUEUED = 2
"""The number of events before a background response starts. The reply does not write them."""


class ResponseSettings(NamedTuple):
    """The settings for rendering a response.

    Attributes:
        head: the fields of the response that do not change.
        form: the settings for parsing the model's response.
        origins: maps a tool's name in the prompt to its declaration.
        keeping: the object that stores the response, or None if it is not stored.
    """

    head: ResponseStart
    form: ResponseForm
    origins: Mapping[str, Origin]
    keeping: Keeping | None = None

    def items(self) -> Items:
        most = self.head["max_tool_calls"]
        return Items(
            self.origins,
            1 if self.form.tools.single else most,
            secret=self.keeping is not None,
            first=NUM_QUEUED if self.head["background"] else 0,
        )

    def response(
        self,
        output: Sequence[OutputItem] = (),
        finish: Finish | None = None,
        *,
        broken: bool = False,
        usage: ResponseUsage | None = None,
        error: ResponseFailure | None = None,
    ) -> OpenAiResponse:
        """Build the response object.

        Args:
            finish: the reason why the response ended, or None if the response is in progress.
            broken: whether a tool call is incomplete, which makes the response incomplete.
        """
        ended: Status = "incomplete" if broken else "completed"
        statuses: Mapping[Finish | None, ResponseStatus] = {
            None: "in_progress",
            Finish.LENGTH: "incomplete",
            Finish.ERROR: "failed",
        }
        status = statuses.get(finish, ended)
        return {
            **self.head,
            "status": status,
            "completed_at": now() if status == "completed" else None,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if finish is Finish.LENGTH else None,
            "output": [*output],
            "usage": usage,
        }

    def store(self, response: OpenAiResponse) -> OpenAiResponse:
        """Store a finished response if requested. Return the response, with `store` false if it could not be stored.

        Raises:
            ServingError: the response could not be appended to its conversation.
        """
        if self.keeping is None:
            return response
        head = {name: value for name, value in response.items() if name != "output"}
        is_stored = self.keeping.end(response["id"], head, response["output"], failed=response["status"] == "failed")
        return response if is_stored else {**response, "store": False}


def now() -> int:
    return int(time.time())


def usage(num_prompt_tokens: int, num_cached_tokens: int, num_tokens: int, num_reasoning: int) -> ResponseUsage:
    return {
        "input_tokens": num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": num_tokens,
        "output_tokens_details": {"reasoning_tokens": num_reasoning},
        "total_tokens": num_prompt_tokens + num_tokens,
    }


class ResponseStream(BlockStream):
    """A response as a stream: `response.created`, `response.in_progress`, the item events, and the last state."""

    def __init__(self, settings: ResponseSettings) -> None:
        super().__init__(ERRORS, settings.form)
        self._settings = settings
        self._items = settings.items()
        self._text_event: bytes | None = None  # the template of a text delta, while a message is open

    def token_encoder(self) -> TokenEncoder | None:
        return None if self._text_event is None or not self._settings.form.is_text else self._text_token

    def _broken_off(self, error: ServingError) -> bytes:
        head = b"" if self._begun else self._head()  # OpenAI's client reads no other event first
        remainder = head + self._encode(self._items.end(complete=False))
        failure: ResponseFailure = {
            "code": "rate_limit_exceeded" if ERRORS.status(error) == 429 else "server_error",
            "message": error.message,
        }
        response = self._settings.store(self._settings.response(self._items.output, Finish.ERROR, error=failure))
        return remainder + self._encode([self._told(response)])

    def _told(self, response: OpenAiResponse, kind: ResponseState | None = None) -> ResponseEvent:
        """Return an event with the response object. By default, the response status determines the event type."""
        return {
            "type": kind or cast(ResponseState, f"response.{response['status']}"),
            "sequence_number": self._items.number(),
            "response": response,
        }

    def _head(self) -> bytes:
        response = self._settings.response()
        if self._settings.keeping is not None:
            self._settings.keeping.begin(response["id"], response)
        if response["background"]:
            return self._encode([self._told(response)])
        return self._encode([self._told(response, "response.created"), self._told(response)])

    def _token(self, position: int, token: Token) -> bytes:
        return self._encode(self._items.feed([token.text] if self._reader is None else self._reader.feed(token)))

    def _text_token(self, token: Token) -> bytes:
        """Encode a message token in a response that consists only of text."""
        self._num_tokens += token.id >= 0
        self._items.parts.append(token.text)
        return self._text(token.text, self._items.number())

    def _text(self, text: str, number: int) -> bytes:
        assert self._text_event is not None, "a message is open"
        return self._text_event % (number, JSON_TEXTS[text])

    def _encode(self, events: Sequence[OpenAiResponseEvent]) -> bytes:
        chunks = []
        for event in events:
            if self._text_event is not None and event["type"] == "response.output_text.delta":
                chunks.append(self._text(event["delta"], event["sequence_number"]))
                continue
            self._text_event = None
            chunks.append(typed_event(event))
        item = self._items.open
        if self._text_event is None and item is not None and item["type"] == "message":
            self._text_event = template(typed_event(self._items.delta(SLOT, NUMBER)))
        return b"".join(chunks)

    def _last(self, position: int, token: Token, finish: Finish) -> bytes:
        remainder = self._token(position, token) if token.text or self._reader is not None else b""
        remainder += self._encode(self._items.feed(self._reader.flush(finish))) if self._reader is not None else b""
        remainder += self._encode(self._items.end(complete=finish is not Finish.LENGTH))
        return remainder + self._completed(finish)

    def _completed(self, finish: Finish) -> bytes:
        """Store the finished response, and return its last event."""
        counts = usage(self._num_prompt_tokens, self._num_cached_tokens, self._num_tokens, self._num_reasoning)
        response = self._settings.response(self._items.output, finish, broken=self._items.broken, usage=counts)
        try:
            response = self._settings.store(response)
        except ServingError as error:
            return self._broken_off(error)
        return self._encode([self._told(response)])


class ResponseDocument(WholeReply):
    """A non-streaming response."""

    def __init__(self, settings: ResponseSettings) -> None:
        super().__init__(1)
        self._settings = settings

    def _document(self) -> OpenAiResponse:
        return self._response()

    def _response(
        self, first: Sequence[CompactionItem] = (), num_cached: int = 0, num_tokens: int = 0, num_reasoning: int = 0
    ) -> OpenAiResponse:
        """Build and store the response.

        Args:
            first: the items before those of the response.
            num_cached, num_tokens, num_reasoning: the counts of these items.
        """
        (sequence,) = self._sequences
        items, (events, num_of_response) = self._settings.items(), read_whole(self._settings.form, sequence)
        items.output += first
        items.feed(events)
        items.end(complete=sequence.finish is not Finish.LENGTH)
        num_cached += sequence.extras.num_cached_tokens or 0
        num_tokens += sequence.num_tokens
        counts = usage(self._num_prompt_tokens, num_cached, num_tokens, num_reasoning + num_of_response)
        response = self._settings.response(items.output, sequence.finish, broken=items.broken, usage=counts)
        return self._settings.store(response)


# -- the fields of the request that a response repeats -----------------------------------------------------------------


_SAMPLING = {"temperature": 1.0, "top_p": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


def read_head(
    body: Mapping[str, Any], generation: GenerationDefaults, *, store: bool = False, background: bool = False
) -> ResponseHead:
    """Return the fields of the request that its response repeats.

    Args:
        generation: the default parameters of the model.
        store: whether the response is stored.
        background: whether the response is generated in the background.
    """
    reasoning = body.get("reasoning") or {}
    parallel, text = body.get("parallel_tool_calls"), body.get("text")
    used = {
        name: generation.sampling.get(name, default) if body.get(name) is None else body[name]
        for name, default in _SAMPLING.items()
    }
    tools = body.get("tools") or []
    return {
        "background": background,
        "frequency_penalty": used["frequency_penalty"],
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "max_tool_calls": body.get("max_tool_calls"),
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": True if parallel is None else parallel,
        "presence_penalty": used["presence_penalty"],
        "previous_response_id": body.get("previous_response_id"),
        "prompt_cache_key": body.get("prompt_cache_key"),
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "safety_identifier": body.get("safety_identifier"),
        "service_tier": "default",
        "store": store,
        "temperature": used["temperature"],
        "text": {"format": _format(text.get("format") if isinstance(text, dict) else None)},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": [_tool(tool) for tool in without_skipped(tools)] if isinstance(tools, list) else tools,
        "top_logprobs": 0,
        "top_p": used["top_p"],
        "truncation": "disabled",
        "user": body.get("user"),
    }


def encode_head(head: ResponseHead) -> ResponseHead:
    """Encode the repeated fields once for all events of a stream. Numbers and null are left unchanged.

    Raises:
        InvalidPayload: a field cannot be encoded.
    """
    written: dict[str, Any] = {}
    for name, value in head.items():
        try:  # nested as deeply as in an event, because orjson writes fewer levels than it reads
            written[name] = value if isinstance(value, int | float | None) else encoded(value, depth=4)
        except TypeError as error:
            raise InvalidPayload(f"'{name}' cannot be repeated in the response: {error}") from None
    return cast(ResponseHead, written)


def without_strict(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool with `strict` false, because nothing enforces its schema."""
    if "tools" in tool:
        return {**tool, "tools": [without_strict(member) for member in tool["tools"]]}
    return {**tool, "strict": False} if "strict" in tool else tool


def _tool(tool: Any) -> Any:
    """Return a tool with all fields that a response has. `ToolsReader` reports errors."""
    if not isinstance(tool, dict):
        return tool
    if isinstance(tool.get("tools"), list):
        return {**tool, "tools": [_tool(member) for member in without_skipped(tool["tools"])]}
    if tool.get("type") == CUSTOM:
        return {"description": None, "format": {"type": "text"}, **tool}
    return {"description": None, "parameters": None, **tool, "strict": tool.get("strict") is True}


def _format(format: Any) -> Any:
    if not isinstance(format, dict) or format.get("type") != "json_schema":
        return format or {"type": "text"}
    return {"description": None, **format, "strict": format.get("strict") is True}
