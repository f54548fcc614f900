"""`make djl`: the handler under DJL, in the foreground, until Ctrl-C."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
import tempfile
import threading
from pathlib import Path

from handler.config.config import Config
from handler.config.loader import read_config
from handler.config.model_files import locate
from handler.container.djl import RETRIES
from handler.core.command_line import port
from handler.core.errors import ConfigError
from tests.djl import home, jars
from tests.djl.launch import MODEL, Djl, StartFailed, write_model

PROPERTIES = Path(__file__).parents[2] / "serving.properties"
CURL = """\
curl -sN {url}{path} -H 'Content-Type: application/json' \\
  -d '{{"inputs":"The capital of France is","parameters":{{"max_new_tokens":8}}{stream}}}'
"""


def main() -> int:
    arguments = _arguments()
    for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(sig, signal.default_int_handler)
    try:
        with tempfile.TemporaryDirectory(prefix="djl-") as scratch:
            return _serve(arguments, Path(scratch))
    except KeyboardInterrupt:
        return 0
    except (ConfigError, jars.Unavailable, OSError) as error:
        print(f"djl: {error}", file=sys.stderr)
    except (StartFailed, AssertionError) as error:  # its further lines are the log, which has been shown
        print(f"djl: {str(error).splitlines()[0]}", file=sys.stderr)
    return 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.djl", description=__doc__)
    parser.add_argument("model", nargs="?", default="demo", help="a .gguf file or a model directory (default: demo)")
    parser.add_argument("--port", type=port, default=8080, help="0 takes a free one (default: %(default)s)")
    parser.add_argument("-o", dest="options", action="append", default=[], metavar="KEY=VALUE",
                        help="an option as serving.properties writes it; beats the file")  # fmt: skip
    return parser.parse_args()


def _serve(arguments: argparse.Namespace, scratch: Path) -> int:
    _check_port(arguments.port)
    serving = home.find()
    version = home.version(serving) if serving else jars.VERSIONS[-1]
    model, config = _model(arguments.model or "demo", arguments.options, scratch)
    what = f"DJL Serving {version} in {serving}" if serving else f"DJL's Python engine {version} behind tests/djl/front"
    progress = Progress(f"loading {arguments.model} under {what}")
    environ = {**RETRIES, **os.environ}
    server = Djl.start(serving, version, scratch, model, arguments.port, environ, show=progress.show)
    try:
        server.wait_ready(3600, progress.tick)
        progress.say(f"ready on {server.url}: {what}, handler.entry with {arguments.model}; Ctrl-C ends it")
        for path, stream in (("/invocations", ""), (f"/predictions/{MODEL}", ',"stream":true')):
            if not stream or config.rolling_batch != "disable":
                progress.say(CURL.format(url=server.url, path=path, stream=stream).rstrip())
        status = server.process.wait()
        raise StartFailed(f"DJL ended with status {status}: {server.reason()}")
    finally:
        for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(sig, signal.SIG_IGN)  # a second one would leave the worker behind
        progress.end()
        server.stop()


def _check_port(number: int) -> None:
    """DJL would say that it is taken after the model has loaded."""
    try:
        socket.create_server(("127.0.0.1", number)).close()
    except OSError as error:
        raise ConfigError(f"cannot listen on 127.0.0.1:{number}: {error.strerror}") from None


def _model(name: str, options: list[str], scratch: Path) -> tuple[Path, Config]:
    """The model directory for DJL, and its options as far as the handler knows them.

    A directory with a serving.properties of its own is taken as it is; for any other model the project's is used.

    Raises:
        ConfigError: an option is wrong; better said now than by Java.
    """
    own = Path(name) / "serving.properties"
    if own.is_file():
        properties, model_id = own, own.parent.resolve()
        files = {entry.name: entry.resolve() for entry in own.parent.iterdir() if entry.name != own.name}
    else:
        properties, model_id, files = PROPERTIES, _model_id(name, scratch), {}
    environ = {key: value for key, value in os.environ.items() if not key.startswith("SERVING_")}
    config = read_config(properties=properties, overrides=options, environ=environ, java=True).checked()
    lines = [properties.read_text(), *options]  # of a key's values the last one counts
    if config.model_id is None:
        lines.insert(1, f"option.model_id={model_id}")
    if "model.py" not in files:
        lines.insert(0, "option.entryPoint=handler.entry")
    directory = write_model(scratch / "model", "\n".join(["engine=Python", "minWorkers=1", "maxWorkers=1", *lines, ""]))
    for name, path in files.items():
        (directory / name).symlink_to(path)
    return directory, config


def _model_id(model: str, scratch: Path) -> Path:
    """Always a directory: DJL Serving takes any other name for one on a hub and asks there."""
    path = locate(model).path.resolve()
    if path.is_dir():
        return path
    directory = scratch / "weights"
    directory.mkdir()
    (directory / path.name).symlink_to(path)
    return directory


class Progress:
    """What the user sees of a start: DJL's log, and the seconds under it; where that is no terminal, now and then."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._terminal = sys.stderr.isatty()
        self._second = -1
        self._ended = False
        self._lock = threading.Lock()
        self.say(what + " ...")

    def say(self, text: str) -> None:
        with self._lock:
            self._write(text + "\n")

    def show(self, line: str) -> None:
        with self._lock:
            if not self._ended:
                self._write(line)

    def end(self) -> None:
        """Java and Python call their end an error, at length: of no use to who asked for it."""
        self.say("ending DJL ...")
        self._ended = True

    def tick(self, elapsed: float) -> None:
        if int(elapsed) == self._second:
            return
        self._second = int(elapsed)
        with self._lock:
            if self._terminal:
                self._write(f"{self._what}: {self._second} s")
            elif self._second and self._second % 10 == 0:
                self._write(f"{self._what}: {self._second} s\n")

    def _write(self, text: str) -> None:
        erase = "\r\x1b[K" if self._terminal else ""
        with contextlib.suppress(OSError):  # the terminal may be gone
            sys.stderr.write(erase + text)
            sys.stderr.flush()


if __name__ == "__main__":
    raise SystemExit(main())
