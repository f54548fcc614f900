"""`lmi`: serve a model, measure a server, or deploy one."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from handler import __version__
from handler.bench.cli import add_parser as add_bench
from handler.core.errors import ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["deploy"]:  # a package of its own, with arguments of its own
        from deploy.__main__ import main as deploy

        return deploy(argv[1:], "lmi deploy")
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except ConfigError as error:
        print(f"lmi: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lmi", description=__doc__)
    parser.add_argument("--version", action="version", version=f"lmi-handler {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="serve a model over HTTP")
    serve.add_argument("model", nargs="?", help="a .gguf file or a model directory; with vllm and trtllm also a name "
                       "on the Hugging Face hub (default: the demo model)")  # fmt: skip
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    serve.add_argument("--port", type=port, default=8080, help="0 takes a free one (default %(default)s)")
    serve.add_argument("--engine", help="option.llm_engine: auto, openvino, trtllm, vllm, openai, echo")
    serve.add_argument("--properties", type=Path, metavar="FILE", help="a serving.properties file")
    serve.add_argument("-o", dest="options", action="append", default=[], metavar="KEY=VALUE",
                       help="an option as serving.properties writes it; beats all other sources")  # fmt: skip
    serve.add_argument("--check", action="store_true", help="list every problem that a start would meet; start nothing")
    _add_access(serve)
    serve.set_defaults(run=_serve)
    options = commands.add_parser("options", help="list the options, or describe one")
    options.add_argument("name", nargs="?", metavar="NAME", help="as serving.properties or the environment writes it")
    options.set_defaults(run=_options)
    add_bench(commands)
    commands.add_parser("deploy", help="put a model on a SageMaker endpoint (lmi deploy --help)")
    return parser


def _add_access(serve: argparse.ArgumentParser) -> None:
    access = serve.add_argument_group("access", "who may speak to the server, and how (docs/serving.md)")
    access.add_argument(
        "--api-key", dest="keys", action="append", default=[], metavar="KEY",
        help="serve only those who send Authorization: Bearer KEY; may be given again. Other users of this machine "
             "can read it in ps: LMI_API_KEY=KEY,... in the environment is better",
    )  # fmt: skip
    access.add_argument("--ssl-certfile", type=Path, metavar="FILE", help="HTTPS, with this certificate chain (PEM)")
    access.add_argument("--ssl-keyfile", type=Path, metavar="FILE", help="its private key, where it is in its own file")
    access.add_argument(
        "--allow-origin", dest="origins", action="append", default=[], metavar="ORIGIN",
        help="let pages of ORIGIN call the server from a browser (CORS); * is all. May be given again",
    )  # fmt: skip
    access.add_argument(
        "--allow-host", dest="hosts", action="append", default=[], metavar="HOST",
        help="answer requests for HOST too; a server without keys on a loopback address answers only those whose Host "
             "header names this machine; * is any. May be given again",
    )  # fmt: skip


def port(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError("must be a number from 0 to 65535")
    return int(text)


def _serve(arguments: argparse.Namespace) -> int:
    from handler.http.stop_signals import StopSignals

    signals = StopSignals()
    signals.install()  # before the slow imports
    from handler.config.loader import read_server_config
    from handler.http.security.access import OPEN, read_access
    from handler.http.startup import serve
    from handler.serving.loading import check

    reading = read_server_config(arguments.model, arguments.engine, arguments.properties, arguments.options)
    problems, access = check(reading), OPEN
    with problems:
        access = read_access(
            arguments.keys,
            arguments.origins,
            arguments.ssl_certfile,
            arguments.ssl_keyfile,
            hosts=arguments.hosts,
            environ=os.environ,
        )
    with problems:
        _log_to_stderr(os.environ.get("LMI_LOG_LEVEL", "INFO").upper())
    config = reading.config
    if not arguments.check:
        return serve(config, arguments.host, arguments.port, signals, access, problems)
    problems.check()
    for warning in config.warnings:
        print(warning)
    print(f"no problems; engine: {reading.engine}, option.model_id: {config.model_id or 'not set'}")
    return 0


def _options(arguments: argparse.Namespace) -> int:
    from handler.config.options import listing

    try:
        print(listing.describe(arguments.name) if arguments.name else listing.table(), flush=True)
    except BrokenPipeError:  # `lmi options | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more at its end
    return 0


def _log_to_stderr(level: str) -> None:
    if level not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise ConfigError(f"environment variable LMI_LOG_LEVEL={level}: must be debug, info, warning or error")
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


if __name__ == "__main__":
    raise SystemExit(main())
