"""Options: sources, precedence, and messages that say what to change."""

from __future__ import annotations

from pathlib import Path

import pytest

from handler import engines
from handler.config.config import Config
from handler.config.engines import ENGINES, LLM_ENGINES
from handler.config.loader import read_config
from handler.config.options import OPTIONS
from handler.config.options.tables import TOOL_CALL_PARSERS
from handler.core.errors import ConfigError
from handler.protocols.assistant.tools import formats
from handler.protocols.assistant.tools.formats import FORMATS
from handler.serving.engine import choose_engine
from tests.one_test import in_one_test

ROOT = Path(__file__).parents[3]


def config(*overrides: str, env: dict[str, str] | None = None, file: Path | None = None) -> Config:
    return read_config(properties=file, overrides=overrides, environ=env or {}).checked()


def refused(*overrides: str, env: dict[str, str] | None = None, file: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        config(*overrides, env=env, file=file)
    return str(caught.value)


@pytest.fixture
def properties(tmp_path: Path) -> Path:
    return tmp_path / "serving.properties"


def test_defaults_are_lmis() -> None:
    found = config()
    assert (found.max_rolling_batch_size, found.job_queue_size, found.batch_size) == (32, 1000, 1)
    assert (found.max_batch_delay, found.max_request_size, found.predict_timeout) == (100, 67_108_864, 120)
    assert (found.rolling_batch, found.tgi_compat, found.output_formatter) == ("auto", False, None)


def test_java_properties_syntax(properties: Path) -> None:
    properties.write_text(
        "# a comment\n! another\n\noption.tgi_compat = true\njob_queue_size: 7\n"
        "option.model_id=a\\\n    b\noption.model_name=caf\\u00e9\n"
    )
    found = config(file=properties)
    assert (found.tgi_compat, found.job_queue_size, found.model_id, found.model_name) == (True, 7, "ab", "café")


def test_precedence_is_o_then_file_then_environment(properties: Path) -> None:
    properties.write_text("option.max_rolling_batch_size=2\n")
    env = {"OPTION_MAX_ROLLING_BATCH_SIZE": "1", "OPTION_TGI_COMPAT": "true"}
    assert config(env=env).max_rolling_batch_size == 1
    assert config(env=env, file=properties).max_rolling_batch_size == 2
    assert config("option.max_rolling_batch_size=3", env=env, file=properties).max_rolling_batch_size == 3
    assert config(env=env, file=properties).tgi_compat


def test_environment_names_of_lmis_guides() -> None:
    env = {"HF_MODEL_ID": "/models/x", "SERVING_JOB_QUEUE_SIZE": "5", "TENSOR_PARALLEL_DEGREE": "max"}
    found = config(env=env)
    assert (found.model_id, found.job_queue_size, found.tensor_parallel_degree) == ("/models/x", 5, "max")
    assert config(env={**env, "OPTION_MODEL_ID": "/models/y"}).model_id == "/models/y"


def test_a_line_number_counts_continued_lines(properties: Path) -> None:
    properties.write_text("option.model_id=a\\\n b\n\nbatch_sise=2\n")
    assert refused(file=properties).startswith("serving.properties, line 4: unknown option 'batch_sise'")


def test_a_key_without_its_prefix_is_pointed_right() -> None:
    assert "did you mean 'option.tgi_compat'" in refused("tgi_compat=true")


@in_one_test(
    ("override", "wanted"),
    [
        ("option.tgi_compat=maybe", "must be true or false"),
        ("job_queue_size=0", "must be a whole number of at least 1"),
        ("batch_size=x", "must be a whole number"),
        ("option.engine_timeout=nan", "must be a number of at least 0.1"),
        ("option.engine_timeout=inf", "must be a number of at least 0.1"),
        ("option.output_formatter=", "must not be empty"),
        ("option.tensor_parallel_degree=0", "must be a whole number of at least 1"),
    ],
)
def test_a_wrong_value_is_named_with_what_would_be_right(override: str, wanted: str) -> None:
    message = refused(override)
    assert override in message
    assert wanted in message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert "nowhere.properties" in refused(file=tmp_path / "nowhere.properties")


def test_djls_own_keys_are_accepted_and_said_to_have_no_effect(properties: Path) -> None:
    properties.write_text("engine=Python\noption.entryPoint=handler.entry\n")
    (warning,) = config(file=properties).warnings
    assert warning == (
        "without effect here: engine (serving.properties, line 1), option.entryPoint (serving.properties, line 2); "
        "DJL Serving's Java side reads it"
    )


def test_mixed_case_variables_keep_their_case_as_in_djl() -> None:
    assert config(env={"OPTION_entryPoint": "handler.entry", "OPTION_ENTRYPOINT": "handler.entry"}).warnings


@pytest.mark.parametrize(
    ("key", "harmless", "other", "words"),
    [
        ("engine", "Python", "TensorFlow", "write engine=Python"),
        ("option.entryPoint", "djl_python.huggingface", "mine.py", "leave it out"),
        ("option.task", "text-embedding", "fill-mask", "must be one of auto, text_embedding, "),
    ],
)
def test_another_handler_or_task_stops_the_embedded_server(key: str, harmless: str, other: str, words: str) -> None:
    config(f"{key}={harmless}")
    assert words in refused(f"{key}={other}")
    if key != "option.task":
        read_config(overrides=[f"{key}={other}"], environ={}, java=True).checked()  # Java has read it


@in_one_test(
    ("text", "limits"),
    [("image=0", {"image": 0}), ('{"image": 0, "video": 0}', {"image": 0, "video": 0}), ("image=4", {"image": 4}),
     ("image=4,audio=1", {"image": 4, "audio": 1}),
     ("image=0,video=1", None), ('{"image": 4, "video": 2}', None), ("audio:8", None)],
)  # fmt: skip
def test_only_images_and_audio_clips_may_have_a_limit_above_zero(text: str, limits: dict[str, int] | None) -> None:
    given = f"option.limit_mm_per_prompt={text}"
    if limits is None:
        assert "others are not served" in refused("option.llm_engine=vllm", given)
        args = f'option.engine_args={{"limit_mm_per_prompt": {text}}}'
        assert text[0] != "{" or "others are not served" in refused("option.llm_engine=vllm", args)
    else:
        assert config("option.llm_engine=vllm", given).engine_options["limit_mm_per_prompt"] == limits


def test_the_engine_is_chosen_by_rolling_batch_when_it_names_one() -> None:
    for name in ("trtllm", "vllm", "lmi-dist"):
        with pytest.raises(ConfigError, match=r"is not installed; to install it: pip install"):
            choose_engine(config(f"option.rolling_batch={name}"))


def test_engine_choice_without_contradiction() -> None:
    assert choose_engine(config()) == "openvino"
    assert choose_engine(config("option.rolling_batch=scheduler")) == "openvino"
    assert choose_engine(config("option.llm_engine=echo", "option.rolling_batch=disable")) == "echo"


def test_more_devices_than_the_engine_uses_are_refused() -> None:
    message = "option.tensor_parallel_degree=4: the engine openvino runs on one device"
    with pytest.raises(ConfigError, match=rf"{message}, and no option names another \(option.llm_engine\)"):
        choose_engine(config("option.tensor_parallel_degree=4"))
    with pytest.raises(ConfigError, match=f"{message}$"):
        choose_engine(config("option.tensor_parallel_degree=4", "option.llm_engine=openvino"))
    assert choose_engine(config("option.tensor_parallel_degree=max")) == "openvino"


@in_one_test("engine", ["echo", "openvino", "openai", "vllm", "trtllm"])
def test_one_stage_is_what_every_engine_has(engine: str) -> None:
    """LMI's files and DJL Serving's recommender write it whatever the engine is."""
    key = "option.pipeline_parallel_degree"
    engine_is = f"option.llm_engine={engine}"
    assert read_config(overrides=[engine_is, f"{key}=1"], environ={}).problems == ()
    assert read_config(overrides=[engine_is], environ={"PIPELINE_PARALLEL_DEGREE": " 1 "}).problems == ()
    (problem,) = read_config(overrides=[engine_is, f"{key}=0"], environ={}).problems
    assert "must be a whole number of at least 1" in str(problem)


@in_one_test("option", ["is_peft_model=true", "default_accept=text/csv", 'kwargs={"a": 1}'])
@in_one_test("engine", ["echo", "vllm"])
def test_what_lmi_s_other_handlers_read_is_refused_with_its_reason(option: str, engine: str) -> None:
    overrides = [f"option.llm_engine={engine}", f"option.{option}"]
    (problem,) = read_config(overrides=overrides, environ={}).problems
    assert "unknown" not in str(problem)


@in_one_test(
    ("line", "why"),
    [
        ("option.adapters=adapters", "LoRA adapters are in the model's directory adapters"),
        ("option.max_new_tokens=100", "the server reads it from each request's parameters"),
    ],
)
@in_one_test("engine", ["echo", "openvino", "openai", "vllm", "trtllm"])
def test_what_lmi_itself_reads_nowhere_is_reported_and_no_reason_to_stop(line: str, why: str, engine: str) -> None:
    """LMI's own test configurations write both lines."""
    found = read_config(overrides=[f"option.llm_engine={engine}", line], environ={})
    assert found.problems == ()
    assert any(why in warning for warning in found.config.warnings), found.config.warnings


def test_a_name_means_what_the_engine_in_use_means_by_it() -> None:
    found = config("option.speculative_draft_model=x", "option.speculative_length=3", "option.llm_engine=vllm")
    assert found.engine_options["num_speculative_tokens"] == 3
    assert "-o option.speculative_length=3" in refused("option.speculative_length=3", "option.llm_engine=trtllm")


def test_every_engine_has_a_folder_of_its_name() -> None:
    for name in ENGINES:
        module = engines.module(name)
        for function in ("check", "prepare", "capabilities", "load", "load_tokenizer"):
            assert callable(getattr(module, function)), name


@in_one_test("engine", LLM_ENGINES)
def test_no_option_of_an_engine_hides_another_of_its_own(engine: str) -> None:
    own = [option for option in OPTIONS if engine in option.engines or not option.engines]
    names = [name for option in own for name in (option.key, *option.aliases)]
    assert len(names) == len(set(names))


def test_several_names_have_commas_between_them() -> None:
    found = config("option.served_model_name=my-endpoint, org/model ,*")
    assert found.served_model_name == ("my-endpoint", "org/model", "*")
    assert config(env={"OPTION_SERVED_MODEL_NAME": "a"}).served_model_name == ("a",)
    assert config().served_model_name is None
    assert "must be names separated by commas" in refused("option.served_model_name=a,,b")


def test_tool_call_parsers_are_those_that_there_are() -> None:
    assert set(TOOL_CALL_PARSERS) == {"auto", "none", "hf", *FORMATS, *formats.ALIASES}


@pytest.mark.parametrize("option", ["tool_call_parser", "reasoning_parser"])
def test_a_parser_of_vllms_that_is_not_here_is_refused_with_a_remedy(option: str) -> None:
    assert "is a format of vLLM's that is not supported here: leave the option out" in refused(f"option.{option}=muse")
    assert "must be one of auto, " in refused(f"option.{option}=kimi_k9")
