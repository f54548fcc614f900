"""Checks a configuration before anything is downloaded or run, and reads defaults and response templates."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from handler import engines
from handler.config import environment, model_files
from handler.config.config import Config
from handler.config.loader import Reading
from handler.config.model_files import chat_template, read_json
from handler.config.options import images
from handler.core.errors import ConfigError, Problem, Problems, refuse
from handler.core.sealing import read_sealer
from handler.core.values import Sampling
from handler.engines.base import Capabilities, EngineConfig
from handler.plugins.aws import STANDARDS, check_handlers, script_of
from handler.plugins.functions import check_model_py, check_syntax, model_py
from handler.plugins.tool_parser import find_tool_parser
from handler.protocols.assistant.response_template.template import ResponseTemplate, read_response_template
from handler.protocols.assistant.tools.parsing import HF
from handler.protocols.assistant.tools.request import AUTO, NONE
from handler.protocols.kernel.context import GenerationDefaults
from handler.protocols.kernel.parameters import MODEL_DEFAULTS
from handler.serving.batches.store import check_batches
from handler.serving.engine import check_replicas, choose_engine, served_task
from handler.serving.media.loader import media_rules
from handler.serving.metrics.tracing import find_exporter
from handler.serving.request_log import check_log
from handler.serving.secure_mode import adapter_problem
from handler.serving.sessions import sessions_root
from handler.serving.stored_responses import check_store
from handler.serving.user_code import (
    adapters_at_start,
    check_users_files,
    handlers_home,
    model_py_directory,
    plugin_directories,
)

log = logging.getLogger("handler.launch")


def check(reading: Reading, directory: Path | None = None, *, handlers: bool = False) -> Problems:
    """Return all problems of a configuration that can be found before anything is downloaded, converted, loaded or run.

    This covers the options, the directories that they name, the chat template, the replicas, the trace exporter, the
    syntax of user files, the engine with its arguments and files, the adapters, and the media directory.

    Args:
        directory: directory of serving.properties, even if the file does not exist. The default is taken from
            `reading`.
        handlers: whether the host calls user-defined handlers and middleware, as AWS's vLLM image does.
    """
    config, problems = reading.config, Problems(reading.problems)
    path = model_py(directory or model_py_directory(config))
    parts: list[Callable[[Config], object]] = [
        functools.partial(check_users_files, directory=directory),
        _check_max_adapters,
        sessions_root,
        check_store,
        check_batches,
        check_log,
        _check_sealer,
        check_replicas,
        _check_exporter,
        _check_chat_template,
        functools.partial(_check_code, path, handlers),
        _check_tool_parser,
        media_rules,
        _check_defaults,
        _check_response_template,
    ]
    for part in parts:
        with problems:
            part(config)
    if reading.engine:
        _check_engine(reading, directory, problems)
    return problems


def _check_engine(reading: Reading, directory: Path | None, problems: Problems) -> None:
    """Add problems with the engine, its arguments and the adapters to `problems`."""
    config, arguments = reading.config, EngineConfig(reading.config)
    with problems:
        found = Problems()
        with found:
            arguments = replace(arguments, task=served_task(config, reading.engine, config.model_id))
        with found:
            engines.check(reading.engine, config.model_id, arguments)
        refuse(_with_origin(problem, config) for problem in found)
    with problems:
        name = choose_engine(config)
        if not engines.capabilities(name, arguments).no_adapters:
            for path in adapters_at_start(config, directory).values():
                with problems:
                    check_model_py(model_py(path))
                    if problem := adapter_problem(path):
                        raise ConfigError(f"src={path}: {problem}")


def without_model_data(reading: Reading) -> Reading:
    """Return the reading without a model in SageMaker's model data, if this machine has no model data."""
    config = reading.config
    return reading._replace(config=replace(config, model_id=None)) if _is_mounted(config) else reading


def _is_mounted(config: Config) -> bool:
    """Return whether the model is in SageMaker's model data, which exists only in containers."""
    directory, path = environment.model_path(), Path(config.model_id or "")
    return directory in (path, *path.parents) and not directory.is_dir()


def model_data_note(config: Config) -> str:
    """Return a note if the model is in SageMaker's model data, which exists only in containers, otherwise "". Without
    option.model_id, AWS's images and this project's containers serve the model data.
    """
    if _is_mounted(config):
        return f"{config.model_id}: not checked; SageMaker puts the model there in a container"
    directory, is_of_aws = environment.model_path(), any(name.startswith(images.ALL) for name in os.environ)
    if config.model_id or not is_of_aws or directory.is_dir() or not engines.fetches(config.engine):
        return ""
    return f"{directory}: not checked; a container serves the model that SageMaker puts there"


def _check_max_adapters(config: Config) -> None:
    environment.max_adapters()


def _check_sealer(config: Config) -> None:
    read_sealer(config.compaction_key_file)


def _check_chat_template(config: Config) -> None:
    template = chat_template(config)
    if template is None or importlib.util.find_spec("jinja2") is None:  # an engine that renders chats brings it
        return
    from handler.engines.huggingface.chat_template import check_template

    try:
        check_template(template)
    except ValueError as error:
        key = "option.chat_template"
        raise ConfigError(f"{config.where(key)}: {key}: the template is broken: {error}") from None


def _check_exporter(config: Config) -> None:
    find_exporter(config.otlp_traces_endpoint)


def _check_defaults(config: Config) -> None:
    read_defaults(config, Path(config.model_id) if config.model_id else None)


def _check_code(path: Path | None, handlers: bool, config: Config) -> None:
    if not handlers:
        check_model_py(path)
        return
    home, variables = handlers_home(config), environment.custom_code()
    if path is not None and path != script_of(home, variables):
        check_model_py(path, handlers=STANDARDS)
    check_handlers(home, variables)


def _check_response_template(config: Config) -> None:
    directory = config.engine_options.get("echo_tokenizer") or config.model_id
    if directory and Path(directory).is_dir():  # otherwise it is downloaded later
        response_template(config, Path(directory))


def _check_tool_parser(config: Config) -> None:
    if config.tool_parser_plugin:
        check_syntax(find_tool_parser(config.tool_parser_plugin, plugin_directories(config)))


def _with_origin(problem: Problem, config: Config) -> Problem:
    """Add an origin to an engine problem: that of the first option in its message, or of the model if it names none."""
    option_keys = [key for key in re.findall(r"option\.\w+", problem.message) if key in config.origins]
    key = option_keys[0] if option_keys else problem.name or "option.model_id"
    return Problem(config.origins.get(key, ""), key, problem.message)


# -- default sampling parameters, from the model's generation_config.json ----------------------------------------------


_LENGTH = "max_new_tokens"


def generation_defaults(config: Config, model: Path | None, able: Capabilities) -> GenerationDefaults:
    """Read the model's default sampling parameters, and log those that apply. Defaults that the engine does not support
    are dropped with a warning.

    Raises:
        ConfigError: a default is wrong, or cannot be read.
    """
    values = read_defaults(config, model)
    length = values.pop(_LENGTH, None)
    for name, reason in ((name, _unsupported(name, value, able)) for name, value in [*values.items()]):
        if reason:
            log.warning("the model's default %s=%s has no effect: %s", name, values.pop(name), reason)
    if unread := [name for name in config.override_generation_config or () if name not in MODEL_DEFAULTS]:
        log.warning("%s: %s has no effect", model_files.OVERRIDE, ", ".join(unread))
    limit = length if model_files.limits_answers(config) else None
    if length is None and config.tgi_version is not None:
        length = config.tgi_version.max_new_tokens
    defaults = GenerationDefaults(values, length, limit)
    if defaults.shown:
        log.info(
            "default sampling parameters: %s (%s; %s=vllm disables the model's defaults)",
            ", ".join(f"{name}={value:g}" for name, value in defaults.shown.items()),
            model_files.origin(config, model),
            model_files.KEY,
        )
    return defaults


def read_defaults(config: Config, model: Path | None) -> dict[str, Any]:
    """Read the sampling parameters from generation_config.json and `option.override_generation_config`.

    Raises:
        ConfigError: the file cannot be read, or some values are wrong. The message lists all wrong values.
    """
    values, problems = model_files.sampling_values(config, model), Problems()
    read: dict[str, Any] = {}
    for name, reader in MODEL_DEFAULTS.items():
        if (value := values.get(name)) is None:
            continue
        try:
            read[name] = reader(value)
        except ValueError as error:
            problems.append(model_files.wrong_value(config, model, name, value, str(error)))
    problems.check()
    return read


def _unsupported(name: str, value: Any, able: Capabilities) -> str:
    """Return why the engine does not support a default, or "" if it supports it or the value has no effect."""
    if value == Sampling._field_defaults[name]:
        return ""
    if reason := able.unsupported.get(name):
        return f"the engine does not support it: {reason}"
    most = able.limits.get(name)
    return f"the engine supports at most {most:g}" if most is not None and value > most else ""


# -- the model's own response template ---------------------------------------------------------------------------------


_OPTIONS = ("option.reasoning_parser", "option.tool_call_parser")


def response_template(config: Config, model: Path | None) -> ResponseTemplate | None:
    """Return the response template from the tokenizer files, or None if it is missing or the options do not select it.

    A template parses complete responses. `auto` therefore selects it unless an option names another parser. With
    `auto`, an invalid template is ignored with a warning. It is an error only if an option names the template.

    Args:
        model: directory or file of the model.

    Raises:
        ConfigError: an option names the template, but the template is missing, is invalid, lacks the part that the
            option selects, or is combined with another parser.
    """
    formats = dict(zip(_OPTIONS, (config.reasoning, config.tool_call_parser), strict=True))
    plugin = {"option.tool_parser_plugin": config.tool_parser_plugin} if config.tool_parser_plugin else {}
    hf_keys = [key for key, name in formats.items() if name == HF.name]
    other_formats = [
        f"{key}={name}" for key, name in {**formats, **plugin}.items() if name not in (AUTO, NONE, HF.name)
    ]
    if hf_keys and other_formats:
        raise _refused(config, hf_keys[0], f"parses complete responses, and cannot be combined with {other_formats[0]}")
    if other_formats or set(formats.values()) == {NONE}:
        return None
    path = None if model is None else model / "tokenizer_config.json"
    value = None if path is None else read_json(path).get("response_template")
    if value is None:
        if hf_keys:
            raise _refused(
                config,
                hf_keys[0],
                f"{path or 'the model'} has no response_template; auto derives the parsers from the chat template",
            )
        return None
    try:
        template = read_response_template(value)
    except ValueError as error:
        if hf_keys:
            raise _refused(config, hf_keys[0], f"{path}: {error}") from None
        log.warning("%s: %s; the parsers are derived from the chat template", path, error)
        return None
    for key, part, name in zip(_OPTIONS, (template.reasoning, template.calls), ("thinking", "tool_calls"), strict=True):
        if key in hf_keys and part is None:
            raise _refused(config, key, f"{path}: response_template.fields has no {name}")
    return template


def _refused(config: Config, key: str, reason: str) -> ConfigError:
    return ConfigError(config.problem(key, HF.name, reason))
