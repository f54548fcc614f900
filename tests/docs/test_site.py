"""What the site's build adds for programs: `llms.txt`, copies of the pages in Markdown, and the list of versions."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from tests.docs.pages import ROOT, copy, copy_name, first_line, links, llms_txt, pages, versions
from tests.one_test import in_one_test

_ENTRY = re.compile(r"^- \[([^\]]+)\]\(markdown/([^)]+)\): (.+)$", re.MULTILINE)


def navigation() -> list[Any]:
    nav: list[Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    return nav


def test_llms_txt_lists_the_pages_in_the_order_of_the_navigation() -> None:
    listed = llms_txt(navigation(), "lmi-handler", "A server.")
    assert listed.startswith("# lmi-handler\n\n> A server.\n\n## Start\n\n- [")
    entries = [entry for part in navigation() for group in part.values() for entry in group]
    paths = [entry if isinstance(entry, str) else next(iter(entry.values())) for entry in entries]
    assert [name for _, name, _ in _ENTRY.findall(listed)] == [copy_name(path) for path in paths]
    assert {copy_name(path) for path in paths} == {copy_name(page) for page in pages()}


@in_one_test("page", pages())
def test_links_of_a_copy_lead_to_copies_and_files_of_the_site(page: str) -> None:
    files = {copy_name(other) for other in pages()}
    for target in links(copy((ROOT / page).read_text(), page)):
        path = target.partition("#")[0]
        if path.startswith("../"):
            name = path.removeprefix("../")
            here = name.removeprefix("repository/") if name.startswith("repository/") else f"docs/{name}"
            assert (ROOT / here).is_file(), target
        else:
            assert not path or ":" in path or path in files, target


@pytest.mark.parametrize(
    ("markdown", "expected"),
    [
        ("[errors](README.md#errors)", "[errors](docs-wire-README.md#errors)"),
        ("![a](../images/overview.svg)", "![a](../images/overview.svg)"),
        ("[license](../../LICENSE), [below](#below)", "[license](../repository/LICENSE), [below](#below)"),
        ("[out](https://example.com/a.md) `[x](y.md)`", "[out](https://example.com/a.md) `[x](y.md)`"),
        ("<!-- server: echo -->\ntext\n```sh\n[x](y.md)\n```", "text\n\n```sh\n[x](y.md)\n```"),
    ],
)
def test_a_copy_is_plain_markdown(markdown: str, expected: str) -> None:
    assert copy(markdown, "docs/wire/openai.md") == expected + "\n"


def test_the_first_line_is_text() -> None:
    page = "# Title\n<!-- server: demo -->\n![picture](a.svg)\n\n**For [operators](b.md):** keys.\nMore."
    assert first_line(page) == "For operators: keys."


def test_versions_are_the_directories_newest_first() -> None:
    found = versions(["1.9.0", "2.0.0", "index.html", "1.10.0"])
    assert [version["version"] for version in found] == ["2.0.0", "1.10.0", "1.9.0"]
    assert [version["aliases"] for version in found] == [["latest"], [], []]
