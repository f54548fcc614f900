"""docs/migrating/: an answer to every name of LMI, TGI, Triton and AWS's images.

`python -m tests.unit.config.test_migrating_document` rewrites the tables.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from deploy.data import table
from handler.config.options import FOREIGN, IMAGES, OPTIONS, VARIABLES_OF
from handler.config.options.engine_arguments import shipped
from handler.config.options.names import VARIABLES, find_option
from handler.config.options.option import OF_JAVA, Gone
from tests.docs.pages import fill

DOCUMENTS = Path(__file__).parents[3] / "docs" / "migrating"
ENGINES = ("vllm", "trtllm")
ENGINES_OWN, HAS_NONE = "supported: the engine's own", "refused: the engine has none"
NEURON = "refused: AWS Neuron is not supported"
KINDS = {
    "supported": "Supported",
    "same as": "These also have other names",
    "left alone": "Read by others",
    "no effect": "No effect",
    "refused": "Refused",
}
MANY = ("No effect", "Refused")
PROTECTING = ("vllm", "sglang", "llama.cpp", "mindie", "djl")
"""Groups of variables that protect a server."""
_PAGE = re.compile(r"\(documentation: ([\w-]+)\)")
_LINK = r"([\1](../\1.md))"
OTHERS = "for other reasons, which `lmi options NAME` gives"
_INSTEAD = re.compile(r"\b(use|write|put) |^set |option\.|[A-Z]_[A-Z]|lmi serve|/metrics|leave it out|\(document")
NOTHING = ("", "-1", "-1.0", "0", "0.0", "1", "1.0", "auto", "false", "off", "disabled", "{}")
"""Values that change nothing. Some refused options and variables may have them, as the pages say."""

SERVER = """
engine job_queue_size batch_size max_batch_delay max_idle_time minWorkers maxWorkers load_on_devices retry_threshold
normalize pooling
"""
LMI = """
model_id entryPoint handler env pythonExecutable parallel_loading enable_venv mpi_mode model_loading_timeout
predict_timeout rolling_batch max_rolling_batch_size tensor_parallel_degree dtype trust_remote_code revision
output_formatter enable_streaming quantize max_rolling_batch_prefill_tokens max_model_len load_format enforce_eager
gpu_memory_utilization speculative_draft_model speculative_length draft_model_tp_size record_acceptance_rate
enable_lora max_loras max_lora_rank lora_extra_vocab_size max_cpu_loras device_map load_in_4bit load_in_8bit
low_cpu_mem_usage disable_flash_attn data_type task waiting_steps max_input_len max_output_len max_num_tokens
use_custom_all_reduce tokens_per_block batch_scheduler_policy kv_cache_free_gpu_mem_fraction max_num_sequences
enable_trt_overlap enable_kv_cache_reuse baichuan_model_version chatglm_model_version gpt_model_version
multi_block_mode use_fused_mlp rotary_base rotary_dim rotary_scaling_type rotary_scaling_factor awq_format
awq_calib_size q_format calib_size calib_batch_size calib_dataset smoothquant_alpha smoothquant_per_token
smoothquant_per_channel multi_query_mode use_fp8_context_fmha n_positions unroll load_split_model
context_length_estimate amp compiled_graph_path neuron_optimize_level s3url paged_attention max_sparsity max_splits
decoding_strategy
model_name pipeline_parallel_degree input_formatter tgi_compat bedrock_compat cluster_size async_mode
use_passive_workers
enable_chunked_prefill cpu_offload_gb_per_gpu enable_prefix_caching disable_sliding_window tokenizer_mode
fully_sharded_loras lora_dtype long_lora_scaling_factors max_logprobs limit_mm_per_prompt image_placeholder_token
speculative_telemetry draft_model_id spec_length enable_auto_tool_choice tool_call_parser enable_reasoning
reasoning_parser chat_template chat_template_content_format kv_transfer_config lmcache_config_file lmcache_auto_config
enable_stateful_sessions sessions_expiration sessions_path device preloaded_model override_neuron_config
max_output_size device_id sessions_s3url height width num_images_per_prompt use_auth_token amp compiled_graph_path
save_mp_checkpoint_path draft_model_compiled_path fuse_qkv fuse_mlp on_device_embedding on_device_generation
shard_over_sequence sequence_parallel sequence_parallel_norm_threshold group_query_attention model_loader
rolling_batch_strategy all_reduce_dtype attention_layout cache_layout cast_logits_dtype collectives_layout
compilation_worker_count enable_mixed_precision_accumulation enable_saturate_infinity fused_rmsnorm_qkv
mlp_out_weight_transpose multi_node neuron_cc_pipeline_factor neuron_quant partition_schema qkv_tiling weight_tiling
use_v2_block_manager generation_config download_dir served_model_name block_size is_peft_model default_accept kwargs
adapters max_new_tokens normalize pooling
"""
"""Options of LMI 0.28 and 0.36: djl_python's properties, and the guides of deepjavalibrary/djl-serving."""

DROPPED = """
quantization_param_path worker_use_ray use_v2_block_manager swap_space max_context_len_to_capture max_seq_len_to_capture
tokenizer_pool_size tokenizer_pool_type tokenizer_pool_extra_config lora_extra_vocab_size device num_lookahead_slots
image_input_type image_token_id image_input_shape image_feature_size scheduler_delay_factor guided_decoding_backend
speculative_model num_speculative_tokens speculative_max_model_len ngram_prompt_lookup_max ngram_prompt_lookup_min
engine_use_ray disable_log_requests rope_scaling rope_theta enable_prompt_adapter max_prompt_adapters
max_prompt_adapter_token long_lora_scaling_factors preemption_mode speculative_draft_tensor_parallel_size
speculative_disable_by_batch_size spec_decoding_acceptance_method typical_acceptance_sampler_posterior_threshold
typical_acceptance_sampler_posterior_alpha qlora_adapter_name_or_path disable_logprobs_during_spec_decoding
num_scheduler_steps multi_step_stream_outputs speculative_model_quantization speculative_disable_mqa_scorer
disable_async_output_proc override_neuron_config task disable_mm_preprocessor_cache enable_lora_bias
logits_processor_pattern override_pooler_config enable_reasoning cuda_graph_sizes num_redundant_experts eplb_window_size
eplb_step_interval eplb_log_balancedness guided_decoding_disable_fallback guided_decoding_disable_any_whitespace
guided_decoding_disable_additional_properties enable_multimodal_encoder_data_parallel enable_log_requests
prompt_adapters disable_frontend_multiprocessing expand_tools_even_if_tool_choice_none
"""
"""Arguments that vLLM 0.4.2 (LMI 0.28) to 0.19 had, and 0.20 has not."""


@functools.cache
def render() -> dict[Path, str]:
    """Each page with its generated parts."""
    parts = {
        "lmi": {"options": _lmi()},
        "README": {"variables": _variables(name for group in PROTECTING for name in VARIABLES_OF[group])},
        "tgi": {"variables": _tgi()},
        "aws-vllm": {"variables": _variables(VARIABLES_OF["aws-vllm"]), "arguments": _vllm()},
        "aws-sglang": {"variables": _of_image("aws-sglang", "sglang")},
        "aws-llama-cpp": {"variables": _of_image("aws-llama-cpp", "llama.cpp")},
        "triton": {"variables": _variables(VARIABLES_OF["triton"]), "parameters": _parameters()},
    }
    pages = {}
    for page, named in parts.items():
        path = DOCUMENTS / f"{page}.md"
        pages[path] = functools.reduce(lambda text, part: fill(text, *part), named.items(), path.read_text())
    return pages


def _lmi() -> str:
    names = {*SERVER.split(), *(f"option.{name}" for name in LMI.split())}
    names |= {one.key for one in OPTIONS if "trtllm" in one.engines or one.of_java or not one.key.startswith("option.")}
    return _by_answer(pair for name in sorted(names) for pair in _of_both(name) if pair[1] != NEURON)


def _of_both(name: str) -> Iterator[tuple[str, str]]:
    """Yield the name with what each engine does with it; marked where the other engine does something else."""
    with_vllm, with_trtllm = (answer(name, engine) for engine in ENGINES)
    if with_vllm == with_trtllm:
        yield _named(name, ENGINES[0]), with_vllm
        return
    yield f"{_named(name, 'vllm')} (vLLM)", with_vllm
    yield f"{_named(name, 'trtllm')} (TensorRT-LLM)", with_trtllm


def _named(name: str, engine: str) -> str:
    """Return the name, with the values that are not refused, where they are not just a default."""
    option = find_option(name, engine)
    return _except(name, option.parse.unless if option and isinstance(option.parse, Gone) else ())


def _except(name: str, values: Sequence[str]) -> str:
    values = [value for value in values if value not in NOTHING]
    return f"`{name}` (except {', '.join(f'`{value}`' for value in values)})" if values else f"`{name}`"


def _by_answer(answers: Iterable[tuple[str, str]]) -> str:
    """Return lists of the reasons with their names, by kind, without the names that work as documented elsewhere."""
    kinds: dict[str, dict[str, list[str]]] = {kind: {} for kind in KINDS}
    for name, answered in answers:
        if answered not in ("supported", ENGINES_OWN, HAS_NONE):
            kind = next(kind for kind in KINDS if answered.startswith(kind))
            kinds[kind].setdefault(answered.removeprefix(kind).lstrip(": "), []).append(name)
    return "\n".join(_list(KINDS[kind], reasons) for kind, reasons in kinds.items() if reasons)


def _list(title: str, reasons: dict[str, list[str]]) -> str:
    """Return the reasons with their names; rare ones that say nothing to write instead share a line."""
    rare = [reason for reason, names in reasons.items() if len(names) < 3 and not _INSTEAD.search(reason)]
    if title not in MANY or len(rare) < 3:
        rare = []
    rows = sorted((row for row in reasons.items() if row[0] not in rare), key=lambda row: (-len(row[1]), row[0]))
    if rare:
        rows.append((OTHERS, sorted(name for reason in rare for name in reasons[reason])))
    lines = (f"* **{_PAGE.sub(_LINK, reason)}:** {', '.join(names)}\n" for reason, names in rows)
    return f"{title}:\n\n" + "".join(lines)


def _tgi() -> str:
    others = {name for group in ("aws-vllm", "triton", *IMAGES, *PROTECTING) for name in VARIABLES_OF[group]}
    return _variables(VARIABLES.keys() - others)


def _variables(names: Iterable[str]) -> str:
    return _by_answer(
        (_except(name, VARIABLES[name].unless), VARIABLES[name]._replace(unless=()).otherwise) for name in sorted(names)
    )


def _of_image(group: str, protecting: str) -> str:
    """Return what becomes of every argument of an image's server, with the name of its variable."""
    lists = _variables([*VARIABLES_OF[group], *VARIABLES_OF[protecting]])
    if flags := sorted(name for name, line in VARIABLES_OF[group].items() if line.flag):
        passed = (
            f"The `llamacpp` engine passes these to llama-server as flags: {', '.join(f'`{name}`' for name in flags)}"
        )
        lists = (
            f"{passed}\n\nIf another engine serves the model, the lists below apply to these variables too.\n\n{lists}"
        )
    unknown = "The server ignores variables that are not listed, and logs their names when it starts."
    neutral = "A refused variable may have a value that changes nothing, such as `0`."
    if any(line.of_server for line in VARIABLES_OF[group].values()):
        kept = sorted(name for name, line in VARIABLES_OF[group].items() if not line.of_server)
        by_url = (
            f"With a server at `option.base_url`, only these have an effect: {', '.join(f'`{name}`' for name in kept)}"
        )
        lists = f"{by_url}\n\nThe lists below are for the `vllm` engine.\n\n{lists}"
    return f"The lists are for {IMAGES[group]}. {unknown} {neutral}\n\n{lists}"


def _parameters() -> str:
    """Return lists of the parameters of config.pbtxt, which `lmi deploy adopt` reads from the same table."""
    parameters = table("triton")
    templates = parameters["templates"]
    lists = []
    for kind, title in (("same", "Supported"), ("idle", "Without effect"), ("missing", "Missing")):
        reasons: dict[str, list[str]] = {}
        for name, reason in sorted(parameters[kind].items()):
            template = f" (template: `{templates[name]}`)" if name in templates else ""
            reasons.setdefault(f"`{reason}`" if kind == "same" else reason, []).append(f"`{name}`{template}")
        lists.append(_list(title, reasons))
    return "\n".join(lists)


def _vllm() -> str:
    return (
        f"The lists are for {shipped('vllm').source}, including arguments that vLLM dropped earlier. Other arguments "
        "work as in vLLM, if the installed release has them. `lmi options --engine vllm` prints them.\n\n"
        f"{_by_answer(_answered())}"
    )


def _answered() -> Iterator[tuple[str, str]]:
    others = {one.key.removeprefix("option.") for one in FOREIGN if one.engines == ("vllm",)} - set(LMI.split())
    for name in sorted({*shipped("vllm").arguments, *shipped("vllm", "server").arguments, *DROPPED.split(), *others}):
        if name not in _passed():
            yield _named(f"option.{name}", "vllm").replace("option.", "", 1), answer(f"option.{name}", "vllm")


def _passed() -> set[str]:
    names = shipped("vllm").arguments
    return {name for name in names if (option := find_option(f"option.{name}", "vllm")) and option.argument}


def answer(name: str, engine: str) -> str:
    """Say what an option does with an engine."""
    option = find_option(name, engine)
    assert option is not None, f"{name} has no answer"
    if isinstance(option.parse, Gone):
        return f"refused: {option.parse.reason}"
    if option.of_java:
        instead = option.help.removeprefix(OF_JAVA).replace("in the embedded server", "there")
        return f"no effect: DJL Serving reads it, not the embedded server{instead}"
    if option.argument:
        return ENGINES_OWN if engine in option.engines else HAS_NONE
    if option.field is None:
        return f"no effect: {option.help}"
    if option.engines and engine not in option.engines:
        return f"no effect: {option.idle}" if option.idle else HAS_NONE
    return "supported" if option.key == name else f"same as `{option.key}`"


@pytest.mark.parametrize("page", ["README", "lmi", "tgi", "aws-vllm", "aws-sglang", "aws-llama-cpp", "triton"])
def test_the_documents_are_up_to_date(page: str) -> None:
    path = DOCUMENTS / f"{page}.md"
    assert path.read_text() == render()[path], "`python -m tests.unit.config.test_migrating_document` writes it"


def test_every_refusal_is_in_the_documents() -> None:
    keys = [option.key for option in OPTIONS if isinstance(option.parse, Gone) and option.parse.answer != NEURON]
    text = "".join(render().values())
    assert keys
    assert [key for key in keys if f"`{key.removeprefix('option.')}`" not in text and f"`{key}`" not in text] == []


def test_every_parameter_of_triton_is_one_of_our_options() -> None:
    parameters = table("triton")
    kinds = [parameters[kind].keys() for kind in ("same", "idle", "missing")]
    assert sum(map(len, kinds)) == len(set().union(*kinds))
    assert [name for name in parameters["same"].values() if answer(name, "trtllm").startswith(("refused", "no"))] == []


if __name__ == "__main__":
    for page, text in render().items():
        page.write_text(text)
