"""docs/migrating's table of what changes by LMI's release: every row has its test, which is named here."""

from __future__ import annotations

import re
from pathlib import Path

from handler.config.lmi_version import VERSIONS
from tests.docs.pages import ROOT

DOCUMENT = ROOT / "docs" / "migrating" / "README.md"

_LMI = "tests/unit/protocols/lmi/test_versions.py::"

_CONFIG = "tests/unit/config/test_lmi_version.py::"

TESTS = {
    "the text of a dynamic batch, where `return_full_text` is absent": (
        _LMI + "test_a_dynamic_batchs_text_begins_with_its_prompt_since_0_29"
    ),
    "`inputs` in rolling batch, without `do_sample`": _LMI + "test_a_temperature_alone_samples_since_0_32",
    "a chat without `max_tokens`": (
        _LMI + "test_a_chat_without_a_limit_has_30_tokens_before_0_32_and_fills_the_context_since"
    ),
    "a chat without other parameters of sampling": (
        "tests/unit/serving/test_generation.py::test_lmis_chats_heed_it_since_0_32"
    ),
    "`option.async_mode=true`, and LMI's async handlers": _CONFIG + "test_the_schema_of_the_async_mode",
    "neither `option.rolling_batch` nor `batch_size` chooses a mode": _CONFIG + "test_the_schema_of_the_async_mode",
    "a streamed chat in rolling batch": _LMI + "test_a_chat_streams_json_lines_and_events_since_0_37",
}
"""The rows by what changes, and the test that holds each."""


def rows() -> list[list[str]]:
    part = DOCUMENT.read_text().partition("<!-- behaviour: begin -->")[2].partition("<!-- behaviour: end -->")[0]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in part.strip().splitlines()[2:]]


def test_every_row_has_its_test() -> None:
    assert [what for _, what, *_ in rows()] == list(TESTS)
    for test in TESTS.values():
        file, _, name = test.partition("::")
        assert re.search(rf"^(async )?def {name}\(", Path(ROOT, file).read_text(), re.MULTILINE), test


def test_the_rows_stand_in_the_order_of_the_releases() -> None:
    since = [row[0] for row in rows()]
    assert since == sorted(since)
    assert set(since) <= {str(version) for version in VERSIONS}


def test_they_stand_first() -> None:
    headings = re.findall(r"^## (.+)", DOCUMENT.read_text(), re.MULTILINE)
    assert headings[0] == "Behaviour changes"
