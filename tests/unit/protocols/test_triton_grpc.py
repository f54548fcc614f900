"""Triton's gRPC messages, without a connection."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import InferResult, service_pb2

from handler.core.errors import GenerationFailed, InvalidPayload
from handler.core.values import Delta, Finish, Token
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.dialect import BinaryBody, WithoutEngine
from handler.protocols.kernel.reply import Reply
from handler.protocols.triton.grpc import FRAMES, PREFIX, InferMessages, body_of, check_fields, messages
from tests.one_test import in_one_test
from tests.unit.protocols.answers import CAPABLE


def request(**more: Any) -> Any:
    message = service_pb2.ModelInferRequest(model_name="model", id="7", **more)
    for name, datatype in (("text_input", "BYTES"), ("max_tokens", "INT32"), ("stream", "BOOL")):
        message.inputs.add(name=name, datatype=datatype, shape=[1, 1])
    return message


def with_raw(*contents: bytes) -> Any:
    message = request()
    message.raw_input_contents.extend(contents)
    return message


def with_typed(*contents: dict[str, Any]) -> Any:
    message = request()
    for tensor, fields in zip(message.inputs, contents, strict=True):
        tensor.contents.CopyFrom(service_pb2.InferTensorContents(**fields))
    return message


TEXT, LENGTH, TRUE = b"\x02\0\0\0hi", b"\x05\0\0\0", b"\1"
TYPED: tuple[dict[str, Any], ...] = ({"bytes_contents": [b"hi"]}, {"int_contents": [5]}, {"bool_contents": [True]})


@pytest.mark.parametrize("message", [with_raw(TEXT, LENGTH, TRUE), with_typed(*TYPED)])
def test_raw_and_typed_contents_are_the_same_body(message: Any) -> None:
    body, length = body_of(message)
    assert body[length:] == TEXT + LENGTH + TRUE
    document = json.loads(body[:length])
    assert document["id"] == "7"
    assert [tensor["parameters"]["binary_data_size"] for tensor in document["inputs"]] == [6, 4, 1]
    assert document["parameters"] == {"binary_data_output": True}


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (with_raw(TEXT), "unable to find data for input tensor 'max_tokens'"),
        (request(), "unable to find data for input tensor 'text_input'"),
        (with_typed(TYPED[0], {"int64_contents": [5]}, TYPED[2]), "int64_contents does not fit datatype 'INT32'"),
        (with_typed(TYPED[0], {"int_contents": [5], "fp32_contents": [5]}, TYPED[2]), "unable to find data"),
    ],
)
def test_contents_that_do_not_fit_are_refused(message: Any, words: str) -> None:
    with pytest.raises(InvalidPayload, match=words):
        body_of(message)


def test_raw_and_typed_contents_together_are_refused() -> None:
    message = with_typed(*TYPED)
    message.raw_input_contents.append(TEXT)
    with pytest.raises(InvalidPayload, match="contents field must not be specified"):
        body_of(message)


def test_a_value_outside_its_datatype_is_refused() -> None:
    message = with_typed(*TYPED)
    message.inputs[1].datatype, message.inputs[1].contents.int_contents[:] = "INT8", [300]
    with pytest.raises(InvalidPayload, match="input 'max_tokens'"):
        body_of(message)


@pytest.mark.parametrize(
    ("name", "value", "refused"),
    [
        ("custom", {"int64_param": 3}, False),
        ("custom", {"double_param": 0.5}, False),
        ("custom", {"uint64_param": 3}, True),
        ("priority", {"uint64_param": 3}, False),
        ("custom", {}, True),
        ("triton_enable_empty_final_response", {"bool_param": True}, False),
        ("triton_enable_empty_final_response", {"int64_param": 1}, True),
    ],
)
def test_parameters_have_the_types_that_triton_takes(name: str, value: dict[str, Any], refused: bool) -> None:
    message = with_raw(TEXT, LENGTH, TRUE)
    message.parameters[name].CopyFrom(service_pb2.InferParameter(**value))
    if refused:
        with pytest.raises(InvalidPayload, match="invalid value type"):
            body_of(message)
    else:
        body, length = body_of(message)
        parameters = json.loads(body[:length])["parameters"]
        assert (name in parameters) is (name != "triton_enable_empty_final_response")


def field(number: int, data: bytes) -> bytes:
    """A field of at least 128 bytes, or of none, in its wire format."""
    size, length = len(data), b""
    while size > 127:
        size, length = size >> 7, length + bytes([size & 127 | 128])
    return bytes([number << 3 | 2]) + length + bytes([size]) + data


LARGE = 2 << 20
TOO_MUCH = {
    "empty inputs": field(5, b"") * LARGE,
    "empty contents": field(7, b"") * LARGE,
    "typed contents": field(5, field(5, field(8, b"") * LARGE)),
    "sizes": field(5, field(3, b"\1" * LARGE)),
    "raw contents before": field(7, bytes(LARGE)) + field(5, b"") * LARGE,
    "an unknown field before": field(9, b"") + field(5, b"") * LARGE,
    "a number before": b"\x28\0" + field(5, b"") * LARGE,
    "a tag of two bytes": b"\xaa\0\0" * LARGE,
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_a_message_that_needs_more_memory_than_its_bytes_is_refused(name: str) -> None:
    with pytest.raises(InvalidPayload, match="bytes besides raw_input_contents"):
        check_fields(TOO_MUCH[name])


def test_raw_contents_may_be_large() -> None:
    message = with_raw(struct.pack("<I", LARGE) + bytes(LARGE), LENGTH, TRUE)
    check_fields(message.SerializeToString())
    check_fields(b"\xff" * 1000)  # too small to matter


@pytest.mark.parametrize("name", ["inputs", "outputs"])
def test_a_message_of_many_tensors_is_refused(name: str) -> None:
    message = with_raw(TEXT, LENGTH, TRUE)
    for _ in range(5000):
        getattr(message, name).add()
    with pytest.raises(InvalidPayload, match="at most 4096 inputs, as many outputs and as many parameters"):
        body_of(message)


# -- responses -----------------------------------------------------------------------------------------------------


def document_of(tensors: dict[str, Any]) -> BinaryBody:
    inputs = [
        {"name": name, "datatype": datatype, "shape": [1, 1], "data": [value]}
        for name, (datatype, value) in tensors.items()
    ]
    return BinaryBody({"id": "7", "inputs": inputs}, b"", "")


def reply_to(*, streams: bool = True, **inputs: Any) -> Reply:
    tensors = {"text_input": ("BYTES", "hi"), "max_tokens": ("INT32", 5), "stream": ("BOOL", streams), **inputs}
    parsed = InferMessages(may_stream=True).parse(document_of(tensors), ServerContext("echo"))
    assert parsed.streams is streams
    return parsed.reply


def decoded(frames: bytes) -> list[Any]:
    return [service_pb2.ModelStreamInferResponse.FromString(message) for message in messages(frames)]


def delta(text: str, finish: Finish | None = None) -> Delta:
    return Delta(1, 0, (Token(5, text, -0.5, False),), finish)


def test_each_message_has_its_length_in_front() -> None:
    frames = reply_to().feed(0, delta("a"))
    zero, length = PREFIX.unpack_from(frames)
    assert (zero, length) == (0, len(frames) - 5)


@given(st.text())
def test_the_encoder_writes_what_feed_writes(text: str) -> None:
    one, other = reply_to(), reply_to()
    one.feed(0, delta("first"))
    other.feed(0, delta("first"))
    encode = one.token_encoder()
    assert encode is not None
    (quick,) = decoded(encode(Token(5, text, -0.5, False)))
    response = quick.infer_response
    assert (response.id, response.model_name, response.model_version) == ("7", "model", "1")
    assert [(output.name, output.datatype, [*output.shape]) for output in response.outputs] == [
        ("text_output", "BYTES", [1])
    ]
    data = text.encode()
    assert [*response.raw_output_contents] == [struct.pack("<I", len(data)) + data]
    assert response.parameters["triton_final_response"].bool_param is False
    assert decoded(other.feed(0, delta(text))) == [quick]


def test_only_the_last_message_is_final() -> None:
    reply = reply_to()
    found = decoded(reply.feed(0, delta("a")) + reply.feed(0, delta("b")) + reply.feed(0, delta("c", Finish.LENGTH)))
    finals = [message.infer_response.parameters["triton_final_response"].bool_param for message in found]
    assert finals == [False, False, True]
    assert reply.finished


def test_outputs_that_change_are_written_one_by_one() -> None:
    reply = reply_to(return_log_probs=("BOOL", True))
    assert reply.token_encoder() is None
    (first,) = decoded(reply.feed(0, delta("a")))
    (second,) = decoded(reply.feed(0, delta("b")))
    for message, total in ((first, -0.5), (second, -1.0)):
        response = message.infer_response
        contents = dict(zip([output.name for output in response.outputs], response.raw_output_contents, strict=True))
        assert struct.unpack("<f", contents["cum_log_probs"]) == (total,)
        assert struct.unpack("<f", contents["output_log_probs"]) == (-0.5,)


def test_a_stream_that_fails_ends_with_its_error() -> None:
    reply = reply_to()
    reply.feed(0, delta("a"))
    (last,) = decoded(reply.feed(0, Delta(1, 0, (), Finish.ERROR, GenerationFailed("broken"))))
    assert "broken" in last.error_message
    assert (last.infer_response.id, last.infer_response.model_name) == ("7", "model")
    assert last.infer_response.parameters["triton_final_response"].bool_param is True


def test_a_whole_response_is_one_final_message() -> None:
    (whole,) = decoded(reply_to(streams=False).feed(0, delta("a", Finish.LENGTH)))
    assert whole.infer_response.parameters["triton_final_response"].bool_param is True
    assert whole.infer_response.raw_output_contents[0].endswith(b"a")


def test_a_stopped_stream_ends_with_an_empty_message_that_tritonclient_reads() -> None:
    tensors = {"input_ids": ("INT32", 1), "request_output_len": ("INT32", 5), "streaming": ("BOOL", True)}
    parsed = InferMessages(may_stream=True).parse(document_of(tensors), CAPABLE)
    first, last = decoded(parsed.reply.feed(0, delta("a")) + parsed.reply.feed(0, Delta(1, 0, (), Finish.STOP)))
    assert parsed.reply.finished
    assert InferResult(first.infer_response).as_numpy("output_ids").tolist() == [[[5]]]
    assert InferResult(last.infer_response).as_numpy("output_ids").tolist() == [[[]]]
    assert last.infer_response.parameters["triton_final_response"].bool_param is True


def test_a_request_that_stops_others_gets_an_empty_final_message() -> None:
    parsed = InferMessages(may_stream=False).parse(document_of({"stop": ("BOOL", True)}), CAPABLE)
    (last,) = decoded(parsed.reply.feed(0, Delta(0, 0, ())))
    response = last.infer_response
    assert (response.id, response.model_name, response.model_version) == ("7", "model", "1")
    assert (list(response.outputs), response.parameters["triton_final_response"].bool_param) == ([], True)
    assert (parsed.course, parsed.reply.content_type) == (WithoutEngine(stops="7"), FRAMES)
    assert InferResult(response).as_numpy("output_ids") is None


@in_one_test(
    ("more", "apart"),
    [
        ({"text_input": ("BYTES", "hi")}, True),
        ({"text_input": ("BYTES", "hi"), "return_finish_reason": ("BOOL", True)}, True),
        ({"text_input": ("BYTES", "hi"), "sampling_parameters": ("BYTES", "{}")}, False),
        ({"input_ids": ("INT32", 1)}, False),
    ],
)
def test_an_empty_final_message_is_sent_on_request_as_by_the_text_models(more: dict[str, Any], apart: bool) -> None:
    """The last message with content has the last text, and a client of `tensorrt_llm_bls` may not read a final one."""
    for asks in (True, False):
        body = document_of({"stream": ("BOOL", True), **more})
        if asks:
            body.document["triton_enable_empty_final_response"] = True
        call = InferMessages(may_stream=True).parse(body, CAPABLE)
        found = decoded(call.reply.feed(0, delta("a")) + call.reply.feed(0, delta("b", Finish.LENGTH)))
        finals = [message.infer_response.parameters["triton_final_response"].bool_param for message in found]
        assert finals == ([False, False, True] if asks and apart else [False, True])
        assert [bool(message.infer_response.outputs) for message in found][2:] == [False] * (asks and apart)
        assert (found[-1].infer_response.id, found[-1].infer_response.model_name) == ("7", "model")
        assert call.reply.finished
        assert call.ignored == []


@in_one_test(("may_stream", "finals"), [(True, [False, True]), (False, [True])])
def test_a_whole_response_ends_apart_on_a_stream_alone(may_stream: bool, finals: list[bool]) -> None:
    body = document_of({"text_input": ("BYTES", "hi")})
    body.document["triton_enable_empty_final_response"] = True
    found = decoded(InferMessages(may_stream=may_stream).parse(body, CAPABLE).reply.feed(0, delta("a", Finish.EOS)))
    assert [message.infer_response.parameters["triton_final_response"].bool_param for message in found] == finals
    assert found[0].infer_response.raw_output_contents[0].endswith(b"a")


def test_the_wish_for_an_empty_final_message_is_in_the_body() -> None:
    asking = with_raw(TEXT, LENGTH, TRUE)
    asking.parameters["triton_enable_empty_final_response"].bool_param = True
    for message, wanted in ((asking, True), (with_raw(TEXT, LENGTH, TRUE), False)):
        body, length = body_of(message)
        assert ("triton_enable_empty_final_response" in json.loads(body[:length])) is wanted
