"""Models with a config.json, for which DJL Serving sets options by itself: they start in each mode, and answer."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.djl.launch import StartFailed
from tests.djl.servers import djl, versions

pytestmark = pytest.mark.djl

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
PEFT = {**CONFIG, "peft_type": "LORA"}
ECHO = {
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

# Of every other version what its images' engines and machines make it write. MPI and AWS Neuron are not here.
RECOMMENDERS: list[tuple[str, str, dict[str, str], dict[str, str]]] = [
    ("0.28.0", "rolling", {}, {}),
    ("0.28.0", "dynamic", {"FRONT_GPUS": "4"}, {}),
    ("0.29.0", "dynamic", {"SERVING_FEATURES": "vllm"}, {}),
    ("0.29.0", "rolling", {"FRONT_GPUS": "4"}, {}),
    ("0.30.0", "plain", {"SERVING_FEATURES": "vllm"}, {}),
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
    with djl(version, {**ECHO, **options}, {"config.json": json.dumps(config)}, env) as server:
        return server.post({"inputs": "a b", "parameters": {"max_new_tokens": 2}}).json()


@pytest.mark.parametrize(("version", "mode"), PLACES)
def test_echo_starts_with_a_config_in_each_mode(version: str, mode: str) -> None:
    said = answer(version, MODES[mode], PEFT)
    assert said == ([{"generated_text": " a b"}] if mode in ("dynamic", "plain") else {"generated_text": " a b"})


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
