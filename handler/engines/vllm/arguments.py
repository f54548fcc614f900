"""Translates options into the arguments of vLLM's EngineArgs."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args

from handler.config import model_files
from handler.config.environment import spread
from handler.config.options.tables import BITSANDBYTES
from handler.core.errors import ConfigError, Problems
from handler.engines.base import EngineConfig, override
from handler.engines.huggingface.files import TORCH_DTYPES

_FILE, _AUTO = "option.lmcache_config_file", "option.lmcache_auto_config"
_CONNECTOR = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
_DISK = Path("/tmp/lmcache")
_GIB = 1 << 30
_MEMORY = Path("/proc/meminfo")


def lmcache_arguments(config: EngineConfig) -> dict[str, Any]:
    """Return the EngineArgs arguments that turn on LMCache if option.lmcache_auto_config is set.

    Raises:
        ConfigError: options contradict each other, LMCache is not installed, or its configuration file is missing.
    """
    options = config.engine_options
    auto, file = options.get("lmcache_auto_config"), options.get("lmcache_config_file")
    if not auto and file is None:
        return {}
    if importlib.util.find_spec("vllm") and not importlib.util.find_spec("lmcache"):
        raise ConfigError(f"{_AUTO if auto else _FILE}: LMCache is not installed; run: pip install lmcache")
    if not auto:
        _config_file(config)
        return {}
    if file is not None:
        raise ConfigError(f"{_AUTO} and {_FILE} cannot be combined")
    if options.get("engine_args", {}).get("enable_expert_parallel"):
        raise ConfigError(f"{_AUTO}: cannot size the cache with option.enable_expert_parallel=true; use {_FILE}")
    if config.options.replicas != "1":
        raise ConfigError(f"{_AUTO} sizes the cache for a single engine; use {_FILE}, or option.replicas=1")
    return {"kv_transfer_config": dict(_CONNECTOR)}


def lmcache_environment(config: EngineConfig, environ: Mapping[str, str], workers: int) -> dict[str, str]:
    """Return LMCache's environment variables. Values in `environ` replace those of option.lmcache_auto_config.

    Args:
        config: the engine's configuration.
        environ: the current environment variables.
        workers: number of vLLM processes, each with one GPU. They share the machine's memory and disk.
    """
    options = config.engine_options
    if "lmcache_config_file" in options:
        return {"LMCACHE_CONFIG_FILE": str(_config_file(config))}
    if not options.get("lmcache_auto_config"):
        return {}
    weights = _weights(config.model)
    defaults = {
        "LMCACHE_MAX_LOCAL_CPU_SIZE": str(_share(_free_memory(), weights, workers)),
        "LMCACHE_MAX_LOCAL_DISK_SIZE": str(_share(shutil.disk_usage(_DISK.parent).free, weights, workers)),
        "LMCACHE_LOCAL_DISK": f"file://{_DISK}/",
        "LMCACHE_ENABLE_LAZY_MEMORY_ALLOCATOR": "true",
        "LMCACHE_EXTRA_CONFIG": '{"use_odirect": true}',
        "PYTHONHASHSEED": "0",  # LMCache's processes must compute the same hash of a block
    }
    return {name: environ.get(name, value) for name, value in defaults.items()}


def _config_file(config: EngineConfig) -> Path:
    """Find LMCache's configuration file next to serving.properties, in the model directory or the working directory."""
    name: str = config.engine_options["lmcache_config_file"]
    paths = [home / name for home in (config.options.directory, config.model, Path()) if home is not None]
    file = next((path for path in paths if path.is_file()), None)
    if file is None:
        raise ConfigError(config.options.problem(_FILE, name, "there is no such file"))
    return file.absolute()


def _share(free: int, weights: int, workers: int) -> int:
    """Return a worker's cache size in GiB. Reserve twice the weights' size, or a fifth of `free` if that is larger."""
    return int(max(0, free - max(2 * weights, free // 5)) / workers / _GIB)


def _weights(model: Path | None) -> int:
    """Return the size of a checkpoint's weights in bytes, from its safetensors files, or its torch files otherwise."""
    for pattern in ("*.safetensors", "*.bin"):
        if model is not None and (total := sum(file.stat().st_size for file in model.rglob(pattern))):
            return total
    return 0


def _free_memory() -> int:
    line = next(line for line in _MEMORY.read_text().splitlines() if line.startswith("MemAvailable:"))
    return int(line.split()[1]) << 10


_LORA = ("max_loras", "max_cpu_loras", "max_lora_rank")

_TRANSLATED = frozenset((
    "engine_args", "guided_decoding", "guided_decoding_backend", "guide_timeout", "speculative_draft_model",
    "num_speculative_tokens", "draft_model_tp_size", "revision", "lmcache_config_file", "lmcache_auto_config",
    "chat_template_content_format", "lora_modules", "adapters_root", "adapters_code", "load_in_4bit", "load_in_8bit",
    *_LORA,
))  # fmt: skip
"""Options that are not passed on unchanged. Every other option is the EngineArgs argument of the same name."""

_HANDLERS = ("generation_config", "override_generation_config")
"""Arguments that affect only vLLM's HTTP server, which the handler replaces."""

_CPU_CACHE_GIB = 4
"""Default size of the KV cache on CPUs, in GiB. vLLM's default is 90 % of the memory, and it fails if less is free."""


def environment(config: EngineConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the vLLM processes. Options override `environ`, which overrides our defaults."""
    defaults = {
        "VLLM_NO_USAGE_STATS": "1",  # without it, vLLM reports usage
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a process with threads must not be forked
    }
    if "gpu_memory_utilization" not in engine_arguments(config, 1, cpu=True):
        defaults["VLLM_CPU_KVCACHE_SPACE"] = str(_CPU_CACHE_GIB)
    cache_space = {"VLLM_CPU_KVCACHE_SPACE": str(config.options.kv_cache_gib)} if config.options.kv_cache_gib else {}
    return {**defaults, **environ, **cache_space}


def engine_arguments(config: EngineConfig, num_devices: int, *, cpu: bool) -> dict[str, Any]:
    """Return the arguments of EngineArgs.

    Args:
        config: the engine's configuration.
        num_devices: number of available devices, for the degree "max".
        cpu: whether the arguments are for vLLM's CPU build, whose cache size is set by `environment`.

    Raises:
        ConfigError: options contradict each other. The message lists all such problems.
    """
    options, problems = config.engine_options, Problems()
    model = spread(config.options.tensor_parallel_degree, options)
    arguments: dict[str, Any] = {
        "model": str(config.model),
        "dtype": TORCH_DTYPES[config.options.dtype],
        "max_num_seqs": config.options.max_rolling_batch_size,
        "tensor_parallel_size": max(num_devices // model.least, 1) if model.tensor is None else model.tensor,
        "disable_log_stats": False,  # /metrics needs the core's statistics; vLLM's own loggers are not used
        # vLLM reads only the end tokens from it, because every request already contains all sampling parameters.
        "generation_config": str(model_files.directory(config.options) or "auto"),
    }
    if cpu:
        arguments["worker_extension_cls"] = "handler.engines.vllm.cpu_worker.Extension"
    limits = {
        "max_num_batched_tokens": config.options.max_num_batched_tokens,
        "max_model_len": config.options.max_model_len,
        "enable_prefix_caching": config.options.enable_prefix_caching,
    }
    if config.options.kv_cache_gib and not cpu:
        limits["kv_cache_memory_bytes"] = config.options.kv_cache_gib << 30
    arguments |= {name: value for name, value in limits.items() if value is not None}
    arguments |= {name: value for name, value in options.items() if name not in _TRANSLATED}
    if options.get("enable_lora"):
        arguments |= {name: options[name] for name in _LORA if name in options}
    if "guided_decoding_backend" in options:
        arguments["structured_outputs_config"] = {"backend": options["guided_decoding_backend"]}
    with problems:
        arguments |= _bitsandbytes(options)
    with problems:
        arguments |= lmcache_arguments(config)
    with problems:
        arguments |= _speculation(options)
    with problems:
        arguments = _merge(arguments, options.get("engine_args", {}))
    with problems:
        _check_reasoning(arguments)
    problems.check()
    return arguments


def _bitsandbytes(options: Mapping[str, Any]) -> dict[str, Any]:
    """Translate LMI's options for bitsandbytes into vLLM's quantization."""
    method = options.get("quantization")
    names = [name for name in BITSANDBYTES if options.get(name)]
    if len(names) > 1:
        raise ConfigError(f"{' and '.join(f'option.{name}' for name in names)} contradict each other")
    if names and method not in (None, "bitsandbytes", BITSANDBYTES[names[0]]):
        raise ConfigError(f"option.{names[0]} and option.quantize={method} contradict each other")
    return {"quantization": "bitsandbytes"} if names or method in BITSANDBYTES.values() else {}


def _speculation(options: Mapping[str, Any]) -> dict[str, Any]:
    """Translate LMI's options for a draft model into vLLM's speculative_config."""
    draft = options.get("speculative_draft_model")
    for name in ("num_speculative_tokens", "draft_model_tp_size"):
        if draft is None and options.get(name, 1) != 1:
            raise ConfigError(f"option.{name} needs option.speculative_draft_model")
    if draft is None:
        return {}
    if "speculative_config" in options:
        raise ConfigError("option.speculative_draft_model and option.speculative_config cannot be combined")
    degree = {"draft_tensor_parallel_size": size} if (size := options.get("draft_model_tp_size")) else {}
    tokens = options.get("num_speculative_tokens", 5)
    return {"speculative_config": {"model": draft, "num_speculative_tokens": tokens, **degree}}


def _check_reasoning(arguments: Mapping[str, Any]) -> None:
    """Refuse vLLM's own reasoning parser, with which structured output is not enforced if there is no reasoning."""
    structured_outputs = arguments.get("structured_outputs_config")
    if arguments.get("reasoning_parser") or (
        isinstance(structured_outputs, dict) and structured_outputs.get("reasoning_parser")
    ):
        raise ConfigError("vLLM's own reasoning_parser is not supported; use option.reasoning_parser")


def _merge(arguments: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Override arguments with those in `option.engine_args`.

    Raises:
        ConfigError: `option.engine_args` contains an argument that another option sets.
    """
    if "model" in more:
        raise ConfigError("option.engine_args: 'model' cannot be set there; use option.model_id")
    for name in _HANDLERS:
        if name in more:
            raise ConfigError(f"option.engine_args: {name!r} has no effect there; use option.{name}")
    return override(arguments, more)


def construct(arguments: Mapping[str, Any], engine_args: type) -> dict[str, Any]:
    """Convert JSON objects to the classes that EngineArgs declares for them, as vLLM's command line does.

    Raises:
        ConfigError: an object is invalid. The message names the option.
    """
    types = {field.name: field.type for field in fields(engine_args)}
    return {name: _construct(name, value, types.get(name)) for name, value in arguments.items()}


def _construct(name: str, value: Any, declared: Any) -> Any:
    classes = [
        candidate
        for candidate in (declared, *get_args(declared))
        if isinstance(candidate, type) and is_dataclass(candidate)
    ]
    if not isinstance(value, dict) or not classes:
        return value
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(classes[0]).validate_python(value)
    except ValidationError as error:
        messages = []
        for detail in error.errors():
            path = ".".join(map(str, detail["loc"]))
            messages.append(f"{path}: {detail['msg']}" if path else detail["msg"])
        raise ConfigError(f"option.{name}: {'; '.join(messages)}") from None
