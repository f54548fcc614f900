"""Renders tokens as Anthropic messages (documents or events), and stores messages in threads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from handler.core.errors import InvalidParameter, ServingError, Unavailable
from handler.core.framing import JSON_TEXTS, SLOT, rewritten, template, typed_event
from handler.core.text import StopMatcher
from handler.core.values import Finish, Token, new_digits
from handler.protocols.anthropic.api import (
    ERRORS,
    AnthropicMessage,
    AnthropicMessageDelta,
    AnthropicStop,
    AnthropicTextDelta,
    AnthropicUsage,
    Block,
    BlockDelta,
    BlockEvent,
    MessageEvent,
    StopReason,
    ThreadNotFound,
    ThreadsUnsupported,
)
from handler.protocols.anthropic.edits import ContextEdits
from handler.protocols.assistant.answer import BlockStream, ResponseForm, read_whole
from handler.protocols.assistant.events import Arguments, CallEnd, CallStart, Event, Reasoning
from handler.protocols.assistant.tools.json_text import is_object
from handler.protocols.kernel.context import RequestContext, ServerContext
from handler.protocols.kernel.readers import NamedValue
from handler.protocols.kernel.reply import WholeReply
from handler.protocols.kernel.schema import TEXT, Shape, nullable, record
from handler.protocols.kernel.stored import Keeper, Keeping, Wanted, kept_items, too_long

# -- threads: conversations that the server stores (option.responses_store), as in Anthropic's package 2.12 ------------


_THREAD_FIELDS = ("system", "tools")
"""The fields that are set when a thread is created and cannot change later."""

THREAD: Shape = nullable(record({"type": {"enum": ["create", "continue"]}}, {"previous_message_id": TEXT}))
"""The schema of `thread`, which `continued` reads."""


def read_wanted(body: Any, *, keeps: bool) -> Wanted | None:
    """Return a body's reference to stored messages, or None if it has no thread. `continued` reports errors in it."""
    thread = body.get("thread") if isinstance(body, dict) else None
    if not isinstance(thread, dict):
        return None
    previous = thread.get("previous_message_id")
    return Wanted("thread", keeps, previous if isinstance(previous, str) and thread.get("type") == "continue" else "")


def continued(body: Mapping[str, Any], context: ServerContext, request_context: RequestContext) -> Mapping[str, Any]:
    """Return the body, with the fields that were sent when its thread was created.

    Raises:
        ThreadsUnsupported: the server does not store responses.
        ThreadNotFound: the previous message is not stored.
        InvalidParameter: `thread` is invalid, or the body changes a field that belongs to the thread.
    """
    if (value := body.get("thread")) is None:
        return body
    if request_context.keeper is None and isinstance(value, dict):
        raise ThreadsUnsupported(
            "thread: is not supported: conversations are not stored (option.responses_store); send all messages"
        )
    thread = NamedValue("thread", value)
    if not isinstance(value, dict) or value.get("type") not in ("create", "continue"):
        raise thread.refused("must be an object with a 'type' that is create or continue")
    names = {"type"} if value["type"] == "create" else {"type", "previous_message_id"}
    if value.keys() != names or not isinstance(value.get("previous_message_id", ""), str):
        raise thread.refused(
            "continue requires a string 'previous_message_id' and no other field; create allows only 'type'"
        )
    if value["type"] == "create":
        return body
    previous = NamedValue("thread.previous_message_id", value["previous_message_id"])
    state = request_context.recalled.state
    if state == "too_long":
        raise too_long(previous, "the thread's earlier messages", context.config.max_request_size)
    if state != "found" or not previous.value:
        raise ThreadNotFound(f"{previous}: this message or an earlier one is not stored; send all messages")
    for name in _THREAD_FIELDS:
        if body.get(name) is not None:
            raise InvalidParameter(f"{name}: cannot be changed within a thread; omit it, or create another thread")
    return {**body, **request_context.recalled.head}


class ThreadKeeping:
    """Stores the response to one request in its thread."""

    def __init__(self, keeping: Keeping, head: Mapping[str, Any]) -> None:
        self._keeping, self._head = keeping, head

    def end(self, id: str, content: Sequence[Block]) -> None:
        """Store the complete message. This call blocks.

        Raises:
            Unavailable: the message could not be stored, so no later request can continue it.
        """
        if not self._keeping.end(id, self._head, [{"role": "assistant", "content": content}] if content else []):
            raise Unavailable("the message could not be stored in its thread; repeat the request, or send all messages")


def make_keeping(body: Mapping[str, Any], keeper: Keeper | None) -> ThreadKeeping | None:
    """Return the object that stores the response to a parsed body, or None if the body belongs to no thread."""
    thread = body.get("thread")
    if thread is None or keeper is None:
        return None
    previous = thread.get("previous_message_id", "")
    head = {} if previous else {name: body[name] for name in _THREAD_FIELDS if body.get(name) is not None}
    *items, _ = kept_items([*body["messages"], head])  # also checks that the head can be encoded
    return ThreadKeeping(Keeping(keeper, "thread", previous, items), head)


SIGNATURE = "lmi"
"""The signature of every thinking block. Clients send back only signed reasoning. The server ignores signatures."""


def tool_use_id() -> str:
    return f"toolu_{new_digits()[:24]}"


class Blocks:
    """The content blocks of one message, as events: the start, deltas and stop of each block, in order.

    Text that is only whitespace is emitted as a block only if there are no other blocks.

    Args:
        stops: the client's stop strings. The text from the engine ends with the matched stop
            string, which this class removes.
        show_reasoning: whether thinking blocks contain the reasoning.
        single: whether to keep only the first tool call.

    Attributes:
        num_calls: the number of tool calls so far.
        broken: whether a tool call is incomplete.
        index: the index of the last block.
    """

    def __init__(self, stops: Sequence[str] = (), *, show_reasoning: bool = True, single: bool = False) -> None:
        self._stops = stops
        self._show_reasoning = show_reasoning
        self._single = single
        self._matcher = StopMatcher(stops)
        self._space = ""
        self._open = ""  # the type of the block that is open
        self.index = -1
        self.num_calls = 0
        self.broken = False

    @property
    def called(self) -> bool:
        """Return whether there are tool calls and all of them are complete, so that the client may execute them."""
        return self.num_calls > 0 and not self.broken

    def feed(self, events: Iterable[Event]) -> list[BlockEvent]:
        block_events: list[BlockEvent] = []
        for event in events:
            if isinstance(event, str):
                self._text(self._matcher.feed(event) if self._stops else event, block_events)
            elif isinstance(event, Reasoning):
                self._thinking(event.text, block_events)
            elif not (self._single and event.number):
                self._call(event, block_events)
        return block_events

    def end(self) -> list[BlockEvent]:
        """Return the remaining events, which end the last block."""
        events: list[BlockEvent] = []
        self._end_text(events)
        if (space := self._space) and self.index < 0:
            self._begin({"type": "text", "text": ""}, events)
            self._add({"type": "text_delta", "text": space}, events)
        self._close(events)
        return events

    def _text(self, text: str, events: list[BlockEvent]) -> None:
        if self._open != "text":
            self._space += text
            if not self._space.strip():
                return
            text, self._space = self._space, ""
            self._begin({"type": "text", "text": ""}, events)
        elif self._stops and not text:
            return
        self._add({"type": "text_delta", "text": text}, events)

    def _thinking(self, text: str, events: list[BlockEvent]) -> None:
        self._end_text(events)
        if self._open != "thinking":
            self._begin({"type": "thinking", "thinking": "", "signature": ""}, events)
        if self._show_reasoning:
            self._add({"type": "thinking_delta", "thinking": text}, events)

    def _call(self, event: CallStart | Arguments | CallEnd, events: list[BlockEvent]) -> None:
        self._end_text(events)
        if isinstance(event, CallStart):
            self.num_calls += 1
            self._begin({"type": "tool_use", "id": tool_use_id(), "name": event.name, "input": {}}, events)
        elif isinstance(event, Arguments):
            self._add({"type": "input_json_delta", "partial_json": event.text}, events)
        else:
            self.broken |= not event.whole
            self._close(events)

    def _end_text(self, events: list[BlockEvent]) -> None:
        """Add the text that was held back as a possible stop string. Stop strings do not span two blocks."""
        if self._stops and not self._matcher.matched:
            self._text(self._matcher.flush(), events)
            self._matcher = StopMatcher(self._stops)

    def _begin(self, block: Block, events: list[BlockEvent]) -> None:
        self._close(events)
        self._space = ""
        self.index += 1
        self._open = block["type"]
        events.append({"type": "content_block_start", "index": self.index, "content_block": block})

    def _add(self, delta: BlockDelta, events: list[BlockEvent]) -> None:
        events.append({"type": "content_block_delta", "index": self.index, "delta": delta})

    def _close(self, events: list[BlockEvent]) -> None:
        if self._open == "thinking":
            self._add({"type": "signature_delta", "signature": SIGNATURE}, events)
        if self._open:
            events.append({"type": "content_block_stop", "index": self.index})
        self._open = ""


def gather(events: Iterable[BlockEvent]) -> list[Block]:
    """Join the events of a stream into the content blocks of a non-streaming response.

    A tool call whose arguments are not a JSON object is converted to a text block.
    """
    content: list[Any] = []
    pieces: dict[str, list[str]] = {}
    for event in events:
        if event["type"] == "content_block_start":
            content.append({**event["content_block"]})
            pieces = {}
        elif event["type"] == "content_block_delta":
            delta: Any = event["delta"]
            field = "partial_json" if delta["type"] == "input_json_delta" else delta["type"].removesuffix("_delta")
            pieces.setdefault(field, []).append(delta[field])
        else:
            arguments = "".join(pieces.pop("partial_json", ()))
            content[-1] |= {field: "".join(texts) for field, texts in pieces.items()}
            if content[-1]["type"] == "tool_use" and is_object(arguments):
                content[-1]["input"] = rewritten(arguments)
            elif content[-1]["type"] == "tool_use":
                content[-1] = {"type": "text", "text": f"{content[-1]['name']} {arguments}"}
    return content


def encode(event: MessageEvent) -> bytes:
    return typed_event(event)


class MessageSettings(NamedTuple):
    """The settings for rendering a response.

    Attributes:
        form: the settings for parsing the model's response.
        max_tokens: the client's limit on new tokens. If a response with fewer tokens ends because of a length limit,
            the context is full.
        stops: the client's stop strings. The engine leaves them in the text.
        show_reasoning: whether thinking blocks contain the reasoning.
        keeping: the object that stores the response in its thread, or None if it belongs to no thread.
        edits: the edits of the conversation, or None if the request has no `context_management`.
    """

    id: str
    model: str
    form: ResponseForm
    max_tokens: int
    stops: Sequence[str] = ()
    show_reasoning: bool = True
    keeping: ThreadKeeping | None = None
    edits: ContextEdits | None = None

    def blocks(self) -> Blocks:
        return Blocks(self.stops, show_reasoning=self.show_reasoning, single=self.form.tools.single)

    def stop(self, finish: Finish, text: str, num_tokens: int, *, called: bool) -> AnthropicStop:
        """Return the stop reason of a response.

        Args:
            text: the text of the response, or at least its end, which may be a stop string.
            called: whether the response has tool calls that the client may execute.
        """
        reason: StopReason = "tool_use" if called else "end_turn"
        stopped_by = None
        if finish is Finish.LENGTH:
            reason = "max_tokens" if num_tokens >= self.max_tokens else "model_context_window_exceeded"
        elif finish is Finish.STOP:
            stopped_by = max((stop for stop in self.stops if text.endswith(stop)), key=len, default=None)
            reason = reason if stopped_by is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": stopped_by}

    def message(self, num_prompt_tokens: int, num_cached_tokens: int = 0) -> AnthropicMessage:
        """Return the message at the start of a stream, which has no content and no stop reason yet."""
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self.usage(num_prompt_tokens, num_cached_tokens, 0),
        }

    def usage(
        self, num_prompt_tokens: int, num_cached_tokens: int, num_tokens: int, num_reasoning: int = 0
    ) -> AnthropicUsage:
        """Return the token counts. Prompt tokens from the engine's prefix cache are counted separately."""
        counts: AnthropicUsage = {
            "input_tokens": num_prompt_tokens - num_cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached_tokens,
            "output_tokens": num_tokens,
        }
        if self.form.thinking is not None:
            counts["output_tokens_details"] = {"thinking_tokens": num_reasoning}
        return counts


class MessageStream(BlockStream):
    """A message as a stream: `message_start`, the events of each block, `message_delta` and `message_stop`.

    Each token of text is a separate event.
    """

    def __init__(self, settings: MessageSettings) -> None:
        super().__init__(ERRORS, settings.form)
        self._settings = settings
        self._blocks = settings.blocks()
        self._is_plain = settings.form.is_text and not settings.stops and settings.keeping is None
        self._kept: list[BlockEvent] = []  # all events, if the response is stored
        self._text_event: bytes | None = None  # the template of a text delta, while a text block is open
        self._longest_stop = max(map(len, settings.stops), default=0)
        self._tail = ""  # the end of the text, as long as the longest stop string

    def _broken_off(self, error: ServingError) -> bytes:
        return typed_event(self._errors.tail(error))

    def _head(self) -> bytes:
        message = self._settings.message(self._num_prompt_tokens, self._num_cached_tokens)
        return encode({"type": "message_start", "message": message})

    def _token(self, position: int, token: Token) -> bytes:
        if self._longest_stop:
            self._tail = (self._tail + token.text)[-self._longest_stop :]
        events = [token.text] if self._reader is None else self._reader.feed(token)
        data = self._render(self._blocks.feed(events))
        self._events[position] = self._text_event if self._is_plain else None
        return data

    def _render(self, events: Sequence[BlockEvent]) -> bytes:
        if self._settings.keeping is not None:
            self._kept += events
        return b"".join([self._event(event) for event in events])

    def _event(self, event: BlockEvent) -> bytes:
        if event["type"] == "content_block_start" and event["content_block"]["type"] == "text":
            slots: AnthropicTextDelta = {"type": "text_delta", "text": SLOT}
            self._text_event = template(
                encode({"type": "content_block_delta", "index": event["index"], "delta": slots})
            )
        elif event["type"] == "content_block_stop":
            self._text_event = None
        elif self._text_event is not None and event["type"] == "content_block_delta":
            delta = event["delta"]
            assert delta["type"] == "text_delta", "a text block only gets text deltas"
            return self._text_event % JSON_TEXTS[delta["text"]]
        return encode(event)

    def _last(self, position: int, token: Token, finish: Finish) -> bytes:
        remainder = self._token(position, token) if token.text else b""
        remainder += self._render(self._blocks.feed(self._reader.flush(finish)) if self._reader is not None else ())
        remainder += self._render(self._blocks.end())
        if self._settings.keeping is not None:
            self._settings.keeping.end(self._settings.id, gather(self._kept))
        stop = self._settings.stop(finish, self._tail, self._num_tokens, called=self._blocks.called)
        counts = self._settings.usage(
            self._num_prompt_tokens, self._num_cached_tokens, self._num_tokens, self._num_reasoning
        )
        end: AnthropicMessageDelta = {"type": "message_delta", "delta": stop, "usage": counts}
        if self._settings.edits is not None:
            end["context_management"] = self._settings.edits.shown()
        return remainder + encode(end) + encode({"type": "message_stop"})


class MessageDocument(WholeReply):
    """A message as a non-streaming response."""

    def __init__(self, settings: MessageSettings) -> None:
        super().__init__(1)
        self._settings = settings

    def _document(self) -> AnthropicMessage:
        (sequence,) = self._sequences
        settings, blocks, num_tokens = self._settings, self._settings.blocks(), sequence.num_tokens
        events, num_reasoning = read_whole(settings.form, sequence)
        content = gather([*blocks.feed(events), *blocks.end()])
        num_cached = sequence.extras.num_cached_tokens or 0
        counts = settings.usage(self._num_prompt_tokens, num_cached, num_tokens, num_reasoning)
        called = blocks.called and sum(block["type"] == "tool_use" for block in content) == blocks.num_calls
        stop = settings.stop(sequence.finish, sequence.text, num_tokens, called=called)
        if settings.keeping is not None:
            settings.keeping.end(settings.id, content)
        message: AnthropicMessage = {**settings.message(0), "content": content, "usage": counts, **stop}
        if settings.edits is not None:
            message["context_management"] = settings.edits.shown()
        return message
