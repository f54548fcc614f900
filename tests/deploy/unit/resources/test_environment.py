from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deploy.deployer.preparation import prepare
from deploy.errors import Refused, SpecError
from deploy.resources.environment import environment
from deploy.spec import Spec
from handler.config.loader import read_config
from tests.deploy.cases import SECRET, decision, spec
from tests.one_test import in_one_test


def variables(case: str = "plain", *, allow: bool = False, **changes: object) -> dict[str, str]:
    return environment(spec(case, **changes), decision(case), allow_plaintext_secret=allow)


def with_model(case: str = "plain", **model: object) -> Spec:
    return spec(case, model={**spec(case).model.model_dump(exclude_none=True), **model})


def test_options_become_what_the_handler_reads() -> None:
    options = {"max_rolling_batch_size": 64, "enable_chunked_prefill": True, "llm_engine": "vllm", "batch_size": 1}
    found = variables(options=options)
    assert found["OPTION_MAX_ROLLING_BATCH_SIZE"] == "64"
    assert found["OPTION_ENABLE_CHUNKED_PREFILL"] == "true"
    assert found["SERVING_BATCH_SIZE"] == "1"
    config = read_config(environ=found).checked()
    assert config.max_rolling_batch_size == 64
    assert config.engine == "vllm"
    assert config.max_model_len == 8192
    assert config.model_loading_timeout == 870.0
    assert config.engine_options["enable_chunked_prefill"] is True


def test_all_wrong_options_are_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "serving.properties").write_text("option.dtype=int9\n")
    options = {
        "llm_engine": "vllm",
        "max_rolling_batchsize": 1,
        "tgi_compat": "maybe",
        "batch_size": 4,
        "enable_streaming": True,
        "sampler_type": "auto",
        "option.dtype": "bf16",
        "model_id": "gpt2",
        "max_model_len": 4096,
    }
    model = {"path": str(tmp_path), "upload": "s3://bucket/model/", "context": 8192}
    with pytest.raises(SpecError) as raised:
        variables(model=model, options=options, environment={"OPTION_OF_TOMORROW": "1", "OPTION_MAX_LORAS": "0"})
    head, *lines = str(raised.value).splitlines()
    wanted = [
        "options.option.dtype: write it without `option.`",
        "options.model_id: the model is said under model:",
        "options.max_model_len and model.context contradict each other",
        "options.enable_streaming: enable_streaming=true needs batch_size=1, but batch_size=4",
        "environment.OPTION_MAX_LORAS: max_loras=0: must be a whole number of at least 1",
        "options.max_rolling_batchsize: unknown option 'max_rolling_batchsize'; did you mean 'max_rolling_batch_size'?",
        "options.sampler_type: sampler_type is for trtllm; the engine here is vllm",
        "options.tgi_compat: tgi_compat=maybe: must be true or false",
        "serving.properties, line 1: dtype=int9: must be one of",
    ]
    assert (head, len(lines)) == (f"{len(wanted)} problems:", len(wanted))
    for line, start in zip(sorted(lines), sorted(wanted), strict=True):
        assert line.startswith(f"  {start}")
    assert "Leave options.max_model_len out." in raised.value.advice
    assert "`lmi options`" in raised.value.advice


def test_an_option_is_any_engines_where_the_image_chooses_the_engine() -> None:
    assert variables(options={"sampler_type": "auto", "load_format": "dummy"})["OPTION_LOAD_FORMAT"] == "dummy"


@in_one_test(("case", "name", "value"), [
    ("plain", "OPTION_MODEL_ID", "meta-llama/Meta-Llama-3-8B-Instruct"),
    ("components", "OPTION_MODEL_ID", "/opt/ml/model"),
    ("isolated", "OPTION_MODEL_ID", "/opt/ml/model"),
    ("isolated", "HF_HUB_OFFLINE", "1"),
    ("isolated", "TRANSFORMERS_OFFLINE", "1"),
    ("aws-image", "HF_MODEL_ID", "Qwen/Qwen3-8B"),
    ("aws-image", "OPTION_ENTRYPOINT", "djl_python.lmi_vllm.vllm_async_service"),
    ("plain", "HF_TOKEN_SECRET_ARN", SECRET),
    ("components", "OPTION_ENABLE_LORA", "true"),
    ("components", "SAGEMAKER_MAX_NUMBER_OF_ADAPTERS_IN_MEMORY", "2"),
])  # fmt: skip
def test_what_the_rest_of_the_specification_makes_of_it(case: str, name: str, value: str) -> None:
    assert variables(case)[name] == value


def test_nothing_is_offline_nor_trusted_unless_asked_for() -> None:
    assert not {"HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "OPTION_TRUST_REMOTE_CODE"} & set(variables())


def test_a_model_is_spread_as_decided_unless_an_option_says_otherwise() -> None:
    four = decision("components", tensor_parallel=4)
    assert environment(spec("components"), four)["OPTION_TENSOR_PARALLEL_DEGREE"] == "4"
    asked = spec("components", options={"tensor_parallel_degree": 2})
    assert environment(asked, four)["OPTION_TENSOR_PARALLEL_DEGREE"] == "2"
    asked = spec("components", environment={"TENSOR_PARALLEL_DEGREE": "2"})
    assert "OPTION_TENSOR_PARALLEL_DEGREE" not in environment(asked, four)
    assert "OPTION_TENSOR_PARALLEL_DEGREE" not in variables()


@in_one_test(("changes", "places"), [
    ({"options": {"max_model_len": 4096}}, ("options.max_model_len", "model.context")),
    ({"options": {"max_seq_len": 4096}}, ("options.max_seq_len", "model.context")),
    ({"environment": {"OPTION_MAX_MODEL_LEN": "1"}}, ("environment.OPTION_MAX_MODEL_LEN", "model.context")),
    ({"environment": {"HF_MODEL_ID": "gpt2"}}, ("environment.HF_MODEL_ID", "model.id")),
    ({"options": {"dtype": "bf16"}, "environment": {"OPTION_DTYPE": "fp16"}}, ("options.dtype", "OPTION_DTYPE")),
    ({"options": {"revision": "a"}, "environment": {"HF_REVISION": "b"}}, ("options.revision", "HF_REVISION")),
    ({"options": {"sessions_path": "a"}, "environment": {"SAGEMAKER_SESSIONS_PATH": "b"}}, ("sessions_path",)),
])  # fmt: skip
def test_contradictions_name_both_places(changes: dict[str, Any], places: tuple[str, str]) -> None:
    with pytest.raises(SpecError) as raised:
        variables(**changes)
    assert all(place in str(raised.value) for place in places)


def test_an_isolated_container_cannot_be_told_to_ask_the_hub() -> None:
    with pytest.raises(SpecError, match=r"environment\.HF_HUB_OFFLINE and network\.isolated contradict each other"):
        variables("isolated", environment={"HF_HUB_OFFLINE": "0"})


def test_model_data_may_hold_the_model_further_down() -> None:
    found = variables("isolated", environment={"OPTION_MODEL_ID": "/opt/ml/model/llama"})
    assert found["OPTION_MODEL_ID"] == "/opt/ml/model/llama"
    with pytest.raises(SpecError, match="contradict"):
        variables("isolated", environment={"OPTION_MODEL_ID": "gpt2"})


def test_saying_the_same_twice_is_no_contradiction() -> None:
    assert variables(options={"max_model_len": 8192})["OPTION_MAX_MODEL_LEN"] == "8192"


def test_an_unknown_option_can_be_passed_on_as_a_variable() -> None:
    assert variables(environment={"OPTION_OF_TOMORROW": "1"})["OPTION_OF_TOMORROW"] == "1"


def test_awss_image_takes_any_option_but_reads_no_secrets() -> None:
    assert variables("aws-image", options={"new_in_lmi": 1})["OPTION_NEW_IN_LMI"] == "1"
    awss = decision("aws-image")
    with pytest.raises(SpecError, match="AWS's image does not read secrets"):
        environment(spec("plain", image={"aws": "djl-lmi"}), awss)
    by_uri = environment(spec("aws-image", image={"uri": awss.image}, options={"new_in_lmi": 1}), awss)
    assert by_uri["HF_MODEL_ID"] == "Qwen/Qwen3-8B"


@in_one_test("name", ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "MY_SECRET", "DB_PASSWORD", "OPENAI_API_KEY"])
def test_secrets_are_refused(name: str) -> None:
    with pytest.raises(Refused) as raised:
        variables(environment={name: "abc123def"})
    assert f"environment.{name}" in str(raised.value)
    assert "model.token_secret" in raised.value.advice
    assert "abc123def" not in str(raised.value) + raised.value.advice
    assert variables(environment={name: "abc123def"}, allow=True)[name] == "abc123def"


def test_the_containers_own_key_is_refused_with_the_reason() -> None:
    with pytest.raises(Refused, match="SageMaker authenticates itself, by SigV4") as raised:
        variables(environment={"LMI_API_KEY": "k"})
    assert "sagemaker:InvokeEndpoint" in raised.value.advice


def test_what_sagemaker_would_not_take_is_refused_with_its_size() -> None:
    with pytest.raises(SpecError, match="MY-NAME: as a variable's name SageMaker takes letters"):
        variables(environment={"MY-NAME": "x"})
    with pytest.raises(SpecError, match="SERVE: its value is 1025 bytes, and SageMaker takes 1024"):
        variables(environment={"SERVE": "ü" * 512 + "x"})
    with pytest.raises(SpecError, match=r"N{2}.*: its name is 1100 bytes"):
        variables(environment={"N" * 1100: "x"})
    with pytest.raises(SpecError, match=r"10\d variables, and SageMaker takes 100"):
        variables(environment={f"V{number}": "x" for number in range(100)})
    with pytest.raises(SpecError, match="bytes in all, and SageMaker takes 32768") as raised:
        variables(environment={f"V{number}": "x" * 1000 for number in range(40)})
    assert "serving.properties" in raised.value.advice


def test_a_revision_of_the_hub_and_the_same_option_are_one() -> None:
    assert "OPTION_REVISION" not in variables(environment={"HF_REVISION": "main"})
    assert "OPTION_MAX_MODEL_LEN" not in environment(with_model(context=None), decision("plain"))


def test_wrong_options_are_named_beside_what_cannot_be_decided() -> None:
    wrong = spec("plain", options={"dtype": "int9"}, instance={"type": "ml.g6e.xlarg"})
    with pytest.raises(SpecError) as raised:
        prepare(wrong, "eu-west-1", None)
    head, *lines = str(raised.value).splitlines()
    assert (head, len(lines)) == ("2 problems:", 2)
    assert "ml.g6e.xlarg" in lines[0]
    assert lines[1].startswith("  options.dtype: dtype=int9: must be one of")


@pytest.mark.parametrize("name", ["SAGEMAKER_MULTI_MODEL", "LORA_ADAPTERS"])
def test_variables_that_the_container_refuses_are_refused_before(name: str) -> None:
    with pytest.raises(SpecError, match=rf"environment\.{name}: {name}=true: "):
        variables(environment={name: "true"})
