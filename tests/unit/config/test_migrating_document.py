"""`lmi options NAME` has an answer to every name of LMI, TGI, Triton and AWS's images, as docs/migrating/ says.

`python -m tests.unit.config.test_migrating_document` rewrites the table of Triton's parameters.
"""

from __future__ import annotations

from pathlib import Path

from deploy.data import table as triton
from handler.config.options import FOREIGN, OPTIONS
from handler.config.options.command_line import describe
from handler.config.options.engine_arguments import shipped
from handler.config.options.names import VARIABLES, find_option
from handler.config.options.option import OF_JAVA, Gone
from tests.docs.pages import fill, table

TRITON = Path(__file__).parents[3] / "docs" / "migrating" / "triton.md"
ENGINES_OWN, HAS_NONE = "supported: the engine's own", "refused: the engine has none"

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


def render() -> str:
    """Return the page about Triton with its generated part."""
    return fill(TRITON.read_text(), "parameters", _parameters())


def answers() -> dict[str, str]:
    """Return what becomes of each name, as `lmi options NAME` takes it."""
    options = {*_lmi(), *(f"option.{name}" for name in _vllm())}
    return {name: answer(name, "vllm") for name in options} | {name: line.otherwise for name, line in VARIABLES.items()}


def _lmi() -> set[str]:
    names = {*SERVER.split(), *(f"option.{name}" for name in LMI.split())}
    names |= {one.key for one in OPTIONS if "trtllm" in one.engines or one.of_java or not one.key.startswith("option.")}
    return names


def _parameters() -> str:
    """Return a table of the parameters of config.pbtxt that have another name here."""
    parameters = triton("triton")
    renamed = {name: option for name, option in parameters["same"].items() if f"option.{name}" != option}
    rows = ((f"`{name}`", f"`{option}`") for name, option in renamed.items())
    return table(("parameter", "here"), rows)


def _vllm() -> list[str]:
    """vLLM's arguments, of which some are no longer its own."""
    others = {one.key.removeprefix("option.") for one in FOREIGN if one.engines == ("vllm",)} - set(LMI.split())
    return sorted({*shipped("vllm").arguments, *shipped("vllm", "server").arguments, *DROPPED.split(), *others})


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


def test_the_document_is_up_to_date_in_migrating_document() -> None:
    assert TRITON.read_text() == render(), "`python -m tests.unit.config.test_migrating_document` writes it"


def test_lmi_options_answers_for_every_name() -> None:
    """The pages send readers there."""
    found = answers()
    assert len(found) > 1000
    told = {name: " ".join(describe(name).split()) for name in found}
    assert [name for name, text in told.items() if name not in text] == []
    reasons = {
        name: answer.partition(": ")[2]
        for name, answer in found.items()
        if answer.startswith("refused: ") and answer != HAS_NONE
    }
    assert [name for name, reason in reasons.items() if reason not in told[name]] == []


def test_every_parameter_of_triton_is_one_of_our_options() -> None:
    parameters = triton("triton")
    kinds = [parameters[kind].keys() for kind in ("same", "idle", "missing")]
    assert sum(map(len, kinds)) == len(set().union(*kinds))
    assert [name for name in parameters["same"].values() if answer(name, "trtllm").startswith(("refused", "no"))] == []


if __name__ == "__main__":
    TRITON.write_text(render())
