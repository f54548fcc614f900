"""Table of all options, from one file a group: common, engines, vLLM, TensorRT-LLM, OpenAI's API, foreign names."""

from __future__ import annotations

from handler.config.options.common import COMMON
from handler.config.options.engines import ECHO, GPU, GUIDED, MEDIA
from handler.config.options.foreign import LMI, VLLM_OWN
from handler.config.options.openai import OPENAI
from handler.config.options.option import Option
from handler.config.options.trtllm import TRTLLM
from handler.config.options.vllm import VLLM

__all__ = ["ENVIRONMENT", "KNOWN", "OPTIONS", "SERVER_ENVIRONMENT", "Option"]

OPTIONS: tuple[Option, ...] = (*COMMON, *ECHO, *GUIDED, *MEDIA, *GPU, *VLLM, *TRTLLM, *OPENAI, *LMI, *VLLM_OWN)

KNOWN: dict[str, list[Option]] = {}
"""Options by name and alias; two engines may have different options of one name."""

for _option in OPTIONS:
    for _name in (_option.key, *_option.aliases):
        KNOWN.setdefault(_name, []).append(_option)

ENVIRONMENT = {
    "HF_MODEL_ID": "option.model_id",
    "HF_REVISION": "option.revision",
    "TENSOR_PARALLEL_DEGREE": "option.tensor_parallel_degree",
    "PIPELINE_PARALLEL_DEGREE": "option.pipeline_parallel_degree",
    "MODEL_LOADING_TIMEOUT": "option.model_loading_timeout",
    "PREDICT_TIMEOUT": "option.predict_timeout",
    "SAGEMAKER_ENABLE_STATEFUL_SESSIONS": "option.enable_stateful_sessions",
    "SAGEMAKER_SESSIONS_EXPIRATION": "option.sessions_expiration",
    "SAGEMAKER_SESSIONS_PATH": "option.sessions_path",
}
"""LMI's variables outside the OPTION_ and SERVING_ patterns, and AWS's of its images."""

SERVER_ENVIRONMENT = frozenset({
    "allow_multi_status", "certificate_file", "chunked_read_timeout", "cluster_address", "cors_allowed_headers",
    "cors_allowed_methods", "cors_allowed_origin", "download_dir", "fail_fast", "features", "health_check_override",
    "inference_address", "io_ratio", "keystore", "load_models", "load_on_devices", "management_address",
    "max_idle_time", "model_store", "model_url_pattern", "number_of_netty_threads",
    "opts", "plugin_folder", "private_key_file", "prometheus", "reserved_memory_mb", "retry_threshold",
    "rolling_batch_buffer", "use_native_io", "wait_model_loading",
})  # fmt: skip
"""SERVING_* names that only DJL Serving's Java side reads; ignored here, as an image may set them."""
