"""Reads the events of a response: token ids, log-probabilities, the finish reason and errors."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from types import MappingProxyType
from typing import Any

import orjson

from handler.core.event_stream import StreamEvent
from handler.core.numbers import is_digits, whole
from handler.core.values import Extras, Finish
from handler.engines.base import Alternatives, EngineRequest
from handler.engines.remote.servers import Busy, Failed, Lasting, Part, Refused, ResponseCheck, score

MAX_EVENT = 1 << 22
"""Maximum size of an event in bytes."""

_ID = "token_id:"
_MOST_WORDS = 4096  # maximum bytes quoted from a response, before keys are masked and the text is shortened further
_OF_THE_REQUEST = (400, 413, 422)
"""Statuses caused by the request itself. Other 4xx statuses not in `_FOR_NOW` are caused by keys, paths and models."""
_HINTS = {
    401: "; set its key in the variable OPENAI_API_KEY",
    403: "; set its key in the variable OPENAI_API_KEY",
    404: "; check option.base_url_model, and that the address ends with /v1",
    405: "; check that the address ends with /v1",
}
_FOR_NOW = (408, 425, 429)
"""4xx statuses that indicate temporary failures."""
_BUSY = (429, 503, 529)
"""Statuses that an overloaded server returns. Anthropic uses 529."""
_BUSY_WORDS = ("rate_limit_exceeded", "rate_limit_error", "overloaded_error")
"""Values of `code` or `type` in the error of an overloaded server: OpenAI's and Anthropic's."""
_LOADING = "Loading model"
"""The message with which llama-server responds while it loads its model, with the status 503."""
_MOST_WAIT = 60.0  # maximum seconds that a client is told to wait; the server may have room earlier than it says
_MOST_HEADER = 64  # characters of a Retry-After


class EventAnswer(ResponseCheck):
    """Reads the events of one response.

    Attributes:
        body: body of the request.
        id: the request's id at the server, or "" if the protocol has none; each attempt has another.
        stopped: whether this engine has ended the response at a stop token that the server misses.
    """

    id = ""
    stopped = False

    def __init__(self, body: Mapping[str, Any], request: EngineRequest) -> None:
        super().__init__(request.sampling)
        self.body = body
        # Number of prompt tokens that may have been in the cache.
        self._num_prompt = 0 if request.goes_on else len(request.ids)
        self._has_text = False

    def read(self, event: StreamEvent, part: Part) -> bool:
        """Read an event and add its content to `part`. Return whether `part` can be passed on.

        The end of a response has to be held back until the next event, which may contain the token counts.

        Raises:
            Refused: the event is an error caused by the request.
            Failed: the event is another error, or cannot be read.
        """
        if part.finish is not None:
            self._count(event, part)
            return True
        try:
            value = event_value(event)
            choice = next(iter(value["choices"]), None)
            if choice is None:  # token counts before the end
                return False
            extra = value.get("nvext") or {}
            ids = choice.get("token_ids") or extra.get("completion_token_ids") or []
            reason = choice.get("finish_reason")
            if ids:
                self._take(ids, choice.get("logprobs"), part)
            self._has_text = self._has_text or bool(choice.get("text"))
        except (ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
            raise unreadable(event, error) from None
        if reason is not None:
            part.finish = self._finish(reason, choice.get("stop_reason"), ids)
        return bool(ids) and reason is None

    def _count(self, event: StreamEvent, part: Part) -> None:
        """Read the number of cached prompt tokens. Ignore errors, because the response is complete."""
        with contextlib.suppress(ValueError, TypeError, AttributeError, KeyError):
            count = orjson.loads(event.data)["usage"]["prompt_tokens_details"]["cached_tokens"]
            if type(count) is int and count > 0 and self._num_prompt:
                part.extras = Extras(num_cached_tokens=min(count, self._num_prompt))

    def _take(self, ids: Sequence[int], scores: Mapping[str, Any] | None, part: Part) -> None:
        if not all(type(id) is int and id >= 0 for id in ids):
            raise ValueError("token ids must be non-negative integers")
        # A token's text may come later than its id, and its log-probability with either.
        token_logprobs = scores["token_logprobs"] if self._scored and scores else []
        logprobs = token_logprobs if len(token_logprobs) == len(ids) else [None] * len(ids)
        tops = [_ranked(entry, self._num_tops) for entry in scores["top_logprobs"]] if self._num_tops and scores else []
        self.take(part, ids, logprobs, tops)

    def _finish(self, reason: str, stop_reason: Any, ids: Sequence[int]) -> Finish:
        if self._has_text and not self._num_ids:
            raise Lasting("sent text without token ids", "option.base_url_kind is wrong")
        return self.finish(reason, ids[-1] if ids else stop_reason)  # the id of the end token may be missing


def event_value(event: StreamEvent, *, status: int = 500) -> Any:
    """Return the JSON of an event.

    Args:
        status: status of an error that specifies none.

    Raises:
        Refused: the event is an error caused by the request.
        Failed: the event is another error, or the end.
        ValueError: the event is not JSON.
    """
    if event.name == b"error":
        raise event_error(event.data or event.comment, status)
    if event.data == b"[DONE]":
        raise Failed("ended its response without a finish_reason")
    value = orjson.loads(event.data)
    if "error" in value:
        raise event_error(event.data, status)
    return value


def unreadable(event: StreamEvent, error: Exception) -> Failed:
    """Return the error for an event that is not as expected."""
    return Failed("sent an event that cannot be read", f"{error!r}: {shortened(event.data)}")


def _ranked(entry: Any, count: int) -> Alternatives:
    """Read the alternatives to a token, from an object that maps names to log-probabilities, or from Dynamo's list."""
    pairs = entry.items() if isinstance(entry, dict) else [(top["token"], top["logprob"]) for top in entry]
    best = sorted(((name, score(logprob)) for name, logprob in pairs), key=lambda pair: -pair[1])[:count]
    return [(_token_id(name), logprob) for name, logprob in best]


def _token_id(name: str) -> int:
    id = whole(name.removeprefix(_ID))
    if id < 0:
        raise ValueError("token ids must be non-negative integers")
    return id


def message(data: bytes) -> str:
    """Return the message in an error body of any format, or the beginning of the body if it has no message."""
    try:
        value: Any = orjson.loads(data)
    except ValueError:
        return shortened(data)
    for name in ("error", "message", "detail", "error_message"):
        if isinstance(value, dict) and value.get(name):
            value = value[name]
    return value[:_MOST_WORDS] if isinstance(value, str) else shortened(data)


def event_error(data: bytes, status: int = 500) -> Refused | Failed:
    """Return the error contained in an event of a 200 response.

    Args:
        status: status of an error that specifies none.
    """
    return status_error(status_in(data, status), data)


def status_in(data: bytes, default: int) -> int:
    """Return the HTTP status specified in an error's JSON, or `default`."""
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
        value = orjson.loads(data)
        error = value.get("error") or value
        if error.get("code") in _BUSY_WORDS or error.get("type") in _BUSY_WORDS:
            return 429
        if type(code := error["code"]) is int and 400 <= code < 600:
            return code
    return default


def status_error(status: int, data: bytes, headers: Mapping[str, str] = MappingProxyType({})) -> Refused | Failed:
    """Return the error that corresponds to a response's status, body and headers."""
    words = message(data) or "no message"
    if status == 503 and words == _LOADING:
        return Busy("is loading its model", retry_after=_retry_after(headers))
    if status in _OF_THE_REQUEST:
        return Refused(status, words)
    if 300 <= status < 400:
        location = headers.get("location", "")[:300]
        words = f"it redirects to {location!r}: redirects are not followed, so set that address"
    elif status in _HINTS:
        words += _HINTS[status]
    kind: type[Failed] = Failed
    if status in _BUSY:
        kind = Busy
    elif 300 <= status < 500 and status not in _FOR_NOW:
        kind = Lasting
    return kind(f"answered {status}", words, retry_after=_retry_after(headers))


def _retry_after(headers: Mapping[str, str]) -> float:
    """Return the value of a Retry-After header (RFC 9110, 10.2.3) in seconds, at most `_MOST_WAIT`.

    The result is 0 if the header is missing or invalid. A date in the header is compared with the response's own date,
    as the server's clock may differ from this machine's.
    """
    value = headers.get("retry-after", "").strip()
    if is_digits(value):
        return min(float(value[:_MOST_HEADER]), _MOST_WAIT)
    if (until := _date(value)) is None:
        return 0.0
    now = _date(headers.get("date", ""))
    return min(max(until - (time.time() if now is None else now), 0.0), _MOST_WAIT)


def _date(value: str) -> float | None:
    """Convert an HTTP date in any of the three formats to seconds since the epoch. Return None if it is invalid."""
    try:
        date: datetime = parsedate_to_datetime(value[:_MOST_HEADER])
        return (date if date.tzinfo else date.replace(tzinfo=timezone.utc)).timestamp()
    except (ValueError, TypeError, IndexError, OverflowError):
        return None


def shortened(data: bytes) -> str:
    """Return the beginning of a server's data as text for an error message."""
    return data[:_MOST_WORDS].decode("utf-8", "replace").strip()
