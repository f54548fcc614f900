"""Translates our options into the keywords of vLLM's EngineArgs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, get_args

from handler.config import generation_config
from handler.config.gpus import spread
from handler.config.options.vllm import BITSANDBYTES
from handler.core.errors import ConfigError, Problems
from handler.engines.base import EngineConfig
from handler.engines.huggingface.checkpoint import TORCH_DTYPES
from handler.engines.vllm import lmcache

_LORA = ("max_loras", "max_cpu_loras", "max_lora_rank")

_OWN = frozenset((
    "engine_args", "guided_decoding", "guided_decoding_backend", "guide_timeout", "speculative_draft_model",
    "num_speculative_tokens", "draft_model_tp_size", "revision", "lmcache_config_file", "lmcache_auto_config",
    "chat_template_content_format", "lora_modules", "load_in_4bit", "load_in_8bit", *_LORA,
))  # fmt: skip
"""Options that are not arguments themselves; the others have the argument's name."""

_HANDLERS = ("generation_config", "override_generation_config")
"""Arguments of vLLM's that concern its HTTP server, in whose place the handler stands."""

_CPU_CACHE_GIB = 4
"""vLLM itself would ask for nine tenths of a CPU's memory, and not start where less is free."""


def environment(config: EngineConfig, given: Mapping[str, str]) -> dict[str, str]:
    """Add the variables that vLLM's processes need; values in `given` win, and options win over those."""
    defaults = {
        "VLLM_NO_USAGE_STATS": "1",  # vLLM would report its use
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a process with threads must not be forked
    }
    if "gpu_memory_utilization" not in engine_arguments(config, 1, cpu=True):
        defaults["VLLM_CPU_KVCACHE_SPACE"] = str(_CPU_CACHE_GIB)
    own = {"VLLM_CPU_KVCACHE_SPACE": str(config.options.kv_cache_gib)} if config.options.kv_cache_gib else {}
    return {**defaults, **given, **own}


def engine_arguments(config: EngineConfig, num_devices: int, *, cpu: bool) -> dict[str, Any]:
    """Make the keywords of EngineArgs.

    Args:
        num_devices: number of devices here, for `max`.
        cpu: for vLLM's CPU build, which gets its cache's size by `environment`.

    Raises:
        ConfigError: the options contradict each other; with all such problems.
    """
    options, problems = config.options.engine_options, Problems()
    model = spread(config.options.tensor_parallel_degree, options)
    arguments: dict[str, Any] = {
        "model": str(config.model),
        "dtype": TORCH_DTYPES[config.options.dtype],
        "max_num_seqs": config.options.max_rolling_batch_size,
        "tensor_parallel_size": max(num_devices // model.least, 1) if model.tensor is None else model.tensor,
        "disable_log_stats": False,  # the core's statistics, for /metrics; vLLM's own loggers get none
        # For its end tokens; sampling parameters are in every request already.
        "generation_config": str(generation_config.directory(config.options) or "auto"),
    }
    limits = {
        "max_num_batched_tokens": config.options.max_num_batched_tokens,
        "max_model_len": config.options.max_model_len,
        "enable_prefix_caching": config.options.enable_prefix_caching,
    }
    if config.options.kv_cache_gib and not cpu:
        limits["kv_cache_memory_bytes"] = config.options.kv_cache_gib << 30
    arguments |= {name: value for name, value in limits.items() if value is not None}
    arguments |= {name: value for name, value in options.items() if name not in _OWN}
    if options.get("enable_lora"):
        arguments |= {name: options[name] for name in _LORA if name in options}
    if "guided_decoding_backend" in options:
        arguments["structured_outputs_config"] = {"backend": options["guided_decoding_backend"]}
    with problems:
        arguments |= _bitsandbytes(options)
    with problems:
        arguments |= lmcache.arguments(config)
    with problems:
        arguments |= _speculation(options)
    with problems:
        arguments = _merge(arguments, options.get("engine_args", {}))
    with problems:
        _check_reasoning(arguments)
    problems.check()
    return arguments


def _bitsandbytes(options: Mapping[str, Any]) -> dict[str, Any]:
    """Make vLLM's quantization of LMI's names for bitsandbytes."""
    given = options.get("quantization")
    named = [name for name in BITSANDBYTES if options.get(name)]
    if len(named) > 1:
        raise ConfigError(f"{' and '.join(f'option.{name}' for name in named)} contradict each other")
    if named and given not in (None, "bitsandbytes", BITSANDBYTES[named[0]]):
        raise ConfigError(f"option.{named[0]} and option.quantize={given} contradict each other")
    return {"quantization": "bitsandbytes"} if named or given in BITSANDBYTES.values() else {}


def _speculation(options: Mapping[str, Any]) -> dict[str, Any]:
    """Make vLLM's form of LMI's options for a draft model."""
    draft = options.get("speculative_draft_model")
    for name in ("num_speculative_tokens", "draft_model_tp_size"):
        if draft is None and options.get(name, 1) != 1:
            raise ConfigError(f"option.{name} needs option.speculative_draft_model")
    if draft is None:
        return {}
    if "speculative_config" in options:
        raise ConfigError("option.speculative_draft_model and option.speculative_config set the same thing")
    degree = {"draft_tensor_parallel_size": size} if (size := options.get("draft_model_tp_size")) else {}
    tokens = options.get("num_speculative_tokens", 5)
    return {"speculative_config": {"model": draft, "num_speculative_tokens": tokens, **degree}}


def _check_reasoning(arguments: Mapping[str, Any]) -> None:
    """Refuse vLLM's own parser of thoughts: with it, an answer without a thought follows no structured output."""
    own = arguments.get("structured_outputs_config")
    if arguments.get("reasoning_parser") or (isinstance(own, dict) and own.get("reasoning_parser")):
        raise ConfigError("vLLM's reasoning_parser is not used: the family of the thoughts is option.reasoning_parser")


def _merge(arguments: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Let `option.engine_args` and vLLM's own options replace single arguments, except those that are ours."""
    if "model" in more:
        raise ConfigError("option.engine_args: the model is option.model_id")
    for name in _HANDLERS:
        if name in more:
            raise ConfigError(f"option.engine_args: {name!r} has no effect there: write option.{name}")
    nested = {
        name: {**arguments[name], **value}
        for name, value in more.items()
        if isinstance(value, dict) and isinstance(arguments.get(name), dict)
    }
    return {**arguments, **more, **nested}


def construct(arguments: Mapping[str, Any], engine_args: type) -> dict[str, Any]:
    """Turn JSON objects into the classes that EngineArgs declares for them, as vLLM's command line does.

    Raises:
        ConfigError: such a class does not take the object; the message names the argument.
    """
    types = {field.name: field.type for field in fields(engine_args)}
    return {name: _construct(name, value, types.get(name)) for name, value in arguments.items()}


def _construct(name: str, value: Any, declared: Any) -> Any:
    classes = [one for one in (declared, *get_args(declared)) if isinstance(one, type) and is_dataclass(one)]
    if not isinstance(value, dict) or not classes:
        return value
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(classes[0]).validate_python(value)
    except ValidationError as error:
        found = (": ".join(filter(None, (".".join(map(str, one["loc"])), one["msg"]))) for one in error.errors())
        raise ConfigError(f"option.{name}: {'; '.join(found)}") from None
