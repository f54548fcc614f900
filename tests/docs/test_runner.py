"""The runner of code blocks, without servers: what it keeps, compares, reports and ends."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from tests.docs import runner
from tests.docs.pages import ROOT
from tests.process_tree import alive
from tests.servers import wait_for


@pytest.fixture
def page(tmp_path: Path) -> runner.PageRun:
    stack = contextlib.ExitStack()
    return runner.PageRun(tmp_path, runner.Servers(Path(), tmp_path, stack), stack)


def test_a_page_is_one_terminal(page: runner.PageRun) -> None:
    page.run("""
<!-- file: a/b.txt -->
```text
content
```
```console
$ NAME=some\\
thing; cd a
$ echo $NAME; cat b.txt
something
content
```
```python
print('{"a": 1}', open("b.txt").read())
```
<!-- output -->
```text
{"a": 1} con…
```
""")
    assert page.failures == []


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        ("```console\n$ true\n$ echo a; false\n```", "3: exit status 1\na\n"),
        ("```console\n$ echo a\nb\n```", "2: echo a\n--- the page\n+++ the output\n@@ -1 +1 @@\n-b\n+a"),
        ("```sh\nfalse\ntrue\n```", "1: exit status 1\n"),
        (
            "text\n```python\n\n1 / 0\n```",
            '2: exit status 1\nTraceback (most recent call last):\n  File "<string>", line 4',
        ),
        (
            "```sh\necho 1\n```\n<!-- output -->\n```json\n2\n```",
            "5: --- the page\n+++ the output\n@@ -1 +1 @@\n-2\n+1",
        ),
    ],
)
def test_a_failure_names_its_line(page: runner.PageRun, text: str, failure: str) -> None:
    page.run(text)
    (found,) = page.failures
    assert found.startswith(failure)


def test_a_block_cannot_hang(page: runner.PageRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "LIMIT", 2.0)
    page.run("```sh\nsleep 100 & echo $! > ../started; wait\n```")
    assert page.failures == ["1: exit status None\n"]
    wait_for(lambda: not alive(int((tmp_path / "started").read_text())), 5, "it is still there")


def test_the_repositorys_files_are_not_written(page: runner.PageRun) -> None:
    before = (ROOT / "serving.properties").read_text()
    page.run("<!-- file: serving.properties -->\n```properties\noption.dtype=fp32\n```")
    assert (ROOT / "serving.properties").read_text() == before
    with pytest.raises(AssertionError, match="is the repository's"):
        page.run("<!-- file: examples/new.txt -->\n```text\na\n```")
