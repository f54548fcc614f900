"""AGENTS.md fits a screen, and names only paths, commands and targets of make that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.blocks import Block, parse
from tests.docs.pages import ROOT
from tests.docs.test_blocks import faults

MAX_LINES = 60
PAGES = ("AGENTS.md", "README.md", "CONTRIBUTING.md")

_TARGETS = re.compile(r"^([a-z][a-z0-9-]*):", re.MULTILINE)
_MAKE = re.compile(r"(?:`|^|&& |; )make (?:[A-Z]+=\S+ )*([a-z][a-z0-9-]*)", re.MULTILINE)
_PATH = re.compile(r"(?<![\w./-])(?:handler|deploy|proof|tests|docs|examples|\.ci)/[\w./-]*")


def targets() -> set[str]:
    """Return the targets of the Makefile."""
    return set(_TARGETS.findall((ROOT / "Makefile").read_text()))


def test_agents_read_it_on_one_screen() -> None:
    assert len((ROOT / "AGENTS.md").read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize("page", PAGES)
def test_the_targets_of_a_page_exist(page: str) -> None:
    named = set(_MAKE.findall((ROOT / page).read_text()))
    assert {"serve", "test"} <= named
    assert named - targets() == set()


def test_the_paths_of_the_page_exist() -> None:
    named = set(_PATH.findall((ROOT / "AGENTS.md").read_text()))
    assert len(named) > 10
    assert {path for path in named if not (ROOT / path).exists()} == set()


def test_the_commands_of_the_page_can_be_read(tmp_path: Path) -> None:
    page = parse((ROOT / "AGENTS.md").read_text())
    blocks = [item for item in page.items if isinstance(item, Block)]
    assert page.faults == []
    assert len(blocks) == 2
    assert [fault for block in blocks for fault in faults(block, tmp_path)] == []


def test_targets_are_found_in_code_and_text() -> None:
    text = "make dev   # once\n`make LATEST=1 VENV=.venv-latest test` uses\nmake a change\ncd x && make serve"
    assert _MAKE.findall(text) == ["dev", "test", "a", "serve"]
