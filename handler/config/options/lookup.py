"""An option's names: find it by one of them, or suggest the nearest; name its environment variable."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from handler.config.options import ENVIRONMENT, KNOWN, SERVER_ENVIRONMENT
from handler.config.options.engine_arguments import NAMES, check, engine_arguments, parser, shipped
from handler.config.options.foreign import NO_ARGUMENTS
from handler.config.options.option import Gone, Option


def find_option(key: str, engine: str) -> Option | None:
    """Find the option that an engine means by a name, else another engine's; None where nobody has it.

    Args:
        engine: "" where it is not known.
    """
    options = KNOWN.get(key, [])
    own = [option for option in options if engine in option.engines]
    own += [option for option in options if not option.engines]
    if own:  # nearly always; the engines' arguments are not read then
        return own[0]
    others = (_argument(key, other) for other in NAMES)
    return _argument(key, engine) or next(iter(options), None) or next(filter(None, others), None)


def _argument(key: str, engine: str) -> Option | None:
    """Make an option of an argument of the engine's own."""
    name = key.removeprefix("option.")
    found = None if name == key else engine_arguments(engine).arguments.get(name)
    return found and Option(key, None, parser(found.types), None, "", engines=(engine,), argument=True)


def option_key(name: str) -> str | None:
    """Find the key of an option that the handler accepts by DJL's name, which has no prefix."""
    key = next((name for name in (f"option.{name}", name) if name in KNOWN and _is_accepted(KNOWN[name], "")), None)
    if key is None:
        return None
    keys = {option.key for option in KNOWN[key]}
    return keys.pop() if len(keys) == 1 else key  # two engines' own: find_option knows which


def variable(key: str) -> str:
    """Name the environment variable of an option; "" for one that only serving.properties and `-o` can have."""
    if not key.startswith("option."):
        return f"SERVING_{key.upper()}" if key == key.lower() and "." not in key and key != "engine" else ""
    name = key.removeprefix("option.")
    return f"OPTION_{name.upper() if name in (name.lower(), 'entryPoint') else name}"


def key_of(name: str) -> str:
    """Name the option of one of the handler's variables."""
    if name.startswith("SERVING_"):
        return name.removeprefix("SERVING_").lower()
    if name in ENVIRONMENT:
        return ENVIRONMENT[name]
    rest = name.removeprefix("OPTION_")
    key = "option." + (rest.lower() if rest == rest.upper() else rest)  # DJL keeps mixed case as it is
    return {"option.entrypoint": "option.entryPoint", "option.engine": "engine"}.get(key, key)


class Unknown(NamedTuple):
    """A name that nobody has.

    Attributes:
        origin: the place that has it.
        message: has the nearest names that are accepted.
        is_near: whether there is such a name, so that this one is likely misspelt.
    """

    key: str
    origin: str
    message: str
    is_near: bool


def unknown_option(key: str, engine: str, origin: str = "") -> Unknown:
    """Say that nobody has the option, with the nearest names that this handler and its engine accept."""
    name = key.removeprefix("option.")
    bare = {name.removeprefix("option."): name for name, options in KNOWN.items() if _is_accepted(options, engine)}
    hints = [repr(bare[near]) for near in _nearest(name, bare)]
    arguments = engine_arguments(engine)
    names = [other for other in arguments.arguments if _is_accepted(KNOWN.get(f"option.{other}", ()), engine)]
    hints += [f"{NAMES[engine]}'s 'option.{near}'" for near in _nearest(name, names) if near not in bare]
    hint = f"did you mean {' or '.join(hints)}?" if hints else "`lmi options` lists those there are"
    releases = _releases(name, engine)
    return Unknown(key, origin, f"unknown option {key!r}{releases}; {hint}", bool(hints or releases))


def unknown_variable(name: str) -> Unknown:
    """Say that nobody has the variable SERVING_X, with the nearest one."""
    key = key_of(name)
    bare = {one for one in KNOWN if not one.startswith("option.")} | SERVER_ENVIRONMENT
    near = (
        [f"OPTION_{key.upper()}"]
        if f"option.{key}" in KNOWN
        else [f"SERVING_{one.upper()}" for one in _nearest(key, bare)]
    )
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return Unknown(name, f"environment variable {name}", f"unknown setting{hint}", bool(near))


def _nearest(name: str, names: Iterable[str]) -> list[str]:
    return difflib.get_close_matches(name, names, n=1, cutoff=0.75)


def _releases(name: str, engine: str) -> str:
    """Say which other releases of the engine have an argument."""
    other = shipped(engine).arguments.get(name) if engine in NAMES else None
    if other is None:
        return ""
    return f": {engine_arguments(engine).source} lacks it; {NAMES[engine]} {other.first} to {other.last} have it"


def wrong_arguments(values: dict[str, Any], engine: str) -> Iterator[str]:
    """Check the names and types of option.engine_args."""
    arguments = engine_arguments(engine)
    for name, value in values.items():
        option = next((one for one in KNOWN.get(f"option.{name}", ()) if engine in one.engines), None)
        found = arguments.arguments.get(name)
        try:
            if name in NO_ARGUMENTS:
                yield f"{name!r}: write option.{name}, which this server reads"
            elif option and getattr(option.parse, "argument", False):
                option.parse(value if isinstance(value, str) else json.dumps(value))
            elif found:
                check(value, found.types)
            else:
                near = _nearest(name, arguments.arguments)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                yield f"{name!r} is not an argument of {arguments.source}{hint}"
        except ValueError as error:
            yield f"{name!r}: {error}"


def _is_accepted(options: Sequence[Option], engine: str) -> bool:
    return not options or any(
        (not engine or not option.engines or engine in option.engines or option.idle)
        and not isinstance(option.parse, Gone)
        and (option.field or option.of_java)
        for option in options
    )
