"""docs/options.md; `python -m tests.unit.config.test_options_document` rewrites its tables."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from handler.config.options import ENVIRONMENT, OPTIONS, Option
from handler.config.options.engine_arguments import shipped
from handler.config.options.listing import default_of, engines_of
from handler.config.options.option import Gone
from tests.docs.pages import fill, table

_PAGE = re.compile(r"(?:docs/)?((?:[\w-]+/)*[\w-]+\.md)")
DOCUMENT = Path(__file__).parents[3] / "docs" / "options.md"


def render() -> str:
    options = [option for option in OPTIONS if option.field and not isinstance(option.parse, Gone)]
    common = [option for option in options if not engines_of(option)]
    groups = sorted({engines_of(option) for option in options} - {()})
    tables = [_table(common)]
    for engines in groups:
        tables.append(
            f"## Only with {_enumerate(engines)}\n"
            + _table([option for option in options if engines_of(option) == engines])
        )
    javas = ", ".join(f"`{option.key}`" for option in OPTIONS if option.of_java and not isinstance(option.parse, Gone))
    idle = "\n".join(f"* `{option.key}`: {option.idle}" for option in OPTIONS if option.idle)
    note = (
        f"An option of another engine stops the start. These have no effect and log a warning instead:\n{idle}\n\n"
        f"In the embedded server, DJL Serving's own keys have no effect and log a warning too: {javas}. "
        "`engine` and `option.entryPoint` may only be LMI's own: Python, MPI or DeepSpeed, and LMI's handlers or "
        "`handler.entry`.\n"
    )
    arguments = " and ".join(shipped(name).source for name in ("vllm", "trtllm"))
    part = f"Where the engine is not installed, the arguments are those of {arguments}.\n\n" + "\n".join(
        [*tables, note]
    )
    return fill(DOCUMENT.read_text(), "tables", part)


def _enumerate(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _table(options: list[Option]) -> str:
    rows = []
    by_key = {key: name for name, key in ENVIRONMENT.items()}
    for option in options:
        others = [*option.aliases, *([by_key[option.key]] if option.key in by_key else [])]
        names = ", ".join(f"`{name}`" for name in others)
        rows.append((f"`{option.key}`", default_of(option), _linked(option.help), names))
    return table(("option", "default", "meaning", "other names"), rows)


def _linked(text: str) -> str:
    """Return an option's description as Markdown, with links to the pages that it names."""
    return _PAGE.sub(r"[\1](\1)", text.replace("<", "&lt;"))


def test_the_document_is_up_to_date() -> None:
    assert DOCUMENT.read_text() == render(), "`python -m tests.unit.config.test_options_document` writes it"


if __name__ == "__main__":
    DOCUMENT.write_text(render())
