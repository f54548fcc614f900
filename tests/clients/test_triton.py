"""Triton's generate extension as its users call it: by requests and sseclient-py, by aiohttp, and by tritonclient.

What Triton's own tests of the extension check is here or in tests/app/dialects/test_triton.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.checks import CHAT, EMOJI, PARIS, UNICODE
from tests.clients.driver import Driver
from tests.servers import http

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


def test_tritonclient_finds_the_server_and_its_model(tritonclient: Driver, triton_url: str) -> None:
    address = triton_url.removeprefix("http://").partition("/")[0]
    found = tritonclient.generate(address, "model", model_version="1")
    assert [found[name] for name in ("is_server_live", "is_server_ready", "is_model_ready")] == [True] * 3
    assert found["get_server_metadata"]["name"] == "lmi-handler"
    assert found["get_model_repository_index"] == [{"name": "model", "version": "1", "state": "READY"}]
    metadata, config = found["get_model_metadata"], found["get_model_config"]
    assert (metadata["name"], metadata["versions"], metadata["platform"]) == ("model", ["1"], "openvino")
    assert [one["name"] for one in metadata["inputs"]] == [one["name"] for one in config["input"]]
    assert metadata["outputs"][0] == {"name": "text_output", "datatype": "BYTES", "shape": [-1, -1]}


def test_tritonclient_is_told_of_an_unknown_model(tritonclient: Driver, triton_url: str) -> None:
    address = triton_url.removeprefix("http://").partition("/")[0]
    outcome = tritonclient.call("generate", address, "x")
    assert outcome.error == "tritonclient.utils.InferenceServerException"
    assert "Request for unknown model: 'x' is not found" in outcome.message


@pytest.mark.parametrize("binary", [True, False])
def test_tritonclient_infers(tritonclient: Driver, triton_url: str, binary: bool) -> None:
    address = triton_url.removeprefix("http://").partition("/")[0]
    inputs = {
        "text_input": ("BYTES", PARIS),
        "max_tokens": ("INT32", 8),
        "stop_words": ("BYTES", "\x07", "☃"),
        "exclude_input_in_output": ("BOOL", True),
    }
    outputs = ["text_output", "output_log_probs", "num_output_tokens"]
    found = tritonclient.generate(address, "model", inputs=inputs, outputs=outputs, binary=binary)
    same = {"text_input": PARIS, "max_tokens": 8, "exclude_input_in_output": True}
    text = http.post(triton_url, json=same).json()["text_output"]
    assert found["text_output"] == ["object", [1, 1], [text]]
    assert found["output_log_probs"][:2] == ["float32", [1, 1, 8]]
    assert max(found["output_log_probs"][2]) < 0
    assert found["num_output_tokens"] == ["int32", [1, 1], [8]]
    assert found["id"] == "7"
    for algorithm in ("gzip", "deflate"):
        packed = {f"{which}_compression_algorithm": algorithm for which in ("request", "response")}
        more = {**packed, "priority": 1, "timeout": 60_000_000}
        options = {"inputs": inputs, "outputs": outputs, "binary": binary, "more": more}
        assert tritonclient.generate(address, "model", **options) == found
    bad = {**inputs, "max_tokens": ("UINT64", 8)}
    outcome = tritonclient.call("generate", address, "model", inputs=bad, outputs=[], binary=binary)
    assert outcome.error == "tritonclient.utils.InferenceServerException"
    assert "data-type is 'UINT64', but model 'model' expects 'INT32'" in outcome.message
