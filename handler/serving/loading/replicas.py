"""The engines of a model: one, or `option.replicas` of them, each with its own devices or cores."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from handler import engines
from handler.config.config import Config
from handler.config.engines import ENGINES
from handler.config.gpus import spread
from handler.core.devices import read_driver, visible_gpus
from handler.core.errors import ConfigError, Problem
from handler.engines.process.engine_loop import Spec
from handler.engines.process.places import ANYWHERE, Place, on_cores, on_devices
from handler.engines.process.replicas import ReplicaSet
from handler.engines.process.supervisor import EngineSupervisor

log = logging.getLogger("handler.launch")

_KEY = "option.replicas"
_LEAST_PATIENCE = 2.0  # seconds; a step of a slow model takes one
_SILENT = 0.25  # the part of option.engine_timeout without a step after which requests may move to another replica


def start_engine(config: Config, spec: Spec) -> EngineSupervisor | ReplicaSet:
    """Start the engine, or all its replicas.

    Raises:
        ConfigError: there are too few devices, or as in check_replicas.
    """
    isolated = engines.entry(spec.engine).isolated
    if config.engine_isolation != "auto":
        isolated = config.engine_isolation == "process"
    timeouts = {"timeout": config.engine_timeout, "load_timeout": config.model_loading_timeout}
    check_replicas(config)
    places = [ANYWHERE] if config.replicas == "1" else replica_places(config, _devices(spec), _cores())
    started: list[EngineSupervisor] = []
    for place in places:
        if len(places) > 1:
            where = ", ".join(f"{name}={value}" for name, value in place.environ.items())
            cores = ",".join(map(str, sorted(place.cores)))
            log.info("replica %d: %s", len(started), where or (cores and f"cores {cores}") or "starts")
        started.append(EngineSupervisor(spec, isolated=isolated or len(places) > 1, place=place, **timeouts))
    if len(started) == 1:
        return started[0]
    follows = config.enable_prefix_caching
    if follows is None:  # as the engine does
        follows = ENGINES[spec.engine].caches_prefixes
    patience = max(config.engine_timeout * _SILENT, _LEAST_PATIENCE)
    return ReplicaSet(started, config.max_rolling_batch_size, follows_prompts=follows, patience=patience)


def check_replicas(config: Config) -> None:
    """Check what needs no look at the machine.

    Raises:
        ConfigError: replicas are to run on threads, or the engine is one by URL.
    """
    if config.replicas != "1" and config.engine == "openai":
        _refuse(
            config, "for several servers by URL, list their addresses in option.base_url; leave option.replicas out"
        )
    if config.replicas != "1" and config.engine_isolation == "thread":
        where = config.where("option.engine_isolation")
        _refuse(config, f"replicas are processes, but option.engine_isolation=thread ({where})")


def replica_places(config: Config, devices: Sequence[str], cores: Sequence[int]) -> list[Place]:
    """Return the place of each of several replicas, or that of the one that `auto` finds room for.

    Args:
        devices: the GPUs that the engine may use; empty: it runs on the cores.
        cores: empty where processes cannot be kept to cores.

    Raises:
        ConfigError: there are too few devices.
    """
    if not devices:
        return [ANYWHERE] if config.replicas == "auto" else on_cores(cores, int(config.replicas))
    model = spread(config.tensor_parallel_degree, config.engine_options)
    each = model.gpus(len(devices))
    if config.replicas == "auto":
        count = max(len(devices) // each, 1)
        return [ANYWHERE] if count == 1 else on_devices(devices[: count * each], count)
    count = int(config.replicas)
    if count * model.least > len(devices):
        _refuse(config, f"with {model} it needs {count * model.least} GPUs; there are {len(devices)}")
    return on_devices(devices if model.tensor is None else devices[: count * each], count)


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def _devices(spec: Spec) -> list[str]:
    """Name the GPUs; none for an engine that runs on the processor."""
    return visible_gpus(read_driver(), os.environ) if ENGINES[spec.engine].spreads else []


def _refuse(config: Config, why: str) -> None:
    raise ConfigError(Problem(config.where(_KEY), _KEY, f"{_KEY}={config.replicas}: {why}"))
