"""The part of DJL Serving's Python package that a model.py imports, for servers without DJL.

Names, signatures and values are the package's own (shared by 0.29 to 0.36). What needs a DJL worker cannot be called.
"""

from __future__ import annotations

import csv
import importlib
import io
import json
from collections.abc import AsyncIterator, Callable
from typing import Any, NoReturn

from handler.plugins import api
from handler.plugins.stand_ins import StandIn


class PairList:
    """Keys and values in order."""

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


class Output:
    """An answer of a worker."""

    def __init__(self, code: int = 200, message: str = "OK") -> None:
        self.code = code
        self.message = message
        self.properties: dict[str, Any] = {}
        self.content = PairList()
        self.stream_content: Any = None

    def set_code(self, code: int) -> Output:
        self.code = code
        return self

    def set_message(self, message: str) -> Output:
        self.message = message
        return self

    def error(self, error: str, code: int = 424, message: str = "invoke handler failure") -> Output:
        self.code, self.message = code, message
        self.add_property("content-type", "application/json")
        return self.add_as_json({"code": code, "message": message, "error": error})

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
        if not isinstance(data, bytes | bytearray):
            data = json.dumps(data, ensure_ascii=False, allow_nan=False).encode()
        self.content.add(name, bytearray(data))
        return self

    def add_as_json(self, val: Any, key: Any = None, batch_index: int | None = None) -> Output:
        return self.add(json.dumps(val, ensure_ascii=False, allow_nan=False), key, batch_index)

    def add_as_string(self, val: str, key: Any = None, batch_index: int | None = None) -> Output:
        return self.add(val, key, batch_index)

    def add_as_npz(self, np_list: Any, key: Any = None, batch_index: int | None = None) -> Output:
        file = io.BytesIO()
        _numpy().savez(file, *np_list)
        return self.add(file.getvalue(), key, batch_index)

    def add_stream_content(self, stream_content: Any, output_formatter: Any = None) -> Output:
        self.stream_content = stream_content
        return self


def _numpy() -> Any:
    return importlib.import_module("numpy")


def decode(
    inputs: api.Input, content_type: str | None, key: str | None = None, require_csv_headers: bool = True
) -> Any:
    """Read a body by its content type; what is no JSON becomes `{"inputs": …}`."""
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
        raise ValueError("CSV needs a line of headers with question, context or inputs")
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
    return _output(data, "application/json", properties, error, code)


def create_stream_chunk_output(
    data: Any, last_chunk: bool, error: str | None = None, code: int | None = None
) -> Output:
    return _output(data, "application/jsonlines", {"last": last_chunk}, error, code)


def _output(data: Any, media: str, properties: dict[str, Any] | None, error: str | None, code: int | None) -> Output:
    output = Output(code or 200)
    output.properties = {"Content-Type": media, **(properties or {})}
    text = json.dumps(data, ensure_ascii=False) if isinstance(data, dict) else str(data)
    return output.add(error if error else f"{text}\n")


async def handle_streaming_response(
    response: AsyncIterator[str], stream_output_formatter: Callable[..., Any], **keywords: Any
) -> AsyncIterator[Output]:
    async for chunk in response:
        data, last = stream_output_formatter(chunk, **keywords)
        yield create_stream_chunk_output(data, last)
        if last:
            return


def _needs_djl(name: str) -> Callable[..., NoReturn]:
    def function(*arguments: Any, **keywords: Any) -> NoReturn:
        raise NotImplementedError(f"{name} needs DJL Serving: this server answers requests itself")

    function.__name__ = name.rpartition(".")[2]
    return function


class StreamingUtils:
    get_stream_generator = staticmethod(_needs_djl("StreamingUtils.get_stream_generator"))


class SessionManager:
    def __init__(self, properties: dict[str, Any]) -> None:
        _needs_djl("SessionManager")()


def _mark(name: str) -> Callable[[Any], Any]:
    def decorate(function: Any) -> Any:
        vars(function)[name] = True
        return function

    return decorate


_REQUEST_IO = {
    name: getattr(api, name)
    for name in ("RequestInput", "RequestOutput", "Sequence", "TextGenerationOutput", "TextInput", "Token")
}
_HANDLE = {"handle": _needs_djl("handle")}

MODULES: dict[str, dict[str, Any]] = {
    "djl_python": {
        "Input": api.Input,
        "Output": Output,
        "PairList": PairList,
        "SessionManager": SessionManager,
        "Session": api.Session,
    },
    "djl_python.inputs": {"Input": api.Input},
    "djl_python.outputs": {"Output": Output},
    "djl_python.pair_list": {"PairList": PairList},
    "djl_python.session_manager": {"SessionManager": SessionManager, "Session": api.Session},
    "djl_python.request_io": _REQUEST_IO,
    "djl_python.output_formatter": {"output_formatter": api.output_formatter, **_REQUEST_IO},
    "djl_python.input_parser": {
        "input_formatter": api.input_formatter,
        "prediction_handler": _mark("is_prediction_handler"),
        "init_handler": _mark("is_init_handler"),
    },
    "djl_python.encode_decode": {"decode": decode, "encode": encode},
    "djl_python.async_utils": {
        "create_non_stream_output": create_non_stream_output,
        "create_stream_chunk_output": create_stream_chunk_output,
        "handle_streaming_response": handle_streaming_response,
    },
    "djl_python.streaming_utils": {"StreamingUtils": StreamingUtils},
    "djl_python.np_util": {name: _needs_djl(name) for name in ("from_nd_list", "to_nd_list")},
    "djl_python.huggingface": _HANDLE,
    "djl_python.tensorrt_llm": _HANDLE,
}

DJL_PYTHON = StandIn(MODULES)
