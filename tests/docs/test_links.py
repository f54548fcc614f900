"""No link of the documents is dead, every page is in the site's navigation, and five tasks are three pages away."""

from __future__ import annotations

import os
import re
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from tests.docs.pages import ROOT, anchors, bars, lines, links, outside_assets, pages, section, separate, slug
from tests.one_test import in_one_test

INDEX = "docs/README.md"
TASKS = {
    "move an LMI endpoint": ([INDEX, "docs/migrating/lmi.md"], "Steps", "lmi serve --check"),
    "stream with boto3": ([INDEX, "docs/first-endpoint.md"], "7. Stream", "invoke_endpoint_with_response_stream"),
    "see the metrics": ([INDEX, "docs/monitoring.md"], "Look at the numbers", "/metrics"),
    "set up four GPUs": ([INDEX, "docs/scaling.md"], "Several GPUs", "option.replicas"),
    "write a formatter": ([INDEX, "docs/formatters.md"], "Write answers", "@output_formatter"),
}
"""A newcomer's task: the pages from the index to its end, the heading there, and what is below it."""
MAX_PAGES = 3

_MENTION = re.compile(r"(?<![\w/.])docs/(?:wire/|migrating/)?[\w-]+\.md(?:#[\w-]+)?")
_OF_OTHERS = {"docs/format.md", "docs/gguf.md"}  # openai/harmony's, ggml's
CODE = ("handler", "deploy", "proof", "examples", "docker", "tests")


def text(page: str) -> str:
    return (ROOT / page).read_text()


def dead(page: str, target: str) -> bool:
    path, _, anchor = target.partition("#")
    whole = (ROOT / page).parent / path if path else ROOT / page
    if not whole.is_file():
        return True
    return bool(anchor) and anchor not in anchors(whole.read_text())


def followed(page: str) -> set[str]:
    """Return the files that a page links to."""
    targets = (target.partition("#")[0] for target in links(text(page)) if ":" not in target)
    return {os.path.normpath(Path(page).parent / target) for target in targets if target}


@in_one_test("page", pages())
def test_links_lead_to_files_and_headings(page: str) -> None:
    targets = [target for target in links(text(page)) if not re.match(r"(https?|mailto):", target)]
    lost = [target for target in targets if dead(page, target)]
    assert not lost, f"no such file or heading: {', '.join(lost)}"


def test_pages_that_the_code_names_exist() -> None:
    files = [ROOT / name for name in ("Makefile", "Dockerfile", "pyproject.toml", "serving.properties", "CHANGELOG.md")]
    files += [path for folder in CODE for path in (ROOT / folder).rglob("*.py")]
    named = {(match[0], str(path)) for path in files for match in _MENTION.finditer(path.read_text())}
    assert {(name, path) for name, path in named if name not in _OF_OTHERS and dead("README.md", name)} == set()


def test_every_page_is_in_the_navigation_once() -> None:
    entries: list[str] = []

    def collect(value: object) -> None:
        if isinstance(value, str):
            entries.append(value)
        for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            collect(item)

    collect(yaml.safe_load(text("mkdocs.yml"))["nav"])
    assert sorted(entries) == sorted(set(entries)), "a page stands in mkdocs.yml twice"
    missing, gone = sorted({*pages()} - {*entries}), sorted({*entries} - {*pages()})
    assert not missing, f"add to `nav` of mkdocs.yml: {', '.join(missing)}"
    assert not gone, f"remove from `nav` of mkdocs.yml: {', '.join(gone)}"


def test_every_page_of_docs_is_two_clicks_from_the_index() -> None:
    near = followed(INDEX)
    near |= {page for folder in near if folder.endswith("/README.md") for page in followed(folder)}
    far = {page for page in pages() if page.startswith("docs/")} - near - {INDEX}
    assert not far, f"link from {INDEX}, or from the README.md of their folder: {', '.join(sorted(far))}"


@in_one_test("page", pages())
def test_tables_have_empty_lines_around_them(page: str) -> None:
    """GitHub reads a line below a table as its next row, and a second table's head too."""
    kinds = [(line.text, line.kind == "text" and line.text.startswith("|")) for line in lines(text(page))]
    below = [row for (_, above), (row, inside) in pairwise(kinds) if above and not inside and row.strip()]
    assert [row for row in below if not row.startswith("<!--")] == []
    heads = [row for (row, inside), (line, _) in pairwise(kinds[1:]) if inside and re.fullmatch(r"\|(:?-+:?\|)+", line)]
    above = [(before, row) for (before, table), (row, _) in pairwise(kinds) if table and row in heads]
    assert above == []


@in_one_test("task", TASKS)
def test_a_newcomer_finds(task: str) -> None:
    path, heading, words = TASKS[task]
    assert len(path) <= MAX_PAGES
    assert all(following in followed(page) for page, following in pairwise(path))
    assert words in section(text(path[-1]), heading)


@in_one_test(
    ("heading", "anchor"),
    [
        ("Metrics, logs and traces", "metrics-logs-and-traces"),
        ("0.28 with `option.rolling_batch=trtllm`", "028-with-optionrolling_batchtrtllm"),
        ("Where does it go?", "where-does-it-go"),
        ("Clients' schemas and grammars", "clients-schemas-and-grammars"),
        ("A – B", "a--b"),
    ],
)
def test_anchors_are_those_of_github(heading: str, anchor: str) -> None:
    assert slug(heading) == anchor


@in_one_test(
    ("page", "expected"),
    [
        ("A list:\n* one\n  more\n* two", "A list:\n\n* one\n  more\n* two"),
        ("Steps:\n1. one\n2. two", "Steps:\n\n1. one\n2. two"),
        ("A table:\n| a |\n|---|\n| b |", "A table:\n\n| a |\n|---|\n| b |"),
        ("| a |\n|---|\n## Next\ntext", "| a |\n|---|\n\n## Next\ntext"),
        ("# Title\n<!-- server: echo -->\ntext\n\n```\n<!-- code -->\n```", "# Title\ntext\n\n```\n<!-- code -->\n```"),
        ("text\n```sh\n# no heading\n* no list\n```\nmore", "text\n\n```sh\n# no heading\n* no list\n```\n\nmore"),
    ],
)
def test_blocks_are_separated_as_python_markdown_needs_them(page: str, expected: str) -> None:
    assert separate(page) == expected


def test_bars_in_the_code_of_tables_are_plain() -> None:
    assert bars(r"<td><code>a\|b</code></td><pre>c\|d</pre>") == r"<td><code>a|b</code></td><pre>c\|d</pre>"


@pytest.mark.parametrize(
    ("built", "number"),
    [
        ('<script src="https://example.com/a.js"></script>', 1),
        ('<link rel="stylesheet" href="//example.com/a.css">', 1),
        ("body { background: url(https://example.com/a.png) }", 1),
        ('<a href="https://example.com/">out</a> <script src="../assets/a.js"></script>', 0),
    ],
)
def test_assets_of_other_servers_are_found(built: str, number: int) -> None:
    assert len(outside_assets(built)) == number
