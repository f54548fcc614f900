"""A streamed answer, while it is read."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, TypeAlias

from deploy.client.errors import FROM_AWS, ModelFailed, RequestFailed, StreamBroken, failure

# -- events of a streamed answer, from the JSON values of any schema ---------------------------------------------------
# LMI's lines, TGI's and Triton's events and OpenAI's chunks all become `Token`s and a `Finish`. Nothing is dropped:
# each event has its JSON value, and any other value is `Raw`.


@dataclass(frozen=True)
class Token:
    """A piece of the answer's text, usually one token.

    Attributes:
        text: the text as it arrived.
        id: the token's number; None: the schema has none.
        logprob: natural logarithm of its probability; None: not requested.
        special: whether it is a special token.
        shown: whether `text` is part of the answer's text; TGI's special tokens are not.
        index: number of the answer, if several were requested.
        data: the JSON value.
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
    """The end of an answer.

    Attributes:
        reason: in the schema's words (`length`, `eos_token`, `stop`, ...); None: the schema gives none.
        generated_text: the whole text; None: the schema does not repeat it.
        details: further fields of the end, under their names.
        index: number of the answer.
    """

    reason: str | None
    generated_text: str | None = None
    details: Mapping[str, Any] | None = None
    index: int = 0
    data: Any = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Raw:
    """Any other value: a part of tool calls, usage, a custom formatter's output, plain text."""

    data: Any


Event: TypeAlias = Token | Finish | Raw


def events_of(value: Any) -> list[Event]:
    """Return the events in one JSON value. A value of unknown form is `Raw`.

    Raises:
        ModelFailed: the value reports a failure of the model.
    """
    try:
        return list(_events(value))
    except (AttributeError, TypeError):  # a list where an object should be, and the like
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
            for index, item in enumerate(values):  # TGI's whole answers
                details = item.get("details")
                yield Finish((details or {}).get("finish_reason"), item["generated_text"], details, index, item)
        case _:
            yield Raw(value)


def _line(value: Mapping[str, Any]) -> Iterator[Event]:
    """Yield the events of a line of LMI or TGI, which differ in two names."""
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
    """Yield the events of one of OpenAI's choices: of a chat or a completion, streamed or whole."""
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
        yield Raw(value)  # of tool calls, or of a model's thoughts
    if reason is not None:
        yield Finish(reason, None, value.get("usage"), index, value)


def _logprob(logprobs: Any) -> float | None:
    """Return the log-probability of a piece that is one token."""
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
        f"the model failed while it answered: {text}" + (f" ({kind})" if kind else ""),
        original_status=status if isinstance(status, int) else None,
    )


# -- split an answer's bytes into values: JSON values, server-sent events, or plain text -------------------------------
# SageMaker cuts PayloadParts anywhere: within a character, or after several events. So bytes are kept until a value is
# complete, and only then decoded. All readers have `feed(data)` and `flush()`, which return complete values.

_OPENING = b"{["
_BLANK = re.compile(rb"\s*")
_OUTSIDE = re.compile(rb'["{}\[\]]')
_INSIDE = re.compile(rb'["\\]')
_END_OF_LINE = re.compile(rb"\r\n|\n|\r")
_FIELDS = (b"data:", b"event:", b"id:", b"retry:", b":")


class Truncated(Exception):
    """The answer ended within a value, which begins with `rest`."""

    def __init__(self, rest: bytes) -> None:
        super().__init__(rest)
        self.rest = rest


class Reader(Protocol):
    def feed(self, data: bytes) -> list[Any]:
        """Return the values that are complete now."""

    def flush(self) -> list[Any]:
        """Return the values that the end of the input completes.

        Raises:
            Truncated: the answer ended within a value.
        """


class JsonValues:
    """Reads JSON values: one a line, over several lines, or without line ends.

    An object or array ends with its last bracket, any other value with its line. A value that is not JSON is its text.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()  # from the first byte of a value on
        self._scanned = 0  # bytes of the buffer that were scanned
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
        """Return the end of the first value; None: it is not complete."""
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
    """Reads server-sent events by the HTML standard's rules. Comments, which keep a connection open, are dropped."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._scanned = 0  # bytes of the buffer without a line end
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[Any]:
        self._buffer += data
        return self._lines(last=False)

    def flush(self) -> list[Any]:
        results = self._lines(last=True)
        if self._buffer:  # the last line has no end
            self._line(bytes(self._buffer))
            self._buffer.clear()
        return results + self._event()

    def _lines(self, *, last: bool) -> list[Any]:
        results: list[Any] = []
        start = 0
        for end in _END_OF_LINE.finditer(self._buffer, self._scanned):
            if end[0] == b"\r" and end.end() == len(self._buffer) and not last:
                break  # a line feed may follow in the next piece; this is the last line end
            line = bytes(self._buffer[start : end.start()])
            start = end.end()
            if line:
                self._line(line)
                continue
            try:
                results += self._event()
            except Truncated as cut:  # within an event with a proper end
                results.append(cut.rest.decode("utf-8", "replace"))
        del self._buffer[:start]
        self._scanned = len(self._buffer) - self._buffer.endswith(b"\r")
        return results

    def _line(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))

    def _event(self) -> list[Any]:
        """Return the values of an event; `[DONE]` has none. Several, if a server omits the empty line between
        events.
        """
        data, self._data = b"\n".join(self._data), []
        values = JsonValues()
        results = values.feed(data)
        results += values.flush()
        return [value for value in results if value != "[DONE]"]


class PlainText:
    """Reads text, in whole characters."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes) -> list[Any]:
        return [text] if (text := self._decoder.decode(data)) else []

    def flush(self) -> list[Any]:
        return [text] if (text := self._decoder.decode(b"", final=True)) else []


def reader_for(content_type: str, beginning: bytes) -> Reader | None:
    """Return the reader for an answer with this beginning; None: it is too short to decide.

    The beginning decides, as a proxy may have changed the content type. If it fits several, the content type decides.

    Args:
        beginning: without a byte order mark.
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


# -- read one streamed answer: bytes in, events out; at the end check that it is complete ------------------------------


class AnswerReader:
    """Reads bytes in any pieces; events do not depend on the pieces (of plain text: the whole text does not).

    Args:
        content_type: the container's; empty: unknown.

    Attributes:
        arrived: the events so far.
    """

    def __init__(self, content_type: str = "") -> None:
        self._content_type = content_type
        self._beginning = b""
        self._reader: Reader | None = None
        self._open: set[int] = set()  # answers that have begun, in schemas that mark the end of each
        self.arrived: list[Event] = []

    def feed(self, data: bytes) -> Iterator[Event]:
        """Yield the events that are complete now.

        Raises:
            ModelFailed: the answer reports a failure, after the events before it.
        """
        if self._reader is None:
            self._beginning += data
            if codecs.BOM_UTF8.startswith(self._beginning):
                return  # nothing yet, or half a byte order mark
            data = self._beginning.removeprefix(codecs.BOM_UTF8)
            self._reader = reader_for(self._content_type, data)
            if self._reader is None:
                return
        yield from self._events(self._reader.feed(data))

    def finish(self) -> Iterator[Event]:
        """Yield the events that the end of the bytes completes.

        Raises:
            StreamBroken: the answer is not complete.
            ModelFailed: as `feed`.
        """
        values: list[object] = []
        if self._reader is None:
            self._reader = JsonValues() if "json" in self._content_type else PlainText()
            values = self._reader.feed(self._beginning.removeprefix(codecs.BOM_UTF8).strip())
        try:
            values += self._reader.flush()
        except Truncated as cut:
            yield from self._events(values)
            rest = cut.rest[:80].decode("utf-8", "replace")
            raise self.with_arrived(StreamBroken(f"the answer ended within a value: {rest}")) from None
        yield from self._events(values)
        if self._open:
            raise self.with_arrived(StreamBroken("the answer ended without saying that it does"))

    def with_arrived(self, error: RequestFailed) -> RequestFailed:
        """Return the error with the events before it."""
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
    """The events of an answer as they arrive. Iterate once, on one thread.

    Leaving it early (`close`, or the `with` statement) closes the connection, which ends the generation if the
    container notices.

    Args:
        parts: the bytes.
        close: closes the connection.

    Attributes:
        content_type: the container's.
        variant: the endpoint's variant that answers.
    """

    def __init__(self, parts: Iterable[bytes], content_type: str, close: Callable[[], Any], variant: str = "") -> None:
        self._parts = parts
        self._close = close
        self._reader = AnswerReader(content_type)
        self._events = self._read()
        self.content_type = content_type
        self.variant = variant

    def __iter__(self) -> Iterator[Event]:
        """Yield the events. Raises RequestFailed, with the events before it."""
        return self._events

    def text(self, index: int = 0) -> Iterator[str]:
        """Yield the pieces of the answer's text as they arrive; the whole text of an answer that is not streamed.

        Args:
            index: number of the answer, if several were requested.
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
        """Yield the bytes as they arrive, in place of events.

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
        """Return the events so far."""
        return tuple(self._reader.arrived)

    @property
    def finish(self) -> Finish | None:
        """Return the end of the (first) answer; None: it has not arrived."""
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
    """Return the stream of an answer of InvokeEndpointWithResponseStream."""
    body = response["Body"]
    parts = (event["PayloadPart"]["Bytes"] for event in body if "PayloadPart" in event)
    return Stream(parts, response.get("ContentType", ""), body.close, response.get("InvokedProductionVariant", ""))
