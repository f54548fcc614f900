"""Triton's infer: the tensors that are read, the words of refusals, and the tensors of a response.

The words and statuses are those that tritonserver 2.51 gave; a status of 500 is 400 here (docs/wire/triton.md).
"""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import pytest

from handler.core.errors import ServingError
from handler.core.values import Delta, Finish
from handler.protocols.kernel.body import decode
from handler.protocols.kernel.dialect import BinaryBody, ParsedRequest, WithoutEngine
from handler.protocols.triton.infer import HEADER, Infer
from handler.protocols.triton.models import TEXT as TEXTS
from handler.protocols.triton.models import TOKENS, TensorModel
from handler.protocols.triton.request import INPUTS, Route, Triton
from tests.one_test import in_one_test
from tests.unit.protocols.answers import CAPABLE, deltas, shorter, with_logits

INFER, GENERATE = Infer(), Triton(Route.GENERATE)


def tensor(name: str, *values: Any, **members: Any) -> dict[str, Any]:
    return {
        "name": name,
        "datatype": TEXTS.inputs[name].datatype,
        "shape": [1, len(values)],
        "data": [*values],
    } | members


TEXT = tensor("text_input", "a b")
LENGTH = tensor("max_tokens", 7)
SCORED = tensor("return_log_probs", True)


LONG = struct.pack("<I", 99) + b"ab"
TOO_LONG = struct.pack("<I", (1 << 23) + 1) + bytes((1 << 23) + 1)


def packed(*texts: str) -> bytes:
    return b"".join(struct.pack("<I", len(text.encode())) + text.encode() for text in texts)


def binary(name: str, data: bytes, *shape: int, size: int | None = None) -> dict[str, Any]:
    found = tensor(
        name, shape=[*(shape or (1, 1))], parameters={"binary_data_size": len(data) if size is None else size}
    )
    del found["data"]
    return found


def parsed(*inputs: Any, tail: bytes = b"", **members: Any) -> ParsedRequest:
    return INFER.parse(BinaryBody({"inputs": [*inputs], **members}, tail), CAPABLE)


def refused(*inputs: Any, tail: bytes = b"", **members: Any) -> str:
    return refused_body(BinaryBody({"inputs": [*inputs], **members}, tail))


def refused_body(body: Any) -> str:
    with pytest.raises(ServingError) as caught:
        INFER.parse(body, CAPABLE)
    response = INFER.errors_of(body, CAPABLE).whole(caught.value)
    assert response.status == 400
    return str(json.loads(response.body)["error"])


def response(*inputs: Any, scripted: Any = None, **members: Any) -> tuple[dict[str, Any], bytes]:
    """The JSON document and the binary data of a response."""
    call = parsed(TEXT, LENGTH, *inputs, **members)
    call.reply.start(0, 3)
    data = b"".join(call.reply.feed(0, delta) for delta in scripted or deltas())
    assert call.reply.finished
    assert call.headers is not None
    headers = dict(call.headers(None))
    assert (HEADER in headers) is (call.reply.content_type == "application/octet-stream")
    length = int(headers.get(HEADER, len(data)))
    return json.loads(data[:length]), data[length:]


# -- requests --------------------------------------------------------------------------------------------------------


def test_tensors_ask_for_the_same_as_generate() -> None:
    inputs = {
        "max_tokens": 7,
        "temperature": 0.5,
        "top_k": 3,
        "random_seed": (1 << 64) - 1,
        "stop_words": ["x", "y"],
        "bad_words": ["z"],
        "return_log_probs": True,
        "beam_width": 1,
    }
    wanted = GENERATE.parse({"text_input": "a b", **inputs}, CAPABLE).requests
    values = {name: value if isinstance(value, list) else [value] for name, value in inputs.items()}
    assert parsed(TEXT, *(tensor(name, *value) for name, value in values.items())).requests == wanted
    codes = {"INT32": "i", "FP32": "f", "UINT64": "Q", "BOOL": "?"}
    data = {
        name: packed(*value)
        if name.endswith("words")
        else struct.pack(f"<{codes[TEXTS.inputs[name].datatype]}", *value)
        for name, value in values.items()
    }
    tensors = [binary(name, item, 1, len(values[name])) for name, item in data.items()]
    text = packed("a b")
    assert parsed(binary("text_input", text), *tensors, tail=b"".join([text, *data.values()])).requests == wanted


def test_json_and_binary_tensors_may_be_mixed_nested_or_without_batch() -> None:
    call = parsed(
        {**TEXT, "shape": [1], "data": [[["a b"]]]},
        binary("max_tokens", struct.pack("<i", 7), 1),
        tensor("stop_words", "x", "y", shape=[2]),
        tail=struct.pack("<i", 7),
    )
    assert (call.requests[0].prompt, call.requests[0].sampling.max_new_tokens) == ("a b", 7)
    assert call.requests[0].sampling.stop == ("x", "y")


def test_every_input_of_generate_is_a_tensor() -> None:
    assert list(TEXTS.inputs) == ["text_input", *INPUTS]


def test_a_response_is_whole_also_for_stream() -> None:
    call = parsed(TEXT, tensor("stream", True))
    assert (call.streams, call.ignored) == (False, ["stream"])
    assert parsed(TEXT, tensor("stream", False), tensor("streaming", True)).ignored == ["streaming"]
    for name in ("stream", "streaming"):
        call = parsed(TEXT, parameters={name: True})
        assert (call.streams, call.ignored) == (False, [f"parameters.{name}"])
    assert not parsed(TEXT, parameters={"stream": False}).ignored


@in_one_test(
    ("parameters", "ignored"),
    [
        ({"binary_data_output": True, "sequence_id": 0, "sequence_start": False}, []),
        ({"priority": 1, "timeout": 5, "mine": "x"}, ["parameters.mine"]),
        ({"priority": 0, "timeout": 0}, []),
    ],
)
def test_parameters_of_the_request(parameters: dict[str, Any], ignored: list[str]) -> None:
    assert parsed(TEXT, parameters=parameters).ignored == ignored


def test_parameters_may_contain_sampling_parameters_as_for_vllms_backend() -> None:
    """gRPC's parameters have no numbers with fractions in older clients, which send them as strings."""
    read = parsed(TEXT, LENGTH, parameters={"temperature": "0.5", "seed": 3, "max_tokens": 9, "stop": "x"})
    sampling = read.requests[0].sampling
    assert (sampling.temperature, sampling.seed, sampling.max_new_tokens) == (0.5, 3, 7)
    assert (sampling.stop, sampling.do_sample) == (("x",), True)
    assert read.ignored == ["parameters.max_tokens"]
    assert refused(TEXT, parameters={"temperature": "warm"}).startswith('temperature="warm": ')


def test_priority_and_timeout_reach_the_queue() -> None:
    (request,) = parsed(TEXT, parameters={"priority": 3, "timeout": 2_500_000}).requests
    assert (request.priority, request.timeout) == (3, 2.5)
    (request,) = parsed(TEXT).requests
    assert (request.priority, request.timeout) == (0, math.inf)
    for name in ("priority", "timeout"):
        for value in (-1, 1.5, True, "1", 1 << 64):
            assert f"Unable to parse '{name}': attempt to access JSON non-unsigned" in refused(
                TEXT, parameters={name: value}
            )


def test_unsigned_integers_of_older_backends() -> None:
    call = parsed(TEXT, {**LENGTH, "datatype": "UINT32"}, {**tensor("random_seed", 7), "datatype": "INT64"})
    assert call.requests[0].sampling.max_new_tokens == parsed(TEXT, LENGTH).requests[0].sampling.max_new_tokens
    data = struct.pack("<I", 1 << 31)
    assert "max_tokens=2147483648" in refused(TEXT, {**binary("max_tokens", data), "datatype": "UINT32"}, tail=data)


# -- refusals ----------------------------------------------------------------------------------------------------------

_FIELDS = "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters'"


@in_one_test(
    ("body", "says"),
    [
        ([], "Unable to parse 'inputs': attempt to access non-existing object member 'inputs'"),
        ({}, "Unable to parse 'inputs': attempt to access non-existing object member 'inputs'"),
        ({"inputs": {}}, "Unable to parse 'inputs': attempt to access JSON non-array as array"),
        ({"inputs": []}, "missing required input(s) ['text_input']"),
        ({"inputs": [1]}, "Unable to parse 'name'"),
        ({"inputs": [TEXT], "id": 7}, "Unable to parse 'id': attempt to access JSON non-string as string"),
        ({"inputs": [TEXT], "outputs": {}}, "Unable to parse 'outputs': attempt to access JSON non-array as array"),
        ({"inputs": [TEXT], "outputs": [{}]}, "Unable to parse 'name': attempt to access non-existing object member"),
        (
            {"inputs": [TEXT], "outputs": [{"name": "text_output"}] * 2},
            "output 'text_output' already exists in request",
        ),
        ({"inputs": [TEXT], "outputs": [{"name": "x"}]}, "unexpected inference output 'x' for model 'model'"),
        ({"inputs": [TEXT], "parameters": []}, "Unable to parse 'parameters'"),
        ({"inputs": [TEXT], "parameters": {"a": None}}, "parameter 'a' has invalid type."),
        ({"inputs": [TEXT], "parameters": {"triton_a": 1}}, "parameter keys starting with 'triton_' are reserved"),
        ({"inputs": [TEXT], "parameters": {"sequence_id": 3}}, "sequence_id=3: the model keeps no state"),
        ({"inputs": [TEXT], "parameters": {"binary_data_output": 1}}, "Unable to parse 'binary_data_output'"),
    ],
)
def test_bad_documents(body: Any, says: str) -> None:
    assert says in refused_body(body)


@in_one_test(
    ("bad", "says"),
    [
        ({"name": "nope"}, "unexpected inference input 'nope' for model 'model'"),
        ({"name": "text_input"}, "[request id: <id_unknown>] input 'text_input' already exists in request"),
        ({"datatype": "STRING"}, "invalid datatype for input max_tokens"),
        ({"datatype": "INT64"}, "inference input 'max_tokens' data-type is 'INT64', but model 'model' expects 'INT32'"),
        ({"datatype": "UINT64"}, "inference input 'max_tokens' data-type is 'UINT64', but model 'model' expects"),
        (
            {"shape": [1, 2], "data": [1, 2]},
            "shape for input 'max_tokens' for model 'model'. Expected [-1,1], got [1,2]",
        ),
        (
            {"shape": [1, 1, 1]},
            "unexpected shape for input 'max_tokens' for model 'model'. Expected [-1,1], got [1,1,1]",
        ),
        ({"shape": [0, 1], "data": []}, "unexpected shape for input 'max_tokens'"),
        ({"data": [[1], [2]]}, "Unable to parse 'data': Shape does not match true shape of 'data' field"),
        ({"shape": []}, "unexpected shape for input 'max_tokens'"),
        ({"shape": [1, 0], "data": []}, "unexpected shape for input 'max_tokens'"),
        ({"shape": [1 << 63, 1]}, "inference request batch-size must be <= 1 for 'model'"),
        ({"shape": [1, 1 << 63]}, "unexpected shape for input 'max_tokens'"),
        ({"shape": [1, -1]}, "Unable to parse 'shape': attempt to access JSON non-unsigned-integer"),
        ({"shape": ["1"]}, "Unable to parse 'shape'"),
        ({"shape": [True]}, "Unable to parse 'shape'"),
        ({"shape": 1}, "Unable to parse 'shape': attempt to access JSON non-array as array"),
        ({"data": [1, 2]}, "Unable to parse 'data': Shape does not match true shape of 'data' field"),
        ({"data": []}, "Unable to parse 'data': Shape does not match"),
        ({"data": 1}, "Unable to parse 'data': attempt to access JSON non-array as array"),
        ({"data": [1.0]}, "attempt to access JSON non-signed-integer as signed-integer"),
        ({"data": ["1"]}, "attempt to access JSON non-signed-integer as signed-integer"),
        ({"data": [None]}, "attempt to access JSON non-signed-integer as signed-integer"),
        ({"data": [True]}, "attempt to access JSON non-signed-integer as signed-integer"),
        ({"data": [1 << 31]}, "max_tokens=2147483648"),
        ({"data": None}, f"{_FIELDS}, 'shared_memory_region' in 'parameters'. But no field is set"),
        ({"parameters": {"binary_data_size": 4}}, f"{_FIELDS}, 'shared_memory_region' in 'parameters'. But set 'data'"),
        ({"data": None, "parameters": {"shared_memory_region": "a"}}, "Unable to find shared memory region: 'a'"),
    ],
)
def test_bad_tensors(bad: dict[str, Any], says: str) -> None:
    assert says in refused(TEXT, {**LENGTH, **bad})


def test_values_of_the_wrong_kind() -> None:
    assert "Unable to parse JSON bytes array" in refused({**TEXT, "data": [1]})
    assert "non-boolean as boolean" in refused(TEXT, tensor("return_log_probs", 1))
    assert "non-number as number" in refused(TEXT, tensor("temperature", None))
    assert parsed(TEXT, tensor("temperature", 1)).requests[0].sampling.temperature == 1


@in_one_test(
    ("bad", "tail", "says"),
    [
        (binary("max_tokens", b"123"), b"123", "mismatch for input 'max_tokens' for model 'model'. Expected 4, got 3"),
        (binary("max_tokens", b"1234", size=8), b"12345678", "Expected 4, got 8"),
        (binary("max_tokens", b"1234"), b"", "'max_tokens', expecting 4 additional bytes for model 'model'"),
        (binary("max_tokens", b"", size=1 << 62), b"1", "unexpected size for input 'max_tokens'"),
        (binary("max_tokens", b"1234"), b"12345", "unexpected additional input data for model 'model'"),
        (LENGTH, b"1", "unexpected additional input data for model 'model'"),
        (binary("max_tokens", b"", size=-1), b"", "Unable to parse 'binary_data_size'"),
        (binary("stop_words", b"abc", 1, 1), b"abc", "incomplete string length indicator"),
        (binary("stop_words", LONG, 1, 1), LONG, "of length 99 but only 2 bytes available"),
        (binary("stop_words", packed("a", "b"), 1, 1), packed("a", "b"), "expected 1 string elements"),
        (binary("stop_words", packed("a"), 1, 2), packed("a"), "for model 'model', got 1"),
        (binary("stop_words", bytes(1 << 20), 1, 1 << 18), bytes(1 << 20), "262144 elements; at most 131072 are read"),
        (binary("stop_token_ids", b"", 1, 1 << 22), b"", "has 4194304 elements; at most 2097152 are read"),
        (binary("text_input", TOO_LONG), TOO_LONG, "has a text of 8388609 bytes; at most 8388608 are read"),
        (binary("stop_words", b"\x01\0\0\0\xff", 1, 1), b"\x01\0\0\0\xff", "input 'stop_words' must be UTF-8"),
    ],
)  # fmt: skip
def test_bad_binary_data(bad: dict[str, Any], tail: bytes, says: str) -> None:
    others = [] if bad["name"] == "text_input" else [TEXT]
    assert says in refused(*others, bad, tail=tail)


@in_one_test(
    ("header", "length"),
    [(None, None), ("10", 10), ("3", 3), ("0", 0)],
)
def test_the_header_splits_the_body(header: str | None, length: int | None) -> None:
    assert INFER.document_length(b"0123456789", {} if header is None else {HEADER: header}) == length


@in_one_test("header", ["11", "-1", "x", "", "9" * 400, "\u0663", "1" * 18 + "x"])
def test_a_header_beyond_the_body_is_refused(header: str) -> None:
    with pytest.raises(ServingError, match=r"inference header size should be in range \(0, 10\), got: "):
        INFER.document_length(b"0123456789", {HEADER: header})


# -- responses ---------------------------------------------------------------------------------------------------------

SAID = 'Deep "Learning" 😀\n'


def test_a_response_of_json() -> None:
    document, data = response(tensor("exclude_input_in_output", True), id="7")
    assert list(document) == ["id", "model_name", "model_version", "outputs"]
    assert document["outputs"] == [{"name": "text_output", "datatype": "BYTES", "shape": [1], "data": [SAID]}]
    assert not data
    assert "id" not in response()[0]


def test_outputs_are_in_the_models_order_and_each_has_its_own_form() -> None:
    names = [
        {"name": "sequence_index"},
        {"name": "batch_index"},
        {"name": "output_log_probs", "parameters": {"binary_data": True}},
        {"name": "text_output"},
        {"name": "finish_reason", "parameters": {"binary_data": True}},
    ]
    document, data = response(SCORED, outputs=names, parameters={"binary_data_output": True})
    found = {tensor["name"]: tensor for tensor in document["outputs"]}
    assert list(found) == ["text_output", "output_log_probs", "finish_reason", "batch_index", "sequence_index"]
    assert found["batch_index"] == {"name": "batch_index", "datatype": "INT32", "shape": [1, 1], "data": [0]}
    assert found["output_log_probs"]["shape"] == [1, 1, 5]
    assert "data" in found["text_output"], "a listed output is JSON unless it says otherwise"
    sizes = [found[name]["parameters"]["binary_data_size"] for name in ("output_log_probs", "finish_reason")]
    assert sizes == [20, len(packed("stop"))]
    assert struct.unpack("<5f", data[:20]) == (pytest.approx(-0.05), -1.25, -0.5, -0.25, -0.125)
    assert data[20:] == packed("stop")


def test_an_output_whose_flag_is_missing_is_missing() -> None:
    """perf_analyzer names all outputs of the model."""
    document, _ = response(outputs=[{"name": name} for name in TEXTS.outputs])
    assert {tensor["name"] for tensor in document["outputs"]} == {
        *("text_output", "finish_reason", "num_input_tokens", "num_output_tokens", "batch_index", "sequence_index")
    }


def test_all_outputs_are_binary_if_the_request_says_so() -> None:
    document, data = response(tensor("return_log_probs", True), parameters={"binary_data_output": True})
    assert [tensor["name"] for tensor in document["outputs"]] == ["text_output", "output_log_probs", "cum_log_probs"]
    assert data.startswith(packed(f"a b{SAID}"))
    assert sum(tensor["parameters"]["binary_data_size"] for tensor in document["outputs"]) == len(data)


def test_shapes_have_a_batch_dimension_if_the_prompt_has_one() -> None:
    logits = [tensor(f"return_{kind}_logits", True) for kind in ("context", "generation")]
    document, _ = response(*logits, tensor("return_log_probs", True), scripted=with_logits())
    shapes = {tensor["name"]: tensor["shape"] for tensor in document["outputs"]}
    assert shapes.pop("text_output") == [1], "TensorRT-LLM's models send it without"
    for name, shape in shapes.items():
        assert len(shape) == 1 + len(TEXTS.outputs[name].dims), name
        assert shape[0] == 1
    call = parsed({**TEXT, "shape": [1]}, tensor("return_log_probs", True, shape=[1]))
    call.reply.start(0, 3)
    plain = json.loads(b"".join(call.reply.feed(0, delta) for delta in deltas()))
    assert [tensor["shape"] for tensor in plain["outputs"]] == [[1], [1, 5], [1]]


def test_sequences_are_elements_of_each_output() -> None:
    names = [{"name": name} for name in ("text_output", "num_input_tokens", "num_output_tokens", "cum_log_probs")]
    document, _ = response(tensor("beam_width", 2), SCORED, scripted=[*deltas(0), *shorter(1)], outputs=names)
    shapes = {tensor["name"]: tensor["shape"] for tensor in document["outputs"]}
    assert shapes == {
        "text_output": [2],
        "cum_log_probs": [1, 2],
        "num_input_tokens": [1, 1],
        "num_output_tokens": [1, 2],
    }


def test_a_log_probability_that_is_not_finite_is_nan_in_binary_data() -> None:
    script = [deltas()[0]._replace(finish=Finish.LENGTH)]
    token = script[0].tokens[0]._replace(logprob=-math.inf)
    names = [{"name": "output_log_probs", "parameters": {"binary_data": True}}]
    _, data = response(SCORED, scripted=[script[0]._replace(tokens=[token])], outputs=names)
    assert struct.unpack("<f", data) == (-math.inf,)


def test_a_document_with_a_key_twice_is_refused() -> None:
    with pytest.raises(ServingError, match="twice"):
        decode(b'{"inputs":[],"inputs":[]}', unique_keys=INFER.unique_keys)


def test_nested_data_is_read_once_however_deep() -> None:
    words = [str(number) for number in range(2000)]
    nested: Any = [words[0]]
    for _ in range(50):
        nested = [nested]
    call = parsed(TEXT, tensor("stop_words", *words[:3], data=[nested, *words[1:3]]))
    assert call.requests[0].sampling.stop == ("0", "1", "2")
    assert "Shape does not match" in refused(TEXT, {**LENGTH, "data": [nested, *words]})


# -- token ids, and the ensemble of 2023 -------------------------------------------------------------------------------


def of_model(model: TensorModel, **values: Any) -> list[dict[str, Any]]:
    """The tensors of a request, each with the batch dimension before its own."""
    return [
        {
            "name": name,
            "datatype": model.inputs[name].datatype,
            "shape": [
                1,
                *(dim if dim > 0 else len(value) // len(model.inputs[name].dims) for dim in model.inputs[name].dims),
            ],
            "data": value,
        }
        for name, value in values.items()
    ]


def outputs_of(*inputs: Any, scripted: Any = None, **members: Any) -> dict[str, Any]:
    call = parsed(*inputs, **members)
    call.reply.start(0, 3)
    document = json.loads(b"".join(call.reply.feed(0, delta) for delta in scripted or deltas()))
    return {tensor["name"]: (tensor["datatype"], tensor["shape"], tensor["data"]) for tensor in document["outputs"]}


IDS = [token.id for delta in deltas() for token in delta.tokens]
ASKED = {"input_ids": [1, 2, 3], "input_lengths": [2], "request_output_len": [5]}


def test_token_ids_are_the_prompt() -> None:
    words = {"stop_words_list": [4, 0, 1, -1], "runtime_top_k": [3], "runtime_top_p": [0.5], "end_id": [5]}
    (request,) = parsed(*of_model(TOKENS, **ASKED, **words)).requests
    sampling = request.sampling
    assert (request.prompt_ids, sampling.max_new_tokens, request.eos_token_id) == ((1, 2), 5, 5)
    assert (sampling.top_k, sampling.top_p, sampling.do_sample, sampling.stop_token_ids) == (3, 0.5, True, (4, 5))


@in_one_test(
    ("more", "before"), [({}, [1, 2]), ({"exclude_input_in_output": [True]}, []), ({"beam_width": [1]}, [1, 2])]
)
def test_the_response_to_token_ids_is_token_ids(more: dict[str, Any], before: list[int]) -> None:
    ids = [*before, *IDS]
    assert outputs_of(*of_model(TOKENS, **ASKED, **more)) == {
        "output_ids": ("INT32", [1, 1, len(ids)], ids),
        "sequence_length": ("INT32", [1, 1], [len(ids)]),
    }


def test_shorter_sequences_of_token_ids_are_padded() -> None:
    found = outputs_of(*of_model(TOKENS, **ASKED, beam_width=[2]), scripted=[*deltas(0), *shorter(1)])
    _, shape, data = found["output_ids"]
    lengths = found["sequence_length"][2]
    assert shape == [1, 2, max(lengths)]
    assert data[shape[2] + lengths[1] :] == [-1] * (max(lengths) - lengths[1])
    assert data[:2] == data[shape[2] : shape[2] + 2] == [1, 2]


def test_outputs_beside_token_ids() -> None:
    names = [{"name": name} for name in ("output_ids", "cum_log_probs", "num_input_tokens", "batch_index")]
    found = outputs_of(*of_model(TOKENS, **ASKED, return_log_probs=[True]), outputs=names)
    assert list(found) == ["output_ids", "cum_log_probs", "num_input_tokens", "batch_index"]
    assert found["cum_log_probs"][1] == [1, 1]


@in_one_test(
    ("inputs", "says"),
    [
        ({**ASKED, "input_lengths": [4]}, "input_lengths=4: must be from 1 to 3"),
        ({**ASKED, "input_lengths": [0]}, "input_lengths=0: must be from 1 to 3"),
        ({**ASKED, "input_ids": []}, "input_ids=[]: must contain at least one token"),
        ({**ASKED, "input_ids": [-1]}, "must contain integers from 0"),
        ({**ASKED, "stop": [True]}, "stop=true: needs the id of the request to stop"),
        ({**ASKED, "request_output_len": [0]}, "request_output_len=0: must be"),
        ({**ASKED, "beam_search_diversity_rate": [0.5]}, "no diverse beam search"),
        ({**ASKED, "stop_words_list": [4, 5, 1, -1]}, "stop_words_list=[[4, 5], [1, -1]]: must have token ids"),
    ],
)
def test_refused_token_requests(inputs: dict[str, Any], says: str) -> None:
    assert says in refused(*of_model(TOKENS, **inputs))


def test_a_word_list_has_two_rows() -> None:
    words = {"name": "stop_words_list", "datatype": "INT32", "shape": [1, 3, 1], "data": [4, 1, 1]}
    assert "Expected [-1,2,-1], got [1,3,1]" in refused(*of_model(TOKENS, **ASKED), words)


def test_texts_and_token_ids_do_not_mix() -> None:
    assert "unexpected inference input 'text_input'" in refused(*of_model(TOKENS, **ASKED), TEXT)
    assert "unexpected inference output 'text_output'" in refused(
        *of_model(TOKENS, **ASKED), outputs=[{"name": "text_output"}]
    )
    assert "unexpected inference input 'runtime_top_k'" in refused(TEXT, *of_model(TOKENS, runtime_top_k=[1]))


def old(name: str, datatype: str, *values: Any) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": [1, len(values)], "data": [*values]}


def test_the_ensemble_of_2023() -> None:
    inputs = [
        old("INPUT_0", "BYTES", "a b"),
        old("INPUT_1", "UINT32", 7),
        old("INPUT_2", "BYTES", ""),
        old("INPUT_3", "BYTES", "x"),
        old("runtime_top_k", "UINT32", 1),
        old("len_penalty", "FP32", 1.0),
    ]
    (request,) = parsed(*inputs).requests
    assert (request.prompt, request.sampling.max_new_tokens, request.sampling.stop) == ("a b", 7, ("x",))
    assert request.sampling.do_sample is False
    assert outputs_of(*inputs, outputs=[{"name": "OUTPUT_0"}]) == {"OUTPUT_0": ("BYTES", [1], [f"a b{SAID}"])}


@in_one_test("shape", [[1, 10**12, 0], [2**63 - 1], [1, 2**63 - 1]])
@in_one_test("name", ["stop_words_list", "embedding_bias"])
def test_a_dimension_is_bounded_before_it_is_used(name: str, shape: list[int]) -> None:
    datatype = TOKENS.inputs[name].datatype
    tensor = {"name": name, "datatype": datatype, "shape": shape, "data": [1]}
    assert f"unexpected shape for input '{name}'" in refused(*of_model(TOKENS, **ASKED), tensor)


# -- stop ------------------------------------------------------------------------------------------------------------

STOP = {"name": "stop", "datatype": "BOOL", "shape": [1, 1], "data": [True]}
STOPPED = Delta(0, 0, (), Finish.STOP)


@in_one_test("others", [[], [TEXT], of_model(TOKENS, **{**ASKED, "request_output_len": [0]})])
def test_stop_names_other_requests_whatever_else_it_says(others: list[Any]) -> None:
    call = parsed(*others, STOP, id="9")
    assert (call.course, call.requests, call.streams) == (WithoutEngine(stops="9"), (), False)
    document = json.loads(call.reply.feed(0, Delta(0, 0, ())))
    assert call.reply.finished
    assert document == {"id": "9", "model_name": "model", "model_version": "1", "outputs": []}
    assert refused(*others, STOP) == "stop=true: needs the id of the request to stop"


def test_stop_is_a_flag_or_words() -> None:
    call = parsed(TEXT, {**STOP, "data": [False]}, id="9")
    assert (call.course, call.requests[0].id, call.requests[0].sampling.stop) == (None, "9", ())
    assert parsed(TEXT, tensor("stop", "x", "y")).requests[0].sampling.stop == ("x", "y")
    assert "Expected [-1,1], got [1,2]" in refused(TEXT, {**STOP, "shape": [1, 2], "data": [True, True]})
    assert "data-type is 'INT32', but model 'model' expects 'BYTES'" in refused(TEXT, {**STOP, "datatype": "INT32"})


def test_a_stopped_response_has_what_there_is() -> None:
    begun = deltas()[:2]
    ids = [1, 2, *(token.id for delta in begun for token in delta.tokens)]
    assert outputs_of(*of_model(TOKENS, **ASKED), scripted=[*begun, STOPPED])["output_ids"][2] == ids
    assert outputs_of(*of_model(TOKENS, **ASKED), scripted=[STOPPED])["sequence_length"][2] == [2]


def test_sequences_that_had_ended_stay_as_they_were() -> None:
    document, _ = response(
        *(tensor("beam_width", 2), tensor("return_finish_reason", True)),
        scripted=[*shorter(1), *deltas(0)[:2], STOPPED, STOPPED._replace(sequence=1)],
    )
    whole, _ = response(
        *(tensor("beam_width", 2), tensor("return_finish_reason", True)), scripted=[*shorter(1), *deltas(0)]
    )
    texts, reasons = (tensor["data"] for tensor in document["outputs"])
    assert texts[1] == whole["outputs"][0]["data"][1]
    assert whole["outputs"][0]["data"][0].startswith(texts[0])
    assert reasons == ["stop", whole["outputs"][1]["data"][1]]
