"""Options: sources, precedence, and every problem of a configuration at once."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest

from handler import engines
from handler.config.config import Config
from handler.config.engines import ENGINES, LLM_ENGINES
from handler.config.lmi_version import VERSIONS, LmiVersion, release_of
from handler.config.loader import read_config
from handler.config.options import KNOWN, OPTIONS
from handler.config.options.names import Unknown, unknown_option
from handler.config.options.option import Gone, redacted
from handler.config.options.tables import TOOL_CALL_PARSERS
from handler.config.sources import Setting, decode_properties, from_file, settings_of
from handler.core.errors import ConfigError, Problem, Problems
from handler.protocols.assistant.tools import formats
from handler.protocols.assistant.tools.formats import FORMATS
from handler.serving.engine import choose_engine
from tests.one_test import in_one_test

# -- options: sources, precedence, and messages that say what to change ------------------------------------------------


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


def test_defaults_are_lmis_in_loader() -> None:
    found = config()
    assert (found.max_rolling_batch_size, found.job_queue_size, found.batch_size) == (32, 1000, 1)
    assert (found.max_batch_delay, found.max_request_size, found.predict_timeout) == (100, 67_108_864, 120)
    assert (found.rolling_batch, found.tgi_compat, found.output_formatter) == ("auto", False, None)


def test_lmis_former_name_of_the_model_gives_way_to_the_present_one(properties: Path) -> None:
    properties.write_text("option.s3url=s3://a/b/\n")
    assert config(file=properties).model_id == "s3://a/b/"
    assert config("option.model_id=c", file=properties).model_id == "c"
    assert config(file=properties, env={"OPTION_MODEL_ID": "c"}).model_id == "c"


@pytest.mark.parametrize("text", ['{"option.model_id": "a"}', '{\n  "model_id": "a"\n}\n', " {}", "{\n"])
def test_json_in_place_of_properties_is_refused(properties: Path, text: str) -> None:
    properties.write_text(text)
    with pytest.raises(
        ConfigError, match=r"cannot read .*serving\.properties: it is JSON: write one KEY=VALUE on each"
    ):
        config(file=properties)


def test_a_key_that_begins_with_a_brace_is_no_json(properties: Path) -> None:
    properties.write_text("{a}=b\noption.dtype=fp16\n")
    assert config(file=properties).dtype == "fp16"


def test_a_value_that_a_later_line_replaces_is_told(properties: Path) -> None:
    properties.write_text("option.dtype=fp16\njob_queue_size=7\noption.dtype=fp32\njob_queue_size=7\n")
    found = config(file=properties)
    told = "option.dtype (serving.properties, line 1) has no effect here: line 3 sets it to another value"
    assert found.warnings == (told,)
    assert found.dtype == "fp32"


def test_comments_after_values_are_named_once(properties: Path) -> None:
    properties.write_text(
        "option.model_id=demo # the demo\noption.dtype=fp32  # exact\njob_queue_size=7 ! more\n"
        "option.served_model_name=a #b\noption.tgi_compat=perhaps\n"
    )
    assert refused(file=properties).splitlines() == [
        "2 problems:",
        "1. serving.properties, line 1: in this format, `# ...` after a value is part of the value: "
        "put comments on separate lines (also line 2, line 3)",
        "2. serving.properties, line 5: option.tgi_compat=perhaps: must be true or false",
    ]


def test_java_properties_syntax(properties: Path) -> None:
    properties.write_text(
        "# a comment\n! another\n\noption.tgi_compat = true\njob_queue_size: 7\n"
        "option.model_id=a\\\n    b\noption.model_name=caf\\u00e9\n"
    )
    found = config(file=properties)
    assert (found.tgi_compat, found.job_queue_size, found.model_id, found.name) == (True, 7, "ab", "café")


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
        "ignored: engine (serving.properties, line 1), option.entryPoint (serving.properties, line 2); "
        "DJL Serving's Java side reads it"
    )


@in_one_test(
    ("overrides", "warning"),
    [
        (["option.async_mode=true", "batch_size=1"], ""),
        (["option.async_mode=true", "batch_size=2"], "rolling batch uses option.max_rolling_batch_size"),
        (["option.enable_streaming=false"], ""),
        (["option.enable_streaming=true"], "rolling batch streams whenever the request asks for it"),
        (["option.rolling_batch=disable", "batch_size=2"], ""),
        (["option.chat_template=a.jinja"], "echo formats chats itself unless option.echo_tokenizer is set"),
        (["option.chat_template=a.jinja", "option.echo_tokenizer=demo"], ""),
        (["option.djl_metrics=true"], "the embedded server exports its metrics at /metrics"),
        (["option.djl_metrics=false"], ""),
    ],
)
def test_options_without_effect_beside_others_are_said(overrides: list[str], warning: str) -> None:
    warnings = config("option.llm_engine=echo", *overrides).warnings
    assert len(warnings) == bool(warning)
    assert all(one.startswith("ignored: ") and one.endswith(warning) for one in warnings)


def test_mixed_case_variables_keep_their_case_as_in_djl() -> None:
    assert config(env={"OPTION_entryPoint": "handler.entry", "OPTION_ENTRYPOINT": "handler.entry"}).warnings


@pytest.mark.parametrize(
    ("key", "harmless", "other", "words"),
    [
        ("engine", "Python", "TensorFlow", "set engine=Python"),
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
        assert "other media are not supported" in refused("option.llm_engine=vllm", given)
        args = f'option.engine_args={{"limit_mm_per_prompt": {text}}}'
        assert text[0] != "{" or "other media are not supported" in refused("option.llm_engine=vllm", args)
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
    with pytest.raises(ConfigError, match=rf"{message}; option.llm_engine selects another engine"):
        choose_engine(config("option.tensor_parallel_degree=4"))
    with pytest.raises(ConfigError, match=f"{message}$"):
        choose_engine(config("option.tensor_parallel_degree=4", "option.llm_engine=openvino"))
    assert choose_engine(config("option.tensor_parallel_degree=max")) == "openvino"
    own = ("option.llm_engine=grpc", "option.engine_python=python3", "option.base_url_kind=vllm")
    with pytest.raises(ConfigError, match=r"=4: pass it to the server of option.engine_python .* option.engine_flags$"):
        choose_engine(config("option.tensor_parallel_degree=4", *own))


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
        ("option.adapters=adapters", "LoRA adapters are loaded from the model's directory adapters"),
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
    assert "is a format that only vLLM supports: omit the option" in refused(f"option.{option}=muse")
    assert "must be one of auto, " in refused(f"option.{option}=kimi_k9")


# -- all problems of a configuration at once: each with its origin, in the order of the sources ------------------------


ECHO = "option.llm_engine=echo\n"


@pytest.mark.parametrize(
    ("text", "overrides", "environ", "told"),
    [
        pytest.param(ECHO, [], {}, [], id="none"),
        pytest.param(
            ECHO + "option.tgi_compt=true\noption.model_name=\\u00zz\noption.dtype=int3\n",
            ["job_queue_size", "batch_size=0"],
            {
                "OPTION_ENGINE_TIMEOUT": "x",
                "OPTION_COMPAT": "1",
                "SERVING_JOB_QUEUE_SIZ": "1",
                "SERVING_ROLLING_BATCH": "1",
                "HF_MODEL_ID": "",
            },
            [
                "environment variable OPTION_ENGINE_TIMEOUT: option.engine_timeout=x: must be a number",
                "environment variable OPTION_COMPAT: unknown option 'option.compat'",
                "environment variable SERVING_JOB_QUEUE_SIZ: unknown setting; did you mean 'SERVING_JOB_QUEUE_SIZE'?",
                "environment variable SERVING_ROLLING_BATCH: unknown setting; did you mean 'OPTION_ROLLING_BATCH'?",
                "environment variable HF_MODEL_ID: option.model_id=: must not be empty",
                "serving.properties, line 2: unknown option 'option.tgi_compt'; did you mean 'option.tgi_compat'?",
                "serving.properties, line 3: Invalid \\u escape sequence",
                "serving.properties, line 4: option.dtype=int3: must be one of",
                "-o job_queue_size: write it as key=value",
                "-o batch_size=0: must be a whole number of at least 1",
            ],
            id="every source",
        ),
        pytest.param(
            "option.llm_engine=openvino\nbatch_size=4\noption.enable_streaming=true\n"
            "option.load_format=dummy\noption.dtype=x\n",
            [],
            {},
            [
                "serving.properties, line 3: option.enable_streaming=true needs batch_size=1, but batch_size=4",
                "serving.properties, line 4: option.load_format is for vllm and trtllm; the engine here is openvino",
                "serving.properties, line 5: option.dtype=x: must be one of",
            ],
            id="rules beside a wrong value",
        ),
        pytest.param(
            ECHO + "option.rolling_batch=disable\nbatch_size=4\noption.enable_streaming=true\noption.tgi_compat=true\n",
            [],
            {},
            [
                "serving.properties, line 4: option.enable_streaming=true needs batch_size=1, but batch_size=4",
                "serving.properties, line 5: option.tgi_compat=true is for rolling batch",
            ],
            id="several rules",
        ),
        pytest.param(
            ECHO + "option.rolling_batch=disable\noption.tgi_version=2.4.1\n",
            [],
            {},
            ["serving.properties, line 3: option.tgi_version=2.4 is for rolling batch"],
            id="a release of TGI without a rolling batch",
        ),
        pytest.param(
            ECHO + "option.rolling_batch=fast\noption.enable_streaming=true\n",
            [],
            {},
            ["serving.properties, line 2: option.rolling_batch=fast: must be one of"],
            id="no rule about a wrong value",
        ),
        pytest.param(
            "option.llm_engine=vlm\noption.load_format=dummy\noption.spec_length=4\noption.max_loras=x\n",
            [],
            {},
            [
                "serving.properties, line 1: option.llm_engine=vlm: must be one of",
                "serving.properties, line 3: option.spec_length=4: use option.speculative_config",
                "serving.properties, line 4: option.max_loras=x: must be a whole number",
            ],
            id="nobody knows whose options they are",
        ),
        pytest.param(
            "option.llm_engine=openvino\noption.rolling_batch=vllm\noption.max_loras=2\n",
            [],
            {},
            [
                "serving.properties, line 2: option.rolling_batch=vllm asks for vllm, but option.llm_engine=openvino "
                "(serving.properties, line 1)"
            ],
            id="two engines",
        ),
    ],
)
def test_every_problem_is_told(
    tmp_path: Path, text: str, overrides: list[str], environ: dict[str, str], told: list[str]
) -> None:
    file = tmp_path / "serving.properties"
    file.write_text(text)
    problems = read_config(properties=file, overrides=overrides, environ=environ).problems
    assert len(problems) == len(told), problems
    for problem, wanted in zip(problems, told, strict=True):
        assert str(problem).startswith(wanted)


def test_a_start_raises_them_together() -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(overrides=["option.dtype=x", "batch_size=0"], environ={}).checked()
    first, second, third = str(caught.value).splitlines()
    assert first == "2 problems:"
    assert second.startswith("1. -o option.dtype=x: must be one of")
    assert third == "2. -o batch_size=0: must be a whole number of at least 1 and at most 4096"
    assert [problem.name for problem in caught.value.problems] == ["option.dtype", "batch_size"]
    assert pickle.loads(pickle.dumps(caught.value)).problems == caught.value.problems


def test_the_default_stands_in_for_a_wrong_value() -> None:
    config, problems, _ = read_config(overrides=["option.dtype=x", "job_queue_size=7"], environ={})
    assert (config.dtype, config.job_queue_size, len(problems)) == ("auto", 7, 1)


def test_steps_go_on_after_a_problem() -> None:
    problems = Problems()
    with problems:
        raise ConfigError("one")
    with problems:
        raise ConfigError(Problem("here", "x", "two"), "one")
    with pytest.raises(ZeroDivisionError), problems:
        raise ZeroDivisionError
    with pytest.raises(ConfigError, match=r"^2 problems:\n1\. one\n2\. here: two$"):
        problems.check()
    Problems().check()


@in_one_test("engine", ["", "openvino", "vllm"])
@in_one_test("key", ["swap_space", "max_batch_size", "enable_block_reuse", "cuda_graph_batch_sizes"])
def test_a_suggestion_is_no_option_that_is_refused(engine: str, key: str) -> None:
    _, _, hint = unknown_option(f"option.{key}s", engine).message.partition("did you mean '")
    for option in KNOWN.get(hint.removesuffix("'?"), []):
        assert not isinstance(option.parse, Gone)
        assert not engine or not option.engines or engine in option.engines or option.idle
    assert unknown_option("option.swap_spac", engine, "-o x") == Unknown(
        "option.swap_spac", "-o x", "unknown option 'option.swap_spac'; `lmi options` lists all options", False
    )


# -- hostile values ------------------------------------------------------------------------------------------------

TOKEN, KEY = "hf_SecretSecretSecret", "sk-secret"


@pytest.mark.parametrize("engine", ["echo", "vllm", "trtllm"])
@pytest.mark.parametrize(
    "setting",
    [
        f"option.hf_token={TOKEN}",
        f"option.hf_tokn={TOKEN}",
        f"option.base_url=http://me:{KEY}@host/v1",
        f"option.api_key={KEY}",
        f"option.ssl_keyfile_password={KEY}",
        f'option.engine_args={{"hf_token": "{TOKEN}", "api_key": "{KEY}"}}',
        f'option.engine_args={{"api_key": "{KEY}", "seed": 1',
        f"option.hf_overrides={{'token': '{KEY}'",
        f"option.env=HF_TOKEN={TOKEN}",
        f"option.base_url=http://user:{KEY}@host/v1",
        f"option.base_url=http://a/v1,http://{KEY}@b/v1",
    ],
)
def test_no_message_shows_a_secret(tmp_path: Path, setting: str, engine: str) -> None:
    file = tmp_path / "serving.properties"
    key, _, value = setting.partition("=")
    file.write_text(f"option.llm_engine={engine}\n{setting}\n")
    name = key.removeprefix("option.").upper()
    chosen = [f"option.llm_engine={engine}"]
    for reading in (
        read_config(properties=file, environ={}),
        read_config(overrides=[*chosen, setting], environ={}),
        read_config(overrides=chosen, environ={f"OPTION_{name}": value}),
        read_config(overrides=chosen, environ={f"SM_VLLM_{name}": value}),
    ):
        said = "".join([*map(str, reading.problems), *reading.config.warnings])
        assert said or "engine_args" in reading.config.engine_options
        assert TOKEN not in said
        assert KEY not in said


def test_what_is_no_secret_is_shown() -> None:
    overrides = ["option.max_num_batched_tokens=x", "option.tokenizer_mode=", "option.skip_tokenizer_init=yes"]
    said = "".join(map(str, read_config(overrides=["option.llm_engine=vllm", *overrides], environ={}).problems))
    assert all(override in said for override in overrides)


def test_an_engine_that_nothing_names_is_told_as_such() -> None:
    reading = read_config(overrides=["option.max_loras=2"], environ={})
    told = "option.max_loras is for vllm and trtllm; the engine here is openvino by default (option.llm_engine)"
    assert told in str(reading.problems[0])


def test_a_switch_is_no_secret() -> None:
    overrides = ["option.smoothquant_per_token=True", "option.password=true1"]
    said = "".join(map(str, read_config(overrides=["option.llm_engine=trtllm", *overrides], environ={}).problems))
    assert "option.smoothquant_per_token=True: " in said
    assert "true1" not in said


@pytest.mark.parametrize(
    "setting",
    [
        "option.smoothquant_per_token=0.5",
        'option.hf_overrides={"eos_token": "</s>", "pad_token": 1',
        "option.per_token=1",
        'option.engine_args={"image_token": "<image>"',
    ],
)
def test_tokens_of_a_vocabulary_are_no_secrets(setting: str) -> None:
    assert redacted(setting) == setting


@in_one_test("name", ["super_token", "token", "hf_token", "per_token_api_key", "eos_password"])
def test_a_secret_is_one_by_its_whole_name(name: str) -> None:
    assert redacted(f"option.{name}=x") == f"option.{name}=***"
    assert "sk-x" not in redacted(f'option.engine_args={{"{name}": "sk-x"}}')


@in_one_test("url", ["http://h:http/v1", "http://h:65536/v1", "http://h:0/v1", "http://[::1/v1", "h:80/v1"])
def test_an_address_that_is_none_is_refused_before_the_start(url: str) -> None:
    read = read_config(overrides=["option.llm_engine=openai", f"option.base_url={url}"], environ={})
    assert f"option.base_url={url}: " in "".join(map(str, read.problems))


_DEEP = '{"a":' * 100_000


@in_one_test(
    ("setting", "told"),
    [
        (f"option.engine_args={_DEEP}", "must be a JSON object: it is nested too deeply"),
        (f"option.speculative_config={_DEEP}", "must be a JSON object: it is nested too deeply"),
        (f"option.compilation_config={'[' * 100_000}", "it is nested too deeply"),
        (f"batch_size={'9' * 100_000}", "must be a whole number"),
        ("x" * 100_000, "write it as key=value"),
        (f"option.model_id={'x' * 256}", "at most 255 bytes between slashes"),
        ("option.model_id=a\nb", "must be printable"),
        ("option.sessions_path=/tmp/a\0b", "must be printable"),
    ],
)
def test_a_hostile_value_is_a_problem_of_few_words(setting: str, told: str) -> None:
    (problem,) = read_config(overrides=["option.llm_engine=vllm", setting], environ={}).problems
    assert told in str(problem)
    assert len(str(problem)) < 1000


def test_a_value_is_shown_on_one_line_and_in_utf_8() -> None:
    value = "\x1b[31ma\nb\udcff"
    reading = read_config(
        overrides=["option.llm_engine=echo", f"option.env={value}", f"option.dtype={value}"], environ={}
    )
    from_environment = read_config(environ={"OPTION_DTYPE": value})
    for said in (*reading.config.warnings, *map(str, (*reading.problems, *from_environment.problems))):
        assert said.isprintable()
        assert "=\\x1b[31ma\\nb\\udcff" in said


@in_one_test(
    ("text", "value", "line"),
    [
        ("a=1\\\n  2\\\n3\noption.dtype=bf16\n", "bf16", 4),
        ("option.dtype=b\\\r\n\t f16\r\n", "bf16", 1),
        ("# a comment does not go on\\\noption.dtype=bf16", "bf16", 2),
        ("a=b\\\\\noption.dtype=bf16", "bf16", 2),  # a backslash that is a backslash
        ("a=b\\\n# no comment\noption.dtype=bf16", "bf16", 3),
        ("option.dtype=bf16\\", "bf16", 1),
        ("a=b\\\n\noption.dtype=bf16", "bf16", 3),
    ],
)
def test_a_line_that_goes_on_is_one_and_those_below_keep_their_numbers(text: str, value: str, line: int) -> None:
    settings = list(settings_of(decode_properties(text.encode()), "serving.properties"))
    assert settings[-1] == Setting("option.dtype", value, f"serving.properties, line {line}")


def test_a_file_of_many_continued_lines_is_read_in_linear_work(tmp_path: Path) -> None:
    """It was the square of their number, half an hour for this file: the test's own limit ends such a reader."""
    path = tmp_path / "serving.properties"
    path.write_text("x\\\n" * 150_000 + "x\nb=1")
    assert list(from_file(path)) == [
        Setting("x" * 150_001, "", "serving.properties, line 1"),
        Setting("b", "1", "serving.properties, line 150002"),
    ]


def test_a_file_without_end_is_not_read_to_its_end() -> None:
    (problem,) = read_config(properties=Path("/dev/zero"), environ={}).problems
    assert "cannot read /dev/zero: it has more than 1048576 bytes" in str(problem)


ASYNC = "option.async_mode=true"
HANDLER = "option.entryPoint=djl_python.lmi_vllm.vllm_async_service"


def read(*overrides: str, env: dict[str, str] | None = None, djl: str = "", java: bool = False) -> Config:
    return read_config(overrides=overrides, environ=env or {}, djl=djl, java=java).checked()


def version(*overrides: str, env: dict[str, str] | None = None, djl: str = "", java: bool = False) -> tuple[str, str]:
    config = read(*overrides, env=env, djl=djl, java=java)
    return str(config.lmi_version), config.where("option.lmi_version")


def test_the_default_is_0_28() -> None:
    assert version() == ("0.28", "default")
    assert version("option.rolling_batch=vllm", "option.async_mode=false") == ("0.28", "default")
    assert version("option.entryPoint=djl_python.huggingface") == ("0.28", "default")


@in_one_test("release", VERSIONS, ids=str)
def test_each_release_is_comparable(release: LmiVersion) -> None:
    found = read(f"option.lmi_version={release}")
    assert found.lmi_version == release
    assert (found.lmi_version >= (0, 32)) is (release.minor >= 32)
    assert read(f"option.lmi_version={release}.0").lmi_version == release
    assert pickle.loads(pickle.dumps(found.lmi_version)) == release


@in_one_test("text", ["0.27", "0.39", "28", "1.0", "0.28.x", "latest", "", "0.4", "9" * 5000 + ".1"])
def test_a_release_that_does_not_exist_is_refused_with_those_that_do(text: str) -> None:
    with pytest.raises(ConfigError, match=r"option\.lmi_version.*must be one of 0\.28, 0\.29, .*, 0\.37, 0\.38"):
        read_config(environ={"OPTION_LMI_VERSION": text}).checked()


def test_what_yaml_makes_of_0_30_is_0_30() -> None:
    assert version("option.lmi_version=0.3")[0] == "0.30"


def test_lmis_async_mode_tells_0_36() -> None:
    assert version(ASYNC) == ("0.36", f"-o {ASYNC}")
    assert version(HANDLER) == ("0.36", f"-o {HANDLER}")
    assert version("option.entryPoint=djl_python.lmi_trtllm.trtllm_async_service")[0] == "0.36"
    env = {"OPTION_ASYNC_MODE": "True", "OPTION_ROLLING_BATCH": "disable"}
    assert version(env=env) == ("0.36", "environment variable OPTION_ASYNC_MODE")
    assert version("option.async_mode=false", env=env)[0] == "0.28"


def test_awss_vllm_image_tells_0_36() -> None:
    assert version(env={"SM_VLLM_MAX_MODEL_LEN": "512"}) == ("0.36", "environment variable SM_VLLM_MAX_MODEL_LEN")


@in_one_test(
    ("djl", "wanted"),
    [("0.25.0", "0.28"), ("0.28.0", "0.28"), ("0.34.0", "0.34"), ("0.36.0-SNAPSHOT", "0.36"), ("0.41.0", "0.38")],
)
def test_the_djl_serving_that_runs_the_handler_tells_the_nearest(djl: str, wanted: str) -> None:
    assert version(djl=djl, java=True) == (wanted, f"DJL Serving {djl}")
    assert version(ASYNC, djl=djl, java=True)[0] == wanted


def test_the_option_beats_whatever_tells(tmp_path: Path) -> None:
    env = {"SM_VLLM_MAX_MODEL_LEN": "512", "OPTION_LMI_VERSION": "0.30"}
    assert version(ASYNC, env=env) == ("0.30", "environment variable OPTION_LMI_VERSION")
    assert version(ASYNC, "option.lmi_version=0.31", env=env, djl="0.36.0", java=True)[0] == "0.31"
    file = tmp_path / "serving.properties"
    file.write_text(f"{ASYNC}\noption.lmi_version=0.33\n")
    found = read_config(properties=file, environ={}).checked()
    assert (found.lmi_version, found.where("option.lmi_version")) == ((0, 33), "serving.properties, line 2")


@in_one_test(
    ("tag", "wanted"),
    [
        ("0.28.0-lmi10.0.0-cu124", (0, 28)), ("0.36.0-lmi18.0.0-cu128", (0, 36)), ("0.36.0-lmi25.0.0-cu130", (0, 36)),
        ("0.36.0-lmi26.0.0-cu130", (0, 37)), ("0.36.0-lmi27.0.0-cu130", (0, 37)), ("0.38.0-lmi29.0.0-cu130", (0, 38)),
        ("0.33.0-tensorrtllm0.21.0-cu128", (0, 33)), ("v0.29.0", (0, 29)), ("0.12.0-cpu", (0, 28)),
        ("latest", None), ("", None), ("12", None),
    ],
)  # fmt: skip
def test_an_images_tag_tells_its_release(tag: str, wanted: tuple[int, int] | None) -> None:
    assert release_of(tag) == wanted


@in_one_test(
    ("overrides", "wanted"),
    [
        ([], False),
        ([ASYNC], True),
        ([HANDLER], True),
        ([HANDLER, "option.async_mode=false"], False),
        ([ASYNC, "option.rolling_batch=disable"], True),
        ([ASYNC, "option.lmi_version=0.33"], True),
        ([ASYNC, "option.lmi_version=0.32"], False),
        ([ASYNC, "option.tgi_compat=true"], True),
        (["option.lmi_version=0.34"], False),
        (["option.lmi_version=0.35"], True),
        (["option.lmi_version=0.36", "option.rolling_batch=auto"], True),
        (["option.lmi_version=0.36", "option.rolling_batch=scheduler"], False),
        (["option.lmi_version=0.36", "option.rolling_batch=disable"], False),
        (["option.lmi_version=0.36", "option.tgi_compat=true"], False),
        (["option.lmi_version=0.36", "option.tgi_version=2.4"], False),
        ([ASYNC, "option.tgi_version=2.4"], True),
        (["option.lmi_version=0.36", "option.async_mode=false"], False),
    ],
)
def test_the_schema_of_the_async_mode(overrides: list[str], wanted: bool) -> None:
    assert read(*overrides).async_schema is wanted


def test_awss_vllm_image_answers_as_openai() -> None:
    assert not read(env={"SM_VLLM_MODEL": "a/b"}).async_schema


def test_async_mode_ends_rolling_batch_disable() -> None:
    """Java batches nothing then; the handler does."""
    assert read(ASYNC, "option.rolling_batch=disable").rolling_batch == "auto"
    assert read(HANDLER, "option.rolling_batch=disable").rolling_batch == "auto"
    assert read("option.async_mode=false", "option.rolling_batch=disable").rolling_batch == "disable"


@pytest.mark.parametrize(
    ("overrides", "warning"),
    [
        ([ASYNC, "option.lmi_version=0.29"], "option.async_mode .*; LMI 0.29 has no async mode"),
        ([ASYNC, "option.tgi_compat=true"], "option.tgi_compat .*, as in LMI's async mode"),
        ([ASYNC, "option.tgi_version=3.3"], "option.tgi_version .*, as in LMI's async mode"),
        (
            ["option.tgi_compat=true", "option.tgi_version=3.3"],
            "option.tgi_compat .*, because option.tgi_version is set",
        ),
        ([ASYNC, "option.output_formatter=sse"], "option.output_formatter .*, as in LMI's async mode"),
    ],
)
def test_what_the_mode_does_not_heed_gets_a_warning(overrides: list[str], warning: str) -> None:
    (found,) = read(*overrides).warnings
    assert re.search(f"(ignored|no effect on responses): {warning}", found)
