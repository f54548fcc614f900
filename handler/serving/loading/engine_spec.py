"""Choose the engine, and what it loads, by the options and the model's files."""

from __future__ import annotations

from pathlib import Path

from handler import engines
from handler.config.config import Config
from handler.config.model_files import chat_template, find_task
from handler.config.options.common import STAND_IN
from handler.core.errors import ConfigError, Problem, Problems
from handler.core.values import Task
from handler.engines.base import EngineConfig
from handler.engines.process.engine_loop import Spec


def engine_spec(config: Config) -> Spec:
    """Return what the engine's process loads; fetch or convert the model's files where that is needed.

    Raises:
        ConfigError: there is no such engine or model.
    """
    name = choose_engine(config)
    served_task(config, name, config.model_id)  # refuses before anything is fetched
    try:
        model_id = engines.fetch(name, config.model_id, EngineConfig(config))
        task = served_task(config, name, model_id)
        model = engines.prepare(name, model_id, EngineConfig(config, task=task))
    except OSError as error:
        raise ConfigError(f"the model's files cannot be fetched: {error}") from error
    source = Path(model_id) if model_id and Path(model_id).is_dir() else None
    return Spec(name, EngineConfig(config, model, chat_template(config), task, None if source == model else source))


def choose_engine(config: Config) -> str:
    """Return the name of an engine that is installed and can run the model.

    Raises:
        ConfigError: the engine is not installed, or does not run on so many devices.
    """
    name, problems = config.engine, Problems()
    with problems:
        engines.entry(name)
    if not engines.ENGINES[name].spreads and name != STAND_IN and config.tensor_parallel_degree not in ("1", "max"):
        key = "option.tensor_parallel_degree"
        message = f"{key}={config.tensor_parallel_degree}: the engine {name} runs on one device"
        problems.append(Problem(config.where(key), key, message))
    problems.check()
    return name


def served_task(config: Config, engine: str, model_id: str | None) -> Task:
    """Find what the model computes.

    Args:
        model_id: that of the options; of a hub's model, the directory that was fetched, once it is there.

    Raises:
        ConfigError: the engine does not compute that; or as `find_task`.
    """
    task = find_task(config.task, Path(model_id) if model_id else None)
    engines.check_task(engine, task, config.task)
    return task
