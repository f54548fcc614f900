"""From options to LLM's arguments, row by row; and that the double takes every one of them."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from handler.config.loader import read_config
from handler.config.options import OPTIONS
from handler.config.options.option import redacted
from handler.core.errors import ConfigError
from handler.engines.base import EngineConfig
from handler.engines.trtllm.arguments import capabilities_of, construct, llm_arguments, release_of, warn_of_newer
from handler.serving.engine import engine_spec
from tests.doubles import tiny, using


def arguments(model: Path, *options: str, gpus: int = 1, release: tuple[int, int] = (1, 2)) -> dict[str, Any]:
    """What `-o option.x=y` become."""
    return llm_arguments(config_of(model, *options), gpus, release)


@functools.cache  # each release is asked about the same ones
def config_of(model: Path, *options: str) -> EngineConfig:
    everything = (f"option.model_id={model}", "option.llm_engine=trtllm", *(f"option.{each}" for each in options))
    with using.tensorrt_llm():
        return engine_spec(read_config(overrides=everything, environ={}).checked()).config


PLAIN = {
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "dtype": "auto",
    "max_batch_size": 256,
    "max_seq_len": tiny.CONTEXT,
    "sampler_type": "TorchSampler",
}

ROWS: list[tuple[str, dict[str, Any]]] = [
    ("dtype=fp16", {"dtype": "float16"}),
    ("dtype=bf16", {"dtype": "bfloat16"}),
    ("dtype=fp32", {"dtype": "float32"}),
    ("tensor_parallel_degree=4", {"tensor_parallel_size": 4}),
    ("pipeline_parallel_degree=2", {"pipeline_parallel_size": 2}),
    ("pipeline_parallel_size=2", {"pipeline_parallel_size": 2}),
    ("max_rolling_batch_size=64", {"max_batch_size": 64}),
    ("max_model_len=300", {"max_seq_len": 300}),
    ("max_seq_len=300", {"max_seq_len": 300}),
    ("max_input_len=100", {"max_input_len": 100}),
    ("max_output_len=100", {"max_input_len": 1024, "max_seq_len": 1124}),
    ("max_num_batched_tokens=4096", {"max_num_tokens": 4096}),
    ("max_rolling_batch_prefill_tokens=4096", {"max_num_tokens": 4096}),
    ("max_num_tokens=4096", {"max_num_tokens": 4096}),
    ("max_beam_width=4", {"max_beam_width": 4, "sampler_type": "TRTLLMSampler"}),
    ("stream_interval=2", {"stream_interval": 2}),
    ("trust_remote_code=true", {"trust_remote_code": True}),
    ("enable_chunked_prefill=true", {"enable_chunked_prefill": True}),
    ("guided_decoding_backend=xgrammar", {"guided_decoding_backend": "xgrammar"}),
    ("gather_generation_logits=true", {"gather_generation_logits": True}),
    ("sampler_type=TRTLLMSampler", {"sampler_type": "TRTLLMSampler"}),
    ('engine_args={"sampler_type": "TRTLLMSampler"}', {"sampler_type": "TRTLLMSampler"}),
    ('engine_args={"max_beam_width": 4}', {"max_beam_width": 4, "sampler_type": "TRTLLMSampler"}),
    ('engine_args={"sampler_type": "auto"}', {}),
    ("disable_flashinfer_sampling=true", {"disable_flashinfer_sampling": True}),
    ("kv_cache_free_gpu_mem_fraction=0.8", {"kv_cache_config": {"free_gpu_memory_fraction": 0.8}}),
    ("free_gpu_memory_fraction=0.8", {"kv_cache_config": {"free_gpu_memory_fraction": 0.8}}),
    ("enable_kv_cache_reuse=false", {"kv_cache_config": {"enable_block_reuse": False}}),
    ("enable_prefix_caching=true", {"kv_cache_config": {"enable_block_reuse": True}}),
    ("kv_cache_gib=3", {"kv_cache_config": {"max_gpu_total_bytes": 3 << 30}}),
    ("tokens_per_block=64", {"kv_cache_config": {"tokens_per_block": 64}}),
    ("max_tokens=10000", {"kv_cache_config": {"max_tokens": 10000}}),
    ("kv_cache_dtype=fp8", {"kv_cache_config": {"dtype": "fp8"}}),
    ("host_cache_size=1000000", {"kv_cache_config": {"host_cache_size": 1000000}}),
    ("max_attention_window=4096,256", {"kv_cache_config": {"max_attention_window": [4096, 256]}}),
    ("max_attention_window=[4096]", {"kv_cache_config": {"max_attention_window": [4096]}}),
    ("sink_token_length=4", {"kv_cache_config": {"sink_token_length": 4}}),
    ("onboard_blocks=false", {"kv_cache_config": {"onboard_blocks": False}}),
    ("cross_kv_cache_fraction=0.5", {"kv_cache_config": {"cross_kv_cache_fraction": 0.5}}),
    ("secondary_offload_min_priority=30", {"kv_cache_config": {"secondary_offload_min_priority": 30}}),
    ("event_buffer_max_size=16", {"kv_cache_config": {"event_buffer_max_size": 16}}),
    ("enable_partial_reuse=false", {"kv_cache_config": {"enable_partial_reuse": False}}),
    ("batch_scheduler_policy=max_utilization", {"scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"}}),
    ("capacity_scheduler_policy=STATIC_BATCH", {"scheduler_config": {"capacity_scheduler_policy": "STATIC_BATCH"}}),
    ("enable_trt_overlap=false", {"disable_overlap_scheduler": True}),
    ("enable_overlap_scheduler=true", {"disable_overlap_scheduler": False}),
    ("use_custom_all_reduce=true", {}),
    ("use_custom_all_reduce=false", {"allreduce_strategy": "NCCL"}),
    ("allreduce_strategy=ONESHOT", {"allreduce_strategy": "ONESHOT"}),
    ("attn_backend=FLASHINFER", {"attn_backend": "FLASHINFER"}),
    ("moe_backend=TRTLLM", {"moe_config": {"backend": "TRTLLM"}}),
    ("use_cuda_graph=true", {}),
    ("use_cuda_graph=false", {"cuda_graph_config": None}),
    ("cuda_graph_batch_sizes=1,2,4", {"cuda_graph_config": {"batch_sizes": [1, 2, 4]}}),
    ("cuda_graph_max_batch_size=32", {"cuda_graph_config": {"max_batch_size": 32}}),
    ("cuda_graph_padding_enabled=true", {"cuda_graph_config": {"enable_padding": True}}),
    ("load_format=dummy", {"load_format": "dummy"}),
    ("backend=pytorch", {}),
    ("context_parallel_size=2", {"context_parallel_size": 2}),
    ("gpus_per_node=8", {"gpus_per_node": 8}),
    ("moe_tensor_parallel_size=2", {"moe_tensor_parallel_size": 2}),
    ("moe_expert_parallel_size=2", {"moe_expert_parallel_size": 2}),
    ("moe_cluster_parallel_size=2", {"moe_cluster_parallel_size": 2}),
    ("enable_attention_dp=true", {"enable_attention_dp": True}),
    ("iter_stats_max_iterations=10", {"iter_stats_max_iterations": 10}),
    ("request_stats_max_iterations=10", {"request_stats_max_iterations": 10}),
    ("inactivity_timeout=5", {}),
    ("usage_stats=true", {}),
    ('engine_args={"enable_min_latency": true}', {"enable_min_latency": True}),
    ('engine_args={"max_seq_len": 99}', {"max_seq_len": 99}),
    (
        'engine_args={"speculative_config": {"decoding_type": "NGram", "max_draft_len": 3}}',
        {"speculative_config": {"decoding_type": "NGram", "max_draft_len": 3}},
    ),
]
NOT_HERE = {
    "revision",
    "lora_target_modules",
    "max_loras",
    "max_lora_rank",
    "max_cpu_loras",
    "enable_lora",
    "adapters_root",
    "adapters_code",
    "lora_modules",
    "guide_timeout",
    "chat_template_content_format",
    "limit_mm_per_prompt",
}


@pytest.mark.parametrize(("option", "wanted"), ROWS, ids=[option for option, _ in ROWS])
def test_an_option_becomes_its_argument(model: Path, option: str, wanted: dict[str, Any]) -> None:
    assert arguments(model, option) == {"model": str(model), **PLAIN, **wanted}


NOT_IN = {
    "1.0.0": {"disable_flashinfer_sampling"},
    "1.1.0": {"disable_flashinfer_sampling"},
    "1.2.1": set(),
    "1.3.0rc29": {"disable_flashinfer_sampling", "moe_cluster_parallel_size", "onboard_blocks", "sampler_type"},
}


@pytest.mark.parametrize("version", NOT_IN)
def test_each_version_takes_an_options_argument_or_the_option_is_refused(model: Path, version: str) -> None:
    release = release_of(version)
    found, refused = [], set()
    for option, _ in ROWS:
        try:
            found.append(arguments(model, option, release=release))
        except ConfigError as error:
            says = re.fullmatch(r"option\.(\w+)\S*: TensorRT-LLM (\d\.\d|has only TorchSampler since) .*", str(error))
            refused.add(says and says[1])
    assert refused == NOT_IN[version]
    with using.tensorrt_llm(f"gpus=16;version={version}"):
        from tensorrt_llm.llm_args import checked

        for each in found:
            checked("LLM", construct(each))


@pytest.mark.parametrize("version", ["0.21.0", "0.9.0.dev2024022700", "unknown"])
def test_a_version_before_1_0_is_refused(version: str) -> None:
    with pytest.raises(ConfigError, match=f"TensorRT-LLM {version} is installed; the engine trtllm needs 1.0 to 1.3"):
        release_of(version)


@pytest.mark.parametrize(("version", "lines"), [("1.2.1", 0), ("1.3.0rc29", 0), ("1.4.0rc1", 1), ("2.0.0", 1)])
def test_a_newer_version_is_warned_of(version: str, lines: int, caplog: pytest.LogCaptureFixture) -> None:
    warn_of_newer(version)
    assert (
        caplog.text.count(f"TensorRT-LLM {version} is installed, but this engine was written for versions up to 1.3")
        == len(caplog.records)
        == lines
    )


def test_every_option_of_trtllm_is_in_the_table_or_refused() -> None:
    seen = {option.partition("=")[0] for option, _ in ROWS} | NOT_HERE
    for option in OPTIONS:
        names = {name.removeprefix("option.") for name in (option.key, *option.aliases)}
        if option.field and "trtllm" in option.engines and not option.help.startswith("refused"):
            assert names & seen, option.key


def test_what_tensorrt_engines_had_is_refused_by_name() -> None:
    had = [one for one in OPTIONS if one.help.startswith("refused") and "trtllm" in one.engines]
    assert len(had) > 100
    for option in had:
        with pytest.raises(ConfigError) as refused:
            read_config(overrides=["option.llm_engine=trtllm", f"{option.key}=x"], environ={}).checked()
        assert str(refused.value) == f"-o {redacted(f'{option.key}=x')}: {option.help.removeprefix('refused: ')}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("max_model_len=100", "max_seq_len=200"), "max_model_len=100 contradicts option.max_seq_len=200"),
        (("max_num_tokens=100", "max_num_batched_tokens=200"), "max_num_batched_tokens=200 contradicts"),
        (("pipeline_parallel_degree=2", "pipeline_parallel_size=4"), "contradicts option.pipeline_parallel_size=4"),
        (("guided_decoding_backend=outlines",), "the engine trtllm supports xgrammar and llguidance"),
        (
            ("max_beam_width=2", "sampler_type=TorchSampler"),
            "does not support option.max_beam_width before TensorRT-LLM 1.3",
        ),
        (
            ("max_beam_width=4", 'engine_args={"sampler_type": "TorchSampler"}'),
            "does not support option.max_beam_width before",
        ),
        (
            ("sampler_type=TorchSampler", 'engine_args={"max_beam_width": 4}'),
            "does not support option.max_beam_width before",
        ),
        (('engine_args={"model": "x"}',), "'model' cannot be changed there"),
        (('engine_args={"tokenizer": "x"}',), "'tokenizer' cannot be changed there"),
    ],
)
def test_what_does_not_go_together_is_refused(model: Path, options: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        arguments(model, *options)


@pytest.mark.parametrize(
    "option", ["backend=tensorrt", "batch_scheduler_policy=inflight", "max_attention_window=a", "max_attention_window=",
               "max_attention_window=0", "lora_target_modules=a,,b", "sampler_type=torch", "load_format=x"],
)  # fmt: skip
def test_a_wrong_value_is_refused(model: Path, option: str) -> None:
    with pytest.raises(ConfigError, match=f"-o option.{option.partition('=')[0]}="):
        arguments(model, option)


def test_all_gpus_are_shared_out(model: Path) -> None:
    assert arguments(model, "tensor_parallel_degree=max", gpus=8)["tensor_parallel_size"] == 8
    staged = arguments(model, "tensor_parallel_degree=max", "pipeline_parallel_degree=2", gpus=8)
    assert (staged["tensor_parallel_size"], staged["pipeline_parallel_size"]) == (4, 2)
    assert arguments(model, "tensor_parallel_degree=max", gpus=0)["tensor_parallel_size"] == 1


def test_adapters_come_with_their_limits(model: Path) -> None:
    found = arguments(model, "enable_lora=true", "max_loras=2", "max_lora_rank=32", "max_cpu_loras=9")
    assert found["enable_lora"]
    limits = {name: found["lora_config"][name] for name in ("max_loras", "max_lora_rank", "max_cpu_loras")}
    assert limits == {"max_loras": 2, "max_lora_rank": 32, "max_cpu_loras": 9}
    assert "attn_q" in found["lora_config"]["lora_target_modules"]
    named = arguments(model, "enable_lora=true", "lora_target_modules=attn_q, attn_v")
    assert named["lora_config"]["lora_target_modules"] == ["attn_q", "attn_v"]
    assert "lora_config" not in arguments(model, "max_loras=2")
    with using.tensorrt_llm():
        built = construct(found)
        assert type(built["lora_config"]).__name__ == "LoraConfig"


def test_adapters_by_the_engines_own_arguments_keep_the_options_limits(model: Path) -> None:
    for more, rank in (({"enable_lora": True}, 16), ({"lora_config": {"max_lora_rank": 64}}, 64)):
        found = arguments(model, f"engine_args={json.dumps(more)}")["lora_config"]
        assert (found["max_lora_rank"], found["max_loras"]) == (rank, 4)
        assert "attn_q" in found["lora_target_modules"]


def test_arguments_of_the_engines_own_come_last_and_go_into_what_is_there(model: Path) -> None:
    more = json.dumps({"kv_cache_config": {"tokens_per_block": 16}, "max_batch_size": 3, "enable_sleep": True})
    found = arguments(model, "enable_prefix_caching=false", "tokens_per_block=64", f"engine_args={more}")
    assert found["kv_cache_config"] == {"enable_block_reuse": False, "tokens_per_block": 16}
    assert (found["max_batch_size"], found["enable_sleep"]) == (3, True)


@pytest.mark.parametrize(
    ("release", "wanted", "sampler"),
    [
        ((1, 0), "auto", {"enable_trtllm_sampler": False, "enable_mixed_sampler": True}),
        ((1, 0), "TRTLLMSampler", {"enable_trtllm_sampler": True, "enable_mixed_sampler": False}),
        ((1, 1), "auto", {"sampler_type": "TorchSampler"}),
        ((1, 2), "TRTLLMSampler", {"sampler_type": "TRTLLMSampler"}),
        ((1, 3), "auto", {}),
        ((1, 3), "TorchSampler", {}),
    ],
)
def test_the_sampler_is_named_as_each_version_has_it(
    model: Path, release: tuple[int, int], wanted: str, sampler: dict[str, Any]
) -> None:
    found = arguments(model, f"sampler_type={wanted}", release=release)
    assert {name: value for name, value in found.items() if "sampler" in name} == sampler


def test_1_0_is_told_of_no_sampler_that_cannot_search_beams(model: Path) -> None:
    args = json.dumps({"enable_trtllm_sampler": False})
    with pytest.raises(ConfigError, match=r"does not support option\.max_beam_width before TensorRT-LLM 1\.3"):
        arguments(model, "max_beam_width=4", f"engine_args={args}", release=(1, 0))


def test_the_length_that_the_engine_is_told_is_the_one_we_check(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert llm_arguments(EngineConfig(model=tmp_path), 1)["max_seq_len"] == 2048  # the model does not say
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"max_position_embeddings": 77}}))
    assert llm_arguments(EngineConfig(model=tmp_path), 1)["max_seq_len"] == 77
    (tmp_path / "config.json").write_text(json.dumps({"text_config": 5}))
    with pytest.raises(ConfigError, match=r"config\.json: text_config must be an object"):
        llm_arguments(EngineConfig(model=tmp_path), 1)


PENALTIES = {"repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram_size", "seed"}
UNLESS_ASKED = {"typical_p", "num_beams", "structured_output", "return_generation_logits"}


@pytest.mark.parametrize(
    ("release", "options", "lacks"),
    [
        (
            (1, 0),
            (),
            UNLESS_ASKED
            | PENALTIES
            | {"bad_sequences", "cache_salt", "min_p", "prompt_logprobs", "return_context_logits"},
        ),
        ((1, 1), ("enable_prefix_caching=false",), UNLESS_ASKED | PENALTIES | {"bad_sequences", "cache_salt", "min_p"}),
        ((1, 2), (), UNLESS_ASKED | PENALTIES | {"bad_sequences"}),
        ((1, 2), ("sampler_type=TRTLLMSampler",), UNLESS_ASKED | {"top_logprobs", "best_of"}),
        ((1, 2), ("max_beam_width=2",), UNLESS_ASKED - {"num_beams"} | {"top_logprobs", "best_of"}),
        ((1, 3), (), UNLESS_ASKED | {"bad_sequences"}),
        ((1, 3), ("max_beam_width=2",), UNLESS_ASKED - {"num_beams"} | {"bad_sequences"}),
        ((1, 3), ("guided_decoding_backend=llguidance",), UNLESS_ASKED - {"structured_output"} | {"bad_sequences"}),
        ((1, 3), ("max_model_len=9000",), UNLESS_ASKED | {"bad_sequences", "thinking_token_budget"}),
        ((1, 3), ("max_model_len=9000", "enable_chunked_prefill=true"), UNLESS_ASKED | {"bad_sequences"}),
        (
            (1, 3),
            ("gather_generation_logits=true",),
            UNLESS_ASKED - {"return_generation_logits"} | {"bad_sequences"},
        ),
    ],
)
def test_what_a_version_cannot_do_is_known_before_it_is_asked(
    model: Path, release: tuple[int, int], options: tuple[str, ...], lacks: set[str]
) -> None:
    found = capabilities_of(arguments(model, *options, release=release), release)
    assert set(found.reasons) == lacks
    assert found.sampling_defaults == {"top_k": 5, "top_p": 0.85, "temperature": 0.8}
    assert "enable_lora" in found.no_adapters


@pytest.mark.parametrize(
    ("release", "backend", "styles"),
    [((1, 1), "xgrammar", set()), ((1, 2), "xgrammar", {"json"}), ((1, 3), "llguidance", set()), ((1, 3), "", set())],
)
def test_structural_tags_are_xgrammars_in_arguments(
    model: Path, release: tuple[int, int], backend: str, styles: set[str]
) -> None:
    options = [f"guided_decoding_backend={backend}"] if backend else []
    found = capabilities_of(arguments(model, *options, release=release), release)
    assert found.structural_tags == styles
