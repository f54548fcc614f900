"""Functions that load the worker's model from the properties in DJL's first call, and report metrics to DJL Serving."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from handler.config import environment, model_files
from handler.config.config import Config
from handler.config.engines import ENGINES
from handler.config.implied import selected_engine
from handler.config.loader import Reading, read_config
from handler.config.options import KNOWN
from handler.config.options.names import option_key
from handler.config.options.tables import ROLLING_BATCHES
from handler.config.sources import Setting, from_environment, from_file, misread_by_java
from handler.config.user_files import unused_handle
from handler.core.errors import BadRequest, ConfigError, Problem, Problems
from handler.core.log import format_as_json, wants_json
from handler.core.numbers import is_digits
from handler.core.user_functions import INSTEAD, SCRIPT
from handler.djl.shared_adapters import SharedAdapters
from handler.engines import choice
from handler.engines.process.engine_process import Spec
from handler.plugins.functions import Formatters, model_py
from handler.serving.check import check
from handler.serving.metrics.tracing import RequestRecord
from handler.serving.model import ServedModel
from handler.serving.sessions import default_root, is_of_another_user, sessions_root
from handler.serving.start import StartTimes, running
from handler.serving.user_code import model_formatters

if TYPE_CHECKING:
    from handler.djl.wire import DjlVersion

log = logging.getLogger("handler.djl")

_JAVA = "DJL Serving"  # the origin of settings that Java passes

_ADVICE = frozenset(
    {
        "option.max_num_tokens",
        "option.max_rolling_batch_size",
        "option.pipeline_parallel_degree",
        "option.rolling_batch",
        "option.tensor_parallel_degree",
    }
)
"""Options that DJL Serving's LmiConfigRecommender sets for a model with a config.json, for every engine."""

_LEFT_TO_JAVA = {"option.rolling_batch": "auto", "option.tensor_parallel_degree": "max"}
"""Maps each option to the value that Java replaces with its own."""

_NO_ASYNC = (
    "option.async_mode=true has no effect: async mode needs DJL Serving 0.33 or later; this release sends batches"
)

_RECOMMENDED_SIZE = "32"
"""The option.max_rolling_batch_size that DJL Serving recommends. In async mode, DJL Serving has no such limit."""

_EMBEDDED_ONLY = {
    **dict.fromkeys(("option.tgi_metrics", "option.cloudwatch_metrics_interval"), "DJL Serving has its own metrics"),
    **{key: "DJL Serving has no such routes" for key in KNOWN if key.startswith("option.batches_")},
    **{key: "DJL Serving has no WebSockets" for key in KNOWN if key.startswith("option.websockets_")},
    "option.enable_tokenizer_info_endpoint": "DJL Serving has no such route",
    "option.grpc_port": "DJL Serving has its own ports",
    "option.batch_transform": "DJL Serving sends the real status of a refused request",
    "option.client_timeout": "DJL Serving has its own time limits",
    "option.keep_alive_timeout": "DJL Serving has its own time limits",
}
"""Maps each option of the embedded server to the reason why it has no effect in a worker. A worker has no routes or
connections.
"""

AT_END = contextlib.AsyncExitStack()
"""Contexts to exit when the event loop ends. In rolling and dynamic batching, the loop ends only with the process."""

_TIME_LIMIT = 900.0  # seconds, because DJL does not report that a client has disconnected (option.request_time_limit)


def is_passive(properties: Mapping[str, Any], version: DjlVersion) -> bool:
    """Return whether this process is an idle rank of an MPI world, because the engine belongs to rank 0.

    No rank is passive in a world that `prepare` refuses, so that every rank reports the problem.

    Args:
        properties: the properties of DJL's first call.
    """
    rank = environment.mpi_world()[1]
    return rank not in ("", "0") and not _is_refused_world(properties, version)


def _is_refused_world(properties: Mapping[str, Any], version: DjlVersion) -> bool:
    """Return whether this Java side would wait for the responses of all ranks, but use only one of them."""
    world = environment.mpi_world()[0]
    return world not in ("", "1") and version.steps_all_ranks and properties.get("rolling_batch") != "trtllm"


def prepare(properties: Mapping[str, Any], version: DjlVersion | None, *, djl: str = "") -> tuple[Config, Formatters]:
    """Read and check the options, and import the model directory's model.py.

    Args:
        version: the version of the Java side, or None in async mode.
        djl: the version of djl_python.

    Raises:
        ConfigError: if there are problems with the options, the model's files or model.py, or if this Java side does
            not support an option. The error contains all problems.
    """
    directory = Path(properties["model_dir"])
    wrong = Problems()
    with wrong:
        if wants_json(os.environ):
            format_as_json()
    reading = read_properties(properties, asynchronous=version is None, djl=djl)
    pairs = (pair.partition("=") for pair in reading.config.settings.get("option.env", "").split(","))
    misread = {name.strip(): value.strip() for name, _, value in pairs if not value.isascii()}  # by Java
    os.environ.update({name: value for name, value in misread.items() if name})
    for warning in reading.config.warnings:
        log.warning("%s", warning)
    if unused := unused_handle(reading.config, model_py(directory)):
        log.warning("%s", unused)
    if version is not None:
        if str(properties.get("async_mode", "")).lower() == "true":
            log.warning("%s", _NO_ASYNC)
        reading = reading._replace(problems=(*reading.problems, *_beyond_java(reading.config, properties, version)))
    reading = reading._replace(
        problems=(*wrong, *reading.problems, *_custom_code(), *_batches_of_java(reading.config, properties, version))
    )
    problems, formatters = check(reading, directory), Formatters()
    with problems:
        formatters = model_formatters(reading.config, directory)
    problems.check()
    return reading.config, formatters


def steps_rolling(config: Config, properties: Mapping[str, Any], version: DjlVersion) -> bool:
    """Return whether Java calls the worker once for each step of a rolling batch."""
    return config.rolling_batch != "disable" or (version.always_steps and "rolling_batch" in properties)


def _batches_of_java(config: Config, properties: Mapping[str, Any], version: DjlVersion | None) -> Iterator[Problem]:
    """Yield a problem if Java would collect batches in a mode in which the handler batches by itself.

    Java then takes the response to a batch for the response to one request, and fails all requests of the batch.
    """
    size = str(properties.get("batch_size") or os.environ.get("SERVING_BATCH_SIZE") or "1").strip()
    if not is_digits(size) or int(size) < 2:
        return
    if version is not None and not steps_rolling(config, properties, version):
        return
    mode = "async mode" if version is None else "rolling batch"
    yield config.problem(
        "batch_size",
        size,
        f"in {mode}, DJL Serving fails every batch of requests; remove the option, as {mode} batches by itself "
        "(option.max_rolling_batch_size). For dynamic batching, set option.rolling_batch=disable and omit "
        "option.async_mode",
    )


def _custom_code() -> Iterator[Problem]:
    """Yield a problem for each variable that sets a custom handler of AWS's vLLM image. Workers do not call these."""
    for name, value in environment.custom_code().items():
        if (name, value) != (SCRIPT, "model.py"):
            yield Problem(f"environment variable {name}", name, f"{name}={value[:200]}: {INSTEAD[name]}")


def _beyond_java(config: Config, properties: Mapping[str, Any], version: DjlVersion) -> Iterator[Problem]:
    """Yield a problem for each option that this Java side does not support: MPI with several ranks, and sessions.

    Sessions require response headers, which contain the session ID.
    """
    if _is_refused_world(properties, version):
        key = "option.mpi_mode"
        yield Problem(
            "DJL Serving", key, f"{key}: several ranks need DJL Serving 0.29 or later, or option.rolling_batch=trtllm"
        )
    reason, rolling = "", steps_rolling(config, properties, version)
    if rolling and not version.passes_headers:
        reason = "sessions need DJL Serving 0.28 or later, because earlier releases drop the headers of a rolling batch"
    if not rolling and config.batch_size > 1:
        reason = f"sessions need batch_size=1, not {config.batch_size}: a dynamic batch has only one set of headers"
    if config.enable_stateful_sessions and reason:
        yield config.problem("option.enable_stateful_sessions", "true", reason)


def worker_sessions(config: Config, java: int) -> Config:
    """Set a sessions directory that belongs to this DJL Serving process, unless option.sessions_path is set.

    All workers of a DJL Serving process share the directory, including workers that replace others. Java kills its
    workers when it exits, so the directories of processes that are no longer running are removed here.

    Args:
        java: the process ID of DJL Serving.

    Raises:
        ConfigError: if sessions cannot be stored.
    """
    root = sessions_root(config)
    if root is None or config.sessions_path is not None:
        return config
    return replace(config, sessions_path=str(_directory_of_workers(root, java)))


async def shared_adapters(model: ServedModel, model_directory: Path, *, is_notified: bool) -> SharedAdapters | None:
    """Return the adapters that the workers of this DJL Serving process share, after taking over what is registered.

    Args:
        is_notified: whether Java tells each worker of every change.

    Returns:
        None if the model supports no adapters, or if there is no directory to share them in.
    """
    root = default_root()
    try:
        model.adapters.registry.check()
        if is_of_another_user(root):
            raise PermissionError(errno.EPERM, "it was created by another user of this machine")
        directory = _directory_of_workers(root, _java())
        adapters = SharedAdapters(
            directory, model_directory, model.adapters, model.config.predict_timeout, is_notified=is_notified
        )
        await adapters.begin()
    except BadRequest:
        return None
    except OSError as error:
        log.warning(
            "the workers do not share adapters, and each change has to be made again for a worker that replaces "
            "another: %s: %s",
            root,
            error.strerror or error,
        )
        return None
    return adapters


def _directory_of_workers(root: Path, java: int) -> Path:
    """Return the directory below `root` for the workers of a DJL Serving process. Remove those of ended processes."""
    for other in root.glob(f"djl-{_namespace()}-*"):
        pid = other.name.split("-")[2]
        if is_digits(pid) and _owner(int(pid)) != other.name:
            shutil.rmtree(other, ignore_errors=True)
    return root / _owner(java)


def _owner(pid: int) -> str:
    """Return a directory name that is unique to a process: its ID and the clock tick at which it started (proc(5))."""
    try:
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        started = "ended"
    return f"djl-{_namespace()}-{pid}-{started}"


def _namespace() -> int:
    """Return the ID of the PID namespace. Process IDs from other containers are not valid here (pid_namespaces(7))."""
    return os.stat("/proc/self/ns/pid").st_ino


def note_load() -> None:
    """Note that this worker has loaded its model, for those that will replace it (see `replaces_another`)."""
    record = _load_record()
    if record is None:
        return
    try:
        record.unlink(missing_ok=True)
        with record.open("x") as file:
            file.write(_owner(_java()))
    except OSError as error:
        log.warning("cannot write %s, so a worker that replaces this one will be called too early: %s", record, error)


def replaces_another() -> bool:
    """Return whether a worker of the same DJL Serving process has already loaded its model on this connection."""
    record = _load_record()
    try:
        return record is not None and record.read_text() == _owner(_java())
    except (OSError, UnicodeDecodeError):
        return False


def _load_record() -> Path | None:
    """Return the file of `note_load`, which lies beside the worker's socket. Java names the socket anew per worker."""
    names = dict(zip(sys.argv, sys.argv[1:], strict=False))
    return Path(f"{names['--sock-name']}.loaded") if "--sock-name" in names else None


def _java() -> int:
    """Return the process ID of DJL Serving, which starts the ranks of an MPI world with mpirun."""
    parent = os.getppid()
    if not environment.mpi_world()[0]:
        return parent
    return int(Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1])


def ends_start(reason: str) -> bool:
    """End DJL Serving if it is still starting, and return whether it is. Call this if async mode cannot be loaded.

    Java would end by itself, but in async mode (0.33 to 0.36) it waits forever for its own thread instead: when it has
    closed the connection, it holds the lock that the handler of the closed connection needs.
    """
    if Path(sys.argv[0]).name != _PROGRAM or _listens(java := _java()):
        return False
    log.error("ending DJL Serving, which would otherwise hang: %s", reason)
    os.kill(java, signal.SIGTERM)
    return True


def _listens(pid: int) -> bool:
    """Return whether a process listens on a socket, as DJL Serving does when its first models are loaded."""
    process = Path(f"/proc/{pid}")
    try:
        sockets = {os.readlink(file) for file in (process / "fd").iterdir()}
        tcp, tcp6, unix = (_rows(process / "net" / name) for name in ("tcp", "tcp6", "unix"))
    except OSError:  # a process of another user
        return True
    listening = [row[9] for row in [*tcp, *tcp6] if row[3] == _LISTEN]
    listening += [row[6] for row in unix if int(row[3], 16) & _ACCEPTS]
    return any(f"socket:[{inode}]" in sockets for inode in listening)


def _rows(table: Path) -> list[list[str]]:
    """Return the rows of a table of sockets. Without IPv6, its table is missing."""
    return [row.split() for row in table.read_text().splitlines()[1:]] if table.exists() else []


_PROGRAM = "djl_python_engine.py"  # of Java's worker processes
_LISTEN = "0A"  # TCP_LISTEN in /proc/net/tcp
_ACCEPTS = 1 << 16  # __SO_ACCEPTCON in /proc/net/unix


async def load(config: Config, formatters: Formatters, directory: Path, *, stepped: bool) -> ServedModel:
    """Load the model, wait until its engine is ready, and return it. It runs until Java ends this process.

    Args:
        directory: the model directory.
        stepped: whether the worker's event loop runs only within DJL's calls.

    Raises:
        ConfigError: if the model cannot be loaded.
    """

    times = StartTimes()

    def announce(spec: Spec) -> None:
        times.files_are_here()
        log.info("loading %s with %s", config.model_id or "no model", spec.engine)

    config = worker_sessions(config, _java())
    host = running(config, formatters, directory, stepped=stepped, wait_ready=False, announce=announce)
    async with contextlib.AsyncExitStack() as on_failure:
        model = await on_failure.enter_async_context(host)
        await _wait_ready(model)
        log.info("%s", times.ready(model))
        AT_END.push_async_exit(on_failure.pop_all())
    return model


async def _wait_ready(model: ServedModel) -> None:
    began = time.monotonic()
    while not (await asyncio.wait({model.availability.opened}, timeout=10))[0]:
        log.info("still loading after %d s", time.monotonic() - began)
    model.availability.opened.result()


def read_properties(properties: Mapping[str, Any], *, asynchronous: bool, djl: str = "") -> Reading:
    """Read the options that Java passes, and the options in serving.properties and the environment.

    Java passes all options without their prefix, together with its own properties. A property that is not one of our
    options is therefore ignored. If it is in serving.properties, it is reported when that file is read.

    Args:
        properties: the properties of DJL's first call.
        asynchronous: whether the worker runs in async mode.
        djl: the version of djl_python, which also determines the LMI release unless an option specifies a release.
    """
    directory = Path(properties["model_dir"])
    file = directory / "serving.properties"
    properties_file, environ = file if file.is_file() else None, environment.of_worker()
    problems = Problems()
    if asynchronous and (properties.get("rolling_batch") or "disable") != "disable":
        message = "option.async_mode=true needs option.rolling_batch=disable: DJL Serving refuses both together"
        problems.append(Problem("", "option.rolling_batch", message))
    read_by_java = [*from_environment(environ), *(from_file(properties_file) if properties_file else ())]
    written = {item.key: item.value.strip() for item in read_by_java if isinstance(item, Setting)}
    settings = _settings(properties, written, asynchronous=asynchronous)
    read = partial(read_config, properties=properties_file, environ=environ, java=True, djl=djl)
    reading = read(settings=settings)
    served = replace(reading.config, model_id=reading.config.model_id or str(directory))
    if (chosen := choice.engine_of(served)) is not None:
        reading = read(settings=[*settings, chosen])
    config, config_problems, engine = reading
    problems += config_problems
    if not asynchronous and config.rolling_batch == "disable":
        config = replace(config, warnings=(*config.warnings, *_lost_rolling_batch(read_by_java)))
    ignored_keys = (key for key in config.origins if key in _EMBEDDED_ONLY)
    warnings = [*config.warnings, *misread_by_java(file)]
    warnings += [f"ignored: {key} ({config.where(key)}); {_EMBEDDED_ONLY[key]}" for key in ignored_keys]
    config = replace(config, warnings=tuple(warnings), cloudwatch_metrics_interval=0.0)
    if config.replicas != "1":
        message = "under DJL Serving, write minWorkers and maxWorkers instead (documentation: scaling)"
        problems.append(config.problem("option.replicas", config.replicas, message))
    if config.request_time_limit is None:
        config = replace(config, request_time_limit=_TIME_LIMIT)
    if config.model_id is None and engine not in ("", "echo"):
        with problems:
            config = replace(config, model_id=_model_of_worker(directory, engine))
    return Reading(config, tuple(problems), engine)


def _lost_rolling_batch(read_by_java: Iterable[Setting | Problem]) -> Iterator[str]:
    """Yield a warning if DJL Serving has replaced the user's option.rolling_batch=auto with `disable`."""
    key = "option.rolling_batch"
    last = [item for item in read_by_java if isinstance(item, Setting) and item.key == key][-1:]
    for setting in last:
        if setting.value.strip() == _LEFT_TO_JAVA[key]:
            yield (
                f"DJL Serving replaced {key}=auto ({setting.origin}) with disable, which is dynamic batching; "
                f"set {key}=scheduler for a rolling batch"
            )


def _settings(properties: Mapping[str, Any], written: Mapping[str, str], *, asynchronous: bool) -> list[Setting]:
    """Return the options that Java passes. An option that Java only recommends is dropped if it is not useful.

    Args:
        written: the values in serving.properties and the environment, by key.
    """
    settings: dict[str, Setting] = {}
    advice: dict[str, Setting] = {}
    for name, value in properties.items():
        key, full_key = option_key(name), f"option.{name}"
        if key is None or not isinstance(value, str) or not value:
            continue
        text = written.get(full_key) or written.get(name, "")
        value = _as_written(value, text)
        if "\ufffd" in value and "\ufffd" not in text:
            log.warning("%s: DJL Serving has lost its characters outside ASCII; set LANG=C.UTF-8", key)
        recommended = full_key in _ADVICE and written.get(full_key) in (None, _LEFT_TO_JAVA.get(full_key))
        (advice if recommended else settings)[key] = Setting(key, value, _JAVA)
    mode = advice.pop("option.rolling_batch", None) or settings.get("option.rolling_batch")
    rolling = mode.value if mode else "disable"  # Java steps a rolling batch only if the property is set
    has_engine = settings.get("option.llm_engine", Setting("", "auto", "")).value != "auto"
    if asynchronous:
        rolling = "auto"  # the handler batches even though Java does not
    elif (
        "option.rolling_batch" not in settings
        and rolling != "disable"
        and (has_engine or rolling not in ROLLING_BATCHES)
    ):
        rolling = "auto"  # Java's value is for the image's engine, not for option.llm_engine
    settings["option.rolling_batch"] = Setting("option.rolling_batch", rolling, _JAVA)
    settings["option.async_mode"] = Setting("option.async_mode", str(asynchronous), _JAVA)
    engine = selected_engine(settings.values(), "openvino")
    for key in advice.keys() - settings.keys():
        if _is_of_use(advice[key], engine, settings, asynchronous=asynchronous):
            settings[key] = advice[key]
        else:
            log.info("ignoring DJL Serving's recommendation %s=%s for engine %s", key, advice[key].value, engine)
    return list(settings.values())


def _as_written(value: str, written: str) -> str:
    """Return the value that the worker has read if it differs from Java's only outside ASCII, otherwise Java's value.

    Java reads serving.properties as ISO 8859-1, and the environment in the encoding of the locale.
    """
    ascii_of, other_of = (_OUTSIDE_ASCII.sub("", text).strip() for text in (value, written))
    return written if not written.isascii() and ascii_of == other_of else value


_OUTSIDE_ASCII = re.compile(r"[^\x00-\x7f]+")


def _is_of_use(advice: Setting, engine: str, settings: Mapping[str, Setting], *, asynchronous: bool) -> bool:
    match advice.key:
        case "option.tensor_parallel_degree":  # the number of GPUs; Java 0.28 sets 0 if there is none
            return advice.value != "0" and engine in ENGINES and ENGINES[engine].spreads
        case "option.max_rolling_batch_size":
            return not (asynchronous and advice.value == _RECOMMENDED_SIZE)
        case "option.max_num_tokens":
            return engine == "trtllm" and "option.max_num_batched_tokens" not in settings
    return False  # the recommended pipeline parallel degree, 1, is every engine's default


def _model_of_worker(directory: Path, engine: str) -> str:
    """Return the model directory as the value of option.model_id, or raise ConfigError if it contains no model."""
    try:
        model_files.locate(str(directory), parts=engine == choice.LLAMACPP)
    except ConfigError as error:
        raise ConfigError(
            f"option.model_id is not set ({model_files.DEMO!r} is a small model from PyPI), and {error}"
        ) from None
    return str(directory)


# -- metrics: lines on stdout that DJL Serving reads and exports to Prometheus (`SERVING_PROMETHEUS=true`) -------------


def report_metrics(model: ServedModel, version: DjlVersion) -> None:
    """Write the metrics of each request from now on, if `option.djl_metrics` is set."""
    if model.config.djl_metrics:
        model.metrics.recorders.append(MetricLines(model.config.label, version).write)


_UNFIT = re.compile(r"[^\w ./-]", re.ASCII)
"""Characters that a label value cannot contain: the separators of the line, and characters that Java's pattern
excludes.
"""


class MetricLines:
    """Writer of the metrics of each finished request.

    Token counts are reported as counters, and times as histograms in seconds. Before DJL Serving 0.29, times are gauges
    of the last value.

    Args:
        model_name: the value of the label `Model`.
        stream: where to write the lines. The default is stdout, which Java reads.
    """

    def __init__(self, model_name: str, version: DjlVersion, stream: TextIO | None = None) -> None:
        self._label = f"|#Model:{_UNFIT.sub('_', model_name)}"
        self._histogram = "|h" if version.metric_types else ""
        self._stream = stream or sys.stdout

    def write(self, request: RequestRecord) -> None:
        """Write all lines of a request in one call, because other processes write to the same stdout."""
        tokens = {"LmiPromptTokens": request.num_prompt_tokens, "LmiGeneratedTokens": request.num_tokens}
        lines = [f"{name}.Count:{count}{self._label}" for name, count in tokens.items() if count]
        if request.num_tokens:
            times = {"LmiTimeToFirstTokenSeconds": request.first, "LmiEngineQueueTimeSeconds": request.queue or 0.0}
            # The unit is None because Java does not know seconds, and drops a metric whose unit it does not know.
            lines += [f"{name}.None:{value:.6f}{self._label}{self._histogram}" for name, value in times.items()]
        try:
            self._stream.write("".join(f"[METRICS]{line}\n" for line in lines))
            self._stream.flush()
        except (OSError, ValueError) as error:  # a request must not fail because of its metrics
            log.warning("cannot write metrics for DJL Serving to stdout: %s", error)
