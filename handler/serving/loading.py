"""Load a served model: choose the engine, start it, load the tokenizer, find adapters and a user's model.py."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from handler import engines
from handler.config import environment
from handler.config.config import Config
from handler.config.loader import Reading
from handler.config.model_files import chat_template, find_task
from handler.core.errors import ConfigError, Problem, Problems
from handler.core.event_loop import run_in_daemon_thread
from handler.core.framing import FRAMINGS
from handler.core.values import Task
from handler.engines.base import EngineConfig, Tokenizer
from handler.engines.process.engine_loop import Spec
from handler.engines.structured_output.validator import Restartable, StructuredOutputValidator
from handler.plugins.functions import Formatters, check_syntax, choose, find_formatters, model_py
from handler.plugins.tool_parser import find_tool_parser, load_tool_format
from handler.protocols.assistant.template import warn_of_unread
from handler.scheduler.lora.files import adapters_in
from handler.scheduler.lora.registry import AdapterHome, AdapterRegistry
from handler.serving.context import schema_context
from handler.serving.media.rules import image_rules
from handler.serving.metrics.tracing import find_exporter, make_tracer
from handler.serving.model import ServedModel
from handler.serving.replicas import check_replicas, start_engine
from handler.serving.sessions import configured_sessions, sessions_root

log = logging.getLogger("handler.launch")


async def load_model(
    config: Config,
    formatters: Formatters,
    directory: Path | None = None,
    *,
    announce: Callable[[Spec], None] = lambda spec: None,
    stepped: bool = False,
) -> ServedModel:
    """Load all that a host needs; the engine may still be loading when this returns.

    The engine's process ends with the thread that runs this.

    Args:
        formatters: those of `model_formatters`, which runs a user's code: call it before a server listens.
        directory: where serving.properties lies, or would; by default where it does.
        announce: called when the model's files are there, before the engine starts.
        stepped: as in `ServedModel`.

    Raises:
        ConfigError: a wrong option, or something that is missing; the message says what to change.
    """
    environment.name_hub_token()
    tracer = make_tracer(config.otlp_traces_endpoint, config.label)
    spec = await run_in_daemon_thread(functools.partial(engine_spec, config))
    if (write := formatters.output) is not None and (task := spec.config.task) is not Task.GENERATION:
        raise ConfigError(f"model.py's output formatter {write.name!r} writes generated text; option.task={task.value}")
    adapters = adapter_home(config, spec, directory)
    announce(spec)
    sessions = configured_sessions(config)
    engine = start_engine(config, spec)
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(engine.close)
        if sessions is not None:
            on_failure.callback(sessions.end)
        tokenizer = await run_in_daemon_thread(functools.partial(load_tokenizer, spec))
        context = replace(schema_context(config, spec, adapters.registry), tool_format=formatters.tool_format)
        warn_of_unread(context.template_arguments, tokenizer.chat_template)
        validator = make_validator(spec, engine)
        make = functools.partial(ServedModel, stepped=stepped, tracer=tracer)
        model = make(config, engine, tokenizer, context, adapters, formatters, validator, sessions)
        on_failure.pop_all()
    return model


def check(reading: Reading, directory: Path | None = None) -> Problems:
    """Find all problems that show before anything is loaded, fetched, converted or run.

    Those of the options, the sessions' path, the replicas, the exporter of traces, the syntax of a user's files, the
    engine, its arguments and files, adapters, the directory of images.

    Args:
        directory: where serving.properties lies, or would; by default where it does.
    """
    config, problems = reading.config, Problems(reading.problems)
    traces = functools.partial(find_exporter, config.otlp_traces_endpoint)
    template = functools.partial(chat_template, config)
    syntax = functools.partial(check_syntax, model_py(directory or _directory(config)))
    sessions, replicas = functools.partial(sessions_root, config), functools.partial(check_replicas, config)
    plugin, images = functools.partial(_check_tool_parser, config), functools.partial(image_rules, config)
    for part in (environment.max_adapters, sessions, replicas, traces, template, syntax, plugin, images):
        with problems:
            part()
    if not reading.engine:
        return problems
    arguments = engine_config(config)
    with problems:
        found = Problems()
        with found:
            arguments = replace(arguments, task=served_task(config, reading.engine))
        with found:
            engines.check(reading.engine, config.model_id, arguments)
        if found:
            raise ConfigError(*(_with_origin(problem, config) for problem in found))
    with problems:
        name = choose_engine(config)
        if not engines.capabilities(name, arguments).no_adapters:
            adapters_in(_adapter_directories(config, directory))
    return problems


def _check_tool_parser(config: Config) -> None:
    if config.tool_parser_plugin:
        check_syntax(find_tool_parser(config.tool_parser_plugin, _homes(config)))


def _homes(config: Config) -> tuple[Path | None, Path]:
    """Where the files of options lie: beside serving.properties, else in the working directory."""
    return config.directory, Path()


def _with_origin(problem: Problem, config: Config) -> Problem:
    """Add the origin of the first option that an engine's problem names; where it names none, it is the model's."""
    named = [key for key in re.findall(r"option\.\w+", problem.message) if key in config.origins]
    key = named[0] if named else problem.name or "option.model_id"
    return Problem(config.origins.get(key, ""), key, problem.message)


def choose_engine(config: Config) -> str:
    """Return the name of an engine that is installed and can run the model.

    Raises:
        ConfigError: the engine is not installed, or does not run on so many devices.
    """
    name, problems = config.engine, Problems()
    with problems:
        engines.entry(name)
    if not engines.ENGINES[name].spreads and config.tensor_parallel_degree not in ("1", "max"):
        key = "option.tensor_parallel_degree"
        message = f"{key}={config.tensor_parallel_degree}: the engine {name} runs on one device"
        problems.append(Problem(config.where(key), key, message))
    problems.check()
    return name


def engine_spec(config: Config) -> Spec:
    """Return what the engine's process loads; fetch or convert the model's files where that is needed.

    Raises:
        ConfigError: there is no such engine or model.
    """
    name = choose_engine(config)
    task = served_task(config, name)
    try:
        model = engines.prepare(name, config.model_id, config.dtype, config.engine_options, task)
    except OSError as error:
        raise ConfigError(f"the model's files cannot be had: {error}") from error
    task = served_task(config, name, model)  # what was fetched may say more
    return Spec(name, engine_config(config, model, chat_template(config), task))


def served_task(config: Config, engine: str, model: Path | None = None) -> Task:
    """Find what the model computes.

    Args:
        model: its files, where they are not those of `option.model_id`.

    Raises:
        ConfigError: the engine does not compute that; or as `find_task`.
    """
    own = Path(config.model_id) if config.model_id else None
    task = find_task(config.task, own if own is not None and own.is_dir() else model)
    engines.check_task(engine, task, config.task)
    return task


def engine_config(
    config: Config, model: Path | None = None, template: str | None = None, task: Task = Task.GENERATION
) -> EngineConfig:
    return EngineConfig(
        model=model,
        dtype=config.dtype,
        max_sequences=config.max_rolling_batch_size,
        max_tokens_per_step=config.max_num_batched_tokens,
        max_total_tokens=config.max_model_len,
        max_input_len=config.max_input_len,
        cache_gib=config.kv_cache_gib,
        prefix_cache=config.enable_prefix_caching,
        devices=config.tensor_parallel_degree,
        options=config.engine_options,
        chat_template=template,
        task=task,
    )


def make_validator(spec: Spec, engine: Restartable | None = None) -> StructuredOutputValidator | None:
    """Return the validator of clients' structured output; None where the engine takes none, or none can harm it."""
    if (
        spec.config.task is not Task.GENERATION
        or not engines.checks_structured_output(spec.engine)
        or "structured_output" in engines.capabilities(spec.engine, spec.config).unsupported
    ):
        return None
    seconds = spec.config.options["guide_timeout"]
    if not seconds:
        return None
    return StructuredOutputValidator(
        functools.partial(engines.structured_output_check, spec.engine, spec.config), seconds=seconds, engine=engine
    )


def load_tokenizer(spec: Spec) -> Tokenizer:
    """Load the tokenizer of the engine's model.

    Raises:
        ConfigError: it cannot be loaded.
    """
    try:
        return engines.load_tokenizer(spec.engine, spec.config)
    except ConfigError:
        raise
    except Exception as error:  # foreign code reading a foreign file
        raise ConfigError(f"the tokenizer of {spec.config.model} cannot be loaded: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    """Return the line that says most: the last one of OpenVINO, after its own source files, the first one of others."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[-1] if lines[0].startswith(("Check '", "Exception from ")) else lines[0]


def model_formatters(config: Config, directory: Path | None = None) -> Formatters:
    """What a model.py brings; importing it runs it.

    Args:
        config: may name which formatters are meant.
        directory: where model.py lies; by default beside serving.properties, else in the model's own directory.

    Raises:
        ConfigError: model.py cannot be used, or an option names what it does not have.
    """
    formatters = find_formatters(directory or _directory(config))
    try:
        key, name = "option.input_formatter", config.input_formatter
        read = choose(formatters.inputs, name, "input")
        key, name = "option.output_formatter", config.output_formatter
        write = None if name in FRAMINGS else choose(formatters.outputs, name, "output")
    except ValueError as error:
        raise ConfigError(f"{config.where(key)}: {key}={name}: {error}" if name else f"{error} by {key}") from None
    if write is not None and config.rolling_batch == "disable":
        raise ConfigError(
            f"model.py's output formatter {write.name!r} is for rolling batch, but option.rolling_batch=disable "
            f"({config.where('option.rolling_batch')}); option.output_formatter=json leaves it out"
        )
    plugin = config.tool_parser_plugin and load_tool_format(config.tool_parser_plugin, _homes(config))
    return Formatters(read, write, config, plugin or None)


def _directory(config: Config) -> Path | None:
    """Where DJL would have model.py: beside serving.properties, which lies in the model's own directory if anywhere."""
    if config.directory is not None:
        return config.directory
    return Path(config.model_id) if config.model_id and Path(config.model_id).is_dir() else None


def adapter_home(config: Config, spec: Spec, directory: Path | None = None) -> AdapterHome:
    """The adapters that lie beside the model, in `adapters/`.

    Args:
        directory: where serving.properties lies, or would; by default where it does.

    Raises:
        ConfigError: one of them cannot be used; or the environment's number of adapters is none.
    """
    limit = environment.max_adapters()
    homes = _adapter_directories(config, directory)
    if missing := engines.capabilities(spec.engine, spec.config).no_adapters:
        if homes:
            log.warning("the adapters in %s are not loaded: %s: %s", homes[0], spec.engine, missing)
        return AdapterHome(AdapterRegistry(limit, unavailable=f"{spec.engine}: {missing}"))
    first = next((place for place in _places(config, directory) if place.is_dir()), None)
    base = homes[0] if homes else first and first.absolute() / "adapters"
    return AdapterHome(AdapterRegistry(limit, base), adapters_in(homes))


def _places(config: Config, directory: Path | None) -> list[Path]:
    places = [directory or config.directory, Path(config.model_id) if config.model_id else None]
    return [place for place in dict.fromkeys(places) if place]


def _adapter_directories(config: Config, directory: Path | None) -> list[Path]:
    return [path for place in _places(config, directory) if (path := place.absolute() / "adapters").is_dir()]
