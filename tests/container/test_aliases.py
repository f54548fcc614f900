"""TGI's and SageMaker's names for the handler's options."""

from __future__ import annotations

import pytest

from handler.container.arguments import translate
from handler.core.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"SM_NUM_GPUS": "4"}, {"TENSOR_PARALLEL_DEGREE": "4"}),
        ({"HF_MODEL_QUANTIZE": "awq"}, {"OPTION_QUANTIZE": "awq"}),
        ({"MAX_CONCURRENT_REQUESTS": "64"}, {"SERVING_JOB_QUEUE_SIZE": "64"}),
        ({"MAX_BATCH_SIZE": "8"}, {"OPTION_MAX_ROLLING_BATCH_SIZE": "8"}),
        ({"MAX_BATCH_PREFILL_TOKENS": "4096"}, {"OPTION_MAX_ROLLING_BATCH_PREFILL_TOKENS": "4096"}),
        ({"MAX_TOTAL_TOKENS": "4096"}, {"OPTION_MAX_MODEL_LEN": "4096"}),
        (
            {"SM_VLLM_MODEL": "a/b", "SM_VLLM_ENFORCE_EAGER": ""},
            {"OPTION_LLM_ENGINE": "vllm", "OPTION_MODEL_ID": "a/b", "OPTION_ENFORCE_EAGER": "true"},
        ),
        ({"HF_MODEL_TRUST_REMOTE_CODE": "true"}, {"OPTION_TRUST_REMOTE_CODE": "true"}),
        (
            {"OPTION_LLM_ENGINE": "vllm", "CUDA_MEMORY_FRACTION": "0.8", "ENABLE_CUDA_GRAPHS": "false"},
            {"OPTION_GPU_MEMORY_UTILIZATION": "0.8", "OPTION_ENFORCE_EAGER": "true"},
        ),
        (
            {"OPTION_ROLLING_BATCH": "trtllm", "CUDA_MEMORY_FRACTION": "0.8", "ENABLE_CUDA_GRAPHS": "false"},
            {"OPTION_KV_CACHE_FREE_GPU_MEM_FRACTION": "0.8", "OPTION_USE_CUDA_GRAPH": "false"},
        ),
    ],
)
def test_each_becomes_the_handlers_own_and_is_told(given: dict[str, str], expected: dict[str, str]) -> None:
    found = translate(given)
    assert found.environ == {**given, **expected}
    for name, value in expected.items():
        assert any(line.endswith(f" is understood as {name}={value}") for line in found.lines)


def test_an_empty_one_counts_as_none() -> None:
    assert translate({"SM_NUM_GPUS": ""}) == ({"SM_NUM_GPUS": ""}, ())


def test_a_token_is_not_shown() -> None:
    found = translate({"HF_API_TOKEN": "hf_secret"})
    assert found.environ == {"HF_TOKEN": "hf_secret"}  # Java's log would show the other's value
    assert found.lines == ("HF_API_TOKEN is understood as HF_TOKEN",)
    with pytest.raises(ConfigError) as error:
        translate({"HUGGING_FACE_HUB_TOKEN": "hf_secret", "HF_TOKEN": "hf_other"})
    assert str(error.value).startswith(
        "environment variables HUGGING_FACE_HUB_TOKEN and HF_TOKEN contradict each other:"
    )
    assert "hf_" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"SM_NUM_GPUS": "4", "TENSOR_PARALLEL_DEGREE": "2"}, r"SM_NUM_GPUS and TENSOR_PARALLEL_DEGREE .* \(4 and 2\)"),
        ({"SM_NUM_GPUS": "4", "OPTION_TENSOR_PARALLEL_DEGREE": "2"}, "and OPTION_TENSOR_PARALLEL_DEGREE contradict"),
        ({"HF_MODEL_ID": "a/b", "OPTION_MODEL_ID": "c/d"}, "HF_MODEL_ID and OPTION_MODEL_ID contradict"),
        ({"ENABLE_CUDA_GRAPHS": "1"}, "ENABLE_CUDA_GRAPHS=1: must be true or false"),
    ],
)
def test_contradictions_are_refused_by_name(given: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        translate(given)


def test_equal_values_are_no_contradiction() -> None:
    assert translate({"HF_MODEL_ID": "a/b", "OPTION_MODEL_ID": "a/b"}).lines == ()


def test_all_problems_are_told() -> None:
    with pytest.raises(ConfigError, match=r"(?s)^2 problems:.*HF_TASK=.*ROPE_FACTOR="):
        translate({"HF_TASK": "fill-mask", "ROPE_FACTOR": "2", "MAX_BEST_OF": "2"})
