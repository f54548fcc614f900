"""What stands behind the image's name: `serve`, nothing, or flags (contract sagemaker.md, sections 1 and 8, row 9)."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import NamedTuple, NoReturn

from handler.core.errors import ConfigError

_PORT = 8080
_BIND = "SAGEMAKER_BIND_TO_PORT"


class Arguments(NamedTuple):
    """`options` are `key=value` texts as `-o` takes them; `port` is where SageMaker looks for the server."""

    port: int
    options: tuple[str, ...] = ()
    host: str = "0.0.0.0"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def read_arguments(argv: Sequence[str], environ: Mapping[str, str]) -> Arguments:
    """
    Raises:
        ConfigError: a command that is none, a wrong flag, a port that is none.
    """
    parser = _Parser(prog="serve", description=__doc__, allow_abbrev=False)
    parser.add_argument("command", nargs="?")
    parser.add_argument("--engine", help="option.llm_engine")
    parser.add_argument("--port", help=f"by default {_BIND}, else {_PORT}")
    parser.add_argument("-o", dest="options", action="append", default=[], metavar="KEY=VALUE")
    found = parser.parse_args(argv)
    if found.command == "train":
        raise ConfigError("this image serves models; it has no `train`")
    if found.command not in (None, "serve"):
        raise ConfigError(
            f"{found.command!r} is no command: an image is run with `serve`, nothing, or flags of it; to run another "
            "program in it, use docker run --entrypoint"
        )
    engine = [f"option.llm_engine={found.engine}"] if found.engine else []
    name, text = ("--port", found.port) if found.port is not None else (_BIND, environ.get(_BIND, str(_PORT)))
    if not text.isdecimal() or len(text) > 5 or not 0 < int(text) < 65536:
        raise ConfigError(f"{name}={text}: must be a number from 1 to 65535")
    return Arguments(int(text), (*engine, *found.options), environ.get("LMI_HOST") or "0.0.0.0")
