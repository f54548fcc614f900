"""The table of docs/models.md says what a deployment would be told."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.resolve.candidates import cheapest, rank
from deploy.resolve.fit import Need
from deploy.resolve.instances import find
from deploy.resolve.model_shape import known_model
from handler.protocols.assistant.reasoning.families import FAMILIES
from handler.protocols.assistant.tools.formats import FORMATS

PAGE = Path(__file__).parents[4] / "docs" / "models.md"
TABLE = PAGE.read_text().partition("## Context, engine, instance")[2]
ROWS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in TABLE.splitlines() if line.startswith("| ")][1:]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_row(row: list[str]) -> None:
    name, parser, calls, context, weights, _, instance = row
    assert parser == "–" or parser.strip("`") in FAMILIES
    assert calls.strip("`") in FORMATS
    types = instance.split("`")[1::2]
    assert all(find(type) is not None for type in types)
    shape = known_model(name)
    assert (shape is None) == name.endswith("¹")
    if shape is not None:
        assert shape.context is not None
        assert context == f"{shape.context:,}"
        needs = [Need(shape, "bf16", shape.context), Need(shape, "fp8", shape.context)]
        sizes = [need.weight_gib for need in needs]
        assert [float(part) for part in weights.split(" / ")] == pytest.approx(sizes, rel=0.01, abs=0.051)
        assert types == list(dict.fromkeys(cheapest(rank(need)).instance.name for need in needs))
