"""Load a model from the properties of DJL's first call, and report its requests to DJL Serving as metrics."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from handler.config import environment, model_files
from handler.config.config import Config
from handler.config.engines import ENGINES
from handler.config.loader import Reading, Setting, from_environment, from_file, named_engine, read_config
from handler.config.options.names import option_key
from handler.config.options.tables import ROLLING_BATCHES
from handler.config.user_files import unused_handle
from handler.core.errors import ConfigError, Problem, Problems
from handler.core.log import format_as_json, wants_json
from handler.core.values import INSTEAD, SCRIPT
from handler.engines.process.engine_process import Spec
from handler.plugins.functions import Formatters, model_py
from handler.serving.check import check
from handler.serving.metrics.tracing import RequestRecord
from handler.serving.model import ServedModel
from handler.serving.sessions import sessions_root
from handler.serving.start import StartTimes, running
from handler.serving.user_code import model_formatters

if TYPE_CHECKING:
    from handler.djl.wire import DjlVersion

log = logging.getLogger("handler.djl")

_JAVA = "DJL Serving"  # the origin of what Java hands over

_ADVICE = frozenset(
    {
        "option.max_num_tokens",
        "option.max_rolling_batch_size",
        "option.pipeline_parallel_degree",
        "option.rolling_batch",
        "option.tensor_parallel_degree",
    }
)
"""Options that DJL Serving's LmiConfigRecommender sets by itself for a model with a config.json, for any engine."""

_LEFT_TO_JAVA = {"option.rolling_batch": "auto", "option.tensor_parallel_degree": "max"}
"""Values that Java replaces with its own."""

_NO_ASYNC = (
    "option.async_mode=true has no effect: DJL Serving has async mode since 0.33, and this one calls the handler for a "
    "batch at a time"
)

_RECOMMENDED_SIZE = "32"
"""The recommender's option.max_rolling_batch_size. In async mode Java itself has no such limit."""

_EMBEDDED_ONLY = {"option.tgi_metrics", "option.cloudwatch_metrics_interval"}
"""Options of metrics that this worker cannot show: it has no HTTP server, and DJL prefixes its log lines."""

_AT_END = contextlib.AsyncExitStack()
"""Closed when the event loop ends; a stepped loop only ends with its process."""

_TIME_LIMIT = 900.0  # seconds: DJL never says that a client has left (option.request_time_limit)


def is_passive(properties: Mapping[str, Any], version: DjlVersion) -> bool:
    """Return whether this process is a rank of an MPI world that has nothing to do: the engine runs beside rank 0.

    No rank of a world that `prepare` refuses is.

    Args:
        properties: of the first call.
    """
    rank = environment.mpi_world()[1]
    return rank not in ("", "0") and not _is_refused_world(properties, version)


def _is_refused_world(properties: Mapping[str, Any], version: DjlVersion) -> bool:
    """Return whether this Java side would wait for the answers of all ranks and use the last one's."""
    world = environment.mpi_world()[0]
    return world not in ("", "1") and version.steps_all_ranks and properties.get("rolling_batch") != "trtllm"


def prepare(properties: Mapping[str, Any], version: DjlVersion | None, *, djl: str = "") -> tuple[Config, Formatters]:
    """Read the options and import the model directory's model.py, which runs it.

    Args:
        version: of the Java side that steps the handler; None: async mode.
        djl: as in `read_properties`.

    Raises:
        ConfigError: with all problems: of options, of what this Java side cannot do, the model's files, model.py.
    """
    directory = Path(properties["model_dir"])
    wrong = Problems()
    with wrong:
        if wants_json(os.environ):
            format_as_json()
    reading = read_properties(properties, asynchronous=version is None, djl=djl)
    for warning in reading.config.warnings:
        log.warning("%s", warning)
    if unused := unused_handle(reading.config, model_py(directory)):
        log.warning("%s", unused)
    if version is not None:
        if str(properties.get("async_mode", "")).lower() == "true":
            log.warning("%s", _NO_ASYNC)
        reading = reading._replace(problems=(*reading.problems, *_beyond_java(reading.config, properties, version)))
    reading = reading._replace(problems=(*wrong, *reading.problems, *_custom_code()))
    problems, formatters = check(reading, directory), Formatters()
    with problems:
        formatters = model_formatters(reading.config, directory)
    problems.check()
    return reading.config, formatters


def steps_rolling(config: Config, properties: Mapping[str, Any], version: DjlVersion) -> bool:
    """Return whether Java steps a rolling batch."""
    return config.rolling_batch != "disable" or (version.always_steps and "rolling_batch" in properties)


def _custom_code() -> Iterator[Problem]:
    """Refuse variables that name handlers of AWS's vLLM image, which only the embedded server calls."""
    for name, value in environment.custom_code().items():
        if (name, value) != (SCRIPT, "model.py"):
            yield Problem(f"environment variable {name}", name, f"{name}={value[:200]}: {INSTEAD[name]}")


def _beyond_java(config: Config, properties: Mapping[str, Any], version: DjlVersion) -> Iterator[Problem]:
    """Name the options that this Java side does not support: those of an MPI world, and of sessions, whose ids go to
    clients.
    """
    if _is_refused_world(properties, version):
        key = "option.mpi_mode"
        yield Problem(
            "DJL Serving", key, f"{key}: before DJL Serving 0.29 several ranks need option.rolling_batch=trtllm"
        )
    why, rolling = "", steps_rolling(config, properties, version)
    if rolling and not version.passes_headers:
        why = "before DJL Serving 0.28 the answers of a rolling batch have no headers"
    if not rolling and config.batch_size > 1:
        why = f"the answers of a dynamic batch share their headers; it needs batch_size=1, not {config.batch_size}"
    if config.enable_stateful_sessions and why:
        yield config.problem("option.enable_stateful_sessions", "true", why)


def own_sessions(config: Config, java: int) -> Config:
    """Keep sessions in a directory of this DJL Serving, unless the options name one.

    Its workers share it, replaced ones too. Java kills workers at its end, so directories whose DJL Serving has ended
    are removed here.

    Args:
        java: its process id.

    Raises:
        ConfigError: sessions cannot be stored there.
    """
    root = sessions_root(config)
    if root is None or config.sessions_path is not None:
        return config
    own = root / _owner(java)
    for other in root.glob(f"djl-{_namespace()}-*"):
        pid = other.name.split("-")[2]
        if pid.isdigit() and _owner(int(pid)) != other.name:
            shutil.rmtree(other, ignore_errors=True)
    return replace(config, sessions_path=str(own))


def _owner(pid: int) -> str:
    """Return a name that no later process has: the process id and the clock tick of its start (proc(5))."""
    try:
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        started = "ended"
    return f"djl-{_namespace()}-{pid}-{started}"


def _namespace() -> int:
    """Return the namespace of process ids: another container's ids mean nothing here (pid_namespaces(7))."""
    return os.stat("/proc/self/ns/pid").st_ino


async def load(config: Config, formatters: Formatters, directory: Path, *, stepped: bool) -> ServedModel:
    """Return a model whose engine is ready. It runs as long as this process, which Java ends.

    Args:
        directory: the model directory.
        stepped: as in ServedModel.

    Raises:
        ConfigError: something is missing; the message says what to change.
    """

    times = StartTimes()

    def announce(spec: Spec) -> None:
        times.files_are_here()
        log.info("loading %s with %s", config.model_id or "no model", spec.engine)

    config = own_sessions(config, os.getppid())
    host = running(config, formatters, directory, stepped=stepped, wait_ready=False, announce=announce)
    async with contextlib.AsyncExitStack() as on_failure:
        model = await on_failure.enter_async_context(host)
        await _wait_ready(model)
        log.info("%s", times.ready(model))
        _AT_END.push_async_exit(on_failure.pop_all())
    return model


async def _wait_ready(model: ServedModel) -> None:
    began = time.monotonic()
    while not (await asyncio.wait({model.opened}, timeout=10))[0]:
        log.info("still loading after %d s", time.monotonic() - began)
    model.opened.result()


def read_properties(properties: Mapping[str, Any], *, asynchronous: bool, djl: str = "") -> Reading:
    """Read the options from the model directory's serving.properties and the environment, as the Java side reads them.

    Java hands over all options without their prefix, among properties of its own. So a key that is not one of our
    options is ignored; if it is in the file, the file's reader refuses it.

    Args:
        djl: version of the djl_python that runs us, which is LMI's release unless an option names another.
    """
    directory = Path(properties["model_dir"])
    file = directory / "serving.properties"
    own_file, environ = file if file.is_file() else None, environment.of_worker()
    problems = Problems()
    if asynchronous and (properties.get("rolling_batch") or "disable") != "disable":
        message = "option.async_mode=true needs option.rolling_batch=disable: Java would step both ways"
        problems.append(Problem("", "option.rolling_batch", message))
    found_by_java = [*from_environment(environ), *(from_file(own_file) if own_file else ())]
    written = {item.key: item.value.strip() for item in found_by_java if isinstance(item, Setting)}
    settings = _settings(properties, written, asynchronous=asynchronous)
    config, found, engine = read_config(properties=own_file, environ=environ, settings=settings, java=True, djl=djl)
    problems += found
    if not asynchronous and config.rolling_batch == "disable":
        config = replace(config, warnings=(*config.warnings, *_lost_rolling_batch(found_by_java)))
    for key in _EMBEDDED_ONLY & config.origins.keys():
        idle = f"without effect here: {key} ({config.where(key)}); DJL Serving has metrics of its own"
        config = replace(config, warnings=(*config.warnings, idle), cloudwatch_metrics_interval=0.0)
    if config.replicas != "1":
        message = "DJL Serving's workers are the replicas: write minWorkers and maxWorkers (documents: scaling)"
        problems.append(config.problem("option.replicas", config.replicas, message))
    if config.request_time_limit is None:
        config = replace(config, request_time_limit=_TIME_LIMIT)
    if config.model_id is None and engine not in ("", "echo"):
        with problems:
            config = replace(config, model_id=_own_model(directory))
    return Reading(config, tuple(problems), engine)


def _lost_rolling_batch(found_by_java: Iterable[Setting | Problem]) -> Iterator[str]:
    """Yield the user's option.rolling_batch=auto if DJL Serving has replaced it with `disable`."""
    key = "option.rolling_batch"
    last = [item for item in found_by_java if isinstance(item, Setting) and item.key == key][-1:]
    for setting in last:
        if setting.value.strip() == _LEFT_TO_JAVA[key]:
            yield (
                f"DJL Serving turned auto into {key}=disable, which is dynamic batching ({setting.origin}); "
                f"write {key}=scheduler for a rolling batch"
            )


def _settings(properties: Mapping[str, Any], written: Mapping[str, str], *, asynchronous: bool) -> list[Setting]:
    """Return the options that Java hands over; those that it only recommends, if the engine supports them.

    Args:
        written: the user's own values, by the names that serving.properties and the environment give them.
    """
    settings: dict[str, Setting] = {}
    advice: dict[str, Setting] = {}
    for name, value in properties.items():
        key, own = option_key(name), f"option.{name}"
        if key is None or not isinstance(value, str) or not value:
            continue
        recommended = own in _ADVICE and written.get(own) in (None, _LEFT_TO_JAVA.get(own))
        (advice if recommended else settings)[key] = Setting(key, value, _JAVA)
    mode = advice.pop("option.rolling_batch", None) or settings.get("option.rolling_batch")
    rolling = mode.value if mode else "disable"  # Java steps a rolling batch only when the property is there
    named = settings.get("option.llm_engine", Setting("", "auto", "")).value != "auto"
    if asynchronous:
        rolling = "auto"  # that Java batches nothing does not keep the handler from doing so
    elif "option.rolling_batch" not in settings and rolling != "disable" and (named or rolling not in ROLLING_BATCHES):
        rolling = "auto"  # Java goes by its image's engine, not by option.llm_engine
    settings["option.rolling_batch"] = Setting("option.rolling_batch", rolling, _JAVA)
    settings["option.async_mode"] = Setting("option.async_mode", str(asynchronous), _JAVA)
    engine = named_engine(settings.values(), "openvino")
    for key in advice.keys() - settings.keys():
        if _is_of_use(advice[key], engine, settings, asynchronous=asynchronous):
            settings[key] = advice[key]
        else:
            log.info("DJL Serving's recommendation %s=%s has no effect with %s", key, advice[key].value, engine)
    return list(settings.values())


def _is_of_use(advice: Setting, engine: str, settings: Mapping[str, Setting], *, asynchronous: bool) -> bool:
    match advice.key:
        case "option.tensor_parallel_degree":  # Java counted the GPUs; 0.28 says 0 where there is none
            return advice.value != "0" and engine in ENGINES and ENGINES[engine].spreads
        case "option.max_rolling_batch_size":
            return not (asynchronous and advice.value == _RECOMMENDED_SIZE)
        case "option.max_num_tokens":
            return engine == "trtllm" and "option.max_num_batched_tokens" not in settings
    return False  # one stage is every engine's default


def _own_model(directory: Path) -> str:
    """Return the model next to serving.properties."""
    try:
        model_files.locate(str(directory))
    except ConfigError as error:
        raise ConfigError(
            f"option.model_id is not set ({model_files.DEMO!r} is a small model from PyPI), and {error}"
        ) from None
    return str(directory)


# -- lines of stdout that DJL Serving reads as metrics, for its Prometheus text (`SERVING_PROMETHEUS=true`) ------------


def report_metrics(model: ServedModel, version: DjlVersion) -> None:
    """Write the figures of each request from now on, if `option.djl_metrics` is set."""
    if model.config.djl_metrics:
        model.metrics.recorders.append(MetricLines(model.config.label, version).write)


_UNFIT = re.compile(r"[^\w ./-]", re.ASCII)
"""Characters that a label's value cannot contain: the line's separators, and those outside Java's pattern."""


class MetricLines:
    """Writes the figures of each request that has ended.

    Tokens are counters. Times are histograms in seconds; before DJL Serving 0.29, gauges of the last value.

    Args:
        model_name: the label `Model`.
        stream: by default stdout, which Java reads.
    """

    def __init__(self, model_name: str, version: DjlVersion, stream: TextIO | None = None) -> None:
        self._label = f"|#Model:{_UNFIT.sub('_', model_name)}"
        self._histogram = "|h" if version.metric_types else ""
        self._stream = stream or sys.stdout

    def write(self, request: RequestRecord) -> None:
        """Write a request's lines at once: other processes have the same stdout."""
        tokens = {"LmiPromptTokens": request.num_prompt_tokens, "LmiGeneratedTokens": request.num_tokens}
        lines = [f"{name}.Count:{count}{self._label}" for name, count in tokens.items() if count]
        if request.num_tokens:
            times = {"LmiTimeToFirstTokenSeconds": request.first, "LmiEngineQueueTimeSeconds": request.queue}
            # Java knows no seconds, and loses a metric with a unit that it does not know.
            lines += [f"{name}.None:{value:.6f}{self._label}{self._histogram}" for name, value in times.items()]
        try:
            self._stream.write("".join(f"[METRICS]{line}\n" for line in lines))
            self._stream.flush()
        except (OSError, ValueError) as error:  # a request must not fail for it
            log.warning("no metrics for DJL Serving: stdout: %s", error)
