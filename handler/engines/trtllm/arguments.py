"""Translates options into the arguments of `tensorrt_llm.LLM` (tensorrt_llm/llmapi/llm_args.py)."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import logging
import os
import re
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

from handler.config.environment import spread
from handler.config.model_files import read_text_config
from handler.core.errors import ConfigError, Problem, Problems
from handler.engines.base import NO_LORA, Capabilities, EngineConfig, override
from handler.engines.huggingface.files import TORCH_DTYPES
from handler.engines.huggingface.media import QwenTokens, no_media, read_tokens
from handler.engines.trtllm.sampling import SUPPORTS

log = logging.getLogger("handler.engine")

Release = tuple[int, int]
NEWEST: Release = (1, 3)  # the newest release that is distinguished below

_SAME_NAME = (
    "context_parallel_size", "moe_tensor_parallel_size", "moe_expert_parallel_size", "moe_cluster_parallel_size",
    "gpus_per_node", "enable_attention_dp", "enable_chunked_prefill", "gather_generation_logits", "stream_interval",
    "disable_flashinfer_sampling", "attn_backend", "load_format", "max_beam_width",
    "iter_stats_max_iterations", "request_stats_max_iterations",
)  # fmt: skip
"""Options with the same name as an argument of LLM."""

_KV_CACHE = (
    "free_gpu_memory_fraction", "tokens_per_block", "host_cache_size", "max_attention_window", "sink_token_length",
    "onboard_blocks", "cross_kv_cache_fraction", "secondary_offload_min_priority", "event_buffer_max_size",
    "enable_partial_reuse",
)  # fmt: skip
_NESTED: Mapping[str, Mapping[str, str]] = {
    "kv_cache_config": {"kv_cache_max_tokens": "max_tokens", "kv_cache_dtype": "dtype", **{n: n for n in _KV_CACHE}},
    "scheduler_config": {"batch_scheduler_policy": "capacity_scheduler_policy"},
    "moe_config": {"moe_backend": "backend"},
    "cuda_graph_config": {
        "cuda_graph_batch_sizes": "batch_sizes",
        "cuda_graph_max_batch_size": "max_batch_size",
        "cuda_graph_padding": "enable_padding",
    },
}
"""Maps each argument of LLM that is an object to its options, and each option to its name in the object."""
_RELEASES: Mapping[str, tuple[Release, Release]] = {
    "moe_cluster_parallel_size": ((1, 0), (1, 2)),
    "onboard_blocks": ((1, 0), (1, 2)),
    "disable_flashinfer_sampling": ((1, 2), (1, 2)),
}
"""First and last release of each option that some releases do not support.

The source is llm-api/reference in the documentation of 1.0 to 1.3.0rc29.
"""

_LORA_MODULES = ("attn_q", "attn_k", "attn_v", "attn_dense", "mlp_h_to_4h", "mlp_4h_to_h", "mlp_gate")
_LORA_CONFIG = ("tensorrt_llm._torch.peft.lora.config", "tensorrt_llm.lora_helper", "tensorrt_llm.lora_manager")
"""Modules that define LoraConfig. The 1.3 module is tried first, because the other modules print a warning in 1.3."""

_MAX_INPUT_LEN = 1024  # LMI's default if max_output_len is set
_CONTEXT_LENGTH = 2048  # tokens, if neither the options nor the model's files specify a context length
_OURS = ("model", "tokenizer", "skip_tokenizer_init", "backend", "generation_config")
"""Arguments that option.engine_args cannot change, because the handler depends on them. The handler's tokenizer reads
the same directory, and requests already contain the defaults from the model's generation_config.json."""

_OBJECTS = frozenset((
    "kv_cache_config", "scheduler_config", "cuda_graph_config", "peft_cache_config", "moe_config",
    "torch_compile_config", "attention_dp_config", "cache_transceiver_config", "quant_config",
))  # fmt: skip
"""Arguments whose classes have the same names in camel case, such as KvCacheConfig."""


def llm_arguments(config: EngineConfig, gpus: int, release: Release = NEWEST) -> dict[str, Any]:
    """Return the arguments of LLM, with sub-configurations as plain dicts.

    Args:
        config: the engine's configuration.
        gpus: number of available GPUs, for the degree "max".
        release: major and minor number of the installed version.

    Raises:
        ConfigError: options contradict each other, or this version does not support them. The message lists all
            problems.
    """
    options, problems = config.engine_options, Problems()
    for name in _present(options, _RELEASES):
        if not _RELEASES[name][0] <= release <= _RELEASES[name][1]:
            message = f"option.{name}: TensorRT-LLM {release[0]}.{release[1]} does not support it"
            problems.append(Problem("", f"option.{name}", message))
    arguments: dict[str, Any] = {
        "model": str(config.model),
        "dtype": TORCH_DTYPES[config.options.dtype],
        "max_batch_size": config.options.max_rolling_batch_size,
        **_parallelism(config, gpus, problems),
        **_lengths(config, problems),
        **_present(options, _SAME_NAME),
        **_objects(config),
        **_communication(options),
        **{name: True for name in ("trust_remote_code", "enable_lora") if options.get(name)},
    }
    if (backend := options.get("guided_decoding_backend")) is not None:
        if backend not in ("xgrammar", "llguidance"):
            key = "option.guided_decoding_backend"
            problems.append(Problem("", key, f"{key}={backend}: the engine trtllm supports xgrammar and llguidance"))
        arguments["guided_decoding_backend"] = backend
    with problems:
        arguments = _merge(arguments, options.get("engine_args") or {})
    if arguments.get("enable_lora") or arguments.get("lora_config"):
        arguments["lora_config"] = {**_lora(options), **(arguments.get("lora_config") or {})}
    if release >= (1, 3):  # its default would limit prompts to 1,024 tokens
        arguments.setdefault("max_input_len", arguments["max_seq_len"])
    sampler = arguments.pop("sampler_type", None) or options.get("sampler_type", "auto")
    with problems:
        arguments = {**_sampler(arguments, sampler, release), **arguments}
    problems.check()
    return arguments


def _present(options: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: options[name] for name in names if options.get(name) is not None}


def _parallelism(config: EngineConfig, gpus: int, problems: Problems) -> dict[str, Any]:
    options = config.engine_options
    stages = _either(
        problems,
        pipeline_parallel_degree=options.get("pipeline_parallel_size"),
        pipeline_parallel_size=options.get("trtllm_pipeline_parallel_size"),
    )
    model = spread(config.options.tensor_parallel_degree, options)
    degree = max(gpus // model.least, 1) if model.tensor is None else model.tensor
    return {"tensor_parallel_size": degree, "pipeline_parallel_size": stages or 1}


def _lengths(config: EngineConfig, problems: Problems) -> dict[str, Any]:
    """Return the token limits. `max_seq_len` is always set, so that the engine and the handler have the same limit."""
    options = config.engine_options
    arguments: dict[str, Any] = {}
    limit = _either(problems, max_model_len=config.options.max_model_len, max_seq_len=options.get("max_seq_len"))
    if config.options.max_input_len is not None:
        arguments["max_input_len"] = config.options.max_input_len
    if options.get("max_output_len") is not None:
        arguments.setdefault("max_input_len", _MAX_INPUT_LEN)
        limit = limit or arguments["max_input_len"] + options["max_output_len"]
    arguments["max_seq_len"] = limit or (context_length(config.model) if config.model else None) or _CONTEXT_LENGTH
    step = config.options.max_num_batched_tokens
    step = _either(problems, max_num_batched_tokens=step, max_num_tokens=options.get("max_num_tokens"))
    if step is not None:
        arguments["max_num_tokens"] = step
    return arguments


def _either(problems: Problems, **values: int | None) -> int | None:
    """Return the value of an option that has two names, or None if unset. Report a problem if the values differ."""
    (first, value), (second, other) = values.items()
    if value is not None and other is not None and value != other:
        message = f"option.{first}={value} contradicts option.{second}={other}: set only one of them"
        problems.append(Problem("", f"option.{first}", message))
    return value if value is not None else other


def _objects(config: EngineConfig) -> dict[str, Any]:
    """Return the arguments that are non-empty objects. The value None disables CUDA graphs."""
    options = config.engine_options
    arguments: dict[str, Any] = {
        argument: {name: options[option] for option, name in names.items() if options.get(option) is not None}
        for argument, names in _NESTED.items()
    }
    if config.options.enable_prefix_caching is not None:
        arguments["kv_cache_config"]["enable_block_reuse"] = config.options.enable_prefix_caching
    if config.options.kv_cache_gib:
        arguments["kv_cache_config"]["max_gpu_total_bytes"] = config.options.kv_cache_gib << 30
    off = {"cuda_graph_config": None} if options.get("use_cuda_graph") is False else {}
    return {name: value for name, value in arguments.items() if value} | off


def _communication(options: Mapping[str, Any]) -> dict[str, Any]:
    arguments = _present(options, ["allreduce_strategy"])
    if options.get("use_custom_all_reduce") is False:
        arguments.setdefault("allreduce_strategy", "NCCL")
    if (overlap := options.get("enable_overlap_scheduler")) is not None:
        arguments["disable_overlap_scheduler"] = not overlap
    return arguments


def _lora(options: Mapping[str, Any]) -> dict[str, Any]:
    # The modules must be named, because no adapter is known at startup from which the engine could infer them.
    modules = list(options.get("lora_target_modules") or _LORA_MODULES)
    return {"lora_target_modules": modules, **_present(options, ["max_lora_rank", "max_loras", "max_cpu_loras"])}


def _merge(arguments: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    if name := next((name for name in more if name in _OURS), ""):
        raise ConfigError(f"option.engine_args: {name!r} cannot be changed there")
    return override(arguments, more)


def _sampler(arguments: Mapping[str, Any], sampler: str, release: Release) -> dict[str, Any]:
    """Return the arguments that select the sampler.

    Before 1.3, they are always set, because the defaults differ between versions. 1.3 has only TorchSampler.

    Args:
        arguments: all other arguments, including those in option.engine_args.
        sampler: the requested sampler, or "auto".
        release: major and minor number of the installed version.
    """
    if release >= (1, 3):
        if sampler == "TRTLLMSampler":
            raise ConfigError("option.sampler_type=TRTLLMSampler: TensorRT-LLM has only TorchSampler since 1.3")
        return {}
    beams = (arguments.get("max_beam_width") or 1) > 1
    if release < (1, 1) and (ours := arguments.get("enable_trtllm_sampler")) is not None:
        sampler = "TRTLLMSampler" if ours else "TorchSampler"
    if beams and sampler == "TorchSampler":
        raise ConfigError("TorchSampler does not support option.max_beam_width before TensorRT-LLM 1.3")
    name = sampler if sampler != "auto" else "TRTLLMSampler" if beams else "TorchSampler"
    if release < (1, 1):  # without mixed_sampler, TorchSampler uses the first request's parameters for all requests
        ours = name == "TRTLLMSampler"
        return {"enable_trtllm_sampler": ours, "enable_mixed_sampler": not ours}
    return {"sampler_type": name}


def context_length(model: Path) -> int | None:
    """Read the context length, in tokens, from config.json. Return None if the file does not specify it."""
    config = read_text_config(model)
    for name in ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length"):
        if isinstance(config.get(name), int):
            return int(config[name])
    return None


def construct(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Convert sub-configurations to TensorRT-LLM's own classes, which refuse unknown keys."""
    return {name: _construct(name, value) for name, value in arguments.items()}


def _construct(name: str, value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    if name == "lora_config":
        return import_name("LoraConfig", *_LORA_CONFIG)(**value)
    if name == "speculative_config":
        fields = dict(value)
        kind = fields.pop("decoding_type", None)
        if kind is None:
            raise ConfigError('option.engine_args: "speculative_config" needs a "decoding_type"')
        return import_name(f"{kind}DecodingConfig", "tensorrt_llm.llmapi")(**fields)
    if name in _OBJECTS:
        return import_name(name.title().replace("_", ""), "tensorrt_llm.llmapi")(**value)
    return dict(value)


def import_name(name: str, *modules: str) -> Any:
    """Import a name from the first of several modules that defines it, because TensorRT-LLM moves names around.

    Raises:
        ConfigError: no module defines the name.
    """
    for module in modules:
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
    raise ConfigError(f"the installed TensorRT-LLM has no {name} in {' or '.join(modules)}")


# -- environment of TensorRT-LLM: MPI's variables, files of models and adapters, GPUs ----------------------------------


_LAUNCHED = ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK")
_NETWORK = ("OMPI_MCA_btl_", "OMPI_MCA_oob_")
_MAX_NUM_TOKENS = 8192  # TensorRT-LLM's default


def environment(config: EngineConfig) -> dict[str, str]:
    """Return the environment variables of TensorRT-LLM and its MPI workers."""
    variables = {}
    if not config.engine_options.get("usage_stats"):
        # Since 1.3 TensorRT-LLM reports usage to NVIDIA by default (`is_usage_stats_enabled` in usage/usage_lib.py).
        variables["TRTLLM_NO_USAGE_STATS"] = "1"
    if os.geteuid() == 0:
        # Open MPI 5 starts MPI workers with `prte`, which refuses to run as root, and the engine would wait forever.
        # Unlike mpirun, prte does not read OMPI_ALLOW_RUN_AS_ROOT (src/mca/schizo/prte in PRRTE 3).
        variables |= {"PRTE_ALLOW_RUN_AS_ROOT": "1", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return variables


def leave_mpi(environ: MutableMapping[str, str]) -> None:
    """Remove the variables set by mpirun if mpirun started this process, as in DJL's mpi_mode.

    With these variables, MPI would treat the engine's own workers as part of that run and fail to start them. Variables
    for the network are kept. If TensorRT-LLM's own launcher started this process, all variables are kept.
    """
    if "TLLM_SPAWN_PROXY_PROCESS" in environ or not any(name in environ for name in _LAUNCHED):
        return
    for name in list(environ):
        if name.startswith(("OMPI_", "PMIX_", "PMI_")) and not name.startswith(_NETWORK):
            del environ[name]


def check_rank(directory: Path, max_rank: int) -> None:
    """Check that an adapter's rank is at most `max_rank`.

    Raises:
        OSError: the adapter has been removed.
        ValueError: the rank is too high, and TensorRT-LLM would fail when a request uses the adapter.
    """
    rank = json.loads((directory / "adapter_config.json").read_text()).get("r")
    if not isinstance(rank, int) or rank > max_rank:
        raise ValueError(f"the adapter's rank is {rank}, but option.max_lora_rank={max_rank}")


def max_prompt(arguments: Mapping[str, Any]) -> int:
    """Return the maximum number of tokens in a prompt. Without chunked prefill, a prompt must fit into one step."""
    step = arguments.get("max_num_tokens") or _MAX_NUM_TOKENS
    limits = [] if arguments.get("enable_chunked_prefill") else [step]
    return min([*limits, *filter(None, (arguments.get("max_input_len"),))], default=1 << 62)


def vocabulary_size(model: Path) -> int:
    config = json.loads((model / "config.json").read_text())
    return int(config.get("vocab_size") or config["text_config"]["vocab_size"])


def tensor_parallel_gpus(config: EngineConfig) -> int:
    if config.options.tensor_parallel_degree != "max":
        return int(config.options.tensor_parallel_degree)
    from torch import cuda  # counting the GPUs does not initialize CUDA in this process

    return int(cuda.device_count())


# -- capabilities of the installed TensorRT-LLM with certain arguments, without importing it ---------------------------


_OLDEST: Release = (1, 0)  # the first release in which `tensorrt_llm.LLM` uses the PyTorch backend
_OF_THE_IMAGE: Release = (1, 2)

SAMPLING_DEFAULTS = MappingProxyType({"top_k": 5, "top_p": 0.85, "temperature": 0.8})
"""LMI's defaults for TensorRT-LLM when `do_sample` is set (djl_python of DJL Serving)."""

_OTHER_SAMPLER = "option.sampler_type=TRTLLMSampler supports it, but returns no log-probabilities"
_IGNORES = f"TorchSampler silently ignores it before TensorRT-LLM 1.3; {_OTHER_SAMPLER}"
_NO_LOGPROBS = "it returns no log-probabilities with option.sampler_type=TRTLLMSampler"

# Parameters that TorchSampler ignores in 1.1 and 1.2. It uses one generator for all requests, so `seed` is one of these
# parameters. NVIDIA/TensorRT-LLM pull request 17172 introduced a seed for each request.
_IGNORED = ("repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram_size", "seed")


def installed_version() -> str:
    try:
        return importlib.metadata.version("tensorrt_llm")
    except importlib.metadata.PackageNotFoundError:  # TensorRT-LLM runs from a source tree
        return str(importlib.import_module("tensorrt_llm").__version__)


def release_of(version: str) -> Release:
    """Return the major and minor numbers of a TensorRT-LLM version.

    Raises:
        ConfigError: the version is too old.
    """
    match = re.match(r"([0-9]+)\.([0-9]+)", version)
    release = (int(match[1]), int(match[2])) if match else (0, 0)
    if release < _OLDEST:
        raise ConfigError(f"TensorRT-LLM {version} is installed; the engine trtllm needs 1.0 to 1.3")
    return release


def warn_of_newer(version: str) -> None:
    if release_of(version) > NEWEST:
        log.warning("TensorRT-LLM %s is installed, but this engine was written for versions up to 1.3", version)


def installed_release() -> Release:
    """Return the installed release, or the container image's release if TensorRT-LLM is not installed."""
    return release_of(installed_version()) if find_spec("tensorrt_llm") else _OF_THE_IMAGE


def torch_sampler(arguments: Mapping[str, Any]) -> bool:
    """Return whether an LLM with these arguments uses TorchSampler, which supports log-probabilities.

    TRTLLMSampler reports log-probabilities as growing lists, but TensorRT-LLM expects increments, and fails with an
    AssertionError except in beam search. Without beam search, log-probabilities are therefore not requested from
    TRTLLMSampler.
    """
    return not arguments.get("enable_trtllm_sampler") and arguments.get("sampler_type") != "TRTLLMSampler"


def whole_prompts(arguments: Mapping[str, Any], release: Release) -> bool:
    """Return whether a request can compute its whole prompt without results from the prefix cache.

    Since 1.2, a request can have a separate cache (`cache_salt`).
    """
    cache = arguments.get("kv_cache_config") or {}
    return release >= (1, 2) or cache.get("enable_block_reuse") is False


def capabilities_of(arguments: Mapping[str, Any], release: Release) -> Capabilities:
    reasons = {"typical_p": "it does not implement typical decoding"}
    if release < (1, 2):
        reasons["cache_salt"] = "before TensorRT-LLM 1.2 all requests share the prefix cache"
    if torch_sampler(arguments):
        reasons["bad_sequences"] = "TorchSampler cannot forbid sequences of tokens"
        if release < (1, 3):
            reasons["bad_sequences"] += f"; {_OTHER_SAMPLER}"
            reasons |= dict.fromkeys(_IGNORED if release >= (1, 2) else (*_IGNORED, "min_p"), _IGNORES)
    else:
        reasons |= {
            "top_logprobs": _NO_LOGPROBS,
            "best_of": f"{_NO_LOGPROBS}, so it cannot choose the best response",
        }
    if (beams := arguments.get("max_beam_width") or 1) < 2:
        reasons["num_beams"] = "it was started without option.max_beam_width"
    if not arguments.get("guided_decoding_backend"):
        reasons["structured_output"] = "it was started without option.guided_decoding_backend=xgrammar or llguidance"
    if max_prompt(arguments) < arguments["max_seq_len"]:
        reasons["thinking_token_budget"] = (
            "a prompt with reasoning may be too long for one step; set option.enable_chunked_prefill=true"
        )
    if not arguments.get("gather_generation_logits"):
        reasons["return_generation_logits"] = "it was started without option.gather_generation_logits=true"
    if not whole_prompts(arguments, release):
        reason = "before TensorRT-LLM 1.2 it needs option.enable_prefix_caching=false"
        reasons |= {"prompt_logprobs": reason, "return_context_logits": reason}
    lora = arguments.get("enable_lora") or arguments.get("lora_config")
    # Supported since NVIDIA/TensorRT-LLM pull request 7893, and only by xgrammar. `json` is the only style that every
    # version of xgrammar in use is known to support.
    tags = release >= (1, 2) and arguments.get("guided_decoding_backend") == "xgrammar"
    return Capabilities(
        SUPPORTS,
        reasons,
        limits={"num_beams": beams},
        no_adapters="" if lora else NO_LORA,
        no_media=refusals(Path(arguments["model"]), separate_caches=whole_prompts(arguments, release)),
        sampling_defaults=SAMPLING_DEFAULTS,
        structural_tags=frozenset({"json"} if tags else ()),
    )


def refusals(model: Path | None, *, separate_caches: bool) -> dict[str, str]:
    """Return, for each kind of media, the reason why the engine does not accept it with this model, or "" if it does.

    TensorRT-LLM 1.0 to 1.3 accepts audio only for Phi-4-multimodal, with code and an adapter from the checkpoint.

    Args:
        model: directory of the model, or None.
        separate_caches: whether each request can have a separate prefix cache, or there is no prefix cache.
    """
    images = read_tokens(model, "image")
    reasons = {"audio": "TensorRT-LLM does not support model_type qwen2_audio (config.json)", "image": ""}
    if not isinstance(images, str) and not isinstance(images, QwenTokens):
        reasons["image"] = "TensorRT-LLM does not support model_type llava (config.json)"
    elif not separate_caches:
        reasons["image"] = "before TensorRT-LLM 1.2, images need option.enable_prefix_caching=false"
    return {kind: reason or reasons[kind] for kind, reason in no_media(model).items()}


def check_prompt(ids: Sequence[int], most: int, vocabulary: int) -> None:
    """Raise ValueError if a prompt is empty, has more than `most` tokens, or contains ids outside the vocabulary."""
    if not ids:
        raise ValueError("the prompt is empty")
    if len(ids) > most:
        raise ValueError(
            f"the prompt has {len(ids)} tokens, but TensorRT-LLM was started with a limit of {most} "
            "(option.max_input_len; option.max_num_batched_tokens without option.enable_chunked_prefill=true)"
        )
    if not all(0 <= id < vocabulary for id in ids):
        raise ValueError(f"the prompt's token ids must be below {vocabulary}")


def background_error(llm: Any) -> Exception | None:
    """Return the first error from TensorRT-LLM's threads and workers that has not been raised yet, or None.

    The executor stores these errors in a queue, and raises them on the next request (`_error_queue` in
    executor/executor.py, 1.0 to 1.4).
    """
    waiting = getattr(getattr(llm, "_executor", None), "_error_queue", None)
    error = next(iter(tuple(getattr(waiting, "queue", ()))), None)
    return error if isinstance(error, Exception) or error is None else RuntimeError(str(error))
