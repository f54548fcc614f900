"""Realtime sessions over a WebSocket: text turns and transcription in OpenAI's protocol, transcription in vLLM's.

A text turn is a request for /v1/responses whose input is the conversation, and a transcription is a request for
/v1/audio/transcriptions. See https://developers.openai.com/api/docs/guides/realtime and
vllm/entrypoints/speech_to_text/realtime.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from handler.core.errors import ServingError
from handler.core.framing import decoded_as_json, dumps, dumps_decoded, loads, raw
from handler.core.values import Task, new_digits
from handler.http.sockets.exchange import Output
from handler.http.sockets.session import Session
from handler.http.sockets.transcription import (
    AudioBuffer,
    EventError,
    FlatTranscription,
    Transcription,
    audio_settings,
    check_model,
)
from handler.serving.quota import Share

RESPONSES = "/v1/responses"

_MAX_ITEMS = 1024  # maximum number of items of a conversation
_SETTINGS = ("model", "instructions", "tools", "tool_choice", "max_output_tokens", "parallel_tool_calls", "reasoning")
"""The fields of a session and of `response.create` that a request for /v1/responses has too."""

_ACCEPTED = {
    "type": ("realtime",),
    "output_modalities": (["text"],),
    "tracing": (None,),
    "prompt": (None,),
    "include": (None, []),
    "truncation": (None, "disabled"),
}
"""Maps further fields to the values that have no effect. Other values are refused."""

_OUT_OF_BAND = "out-of-band"
"""The lane of out-of-band responses, which are not added to the conversation."""


class Item(NamedTuple):
    """An item of a conversation. It is encoded once, because it may be large.

    Attributes:
        shown: the item as realtime clients read it, as JSON.
        body: the item as /v1/responses reads it, as JSON.
    """

    id: str
    shown: bytes
    body: bytes

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Item:
        """Encode an item."""
        return cls(fields["id"], dumps_decoded(fields), dumps_decoded(_input_item(fields)))

    @property
    def size(self) -> int:
        return len(self.shown) + len(self.body)


class Conversation:
    """The items of a conversation, in order.

    Attributes:
        items: items by id.
    """

    def __init__(self) -> None:
        self.items: dict[str, Item] = {}
        self._memory: dict[str, Share] = {}  # of each item

    def add(self, item: Item, previous: str | None, hold: Callable[[int], Share]) -> str | None:
        """Add an item after another one, and return the id of that one.

        Args:
            previous: id of the item before it, "root" for the beginning, or None for the end.
            hold: returns a share of the memory quota.

        Raises:
            ServingError: the item cannot be added.
        """
        if item.id in self.items:
            raise EventError(f"item.id={item.id!r:.100}: an item with this id exists", "invalid_value", "item.id")
        self.check_room()
        ids = [*self.items]
        if previous is None:
            index = len(ids)
        elif previous == "root":
            index = 0
        elif isinstance(previous, str) and previous in self.items:
            index = ids.index(previous) + 1
        else:
            raise _no_item(previous, "previous_item_id")
        self._memory[item.id] = hold(item.size)
        items = [*self.items.items()]
        items.insert(index, (item.id, item))
        self.items = dict(items)
        return ids[index - 1] if index else None

    def check_room(self) -> None:
        """Raise EventError if no item can be added."""
        if len(self.items) >= _MAX_ITEMS:
            raise EventError(f"a conversation can have at most {_MAX_ITEMS} items", "conversation_too_long")

    def remove(self, item: Item) -> None:
        """Remove an item."""
        del self.items[item.id]
        self._memory.pop(item.id).close()

    def get(self, id: object) -> Item:
        """Return an item.

        Raises:
            EventError: no item has this id.
        """
        if not isinstance(id, str) or id not in self.items:
            raise _no_item(id, "item_id")
        return self.items[id]


def _is_flat(event: Mapping[str, Any]) -> bool:
    """Return whether only clients of vLLM send an event."""
    if event.get("type") == "session.update":
        return "model" in event and "session" not in event
    return event.get("type") == "input_audio_buffer.commit" and "final" in event


def _no_item(id: object, param: str) -> EventError:
    return EventError(f"{param}={id!r:.100}: no item of the conversation has this id", "item_not_found", param)


class RealtimeReader:
    """Reads the events of realtime sessions (see `MessageReader`).

    Args:
        intent: value of `intent` in the query string, with which clients choose the kind of session.
    """

    _audio: AudioBuffer
    _memory: Share  # of the settings

    def __init__(self, intent: str = "") -> None:
        self._intent = intent
        self._id = f"sess_{new_digits()}"
        self.conversation_id = f"conv_{new_digits()}"
        self._settings: dict[str, Any] = {"output_modalities": ["text"], "instructions": "", "tools": []}
        self._conversation = Conversation()
        self._turn: TextTurn | None = None  # the response that the conversation waits for
        self._num_events = itertools.count(1)
        self._transcription: Transcription | None = None

    def begin(self, session: Session) -> None:
        """Send `session.created`, which clients of OpenAI and of vLLM both read."""
        self._audio, self._memory = AudioBuffer(session.hold(0)), session.hold(0)
        if self._intent == "transcription" or session.model.context.task is Task.TRANSCRIPTION:
            self._transcription = Transcription()
        self.send(session, "session.created", id=self._id, created=int(time.time()), session=self._session(session))

    async def read(self, session: Session, message: bytes) -> None:
        try:
            event = await session.decode(message)
        except ServingError as error:
            return self.fail(session, error)
        kind, id = event.get("type"), event.get("event_id")
        if _is_flat(event):
            session.reader = FlatTranscription(session)
            return await session.reader.read(session, message)
        handle = _HANDLERS.get(kind) if isinstance(kind, str) else None
        try:
            if handle is None:
                raise EventError(f"type={kind!r:.100}: no such event", "unknown_event", "type")
            await handle(self, session, event, len(message))
        except ServingError as error:
            self.fail(session, error, id)

    def expire(self, session: Session) -> None:
        self.fail(
            session, EventError("the session has reached its maximum lifetime; open a new one", "session_expired")
        )

    # -- events of the server ------------------------------------------------------------------------------------

    def send(self, session: Session, kind: str, /, **fields: Any) -> None:
        event = {"type": kind, "event_id": f"event_{next(self._num_events)}", **fields}
        session.socket.send_text(dumps_decoded(event))

    def fail(self, session: Session, error: ServingError, id: object = None) -> None:
        """Send an error.

        Args:
            id: id of the client's event.
        """
        body = {
            "type": "invalid_request_error",
            "code": getattr(error, "code", None) or "invalid_value",
            "message": error.message,
            "param": getattr(error, "param", None),
            "event_id": id if isinstance(id, str) else None,
        }
        self.send(session, "error", error=body)

    def _session(self, session: Session) -> dict[str, Any]:
        kind = "realtime" if self._transcription is None else "transcription"
        audio = {} if self._transcription is None else {"audio": {"input": self._transcription.settings}}
        text = self._settings if self._transcription is None else {}
        model = self._settings.get("model") or session.model.context.own_name
        return {"type": kind, "object": "realtime.session", "id": self._id, **text, "model": model, **audio}

    # -- events of the client ------------------------------------------------------------------------------------

    async def _update(self, session: Session, event: Mapping[str, Any], size: int) -> None:
        new = _object(event, "session")
        if new.get("type") == "transcription":
            self._transcribe(session, new, size)
        else:
            check_model(session, new.get("model"), "session.model")
            settings = await session.call(size, functools.partial(_read_settings, new, "session."))
            settings = {**self._settings, **settings}
            self._memory.set(len(dumps(settings)))
            self._settings = settings
            self._transcription = None
        self.send(session, "session.updated", session=self._session(session))

    def _transcribe(self, session: Session, new: Mapping[str, Any], size: int) -> None:
        """Change the settings of a transcription session."""
        if self._conversation.items and self._transcription is None:
            raise EventError("session.type: the session has a conversation", "invalid_value", "session.type")
        earlier = self._transcription or Transcription()
        check_model(session, new.get("model"), "session.model")
        settings = audio_settings(new, earlier)
        check_model(session, settings.fields.get("model"), "session.audio.input.transcription.model")
        if self._audio.size and (settings.kind, settings.rate) != (earlier.kind, earlier.rate):
            at = "session.audio.input.format"
            raise EventError(f"{at}: the buffer has audio of another format; commit or clear it", "invalid_value", at)
        self._memory.set(size)
        self._transcription = settings

    async def _add_item(self, session: Session, event: Mapping[str, Any], size: int) -> None:
        item = await session.call(size, functools.partial(_read_item, _object(event, "item")))
        self._add(session, item, event.get("previous_item_id"))

    def _add(self, session: Session, item: Item, previous: Any = None) -> None:
        before = self._conversation.add(item, previous, session.hold)
        for kind in ("conversation.item.added", "conversation.item.done"):
            self.send(session, kind, previous_item_id=before, item=raw(item.shown))

    async def _delete_item(self, session: Session, event: Mapping[str, Any], size: int) -> None:
        item = self._conversation.get(event.get("item_id"))
        self._conversation.remove(item)
        self.send(session, "conversation.item.deleted", item_id=item.id)

    async def _show_item(self, session: Session, event: Mapping[str, Any], size: int) -> None:
        item = self._conversation.get(event.get("item_id"))
        self.send(session, "conversation.item.retrieved", item=raw(item.shown))

    async def _refuse_truncation(self, session: Session, event: Mapping[str, Any], size: int) -> None:
        raise EventError(
            "conversation.item.truncate cuts audio output, which is not supported", "not_supported", "type"
        )

    async def _respond(self, session: Session, event: Mapping[str, Any], size: int) -> None:
        if self._transcription is not None:
            raise EventError("a transcription session has no responses", "not_supported", "type")
        fields = _object(event, "response") if event.get("response") is not None else {}
        is_out_of_band = fields.get("conversation", "auto") == "none"
        if fields.get("conversation", "auto") not in ("auto", "none"):
            raise EventError("response.conversation: must be auto or none", "invalid_value", "response.conversation")
        if self._turn is not None and not is_out_of_band:
            code = "conversation_already_has_active_response"
            raise EventError("the conversation has an active response; cancel it, or wait for its end", code)
        turn, body = await session.call(
            size, functools.partial(self._turn_of, session, fields, joins=not is_out_of_band)
        )
        lane = _OUT_OF_BAND if is_out_of_band else ""
        session.start(lane, len(body), functools.partial(self._run, session, body, turn))
        if not is_out_of_band:
            self._turn = turn

    def _turn_of(self, session: Session, fields: Mapping[str, Any], *, joins: bool) -> tuple[TextTurn, bytes]:
        """Return the turn for the fields of a response, and the body of its request."""
        items = [*self._conversation.items.values()]
        if "input" in fields:
            items = [self._input_item(item) for item in _list(fields, "input")]
        size, limit = sum(len(item.body) for item in items), session.model.config.max_request_size
        if size > limit:
            raise EventError(f"the items have {size} bytes together; at most {limit} are allowed", "input_too_long")
        settings = {**self._settings, **_read_settings(fields, "response.")}
        metadata = None if fields.get("metadata") is None else decoded_as_json(fields["metadata"])
        turn = TextTurn(self, session, settings, metadata, joins=joins)
        return turn, _request_body(settings, items, metadata)

    def _input_item(self, item: Any) -> Item:
        if isinstance(item, dict) and item.get("type") == "item_reference":
            return self._conversation.get(item.get("id"))
        return _read_item(item)

    async def _run(self, session: Session, body: bytes, turn: TextTurn) -> None:
        try:
            if not turn.is_over:
                await session.respond(RESPONSES, body, turn)
        finally:
            if self._turn is turn:
                self._turn = None

    async def _cancel(self, session: Session, event: Mapping[str, Any], size: int) -> None:
        turn, id = self._turn, event.get("response_id")
        if turn is None or (id is not None and id != turn.id):
            raise EventError(
                "there is no active response, or it has another id", "response_cancel_not_active", "response_id"
            )
        turn.cancel()

    def finish(self, session: Session, items: Sequence[dict[str, Any]]) -> None:
        """Add the items of a response to the conversation."""
        try:
            for item in items:
                self._conversation.add(Item.of(item), None, session.hold)
        except ServingError as error:
            self.fail(session, error)

    # -- audio ---------------------------------------------------------------------------------------------------

    def _need_transcription(self) -> Transcription:
        if self._transcription is None:
            message = "the model does not read audio; open a session of type transcription on a model that transcribes"
            raise EventError(message, "not_supported", "type")
        return self._transcription

    async def _append(self, session: Session, event: Mapping[str, Any], size: int) -> None:
        self._audio.append(self._need_transcription(), event.get("audio"))

    async def _clear(self, session: Session, event: Mapping[str, Any], size: int) -> None:
        self._audio.take()
        self.send(session, "input_audio_buffer.cleared")

    async def _commit(self, session: Session, event: Mapping[str, Any], size: int) -> None:
        heard = self._need_transcription()
        if not self._audio.size:
            raise EventError("the buffer has no audio", "input_audio_buffer_commit_empty")
        id = f"item_{new_digits()}"
        content = [{"type": "input_audio", "transcript": None}]
        fields = {"id": id, "object": "realtime.item", "type": "message", "role": "user", "content": content}
        self._conversation.check_room()
        audio = self._audio.take()
        work = functools.partial(heard.run, session, audio, functools.partial(self.send, session), id)
        session.start("", len(audio), work)
        previous = next(reversed(self._conversation.items), None)
        self.send(session, "input_audio_buffer.committed", item_id=id, previous_item_id=previous)
        self._add(session, Item.of({**fields, "status": "completed"}))


class TextTurn(Output):
    """A response of the conversation, whose events are those of /v1/responses in other words.

    Args:
        settings: settings of the session, with those of the response.
        joins: whether its items are added to the conversation.

    Attributes:
        id: id of the response.
        is_over: whether `response.done` has been sent.
    """

    def __init__(
        self, reader: RealtimeReader, session: Session, settings: Mapping[str, Any], metadata: object, *, joins: bool
    ) -> None:
        super().__init__(session.socket)
        self._reader = reader
        self._session = session
        self._settings = settings
        self._metadata = metadata
        self._joins = joins
        self._hidden = set[int]()  # indices of items that the client is not shown, such as reasoning
        self._items: list[dict[str, Any]] = []
        self._calls: dict[int, dict[str, str]] = {}  # by index, what the events of a function call repeat
        self.id = f"resp_{new_digits()}"
        self.is_over = False

    def cancel(self) -> None:
        """End the response."""
        self._done("cancelled", {"type": "cancelled", "reason": "client_cancelled"})
        self.disconnect()

    def event(self, event: bytes) -> None:
        if not self.is_over:
            self._translate(loads(event))

    def error(self, event: dict[str, Any]) -> None:
        if self.is_over:
            return
        error = event.get("error", event)
        kind = "invalid_request_error" if event["status"] < 500 else "server_error"
        if not self._items:
            self._begin()
        self._done(
            "failed",
            {"type": "failed", "error": {"type": kind, "code": error.get("code"), "message": error.get("message")}},
        )

    def _begin(self) -> None:
        self._send("response.created", response=self._response("in_progress"))

    def _send(self, kind: str, **fields: Any) -> None:
        self._reader.send(self._session, kind, **fields)

    def _translate(self, event: dict[str, Any]) -> None:
        kind = event["type"].removeprefix("response.")
        if kind == "created":
            return self._begin()
        if kind in ("completed", "incomplete", "failed"):
            return self._end(event["response"])
        if event.get("output_index") in self._hidden or kind == "in_progress":
            return
        if kind.startswith("output_item"):
            return self._item(kind, event)
        fields = {
            name: value for name, value in event.items() if name not in ("type", "sequence_number", "logprobs", "part")
        }
        if "output_index" in event:
            fields["output_index"] = self._index(event)
        if kind.startswith("function_call_arguments"):
            fields.update(self._calls[event["output_index"]])
        if "part" in event:
            fields["part"] = {"type": "text", "text": event["part"]["text"]}
        self._send(event["type"], response_id=self.id, **fields)

    def _item(self, kind: str, event: dict[str, Any]) -> None:
        if event["item"]["type"] == "reasoning":
            self._hidden.add(event["output_index"])
            return
        item = _output_item(event["item"])
        if item["type"] == "function_call":
            self._calls[event["output_index"]] = {"call_id": item["call_id"], "name": item["name"]}
        self._send(event["type"], response_id=self.id, output_index=self._index(event), item=item)
        if kind == "output_item.done":
            self._items.append(item)
        if self._joins:
            word = "added" if kind == "output_item.added" else "done"
            self._send(f"conversation.item.{word}", previous_item_id=None, item=item)

    def _index(self, event: Mapping[str, Any]) -> int:
        """Return the index of an event's item among the items that the client is shown."""
        index: int = event["output_index"]
        return index - sum(hidden < index for hidden in self._hidden)

    def _end(self, response: Mapping[str, Any]) -> None:
        details = None
        if response["status"] == "incomplete":
            reason = (response["incomplete_details"] or {}).get("reason", "interrupted")
            details = {"type": "incomplete", "reason": reason}
        elif response["status"] == "failed":
            details = {"type": "failed", "error": {"type": "server_error", **response["error"]}}
        self._done(response["status"], details, response["usage"])

    def _done(self, status: str, details: object = None, usage: Mapping[str, Any] | None = None) -> None:
        self.is_over = True
        if self._joins:
            self._reader.finish(self._session, self._items)
        self._send("response.done", response=self._response(status, details, usage))

    def _response(self, status: str, details: object = None, usage: Mapping[str, Any] | None = None) -> dict[str, Any]:
        limit = self._settings.get("max_output_tokens", "inf")
        return {
            "id": self.id,
            "object": "realtime.response",
            "status": status,
            "status_details": details,
            "output": self._items,
            "conversation_id": self._reader.conversation_id if self._joins else None,
            "output_modalities": ["text"],
            "max_output_tokens": limit,
            "metadata": self._metadata,
            "usage": None if usage is None else _usage(usage),
        }


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    num_in, num_out = usage["input_tokens"], usage["output_tokens"]
    cached = usage["input_tokens_details"]["cached_tokens"]
    details = {"text_tokens": num_in, "audio_tokens": 0, "image_tokens": 0, "cached_tokens": cached}
    return {
        "total_tokens": num_in + num_out,
        "input_tokens": num_in,
        "output_tokens": num_out,
        "input_token_details": details,
        "output_token_details": {"text_tokens": num_out, "audio_tokens": 0},
    }


# -- fields ------------------------------------------------------------------------------------------------------------


def _object(event: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = event.get(name)
    if not isinstance(value, dict):
        raise EventError(f"{name}: must be an object", "invalid_type", name)
    return value


def _list(fields: Mapping[str, Any], name: str) -> list[Any]:
    value = fields[name]
    if not isinstance(value, list):
        raise EventError(f"response.{name}: must be a list", "invalid_type", f"response.{name}")
    return value


def _read_settings(fields: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the settings of a session or a response, most of them as JSON.

    Raises:
        EventError: a setting is not supported.
    """
    settings = {}
    for name, value in fields.items():
        at = f"{prefix}{name}"
        if name in _SETTINGS:
            is_raw = name == "max_output_tokens" or value in (None, "", [])
            settings[name] = value if is_raw else decoded_as_json(value)
        elif name in _ACCEPTED:
            if value not in _ACCEPTED[name]:
                raise EventError(f"{at}={value!r:.100}: is not supported", "not_supported", at)
        elif name == "audio":
            _check_no_audio(value, at)
        elif name not in ("input", "conversation", "metadata", "id", "object"):
            raise EventError(f"{at}: is not supported", "unknown_parameter", at)
    limit = settings.get("max_output_tokens", "inf")
    if limit != "inf" and (isinstance(limit, bool) or not isinstance(limit, int) or not 0 < limit < 1 << 63):
        at = f"{prefix}max_output_tokens"
        raise EventError(f"{at}={limit!r:.100}: must be a positive integer or inf", "invalid_value", at)
    return settings


def _check_no_audio(value: Any, at: str) -> None:
    """Refuse audio settings that ask for something. Sessions of text accept only `null`."""
    parts = value.values() if isinstance(value, dict) else [value]
    if any(part not in (None, {}) for part in parts):
        raise EventError(f'{at}: the session has no audio; output_modalities is ["text"]', "not_supported", at)


_PARTS = {"user": ("input_text", "input_image"), "system": ("input_text",), "assistant": ("output_text", "text")}
"""Maps roles to the types of their parts."""


def _read_item(value: Any) -> Item:
    """Check an item of the conversation, and set its id and status if they are missing.

    Raises:
        EventError: the item is invalid.
    """
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in ("message", "function_call", "function_call_output"):
        message = "item.type: must be message, function_call or function_call_output"
        raise EventError(message, "invalid_value", "item.type")
    id = value.get("id")
    if id is not None and (not isinstance(id, str) or not 0 < len(id) <= 256):
        raise EventError("item.id: must be a string of 1 to 256 characters", "invalid_value", "item.id")
    if kind == "message":
        _check_parts(value)
    item = {**value, "object": "realtime.item", "status": value.get("status") or "completed"}
    return Item.of({**item, "id": id or f"item_{new_digits()}"})


def _check_parts(item: Mapping[str, Any]) -> None:
    role, content = item.get("role"), item.get("content")
    parts = _PARTS.get(role) if isinstance(role, str) else None
    if parts is None:
        raise EventError("item.role: must be user, system or assistant", "invalid_value", "item.role")
    if not isinstance(content, list):
        raise EventError("item.content: must be a list of parts", "invalid_type", "item.content")
    for number, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") not in parts:
            at = f"item.content[{number}].type"
            raise EventError(f"{at}: must be {' or '.join(parts)}", "not_supported", at)


def _request_body(settings: Mapping[str, Any], items: Sequence[Item], metadata: object) -> bytes:
    """Return the body of a request for /v1/responses."""
    body = {name: value for name, value in settings.items() if name in _SETTINGS and value not in (None, "", [], "inf")}
    if metadata is not None:
        body["metadata"] = metadata
    input = raw(b"[%b]" % b",".join(item.body for item in items))
    return dumps({**body, "input": input, "stream": True, "store": False})


def _input_item(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return an item as /v1/responses reads it."""
    fields = {name: value for name, value in item.items() if name != "object"}
    if item["type"] == "message" and item["role"] == "assistant":
        fields["content"] = [{"type": "output_text", "text": part.get("text", "")} for part in item["content"]]
    return fields


def _output_item(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return an item of a response as realtime clients read it."""
    fields = {**item, "object": "realtime.item"}
    if item["type"] == "message":
        fields["content"] = [{"type": "output_text", "text": part["text"]} for part in item["content"]]
    return fields


_HANDLERS = {
    "session.update": RealtimeReader._update,
    "conversation.item.create": RealtimeReader._add_item,
    "conversation.item.delete": RealtimeReader._delete_item,
    "conversation.item.retrieve": RealtimeReader._show_item,
    "conversation.item.truncate": RealtimeReader._refuse_truncation,
    "response.create": RealtimeReader._respond,
    "response.cancel": RealtimeReader._cancel,
    "input_audio_buffer.append": RealtimeReader._append,
    "input_audio_buffer.clear": RealtimeReader._clear,
    "input_audio_buffer.commit": RealtimeReader._commit,
}
"""Maps the types of client events to methods of the reader."""
