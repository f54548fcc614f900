"""Choose the engine, and what it loads, by the options and the model's files."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from handler import engines
from handler.config.config import Config
from handler.config.engines import ENGINES
from handler.config.model_files import chat_template, find_task
from handler.config.options.common import STAND_IN
from handler.core.custom_handlers import Role
from handler.core.errors import ConfigError, Problem, Problems
from handler.core.values import Task
from handler.engines import s3
from handler.engines.base import EngineConfig
from handler.engines.huggingface import hub
from handler.engines.process.engine_loop import Spec

log = logging.getLogger("handler.launch")

_OWN = ("serving.properties", "model.py", "requirements.txt")
_DRAFT = "speculative_draft_model"


def engine_spec(config: Config) -> Spec:
    """Return what the engine's process loads; fetch or convert the model's files where that is needed.

    Raises:
        ConfigError: there is no such engine or model.
    """
    name = choose_engine(config)
    served_task(config, name, config.model_id)  # refuses before anything is fetched
    try:
        model_id = engines.fetch(name, config.model_id, EngineConfig(config))
        config = _with_directories(config, name, model_id)
        task = served_task(config, name, model_id)
        model = engines.prepare(name, model_id, EngineConfig(config, task=task))
    except OSError as error:
        raise ConfigError(f"the model's files cannot be fetched: {error}") from error
    source = Path(model_id) if model_id and Path(model_id).is_dir() else None
    return Spec(name, EngineConfig(config, model, chat_template(config), task, None if source == model else source))


def _with_directories(config: Config, engine: str, model_id: str | None) -> Config:
    """Name the directories of models of S3 in their place, as DJL Serving does: engines and adapters look there."""
    if s3.is_url(config.model_id):
        config = replace(config, model_id=model_id)
        if s3.is_download(config.directory):  # of the settings alone, which the model has too
            return _with_draft(replace(config, directory=Path(str(model_id))), engine)
        for path in [path for path in map(Path(str(model_id)).joinpath, _OWN) if path.is_file()]:
            log.warning("%s of the model on S3 is not read: options and code come from this machine", path.name)
    return _with_draft(config, engine)


def _with_draft(config: Config, engine: str) -> Config:
    if s3.is_url(draft := config.engine_options.get(_DRAFT)):
        fetched = engines.fetch(engine, draft, EngineConfig(config))
        config = replace(config, engine_options={**config.engine_options, _DRAFT: fetched})
    return config


def downloads_of(config: Config, engine: str) -> dict[str, str]:
    """Return the models of S3 that a start downloads, by their options."""
    if config.handle_role is Role.ALONE:
        url = config.settings.get("option.model_id")
        return {"option.model_id": url} if s3.is_url(url) else {}
    if not engines.fetches(engine):
        return {}
    named = {"option.model_id": config.model_id, f"option.{_DRAFT}": config.engine_options.get(_DRAFT)}
    return {key: url for key, url in named.items() if s3.is_url(url)}


def hub_note(config: Config, engine: str) -> str:
    """Say what a start fetches from the hub, and does with it; "" where it fetches nothing there."""
    model = config.model_id or ""
    if config.handle_role is Role.ALONE or not engines.fetches(engine) or not hub.is_hub_reference(model):
        return ""
    rest = engines.conversion(engine, model)
    return f"{model}: the start downloads it from the hub{rest and '; ' + rest}"


def choose_engine(config: Config) -> str:
    """Return the name of an engine that is installed and can run the model.

    Raises:
        ConfigError: the engine is not installed, or does not run on so many devices.
    """
    name, problems = config.engine, Problems()
    with problems:
        engines.entry(name)
    if not ENGINES[name].spreads and name != STAND_IN and config.tensor_parallel_degree not in ("1", "max"):
        key = "option.tensor_parallel_degree"
        chosen = ", and no option names another (option.llm_engine)" if config.llm_engine == "auto" else ""
        message = f"{key}={config.tensor_parallel_degree}: the engine {name} runs on one device{chosen}"
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
