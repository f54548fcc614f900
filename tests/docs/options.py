"""The tables of docs/options.md: the most used options for the page itself, and all options for the site."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from handler.config.options import ENVIRONMENT, OPTIONS, Option
from handler.config.options.command_line import default_of, engines_of
from handler.config.options.names import find_option
from handler.config.options.option import Gone
from tests.docs.pages import fill, table

MOST_USED = (
    "option.model_id",
    "option.served_model_name",
    "option.llm_engine",
    "option.lmi_version",
    "option.dtype",
    "option.tensor_parallel_degree",
    "option.replicas",
    "option.max_model_len",
    "option.max_rolling_batch_size",
    "job_queue_size",
    "option.predict_timeout",
    "option.enable_lora",
    "option.unknown_parameters",
)
"""Options that the page explains; `lmi options` explains all."""

_PAGE = re.compile(r"(?:docs/)?((?:[\w-]+/)*[\w-]+\.md)")


def with_most_used(page: str) -> str:
    """Return docs/options.md with the table of the most used options, as in the repository."""
    options = [option for name in MOST_USED if (option := find_option(name, "vllm")) is not None]
    return fill(page, "tables", _common(options))


def with_all(page: str) -> str:
    """Return docs/options.md with tables of all options, as on the site."""
    options = [option for option in OPTIONS if option.field and not isinstance(option.parse, Gone)]
    parts = [_common(option for option in options if not engines_of(option))]
    for engines in sorted({engines_of(option) for option in options} - {()}):
        those = [option for option in options if engines_of(option) == engines]
        parts.append(f"## Only with {_enumerate(engines)}\n{_of_engines(those)}")
    return fill(page, "tables", "\n".join(parts)).replace("## The most used options", "## All options", 1)


def _enumerate(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _common(options: Iterable[Option]) -> str:
    rows = ((f"`{option.key}`", default_of(option), _meaning(option)) for option in options)
    return table(("option", "default", "meaning"), rows)


def _of_engines(options: Iterable[Option]) -> str:
    """Return a table of some engines' options, few of which have a default here."""
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
