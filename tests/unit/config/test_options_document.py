"""docs/options.md; `python -m tests.unit.config.test_options_document` rewrites its tables."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from handler.config.options import ENVIRONMENT, OPTIONS, Option
from handler.config.options.command_line import default_of, engines_of
from handler.config.options.engine_arguments import shipped
from handler.config.options.option import Gone
from tests.docs.pages import fill, table

_PAGE = re.compile(r"(?:docs/)?((?:[\w-]+/)*[\w-]+\.md)")
DOCUMENT = Path(__file__).parents[3] / "docs" / "options.md"


def render() -> str:
    options = [option for option in OPTIONS if option.field and not isinstance(option.parse, Gone)]
    common = [option for option in options if not engines_of(option)]
    groups = sorted({engines_of(option) for option in options} - {()})
    tables = [_common(common)]
    for engines in groups:
        tables.append(
            f"## Only with {_enumerate(engines)}\n"
            + _table([option for option in options if engines_of(option) == engines])
        )
    idle = ", ".join(f"`{option.key}`" for option in OPTIONS if option.idle)
    note = (
        f"The server does not start with another engine's option, except with `echo`, which ignores it. "
        f"These options only log a warning: {idle}.\n\n"
        "The embedded server ignores [DJL Serving's own keys](migrating/lmi.md#every-option-of-lmi), with a warning. "
        "`engine` may be Python, MPI or DeepSpeed, and `option.entryPoint` one of LMI's handlers or `handler.entry`.\n"
    )
    arguments = " and ".join(shipped(name).source for name in ("vllm", "trtllm"))
    part = f"If the engine is not installed, the arguments are those of {arguments}.\n\n" + "\n".join([*tables, note])
    return fill(DOCUMENT.read_text(), "tables", part)


def _enumerate(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _common(options: list[Option]) -> str:
    rows = ((f"`{option.key}`", default_of(option), _meaning(option)) for option in options)
    return table(("option", "default", "meaning"), rows)


def _table(options: list[Option]) -> str:
    """Return a table of an engine's options, few of which have a default here."""
    rows = []
    for option in options:
        default = default_of(option)
        rows.append((f"`{option.key}`", f"{_meaning(option)}{f' (default: {default})' if default else ''}"))
    return table(("option", "meaning"), rows)


def _meaning(option: Option) -> str:
    """Return an option's description and other names as Markdown, with links to the pages that it names."""
    others = [*option.aliases, *(name for name, key in ENVIRONMENT.items() if key == option.key)]
    also = f"; also {', '.join(f'`{name}`' for name in others)}" if others else ""
    return _PAGE.sub(r"[\1](\1)", option.help.replace("<", "&lt;")) + also


def test_the_document_is_up_to_date_in_options_document() -> None:
    assert DOCUMENT.read_text() == render(), "`python -m tests.unit.config.test_options_document` writes it"


if __name__ == "__main__":
    DOCUMENT.write_text(render())
