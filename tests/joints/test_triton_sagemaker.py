"""Triton's tensors by boto3, through the emulator of SageMaker's runtime: the same content type both ways."""

from __future__ import annotations

import contextlib
import json
import struct

from handler.protocols.triton.infer import SAGEMAKER_TYPE
from tests.deploy.local.servers import Loop
from tests.deploy.local.servers import local as make_local
from tests.servers import LiveServer

LENGTH = {"name": "max_tokens", "datatype": "INT32", "shape": [1, 1], "data": [2]}
TEXT = struct.pack("<I", 3) + b"a b"
TENSOR = {
    "name": "text_input",
    "datatype": "BYTES",
    "shape": [1, 1],
    "parameters": {"binary_data_size": len(TEXT)},
}


def test_binary_data_passes_sagemaker_both_ways(echo_server: LiveServer) -> None:
    head = json.dumps({"inputs": [TENSOR, LENGTH], "parameters": {"binary_data_output": True}}).encode()
    with contextlib.closing(Loop()) as loop, make_local(loop, echo_server.url) as local:
        answer = local.invoke(head + TEXT, ContentType=f"{SAGEMAKER_TYPE};json-header-size={len(head)}")
        kind, _, size = answer["ContentType"].partition(";json-header-size=")
        body = answer["Body"].read()
        plain = {**TENSOR, "data": ["a b"], "parameters": {}}
        same = local.invoke({"inputs": [plain, LENGTH]}, ContentType="application/octet-stream")
        assert json.loads(same["Body"].read())["outputs"][0]["data"] == ["a b a b"]
        assert same["ContentType"] == "application/json"
    assert kind == SAGEMAKER_TYPE
    (output,) = json.loads(body[: int(size)])["outputs"]
    assert output["parameters"] == {"binary_data_size": len(body) - int(size)}
    assert body[int(size) + 4 :] == b"a b a b"
