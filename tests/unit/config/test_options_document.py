"""docs/options.md; `python -m tests.unit.config.test_options_document` rewrites its table."""

from __future__ import annotations

from pathlib import Path

from handler.config.options import OPTIONS
from handler.config.options.engine_arguments import shipped
from handler.config.options.option import Gone
from tests.docs.options import MOST_USED, with_all, with_most_used

DOCUMENT = Path(__file__).parents[3] / "docs" / "options.md"


def test_the_document_is_up_to_date_in_options_document() -> None:
    page = DOCUMENT.read_text()
    assert page == with_most_used(page), "`python -m tests.unit.config.test_options_document` writes it"
    assert all(f"\n| `{name}` |" in page for name in MOST_USED)


def test_the_site_shows_every_option() -> None:
    page = with_all(DOCUMENT.read_text())
    options = [option for option in OPTIONS if option.field and not isinstance(option.parse, Gone)]
    assert [option.key for option in options if f"\n| `{option.key}` |" not in page] == []


def test_the_document_names_the_releases_of_the_engines_arguments() -> None:
    page = DOCUMENT.read_text()
    assert [name for name in ("vllm", "trtllm") if shipped(name).source not in page] == []


def test_the_document_names_the_options_that_another_engine_only_warns_of() -> None:
    page = DOCUMENT.read_text()
    assert [option.key for option in OPTIONS if option.idle and f"`{option.key}`" not in page] == []


if __name__ == "__main__":
    DOCUMENT.write_text(with_most_used(DOCUMENT.read_text()))
