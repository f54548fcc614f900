"""Triton's gRPC messages: requests as bodies of `infer`, and responses as messages in gRPC framing.

A response of this dialect is a sequence of ModelStreamInferResponse messages. Each has the five-byte prefix of gRPC:
a zero and the length (grpc/grpc, doc/PROTOCOL-HTTP2.md). A non-streaming response is a single message.
Sources: triton-inference-server/common, protobuf/grpc_service.proto; server, docs/protocol/extension_*.md.
"""

from __future__ import annotations

import functools
import itertools
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tritonclient.grpc import service_pb2

from handler.core.errors import InvalidPayload, ServingError
from handler.core.framing import JSON
from handler.core.values import Finish, Token
from handler.protocols.kernel.context import NO_REQUEST, RequestContext, ServerContext
from handler.protocols.kernel.dialect import BinaryBody, ParsedRequest
from handler.protocols.kernel.reply import PreparedDocument, TokenEncoder
from handler.protocols.kernel.tensors import TensorValues
from handler.protocols.triton.api import VERSION, TritonExtras
from handler.protocols.triton.infer import Infer, InferDocument, OutputTensor, Selection, packed
from handler.protocols.triton.models import INDICES
from handler.protocols.triton.request import IDS
from handler.protocols.triton.response import ResponseOptions, TritonStream

FRAMES = "application/grpc+proto"
PREFIX = struct.Struct(">BI")
_FINAL = "triton_final_response"
_EMPTY_FINAL = "triton_enable_empty_final_response"
_LENGTH = struct.Struct("<I")

_CONTENTS = {
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    **{name: f"{name.lower()}_contents" for name in ("BOOL", "INT64", "UINT64", "FP32", "FP64", "BYTES")},
}
"""Maps a datatype to the field of InferTensorContents for its elements."""

_MAX_TYPED = 1 << 20  # bytes of a message besides raw contents
_MAX_FIELDS = 1 << 12  # fields of a message, inputs, outputs or parameters
_FIELD = re.compile(rb"([\x0a\x12\x1a\x22\x2a\x32\x3a])([\x80-\xff]{0,4}[\x00-\x7f])")
"""Matches the start of a field of a ModelInferRequest: a byte with the field number and type, and the length."""

_RAW = b"\x3a"  # raw_input_contents


# -- requests ----------------------------------------------------------------------------------------------------


def check_fields(message: bytes) -> None:
    """Refuse a ModelInferRequest that may need much more memory than its bytes.

    A tensor or an element without content takes two bytes in the message, but about thirty in memory. Therefore the
    size of everything except raw contents is limited.

    Raises:
        InvalidPayload: the message has too much data besides raw contents, or too many fields.
    """
    if len(message) <= _MAX_TYPED:
        return
    raw = sum(itertools.islice(_raw_lengths(message), _MAX_FIELDS))
    if len(message) - raw > _MAX_TYPED:
        raise InvalidPayload(f"the message has more than {_MAX_TYPED} bytes besides raw_input_contents")


def _raw_lengths(message: bytes) -> Iterator[int]:
    """Yield the length of the raw contents in each field, or 0 for other fields. Stop at an unknown field."""
    position = 0
    while match := _FIELD.match(message, position):
        length = sum((byte & 127) << 7 * index for index, byte in enumerate(match[2]))
        position = match.end() + length
        yield length if match[1] == _RAW else 0


def body_of(request: Any) -> tuple[bytes, int]:
    """Return the body of `infer` that is equivalent to a ModelInferRequest, and the length of its JSON document.

    All tensors are converted to binary data.

    Raises:
        InvalidPayload: the contents or a parameter are invalid.
    """
    if max(len(request.inputs), len(request.outputs), len(request.parameters)) > _MAX_FIELDS:
        raise InvalidPayload(f"a request may have at most {_MAX_FIELDS} inputs, as many outputs and as many parameters")
    contents = list(_contents(request))
    inputs = [
        {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": [*tensor.shape],
            "parameters": {"binary_data_size": len(data)},
        }
        for tensor, data in zip(request.inputs, contents, strict=True)
    ]
    outputs = [{"name": output.name, "parameters": {"binary_data": True}} for output in request.outputs]
    parameters = {name: _parameter(name, value) for name, value in request.parameters.items()}
    ends_apart = parameters.pop(_EMPTY_FINAL, False)
    if not isinstance(ends_apart, bool):
        raise InvalidPayload(f"invalid value type for '{_EMPTY_FINAL}' parameter, expected bool_param.")
    document = {"inputs": inputs, "outputs": outputs, "parameters": {**parameters, "binary_data_output": True}}
    members = {**({"id": request.id} if request.id else {}), **({_EMPTY_FINAL: True} if ends_apart else {})}
    data = JSON.encode({**members, **document})
    return b"".join([data, *contents]), len(data)


def _contents(request: Any) -> Iterator[bytes]:
    """Yield the binary data of each input."""
    raw = request.raw_input_contents
    for index, tensor in enumerate(request.inputs):
        fields = [field.name for field, _ in tensor.contents.ListFields()]
        name, of_model = f"'{tensor.name[:_MAX_SHOW]}'", f"for model '{request.model_name[:_MAX_SHOW]}'"
        if raw and fields:
            message = f"contents field must not be specified when using raw_input_contents for {name} {of_model}"
            raise InvalidPayload(message)
        if raw and index < len(raw):
            yield raw[index]
        elif len(fields) != 1:
            raise InvalidPayload(f"unable to find data for input tensor {name} {of_model} in request.")
        elif fields[0] != _CONTENTS.get(tensor.datatype):
            problem = f"unexpected explicit tensor data for input tensor {name} {of_model}"
            raise InvalidPayload(f"{problem}: {fields[0]} does not fit datatype {tensor.datatype[:_MAX_SHOW]!r}")
        else:
            try:
                yield packed(tensor.datatype, getattr(tensor.contents, fields[0]))
            except struct.error as error:
                raise InvalidPayload(f"input {name}: {error}") from None


_MAX_SHOW = 64  # characters of a name in a message


def _parameter(name: str, value: Any) -> Any:
    kind = value.WhichOneof("parameter_choice")
    of_client = (name, kind) == ("priority", "uint64_param")  # as tritonclient sends it
    if kind not in ("int64_param", "bool_param", "string_param", "double_param") and not of_client:
        expected = "int64_param, bool_param, or string_param."
        raise InvalidPayload(f"invalid value type for '{name[:_MAX_SHOW]}' parameter, expected {expected}")
    return getattr(value, kind)


# -- responses ---------------------------------------------------------------------------------------------------


def framed(message: bytes) -> bytes:
    """Return a message with the gRPC prefix."""
    return PREFIX.pack(0, len(message)) + message


def messages(frames: bytes) -> Iterator[bytes]:
    """Yield the messages in complete frames."""
    start = 0
    while start < len(frames):
        _, length = PREFIX.unpack_from(frames, start)
        start += PREFIX.size
        yield frames[start : start + length]
        start += length


def failure(id: str, message: str) -> bytes:
    """Return a ModelStreamInferResponse for a request that was refused."""
    return _streamed(service_pb2.ModelInferResponse(id=id), message)


def _streamed(response: Any, error: str = "") -> bytes:
    """Return a ModelStreamInferResponse that contains a ModelInferResponse."""
    message = service_pb2.ModelStreamInferResponse(error_message=error, infer_response=response)
    data: bytes = message.SerializeToString()
    return data


def _response(options: ResponseOptions, tensors: Sequence[OutputTensor] = (), *, final: bool) -> Any:
    """Return a ModelInferResponse with the tensors as raw contents."""
    response = service_pb2.ModelInferResponse(**options.fixed)
    response.parameters[_FINAL].bool_param = final
    for name, datatype, shape, items in tensors:
        response.outputs.add(name=name, datatype=datatype, shape=shape)
        response.raw_output_contents.append(packed(datatype, items))
    return response


def _frames(options: ResponseOptions, tensors: Iterable[OutputTensor], *, final: bool, ends_apart: bool) -> bytes:
    """Return a message with these tensors. If `final` and `ends_apart` are set, append an empty final message."""
    end = framed(_streamed(_response(options, final=True))) if final and ends_apart else b""
    return framed(_streamed(_response(options, [*tensors], final=final and not ends_apart))) + end


class WholeMessage(InferDocument):
    """The output tensors as one message, possibly followed by an empty final message."""

    ends_apart = False

    def _encode(self) -> bytes:
        self.content_type = FRAMES
        tensors = self._selection.tensors(self._options.values(*self._outputs()))
        return _frames(self._options, tensors, final=True, ends_apart=self.ends_apart)


class TokenMessages(TritonStream):
    """One message for each token, possibly followed by an empty final message."""

    ends_apart = False

    def __init__(self, options: ResponseOptions, selection: Selection, dialect: Infer) -> None:
        super().__init__(options, dialect.errors)
        self.content_type = FRAMES
        self._selection = selection
        plain = options.tensors is None and options.extras <= {"finish_reason"}
        self._is_plain = plain and selection.names.keys().isdisjoint(INDICES)

    def _token(self, position: int, token: Token) -> bytes:
        return self._event(token, None)

    def _render(self, text: str, values: TensorValues | None, extras: TritonExtras, finish: Finish | None) -> bytes:
        tensors = self._selection.tensors(self._options.values([text], values, extras))
        return _frames(self._options, tensors, final=finish is not None, ends_apart=self.ends_apart)

    def token_encoder(self) -> TokenEncoder | None:
        return self._encode_token if self._is_plain else None

    @functools.cached_property
    def _encode_token(self) -> TokenEncoder:
        """An encoder that only appends the text of a token to bytes that are the same for every token.

        Parsers merge the two occurrences of `infer_response` (protobuf's "Encoding" guide).
        """
        tensors = [*self._selection.tensors({"text_output": [""]})]
        response = _response(self._options, tensors, final=False)
        del response.raw_output_contents[:]
        fields = _streamed(response)
        empty, has_text = service_pb2.ModelInferResponse, bool(tensors)

        def encode(token: Token) -> bytes:
            if not has_text:
                return framed(fields)
            text = token.text.encode()
            content = empty(raw_output_contents=[_LENGTH.pack(len(text)) + text])
            return framed(fields + _streamed(content))

        return encode

    def _broken_off(self, error: ServingError) -> bytes:
        return framed(_streamed(_response(self._options, final=True), self._errors.body(error)["error"]))


class InferMessages(Infer):
    """The dialect of `infer` over gRPC.

    Args:
        may_stream: whether a response may have several messages.
    """

    def __init__(self, *, may_stream: bool) -> None:
        super().__init__()
        self.name, self.may_stream = "triton_grpc", may_stream

    def parse(self, body: Any, context: ServerContext, request_context: RequestContext = NO_REQUEST) -> ParsedRequest:
        """Read a request. On a stream, the text models of TensorRT-LLM send an empty final message on request.

        With TensorRT-LLM's model `tensorrt_llm` and vLLM's backend, the last message with content is final.
        """
        document = body.document if isinstance(body, BinaryBody) else body
        ends_apart = isinstance(document, dict) and document.pop(_EMPTY_FINAL, False)
        call = super().parse(body, context, request_context)
        if ends_apart and self.may_stream and isinstance(call.reply, TokenMessages | WholeMessage):
            names = [tensor["name"] for tensor in document["inputs"]]
            call.reply.ends_apart = IDS not in names and "sampling_parameters" not in names
        return call

    def _empty(self, id: str, name: str) -> PreparedDocument:
        response = service_pb2.ModelInferResponse(id=id, model_name=name, model_version=VERSION)
        response.parameters[_FINAL].bool_param = True
        reply = PreparedDocument(framed(_streamed(response)))
        reply.content_type = FRAMES
        return reply

    def _respond(
        self, options: ResponseOptions, selection: Selection, ignored: Sequence[str], *, streams: bool
    ) -> ParsedRequest:
        reply = TokenMessages(options, selection, self) if streams else WholeMessage(options, selection)
        return ParsedRequest((options.request,), reply, self.errors, ignored, streams=streams)
