"""The variables of AWS's SGLang and llama.cpp images, and the names that resemble those of other servers."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from handler.config.loader import Reading, read_config
from handler.config.model_files import limits_answers
from handler.config.options import IMAGES, VARIABLES_OF
from handler.container.arguments import translated_environment
from handler.engines.base import EngineConfig
from handler.engines.llamacpp.child import check_flags
from tests.one_test import in_one_test
from tests.unit.config.image_arguments import of_llama_server, of_sglang, variable_of


def read(environ: dict[str, str], *overrides: str) -> Reading:
    return read_config(overrides=overrides, environ=environ)


def sglang(**values: str) -> dict[str, str]:
    return {f"SM_SGLANG_{name}": value for name, value in values.items()}


def llama(**values: str) -> dict[str, str]:
    return {f"SM_LLAMA_CPP_{name}": value for name, value in values.items()}


@in_one_test(
    ("environ", "wanted"),
    [
        (sglang(MODEL_PATH="a/b"), {"model_id": "a/b", "engine": "vllm", "openai_compat": True}),
        (sglang(MODEL="a/b", TP_SIZE="2"), {"tensor_parallel_degree": "2"}),
        (sglang(TP="2", DP="3"), {"tensor_parallel_degree": "2", "replicas": "3"}),
        (sglang(CONTEXT_LENGTH="4096\nmore"), {"max_model_len": 4096}),
        (sglang(CONTEXT_LENGTH="4096"), {"lmi_version": (0, 36)}),
        (sglang(MEM_FRACTION_STATIC="0.8"), {"gpu_memory_utilization": 0.8}),
        (sglang(MAX_RUNNING_REQUESTS="7", MAX_QUEUED_REQUESTS="9"), {"max_rolling_batch_size": 7, "job_queue_size": 9}),
        (sglang(CHUNKED_PREFILL_SIZE="-1"), {"max_num_batched_tokens": None}),
        (sglang(TRUST_REMOTE_CODE=""), {"trust_remote_code": True}),
        (sglang(TRUST_REMOTE_CODE="False"), {"trust_remote_code": False}),
        (sglang(DISABLE_RADIX_CACHE="true"), {"enable_prefix_caching": False}),
        (sglang(DISABLE_CUDA_GRAPH="TRUE"), {"enforce_eager": True}),
        (sglang(IS_EMBEDDING="true"), {"task": "text-embedding"}),
        (sglang(TOOL_CALL_PARSER="qwen25"), {"tool_call_parser": "hermes"}),
        (sglang(REASONING_PARSER="deepseek-r1"), {"reasoning_parser": "deepseek_r1"}),
        (sglang(TOOL_CALL_PARSER="gpt-oss"), {"tool_call_parser": "openai"}),
        (sglang(LORA_PATHS="x=/x"), {"lora_modules": {"x": "/x"}}),
        (sglang(LORA_PATHS='{"lora_name": "x", "lora_path": "/x"}'), {"lora_modules": {"x": "/x"}}),
        (sglang(CHAT_TEMPLATE="/opt/ml/model/t.jinja"), {"chat_template": "/opt/ml/model/t.jinja"}),
        (sglang(PORT="8080", HOST="0.0.0.0", NNODES="1"), {"engine": "vllm"}),
        ({**sglang(TP_SIZE="2"), "OPTION_LLM_ENGINE": "echo"}, {"engine": "echo", "tensor_parallel_degree": "2"}),
        ({**sglang(MODEL_PATH="a/b"), "OPTION_OPENAI_COMPAT": "false"}, {"openai_compat": False}),
        (llama(MODEL="/m.gguf"), {"model_id": "/m.gguf", "engine": "openvino", "openai_compat": True}),
        ({**llama(MODEL="/m.gguf"), "OPTION_LLM_ENGINE": "vllm"}, {"engine": "vllm"}),
        (llama(HF_REPO="a/b:Q8_0", HF_FILE="m.gguf"), {"model_id": "a/b/m.gguf"}),
        (llama(CTX_SIZE="8192", PARALLEL="4"), {"max_model_len": 2048, "max_rolling_batch_size": 4}),
        (llama(CTX_SIZE="8192", PARALLEL="4", KV_UNIFIED="true"), {"max_model_len": 8192}),
        (llama(CTX_SIZE="0", PARALLEL="-1"), {"max_model_len": None, "max_rolling_batch_size": 32}),
        (llama(ALIAS="a,b"), {"served_model_name": ("a", "b")}),
        (
            llama(TEMP="0.7", TOP_K="20", N_PREDICT="64"),
            {"override_generation_config": {"temperature": 0.7, "top_k": 20, "max_new_tokens": 64}},
        ),
        (
            llama(CHAT_TEMPLATE_KWARGS='{"a": 1}', REASONING_BUDGET="0", REASONING_EFFORT="low"),
            {"default_chat_template_kwargs": {"a": 1, "enable_thinking": False, "reasoning_effort": "low"}},
        ),
        (llama(REASONING_FORMAT="none"), {"reasoning_parser": "none"}),
        (llama(EMBEDDINGS="true", POOLING="mean"), {"task": "text-embedding", "pooling": "mean"}),
        (llama(RERANKING="true"), {"task": "rerank"}),
        (llama(NO_CACHE_PROMPT="true"), {"enable_prefix_caching": False}),
        ({"LLAMA_ARG_CACHE_PROMPT": "off"}, {"enable_prefix_caching": False, "openai_compat": True}),
        ({"LLAMA_ARG_N_PARALLEL": "2", "LLAMA_ARG_CTX_SIZE": "4096"}, {"max_model_len": 2048}),
        ({"LLAMA_ARG_CTX_SIZE": "4096", **llama(CTX_SIZE="512")}, {"max_model_len": 512}),
        ({"LLAMA_ARG_EMBEDDINGS": "0"}, {"task": "auto"}),
        (sglang(CONTEXT_LENGTH="32k"), {"max_model_len": 32_000}),
        (sglang(CONTEXT_LENGTH="25.6k"), {"max_model_len": 25_600}),
        (sglang(CHUNKED_PREFILL_SIZE="4Ki"), {"max_num_batched_tokens": 4096}),
        (sglang(EP_SIZE="8"), {"engine_args": {"enable_expert_parallel": True}}),
        (sglang(KV_CACHE_DTYPE="bf16"), {"kv_cache_dtype": "bfloat16"}),
        (sglang(GRAMMAR_BACKEND="llguidance"), {"guided_decoding_backend": "guidance"}),
        (sglang(MODEL_IMPL="sglang"), {"engine_args": {"model_impl": "vllm"}}),
        (sglang(LANGUAGE_MODEL_ONLY=""), {"engine_args": {"language_model_only": True}}),
        (sglang(PREFERRED_SAMPLING_PARAMS='{"top_k": 5}'), {"override_generation_config": {"top_k": 5}}),
        (sglang(WATCHDOG_TIMEOUT="900"), {"engine_timeout": 900.0}),
        (sglang(MEDIA_URL_MAX_FILE_SIZE_MB="8"), {"max_image_bytes": 8 << 20}),
        (sglang(TP="8", DP="8", ENABLE_DP_ATTENTION="true"), {"tensor_parallel_degree": "8", "replicas": "1"}),
        (sglang(ENABLE_PRIORITY_SCHEDULING="true", SCHEDULE_LOW_PRIORITY_VALUES_FIRST="true"), {"engine": "vllm"}),
        (llama(TIMEOUT="600"), {"client_timeout": 600.0, "predict_timeout": 120.0}),
        (llama(EMBD_NORMALIZE="-1"), {"normalize": False}),
        (llama(REASONING_EFFORT="default"), {"default_chat_template_kwargs": None}),
        (llama(KV_UNIFIED_PER_SLOT="1024", PARALLEL="4"), {"max_model_len": 1024}),
        (llama(CTX_SIZE="8192", KV_UNIFIED_PER_SLOT="4096", PARALLEL="4"), {"max_model_len": 2048}),
        ({"LLAMA_ARG_CTX_SIZE": "8192", "LLAMA_ARG_KV_UNIFIED_PER_SLOT": "4096"}, {"max_model_len": 4096}),
        ({"LLAMA_ARG_KV_UNIFIED": "0", **llama(CTX_SIZE="8192", PARALLEL="4")}, {"max_model_len": 2048}),
        ({"LLAMA_ARG_OFFLINE": "0", "LLAMA_ARG_REASONING_PRESERVE": "off"}, {"engine": "openvino"}),
        (llama(XTC_PROBABILITY="0.0", XTC_THRESHOLD="0.1", KEEP="0"), {"engine": "openvino"}),
    ],
)  # fmt: skip
def test_a_variable_of_an_image_sets_an_option(environ: dict[str, str], wanted: dict[str, Any]) -> None:
    config = read(environ).checked()
    values = {name: getattr(config, name, config.engine_options.get(name)) for name in wanted}
    assert values == wanted


@in_one_test(
    ("environ", "wanted"),
    [
        (llama(MIN_P="0.1", N_PREDICT="64"), False),
        ({"LLAMA_ARG_N_PREDICT": "64"}, False),
        (sglang(PREFERRED_SAMPLING_PARAMS='{"max_new_tokens": 64}'), False),
        ({"OPTION_OVERRIDE_GENERATION_CONFIG": '{"max_new_tokens": 64}'}, True),
        ({"SM_VLLM_OVERRIDE_GENERATION_CONFIG": '{"max_new_tokens": 64}'}, True),
    ],
)
def test_the_length_of_responses_is_a_limit_only_where_it_is_one_for_the_images_server(
    environ: dict[str, str], wanted: bool
) -> None:
    config = read(environ).config
    assert config is not None
    assert limits_answers(config) is wanted


@in_one_test(
    ("environ", "wanted"),
    [
        (sglang(PORT="80"), "environment variable SM_SGLANG_PORT=80: `lmi serve --port` sets it"),
        (sglang(SPECULATIVE_ALGORITHM="EAGLE"), "use option.speculative_config"),
        (sglang(NNODES="2"), "to use several machines"),
        (sglang(CHAT_TEMPLATE="chatml"), "it names a built-in template"),
        (sglang(TOOL_CALL_PARSER="spark25"), "environment variable SM_SGLANG_TOOL_CALL_PARSER: "),
        (sglang(LORA_PATHS="a=/x b=/y"), "set OPTION_LORA_MODULES"),
        (sglang(TP="2", TP_SIZE="4"), "environment variables SM_SGLANG_TP_SIZE and SM_SGLANG_TP contradict"),
        (sglang(TP="2") | {"TENSOR_PARALLEL_DEGREE": "4"}, "contradict each other"),
        (llama(HF_REPO="a/b"), "SM_LLAMA_CPP_HF_FILE=NAME.gguf"),
        (llama(NO_JINJA="true"), "chats need a Jinja template"),
        ({"LLAMA_ARG_JINJA": "0"}, "environment variable LLAMA_ARG_JINJA=0: chats need"),
        (llama(TEMP="hot"), "environment variable SM_LLAMA_CPP_TEMP=hot: must be a number"),
        (llama(MMPROJ="/p.gguf"), "serve the Hugging Face checkpoint"),
        (llama(CHAT_TEMPLATE_KWARGS="{", REASONING_BUDGET="0"), "SM_LLAMA_CPP_CHAT_TEMPLATE_KWARGS: "),
        (llama(MODEL="/a.gguf", HF_REPO="a/b", HF_FILE="c.gguf"), "contradict each other"),
        (sglang(ENABLE_PRIORITY_SCHEDULING="true"), "requests with a lower priority come first"),
        (sglang(ENABLE_FP32_LM_HEAD="true"), "set option.dtype=fp32"),
        (sglang(ENABLE_STREAMING_SESSION="true"), "SGLang's sessions are not supported"),
        (sglang(TORCHAO_CONFIG="int8wo"), "serve a checkpoint that is already quantized"),
        (sglang(KT_WEIGHT_PATH="/w"), "option.model_id is the only source of weights"),
        (sglang(MEDIA_URL_MAX_FILE_SIZE_MB="0"), "SM_SGLANG_MEDIA_URL_MAX_FILE_SIZE_MB=0: must be"),
        (sglang(CONTEXT_LENGTH="1.5Ki"), "option.max_model_len=1.5Ki: must be a whole number"),
        (llama(OFFLINE="true"), "set HF_HUB_OFFLINE=1 in the environment"),
        ({"LLAMA_ARG_OFFLINE": "1"}, "environment variable LLAMA_ARG_OFFLINE=1: set HF_HUB_OFFLINE=1"),
        (llama(REASONING_BUDGET="512"), "requests can set thinking_token_budget"),
        (llama(REASONING_PRESERVE="true"), "preserve_thinking"),
        (llama(TYPICAL="0.9"), "this server has no such default"),
        (llama(EMBD_NORMALIZE="1"), "SM_LLAMA_CPP_EMBD_NORMALIZE=1: must be -1 (none) or 2"),
        (llama(MMPROJ_AUTO="true"), "serve the Hugging Face checkpoint"),
        (llama(PREFILL_ASSISTANT="true"), "continue_final_message"),
        (llama(MEDIA_PATH="/m"), "set option.allowed_local_media_path"),
        (llama(SLOT_SAVE_PATH="/s"), "does not save the cache of a prompt in a file"),
        (llama(TOOLS="all"), "this server runs no tools; clients run them"),
        (llama(API_PREFIX="/a"), "put a proxy in front of this server"),
    ],
)  # fmt: skip
def test_a_variable_that_cannot_be_followed_is_refused_by_its_name(environ: dict[str, str], wanted: str) -> None:
    (problem,) = read(environ).problems
    assert wanted in str(problem)


@in_one_test(
    ("environ", "wanted"),
    [
        (sglang(ENABLE_METRICS="true"), "SM_SGLANG_ENABLE_METRICS has no effect here: /metrics is always there"),
        (llama(THREADS="4"), "SM_LLAMA_CPP_THREADS has no effect here: the engine chooses its own threads"),
        (llama(JINJA="false"), "set SM_LLAMA_CPP_NO_JINJA=true"),
        (llama(ALIAS="a\nb"), "SM_LLAMA_CPP_ALIAS: AWS's image reads only the first line"),
        ({"LLAMA_ARG_CTX_SIZE": "9", **llama(CTX_SIZE="8")}, "SM_LLAMA_CPP_CTX_SIZE overrides it"),
        (sglang(CONTEXT_LENGHT="1"), "SM_SGLANG_CONTEXT_LENGHT (did you mean SM_SGLANG_CONTEXT_LENGTH?)"),
        (llama(CTX="1"), "ignored: environment variable SM_LLAMA_CPP_CTX"),
        (sglang(MEM_FRACTION_STATIC="0.8"), "SM_SGLANG_MEM_FRACTION_STATIC: vLLM's share includes activations"),
        (sglang(DP_SIZE="2"), "SM_SGLANG_DP_SIZE: it starts complete replicas here"),
        (sglang(DP="2", ENABLE_DP_ATTENTION="true"), "SM_SGLANG_DP has no effect here: with SM_SGLANG_ENABLE_DP"),
        (sglang(CHUNKED_PREFILL_SIZE="-1"), "prompts are always computed in chunks"),
        (sglang(DISABLE_PIECEWISE_CUDA_GRAPH="true"), "the engine chooses its own kernels and graphs"),
        (sglang(STREAM_INTERVAL="8"), "every token is sent as soon as it is generated"),
        (llama(REPEAT_PENALTY="1.1"), "SM_LLAMA_CPP_REPEAT_PENALTY: it applies to all tokens of prompt and response"),
        (
            {**llama(N_GPU_LAYERS="99"), "OPTION_LLM_ENGINE": "vllm"},
            "SM_LLAMA_CPP_N_GPU_LAYERS has no effect here: the",
        ),
        ({"LLAMA_ARG_CTX_SIZ": "1"}, "did you mean LLAMA_ARG_CTX_SIZE?"),
        ({"SM_NUM_GPU": "1"}, "did you mean SM_NUM_GPUS?"),
        ({"HF_MODLE_ID": "a/b"}, "did you mean HF_MODEL_ID?"),
        ({"MAX_TOTAL_TOKEN": "1"}, "did you mean MAX_TOTAL_TOKENS?"),
        ({"SAGEMAKER_TRITON_DEFAULT_MODEL": "m"}, "SAGEMAKER_TRITON_DEFAULT_MODEL"),
        ({"MIES_INSTALL_PATH": "/m"}, "MIES_INSTALL_PATH"),
        ({"OPTION_DANCE": "1"}, "OPTION_DANCE"),
    ],
)
def test_a_variable_without_effect_is_reported(environ: dict[str, str], wanted: str) -> None:
    reading = read(environ)
    assert not reading.problems
    assert wanted in "\n".join(reading.config.warnings)


@in_one_test("name", ["HF_HOME", "HF_HUB_ENABLE_HF_TRANSFER", "HF_XET_HIGH_PERFORMANCE", "PATH", "MAX_JOBS", "LANG"])
def test_the_variables_of_other_software_are_not_reported(name: str) -> None:
    assert read({name: "1"}).checked().warnings == ()


def test_unknown_names_stop_the_start_if_asked() -> None:
    (problem,) = read({**sglang(CONTEXT_LENGHT="1"), "LMI_UNKNOWN_OPTIONS": "error"}).problems
    assert "did you mean 'SM_SGLANG_CONTEXT_LENGTH'?" in str(problem)


def test_the_token_of_llama_cpp_is_that_of_the_hub_and_secret() -> None:
    assert read(llama(HF_TOKEN="hf_a")).checked().warnings == ()
    (problem,) = read({**llama(HF_TOKEN="hf_a"), "HF_TOKEN": "hf_b"}).problems
    assert "hf_" not in str(problem)


# -- the llamacpp engine, to which the flags of llama-server are passed on ---------------------------------------------


LLAMACPP = {"OPTION_LLM_ENGINE": "llamacpp"}


def flags_of(environ: dict[str, str]) -> str:
    config = read({**LLAMACPP, **environ}).checked()
    return shlex.join(config.engine_options.get("llama_server_args", ()))


@in_one_test(
    ("environ", "wanted"),
    [
        (llama(THREADS="4", FLASH_ATTN="on"), "--flash-attn on --threads 4"),
        (llama(CACHE_TYPE_K="q8_0", CACHE_TYPE_V="q8_0"), "--cache-type-k q8_0 --cache-type-v q8_0"),
        (llama(N_GPU_LAYERS="99", SPLIT_MODE="row"), "--n-gpu-layers 99 --split-mode row"),
        (llama(ROPE_SCALING="yarn", YARN_ORIG_CTX="4096"), "--rope-scaling yarn --yarn-orig-ctx 4096"),
        (llama(SPEC_DRAFT_MODEL="/a b.gguf"), "--spec-draft-model '/a b.gguf'"),
        (llama(LORA="/l.gguf", UBATCH_SIZE="64"), "--lora /l.gguf --ubatch-size 64"),
        (llama(MMPROJ="/p.gguf", IMAGE_MAX_TOKENS="70"), "--image-max-tokens 70 --mmproj /p.gguf"),
        (llama(SWA_FULL="", CPU_MOE="true", CHECK_TENSORS="false"), "--cpu-moe --swa-full"),
        ({"LLAMA_ARG_KV_OFFLOAD": "0", "LLAMA_ARG_NO_HOST": "off"}, "--no-kv-offload"),
        ({"LLAMA_ARG_KV_OFFLOAD": "on", "LLAMA_ARG_UBATCH": "32"}, "--kv-offload --ubatch-size 32"),
        ({"LLAMA_ARG_THREADS": "2", **llama(THREADS="3")}, "--threads 2 --threads 3"),  # the last one applies
        (llama(KV_UNIFIED="true", CTX_SIZE="8192", PARALLEL="4"), "--kv-unified --ctx-size 8192"),
        (llama(KV_UNIFIED="true"), "--kv-unified"),
        (llama(CTX_SIZE="8192", TEMP="0.5"), ""),
        (llama(LOG_VERBOSITY="4", METRICS="true"), ""),
    ],
)  # fmt: skip
def test_llama_servers_flags_are_passed_on(environ: dict[str, str], wanted: str) -> None:
    assert flags_of(environ) == wanted


@in_one_test(
    ("environ", "wanted"),
    [
        (llama(CTX_SIZE="8192", PARALLEL="4"), {"max_model_len": 2048, "max_rolling_batch_size": 4}),
        (llama(KV_UNIFIED="true", CTX_SIZE="8192", PARALLEL="4"), {"max_model_len": 8192}),
        (llama(BATCH_SIZE="512"), {"max_num_batched_tokens": 512}),
        (llama(EMBEDDINGS="true", POOLING="mean"), {"task": "text-embedding", "pooling": "mean"}),
        (
            llama(TEMP="0.7", N_PREDICT="9"),
            {
                "override_generation_config": {
                    "temperature": 0.7, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "max_new_tokens": 9,
                }
            },
        ),
        (
            {"LLAMA_ARG_THREADS": "1"},
            {"override_generation_config": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}},
        ),
        (
            {**llama(THREADS="1"), "OPTION_OVERRIDE_GENERATION_CONFIG": '{"top_k": 3}'},
            {"override_generation_config": {"top_k": 3}},
        ),
        ({}, {"override_generation_config": None}),
    ],
)  # fmt: skip
def test_the_other_variables_have_the_same_options_with_llamacpp(
    environ: dict[str, str], wanted: dict[str, Any]
) -> None:
    config = read({**LLAMACPP, **environ}).checked()
    assert {name: getattr(config, name, None) for name in wanted} == wanted


def test_a_variable_that_names_no_flag_of_the_engine_keeps_its_answer_with_llamacpp() -> None:
    (problem,) = read({**LLAMACPP, **llama(MIROSTAT="2")}).problems
    assert "this server has no such default" in str(problem)
    (problem,) = read({**LLAMACPP, **llama(PERF="much")}).problems
    assert str(problem) == "environment variable SM_LLAMA_CPP_PERF=much: must be true or false"
    (problem,) = read({**LLAMACPP, **llama(THREADS="2"), "OPTION_LLAMA_SERVER_ARGS": "-t 3"}).problems
    assert "SM_LLAMA_CPP_THREADS and OPTION_LLAMA_SERVER_ARGS contradict each other" in str(problem)


def test_other_engines_name_the_one_that_passes_a_flag_on() -> None:
    (problem,) = read({**llama(SPEC_DRAFT_MODEL="/d.gguf"), "OPTION_LLM_ENGINE": "openvino"}).problems
    assert str(problem).endswith("the llamacpp engine passes it to llama-server (OPTION_LLM_ENGINE=llamacpp)")


def test_a_file_replaces_the_flags_with_a_warning(tmp_path: Path) -> None:
    (tmp_path / "serving.properties").write_text("option.llama_server_args=-t 8\n")
    environ = {**LLAMACPP, **llama(THREADS="2")}
    config = read_config(properties=tmp_path / "serving.properties", environ=environ).checked()
    assert config.engine_options["llama_server_args"] == ("-t", "8")
    assert "option.llama_server_args (environment variable SM_LLAMA_CPP_THREADS); option.llama_server" in "\n".join(
        config.warnings
    )


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "bin" / "llama-server"
    path.parent.mkdir()
    path.touch(0o755)
    return path


def test_the_variables_select_llamacpp_where_llama_server_is(program: Path) -> None:
    found = {"PATH": str(program.parent)}
    assert read({**found, **llama(CTX_SIZE="512")}).engine == "llamacpp"
    assert read({**found, "LLAMA_ARG_CTX_SIZE": "512"}).engine == "llamacpp"
    assert read({"OPTION_LLAMA_SERVER": str(program), **llama(CTX_SIZE="512")}).engine == "llamacpp"
    assert read({**found, **llama(CTX_SIZE="512"), "OPTION_LLM_ENGINE": "openvino"}).engine == "openvino"
    assert read({**found, **llama(CTX_SIZE="512")}, "option.llm_engine=vllm").engine == "vllm"
    assert read({"PATH": str(program.parent.parent), **llama(CTX_SIZE="512")}).engine == "openvino"
    assert read({"PATH": "", **llama(CTX_SIZE="512")}).engine == "openvino"
    assert read(found).engine == "openvino"
    assert read({**found, **sglang(TP="1")}).engine == "vllm"


@in_one_test("more", [{}, {"OPTION_LLM_ENGINE": "llamacpp"}, {"OPTION_OVERRIDE_GENERATION_CONFIG": '{"top_k": 3}'}])
def test_the_environment_of_a_container_is_translated_twice(program: Path, more: dict[str, str]) -> None:
    """First by the container, whose variables the server then reads beside the image's own."""
    variables = llama(MODEL="/m.gguf", THREADS="2", FLASH_ATTN="on", CTX_SIZE="4096", PARALLEL="2")
    environ = {"PATH": str(program.parent), **variables, **more}
    once, twice = read(environ), read(dict(translated_environment(environ).environ))
    assert (once.engine, once.problems) == ("llamacpp", ())
    assert (twice.engine, twice.problems) == ("llamacpp", ())
    for name in ("model_id", "max_model_len", "override_generation_config", "engine_options"):
        assert getattr(once.config, name) == getattr(twice.config, name), name


def test_each_flag_is_an_argument_that_the_engine_accepts() -> None:
    lines = {name: line for name, line in VARIABLES_OF["aws-llama-cpp"].items() if line.flag}
    assert len(lines) > 150
    words = sorted({line.flag for line in lines.values()})
    check_flags(EngineConfig(replace(read_config(environ={}).config, engine_options={"llama_server_args": words})))
    for name, line in lines.items():
        assert line.refused or line.idle, name
        assert line.answer == f"{line.otherwise}; the llamacpp engine passes it to llama-server"


# -- SGLang's own server at option.base_url ----------------------------------------------------------------------------

URL = {"OPTION_BASE_URL": "http://127.0.0.1:30000/v1"}


@in_one_test(
    ("environ", "wanted"),
    [
        (sglang(TP="2", DP="2", PORT="30000", SPECULATIVE_ALGORITHM="EAGLE", NNODES="2", DTYPE="half"), {}),
        (sglang(MODEL_PATH="a/b", CONTEXT_LENGTH="32k"), {"model_id": "a/b", "max_model_len": 32_000}),
        (sglang(TOOL_CALL_PARSER="qwen25", SERVED_MODEL_NAME="x"), {"tool_call_parser": "hermes"}),
        (sglang(PREFERRED_SAMPLING_PARAMS='{"top_k": 5}'), {"override_generation_config": {"top_k": 5}}),
    ],
)
def test_a_server_by_url_has_its_own_flags(environ: dict[str, str], wanted: dict[str, Any]) -> None:
    config = read({**URL, **environ}).checked()
    kind = config.engine_options["base_url_kind"]
    assert (config.engine, kind, config.openai_compat, config.replicas) == ("openai", "sglang", True, "1")
    assert {name: getattr(config, name) for name in wanted} == wanted
    told = "\n".join(config.warnings)
    for name in environ:
        idle = f"{name} has no effect here: the server at option.base_url has its own flags"
        assert (idle in told) is VARIABLES_OF["aws-sglang"][name].of_server


def test_a_server_by_url_is_of_the_kind_that_the_options_say() -> None:
    assert read({**sglang(TP="2"), "OPTION_BASE_URL": "grpc://127.0.0.1:1"}).engine == "grpc"
    config = read({**URL, **sglang(TP="2"), "OPTION_BASE_URL_KIND": "auto"}).checked()
    assert (config.engine, config.engine_options["base_url_kind"]) == ("openai", "auto")
    config = read({**sglang(TP="2"), "OPTION_LLM_ENGINE": "openai"}, "option.base_url=http://h:1").checked()
    assert (config.tensor_parallel_degree, config.engine_options["base_url_kind"]) == ("1", "auto")
    assert read({**URL, **sglang(TP="2"), "OPTION_LLM_ENGINE": "echo"}).config.tensor_parallel_degree == "2"


# -- the model of llama.cpp's image ------------------------------------------------------------------------------------


def _model(environ: dict[str, str]) -> str | None:
    return read(environ).checked().model_id


def test_the_first_file_of_the_directory_is_the_model(tmp_path: Path) -> None:
    below = tmp_path / "a"
    below.mkdir()
    for file in (tmp_path / "z.gguf", below / "a.gguf", tmp_path / ".b.gguf"):
        file.touch()
    assert _model(llama(MODEL_DIR=str(tmp_path))) == str(tmp_path / "z.gguf")
    (tmp_path / "z.gguf").unlink()
    assert _model(llama(MODEL_DIR=str(tmp_path))) == str(below / "a.gguf")
    data = {"SAGEMAKER_MODEL_PATH": str(tmp_path)}
    assert _model({**data, **llama(PORT="8080")}) == str(below / "a.gguf")
    assert _model({**data, **llama(MODEL="/m.gguf")}) == "/m.gguf"
    assert _model({**data, **llama(PORT="8080"), "HF_MODEL_ID": "a/b"}) == "a/b"
    assert _model({**data, **sglang(PORT="8080")}) is None
    (below / "a.gguf").unlink()
    assert _model(llama(MODEL_DIR=str(tmp_path))) == str(tmp_path)


# -- images.json -------------------------------------------------------------------------------------------------------


DATA = json.loads((files("handler.config.options") / "images.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("group", IMAGES)
def test_each_argument_has_one_line(group: str) -> None:
    image = DATA[group]
    names = [*image["lines"], *(name for kind in ("refused", "idle") for part in image[kind].values() for name in part)]
    assert sorted(set(names)) == sorted(names)
    assert all(
        line.keys() <= {"same", "field", "convert", "idle", "note", "refused", "unless"}
        for line in image["lines"].values()
    )


def test_each_reason_is_used() -> None:
    text = json.dumps({group: DATA[group] for group in IMAGES})
    assert [name for name in DATA["reasons"] if f'"@{name}"' not in text] == []


def test_the_reader_of_the_servers_arguments() -> None:
    source = """
class Model(Struct):
    model_path: A[str, Arg(help="x", aliases=["--model"])]
    ep_join_mode: A[str, Arg(cli_name="--elastic-ep-join-mode")] = None
    hidden: A[str, Arg(help="x", no_cli=True)] = ""
    fused: A[bool, Arg(action=argparse.BooleanOptionalAction)] = None
    plain: int = 1
parser.add_argument("--config", type=str)
"""
    flags = {"--model-path", "--model", "--elastic-ep-join-mode", "--fused", "--no-fused", "--config"}
    assert {*of_sglang(source)} == flags
    readme = "| `-c, --ctx-size N` | size<br/>(env: LLAMA_ARG_CTX_SIZE) |\n| `--jinja, --no-jinja` | whether |\n"
    pairs = [("--ctx-size", "LLAMA_ARG_CTX_SIZE"), ("--jinja", ""), ("--no-jinja", "")]
    assert [*of_llama_server(readme)] == pairs
    assert all(re.fullmatch("SM_LLAMA_CPP_[A-Z_]+", variable_of("SM_LLAMA_CPP_", flag)) for flag, _ in pairs)
