"""The startup and shutdown of a served model, which all hosts share."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

from handler import __version__, engines
from handler.config import environment
from handler.config.config import Config
from handler.config.model_files import DEMO, DEMO_MEMBER, embedding_prompts, label_names, locate, tokenizer_config
from handler.core import child_processes, loop
from handler.core.errors import ConfigError
from handler.core.loop import LoopWatch, run_in_daemon_thread
from handler.core.media import MEDIA
from handler.core.sealing import read_sealer
from handler.core.user_functions import Role
from handler.core.values import Task
from handler.engines.base import NO_MEDIA, Tokenizer
from handler.engines.huggingface.files import eos_ids
from handler.engines.process.engine_process import Spec
from handler.engines.process.supervisor import State
from handler.engines.structured_output.validator import Restartable, StructuredOutputValidator
from handler.plugins.functions import Formatters
from handler.protocols import registry
from handler.protocols.assistant.answer import describe_parsers, warn_of_unread_calls
from handler.protocols.assistant.template import check_defaults, warn_of_unread
from handler.protocols.kernel.context import DEFAULT_MAX_MEDIA, NO_DEFAULTS, ServerContext
from handler.protocols.lmi.asynchronous import MODEL_NAME
from handler.scheduler.lora import AdapterRegistry
from handler.serving.batches.runner import batches_run
from handler.serving.batches.store import configured_batches
from handler.serving.check import generation_defaults, response_template
from handler.serving.engine import engine_spec, start_engine
from handler.serving.media.loader import missing_packages
from handler.serving.metrics import cloudwatch
from handler.serving.metrics.tracing import make_tracer
from handler.serving.model import ServedModel
from handler.serving.preprocessor import Preprocessor
from handler.serving.request_log import configured_log
from handler.serving.sessions import configured_sessions
from handler.serving.stored_responses import configured_store
from handler.serving.user_code import adapter_home, model_formatters

__all__ = ["ServedModel", "running"]

log = logging.getLogger("handler.launch")

DRAIN = 20.0
"""Number of seconds that open requests have to finish after the `async with running(...)` block."""

_LAST_BYTES = 1.0
"""Number of seconds for sending errors to the clients of abandoned requests."""

_TIDY = 2.0
"""Number of seconds that a cancelled model conversion has to remove its files."""


def server_context(config: Config, spec: Spec, adapters: AdapterRegistry) -> ServerContext:
    check_defaults(config)
    able = engines.capabilities(spec.engine, spec.config)
    generation, template = NO_DEFAULTS, None
    source = config.engine_options.get("echo_tokenizer") or spec.config.source or spec.config.model
    if spec.config.task is Task.GENERATION:
        generation = generation_defaults(config, spec.config.source or spec.config.model, able)
        template = response_template(config, Path(source) if source else None)
    names = (config.name, config.model_id, *(config.served_model_name or (MODEL_NAME,)))
    options = {**config.engine_options, **config.engine_options.get("engine_args", {})}
    max_media = {kind: options.get("limit_mm_per_prompt", {}).get(kind, DEFAULT_MAX_MEDIA) for kind in MEDIA}
    return ServerContext(
        engine=spec.engine,
        config=config,
        unsupported=able.unsupported,
        limits=able.limits,
        no_adapters=able.no_adapters,
        no_labels=able.no_labels,
        native_labels=able.labels,
        sampling_defaults=able.sampling_defaults,
        generation=generation,
        adapters=adapters,
        model_names=tuple(filter(None, names)),
        source=_source(config.model_id) if spec.config.model else "",
        fingerprint=f"lmi-{__version__}-{spec.engine}",
        response_template=template,
        task=spec.config.task,
        eos=eos_ids(spec.config) if spec.config.model else frozenset(),
        prompts=embedding_prompts(spec.config.model),
        labels=label_names(spec.config.model) or ("LABEL_0", "LABEL_1"),
        structural_tags=able.structural_tags if "structured_output" not in able.unsupported else frozenset(),
        no_media={
            kind: able.no_media.get(kind, NO_MEDIA)
            or ("" if max_media[kind] else "option.limit_mm_per_prompt is 0")
            or missing_packages(kind)
            for kind in MEDIA
        },
        max_media=max_media,
        tokenizer_config=_tokenizer_config(config, source, spec),
        sealer=read_sealer(config.compaction_key_file),
    )


def _tokenizer_config(config: Config, source: Path | str | None, spec: Spec) -> dict[str, Any]:
    """Return the values for /tokenizer_info. If a model was converted from a GGUF file, read them from that file."""
    if not source or not config.enable_tokenizer_info_endpoint:
        return {}
    if tokenizer_values := tokenizer_config(Path(source)):
        return tokenizer_values
    with contextlib.suppress(ConfigError, OSError, ValueError):
        model_id = engines.fetch(spec.engine, spec.config.options.model_id, spec.config)
        return tokenizer_config(locate(model_id or DEMO).path)
    return {}


def _source(model_id: str | None) -> str:
    """Return the short name of a model, which is the last part of its path or URL."""
    return PurePath(DEMO_MEMBER).stem if model_id in (None, DEMO) else PurePath(model_id).name


# -- loading of a served model: the engine, the tokenizer, adapters and the user's model.py ----------------------------


async def load_model(
    config: Config,
    formatters: Formatters,
    directory: Path | None = None,
    *,
    announce: Callable[[Spec], None] = lambda spec: None,
    stepped: bool = False,
) -> ServedModel:
    """Load a model and everything that its host needs. The engine may still be loading afterwards.

    The engine process ends when the calling thread ends.

    Args:
        formatters: result of `model_formatters`, which runs user code and should therefore be called before a server
            starts to listen.
        directory: directory of serving.properties, even if the file does not exist. The default is taken from `config`.
        announce: called before the engine starts, once the model files are on this machine.
        stepped: whether the event loop runs only when its host steps it.

    Raises:
        ConfigError: an option is invalid, or something is missing. The message explains what to change.
    """
    environment.name_hub_token()
    tracer = make_tracer(config.otlp_traces_endpoint, config.label)
    spec = await run_in_daemon_thread(engine_spec, config)
    if (write := formatters.output) is not None and (task := spec.config.task) is not Task.GENERATION:
        raise ConfigError(f"model.py's output formatter {write.name!r} is for generated text; option.task={task.value}")
    adapters = adapter_home(spec.config.options, spec, directory)
    announce(spec)
    sessions, store = configured_sessions(config), configured_store(config)
    request_log, batches = configured_log(config), None if stepped else configured_batches(config)
    engine = start_engine(config, spec)
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(engine.close)
        if sessions is not None:
            on_failure.callback(sessions.end)
        for part in (store, request_log, batches):
            if part is not None:
                on_failure.callback(part.close)
        tokenizer = await run_in_daemon_thread(load_tokenizer, spec)
        context = replace(server_context(config, spec, adapters.registry), tool_format=formatters.tool_format)
        warn_of_unread(config.default_chat_template_kwargs or (), tokenizer.chat_template)
        if tokenizer.chat_template and context.task is Task.GENERATION:
            shown_context = replace(context, chat_template=tokenizer.chat_template)
            log.info("%s", describe_parsers(shown_context))
            warn_of_unread_calls(shown_context)
        validator = make_validator(spec, engine)
        dialect = registry.choose(config, context.task)
        whole = stepped and config.rolling_batch == "disable" and not config.enable_streaming
        info = functools.partial(getattr, engine, "info")  # None while the engine is loading
        preprocessor = Preprocessor(
            dialect, context, tokenizer, info, formatters, validator, sessions, store, whole=whole
        )
        model = ServedModel(
            config,
            engine,
            preprocessor,
            adapters,
            stepped=stepped,
            tracer=tracer,
            request_log=request_log,
            batches=batches,
        )
        on_failure.pop_all()
    return model


def make_validator(spec: Spec, engine: Restartable | None = None) -> StructuredOutputValidator | None:
    """Return the validator of structured output. Return None if the engine does not support structured output, if no
    input can harm the engine, or if option.guide_timeout is 0.
    """
    if (
        spec.config.task is not Task.GENERATION
        or not engines.checks_structured_output(spec.engine, spec.config)
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
    """Load the tokenizer of the model.

    Raises:
        ConfigError: the tokenizer cannot be loaded.
    """
    try:
        return engines.load_tokenizer(spec.engine, spec.config)
    except ConfigError:
        raise
    except Exception as error:  # third-party code may raise anything
        raise ConfigError(f"the tokenizer of {spec.config.model} cannot be loaded: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    """Return the most informative line of an error: the first line, or the last line for OpenVINO's errors, which start
    with names of source files.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[-1] if lines[0].startswith(("Check '", "Exception from ")) else lines[0]


class StartTimes:
    """Measures the phases of a startup: until the model files are on this machine, and until the engine is ready."""

    def __init__(self) -> None:
        self._began = self._loading = time.monotonic()

    def files_are_here(self) -> None:
        """Record that the model files are on this machine and the engine is about to start."""
        self._loading = time.monotonic()

    def ready(self, model: ServedModel) -> str:
        """Return the log message for the end of the startup."""
        now = time.monotonic()
        parts = f"files {self._loading - self._began:.1f} s, engine {now - self._loading:.1f} s"
        return f"ready after {now - self._began:.1f} s ({parts}): {_describe(model)}"


def _describe(model: ServedModel) -> str:
    if model.config.handle_role is Role.ALONE:
        return "handle of model.py, without an engine"
    info, replicas = model.info, model.replicas
    assert info is not None, "a ready engine has an `info`"
    limit = info.max_total_tokens
    count = f"{len(replicas)} replicas of " if replicas else ""
    computes = "" if info.device == "none" else f" on {info.device}, dtype {info.dtype}"  # echo does not
    option = model.config.max_model_len
    lowered = f", as the model allows no more (option.max_model_len={option})" if option and option > limit else ""
    return f"{count}{info.name} {info.version}{computes}, {limit} tokens{lowered}"


@contextlib.asynccontextmanager
async def running(
    config: Config,
    formatters: Formatters | None = None,
    directory: Path | None = None,
    *,
    stepped: bool = False,
    signals: bool = False,
    wait_ready: bool = True,
    announce: Callable[[Spec], None] = lambda spec: None,
    on_state: Callable[[ServedModel, State], None] = lambda model, state: None,
) -> AsyncIterator[ServedModel]:
    """Load and start a model on the running event loop, and close it at the end of the block.

    After the block, open requests may finish, unless the host has drained the model itself or the block has raised an
    exception.

    Args:
        formatters: result of `model_formatters`, which is called here by default. A host that listens on a socket
            should call it earlier, because it runs user code.
        directory: directory of serving.properties, even if the file does not exist. The default is taken from `config`.
        stepped: whether the event loop runs only when its host steps it. Such a loop is not watched for hangs.
        signals: whether the event loop handles SIGTERM and SIGINT, which matters if it hangs.
        wait_ready: whether to wait until the engine is ready before entering the block.
        announce: called before the engine starts, once the model files are on this machine.
        on_state: called with the model and the engine state, initially and after every change.

    Raises:
        ConfigError: the model or its engine is not available. The message explains what to change.
    """
    if formatters is None:
        formatters = model_formatters(config, directory)
    model = await _loaded(load_model(config, formatters, directory, announce=announce, stepped=stepped))
    watch = LoopWatch(0.0 if stepped else config.event_loop_timeout, signals=signals)

    def changed(state: State) -> None:
        if state is State.READY:
            watch.start()
        on_state(model, state)

    with contextlib.ExitStack() as at_end:
        at_end.callback(model.close)
        at_end.callback(watch.stop)
        loop.keep_collecting()
        loop.return_large_blocks()
        model.start(changed)
        interval = config.cloudwatch_metrics_interval
        at_end.enter_context(cloudwatch.reporting(model.metrics.registry, config.label, interval))
        at_end.callback(model.give_up)
        if wait_ready:
            await asyncio.wait(
                {model.availability.opened}
            )  # `wait`, so that cancelling the host does not cancel the future
            model.availability.opened.result()
        async with batches_run(model):
            yield model
            await _finish(model)


async def _loaded(load: Coroutine[Any, Any, ServedModel]) -> ServedModel:
    """Return the loaded model. If the caller is cancelled, stop everything that loading has started.

    A second cancellation ends only the wait. The model is then closed when loading ends.
    """
    loading = asyncio.create_task(load)
    try:
        await asyncio.wait({loading})
    except asyncio.CancelledError:
        if loading.done():
            _close_loaded(loading)
        else:
            loading.add_done_callback(_close_loaded)
            await _stop_loading(loading)
        raise
    return loading.result()


async def _stop_loading(loading: asyncio.Task[ServedModel]) -> None:
    child_processes.stop_all()
    try:
        await asyncio.wait({loading}, timeout=_TIDY)
    finally:
        loading.cancel()
    await asyncio.wait({loading})


def _close_loaded(loading: asyncio.Task[ServedModel]) -> None:
    if not loading.cancelled() and loading.exception() is None:
        loading.result().close()


async def _finish(model: ServedModel) -> None:
    """Refuse new requests, wait a limited time for open requests, and end the remaining requests with an error."""
    if not model.availability.draining:  # otherwise the host has already waited
        model.drain()
        await _wait_idle(model, DRAIN)
    model.give_up()
    await _wait_idle(model, _LAST_BYTES)


async def _wait_idle(model: ServedModel, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while model.num_requests and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
