"""Every option there is, a line each: its key as serving.properties writes it, its type, default and meaning."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple


class Option(NamedTuple):
    """`field` is its name in `Config`; None marks a key of DJL Serving's own that has no meaning in the embedded server."""

    key: str
    field: str | None
    parse: Callable[[str], Any]
    default: Any
    help: str
    aliases: tuple[str, ...] = ()


def boolean(text: str) -> bool:
    match text.lower():
        case "true":
            return True
        case "false":
            return False
    raise ValueError("must be true or false")


def string(text: str) -> str:
    if not text:
        raise ValueError("must not be empty")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("must be UTF-8") from None
    return text


def one_of(*names: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in names:
            raise ValueError(f"must be one of {', '.join(names)}")
        return text

    return parse


def integer(least: int, most: int | None = None) -> Callable[[str], int]:
    def parse(text: str) -> int:
        wanted = f"must be a whole number of at least {least}" + (f" and at most {most}" if most is not None else "")
        try:
            value = int(text)
        except ValueError:
            raise ValueError(wanted) from None
        if value < least or (most is not None and value > most):
            raise ValueError(wanted)
        return value

    return parse


def number(least: float, most: float = 1e6) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise ValueError(f"must be a number of at least {least:g} and at most {most:g}")
        return value

    return parse


def precision(text: str) -> str:
    """LMI's and vLLM's names for precisions, onto one each."""
    names = {"auto": "auto", "fp32": "fp32", "f32": "fp32", "float32": "fp32", "float": "fp32"}
    names |= {"fp16": "fp16", "f16": "fp16", "float16": "fp16", "half": "fp16", "bf16": "bf16", "bfloat16": "bf16"}
    if text.lower() not in names:
        raise ValueError(f"must be one of {', '.join(names)}")
    return names[text.lower()]


def parallel_degree(text: str) -> str:
    return text if text == "max" else str(integer(1)(text))


ROLLING_BATCHES = ("auto", "disable", "trtllm", "vllm", "lmi-dist", "scheduler")
LLM_ENGINES = ("auto", "openvino", "trtllm", "vllm", "echo")

OF_JAVA = "DJL Serving's Java side reads it"

OPTIONS = (
    # what is served
    Option("option.model_id", "model_id", string, None, "a .gguf file, a model directory, or `demo`"),
    Option("option.model_name", "model_name", string, "model", "the name in /predictions/{name} and /models", ("option.modelName",)),
    Option("option.llm_engine", "llm_engine", one_of(*LLM_ENGINES), "auto", "the engine; auto: as option.rolling_batch names it, else openvino"),
    Option("option.rolling_batch", "rolling_batch", one_of(*ROLLING_BATCHES), "auto", "LMI's switch: disable is dynamic batching; trtllm, vllm and lmi-dist (vLLM) choose the engine; scheduler is auto"),
    Option("option.dtype", "dtype", precision, "auto", "precision of the computation; auto is the engine's choice (CPU: bf16 where it has it)"),
    Option("option.tensor_parallel_degree", "tensor_parallel_degree", parallel_degree, "1", "devices a model is spread over; CPU engines have one"),
    # how answers look
    Option("option.output_formatter", "output_formatter", string, None, "framing of answers: json, jsonlines or sse, by default json, or jsonlines (tgi_compat: sse) when streaming; or the name of a model.py's output formatter (formatters.md), which is the default where there is one"),
    Option("option.input_formatter", "input_formatter", string, None, "the name of a model.py's input formatter (formatters.md); not needed where there is only one"),
    Option("option.tgi_compat", "tgi_compat", boolean, False, "answers laid out as TGI's"),
    Option("option.enable_streaming", "enable_streaming", boolean, False, "dynamic batching only: answers as {\"outputs\": [...]} lines"),
    Option("option.unknown_parameters", "unknown_parameters", one_of("report", "refuse"), "report", "names that no dialect knows: reported in x-lmi-ignored-parameters, or refused"),
    # how much at once
    Option("option.max_rolling_batch_size", "max_rolling_batch_size", integer(1, 4096), 32, "sequences in the engine at once"),
    Option("job_queue_size", "job_queue_size", integer(1), 1000, "requests that may wait; the next is answered 503"),
    Option("batch_size", "batch_size", integer(1, 999), 1, "dynamic batching: requests in a batch", ("max_dynamic_batch_size",)),
    Option("max_batch_delay", "max_batch_delay", integer(0, 3_600_000), 100, "dynamic batching: milliseconds to wait for a full batch"),
    Option("max_request_size", "max_request_size", integer(1), 67_108_864, "bytes of a request body; more is answered 413"),
    Option("option.max_model_len", "max_model_len", integer(2), None, "tokens of prompt and answer together; by default what the model was trained for"),
    Option("option.max_num_batched_tokens", "max_num_batched_tokens", integer(16), 256, "tokens that one engine step computes; less keeps neighbours moving during long prompts", ("option.max_rolling_batch_prefill_tokens",)),
    Option("option.kv_cache_gib", "kv_cache_gib", integer(0), 0, "GiB for the KV cache; 0 lets it grow as needed"),
    Option("option.enable_prefix_caching", "enable_prefix_caching", boolean, False, "reuse the KV cache of equal prompt beginnings"),
    # how long
    Option("option.predict_timeout", "predict_timeout", number(0.1), 120.0, "seconds that a request may wait for its turn; under DJL also that a dynamic batch may take", ("option.predictTimeout",)),
    Option("option.request_time_limit", "request_time_limit", number(0), None, "seconds that a request may take in all, 0 for any; by default 900 under DJL Serving, which never says that a client has left, and any in the embedded server"),
    Option("option.model_loading_timeout", "model_loading_timeout", number(1), 240.0, "seconds that the engine may take to load"),
    Option("option.engine_timeout", "engine_timeout", number(0.1), 60.0, "seconds without a step after which the engine counts as hung"),
    Option("option.client_timeout", "client_timeout", number(0.1), 120.0, "seconds that a client may take for its body, or read nothing of its stream, before it is dropped"),
    # the rest
    Option("option.engine_isolation", "engine_isolation", one_of("auto", "process", "thread"), "auto", "where the engine runs; auto: a process, but a thread for echo"),
    Option("option.echo_tokens_per_second", "echo_tokens_per_second", number(0), 0.0, "echo: tokens a second for each request; 0: as fast as it goes"),
    Option("option.echo_cues", "echo_cues", boolean, False, "echo: the words <raise> <hang> <die> <refuse> do so (for tests)"),
    Option("option.log_prompts", "log_prompts", boolean, False, "write prompts to the log"),
    # no meaning here
    Option("option.trust_remote_code", None, str, None, "no code that comes with a model is run"),
    Option("option.revision", None, str, None, "nothing is fetched from a hub"),
    # DJL Serving's own: its Java side reads them, the embedded server has no use for them
    *(
        Option(key, None, str, None, OF_JAVA)
        for key in (
            "engine", "option.entryPoint", "option.handler", "option.pythonExecutable", "option.env", "option.mpi_mode",
            "option.parallel_loading", "option.enable_venv", "option.async_mode", "option.use_passive_workers",
            "max_idle_time", "load_on_devices", "minWorkers", "maxWorkers", "gpu.minWorkers", "gpu.maxWorkers",
            "cpu.minWorkers", "cpu.maxWorkers", "retry_threshold", "required_memory_mb", "reserved_memory_mb",
            "log_request_metric", "metrics_aggregation",
        )
    ),
)  # fmt: skip

KNOWN = {name: option for option in OPTIONS for name in (option.key, *option.aliases)}
"""Options by every name that they have."""

ENVIRONMENT = {
    "HF_MODEL_ID": "option.model_id",
    "TENSOR_PARALLEL_DEGREE": "option.tensor_parallel_degree",
    "MODEL_LOADING_TIMEOUT": "option.model_loading_timeout",
    "PREDICT_TIMEOUT": "option.predict_timeout",
}
"""LMI's variables outside the OPTION_ and SERVING_ patterns."""

SERVER_ENVIRONMENT = frozenset(
    {
        "allow_multi_status",
        "certificate_file",
        "chunked_read_timeout",
        "cluster_address",
        "cors_allowed_headers",
        "cors_allowed_methods",
        "cors_allowed_origin",
        "download_dir",
        "fail_fast",
        "features",
        "health_check_override",
        "inference_address",
        "io_ratio",
        "keystore",
        "load_models",
        "load_on_devices",
        "management_address",
        "max_idle_time",
        "max_workers",
        "min_workers",
        "model_store",
        "model_url_pattern",
        "number_of_netty_threads",
        "opts",
        "plugin_folder",
        "private_key_file",
        "prometheus",
        "reserved_memory_mb",
        "retry_threshold",
        "use_native_io",
        "wait_model_loading",
    }
)
"""SERVING_* names that only DJL Serving's Java side reads; an image's environment may carry them, so they are let be."""
