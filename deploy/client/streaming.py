"""Read a streamed response as events, in any of the schemas of LMI, TGI, Triton and OpenAI."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, TypeAlias

from deploy.client.errors import FROM_AWS, ModelFailed, RequestFailed, StreamBroken, failure
from handler.core.event_stream import EventReader

# -- events of a streamed response, from the JSON values of any schema -------------------------------------------------
# LMI's lines, TGI's and Triton's events and OpenAI's chunks all become `Token`s and a `Finish`. Nothing is dropped:
# each event keeps its JSON value, and any other value becomes `Raw`.


@dataclass(frozen=True)
class Token:
    """A piece of the generated text, usually one token.

    Attributes:
        text: text of the piece as it arrived.
        id: the ID of the token, or None if the schema has no token IDs.
        logprob: natural logarithm of the token's probability, or None if it was not requested.
        special: whether the token is a special token.
        shown: whether `text` is part of the generated text. TGI's special tokens are not.
        index: index of the choice, or 0 if the schema has no index.
        data: the JSON value of the event.
    """

    text: str
    id: int | None = None
    logprob: float | None = None
    special: bool = False
    shown: bool = True
    index: int = 0
    data: Any = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Finish:
    """The end of a choice.

    Attributes:
        reason: finish reason in the schema's terms, such as `length`, `eos_token` or `stop`, or None if there is none.
        generated_text: whole text, or None if the schema does not repeat it.
        details: further fields of the final event, under their own names.
        index: index of the choice, or 0 if the schema has no index.
        data: the JSON value of the event.
    """

    reason: str | None
    generated_text: str | None = None
    details: Mapping[str, Any] | None = None
    index: int = 0
    data: Any = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Raw:
    """A value of any other kind: part of a tool call, usage, the output of a custom formatter, or plain text."""

    data: Any


Event: TypeAlias = Token | Finish | Raw


def events_of(value: Any) -> list[Event]:
    """Return the events in one JSON value. A value of an unknown schema is returned as `Raw`.

    Raises:
        ModelFailed: the value reports a failure of the model.
    """
    try:
        return list(_events(value))
    except (AttributeError, TypeError):  # such as a list where an object is expected
        return [Raw(value)]


def _events(value: Any) -> Iterator[Event]:
    match value:
        case {"error": error} if error:
            raise _failure(error, value)
        case {"details": {"finish_reason": "error"}}:
            raise _failure("the model failed", value)
        case {"choices": [*choices]} if choices and all(isinstance(choice, dict) for choice in choices):
            for choice in choices:
                yield from _choice(choice, value)
        case {"token": {"text": str()}}:
            yield from _line(value)
        case {"text_output": str(text)}:
            logprob = value.get("output_log_probs")
            yield Token(text, logprob=logprob if isinstance(logprob, float) else None, data=value)
            if reason := value.get("finish_reason"):
                yield Finish(reason, data=value)
        case {"generated_text": str(text)}:
            details = value.get("details")
            yield Finish((details or {}).get("finish_reason"), text, details, data=value)
        case {"outputs": [*texts]} if texts and all(isinstance(text, str) for text in texts):
            yield Token("".join(texts), data=value)  # LMI's streams before 0.27
        case [*values] if values and all(isinstance(item, dict) and "generated_text" in item for item in values):
            for index, item in enumerate(values):  # TGI's responses without streaming
                details = item.get("details")
                yield Finish((details or {}).get("finish_reason"), item["generated_text"], details, index, item)
        case _:
            yield Raw(value)


def _line(value: Mapping[str, Any]) -> Iterator[Event]:
    """Yield the events in a line from LMI or TGI, whose schemas differ in the names of two fields."""
    token = value["token"]
    tgi = "logprob" in token
    special = bool(token.get("special" if tgi else "special_token", False))
    yield Token(
        token["text"],
        token.get("id"),
        token.get("logprob" if tgi else "log_prob"),
        special,
        shown=not (tgi and special),
        data=value,
    )
    text, details = value.get("generated_text"), value.get("details")
    if text is not None or details is not None:
        yield Finish((details or {}).get("finish_reason"), text, details, data=value)


def _choice(choice: Mapping[str, Any], value: Mapping[str, Any]) -> Iterator[Event]:
    """Yield the events of a choice in OpenAI's schema for chats or completions, streaming or non-streaming."""
    index, reason = choice.get("index", 0), choice.get("finish_reason")
    if not isinstance(index, int):
        raise TypeError(index)
    if (message := choice.get("message")) is not None:
        yield Finish(reason, message.get("content"), value.get("usage"), index, value)
        return
    delta = choice.get("delta")
    text = choice.get("text") if delta is None else delta.get("content")
    more = any(part is not None for name, part in (delta or {}).items() if name not in ("role", "content"))
    if text or (text is not None and not more):
        yield Token(text, logprob=_logprob(choice.get("logprobs")), index=index, data=value)
    elif more or reason is None:
        yield Raw(value)  # part of a tool call, or of the reasoning
    if reason is not None:
        yield Finish(reason, None, value.get("usage"), index, value)


def _logprob(logprobs: Any) -> float | None:
    """Return the log-probability of a piece that consists of a single token, or None."""
    match logprobs:
        case {"content": [{"logprob": float(value_)}]} | {"token_logprobs": [float(value_)]}:
            return value_
    return None


def _failure(error: Any, value: Mapping[str, Any]) -> ModelFailed:
    match error:
        case {"message": str(message)}:
            text, status = message, error.get("code")
        case _:
            text, status = str(error), value.get("code")
    kind = value.get("error_type") or (error.get("type") if isinstance(error, dict) else None)
    return ModelFailed(
        f"the model failed during the response: {text}" + (f" ({kind})" if kind else ""),
        original_status=status if isinstance(status, int) else None,
    )


class ResponseEnd:
    """Recognizes the last message of a response on a connection that stays open.

    Args:
        body: the request.
    """

    def __init__(self, body: bytes) -> None:
        request = json_object(body)
        parameters = request.get("parameters")
        number = request.get("n", parameters.get("n") if isinstance(parameters, dict) else None)
        options = request.get("stream_options")
        self._is_stream = request.get("stream") is True
        self._has_usage = isinstance(options, dict) and options.get("include_usage") is True
        self._num_running = number if isinstance(number, int) else 1

    def is_last(self, message: bytes) -> bool:
        """Return whether this is the response's last message. Call it for each message."""
        value = json_object(message)
        try:
            events = events_of(value)
        except ModelFailed:
            return True
        self._num_running -= sum(isinstance(event, Finish) for event in events)
        if not self._is_stream:
            return True
        return self._num_running <= 0 and (not self._has_usage or value.get("choices") == [])


def json_object(data: bytes) -> dict[str, Any]:
    """Return the JSON object in `data`, or {} for anything else."""
    try:
        value = json.loads(data)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


# -- split a response's bytes into values: JSON values, server-sent events, or plain text ------------------------------
# SageMaker may split PayloadParts anywhere, even inside a character, or send several events in one. So bytes are kept
# until a value is complete, and only then decoded. `feed(data)` and `flush()` of all readers return complete values.

_OPENING = b"{["
_BLANK = re.compile(rb"\s*")
_OUTSIDE = re.compile(rb'["{}\[\]]')
_INSIDE = re.compile(rb'["\\]')
_MAX_EVENT = 64 << 20  # bytes
_FIELDS = (b"data:", b"event:", b"id:", b"retry:", b":")


class Truncated(Exception):
    """The error for a response that ends inside a value. `remainder` is the incomplete value."""

    def __init__(self, remainder: bytes) -> None:
        super().__init__(remainder)
        self.remainder = remainder


class Reader(Protocol):
    def feed(self, data: bytes) -> list[Any]:
        """Add bytes, and return the values that they complete.

        Raises:
            ValueError: an event is too large.
        """

    def flush(self) -> list[Any]:
        """Return the values that the end of the input completes.

        Raises:
            Truncated: the response ended inside a value.
        """


class JsonValues:
    """A reader of JSON values, which may be one per line, span several lines, or have no newlines between them.

    An object or array ends with its last bracket, and any other value ends with its line. A value that is not JSON
    is returned as text.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()  # starts with the first byte of a value
        self._scanned = 0  # number of bytes of the buffer that were scanned
        self._depth = 0
        self._in_string = False

    def feed(self, data: bytes) -> list[Any]:
        self._buffer += data
        results: list[Any] = []
        while (end := self._end()) is not None:
            results.append(_parse(bytes(self._buffer[:end]).strip()))
            del self._buffer[:end]
            self._scanned = 0
        return results

    def flush(self) -> list[Any]:
        if self._depth:
            raise Truncated(bytes(self._buffer))
        value = bytes(self._buffer).strip()
        self._buffer.clear()
        return [_parse(value)] if value else []

    def _end(self) -> int | None:
        """Return the index at which the first value ends, or None if the value is incomplete."""
        if not self._scanned:
            del self._buffer[: _BLANK.match(self._buffer).end()]  # type: ignore[union-attr]  # matches always
        if not self._buffer:
            return None
        if self._buffer[0] not in _OPENING:
            at = self._buffer.find(b"\n", self._scanned)
            self._scanned = len(self._buffer)
            return None if at < 0 else at
        while (sign := (_INSIDE if self._in_string else _OUTSIDE).search(self._buffer, self._scanned)) is not None:
            if sign[0] == b"\\":
                if sign.end() == len(self._buffer):  # the escaped character is in the next piece
                    self._scanned = sign.start()
                    return None
                self._scanned = sign.end() + 1
                continue
            self._scanned = sign.end()
            if sign[0] == b'"':
                self._in_string = not self._in_string
                continue
            self._depth += 1 if sign[0] in b"{[" else -1
            if not self._depth:
                return self._scanned
        self._scanned = len(self._buffer)
        return None


class ServerSentEvents:
    """A reader of the values in server-sent events. Names and comments, such as keep-alives, are dropped.

    There are several values in an event if a server omits the empty line between events. `[DONE]` is not one.
    """

    def __init__(self) -> None:
        self._events = EventReader(_MAX_EVENT)

    def feed(self, data: bytes) -> list[Any]:
        results: list[Any] = []
        for event in self._events.feed(data):
            try:
                results += _values(event.data)
            except Truncated as cut:  # the value is incomplete, although its event is complete
                results.append(cut.remainder.decode("utf-8", "replace"))
        return results

    def flush(self) -> list[Any]:
        return [value for event in self._events.feed(b"\n\n") for value in _values(event.data)]


def _values(data: bytes) -> list[Any]:
    values = JsonValues()
    results = [*values.feed(data), *values.flush()]
    return [value for value in results if value != "[DONE]"]


class PlainText:
    """A reader of plain text that returns only complete characters."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes) -> list[Any]:
        return [text] if (text := self._decoder.decode(data)) else []

    def flush(self) -> list[Any]:
        return [text] if (text := self._decoder.decode(b"", final=True)) else []


def reader_for(content_type: str, beginning: bytes) -> Reader | None:
    """Return a reader for the format of the response, or None if its beginning is too short to decide.

    A content type such as text/plain means plain text. For other types, the beginning takes precedence, as a proxy may
    have changed the type. If the beginning fits several readers, the content type decides.

    Args:
        beginning: first bytes of the response, without a byte order mark.
    """
    kind = content_type.partition(";")[0].strip().lower()
    events = kind == "text/event-stream"
    start = beginning.lstrip()
    if kind.startswith("text/") and not events:
        return PlainText()
    if start.startswith((b"{", b"[")):
        return JsonValues()
    if start.startswith(_FIELDS) or (events and start):
        return ServerSentEvents()
    if not start or any(field.startswith(start) for field in _FIELDS):
        return None
    return JsonValues() if "json" in kind else PlainText()


def _parse(value: bytes) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError):  # nested deeper than Python's limit
        return value.decode("utf-8", "replace")


# -- convert the bytes of a streamed response to events, and check at the end that it is complete ----------------------


class ResponseEvents:
    """A reader that converts the bytes of a response to events.

    The events do not depend on how the bytes are split, except that plain text may be split differently.

    Args:
        content_type: content type that the container sent, or "" if it is unknown.

    Attributes:
        arrived: events that have arrived so far.
    """

    def __init__(self, content_type: str = "") -> None:
        self._content_type = content_type
        self._beginning = b""
        self._reader: Reader | None = None
        self._open: set[int] = set()  # choices that have started, in schemas that mark the end of each choice
        self.arrived: list[Event] = []

    def feed(self, data: bytes) -> Iterator[Event]:
        """Add bytes, and yield the events that they complete.

        Raises:
            ModelFailed: the response reports a failure. All earlier events are yielded first.
            StreamBroken: an event is too large.
        """
        if self._reader is None:
            self._beginning += data
            if codecs.BOM_UTF8.startswith(self._beginning):
                return  # nothing yet, or half a byte order mark
            data = self._beginning.removeprefix(codecs.BOM_UTF8)
            self._reader = reader_for(self._content_type, data)
            if self._reader is None:
                return
        try:
            values = self._reader.feed(data)
        except ValueError as error:
            raise self.with_arrived(StreamBroken(f"the response cannot be read: {error}")) from None
        yield from self._events(values)

    def finish(self) -> Iterator[Event]:
        """Yield the remaining events after the last bytes have been fed.

        Raises:
            StreamBroken: the response is incomplete.
            ModelFailed: the response reports a failure.
        """
        values: list[object] = []
        if self._reader is None:
            self._reader = JsonValues() if "json" in self._content_type else PlainText()
            values = self._reader.feed(self._beginning.removeprefix(codecs.BOM_UTF8).strip())
        try:
            values += self._reader.flush()
        except Truncated as cut:
            yield from self._events(values)
            beginning = cut.remainder[:80].decode("utf-8", "replace")
            raise self.with_arrived(StreamBroken(f"the response ended inside a value: {beginning}")) from None
        yield from self._events(values)
        if self._open:
            raise self.with_arrived(StreamBroken("the response ended without a final event"))

    def with_arrived(self, error: RequestFailed) -> RequestFailed:
        """Return the error after adding the events that arrived before it."""
        error.arrived = tuple(self.arrived)
        return error

    def _events(self, values: list[object]) -> Iterator[Event]:
        for value in values:
            try:
                for event in events_of(value):
                    self._note(event)
                    yield event
            except RequestFailed as error:
                self._open.clear()
                raise self.with_arrived(error) from None

    def _note(self, event: Event) -> None:
        self.arrived.append(event)
        if isinstance(event, Token) and event.data.keys() & {"token", "choices"}:
            self._open.add(event.index)
        elif isinstance(event, Finish):
            self._open.discard(event.index)


class Stream:
    """The events of a response as they arrive. A stream can be iterated only once, and only in one thread.

    Closing the stream early, with `close` or at the end of the `with` statement, closes the connection. This stops the
    generation if the container notices.

    Args:
        parts: parts of the response body.
        close: function that closes the connection.

    Attributes:
        content_type: content type that the container sent.
        variant: production variant that serves the request.
    """

    def __init__(self, parts: Iterable[bytes], content_type: str, close: Callable[[], Any], variant: str = "") -> None:
        self._parts = parts
        self._close = close
        self._reader = ResponseEvents(content_type)
        self._events = self._read()
        self.content_type = content_type
        self.variant = variant

    def __iter__(self) -> Iterator[Event]:
        """Yield the events. Raises RequestFailed, whose `arrived` contains the events before the failure."""
        return self._events

    def text(self, index: int = 0) -> Iterator[str]:
        """Yield the pieces of the generated text as they arrive, or the whole text if the response is not streamed.

        Args:
            index: index of the choice, if several were requested.
        """
        pieces = False
        for event in self._events:
            if isinstance(event, Token) and event.index == index:
                pieces = True
                if event.shown and event.text:
                    yield event.text
            elif isinstance(event, Finish) and event.index == index and not pieces and event.generated_text:
                yield event.generated_text

    def bytes(self) -> Iterator[bytes]:
        """Yield the bytes of the response as they arrive, instead of events.

        Raises:
            RequestFailed: the connection failed. A failure of the model is part of the bytes.
        """
        try:
            yield from self._parts
        except FROM_AWS as error:
            raise failure(error) from error
        finally:
            self.close()

    @property
    def arrived(self) -> tuple[Event, ...]:
        """Return the events that have arrived so far."""
        return tuple(self._reader.arrived)

    @property
    def finish(self) -> Finish | None:
        """Return the `Finish` event that arrived first, or None if no choice has ended."""
        return next((event for event in self._reader.arrived if isinstance(event, Finish)), None)

    def close(self) -> None:
        self._close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _read(self) -> Iterator[Event]:
        try:
            for part in self._parts:
                yield from self._reader.feed(part)
            yield from self._reader.finish()
        except FROM_AWS as error:
            raise self._reader.with_arrived(failure(error)) from error
        finally:
            self.close()


def stream_of(response: dict[str, Any]) -> Stream:
    """Return the stream of events of a response from InvokeEndpointWithResponseStream."""
    body = response["Body"]
    parts = (event["PayloadPart"]["Bytes"] for event in body if "PayloadPart" in event)
    return Stream(parts, response.get("ContentType", ""), body.close, response.get("InvokedProductionVariant", ""))
