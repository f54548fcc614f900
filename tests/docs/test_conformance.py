"""docs/conformance.md has every rule of `lmi conform`; `python -m tests.docs.test_conformance` writes its table."""

from __future__ import annotations

from handler.conform import rules
from handler.conform.report import rules_table
from tests.docs.pages import ROOT, fill

DOCUMENT = ROOT / "docs" / "conformance.md"

assert rules.__all__  # importing them fills the table


def render() -> str:
    return fill(DOCUMENT.read_text(), "rules", rules_table())


def test_the_page_has_every_rule() -> None:
    assert DOCUMENT.read_text() == render(), "`python -m tests.docs.test_conformance` writes it"


if __name__ == "__main__":
    DOCUMENT.write_text(render())
