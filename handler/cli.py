"""The command `lmi`, with its overview and the subcommands serve, options and completion."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from handler import __commit__, __version__
from handler.config.engines import LLM_ENGINES
from handler.core.command_line import (
    KeptLines,
    Parser,
    add_installed,
    add_json,
    add_repeatable,
    host,
    port,
    print_json,
)
from handler.core.errors import ConfigError, Problems
from handler.core.package import install
from handler.core.terminal import escaping
from handler.launch import add_parser as add_launch
from handler.models import add_parser as add_models
from handler.skill import add_parser as add_skill

if TYPE_CHECKING:
    from handler.config.loader import Reading

_SHELLS = ("bash", "zsh", "fish")
_MEANT = {
    **dict.fromkeys(("run", "start"), "lmi serve MODEL"),
    **dict.fromkeys(("pull", "download", "fetch"), "lmi models get MODEL"),
    **dict.fromkeys(("list", "ls", "ps"), "lmi models"),
    **dict.fromkeys(("rm", "remove"), "lmi models rm MODEL"),
}
"""Commands that users know from other programs, and the equivalent commands of `lmi`."""
_MEANT_FLAGS = {
    **dict.fromkeys(("-hf", "-hfr", "--hf-repo"), "lmi serve OWNER/MODEL, or lmi serve OWNER/MODEL/FILE.gguf"),
    "-m": "lmi serve MODEL",
    "-a": "--served-model-name",
    "-c": "--max-model-len",
    "-np": "--max-rolling-batch-size",
    **dict.fromkeys(("-ngl", "-t"), "--llama-server-args"),
}
"""Short flags of `llama-server`, and what `lmi serve` takes instead. `lead_of_flag` knows the long ones."""
_MAP = """Serve a large language model, measure it, and deploy it to SageMaker.

serve
  lmi serve [MODEL]                       serve a model over HTTP (default: the demo model)
  lmi serve [MODEL] --check               only list every problem of the configuration
  lmi options [NAME|WORD]                 list all options, describe one, or search for a word
  lmi models [get MODEL | rm MODEL ...]   list, fetch and remove the models on this machine
  lmi launch AGENT [MODEL] [-- ARGUMENT]  run Claude Code, Codex or another coding agent on a server
  lmi skill install AGENT                 teach a coding agent how to move an endpoint

measure
  lmi bench URL                           measure a running server: table, JSON
  lmi bench --engine                      start a server, and compare it with its engine without a server
  lmi bench --compare A.json B.json       compare results in a table

move
  lmi move ENDPOINT [REQUESTS]            adopt an endpoint, and prove here what can be proven; list what is not
  lmi replay REQUESTS --to TARGET         send recorded requests, and compare the responses with the recorded ones
  lmi conform URL                         test whether a server conforms to SageMaker's and other contracts

deploy to SageMaker
  lmi deploy plan|up|update|promote|down  preview, create, change or delete an endpoint
  lmi deploy invoke|stream|chat|bench     send requests to an endpoint, or measure it
  lmi deploy status|logs|scale|doctor     monitor, scale and diagnose an endpoint
  lmi deploy batch                        run a transform job on files of requests in S3
  lmi deploy adopt                        write the specification of an existing endpoint
  lmi deploy export|iam|schema            export the specification, IAM policies, or the specification's schema
  lmi deploy local                        run the container and SageMaker's API on this machine

shell
  lmi completion SHELL                    print a completion script for bash, zsh or fish: eval "$(lmi completion bash)"

Each command has its own --help. The documentation begins in README.md."""


@escaping()
def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["deploy"]:  # a separate package that parses its own arguments
        from deploy.__main__ import main as deploy

        return deploy(argv[1:], "lmi deploy")
    parser = make_parser(
        flags=argv[:1] in (["serve"], ["completion"]),
        tools=argv[:1] not in (["serve"], ["options"], ["launch"], ["models"], ["skill"]),
    )
    if not argv:
        parser.print_help()
        return 0
    arguments = parser.parse_all(argv)
    try:
        return int(arguments.run(arguments))
    except ConfigError as error:
        message = str(error)
        print(message if message.startswith("lmi ") else f"lmi: {message}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `lmi options | head`
        if arguments.run is _serve:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes stdout when it exits
        return 0
    except KeyboardInterrupt:
        return 130


def run(words: str) -> None:
    """Run the command line in a JSON list, in a process that `child_processes.python` has started."""
    raise SystemExit(main(json.loads(words)))


def make_parser(*, flags: bool = True, tools: bool = True) -> Parser:
    """Create the parser for all commands.

    Args:
        flags: whether to add a flag for each option. The table of options is slow to import.
        tools: whether to add the commands of other installed packages. Searching for them is slow.
    """
    parser = Parser(prog="lmi", usage="lmi COMMAND ...", description=_MAP, formatter_class=KeptLines)
    parser.add_argument("--version", action="version", version=_version())
    parser.meant = _MEANT
    commands = parser.add_subparsers(prog="lmi", required=True, metavar="COMMAND", help=argparse.SUPPRESS)
    _add_serve(commands, flags=flags)
    _add_options(commands)
    add_launch(commands)
    add_models(commands)
    add_skill(commands)
    if tools:
        add_installed(commands, "lmi.commands")
    deploy = commands.add_parser("deploy", help="deploy a model to a SageMaker endpoint")
    completion = _add_completion(commands)
    completion.set_defaults(run=lambda arguments: _completion(arguments.shell, parser, deploy))
    return parser


def _version() -> str:
    return f"lmi-handler {__version__}" + (f" (commit {__commit__})" if __commit__ else "")


def _add_serve(commands: Any, *, flags: bool) -> None:
    serve = commands.add_parser(
        "serve",
        help="serve a model over HTTP",
        usage="lmi serve [-h] [MODEL] [--check] [--OPTION VALUE ...] [-o KEY=VALUE ...]",
    )
    serve.meant_flags = _MEANT_FLAGS
    serve.hint = " (`lmi options {word}` searches the options; -o KEY=VALUE sets any option)"
    serve.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a .gguf file, a model directory, or a name on the Hugging Face hub "
        "(owner/model, owner/model/file.gguf) (default: the demo model)",
    )
    listening = "address to listen on (default: LMI_HOST, or 127.0.0.1)"
    serve.add_argument("--host", type=host, default=os.environ.get("LMI_HOST") or "127.0.0.1", help=listening)
    serve.add_argument(
        "--port", type=port, default=8080, help="port to listen on, or 0 for any free port (default: %(default)s)"
    )
    serve.add_argument("--engine", help=f"the engine (option.llm_engine): {', '.join(LLM_ENGINES)}")
    serve.add_argument("--properties", type=Path, metavar="FILE", help="a serving.properties file")
    option = "an option as in serving.properties; overrides all other sources"
    add_repeatable(serve, "-o", "options", "KEY=VALUE", option)
    serve.add_argument(
        "--check",
        action="store_true",
        help="only list every problem of the configuration; exit status: 0 without problems, 2 with problems",
    )
    serve.add_argument("--json", action="store_true", help="with --check: print JSON")
    _add_access(serve)
    if flags:
        from handler.config.options.command_line import add_flags

        add_flags(serve)
    serve.set_defaults(run=_serve)


def _add_options(commands: Any) -> None:
    options = commands.add_parser(
        "options",
        help="list all options, describe one, or search for a word",
        description="List all options, describe one, or search for words. Exit status: 0, or 2 if no option matches.",
    )
    options.add_argument(
        "words",
        nargs="*",
        metavar="NAME|WORD",
        help="an option's name, as in serving.properties, the environment or a flag; or words to search for",
    )
    options.add_argument("--engine", choices=LLM_ENGINES[1:], help="list this engine's options and native arguments")
    add_json(options)
    options.set_defaults(run=_options)


def _add_completion(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "completion",
        help="print a completion script for a shell",
        formatter_class=KeptLines,
        description="Print a completion script. To use it:\n"
        '  bash  eval "$(lmi completion bash)" in ~/.bashrc\n'
        "  zsh   lmi completion zsh > FOLDER/_lmi, where FOLDER is in $fpath\n"
        "  fish  lmi completion fish > ~/.config/fish/completions/lmi.fish",
    )
    parser.add_argument("shell", choices=_SHELLS)
    return parser


def _add_access(serve: argparse.ArgumentParser) -> None:
    access = serve.add_argument_group("access", "access control and HTTPS")
    key = (
        "require the header Authorization: Bearer KEY (other users of this machine can see the key in ps, so prefer "
        "LMI_API_KEY=KEY,... in the environment)"
    )
    add_repeatable(access, "--api-key", "keys", "KEY", key)
    access.add_argument(
        "--ssl-certfile", type=Path, metavar="FILE", help="serve HTTPS with this certificate chain (PEM)"
    )
    access.add_argument(
        "--ssl-keyfile", type=Path, metavar="FILE", help="the certificate's private key, if it is in a separate file"
    )
    origin = "allow pages from ORIGIN to call the server in a browser (CORS); * allows all"
    add_repeatable(access, "--allow-origin", "origins", "ORIGIN", origin)
    name = (
        "also accept requests whose Host header is HOST; * accepts any. Without API keys, a server on a loopback "
        "address otherwise accepts only Host headers that name this machine"
    )
    add_repeatable(access, "--allow-host", "hosts", "HOST", name)


def _serve(arguments: argparse.Namespace) -> int:
    from handler.core import log, loop

    if arguments.json and not arguments.check:
        arguments.parser.error("--json applies only with --check")
    signals = loop.StopSignals()
    signals.install()  # before the slow imports
    with loop.importing():
        from handler.http.security import OPEN, read_access, warning_of
        from handler.http.server import serve
        from handler.serving.check import check, without_model_data
        from handler.serving.engine import read_local, read_sources

    read = read_local if arguments.check else read_sources  # `read_sources` downloads the model's options
    try:
        reading = read(arguments.model, arguments.engine, arguments.properties, arguments.options)
    except ConfigError as error:
        if not arguments.json:
            raise
        return _print_check(Problems(error.problems), iter(()), None)
    checked = without_model_data(reading) if arguments.check else reading
    problems, access = check(checked, handlers=True), OPEN
    with problems:
        access = read_access(
            arguments.keys,
            arguments.origins,
            arguments.ssl_certfile,
            arguments.ssl_keyfile,
            hosts=arguments.hosts,
            environ=os.environ,
        )
    as_json = False
    with problems:
        as_json = log.set_up(os.environ)
    if not arguments.check:
        with log.captured(as_json):
            return serve(reading.config, arguments.host, arguments.port, signals, access, problems)
    notes = _checked(reading, problems, warning_of(access, arguments.host))
    return _print_check(problems, notes, reading) if arguments.json else _print_notes(notes, reading)


def _print_notes(notes: Iterator[str], reading: Reading) -> int:
    """Print what `lmi serve --check` finds as text, and return 0. Raise a ConfigError if there is a problem."""
    for note in notes:
        print(note)
    engine, model = _served(reading)
    print(f"no problems; engine: {engine}, option.model_id: {model or 'not set'}")
    return 0


def _served(reading: Reading) -> tuple[str, str | None]:
    """Return the names of the engine and of the model that a configuration serves."""
    from handler.core.user_functions import Role

    config = reading.config
    return "none" if config.handle_role is Role.ALONE else reading.engine, config.model_id


def _print_check(problems: Problems, notes: Iterator[str], reading: Reading | None) -> int:
    """Print what `lmi serve --check` finds as JSON, and return its exit status.

    Args:
        reading: the configuration, or None if it cannot be read.
    """
    kept: list[str] = []
    with problems:
        for note in notes:
            kept.append(note)
    engine, model = (None, None) if reading is None else _served(reading)
    print_json(
        {
            "problems": [{**problem._asdict(), "text": str(problem)} for problem in dict.fromkeys(problems)],
            "notes": kept,
            "engine": engine or None,
            "model": model,
        }
    )
    return 2 if problems else 0


def _checked(reading: Reading, problems: Problems, warning: str) -> Iterator[str]:
    """Yield the notes that `lmi serve --check` prints. Raise a ConfigError after the warnings if there is a problem.

    Args:
        warning: the warning about a server that anyone can use, or "".
    """
    from handler.config.sources import misread_by_java
    from handler.config.user_files import describe_model_py, missing_formatters, requirements_file
    from handler.core.user_functions import Role
    from handler.engines import choice
    from handler.http.custom import missing_of
    from handler.plugins.functions import model_py
    from handler.serving.check import model_data_note
    from handler.serving.engine import downloads_of, hub_note
    from handler.serving.user_code import model_py_directory

    config = reading.config
    yield from config.warnings
    yield from filter(None, [warning])
    yield from misread_by_java(config.directory / "serving.properties") if config.directory else ()
    path = model_py(model_py_directory(config))
    downloads = downloads_of(config, reading.engine) if reading.engine else {}
    if path is not None or not downloads:  # a model on S3 may have its own model.py
        problems.extend(missing_formatters(path, config))
    if config.handle_role is not Role.ALONE:
        yield from choice.describe(config)
    problems.check()
    for key, url in downloads.items():
        yield f"{key}={url}: not checked; it is downloaded at startup (under DJL Serving, by the Java side)"
    if reading.engine and (note := model_data_note(config) or hub_note(config, reading.engine)):
        yield note
    if (file := requirements_file(model_py_directory(config), is_enabled=config.install_requirements)) is not None:
        yield f"{file}: not checked; its packages are installed at startup (option.install_requirements)"
    if path is not None:
        yield describe_model_py(path, config)
    yield from missing_of(config)


def _options(arguments: argparse.Namespace) -> int:
    from handler.config.options import command_line

    if arguments.json:
        print_json(command_line.as_json(arguments.words, arguments.engine or "", _flags_of_serve()))
        return 0
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print(command_line.listing(arguments.words, arguments.engine or "", _flags_of_serve(), width), flush=True)
    return 0


def _flags_of_serve() -> dict[str, str]:
    """Return the flags of `lmi serve` that do not set an option, with their help texts."""
    parser = make_parser(flags=False, tools=False)
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    actions = (action for action in commands.choices["serve"]._actions if action.option_strings)
    return {action.option_strings[-1]: (action.help or "") % {"default": action.default} for action in actions}


def _completion(shell: str, parser: argparse.ArgumentParser, deploy: argparse.ArgumentParser) -> int:
    """Print the completion script for a shell. It includes the commands of `lmi deploy` if their extra is installed."""
    try:
        import shtab
    except ModuleNotFoundError:
        raise ConfigError(f"lmi completion: shtab is not installed: {install('lmi-handler[cli]')}") from None
    try:
        from deploy.cli.main import add_commands

        add_commands(deploy)
    except ModuleNotFoundError as error:
        print(
            f"lmi completion: the script omits the commands of lmi deploy, because {error.name} is not installed",
            file=sys.stderr,
        )
    _complete_files(parser, shtab.FILE)
    print(shtab.complete(parser, shell), flush=True)
    return 0


def _complete_files(parser: argparse.ArgumentParser, files: dict[str, str]) -> None:
    """Set the attribute `complete` of every path argument, so that shtab completes file names."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            action.help = None  # shtab omits an action with SUPPRESS, as the help does
            for command in action.choices.values():
                _complete_files(command, files)
        elif action.metavar == "FILE" or action.dest == "model":
            action.complete = files  # type: ignore[attr-defined]
        if action.help == argparse.SUPPRESS:  # a flag that only `lmi options` describes
            action.help = ""
