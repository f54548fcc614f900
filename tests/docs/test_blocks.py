"""Every code block of README.md, docs/ and examples/README.md is read, and run where it can be."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.blocks import Block, Server, parse
from tests.docs.checks import faults
from tests.docs.pages import ROOT
from tests.docs.runner import PageRun, Servers

PATHS = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), ROOT / "examples" / "README.md"]
PAGES = sorted({str(path.relative_to(ROOT)) for path in PATHS})

COMMANDS = {
    "demo": "(?:lmi|make) serve",
    "echo": "lmi serve --engine echo",
    "emulator": "lmi deploy local",
    "aws": "lmi deploy local --aws",
}
"""Of the kinds of servers that a reader can start."""

every_page = pytest.mark.parametrize("page", PAGES)


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
@every_page
def test_blocks_run(page: str, servers: Servers, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        run = PageRun(tmp_path, servers, stack)
        run.run((ROOT / page).read_text())
    fail(page, run.failures)


def fail(page: str, faults: list[str]) -> None:
    if faults:
        pytest.fail("\n".join(f"{page}:{fault}" for fault in faults), pytrace=False)
