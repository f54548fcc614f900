"""Triton's gRPC service over real sockets, beside the same calls by HTTP."""

from __future__ import annotations

import contextlib
import json
import queue
import re
import signal
import struct
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy
import pytest
from tritonclient.grpc import InferenceServerClient, InferInput, service_pb2, service_pb2_grpc

from tests.app.server import serve
from tests.servers import LiveServer, free_port, http, wait_for

Messages = list[Any]
ASK = {"text_input": "a b c d e", "max_tokens": 5, "exclude_input_in_output": True}
NO_SHARED_MEMORY = "shared memory is not supported: send tensors as JSON or as binary data"
WAITING = 'vllm:num_requests_waiting{engine="0",model_name="model"}'
RUNNING = 'vllm:num_requests_running{engine="0",model_name="model"}'


class Triton:
    """A server with both doors, and a channel to its gRPC port."""

    def __init__(self, server: LiveServer, port: int, *, reads: bool = True) -> None:
        self.server = server
        self.address = f"127.0.0.1:{port}"
        self.channel = grpc.insecure_channel(self.address)
        self.stub = service_pb2_grpc.GRPCInferenceServiceStub(self.channel)

    def stream(self, *requests: Any, **more: Any) -> Messages:
        """All messages of a stream whose client has nothing more to send."""
        return [*self.stub.ModelStreamInfer(iter(requests), timeout=30, **more)]

    def text(self, **inputs: Any) -> str:
        """What `generate` answers."""
        return str(self.server.post({**ASK, **inputs}, "/v2/models/model/generate").json()["text_output"])


@contextlib.contextmanager
def triton(*arguments: str, env: dict[str, str] | None = None) -> Iterator[Triton]:
    port = free_port()
    with serve("--engine", "echo", "--grpc-port", str(port), *arguments, env=env) as server:
        client = Triton(server, port)
        with client.channel:
            yield client


@pytest.fixture(scope="module")
def open_triton() -> Iterator[Triton]:
    with triton() as client:
        yield client


def ask(id: str = "7", *, name: str = "model", version: str = "", **inputs: Any) -> Any:
    request = service_pb2.ModelInferRequest(model_name=name, model_version=version, id=id)
    for tensor, value in {**ASK, **inputs}.items():
        if isinstance(value, str):
            kind, data = "BYTES", struct.pack("<I", len(value.encode())) + value.encode()
        elif isinstance(value, bool):
            kind, data = "BOOL", bytes([value])
        else:
            kind, data = "INT32", struct.pack("<i", value)
        request.inputs.add(name=tensor, datatype=kind, shape=[1, 1])
        request.raw_input_contents.append(data)
    return request


def text_of(response: Any) -> str:
    assert response.outputs[0].name == "text_output"
    (length,) = struct.unpack_from("<I", response.raw_output_contents[0])
    assert length == len(response.raw_output_contents[0]) - 4
    return str(response.raw_output_contents[0][4:], "utf-8")


def joined(messages: Iterable[Any], id: str) -> str:
    return "".join(text_of(one.infer_response) for one in messages if one.infer_response.id == id)


def refusal(call: Any, request: Any, **more: Any) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as refused:
        call(request, timeout=30, **more)
    return refused.value.code().name, refused.value.details()


# -- the same answers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["", "1"])
def test_infer_answers_as_generate_does(open_triton: Triton, version: str) -> None:
    response = open_triton.stub.ModelInfer(ask(version=version))
    assert text_of(response) == open_triton.text() == " a b c d e"
    assert (response.id, response.model_name, response.model_version) == ("7", "model", "1")
    assert not response.parameters


def test_a_stream_has_a_message_for_each_token(open_triton: Triton) -> None:
    found = open_triton.stream(ask(stream=True))
    assert [text_of(one.infer_response) for one in found] == [" a", " b", " c", " d", " e"]
    finals = [one.infer_response.parameters["triton_final_response"].bool_param for one in found]
    assert finals == [False] * 4 + [True]


def test_requests_of_a_stream_do_not_mix(open_triton: Triton) -> None:
    prompts = {str(number): " ".join(f"w{number}x{index}" for index in range(9)) for number in range(40)}
    requests = [ask(id, stream=True, text_input=prompt, max_tokens=9) for id, prompt in prompts.items()]
    found = open_triton.stream(*requests)
    assert {id: joined(found, id) for id in prompts} == {id: f" {prompt}" for id, prompt in prompts.items()}


def test_a_stream_answers_whole_where_the_request_does_not_stream(open_triton: Triton) -> None:
    (one,) = open_triton.stream(ask())
    assert text_of(one.infer_response) == open_triton.text()


def test_more_requests_than_run_at_once(open_triton: Triton) -> None:
    found = open_triton.stream(*(ask(str(number), max_tokens=1) for number in range(300)))
    assert {one.infer_response.id for one in found} == {str(number) for number in range(300)}
    assert not any(one.error_message for one in found)


def test_a_stream_without_requests_ends(open_triton: Triton) -> None:
    assert open_triton.stream() == []


def test_state_and_metadata_are_those_of_http(open_triton: Triton) -> None:
    stub, url = open_triton.stub, open_triton.server.url
    model = service_pb2.ModelMetadataRequest(name="model")
    metadata = http.get(f"{url}/v2/models/model").json()
    found = stub.ModelMetadata(model)
    assert [(one.name, one.datatype, [*one.shape]) for one in found.inputs] == [
        (one["name"], one["datatype"], one["shape"]) for one in metadata["inputs"]
    ]
    config = stub.ModelConfig(service_pb2.ModelConfigRequest(name="model")).config
    assert config.model_transaction_policy.decoupled is True
    assert {one.name for one in config.output} == {one["name"] for one in metadata["outputs"]}
    assert stub.ServerLive(service_pb2.ServerLiveRequest()).live is True
    assert stub.ServerReady(service_pb2.ServerReadyRequest()).ready is True
    assert stub.ModelReady(service_pb2.ModelReadyRequest(name="model")).ready is True
    assert stub.ModelReady(service_pb2.ModelReadyRequest(name="other")).ready is False
    assert stub.ServerMetadata(service_pb2.ServerMetadataRequest()).name == "lmi-handler"
    (state,) = stub.RepositoryIndex(service_pb2.RepositoryIndexRequest()).models
    assert (state.name, state.version, state.state) == ("model", "1", "READY")
    (statistics,) = stub.ModelStatistics(service_pb2.ModelStatisticsRequest(name="model")).model_stats
    assert statistics.inference_stats.success.count == statistics.inference_count
    for kind in ("System", "Cuda"):
        status, unregister, register = (
            (getattr(stub, f"{kind}SharedMemory{call}"), getattr(service_pb2, f"{kind}SharedMemory{call}Request")())
            for call in ("Status", "Unregister", "Register")
        )
        assert not status[0](status[1]).regions
        unregister[0](unregister[1])
        assert refusal(*register) == ("INVALID_ARGUMENT", NO_SHARED_MEMORY)
    check = open_triton.channel.unary_unary("/grpc.health.v1.Health/Check")
    assert check(b"") == b"\x08\x01"


# -- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        (ask(name="other"), "NOT_FOUND", "Request for unknown model: 'other' is not found"),
        (ask(name=""), "NOT_FOUND", "Request for unknown model: ' ' is not found"),
        (ask(name="model/versions/1"), "NOT_FOUND", "Request for unknown model: 'model%2Fversions%2F1' is not found"),
        (ask(version="2"), "NOT_FOUND", "Request for unknown model: 'model' version 2 is not found"),
        (ask(max_tokens="5"), "INVALID_ARGUMENT", "data-type is 'BYTES', but model 'model' expects 'INT32'"),
        (ask(max_tokens=-1), "INVALID_ARGUMENT", "max_tokens"),
        (ask(nonsense=1), "INVALID_ARGUMENT", "unexpected inference input 'nonsense'"),
        (service_pb2.ModelInferRequest(model_name="model"), "INVALID_ARGUMENT", "text_input"),
    ],
)
def test_a_fault_has_tritons_code(open_triton: Triton, request_: Any, code: str, words: str) -> None:
    found, details = refusal(open_triton.stub.ModelInfer, request_)
    assert found == code
    assert words in details
    neighbours = open_triton.stream(ask("1", stream=True), request_, ask("2", stream=True))
    (error,) = (one for one in neighbours if one.error_message)
    assert words in error.error_message
    assert error.infer_response.id == request_.id
    assert joined(neighbours, "1") == joined(neighbours, "2") == " a b c d e"


@pytest.mark.parametrize("name", ["stats", "model/config", "model/versions/1", ""])
def test_a_name_leads_to_no_other_route(open_triton: Triton, name: str) -> None:
    model = service_pb2.ModelMetadataRequest(name=name)
    assert refusal(open_triton.stub.ModelMetadata, model)[0] == "NOT_FOUND"
    assert open_triton.stub.ModelReady(service_pb2.ModelReadyRequest(name=name)).ready is False
    version = service_pb2.ModelMetadataRequest(name="model", version="index")
    assert refusal(open_triton.stub.ModelMetadata, version)[0] == "NOT_FOUND"


def test_a_shape_beyond_any_memory(open_triton: Triton) -> None:
    request = ask()
    request.inputs[0].shape[:] = [2**62, 2**62]
    assert refusal(open_triton.stub.ModelInfer, request)[0] == "INVALID_ARGUMENT"


def test_bytes_that_are_no_message(open_triton: Triton) -> None:
    call = open_triton.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    assert refusal(call, b"\xff\xff\xff")[0] == "INTERNAL"
    assert refusal(open_triton.channel.unary_unary("/inference.GRPCInferenceService/Other"), b"")[0] == "UNIMPLEMENTED"
    stream = open_triton.channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
    with pytest.raises(grpc.RpcError) as broken:
        [*stream(iter([b"\xff\xff"]), timeout=30)]
    assert broken.value.code() is grpc.StatusCode.INTERNAL
    assert "Traceback" not in open_triton.server.log


def test_a_message_above_the_limit() -> None:
    with triton("-o", "max_request_size=100000") as client:
        assert refusal(client.stub.ModelInfer, ask(text_input="a " * 50_100))[0] == "INVALID_ARGUMENT"
        assert refusal(client.stub.ModelInfer, ask(text_input="a " * 500_000))[0] == "RESOURCE_EXHAUSTED"
        assert text_of(client.stub.ModelInfer(ask())) == " a b c d e"


# -- ends ------------------------------------------------------------------------------------------------------------

SLOW = ("-o", "option.echo_tokens_per_second=20")


def test_a_cancelled_stream_leaves_the_engine() -> None:
    with triton(*SLOW) as client:
        call = client.stub.ModelStreamInfer(iter([ask(stream=True, max_tokens=5000)]))
        assert text_of(next(call).infer_response) == " a"
        assert client.server.metric(RUNNING) == 1
        call.cancel()
        wait_for(lambda: client.server.metric(RUNNING) == 0, 20, "the engine goes on")


LONG: dict[str, Any] = {"text_input": "a " * 300, "max_tokens": 500}


def stop(id: str, **inputs: Any) -> Any:
    """As TensorRT-LLM's client sends it, with inputs that do not matter."""
    request = ask(id, text_input="", max_tokens=0, **inputs)
    request.inputs.add(name="stop", datatype="BOOL", shape=[1, 1])
    request.raw_input_contents.append(b"\1")
    return request


def is_final(response: Any) -> bool:
    return bool(response.parameters["triton_final_response"].bool_param)


def test_stop_ends_the_requests_of_its_id_alone() -> None:
    with triton(*SLOW) as client:
        asked: queue.Queue[Any] = queue.Queue()
        answers = client.stub.ModelStreamInfer(iter(asked.get, None), timeout=30)
        asked.put(ask("long", stream=True, **LONG))
        asked.put(ask("long", stream=True, return_finish_reason=True, **LONG))
        asked.put(ask("other", stream=True, max_tokens=5))
        first = next(answers)
        asked.put(stop("long"))
        asked.put(None)
        found = [one.infer_response for one in (first, *answers)]
        other = [one for one in found if one.id == "other"]
        assert ("".join(map(text_of, other)), is_final(other[-1])) == (client.text(), True)
        finals = [one for one in found if one.id == "long" and is_final(one)]
        empty, *stopped = sorted(finals, key=lambda one: len(one.outputs))
        assert (list(empty.outputs), empty.model_name, empty.model_version) == ([], "model", "1")
        assert [text_of(one) for one in stopped] == [""] * 2
        assert stopped[1].raw_output_contents[1][4:] == b"stop"
        assert len([one for one in found if one.id == "long"]) < 100
        last = max(map(found.index, stopped))
        assert not any(one.id == "long" and one.outputs for one in found[last + 1 :])
        wait_for(lambda: client.server.metric(RUNNING) == 0, 20, "the engine goes on")


def test_nothing_of_a_stopped_request_follows_its_last_message() -> None:
    """Its client reads nothing before it stops the request, so much waits to be sent."""
    pace = "option.echo_tokens_per_second=10000"  # so that it is far from its end when it is stopped
    with triton("-o", "option.max_model_len=300000", "-o", pace) as client:
        asked: queue.Queue[Any] = queue.Queue()
        answers = client.stub.ModelStreamInfer(iter(asked.get, None), timeout=60)
        asked.put(ask("long", stream=True, text_input="word " * 500, max_tokens=50_000))
        wait_for(lambda: client.server.metric(RUNNING) == 1, 20, "the request does not begin")
        time.sleep(1.0)  # for more than the connection takes
        asked.put(stop("long"))
        wait_for(lambda: client.server.metric(RUNNING) == 0, 20, "the engine goes on")
        asked.put(None)
        found = [one.infer_response for one in answers]
        assert len(found) < 50_000
        finals = [bool(one.outputs) for one in found if is_final(one)]
        assert sorted(finals) == [False, True]
        assert is_final([one for one in found if one.outputs][-1])


Results = queue.Queue[tuple[str, Any]]


def sent(client: InferenceServerClient, results: Results, name: str, **inputs: Any) -> None:
    """Send a request by itself, and put its name and its result into `results`."""
    tensors = []
    for tensor, (datatype, value) in inputs.items():
        tensors.append(InferInput(tensor, [1, 1], datatype))
        tensors[-1].set_data_from_numpy(
            numpy.array([[value]], {"BYTES": object, "INT32": numpy.int32, "BOOL": bool}[datatype])
        )
    client.async_infer("model", tensors, lambda result, error: results.put((name, error or result)), request_id="12345")


@pytest.mark.parametrize("option", [SLOW, (*SLOW, "-o", "option.rolling_batch=disable", "-o", "batch_size=1")])
def test_stop_by_a_call_of_its_own_ends_running_and_waiting_calls(option: tuple[str, ...]) -> None:
    """TensorRT-LLM's client reads the ids of the last result that it gets, so this is not that of `stop`."""
    with triton(*option, "-o", "option.max_rolling_batch_size=2") as client:
        official, results = InferenceServerClient(client.address), Results()
        long = {"text_input": ("BYTES", b"a " * 300), "max_tokens": ("INT32", 500)}
        sent(official, results, "one", **long, n=("INT32", 2))
        wait_for(lambda: client.server.metric(RUNNING) == 2, 20, "the request does not begin")
        sent(official, results, "waiting", **long)
        wait_for(lambda: client.server.metric(WAITING) == 1 or "disable" in str(option), 20, "it does not wait")
        time.sleep(0.5)
        sent(official, results, "stop", **{**long, "stop": ("BOOL", True)})
        found = [results.get(timeout=20) for _ in range(3)]
        texts = {name: result.as_numpy("text_output") for name, result in found}
        ended = re.findall(r" prompt_tokens=(\d+) ", client.server.log)  # the client may get them in another order
        assert ended[0] == "0", "it is not `stop` that ends first"
        assert texts["stop"] is None
        assert [text.startswith(b"a a a") for text in texts["one"]] == [True] * 2
        assert texts["waiting"].tolist() == [b"a " * 300]
        assert all(result.get_response().id == "12345" for _, result in found)
        wait_for(lambda: client.server.metric(RUNNING) == 0, 20, "the engine goes on")
        sent(official, results, "later", text_input=("BYTES", b"a b"), max_tokens=("INT32", 2))
        assert results.get(timeout=20)[1].as_numpy("text_output").tolist() == [b"a b a b"]


def test_stop_ends_only_requests_of_the_same_key() -> None:
    with triton(*SLOW, env={"LMI_API_KEY": "ann,bob"}) as client:
        by = {name: [("authorization", f"Bearer {name}")] for name in ("ann", "bob")}
        running = client.stub.ModelInfer.future(ask("7", max_tokens=40), timeout=30, metadata=by["ann"])
        time.sleep(0.5)  # of two seconds
        assert not client.stub.ModelInfer(stop("7"), timeout=30, metadata=by["bob"]).outputs
        time.sleep(0.3)
        assert not running.done()
        assert not client.stub.ModelInfer(stop("7"), timeout=30, metadata=by["ann"]).outputs
        assert len(text_of(running.result()).split()) < 40


def test_stop_by_http_ends_a_stream_of_generate() -> None:
    with triton(*SLOW) as client:
        url = f"{client.server.url}/v2/models/model"
        with http.stream("POST", f"{url}/generate_stream", json={**ASK, **LONG, "id": "7"}) as response:
            lines = (line for line in response.iter_lines() if line)
            next(lines)
            tensor = {"name": "stop", "datatype": "BOOL", "shape": [1, 1], "data": [True]}
            stopped = http.post(f"{url}/infer", json={"id": "7", "inputs": [tensor]})
            assert (stopped.status_code, stopped.json()) == (
                200,
                {"id": "7", "model_name": "model", "model_version": "1", "outputs": []},
            )
            rest = list(lines)
        assert len(rest) < 100
        assert json.loads(rest[-1].removeprefix("data: "))["text_output"] == ""
        wait_for(lambda: client.server.metric(RUNNING) == 0, 20, "the engine goes on")
        nothing = http.post(f"{url}/infer", json={"id": "7", "inputs": [tensor]})
        assert nothing.json() == stopped.json(), "there is nothing to stop"
        assert http.post(f"{url}/infer", json={"inputs": [tensor]}).json()["error"] == (
            "stop=true: needs the id of the request to stop"
        )


def test_a_deadline_ends_the_request() -> None:
    with triton(*SLOW) as client:
        with pytest.raises(grpc.RpcError) as late:
            client.stub.ModelInfer(ask(max_tokens=5000), timeout=0.5)
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        wait_for(lambda: client.server.metric(RUNNING) == 0, 20, "the engine goes on")


def test_running_streams_end_well_after_sigterm() -> None:
    with triton(*SLOW) as client:
        call = client.stub.ModelStreamInfer(iter([ask(stream=True, max_tokens=30)]))
        first = next(call)
        client.server.send_signal(signal.SIGTERM)
        assert refusal(client.stub.ModelInfer, ask())[0] == "UNAVAILABLE"
        found = [first, *call]
        assert len(found) == 30
        assert found[-1].infer_response.parameters["triton_final_response"].bool_param is True
        assert client.server.wait(30) == 0


def test_a_client_that_does_not_read_loses_its_stream_alone() -> None:
    many = ask(stream=True, max_tokens=100_000, text_input="word " * 200)
    with triton("-o", "option.client_timeout=1") as client:
        call = client.stub.ModelStreamInfer(iter([many] * 8))
        next(call)
        wait_for(lambda: client.server.metric(RUNNING) == 0, 60, "the server writes for ever")
        assert text_of(client.stub.ModelInfer(ask())) == " a b c d e"
        call.cancel()


def test_a_stream_goes_on_after_a_message_that_is_refused_unread(open_triton: Triton) -> None:
    large = ask("large")
    large.inputs.add(name="bad_words", datatype="BYTES", shape=[1, 1]).contents.bytes_contents.append(bytes(2 << 20))
    refused, answered = open_triton.stream(large, ask("small"))
    assert refused.error_message == "the message has more than 1048576 bytes besides raw_input_contents"
    assert text_of(answered.infer_response) == " a b c d e"


# -- who may call ------------------------------------------------------------------------------------------------------


def test_a_key_is_needed_where_http_needs_one() -> None:
    with triton(env={"LMI_API_KEY": "secret"}) as client:
        code, details = refusal(client.stub.ModelInfer, ask())
        assert (code, "Authorization: Bearer" in details) == ("UNAUTHENTICATED", True)
        assert refusal(lambda request, **more: [*client.stub.ModelStreamInfer(iter([request]), **more)], ask()) == (
            code,
            details,
        )
        assert refusal(client.stub.ModelReady, service_pb2.ModelReadyRequest(name="model"))[0] == "UNAUTHENTICATED"
        assert client.channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=30) == b"\x08\x01"
        assert client.server.log.count("outcome=refused") == 2, "only calls for inference count"
        assert "status=401 method=GET path='/v2'" in client.server.log
        key = [("authorization", "Bearer secret")]
        assert text_of(client.stub.ModelInfer(ask(), metadata=key)) == " a b c d e"
        assert joined(client.stream(ask(stream=True), metadata=key), "7") == " a b c d e"
        assert "secret" not in client.server.log


def test_tls_with_the_certificate_of_https(tmp_path: Path) -> None:
    trustme = pytest.importorskip("trustme")
    authority = trustme.CA()
    leaf = authority.issue_cert("127.0.0.1", "localhost")
    leaf.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "both.pem"))
    port = free_port()
    with serve("--engine", "echo", "--grpc-port", str(port), "--ssl-certfile", str(tmp_path / "both.pem")):
        credentials = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
        with grpc.secure_channel(f"localhost:{port}", credentials) as channel:
            assert text_of(service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(ask())) == " a b c d e"


def test_a_port_in_use_is_named() -> None:
    with triton() as client:
        port = client.channel._channel.target().decode().rpartition(":")[2]
        words = rf"cannot listen on 127.0.0.1:{port} \(option.grpc_port\)"
        with pytest.raises(AssertionError, match=words), serve("--engine", "echo", "--grpc-port", port):
            pass


def test_a_request_is_captured(tmp_path: Path) -> None:
    with triton("-o", f"option.capture_requests={tmp_path}") as client:
        client.stream(ask(stream=True))
    text = "".join(path.read_text() for path in tmp_path.rglob("*.jsonl"))
    assert "/inference.GRPCInferenceService/ModelStreamInfer/model" in text
