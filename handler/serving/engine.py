"""Starts the engine of a model: finds and downloads its files, and starts the engine or its replicas."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from handler import engines
from handler.config.config import Config
from handler.config.engines import ENGINES
from handler.config.environment import spread
from handler.config.loader import Reading, read_server_config
from handler.config.model_files import chat_template, find_task
from handler.config.options.tables import STAND_IN
from handler.config.sources import Setting
from handler.core.devices import read_driver, visible_gpus
from handler.core.errors import ConfigError, Problems
from handler.core.user_functions import Role
from handler.core.values import Task
from handler.engines import choice, downloads, s3
from handler.engines.base import EngineConfig
from handler.engines.huggingface import files
from handler.engines.process.engine_process import Spec
from handler.engines.process.replicas import ReplicaSet
from handler.engines.process.supervisor import ANYWHERE, EngineSupervisor, Placement, on_cores, on_devices

log = logging.getLogger("handler.launch")

_OWN = ("serving.properties", "model.py", "requirements.txt")
_DRAFT = "speculative_draft_model"


def engine_spec(config: Config) -> Spec:
    """Return the specification of the engine process. Download and convert the model files first if needed.

    Raises:
        ConfigError: the engine or the model is not available.
    """
    name = choose_engine(config)
    if (origin := config.where("option.llm_engine")).startswith("chosen"):
        log.info("engine %s: %s", name, origin)
    served_task(config, name, config.model_id)  # raises an error before anything is downloaded
    try:
        model_id = engines.fetch(name, config.model_id, EngineConfig(config))
        config = _with_directories(config, name, model_id)
        task = served_task(config, name, model_id)
        model = engines.prepare(name, model_id, EngineConfig(config, task=task))
        weights = engines.weights(name, model_id)
    except OSError as error:
        raise ConfigError(f"the model's files cannot be fetched: {error}") from error
    source = Path(model_id) if model_id and Path(model_id).is_dir() else None
    source = None if source == model else source
    return Spec(name, EngineConfig(config, model, chat_template(config), task, source, weights))


def _with_directories(config: Config, engine: str, model_id: str | None) -> Config:
    """Replace the S3 URLs of models with local directories, where engines and adapters look for files."""
    if s3.is_url(config.model_id):
        config = replace(config, model_id=model_id)
        if s3.is_download(config.directory):  # only the settings, which the model's directory contains too
            return _with_draft(replace(config, directory=Path(str(model_id))), engine)
        for path in [path for path in map(Path(str(model_id)).joinpath, _OWN) if path.is_file()]:
            log.warning("%s of the model on S3 is ignored: options and code are read from this machine", path.name)
    return _with_draft(config, engine)


def _with_draft(config: Config, engine: str) -> Config:
    if s3.is_url(draft := config.engine_options.get(_DRAFT)):
        fetched = engines.fetch(engine, draft, EngineConfig(config))
        config = replace(config, engine_options={**config.engine_options, _DRAFT: fetched})
    return config


def downloads_of(config: Config, engine: str) -> dict[str, str]:
    """Return the S3 URLs of the models to download at startup, by option."""
    if config.handle_role is Role.ALONE:
        url = config.settings.get("option.model_id")
        return {"option.model_id": url} if s3.is_url(url) else {}
    if not engines.fetches(engine):
        return {}
    sources = {"option.model_id": config.model_id, f"option.{_DRAFT}": config.engine_options.get(_DRAFT)}
    return {key: url for key, url in sources.items() if s3.is_url(url)}


def hub_note(config: Config, engine: str) -> str:
    """Return a note about the hub download and the conversion at startup, or "" if nothing is downloaded."""
    model = config.model_id or ""
    if config.handle_role is Role.ALONE or not engines.fetches(engine) or not files.is_hub_reference(model):
        return ""
    if "/" not in model:
        return (
            f"{model}: not checked; it is not a file or directory on this machine, so it is looked up on the hub at "
            "startup; most names on the hub have the form OWNER/MODEL"
        )
    more = engines.conversion(engine, model) or choice.note(config)
    return f"{model}: not checked; at startup it is downloaded from the hub{more and '; ' + more}"


def choose_engine(config: Config) -> str:
    """Return the name of the configured engine.

    Raises:
        ConfigError: the engine is not installed, or does not support the number of devices.
    """
    name, problems = config.engine, Problems()
    with problems:
        engines.entry(name)
    if not ENGINES[name].spreads and name != STAND_IN and config.tensor_parallel_degree not in ("1", "max"):
        chosen = "; option.llm_engine selects another engine" if config.llm_engine == "auto" else ""
        reason = f"the engine {name} runs on one device{chosen}"
        if "engine_python" in config.engine_options:
            reason = "pass it to the server of option.engine_python as a flag, in option.engine_flags"
        problems.append(config.problem("option.tensor_parallel_degree", config.tensor_parallel_degree, reason))
    problems.check()
    return name


def served_task(config: Config, engine: str, model_id: str | None) -> Task:
    """Return the task of the model.

    Args:
        model_id: model id from the options, or the directory of a downloaded model.

    Raises:
        ConfigError: the engine does not support the task, or the task cannot be determined.
    """
    task = find_task(config.task, Path(model_id) if model_id else None)
    engines.check_task(engine, task, config.task)
    return task


# -- the engine of a model, or one engine for each replica (`option.replicas`), with its own devices or cores ----------


_KEY = "option.replicas"
_LEAST_PATIENCE = 2.0  # seconds; a step of a slow model takes one second
_SILENT = 0.25  # fraction of option.engine_timeout without a step after which requests may move to another replica


def start_engine(config: Config, spec: Spec) -> EngineSupervisor | ReplicaSet:
    """Start the engine or all its replicas.

    Raises:
        ConfigError: there are too few devices, or `check_replicas` raises an error.
    """
    isolated = engines.entry(spec.engine).isolated
    if config.engine_isolation != "auto":
        isolated = config.engine_isolation == "process"
    # A server at option.base_url loads its model in its own time, and may even be started later.
    load_timeout = math.inf if "base_url" in config.engine_options else config.model_loading_timeout
    timeouts = {"timeout": config.engine_timeout, "load_timeout": load_timeout}
    check_replicas(config)
    places = [ANYWHERE] if config.replicas == "1" else replica_places(config, _devices(spec), _cores())
    started: list[EngineSupervisor] = []
    for placement in places:
        if len(places) > 1:
            log.info("replica %d: %s", len(started), _describe(placement))
        started.append(EngineSupervisor(spec, isolated=isolated or len(places) > 1, placement=placement, **timeouts))
    if len(started) == 1:
        return started[0]
    follows = config.enable_prefix_caching
    if follows is None:  # as the engine does
        follows = ENGINES[spec.engine].caches_prefixes
    patience = max(config.engine_timeout * _SILENT, _LEAST_PATIENCE)
    return ReplicaSet(started, config.max_rolling_batch_size, follows_prompts=follows, patience=patience)


def _describe(placement: Placement) -> str:
    variables = ", ".join(f"{name}={value}" for name, value in placement.environ.items())
    cores = ",".join(map(str, sorted(placement.cores)))
    return variables or (cores and f"cores {cores}") or "starts"


def check_replicas(config: Config) -> None:
    """Check the options for replicas, as far as this is possible without knowing the machine.

    Raises:
        ConfigError: several replicas are configured, but the engine uses servers at a URL, or engines run on threads.
    """
    if config.replicas != "1" and config.engine and ENGINES[config.engine].remote:
        _refuse(config, "list the addresses of several servers in option.base_url, and omit option.replicas")
    if config.replicas != "1" and config.engine_isolation == "thread":
        where = config.where("option.engine_isolation")
        _refuse(config, f"replicas run as processes, but option.engine_isolation=thread ({where})")


def replica_places(config: Config, devices: Sequence[str], cores: Sequence[int]) -> list[Placement]:
    """Return the devices or cores of each replica. `auto` uses as many replicas as the devices allow.

    Args:
        devices: the GPUs that the engine may use; empty if it runs on the CPU.
        cores: cores that the engine may use; empty if processes cannot be pinned to cores.

    Raises:
        ConfigError: there are too few devices.
    """
    if not devices:
        return [ANYWHERE] if config.replicas == "auto" else on_cores(cores, int(config.replicas))
    model = spread(config.tensor_parallel_degree, config.engine_options)
    each = len(devices) if model.tensor is None else model.least
    if config.replicas == "auto":
        count = max(len(devices) // each, 1)
        return [ANYWHERE] if count == 1 else on_devices(devices[: count * each], count)
    count = int(config.replicas)
    if count * model.least > len(devices):
        _refuse(config, f"needs {count * model.least} GPUs with {model}, but there are {len(devices)}")
    return on_devices(devices if model.tensor is None else devices[: count * each], count)


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def _devices(spec: Spec) -> list[str]:
    """Return the ids of the GPUs, or an empty list if the engine cannot spread a model over GPUs."""
    return visible_gpus(read_driver(), os.environ) if ENGINES[spec.engine].spreads else []


def _refuse(config: Config, reason: str) -> None:
    raise ConfigError(config.problem(_KEY, config.replicas, reason))


# -- reading of a server's configuration, including serving.properties in a model directory on S3 ----------------------


def read_local(
    model: str | None = None,
    engine: str | None = None,
    properties: Path | None = None,
    overrides: Iterable[str] = (),
) -> Reading:
    """Read a server's configuration without downloading anything, and choose the engine of a GGUF file.

    Args:
        model, engine, properties, overrides: the arguments of `read_server_config`.
    """
    return _with_choice(choice.engine_of, model, engine, properties, list(overrides))


def _with_choice(
    choose: Callable[[Config], Setting | None],
    model: str | None,
    engine: str | None,
    properties: Path | None,
    overrides: Sequence[str],
) -> Reading:
    """Read a server's configuration, with the engine that `choose` returns for it, if any."""
    reading = read_server_config(model, engine, properties, overrides)
    chosen = choose(reading.config)
    return reading if chosen is None else read_server_config(model, engine, properties, overrides, chosen)


def _choose(config: Config) -> Setting | None:
    return choice.engine_of(config) or choice.engine_of_remote(config)


def read_sources(
    model: str | None = None,
    engine: str | None = None,
    properties: Path | None = None,
    overrides: Iterable[str] = (),
) -> Reading:
    """Read a server's configuration, and choose the engine of a GGUF file.

    With `HF_MODEL_ID=s3://...`, also download the model's options and code. As in LMI, this variable specifies a
    complete model directory, including serving.properties and model.py. `option.model_id` specifies only the model
    files.

    Args:
        model, engine, properties, overrides: the arguments of `read_server_config`.

    Raises:
        ConfigError: the options and code cannot be downloaded.
    """
    overrides = list(overrides)
    reading = _with_choice(_choose, model, engine, properties, overrides)
    url = reading.config.model_id
    if reading.config.directory or "OPTION_MODEL_ID" in os.environ or url != os.environ.get("HF_MODEL_ID"):
        return reading
    if not (reading.engine and engines.fetches(reading.engine) and s3.is_url(url)):
        return reading
    directory = Path(downloads.fetch(s3.download, url, list(s3.SETTINGS)))
    if (own := directory / "serving.properties").is_file():
        reading = _with_choice(_choose, None, engine, own, overrides)
    model_id = reading.config.model_id or url
    return reading._replace(config=replace(reading.config, model_id=model_id, directory=directory))
