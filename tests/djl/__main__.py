"""`make djl`: the handler under DJL, in the foreground, until Ctrl-C."""

from __future__ import annotations

import argparse
import signal
import socket
import sys
import tempfile
import threading
from pathlib import Path

from handler.errors import ConfigError
from handler.models import locate
from tests.djl import home, jars
from tests.djl.launch import MODEL, Djl, StartFailed, write_model

PROPERTIES = Path(__file__).parents[2] / "serving.properties"
CURL = """\
curl -sN {url}{path} -H 'Content-Type: application/json' \\
  -d '{{"inputs":"The capital of France is","parameters":{{"max_new_tokens":8}}{stream}}}'
"""


def main() -> int:
    arguments = _arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
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
    parser.add_argument("--port", type=int, default=8080, help="0 takes a free one (default %(default)s)")
    parser.add_argument("-o", dest="options", action="append", default=[], metavar="KEY=VALUE",
                        help="an option as serving.properties writes it; beats the file")  # fmt: skip
    return parser.parse_args()


def _serve(arguments: argparse.Namespace, scratch: Path) -> int:
    socket.create_server(("127.0.0.1", arguments.port)).close()  # taken? DJL would say so after the model has loaded
    serving = home.find()
    version = home.version(serving) if serving else jars.VERSIONS[-1]
    model_id = _model_id(arguments.model, scratch)
    more = "\n".join([f"option.model_id={model_id}", *arguments.options])  # of a key's values the last one counts
    model = write_model(scratch / "model", f"{PROPERTIES.read_text()}\n{more}\n")
    what = f"DJL Serving {version} in {serving}" if serving else f"DJL's Python engine {version} behind tests/djl/front"
    progress = Progress(f"loading {arguments.model} under {what}")
    server = Djl.start(serving, version, scratch, model, arguments.port, show=progress.show)
    try:
        server.wait_ready(3600, progress.tick)
        progress.say(f"ready on {server.url}: {what}, handler.entry with {arguments.model}; Ctrl-C ends it")
        for path, stream in (("/invocations", ""), (f"/predictions/{MODEL}", ',"stream":true')):
            progress.say(CURL.format(url=server.url, path=path, stream=stream).rstrip())
        status = server.process.wait()
        raise StartFailed(f"DJL ended with status {status}: {server.reason()}")
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would leave the worker behind
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        progress.end()
        server.stop()


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
        sys.stderr.write(erase + text)
        sys.stderr.flush()


if __name__ == "__main__":
    raise SystemExit(main())
