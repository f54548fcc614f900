"""Arguments behind the image's name, and TGI's and SageMaker's names for the handler's options."""

from __future__ import annotations

import pytest

from handler.config.loader import read_config
from handler.container.arguments import ContainerArguments, Translation, read_arguments, translated_environment
from handler.core.errors import ConfigError

# -- what may stand behind the image's name ----------------------------------------------------------------------------


_STORE = "/opt/ml/model"


@pytest.mark.parametrize(
    "argv",
    [
        [], ["serve"], ["djl-serving"], ["djl-serving", "-s", _STORE], ["djl-serving", "-s", f"{_STORE}/"],
        ["djl-serving", "--model-store", _STORE], ["djl-serving", f"--model-store={_STORE}"],
        ["serve", "-s", _STORE], ["serve", "-m", f"file:{_STORE}"], ["-m", _STORE],
    ],
)  # fmt: skip
def test_serve_and_nothing_are_the_same(argv: list[str]) -> None:
    assert read_arguments(argv, {}) == ContainerArguments(8080, ())


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (_STORE, ()),
        (f"file:{_STORE}", ()),
        (f"llm={_STORE}/", ("option.model_name=llm",)),
        (f"llm::Python:*=file://{_STORE}", ("option.model_name=llm",)),
        (f"[llm:1:Python:-1]=file:{_STORE}", ("option.model_name=llm",)),
    ],
)
def test_a_model_of_djl_servings_command_is_served_by_its_name(model: str, options: tuple[str, ...]) -> None:
    for command in (["djl-serving"], ["serve"], []):  # AWS's entry point passes what stands behind `serve` on
        assert read_arguments([*command, "-m", model], {}) == ContainerArguments(8080, options)


def test_flags_with_and_without_serve() -> None:
    flags = ["--engine", "echo", "-o", "option.dtype=fp32", "--port", "9000"]
    expected = ContainerArguments(9000, ("option.llm_engine=echo", "option.dtype=fp32"))
    assert read_arguments(flags, {"SAGEMAKER_BIND_TO_PORT": "1"}) == expected
    assert read_arguments(["serve", *flags], {}) == expected


def test_another_address_is_for_tests() -> None:
    assert read_arguments([], {"LMI_HOST": "127.0.0.1"}) == ContainerArguments(8080, (), "127.0.0.1")


def test_sagemaker_names_the_port() -> None:
    assert read_arguments(["serve"], {"SAGEMAKER_BIND_TO_PORT": "8090"}).port == 8090


@pytest.mark.parametrize(
    ("argv", "environ", "message"),
    [
        (["train"], {}, "this image only serves models; it cannot `train` them"),
        (["djl-serving", "-s", "/models"], {}, "--model-store /models: the model is in /opt/ml/model"),
        (["djl-serving", "-m", "m::Python=https://example.com/m.zip"], {}, "the model is in /opt/ml/model"),
        (["djl-serving", "-m", f"a=file:{_STORE}", f"b=file:{_STORE}"], {}, "serves one model"),
        (
            ["djl-serving", "-s", _STORE, "-m", "m::Python=/m"],
            {},
            "--models m::Python=/m: the model is in /opt/ml/model",
        ),
        (["djl-serving", "-f", "/x"], {}, "--config-file: only DJL Serving supports this flag"),
        (["serve", "--install", "ai.djl:x:1", "ai.djl:y:1"], {}, "--install: only DJL Serving supports this flag"),
        (["serve", "-m", f"test=file:{_STORE}/test/"], {}, f"--models test=file:{_STORE}/test/: the model is in "),
        (["bash"], {}, "'bash' is not a command"),
        (["serve", "--tp-size", "2"], {}, "unrecognized arguments: --tp-size 2: set options with -o option"),
        (["--model-id", "a/b"], {}, "unrecognized arguments: --model-id: set options with -o option"),
        (["serve"], {"SAGEMAKER_BIND_TO_PORT": "eighty"}, "SAGEMAKER_BIND_TO_PORT=eighty: must be a number"),
        (["serve", "--port", 5000 * "9"], {}, "must be a number from 1 to 65535"),
        (["serve", "--port", "0"], {}, "--port=0: must be a number from 1 to 65535"),
    ],
)
def test_anything_else_is_refused_by_name(argv: list[str], environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_arguments(argv, environ)


# -- TGI's and SageMaker's names for the handler's options -------------------------------------------------------------


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
    assert translated_environment({"SM_NUM_GPUS": ""}) == Translation({"SM_NUM_GPUS": ""}, ())


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
