"""Our options as vLLM's arguments, without vLLM."""

from __future__ import annotations

import importlib.util
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from handler.config.config import Config
from handler.config.loader import read_config
from handler.config.options import OPTIONS
from handler.core.errors import ConfigError
from handler.engines.base import EngineConfig, override
from handler.engines.vllm import arguments as lmcache
from handler.engines.vllm.arguments import engine_arguments, environment
from handler.engines.vllm.engine import capabilities
from tests.one_test import in_one_test

# -- what our options become as vLLM's arguments, without vLLM ---------------------------------------------------------


CONFIG = EngineConfig(Config(max_rolling_batch_size=7), model=Path("model"))


def config_with(**options: Any) -> EngineConfig:
    return replace(CONFIG, options=replace(CONFIG.options, **options))


# An option as serving.properties writes it, and what it adds to vLLM's arguments.
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "option.trust_remote_code": ("true", {"trust_remote_code": True}),
    "option.revision": ("main", {}),  # the directory that is loaded is that revision's
    "option.pipeline_parallel_degree": ("2", {"pipeline_parallel_size": 2}),
    "option.enable_chunked_prefill": ("false", {"enable_chunked_prefill": False}),
    "option.enable_lora": ("true", {"enable_lora": True, "max_loras": 4, "max_lora_rank": 16}),
    "option.limit_mm_per_prompt": ('{"image": 2}', {"limit_mm_per_prompt": {"image": 2}}),
    "option.lora_modules": ("a=/adapters/a", {}),  # the server loads them
    "option.max_loras": ("2", {}),  # with enable_lora only
    "option.max_cpu_loras": ("8", {}),
    "option.max_lora_rank": ("64", {}),
    "option.guided_decoding": ("false", {}),  # we refuse them
    "option.guide_timeout": ("2", {}),  # ours
    "option.guided_decoding_backend": ("guidance", {"structured_outputs_config": {"backend": "guidance"}}),
    "option.engine_args": ('{"seed": 5, "max_num_seqs": 9}', {"seed": 5, "max_num_seqs": 9}),
    "option.gpu_memory_utilization": ("0.8", {"gpu_memory_utilization": 0.8}),
    "option.enforce_eager": ("true", {"enforce_eager": True}),
    "option.load_format": ("dummy", {"load_format": "dummy"}),
    "option.kv_cache_dtype": ("fp8", {"kv_cache_dtype": "fp8"}),
    "option.block_size": ("32", {"block_size": 32}),
    "option.max_logprobs": ("5", {"max_logprobs": 5}),
    "option.tokenizer_mode": ("hf", {"tokenizer_mode": "hf"}),
    "option.quantize": ("awq", {"quantization": "awq"}),
    "option.load_in_4bit": ("true", {"quantization": "bitsandbytes"}),
    "option.load_in_8bit": ("TRUE", {"quantization": "bitsandbytes"}),
    "option.cpu_offload_gb_per_gpu": ("1.5", {"cpu_offload_gb": 1.5}),
    "option.disable_sliding_window": ("true", {"disable_sliding_window": True}),
    "option.disable_custom_all_reduce": ("true", {"disable_custom_all_reduce": True}),
    "option.distributed_executor_backend": ("ray", {"distributed_executor_backend": "ray"}),
    "option.fully_sharded_loras": ("true", {"fully_sharded_loras": True}),
    "option.lora_dtype": ("bfloat16", {"lora_dtype": "bfloat16"}),
    "option.speculative_config": ('{"method": "ngram"}', {"speculative_config": {"method": "ngram"}}),
    "option.speculative_draft_model": (
        "draft",
        {"speculative_config": {"model": "draft", "num_speculative_tokens": 5}},
    ),
}


def arguments(*overrides: str) -> dict[str, Any]:
    config = read_config(overrides=["option.llm_engine=vllm", *overrides], environ={}).checked()
    return engine_arguments(config_with(engine_options=config.engine_options), 1, cpu=True)


PLAIN = arguments()


def test_the_defaults() -> None:
    assert PLAIN == {
        "model": "model",
        "dtype": "auto",
        "max_num_seqs": 7,
        "tensor_parallel_size": 1,
        "disable_log_stats": False,
        "generation_config": "auto",
        "trust_remote_code": False,
        "enable_lora": False,
        "max_logprobs": -1,
        "worker_extension_cls": "handler.engines.vllm.cpu_worker.Extension",
    }
    assert engine_arguments(config_with(), 1, cpu=False).keys().isdisjoint({"worker_extension_cls", "seed"})
    assert arguments('option.engine_args={"worker_extension_cls": "own"}')["worker_extension_cls"] == "own"


def test_every_option_of_vllm_has_its_row_or_is_refused() -> None:
    refused = set()
    for option in OPTIONS:
        if "vllm" in option.engines and option.help.startswith("refused: "):
            with pytest.raises(ConfigError, match=option.key):
                arguments(f"{option.key}=x")
            refused.add(option.key)
    rest = {option.key for option in OPTIONS if option.field and "vllm" in option.engines} - refused
    elsewhere = {
        "adapters_code",
        "adapters_root",
        "lmcache_config_file",
        "lmcache_auto_config",
        "chat_template_content_format",
        "num_speculative_tokens",
        "draft_model_tp_size",
    }
    assert rest == set(ROWS) | {f"option.{name}" for name in elsewhere}


@in_one_test("key", ROWS)
def test_an_option_becomes_an_argument(key: str) -> None:
    text, added = ROWS[key]
    assert arguments(f"{key}={text}") == {**PLAIN, **added}


def test_what_belongs_together() -> None:
    lora = arguments(
        "option.enable_lora=true", "option.max_loras=2", "option.max_cpu_loras=8", "option.max_lora_rank=64"
    )
    assert (lora["max_loras"], lora["max_cpu_loras"], lora["max_lora_rank"]) == (2, 8, 64)
    draft = arguments("option.speculative_draft_model=d", "option.num_speculative_tokens=2")
    assert draft["speculative_config"] == {"model": "d", "num_speculative_tokens": 2}
    with pytest.raises(ConfigError, match=r"needs option\.speculative_draft_model"):
        arguments("option.num_speculative_tokens=2")
    with pytest.raises(ConfigError, match="cannot be combined"):
        arguments("option.speculative_draft_model=d", 'option.speculative_config={"model": "d"}')


@pytest.mark.parametrize("bits", [4, 8])
def test_lmis_names_of_bitsandbytes(bits: int) -> None:
    own, option = f"option.quantize=bitsandbytes{bits}", f"option.load_in_{bits}bit=true"
    for lines in ([own], [own, option], [option, "option.quantize=bitsandbytes"]):
        assert arguments(*lines) == {**PLAIN, "quantization": "bitsandbytes"}
    assert arguments(f"option.load_in_{bits}bit=False") == PLAIN
    for other in ("awq", f"bitsandbytes{12 - bits}"):
        with pytest.raises(ConfigError, match=rf"load_in_{bits}bit and option.quantize={other} contradict"):
            arguments(option, f"option.quantize={other}")


def test_4_and_8_bits_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match=r"option\.load_in_4bit and option\.load_in_8bit contradict each other"):
        arguments("option.load_in_4bit=true", "option.load_in_8bit=true")


def test_what_all_engines_have() -> None:
    config = config_with(
        dtype="fp32",
        max_num_batched_tokens=64,
        max_model_len=512,
        enable_prefix_caching=False,
        tensor_parallel_degree="max",
    )
    found = engine_arguments(config, 4, cpu=True)
    assert found["dtype"] == "float32"
    assert (found["max_num_batched_tokens"], found["max_model_len"]) == (64, 512)
    assert (found["enable_prefix_caching"], found["tensor_parallel_size"]) == (False, 4)
    assert engine_arguments(config_with(tensor_parallel_degree="2"), 4, cpu=True)["tensor_parallel_size"] == 2


@pytest.mark.parametrize("without", [True, False])
def test_vllms_statistics_can_be_left_out(without: bool) -> None:
    given = json.dumps({"disable_log_stats": without})
    assert arguments(f"option.engine_args={given}") == {**PLAIN, "disable_log_stats": without}


def test_further_arguments_override_single_settings_but_not_the_model() -> None:
    more = 'option.engine_args={"structured_outputs_config": {"disable_any_whitespace": true}, "enable_lora": true}'
    found = arguments("option.guided_decoding_backend=xgrammar", more)
    assert found["structured_outputs_config"] == {"backend": "xgrammar", "disable_any_whitespace": True}
    assert found["enable_lora"]
    with pytest.raises(ConfigError, match="'model' cannot be set there"):
        arguments('option.engine_args={"model": "other"}')
    own = {"reasoning_parser": "qwen3"}
    for more in (f"engine_args={json.dumps(own)}", f"structured_outputs_config={json.dumps(own)}"):
        with pytest.raises(ConfigError, match=r"use option\.reasoning_parser"):
            arguments(f"option.{more}")


def test_the_cache_is_the_gpus_by_argument_and_the_cpus_by_environment() -> None:
    small = config_with(kv_cache_gib=2)
    assert engine_arguments(small, 1, cpu=False)["kv_cache_memory_bytes"] == 2 << 30
    assert "kv_cache_memory_bytes" not in engine_arguments(small, 1, cpu=True)
    space = "VLLM_CPU_KVCACHE_SPACE"
    assert environment(small, {space: "7"})[space] == "2"
    assert environment(CONFIG, {space: "7"})[space] == "7"
    assert environment(CONFIG, {})[space] == "4"
    shared = config_with(engine_options={"gpu_memory_utilization": 0.5})
    assert space not in environment(shared, {})
    assert environment(CONFIG, {"VLLM_LOGGING_LEVEL": "DEBUG"})["VLLM_LOGGING_LEVEL"] == "DEBUG"


def test_adapters_are_served_however_they_were_asked_for() -> None:
    assert capabilities(CONFIG).no_adapters
    assert not capabilities(config_with(engine_options={"enable_lora": True})).no_adapters
    assert not capabilities(config_with(engine_options={"engine_args": {"enable_lora": True}})).no_adapters


def test_guides_can_be_switched_off() -> None:
    assert "structured_output" not in capabilities(CONFIG).unsupported
    assert "structured_output" in capabilities(config_with(engine_options={"guided_decoding": False})).unsupported


@pytest.mark.parametrize(
    ("version", "options", "styles"),
    [
        ("0.2.8", {}, {"json", "qwen_xml", "minimax_xml", "deepseek_xml", "glm_xml"}),
        (
            "0.2.8",
            {"guided_decoding_backend": "xgrammar"},
            {"json", "qwen_xml", "minimax_xml", "deepseek_xml", "glm_xml"},
        ),
        ("0.1.25", {}, {"json"}),
        ("0.1.24", {}, set()),
        ("0.2.8", {"guided_decoding_backend": "guidance"}, set()),
        ("0.2.8", {"structured_outputs_config": {"backend": "outlines"}}, set()),
        ("", {}, set()),
    ],
)
def test_structural_tags_are_xgrammars_in_vllm_arguments(
    version: str, options: dict[str, Any], styles: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("handler.engines.vllm.sampling.find_spec", lambda name: name if version else None)
    monkeypatch.setattr("handler.engines.structured_output.xgrammar.version", lambda name: version)
    assert capabilities(config_with(engine_options=options)).structural_tags == styles


# -- lMCache's variables and vLLM's connector, by LMI's two options ----------------------------------------------------


AUTO, FILE = "option.lmcache_auto_config=true", "option.lmcache_config_file=cache.yaml"


def config(*overrides: str, properties: Path | None = None, model: Path | None = None) -> EngineConfig:
    lines = ["option.llm_engine=vllm", *overrides]
    return EngineConfig(read_config(properties=properties, overrides=lines, environ={}).checked(), model)


def lmcache_arguments(given: EngineConfig) -> dict[str, Any]:
    return engine_arguments(given, 4, cpu=False)


def test_a_file_lies_beside_serving_properties_or_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    properties, model = tmp_path / "serving.properties", tmp_path / "model"
    properties.write_text("")
    model.mkdir()
    (model / "cache.yaml").write_text("chunk_size: 256\n")
    for given in (config(FILE, properties=properties, model=model), config(FILE, model=model)):
        assert "kv_transfer_config" not in lmcache_arguments(given)
        found = lmcache.lmcache_environment(given, {"LMCACHE_CONFIG_FILE": "other"}, 1)
        assert found == {"LMCACHE_CONFIG_FILE": str(model / "cache.yaml")}
    shutil.move(model / "cache.yaml", tmp_path / "cache.yaml")
    beside = lmcache.lmcache_environment(config(FILE, properties=properties, model=model), {}, 1)
    assert beside == {"LMCACHE_CONFIG_FILE": str(tmp_path / "cache.yaml")}
    monkeypatch.chdir(tmp_path)
    assert lmcache.lmcache_environment(config(FILE), {}, 1) == beside


class Usage(NamedTuple):
    free: int


def test_by_itself_it_takes_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.safetensors").write_bytes(bytes(1000))
    (tmp_path / "b.bin").write_bytes(bytes(10))
    (tmp_path / "memory").write_text(f"MemTotal: 9 kB\nMemAvailable: {100 << 20} kB\n")
    monkeypatch.setattr(lmcache, "_MEMORY", tmp_path / "memory")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(500 << 30))
    given = config(AUTO, model=tmp_path)
    assert lmcache_arguments(given)["kv_transfer_config"] == {
        "kv_connector": "LMCacheConnectorV1",
        "kv_role": "kv_both",
    }
    assert lmcache.lmcache_environment(given, {"LMCACHE_LOCAL_DISK": "file:///mine/"}, 4) == {
        "LMCACHE_MAX_LOCAL_CPU_SIZE": "20",  # four fifths of 100 GiB, for each of four workers
        "LMCACHE_MAX_LOCAL_DISK_SIZE": "100",
        "LMCACHE_LOCAL_DISK": "file:///mine/",
        "LMCACHE_ENABLE_LAZY_MEMORY_ALLOCATOR": "true",
        "LMCACHE_EXTRA_CONFIG": '{"use_odirect": true}',
        "PYTHONHASHSEED": "0",
    }


def test_large_weights_leave_less() -> None:
    assert [lmcache._share(100 << 30, weights << 30, 2) for weights in (0, 10, 40, 60)] == [40, 40, 10, 0]


def test_without_the_options_nothing_is_set() -> None:
    assert lmcache.lmcache_environment(config("option.lmcache_auto_config=false"), {}, 1) == {}
    assert "kv_transfer_config" not in lmcache_arguments(config("option.lmcache_auto_config=false"))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            [FILE],
            r"^-o option.lmcache_config_file=cache.yaml: there is no such file$",
        ),
        ([AUTO, FILE], "cannot be combined"),
        ([AUTO, "option.enable_expert_parallel=true"], "option.enable_expert_parallel=true"),
        ([AUTO, "option.replicas=2"], "option.replicas=1"),
    ],
)
def test_what_cannot_be_is_refused(lines: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lmcache_arguments(config(*lines))


def test_a_missing_package_is_named_in_vllm_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "vllm" or None)
    with pytest.raises(ConfigError, match="pip install lmcache"):
        lmcache_arguments(config(AUTO))


def test_what_the_engine_sets_leaves_a_users_keys_beside_it() -> None:
    own = arguments('option.engine_args={"hf_overrides": {"rope_theta": 1.0, "problem_type": "x"}}')
    overridden = override(own, {"runner": "pooling", "hf_overrides": {"problem_type": "regression"}})
    assert overridden["hf_overrides"] == {"rope_theta": 1.0, "problem_type": "regression"}
    assert overridden["runner"] == "pooling"
