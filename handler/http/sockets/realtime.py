"""Realtime sessions over a WebSocket: text turns and transcription in OpenAI's protocol, transcription in vLLM's.

A text turn is a request for /v1/responses whose input is the conversation, and a transcription is a request for
/v1/audio/transcriptions. See https://developers.openai.com/api/docs/guides/realtime and
vllm/entrypoints/speech_to_text/realtime.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from websockets.frames import CloseCode

from handler.core.errors import ServingError
from handler.core.framing import decoded_as_json, dumps, dumps_decoded, raw
from handler.core.media import MediaSource
from handler.core.values import Task, new_digits
from handler.http.sockets.conversation import (
    ConversationItem,
    RealtimeConversation,
    check_outputs,
    read_item,
    readable,
)
from handler.http.sockets.session import MessageReader, SocketSession
from handler.http.sockets.settings import REQUEST_SETTINGS, EventError, object_in, read_settings
from handler.http.sockets.transcription import (
    AudioBuffer,
    FlatTranscription,
    Transcriber,
    audio_settings,
    check_model,
    read_audio,
)
from handler.http.sockets.turn import TextTurn
from handler.protocols.kernel.readers import show
from handler.protocols.responses.conversations import check_item

RESPONSES = "/v1/responses"

_OUT_OF_BAND = "out-of-band"
"""The lane of out-of-band responses, which are not added to the conversation."""


def _is_flat(event: Mapping[str, Any]) -> bool:
    """Return whether only clients of vLLM send an event."""
    if event.get("type") == "session.update":
        return "model" in event and "session" not in event
    return event.get("type") == "input_audio_buffer.commit" and "final" in event


class RealtimeReader(MessageReader):
    """Reads the events of realtime sessions.

    Args:
        query: query string, in which clients may choose the model, and the kind of session by `intent`.
    """

    def __init__(self, session: SocketSession, query: Mapping[str, str] = MappingProxyType({})) -> None:
        self._session = session
        self._model = query.get("model")
        self._id = f"sess_{new_digits()}"
        self._settings: dict[str, Any] = {"output_modalities": ["text"], "instructions": "", "tools": []}
        self._memory = session.hold(0)  # of the settings
        self._conversation = RealtimeConversation(session.hold)
        self._turns: dict[str, TextTurn] = {}  # the responses that have not ended, by id
        self._num_events = itertools.count(1)
        self._audio = AudioBuffer(session.hold(0))
        self._transcription: Transcriber | None = None
        if query.get("intent") == "transcription" or session.model.context.task is Task.TRANSCRIPTION:
            self._transcription = Transcriber()

    def begin(self) -> None:
        """Send `session.created`, which clients of OpenAI and of vLLM both read, or refuse the model in the query."""
        try:
            check_model(self._session, self._model, "model")
        except EventError as error:
            self._fail(error)
            return self._session.socket.close(CloseCode.POLICY_VIOLATION, "the model is not served here")
        if self._model is not None:
            self._settings["model"] = self._model
        described = self._description(self._settings, self._transcription)
        self._send("session.created", id=self._id, created=int(time.time()), session=described)

    async def read(self, message: bytes) -> None:
        try:
            event = await self._session.decode(message)
        except ServingError as error:
            return self._fail(error)
        kind, id = event.get("type"), event.get("event_id")
        if _is_flat(event):
            self._session.reader = FlatTranscription(self._session)
            return await self._session.reader.read(message)
        handle = _HANDLERS.get(kind) if isinstance(kind, str) else None
        try:
            if handle is None:
                raise EventError(f"type={show(kind)}: no such event", "unknown_event", "type")
            await handle(self, event, len(message))
        except ServingError as error:
            self._fail(error, id)

    def expire(self) -> None:
        message = "the session has reached its maximum lifetime; open a new one"
        self._fail(EventError(message, "session_expired"))

    # -- events of the server ------------------------------------------------------------------------------------

    def _send(self, kind: str, /, **fields: Any) -> None:
        self._session.socket.send_text(dumps_decoded(self._event(kind, **fields)))

    def _event(self, kind: str, /, **fields: Any) -> dict[str, Any]:
        return {"type": kind, "event_id": f"event_{next(self._num_events)}", **fields}

    async def _encoded(self, size: int, kind: str, /, **fields: Any) -> bytes:
        """Return an event of about `size` bytes as JSON.

        A large one is encoded in turns, because a few bytes of the client may request it.
        """
        return await self._session.call(size, functools.partial(dumps_decoded, self._event(kind, **fields)))

    async def _show(self, item: ConversationItem, kind: str, **fields: Any) -> None:
        """Send an event with an item."""
        event = await self._encoded(item.size, f"conversation.item.{kind}", **fields, item=raw(item.event))
        self._session.socket.send_text(event)

    def _fail(self, error: ServingError, id: object = None) -> None:
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
        self._send("error", error=body)

    def _description(self, settings: Mapping[str, Any], transcription: Transcriber | None) -> dict[str, Any]:
        kind = "realtime" if transcription is None else "transcription"
        model = settings.get("model") or self._session.model.context.own_name
        session = {"type": kind, "object": "realtime.session", "id": self._id}
        if transcription is None:
            return {**session, **settings, "model": model}
        return {**session, "model": model, "audio": {"input": transcription.settings}}

    # -- events of the client ------------------------------------------------------------------------------------

    async def _update(self, event: Mapping[str, Any], size: int) -> None:
        new = object_in(event, "session")
        settings, transcription = self._settings, None
        if new.get("type") == "transcription":
            transcription = self._transcribe(new)
        else:
            check_model(self._session, new.get("model"), "session.model")
            read = await self._session.call(size, functools.partial(read_settings, new, "session."))
            settings = {**settings, **read}
        described = self._description(settings, transcription)
        updated = await self._encoded(size + self._memory.size, "session.updated", session=described)
        self._memory.set(len(updated))
        self._settings, self._transcription = settings, transcription
        self._session.socket.send_text(updated)

    def _transcribe(self, new: Mapping[str, Any]) -> Transcriber:
        """Return the new settings of a transcription session."""
        if self._conversation.items and self._transcription is None:
            at = "session.type"
            raise EventError(f"{at}: cannot change, because the session has a conversation", "invalid_value", at)
        earlier = self._transcription or Transcriber()
        check_model(self._session, new.get("model"), "session.model")
        settings = audio_settings(new, earlier)
        check_model(self._session, settings.fields.get("model"), "session.audio.input.transcription.model")
        if self._audio.size and (settings.kind, settings.rate) != (earlier.kind, earlier.rate):
            at = "session.audio.input.format"
            message = f"{at}: the buffer contains audio in another format; commit or clear it first"
            raise EventError(message, "invalid_value", at)
        return settings

    async def _add_item(self, event: Mapping[str, Any], size: int) -> None:
        previous = event.get("previous_item_id")
        calls = self._conversation.calls_before(previous)
        read = functools.partial(self._read_new, object_in(event, "item"), calls)
        item, media = await self._session.call(size, read)
        await self._session.model.admission.check_media(media, self._session.owner)
        await self._add(item, previous)

    def _read_new(
        self, value: dict[str, Any], calls: Mapping[str, str]
    ) -> tuple[ConversationItem, Sequence[MediaSource]]:
        """Read an item after the calls with these ids, and return it with its media, if a response can read it."""
        media: list[MediaSource] = []
        context, owner = self._session.model.context, self._session.owner
        return read_item(value, lambda item: media.extend(check_item(item, "item", context, owner, calls))), media

    async def _add(self, item: ConversationItem, previous: object = None) -> None:
        before = self._conversation.add(item, previous)
        for kind in ("added", "done"):
            await self._show(item, kind, previous_item_id=before)

    async def _delete_item(self, event: Mapping[str, Any], size: int) -> None:
        item = self._conversation.get(event.get("item_id"))
        self._conversation.remove(item)
        self._send("conversation.item.deleted", item_id=item.id)

    async def _retrieve_item(self, event: Mapping[str, Any], size: int) -> None:
        await self._show(self._conversation.get(event.get("item_id")), "retrieved")

    async def _refuse_truncation(self, event: Mapping[str, Any], size: int) -> None:
        message = "conversation.item.truncate cuts audio output, which is not supported"
        raise EventError(message, "not_supported", "type")

    async def _respond(self, event: Mapping[str, Any], size: int) -> None:
        if self._transcription is not None:
            raise EventError("responses cannot be created in a transcription session", "not_supported", "type")
        fields = object_in(event, "response") if event.get("response") is not None else {}
        target = fields.get("conversation", "auto")
        if target not in ("auto", "none"):
            at = "response.conversation"
            raise EventError(f"{at}: must be auto or none", "invalid_value", at)
        joins = target == "auto"
        if joins and self._active is not None:
            code = "conversation_already_has_active_response"
            raise EventError("the conversation has an active response; cancel it, or wait for its end", code)
        size += self._memory.size + self._conversation.size
        turn, body = await self._session.call(size, functools.partial(self._turn_of, fields, joins=joins))
        self._session.start("" if joins else _OUT_OF_BAND, len(body), functools.partial(self._run, body, turn))
        self._turns[turn.id] = turn

    def _turn_of(self, fields: Mapping[str, Any], *, joins: bool) -> tuple[TextTurn, bytes]:
        """Return the turn for the fields of a response, and the body of its request."""
        items = [*self._conversation.items.values()]
        if "input" in fields:
            items = [self._input_item(item) for item in _list(fields, "input")]
        items = readable(items)
        check_outputs(items)
        size = sum(len(item.input) for item in items)
        limit = self._session.model.config.max_request_size
        if size > limit:
            message = f"the items have {size} bytes in total; at most {limit} are allowed"
            raise EventError(message, "input_too_long")
        settings = {**self._settings, **read_settings(fields, "response.")}
        metadata = None if fields.get("metadata") is None else decoded_as_json(fields["metadata"])
        turn = functools.partial(TextTurn, self._session.socket, self._send, settings, metadata)
        body = _request_body(settings, items, metadata)
        return (turn(self._conversation.id, self._put_output) if joins else turn()), body

    def _input_item(self, item: Any) -> ConversationItem:
        if isinstance(item, dict) and item.get("type") == "item_reference":
            return self._conversation.get(item.get("id"))
        return read_item(item)

    async def _run(self, body: bytes, turn: TextTurn) -> None:
        try:
            if not turn.is_over:
                await self._session.respond(RESPONSES, body, turn)
        finally:
            turn.close()
            del self._turns[turn.id]

    @property
    def _active(self) -> TextTurn | None:
        """The response whose items are added to the conversation."""
        turns = (turn for turn in self._turns.values() if turn.conversation_id is not None)
        return next((turn for turn in turns if not turn.is_over), None)

    async def _cancel(self, event: Mapping[str, Any], size: int) -> None:
        id = event.get("response_id")
        turn = self._active if id is None else self._turns.get(id) if isinstance(id, str) else None
        if turn is None or turn.is_over:
            message = "there is no active response, or it has another id"
            raise EventError(message, "response_cancel_not_active", "response_id")
        turn.cancel()

    def _put_output(self, kind: str, fields: dict[str, Any]) -> None:
        """Add an item that a response begins to the conversation, or replace it when it ends, and tell the client.

        Args:
            kind: "added" or "done".
        """
        item = ConversationItem.of_response(fields)
        put = self._conversation.add if kind == "added" else self._conversation.replace
        try:
            put(item)
        except ServingError as error:
            self._fail(error)
        if self._conversation.items.get(item.id) is item:
            before = self._conversation.id_before(item.id)
            self._send(f"conversation.item.{kind}", previous_item_id=before, item=fields)

    # -- audio ---------------------------------------------------------------------------------------------------

    def _need_transcription(self) -> Transcriber:
        if self._transcription is None:
            message = "the model does not read audio; open a session of type transcription on a model that transcribes"
            raise EventError(message, "not_supported", "type")
        return self._transcription

    async def _append(self, event: Mapping[str, Any], size: int) -> None:
        transcription = self._need_transcription()
        audio = await self._session.call(size, functools.partial(read_audio, event.get("audio")))
        self._audio.append(transcription, audio)

    async def _clear(self, event: Mapping[str, Any], size: int) -> None:
        self._audio.take()
        self._send("input_audio_buffer.cleared")

    async def _commit(self, event: Mapping[str, Any], size: int) -> None:
        transcription = self._need_transcription()
        if not self._audio.size:
            raise EventError("the buffer has no audio", "input_audio_buffer_commit_empty")
        self._conversation.check_room()
        item = _audio_item()
        audio = self._audio.take()
        transcribe = functools.partial(transcription.run, self._session, audio, self._send, item.id)
        self._session.start("", len(audio), transcribe)
        previous = self._conversation.last_id
        self._send("input_audio_buffer.committed", item_id=item.id, previous_item_id=previous)
        await self._add(item)


# -- fields ------------------------------------------------------------------------------------------------------------


def _list(fields: Mapping[str, Any], name: str) -> list[Any]:
    value = fields[name]
    if not isinstance(value, list):
        raise EventError(f"response.{name}: must be a list", "invalid_type", f"response.{name}")
    return value


def _audio_item() -> ConversationItem:
    return ConversationItem.of(
        {
            "id": f"item_{new_digits()}",
            "object": "realtime.item",
            "type": "message",
            "role": "user",
            "content": [{"type": "input_audio", "transcript": None}],
            "status": "completed",
        }
    )


def _request_body(settings: Mapping[str, Any], items: Sequence[ConversationItem], metadata: object) -> bytes:
    """Return the body of a request for /v1/responses."""
    body = {name: settings[name] for name in REQUEST_SETTINGS if settings.get(name) not in (None, "", [], "inf")}
    if metadata is not None:
        body["metadata"] = metadata
    input = raw(b"[%b]" % b",".join(item.input for item in items))
    return dumps({**body, "input": input, "stream": True, "store": False})


_HANDLERS = {
    "session.update": RealtimeReader._update,
    "conversation.item.create": RealtimeReader._add_item,
    "conversation.item.delete": RealtimeReader._delete_item,
    "conversation.item.retrieve": RealtimeReader._retrieve_item,
    "conversation.item.truncate": RealtimeReader._refuse_truncation,
    "response.create": RealtimeReader._respond,
    "response.cancel": RealtimeReader._cancel,
    "input_audio_buffer.append": RealtimeReader._append,
    "input_audio_buffer.clear": RealtimeReader._clear,
    "input_audio_buffer.commit": RealtimeReader._commit,
}
"""Maps the types of client events to methods of the reader."""
