"""The function `handle` in a user's model.py, as in LMI: its input, calls and results (docs/custom-code.md)."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from handler.core.errors import ConfigError, ServingError, error_text
from handler.core.numbers import is_digits
from handler.core.user_functions import Role
from handler.plugins.api import Content, Input
from handler.plugins.functions import import_once
from handler.plugins.stand_ins.djl import EngineAnswer, Output, binary_fields, encoded_json
from handler.protocols.kernel.errors import retry_headers

log = logging.getLogger("handler.formatters")

TITLE = "handle of model.py"

_ENGINE_MODULES = re.compile(r"(djl_python\.|handler\.(plugins|entry|djl))")
_BATCH_KEY = re.compile(r"batch_([0-9]+)\.(.*)", re.DOTALL)
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_OF_THE_CONNECTION = frozenset(
    {
        "connection", "content-length", "date", "host", "keep-alive", "proxy-connection", "server", "trailer",
        "transfer-encoding", "upgrade",
    }
)  # fmt: skip
"""Headers that the server sets itself or that belong to the connection."""
_OUT_OF_MEMORY = ("No available memory for the cache blocks", "CUDA error: out of memory")


class Handle(NamedTuple):
    """The user's function `handle`.

    Attributes:
        properties: the properties of its first call, which has no contents.
        always: the properties of every call.
    """

    function: Callable[..., Any]
    role: Role
    properties: Mapping[str, Any]
    always: Mapping[str, Any]

    @property
    def is_async(self) -> bool:
        function = inspect.unwrap(self.function)
        call = getattr(function, "__call__", None)  # noqa: B004
        return any(
            check(candidate)
            for check in (inspect.iscoroutinefunction, inspect.isasyncgenfunction)
            for candidate in (function, call)
        )


class Answer(NamedTuple):
    """A response.

    Attributes:
        headers: the headers that the user has set, which may lack a content type.
        parts: an iterator or asynchronous iterator over the rest of a streamed body, or None if `body` is complete.
    """

    status: int
    headers: Sequence[tuple[str, str]] = ()
    body: bytes = b""
    parts: Any = None


class PassOn(NamedTuple):
    """A result that passes the request to the engine.

    Attributes:
        body: the body for the engine, or None for the original body of the request.
    """

    body: bytes | None = None


class Broken(NamedTuple):
    """The last part of a response that failed before its end."""

    body: bytes


Result = Answer | PassOn


def find_handle(
    path: Path, role: Role, options: Mapping[str, str], *, release: tuple[int, int], device: str = "-1"
) -> Handle | None:
    """Import a model.py, and return its function `handle`. Return None if it is missing or imported from LMI.

    Args:
        path: the path of the model.py.
        role: the role of the function.
        options: the values of all options as written by the user, by key.
        release: the LMI release, which determines the text of error responses.
        device: the device that DJL would assign.

    Raises:
        ConfigError: if the file cannot be imported or the function cannot be called.
    """
    function = getattr(import_once(path), "handle", None)
    if function is None or _ENGINE_MODULES.match(getattr(function, "__module__", None) or ""):
        return None
    if not callable(function):
        raise ConfigError(f"{path}: handle is a {type(function).__name__}, not a function")
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise ConfigError(f"{path}: handle must take one argument, the Input: {error}") from None
    except ValueError:  # a built-in function without a signature
        pass
    Output.failure = "prediction failure" if release < (0, 31) else "invoke handler failure"
    degree = options.get("option.tensor_parallel_degree", "1")
    always = {
        "model_dir": str(path.parent.resolve()),
        "device_id": device,
        "tensor_parallel_degree": int(degree) if is_digits(degree) else 1,
        "handler": "handle",
    }
    values = {key.removeprefix("option."): value for key, value in options.items()}
    log.info("%s: handle %s", path, role.value)
    return Handle(function, role, {**values, **always}, always)


# -- the input of a call -----------------------------------------------------------------------------------------------


class Call(Input):
    """The input of a call: one request, the requests of a dynamic batch, or no request at startup.

    Args:
        contents: the body as `data` or as the fields of a form, and the query parameters.
        properties: the properties of the call.
        items: the requests of a dynamic batch, or () if there is at most one request.
    """

    def __init__(
        self, contents: Mapping[str, bytes], properties: Mapping[str, Any], items: Sequence[Call] = ()
    ) -> None:
        super().__init__(properties=properties)
        self.content = Content(contents)
        self._items = items

    def is_batch(self) -> bool:
        return bool(self._items)

    def get_batch_size(self) -> int:
        return len(self._items) or 1

    def get_batches(self) -> list[Input]:
        return list(self._items) or [self]


def batch(items: Sequence[Call], always: Mapping[str, Any]) -> Call:
    """Join requests into the input of a dynamic batch. A single request is returned unchanged."""
    if len(items) == 1:
        return items[0]
    contents: dict[str, bytes] = {}
    properties = {**always, "batch_size": str(len(items))}
    for index, item in enumerate(items):
        contents |= {f"batch_{index:03}.{key}": value for key, value in item.content.items()}
        properties |= {f"batch_{index:03}.{key}": value for key, value in item.properties.items()}
    return Call(contents, properties, items)


# -- calls -------------------------------------------------------------------------------------------------------


def call(handle: Handle, item: Call) -> list[Result]:
    """Call a plain function, and return a result for each request of the batch. Exceptions become error responses."""
    try:
        value = handle.function(item)
        if inspect.isawaitable(value):
            value = asyncio.run(_awaited(value))
        results = _results(handle, value, item)
        if len(results) != item.get_batch_size():
            raise ValueError(f"{len(results)} results for {item.get_batch_size()} requests")
        return results
    except BaseException as error:  # SystemExit in user code must end only its request
        return [failure(handle, error)] * item.get_batch_size()


async def call_async(handle: Handle, item: Call) -> Result:
    """Call a coroutine function or start an asynchronous generator. Exceptions of user code become error responses."""
    try:
        value = handle.function(item)
        if inspect.isawaitable(value):
            value = await value
        if inspect.isasyncgen(value):
            return await _begun(value)
        return _results(handle, value, item)[0]
    except (asyncio.CancelledError, GeneratorExit):
        raise
    except BaseException as error:
        return failure(handle, error)


async def _awaited(value: Any) -> Any:
    return await value


def failure(handle: Handle, error: BaseException) -> Answer:
    """Log the exception of a call, and return its error response."""
    log.error("%s failed", TITLE, exc_info=error)
    text = _text(error)
    if handle.role is Role.FIRST:
        return _error(424, f"Custom handler failed: {text}")
    if type(error).__name__ in ("OutOfMemoryError", "MemoryError") or any(word in text for word in _OUT_OF_MEMORY):
        return Answer(507)
    return _answer(Output().error(text))


def late(error: ServingError) -> Answer:
    """Return the response to a call that timed out or was rejected, in the format of DJL Serving's front end."""
    body = {"code": error.status, "type": error.type, "message": error.message}
    headers = (("content-type", "application/json"), *retry_headers(error.status))
    return Answer(error.status, headers, json.dumps(body).encode())


def next_part(parts: Iterator[bytes]) -> bytes | Broken | None:
    """Return the next part of a body, or None at its end. An exception is returned as a `Broken`."""
    try:
        return next(parts, None)
    except BaseException as error:
        return _broken(error)


async def next_part_async(parts: AsyncIterator[Any]) -> bytes | Broken | None:
    """Return the next part of an asynchronous body, or None at its end. A user exception is returned as a `Broken`."""
    try:
        part: bytes = await anext(parts)
    except StopAsyncIteration:
        return None
    except (asyncio.CancelledError, GeneratorExit):
        raise
    except BaseException as error:
        return _broken(error)
    return part


def _broken(error: BaseException) -> Broken:
    log.error("%s failed in the middle of a response", TITLE, exc_info=error)
    return broken(424, _text(error))


def _text(error: BaseException) -> str:
    return error_text(error) or type(error).__name__


def broken(status: int, text: str) -> Broken:
    """Return the last part of a response that failed before its end, in the format of LMI."""
    return Broken(_error_line(status, text))


# -- the results of a call ---------------------------------------------------------------------------------------------


def _results(handle: Handle, value: Any, item: Call) -> list[Result]:
    size = item.get_batch_size()
    if value is None:
        return [PassOn() if handle.role is Role.FIRST else Answer(204)] * size
    if isinstance(value, EngineAnswer):
        return [PassOn(bytes(part.get_as_bytes() or b"")) for part in value.inputs.get_batches()]
    if not _is_output(value):
        answer = _answer(Output().error(f"Invalid output type: {type(value)}"))
        return [answer] * size
    if not item.is_batch() or value.code >= 300:
        return [_whole(value)] * size
    return _split(value, size)


def _whole(output: Any) -> Answer:
    """Read an Output as a complete response.

    Raises:
        ValueError: if the Output is only a part of a response.
    """
    answer = _answer(output)
    if answer.status < 300 and _last(output) == "false":
        raise ValueError(
            "the Output has last=False, but handle is called only once per request, unlike in DJL Serving's rolling "
            "batch; return the whole response, or an asynchronous generator of Outputs"
        )
    return answer


def _is_output(value: Any) -> bool:
    """Return whether a value is an Output from djl_python or from our stand-in."""
    return all(hasattr(value, name) for name in ("code", "properties", "content", "stream_content"))


def _split(output: Any, size: int) -> list[Result]:
    """Return the response to each request of a dynamic batch. The keys of the contents identify the requests."""
    if output.stream_content is not None:
        return [_answer(Output().error("A dynamic batch cannot be streamed: set batch_size=1"))] * size
    contents: dict[int, bytes] = {}
    headers = _headers(output.properties)
    for index in range(output.content.size()):
        match = _BATCH_KEY.fullmatch(output.content.key_at(index) or "")
        if match is None:
            return [_translation("Unexpected batch output key: " + str(output.content.key_at(index)))] * size
        contents.setdefault(int(match[1]), bytes(output.content.value_at(index)))
    if sorted(contents) != list(range(size)):
        return [_translation(f"Batch output size mismatch, expected: {size}, actual: {len(contents)}")] * size
    return [Answer(output.code, headers, contents[index]) for index in range(size)]


def _translation(message: str) -> Answer:
    body = {"code": 400, "type": "TranslateException", "message": message}
    return Answer(400, (("content-type", "application/json"),), json.dumps(body).encode())


def _answer(output: Any) -> Answer:
    """Convert an Output to a response, as in DJL Serving.

    The properties are sent as headers, and the content `data` or else the first content is sent as the body.
    """
    status, headers = _status(output.code), _headers(output.properties)
    if output.stream_content is not None:
        return Answer(status, headers, parts=_encoded(output))
    body = _first(output)
    fields = binary_fields(body)
    if fields is None:
        return Answer(status, headers, body)
    if "code" in fields:
        return _error(_status(fields["code"]), fields.get("error", ""), headers)
    return Answer(status, headers, fields["data"].encode())


def _first(output: Any) -> bytes:
    content = output.content
    if not content.size():
        return b""
    return bytes(content.get("data") or content.value_at(0))


def _status(code: Any) -> int:
    status = int(code)
    if not 200 <= status <= 599:
        raise ValueError(f"Output.code={status}: must be 200 to 599")
    return status


def _headers(properties: Mapping[Any, Any]) -> list[tuple[str, str]]:
    """Return properties as headers, without the headers that the server sets itself.

    Raises:
        ValueError: if a property is not a valid header.
    """
    headers: dict[str, str] = {}
    for key, written in properties.items():
        name, value = str(key).lower(), str(written)
        if not _NAME.fullmatch(name) or not value.isprintable() or not value.isascii():
            raise ValueError(f"property {name[:100]!r} is not a valid HTTP header")
        if name not in _OF_THE_CONNECTION:
            headers[name] = value.strip()
    return list(headers.items())


def _error(status: int, text: str, headers: Sequence[tuple[str, str]] = ()) -> Answer:
    """Return an error response in the format of the Java side for errors in a handler."""
    remaining = [header for header in headers if header[0] != "content-type"]
    return Answer(status, [("content-type", "application/json"), *remaining], _error_line(status, text).rstrip(b"\n"))


def _error_line(status: int, text: str) -> bytes:
    return json.dumps({"error": text, "code": status}, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _encoded(output: Any) -> Iterator[bytes]:
    write = output.stream_output_formatter
    for part in output.stream_content:
        value = part if write is None else write(part)
        if isinstance(value, str):
            yield value.encode()
        else:
            yield bytes(value) if isinstance(value, bytes | bytearray) else encoded_json(value)


async def _begun(outputs: Any) -> Answer:
    """Wait for the first Output, and return a response with its status and headers. Later Outputs continue the body."""
    try:
        first = await anext(outputs)
    except StopAsyncIteration:
        return Answer(204)
    answer = _answer(first)
    if answer.parts is not None:
        raise ValueError("an Output of an asynchronous generator must not contain a stream")
    if answer.status >= 300 or _last(first) == "true":
        await outputs.aclose()
        return answer
    return answer._replace(body=b"", parts=_bodies(answer.body, outputs))


async def _bodies(first: bytes, outputs: Any) -> AsyncIterator[bytes]:
    yield first
    try:
        async for output in outputs:
            answer = _answer(output)
            yield answer.body if answer.status < 300 else answer.body + b"\n"
            if answer.status >= 300 or _last(output) == "true":
                return
    finally:
        await outputs.aclose()


def _last(output: Any) -> str:
    """Return the field `last` of an encoded part ("true" or "false"), or "" if the Output has no such field."""
    fields = binary_fields(_first(output))
    return "" if fields is None else fields.get("last", "").lower()
