"""Transcription over a WebSocket: audio is appended to a buffer, and committed audio is transcribed."""

from __future__ import annotations

import base64
import binascii
import functools
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

from handler.core.errors import ServingError
from handler.core.framing import dumps, loads
from handler.core.values import new_secret
from handler.http.sockets.exchange import EventSender
from handler.http.sockets.session import MessageReader, SocketSession
from handler.http.sockets.settings import EventError
from handler.http.sockets.turn import Send
from handler.protocols.kernel.context import NO_REQUEST
from handler.protocols.kernel.readers import show
from handler.protocols.openai.request import read_model
from handler.serving.quota import Share

PATH = "/v1/audio/transcriptions"
MAX_SECONDS = 600.0  # maximum length of the audio in a buffer

_RATES = (16000, 24000, 48000)
_CODES = {"audio/pcm": (1, 16), "audio/pcma": (6, 8), "audio/pcmu": (7, 8)}
"""Maps formats to their number in a WAV file, and to their bits per sample."""


class Transcriber:
    """The settings of a transcription session, and its requests.

    Attributes:
        kind: format of the audio, such as "audio/pcm".
        rate: samples per second.
        fields: fields of the requests, such as the language.
    """

    def __init__(self, kind: str = "audio/pcm", rate: int = 24000, fields: Mapping[str, Any] | None = None) -> None:
        self.kind = kind
        self.rate = rate
        self.fields = fields or {}

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings as OpenAI's API shows them."""
        format = {"type": self.kind, **({"rate": self.rate} if self.kind == "audio/pcm" else {})}
        return {"format": format, "transcription": {**self.fields}, "turn_detection": None, "noise_reduction": None}

    @property
    def sample_size(self) -> int:
        """Return the number of bytes of a sample."""
        return _CODES[self.kind][1] // 8

    def file(self, audio: bytes | bytearray) -> bytes:
        """Return a WAV file with samples of the format."""
        code, bits = _CODES[self.kind]
        num_bytes = bits // 8
        head = struct.pack("<HHIIHH", code, 1, self.rate, self.rate * num_bytes, num_bytes, bits)
        chunks = b"fmt " + struct.pack("<I", len(head)) + head + b"data" + struct.pack("<I", len(audio))
        size = struct.pack("<I", 4 + len(chunks) + len(audio))
        return b"".join([b"RIFF", size, b"WAVE", chunks, audio])

    async def run(self, session: SocketSession, audio: bytes | bytearray, send: Send, item: str) -> None:
        """Transcribe audio, and send the events of OpenAI's API for its item."""
        await self.transcribe(session, audio, _Transcript(session, send, item))

    async def transcribe(self, session: SocketSession, audio: bytes | bytearray, output: EventSender) -> None:
        """Transcribe audio, and send the events of its transcript to an output."""
        form = await session.call(len(audio), functools.partial(self._form, audio))
        await session.respond(PATH, form.body, output, form.content_type)

    def _form(self, audio: bytes | bytearray) -> Form:
        return _form({**self.fields, "stream": "true"}, self.file(audio))


class Form(NamedTuple):
    """A form with a file. Unlike a string in JSON, the file may have any length."""

    content_type: str
    body: bytes


def _form(fields: Mapping[str, str], file: bytes) -> Form:
    boundary = new_secret()
    begin = f"--{boundary}\r\nContent-Disposition: form-data; name="
    parts = [f'{begin}"{name}"\r\n\r\n{value}\r\n' for name, value in fields.items()]
    head = "".join([*parts, f'{begin}"file"; filename="audio.wav"\r\n\r\n'])
    body = b"%b%b\r\n--%b--\r\n" % (head.encode(), file, boundary.encode())
    return Form(f"multipart/form-data; boundary={boundary}", body)


def check_model(session: SocketSession, name: object, param: str | None = None) -> None:
    """Check a model name in the same way as a request to a route.

    Raises:
        EventError: neither the model nor an adapter has this name.
    """
    try:
        read_model({"model": name}, session.model.context, NO_REQUEST)
    except ServingError as error:
        raise EventError(error.message, "model_not_found", param) from None


def audio_settings(session: Mapping[str, Any], earlier: Transcriber) -> Transcriber:
    """Return the settings of `session.update` for a transcription session.

    Raises:
        EventError: a setting is not supported.
    """
    for name, value in session.items():
        if value is not None and name not in ("type", "audio", "include", "id", "object", "model"):
            at = f"session.{name[:64]}"
            raise EventError(f"{at}: is not supported", "not_supported", at)
    if session.get("include"):
        raise EventError("session.include: is not supported", "not_supported", "session.include")
    audio = session.get("audio") or {}
    settings = (audio.get("input") if isinstance(audio, dict) else None) or {}
    if not isinstance(settings, dict):
        raise EventError("session.audio.input: must be an object", "invalid_type", "session.audio.input")
    for name in ("turn_detection", "noise_reduction"):
        if settings.get(name) is not None:
            at = f"session.audio.input.{name}"
            raise EventError(f"{at}: must be null, because the client must commit the audio", "not_supported", at)
    kind, rate = _format(settings.get("format"), earlier)
    fields = settings.get("transcription")
    return Transcriber(kind, rate, earlier.fields if fields is None else _fields(fields))


def _format(value: Any, earlier: Transcriber) -> tuple[str, int]:
    at = "session.audio.input.format"
    if value is None:
        return earlier.kind, earlier.rate
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in _CODES:
        raise EventError(f"{at}.type: must be {', '.join(_CODES)}", "not_supported", f"{at}.type")
    if kind != "audio/pcm":
        return kind, 8000
    rate = value.get("rate") or 24000
    if rate not in _RATES:
        raise EventError(f"{at}.rate: must be {' or '.join(map(str, _RATES))}", "not_supported", f"{at}.rate")
    return kind, int(rate)


def _fields(value: Any) -> dict[str, Any]:
    at = "session.audio.input.transcription"
    if not isinstance(value, dict):
        raise EventError(f"{at}: must be an object", "invalid_type", at)
    for name in value:
        if name not in ("model", "language", "prompt"):
            raise EventError(f"{at}.{name}: is not supported", "not_supported", f"{at}.{name}")
        if not isinstance(value[name], str | None):
            raise EventError(f"{at}.{name}: must be a string", "invalid_type", f"{at}.{name}")
    return {name: field for name, field in value.items() if field is not None}


class AudioBuffer:
    """The audio that a client has appended and not committed.

    Args:
        memory: memory that the audio holds.
    """

    def __init__(self, memory: Share) -> None:
        self._audio = bytearray()
        self._memory = memory

    @property
    def size(self) -> int:
        return len(self._audio)

    def append(self, settings: Transcriber, audio: bytes) -> None:
        """Append audio.

        Raises:
            ServingError: the audio is not whole samples, or there is too much of it.
        """
        if len(audio) % settings.sample_size:
            raise EventError(
                f"audio: must contain whole samples of {settings.sample_size} bytes", "invalid_audio_format", "audio"
            )
        if len(self._audio) + len(audio) > MAX_SECONDS * settings.rate * settings.sample_size:
            raise EventError(
                f"the buffer can hold {MAX_SECONDS:g} s of audio; commit it first", "buffer_overflow", "audio"
            )
        self._memory.take(len(audio))
        self._audio += audio

    def take(self) -> bytes | bytearray:
        """Remove the audio from the buffer, and return it."""
        audio, self._audio = self._audio, bytearray()
        self._memory.give_back()
        return audio


def read_audio(value: object) -> bytes:
    """Return audio that is sent as base64.

    Raises:
        EventError: it is invalid.
    """
    try:
        audio = base64.b64decode(value, validate=True) if isinstance(value, str) else b""
    except (binascii.Error, ValueError):
        audio = b""
    if not audio:
        raise EventError("audio: must be base64 of at least one sample", "invalid_audio", "audio")
    return audio


class _Transcript(EventSender):
    """The events of a transcript for an item of the conversation."""

    def __init__(self, session: SocketSession, send: Send, item: str) -> None:
        super().__init__(session.socket)
        self._send = send
        self._item = {"item_id": item, "content_index": 0}

    def event(self, event: bytes) -> None:
        value = loads(event)
        word = "conversation.item.input_audio_transcription"
        if value["type"] == "transcript.text.delta":
            self._send(f"{word}.delta", **self._item, delta=value["delta"])
        elif value["type"] == "transcript.text.done":
            self._send(f"{word}.completed", **self._item, transcript=value["text"], usage=value["usage"])
        else:
            self._fail(value)

    def error(self, event: dict[str, Any]) -> None:
        self._fail(event)

    def _fail(self, event: Mapping[str, Any]) -> None:
        error = {"type": "server_error", "message": event.get("message"), **event.get("error", {})}
        fields = {name: error.get(name) for name in ("type", "code", "message")}
        self._send("conversation.item.input_audio_transcription.failed", **self._item, error=fields)


# -- vLLM's protocol ---------------------------------------------------------------------------------------------------


class FlatTranscription(MessageReader):
    """Reads the events of vLLM's clients, whose audio has 16,000 samples per second."""

    def __init__(self, session: SocketSession) -> None:
        self._session = session
        self._transcription = Transcriber(rate=16000)
        self._audio = AudioBuffer(session.hold(0))
        self._is_checked = False

    async def read(self, message: bytes) -> None:
        try:
            event = await self._session.decode(message)
            audio = b""
            if event.get("type") == "input_audio_buffer.append":
                audio = await self._session.call(len(message), functools.partial(read_audio, event.get("audio")))
            self._read(event, audio)
        except ServingError as error:
            self._fail(error.message, getattr(error, "code", "invalid_json"))

    def expire(self) -> None:
        self._fail("the session has reached its maximum lifetime", "session_expired")

    def _read(self, event: Mapping[str, Any], audio: bytes) -> None:
        kind = event.get("type")
        if kind == "session.update":
            self._update(event)
        elif kind == "input_audio_buffer.append":
            self._audio.append(self._transcription, audio)
        elif kind != "input_audio_buffer.commit":
            raise EventError(f"Unknown event type: {show(kind)}", "unknown_event")
        elif not self._is_checked:
            raise EventError("send session.update with the model first", "model_not_validated")
        elif event.get("final"):
            samples = self._audio.take()
            if not samples:
                raise EventError("the buffer has no audio", "invalid_audio")
            output = _FlatTranscript(self._session.socket)
            self._session.start(
                "", len(samples), functools.partial(self._transcription.transcribe, self._session, samples, output)
            )

    def _update(self, event: Mapping[str, Any]) -> None:
        model = event.get("model")
        if not isinstance(model, str):
            raise EventError("session.update needs a model", "invalid_event")
        check_model(self._session, model)
        if event.get("include"):
            raise EventError("include: is not supported", "invalid_event")
        fields = {name: event[name] for name in ("model", "language", "prompt") if event.get(name) is not None}
        for name, value in fields.items():
            if not isinstance(value, str):
                raise EventError(f"{name}: must be a string", "invalid_event")
        self._transcription = Transcriber(rate=16000, fields=fields)
        self._is_checked = True

    def _fail(self, message: str, code: str) -> None:
        self._session.socket.send_text(dumps({"type": "error", "error": message, "code": code}))


class _FlatTranscript(EventSender):
    """The events of a transcript for vLLM's clients."""

    def event(self, event: bytes) -> None:
        value = loads(event)
        if value["type"] == "transcript.text.delta":
            super().event(dumps({"type": "transcription.delta", "delta": value["delta"], "logprobs": None}))
        elif value["type"] == "transcript.text.done":
            usage = value["usage"]
            counts = {
                "prompt_tokens": usage["input_tokens"],
                "completion_tokens": usage["output_tokens"],
                "total_tokens": usage["total_tokens"],
            }
            super().event(dumps({"type": "transcription.done", "text": value["text"], "usage": counts}))
        else:
            self.error(value)

    def error(self, event: dict[str, Any]) -> None:
        message = (event.get("error") or {}).get("message", "the audio could not be transcribed")
        super().event(dumps({"type": "error", "error": message, "code": "processing_error"}))
