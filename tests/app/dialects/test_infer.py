"""Triton's infer over real sockets: JSON and binary data, large bodies, and the model's metadata."""

from __future__ import annotations

import gzip
import json
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from handler.protocols.triton.infer import SAGEMAKER_TYPE
from tests.app.server import serve
from tests.doubles import tiny
from tests.servers import LiveServer, http, options, wait_for

MODEL = "/v2/models/model"
INFER = f"{MODEL}/infer"
LENGTH = {"name": "max_tokens", "datatype": "INT32", "shape": [1, 1], "data": [2]}
BARE = {"name": "exclude_input_in_output", "datatype": "BOOL", "shape": [1, 1], "data": [True]}


def text(prompt: str, **members: Any) -> dict[str, Any]:
    return {"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "data": [prompt], **members}


def packed(prompt: str) -> bytes:
    return struct.pack("<I", len(prompt)) + prompt.encode()


def with_data(server: LiveServer, document: Any, data: bytes, **headers: str) -> httpx.Response:
    head = json.dumps(document).encode()
    length = {"inference-header-content-length": str(len(head))}
    return http.post(server.url + INFER, content=head + data, headers={**length, **headers})


def binary(prompt: str) -> dict[str, Any]:
    return text(prompt, data=None, parameters={"binary_data_size": len(packed(prompt))})


@pytest.mark.parametrize("path", [INFER, f"{MODEL}/versions/1/infer"])
def test_json(echo_server: LiveServer, path: str) -> None:
    found = http.post(echo_server.url + path, json={"id": "9", "inputs": [text("a b"), LENGTH, BARE]})
    assert (found.status_code, found.headers["content-type"]) == (200, "application/json")
    assert "inference-header-content-length" not in found.headers
    assert found.json() == {
        "id": "9",
        "model_name": "model",
        "model_version": "1",
        "outputs": [{"name": "text_output", "datatype": "BYTES", "shape": [1], "data": [" a b"]}],
    }


@pytest.mark.parametrize("size", [3, 400_000])
def test_binary_data_of_any_size(echo_server: LiveServer, size: int) -> None:
    """A large body is decoded apart; its binary data is not JSON there either."""
    prompt = "é" * 10 + " a" * (size // 2)
    document = {"inputs": [binary(prompt), LENGTH], "parameters": {"binary_data_output": True}}
    document["inputs"][0]["parameters"] = {"binary_data_size": 4 + len(prompt.encode())}  # type: ignore[index]
    data = struct.pack("<I", len(prompt.encode())) + prompt.encode()
    found = with_data(echo_server, document, data, **{"content-type": "application/octet-stream"})
    if size > 1000:  # more than the context has, which is Triton's form of refusal too
        assert (found.status_code, found.json().keys()) == (400, {"error"})
        assert "tokens" in found.json()["error"]
        return
    assert (found.status_code, found.headers["content-type"]) == (200, "application/octet-stream")
    length = int(found.headers["inference-header-content-length"])
    (output,) = json.loads(found.content[:length])["outputs"]
    tail = found.content[length:]
    assert output["parameters"] == {"binary_data_size": len(tail)}
    assert tail[4:].decode().startswith(prompt)


def test_a_large_json_body(echo_server: LiveServer) -> None:
    found = http.post(echo_server.url + INFER, json={"inputs": [text("a b"), LENGTH, BARE], "note": "x" * 300_000})
    assert found.json()["outputs"][0]["data"] == [" a b"]


@pytest.mark.parametrize("length", ["999999", "x", "-1"])
def test_a_bad_length(echo_server: LiveServer, length: str) -> None:
    headers = {"inference-header-content-length": length}
    found = http.post(echo_server.url + INFER, content=b"{}", headers=headers)
    assert (found.status_code, "inference header size" in found.json()["error"]) == (400, True)


CODES: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress}


@pytest.mark.parametrize("encoding", CODES)
@pytest.mark.parametrize("size", [1, 200_000])
def test_a_compressed_body(echo_server: LiveServer, encoding: str, size: int) -> None:
    """The header counts the bytes of the document before its compression. The note makes the body large."""
    document = {"inputs": [binary("a b"), LENGTH, BARE], "note": "x" * size}
    head = json.dumps(document).encode()
    headers = {"content-encoding": encoding.upper(), "inference-header-content-length": str(len(head))}
    body = CODES[encoding](head + packed("a b"))
    found = http.post(echo_server.url + INFER, content=body, headers=headers)
    assert found.json()["outputs"][0]["data"] == [" a b"]
    assert "content-encoding" not in found.headers


BODY = json.dumps({"inputs": [text("a b"), LENGTH]}).encode()
FAULTS = {
    "plain": ("gzip", BODY, "is not compressed as its Content-Encoding says"),
    "raw": ("deflate", zlib.compress(BODY)[2:-4], "is not compressed as its Content-Encoding says"),
    "empty": ("gzip", b"", "is cut off before its end"),
    "cut": ("gzip", gzip.compress(BODY)[:-9], "is cut off before its end"),
    "more": ("gzip", gzip.compress(BODY) + b"x", "has further data after its end"),
    "much more": ("deflate", zlib.compress(BODY) + bytes(300_000), "has further data after its end"),
    "other": ("br", BODY, "content-encoding 'br' is not supported"),
    "both": ("gzip, deflate", BODY, "content-encoding 'gzip, deflate' is not supported"),
    "a bomb": ("gzip", gzip.compress(bytes(200 << 20), 9), "the decompressed body has more than"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_body_that_is_not_as_its_encoding_says(echo_server: LiveServer, fault: str) -> None:
    encoding, body, says = FAULTS[fault]
    found = http.post(echo_server.url + INFER, content=body, headers={"content-encoding": encoding})
    assert (found.status_code, says in found.json()["error"]) == (400, True), found.text
    assert http.post(echo_server.url + INFER, content=BODY).status_code == 200


# -- /invocations ------------------------------------------------------------------------------------------------------


def invoked(server: LiveServer, body: bytes, media_type: str, **headers: str) -> httpx.Response:
    return http.post(f"{server.url}/invocations", content=body, headers={"content-type": media_type, **headers})


@pytest.mark.parametrize("media_type", ["application/json", "application/octet-stream", SAGEMAKER_TYPE])
def test_invocations_read_tensors(echo_server: LiveServer, media_type: str) -> None:
    document = {"inputs": [text("a b"), LENGTH, BARE]}
    found = invoked(echo_server, json.dumps(document).encode(), media_type)
    assert (found.status_code, found.headers["content-type"]) == (200, "application/json")
    assert found.json() == http.post(echo_server.url + INFER, json=document).json()


@pytest.mark.parametrize("outputs", [True, False])
def test_invocations_answer_binary_data_in_the_type_of_the_request(echo_server: LiveServer, outputs: bool) -> None:
    parameters = {"binary_data_output": outputs}
    document = json.dumps({"inputs": [binary("a b"), LENGTH, BARE], "parameters": parameters}).encode()
    body = document + packed("a b")
    size = "inference-header-content-length"
    ways = {
        f"{SAGEMAKER_TYPE};json-header-size={len(document)}": {size: "3"},  # the type wins
        f"{SAGEMAKER_TYPE.upper()}; json-header-size={len(document)}": {},
        "application/octet-stream": {size: str(len(document))},
    }
    for media_type, headers in ways.items():
        found = invoked(echo_server, body, media_type, **headers)
        kind, _, parameter = found.headers["content-type"].partition(";json-header-size=")
        if not outputs:
            assert (kind, found.json()["outputs"][0]["data"]) == ("application/json", [" a b"])
            continue
        assert kind == media_type.lower().partition(";")[0]
        assert (size in found.headers) is (not parameter)
        length = int(parameter or found.headers[size])
        assert json.loads(found.content[:length])["outputs"][0]["parameters"] == {"binary_data_size": 8}
        assert found.content[length:] == packed(" a b")


def test_json_that_asks_for_binary_data_gets_the_type_that_sagemaker_forwards(echo_server: LiveServer) -> None:
    document = {"inputs": [text("a b"), LENGTH, BARE], "parameters": {"binary_data_output": True}}
    found = http.post(f"{echo_server.url}/invocations", json=document)
    assert found.headers["content-type"].startswith(f"{SAGEMAKER_TYPE};json-header-size=")
    assert found.content.endswith(packed(" a b"))


@pytest.mark.parametrize("size", ["99999", "-1", "x", ""])
def test_a_bad_size_in_the_content_type(echo_server: LiveServer, size: str) -> None:
    found = invoked(echo_server, BODY, f"{SAGEMAKER_TYPE};json-header-size={size}")
    assert (found.status_code, found.json().keys()) == (400, {"error"})
    assert "inference header size should be in range" in found.json()["error"]
    found = invoked(echo_server, BODY, f"{SAGEMAKER_TYPE};json-header-size=9")
    assert found.json()["error"].startswith("failed to parse the request JSON buffer: ")


def test_tensors_keep_tritons_errors_on_invocations(echo_server: LiveServer) -> None:
    found = http.post(f"{echo_server.url}/invocations", json={"inputs": [{**text("a"), "datatype": "INT32"}]})
    assert (found.status_code, found.json().keys()) == (400, {"error"})
    assert "data-type is 'INT32', but model 'model' expects 'BYTES'" in found.json()["error"]


def test_data_without_its_header_is_not_json(echo_server: LiveServer) -> None:
    document = json.dumps({"inputs": [binary("a"), LENGTH]}).encode()
    found = http.post(echo_server.url + INFER, content=document + packed("a"))
    assert found.status_code == 400
    assert found.json()["error"].startswith("failed to parse the request JSON buffer: ")


def test_metadata_has_the_shapes_that_requests_and_responses_have(echo_server: LiveServer) -> None:
    metadata, config = (http.get(echo_server.url + MODEL + end).json() for end in ("", "/config"))
    shapes = {tensor["name"]: tensor["shape"] for tensor in (*metadata["inputs"], *metadata["outputs"])}
    assert (shapes["text_input"], shapes["stop_words"], shapes["text_output"]) == ([-1, 1], [-1, -1], [-1, -1])
    dims = {tensor["name"]: tensor["dims"] for tensor in (*config["input"], *config["output"])}
    assert shapes == {name: [-1, *size] for name, size in dims.items()}
    assert config["max_batch_size"] == 1
    assert [tensor["name"] for tensor in config["input"] if not tensor["optional"]] == ["text_input"]


# -- statistics and shared memory --------------------------------------------------------------------------------------


def test_statistics_count_the_requests_of_the_engine(echo_server: LiveServer) -> None:
    def stats(path: str) -> dict[str, Any]:
        (model,) = http.get(f"{echo_server.url}{path}").json()["model_stats"]
        return dict(model)

    before = stats(f"{MODEL}/stats")
    for _ in range(3):
        assert http.post(echo_server.url + INFER, json={"inputs": [text("a b"), LENGTH, BARE]}).status_code == 200
    assert http.post(echo_server.url + INFER, json={"inputs": []}).status_code == 400  # the engine never gets it
    after = stats("/v2/models/stats")
    assert (after["name"], after["version"]) == ("model", "1")
    assert after["inference_count"] - before["inference_count"] == 3
    assert after["last_inference"] >= before["last_inference"]
    for name in ("success", "queue", "compute_input", "compute_infer", "compute_output"):
        assert after["inference_stats"][name]["count"] - before["inference_stats"][name]["count"] == 3, name
    assert after["inference_stats"]["success"]["ns"] > before["inference_stats"]["success"]["ns"]
    assert after["inference_stats"]["fail"] == before["inference_stats"]["fail"]
    assert http.get(f"{echo_server.url}/v2/models/other/stats").status_code == 404


@pytest.mark.parametrize("kind", ["system", "cuda"])
def test_shared_memory_has_no_regions_and_takes_none(echo_server: LiveServer, kind: str) -> None:
    assert http.get(f"{echo_server.url}/v2/{kind}sharedmemory/status").json() == []
    found = http.post(f"{echo_server.url}/v2/{kind}sharedmemory/region/a/register", json={"key": "/a", "byte_size": 8})
    assert (found.status_code, found.json().keys()) == (400, {"error"})
    assert "shared memory is not supported" in found.json()["error"]
    for region in ("", "/region/a"):  # examples and perf tools begin so
        found = http.post(f"{echo_server.url}/v2/{kind}sharedmemory{region}/unregister")
        assert (found.status_code, found.content) == (200, b"")


# -- the names of TensorRT-LLM's repository, and its token ids ---------------------------------------------------------

NAMES = ("ensemble", "tensorrt_llm_bls", "tensorrt_llm")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    directory = tiny.make(tmp_path_factory.mktemp("tiny"))
    own = (f"option.echo_tokenizer={directory}", f"option.model_name={','.join(NAMES)}")
    with serve("--engine", "echo", *options(*own)) as server:
        server.wait_ready()
        yield server


@pytest.mark.parametrize("name", NAMES)
def test_each_name_answers(repository: LiveServer, name: str) -> None:
    path = f"{repository.url}/v2/models/{name}"
    asked = {"inputs": [text("a b"), LENGTH, BARE]}
    for document in (
        http.post(f"{path}/infer", json=asked).json(),
        http.post(f"{path}/versions/1/infer", json=asked).json(),
        http.post(f"{path}/generate", json={"text_input": "a b", "max_tokens": 2}).json(),
    ):
        assert (document["model_name"], document["model_version"]) == (name, "1")
    assert http.get(f"{path}/ready").status_code == 200
    assert http.get(path).json()["name"] == http.get(f"{path}/config").json()["name"] == name
    assert http.get(f"{path}/stats").json()["model_stats"][0]["name"] == name
    invoked = http.post(f"{repository.url}/predictions/{name}", json={"inputs": "a b"})
    assert invoked.status_code == 200, invoked.text


def test_other_names_are_refused_with_all_of_ours(repository: LiveServer) -> None:
    found = http.post(f"{repository.url}/v2/models/model/infer", json={"inputs": [text("a b")]})
    assert found.status_code == 404
    assert all(name in found.json()["error"] for name in NAMES)
    index = http.post(f"{repository.url}/v2/repository/index").json()
    assert [(state["name"], state["state"]) for state in index] == [(name, "READY") for name in NAMES]
    (listed,) = http.get(f"{repository.url}/models").json()["models"]
    assert listed["modelName"] == NAMES[0]


def test_the_token_model_describes_its_tensors(repository: LiveServer) -> None:
    texts, ids = (http.get(f"{repository.url}/v2/models/{name}").json() for name in ("ensemble", "tensorrt_llm"))
    assert [tensor["name"] for tensor in (texts["inputs"][0], ids["inputs"][0])] == ["text_input", "input_ids"]
    assert {"name": "output_ids", "datatype": "INT32", "shape": [-1, -1, -1]} in ids["outputs"]
    assert {"name": "stop_words_list", "datatype": "INT32", "shape": [-1, 2, -1]} in ids["inputs"]


def test_token_ids_by_any_name(repository: LiveServer) -> None:
    """Echo answers with the prompt's own tokens."""
    prompt = http.post(f"{repository.url}/tokenize", json={"prompt": "the answer"}).json()["tokens"]
    number = len(prompt)
    inputs = [
        {"name": "input_ids", "datatype": "INT32", "shape": [1, number], "data": prompt},
        {"name": "request_output_len", "datatype": "INT32", "shape": [1, 1], "data": [number]},
    ]
    for name in NAMES:
        found = http.post(f"{repository.url}/v2/models/{name}/infer", json={"inputs": inputs})
        assert found.status_code == 200, found.text
        ids, length = found.json()["outputs"]
        assert (ids["name"], ids["shape"], ids["data"][:number]) == ("output_ids", [1, 1, length["data"][0]], prompt)
        assert number < length["data"][0] <= 2 * number


def test_token_ids_need_a_vocabulary(echo_server: LiveServer) -> None:
    ids = {"name": "input_ids", "datatype": "INT32", "shape": [1, 1], "data": [1]}
    found = http.post(echo_server.url + INFER, json={"inputs": [ids]})
    assert (found.status_code, "vocabulary" in found.json()["error"]) == (400, True)


ALONE = {
    "a batch": options("option.rolling_batch=disable", "batch_size=1"),
    "the engine": options("option.max_rolling_batch_size=1"),
}


@pytest.mark.parametrize("waits_for", ALONE)
def test_a_timeout_counts_from_when_the_request_is_accepted(waits_for: str) -> None:
    """Whether the request waits or runs. Without a timeout, it waits for `option.predict_timeout`."""
    body: dict[str, Any] = {"inputs": [text("a " * 40), {**LENGTH, "data": [40]}]}
    slow = options("option.echo_tokens_per_second=20")
    with serve("--engine", "echo", *slow, *ALONE[waits_for]) as server, ThreadPoolExecutor(3) as pool:
        running = pool.submit(http.post, server.url + INFER, json=body)
        wait_for(lambda: server.metric('vllm:num_requests_running{engine="0",model_name="model"}') == 1, 20, "it waits")
        began = time.monotonic()
        late = http.post(server.url + INFER, json={**body, "parameters": {"timeout": 300_000}})
        assert (late.status_code, late.json()) == (503, {"error": "Request timeout expired"})
        assert 0.3 <= time.monotonic() - began < 1.5
        patient = pool.submit(http.post, server.url + INFER, json={**body, "parameters": {"timeout": 60_000_000}})
        assert running.result().status_code == 200
        assert patient.result().status_code == 200, "the request that left holds up nobody"
        running_late = http.post(server.url + INFER, json={**body, "parameters": {"timeout": 500_000}})
        assert (running_late.status_code, running_late.json()["error"]) == (503, "Request timeout expired")
        assert server.metric('vllm:num_requests_running{engine="0",model_name="model"}') == 0
