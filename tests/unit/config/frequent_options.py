"""The options that stand most often in LMI's own test configurations, each with a value of them, and its effect here.

Counted in the 892 configurations that the builders of LMI 0.28, 0.29, 0.36 and its main branch write, each builder for
each of its models, without those of AWS Neuron; most frequent first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

_ADAPTERS = ("option.enable_lora=true",)
_DYNAMIC = ("option.rolling_batch=disable",)
_LMCACHE = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
_EAGLE = {"method": "eagle", "model": "org/draft", "num_speculative_tokens": 4}


class Row(NamedTuple):
    """An option and what it changes.

    Attributes:
        name, value: as serving.properties writes them.
        changes: fields of `Config`, `engine`, and vLLM's arguments as `vllm.NAME`, with their values.
        beside: the lines that the option needs.
        warning: words of the line that it logs; "" where it logs none.
        image: what the image names as the engine.
    """

    name: str
    value: str
    changes: Mapping[str, Any] = {}
    beside: tuple[str, ...] = ()
    warning: str = ""
    image: str = "vllm"


ROWS = (
    Row("option.model_id", "org/model", {"model_id": "org/model"}),
    Row(
        "option.tensor_parallel_degree",
        "4",
        {"tensor_parallel_degree": "4", "vllm.tensor_parallel_size": 4},
    ),
    Row("engine", "Python", warning="DJL Serving's Java side reads it"),
    Row(
        "option.rolling_batch",
        "vllm",
        {"engine": "vllm", "rolling_batch": "vllm", "max_rolling_batch_size": 256},
        image="",
    ),
    Row(
        "option.entryPoint",
        "djl_python.lmi_vllm.vllm_async_service",
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
        {"rolling_batch": "auto", "async_mode": True, "lmi_version": "0.36"},
        _DYNAMIC,
    ),
    Row(
        "option.max_rolling_batch_size",
        "4",
        {"max_rolling_batch_size": 4, "vllm.max_num_seqs": 4},
    ),
    Row("option.task", "text-embedding", {"task": "text-embedding"}),
    Row("option.gpu_memory_utilization", "0.8", {"vllm.gpu_memory_utilization": 0.8}),
    Row("option.load_format", "dummy", {"vllm.load_format": "dummy"}),
    Row("option.max_new_tokens", "100", warning="the server reads it from each request's parameters"),
    Row(
        "option.output_formatter",
        "jsonlines",
        {"output_formatter": "jsonlines"},
    ),
    Row(
        "option.kv_transfer_config",
        '{"kv_connector":"LMCacheConnectorV1", "kv_role":"kv_both"}',
        {"vllm.kv_transfer_config": _LMCACHE},
    ),
    Row("load_on_devices", "0", warning="DJL Serving's Java side reads it"),
    Row("option.trust_remote_code", "True", {"vllm.trust_remote_code": True}),
    Row(
        "option.enable_lora",
        "true",
        {"vllm.enable_lora": True, "vllm.max_loras": 4, "vllm.max_lora_rank": 16},
    ),
    Row("option.adapters", "adapters", warning="LoRA adapters are in the model's directory adapters"),
    Row(
        "option.lmcache_config_file",
        "FILE",
        {"environment": {"LMCACHE_CONFIG_FILE": "FILE"}},
    ),
    Row("option.max_loras", "2", {"vllm.max_loras": 2}, _ADAPTERS),
    Row("option.max_lora_rank", "64", {"vllm.max_lora_rank": 64}, _ADAPTERS),
    Row(
        "option.max_model_len",
        "8192",
        {"max_model_len": 8192, "vllm.max_model_len": 8192},
    ),
    Row("option.long_lora_scaling_factors", "4.0", warning="vLLM has no long LoRA any more"),
    Row("option.quantize", "awq", {"vllm.quantization": "awq"}),
    Row("option.dtype", "fp16", {"dtype": "fp16", "vllm.dtype": "float16"}),
    Row("model_loading_timeout", "1800", warning="LMI reads only option.model_loading_timeout"),
    Row("adapter_ids", "['org/adapter']", warning="the name is not known"),
    Row("adapter_names", "['one']", warning="the name is not known"),
    Row("option.limit_mm_per_prompt", '{"image": 4}', {"vllm.limit_mm_per_prompt": {"image": 4}}),
    Row("option.enforce_eager", "True", {"vllm.enforce_eager": True}),
    Row("option.predict_timeout", "240", {"predict_timeout": 240.0}),
    Row(
        "option.enable_prefix_caching",
        "False",
        {"enable_prefix_caching": False, "vllm.enable_prefix_caching": False},
    ),
    Row("normalize", "False", {"normalize": False}),
    Row("option.device_map", "auto"),
    Row("batch_size", "8", {"batch_size": 8, "rolling_batch": "disable"}),
    Row("option.enable_chunked_prefill", "true", {"vllm.enable_chunked_prefill": True}),
    Row(
        "option.speculative_config",
        '{"method":"eagle","model":"org/draft","num_speculative_tokens":4}',
        {"vllm.speculative_config": _EAGLE},
    ),
    Row(
        "option.enable_auto_tool_choice",
        "True",
        warning="requests may always bring tools",
    ),
    Row("option.tool_call_parser", "llama3_json", {"tool_call_parser": "llama3_json"}),
    Row("option.lora_dtype", "float16", {"vllm.lora_dtype": "float16"}, _ADAPTERS),
    Row("pooling", "cls", {"pooling": "cls"}),
)
