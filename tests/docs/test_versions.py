"""`versions.json` holds the versions of clients and servers that the documentation names and the tests install."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TypedDict

from tests.docs.pages import ROOT


class Release(TypedDict):
    """A version, the file whose pin it repeats, and the package's name in that file."""

    version: str
    pinned: str
    package: str


RELEASES: dict[str, Release] = json.loads(Path(__file__).with_name("versions.json").read_text())
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PYTHON_PACKAGE = {"OpenAI": "openai", "Anthropic": "anthropic"}
_NAMED = re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, RELEASES))}) (\d+(?:\.\d+)+)")
_PACKAGE = re.compile(r"(OpenAI|Anthropic)'s Python package (\d+(?:\.\d+)+)")


def mentions(text: str) -> list[tuple[str, str]]:
    """The names and versions in a text of those clients and servers that `versions.json` lists."""
    packages = [(PYTHON_PACKAGE[maker], version) for maker, version in _PACKAGE.findall(text)]
    return [*_NAMED.findall(text), *packages]


def pins(path: str, package: str) -> list[str]:
    """The versions of a package that a file of pip's or npm's requirements allows."""
    text = (ROOT / path).read_text()
    if path.endswith(".json"):
        return [json.loads(text)["dependencies"][package]]
    return re.findall(rf"^{re.escape(package)}==(\S+)", text, re.MULTILINE)


def test_pages_name_the_versions_of_the_list() -> None:
    other = {
        f"{page.relative_to(ROOT)}: {name} {version}"
        for page in PAGES
        for name, version in mentions(page.read_text())
        if version != RELEASES[name]["version"]
    }
    assert other == set(), "correct the page, or tests/docs/versions.json"


def test_the_list_has_no_version_that_no_page_names() -> None:
    named = {name for page in PAGES for name, _ in mentions(page.read_text())}
    assert named == RELEASES.keys()


def test_the_tests_install_the_versions_of_the_list() -> None:
    for name, release in RELEASES.items():
        installed = pins(release["pinned"], release["package"])
        same = [pin for pin in installed if f"{pin}.".startswith(f"{release['version']}.")]
        assert same, f"{name}: {release['pinned']} installs {installed}, not {release['version']}"


def test_versions_in_a_text_are_read() -> None:
    text = "openai 3.1 and langchain-openai 1.2; types in Anthropic's Python package 2.3."
    assert mentions(text) == [("openai", "3.1"), ("langchain-openai", "1.2"), ("anthropic", "2.3")]
