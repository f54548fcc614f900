"""docs/models.md's table of families: what `auto` finds in each template, and only names that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from handler.config.options.common import REASONING_PARSERS, TOOL_CALL_PARSERS
from handler.protocols.assistant.reasoning.families import choose_family
from handler.protocols.assistant.tools.formats import find
from handler.protocols.assistant.tools.formats.json_calls import SMOLLM2
from handler.protocols.assistant.tools.prompt import takes_tools
from tests.templates.test_tool_formats import directory, source

__all__ = ["directory"]

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"
TABLE = DOCUMENT.read_text().partition("\n## Families\n")[2].partition("\nNot read")[0]
ROWS = [[cell.strip(" `") for cell in line.split("|")[1:6]] for line in TABLE.splitlines() if line.startswith("| ")][1:]


def test_the_table_has_families_and_names_that_there_are() -> None:
    assert len({row[0] for row in ROWS}) == len(ROWS) >= 40
    for family, tools, reasoning, *_ in ROWS:
        assert tools in TOOL_CALL_PARSERS, family
        assert reasoning in (*REASONING_PARSERS, "–"), family
    assert re.search(rf"answers of {len(ROWS)} families", TABLE)


@pytest.mark.parametrize("row", [row for row in ROWS if row[3] != "–"], ids=lambda row: row[0])
def test_auto_finds_in_a_template_what_the_table_says(row: list[str], directory: Path) -> None:
    template = source(directory, row[3])
    format = find(template) if takes_tools(template) else SMOLLM2
    family = choose_family("auto", template)
    assert [format and format.name, family.name if family else "–"] == row[1:3]
