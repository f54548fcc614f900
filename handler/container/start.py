"""Start of the container: from the environment to the server's process."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from handler import __version__
from handler.config.loader import read_config
from handler.container import djl
from handler.container.arguments import Arguments, Translation, read_arguments, translated_environment
from handler.container.model import ModelSource, find_model
from handler.container.secret import with_token
from handler.container.supervisor import run_as_init, supervise
from handler.core.devices import Driver, DriverCheck, check_driver, read_driver
from handler.core.errors import ConfigError, Problem, Problems

log = logging.getLogger("handler.container")

FRONTS = ("djl", "embedded")
_CACHES = {
    "LMI_CACHE": "lmi",  # converted models
    "HF_HOME": "huggingface",
    "TRITON_CACHE_DIR": "triton",
    "VLLM_CACHE_ROOT": "vllm",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "TORCHINDUCTOR_CACHE_DIR": "torchinductor",
}
"""Directories that engines write to, below LMI_SCRATCH unless the variable is set; never the model's own."""


class Start(NamedTuple):
    """A server's command and environment. `supervised` where this process must drain it at SIGTERM."""

    command: list[str]
    environ: Mapping[str, str]
    port: int
    supervised: bool


def main(argv: Sequence[str] | None = None) -> int:
    """Replace this process by the server, or run the server and return its exit status."""
    signal.signal(signal.SIGTERM, _exit)  # without a handler the kernel drops it for process 1
    logging.basicConfig(
        level="INFO", format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr, force=True
    )
    try:
        start = prepare(sys.argv[1:] if argv is None else argv, os.environ)
    except ConfigError as error:
        log.error("cannot start: %s", error)
        return 2
    except OSError as error:
        log.error("cannot start: %s", error)
        return 1
    sys.stderr.flush()
    if start.supervised:
        return supervise(start.command, start.environ, start.port)
    if os.getpid() == 1:
        return run_as_init(start.command, start.environ)
    # A signal that comes now waits until `lmi serve` has its handlers; process 1 would lose it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    os.execve(start.command[0], start.command, dict(start.environ))


def prepare(argv: Sequence[str], environ: Mapping[str, str], driver: Driver | None = None) -> Start:
    """Make the server's command; writes only below LMI_SCRATCH, and only for DJL Serving.

    Args:
        driver: by default read from NVML.

    Raises:
        ConfigError: the server cannot start; with all problems that show before it is started.
        OSError: the scratch directory cannot be written.
    """
    problems = Problems()
    arguments, gpus = Arguments(0), DriverCheck("")
    translation, source = Translation(environ, ()), ModelSource(None, None, {})
    with problems:
        arguments = read_arguments(argv, environ)
    for option in arguments.options:
        key, _, value = option.partition("=")
        if key.strip() == "option.model_id":
            environ = {**environ, "OPTION_MODEL_ID": value.strip()}  # which a flag beats
    front = environ.get("LMI_FRONT") or "embedded"
    if front not in FRONTS:
        problems.append(Problem("", "", f"environment variable LMI_FRONT={front}: must be {' or '.join(FRONTS)}"))
    log.info("lmi-handler %s, front %s, port %d", __version__, front, arguments.port)
    driver = driver or read_driver()
    with problems:
        gpus = check_driver(driver, environ)
    if gpus.line:
        log.info("%s", gpus.line)
    with problems:
        translation = translated_environment(environ)
    for line in translation.lines:
        log.info("%s", line)
    echo = "option.llm_engine=echo" in arguments.options or environ.get("OPTION_LLM_ENGINE") == "echo"
    with problems:
        source = find_model(translation.environ, needed=not echo)
        _log(source)
    scratch = Path(environ.get("LMI_SCRATCH") or Path(environ.get("TMPDIR") or "/tmp") / "lmi")
    ready = {**_caches(scratch), **translation.environ}
    with problems:
        _check_caches(translation.environ, source)
    home, server = Path(), list[str]()
    with problems:
        if front == "djl" and not arguments.check:
            home = djl.home(ready)
        else:
            server = embedded_command(arguments, source)
    if problems or not server:  # else `lmi serve` tells those of the options
        reading = read_config(
            properties=source.properties, overrides=arguments.options, environ=translation.environ, java=front == "djl"
        )
        problems += reading.problems
    problems.check()
    if gpus.library_path:
        ready["LD_LIBRARY_PATH"] = ":".join(filter(None, [gpus.library_path, environ.get("LD_LIBRARY_PATH")]))
    if server:
        environ = ready if arguments.check else with_token(ready)
        return Start(server, environ, arguments.port, supervised=False)
    scratch.mkdir(parents=True, exist_ok=True)
    name = djl.make_model(arguments, source, ready, scratch / "model", djl.version(home))
    configuration = djl.make_configuration(scratch, arguments)
    command = djl.command(home, configuration, name, scratch / "model", gpu=driver is not None)
    return Start(command, with_token(djl.environment(home, ready, scratch)), arguments.port, supervised=True)


def embedded_command(arguments: Arguments, source: ModelSource) -> list[str]:
    """Make the command of `lmi serve`, which drains by itself at SIGTERM.

    Raises:
        ConfigError: SageMaker's model data have a model.py, but no serving.properties.
    """
    options = [part for option in arguments.options for part in ("-o", option)]
    serve = [sys.executable, "-m", "handler", "serve", "--host", arguments.host]
    serve += ["--port", str(arguments.port), *options, *(["--check"] if arguments.check else [])]
    if source.properties is not None:  # it may name the model itself
        return [*serve, str(source.properties.parent)]
    code = source.directory and source.directory / "model.py"
    if code and code.is_file() and source.model_id != str(source.directory):
        raise ConfigError(f"{code} needs a serving.properties beside it, which may be empty")
    # Not as an option, which would beat the serving.properties of that directory.
    return [*serve, source.model_id] if source.model_id else serve


def _log(source: ModelSource) -> None:
    log.info("model: %s", source.model_id or (f"as {source.properties} says" if source.properties else "none"))
    for name, path in source.channels.items():
        log.info("additional model data: %s in %s", name, path)


def _caches(scratch: Path) -> dict[str, str]:
    return {name: str(scratch / directory) for name, directory in _CACHES.items()}


def _check_caches(environ: Mapping[str, str], source: ModelSource) -> None:
    inside = [
        f"environment variable {name}={value}: SageMaker's model data cannot be written to"
        for name in _CACHES
        if (value := environ.get(name)) and source.directory and Path(value).is_relative_to(source.directory)
    ]
    if inside:
        raise ConfigError(*inside)


def _exit(sig: int, frame: FrameType | None) -> None:
    os._exit(0)  # an exception in the middle of an import may crash an extension module
