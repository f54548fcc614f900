"""Variables of TGI, Hugging Face and AWS's vLLM image, and the settings of LMI's own handlers."""

from __future__ import annotations

import os
from typing import Any

import pytest

from handler.config.config import Config
from handler.config.environment import name_hub_token
from handler.config.loader import Reading, read_config
from handler.config.options.names import VARIABLES
from tests.one_test import in_one_test


def reading(environ: dict[str, str], *overrides: str) -> Reading:
    return read_config(overrides=overrides, environ=environ)


@in_one_test(
    ("environ", "wanted"),
    [
        # TGI and Hugging Face
        ({"SM_NUM_GPUS": "4"}, {"tensor_parallel_degree": "4"}),
        ({"NUM_SHARD": "2"}, {"tensor_parallel_degree": "2"}),
        ({"SHARDED": "true"}, {"tensor_parallel_degree": "max"}),
        ({"SHARDED": "false"}, {"tensor_parallel_degree": "1"}),
        ({"MAX_TOTAL_TOKENS": "512", "MAX_INPUT_TOKENS": "500"}, {"max_model_len": 512, "max_input_len": 500}),
        ({"MAX_INPUT_LENGTH": "500"}, {"max_input_len": 500}),
        ({"MAX_BATCH_SIZE": "8", "PAYLOAD_LIMIT": "99"}, {"max_rolling_batch_size": 8, "max_request_size": 99}),
        ({"MODEL_ID": "a/b", "DTYPE": "bfloat16"}, {"model_id": "a/b", "dtype": "bf16"}),
        ({"MAX_CONCURRENT_REQUESTS": ""}, {"job_queue_size": 1000}),
        ({"HF_TASK": "text-generation"}, {"task": "text-generation"}),
        ({"HF_TASK": "feature-extraction"}, {"task": "text-embedding"}),
        ({"OPTION_ROLLING_BATCH": "vllm", "QUANTIZE": "awq", "HF_MODEL_QUANTIZE": "awq"}, {"quantization": "awq"}),
        ({"OPTION_ROLLING_BATCH": "vllm", "CUDA_MEMORY_FRACTION": "0.5"}, {"gpu_memory_utilization": 0.5}),
        ({"OPTION_ROLLING_BATCH": "vllm", "ENABLE_CUDA_GRAPHS": "false"}, {"enforce_eager": True}),
        ({"OPTION_ROLLING_BATCH": "vllm", "CUDA_GRAPHS": "1,2"}, {"engine_args": {"cudagraph_capture_sizes": [1, 2]}}),
        ({"OPTION_ROLLING_BATCH": "vllm", "KV_CACHE_DTYPE": "fp8_e4m3fn"}, {"kv_cache_dtype": "fp8_e4m3"}),
        ({"OPTION_ROLLING_BATCH": "trtllm", "CUDA_MEMORY_FRACTION": "0.5"}, {"free_gpu_memory_fraction": 0.5}),
        # AWS's vLLM image
        ({"SM_VLLM_MODEL": "a/b", "SM_VLLM_SEED": "1"}, {"model_id": "a/b", "engine_args": {"seed": 1}}),
        ({"SM_VLLM_ENFORCE_EAGER": ""}, {"enforce_eager": True}),
        ({"SM_VLLM_NO_ENABLE_PREFIX_CACHING": "true"}, {"enable_prefix_caching": False}),
        ({"SM_VLLM_TENSOR_PARALLEL_SIZE": "2", "SM_VLLM_MAX_NUM_SEQS": "7"}, {"max_rolling_batch_size": 7}),
        ({"SM_VLLM_SERVED_MODEL_NAME": '["a", "b"]'}, {"served_model_name": ("a", "b")}),
        ({"SM_VLLM_MODEL": "a/b"}, {"openai_compat": True}),
        ({"SM_VLLM_MODEL": "a/b", "OPTION_OPENAI_COMPAT": "false"}, {"openai_compat": False}),
        ({"MESSAGES_API_ENABLED": "true"}, {"openai_compat": True}),
        ({"SM_VLLM_PORT": "8080", "SM_VLLM_HOST": "0.0.0.0"}, {"engine": "vllm"}),
        ({"SM_VLLM_DTYPE": "half", "OPTION_LLM_ENGINE": "echo"}, {"engine": "echo", "dtype": "fp16"}),
        # LMI's own handlers
        (
            {"OPTION_ENTRYPOINT": "djl_python.lmi_vllm.vllm_async_service", "OPTION_ASYNC_MODE": "true",
             "OPTION_ROLLING_BATCH": "disable"},
            {"engine": "vllm", "rolling_batch": "auto"},
        ),
        ({"OPTION_ENTRYPOINT": "djl_python.lmi_trtllm.trtllm_async_service"}, {"engine": "trtllm"}),
        ({"OPTION_ENTRYPOINT": "handler.entry", "OPTION_ROLLING_BATCH": "disable"}, {"rolling_batch": "disable"}),
    ],
)  # fmt: skip
def test_a_variable_sets_an_option(environ: dict[str, str], wanted: dict[str, Any]) -> None:
    config, problems, _ = reading(environ)
    assert problems == ()
    assert {name: value(config, name) for name in wanted} == wanted


def value(config: Config, name: str) -> Any:
    return getattr(config, name, None) or config.engine_options.get(name, getattr(config, name, None))


@in_one_test(
    ("environ", "wanted"),
    [
        ({"SM_NUM_GPUS": "x"}, "environment variable SM_NUM_GPUS: option.tensor_parallel_degree=x: must be a whole"),
        ({"SM_NUM_GPUS": "2", "NUM_SHARD": "4"}, "environment variables NUM_SHARD and SM_NUM_GPUS contra"),
        (
            {"NUM_SHARD": "4", "TENSOR_PARALLEL_DEGREE": "2"},
            "environment variables NUM_SHARD and TENSOR_PARALLEL_D",
        ),
        (
            {"HF_API_TOKEN": "hf_a", "HF_TOKEN": "hf_b"},
            "environment variables HF_API_TOKEN and HF_TOKEN contradict each",
        ),
        ({"QUANTIZE": "awq"}, "environment variable QUANTIZE: option.quantize=awq: must be one of int8, int4"),
        (
            {"HF_TASK": "fill-mask"},
            "environment variable HF_TASK: option.task=fill-mask: must be one of auto, text_embedding",
        ),
        ({"ROPE_FACTOR": "2"}, "environment variable ROPE_FACTOR: ROPE_FACTOR=2: write OPTION_HF_OVERRIDES"),
        ({"SHARDED": "x"}, "environment variable SHARDED: SHARDED=x: must be true or false"),
        (
            {"SM_VLLM_SED": "1"},
            "environment variable SM_VLLM_SED: unknown option 'option.sed'; did you mean vLLM",
        ),
        ({"SM_VLLM_PORT": "80"}, "environment variable SM_VLLM_PORT: option.port=80: `lmi serve --host` and `--port`"),
    ],
)
def test_a_problem_names_the_variable(environ: dict[str, str], wanted: str) -> None:
    (problem,) = reading(environ).problems
    assert str(problem).startswith(wanted)


def test_options_beat_foreign_names() -> None:
    config, problems, _ = reading({"DTYPE": "float16"}, "option.dtype=bf16")
    assert (config.dtype, problems) == ("bf16", ())


@in_one_test("name", sorted(VARIABLES))
def test_no_variable_is_passed_over(name: str) -> None:
    """It sets something, is refused, or has no effect and says so; those that others or a host read say nothing."""
    config, problems, _ = reading({name: "7"})
    heeded = f"environment variable {name}" in config.origins.values() or VARIABLES[name].same == "HF_TOKEN"
    told = any(name in text for text in (*map(str, problems), *config.warnings))
    assert bool(heeded or told) is not bool(VARIABLES[name].unread or VARIABLES[name].heeded)


@pytest.mark.parametrize("name", ["HF_API_TOKEN", "HUGGINGFACE_HUB_TOKEN", "HUGGING_FACE_HUB_TOKEN"])
def test_the_hubs_token_has_several_names(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setenv(name, "hf_a")
    name_hub_token()
    assert os.environ["HF_TOKEN"] == "hf_a"
    assert not reading(dict(os.environ)).problems
    monkeypatch.setenv("HF_TOKEN", "hf_b")
    name_hub_token()
    assert os.environ["HF_TOKEN"] == "hf_b"


def test_a_multi_model_endpoint_is_refused_by_name() -> None:
    (problem,) = reading({"SAGEMAKER_MULTI_MODEL": "true"}).problems
    assert problem.name == "SAGEMAKER_MULTI_MODEL"
    assert "inference components" in problem.message
    assert not reading({"SAGEMAKER_MULTI_MODEL": "false"}).problems
