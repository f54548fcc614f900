"""docs/models.md says what a deployment would be told.

`python -m tests.deploy.unit.resolve.test_models_document` writes its table of GPUs.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from deploy.resolve.fit import LEAST_CAPABILITIES, Need, cheapest, rank
from deploy.resolve.instances import all_types, find
from deploy.resolve.model.shape import shape_from_table
from deploy.spec.values import Precision
from tests.docs.pages import fill, section, table
from tests.one_test import in_one_test

PAGE = Path(__file__).parents[4] / "docs" / "models.md"
TABLE = section(PAGE.read_text(), "Instances for known models")
ROWS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in TABLE.splitlines() if line.startswith("| ")][1:]


@in_one_test("row", ROWS, ids=lambda row: row[0])
def test_a_row_in_models_document(row: list[str]) -> None:
    name, context, weights, instance = row
    types = instance.split("`")[1::2]
    assert all(find(type) is not None for type in types)
    shape = shape_from_table(name)
    assert (shape is None) == name.endswith("¹")
    if shape is not None:
        assert shape.context is not None
        assert context == f"{shape.context:,}"
        dtype = shape.dtype or "bf16"
        dtypes: tuple[Precision, ...] = ("bf16", "fp8") if dtype == "bf16" else (dtype,)
        needs = [Need(shape, dtype, shape.context, windows=True, experts=None) for dtype in dtypes]
        sizes = [need.weight_gib for need in needs]
        assert weights.endswith(f" {dtype}") == (dtype != "bf16")
        assert [float(part) for part in weights.removesuffix(f" {dtype}").split("/")] == pytest.approx(
            sizes, rel=0.01, abs=0.051
        )
        assert types == list(dict.fromkeys(cheapest(rank(need)).instance.name for need in needs))


def gpus() -> str:
    types = sorted((item for item in all_types() if item.gpus), key=lambda item: (item.family, item.gpus))
    rows = []
    for family, group in itertools.groupby(types, key=lambda item: item.family):
        items = list(group)
        first = items[0]
        counts = ", ".join(str(count) for count in sorted({item.gpus for item in items}))
        compute = f"{first.compute[0]}.{first.compute[1]}"
        rows.append((f"ml.{family}", str(first.gpu), f"{first.gpu_gib:.0f}", counts, compute))
    return table(("type", "GPU", "GiB", "GPUs", "capability"), rows)


def render() -> str:
    return fill(PAGE.read_text(), "gpus", gpus())


def test_the_table_of_models_has_rows() -> None:
    assert len(ROWS) > 10


def test_the_table_of_gpus_is_that_of_the_code() -> None:
    assert PAGE.read_text() == render(), "`python -m tests.deploy.unit.resolve.test_models_document` writes it"


def test_its_sentences_about_gpus_are_those_of_the_code() -> None:
    assert all(item.nvlink == item.family.startswith("p") for item in all_types() if item.gpus > 1)
    least = {name: "{}.{}".format(*LEAST_CAPABILITIES[name]) for name in ("bf16", "mxfp4", "fp8", "fp4")}
    assert "bf16 and mxfp4 need {bf16}, fp8 {fp8}, and fp4 {fp4}.".format(**least) in PAGE.read_text()
    assert least["mxfp4"] == least["bf16"]


if __name__ == "__main__":
    PAGE.write_text(render())
