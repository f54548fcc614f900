"""What can be told of a block without running it: its syntax, its `lmi` commands, its curl bodies."""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from deploy.cli.main import add_commands
from deploy.errors import SpecError
from deploy.spec import Spec
from deploy.spec.reading import FILLERS, read_spec
from handler.cli import make_parser
from handler.config.loader import read_config
from tests.docs.blocks import Block, programs

_DATA = ("-d", "--data", "--data-raw", "--data-binary", "--json")


def faults(block: Block, directory: Path) -> list[str]:
    """Say what is wrong with a block, each as `LINE: fault`.

    Args:
        directory: for files that readers want.
    """
    match block.language:
        case "console" | "sh":
            found = [(command.line, fault) for command in block.commands for fault in _shell(command.text)]
            return [f"{line}: {fault}" for line, fault in found]
        case "python":
            check = _python
        case "json":
            check = _json
        case "toml":
            check = _toml
        case "yaml":
            check = _yaml
        case "properties":
            check = _properties
        case _:
            return []
    return [f"{block.line}: {fault}" for fault in check(block.text, directory)]


def _python(text: str, directory: Path) -> Iterator[str]:
    try:
        compile(text, "<block>", "exec")
    except SyntaxError as error:
        yield f"not Python: {error}"


def _json(text: str, directory: Path) -> Iterator[str]:
    try:
        json.loads(text)
    except ValueError as error:
        yield f"not JSON: {error}"


def _toml(text: str, directory: Path) -> Iterator[str]:
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        yield f"not TOML: {error}"


def _yaml(text: str, directory: Path) -> Iterator[str]:
    """A deployment's specification, or a part of one, is read as `lmi deploy plan` reads it."""
    try:
        documents = list(yaml.safe_load_all(text))
    except yaml.YAMLError as error:
        yield f"not YAML: {error}"
        return
    for content in documents:
        if isinstance(content, dict) and content.keys() <= Spec.model_fields.keys():
            path = directory / "deployment.yaml"
            path.write_text(json.dumps({**FILLERS, **content}))
            try:
                read_spec(path)
            except SpecError as error:
                yield str(error)


def _properties(text: str, directory: Path) -> Iterator[str]:
    path = directory / "serving.properties"
    path.write_text(text)
    for problem in read_config(properties=path, environ={}).problems:
        yield str(problem)


def _shell(command: str) -> Iterator[str]:
    try:
        calls = list(programs(command))
    except ValueError as error:
        yield f"not a command: {error}"
        return
    for program, *arguments in calls:
        match program.rpartition("/")[2]:
            case "lmi":
                yield from _lmi(arguments)
            case "curl":
                yield from _curl(arguments)


def _lmi(arguments: list[str]) -> Iterator[str]:
    """Read them by the command's own parsers."""
    if arguments[:1] == ["deploy"]:
        parser = argparse.ArgumentParser("lmi deploy")
        add_commands(parser)
        arguments = arguments[1:]
    else:
        parser = make_parser()
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told), contextlib.redirect_stdout(io.StringIO()):
            parser.parse_args(arguments)
    except SystemExit as error:
        if error.code:
            yield f"lmi {shlex.join(arguments)}: {told.getvalue().strip().splitlines()[-1]}"


def _curl(arguments: list[str]) -> Iterator[str]:
    for option, body in itertools.pairwise(arguments):
        if option in _DATA and body.startswith(("{", "[")) and "$(" not in body:
            yield from (f"{fault}: {body}" for fault in _json(body, Path()))
