"""Names and values of LMI's files, and of the variables of TGI, Hugging Face and AWS's vLLM image."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from handler.config.config import Config
from handler.config.environment import name_hub_token
from handler.config.loader import Reading, read_config, read_server_config
from handler.config.options import COMMON, FOREIGN, JAVA, KNOWN, VARIABLES_OF, Option
from handler.config.options.command_line import describe
from handler.config.options.names import CONVERSIONS, SECRET, VARIABLES, find_option, key_of
from tests.one_test import in_one_test

# -- names and values of LMI's files: what LMI ignores gets one line, and what it takes means the same -----------------


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
    assert warning.startswith(f"ignored: {name} (-o {name}=1); ")
    assert "  no effect: " in describe(name)


# -- names that nobody has ---------------------------------------------------------------------------------------------


def test_names_that_nobody_has_get_one_line_together(tmp_path: Path) -> None:
    file = tmp_path / "serving.properties"
    file.write_text("adapter_ids=['a']\noption.dance=1\n")
    environ = {"OPTION_SING": "1", "SERVING_KITCHEN": "x"}
    found = read_config(properties=file, environ=environ, overrides=["option.xyzzy=2"]).checked()
    assert found.warnings == (
        "ignored: environment variable SERVING_KITCHEN, option.sing (environment variable OPTION_SING), "
        "adapter_ids (serving.properties, line 1), option.dance (serving.properties, line 2), -o option.xyzzy=2; "
        "no option has this name; LMI_UNKNOWN_OPTIONS=error refuses such names",
    )


def test_a_variable_that_the_file_overrides_gets_one_line(tmp_path: Path) -> None:
    file = tmp_path / "serving.properties"
    file.write_text("option.max_model_len=4096\noption.enforce_eager=true\noption.tensor_parallel_size=2\n")
    same = {"OPTION_MAX_MODEL_LEN": "4096", "OPTION_ENFORCE_EAGER": "True"}
    other = {"OPTION_MAX_MODEL_LEN": "2048", "TENSOR_PARALLEL_DEGREE": "4"}

    def warnings(environ: dict[str, str], *overrides: str) -> tuple[str, ...]:
        environ = {"OPTION_LLM_ENGINE": "vllm", **environ}
        return read_config(properties=file, environ=environ, overrides=overrides).checked().warnings

    assert warnings(same) == ()
    length, degree = warnings(other)
    assert length == (
        "ignored: option.max_model_len (environment variable OPTION_MAX_MODEL_LEN); "
        "option.max_model_len (serving.properties, line 1) overrides it with another value"
    )
    assert degree == (
        "ignored: option.tensor_parallel_degree (environment variable TENSOR_PARALLEL_DEGREE); "
        "option.tensor_parallel_size (serving.properties, line 3) overrides it with another value"
    )
    assert warnings(other, "option.max_model_len=1024") == (degree,), "an override is there to override"


@pytest.mark.parametrize("variable", ["OPTION_MODEL_ID", "HF_MODEL_ID", "OPTION_MODEL", "MODEL_ID"])
def test_a_model_in_the_environment_that_the_command_line_overrides_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "owner/model")

    def warnings(model: str | None = None, *overrides: str) -> tuple[str, ...]:
        return read_server_config(model, "echo", None, overrides).config.warnings

    assert warnings() == warnings("owner/model") == ()
    (argument,) = warnings("demo")
    assert argument.endswith("; option.model_id (the MODEL argument) overrides it with another value")
    assert variable in argument
    (override,) = warnings(None, "option.model_id=demo")
    assert override.endswith("; option.model_id (-o option.model_id=demo) overrides it with another value")
    (tmp_path / "serving.properties").write_text("option.max_model_len=64\n")
    (directory,) = warnings(str(tmp_path))
    assert directory.startswith(f"ignored: the model in {tmp_path} (the MODEL argument); option.model_id (environment")


@pytest.mark.parametrize("name", ["option.max_rolling_batchsize", "option.tgi_compt", "tensor_parallel_degree"])
def test_a_name_near_a_known_one_stops_the_start(name: str) -> None:
    (problem,) = read(f"{name}=4").problems
    assert "did you mean" in problem.message


def test_a_variable_refuses_every_unknown_name() -> None:
    reading = read("option.dance=1", LMI_UNKNOWN_OPTIONS="error", SERVING_KITCHEN="x")
    assert [str(problem) for problem in reading.problems] == [
        "environment variable SERVING_KITCHEN: unknown setting",
        "-o option.dance=1: unknown option 'option.dance'; `lmi options` lists all options",
    ]
    assert config("option.dance=1", LMI_UNKNOWN_OPTIONS="warn").warnings
    (problem,) = read(LMI_UNKNOWN_OPTIONS="maybe").problems
    assert str(problem) == "environment variable LMI_UNKNOWN_OPTIONS=maybe: must be warn or error"


# -- values ------------------------------------------------------------------------------------------------------------


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
    assert warning.startswith(f"ignored: {line.partition('=')[0]} (-o {line}); rolling batch ")


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
    assert template.startswith("ignored: option.chat_template (")
    assert "option.enforce_eager (" in others
    assert others.endswith("; echo replaces the engine that supports it")


@pytest.mark.parametrize("line", ["option.speculative_model=x", "option.gpu_memory_utilization=2"])
def test_echo_refuses_what_the_engine_would_refuse(line: str) -> None:
    assert read(line, engine="echo").problems


@pytest.mark.parametrize("line", ["option.load_in_8bit=TRUE", "option.quantize=bitsandbytes8"])
def test_8_bits_of_bitsandbytes_are_4_in_vllm_as_the_log_says(line: str) -> None:
    (warning,) = config(line).warnings
    assert warning.startswith(f"{line.partition('=')[0]} (-o {line}): vLLM's bitsandbytes uses 4 bits")
    assert config("option.quantize=bitsandbytes", "option.load_in_8bit=false").warnings == ()


@pytest.mark.parametrize("engine", ["openvino", "trtllm"])
def test_8_bits_are_vllms(engine: str) -> None:
    (problem,) = read("option.load_in_8bit=true", engine=engine).problems
    assert "option.load_in_8bit is for vllm" in problem.message
    assert not read("option.load_in_8bit=False", engine=engine).problems


def test_checkpoints_in_marlins_own_format_are_refused() -> None:
    (problem,) = read("option.quantize=marlin").problems
    assert problem.message.startswith("vLLM no longer reads checkpoints in Marlin's own format; use a GPTQ")


def test_the_length_of_drafts_is_nothing_without_an_engine_that_was_built() -> None:
    (warning,) = config("option.max_draft_len=20", engine="trtllm").warnings
    assert warning.startswith("ignored: option.max_draft_len (")
    assert "speculative_config" in warning


def test_a_format_of_weights_that_only_lmis_own_vllm_had_is_refused() -> None:
    (problem,) = read("option.load_format=sagemaker_fast_model_loader").problems
    assert problem.message.startswith("is only supported by AWS's builds of vLLM")
    assert config("option.load_format=runai_streamer").engine_options["load_format"] == "runai_streamer"


# -- engines of DJL's own ----------------------------------------------------------------------------------------------


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
    assert any("DJL's own engines are not supported; set engine=Python" in line for line in problems)


# -- variables of TGI, Hugging Face, Triton and AWS's vLLM image, and the settings of LMI's own handlers ---------------


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
        ({"OPTION_ROLLING_BATCH": "vllm", "PREFIX_CACHING": "1"}, {"enable_prefix_caching": True}),
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
        ({"SM_VLLM_MODEL": "a/b", "SM_VLLM_SERVED_MODEL_NAME": "[]"}, {"served_model_name": None}),
        (
            {"SM_VLLM_LORA_MODULES": '{"name": "a", "path": "/a"}  {"name": "b", "path": "/b"}'},
            {"lora_modules": {"a": "/a", "b": "/b"}},
        ),
        ({"SM_VLLM_LORA_MODULES": '["a=/a", "b=/b"]'}, {"lora_modules": {"a": "/a", "b": "/b"}}),
        ({"SM_VLLM_LIMIT_MM_PER_PROMPT": '{"image": 2}'}, {"openai_compat": True}),
        ({"SM_VLLM_MODEL": "a/b"}, {"openai_compat": True}),
        ({"SM_VLLM_OPENAI_COMPAT": "false"}, {"openai_compat": False}),
        ({"SM_VLLM_MAX_NUM_SEQS": "7", "OPTION_ROLLING_BATCH": "trtllm"}, {"engine": "trtllm"}),
        ({"SM_VLLM_MODEL": "a/b", "OPTION_OPENAI_COMPAT": "false"}, {"openai_compat": False}),
        ({"MESSAGES_API_ENABLED": "true"}, {"openai_compat": True}),
        ({"SM_VLLM_PORT": "8080", "SM_VLLM_HOST": "0.0.0.0"}, {"engine": "vllm"}),
        ({"SM_VLLM_DTYPE": "half", "OPTION_LLM_ENGINE": "echo"}, {"engine": "echo", "dtype": "fp16"}),
        # Triton's SageMaker container
        ({"SAGEMAKER_TRITON_DEFAULT_MODEL_NAME": "ensemble"}, {"model_name": ("ensemble",)}),
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
        (
            {"SAGEMAKER_TRITON_DEFAULT_MODEL_NAME": "ensemble", "OPTION_MODEL_NAME": "other"},
            "environment variables SAGEMAKER_TRITON_DEFAULT_MODEL_NAME and OPTION_MODEL_NAME contradict each",
        ),
        ({"QUANTIZE": "awq"}, "environment variable QUANTIZE: option.quantize=awq: must be one of int8, int4"),
        (
            {"HF_TASK": "fill-mask"},
            "environment variable HF_TASK: option.task=fill-mask: must be one of auto, text_embedding",
        ),
        ({"ROPE_FACTOR": "2"}, "environment variable ROPE_FACTOR=2: set OPTION_HF_OVERRIDES"),
        ({"SHARDED": "x"}, "environment variable SHARDED=x: must be true or false"),
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
    heeded = f"environment variable {name}" in config.origins.values() or str(VARIABLES[name].same) in SECRET
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


# -- what protects a server: keys, TLS and addresses of other servers, and misspelt names of ours ----------------------


@in_one_test("name", ["API_KEY", "VLLM_API_KEY", "LLAMA_API_KEY"])
def test_a_key_of_another_server_is_read_and_may_not_differ_from_ours(name: str) -> None:
    assert not reading({name: "one"}).problems
    assert not reading({name: "one", "LMI_API_KEY": "one"}).problems
    (problem,) = reading({name: "one", "LMI_API_KEY": "two"}).problems
    assert str(problem) == f"environment variables {name} and LMI_API_KEY contradict each other: remove one"


@in_one_test("name", ["API_KEY", "VLLM_API_KEY"])
def test_a_single_key_with_a_comma_is_not_split(name: str) -> None:
    (problem,) = reading({name: "one,two"}).problems
    assert "comma" in problem.message
    assert "one" not in problem.message


@in_one_test(("name", "value"), [
    ("SM_SGLANG_API_KEY", "hidden"), ("SM_SGLANG_ADMIN_API_KEY", "hidden"),
    ("SM_SGLANG_SSL_KEYFILE_PASSWORD", "hidden"),
    ("SM_SGLANG_SSL_CERTFILE", "c.pem"), ("SM_LLAMA_CPP_API_KEY", "hidden"), ("LLAMA_ARG_SSL_CERT_FILE", "c.pem"),
    ("LLAMA_ARG_SSL_KEY_FILE", "k.pem"), ("LLAMA_ARG_HOST", "127.0.0.1"), ("MIES_CONFIG_JSON_PATH", "/config.json"),
    ("SERVING_CERTIFICATE_FILE", "c.pem"), ("SERVING_PRIVATE_KEY_FILE", "k.pem"), ("SERVING_KEYSTORE", "k.p12"),
    ("SERVING_INFERENCE_ADDRESS", "https://0.0.0.0:8443"), ("SERVING_MANAGEMENT_ADDRESS", "HTTPS://127.0.0.1:8444"),
    ("SAGEMAKER_TRITON_ADDITIONAL_ARGS", "--log-verbose=1 --http-restricted-api=health:key=hidden"),
    ("SAGEMAKER_TRITON_ADDITIONAL_ARGS", "--grpc-use-ssl=true"), ("SM_VLLM_API_KEY", "hidden"),
    ("SM_VLLM_SSL_CERTFILE", "c.pem"), ("SM_VLLM_ALLOWED_ORIGINS", '["https://a.b"]'),
])  # fmt: skip
def test_what_protects_another_server_is_refused_if_it_is_not_read(name: str, value: str) -> None:
    """With echo too, which replaces another engine, but not its server."""
    for engine in ("echo", "openvino"):
        _, problems, _ = reading({name: value, "OPTION_LLM_ENGINE": engine})
        (problem,) = problems
        assert name in str(problem)
        assert "hidden" not in str(problem)


@in_one_test("name", ["option.api_key", "option.ssl_certfile", "option.allowed_origins"])
def test_a_refused_option_is_not_said_to_be_ignored_too(name: str) -> None:
    config, problems, _ = reading({}, f"{name}=x", "option.llm_engine=echo")
    assert len(problems) == 1
    assert config.warnings == ()


@in_one_test(("name", "meant"), [
    ("LMI_API_KEYS", "LMI_API_KEY"), ("LMI_APIKEY", "LMI_API_KEY"), ("LMI_KEY", "LMI_API_KEY"),
    ("LMI_LOGLEVEL", "LMI_LOG_LEVEL"), ("LMI_CACHE_DIR", "LMI_CACHE"),
])  # fmt: skip
def test_a_misspelt_variable_of_ours_is_refused(name: str, meant: str) -> None:
    (problem,) = reading({name: "hidden"}).problems
    assert str(problem) == f"environment variable {name}: unknown setting; did you mean {meant!r}?"


def test_other_variables_with_our_prefix_are_named_but_not_those_of_a_kubernetes_service() -> None:
    service = {
        "LMI_SERVICE_HOST": "10.0.0.1", "LMI_SERVICE_PORT": "80", "LMI_SERVICE_PORT_HTTP": "80",
        "LMI_PORT": "tcp://10.0.0.1:80", "LMI_PORT_80_TCP": "tcp://10.0.0.1:80",
        "LMI_CACHE_PORT_80_TCP_ADDR": "10.0.0.1",
    }  # fmt: skip
    assert reading(service).checked().warnings == ()
    (warning,) = reading({**service, "LMI_FOO": "1"}).checked().warnings
    assert warning.startswith("ignored: environment variable LMI_FOO; no option has this name")


def test_every_variable_of_ours_is_known() -> None:
    root = Path(__file__).parents[3]
    sources = [path for part in ("handler", "deploy", "proof") for path in (root / part).rglob("*.py")]
    quoted = {name for path in sources for name in re.findall(r'"(LMI_[A-Z_]+)"', path.read_text())}
    image = {*re.findall(r"^(?:ENV|   ) *(LMI_[A-Z_]+)=", (root / "Dockerfile").read_text(), re.MULTILINE)}
    assert image
    assert {"LMI_API_KEY", "LMI_CACHE"} <= quoted
    assert reading(dict.fromkeys(quoted | image - {"LMI_UNKNOWN_OPTIONS"}, "warn")).checked().warnings == ()


# -- foreign.json: whoever adds a name to it is told of a slip ---------------------------------------------------------


TEXT = (files("handler.config.options") / "foreign.json").read_text(encoding="utf-8")
DATA = json.loads(TEXT)


def lines() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for part in ("options", "variables"):
        for group, names in DATA[part].items():
            for name, line in names.items():
                yield group, name, line


def test_no_name_stands_twice_in_a_group() -> None:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        assert len(set(names)) == len(names), sorted({name for name in names if names.count(name) > 1})
        return dict(pairs)

    json.loads(TEXT, object_pairs_hook=unique)
    assert sum(map(len, VARIABLES_OF.values())) == len(VARIABLES)


def test_each_name_has_a_line_of_its_own() -> None:
    written = {line.strip().rstrip(",") for line in TEXT.splitlines()}
    wanted = {f"{json.dumps(name)}: {json.dumps(line)}" for _, name, line in lines()}
    assert wanted <= written


@in_one_test("group", [*DATA["options"], *DATA["variables"]])
def test_each_line_says_one_thing(group: str) -> None:
    for of, name, line in lines():
        if of == group:
            verdicts = line.keys() & {"refused", "idle", "same", "unread", "heeded"}
            by_engine = isinstance(line.get("same"), dict)
            assert (
                verdicts == {"same", "idle"} if by_engine else len(verdicts) == (group != "java" or "refused" in line)
            ), name
            assert line.get("convert", "") in CONVERSIONS, name


def test_each_reason_is_used_and_each_that_is_used_is_there() -> None:
    used = {text[1:] for _, _, line in lines() for text in line.values() if isinstance(text, str) and text[:1] == "@"}
    assert used - {"handlers", "middleware", "ping", "throttle"} == DATA["reasons"].keys()


def test_each_variable_that_stands_for_ours_names_an_option() -> None:
    owns = {own for variable in VARIABLES.values() for own in variable.owns.values()}
    of_vllm = {own for own in owns - SECRET if key_of(own) not in KNOWN}
    assert "OPTION_CUDAGRAPH_CAPTURE_SIZES" in of_vllm
    assert [own for own in of_vllm if find_option(key_of(own), "vllm") is None] == []


def test_every_name_is_an_option() -> None:
    assert {option.key for option in (*JAVA, *FOREIGN)} == {
        name for names in DATA["options"].values() for name in names
    }


# -- the serving.properties at the top: it loads as it is, names every option, and shows the true defaults -------------


FILE = Path(__file__).parents[3] / "serving.properties"
SHOWN = dict(re.findall(r"^#?([\w.]+)=(.*)$", FILE.read_text(), re.MULTILINE))


def test_it_loads_with_defaults_everywhere() -> None:
    """But for the mode, which option.rolling_batch=scheduler chooses."""
    found = read_config(properties=FILE, environ={}).checked()
    assert replace(found, warnings=(), async_mode=None) == read_config(environ={}).checked()


@in_one_test("option", COMMON, ids=lambda option: option.key)
def test_every_option_that_is_not_an_engines_own_is_shown_with_its_default(option: Option) -> None:
    shown = SHOWN[option.key]
    wanted = None if option.by_engine else option.default  # a line with one engine's would be wrong for another
    assert (option.parse(shown) if shown else None) == wanted


def test_it_shows_nothing_that_is_unknown() -> None:
    assert set(SHOWN) <= set(KNOWN)
