"""Names and values of LMI's files: what LMI ignores gets one line, and what it takes means the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from handler.config.config import Config
from handler.config.loader import Reading, read_config
from handler.config.options.command_line import describe
from tests.one_test import in_one_test


def read(*lines: str, engine: str = "vllm", **environ: str) -> Reading:
    return read_config(overrides=lines, environ={"OPTION_LLM_ENGINE": engine, **environ})


def config(*lines: str, engine: str = "vllm", **environ: str) -> Config:
    return read(*lines, engine=engine, **environ).checked()


IGNORED = """
option.adapters option.max_new_tokens option.max_output_len model_loading_timeout load_on_device option.load_on_device
option.long_lora_scaling_factors option.lora_extra_vocab_size reranking sigmoid
includeTokenTypes option.baichuan_model_version option.chatglm_model_version option.gpt_model_version
option.waiting_steps option.low_cpu_mem_usage option.disable_flash_attn option.use_v2_block_manager
option.fp8_scheme option.awq_block_size option.awq_zero_point option.has_custom_code add_output_formatter
option.enable_reasoning option.skops_trusted_types option.speculative_telemetry
"""


@in_one_test("name", IGNORED.split())
def test_a_name_that_lmi_ignores_gets_one_line(name: str) -> None:
    (warning,) = config(f"{name}=1").warnings
    assert warning.startswith(f"without effect here: {name} (-o {name}=1); ")
    assert "  no effect: " in describe(name)


# -- names that nobody has -------------------------------------------------------------------------------------------


def test_names_that_nobody_has_get_one_line_together(tmp_path: Path) -> None:
    file = tmp_path / "serving.properties"
    file.write_text("adapter_ids=['a']\noption.dance=1\n")
    environ = {"OPTION_SING": "1", "SERVING_KITCHEN": "x"}
    found = read_config(properties=file, environ=environ, overrides=["option.xyzzy=2"]).checked()
    assert found.warnings == (
        "without effect here: environment variable SERVING_KITCHEN, option.sing (environment variable OPTION_SING), "
        "adapter_ids (serving.properties, line 1), option.dance (serving.properties, line 2), -o option.xyzzy=2; "
        "the name is not known; LMI_UNKNOWN_OPTIONS=error refuses such names",
    )


@pytest.mark.parametrize("name", ["option.max_rolling_batchsize", "option.tgi_compt", "tensor_parallel_degree"])
def test_a_name_near_a_known_one_stops_the_start(name: str) -> None:
    (problem,) = read(f"{name}=4").problems
    assert "did you mean" in problem.message


def test_a_variable_refuses_every_unknown_name() -> None:
    reading = read("option.dance=1", LMI_UNKNOWN_OPTIONS="error", SERVING_KITCHEN="x")
    assert [str(problem) for problem in reading.problems] == [
        "environment variable SERVING_KITCHEN: unknown setting",
        "-o option.dance=1: unknown option 'option.dance'; `lmi options` lists those there are",
    ]
    assert config("option.dance=1", LMI_UNKNOWN_OPTIONS="warn").warnings
    (problem,) = read(LMI_UNKNOWN_OPTIONS="maybe").problems
    assert str(problem) == "environment variable LMI_UNKNOWN_OPTIONS: LMI_UNKNOWN_OPTIONS=maybe: must be warn or error"


# -- values ----------------------------------------------------------------------------------------------------------


@in_one_test(
    ("lines", "wanted"),
    [
        (["option.task=image-text-to-text"], {"task": "auto"}),
        (["option.task=text_embedding"], {"task": "auto"}),
        (["option.runner=generate"], {"task": "text-generation"}),
        (["option.runner=pooling"], {"task": "pooling"}),
        (["option.runner=pooling", "option.convert=classify"], {"task": "text-classification"}),
        (["option.runner=pooling", "option.convert=none"], {"task": "pooling"}),
        (["option.runner=pooling", "option.task=rerank"], {"task": "rerank"}),
        (["option.enable_streaming=huggingface", "option.rolling_batch=disable"], {"enable_streaming": True}),
        (["option.enable_streaming=True"], {"enable_streaming": False}),
        (["batch_size=8"], {"rolling_batch": "disable", "batch_size": 8}),
        (["max_dynamic_batch_size=8"], {"rolling_batch": "disable", "batch_size": 8}),
        (["batch_size=8", "option.rolling_batch=auto"], {"rolling_batch": "disable"}),
        (["batch_size=1"], {"rolling_batch": "auto"}),
        (["batch_size=8", "option.async_mode=true"], {"rolling_batch": "auto", "batch_size": 1}),
    ],
)
def test_a_value_that_lmi_takes(lines: list[str], wanted: dict[str, Any]) -> None:
    found = config(*lines)
    assert {name: getattr(found, name) for name in wanted} == wanted


@in_one_test("name", ["option.async_mode", "option.enable_streaming"])
def test_a_word_that_lmis_java_takes_for_false_is_no_boolean(name: str) -> None:
    for word in ("1", "yes", "on", "0"):
        (problem,) = read(f"{name}={word}").problems
        assert "must be true or false" in str(problem)
    assert not read(f"{name}=TRUE").problems


def test_a_rolling_batch_still_names_the_engine_of_dynamic_batching() -> None:
    found = read_config(overrides=["batch_size=8", "option.rolling_batch=vllm"], environ={})
    assert (found.engine, found.checked().rolling_batch) == ("vllm", "disable")


@pytest.mark.parametrize("line", ["option.enable_streaming=true", "batch_size=2"])
def test_what_belongs_to_dynamic_batching_is_said_to_have_no_effect(line: str) -> None:
    (warning,) = config(line, "option.async_mode=true").warnings[:1]
    assert warning.startswith(f"without effect here: {line.partition('=')[0]} (-o {line}); a rolling batch ")


@pytest.mark.parametrize("variable", ["SM_VLLM_RUNNER", "OPTION_RUNNER"])
def test_a_variable_names_vllms_runner(variable: str) -> None:
    assert config(**{variable: "pooling"}).task == "pooling"


def test_the_size_of_the_draft_model_is_vllms() -> None:
    lines = ("option.speculative_draft_model=x/y", "option.draft_model_tp_size=1")
    assert config(*lines).engine_options["draft_model_tp_size"] == 1
    assert config("option.draft_model_tp_size=1", engine="trtllm").engine_options.get("draft_model_tp_size") is None


# -- the engine echo, which tries the configuration of any other -------------------------------------------------------


UNCHANGED = """
option.rolling_batch=vllm option.enforce_eager=true option.load_format=dummy option.kv_transfer_config={}
option.seed=1 option.gpu_memory_utilization=0.9 option.tensor_parallel_degree=4 option.chat_template={{x}}
option.speculative_config={}
"""


def test_echo_tries_an_unchanged_file() -> None:
    found = read_config(overrides=["option.llm_engine=echo", *UNCHANGED.split()], environ={})
    assert (found.engine, found.problems) == ("echo", ())
    template, others = found.config.warnings
    assert template.startswith("without effect here: option.chat_template (")
    assert "option.enforce_eager (" in others
    assert others.endswith("; echo stands in for the engine that has it")


@pytest.mark.parametrize("line", ["option.speculative_model=x", "option.gpu_memory_utilization=2"])
def test_echo_refuses_what_the_engine_would_refuse(line: str) -> None:
    assert read(line, engine="echo").problems


@pytest.mark.parametrize("line", ["option.load_in_8bit=TRUE", "option.quantize=bitsandbytes8"])
def test_8_bits_of_bitsandbytes_are_4_in_vllm_as_the_log_says(line: str) -> None:
    (warning,) = config(line).warnings
    assert warning.startswith(f"{line.partition('=')[0]} (-o {line}): vLLM's bitsandbytes has 4 bits")
    assert config("option.quantize=bitsandbytes", "option.load_in_8bit=false").warnings == ()


@pytest.mark.parametrize("engine", ["openvino", "trtllm"])
def test_8_bits_are_vllms(engine: str) -> None:
    (problem,) = read("option.load_in_8bit=true", engine=engine).problems
    assert "option.load_in_8bit is for vllm" in problem.message
    assert not read("option.load_in_8bit=False", engine=engine).problems


def test_checkpoints_in_marlins_own_format_are_refused() -> None:
    (problem,) = read("option.quantize=marlin").problems
    assert problem.message.startswith("vLLM no longer reads checkpoints in Marlin's own format; serve a GPTQ")


def test_the_length_of_drafts_is_nothing_without_an_engine_that_was_built() -> None:
    (warning,) = config("option.max_draft_len=20", engine="trtllm").warnings
    assert warning.startswith("without effect here: option.max_draft_len (")
    assert "speculative_config" in warning


def test_a_format_of_weights_that_only_lmis_own_vllm_had_is_refused() -> None:
    (problem,) = read("option.load_format=sagemaker_fast_model_loader").problems
    assert problem.message.startswith("only AWS's builds of vLLM")
    assert config("option.load_format=runai_streamer").engine_options["load_format"] == "runai_streamer"


# -- engines of DJL's own ----------------------------------------------------------------------------------------


@in_one_test("name", ["Rust", "OnnxRuntime", "PyTorch"])
@in_one_test("task", [(), ("option.task=text-embedding",), ("option.task=text_embedding",), ("option.task=rerank",)])
def test_an_engine_of_djls_own_that_embeds_is_replaced_with_one_line(name: str, task: tuple[str, ...]) -> None:
    found = config(f"engine={name}", *task, "option.model_id=owner/model", engine="openvino")
    assert (found.task, found.engine) == ("pooling", "openvino")
    (warning,) = found.warnings
    assert warning.startswith(
        f"engine={name} (-o engine={name}): DJL's own engines do not run here; openvino computes "
    )


def test_lmis_file_of_the_rust_engine_starts() -> None:
    translator = "translatorFactory=ai.djl.huggingface.translator.TextEmbeddingTranslatorFactory"
    lines = ("engine=Rust", "option.model_id=BAAI/bge-base-en-v1.5", translator, "batch_size=32")
    found = config(*lines, "option.lmi_version=0.36", engine="vllm")
    assert (found.task, found.batch_size, found.async_schema) == ("pooling", 32, False)
    assert not config("engine=Rust", "option.lmi_version=0.36").async_schema
    assert config(OPTION_ENGINE="Rust", HF_MODEL_ID="BAAI/bge-base-en-v1.5").task == "pooling"


@pytest.mark.parametrize(
    "lines",
    [
        ["engine=TensorFlow"],
        ["engine=Rust", "option.task=text-generation"],
        ["engine=PyTorch", "translatorFactory=ai.djl.modality.cv.translator.ImageClassificationTranslatorFactory"],
    ],
)
def test_an_engine_of_djls_own_for_anything_else_is_refused(lines: list[str]) -> None:
    problems = [str(problem) for problem in read(*lines, engine="openvino").problems]
    assert any("DJL's own engines are not served here; write engine=Python" in line for line in problems)
