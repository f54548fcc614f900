"""Reads the settings from each source: the environment, serving.properties, and `-o` arguments."""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import javaproperties

from handler.config.environment import key_variables, model_path
from handler.config.options import ENVIRONMENT, KNOWN, images
from handler.config.options.images import Note
from handler.config.options.names import (
    KEY_VARIABLES,
    KEYS,
    SECRET,
    Own,
    Unknown,
    find_option,
    is_unknown,
    key_of,
    translate,
    unfamiliar,
    unknown_variable,
)
from handler.config.options.option import dotted_value, redacted
from handler.core import text_files
from handler.core.errors import Problem
from handler.core.numbers import is_digits


class Setting(NamedTuple):
    """The value of an option as text, and its origin, such as `serving.properties, line 3`."""

    key: str
    value: str
    origin: str

    def __str__(self) -> str:
        return f"{self.key} ({self.origin})"


MOST_BYTES = 1 << 20
"""Maximum size of a serving.properties file, in bytes."""


def from_file(path: Path) -> Iterator[Setting | Problem]:
    """Yield the settings in a Java properties file, in order, or a problem if the file cannot be read."""
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES} bytes")
        text = decode_properties(data)
        if _is_json(text):
            raise ValueError("it is JSON: write one KEY=VALUE on each line")
    except (OSError, ValueError) as error:
        yield Problem("", "", f"cannot read {path}: {error}")
        return
    yield from settings_of(text, path.name)


def _is_json(text: str) -> bool:
    """Return whether a text is a JSON object, or begins like one that is broken or cut short."""
    return re.match(r"\s*\{\s*([\"}]|$)", text) is not None


def settings_of(text: str, name: str) -> Iterator[Setting | Problem]:
    """Yield the settings and problems in the text of a Java properties file.

    Args:
        text: the text that `decode_properties` returns.
        name: the name of the file, for the origins of settings.
    """
    stream = io.StringIO(text)
    elements = javaproperties.parse(stream)
    line, read = 1, 0
    while True:
        line, read = line + text.count("\n", read, stream.tell()), stream.tell()
        origin = f"{name}, line {line}"
        try:
            element = next(elements, None)
        except javaproperties.InvalidUEscapeError as error:
            yield Problem(origin, "", str(error))
            elements = javaproperties.parse(stream)  # continues at the next line
            continue
        if element is None:
            return
        if isinstance(element, javaproperties.KeyValue):
            yield Setting(element.key, element.value, origin)


def with_repeated(items: Iterable[Setting | Problem]) -> Iterator[Setting | Problem | Note]:
    """Add a note for each value that a later line of the same file replaces with a different value."""
    before: dict[str, Setting] = {}
    for item in items:
        yield item
        if isinstance(item, Setting):
            earlier = before.setdefault(item.key, item)
            if earlier.value != item.value:
                line = item.origin.rpartition(", ")[2]
                yield Note(str(earlier), f"{line} sets it to another value")
            before[item.key] = item


def decode_properties(data: bytes) -> str:
    """Decode a properties file as UTF-8, or else as ISO 8859-1, which was the encoding of such files before Java 9.

    Each continued line is joined with the lines that continue it, and these are replaced by blank lines. Otherwise, the
    parsing time of javaproperties would grow with the square of their number.

    Raises:
        ValueError: if the file is UTF-16.
    """
    lines: list[str] = []
    parts: list[str] = []  # of a continued line
    for line in _LINE_END.split(text_files.decode(data, otherwise="iso-8859-1")):
        text = line.lstrip(_BLANK)
        if (parts or not text.startswith(("#", "!"))) and (len(line) - len(line.rstrip("\\"))) % 2:
            parts.append((text if parts else line)[:-1])
        elif parts:
            lines += ["".join([*parts, text]), *[""] * len(parts)]
            parts = []
        else:
            lines.append(line)
    return "\n".join([*lines, "".join(parts)] if parts else lines)


def encode_properties(text: str) -> str:
    """Encode a properties file in ASCII, so that all readers read the same text. Java reads the bytes as ISO 8859-1.

    A single backslash before a non-ASCII character has no meaning. It is dropped, because it would escape the backslash
    of the new escape sequence.
    """

    def escaped(match: re.Match[str]) -> str:
        units = match[2].encode("utf-16-be").hex()
        return match[1] + "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))

    return re.sub(r"((?:\\\\)*)\\?([^\x00-\x7f]+)", escaped, text)


def misread_by_java(file: Path) -> Iterator[str]:
    """Yield messages about parts of serving.properties in a model directory that only this package reads correctly.

    DJL's ModelInfo reads the bytes as ISO 8859-1. Its BaseModelLoader reads UTF-8, and raises MalformedInputException.
    """
    with contextlib.suppress(OSError), file.open("rb") as stream:
        data = stream.read(MOST_BYTES)
        try:
            data.decode()
        except UnicodeDecodeError:
            yield f"{file} is not UTF-8: DJL Serving itself does not start with it; save it as UTF-8"
        first = next(from_file(file), None)
        if data.startswith(codecs.BOM_UTF8) and isinstance(first, Setting) and first.origin.endswith(", line 1"):
            where = f"{first.key} ({first.origin})"
            yield f"DJL Serving does not read {where}: a byte order mark precedes it; save the file without the mark"


_LINE_END = re.compile(r"\r\n|\r|\n")
_BLANK = " \t\f"  # characters that Java skips at the beginning of a line


def from_overrides(overrides: Iterable[str]) -> Iterator[Setting | Problem]:
    """Yield the settings from `-o` arguments, and a problem for each argument without `=`."""
    for override in overrides:
        key, equals, value = override.partition("=")
        if equals:
            yield Setting(key.strip(), value, f"-o {redacted(override)}")
        else:
            yield Problem(f"-o {redacted(override)}", "", "write it as key=value")


def from_environment(environ: Mapping[str, str]) -> Iterator[Setting | Unknown]:
    """Yield the settings from `OPTION_*` and `SERVING_*` variables, and from the variables in `ENVIRONMENT`."""
    for name, value in environ.items():
        origin = f"environment variable {name}"
        key = key_of(name)
        if is_unknown(name):
            yield unknown_variable(name)
        elif name.startswith("OPTION_") or (name.startswith("SERVING_") and key in KNOWN):
            yield Setting(key, value, origin)
    for name, key in ENVIRONMENT.items():
        # As in LMI, `OPTION_*` overrides these names.
        option_name = "OPTION_" + key.removeprefix("option.").upper()
        if name in environ and option_name not in environ:
            yield Setting(key, environ[name], f"environment variable {name}")


def from_foreign_variables(
    environ: Mapping[str, str], engine: str, *, java: bool = False
) -> Iterator[Setting | Problem | Note | Unknown]:
    """Yield the settings from the environment variables of other servers, and problems with those that protect one.

    Args:
        environ: the environment.
        engine: the engine that the options select, or "" if they select no engine.
        java: whether DJL Serving runs the handler. It reads its own variables, but checks no keys.
    """
    if java:
        environ = {name: value for name, value in environ.items() if not name.startswith("SERVING_")}
        yield from (_unchecked(name) for name in key_variables() if environ.get(name))
    for name in {*KEY_VARIABLES} - {*key_variables()}:
        if environ.get(name):
            yield Note(name, f"on SageMaker, clients cannot send a key; {KEYS} would require one")
            environ = {other: value for other, value in environ.items() if other != name}
    yield from unfamiliar(environ)
    if is_digits(environ.get("LMI_PORT", "")):  # that of Kubernetes, for a service named lmi, has a scheme
        yield Note("LMI_PORT", "`lmi serve --port` and SAGEMAKER_BIND_TO_PORT set it")
    for item in translate(environ, engine):
        if not isinstance(item, Own):
            yield item
        elif item.name not in environ and item.name not in SECRET:
            value = _model_in(item.value) if item.foreign == images.MODEL_DIR else item.value
            yield Setting(key_of(item.name), value, f"environment variable {item.foreign}")
    name = "" if environ.keys() & images.MODELS else images.AWS["llama.cpp"].first_of(environ)
    file = images.first_gguf(model_path(environ)) if name else None
    if file is not None:
        yield Setting("option.model_id", str(file), f"environment variable {name}")


def _model_in(directory: str) -> str:
    """Return the model that llama.cpp's image serves from a directory, or the directory if it contains none."""
    return str(images.first_gguf(Path(directory)) or directory)


def _unchecked(name: str) -> Problem:
    message = "DJL Serving checks no keys: unset it, or use the embedded server (LMI_FRONT=embedded, or `lmi serve`)"
    return Problem(f"environment variable {name}", name, message)


Item: TypeAlias = Setting | Problem | Note | Unknown
"""An item from a source: a setting, a problem, a note or an unknown name."""

_Kind = TypeVar("_Kind", Setting, Problem, Note, Unknown)


def only(kind: type[_Kind], items: Iterable[Item]) -> list[_Kind]:
    return [item for item in items if isinstance(item, kind)]


def joined(source: Iterable[Item]) -> list[Item]:
    """Join dotted names in a source. `option.x.a=1` and `option.x.b.c=2` result in `option.x={"a": 1, "b": {"c": 2}}`.

    This follows vLLM's FlexibleArgumentParser (vllm/utils/argparse_utils.py), which reads dotted names after all other
    names. A value is JSON or text, or a list of strings if its name ends with `+`. Lists with the same name are
    concatenated. The joined object replaces any value of the option itself.
    """
    plain: list[Item] = []
    values: dict[str, dict[str, Any]] = {}
    last: dict[str, Setting] = {}
    for item in source:
        names = _dotted_names(item.key) if isinstance(item, Setting) else []
        if not isinstance(item, Setting) or not names:
            plain.append(item)
            continue
        root = f"option.{names[0]}"
        try:
            value = dotted_value(item.value, is_list=item.key.endswith("+"))
            for name in reversed(names[1:]):
                value = {name: value}
            _update(values.setdefault(root, {}), value)
            last[root] = Setting(root, json.dumps(values[root]), item.origin)
        except (ValueError, RecursionError):
            plain.append(Problem(item.origin, root, f"{redacted(root)}: nested too deeply"))
    overridden = (item for item in only(Setting, plain) if item.key in last)
    notes = (Note(str(item), "overridden by its fields under dotted names, as in vLLM") for item in overridden)
    return [*plain, *last.values(), *notes]


def _dotted_names(key: str) -> list[str]:
    """Return the components of a dotted name that sets a part of an option, or [] for any other key."""
    names = key.removeprefix("option.").removesuffix("+").split(".")
    is_part = key.startswith("option.") and len(names) > 1 and key not in KNOWN
    return names if is_part and find_option(f"option.{names[0]}", "") else []


def _update(values: dict[str, Any], more: Mapping[str, Any]) -> None:
    for key, value in more.items():
        old = values.get(key)
        if isinstance(value, dict) and isinstance(old, dict):
            _update(old, value)
        elif isinstance(value, list) and isinstance(old, list):
            old += value
        else:
            values[key] = value


class Sources(NamedTuple):
    """The contents of all sources, each of which is read once. Later sources override earlier ones.

    Attributes:
        environ: the environment.
        variables: the items of the variables of this package.
        in_file: the items of serving.properties.
        in_arguments: the items of the `-o` arguments.
        directory: the directory of serving.properties, or None if no such file is read.
    """

    environ: Mapping[str, str]
    variables: list[Item]
    in_file: list[Item]
    in_arguments: list[Item]
    directory: Path | None

    @classmethod
    def read(cls, properties: Path | None, overrides: Iterable[str], environ: Mapping[str, str] | None) -> Sources:
        """Read the sources.

        Args:
            properties: the path of a serving.properties, or None.
            overrides: arguments of `-o`, in the form `key=value`.
            environ: the environment, or None for `os.environ`.
        """
        environ = os.environ if environ is None else environ
        sources = cls(environ, [*from_environment(environ)], [], [*from_overrides(overrides)], None)
        return sources if properties is None else sources.with_file(properties)

    def with_file(self, properties: Path) -> Sources:
        """Return the sources with a serving.properties."""
        return self._replace(in_file=[*with_repeated(from_file(properties))], directory=properties.absolute().parent)

    @property
    def options(self) -> list[list[Item]]:
        """The sources in which options have the names of this package."""
        return [self.variables, self.in_file, self.in_arguments]
