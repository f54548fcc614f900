"""LMI's options for vLLM alone; foreign.json has those that vLLM dropped."""

from __future__ import annotations

from handler.config.options.engine_arguments import choice
from handler.config.options.option import Option, boolean, integer, json_object, number, one_of, path, string

_VLLM = ("vllm",)


def load_format(text: str) -> str:
    """Parse a format of the weights; vLLM checks its own names."""
    if text == "sagemaker_fast_model_loader":
        raise ValueError("only AWS's builds of vLLM in LMI's images up to v15 have it; leave it out")
    return string(text)


def _quantization(text: str) -> str:
    """Parse a quantization, also by LMI's names; an installed vLLM checks its own."""
    if text == "marlin":
        raise ValueError(
            "vLLM no longer reads checkpoints in Marlin's own format; serve a GPTQ or AWQ one, and leave it out: "
            "vLLM chooses the kernel"
        )
    return text if text in BITSANDBYTES.values() else choice("vllm", "quantization")(text)


BITSANDBYTES = {"load_in_4bit": "bitsandbytes4", "load_in_8bit": "bitsandbytes8"}
"""LMI's options for bitsandbytes, and what each is as a value of option.quantize."""

VLLM = (
    Option("option.guided_decoding", "guided_decoding", boolean, True, "accept structured output from clients (vllm.md)", engines=_VLLM),
    Option("option.gpu_memory_utilization", "gpu_memory_utilization", number(0.01, 1), None, "share of a GPU's memory for weights and KV cache", engines=_VLLM),
    Option("option.enforce_eager", "enforce_eager", boolean, None, "no CUDA graphs and no compilation: starts sooner, runs slower", engines=_VLLM),
    Option("option.load_format", "load_format", load_format, None, "format of the weights: auto, safetensors, dummy, runai_streamer, ...", engines=_VLLM),
    Option("option.kv_cache_dtype", "kv_cache_dtype", string, None, "precision of the KV cache: auto, fp8, ...", engines=_VLLM),
    Option("option.block_size", "block_size", integer(1), None, "tokens in a block of the KV cache", engines=_VLLM),
    Option("option.max_logprobs", "max_logprobs", integer(-1), -1, "largest number of alternatives to a token; -1: no limit", engines=_VLLM),
    Option("option.tokenizer_mode", "tokenizer_mode", one_of("auto", "hf", "mistral"), None, "vLLM's tokenizer: auto, hf, or mistral, Mistral's own (vllm.md)", engines=_VLLM),
    Option("option.quantize", "quantization", _quantization, None, "quantization, if the checkpoint does not name it: awq, gptq, fp8, bitsandbytes, ...", ("option.quantization",), engines=_VLLM),
    Option("option.load_in_4bit", "load_in_4bit", boolean, None, "option.quantize=bitsandbytes, by LMI's name", engines=_VLLM, harmless=("false",)),
    Option("option.load_in_8bit", "load_in_8bit", boolean, None, "the same; vLLM computes in 4 bits unless the checkpoint has 8", engines=_VLLM, harmless=("false",)),
    Option("option.cpu_offload_gb_per_gpu", "cpu_offload_gb", number(0), None, "GiB of weights kept in the host's memory, for each GPU", ("option.cpu_offload_gb",), engines=_VLLM),
    Option("option.disable_sliding_window", "disable_sliding_window", boolean, None, "attend to the whole context, even with a sliding-window model", engines=_VLLM),
    Option("option.disable_custom_all_reduce", "disable_custom_all_reduce", boolean, None, "use NCCL between GPUs", engines=_VLLM),
    Option("option.distributed_executor_backend", "distributed_executor_backend", one_of("mp", "ray", "uni", "external_launcher"), None, "executor for several GPUs or hosts", engines=_VLLM),
    Option("option.fully_sharded_loras", "fully_sharded_loras", boolean, None, "also spread LoRA computation over GPUs", engines=_VLLM),
    Option("option.lora_dtype", "lora_dtype", string, None, "precision of adapters", engines=_VLLM),
    Option("option.speculative_config", "speculative_config", json_object, None, "speculative decoding, by vLLM's names: {\"method\": \"ngram\", \"num_speculative_tokens\": 3, ...}", engines=_VLLM),
    Option("option.speculative_draft_model", "speculative_draft_model", string, None, "a draft model for speculative decoding (LMI)", engines=_VLLM),
    Option("option.num_speculative_tokens", "num_speculative_tokens", integer(1), None, "tokens that the draft model proposes at a time (LMI; default 5)", ("option.speculative_length",), engines=_VLLM),
    Option("option.draft_model_tp_size", "draft_model_tp_size", integer(1), None, "number of GPUs for the draft model (LMI; by default the model's)", ("option.speculative_draft_tensor_parallel_size",), engines=_VLLM, harmless=("1",)),
    Option("option.lmcache_config_file", "lmcache_config_file", path, None, "LMCache's own file of options (vllm.md); sets LMCACHE_CONFIG_FILE", engines=_VLLM),
    Option("option.lmcache_auto_config", "lmcache_auto_config", boolean, None, "true: LMCache keeps the KV cache in free memory and disk space (vllm.md)", engines=_VLLM, harmless=("false",)),
)  # fmt: skip
