"""DJL Serving's own parts: its release, the options that it sets, and its metrics."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.djl import launch
from tests.djl.launch import StartFailed
from tests.djl.servers import DjlServer, djl, newer, versions
from tests.servers import PATIENCE, http, wait_for

pytestmark = pytest.mark.djl

# -- the DJL Serving that runs the handler is LMI's release, unless option.lmi_version names another -------------------


ECHO = {"option.entryPoint": "handler.entry", "option.llm_engine": "echo"}
ROLLING = {**ECHO, "option.rolling_batch": "scheduler", "option.max_model_len": "200"}  # where a chat ends
SAMPLED: dict[str, Any] = {"inputs": "a b", "parameters": {"temperature": 0.7, "max_new_tokens": 2}}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a " * 40}]}


@pytest.fixture(scope="module", params=versions())
def rolling(request: pytest.FixtureRequest) -> Iterator[tuple[str, DjlServer]]:
    with djl(request.param, ROLLING, own_release=True) as found:
        yield request.param, found


def test_a_temperature_samples_as_in_the_djl_serving_that_runs_the_handler(rolling: tuple[str, DjlServer]) -> None:
    version, server = rolling
    names = server.post(SAMPLED).headers.get("x-lmi-ignored-parameters")
    if newer(version, "0.28"):  # which lets the header pass
        assert names == (None if newer(version, "0.32") else "parameters.temperature")
    if newer(version, "0.32"):
        assert "option.lmi_version=0.32" not in server.log
    else:  # Java passes the worker's lines on in its own time
        wait_for(lambda: "option.lmi_version=0.32" in server.log, PATIENCE, "the log does not name the option")


def test_a_chat_has_its_length(rolling: tuple[str, DjlServer]) -> None:
    """DJL Serving's chat route is another name for /invocations, of which a handler hears nothing."""
    version, server = rolling
    assert (server.post(CHAT, "/v1/chat/completions").json()["usage"]["completion_tokens"] > 30) is newer(
        version, "0.32"
    )


@pytest.mark.parametrize("version", versions())
def test_a_dynamic_batch_has_its_texts(version: str) -> None:
    off = {"option.rolling_batch": "disable"} if newer(version, "0.28") else {}  # which 0.25 steps all the same
    with djl(version, {**ECHO, **off}, own_release=True) as server:
        (found,) = server.post({"inputs": "a b", "parameters": {"max_new_tokens": 2}}).json()
        assert found["generated_text"] == ("a b a b" if newer(version, "0.29") else " a b")


@pytest.mark.parametrize("version", versions("0.33"))
def test_async_mode_has_its_schema(version: str) -> None:
    properties = {**ECHO, "option.async_mode": "true", "option.rolling_batch": "disable"}
    with djl(version, properties, own_release=True) as server:
        answer = server.post({"inputs": "a b", "parameters": {"max_new_tokens": 1, "details": True}}).json()
        assert answer["details"]["prefill"] == []
        assert "inputs" not in answer["details"]


@pytest.mark.parametrize("version", versions())
def test_the_option_beats_it(version: str) -> None:
    other = "0.28" if newer(version, "0.32") else "0.36"
    with djl(version, {**ROLLING, "option.lmi_version": other}) as server:
        assert (server.post(CHAT).json()["usage"]["completion_tokens"] == 30) is (other == "0.28")


# -- recommended -------------------------------------------------------------------------------------------------------
# Models with a config.json, for which DJL Serving sets options by itself: they start in each mode, and answer.


CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
PEFT = {**CONFIG, "peft_type": "LORA"}
RECOMMENDED_ECHO = {
    "option.entryPoint": "handler.entry",
    "option.llm_engine": "echo",
    "option.lmi_version": "0.28",  # whose schema these tests know, in each mode
}
MODES = {
    "rolling": {"option.rolling_batch": "scheduler"},
    "dynamic": {"batch_size": "4", "max_batch_delay": "10"},
    "plain": {},
    "async": {"option.async_mode": "true"},
}
SINCE = "0.31"  # async mode; every version with a recommender that Maven Central has is later
PLACES = [(version, mode) for mode in MODES for version in versions(SINCE)]

PYTORCH = {"option.backend": "pytorch"}
TRTLLM = {"SERVING_FEATURES": "trtllm"}

# Of every other version one start, with what its image's engine or machine makes it write. MPI and AWS Neuron are not
# here; tests/unit/djl/test_startup.py has what is written, for each engine.
RECOMMENDERS: list[tuple[str, str, dict[str, str], dict[str, str]]] = [
    ("0.28.0", "rolling", {}, {}),
    ("0.29.0", "dynamic", {"SERVING_FEATURES": "vllm"}, {}),
    ("0.30.0", "rolling", {"FRONT_GPUS": "4"}, {}),
    ("0.31.0", "rolling", {"FRONT_GPUS": "2"}, {"option.enable_lora": "true"}),
    ("0.32.0", "plain", {"SERVING_FEATURES": "vllm"}, {"option.pythonExecutable": sys.executable}),
    ("0.33.0", "async", {"FRONT_GPUS": "4"}, {"option.rolling_batch": "disable"}),
    ("0.34.0", "plain", {"SERVING_FEATURES": "vllm", "FRONT_GPUS": "4"}, {"option.tensor_parallel_degree": "max"}),
    ("0.35.0", "plain", {"SERVING_FEATURES": "vllm", "FRONT_GPUS": "4"}, {}),
    (
        "0.36.0",
        "plain",
        {"SERVING_FEATURES": "trtllm", "FRONT_GPUS": "4"},
        {**PYTORCH, "option.enable_stateful_sessions": "true"},
    ),
]


def answer(version: str, options: Mapping[str, str], config: object, env: Mapping[str, str] | None = None) -> Any:
    with djl(version, {**RECOMMENDED_ECHO, **options}, {"config.json": json.dumps(config)}, env) as server:
        return server.post({"inputs": "a b", "parameters": {"max_new_tokens": 2}}).json()


@pytest.mark.parametrize(("version", "mode"), PLACES)
def test_echo_starts_with_a_config_in_each_mode(version: str, mode: str) -> None:
    said = answer(version, MODES[mode], PEFT)
    assert said == ([{"generated_text": " a b"}] if mode in ("dynamic", "plain") else {"generated_text": " a b"})


@pytest.mark.nightly
@pytest.mark.skipif("DJL_SERVING_HOME" in os.environ, reason="it has a recommender of its own")
@pytest.mark.parametrize(("recommender", "mode", "env", "options"), RECOMMENDERS)
def test_echo_starts_with_what_each_version_recommends(
    recommender: str, mode: str, env: dict[str, str], options: dict[str, str]
) -> None:
    said = answer(versions()[-1], {**MODES[mode], **options}, PEFT, {**env, "FRONT_RECOMMENDER": recommender})
    assert said in ({"generated_text": " a b"}, [{"generated_text": " a b"}])


@pytest.mark.parametrize("version", versions("0.33"))
def test_where_the_image_names_trtllm_java_converts_the_model_first(version: str) -> None:
    """Whatever the mode: docs/djl.md says what prevents it."""
    recommender = "0.36.0"  # of our front end
    mode, env = {**MODES["async"], "option.rolling_batch": "disable"}, {**TRTLLM, "FRONT_RECOMMENDER": recommender}
    with pytest.raises(StartFailed, match=r"trt_llm_partition\.py"):
        answer(version, mode, CONFIG, env)
    assert answer(version, {**mode, **PYTORCH}, CONFIG, env) == {"generated_text": " a b"}


@pytest.mark.model
@pytest.mark.parametrize("version", versions(SINCE))
def test_openvino_starts_with_a_config(version: str, demo_model: Path) -> None:
    """The engine and the mode where nothing names one; echo shows the modes, test_model.py OpenVINO in each."""
    options = {"option.model_id": str(demo_model), "option.dtype": "fp32", "option.llm_engine": "auto"}
    said = answer(version, {**options, **MODES["plain"]}, CONFIG)
    assert (said[0] if isinstance(said, list) else said)["generated_text"]


@pytest.mark.skipif("DJL_SERVING_HOME" in os.environ, reason="the command's device is its own")
@pytest.mark.parametrize("option", ["option.enable_stateful_sessions", "option.enable_lora"])
def test_without_a_gpu_java_needs_a_device_in_its_command(option: str) -> None:
    options, env = {**MODES["rolling"], option: "true"}, {"FRONT_RECOMMENDER": "0.36.0"}
    with pytest.raises(StartFailed, match="No GPU device detected"):
        answer(versions()[-1], options, CONFIG, env)
    if option == "option.enable_stateful_sessions":  # echo has no adapters
        assert answer(versions()[-1], options, CONFIG, {**env, "FRONT_DEVICE": "-1"}) == {"generated_text": " a b"}


# -- what DJL Serving itself makes of a request: the id in its answer, and the figures in its metrics ------------------


METRICS_ROLLING = {**ECHO, "option.rolling_batch": "auto"}
ASYNC = {**ECHO, "option.async_mode": "true", "option.rolling_batch": "disable"}
BODY = {"inputs": "a b c", "parameters": {"max_new_tokens": 2}}


METRICS = {"option.djl_metrics": "true", "option.model_name": "mine"}
PROMETHEUS = {"SERVING_PROMETHEUS": "true"}
FIGURES = [
    r"LmiPromptTokens(_total)?{Model=.mine.} 3\.0",
    r"LmiGeneratedTokens(_total)?{Model=.mine.} 2\.0",
    r"LmiTimeToFirstTokenSeconds(_count)?{Model=.mine.} \d",  # 0.28 has gauges
    r"LmiEngineQueueTimeSeconds(_count)?{Model=.mine.} \d",
]


def shown(server: DjlServer, version: str) -> str:
    """The metrics of the worker: DJL Serving's Prometheus text, else what DJL's own reader makes of its lines."""
    if "DJL_SERVING_HOME" in os.environ:
        return http.get(server.url + "/server/metrics").text
    return launch.run(version, "Metrics", "\n".join(re.findall(r"\[INFO\] (Lmi.*)", server.log)))


def check_figures(server: DjlServer, version: str) -> None:
    if "DJL_SERVING_HOME" not in os.environ:
        names = {each.partition("(")[0] for each in FIGURES}
        wait_for(lambda: all(name in server.log for name in names), 20, "not all metrics are written")

    def all_shown() -> bool:
        text = shown(server, version)
        return all(re.search(each, text) for each in FIGURES)

    wait_for(all_shown, 20, "not all metrics are shown")
    assert "[METRICS]" not in server.log  # else Java would have shown the line
    assert "Invalid unit" not in server.log


@pytest.mark.parametrize("version", versions())
def test_a_rolling_batchs_answer_has_its_id_and_the_metrics_its_figures(version: str) -> None:
    with djl(version, {**METRICS_ROLLING, **METRICS}, env=PROMETHEUS) as server:
        found = server.post(BODY)
        assert found.status_code == 200
        id = found.headers["x-request-id"] if newer(version, "0.30") else None
        assert found.headers.get("requestId") == id
        check_figures(server, version)
        assert server.post(BODY).status_code == 200


@pytest.mark.parametrize("version", versions("0.31"))
def test_async_mode_has_the_figures_and_no_id_as_in_lmi(version: str) -> None:
    with djl(version, {**ASYNC, **METRICS}, env=PROMETHEUS) as server:
        found = server.post(BODY)
        assert (found.status_code, found.headers.get("requestId")) == (200, None)
        check_figures(server, version)


# -- text outside ASCII: Java reads the file as ISO 8859-1, and the environment by the locale --------------------------


NAME = "gr\u00f6\u00dfe \u65e5\u672c"
NAMED = {**ECHO, "option.openai_compat": "true"}  # a chat's answer contains the model's name
SHORT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}


@pytest.mark.parametrize("version", versions())
def test_a_file_outside_ascii_is_utf_8_and_a_byte_order_mark_is_reported(version: str) -> None:
    lines = ["\ufeffoption.rolling_batch=scheduler", "engine=Python", "minWorkers=1", "maxWorkers=1"]
    lines += [f"{key}={value}" for key, value in {**NAMED, "option.served_model_name": NAME}.items()]
    with djl(version, files={"serving.properties": "\n".join(lines)}) as server:
        assert server.post(SHORT).json()["model"] == NAME
        assert isinstance(server.post({"inputs": "a", "parameters": {"max_new_tokens": 1}}).json(), list)  # dynamic
        wait_for(
            lambda: "does not read option.rolling_batch" in server.log, PATIENCE, "the log does not name the option"
        )


@pytest.mark.parametrize("version", versions())
def test_the_environment_is_read_as_utf_8_without_a_locale(version: str) -> None:
    variables = {"LC_ALL": "POSIX", "OPTION_SERVED_MODEL_NAME": NAME, "OPTION_BATCHES_STORE": "/tmp/no-batches"}
    with djl(version, {**NAMED, "option.rolling_batch": "scheduler"}, env=variables) as server:
        assert server.post(SHORT).json()["model"] == NAME
        wait_for(lambda: "ignored: option.batches_store" in server.log, PATIENCE, "the log does not name the option")


@pytest.mark.parametrize("version", versions())
def test_one_of_several_models_is_java_s_choice(version: str) -> None:
    with djl(version, ROLLING, env={"SAGEMAKER_MULTI_MODEL": "true"}) as server:
        answer = server.post(SHORT, headers={"X-Amzn-SageMaker-Target-Model": "model.tar.gz"})
        assert answer.status_code == 200
