"""Stand-in for djl_python, DJL Serving's Python package, with the parts that a model.py imports.

Names, signatures and values are the same as in the package, 0.29 to 0.36. Functions that need a DJL worker raise
NotImplementedError.
"""

from __future__ import annotations

import csv
import datetime
import importlib
import io
import json
import logging
import os
import pickle
import shutil
import struct
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from handler.plugins import api
from handler.plugins.stand_ins import StandIn
from handler.plugins.stand_ins.nd_list import from_nd_list, to_nd_list

# -- sessions that a model.py manages itself ---------------------------------------------------------------------------
# They are not the server's own sessions (docs/sessions.md), which clients open and formatters receive with a request.

log = logging.getLogger("handler.formatters")

_MEMORY = Path("/dev/shm")
_EXPIRATION = ".expiration_ts"


class Session:
    """A session. Its directory contains a file for each stored value.

    Args:
        expiration_ts: expiry time in seconds since the epoch, or None to read it from the directory.
    """

    def __init__(self, session_id: str, session_root: str, expiration_ts: float | None = None) -> None:
        self.session_id = session_id
        self.files_path = os.path.join(session_root, session_id)
        self.expiration_ts = self.get(_EXPIRATION) if expiration_ts is None else expiration_ts

    def put(self, key: str, value: Any) -> None:
        self._path(key).write_bytes(pickle.dumps(value))

    def get(self, key: str, d: Any = None) -> Any:
        """Return a value, or the default `d` if it is not stored."""
        path = self._path(key)
        return pickle.loads(path.read_bytes()) if path.is_file() else d

    def get_as_numpy(self, key: str, shape: Any, dtype: Any = "float32", create: bool = False) -> Any:
        """Return a memory-mapped array. With `create`, a file with zeros replaces the existing file."""
        path = self._path(key)
        if create:
            path.write_bytes(b"")
        return importlib.import_module("numpy").memmap(path, dtype=dtype, mode="r+", shape=shape)

    def remove(self) -> bool:
        """Remove the directory of the session.

        Raises:
            ValueError: if the directory does not exist.
        """
        if not os.path.isdir(self.files_path):
            raise ValueError(f"session directory does not exist: {self.session_id}")
        shutil.rmtree(self.files_path)
        return True

    def _path(self, key: str) -> Path:
        return Path(self.files_path, key.replace("/", "-"))


class SessionManager:
    """Manages the sessions in a directory.

    Args:
        properties: the model properties. `sessions_path` and `sessions_expiration` (in seconds) are used.

    Raises:
        PermissionError: if the directory belongs to another user, whose pickles could run arbitrary code.
    """

    def __init__(self, properties: Mapping[str, Any]) -> None:
        self.expiration = int(properties.get("sessions_expiration", 1200))
        home = _MEMORY if _MEMORY.is_dir() else Path(tempfile.gettempdir())
        self.sessions_path = str(properties.get("sessions_path", home / "djl_sessions"))
        os.makedirs(self.sessions_path, mode=0o700, exist_ok=True)
        if os.stat(self.sessions_path).st_uid != os.geteuid():
            raise PermissionError(f"sessions_path={self.sessions_path}: belongs to another user")
        if properties.get("sessions_s3url"):
            log.warning("sessions_s3url is ignored: sessions are stored in %s", self.sessions_path)
        self.sessions = {id: Session(id, self.sessions_path) for id in os.listdir(self.sessions_path)}

    def create_session(self) -> Session:
        """Open a session, and remove all sessions that have expired."""
        for session in [other for other in self.sessions.values() if self._is_over(other)]:
            self.close_session(session.session_id)
        session = Session(str(uuid.uuid4()), self.sessions_path, time.time() + self.expiration)
        os.mkdir(session.files_path, mode=0o700)
        session.put(_EXPIRATION, session.expiration_ts)
        self.sessions[session.session_id] = session
        return session

    def get_session(self, session_id: str | None) -> Session | None:
        """Return an open session, or None if it has expired or if the ID is empty or NEW_SESSION.

        Raises:
            ValueError: if the session does not exist.
        """
        if not session_id or session_id == "NEW_SESSION":
            return None
        session = self._existing(session_id)
        return None if self._is_over(session) else session

    def close_session(self, session_id: str) -> None:
        """Remove a session.

        Raises:
            ValueError: if the session does not exist.
        """
        self._existing(session_id).remove()
        del self.sessions[session_id]

    def _existing(self, session_id: str) -> Session:
        if session_id not in self.sessions:
            raise ValueError(f"session not found: {session_id}")
        return self.sessions[session_id]

    def _is_over(self, session: Session) -> bool:
        return session.expiration_ts is None or time.time() > session.expiration_ts


class PairList:
    """An ordered list of keys and values."""

    def __init__(self) -> None:
        self.keys: list[str | None] = []
        self.values: list[Any] = []

    def add(self, key: str | None = None, value: Any = None) -> None:
        if value is not None:
            self.keys.append(key)
            self.values.append(value)

    def size(self) -> int:
        return len(self.keys)

    def is_empty(self) -> bool:
        return not self.keys

    def get(self, key: str) -> Any:
        return self.values[self.keys.index(key)] if key in self.keys else None

    def key_at(self, index: int) -> str | None:
        return self.keys[index]

    def value_at(self, index: int) -> Any:
        return self.values[index]

    def get_keys(self) -> list[str | None]:
        return self.keys

    def get_values(self) -> list[Any]:
        return self.values


def encoded_json(value: Any) -> bytes:
    """Encode a value as JSON in the format of the package. Dates and NumPy values are supported."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=2, separators=(",", ":"), default=_as_json)
    return text.encode()


def _as_json(value: Any) -> Any:
    if isinstance(value, datetime.datetime):
        return str(value)
    if callable(plain := getattr(value, "tolist", None)):  # numpy's arrays and numbers
        return plain()
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _default_stream_formatter(part: Any) -> bytes:
    return json.dumps({"outputs": part}).encode() + b"\n"


class Output:
    """A response from a worker.

    Attributes:
        failure: the default message of the method `error`, which depends on the LMI release.
    """

    failure = "invoke handler failure"

    def __init__(self, code: int = 200, message: str = "OK") -> None:
        self.code = code
        self.message = message
        self.properties: dict[str, Any] = {}
        self.content = PairList()
        self.stream_content: Any = None
        self.stream_output_formatter: Any = None
        self.finalize_function: Any = None
        self.finalize_args: Any = None

    def __str__(self) -> str:
        content = {
            str(key): f"type: {type(value)}" for key, value in zip(self.content.keys, self.content.values, strict=True)
        }
        fields = {"code": self.code, "message": self.message, "properties": self.properties, "content": content}
        return json.dumps(fields, indent=2, default=str)

    def set_code(self, code: int) -> Output:
        self.code = code
        return self

    def set_message(self, message: str) -> Output:
        self.message = message
        return self

    def error(self, error: str, code: int = 424, message: str | None = None) -> Output:
        self.code, self.message = code, self.failure if message is None else message
        self.add_property("content-type", "application/json")
        return self.add_as_json({"code": code, "message": self.message, "error": error})

    def add_property(self, key: str, val: Any) -> Output:
        self.properties[key] = val
        return self

    def get_properties(self) -> dict[str, Any]:
        return self.properties

    def get_property(self, key: str) -> Any:
        return self.properties.get(key)

    def add(self, value: Any, key: Any = None, batch_index: int | None = None) -> Output:
        name = None if key is None else str(key)
        if batch_index is not None:
            name = f"batch_{batch_index}.{name or ''}"
        data = value.encode() if isinstance(value, str) else value
        self.content.add(name, bytearray(data if isinstance(data, bytes | bytearray) else encoded_json(data)))
        return self

    def add_as_json(self, val: Any, key: Any = None, batch_index: int | None = None) -> Output:
        return self.add(encoded_json(val), key, batch_index)

    def add_as_string(self, val: str, key: Any = None, batch_index: int | None = None) -> Output:
        return self.add(val, key, batch_index)

    def add_as_npz(self, np_list: Any, key: Any = None, batch_index: int | None = None) -> Output:
        file = io.BytesIO()
        _numpy().savez(file, *np_list)
        return self.add(file.getvalue(), key, batch_index)

    def add_as_numpy(self, np_list: Any, key: Any = None, batch_index: int | None = None) -> Output:
        return self.add(to_nd_list(np_list), key, batch_index)

    def add_stream_content(
        self, stream_content: Any, output_formatter: Callable[[Any], Any] | None = _default_stream_formatter
    ) -> Output:
        self.stream_content, self.stream_output_formatter = stream_content, output_formatter
        return self

    def finalize(self, finalize_function: Callable[..., Any], *args: Any) -> Output:
        self.finalize_function, self.finalize_args = finalize_function, args
        return self

    def execute_finalize(self) -> Any:
        return self.finalize_function(*self.finalize_args) if self.finalize_function else None

    @staticmethod
    def binary_encode(data: dict[str, Any]) -> bytes:
        texts = [text.encode() for pair in data.items() for text in map(str, pair)]
        return struct.pack(">h", len(data)) + b"".join(struct.pack(">i", len(text)) + text for text in texts)


def binary_fields(data: bytes) -> dict[str, str] | None:
    """Decode a body that was encoded by `Output.binary_encode`. Return None for any other body."""
    if not data.startswith(b"\0") or len(data) < 2:
        return None
    index, texts = 2, []
    for _ in range(2 * data[1]):
        size = int.from_bytes(data[index : index + 4], "big")
        index += 4 + size
        if index > len(data):
            return None
        texts.append(data[index - size : index])
    words = [text.decode(errors="replace") for text in texts]
    fields = dict(zip(words[::2], words[1::2], strict=True))
    return fields if index == len(data) and {"data", "last"} & fields.keys() else None


def _numpy() -> Any:
    return importlib.import_module("numpy")


def decode(
    inputs: api.Input, content_type: str | None, key: str | None = None, require_csv_headers: bool = True
) -> Any:
    """Decode a body according to its content type. If it is neither JSON nor CSV, return `{"inputs": …}`."""
    media = content_type or ""
    if not media:
        return inputs.get_as_json(key) if inputs.get_as_bytes(key) else {"inputs": ""}
    if "application/json" in media:
        return inputs.get_as_json(key)
    if "text/csv" in media:
        return _decode_csv(inputs.get_as_string(key), require_csv_headers)
    if "text/plain" in media:
        return {"inputs": [inputs.get_as_string(key)]}
    if media.startswith("image/"):
        return {"inputs": inputs.get_as_image(key)}
    if "tensor/npz" in media:
        return {"inputs": inputs.get_as_npz(key)}
    if media == "application/x-www-form-urlencoded":
        return {"inputs": inputs.get_as_string(key)}
    return {"inputs": inputs.get_as_bytes(key)}


def _decode_csv(text: str, headers: bool) -> Any:
    if not headers:
        return _numpy().genfromtxt(io.StringIO(text), delimiter=",")
    first = text.partition("\n")[0].lower()
    if not any(name in first for name in ("question", "context", "inputs")):
        raise ValueError("CSV must begin with a header line that contains question, context or inputs")
    rows = list(csv.DictReader(io.StringIO(text)))
    return {"inputs": [row["inputs"] for row in rows] if rows and "inputs" in rows[0] else rows}


def encode(outputs: Output, prediction: Any, content_type: str | None, key: str | None = None) -> None:
    media = content_type or "application/json"
    if "text/csv" in media:
        file, rows = io.StringIO(), list(prediction)
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
        outputs.add_as_string(file.getvalue(), key).add_property("Content-Type", "text/csv")
    elif "tensor/npz" in media:
        outputs.add_as_npz(prediction, key).add_property("Content-Type", "tensor/npz")
    else:
        outputs.add_as_json(prediction, key).add_property("Content-Type", "application/json")


def create_non_stream_output(
    data: Any, properties: dict[str, Any] | None = None, error: str | None = None, code: int | None = None
) -> Output:
    return _output(data, True, "application/json", properties, error, code)


def create_stream_chunk_output(
    data: Any, last_chunk: bool, error: str | None = None, code: int | None = None
) -> Output:
    return _output(data, last_chunk, "application/jsonlines", None, error, code)


def _output(
    data: Any, last: bool, media: str, properties: dict[str, Any] | None, error: str | None, code: int | None
) -> Output:
    text = json.dumps(data, ensure_ascii=False) if isinstance(data, dict) else str(data)
    fields = {
        "data": f"{text}\n",
        "last": last,
        **({"error": error} if error else {}),
        **({"code": code} if code else {}),
    }
    output = Output()
    output.properties = {"Content-Type": media, **(properties or {})}
    return output.add(Output.binary_encode(fields))


async def handle_streaming_response(
    response: AsyncIterator[str],
    stream_output_formatter: Callable[..., Any],
    accumulate_chunks: bool = False,
    **keywords: Any,
) -> AsyncIterator[Output]:
    history: Any = []
    async for chunk in response:
        try:
            if accumulate_chunks:
                data, last, history = stream_output_formatter(chunk, history=history, **keywords)
            else:
                data, last = stream_output_formatter(chunk, **keywords)
        except Exception as error:
            yield create_stream_chunk_output("", True, error=str(error), code=424)
            return
        yield create_stream_chunk_output(data, last)
        if last:
            return


class StreamingUtils:
    @staticmethod
    def get_stream_generator(*arguments: Any, **keywords: Any) -> NoReturn:
        raise NotImplementedError("StreamingUtils.get_stream_generator is only available under DJL Serving")


def _unchanged(function: Any) -> Any:
    """Return the function unchanged, because this server refuses files with functions that need this decorator."""
    return function


_REQUEST_IO = {
    name: getattr(api, name)
    for name in ("RequestInput", "RequestOutput", "Sequence", "TextGenerationOutput", "TextInput", "Token")
}


# -- LMI's own handlers ------------------------------------------------------------------------------------------


class EngineAnswer(Output):
    """The result of LMI's own handlers. If `handle` returns it, the server replaces it with the engine response."""

    def __init__(self, inputs: api.Input) -> None:
        super().__init__()
        self.inputs = inputs

    def __getattribute__(self, name: str) -> Any:
        if name in ("content", "add", "add_as_json", "add_as_string", "stream_content"):
            vars_of = object.__getattribute__(self, "__dict__")
            if "inputs" in vars_of:
                raise NotImplementedError(
                    f"Output.{name} is not available: the engine answers after handle has returned; {_FORMATTERS}"
                )
        return object.__getattribute__(self, name)


_FORMATTERS = "write @input_formatter or @output_formatter functions to change requests and responses"


def handle(inputs: api.Input) -> Output | None:
    """Pass the request to the engine. The empty first call does nothing, because the engine is already loaded."""
    return None if inputs.is_empty() else EngineAnswer(inputs)


async def handle_async(inputs: api.Input) -> Output | None:
    return handle(inputs)


class EngineService:
    """Stand-in for LMI's own services, which passes requests to the engine of the server."""

    def __init__(self) -> None:
        self.initialized = False

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        for name in vars(cls).keys() - {"handle", "inference", "initialize"}:
            if not name.startswith("__") and name in _HOOKS:
                raise TypeError(f"{cls.__name__}.{name} is not called here; {_FORMATTERS}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _HOOKS:
            raise AttributeError(f"{type(self).__name__}.{name} is not called here; {_FORMATTERS}")
        object.__setattr__(self, name, value)

    def initialize(self, properties: dict[str, Any]) -> None:
        self.initialized = True

    def inference(self, inputs: api.Input) -> Output:
        return EngineAnswer(inputs)


class AsyncEngineService(EngineService):
    async def initialize(self, properties: dict[str, Any]) -> None:  # type: ignore[override]
        self.initialized = True

    async def inference(self, inputs: api.Input) -> Output:  # type: ignore[override]
        return EngineAnswer(inputs)


_HOOKS = frozenset(
    {
        "parse_input", "parsed_input", "preprocess", "preprocess_request", "postprocess", "dynamic_batch_inference",
        "format_output", "load_model", "get_pipeline", "rolling_batch", "model", "tokenizer", "hf_pipeline",
    }
)  # fmt: skip
"""Attributes of LMI's services that users override. This server would neither call nor read them."""

MODULES: dict[str, dict[str, Any]] = {
    "djl_python": {
        "Input": api.Input,
        "Output": Output,
        "PairList": PairList,
        "SessionManager": SessionManager,
        "Session": Session,
    },
    "djl_python.inputs": {"Input": api.Input},
    "djl_python.outputs": {"Output": Output},
    "djl_python.pair_list": {"PairList": PairList},
    "djl_python.session_manager": {"SessionManager": SessionManager, "Session": Session},
    "djl_python.request_io": _REQUEST_IO,
    "djl_python.output_formatter": {"output_formatter": api.output_formatter, **_REQUEST_IO},
    "djl_python.input_parser": {
        "input_formatter": api.input_formatter,
        "prediction_handler": _unchanged,
        "init_handler": _unchanged,
    },
    "djl_python.encode_decode": {"decode": decode, "encode": encode},
    "djl_python.async_utils": {
        "create_non_stream_output": create_non_stream_output,
        "create_stream_chunk_output": create_stream_chunk_output,
        "handle_streaming_response": handle_streaming_response,
    },
    "djl_python.streaming_utils": {"StreamingUtils": StreamingUtils},
    "djl_python.np_util": {"from_nd_list": from_nd_list, "to_nd_list": to_nd_list},
    "djl_python.huggingface": {"handle": handle, "HuggingFaceService": EngineService},
    "djl_python.tensorrt_llm": {"handle": handle, "TRTLLMService": EngineService},
    "djl_python.lmi_vllm": {},
    "djl_python.lmi_vllm.vllm_async_service": {"handle": handle_async, "VLLMHandler": AsyncEngineService},
    "djl_python.lmi_trtllm": {},
    "djl_python.lmi_trtllm.trtllm_async_service": {
        "handle": handle_async,
        "TensorRTLlmAsyncService": AsyncEngineService,
    },
}

DJL_PYTHON = StandIn(MODULES)
