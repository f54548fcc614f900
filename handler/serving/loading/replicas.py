"""The engines of a model: one, or `option.replicas` of them, each with its own devices or cores."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from handler import engines
from handler.config.config import Config
from handler.core.devices import read_driver, visible_gpus
from handler.core.errors import ConfigError, Problem
from handler.engines.process.engine_loop import Spec
from handler.engines.process.places import ANYWHERE, Place, on_cores, on_devices
from handler.engines.process.replicas import ReplicaSet
from handler.engines.process.supervisor import EngineSupervisor

log = logging.getLogger("handler.launch")

_KEY = "option.replicas"


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
        follows = engines.ENGINES[spec.engine].spreads
    return ReplicaSet(started, config.max_rolling_batch_size, follows_prompts=follows)


def check_replicas(config: Config) -> None:
    """Check what needs no look at the machine.

    Raises:
        ConfigError: replicas are to run on threads, or the engine is one by URL.
    """
    if config.replicas != "1" and config.engine == "openai":
        _refuse(config, "several servers by URL are several addresses in option.base_url; leave option.replicas out")
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
    options, degree = config.engine_options, config.tensor_parallel_degree
    stages = options.get("pipeline_parallel_size") or options.get("trtllm_pipeline_parallel_size") or 1
    if not devices:
        return [ANYWHERE] if config.replicas == "auto" else on_cores(cores, int(config.replicas))
    each = len(devices) if degree == "max" else int(degree) * stages
    if config.replicas == "auto":
        count = max(len(devices) // each, 1)
        return [ANYWHERE] if count == 1 else on_devices(devices[: count * each], count)
    count = int(config.replicas)
    least = stages if degree == "max" else each
    if count * least > len(devices):
        degrees = f"option.tensor_parallel_degree={degree}" + (f" and {stages} stages" if stages > 1 else "")
        _refuse(config, f"with {degrees} it needs {count * least} GPUs; there are {len(devices)}")
    return on_devices(devices if degree == "max" else devices[: count * each], count)


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def _devices(spec: Spec) -> list[str]:
    """Name the GPUs; none for an engine that runs on the processor."""
    return visible_gpus(read_driver(), os.environ) if engines.ENGINES[spec.engine].spreads else []


def _refuse(config: Config, why: str) -> None:
    raise ConfigError(Problem(config.where(_KEY), _KEY, f"{_KEY}={config.replicas}: {why}"))
