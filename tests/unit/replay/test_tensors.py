"""Triton's tensors in recorded requests and answers: binary data are compared as JSON is."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest

from proof.replay.comparison import Class, Seen, Traits, class_of, findings, traits
from proof.replay.exchange import Request, Response
from proof.tensors import binary, by_name, read

OCTETS = "application/octet-stream"


def document(text: str, **more: Any) -> dict[str, Any]:
    outputs = [
        {"name": "text_output", "datatype": "BYTES", "shape": [1, 1], "data": [text]},
        {"name": "output_log_probs", "datatype": "FP32", "shape": [1, 1, 2], "data": [-0.5, -0.25]},
    ]
    return {"model_name": "m", "model_version": "1", "outputs": outputs, **more}


def packed(value: dict[str, Any], *data: bytes, of: str = "outputs") -> bytes:
    """The document with the data of its first tensors behind it."""
    tensors = json.loads(json.dumps(value[of]))
    for tensor, content in zip(tensors, data, strict=False):
        del tensor["data"]
        tensor["parameters"] = {"binary_data_size": len(content)}
    return json.dumps({**value, of: tensors}, ensure_ascii=False).encode() + b"".join(data)


def answer(text: str, *, is_binary: bool) -> Response:
    value, data = document(text, id="é"), (binary(text), struct.pack("<2f", -0.5, -0.25))
    return Response(200, OCTETS, packed(value, *data)) if is_binary else Response(200, "", json.dumps(value).encode())


@pytest.mark.parametrize("is_binary", [False, True])
def test_a_text_is_compared_as_a_text(is_binary: bool) -> None:
    old, new = (answer(text, is_binary=is_binary) for text in ("a é", "a c"))
    found = findings(old, new, Traits(True), Seen())
    assert (class_of(found), found[0].name) == (Class.TEXT, "text $.outputs[].text_output[]")
    assert class_of(findings(old, new, Traits(False), Seen())) is Class.EQUAL
    assert class_of(findings(old, old._replace(body=old.body + b"x"), Traits(True), Seen())) is not Class.EQUAL


def test_the_elements_of_all_datatypes_are_read() -> None:
    formats = {"BOOL": "?", "UINT16": "H", "INT64": "q", "FP64": "d"}
    tensors = [{"name": name, "datatype": name, "shape": [2], "data": [1, 0]} for name in formats]
    data = [struct.pack(f"<2{code}", 1, 0) for code in formats.values()]
    value, rest = read(packed({"inputs": tensors}, *data, of="inputs") + b"more")
    assert [tensor["data"] for tensor in value["inputs"]] == [[1, 0]] * 4
    assert rest == b"more"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[1]",
        b'{"datatype"',
        b'[{"datatype": 1}]',
        b'{"outputs": 5, "datatype": 1}',
        b'{"outputs": [{"datatype": "BYTES"}]}',
        b'{"outputs": [{"name": "a", "datatype": "BYTES", "parameters": {"binary_data_size": 3}}]}abc',
        b'{"outputs": [{"name": "a", "datatype": "INT32", "parameters": {"binary_data_size": -3}}]}abcdefgh',
        b'{"outputs": [{"name": "a", "datatype": "WHAT", "parameters": {"binary_data_size": 4}}]}abcd',
        b'{"outputs": [{"name": "a", "datatype": "BYTES", "parameters": {"binary_data_size": "x"}}]}abcd',
        b'{"outputs": [{"name": "a", "datatype": "BYTES", "parameters": 7}]}',
        b'{"datatype":' + b"[" * 100_000,
    ],
)
def test_other_bodies_stay_as_they_are(body: bytes) -> None:
    assert by_name(body) == body


def asked(**inputs: float) -> list[bytes]:
    tensors = [
        {"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "data": ["a"]},
        *({"name": name, "datatype": "FP32", "shape": [1, 1], "data": [value]} for name, value in inputs.items()),
    ]
    return [json.dumps({"inputs": tensors}).encode(), packed({"inputs": tensors}, binary("a"), of="inputs")]


@pytest.mark.parametrize(
    ("inputs", "greedy"), [({}, True), ({"temperature": 0}, True), ({"temperature": 0.7}, False), ({"top_k": 1}, True)]
)
def test_tensors_decide_whether_a_request_is_sampled(inputs: dict[str, float], greedy: bool) -> None:
    for body in asked(**inputs):
        assert traits(Request("1", "/v2/models/m/infer", {}, body)).greedy is greedy


def test_a_prompt_about_datatypes_is_no_tensor() -> None:
    body = json.dumps({"inputs": 'a "datatype" b', "parameters": {"temperature": 1}, "datatype": {}}).encode()
    assert not traits(Request("1", "/invocations", {}, body)).greedy
