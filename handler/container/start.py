"""From the environment to the server's process: what is said in the log, what is refused, what is started."""

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
from handler.container import djl, embedded, gpu
from handler.container.aliases import translate
from handler.container.arguments import read_arguments
from handler.container.model import Found, find_model
from handler.container.secret import with_token
from handler.container.supervisor import run_as_init, supervise
from handler.core.errors import ConfigError

log = logging.getLogger("handler.container")

FRONTS = ("djl", "embedded")
_CACHES = {
    "LMI_CACHE": "lmi",  # models that are made of the given one
    "HF_HOME": "huggingface",
    "TRITON_CACHE_DIR": "triton",
    "VLLM_CACHE_ROOT": "vllm",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "TORCHINDUCTOR_CACHE_DIR": "torchinductor",
}
"""What engines write, which is never the model's own directory; below LMI_SCRATCH where nothing else is said."""


class Start(NamedTuple):
    """`supervised`: the server does not drain by itself, so this process stays to see to it."""

    command: list[str]
    environ: Mapping[str, str]
    port: int
    supervised: bool


def main(argv: Sequence[str] | None = None) -> int:
    """Replaces this process by the server, or runs it; returns only with an exit status."""
    signal.signal(signal.SIGTERM, _leave)  # process 1 would not end by it otherwise
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
    # The kernel drops what process 1 does not handle. What comes now waits until `lmi serve` has its handlers.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    os.execve(start.command[0], start.command, dict(start.environ))


def prepare(argv: Sequence[str], environ: Mapping[str, str], driver: gpu.Driver | None = None) -> Start:
    """Everything up to the server's command; writes only below LMI_SCRATCH, and there only for DJL Serving.

    Args:
        driver: by default the one that NVML tells of.

    Raises:
        ConfigError: it cannot start, for the reason given.
        OSError: the scratch directory cannot be written.
    """
    arguments = read_arguments(argv, environ)
    front = environ.get("LMI_FRONT") or "embedded"
    if front not in FRONTS:
        raise ConfigError(f"environment variable LMI_FRONT={front}: must be {' or '.join(FRONTS)}")
    log.info("lmi-handler %s, front %s, port %d", __version__, front, arguments.port)
    look = gpu.check(driver or gpu.read_driver(), environ)
    if look.line:
        log.info("%s", look.line)
    translated = translate(environ)
    for line in translated.lines:
        log.info("%s", line)
    echo = "option.llm_engine=echo" in arguments.options or environ.get("OPTION_LLM_ENGINE") == "echo"
    found = find_model(translated.environ, needed=not echo)
    _tell(found)
    scratch = Path(environ.get("LMI_SCRATCH") or Path(environ.get("TMPDIR") or "/tmp") / "lmi")
    ready = {**_caches(translated.environ, scratch, found), **translated.environ}
    if look.library_path:
        ready["LD_LIBRARY_PATH"] = ":".join(filter(None, [look.library_path, environ.get("LD_LIBRARY_PATH")]))
    if front == "embedded":
        return Start(embedded.command(arguments, found), with_token(ready), arguments.port, supervised=False)
    home = djl.home(ready)
    scratch.mkdir(parents=True, exist_ok=True)
    name = djl.make_model(arguments, found, ready, scratch / "model", djl.version(home))
    command = djl.command(home, djl.make_configuration(scratch, arguments), name, scratch / "model")
    return Start(command, with_token(djl.environment(home, ready, scratch)), arguments.port, supervised=True)


def _tell(found: Found) -> None:
    log.info("model: %s", found.model_id or (f"as {found.properties} says" if found.properties else "none"))
    for name, path in found.channels.items():
        log.info("additional model data: %s in %s", name, path)


def _caches(environ: Mapping[str, str], scratch: Path, found: Found) -> dict[str, str]:
    for name in _CACHES:
        value = environ.get(name)
        if value and found.directory and Path(value).is_relative_to(found.directory):
            raise ConfigError(f"environment variable {name}={value}: SageMaker's model data cannot be written to")
    return {name: str(scratch / directory) for name, directory in _CACHES.items()}


def _leave(sig: int, frame: FrameType | None) -> None:
    raise SystemExit(0)
