"""The same requests to the real tritonserver and to ours: statuses, bodies, framing and words of errors.

`DIFFERENT` pins what differs. docs/wire/triton.md says it in "Differences from Triton".
"""

from __future__ import annotations

import gzip
import json
import re
import struct
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import grpc
import httpx
import pytest
from google.protobuf import json_format
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.clients.driver import skipped_without
from tests.clients.tritonserver import DECOUPLED, PLAIN, Tritonserver, tritonserver
from tests.servers import LiveServer, free_port, http, serve

pytestmark = pytest.mark.clients

HEADER = "inference-header-content-length"


class Pair(NamedTuple):
    real: Tritonserver
    ours: Tritonserver


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Pair, LiveServer]]:
    port = free_port()
    own = ("-o", f"option.model_name={PLAIN}", "-o", "option.echo_cues=true", "--grpc-port", str(port))
    with (
        skipped_without(),
        tritonserver(tmp_path_factory.mktemp("triton")) as real,
        serve("--engine", "echo", *own) as ours,
    ):
        ours.wait_ready()
        yield Pair(real, Tritonserver(ours.url, port)), ours


@pytest.fixture
def pair(servers: tuple[Pair, LiveServer]) -> Pair:
    """Both, ready: the engine echo starts again when it has failed on cue."""
    servers[1].wait_ready()
    return servers[0]


# -- requests ----------------------------------------------------------------------------------------------------------


def tensor(name: str, datatype: str, *values: Any, **members: Any) -> dict[str, Any]:
    found = {"name": name, "shape": [1, len(values)], "datatype": datatype, "data": [*values], **members}
    return {key: value for key, value in found.items() if value is not None}


def packed(*texts: str) -> bytes:
    return b"".join(struct.pack("<I", len(text.encode())) + text.encode() for text in texts)


def binary(name: str, datatype: str, data: bytes, **members: Any) -> dict[str, Any]:
    return tensor(name, datatype, 0, **{"data": None, "parameters": {"binary_data_size": len(data)}, **members})


TEXT, LENGTH = tensor("text_input", "BYTES", "a b é"), tensor("max_tokens", "INT32", 4)
BARE = tensor("exclude_input_in_output", "BOOL", True)
ASK = [TEXT, LENGTH, BARE]
IN = binary("text_input", "BYTES", packed("a b é"))
FOUR = struct.pack("<i", 4)


class Sent(NamedTuple):
    """A request by HTTP. `document` goes before `data`, whose presence sends the header."""

    path: str
    document: Any = None
    data: bytes | None = None
    headers: Mapping[str, str] = {}
    method: str = "POST"

    def to(self, url: str) -> httpx.Response:
        head = self.document if isinstance(self.document, bytes) else json.dumps(self.document).encode()
        headers = {**({HEADER: str(len(head))} if self.data is not None else {}), **self.headers}
        content = b"" if self.document is None else head + (self.data or b"")
        return http.request(self.method, url + self.path, content=content, headers=headers)


def infer(*inputs: Any, data: bytes | None = None, headers: Mapping[str, str] = {}, **members: Any) -> Sent:
    return Sent(f"/v2/models/{PLAIN}/infer", {"inputs": [*inputs], **members}, data, headers)


def instead(**members: Any) -> Sent:
    """The request with another `max_tokens`."""
    return infer(TEXT, {key: value for key, value in {**LENGTH, **members}.items() if value is not None}, BARE)


def got(path: str, method: str = "GET", document: Any = None) -> Sent:
    return Sent(path, document, method=method)


OUTPUT = {"name": "text_output"}
LOGPROBS = tensor("return_log_probs", "BOOL", True)
REQUESTS: dict[str, Sent] = {
    # answers
    "json": infer(*ASK),
    "an id": infer(*ASK, id="7"),
    "an empty id": infer(*ASK, id=""),
    "a version": infer(*ASK)._replace(path=f"/v2/models/{PLAIN}/versions/1/infer"),
    "log-probabilities": infer(*ASK, LOGPROBS),
    "an output": infer(*ASK, LOGPROBS, outputs=[OUTPUT]),
    "an output twice": infer(*ASK, outputs=[OUTPUT, OUTPUT]),
    "outputs in another order": infer(*ASK, LOGPROBS, outputs=[{"name": "cum_log_probs"}, OUTPUT]),
    "no outputs": infer(*ASK, outputs=[]),
    "binary input": infer(IN, LENGTH, BARE, data=packed("a b é")),
    "binary inputs": infer(IN, binary("max_tokens", "INT32", FOUR), BARE, data=packed("a b é") + FOUR),
    "binary output": infer(*ASK, parameters={"binary_data_output": True}),
    "binary outputs": infer(*ASK, LOGPROBS, parameters={"binary_data_output": True}),
    "a binary output": infer(*ASK, outputs=[{**OUTPUT, "parameters": {"binary_data": True}}]),
    "a listed output beside the flag": infer(*ASK, outputs=[OUTPUT], parameters={"binary_data_output": True}),
    "one output binary, one not": infer(
        *ASK, LOGPROBS, outputs=[{**OUTPUT, "parameters": {"binary_data": True}}, {"name": "cum_log_probs"}]
    ),
    "unknown members": infer(*ASK, nonsense=[1], parameters={"custom": 3, "text": "a", "real": 0.5}),
    "nested data": infer({**TEXT, "data": [["a b é"]]}, {**LENGTH, "data": [[[4]]]}, BARE),
    "priority and timeout": infer(*ASK, parameters={"priority": 1, "timeout": 60_000_000}),
    "a number without a fraction": infer(*ASK, tensor("temperature", "FP32", 1)),
    "text of no characters": infer({**TEXT, "data": [""]}, LENGTH, BARE),
    "other types of content": infer(*ASK, headers={"content-type": "text/plain", "accept": "text/html"}),
    "a query": infer(*ASK)._replace(path=f"/v2/models/{PLAIN}/infer?a=1"),
    "gzip": Sent(
        f"/v2/models/{PLAIN}/infer",
        gzip.compress(json.dumps({"inputs": ASK}).encode()),
        headers={"content-encoding": "gzip"},
    ),
    "deflate": Sent(
        f"/v2/models/{PLAIN}/infer",
        zlib.compress(json.dumps({"inputs": ASK}).encode()),
        headers={"content-encoding": "deflate"},
    ),
    # faults of the request
    "an unknown model": infer(*ASK)._replace(path="/v2/models/nope/infer"),
    "an unknown version": infer(*ASK)._replace(path=f"/v2/models/{PLAIN}/versions/2/infer"),
    "a version of letters": infer(*ASK)._replace(path=f"/v2/models/{PLAIN}/versions/x/infer"),
    "a slash at the end": infer(*ASK)._replace(path=f"/v2/models/{PLAIN}/infer/"),
    "GET": got(f"/v2/models/{PLAIN}/infer"),
    "no body": got(f"/v2/models/{PLAIN}/infer", "POST"),
    "no JSON": Sent(f"/v2/models/{PLAIN}/infer", b"{"),
    "a list": Sent(f"/v2/models/{PLAIN}/infer", []),
    "no inputs": Sent(f"/v2/models/{PLAIN}/infer", {}),
    "inputs of another kind": Sent(f"/v2/models/{PLAIN}/infer", {"inputs": 1}),
    "inputs without elements": infer(),
    "an input missing": infer(LENGTH),
    "an unknown input": infer(*ASK, tensor("nope", "INT32", 1)),
    "an unknown output": infer(*ASK, outputs=[{"name": "nope"}]),
    "an output without a name": infer(*ASK, outputs=[{}]),
    "outputs of another kind": infer(*ASK, outputs={}),
    "an input twice": infer(TEXT, *ASK),
    "an id that is a number": infer(*ASK, id=7),
    "a parameter that is a list": infer(*ASK, parameters={"a": [1]}),
    "a reserved parameter": infer(*ASK, parameters={"triton_a": 1}),
    "parameters of another kind": infer(*ASK, parameters=[]),
    "a flag of another kind": infer(*ASK, parameters={"binary_data_output": 1}),
    "a flag of an output of another kind": infer(*ASK, outputs=[{**OUTPUT, "parameters": {"binary_data": 1}}]),
    # faults of a tensor
    "no datatype": instead(datatype=None),
    "no shape": instead(shape=None),
    "no data": instead(data=None),
    "data twice": instead(parameters={"binary_data_size": 4}),
    "shared memory": instead(data=None, parameters={"shared_memory_region": "a", "shared_memory_byte_size": 4}),
    "an unknown datatype": instead(datatype="INT128"),
    "another datatype": instead(datatype="INT64"),
    "no batch dimension": instead(shape=[1]),
    "another shape": instead(shape=[1, 2], data=[4, 4]),
    "a shape of zeros": instead(shape=[1, 0], data=[]),
    "a batch too large": infer({**TEXT, "shape": [2, 1], "data": ["a", "b"]}, LENGTH),
    "2^63 elements": instead(shape=[1, 1 << 63]),
    "2^64 elements": instead(shape=[1, 1 << 64]),
    "a negative dimension": instead(shape=[1, -1]),
    "a shape of texts": instead(shape=["1", "1"]),
    "too few data": instead(data=[]),
    "too many data": instead(data=[4, 4]),
    "data of another kind": instead(data=4),
    "a number with a fraction": instead(data=[4.5]),
    "a text for a number": instead(data=["4"]),
    "null for a number": instead(data=[None]),
    "NaN": Sent(
        f"/v2/models/{PLAIN}/infer",
        json.dumps({"inputs": [*ASK, tensor("temperature", "FP32", 0)]}).replace("[0]", "[NaN]").encode(),
    ),
    "a number for a boolean": infer(TEXT, LENGTH, {**BARE, "data": [1]}),
    "a number for a text": infer({**TEXT, "data": [1]}, LENGTH),
    # faults of binary data
    "a length beyond the body": infer(*ASK, data=b"", headers={HEADER: "99999"}),
    "a negative length": infer(*ASK, data=b"", headers={HEADER: "-1"}),
    "a length too short": infer(*ASK, data=b"", headers={HEADER: "9"}),
    "a length of letters": infer(*ASK, data=b"", headers={HEADER: "x"}),
    "binary data without the header": Sent(
        f"/v2/models/{PLAIN}/infer", json.dumps({"inputs": [IN, LENGTH]}).encode() + packed("a b é")
    ),
    "more data than announced": infer(IN, LENGTH, BARE, data=packed("a b é") + b"x"),
    "fewer data than announced": infer(IN, LENGTH, BARE, data=packed("a b é")[:-1]),
    "three bytes for four": infer(TEXT, binary("max_tokens", "INT32", b"123"), data=b"123"),
    "a text that runs over": infer(binary("text_input", "BYTES", b"\x63\0\0\0ab"), LENGTH, data=b"\x63\0\0\0ab"),
    "a length that is cut off": infer(binary("text_input", "BYTES", b"abc"), LENGTH, data=b"abc"),
    "two texts for one": infer(binary("text_input", "BYTES", packed("a", "b")), LENGTH, data=packed("a", "b")),
    "no text for one": infer(binary("text_input", "BYTES", b""), LENGTH, data=b""),
    "a negative size": infer(binary("text_input", "BYTES", b"", parameters={"binary_data_size": -1}), LENGTH, data=b""),
    "an unknown compression": infer(*ASK, headers={"content-encoding": "br"}),
    "gzip that is cut off": Sent(
        f"/v2/models/{PLAIN}/infer",
        gzip.compress(json.dumps({"inputs": ASK}).encode())[:-9],
        headers={"content-encoding": "gzip"},
    ),
    "an error of the model": infer({**TEXT, "data": ["a <raise>"]}, LENGTH),
    # other routes
    "live": got("/v2/health/live"),
    "ready": got("/v2/health/ready"),
    "a model that is ready": got(f"/v2/models/{PLAIN}/ready"),
    "a version that is ready": got(f"/v2/models/{PLAIN}/versions/1/ready"),
    "an unknown model's readiness": got("/v2/models/nope/ready"),
    "an unknown model's metadata": got("/v2/models/nope"),
    "an unknown version's metadata": got(f"/v2/models/{PLAIN}/versions/2"),
    "an unknown model's configuration": got("/v2/models/nope/config"),
    "an unknown model's statistics": got("/v2/models/nope/stats"),
    "regions of shared memory": got("/v2/systemsharedmemory/status"),
    "regions of CUDA's shared memory": got("/v2/cudasharedmemory/status"),
    "all regions forgotten": got("/v2/systemsharedmemory/unregister", "POST"),
    "a region forgotten": got("/v2/systemsharedmemory/region/a/unregister", "POST"),
    "CUDA's regions forgotten": got("/v2/cudasharedmemory/unregister", "POST"),
    "an unknown region": got("/v2/systemsharedmemory/region/a/status"),
    "a region without a key": got("/v2/systemsharedmemory/region/a/register", "POST", {}),
    "loading": got(f"/v2/repository/models/{PLAIN}/load", "POST", {}),
    "an unknown route": got("/v2/nope"),
}


# -- requests by gRPC --------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """An input tensor of a message."""

    name: str
    datatype: str
    data: bytes | None
    typed: Mapping[str, Any] = {}
    shape: tuple[int, ...] = (1, 1)


RAW = (
    Part("text_input", "BYTES", packed("a b é")),
    Part("max_tokens", "INT32", FOUR),
    Part("exclude_input_in_output", "BOOL", b"\1"),
)
TYPED = (
    Part("text_input", "BYTES", None, {"bytes_contents": ["a b é".encode()]}),
    Part("max_tokens", "INT32", None, {"int_contents": [4]}),
    Part("exclude_input_in_output", "BOOL", None, {"bool_contents": [True]}),
)
STREAMS = Part("stream", "BOOL", b"\1")


def asking(*parts: Part, name: str = PLAIN, outputs: tuple[str, ...] = (), **members: Any) -> Any:
    parameters = members.pop("parameters", {})
    request = service_pb2.ModelInferRequest(model_name=name, **members)
    for part in parts or RAW:
        one = request.inputs.add(name=part.name, datatype=part.datatype, shape=part.shape)
        if part.typed:
            one.contents.CopyFrom(service_pb2.InferTensorContents(**part.typed))
        if part.data is not None:
            request.raw_input_contents.append(part.data)
    for output in outputs:
        request.outputs.add(name=output)
    for key, value in parameters.items():
        request.parameters[key].CopyFrom(service_pb2.InferParameter(**value))
    return request


def with_length(**members: Any) -> Any:
    """The request with another `max_tokens`."""
    parts = TYPED if "typed" in members else RAW
    return asking(parts[0], parts[1]._replace(**members), parts[2])


def with_text(data: bytes, **members: Any) -> Any:
    return asking(RAW[0]._replace(data=data, **members), *RAW[1:])


def with_more_contents() -> Any:
    request = asking()
    request.raw_input_contents.append(b"x")
    return request


def of_call(call: str, /, **members: Any) -> tuple[str, Any]:
    return call, getattr(service_pb2, f"{call}Request")(**members)


CALLS: dict[str, tuple[str, Any]] = {
    **{
        name: ("ModelInfer", request)
        for name, request in {
            # answers
            "raw contents": asking(),
            "typed contents": asking(*TYPED),
            "an id": asking(id="7"),
            "a version": asking(model_version="1"),
            "an output": asking(outputs=("text_output",)),
            "an output twice": asking(outputs=("text_output", "text_output")),
            "more contents than inputs": with_more_contents(),
            "parameters": asking(
                parameters={
                    "a": {"int64_param": 1},
                    "b": {"string_param": "x"},
                    "c": {"bool_param": True},
                    "d": {"double_param": 0.5},
                }
            ),
            "priority and timeout": asking(
                parameters={"priority": {"uint64_param": 1}, "timeout": {"int64_param": 60_000_000}}
            ),
            # faults
            "an unknown model": asking(name="nope"),
            "no model": asking(name=""),
            "an unknown version": asking(model_version="2"),
            "a version of letters": asking(model_version="x"),
            "an unknown input": asking(*RAW, Part("nope", "INT32", FOUR)),
            "an unknown output": asking(outputs=("nope",)),
            "an input missing": asking(RAW[1]),
            "an input twice": asking(*RAW, RAW[0]),
            "another datatype": with_length(datatype="INT64", data=struct.pack("<q", 4)),
            "an unknown datatype": with_length(datatype="INT128"),
            "no datatype": with_length(datatype=""),
            "no batch dimension": with_length(shape=(1,)),
            "another shape": with_length(shape=(1, 2), data=FOUR * 2),
            "no shape": with_length(shape=()),
            "a negative dimension": with_length(shape=(1, -1)),
            "2^62 elements": with_length(shape=(1, 1 << 62)),
            "three bytes for four": with_length(data=b"123"),
            "a text that runs over": with_text(b"\x63\0\0\0ab"),
            "a length that is cut off": with_text(b"abc"),
            "two texts for one": with_text(packed("a", "b")),
            "no text for one": with_text(b""),
            "no contents": with_length(data=None),
            "raw and typed contents": asking(RAW[0], RAW[1]._replace(typed=TYPED[1].typed), RAW[2]),
            "contents of another type": with_length(typed={"int64_contents": [4]}),
            "contents of two types": with_length(typed={"int_contents": [4], "int64_contents": [4]}),
            "too many contents": with_length(typed={"int_contents": [4, 4]}),
            "an unsigned parameter": asking(parameters={"a": {"uint64_param": 1}}),
            "a parameter without a value": asking(parameters={"a": {}}),
            "a reserved parameter": asking(parameters={"triton_a": {"int64_param": 1}}),
            "an error of the model": with_text(packed("a <raise>")),
        }.items()
    },
    "live": of_call("ServerLive"),
    "ready": of_call("ServerReady"),
    "a model that is ready": of_call("ModelReady", name=PLAIN),
    "a version that is ready": of_call("ModelReady", name=PLAIN, version="1"),
    "an unknown model's readiness": of_call("ModelReady", name="nope"),
    "an unknown version's readiness": of_call("ModelReady", name=PLAIN, version="2"),
    "the readiness of a version of letters": of_call("ModelReady", name=PLAIN, version="x"),
    "an unknown model's metadata": of_call("ModelMetadata", name="nope"),
    "an unknown version's metadata": of_call("ModelMetadata", name=PLAIN, version="2"),
    "an unknown model's configuration": of_call("ModelConfig", name="nope"),
    "an unknown model's statistics": of_call("ModelStatistics", name="nope"),
    "a repository's index": of_call("RepositoryIndex", repository_name="a"),
    "loading": of_call("RepositoryModelLoad", model_name=PLAIN),
    "unloading": of_call("RepositoryModelUnload", model_name=PLAIN),
    "regions of shared memory": of_call("SystemSharedMemoryStatus"),
    "an unknown region": of_call("SystemSharedMemoryStatus", name="a"),
    "all regions forgotten": of_call("SystemSharedMemoryUnregister"),
    "CUDA's regions forgotten": of_call("CudaSharedMemoryUnregister"),
    "a region without a key": of_call("SystemSharedMemoryRegister", name="a"),
    "tracing": of_call("TraceSetting"),
    "logging": of_call("LogSettings"),
}

_ENDS = "triton_enable_empty_final_response"
_PAUSE = 0.5  # seconds between an answer's end and the next request
_FLAG = {_ENDS: {"bool_param": True}}
_STREAM: dict[str, Any] = {"name": DECOUPLED}
CONVERSATIONS: dict[str, list[Any]] = {
    "tokens": [asking(*RAW, STREAMS, **_STREAM, id="7")],
    "no id": [asking(*RAW, STREAMS, **_STREAM)],
    "tokens and an empty end": [asking(*RAW, STREAMS, **_STREAM, id="7", parameters=_FLAG)],
    "a whole answer": [asking(**_STREAM, id="7")],
    "a whole answer and an empty end": [asking(**_STREAM, id="7", parameters=_FLAG)],
    "a whole answer of a model that does not stream": [asking(id="7")],
    "nothing": [],
    "an unknown model": [asking(name="nope", id="7")],
    "an input missing": [asking(RAW[1], **_STREAM, id="7")],
    "three bytes for four": [asking(RAW[0], RAW[1]._replace(data=b"123"), **_STREAM, id="7")],
    "no contents": [asking(RAW[0], RAW[1]._replace(data=None), **_STREAM, id="7")],
    "a flag of another type": [asking(**_STREAM, id="7", parameters={_ENDS: {"int64_param": 1}})],
    "an id twice": [asking(**_STREAM, id="7"), asking(**_STREAM, id="7")],
    "an error of the model": [
        asking(RAW[0]._replace(data=packed("a b <raise>")), *RAW[1:], STREAMS, **_STREAM, id="7")
    ],
    "an error between answers, each with an empty end": [
        asking(*RAW, STREAMS, **_STREAM, id="1", parameters=_FLAG),
        asking(name="nope", id="2", parameters=_FLAG),
        asking(**_STREAM, id="3", parameters=_FLAG),
    ],
}


# -- what a client sees ------------------------------------------------------------------------------------------------


class Seen(NamedTuple):
    """An answer, or the status and the words of an error."""

    answer: Any
    status: Any = None
    words: str = ""


def of_http(found: httpx.Response) -> Seen:
    length = found.headers.get(HEADER)
    head = found.content[: int(length)] if length else found.content
    document = json.loads(head) if head else None
    if found.status_code != 200:
        return Seen(None, found.status_code, json.loads(head)["error"])
    order = [*document] if isinstance(document, dict) else []
    media_type = found.headers["content-type"] if found.content else ""
    return Seen((media_type, document, order, found.content[len(head) :]))


def of_grpc(address: Tritonserver, call: str, request: Any) -> Seen:
    with grpc.insecure_channel(f"127.0.0.1:{address.grpc_port}") as channel:
        try:
            found = getattr(service_pb2_grpc.GRPCInferenceServiceStub(channel), call)(request, timeout=60)
        except grpc.RpcError as error:
            return Seen(None, error.code().name, error.details())
    return Seen(json_format.MessageToDict(found))


def differences(real: Seen, ours: Seen) -> str:
    """What differs: the answer, or an error's status or words.

    A body whose JSON cannot be read has status 400 here, where Triton says 500. Words may be the beginning of others.
    """
    if (real.status is None) != (ours.status is None) or real.answer != ours.answer:
        return "answer"
    found = [] if real.status in (ours.status, 500 if ours.status == 400 else None) else ["status"]
    if not (real.words.startswith(ours.words) or ours.words.startswith(real.words)):
        found.append("words")
    return ", ".join(found)


# -- the tests ---------------------------------------------------------------------------------------------------------

JSON_WORDS = ("no body", "no JSON", "a length too short", "binary data without the header")
"""Parsers of JSON have words of their own."""

OTHER_WORDS = (
    *("an unknown route", "an unknown region", "a region without a key"),
    *("inputs without elements", "an input missing", "parameters of another kind", "a batch too large"),
    *("2^63 elements", "2^64 elements", "a length of letters", "two texts for one", "an error of the model"),
)
DIFFERENT = {
    **dict.fromkeys((*JSON_WORDS, *OTHER_WORDS), "words"),
    "shared memory": "status",
    "an unknown compression": "status, words",
    "an unknown model's readiness": "status, words",
    "an unknown model's statistics": "status, words",
    "loading": "status, words",
    # ours refuse
    "text of no characters": "answer",
    "NaN": "answer",
    "gzip that is cut off": "answer",
    "an output twice": "answer",  # as newer Tritons do, whose tests ask for it; this one counts it once
    # ours take
    "no batch dimension": "answer",
    "a slash at the end": "answer",
}
"""What differs, by the request's name."""

DIFFERENT_CALLS = {
    "an output twice": "answer",
    **dict.fromkeys(
        (
            *("no model", "an input missing", "an unknown datatype", "no datatype", "no shape", "a negative dimension"),
            *("two texts for one", "contents of another type", "contents of two types", "a reserved parameter"),
            "an error of the model",
        ),
        "words",
    ),
    "a version of letters": "status, words",
    "an unknown model's statistics": "status, words",
    "a region without a key": "status, words",
    "loading": "status, words",
    "unloading": "status, words",
    # ours refuse
    "tracing": "answer",
    "logging": "answer",
    # ours take
    "no batch dimension": "answer",
    "a slash at the end": "answer",
    "the readiness of a version of letters": "answer",
    "a repository's index": "answer",
    "an unknown region": "answer",
}


@pytest.mark.parametrize("name", REQUESTS)
def test_http(pair: Pair, name: str) -> None:
    sent = REQUESTS[name]
    real, ours = (of_http(sent.to(one.url)) for one in pair)
    assert differences(real, ours) == DIFFERENT.get(name, ""), f"real {real}\nours {ours}"


@pytest.mark.parametrize("name", CALLS)
def test_grpc(pair: Pair, name: str) -> None:
    real, ours = (of_grpc(one, *CALLS[name]) for one in pair)
    assert differences(real, ours) == DIFFERENT_CALLS.get(name, ""), f"real {real}\nours {ours}"


def _words(message: str) -> str:
    """An error's words that both servers have."""
    names = message.replace(DECOUPLED, PLAIN).removeprefix("engine failure: ").partition("; served here")[0]
    return re.sub("between [0-9]+ and [0-9]+", "", names)


def told(address: Tritonserver, requests: list[Any], name: str) -> tuple[dict[str, list[Any]], list[bool]]:
    """The texts and the errors of a stream, by the request's id, and which message says that it is the last one."""
    found, finals = dict[str, list[Any]](), list[bool]()
    ended = threading.Semaphore()

    def one_by_one() -> Iterator[Any]:
        """Triton aborts where an error comes within milliseconds of another answer's end."""
        for request in requests:
            request.model_name = name if request.model_name == DECOUPLED else request.model_name
            yield request
            if _ENDS in request.parameters:
                ended.acquire(timeout=60)
                time.sleep(_PAUSE)

    with grpc.insecure_channel(f"127.0.0.1:{address.grpc_port}") as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for message in stub.ModelStreamInfer(one_by_one(), timeout=60):
            response = message.infer_response
            finals.append(response.parameters["triton_final_response"].bool_param)
            texts = [raw[4:].decode() for raw in response.raw_output_contents]
            if texts or message.error_message:
                own = found.setdefault(response.id, [])
                own.append(texts or _words(message.error_message))
            if finals[-1] or message.error_message:
                ended.release()
    return found, finals


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_conversations_stream_is_that_of_triton(pair: Pair, name: str) -> None:
    """Ours sends an empty message at the end only on request. Else the last one with content says that it is the last.

    The doubles of TensorRT-LLM's text models end as `tensorrt_llm_bls` does.
    """
    requests = [
        [service_pb2.ModelInferRequest.FromString(one.SerializeToString()) for one in CONVERSATIONS[name]] for _ in pair
    ]
    real, real_finals = told(pair.real, requests[0], DECOUPLED)
    ours, finals = told(pair.ours, requests[1], PLAIN)
    assert ours == real
    if name.endswith("an empty end"):
        assert finals == real_finals
    if len(requests[0]) == 1 and len(ours.popitem()[1]) > 1:
        assert finals == [False] * (len(finals) - 1) + [True]
