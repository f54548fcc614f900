"""Check a configuration without loading, fetching, converting or running anything."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from pathlib import Path

from handler import engines
from handler.config import environment
from handler.config.config import Config
from handler.config.loader import Reading
from handler.config.model_files import chat_template
from handler.core.errors import ConfigError, Problem, Problems
from handler.engines.base import EngineConfig
from handler.plugins.aws import STANDARDS, check_handlers, script_of
from handler.plugins.functions import check_model_py, check_syntax, model_py
from handler.plugins.tool_parser import find_tool_parser
from handler.serving.loading.engine_spec import choose_engine, served_task
from handler.serving.loading.generation import read_defaults
from handler.serving.loading.model_directory import (
    adapters_at_start,
    handlers_home,
    model_py_directory,
    plugin_directories,
)
from handler.serving.loading.replicas import check_replicas
from handler.serving.loading.response_template import response_template
from handler.serving.media.rules import media_rules
from handler.serving.metrics.tracing import find_exporter
from handler.serving.sessions import sessions_root


def check(reading: Reading, directory: Path | None = None, *, handlers: bool = False) -> Problems:
    """Find all problems that show before anything is loaded, fetched, converted or run.

    Those of the options, the sessions' path, the replicas, the exporter of traces, the syntax of a user's files, the
    engine, its arguments and files, adapters, the directory of media.

    Args:
        directory: where serving.properties lies, or would; by default where it does.
        handlers: the host calls handlers and middleware of AWS's vLLM image.
    """
    config, problems = reading.config, Problems(reading.problems)
    traces = functools.partial(find_exporter, config.otlp_traces_endpoint)
    template = functools.partial(chat_template, config)
    path = model_py(directory or model_py_directory(config))
    syntax = functools.partial(check_model_py, path)
    if handlers:
        syntax = functools.partial(_check_code, path, config)
    sessions, replicas = functools.partial(sessions_root, config), functools.partial(check_replicas, config)
    plugin = functools.partial(_check_tool_parser, config)
    media = functools.partial(media_rules, config)
    generation = functools.partial(read_defaults, config, Path(config.model_id) if config.model_id else None)
    answers = functools.partial(_check_response_template, config)
    parts = (environment.max_adapters, sessions, replicas, traces, template, syntax, plugin, media, generation, answers)
    for part in parts:
        with problems:
            part()
    if not reading.engine:
        return problems
    arguments = EngineConfig(config)
    with problems:
        found = Problems()
        with found:
            arguments = replace(arguments, task=served_task(config, reading.engine, config.model_id))
        with found:
            engines.check(reading.engine, config.model_id, arguments)
        if found:
            raise ConfigError(*(_with_origin(problem, config) for problem in found))
    with problems:
        name = choose_engine(config)
        if not engines.capabilities(name, arguments).no_adapters:
            for path in adapters_at_start(config, directory).values():
                with problems:
                    check_model_py(model_py(path))
    return problems


def _check_code(path: Path | None, config: Config) -> None:
    home, variables = handlers_home(config), environment.custom_code()
    if path is not None and path != script_of(home, variables):
        check_model_py(path, handlers=STANDARDS)
    check_handlers(home, variables)


def _check_response_template(config: Config) -> None:
    directory = config.engine_options.get("echo_tokenizer") or config.model_id
    if directory and Path(directory).is_dir():  # or it is fetched
        response_template(config, Path(directory))


def _check_tool_parser(config: Config) -> None:
    if config.tool_parser_plugin:
        check_syntax(find_tool_parser(config.tool_parser_plugin, plugin_directories(config)))


def _with_origin(problem: Problem, config: Config) -> Problem:
    """Add the origin of the first option that an engine's problem names; where it names none, it is the model's."""
    named = [key for key in re.findall(r"option\.\w+", problem.message) if key in config.origins]
    key = named[0] if named else problem.name or "option.model_id"
    return Problem(config.origins.get(key, ""), key, problem.message)
