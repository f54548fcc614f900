"""OpenAI's files and batches: their requests and objects, and the input and output lines of a batch.

Sources: OpenAI's API reference, "Files" and "Batch"; the types of its Python client, 3.52.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from handler.core.errors import InvalidPayload, NotFound
from handler.core.framing import dumps, dumps_decoded
from handler.core.media import Upload
from handler.protocols.kernel.body import report_unknown
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.errors import HttpResponse
from handler.protocols.kernel.readers import NamedValue, integer, metadata, string
from handler.protocols.openai.api import BatchError, DeletedFile, OpenAiBatch, OpenAiFile

INPUT, OUTPUT = "batch", "batch_output"
"""The purposes of files: batch input that a client uploads, and output that a batch writes."""

DAY = 86_400  # seconds
LIFETIME = 30 * DAY
"""The default and maximum lifetime of files in seconds, as for OpenAI's batch files.

Finished batches are retained for the same time.
"""

_LEAST_LIFETIME = 3600
_MOST_NAME = 255  # characters of a file's name
_MOST_ID = 512  # characters of a custom_id
_WINDOW = re.compile(r"([1-9][0-9]{0,3})([mhd])")
UNITS = {"m": 60, "h": 3600, "d": DAY}
_SECONDS = integer(_LEAST_LIFETIME, LIFETIME)
_FILE_FIELDS = ("file", "purpose", "expires_after[anchor]", "expires_after[seconds]")


# -- calls -------------------------------------------------------------------------------------------------------


class NewFile(NamedTuple):
    """The parsed upload of a file. `lifetime` is in seconds."""

    name: str
    lifetime: int
    ignored: Sequence[str]


def read_file(form: Mapping[str, Any], context: ServerContext) -> NewFile:
    """Read the form of POST /v1/files.

    Raises:
        InvalidPayload, InvalidParameter: a field is missing or invalid. The message names it.
    """
    file, purpose = form.get("file"), form.get("purpose")
    if not isinstance(file, Upload):
        raise InvalidPayload("'file' must be a file with a filename, uploaded in the form")
    if purpose != INPUT:
        raise NamedValue("purpose", purpose).refused(f"must be {INPUT}: files are only stored for batches")
    anchor, seconds = (form.get(f"expires_after[{name}]") for name in ("anchor", "seconds"))
    if isinstance(seconds, str) and re.fullmatch(r"[0-9]{1,9}", seconds):
        seconds = int(seconds)
    expires = None if anchor is None and seconds is None else {"anchor": anchor, "seconds": seconds}
    lifetime = _read_lifetime("expires_after", expires)
    ignored = report_unknown(form, _FILE_FIELDS, context)
    return NewFile(file.name[-_MOST_NAME:], lifetime, ignored)


class NewBatch(NamedTuple):
    """The parsed request that creates a batch.

    Attributes:
        input: the id of the input file.
        window: the completion window, in seconds.
        lifetime: the number of seconds for which output files are retained.
        total: the number of requests, or 0 if it is not known yet.
    """

    input: str
    endpoint: str
    completion_window: str
    window: int
    lifetime: int
    metadata: dict[str, str] | None
    ignored: Sequence[str]
    total: int = 0


_FIELDS = ("input_file_id", "endpoint", "completion_window", "metadata", "output_expires_after")


def read_batch(body: Any, endpoints: Collection[str], context: ServerContext) -> NewBatch:
    """Read the body of POST /v1/batches.

    Args:
        endpoints: the routes that batches may call.

    Raises:
        InvalidPayload, InvalidParameter: a field is missing or invalid. The message names it.
    """
    if not isinstance(body, dict):
        raise InvalidPayload("the body must be a JSON object with 'input_file_id', 'endpoint' and 'completion_window'")
    for name in _FIELDS[:3]:
        if body.get(name) is None:
            raise InvalidPayload(f"'{name}' is missing")
    input, endpoint, window = (NamedValue(name, body[name]).read(string) for name in _FIELDS[:3])
    if endpoint not in endpoints:
        raise NamedValue("endpoint", endpoint).refused(f"must be one of {', '.join(endpoints)}")
    seconds = NamedValue("completion_window", window).read(_seconds)
    if (pairs := body.get("metadata")) is not None:
        NamedValue("metadata", pairs).read(metadata)
    lifetime = _read_lifetime("output_expires_after", body.get("output_expires_after"))
    ignored = report_unknown(body, _FIELDS, context)
    return NewBatch(input, endpoint, window, seconds, lifetime, pairs, ignored)


def _seconds(window: str) -> int:
    match = _WINDOW.fullmatch(window)
    seconds = int(match[1]) * UNITS[match[2]] if match else 0
    if not 0 < seconds <= LIFETIME:
        raise ValueError("must be a number of minutes (m), hours (h) or days (d), such as 24h, of at most 30d")
    return seconds


def _read_lifetime(name: str, value: Any) -> int:
    """Read a file's expiry, `{"anchor": "created_at", "seconds": …}`. Return the seconds, or LIFETIME by default."""
    if value is None:
        return LIFETIME
    if not isinstance(value, dict) or value.get("anchor") != "created_at":
        raise NamedValue(name, value).refused("must be an object with 'anchor': 'created_at' and 'seconds'")
    return NamedValue(f"{name}.seconds", value.get("seconds")).read(_SECONDS)


def no_file(id: str) -> NotFound:
    return NotFound(f"No such File object: {id[:128]}")


def no_batch(id: str) -> NotFound:
    return NotFound(f"No batch found with id '{id[:128]}'.")


# -- objects -----------------------------------------------------------------------------------------------------


def new_file(id: str, name: str, size: int, now: float, lifetime: int, purpose: str = INPUT) -> OpenAiFile:
    return {
        "id": id,
        "object": "file",
        "bytes": size,
        "created_at": int(now),
        "expires_at": int(now) + lifetime,
        "filename": name,
        "purpose": purpose,
        "status": "processed",
    }


def deleted(id: str) -> DeletedFile:
    return {"id": id, "object": "file", "deleted": True}


def new_batch(id: str, request: NewBatch, now: float) -> OpenAiBatch:
    return {
        "id": id,
        "object": "batch",
        "endpoint": request.endpoint,
        "errors": None,
        "input_file_id": request.input,
        "completion_window": request.completion_window,
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": int(now),
        "in_progress_at": None,
        "expires_at": int(now) + request.window,
        "finalizing_at": None,
        "completed_at": None,
        "failed_at": None,
        "expired_at": None,
        "cancelling_at": None,
        "cancelled_at": None,
        "request_counts": {"total": request.total, "completed": 0, "failed": 0},
        "metadata": request.metadata,
    }


# -- lines -------------------------------------------------------------------------------------------------------


class LineError(NamedTuple):
    """The reason why a line has no response, with OpenAI's error code. `param` names the invalid field, if any."""

    code: str
    message: str
    param: str | None = None


def batch_error(code: str, message: str, param: str | None = None, line: int | None = None) -> BatchError:
    return {"code": code, "message": message, "param": param, "line": line}


class Line(NamedTuple):
    """A line of batch input.

    Attributes:
        number: the line number, starting at 1.
        custom_id: the client's id of the request, or None if the line has no valid id.
        body: the request body as JSON, or b"" if there is an error.
        error: the reason why the line is not a valid request, or None if it is valid.
    """

    number: int
    custom_id: str | None
    body: bytes = b""
    error: LineError | None = None


NOT_JSON = LineError("invalid_json_line", "This line is not parseable as valid JSON.")
EXPIRED = LineError("batch_expired", "This request could not be executed before the completion window expired.")
CANCELLED = LineError("batch_cancelled", "This request was not executed before the batch was cancelled.")
MISMATCH = "url_mismatch"


def read_line(number: int, value: Any, endpoint: str) -> Line:
    """Return the parsed line of a batch whose requests are for `endpoint`."""
    if not isinstance(value, dict):
        return Line(number, None, error=NOT_JSON)
    custom_id, url, body = value.get("custom_id"), value.get("url"), value.get("body")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _MOST_ID:
        reason = f"'custom_id' must be a string of 1 to {_MOST_ID} characters"
        return Line(number, None, error=LineError("missing_required_parameter", reason, "custom_id"))
    error = None
    if value.get("method") != "POST":
        error = LineError("invalid_method", "'method' must be POST", "method")
    elif not isinstance(body, dict):
        error = LineError("missing_required_parameter", "'body' must be a JSON object", "body")
    elif url is None:
        error = LineError("missing_required_parameter", "'url' is missing", "url")
    elif url != endpoint:
        error = LineError(MISMATCH, f"'url' must be the batch's endpoint, {endpoint}", "url")
    return Line(number, custom_id, b"" if error else dumps_decoded(body), error)


def line_id(batch: str, number: int) -> str:
    """Return the id of the response to a line. `line_number` extracts the line number from the id."""
    return f"batch_req_{batch.removeprefix('batch_')}_{number}"


def line_number(id: str) -> int:
    return int(id.rpartition("_")[2])


def answered(batch: str, line: Line, response: HttpResponse, ignored: Sequence[str] = ()) -> bytes:
    """Return the output line for a request that reached its route, even if the route refused it.

    Args:
        ignored: the fields of the request that had no effect.
    """
    id = line_id(batch, line.number)
    body = response.body if "json" in response.content_type else dumps(response.body.decode())
    head = dumps({"id": id, "custom_id": line.custom_id})[:-1]
    extra = b',"ignored_parameters":%b' % dumps([*ignored]) if ignored else b""
    member = b'"response":{"status_code":%d,"request_id":%b,"body":%b%b}' % (response.status, dumps(id), body, extra)
    return b'%b,%b,"error":null}\n' % (head, member)


def is_unsent(line: bytes) -> bool:
    """Return whether a line was written because its request had not been sent when the batch ended early."""
    return any(marker in line for marker in _UNSENT)  # quotes within strings would be escaped


_UNSENT = tuple(b'"response":null,"error":{"code":"%b"' % error.code.encode() for error in (EXPIRED, CANCELLED))


def not_answered(batch: str, line: Line, error: LineError) -> bytes:
    """Return the line in the error file for a request that was not sent to its route."""
    value = {"code": error.code, "message": error.message, **({"param": error.param} if error.param else {})}
    id = line_id(batch, line.number)
    return dumps({"id": id, "custom_id": line.custom_id, "response": None, "error": value}) + b"\n"
