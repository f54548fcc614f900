from __future__ import annotations

import pytest

from deploy.errors import Refused, SpecError
from deploy.resources.environment import _known_options, _name, environment
from deploy.spec import Spec
from handler.config.loader import load_config
from handler.core.errors import ConfigError
from tests.deploy.cases import SECRET, decision, spec


def variables(case: str = "plain", *, allow: bool = False, **changes: object) -> dict[str, str]:
    return environment(spec(case, **changes), decision(case), allow_plaintext_secret=allow)


def with_model(case: str = "plain", **model: object) -> Spec:
    return spec(case, model={**spec(case).model.model_dump(exclude_none=True), **model})


def said_by_the_handler(environ: dict[str, str]) -> str:
    try:
        load_config(environ=environ)
    except ConfigError as error:
        return str(error)
    return ""


def test_options_become_what_the_handler_reads() -> None:
    options = {"max_rolling_batch_size": 64, "enable_chunked_prefill": True, "llm_engine": "vllm", "batch_size": 1}
    found = variables(options=options)
    assert found["OPTION_MAX_ROLLING_BATCH_SIZE"] == "64"
    assert found["OPTION_ENABLE_CHUNKED_PREFILL"] == "true"
    assert found["SERVING_BATCH_SIZE"] == "1"
    config = load_config(environ=found)
    assert config.max_rolling_batch_size == 64
    assert config.engine == "vllm"
    assert config.max_model_len == 8192
    assert config.model_loading_timeout == 870.0
    assert config.engine_options["enable_chunked_prefill"] is True


def test_every_option_that_is_known_here_is_one_to_the_handler() -> None:
    for option in sorted(_known_options()):  # a value may be wrong, or an option another engine's; unknown is none
        assert "unknown option" not in said_by_the_handler({_name(option): "wrong"}), option
    assert "unknown option" in said_by_the_handler({"OPTION_NOBODYS": "wrong"})


@pytest.mark.parametrize(("case", "name", "value"), [
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


@pytest.mark.parametrize(("changes", "places"), [
    ({"options": {"max_model_len": 4096}}, ("options.max_model_len", "model.context")),
    ({"options": {"max_seq_len": 4096}}, ("options.max_seq_len", "model.context")),
    ({"environment": {"OPTION_MAX_MODEL_LEN": "1"}}, ("environment.OPTION_MAX_MODEL_LEN", "model.context")),
    ({"environment": {"HF_MODEL_ID": "gpt2"}}, ("environment.HF_MODEL_ID", "model.id")),
    ({"options": {"dtype": "bf16"}, "environment": {"OPTION_DTYPE": "fp16"}}, ("options.dtype", "OPTION_DTYPE")),
])  # fmt: skip
def test_contradictions_name_both_places(changes: dict[str, object], places: tuple[str, str]) -> None:
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


@pytest.mark.parametrize(("options", "message"), [
    ({"max_rolling_batchsize": 1}, "did you mean 'max_rolling_batch_size'"),
    ({"option.dtype": "bf16"}, "without `option.`"),
    ({"model_id": "gpt2"}, "under model:"),
])  # fmt: skip
def test_wrong_options_are_refused_by_name(options: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        variables(options=options)


def test_an_unknown_option_can_be_passed_on_as_a_variable() -> None:
    assert variables(environment={"OPTION_OF_TOMORROW": "1"})["OPTION_OF_TOMORROW"] == "1"


def test_awss_image_takes_any_option_but_reads_no_secrets() -> None:
    assert variables("aws-image", options={"new_in_lmi": 1})["OPTION_NEW_IN_LMI"] == "1"
    awss = decision("aws-image")
    with pytest.raises(SpecError, match="AWS's image does not read secrets"):
        environment(spec("plain", image={"aws": "djl-lmi"}), awss)
    by_uri = environment(spec("aws-image", image={"uri": awss.image}, options={"new_in_lmi": 1}), awss)
    assert by_uri["HF_MODEL_ID"] == "Qwen/Qwen3-8B"


@pytest.mark.parametrize("name", ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "MY_SECRET", "DB_PASSWORD", "OPENAI_API_KEY"])
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
    with pytest.raises(SpecError, match="contradict"):
        environment(spec("plain", options={"revision": "a"}, environment={"HF_REVISION": "b"}), decision("plain"))
    assert "OPTION_MAX_MODEL_LEN" not in environment(with_model(context=None), decision("plain"))
