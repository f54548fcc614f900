"""Reader of one answer's events: token ids, log-probabilities, its end and errors."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from types import MappingProxyType
from typing import Any, NamedTuple

import orjson

from handler.core.values import Extras, Finish
from handler.engines.base import Alternatives, EngineRequest
from handler.engines.remote.servers import Answer, Failed, Part, Refused, score

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_MOST = 1 << 22  # bytes of an event


class Event(NamedTuple):
    """One event. `comment` is its comment lines, where Dynamo writes an error's message."""

    name: bytes
    data: bytes
    comment: bytes


class EventReader:
    """Reads events from data in pieces of any size. An event cut off by the stream's end is dropped."""

    def __init__(self) -> None:
        self._rest = bytearray()  # of a line, which later pieces continue
        self._name = b""
        self._data: list[bytes] = []
        self._comments: list[bytes] = []
        self._size = 0  # bytes of the event so far, in whole lines
        self._mark = _BYTE_ORDER_MARK  # with which the first line may begin

    def feed(self, data: bytes) -> list[Event]:
        """Return the events that end in `data`.

        Raises:
            ValueError: an event has more than 4 MiB.
        """
        if (
            data.startswith(b"data: ")
            and data.endswith(b"\n\n")
            and data.find(b"\n") == len(data) - 2
            and self._between_events()
        ):  # nearly all
            return [Event(b"", data[6:-2], b"")]
        first, *more = data.split(b"\n")
        self._rest += first
        if self._size + len(self._rest) > _MOST:
            raise ValueError(f"an event has more than {_MOST} bytes")
        if not more:
            return []
        lines, self._rest = [bytes(self._rest), *more[:-1]], bytearray(more[-1])
        events = []
        for line in lines:
            self._size += len(line) + 1
            line, self._mark = line.removesuffix(b"\r").removeprefix(self._mark), b""
            if not line:
                if self._data or self._name:
                    events.append(Event(self._name, b"\n".join(self._data), b" ".join(self._comments)))
                self._name, self._data, self._comments, self._size = b"", [], [], 0  # a comment alone keeps alive
                continue
            field, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if field == b"data":
                self._data.append(value)
            elif field == b"event":
                self._name = value
            elif not field:
                self._comments.append(value)
        if self._size + len(self._rest) > _MOST:
            raise ValueError(f"an event has more than {_MOST} bytes")
        return events

    def _between_events(self) -> bool:
        return not (self._rest or self._data or self._name or self._comments)


_ID = "token_id:"
_MOST_WORDS = 4096  # bytes of an answer that are quoted, before keys are masked and the rest is cut
_OF_THE_REQUEST = (400, 413, 422)
"""Statuses that blame the request; other 4xx are about keys, paths and models."""
_HINTS = {
    401: "; its key is the variable OPENAI_API_KEY",
    403: "; its key is the variable OPENAI_API_KEY",
    404: "; its model is option.base_url_model, and its address ends with /v1",
    405: "; its address ends with /v1",
}
_FOR_NOW = (408, 425, 429)
"""Temporary 4xx statuses."""
_BUSY = (429, 503, 529)
"""Statuses of an overloaded server; 529 is Anthropic's."""
_BUSY_WORDS = ("rate_limit_exceeded", "rate_limit_error", "overloaded_error")
"""`code` or `type` in an overloaded server's error: OpenAI's and Anthropic's."""
_MOST_WAIT = 60.0  # seconds that a client is told to wait: whatever a server says, it may have room long before
_MOST_HEADER = 64  # characters of a Retry-After


class EventAnswer(Answer):
    """Reads the events of one answer."""

    def __init__(self, body: Mapping[str, Any], request: EngineRequest) -> None:
        super().__init__(request.sampling)
        self.body = body
        self._num_prompt = 0 if request.goes_on else len(request.ids)  # tokens that may have been cached before
        self._has_text = False

    def read(self, event: Event, part: Part) -> bool:
        """Add an event to `part`; return whether there is something to take.

        The end of an answer is to be held until the next event, which may have the count of tokens.

        Raises:
            Refused, Failed: the event is an error, or cannot be read.
        """
        if part.finish is not None:
            self._count(event, part)
            return True
        if event.name == b"error":
            raise _event_error(event.data or event.comment)
        if event.data == b"[DONE]":
            raise Failed("ended its answer without a finish_reason")
        try:
            value = orjson.loads(event.data)
            if "error" in value:
                raise _event_error(event.data)
            choice = next(iter(value["choices"]), None)
            if choice is None:  # a count of tokens that comes early
                return False
            extra = value.get("nvext") or {}
            ids = choice.get("token_ids") or extra.get("completion_token_ids") or []
            reason = choice.get("finish_reason")
            if ids:
                self._take(ids, choice.get("logprobs"), part)
            self._has_text = self._has_text or bool(choice.get("text"))
        except (ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
            raise Failed("sent an event that cannot be read", f"{error!r}: {_short(event.data)}") from None
        if reason is not None:
            part.finish = self._finish(reason, choice.get("stop_reason"), ids)
        return bool(ids) and reason is None

    def _count(self, event: Event, part: Part) -> None:
        """Read how much of the prompt was cached; no error takes away an answer that is complete."""
        with contextlib.suppress(ValueError, TypeError, AttributeError, KeyError):
            count = orjson.loads(event.data)["usage"]["prompt_tokens_details"]["cached_tokens"]
            if type(count) is int and count > 0 and self._num_prompt:
                part.extras = Extras(num_cached_tokens=min(count, self._num_prompt))

    def _take(self, ids: Sequence[int], scores: Mapping[str, Any] | None, part: Part) -> None:
        if not all(type(id) is int and id >= 0 for id in ids):
            raise ValueError("token ids are whole numbers")
        # A token's text may come later than its id, and its log-probability with either.
        given = scores["token_logprobs"] if self._scored and scores else []
        logprobs = given if len(given) == len(ids) else [None] * len(ids)
        tops = [_ranked(one, self._num_tops) for one in scores["top_logprobs"]] if self._num_tops and scores else []
        self.take(part, ids, logprobs, tops)

    def _finish(self, reason: str, stop_reason: Any, ids: Sequence[int]) -> Finish:
        if self._has_text and not self._num_ids:
            raise Failed("sent text without token ids", "option.base_url_kind is another", lasts=True)
        return self.finish(reason, ids[-1] if ids else stop_reason)  # the id may be left out


def _ranked(entry: Any, count: int) -> Alternatives:
    """Read the alternatives to a token: names with their log-probabilities, or Dynamo's list of objects."""
    pairs = entry.items() if isinstance(entry, dict) else [(one["token"], one["logprob"]) for one in entry]
    best = sorted(((name, score(logprob)) for name, logprob in pairs), key=lambda pair: -pair[1])[:count]
    return [(_token_id(name), logprob) for name, logprob in best]


def _token_id(name: str) -> int:
    id = int(name.removeprefix(_ID))
    if id < 0:
        raise ValueError("token ids are whole numbers")
    return id


def message(data: bytes) -> str:
    """Return the message in an error's body of any form; otherwise the body's beginning."""
    try:
        value: Any = orjson.loads(data)
    except ValueError:
        return _short(data)
    for name in ("error", "message", "detail"):
        if isinstance(value, dict) and value.get(name):
            value = value[name]
    return value[:_MOST_WORDS] if isinstance(value, str) else _short(data)


def _event_error(data: bytes) -> Refused | Failed:
    """Return the error in an event of a 200 answer, by the status that it names."""
    return status_error(status_in(data, 500), data)


def status_in(data: bytes, default: int) -> int:
    """Return the HTTP status that the JSON of an error names."""
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
        value = orjson.loads(data)
        error = value.get("error") or value
        if error.get("code") in _BUSY_WORDS or error.get("type") in _BUSY_WORDS:
            return 429
        if type(code := error["code"]) is int and 400 <= code < 600:
            return code
    return default


def status_error(status: int, data: bytes, headers: Mapping[str, str] = MappingProxyType({})) -> Refused | Failed:
    """Return the error of a status, its body and its headers."""
    words = message(data) or "no message"
    if status in _OF_THE_REQUEST:
        return Refused(status, words)
    if 300 <= status < 400:
        location = headers.get("location", "")[:300]
        words = f"it redirects to {location!r}, which is not followed: write that address"
    elif status in _HINTS:
        words += _HINTS[status]
    lasts = 300 <= status < 500 and status not in _FOR_NOW
    busy = status in _BUSY
    return Failed(f"answered {status}", words, lasts=lasts, busy=busy, retry_after=_retry_after(headers))


def _retry_after(headers: Mapping[str, str]) -> float:
    """Read a Retry-After (RFC 9110, 10.2.3) in seconds, at most `_MOST_WAIT`; 0: none, or one that cannot be read.

    A date is compared with the answer's own, as the server's clock may differ from this one.
    """
    value = headers.get("retry-after", "").strip()
    if value.isascii() and value.isdecimal():
        return min(float(value[:_MOST_HEADER]), _MOST_WAIT)
    if (until := _date(value)) is None:
        return 0.0
    now = _date(headers.get("date", ""))
    return min(max(until - (time.time() if now is None else now), 0.0), _MOST_WAIT)


def _date(value: str) -> float | None:
    """Read an HTTP date of any of its three forms as seconds since the epoch; None: it is none."""
    try:
        date: datetime = parsedate_to_datetime(value[:_MOST_HEADER])
        return (date if date.tzinfo else date.replace(tzinfo=timezone.utc)).timestamp()
    except (ValueError, TypeError, IndexError, OverflowError):
        return None


def _short(data: bytes) -> str:
    return data[:_MOST_WORDS].decode("utf-8", "replace").strip()
