"""LMCache, which keeps vLLM's KV cache in the host's memory and on disk too: what LMI's two options set for it."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from handler.core.errors import ConfigError, Problem
from handler.engines.base import EngineConfig

_FILE, _AUTO = "option.lmcache_config_file", "option.lmcache_auto_config"
_CONNECTOR = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
_DISK = Path("/tmp/lmcache")
_GIB = 1 << 30
_MEMORY = Path("/proc/meminfo")


def arguments(config: EngineConfig) -> dict[str, Any]:
    """Return the arguments of EngineArgs that option.lmcache_auto_config stands for.

    Raises:
        ConfigError: the options contradict each other or others, LMCache is missing, or its file.
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
        raise ConfigError(f"{_AUTO}: sizes no cache beside option.enable_expert_parallel=true; write {_FILE}")
    if config.options.replicas != "1":
        raise ConfigError(f"{_AUTO}: gives one engine all of the machine; write {_FILE}, or option.replicas=1")
    return {"kv_transfer_config": dict(_CONNECTOR)}


def environment(config: EngineConfig, given: Mapping[str, str], workers: int) -> dict[str, str]:
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
    """Find the file as LMI does: beside serving.properties, or the model; else in the working directory."""
    name: str = config.options.engine_options["lmcache_config_file"]
    places = [home / name for home in (config.options.directory, config.model, Path()) if home is not None]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise ConfigError(Problem(config.options.where(_FILE), _FILE, f"{_FILE}={name}: there is no such file"))
    return found.absolute()


def _share(free: int, weights: int, workers: int) -> int:
    """Return the GiB of a worker's cache: twice the weights stay free, or a fifth of all where that is more."""
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
