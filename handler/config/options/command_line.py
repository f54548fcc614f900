"""Options on the command line: flags of `lmi serve`, and the output of `lmi options`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from handler.config import lmi_version
from handler.config.engines import LLM_ENGINES
from handler.config.options import ENVIRONMENT, KNOWN, OPTIONS, images
from handler.config.options.engine_arguments import NAMES, engine_arguments, shipped
from handler.config.options.names import (
    SECRET,
    SETTINGS,
    VARIABLES,
    find_option,
    key_of,
    of_vllms_variable,
    unknown_option,
    variable,
)
from handler.config.options.option import Gone, Option, boolean
from handler.core.command_line import Parser, wrap
from handler.core.errors import ConfigError

_WIDTH = 120  # columns of paragraphs without a terminal
_NAMES = 36  # columns for names on a terminal; the meaning of a longer name begins on the next line


def listing(
    words: Sequence[str], engine: str = "", flags: Mapping[str, str] = MappingProxyType({}), width: int | None = None
) -> str:
    """Describe a single option, or list the options whose names or descriptions contain all of the words.

    Args:
        words: the name of an option, or search terms. If empty, all options are listed.
        engine: the engine whose options and native arguments are listed, or "" to list the options of all engines.
        flags: the flags of `lmi serve` that do not set an option, with their descriptions. They are also searched.
        width: the number of columns at which text wraps, or None to write each option on one line.

    Raises:
        ConfigError: if no option matches. The message suggests the nearest name.
    """
    names = _names_of(words)
    if not names:
        return table(engine=engine, width=width)
    unknown = _none_has(words)
    if len(names) == 1:
        try:
            return describe(names[0], width)
        except ConfigError as error:
            unknown = error
    serve_flags = _flags_with(names, flags)
    parts = [
        table(names, engine, width),
        "\n".join(["Flags of lmi serve:", *_listed(serve_flags, width)]) if serve_flags else "",
    ]
    if not any(parts):
        raise unknown
    return "\n\n".join(filter(None, parts))


def as_json(words: Sequence[str], engine: str = "", flags: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
    """Return what `listing` says, as JSON: options with their facts, native arguments of engines, and flags.

    Args:
        words, engine, flags: as for `listing`. `text` describes a variable that belongs to no option.

    Raises:
        ConfigError: if no option matches. The message suggests the nearest name.
    """
    names = _names_of(words)
    unknown = _none_has(words)
    if len(names) == 1:
        try:
            name = _variable_of_flag(names[0]) or names[0]
            described = [] if name in SETTINGS else [*_described(name)]
            return {"name": name, "text": describe(name), "options": [*map(_facts, described)]}
        except ConfigError as error:
            unknown = error
    document = {
        "options": [*map(_facts, _selected(names, engine))],
        "engine_arguments": _native(names, engine),
        "flags": _flags_with(names, flags) if names else {},
    }
    if names and not any(document.values()):
        raise unknown
    return document


def _names_of(words: Sequence[str]) -> list[str]:
    return [word.strip("-").replace("-", "_") for word in words]


def _none_has(words: Sequence[str]) -> ConfigError:
    return ConfigError(f"no option has all of these words: {' '.join(words)}")


def _flags_with(names: Sequence[str], flags: Mapping[str, str]) -> dict[str, str]:
    return {flag: text for flag, text in flags.items() if _has(names, f"{flag} {text}".replace("-", "_"))}


def _selected(words: Sequence[str], engine: str) -> list[Option]:
    """Return the options that have an effect, of an engine or of all, whose names or descriptions have all words."""
    return [
        option
        for option in OPTIONS
        if option.field
        and not isinstance(option.parse, Gone)
        and (not engine or not engines_of(option) or engine in option.engines)
        and _has(words, " ".join((option.key, option.help, *option.aliases)))
    ]


def _native(words: Sequence[str], engine: str) -> list[str]:
    """Return the keys of an engine's native arguments that are not options here, and whose names have all words."""
    keys = [f"option.{name}" for name in sorted(engine_arguments(engine).arguments) if _has(words, name)]
    return [key for key in keys if key not in KNOWN]


def table(words: Sequence[str] = (), engine: str = "", width: int | None = None) -> str:
    """List the options that have an effect, grouped by engine.

    Args:
        words: words that the name or description of an option must contain.
        engine: the engine whose options and native arguments are listed, or "" to list the options of all engines.
        width: the number of columns at which text wraps, or None to write each option on one line.
    """
    listed = _selected(words, engine)
    parts = [
        "\n".join(_group(engines, [option for option in listed if engines_of(option) == engines], width))
        for engines in sorted({engines_of(option) for option in listed})
    ]
    if keys := _native(words, engine):
        parts.append(f"Arguments of {engine_arguments(engine).source}:\n{_filled(', '.join(keys), width)}")
    return "\n\n".join(parts)


def _has(words: Sequence[str], text: str) -> bool:
    return all(word.lower() in text.lower() for word in words)


def _filled(text: str, width: int | None, indent: int = 2) -> str:
    margin = " " * indent
    return wrap(text, width or _WIDTH, margin, margin)


def _line(text: str, width: int | None) -> str:
    return f"  {text}" if width is None else _filled(text, width)


def _listed(meanings: Mapping[str, str], width: int | None) -> Iterator[str]:
    """Yield each name with its description, in two columns."""
    longest = max(map(len, meanings))
    column = longest if width is None else min(longest, _NAMES)
    for name, meaning in meanings.items():
        if width is None:
            yield f"  {name:{column}}  {meaning}"
            continue
        text = _filled(meaning, width, column + 4)
        yield f"  {name}\n{text}" if len(name) > column else f"  {name:{column}}  {text.lstrip()}"


def engines_of(option: Option) -> tuple[str, ...]:
    """Return the engines that support an option, or () if all engines support it."""
    return () if len(option.engines) == len(LLM_ENGINES) - 1 else option.engines


def _group(engines: Sequence[str], options: Sequence[Option], width: int | None) -> Iterator[str]:
    yield f"Only with {', '.join(engines)}:" if engines else "With every engine:"
    defaults = {option.key: default_of(option) for option in options}
    notes = {key: f" (default: {default})" if default else "" for key, default in defaults.items()}
    yield from _listed({option.key: f"{option.help}{notes[option.key]}" for option in options}, width)


def describe(name: str, width: int | None = None) -> str:
    """Describe an option.

    Args:
        name: any name of the option, with or without `option.`, or of its variable, or of a variable of TGI or vLLM.
        width: the number of columns at which text wraps, or None to write each fact on one line.

    Raises:
        ConfigError: if there is no such option. The message suggests the nearest name.
    """
    name = _variable_of_flag(name) or name
    if name in SETTINGS:
        return f"{name}\n{_line(f'a variable of the environment: {SETTINGS[name]}', width)}"
    return "\n\n".join([*_foreign(name, width), *("\n".join(_lines(option, width)) for option in _described(name))])


def _described(name: str) -> Iterator[Option]:
    """Yield the options that a name belongs to. Raise a ConfigError if there is no such option."""
    engines = ("vllm",) if name.startswith(images.VLLM) else ("", *LLM_ENGINES)
    for key in _keys(name):
        described = [option for engine in engines if (option := find_option(key, engine))]
        if not described:
            raise ConfigError(unknown_option(key, "").message)
        yield from {row.engines: row for row in described}.values()


def _variable_of_flag(name: str) -> str:
    """Return the variable for a flag of another server, such as NUM_SHARD for `num_shard`, or "" if there is none."""
    if any(find_option(key, engine) for key in (name, f"option.{name}") for engine in ("", *LLM_ENGINES)):
        return ""
    variables = (f"{prefix}{name.upper()}" for prefix in ("", *images.PREFIXES[::-1]))
    return next((variable for variable in variables if variable in VARIABLES), "")


def lead_of_flag(flag: str) -> str:
    """Return what to use instead of a flag of another server whose variable is known, or "" for any other flag."""
    name = _variable_of_flag(flag.strip("-").replace("-", "_"))
    line = VARIABLES.get(name)
    if line is None or line.unread:
        return ""
    if line.heeded:
        return f"; set {name} in the environment"
    if line.flag:
        words = line.flag if line.is_switch else f"{line.flag} ..."
        return f'; with the llamacpp engine, use --llama-server-args "{words}"'
    if line.refused or not line.owns:
        return f"; it has no equivalent here: {line.refused or line.idle}"
    field = f"the field {line.field} of " if line.field else ""
    return f"; use {field}{' or '.join(dict.fromkeys(map(_flag_of, line.owns.values())))}"


def _flag_of(variable: str) -> str:
    """Return the flag for a variable, or the variable itself if it sets no option."""
    key = key_of(variable)
    flag = key.removeprefix("option.").replace("_", "-")
    return f"--{flag}" if key in KNOWN or key in _flag_keys() else f"{variable} in the environment"


def _foreign(name: str, width: int | None) -> list[str]:
    """Describe what a variable of TGI or vLLM does here, in paragraphs. Return [] if the name is not one of these."""
    if name in VARIABLES:
        return [f"{name}\n{_line(VARIABLES[name].answer, width)}"]
    if not name.startswith(images.VLLM):
        return []
    first_key = key_of(of_vllms_variable(name, "true").name)
    implied = images.AWS["vLLM"].along({name: "true"})
    along = {**{key_of(name): value for name, value in implied.items()}, lmi_version.KEY: lmi_version.ASYNC}
    other_settings = ", ".join(f"{key}={value}" for key, value in along.items() if key != first_key)
    sets = f"sets {first_key}; like every SM_VLLM_* variable, it also sets these options, unless another source does:"
    return [f"{name}\n{_line(sets, width)}\n{_line(other_settings, width)}"]


def _keys(name: str) -> list[str]:
    """Return the keys of the options for a name or variable, or [] for a variable of TGI or vLLM without an option."""
    if name in VARIABLES:
        return [key_of(variable) for variable in sorted({*VARIABLES[name].owns.values()} - SECRET)]
    if name.startswith(images.VLLM):
        return [key_of(of_vllms_variable(name, "true").name)]
    if name in ENVIRONMENT or name.startswith(("OPTION_", "SERVING_")):
        return [key_of(name)]
    return [name if name.startswith("option.") or find_option(name, "") else f"option.{name}"]


def _lines(option: Option, width: int | None) -> Iterator[str]:
    yield option.key
    if isinstance(option.parse, Gone):
        yield _line(option.parse.answer, width)
        if engines := engines_of(option):
            yield f"  engines:     {', '.join(engines)}"
        return
    if option.field is None and not option.argument and not option.of_java:
        yield _line(f"no effect: {option.help}", width)
        return
    facts = {
        "meaning": option.help or "an argument of the engine",
        "type": _type(option),
        "default": default_of(option) or "none",
        "engines": _engines(option),
        "environment": ", ".join(_variables(option)),
        "other names": ", ".join(option.aliases),
    }
    for fact, text in facts.items():
        if text:
            yield f"  {fact + ':':13}{_filled(text, width, 15).lstrip()}"


def _facts(option: Option) -> dict[str, Any]:
    """Return what is said of an option, as JSON. `engines` is empty if all engines support it."""
    if isinstance(option.parse, Gone) or (option.field is None and not option.argument and not option.of_java):
        return {"key": option.key, "text": "\n".join(_lines(option, None)), "engines": [*engines_of(option)]}
    return {
        "key": option.key,
        "meaning": option.help or "an argument of the engine",
        "type": _type(option),
        "default": default_of(option) or None,
        "engines": [*engines_of(option)],
        "environment": _variables(option),
        "other_names": [*option.aliases],
    }


def _variables(option: Option) -> list[str]:
    """Return the names of the environment variables that set an option."""
    return [variable(option.key), *(name for name, key in ENVIRONMENT.items() if key == option.key)]


def _type(option: Option) -> str:
    """Return a description of the values that the parser accepts, taken from its error message."""
    try:
        option.parse(",")
    except ValueError as error:
        return str(error).removeprefix("must be ").partition(":")[0]
    return "a string"


def default_of(option: Option) -> str:
    """Return the default as written by users, and engines with other defaults, or "" if there is no default."""
    if option.default is None:
        return ""
    exceptions = "".join(f"; {engine}: {value}" for engine, value in option.by_engine.items())
    default = ", ".join(option.default) if type(option.default) is tuple else str(option.default)
    return f"{default.lower() if isinstance(option.default, bool) else default}{exceptions}"


def _engines(option: Option) -> str:
    if option.of_java:
        return ""
    if not engines_of(option):
        return "all"
    elsewhere = f"no effect with other engines: {option.idle}" if option.idle else "refused by other engines"
    return f"{', '.join(option.engines)}; {elsewhere}"


# -- options as flags of `lmi serve`: `--max-model-len 8192` is `-o option.max_model_len=8192` -------------------------
# As in vLLM, underscores count as dashes, and `--compilation-config.mode 3` is `-o option.compilation_config.mode=3`.

_SHORT = {
    "option.tensor_parallel_size": "-tp",
    "option.pipeline_parallel_size": "-pp",
    "option.data_parallel_size": "-dp",
    "option.quantization": "-q",
    "option.speculative_config": "-sc",
    "option.compilation_config": "-cc",
    "option.attention_config": "-ac",
}
"""The short flags of vLLM."""
_FORMER_SWITCHES = {"option.disable_log_requests", "option.enable_log_requests", "option.enable_reasoning"}
"""vLLM switches that existing commands use, but that are missing from the current lists of vLLM arguments."""
_DOTTED = re.compile(r"(--?[A-Za-z][\w-]*)(\.[^=]+)(=?)(.*)", re.DOTALL)

_LISTED = {
    "dtype": "precision: auto, bf16, fp16, fp32",
    "max-model-len": "maximum number of tokens in prompt and response together",
    "max-num-seqs": "maximum number of sequences in the engine at once",
    "tensor-parallel-size": "number of devices per model, or max",
    "served-model-name": "the model's name in OpenAI's API",
    "gpu-memory-utilization": "fraction of GPU memory that vLLM uses",
    "quantization": "how weights are quantized",
    "chat-template": "a chat template, or the path to one",
    "reasoning-parser": "format of the model's reasoning (default: auto)",
    "tool-call-parser": "format of the model's tool calls (default: auto)",
}
"""The flags that are listed by --help. `lmi options` lists all others."""


class _Flag(argparse.Action):
    """Action that appends `key=value` to `options`, like `-o`."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, flag: str | None = None) -> None:
        value = values if isinstance(values, str) else "false" if str(flag).startswith("--no-") else "true"
        namespace.options = [*namespace.options, f"{self.const}={value}"]


def add_flags(serve: Parser) -> None:
    """Add a flag for each option, and for each native argument of an engine."""
    serve.rewrite = _rewritten
    serve.lead = lead_of_flag
    group = serve.add_argument_group("options", "every option of `lmi options` is also a flag; the most common flags:")
    taken = {*serve._option_string_actions}
    for key, is_switch in sorted(_flag_keys().items()):
        name = key.removeprefix("option.").replace("_", "-")
        if f"--{name}" in taken:
            continue
        names = [*([_SHORT[key]] if key in _SHORT else []), f"--{name}", *([f"--no-{name}"] if is_switch else [])]
        group.add_argument(
            *names,
            action=_Flag,
            const=key,
            dest=f"option {key}",
            default=argparse.SUPPRESS,
            nargs=0 if is_switch else None,
            metavar="VALUE",
            help=_LISTED.get(name, argparse.SUPPRESS),
        )


def _flag_keys() -> dict[str, bool]:
    """Return the keys of all options and native arguments, and whether each of them is a switch."""
    arguments = [entry for engine in NAMES for entry in shipped(engine).arguments.items()]
    keys = {f"option.{name}": argument.types <= {"bool", "null"} for name, argument in arguments}
    server = shipped("vllm", "server").arguments.items()
    idle = {f"option.{name}" for name, argument in server if argument.types == {"bool"}} | _FORMER_SWITCHES
    for key in KNOWN:
        if f"option.{key}" not in KNOWN:
            keys[key] = _is_switch(KNOWN[key]) or keys.get(key, key in idle)
    return keys


def _is_switch(options: Sequence[Option]) -> bool:
    return all(option.parse is boolean or "false" in getattr(option.parse, "unless", ()) for option in options)


def _rewritten(words: Sequence[str]) -> list[str]:
    """Replace underscores in flag names with dashes, and rewrite flags with dotted names as `-o KEY=VALUE`."""
    rewritten: list[str] = []
    remaining = iter(words)
    for word in remaining:
        match = _DOTTED.fullmatch(word)
        key = _key_of_flag(match[1]) if match else ""
        if match and key:
            value = match[4] if match[3] else next(remaining, None)
            rewritten += [word] if value is None else ["-o", f"{key}{match[2]}={value}"]
        elif word.startswith("--"):
            name, equals, value = word.partition("=")
            rewritten.append(f"{name.replace('_', '-')}{equals}{value}")
        else:
            rewritten.append(word)
    return rewritten


def _key_of_flag(flag: str) -> str:
    """Return the key of the option that a flag sets, or "" if there is none."""
    if not flag.startswith("--"):
        return next((key for key, short in _SHORT.items() if short == flag), "")
    key = f"option.{flag[2:].replace('-', '_')}"
    return key if find_option(key, "") else ""
