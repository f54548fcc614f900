"""Translates our options into the keywords of vLLM's EngineArgs."""

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
from handler.engines.base import EngineConfig
from handler.engines.huggingface.files import TORCH_DTYPES

_FILE, _AUTO = "option.lmcache_config_file", "option.lmcache_auto_config"
_CONNECTOR = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
_DISK = Path("/tmp/lmcache")
_GIB = 1 << 30
_MEMORY = Path("/proc/meminfo")


def lmcache_arguments(config: EngineConfig) -> dict[str, Any]:
    """Return the arguments of EngineArgs that option.lmcache_auto_config stands for.

    Raises:
        ConfigError: the options contradict each other or others, or LMCache or its file is missing.
    """
    options = config.options.engine_options
    auto, file = options.get("lmcache_auto_config"), options.get("lmcache_config_file")
    if not auto and file is None:
        return {}
    if importlib.util.find_spec("vllm") and not importlib.util.find_spec("lmcache"):
        raise ConfigError(f"{_AUTO if auto else _FILE}: LMCache is not installed; to install it: pip install lmcache")
    if not auto:
        _config_file(config)
        return {}
    if file is not None:
        raise ConfigError(f"{_AUTO} and {_FILE} set the same thing")
    if options.get("engine_args", {}).get("enable_expert_parallel"):
        raise ConfigError(f"{_AUTO}: cannot size the cache with option.enable_expert_parallel=true; write {_FILE}")
    if config.options.replicas != "1":
        raise ConfigError(f"{_AUTO}: gives one engine all of the machine; write {_FILE}, or option.replicas=1")
    return {"kv_transfer_config": dict(_CONNECTOR)}


def lmcache_environment(config: EngineConfig, given: Mapping[str, str], workers: int) -> dict[str, str]:
    """Return the variables of LMCache that the options set; those in `given` win over sizes.

    Args:
        workers: vLLM's processes with a GPU each, which share memory and disk.
    """
    options = config.options.engine_options
    if "lmcache_config_file" in options:
        return {"LMCACHE_CONFIG_FILE": str(_config_file(config))}
    if not options.get("lmcache_auto_config"):
        return {}
    weights = _weights(config.model)
    own = {
        "LMCACHE_MAX_LOCAL_CPU_SIZE": str(_share(_free_memory(), weights, workers)),
        "LMCACHE_MAX_LOCAL_DISK_SIZE": str(_share(shutil.disk_usage(_DISK.parent).free, weights, workers)),
        "LMCACHE_LOCAL_DISK": f"file://{_DISK}/",
        "LMCACHE_ENABLE_LAZY_MEMORY_ALLOCATOR": "true",
        "LMCACHE_EXTRA_CONFIG": '{"use_odirect": true}',
        "PYTHONHASHSEED": "0",  # its processes find a block by Python's hash
    }
    return {name: given.get(name, value) for name, value in own.items()}


def _config_file(config: EngineConfig) -> Path:
    """Find the file as LMI does: next to serving.properties, or the model; otherwise in the working directory."""
    name: str = config.options.engine_options["lmcache_config_file"]
    places = [home / name for home in (config.options.directory, config.model, Path()) if home is not None]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise ConfigError(config.options.problem(_FILE, name, "there is no such file"))
    return found.absolute()


def _share(free: int, weights: int, workers: int) -> int:
    """Return the GiB of a worker's cache: twice the weights stay free, or a fifth of all if that is more."""
    return int(max(0, free - max(2 * weights, free // 5)) / workers / _GIB)


def _weights(model: Path | None) -> int:
    """Return the bytes of a checkpoint's weights: those of safetensors, else of torch's files."""
    for pattern in ("*.safetensors", "*.bin"):
        if model is not None and (total := sum(file.stat().st_size for file in model.rglob(pattern))):
            return total
    return 0


def _free_memory() -> int:
    line = next(line for line in _MEMORY.read_text().splitlines() if line.startswith("MemAvailable:"))
    return int(line.split()[1]) << 10


_LORA = ("max_loras", "max_cpu_loras", "max_lora_rank")

_OWN = frozenset((
    "engine_args", "guided_decoding", "guided_decoding_backend", "guide_timeout", "speculative_draft_model",
    "num_speculative_tokens", "draft_model_tp_size", "revision", "lmcache_config_file", "lmcache_auto_config",
    "chat_template_content_format", "lora_modules", "load_in_4bit", "load_in_8bit", *_LORA,
))  # fmt: skip
"""Options that are not arguments themselves; the others have the argument's name."""

_HANDLERS = ("generation_config", "override_generation_config")
"""Arguments of vLLM's that concern its HTTP server, which the handler replaces."""

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
        "generation_config": str(model_files.directory(config.options) or "auto"),
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
    """Refuse vLLM's own reasoning parser: with it, structured output is not enforced on answers without reasoning."""
    own = arguments.get("structured_outputs_config")
    if arguments.get("reasoning_parser") or (isinstance(own, dict) and own.get("reasoning_parser")):
        raise ConfigError("vLLM's reasoning_parser is not used: option.reasoning_parser sets the format")


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
