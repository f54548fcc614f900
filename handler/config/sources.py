"""Sources of options: a serving.properties, `-o` and the environment; each yields settings, and problems of its own."""

from __future__ import annotations

import difflib
import io
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import javaproperties

from handler.config.options import ENVIRONMENT, KNOWN, SERVER_ENVIRONMENT
from handler.core.errors import Problem


class Setting(NamedTuple):
    """One value as text, and its origin: `serving.properties, line 3` or `environment variable OPTION_X`."""

    key: str
    value: str
    origin: str


def from_file(path: Path) -> Iterator[Setting | Problem]:
    """Read a Java properties file; the last value of a key counts, as in Java."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        yield Problem("", "", f"cannot read {path}: {error}")
        return
    stream = io.StringIO(text)
    elements = javaproperties.parse(stream)
    while True:
        origin = f"{path.name}, line {text.count(chr(10), 0, stream.tell()) + 1}"
        try:
            element = next(elements, None)
        except javaproperties.InvalidUEscapeError as error:
            yield Problem(origin, "", str(error))
            elements = javaproperties.parse(stream)  # goes on with the next line
            continue
        if element is None:
            return
        if isinstance(element, javaproperties.KeyValue):
            yield Setting(element.key, element.value, origin)


def from_overrides(overrides: Iterable[str]) -> Iterator[Setting | Problem]:
    """Read the texts of `-o`."""
    for override in overrides:
        key, equals, value = override.partition("=")
        if equals:
            yield Setting(key.strip(), value, f"-o {override}")
        else:
            yield Problem(f"-o {override}", "", "write it as key=value")


def from_environment(environ: Mapping[str, str]) -> Iterator[Setting | Problem]:
    """Read `OPTION_X_Y` as option.x_y, `SERVING_X` as the server's x, and the names in `ENVIRONMENT`."""
    for name, value in environ.items():
        origin = f"environment variable {name}"
        if name.startswith("OPTION_"):
            rest = name.removeprefix("OPTION_")
            key = "option." + (rest.lower() if rest == rest.upper() else rest)  # DJL keeps mixed case as it is
            yield Setting(
                {"option.entrypoint": "option.entryPoint", "option.engine": "engine"}.get(key, key), value, origin
            )
        elif name.startswith("SERVING_"):
            key = name.removeprefix("SERVING_").lower()
            if key in KNOWN:
                yield Setting(key, value, origin)
            elif key not in SERVER_ENVIRONMENT:
                near = difflib.get_close_matches(key, [*KNOWN, *SERVER_ENVIRONMENT], n=1)
                hint = f"; did you mean 'SERVING_{near[0].upper()}'?" if near else ""
                yield Problem(origin, "", f"unknown setting{hint}")
    for name, key in ENVIRONMENT.items():
        # As LMI does: `OPTION_*` beats these names.
        option_name = "OPTION_" + key.removeprefix("option.").upper()
        if name in environ and option_name not in environ:
            yield Setting(key, environ[name], f"environment variable {name}")
