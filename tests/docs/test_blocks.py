"""Every code block of README.md, docs/, examples/README.md and the skills is read, and run where it can be."""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from deploy.cli.main import add_commands
from deploy.errors import SpecError
from deploy.spec import Spec
from deploy.spec.reading import FILLERS, read_spec
from handler.cli import make_parser
from handler.config.loader import read_config
from tests.docs.blocks import Block, Server, parse, programs
from tests.docs.pages import ROOT
from tests.docs.runner import PageRun, Servers

# -- what can be told of a block without running it: its syntax, its `lmi` commands, its curl bodies -------------------


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


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


PATHS = [
    *(ROOT / "README.md", ROOT / "examples" / "README.md"),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "skills").rglob("SKILL.md"),
]
PAGES = sorted({str(path.relative_to(ROOT)) for path in PATHS})

COMMANDS = {
    "demo": "(?:lmi|make) serve",
    "echo": "lmi serve --engine echo",
    "emulator": "lmi deploy local",
    "aws": "lmi deploy local --aws",
}
"""Of the kinds of servers that a reader can start."""

every_page = pytest.mark.parametrize("page", PAGES)

AT_NIGHT = ("docs/adopt.md", "docs/deploy.md")
"""A rehearsal of minutes, whose cases tests/deploy has one by one."""


@every_page
def test_blocks_follow_the_convention(page: str, tmp_path: Path) -> None:
    items, found = parse((ROOT / page).read_text())
    blocks = [item for item in items if isinstance(item, Block) and not (item.output and item.language == "text")]
    found = [*found, *(fault for block in blocks for fault in faults(block, tmp_path))]
    fail(page, found)


@every_page
def test_a_page_names_the_command_of_a_server_before_its_blocks(page: str) -> None:
    text = (ROOT / page).read_text()
    servers = [item for item in parse(text).items if isinstance(item, Server) and item.kind in COMMANDS]
    fail(page, [f"{server.line}: name the server's command above" for server in servers if not named(server, text)])


def named(server: Server, text: str) -> bool:
    command = " ".join(filter(None, [COMMANDS[server.kind], re.escape(shlex.join(server.arguments))]))
    return bool(re.search(rf"{command}(?=`| *\n| +#)", above(server, text)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Run `lmi serve --engine echo -o a=1`:", True),
        ("```sh\nlmi serve --engine echo -o a=1   # here\n```\nThen:", True),
        ("Run `lmi serve --engine echo`:", False),
        ("Run `lmi serve --engine echo -o a=1 -o b=2`:", False),
    ],
)
def test_the_command_of_a_server_is_found_above_it(text: str, expected: bool) -> None:
    page = f"{text}\n<!-- server: echo -o a=1 -->\n"
    server = parse(page).items[-1]
    assert isinstance(server, Server)
    assert named(server, page) == expected


@every_page
def test_a_page_names_the_file_of_a_block_above_it(page: str) -> None:
    text = (ROOT / page).read_text()
    files = [item for item in parse(text).items if isinstance(item, Block) and item.file]
    fail(page, [f"{block.line}: name {block.file} above" for block in files if block.file not in above(block, text)])


def above(item: Block | Server, text: str) -> str:
    """Return the page above, without comments, which a reader does not see."""
    return re.sub(r"<!--.*?-->", "", "\n".join(text.splitlines()[: item.line]))


def test_the_name_of_a_file_in_a_comment_is_not_seen() -> None:
    page = "Write it:\n<!-- file: a.env -->\n```sh\nA=1\n```"
    block = parse(page).items[0]
    assert "a.env" not in above(block, page)
    assert "a.env" in above(block, page.replace("it", "`a.env`"))


@pytest.fixture(scope="module")
def servers(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with contextlib.ExitStack() as stack:
        yield Servers(demo_model, tmp_path_factory.mktemp("servers"), stack)


@pytest.mark.model
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.nightly] if page in AT_NIGHT else []) for page in PAGES]
)
def test_blocks_run(page: str, servers: Servers, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        run = PageRun(tmp_path, servers, stack)
        run.run((ROOT / page).read_text())
    fail(page, run.failures)


def fail(page: str, faults: list[str]) -> None:
    if faults:
        pytest.fail("\n".join(f"{page}:{fault}" for fault in faults), pytrace=False)
