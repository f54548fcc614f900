"""Triton's generate extension as its users call it: by requests and sseclient-py, by aiohttp, and by tritonclient.

What Triton's own tests of the extension check is here or in tests/app/dialects/test_triton.py.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.clients import toolchains
from tests.clients.checks import CHAT, EMOJI, PARIS, UNICODE
from tests.clients.driver import Driver, python_client
from tests.servers import free_port, http, serve, wait_for

pytestmark = pytest.mark.clients

_both = pytest.mark.parametrize("how", ["generate", "stream"])

MODEL = {"model_name": "model", "model_version": "1"}


def joined(events: list[Any]) -> str:
    return "".join(event["text_output"] for event in events)


# -- the demo model ------------------------------------------------------------------------------------------------


def test_an_answer_and_its_stream_for_triton(triton: Driver, triton_url: str) -> None:
    answer = triton.generate(triton_url, PARIS, max_tokens=8)
    assert answer.keys() == {"model_name", "model_version", "text_output"}
    assert answer["text_output"].startswith(f"{PARIS} Paris")
    events = triton.stream(triton_url, PARIS, max_tokens=8, stream=True)
    assert len(events) == 8
    assert events[0] == {**MODEL, "text_output": " Paris"}
    assert PARIS + joined(events) == answer["text_output"]


def test_the_documents_own_example(triton: Driver, triton_url: str) -> None:
    """The request in Triton's documentation of its generate extension."""
    answer = triton.generate(triton_url, "client input", id="42", parameters={"stream": False, "temperature": 0})
    assert answer.pop("text_output").startswith("client input")
    assert answer == {"id": "42", **MODEL}


def test_ids_come_back_and_empty_ones_do_not(triton: Driver, triton_url: str) -> None:
    for id in ("42", 'a "b" ü'):
        assert triton.generate(triton_url, PARIS, max_tokens=1, id=id)["id"] == id
        events = triton.stream(triton_url, PARIS, max_tokens=3, id=id)
        assert [event["id"] for event in events] == [id] * 3
    assert "id" not in triton.generate(triton_url, PARIS, max_tokens=1, id="")


def test_a_stream_that_is_told_not_to_stream_has_one_event(triton: Driver, triton_url: str) -> None:
    (event,) = triton.stream(triton_url, PARIS, max_tokens=4, stream=False)
    assert event == triton.generate(triton_url, PARIS, max_tokens=4)


def test_tensorrt_llms_example(triton: Driver, triton_url: str) -> None:
    """As its README has it: both lists of words sent, and empty."""
    names: dict[str, Any] = {"max_tokens": 8, "bad_words": "", "stop_words": "", "pad_id": 2, "end_id": 2}
    assert triton.generate(triton_url, PARIS, **names)["text_output"].startswith(f"{PARIS} Paris")
    assert joined(triton.stream(triton_url, PARIS, **names, stream=True)).startswith(" Paris")


def test_stop_words_are_left_out(triton: Driver, triton_url: str) -> None:
    names: dict[str, Any] = {"max_tokens": 8, "return_finish_reason": True, "exclude_input_in_output": True}
    answer = triton.generate(triton_url, PARIS, stop_words=["ris"], **names)
    assert (answer["text_output"], answer["finish_reason"]) == (" Pa", "stop")
    *_, last = events = triton.stream(triton_url, PARIS, parameters={"stop_words": "ris"}, **names)
    assert (joined(events), last["finish_reason"]) == (" Pa", "stop")


def test_figures_beside_the_text(triton: Driver, triton_url: str) -> None:
    names: dict[str, Any] = {
        "max_tokens": 4,
        "return_log_probs": True,
        "return_cumulative_logprob": True,
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
    }
    answer = triton.generate(triton_url, PARIS, **names)
    assert (answer["num_input_tokens"], answer["num_output_tokens"]) == (5, 4)
    assert answer["output_log_probs"][0] == pytest.approx(-0.55, abs=0.3)
    assert answer["cum_log_probs"] == answer["cumulative_logprob"] == pytest.approx(sum(answer["output_log_probs"]))
    events = triton.stream(triton_url, PARIS, **names)
    assert [event["output_log_probs"] for event in events] == pytest.approx(answer["output_log_probs"], abs=0.05)
    assert events[-1]["cum_log_probs"] == pytest.approx(answer["cum_log_probs"], abs=0.1)


def test_a_seed_repeats_the_text_for_triton(triton: Driver, triton_url: str) -> None:
    names: dict[str, Any] = {"max_tokens": 8, "temperature": 1.0, "top_k": 50, "exclude_input_in_output": True}
    first, again, other = (triton.generate(triton_url, PARIS, random_seed=seed, **names) for seed in (7, 7, 8))
    assert first == again
    assert first != other
    assert joined(triton.stream(triton_url, PARIS, random_seed=7, **names)) == first["text_output"]


def test_beams(triton: Driver, triton_url: str) -> None:
    answer = triton.generate(triton_url, PARIS, max_tokens=4, beam_width=2, return_log_probs=True)
    assert len(answer["text_output"]) == len(answer["cum_log_probs"]) == 2
    assert all(text.startswith(PARIS) for text in answer["text_output"])
    assert len(answer["output_log_probs"]) == 8


def test_characters_made_of_several_tokens_come_whole_for_triton(triton: Driver, triton_url: str) -> None:
    text = joined(triton.stream(triton_url, EMOJI, max_tokens=16))
    assert "👩\u200d🚀" in text
    assert "\ufffd" not in text


def test_the_end_of_sequence_token_is_no_text_for_triton(triton: Driver, triton_url: str) -> None:
    answer = triton.generate(triton_url, CHAT, max_tokens=200, return_finish_reason=True, exclude_input_in_output=True)
    assert "Paris" in answer["text_output"]
    assert "<|im_end|>" not in answer["text_output"]
    assert answer["finish_reason"] == "stop"


# -- the shapes of benchmarks --------------------------------------------------------------------------------------


def test_the_shape_of_vllms_benchmark(triton: Driver, triton_url: str) -> None:
    """Its backend `tensorrt-llm`: it adds the texts up and counts the lines."""
    events = triton.stream(
        triton_url, PARIS, accumulate_tokens=True, temperature=0.0, top_p=1.0, max_tokens=6, stream=True, min_length=6
    )
    assert len(events) == 6
    assert joined(events).startswith(" Paris")


def test_the_shape_of_genai_perf(triton: Driver, triton_url: str) -> None:
    assert triton.generate(triton_url, PARIS)["text_output"].startswith(f"{PARIS} Paris")
    events = triton.stream(triton_url, PARIS, max_tokens=5, stream=True)
    assert [type(event["text_output"]) for event in events] == [str] * 5


def test_the_shape_of_the_llmapi_model(triton: Driver, triton_url: str) -> None:
    names = {"sampling_param_max_tokens": 4, "sampling_param_temperature": 0.0, "return_finish_reason": True}
    answer = triton.generate(triton_url, PARIS, **names, streaming=False)
    assert answer["text_output"].startswith(" Paris")
    assert answer["finish_reason"] == "length"
    assert joined(triton.stream(triton_url, PARIS, **names, streaming=True)) == answer["text_output"]


# -- errors --------------------------------------------------------------------------------------------------------


@_both
@pytest.mark.parametrize(
    ("names", "says"),
    [
        ({"max_tokens": "x"}, '400 max_tokens="x": must be an integer'),
        ({"arr": [1]}, "400 parameter 'arr' has invalid type. It should be either 'int', 'bool', or 'string'."),
        ({"parameters": {"nested": {}}}, "400 Converting keyword: 'parameters': parameter 'nested' has invalid type"),
        ({"parameters": 1}, "400 Expected JSON object for keyword: 'parameters'"),
        ({"id": 7}, "400 Unable to parse 'id': attempt to access JSON non-string as string"),
        ({"max_tokens": 1, "parameters": {"max_tokens": 1}}, "400 input 'max_tokens' already exists in request"),
        ({"max_tokens": 100_000_000}, "400 max_tokens=100000000: with 5 prompt tokens it must be at most"),
        ({"guided_decoding_guide_type": "xml"}, '400 guided_decoding_guide_type="xml": must be one of'),
    ],
)
def test_refusals_for_triton(triton: Driver, triton_url: str, how: str, names: dict[str, Any], says: str) -> None:
    outcome = triton.call(how, triton_url, PARIS, **names)
    assert outcome.error == "__main__.Refused"
    assert outcome.message.startswith(says)


def test_exactly_one_response(triton: Driver, triton_url: str) -> None:
    answer = triton.generate(triton_url, PARIS, max_tokens=3, stream=True)
    assert answer == {
        "error": "generate expects model to produce exactly 1 response, use generate stream for model that generates "
        "various number of responses"
    }


@_both
def test_an_unknown_model(triton: Driver, triton_url: str, how: str) -> None:
    outcome = triton.call(how, triton_url.replace("/model/", "/x/"), PARIS)
    assert outcome.message == "404 Request for unknown model: 'x' is not found; served here: model"


def test_a_stream_that_fails_brings_its_tokens_before_the_error_for_triton(
    triton: Driver, triton_echo_url: str
) -> None:
    events = triton.stream(triton_echo_url, "a b <raise> c", max_tokens=9)
    assert joined(events[:-1]) == " a b"
    assert events[-1].keys() == {"error"}
    assert "raised on cue" in events[-1]["error"]


@_both
def test_a_failure_before_the_first_token_is_a_status(triton: Driver, triton_echo_url: str, how: str) -> None:
    outcome = triton.call(how, triton_echo_url, "<raise> a")
    assert outcome.message.startswith("400 ")
    assert "raised on cue" in outcome.message
    assert outcome.events == []


def test_echoed_words_come_one_by_one_for_triton(triton: Driver, triton_echo_url: str) -> None:
    words = [f" {word}" for word in UNICODE.split()]
    events = triton.stream(triton_echo_url, UNICODE, max_tokens=len(words))
    assert [event["text_output"] for event in events] == words


# -- tritonclient --------------------------------------------------------------------------------------------------


class Client(NamedTuple):
    """A client of tritonclient's: its version, its door and whether it is asynchronous, and what it talks to."""

    driver: Driver
    door: str
    address: str

    def call(self, method: str, model: str = "model", **options: Any) -> Any:
        return self.driver.generate(self.address, model, door=self.door, method=method, **options)

    def refused(self, method: str, model: str = "model", **options: Any) -> str:
        outcome = self.driver.call("generate", self.address, model, door=self.door, method=method, **options)
        assert outcome.error == "tritonclient.utils.InferenceServerException", outcome
        return outcome.message

    def infer(self, method: str = "infer", **inputs: Any) -> Any:
        options = {name: inputs.pop(name) for name in ("outputs", "more", "binary", "cancel_after") if name in inputs}
        return self.call(method, inputs={**ASK, **inputs}, **options)

    def stream(self, **options: Any) -> list[Any]:
        inputs = {**ASK, "stream": ("BOOL", True), **options.pop("inputs", {})}
        return self.driver.stream(self.address, options.pop("model", "model"), door=self.door, inputs=inputs, **options)


WORDS = "a b c d e"
ASK = {"text_input": ("BYTES", WORDS), "max_tokens": ("INT32", 5), "exclude_input_in_output": ("BOOL", True)}

CLIENTS = [
    pytest.param((environment, door, mode), id=f"{version}-{door}-{mode}", marks=marks)
    for environment, version, marks in (("triton", "2.73", ()), ("triton-2024", "2.50", pytest.mark.nightly))
    for door in ("http", "grpc")
    for mode in ("sync", "async")
]
"""The environment, the door and the mode of each client."""


@pytest.fixture(scope="module")
def doors() -> Iterator[dict[str, str]]:
    """The echo engine at both doors, as host:port. It writes slowly, so that requests can be cancelled."""
    port = free_port()
    own = ("-o", "option.echo_cues=true", "-o", "option.echo_tokens_per_second=200")
    with serve("--engine", "echo", "--grpc-port", str(port), *own) as server:
        server.wait_ready()
        yield {"http": server.url.removeprefix("http://"), "grpc": f"127.0.0.1:{port}", "url": server.url}


@pytest.fixture(params=CLIENTS)
def client(request: pytest.FixtureRequest, doors: dict[str, str]) -> Client:
    environment, door, mode = request.param
    return Client(python_client(environment, "drive_tritonclient", mode), door, doors[door])


@pytest.mark.parametrize("model", ["model", "nope"])
def test_tritonclient_asks_for_the_state(client: Client, model: str) -> None:
    assert client.call("is_server_live") is True
    assert client.call("is_server_ready") is True
    assert client.call("is_model_ready", model) is (model == "model")


def test_tritonclient_describes_the_server_and_its_model(client: Client) -> None:
    server = client.call("get_server_metadata")
    assert server["name"] == "lmi-handler"
    assert "binary_tensor_data" in server["extensions"]
    metadata, config = client.call("get_model_metadata"), client.call("get_model_config")
    assert (metadata["name"], metadata["versions"], metadata["platform"]) == ("model", ["1"], "echo")
    config = config.get("config", config)
    assert [one["name"] for one in metadata["inputs"]] == [one["name"] for one in config["input"]]
    assert metadata["outputs"][0]["name"] == "text_output"
    assert [int(size) for size in metadata["outputs"][0]["shape"]] == [-1, -1]
    (state,) = index if isinstance(index := client.call("get_model_repository_index"), list) else index["models"]
    assert state == {"name": "model", "version": "1", "state": "READY"}


@pytest.mark.parametrize("method", ["get_model_metadata", "get_model_config", "get_inference_statistics"])
def test_tritonclient_is_told_of_an_unknown_model(client: Client, method: str) -> None:
    assert "Request for unknown model: 'nope' is not found" in client.refused(method, "nope")


def test_tritonclient_reads_statistics(client: Client) -> None:
    def count() -> int:
        (model,) = client.call("get_inference_statistics")["model_stats"]
        assert model["inference_stats"]["success"]["count"] == model["inference_count"]
        return int(model["inference_count"])

    before = count()
    client.infer()
    assert count() == before + 1


@pytest.mark.parametrize("kind", ["system", "cuda"])
def test_tritonclient_finds_no_shared_memory(client: Client, kind: str) -> None:
    """Examples forget all regions first."""
    client.call(f"unregister_{kind}_shared_memory")
    client.call(f"unregister_{kind}_shared_memory", arguments={"name": "a"})
    assert not client.call(f"get_{kind}_shared_memory_status")
    places: dict[str, dict[str, Any]] = {"system": {"key": "/a"}, "cuda": {"raw_handle": "", "device_id": 0}}
    arguments = {"name": "a", "byte_size": 8, **places[kind]}
    assert "shared memory is not supported" in client.refused(f"register_{kind}_shared_memory", arguments=arguments)


def test_tritonclient_can_load_no_model(client: Client) -> None:
    assert client.refused("load_model")


@pytest.mark.parametrize("method", ["infer", "async_infer"])
def test_tritonclient_infers(client: Client, doors: dict[str, str], method: str) -> None:
    same = {"text_input": WORDS, "max_tokens": 5, "exclude_input_in_output": True}
    text = http.post(f"{doors['url']}/v2/models/model/generate", json=same).json()["text_output"]
    found = client.infer(method, outputs=["text_output", "num_output_tokens"])
    assert found == {"id": "7", "text_output": ["object", [1], [text]], "num_output_tokens": ["int32", [1, 1], [5]]}
    assert client.infer(method, text_input=("BYTES", UNICODE), max_tokens=("INT32", 50))["text_output"][2][0]


@pytest.mark.parametrize("binary", [True, False])
def test_tritonclient_infers_in_json(client: Client, binary: bool) -> None:
    if client.door == "grpc":
        pytest.skip("gRPC has no JSON")
    assert client.infer(binary=binary)["text_output"] == ["object", [1], [f" {WORDS}"]]


def test_tritonclient_stops_at_words(client: Client) -> None:
    assert client.infer(stop_words=("BYTES", "\x07", "c"))["text_output"][2] == [" a b "]


def test_tritonclient_reads_log_probabilities(client: Client) -> None:
    found = client.infer(return_log_probs=("BOOL", True), outputs=["output_log_probs", "cum_log_probs"])
    assert found["output_log_probs"][:2] == ["float32", [1, 1, 5]]
    assert found["cum_log_probs"][2] == pytest.approx([sum(found["output_log_probs"][2])])


COMPRESSIONS = ["gzip", "deflate"]


@pytest.mark.parametrize("algorithm", COMPRESSIONS)
def test_tritonclient_compresses(client: Client, algorithm: str) -> None:
    both = [f"{which}_compression_algorithm" for which in ("request", "response")]
    names = both if client.door == "http" else ["compression_algorithm"]
    assert client.infer(more=dict.fromkeys(names, algorithm)) == client.infer()


def test_tritonclient_sends_a_priority_and_a_timeout(client: Client) -> None:
    assert client.infer(more={"priority": 1, "timeout": 60_000_000}) == client.infer()
    inputs = {**ASK, "max_tokens": ("INT32", 5000)}
    assert "Request timeout expired" in client.refused("infer", inputs=inputs, more={"timeout": 100_000})


@pytest.mark.parametrize(
    ("inputs", "options", "says"),
    [
        ({"max_tokens": ("UINT64", 5)}, {}, "data-type is 'UINT64', but model 'model' expects 'INT32'"),
        ({"max_tokens": ("INT32", -1)}, {}, "max_tokens=-1: "),
        ({"temperature": ("INT32", 5)}, {}, "data-type is 'INT32', but model 'model' expects 'FP32'"),
        ({"nope": ("INT32", 5)}, {}, "unexpected inference input 'nope' for model 'model'"),
        ({}, {"outputs": ["nope"]}, "unexpected inference output 'nope' for model 'model'"),
        ({}, {"model": "nope"}, "Request for unknown model: 'nope' is not found"),
        ({}, {"more": {"model_version": "2"}}, "Request for unknown model: 'model' version 2 is not found"),
        ({}, {"more": {"sequence_id": 3}}, "sequence_id=3: the model keeps no state between requests"),
        ({"text_input": ("BYTES", "<refuse>")}, {}, "refused on cue"),
    ],
)
def test_tritonclient_is_told_what_is_wrong(
    client: Client, inputs: dict[str, Any], options: dict[str, Any], says: str
) -> None:
    message = client.refused("infer", inputs={**ASK, **inputs}, **options)
    assert says in message
    http_status, code = ("[400]", "INVALID_ARGUMENT")
    if "unknown" in says:
        http_status, code = ("[404]", "NOT_FOUND")
    elif "refused" in says:  # by the engine
        http_status, code = ("[500]", "INTERNAL")
    assert (code if client.door == "grpc" else http_status) in message


# -- streams of tritonclient.grpc --------------------------------------------------------------------------------------

streams = pytest.mark.parametrize("client", [one for one in CLIENTS if "grpc" in str(one.id)], indirect=True)


@streams
def test_tritonclient_streams(client: Client) -> None:
    events = client.stream()
    assert [event["text_output"] for event in events] == [["object", [1], [f" {word}"]] for word in WORDS.split()]
    assert [event["final"] for event in events] == [False] * 4 + [True]
    if client.driver.asynchronous:
        return  # tritonclient.grpc.aio cannot ask for an empty end
    *others, end = client.stream(more={"enable_empty_final_response": True})
    assert [event["text_output"] for event in others] == [event["text_output"] for event in events]
    assert [event["final"] for event in (*others, end)] == [False] * 5 + [True]
    assert "text_output" not in end


@streams
def test_tritonclient_streams_whole_answers(client: Client) -> None:
    (event,) = client.stream(inputs={"stream": ("BOOL", False)})
    assert (event["text_output"][2], event["final"]) == ([f" {WORDS}"], True)


@streams
def test_tritonclient_sends_many_requests_on_a_stream(client: Client) -> None:
    events = client.stream(requests=20)
    texts = {str(number): "" for number in range(20)}
    for event in events:
        texts[event["id"]] += event["text_output"][2][0]
    assert {*texts.values()} == {f" {WORDS}"}


@streams
def test_tritonclient_streams_up_to_stop_words(client: Client) -> None:
    events = client.stream(inputs={"stop_words": ("BYTES", "c")})
    assert "".join(event["text_output"][2][0] for event in events) == " a b "


@streams
def test_tritonclient_streams_log_probabilities(client: Client) -> None:
    events = client.stream(inputs={"return_log_probs": ("BOOL", True)})
    assert [event["output_log_probs"][1] for event in events] == [[1, 1, 1]] * 5


@streams
def test_tritonclient_is_told_of_errors_on_a_stream(client: Client) -> None:
    (event,) = client.stream(inputs={"nope": ("INT32", 1)})
    assert "unexpected inference input 'nope'" in event["error"]


@streams
def test_tritonclient_cancels(client: Client, doors: dict[str, str]) -> None:
    long = {"max_tokens": ("INT32", 100_000)}
    first, *_ = client.stream(inputs=long, cancel_after=1)
    assert first["text_output"][2] == [" a"]
    wait_for(lambda: running(doors) == 0, 20, "the engine goes on")
    outcome = client.driver.call(
        "generate", client.address, "model", door="grpc", method="async_infer", inputs={**ASK, **long}, cancel_after=0.5
    )
    assert "ancelled" in outcome.message
    wait_for(lambda: running(doors) == 0, 20, "the engine goes on")


def running(doors: dict[str, str]) -> float:
    text = http.get(f"{doors['url']}/metrics").text
    return float(text.partition('\nvllm:num_requests_running{engine="0",model_name="model"} ')[2].split()[0])


@streams
def test_tritonclient_has_a_deadline(client: Client) -> None:
    inputs = {**ASK, "max_tokens": ("INT32", 100_000)}
    assert "DEADLINE_EXCEEDED" in client.refused("infer", inputs=inputs, more={"client_timeout": 0.3})


@streams
def test_tritonclient_is_told_of_a_failure_after_tokens(client: Client, doors: dict[str, str]) -> None:
    """The last test: the engine starts again after a failure, each time after a longer pause."""
    wait_for(lambda: http.get(f"{doors['url']}/ping").status_code == 200, 60, "the engine is not back")
    *events, last = client.stream(inputs={"text_input": ("BYTES", "a b <raise> c")})
    assert [event["text_output"][2] for event in events] == [[" a"], [" b"]]
    assert "raised on cue" in last["error"]


# -- perf_analyzer -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(platform.machine() != "x86_64", reason="perf_analyzer is for x86-64")
def test_perf_analyzer_counts_what_the_server_counts(doors: dict[str, str], tmp_path: Path) -> None:
    """It comes with tritonclient of 2024; what else it loads comes with tritonserver."""
    program = toolchains.python("triton-2024").with_name("perf_analyzer")
    [libraries] = toolchains.python("pytriton").parents[1].glob("lib/python*/site-packages/nvidia_pytriton.libs")
    for name in ("libb64-*.so.0d", "libcudart-*.so.12*"):
        [library] = libraries.glob(name)
        base, _, version = library.name.partition(".so.")
        (tmp_path / f"{base.partition('-')[0]}.so.{version.partition('.')[0]}").symlink_to(library)
    inputs = {"text_input": [WORDS], "max_tokens": [5], "stream": [True], "exclude_input_in_output": [True]}
    data = tmp_path / "data.json"
    data.write_text(json.dumps({"data": [inputs]}))
    load = ("--request-count", "40", "--concurrency-range", "4")
    command = [str(program), "-m", "model", "-i", "grpc", "-u", doors["grpc"], "--async", "--streaming", *load]
    wait_for(lambda: http.get(f"{doors['url']}/ping").status_code == 200, 60, "the engine is not back")
    before = counted(doors)
    done = subprocess.run(
        [*command, "--input-data", str(data), "--shape", "text_input:1"],
        capture_output=True,
        text=True,
        timeout=100,
        env={"LD_LIBRARY_PATH": f"{tmp_path}:{libraries}", "PATH": ""},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    requested, tokens = (after - earlier for after, earlier in zip(counted(doors), before, strict=True))
    assert (requested, tokens) == (40, 200)
    assert all(f"{what} count: 40" in done.stdout for what in ("Request", "Inference", "Successful request"))
    rates = {name: float(rate) for name, rate in re.findall("(Throughput|Response Throughput): ([0-9.]+)", done.stdout)}
    assert rates["Response Throughput"] / rates["Throughput"] == pytest.approx(5, abs=0.1)


def counted(doors: dict[str, str]) -> tuple[int, int]:
    """The requests in the statistics of the model, and the tokens in the metrics."""
    (model,) = http.get(f"{doors['url']}/v2/models/model/stats").json()["model_stats"]
    text = http.get(f"{doors['url']}/metrics").text
    tokens = text.partition('\nvllm:generation_tokens_total{engine="0",model_name="model"} ')[2].split()[0]
    return model["inference_count"], int(float(tokens))
