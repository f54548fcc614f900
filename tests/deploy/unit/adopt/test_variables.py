"""What becomes of a container's variables."""

from __future__ import annotations

import pytest

from deploy.adopt.variables import Container, Variables, container_kind, typed, variables
from deploy.errors import Refused
from deploy.spec.options import settings_of
from tests.one_test import in_one_test

LMI = Container("lmi", "vllm", "0.36")
TGI = Container("tgi", "vllm")
VLLM = Container("vllm", "vllm")


def names(items: list[tuple[str, str]]) -> list[str]:
    return [what.partition("=")[0] for what, _ in items]


def everywhere(found: Variables) -> str:
    return repr(found)


def test_options_keep_their_values_and_lmi_s_release_is_written() -> None:
    given = {"OPTION_MAX_ROLLING_BATCH_SIZE": "64", "OPTION_DTYPE": "bf16", "SERVING_JOB_QUEUE_SIZE": "500"}
    found = variables({**given, "HF_MODEL_ID": "Qwen/Qwen3-8B", "OPTION_MAX_MODEL_LEN": "8192"}, LMI)
    assert found.options == {
        "lmi_version": "0.36", "max_rolling_batch_size": 64, "dtype": "bf16", "job_queue_size": 500,
        "llm_engine": "vllm",
    }  # fmt: skip
    assert (found.model_id, found.context, found.unmapped, found.idle) == ("Qwen/Qwen3-8B", 8192, [], [])
    written = {setting.name: setting.value for setting in settings_of(found.options, {})}
    assert {name: written[name] for name in given} == given


def test_a_release_that_is_given_stays() -> None:
    assert variables({"OPTION_LMI_VERSION": "0.30"}, LMI).options["lmi_version"] == "0.30"


def test_names_of_tgi_become_options() -> None:
    given = {"MODEL_ID": "a/b", "NUM_SHARD": "4", "MAX_INPUT_TOKENS": "1024", "MAX_TOTAL_TOKENS": "2048"}
    found = variables({**given, "QUANTIZE": "awq", "CUDA_MEMORY_FRACTION": "0.8"}, TGI)
    assert found.options == {
        "tensor_parallel_degree": 4, "max_input_len": 1024, "quantize": "awq", "gpu_memory_utilization": 0.8,
        "llm_engine": "vllm",
    }  # fmt: skip
    assert (found.model_id, found.context) == ("a/b", 2048)


def test_variables_of_vllm_s_image_become_options_and_what_they_set_beside() -> None:
    found = variables({"SM_VLLM_MODEL": "a/b", "SM_VLLM_MAX_NUM_SEQS": "32", "VLLM_USE_V1": "1"}, VLLM)
    assert found.options["openai_compat"] is True
    assert found.options["llm_engine"] == "vllm"
    assert found.environment == {"VLLM_USE_V1": "1"}
    assert found.model_id == "a/b"


def test_a_handler_of_lmi_tells_its_mode() -> None:
    found = variables({"OPTION_ENTRYPOINT": "djl_python.lmi_vllm.vllm_async_service"}, LMI)
    assert found.options["async_mode"] is True


def test_an_engine_that_the_container_names_is_not_named_twice() -> None:
    found = variables({"OPTION_ROLLING_BATCH": "trtllm", "OPTION_MAX_NUM_TOKENS": "8192"}, LMI)
    assert found.options == {"lmi_version": "0.36", "rolling_batch": "trtllm", "max_num_tokens": 8192}


def test_what_is_refused_unknown_or_wrong_does_not_map_with_the_reason() -> None:
    given = {
        "ROPE_SCALING": "dynamic",  # refused
        "OPTION_NO_SUCH_THING": "1",  # nobody's
        "OPTION_MAX_ROLLING_BATCH": "32",  # near a known one
        "OPTION_DTYPE": "fp17",  # a wrong value
        "OPTION_MAX_BEAM_WIDTH": "2",  # another engine's
        "SERVING_NO_SUCH_THING": "1",
    }
    found = variables(given, LMI)
    assert sorted(names(found.unmapped)) == sorted(given)
    assert all(why for _, why in found.unmapped)
    assert set(found.options) == {"lmi_version", "llm_engine"}


def test_what_has_no_effect_is_listed_and_left_out() -> None:
    given = {
        "SERVING_FAIL_FAST": "true",
        "MAX_BATCH_TOTAL_TOKENS": "8192",
        "SAGEMAKER_PROGRAM": "inference.py",
        "OPTION_PARALLEL_LOADING": "true",
    }
    found = variables(given, LMI)
    assert sorted(names(found.idle)) == sorted(given)
    assert (found.unmapped, found.environment) == ([], {})


def test_two_names_of_one_option_with_two_values_are_said() -> None:
    found = variables({"SM_NUM_GPUS": "8", "OPTION_TENSOR_PARALLEL_DEGREE": "4"}, LMI)
    assert found.options["tensor_parallel_degree"] == 4
    assert names(found.idle) == ["SM_NUM_GPUS"]


def test_no_secret_is_written_anywhere() -> None:
    token, key, address = "hf_0123456789abcdefghijklmn", "sk-0123456789abcdefghijklmn", "https://me:secret@host/"
    found = variables(
        {"HF_TOKEN": token, "HUGGING_FACE_HUB_TOKEN": token, "OPENAI_API_KEY": key, "PROXY": address, "NOTE": token},
        TGI,
    )
    assert found.hub_token == ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"]
    assert names(found.unmapped) == ["OPENAI_API_KEY", "PROXY", "NOTE"]
    said = everywhere(found)
    assert not [secret for secret in (token, key, "secret@host") if secret in said]


@in_one_test("text", ["0", "8", "0.9", "0.90", "007", "1e3", "true", "True", "-1", "9" * 20, "max", "1_000", ""])
def test_a_typed_value_gives_the_same_variable(text: str) -> None:
    ((_, value, _),) = settings_of({"dtype": typed(text)}, {})
    assert value == text


@in_one_test(
    ("image", "kind", "engine", "release"),
    [
        ("763104351884.dkr.ecr.us-east-1.amazonaws.com/djl-inference:0.36.0-lmi20.0.0-cu128", "lmi", "vllm", "0.36"),
        ("763104351884.dkr.ecr.us-east-1.amazonaws.com/djl-inference:0.30.0-tensorrtllm0.12.0-cu125", "lmi", "trtllm",
         "0.30"),
        ("1.dkr.ecr.us-east-1.amazonaws.com/huggingface-pytorch-tgi-inference:2.4.0-tgi2.3.1-gpu", "tgi", "vllm", ""),
        ("1.dkr.ecr.us-east-1.amazonaws.com/vllm:0.19.0-gpu", "vllm", "vllm", ""),
        ("1.dkr.ecr.us-east-1.amazonaws.com/mirror/vllm-openai@sha256:00", "vllm", "vllm", ""),
        ("1.dkr.ecr.us-east-1.amazonaws.com/lmi-handler:1", "ours", "vllm", ""),
    ],
)  # fmt: skip
def test_a_container_is_known_by_its_image(image: str, kind: str, engine: str, release: str) -> None:
    assert container_kind(image, None) == Container(kind, engine, release)


@in_one_test("image", ["x/sglang:1", "x/huggingface-pytorch-inference:2", "x/tritonserver:24", "", "vllmish:1"])
def test_another_container_is_refused_unless_the_user_says_what_it_is(image: str) -> None:
    with pytest.raises(Refused, match="not one that lmi deploy can replace"):
        container_kind(image, None)
    assert container_kind(image, "vllm").kind == "vllm"


def test_neuron_is_refused_whatever_the_user_says() -> None:
    with pytest.raises(Refused, match="Neuron"):
        container_kind("x/djl-inference:0.30.0-neuronx-sdk2.20.1", "lmi")
