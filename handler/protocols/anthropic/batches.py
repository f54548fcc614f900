"""Anthropic's message batches: the request that creates a batch, the batch, and its results.

Sources: Anthropic's API reference, "Message Batches"; the types of its Python client, 2.14. The server stores and runs
these batches as OpenAI's (`openai/batches.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, BinaryIO, Literal, TypedDict

from handler.core.errors import InvalidPayload, NotJson, TooLarge
from handler.core.framing import dumps, dumps_decoded, loads
from handler.protocols.anthropic.api import AnthropicError, AnthropicMessage, rfc3339
from handler.protocols.kernel.body import decode, report_unknown
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.schema import Count
from handler.protocols.openai.api import OpenAiBatch
from handler.protocols.openai.batches import CANCELLED, DAY, EXPIRED, LIFETIME, NewBatch, line_number

ENDPOINT = "/v1/messages"
BATCHES = "/v1/messages/batches"

_MAX_ID = 512  # maximum number of characters of a custom_id
_MAX_SKELETON = 1 << 20  # maximum size of the body without its requests, in bytes


class MessageBatchCounts(TypedDict):
    processing: Count
    succeeded: Count
    errored: Count
    canceled: Count
    expired: Count


class MessageBatch(TypedDict):
    """A batch. Until it has ended, all its requests are counted as `processing`."""

    id: str
    type: Literal["message_batch"]
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: MessageBatchCounts
    created_at: str
    expires_at: str
    ended_at: str | None
    cancel_initiated_at: str | None
    archived_at: None
    results_url: str | None


class MessageBatches(TypedDict):
    """A page of batches, with the ids of its first and last batch. The newest batch is the first."""

    data: list[MessageBatch]
    has_more: bool
    first_id: str | None
    last_id: str | None


class DeletedMessageBatch(TypedDict):
    id: str
    type: Literal["message_batch_deleted"]


class SucceededResult(TypedDict):
    type: Literal["succeeded"]
    message: AnthropicMessage


class ErroredResult(TypedDict):
    type: Literal["errored"]
    error: AnthropicError


class UnsentResult(TypedDict):
    type: Literal["canceled", "expired"]


class MessageResult(TypedDict):
    """A line of the results."""

    custom_id: str
    result: SucceededResult | ErroredResult | UnsentResult


# -- the request that creates a batch --------------------------------------------------------------------------------


class RequestSplitter:
    """Extracts requests from a body `{"requests": [{…}, …]}` as it arrives, so the full body is never held in memory.

    Each object at nesting depth three is extracted, and replaced with `0` in the remaining body.

    Args:
        limit: maximum size of a request, in bytes.
        max_requests: maximum number of requests.
    """

    def __init__(self, limit: int, max_requests: int) -> None:
        self._limit = limit
        self._max_requests = max_requests
        self._skeleton, self._request = bytearray(), bytearray()
        self._rest = b""  # a backslash whose escaped character has not arrived
        self._depth = 0
        self._is_string = self._is_request = False
        self._num_requests = 0

    @property
    def size(self) -> int:
        """The number of bytes that are held."""
        return len(self._skeleton) + len(self._request)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Read the next bytes of the body, and yield the requests that are complete.

        Raises:
            InvalidPayload: there are too many requests, or too many bytes besides them.
            TooLarge: a request is too large.
        """
        data, start = self._rest + data, 0
        for bracket in self._brackets(data):
            if bracket[0] in b"[{":
                if self._depth == 2 and bracket[0] == b"{":
                    self._hold(data[start : bracket.start()])
                    self._begin()
                    start = bracket.start()
                self._depth += 1
            else:
                self._depth -= 1
                if self._is_request and self._depth == 2:
                    self._hold(data[start : bracket.end()])
                    start = bracket.end()
                    yield self._take()
        self._hold(data[start : len(data) - len(self._rest)])

    def end(self) -> dict[str, Any]:
        """Return the members of the body besides its requests.

        Raises:
            InvalidPayload: the body is not a JSON object with a list of requests.
        """
        self._hold(self._rest)
        value = decode(bytes(self._skeleton + self._request))
        if not isinstance(value, dict):
            raise InvalidPayload("the body must be a JSON object with 'requests'")
        requests = value.pop("requests", None)
        if not isinstance(requests, list) or not requests:
            raise InvalidPayload("'requests' must be a list of at least one object with 'custom_id' and 'params'")
        if requests != [0] * self._num_requests:
            raise InvalidPayload("'requests' must be the only list, and all its items must be objects")
        return value

    def _brackets(self, data: bytes) -> Iterator[re.Match[bytes]]:
        """Yield the brackets and braces outside of strings."""
        end = 0
        while True:
            if self._is_string:
                end = _end_of_text(data, end)
                if data[end : end + 1] != b'"':
                    break
                self._is_string, end = False, end + 1
            bracket = _BRACKET.search(data, end)
            if bracket is None:
                end = len(data)
                break
            end = bracket.end()
            if bracket[0] == b'"':
                self._is_string = True
            else:
                yield bracket
        self._rest = data[end:]

    def _hold(self, data: bytes) -> None:
        if not self._is_request:
            self._skeleton += data
            if len(self._skeleton) > _MAX_SKELETON:
                raise InvalidPayload(f"apart from its requests, the body has more than {_MAX_SKELETON} bytes")
            return
        self._request += data
        if len(self._request) > self._limit:
            at = f"requests[{self._num_requests - 1}]"
            raise TooLarge(f"{at}: has more than {self._limit} bytes (max_request_size)")

    def _begin(self) -> None:
        self._skeleton += b"0"
        self._is_request = True
        self._num_requests += 1
        if self._num_requests > self._max_requests:
            raise InvalidPayload(f"'requests' has more than {self._max_requests} items (option.batches_max_lines)")

    def _take(self) -> bytes:
        request = bytes(self._request)
        self._request.clear()
        self._is_request = False
        return request


_BRACKET = re.compile(rb'["{}\[\]]')
_TEXT = re.compile(rb'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)


def _end_of_text(data: bytes, start: int) -> int:
    """Return the position where the text of a string ends: before its closing quote, or where more data is needed."""
    match = _TEXT.match(data, start)
    assert match is not None, "the pattern matches everywhere"
    return match.end()


class RequestReader:
    """Reads the requests of a batch, and returns them as lines of OpenAI's batch files.

    Args:
        decode_request: decodes the JSON object of a request, which may be large.
    """

    def __init__(self, decode_request: Callable[[bytes], Any]) -> None:
        self._decode = decode_request
        self._seen = set[bytes]()  # digests of the ids, because ids may be long

    @property
    def num_requests(self) -> int:
        return len(self._seen)

    def line(self, request: bytes) -> bytes:
        """Return the line for the next request.

        Raises:
            InvalidPayload: the request is invalid.
            TooLarge: the request has too much data.
        """
        at = f"requests[{self.num_requests}]"
        try:
            value = self._decode(request)
        except NotJson as error:
            raise InvalidPayload(f"{at}: {error.message}") from None
        except TooLarge as error:
            raise TooLarge(f"{at}: {error.message}") from None
        id, params = value.get("custom_id"), value.get("params")
        if not isinstance(id, str) or not 0 < len(id) <= _MAX_ID:
            raise InvalidPayload(f"{at}.custom_id: must be a string of 1 to {_MAX_ID} characters")
        if not isinstance(params, dict):
            raise InvalidPayload(f"{at}.params: must be an object, the body of a request to {ENDPOINT}")
        if unknown := next((name for name in value if name not in ("custom_id", "params")), None):
            raise InvalidPayload(f"{at}.{unknown[:100]}: must be within 'params', or be omitted")
        digest = blake2b(id.encode(), digest_size=16).digest()
        if digest in self._seen:
            raise InvalidPayload(f"{at}.custom_id: {id[:64]!r} is also the custom_id of another request")
        self._seen.add(digest)
        return dumps_decoded({"custom_id": id, "method": "POST", "url": ENDPOINT, "body": params}) + b"\n"


def new_message_batch(input: str, rest: Mapping[str, Any], context: ServerContext) -> NewBatch:
    """Return the batch to create.

    Args:
        input: id of the file with the lines.
        rest: members of the body besides its requests.
    """
    ignored = report_unknown(rest, (), context)
    return NewBatch(input, ENDPOINT, "24h", DAY, LIFETIME, None, ignored)


# -- the batch -------------------------------------------------------------------------------------------------------


_UNSENT_TYPES: Mapping[str, Literal["canceled", "expired"]] = {"cancelled": "canceled", "expired": "expired"}
"""Maps the statuses of batches to the results of requests that were not sent."""


def message_batch(batch: OpenAiBatch, num_unsent: int) -> MessageBatch:
    """Describe a batch.

    Args:
        num_unsent: number of its failed requests that were not sent.
    """
    ended_at = _ended_at(batch)
    id, canceled_at = batch["id"], batch["cancelling_at"]
    status: Literal["in_progress", "canceling", "ended"] = "in_progress" if canceled_at is None else "canceling"
    if ended_at is not None:
        status = "ended"
    return {
        "id": id,
        "type": "message_batch",
        "processing_status": status,
        "request_counts": _counts(batch, num_unsent, has_ended=ended_at is not None),
        "created_at": rfc3339(batch["created_at"]),
        "expires_at": rfc3339(batch["expires_at"]),
        "ended_at": None if ended_at is None else rfc3339(ended_at),
        "cancel_initiated_at": None if canceled_at is None else rfc3339(canceled_at),
        "archived_at": None,
        "results_url": None if ended_at is None else f"{BATCHES}/{id}/results",
    }


def _ended_at(batch: OpenAiBatch) -> int | None:
    """Return when a batch has ended, or None. The time of an expiry is set before the batch ends."""
    if batch["status"] in ("completed", "failed", "expired", "cancelled"):
        time: int = batch[f"{batch['status']}_at"]  # type: ignore[literal-required]
        return time
    return None


def _counts(batch: OpenAiBatch, num_unsent: int, *, has_ended: bool) -> MessageBatchCounts:
    counts = batch["request_counts"]
    result: MessageBatchCounts = {"processing": 0, "succeeded": 0, "errored": 0, "canceled": 0, "expired": 0}
    if not has_ended:
        return {**result, "processing": counts["total"]}
    result["succeeded"] = counts["completed"]
    result["errored"] = counts["failed"] - num_unsent
    rest = counts["total"] - result["succeeded"] - result["errored"]
    kind: Literal["canceled", "expired", "errored"] = _UNSENT_TYPES.get(batch["status"], "errored")
    result[kind] += rest
    return result


# -- the results -----------------------------------------------------------------------------------------------------


class MessageResults:
    """The results of a batch that has ended.

    Args:
        status: status of the batch, as OpenAI names it.
        outputs: files with the lines of requests that have a result.
        input: file with the lines of all requests, or None if all of them have a result.
    """

    def __init__(self, status: str, outputs: Sequence[BinaryIO], input: BinaryIO | None) -> None:
        self._status = status
        self._outputs = outputs
        self._input = input

    def __iter__(self) -> Iterator[bytes]:
        """Yield the lines of the results. May block."""
        done = set[int]()
        for file in self._outputs:
            for text in file:
                line = loads(text)
                done.add(line_number(line["id"]))
                yield _line(line["custom_id"], _result(line))
        for number, text in enumerate(self._input or (), 1):
            if number not in done:
                yield _line(loads(text)["custom_id"], self._missing())

    def close(self) -> None:
        """Close the files."""
        for file in [*self._outputs, self._input]:
            if file is not None:
                file.close()

    def _missing(self) -> Any:
        """Return the result of a request that the batch did not reach."""
        kind = _UNSENT_TYPES.get(self._status)
        return {"type": kind} if kind else _errored("api_error", "The batch failed before this request was sent.")


def _line(custom_id: str, result: Any) -> bytes:
    return dumps({"custom_id": custom_id, "result": result}) + b"\n"


def _result(line: Mapping[str, Any]) -> Any:
    """Return the result in an output line of OpenAI's batches."""
    response, error = line["response"], line["error"]
    if response is None:
        kind = _UNSENT_CODES.get(error["code"])
        return {"type": kind} if kind else _errored("invalid_request_error", error["message"])
    body = response["body"]
    if response["status_code"] == 200:
        return {"type": "succeeded", "message": body}
    if not isinstance(body, dict) or body.get("type") != "error":  # custom code may write any error
        return _errored("api_error", body if isinstance(body, str) else dumps(body).decode())
    return {"type": "errored", "error": {**body, "request_id": None}}


_UNSENT_CODES = {EXPIRED.code: "expired", CANCELLED.code: "canceled"}


def _errored(kind: str, message: str) -> Any:
    error = {"type": "error", "error": {"type": kind, "message": message}, "request_id": None}
    return {"type": "errored", "error": error}
