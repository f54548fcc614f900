"""The reader and the runner of code blocks, without servers."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from tests.docs import runner
from tests.docs.blocks import Block, Command, Server, difference, json_difference, parse, programs
from tests.docs.pages import ROOT
from tests.one_test import in_one_test
from tests.process_tree import alive
from tests.servers import wait_for

# -- the runner of code blocks, without servers: what it keeps, compares, reports and ends -----------------------------


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


# -- the reader of code blocks: fences, comments, commands, outputs ----------------------------------------------------


PAGE = """# Page
<!-- server: echo -o 'option.x=a b' -->
<!-- file: a/b.json -->
```json
{}
```
<!-- some other comment -->
text
* A list
  ```console
  $ a \\
    b
  out
    more

  $ cat <<END | b
  $ it's
  END
  $ echo '{
    "c": 1}'
  ```
<!-- output -->
```text
…
```
<!-- not run: AWS -->
```sh
lmi serve
```
"""


def test_a_page() -> None:
    page = parse(PAGE)
    assert page.faults == []
    server, file, console, output, shell = page.items
    assert server == Server(2, "echo", ("-o", "option.x=a b"))
    assert file == Block(4, "json", "{}", file="a/b.json")
    assert isinstance(console, Block)
    assert console.commands == [
        Command(11, "a \\\n  b", "out\n  more"),
        Command(16, "cat <<END | b\n$ it's\nEND", ""),
        Command(19, "echo '{\n  \"c\": 1}'", ""),
    ]
    assert output == Block(23, "text", "…", output=True)
    assert shell == Block(27, "sh", "lmi serve", reason="AWS")
    assert [item.runs for item in page.items if isinstance(item, Block)] == [False, True, False, False]


@in_one_test(
    ("text", "fault"),
    [
        ("```\na\n```", "1: the language '' must be one of console, "),
        ("```bash\na\n```", "1: the language 'bash' must be"),
        ("```sh lmi\na\n```", "1: the language 'sh lmi' must be"),
        ("```sh\na", "1: the block has no end"),
        ("```console\na\n```", "1: a console block begins with '$ '"),
        ("<!-- servr: demo -->\n```sh\na\n```", "1: unknown comment 'servr: demo'"),
        ("<!-- server: vllm -->", "1: unknown server 'vllm'"),
        ("<!-- not run: no time -->\n```sh\na\n```", "1: unknown reason 'no time'"),
        ("<!-- not run: AWS -->\n\n```sh\na\n```", "1: no block follows 'not run: AWS'"),
        ("```json\n1\n```\n<!-- output -->\n```text\na\n```", "5: an output is json or text, and follows"),
        ("```sh\na\n```\n<!-- output -->\n```sh\na\n```", "5: an output is json or text, and follows"),
    ],
)
def test_faults(text: str, fault: str) -> None:
    (found,) = parse(text).faults
    assert found.startswith(fault)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("A=1 B='c d' lmi serve -o 'a=b c' &", [["lmi", "serve", "-o", "a=b c"]]),
        ("a | b > f && exec lmi x;c  # d", [["a"], ["b"], ["f"], ["lmi", "x"], ["c"]]),
        ("curl -d @- \\\n x <<END\nit's\nEND", [["curl", "-d", "@-", "x"]]),
        ("# only a comment", []),
    ],
)
def test_programs(command: str, words: list[list[str]]) -> None:
    assert list(programs(command)) == words


@in_one_test(
    ("expected", "actual", "diff"),
    [
        ("a\nb", "a  \nb\n\n", []),
        ("id …, b", "id 17, b", []),
        ("a\n…\nc", "a\nc", []),
        ("a\n…\nc", "a\nb\nb\nc", []),
        ("a", "a\nb", ["+b"]),
        ("a\nb", "a", ["-b"]),
        ("id …, b\nc", "id 17, b\nd", ["-c", "+d"]),
        ("id …, b", "id 17\n, b", ["-id …, b", "+id 17", "+, b"]),
    ],
)
def test_outputs(expected: str, actual: str, diff: list[str]) -> None:
    found = difference(expected, actual).splitlines()
    assert [line for line in found if line[0] in "+-" and line[1:4] not in ("-- ", "++ ")] == diff


@in_one_test(
    ("expected", "actual", "same"),
    [
        ('{"a": 1, "b": [2]}', '{"b":[2],"a":1}', True),
        ('{"id": "…", "n": "…"}', '{"id": "x\\ny", "n": {"a": 1}}', True),
        ('{"id": "x-…"}', '{"id": "x-1"}', True),
        ('{"id": "x-…"}', '{"id": "y-1"}', False),
        ('{"a": 1, "…": "…"}', '{"a": 1, "b": 2}', True),
        ('{"a": 1, "…": "…"}', '{"b": 2}', False),
        ('{"a": 1}', '{"a": 1, "b": 2}', False),
        ('[1, "…"]', "[1, 2, 3]", True),
        ('[1, "…"]', "[2, 2]", False),
        ("[1]", "[1, 2]", False),
        ("[1]", "1]", False),
    ],
)
def test_json_outputs(expected: str, actual: str, same: bool) -> None:
    assert (json_difference(expected, actual) == "") == same
