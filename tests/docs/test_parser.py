"""The reader of code blocks: fences, comments, commands, outputs."""

from __future__ import annotations

import pytest

from tests.docs.blocks import Block, Command, Server, difference, json_difference, parse, programs
from tests.one_test import in_one_test

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
