"""The version is one: `pyproject.toml` has it, and the changelog and the documents' images name the same."""

from __future__ import annotations

import re

from tests.docs.pages import ROOT

VERSION = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[0]
MOST_WORDS = 500
"""Of a version's summary: two minutes, at 250 words a minute."""


def test_the_changelog_has_the_version_with_a_summary_of_two_minutes() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## \[(.+?)\](?: - (.+))?$", text, re.MULTILINE)
    assert [name for name, _ in headings[:2]] == ["Unreleased", VERSION]
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", headings[1][1])
    summary = text.partition(f"## [{VERSION}]")[2].partition("\n### ")[0]
    assert 100 < len(summary.split()) <= MOST_WORDS


def test_images_have_the_version_where_documents_and_examples_name_them() -> None:
    paths = [path for folder in ("docs", "examples") for path in (ROOT / folder).rglob("*") if path.is_file()]
    named = {
        f"{path.relative_to(ROOT)}: {match[0]}": match[1]
        for path in paths
        if path.suffix in (".md", ".yaml", ".yml", ".json", ".py")
        for match in re.finditer(r"lmi-handler(?:-cpu|-vllm)?:(\d+\.\d+\.\d+)", path.read_text())
    }
    assert named
    assert {place for place, version in named.items() if version != VERSION} == set()
