"""TGI's and SageMaker's names for the handler's options."""

from __future__ import annotations

import pytest

from handler.config.loader import read_config
from handler.container.arguments import translated_environment
from handler.core.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"SM_NUM_GPUS": "4"}, {"TENSOR_PARALLEL_DEGREE": "4"}),
        (
            {"SM_VLLM_MODEL": "a/b", "SM_VLLM_ENFORCE_EAGER": ""},
            {"OPTION_LLM_ENGINE": "vllm", "OPTION_MODEL_ID": "a/b", "OPTION_ENFORCE_EAGER": "true",
             "OPTION_OPENAI_COMPAT": "true"},
        ),
        (
            {"OPTION_LLM_ENGINE": "vllm", "CUDA_MEMORY_FRACTION": "0.8", "ENABLE_CUDA_GRAPHS": "false"},
            {"OPTION_GPU_MEMORY_UTILIZATION": "0.8", "OPTION_ENFORCE_EAGER": "true"},
        ),
        (
            {"OPTION_ROLLING_BATCH": "trtllm", "CUDA_MEMORY_FRACTION": "0.8", "ENABLE_CUDA_GRAPHS": "false"},
            {"OPTION_KV_CACHE_FREE_GPU_MEM_FRACTION": "0.8", "OPTION_USE_CUDA_GRAPH": "false"},
        ),
    ],
)  # fmt: skip
def test_each_becomes_the_handlers_own_and_is_told(given: dict[str, str], expected: dict[str, str]) -> None:
    found = translated_environment(given)
    assert found.environ == {**given, **expected}
    for name, value in expected.items():
        assert any(line.endswith(f" is understood as {name}={value}") for line in found.lines)


def test_an_empty_one_counts_as_none() -> None:
    assert translated_environment({"SM_NUM_GPUS": ""}) == ({"SM_NUM_GPUS": ""}, ())


def test_a_token_is_not_shown() -> None:
    found = translated_environment({"HF_API_TOKEN": "hf_secret"})
    assert found.environ == {"HF_TOKEN": "hf_secret"}  # Java's log would show the other's value
    assert found.lines == ("HF_API_TOKEN is understood as HF_TOKEN=***",)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"SM_NUM_GPUS": "4", "OPTION_TENSOR_PARALLEL_DEGREE": "2"}, r"TENSOR_PARALLEL_DEGREE .* \(4 and 2\)"),
        ({"HF_MODEL_ID": "a/b", "OPTION_MODEL_ID": "c/d"}, "HF_MODEL_ID and OPTION_MODEL_ID contradict"),
    ],
)
def test_contradictions_are_refused_by_name(given: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        translated_environment(given)


def test_equal_values_are_no_contradiction() -> None:
    assert translated_environment({"HF_MODEL_ID": "a/b", "OPTION_MODEL_ID": "a/b"}).lines == ()


def test_what_is_refused_is_left_to_the_server() -> None:
    given = {"SM_NUM_GPUS": "4", "NUM_SHARD": "2", "MAX_BEST_OF": "2"}
    assert translated_environment(given).environ == {**given, "TENSOR_PARALLEL_DEGREE": "4"}


def test_a_contradiction_of_keys_shows_none() -> None:
    given = {"SM_VLLM_API_KEY": "sk-one", "OPTION_API_KEY": "sk-two"}
    assert "sk-" not in "".join(
        str(item) for item in (*translated_environment(given).lines, *read_config(environ=given).problems)
    )
