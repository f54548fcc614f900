"""Triton's `infer`: the tensors of a text model as JSON or binary data, read as the inputs of `generate`.

Sources: Triton's docs/protocol/extension_binary_data.md, KServe's open inference protocol (v2), and Triton's
src/http_server.cc and core's infer_request.cc for error messages.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from handler.core.errors import GenerationFailed, InternalError, InvalidParameter, InvalidPayload
from handler.core.framing import JSON
from handler.core.numbers import is_digits, whole
from handler.protocols.kernel.context import NO_REQUEST, RequestContext, ServerContext
from handler.protocols.kernel.dialect import BinaryBody, Description, Dialect, ParsedRequest, Timing, WithoutEngine
from handler.protocols.kernel.errors import Headers
from handler.protocols.kernel.readers import MAX_NAME, quote, show
from handler.protocols.kernel.reply import PreparedDocument
from handler.protocols.kernel.schema import TEXT, Shape, listing, record, schema_of_type
from handler.protocols.kernel.tensors import OUTPUTS as TENSOR_OUTPUTS
from handler.protocols.triton.api import VERSION, InferResponse, InferTensor, TritonError, TritonErrors
from handler.protocols.triton.models import FREE, INDICES, UNBATCHED, TensorModel, TensorSpec, model_of
from handler.protocols.triton.request import (
    INPUTS,
    check_single_sequence,
    from_text,
    head_of,
    read_id,
    read_inputs,
    wrong_type,
)
from handler.protocols.triton.response import ResponseOptions, TritonDocument, shape_of

HEADER = "inference-header-content-length"
SAGEMAKER_TYPE = "application/vnd.sagemaker-triton.binary+json"
"""The content type on SageMaker, which does not forward `HEADER`. `json-header-size` is the size of the JSON."""
_OCTETS = "application/octet-stream"
_MAX_DIGITS = 18  # of a length; no real body is longer
_MAX_SIZE = 1 << 60  # of a dimension; Python counts no more
_MAX_DIMS = 8  # dimensions of a shape in a message
_MAX_TEXT = 1 << 23  # bytes of a text in binary data. These are the limits of large bodies of JSON.
_MAX_TEXTS, _MAX_NUMBERS = 1 << 17, 1 << 21  # elements of a tensor in binary data
_REGION = "shared_memory_region"
_QUEUEING = ("priority", "timeout")
_STATEFUL = ("sequence_id", "sequence_start", "sequence_end")
_HEEDED = frozenset({"binary_data_output", *_STATEFUL, *_QUEUEING, *INPUTS})  # parameters that have an effect

FORMATS = {
    **{f"UINT{8 << index}": code for index, code in enumerate("BHIQ")},
    **{f"INT{8 << index}": code for index, code in enumerate("bhiq")},
    **{"BOOL": "?", "FP16": "e", "FP32": "f", "FP64": "d", "BF16": "H"},
}
"""Maps a datatype of fixed size to its code in `struct`."""

_KINDS: Mapping[str, tuple[tuple[type, ...], str]] = {
    "BYTES": ((str,), "string"),
    "BOOL": ((bool,), "boolean"),
    "INT": ((int,), "signed-integer"),
    "UINT": ((int,), "unsigned-integer"),
    "FP": ((int, float), "number"),
}
"""Maps a datatype without its size to the JSON types of its values, and to Triton's word for them."""

# -- reading -----------------------------------------------------------------------------------------------------


class _Reader:
    """Reads the input tensors of a request.

    Args:
        id: the request id in messages.
        name: the model name in messages.
        model: the model that the request is for.
        tail: the binary data after the JSON document.
    """

    def __init__(self, id: str, name: str, model: TensorModel, tail: bytes) -> None:
        self._id = id or "<id_unknown>"
        self._name = name
        self.model = model
        self._tail = tail
        self._position = 0
        self.has_batch = True
        self.values: dict[str, Any] = {}

    def read(self, tensors: Sequence[Any]) -> None:
        """Read all input tensors into `values`, in the format of the JSON values of `generate`.

        Raises:
            InvalidPayload: a tensor is invalid.
        """
        inputs = self.model.inputs
        for tensor in tensors:
            name, datatype, shape = (_member(tensor, key, kind) for key, kind in _MEMBERS.items())
            if name not in inputs:
                raise InvalidPayload(f"unexpected inference input {quote(name)} for model '{self._name}'")
            if name in self.values:
                raise self._refused(f"input '{name}' already exists in request")
            expected, dims = _STOP if (name, datatype) == ("stop", "BOOL") else inputs[name]
            if datatype not in FORMATS and datatype != "BYTES":
                raise InvalidPayload(f"invalid datatype for input {name}")
            if datatype.removeprefix("U") != expected.removeprefix("U"):  # older backends declare UINT32
                raise self._refused(
                    f"inference input '{name}' data-type is '{datatype}', but model '{self._name}' expects '{expected}'"
                )
            sizes = self._sizes(name, dims, shape)
            data, parameters = tensor.get("data"), tensor.get("parameters", {})
            items = self._items(name, datatype, math.prod(sizes), data, parameters)
            rows = [items[: sizes[-1]], items[sizes[-1] :]] if len(dims) > 1 else items  # word lists have two
            self.values[name] = items[0] if dims == (1,) else rows
        if self._position != len(self._tail):
            raise InvalidPayload(f"unexpected additional input data for model '{self._name}'")

    def _refused(self, message: str) -> InvalidPayload:
        return InvalidPayload(f"[request id: {self._id}] {message}")

    def _sizes(self, name: str, dims: Sequence[int], shape: Sequence[Any]) -> list[int]:
        """Return the sizes of a shape after the batch dimension, which must be 1 or missing."""
        if not all(type(size) is int and size >= 0 for size in shape):
            raise wrong_type("shape", "unsigned-integer")
        has_batch = len(shape) > len(dims)
        if has_batch and shape[0] > 1:
            raise self._refused(f"inference request batch-size must be <= 1 for '{self._name}'")
        sizes = [*shape[has_batch:]]
        fits = len(sizes) == len(dims) and all(dim in (-1, size) for dim, size in zip(dims, sizes, strict=True))
        if not fits or 0 in shape[:has_batch] or max(sizes) > _MAX_SIZE:
            expected, actual = (",".join(map(str, sizes)) for sizes in ((-1, *dims), shape[:_MAX_DIMS]))
            raise self._refused(
                f"unexpected shape for input '{name}' for model '{self._name}'. Expected [{expected}], got "
                f"[{actual[:MAX_NAME]}]."
            )
        if name == self.model.prompt:
            self.has_batch = has_batch
        return sizes

    def _items(self, name: str, datatype: str, number: int, data: Any, parameters: Any) -> list[Any]:
        parameters = parameters if isinstance(parameters, dict) else {}
        size = parameters.get("binary_data_size")
        sources = {"'data'": data, "'binary_data_size'": size, "'shared_memory_region'": parameters.get(_REGION)}
        present = [source for source, value in sources.items() if value is not None]
        if len(present) != 1:
            fields = "'data', 'binary_data_size' in 'parameters', 'shared_memory_region' in 'parameters'"
            but = f"set {' '.join(present)}" if present else "no field is set"
            raise InvalidPayload(f"Input must set only one of the following fields: {fields}. But {but}")
        if size is not None:
            return self._binary(name, datatype, number, size)
        if data is None:
            raise InvalidPayload(f"Unable to find shared memory region: {quote(str(parameters[_REGION]))}")
        return _flat(datatype, number, data)

    def _binary(self, name: str, datatype: str, number: int, size: Any) -> list[Any]:
        if type(size) is not int or size < 0:
            raise wrong_type("binary_data_size", "unsigned-integer")
        if number > (most := _MAX_TEXTS if datatype == "BYTES" else _MAX_NUMBERS):
            raise self._refused(f"input '{name}' has {show(number)} elements; at most {most} are read")
        data = self._tail[self._position : self._position + size]
        if len(data) < size:
            raise InvalidPayload(
                f"unexpected size for input '{name}', expecting {size - len(data)} additional bytes for model "
                f"'{self._name}'"
            )
        self._position += size
        if datatype == "BYTES":
            texts = list(itertools.islice(self._texts(name, data), number + 1))
            if len(texts) != number:
                error = f"expected {number} string elements for inference input '{name}' for model '{self._name}', got"
                raise self._refused(f"{error} {len(texts) if len(texts) < number else 'more'}")
            return texts
        code = FORMATS[datatype]
        if size != number * struct.calcsize(code):
            expected = f"Expected {number * struct.calcsize(code)}, got {size}"
            raise self._refused(f"input byte size mismatch for input '{name}' for model '{self._name}'. {expected}")
        return list(struct.unpack(f"<{number}{code}", data))

    def _texts(self, name: str, data: bytes) -> Iterator[str]:
        position, of_input = 0, f"for inference input '{name}' for model '{self._name}'"
        while position < len(data):
            length = data[position : position + 4]
            if len(length) < 4:
                error = f"incomplete string length indicator {of_input}, expecting 4 bytes but only {len(length)} bytes"
                raise self._refused(f"{error} available")
            (number,) = struct.unpack("<I", length)
            text = data[position + 4 : position + 4 + min(number, _MAX_TEXT)]
            if number > len(text) == _MAX_TEXT:
                raise InvalidPayload(f"input '{name}' has a text of {number} bytes; at most {_MAX_TEXT} are read")
            if len(text) < number:
                error = f"incomplete string data for inference input '{name}', expecting string of length {number} but"
                raise InvalidPayload(f"{error} only {len(text)} bytes available")
            position += 4 + number
            try:
                yield text.decode()
            except UnicodeDecodeError:
                raise InvalidPayload(f"input '{name}' must be UTF-8") from None


_MEMBERS = {"name": str, "datatype": str, "shape": list}
_STOP = TensorSpec("BOOL")
"""The input `stop` of TensorRT-LLM, which also stops requests for the other models."""


def _member(tensor: Any, key: str, kind: type) -> Any:
    """Return a member of a tensor.

    Raises:
        InvalidPayload: the member is missing or has a different type.
    """
    if not isinstance(tensor, dict) or key not in tensor:
        raise InvalidPayload(f"Unable to parse '{key}': attempt to access non-existing object member '{key}'")
    if not isinstance(tensor[key], kind):
        raise wrong_type(key, "string" if kind is str else "array")
    return tensor[key]


def _flat(datatype: str, number: int, data: Any) -> list[Any]:
    """Return the elements of `data`. As in Triton, only their number must be correct, not their nesting."""
    if not isinstance(data, list):
        raise wrong_type("data", "array")
    items = list(itertools.islice(_elements(data), number + 1))
    if len(items) != number:
        raise InvalidPayload("Unable to parse 'data': Shape does not match true shape of 'data' field")
    kinds, word = _KINDS[datatype.rstrip("0123456789")]
    for item in items:
        if type(item) not in kinds:
            where = "JSON bytes array" if datatype == "BYTES" else "'data'"
            raise InvalidPayload(f"Unable to parse {where}: attempt to access JSON non-{word} as {word}")
    return items


def _elements(data: list[Any]) -> Iterator[Any]:
    """Yield the elements of nested lists."""
    levels = [iter(data)]
    while levels:
        for item in levels[-1]:
            if isinstance(item, list):
                levels.append(iter(item))
                break
            yield item
        else:
            levels.pop()


# -- writing -----------------------------------------------------------------------------------------------------


OutputTensor = tuple[str, str, Sequence[int], Sequence[Any]]
"""The name, the datatype, the shape and the elements of an output tensor."""


_WITH_BATCH = TENSOR_OUTPUTS.keys() - {"output_ids", "sequence_length"}
"""Outputs whose values include the batch dimension."""


class Selection(NamedTuple):
    """The output tensors of a response.

    Attributes:
        model: the model that the request is for.
        names: maps each tensor that the request names to whether it is binary. If this is empty, all tensors are sent.
        is_binary: whether tensors are binary if the request names no tensor.
        has_batch: whether shapes begin with the batch dimension, except those of `UNBATCHED`.
        sagemaker: whether binary data has SageMaker's content type.
    """

    model: TensorModel
    names: Mapping[str, bool]
    is_binary: bool
    has_batch: bool
    sagemaker: bool

    def tensors(self, values: Mapping[str, Any]) -> Iterator[OutputTensor]:
        """Yield the selected tensors.

        Args:
            values: the contents of the tensors, by name, in the order in which they are sent.
        """
        outputs = self.model.outputs
        present = {self.model.text if name == "text_output" else name: value for name, value in values.items()}
        present.update((name, 0) for name in INDICES if name in self.names)
        for name, value in present.items():
            if name in outputs and name in (self.names or present):
                if name not in _WITH_BATCH:
                    value = [value if isinstance(value, list) else [value]]
                shape, items = shape_of(value if self.has_batch and name not in UNBATCHED else value[0])
                yield name, outputs[name].datatype, shape, items


class InferDocument(TritonDocument):
    """A JSON document with the output tensors in the order of the model, followed by their binary data, if any."""

    def __init__(self, options: ResponseOptions, selection: Selection) -> None:
        super().__init__(options)
        self._selection = selection
        self._headers: Headers = ()

    def headers(self, timing: Timing | None) -> Headers:
        """Return the header with the size of the JSON document if binary data follows it."""
        return self._headers

    def _encode(self) -> bytes:
        tensors, data = list[Mapping[str, Any]](), list[bytes]()
        for name, datatype, shape, items in self._selection.tensors(self._options.values(*self._outputs())):
            content: Mapping[str, Any] = {"data": items}
            if self._selection.names.get(name, self._selection.is_binary):
                data.append(packed(datatype, items))
                content = {"parameters": {"binary_data_size": len(data[-1])}}
            tensors.append({"name": name, "datatype": datatype, "shape": shape, **content})
        fixed = dict(self._options.fixed)
        id = {"id": fixed.pop("id")} if "id" in fixed else {}
        document = JSON.encode({**id, **fixed, "outputs": tensors})
        if data and self._selection.sagemaker:
            self.content_type = f"{SAGEMAKER_TYPE};json-header-size={len(document)}"
        elif data:
            self.content_type, self._headers = _OCTETS, ((HEADER, str(len(document))),)
        return b"".join([document, *data])


def packed(datatype: str, items: Sequence[Any]) -> bytes:
    """Return the binary data of a tensor."""
    if datatype == "BYTES":
        texts = (item if isinstance(item, bytes) else (item or "").encode() for item in items)
        return b"".join(struct.pack("<I", len(text)) + text for text in texts)
    values = (math.nan if item is None else item for item in items)
    return struct.pack(f"<{len(items)}{FORMATS[datatype]}", *values)


# -- the dialect -------------------------------------------------------------------------------------------------


def _request_shape(context: ServerContext) -> Shape:
    properties: Shape = {"type": "object"}
    outputs = listing(record({"name": TEXT}, {"parameters": properties}))
    inputs = listing(schema_of_type(InferTensor))
    return record({"inputs": inputs}, {"id": TEXT, "outputs": outputs, "parameters": properties})


class InferErrors(TritonErrors):
    """Triton's errors. Unlike with `generate`, a model failure has status 500."""

    statuses = MappingProxyType({**TritonErrors.statuses, GenerationFailed: 500, InternalError: 500})


class Infer(Dialect):
    """The dialect of `infer`, whose response is never streamed over HTTP.

    Args:
        sagemaker: whether the route is /invocations, where a content type replaces `HEADER` (Triton's
            src/sagemaker_server.cc).
    """

    may_stream = False
    any_media = True  # as in Triton, only a header tells binary data from JSON
    media_types = (_OCTETS,)
    unique_keys = True
    errors = InferErrors()
    description = Description(
        title="Triton infer",
        request="TritonInferRequest",
        request_shape=_request_shape,
        error=TritonError,
        example={
            "inputs": [
                {"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "data": ["The capital of France is"]},
                {"name": "max_tokens", "datatype": "INT32", "shape": [1, 1], "data": [8]},
            ]
        },
        response=InferResponse,
    )

    def __init__(self, *, sagemaker: bool = False) -> None:
        self.name = "triton_invocations" if sagemaker else "triton_infer"
        self._sagemaker = sagemaker

    def document_length(self, body: bytes, headers: Mapping[str, str]) -> int | None:
        digits = headers.get(HEADER)
        media_type, _, size = headers.get("content-type", "").lower().partition(";")
        if self._sagemaker and media_type == SAGEMAKER_TYPE and size.strip().startswith("json-header-size="):
            digits = size.partition("=")[2]
        if digits is None:
            return None
        length = whole(digits) if is_digits(digits) and len(digits) <= _MAX_DIGITS else -1
        if not 0 <= length <= len(body):
            raise InvalidPayload(f"inference header size should be in range (0, {len(body)}), got: {digits[:MAX_NAME]}")
        return length

    def parse(self, body: Any, context: ServerContext, request_context: RequestContext = NO_REQUEST) -> ParsedRequest:
        document, data, media_type = body if isinstance(body, BinaryBody) else (body, b"", "")
        tensors = document.get("inputs") if isinstance(document, dict) else None
        if tensors is None:
            raise InvalidPayload("Unable to parse 'inputs': attempt to access non-existing object member 'inputs'")
        if not isinstance(tensors, list):
            raise wrong_type("inputs", "array")
        id, name = read_id(document), request_context.model or context.model_names[0]
        model = model_of(tensors)
        reader = _Reader(id, name, model, data)
        reader.read(tensors)
        if reader.values.get("stop") is True:  # as in TensorRT-LLM, the other inputs do not matter
            if not id:
                raise InvalidPayload("stop=true: needs the id of the request to stop")
            return ParsedRequest((), self._empty(id, name), self.errors, course=WithoutEngine(stops=id))
        parameters = document.get("parameters", {})
        is_binary, unknown = _read_parameters(parameters)
        unknown += [name for name in document if name not in ("id", "inputs", "outputs", "parameters")]
        names = _read_outputs(document.get("outputs", []), name, model)
        # vLLM's backend reads its sampling parameters from here (triton-inference-server/vllm_backend, src/utils).
        values = {name: from_text(name, value) for name, value in parameters.items() if name in INPUTS}
        unknown += [f"parameters.{name}" for name in values if name in reader.values]
        values = {**values, **reader.values, **{f"return_{output}": True for output in names if output in FREE}}
        flags = [name for name in ("stream", "streaming") if values.pop(name, False)]
        streams = bool(flags) and self.may_stream
        if not self.may_stream:
            unknown += [name if name in reader.values else f"parameters.{name}" for name in flags]
        options, read, ignored = read_inputs(
            values, unknown, head_of(id, name), document, context, lambda parameters: streams
        )
        priority, timeout = (parameters.get(name, 0) for name in _QUEUEING)
        request = options.request._replace(priority=priority, timeout=timeout / 1e6 or math.inf)
        if streams:
            check_single_sequence(request.sampling, read)
        selection = Selection(model, names, is_binary, reader.has_batch, self._sagemaker and media_type != _OCTETS)
        return self._respond(options._replace(request=request), selection, ignored, streams=streams)

    def _empty(self, id: str, name: str) -> PreparedDocument:
        """Return a reply that has no outputs."""
        return PreparedDocument(JSON.encode({"id": id, "model_name": name, "model_version": VERSION, "outputs": []}))

    def _respond(
        self, options: ResponseOptions, selection: Selection, ignored: Sequence[str], *, streams: bool
    ) -> ParsedRequest:
        reply = InferDocument(options, selection)
        return ParsedRequest((options.request,), reply, self.errors, ignored, headers=reply.headers)


def _read_parameters(parameters: Any) -> tuple[bool, list[str]]:
    """Return whether outputs are binary by default, and the names of parameters that have no effect.

    Raises:
        InvalidPayload: a parameter has a type that Triton does not accept, or is reserved.
        InvalidParameter: the request belongs to a sequence of requests, or its priority or timeout is invalid.
    """
    if not isinstance(parameters, dict):
        raise InvalidPayload("Unable to parse 'parameters': attempt to get members for non-object")
    for name, value in parameters.items():
        if name.startswith("triton_"):
            raise InvalidPayload(
                "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified."
            )
        if value is None or isinstance(value, dict | list):
            kinds = "It should be either 'int', 'bool', or 'string'."
            raise InvalidPayload(f"parameter {quote(name)} has invalid type. {kinds}")
        if name in _STATEFUL and value:
            raise InvalidParameter(f"{name}={show(value)}: the model keeps no state between requests")
    is_binary = parameters.get("binary_data_output", False)
    if not isinstance(is_binary, bool):
        raise wrong_type("binary_data_output", "boolean")
    for name in _QUEUEING:
        value = parameters.get(name, 0)
        if type(value) is not int or not 0 <= value < 1 << 64:
            raise InvalidParameter(
                f"Unable to parse '{name}': attempt to access JSON non-unsigned-integer as unsigned-integer"
            )
    return is_binary, [f"parameters.{name}" for name, value in parameters.items() if name not in _HEEDED and value]


def _read_outputs(tensors: Any, of_model: str, model: TensorModel) -> dict[str, bool]:
    """Map each output tensor that the request names to whether it is binary.

    Raises:
        InvalidPayload: an output is unknown or named twice, or has an unsupported parameter.
    """
    if not isinstance(tensors, list):
        raise wrong_type("outputs", "array")
    names: dict[str, bool] = {}
    for tensor in tensors:
        name = _member(tensor, "name", str)
        if name not in model.outputs:
            raise InvalidPayload(f"unexpected inference output {quote(name)} for model '{of_model}'")
        if name in names:
            raise InvalidPayload(f"output '{name}' already exists in request")
        parameters = tensor.get("parameters", {})
        if not isinstance(parameters, dict) or not isinstance(is_binary := parameters.get("binary_data", False), bool):
            raise wrong_type("binary_data", "boolean")
        for unsupported in ("classification", _REGION):
            if parameters.get(unsupported):
                raise InvalidPayload(f"output '{name}': {unsupported} is not supported")
        names[name] = is_binary
    return names
