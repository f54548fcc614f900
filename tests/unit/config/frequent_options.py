"""The options that stand most often in LMI's own test configurations, each with a value of them, and its effect here.

Counted in the 892 configurations that the builders of LMI 0.28, 0.29, 0.36 and its main branch write, each builder for
each of its models, without those of AWS Neuron; most frequent first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

_NOTE = "no effect, with one line, as in LMI"
_ADAPTERS = ("option.enable_lora=true",)
_DYNAMIC = ("option.rolling_batch=disable",)
_LMCACHE = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
_EAGLE = {"method": "eagle", "model": "org/draft", "num_speculative_tokens": 4}


class Row(NamedTuple):
    """An option and what it changes.

    Attributes:
        name, value: as serving.properties writes them.
        meaning: for the documents.
        changes: fields of `Config`, `engine`, and vLLM's arguments as `vllm.NAME`, with their values.
        beside: the lines that the option needs.
        warning: words of the line that it logs; "" where it logs none.
        image: what the image names as the engine.
    """

    name: str
    value: str
    meaning: str
    changes: Mapping[str, Any] = {}
    beside: tuple[str, ...] = ()
    warning: str = ""
    image: str = "vllm"


ROWS = (
    Row("option.model_id", "org/model", "the model", {"model_id": "org/model"}),
    Row(
        "option.tensor_parallel_degree",
        "4",
        "GPUs of the model",
        {"tensor_parallel_degree": "4", "vllm.tensor_parallel_size": 4},
    ),
    Row("engine", "Python", "DJL Serving reads it", warning="DJL Serving's Java side reads it"),
    Row(
        "option.rolling_batch",
        "vllm",
        "the engine, where the image names none, and its number of requests",
        {"engine": "vllm", "rolling_batch": "vllm", "max_rolling_batch_size": 256},
        image="",
    ),
    Row(
        "option.entryPoint",
        "djl_python.lmi_vllm.vllm_async_service",
        "engine and mode, by LMI's handler",
        {
            "engine": "vllm",
            "llm_engine": "vllm",
            "async_mode": True,
            "max_rolling_batch_size": 256,
            "lmi_version": "0.36",
        },
        image="",
    ),
    Row(
        "option.async_mode",
        "true",
        "LMI's async mode: the engine batches, whatever `option.rolling_batch=disable` says",
        {"rolling_batch": "auto", "async_mode": True, "lmi_version": "0.36"},
        _DYNAMIC,
    ),
    Row(
        "option.max_rolling_batch_size",
        "4",
        "requests in the engine at once",
        {"max_rolling_batch_size": 4, "vllm.max_num_seqs": 4},
    ),
    Row("option.task", "text-embedding", "what the model computes", {"task": "text-embedding"}),
    Row("option.gpu_memory_utilization", "0.8", "share of the GPU's memory", {"vllm.gpu_memory_utilization": 0.8}),
    Row("option.load_format", "dummy", "format of the weights", {"vllm.load_format": "dummy"}),
    Row("option.max_new_tokens", "100", _NOTE, warning="the server reads it from each request's parameters"),
    Row(
        "option.output_formatter",
        "jsonlines",
        "framing of answers in a rolling batch",
        {"output_formatter": "jsonlines"},
    ),
    Row(
        "option.kv_transfer_config",
        '{"kv_connector":"LMCacheConnectorV1", "kv_role":"kv_both"}',
        "vLLM's connector",
        {"vllm.kv_transfer_config": _LMCACHE},
    ),
    Row("load_on_devices", "0", "DJL Serving reads it", warning="DJL Serving's Java side reads it"),
    Row("option.trust_remote_code", "True", "code of the model's own", {"vllm.trust_remote_code": True}),
    Row(
        "option.enable_lora",
        "true",
        "LoRA adapters",
        {"vllm.enable_lora": True, "vllm.max_loras": 4, "vllm.max_lora_rank": 16},
    ),
    Row("option.adapters", "adapters", _NOTE, warning="LoRA adapters are in the model's directory adapters"),
    Row(
        "option.lmcache_config_file",
        "FILE",
        "LMCache's file, by `LMCACHE_CONFIG_FILE`",
        {"environment": {"LMCACHE_CONFIG_FILE": "FILE"}},
    ),
    Row("option.max_loras", "2", "adapters in a batch", {"vllm.max_loras": 2}, _ADAPTERS),
    Row("option.max_lora_rank", "64", "the largest rank", {"vllm.max_lora_rank": 64}, _ADAPTERS),
    Row(
        "option.max_model_len",
        "8192",
        "tokens of prompt and answer together",
        {"max_model_len": 8192, "vllm.max_model_len": 8192},
    ),
    Row("option.long_lora_scaling_factors", "4.0", _NOTE, warning="vLLM has no long LoRA any more"),
    Row("option.quantize", "awq", "quantization", {"vllm.quantization": "awq"}),
    Row("option.dtype", "fp16", "precision", {"dtype": "fp16", "vllm.dtype": "float16"}),
    Row("model_loading_timeout", "1800", _NOTE, warning="LMI reads option.model_loading_timeout alone"),
    Row("adapter_ids", "['org/adapter']", _NOTE, warning="the name is not known"),
    Row("adapter_names", "['one']", _NOTE, warning="the name is not known"),
    Row(
        "option.limit_mm_per_prompt", '{"image": 4}', "images of a request", {"vllm.limit_mm_per_prompt": {"image": 4}}
    ),
    Row("option.enforce_eager", "True", "no CUDA graphs", {"vllm.enforce_eager": True}),
    Row("option.predict_timeout", "240", "seconds that a request may wait for its start", {"predict_timeout": 240.0}),
    Row(
        "option.enable_prefix_caching",
        "False",
        "reuse of prompts' beginnings",
        {"enable_prefix_caching": False, "vllm.enable_prefix_caching": False},
    ),
    Row("normalize", "False", "vectors as the model computes them, not of length 1", {"normalize": False}),
    Row("option.device_map", "auto", "`auto` asks for nothing; other values are refused"),
    Row("batch_size", "8", "dynamic batching of so many requests", {"batch_size": 8, "rolling_batch": "disable"}),
    Row("option.enable_chunked_prefill", "true", "long prompts in parts", {"vllm.enable_chunked_prefill": True}),
    Row(
        "option.speculative_config",
        '{"method":"eagle","model":"org/draft","num_speculative_tokens":4}',
        "speculative decoding",
        {"vllm.speculative_config": _EAGLE},
    ),
    Row(
        "option.enable_auto_tool_choice",
        "True",
        "requests may always bring tools",
        warning="requests may always bring tools",
    ),
    Row("option.tool_call_parser", "llama3_json", "format of tool calls", {"tool_call_parser": "llama3_json"}),
    Row("option.lora_dtype", "float16", "precision of adapters", {"vllm.lora_dtype": "float16"}, _ADAPTERS),
    Row("pooling", "cls", "how the tokens' vectors become the text's vector", {"pooling": "cls"}),
)
