"""Tensors in Triton's inference protocol, as JSON or binary data."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

import orjson

HEADER = "inference-header-content-length"
"""The header with the size of the JSON document that precedes the binary data."""

_NAMES = "BOOL UINT8 UINT16 UINT32 UINT64 INT8 INT16 INT32 INT64 FP16 FP32 FP64 BF16"
_FORMATS = dict(zip(_NAMES.split(), "?BHIQbhiqefdH", strict=True))
"""Maps a fixed-size datatype to its code in `struct`."""

DATATYPES = {"BYTES", *_FORMATS}


def binary(text: str) -> bytes:
    """Return the binary data of a tensor that contains one string."""
    return struct.pack("<I", len(text.encode())) + text.encode()


def read(body: bytes) -> tuple[Any, bytes]:
    """Return the JSON document of a body, and the bytes after its tensors.

    For a tensor that was sent as binary data, the elements are added as the field `data`.

    Raises:
        ValueError: the body is not JSON, or a tensor is invalid.
    """
    if b'"datatype"' not in body:
        return orjson.loads(body), b""
    try:
        text = body.decode("utf-8", "surrogateescape")
        document, end = json.JSONDecoder().raw_decode(text)
        start = len(text[:end].encode("utf-8", "surrogateescape"))
        tensors = [row for name in ("inputs", "outputs") for row in document.get(name, ()) if isinstance(row, dict)]
        for tensor in tensors:
            size = tensor.get("parameters", {}).get("binary_data_size")
            if size is not None and size >= 0:
                tensor["data"] = [*_elements(tensor["datatype"], body[start : start + size])]
                start += size
    except (AttributeError, KeyError, TypeError, RecursionError, struct.error) as error:
        raise ValueError(f"not a body of tensors: {error}") from None
    return document, body[start:]


def _elements(datatype: str, data: bytes) -> Iterator[Any]:
    if datatype != "BYTES":
        yield from (value for (value,) in struct.iter_unpack(f"<{_FORMATS[datatype]}", data))
    start = 0
    while datatype == "BYTES" and start < len(data):
        (size,) = struct.unpack_from("<I", data, start)
        start += 4 + size
        yield data[start - size : start].decode("utf-8", "replace")


def inputs(document: Any) -> dict[str, Any]:
    """Return the first element of each input tensor by name, or {} if the inputs are not tensors."""
    tensors = document.get("inputs")
    rows = [row for row in tensors if isinstance(row, dict)] if isinstance(tensors, list) else ()
    return {str(row.get("name")): row["data"][0] for row in rows if isinstance(row.get("data"), list) and row["data"]}


def by_name(body: bytes) -> bytes:
    """Return a response with tensors as JSON in which the name of each tensor replaces its key `data`.

    Other bodies are returned unchanged.
    """
    try:
        document, tail = read(body)
        for tensor in document["outputs"]:
            tensor[str(tensor["name"])] = tensor.pop("data")
    except (AttributeError, LookupError, TypeError, ValueError):
        return body
    return json.dumps(document).encode() + tail
