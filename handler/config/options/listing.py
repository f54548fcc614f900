"""Options as text, for `lmi options`: a table of all, or everything about one."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from handler.config import lmi_version
from handler.config.engines import LLM_ENGINES
from handler.config.options import ENVIRONMENT, KNOWN, OPTIONS
from handler.config.options.engine_arguments import engine_arguments
from handler.config.options.lookup import find_option, key_of, unknown_option, variable
from handler.config.options.option import Gone, Option
from handler.config.options.variables import ALONG, SECRET, SM_VLLM, VARIABLES, of_vllms_variable
from handler.core.errors import ConfigError

_WIDTH = 120


def found(text: str, engine: str = "") -> str:
    """Describe the option of this name; where there is none, list those whose names or meanings have the text.

    Args:
        text: "" lists all.
        engine: lists those that it has, with arguments of its own; "" lists those of every engine.

    Raises:
        ConfigError: neither is there; the message has the nearest name.
    """
    name = text.replace("-", "_")
    if not name:
        return table(engine=engine)
    try:
        return describe(name)
    except ConfigError:
        if not (listed := table(name, engine)):
            raise
        return listed


def table(word: str = "", engine: str = "") -> str:
    """List the options that have an effect here: a line each, by engines.

    Args:
        word: only those whose names or meanings have it.
        engine: only those that it has, and its own arguments.
    """
    listed = [
        option
        for option in OPTIONS
        if option.field
        and not isinstance(option.parse, Gone)
        and (not engine or not engines_of(option) or engine in option.engines)
        and word.lower() in " ".join((option.key, option.help, *option.aliases)).lower()
    ]
    groups = sorted({engines_of(option) for option in listed})
    parts = ["\n".join(_group(engines, [one for one in listed if engines_of(one) == engines])) for engines in groups]
    arguments = engine_arguments(engine)
    own = [f"option.{name}" for name in sorted(arguments.arguments) if word in name and f"option.{name}" not in KNOWN]
    if own:
        parts.append(f"Arguments of {arguments.source}:\n{_filled(', '.join(own))}")
    return "\n\n".join(parts)


def _filled(text: str) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)


def engines_of(option: Option) -> tuple[str, ...]:
    """Return the engines that have an option; empty: all."""
    return () if len(option.engines) == len(LLM_ENGINES) - 1 else option.engines


def _group(engines: Sequence[str], options: Sequence[Option]) -> Iterator[str]:
    width = max(len(option.key) for option in options)
    yield f"Only with {', '.join(engines)}:" if engines else "With every engine:"
    for option in options:
        default = default_of(option)
        yield f"  {option.key:{width}}  {option.help}{f' (default {default})' if default else ''}"


def describe(name: str) -> str:
    """Describe an option by any of its names, with or without `option.`, or by its variable or a foreign one.

    Raises:
        ConfigError: nobody has it; the message has the nearest name.
    """
    paragraphs = _foreign(name)
    engines = ("vllm",) if name.startswith(SM_VLLM) else ("", *LLM_ENGINES)
    for key in _keys(name):
        found = [option for engine in engines if (option := find_option(key, engine))]
        if not found:
            raise ConfigError(unknown_option(key, "").message)
        paragraphs += ["\n".join(_lines(option)) for option in {one.engines: one for one in found}.values()]
    return "\n\n".join(paragraphs)


def _foreign(name: str) -> list[str]:
    """Say what a foreign variable means here; nothing of a name of ours."""
    if name in VARIABLES:
        return [f"{name}\n  {VARIABLES[name].answer}"]
    if not name.startswith(SM_VLLM):
        return []
    own = key_of(of_vllms_variable(name, "true").name)
    along = {**{key_of(one): value for one, value in ALONG.items()}, lmi_version.KEY: lmi_version.ASYNC}
    others = ", ".join(f"{key}={value}" for key, value in along.items() if key != own)
    return [f"{name}\n  sets {own}; like every {SM_VLLM}*, where no option says otherwise, also\n  {others}"]


def _keys(name: str) -> list[str]:
    """Return the names that serving.properties has for it; none for a foreign variable without an option."""
    if name in VARIABLES:
        return [key_of(own) for own in sorted({*VARIABLES[name].owns.values()} - SECRET)]
    if name.startswith(SM_VLLM):
        return [key_of(of_vllms_variable(name, "true").name)]
    if name in ENVIRONMENT or name.startswith(("OPTION_", "SERVING_")):
        return [key_of(name)]
    return [name if name.startswith("option.") or find_option(name, "") else f"option.{name}"]


def _lines(option: Option) -> Iterator[str]:
    yield option.key
    if isinstance(option.parse, Gone):
        yield f"  {option.parse.answer}"
        if engines := engines_of(option):
            yield f"  engines:     {', '.join(engines)}"
        return
    if option.field is None and not option.argument and not option.of_java:
        yield f"  no effect: {option.help}"
        return
    facts = {
        "meaning": option.help or "an argument of the engine's own",
        "type": _type(option),
        "default": default_of(option) or "none",
        "engines": _engines(option),
        "environment": ", ".join(
            [variable(option.key), *(name for name, key in ENVIRONMENT.items() if key == option.key)]
        ),
        "other names": ", ".join(option.aliases),
    }
    for fact, text in facts.items():
        if text:
            yield textwrap.fill(f"  {fact + ':':13}{text}", _WIDTH, subsequent_indent=" " * 15, break_long_words=False)


def _type(option: Option) -> str:
    """Say what the parser takes, in the words in which it refuses."""
    try:
        option.parse(",")
    except ValueError as error:
        return str(error).removeprefix("must be ").partition(":")[0]
    return "a text"


def default_of(option: Option) -> str:
    """Return the default as a user writes it, and those of engines that have another; "" where there is none."""
    if option.default is None:
        return ""
    others = "".join(f"; {engine}: {value}" for engine, value in option.by_engine.items())
    return f"{str(option.default).lower() if isinstance(option.default, bool) else option.default}{others}"


def _engines(option: Option) -> str:
    if option.of_java:
        return ""
    if not engines_of(option):
        return "all"
    others = f"no effect with others: {option.idle}" if option.idle else "others refuse it"
    return f"{', '.join(option.engines)}; {others}"
