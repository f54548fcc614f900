"""docs/tuning.md, and pages beside it: the options that they name exist, and have the defaults that they name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from handler.config.options.lookup import find_option
from handler.config.options.option import Gone
from handler.engines import ENGINES

DOCS = Path(__file__).parents[2] / "docs"
PAGES = (
    *("tuning", "troubleshooting", "models", "scaling", "performance"),
    *("engines-by-url", "vllm", "trtllm"),
)
DEFAULT = re.compile(r"^\| `([\w.]+)` \| ([\d,]+)(?: s)? \|", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES)
def test_the_options_of_a_page_exist(page: str) -> None:
    text = re.sub(r"```.*?```", "", (DOCS / f"{page}.md").read_text(), flags=re.DOTALL)
    named = set(re.findall(r"\boption\.[a-z_]+\b", text))
    assert named
    for name in named:
        options = [option for engine in ENGINES if (option := find_option(name, engine)) is not None]
        assert any(not isinstance(option.parse, Gone) for option in options), name


def test_the_defaults_are_the_codes() -> None:
    defaults = dict(DEFAULT.findall((DOCS / "tuning.md").read_text()))
    assert len(defaults) == 4
    for name, value in defaults.items():
        option = find_option(name, "vllm")
        assert option is not None
        assert option.default == float(value.replace(",", "")), name
