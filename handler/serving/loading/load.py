"""Load a served model: start the engine, load the tokenizer, find adapters and a user's model.py."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from handler import engines
from handler.config import environment
from handler.config.config import Config
from handler.core.errors import ConfigError
from handler.core.event_loop import run_in_daemon_thread
from handler.core.values import Task
from handler.engines.base import Tokenizer
from handler.engines.process.engine_loop import Spec
from handler.engines.structured_output.validator import Restartable, StructuredOutputValidator
from handler.plugins.functions import Formatters
from handler.protocols.assistant.choice import describe_parsers, warn_of_unread_calls
from handler.protocols.assistant.template import warn_of_unread
from handler.serving.loading.context import server_context
from handler.serving.loading.engine_spec import engine_spec
from handler.serving.loading.model_directory import adapter_home
from handler.serving.loading.replicas import start_engine
from handler.serving.metrics.tracing import make_tracer
from handler.serving.model import ServedModel
from handler.serving.request_log import configured_log
from handler.serving.response_store import configured_store
from handler.serving.sessions import configured_sessions

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
    adapters = adapter_home(spec.config.options, spec, directory)
    announce(spec)
    sessions, store = configured_sessions(config), configured_store(config)
    request_log = configured_log(config)
    engine = start_engine(config, spec)
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(engine.close)
        if sessions is not None:
            on_failure.callback(sessions.end)
        if store is not None:
            on_failure.callback(store.close)
        if request_log is not None:
            on_failure.callback(request_log.close)
        tokenizer = await run_in_daemon_thread(functools.partial(load_tokenizer, spec))
        context = replace(server_context(config, spec, adapters.registry), tool_format=formatters.tool_format)
        warn_of_unread(config.default_chat_template_kwargs or (), tokenizer.chat_template)
        if tokenizer.chat_template and context.task is Task.GENERATION:
            shown = replace(context, chat_template=tokenizer.chat_template)
            log.info("%s", describe_parsers(shown))
            warn_of_unread_calls(shown)
        validator = make_validator(spec, engine)
        make = functools.partial(ServedModel, stepped=stepped, tracer=tracer, request_log=request_log)
        model = make(config, engine, tokenizer, context, adapters, formatters, validator, sessions, store)
        on_failure.pop_all()
    return model


def make_validator(spec: Spec, engine: Restartable | None = None) -> StructuredOutputValidator | None:
    """Return the validator of clients' structured output; None where the engine takes none, or none can harm it."""
    if (
        spec.config.task is not Task.GENERATION
        or not engines.checks_structured_output(spec.engine)
        or "structured_output" in engines.capabilities(spec.engine, spec.config).unsupported
    ):
        return None
    seconds = spec.config.options.engine_options["guide_timeout"]
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
