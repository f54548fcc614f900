"""Options of LMI, and arguments of vLLM, that this handler refuses or that have no effect here; a line each reason."""

from __future__ import annotations

from handler.config.options.common import LLM_ENGINES
from handler.config.options.option import Gone, Option

ENGINES = LLM_ENGINES[1:]
_VLLM = ("vllm",)


def _refused(why: str, *names: str, unless: tuple[str, ...] = (), engines: tuple[str, ...] = _VLLM) -> list[Option]:
    """Refuse options, also within option.engine_args; `unless` are values that are harmless."""
    parse = Gone(why, unless, argument=True)
    return [Option(f"option.{name}", name, parse, None, f"refused: {why}", engines=engines) for name in names]


def _idle(why: str, *names: str, engines: tuple[str, ...] = _VLLM) -> list[Option]:
    return [Option(f"option.{name}", None, str, None, why, engines=engines) for name in names]


_FALSE = ("false",)
_TEXT = "only text generation is served"
_IMAGES = "the model's own configuration says it"
_TOKENIZER = "the tokenizer is the one in the model's directory"
_SPECULATION = "say it in option.speculative_config"
_REPLICAS = "write option.replicas, which runs whole engines side by side (documents: scaling); they do not share a model's experts"
_MACHINE = (
    "one machine serves a model; for several, start a server on them and make it the engine (documents: engines-by-url)"
)
_SERVER = "this server takes no such part; a model.py's formatters change requests and answers"
_LOG = "LMI_LOG_LEVEL sets the log, option.log_prompts adds prompts to it"
_METRICS = "vLLM's own logs and metrics are not written here; see /metrics"
_SCHEDULER = "vLLM's scheduler has it no more"
_TENSORS = "answers do not carry it"
_NEURON = "AWS Neuron is not served"

NO_ARGUMENTS = ("allowed_media_domains", "allowed_local_media_path")
"""Arguments of vLLM's that are options of this server: it fetches what a request names."""

LMI = (
    *_refused("write option.quantize=bitsandbytes", "load_in_4bit", "load_in_8bit", unless=_FALSE, engines=ENGINES),
    *_refused(_MACHINE, "cluster_size", unless=("1",), engines=ENGINES),
    *_refused(_TEXT, "height", "width", "num_images_per_prompt", "use_auth_token", engines=ENGINES),
    *_refused("sessions lie in option.sessions_path alone", "sessions_s3url", engines=ENGINES),
    *_refused("set CUDA_VISIBLE_DEVICES in the environment", "device_id", unless=("-1",), engines=ENGINES),
    *_refused("write option.model_id", "s3url", engines=ENGINES),
    *_refused("answers in Bedrock's form are not made here; leave it out", "bedrock_compat", unless=_FALSE, engines=ENGINES),
    *_refused("option.tensor_parallel_degree spreads a model over GPUs", "device_map", unless=("auto",), engines=ENGINES),
    *_refused("write option.kv_transfer_config={\"kv_connector\": \"LMCacheConnectorV1\", \"kv_role\": \"kv_both\"}, and set LMCache by its own LMCACHE_* variables", "lmcache_auto_config", unless=_FALSE, engines=ENGINES),
    *_refused("write the adapter's base model into option.model_id, and put the adapter into the model's directory (documents: adapters)", "is_peft_model", unless=_FALSE, engines=ENGINES),
    *_refused("it is for LMI's scikit-learn and XGBoost handlers; the answers of a route have one type here", "default_accept", unless=("application/json",), engines=ENGINES),
    *_refused("write each argument of the engine as an option of its own (documents: options)", "kwargs", unless=("{}",), engines=ENGINES),
    *_refused(_NEURON, "neuron_optimize_level", "n_positions", "unroll", "load_split_model", "context_length_estimate", "amp", "compiled_graph_path", "draft_model_compiled_path", "save_mp_checkpoint_path", "group_query_attention", "model_loader", "rolling_batch_strategy", "fuse_qkv", "fuse_mlp", "on_device_embedding", "on_device_generation", "shard_over_sequence", "sequence_parallel", "override_neuron_config", "preloaded_model", "all_reduce_dtype", "attention_layout", "cache_layout", "cast_logits_dtype", "collectives_layout", "compilation_worker_count", "enable_mixed_precision_accumulation", "enable_saturate_infinity", "fused_rmsnorm_qkv", "mlp_out_weight_transpose", "multi_node", "neuron_cc_pipeline_factor", "neuron_quant", "partition_schema", "qkv_tiling", "sequence_parallel_norm_threshold", "weight_tiling", engines=ENGINES),
    *_refused("set LMCACHE_CONFIG_FILE in the environment", "lmcache_config_file", engines=ENGINES),
    *_idle(_IMAGES, "image_placeholder_token", engines=()),
    Option("translatorFactory", "translatorFactory", Gone(_TEXT), None, f"refused: {_TEXT}", engines=ENGINES),
    *_idle("every request joins a running batch at its next step", "waiting_steps", "paged_attention", "max_sparsity", "max_splits", "decoding_strategy", engines=()),
    *_idle("the engine chooses how it loads and computes", "low_cpu_mem_usage", "disable_flash_attn", engines=()),
    *_idle("LoRA adapters lie in the model's directory adapters (documents: adapters)", "adapters", engines=()),
    *_idle("the server reads it from each request's parameters", "max_new_tokens", engines=()),
    *_idle("speculation's statistics are not kept here", "speculative_telemetry", engines=()),
)  # fmt: skip
"""LMI's options for every engine, from djl_python's properties of 0.28 to 0.36."""

VLLM_OWN = (
    # the model and its tokenizer
    *_refused("write option.model_id", "model_weights"),
    *_refused(_TOKENIZER, "tokenizer", "tokenizer_revision", "io_processor_plugin"),
    *_refused(_TOKENIZER, "skip_tokenizer_init", unless=_FALSE),
    *_refused("set HF_TOKEN in the environment, which no log shows", "hf_token"),
    *_refused("set HF_HUB_CACHE in the environment", "download_dir"),
    *_refused("option.task says it", "runner", unless=("auto",)),
    *_refused("option.task says it", "convert", unless=("auto",)),
    *_refused("the model's sentence-transformers files say it", "pooler_config", "override_pooler_config"),
    *_refused("a prompt is a text or a chat", "enable_prompt_embeds", "tokens_only", unless=_FALSE),
    *_refused("the families are those of option.reasoning_parser", "reasoning_parser_plugin"),
    *_idle("option.reasoning_parser turns it on", "enable_reasoning"),
    *_refused("write option.default_chat_template_kwargs", "reasoning_effort_map"),
    *_refused("a message's parts are joined to one text", "chat_template_content_format", unless=("auto", "string")),
    *_refused("a request's template could end this process; write option.chat_template", "trust_request_chat_template", unless=_FALSE),
    *_idle(_IMAGES, "image_token_id", "image_input_shape", "image_feature_size"),
    *_refused("the engine gets images as pixels", "image_input_type", unless=("pixel_values",)),
    *_refused("this server decodes images itself (documents: images)", "media_io_kwargs"),
    *_refused("images come as files", "enable_mm_embeds", unless=_FALSE),
    *_refused("requests bring no arguments of the model's image processor", "trust_request_mm_kwargs", unless=_FALSE),
    # how much of the machine
    *_refused(_REPLICAS, "data_parallel_size", unless=("1",)),
    *_refused(_REPLICAS, "data_parallel_rank", "data_parallel_start_rank", "data_parallel_size_local", "data_parallel_address", "data_parallel_rpc_port", "data_parallel_supervisor_port"),
    *_refused(_REPLICAS, "data_parallel_hybrid_lb", "data_parallel_external_lb", "data_parallel_multi_port_external_lb", "enable_elastic_ep", "enable_scale_out", unless=_FALSE),
    *_refused(_MACHINE, "nnodes", unless=("1",)),
    *_refused(_MACHINE, "node_rank", unless=("0",)),
    *_refused(_MACHINE, "master_addr", "master_port"),
    *_refused("write job_queue_size", "max_num_queued_reqs", "max_num_queued_tokens"),
    *_refused("every token is sent when it is there", "stream_interval", unless=("1",)),
    # answers
    *_refused(_TENSORS, "enable_return_routed_experts", "return_sampling_mask", "return_tokens_as_token_ids", unless=_FALSE),
    *_refused(_TENSORS, "aux_output_config"),
    *_refused("answers come from the assistant", "response_role", unless=("assistant",)),
    *_refused("a request's tools say it by strict", "tool_strict_level", unless=("auto",)),
    *_refused("tools are given to the model whatever tool_choice says", "exclude_tools_when_tool_choice_none", unless=_FALSE),
    *_refused("write adapters into the model's directory, or register them (documents: adapters)", "lora_modules", "qlora_adapter_name_or_path"),
    *_refused("vLLM has no prompt adapters any more", "enable_prompt_adapter", "max_prompt_adapters", "max_prompt_adapter_token", "prompt_adapters", unless=_FALSE),
    *_refused("vLLM has no biases of LoRA adapters any more", "enable_lora_bias", unless=_FALSE),
    *_refused("vLLM has no long LoRA any more", "long_lora_scaling_factors"),
    # vLLM's own server
    *_refused("`lmi serve --host` and `--port` say it", "host", unless=("0.0.0.0",)),
    *_refused("`lmi serve --host` and `--port` say it", "port", unless=("8080",)),
    *_refused(_SERVER, "uds", "grpc_port", "middleware", "tool_server"),
    *_refused("a proxy before the server can cut off a path", "root_path"),
    *_refused("set LMI_API_KEY in the environment", "api_key"),
    *_refused("`lmi serve --ssl-certfile` and `--ssl-keyfile` say it", "ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers"),
    *_refused("`lmi serve --ssl-certfile` and `--ssl-keyfile` say it", "enable_ssl_refresh", unless=_FALSE),
    *_refused("`lmi serve --allow-origin` says it", "allowed_origins", "allowed_methods", "allowed_headers"),
    *_refused("`lmi serve --allow-origin` says it", "allow_credentials", unless=_FALSE),
    *_refused("a stream sends nothing between two tokens", "sse_keep_alive_interval", unless=("0",)),
    *_refused("vLLM's traces are not made here; write option.otlp_traces_endpoint for this server's", "collect_detailed_traces"),
    *_idle("requests may always bring tools", "enable_auto_tool_choice", "expand_tools_even_if_tool_choice_none"),
    *_idle(_LOG, "enable_log_requests", "disable_log_requests", "enable_log_outputs", "enable_log_deltas", "max_log_len", "uvicorn_log_level", "disable_uvicorn_access_log", "disable_access_log_for_endpoints", "log_error_stack", "aggregate_engine_logging"),
    *_idle(_METRICS, "show_hidden_metrics_for_version", "kv_cache_metrics", "kv_cache_metrics_sample", "cudagraph_metrics", "enable_mfu_metrics", "enable_mm_processor_stats", "per_request_spec_decode_metrics", "custom_histogram_buckets", "enable_server_load_tracking", "enable_per_request_metrics", "record_acceptance_rate", "disable_logprobs_during_spec_decoding"),
    *_idle("answers have what their API says", "enable_prompt_tokens_details", "enable_request_id_headers", "fingerprint_mode", "fingerprint_value", "enable_tokenizer_info_endpoint", "cohere_format", "cohere_is_reasoning_model", "anthropic_disabled_thinking_effort"),
    *_idle("this server has its own limits and documentation pages (documents: serving)", "h11_max_header_count", "h11_max_incomplete_event_size", "disable_fastapi_docs", "enable_offline_docs", "disable_frontend_multiprocessing", "renderer_num_workers", "enable_flash_late_interaction", "dp_supervisor_probe_interval_s", "dp_supervisor_probe_timeout_s", "dp_supervisor_probe_failure_threshold"),
    # what vLLM before 0.20 had
    *_idle(_SCHEDULER, "swap_space", "use_v2_block_manager", "num_lookahead_slots", "scheduler_delay_factor", "preemption_mode", "disable_async_output_proc", "multi_step_stream_outputs", "num_scheduler_steps"),
    *_idle("the handler's own tokenizer needs none", "tokenizer_pool_size", "tokenizer_pool_type", "tokenizer_pool_extra_config"),
    *_idle("vLLM takes no adapters with tokens of their own any more", "lora_extra_vocab_size"),
    *_idle("requests bring no logits processors", "logits_processor_pattern"),
    *_refused("write option.distributed_executor_backend=ray", "worker_use_ray", "engine_use_ray", unless=_FALSE),
    *_refused("write option.cudagraph_capture_sizes=[...]", "max_seq_len_to_capture", "max_context_len_to_capture", "cuda_graph_sizes"),
    *_refused("the checkpoint says it", "quantization_param_path"),
    *_refused("write option.hf_overrides={...}", "rope_scaling", "rope_theta"),
    *_refused("write option.structured_outputs_config={...}", "guided_decoding_disable_fallback", "guided_decoding_disable_any_whitespace", "guided_decoding_disable_additional_properties"),
    *_refused("write option.mm_processor_cache_gb=0", "disable_mm_preprocessor_cache", unless=_FALSE),
    *_refused("write option.mm_encoder_tp_mode=data", "enable_multimodal_encoder_data_parallel", unless=_FALSE),
    *_refused("write option.eplb_config={...}", "num_redundant_experts", "eplb_window_size", "eplb_step_interval", "eplb_log_balancedness"),
    *_refused(_SPECULATION, "speculative_model", "draft_model_id", "spec_length", "speculative_max_model_len", "ngram_prompt_lookup_max", "ngram_prompt_lookup_min", "speculative_draft_tensor_parallel_size", "speculative_disable_by_batch_size", "spec_decoding_acceptance_method", "typical_acceptance_sampler_posterior_threshold", "typical_acceptance_sampler_posterior_alpha", "speculative_model_quantization", "speculative_disable_mqa_scorer"),
    *_refused("say it in option.speculative_config as draft_tensor_parallel_size", "draft_model_tp_size"),
    *_refused("vLLM takes the device that its build is for", "device", unless=("auto",)),
)  # fmt: skip
"""Arguments of vLLM's EngineArgs and of its server that the handler owns, and those that vLLM dropped before 0.20."""
