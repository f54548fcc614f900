"""Every code block of README.md, docs/ and examples/README.md is read, and run where it can be."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.blocks import Block, parse
from tests.docs.checks import faults
from tests.docs.runner import ROOT, PageRun, Servers

PATHS = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), ROOT / "examples" / "README.md"]
PAGES = sorted({str(path.relative_to(ROOT)) for path in PATHS})

every_page = pytest.mark.parametrize("page", PAGES)


@every_page
def test_blocks_follow_the_convention(page: str, tmp_path: Path) -> None:
    items, found = parse((ROOT / page).read_text())
    blocks = [item for item in items if isinstance(item, Block) and not (item.output and item.language == "text")]
    found = [*found, *(fault for block in blocks for fault in faults(block, tmp_path))]
    fail(page, found)


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
