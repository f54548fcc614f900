"""LMI's options for TensorRT-LLM alone; foreign.json has those of its former TensorRT engines.

`engines/trtllm/arguments.py` turns them into the arguments of `tensorrt_llm.LLM`.
"""

from __future__ import annotations

import json

from handler.config.options.option import Option, boolean, integer, names, number, one_of, string

_TRTLLM = ("trtllm",)


def policy(text: str) -> str:
    """Parse LMI's lower-case names of the scheduler's policies, or TensorRT-LLM's own."""
    return one_of("MAX_UTILIZATION", "GUARANTEED_NO_EVICT", "STATIC_BATCH")(text.upper())


def integers(text: str) -> list[int]:
    """Parse `[4096, 256]` or `4096,256`."""
    rule = "must be whole numbers of at least 1, separated by commas"
    try:
        values = json.loads(text if text.startswith("[") else f"[{text}]")
    except ValueError:
        raise ValueError(rule) from None
    if not values or not all(type(value) is int and value > 0 for value in values):
        raise ValueError(rule)
    return list(values)


def pytorch(text: str) -> str:
    if text != "pytorch":
        raise ValueError("must be pytorch: TensorRT engines are no longer built")
    return text


TRTLLM = (
    # lengths and sizes
    Option("option.max_output_len", "max_output_len", integer(1), None, "largest number of tokens in an answer; with option.max_input_len (then 1024 by default) it gives option.max_model_len", engines=_TRTLLM),
    Option("option.max_seq_len", "max_seq_len", integer(2), None, "option.max_model_len by TensorRT-LLM's name", engines=_TRTLLM),
    Option("option.max_num_tokens", "max_num_tokens", integer(16), None, "option.max_num_batched_tokens by TensorRT-LLM's name", engines=_TRTLLM),
    Option("option.max_beam_width", "max_beam_width", integer(1), None, "largest value of num_beams", engines=_TRTLLM),
    Option("option.stream_interval", "stream_interval", integer(1), None, "steps between two messages of a request's tokens", engines=_TRTLLM),
    Option("option.inactivity_timeout", "inactivity_timeout", number(0.1), 60.0, "seconds without progress after which the engine counts as hung (trtllm.md)", engines=_TRTLLM),
    # sampling
    Option("option.sampler_type", "sampler_type", one_of("auto", "TorchSampler", "TRTLLMSampler"), "auto", "before 1.3: TorchSampler or TRTLLMSampler (trtllm.md); auto: the latter with option.max_beam_width", engines=_TRTLLM),
    Option("option.gather_generation_logits", "gather_generation_logits", boolean, None, "allow requests for the answer's logits", engines=_TRTLLM),
    Option("option.disable_flashinfer_sampling", "disable_flashinfer_sampling", boolean, None, "TorchSampler without FlashInfer's kernels", engines=_TRTLLM),
    # the KV cache
    Option("option.kv_cache_free_gpu_mem_fraction", "free_gpu_memory_fraction", number(0, 1), None, "share of the GPU memory left after loading for the KV cache", ("option.free_gpu_memory_fraction",), engines=_TRTLLM),
    Option("option.tokens_per_block", "tokens_per_block", integer(1), None, "tokens in a block of the KV cache", engines=_TRTLLM),
    Option("option.max_tokens", "kv_cache_max_tokens", integer(1), None, "tokens in the whole KV cache", engines=_TRTLLM),
    Option("option.kv_cache_dtype", "kv_cache_dtype", string, None, "precision of the KV cache: auto, fp8, nvfp4", engines=_TRTLLM),
    Option("option.host_cache_size", "host_cache_size", integer(0), None, "bytes of host memory for blocks that do not fit on the GPU", engines=_TRTLLM),
    Option("option.max_attention_window", "max_attention_window", integers, None, "numbers of tokens that the layers attend to, separated by commas; repeated over the layers", engines=_TRTLLM),
    Option("option.sink_token_length", "sink_token_length", integer(0), None, "first tokens that stay within a sliding window", engines=_TRTLLM),
    Option("option.onboard_blocks", "onboard_blocks", boolean, None, "copy blocks back from the host's memory before use", engines=_TRTLLM),
    Option("option.cross_kv_cache_fraction", "cross_kv_cache_fraction", number(0, 1), None, "share of the KV cache for cross attention", engines=_TRTLLM),
    Option("option.secondary_offload_min_priority", "secondary_offload_min_priority", integer(0, 100), None, "lowest priority of blocks that go to the host's memory", engines=_TRTLLM),
    Option("option.event_buffer_max_size", "event_buffer_max_size", integer(0), None, "events of the KV cache to keep", engines=_TRTLLM),
    Option("option.enable_partial_reuse", "enable_partial_reuse", boolean, None, "also reuse a part of a block", engines=_TRTLLM),
    # scheduling and kernels
    Option("option.batch_scheduler_policy", "batch_scheduler_policy", policy, None, "max_utilization, guaranteed_no_evict or static_batch", ("option.capacity_scheduler_policy",), engines=_TRTLLM),
    Option("option.enable_trt_overlap", "enable_overlap_scheduler", boolean, None, "prepare a step while the GPU computes the previous one", ("option.enable_overlap_scheduler",), engines=_TRTLLM),
    Option("option.use_custom_all_reduce", "use_custom_all_reduce", boolean, None, "false: use NCCL for sums over GPUs", engines=_TRTLLM),
    Option("option.allreduce_strategy", "allreduce_strategy", string, None, "method of sums over GPUs: AUTO, NCCL, ONESHOT, TWOSHOT, ...", engines=_TRTLLM),
    Option("option.attn_backend", "attn_backend", string, None, "attention kernels: TRTLLM, FLASHINFER, VANILLA", engines=_TRTLLM),
    Option("option.moe_backend", "moe_backend", string, None, "kernels for mixtures of experts: CUTLASS, TRTLLM, ...", engines=_TRTLLM),
    Option("option.use_cuda_graph", "use_cuda_graph", boolean, None, "record the GPU's work once and replay it", engines=_TRTLLM),
    Option("option.cuda_graph_batch_sizes", "cuda_graph_batch_sizes", integers, None, "batch sizes to record, separated by commas", engines=_TRTLLM),
    Option("option.cuda_graph_max_batch_size", "cuda_graph_max_batch_size", integer(1), None, "the largest batch size to record", engines=_TRTLLM),
    Option("option.cuda_graph_padding_enabled", "cuda_graph_padding", boolean, None, "fill batches up to a recorded size", engines=_TRTLLM),
    Option("option.load_format", "load_format", one_of("auto", "dummy"), None, "dummy: random weights, to measure with", engines=_TRTLLM),
    Option("option.backend", "backend", pytorch, None, "pytorch, the only one", engines=_TRTLLM),
    # several GPUs
    Option("option.pipeline_parallel_size", "trtllm_pipeline_parallel_size", integer(1), None, "option.pipeline_parallel_degree by TensorRT-LLM's name", engines=_TRTLLM),
    Option("option.context_parallel_size", "context_parallel_size", integer(1), None, "GPUs for a long prompt", engines=_TRTLLM),
    Option("option.gpus_per_node", "gpus_per_node", integer(1), None, "GPUs of each machine", engines=_TRTLLM),
    Option("option.moe_tensor_parallel_size", "moe_tensor_parallel_size", integer(1), None, "GPUs for one expert", engines=_TRTLLM),
    Option("option.moe_expert_parallel_size", "moe_expert_parallel_size", integer(1), None, "GPUs for the experts", engines=_TRTLLM),
    Option("option.moe_cluster_parallel_size", "moe_cluster_parallel_size", integer(1), None, "GPU clusters for the experts", engines=_TRTLLM),
    Option("option.enable_attention_dp", "enable_attention_dp", boolean, None, "split attention by request instead of by head", engines=_TRTLLM),
    # adapters, statistics
    Option("option.lora_target_modules", "lora_target_modules", names, None, "modules that adapters change, separated by commas; by default those of attention and MLP", engines=_TRTLLM),
    Option("option.iter_stats_max_iterations", "iter_stats_max_iterations", integer(1), None, "steps whose statistics are kept", engines=_TRTLLM),
    Option("option.request_stats_max_iterations", "request_stats_max_iterations", integer(1), None, "steps whose request statistics are kept", engines=_TRTLLM),
    Option("option.usage_stats", "usage_stats", boolean, False, "let TensorRT-LLM 1.3 and later report its use to NVIDIA (trtllm.md)", engines=_TRTLLM),
)  # fmt: skip
