"""The parameters that the pages of docs/wire/ list as LMI's, out of their declarations.

`python -m tests.unit.protocols.test_parameter_pages` adds those that are missing after `min_p`. A parameter that needs
more words than its range gets them by hand.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from typing import Any

from handler.core.values import SAMPLED, Sampling
from handler.protocols.kernel.parameters import ROWS, TableRow
from handler.protocols.kernel.readers import INT32
from handler.protocols.kernel.schema import schema_of_reader
from tests.doubles import using
from tests.parameter_matrix import DOCUMENTS, PARAMETERS
from tests.unit.protocols.test_parameters import SETTINGS, context, outcome

LISTS = {
    "openai.md": [row.openai for row in ROWS],
    "responses.md": [row.responses or row.openai for row in ROWS if row.responses or row.vllm_responses],
    "triton.md": [row.lmi for row in ROWS if row.triton],
}
"""A page that lists names only -> the names."""

NEIGHBOUR = "`min_p`"
LIMITS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
ENGINES = ("openvino", "vllm", "trtllm", "echo")


def refusing(name: str) -> str:
    """Return the engines that always refuse a parameter of LMI's."""
    outcomes = defaultdict[str, set[str]](set)
    for engine, version, options in SETTINGS.values():
        with using.tensorrt_llm(f"version={version}") if version else contextlib.nullcontext():
            outcomes[engine].add(outcome(PARAMETERS, name, context(engine, options)))
    return ", ".join(engine for engine in ENGINES if outcomes[engine] == {"refused"})


def described(shape: dict[str, Any]) -> str:
    """Describe the schema of a number or boolean."""
    limits = " and ".join(
        f"{symbol} {shape[key]:g}" for key, symbol in LIMITS.items() if abs(shape.get(key, INT32)) < INT32
    )
    return f"{shape['type']} {limits}".strip()


def line(row: TableRow) -> str:
    default = str(Sampling._field_defaults[row.field]).lower()
    name = f"`{row.lmi}`{' †' if row.field in SAMPLED else ''}"
    return f"| {name} | {described(schema_of_reader(row.read))} ({default}) | {refusing(row.lmi)} |\n"


def with_rows(text: str) -> str:
    """Return LMI's page with a row for each of its parameters."""
    missing = [row for row in ROWS if f"`{row.lmi}`" not in text and row.lmi]
    start = text.index("\n", text.index(f"| {NEIGHBOUR}")) + 1
    return text[:start] + "".join(map(line, missing)) + text[start:]


def with_names(text: str, names: list[str]) -> str:
    """Return a page with all names."""
    missing = [f"`{name}`" for name in dict.fromkeys(names) if f"`{name}`" not in text and name]
    return text.replace(NEIGHBOUR, ", ".join([NEIGHBOUR, *missing]), 1)


def render() -> dict[str, str]:
    pages = {name: with_names((DOCUMENTS / name).read_text(), names) for name, names in LISTS.items()}
    return {**pages, "lmi.md": with_rows((DOCUMENTS / "lmi.md").read_text())}


def test_each_page_has_every_parameter() -> None:
    written = "`python -m tests.unit.protocols.test_parameter_pages` writes it"
    for name, text in render().items():
        assert (DOCUMENTS / name).read_text() == text, written


def test_a_range_is_described_by_its_limits() -> None:
    assert described({"type": "number", "minimum": 0, "exclusiveMaximum": 1}) == "number ≥ 0 and < 1"
    assert described({"type": "integer", "exclusiveMinimum": 0, "maximum": INT32}) == "integer > 0"
    assert described({"type": "boolean"}) == "boolean"


def test_a_missing_parameter_gets_a_row_and_is_added_to_lists() -> None:
    page = (DOCUMENTS / "lmi.md").read_text()
    [row] = [text for text in page.splitlines(keepends=True) if text.startswith("| `length_penalty`")]
    again = with_rows(page.replace(row, ""))
    assert "| `length_penalty` | number ≥ -20 and ≤ 20 (1.0) | echo |\n" in again
    assert with_names("| `top_k`, `min_p` | the same |", ["top_k", "", "n"]) == "| `top_k`, `min_p`, `n` | the same |"


if __name__ == "__main__":
    for name, text in render().items():
        (DOCUMENTS / name).write_text(text)
