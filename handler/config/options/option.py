"""Definition of an option, and parsers for values, which raise ValueError with a description of the allowed values."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, cast

from handler.core.media import ALL_MEDIA, MEDIA
from handler.core.numbers import decimal, whole
from handler.core.secrets import TOKENS

_T = TypeVar("_T")
_D = TypeVar("_D")

_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}")

OF_JAVA = "DJL Serving's Java side reads it"


class Option(NamedTuple):
    """The definition of an option.

    Attributes:
        key: the option name in serving.properties.
        field: the option name in `Config`, or in `Config.engine_options` if it has `engines`. None for native engine
            arguments and for options that have no effect.
        parse: the parser for the option value.
        default: the default value, or None to leave it to the engine.
        help: a description of the option, or why it has no effect.
        aliases: other names of the option.
        engines: the engines that support the option, or () for all engines. Other engines refuse it unless `idle` is
            set.
        idle: why other engines ignore the option, or "" if they refuse it.
        argument: whether the option is a native argument of an engine.
        of_java: whether only the Java side of DJL Serving reads the option.
        harmless: values that have no effect. Engines that do not support the option accept them.
        by_engine: maps engines with a different default to that default.
    """

    key: str
    field: str | None
    parse: Callable[[str], Any]
    default: Any
    help: str
    aliases: tuple[str, ...] = ()
    engines: tuple[str, ...] = ()
    idle: str = ""
    argument: bool = False
    of_java: bool = False
    harmless: tuple[str, ...] = ()
    by_engine: Mapping[str, Any] = MappingProxyType({})

    def default_with(self, engine: str) -> Any:
        return self.by_engine.get(engine, self.default)


def option(
    parse: Callable[[str], _T],
    default: _D,
    help: str,
    *aliases: str,
    prefix: str = "option.",
    by_engine: Mapping[str, _T] = MappingProxyType({}),
) -> _T | _D:
    """Declare an option as a field of a dataclass. The field has the name and the type of the option."""
    row = Option(prefix, None, parse, default, help, aliases, by_engine=by_engine)
    return cast("_T | _D", field(default=default, metadata={"option": row}))


def declared(table: type) -> tuple[Option, ...]:
    """Return the options that a dataclass declares."""
    rows = ((option.name, option.metadata["option"]) for option in fields(table))
    return tuple(row._replace(key=row.key + name, field=name) for name, row in rows)


_MARKS = ("eos", "bos", "pad", "unk", "sep", "cls", "mask", "image", "audio", "video")
"""Words before `_token` in the names of special tokens, such as `eos_token`. These settings, and settings whose names
end with `per_token`, are not secrets.
"""
_NO_MARK = "".join(rf"(?<!\b{name})(?<!_{name})" for name in (*_MARKS, "per"))
_SECRET = re.compile(
    rf"(?i)(\btoken|{_NO_MARK}_token|(\b|_)(api_?keys?|password|secret))[\"']?\s*[:=]|\bhf_[a-z0-9]{{16}}|://[^/\s]*@|-restricted-(api|protocol)"
    rf"|(?-i:{TOKENS})"
)
_SWITCH = re.compile(r"(?i)^[\w.-]+=\s*(true|false)\s*$")  # smoothquant_per_token=true
_HOST = re.compile(r"(\*|[a-z0-9_.-]+(:[0-9]+)?|\[[0-9a-f]*:[0-9a-f:.]*\](:[0-9]+)?)")
_LARGEST_MAX_MEDIA = 1000
"""The largest allowed limit on media of one kind in a request."""
_UNITS = "kmgt"  # powers of 1000, or of 1024 in capitals
_READABLE = re.compile(r"([0-9]+)((?:\.[0-9]+)?)([kKmMgGtT])")
_MAX_LENGTH = 400  # characters
_MOST_NAME, _MOST_PATH = 255, 4095  # Linux's limits, in bytes


def is_secret(setting: str) -> bool:
    """Return whether `name=value` contains a key, token or password, even inside JSON or a URL."""
    return bool(_SECRET.search(setting)) and not _SWITCH.search(setting)


def redacted(setting: str) -> str:
    """Return `name=value` for messages and logs: on one line, without secrets, and truncated if it is long."""
    if is_secret(setting):
        setting = f"{setting.partition('=')[0]}=***"
    return beginning(setting)


def beginning(text: str) -> str:
    """Return text for messages and logs: on one line, and truncated if it is long."""
    if len(text) > _MAX_LENGTH:
        text = f"{text[:_MAX_LENGTH]}..."
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text)


def boolean(text: str) -> bool:
    """Parse a boolean in any form that pydantic and thus LMI accepts (docs.pydantic.dev, "Booleans")."""
    match text.lower():
        case "true" | "t" | "yes" | "y" | "on" | "1":
            return True
        case "false" | "f" | "no" | "n" | "off" | "0":
            return False
    raise ValueError("must be true or false")


def true_or_false(text: str) -> bool:
    """Parse a boolean that Java also reads. Values such as 1 are refused, because Java reads them as false."""
    if text.lower() not in ("true", "false"):
        raise ValueError("must be true or false")
    return text.lower() == "true"


def string(text: str) -> str:
    if not text:
        raise ValueError("must not be empty")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("must be UTF-8") from None
    return text


def path(text: str) -> str:
    """Parse a path, or a word that an option accepts in place of a path."""
    parts = os.fsencode(string(text)).split(b"/")
    if not text.isprintable() or len(text) > _MOST_PATH or max(map(len, parts)) > _MOST_NAME:
        raise ValueError(f"must be printable, with at most {_MOST_NAME} bytes between slashes and {_MOST_PATH} in all")
    return text


def header_name(text: str) -> str:
    """Parse the name of a header, in any case."""
    if not _HEADER.fullmatch(text):
        raise ValueError("must be the name of a header, such as x-user")
    return text.lower()


def names(text: str) -> tuple[str, ...]:
    """Parse names separated by commas."""
    values = tuple(name.strip() for name in string(text).split(","))
    if not all(values):
        raise ValueError("must be names separated by commas")
    return values


def hosts(text: str) -> tuple[str, ...]:
    """Parse host names, optionally with ports, separated by commas or as a JSON list. "*" matches any host."""
    hosts_read = read_json(text) if text.startswith('["') else text.split(",")
    values = [name.strip().lower() if isinstance(name, str) else "" for name in hosts_read]
    if not values or not all(_HOST.fullmatch(name) for name in values):
        raise ValueError("must be host names, optionally with ports, separated by commas; or *")
    return tuple(values)


def choice_of(*names: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in names:
            raise ValueError(f"must be one of {', '.join(names)}")
        return text

    return parse


def integer(least: int, most: int | None = None) -> Callable[[str], int]:
    def parse(text: str) -> int:
        rule = f"must be a whole number of at least {least}" + (f" and at most {most}" if most is not None else "")
        try:
            value = whole(text)
        except ValueError:
            raise ValueError(rule) from None
        if value < least or (most is not None and value > most):
            raise ValueError(rule)
        return value

    return parse


def number(least: float, most: float = 1e6) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = decimal(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise ValueError(f"must be a number of at least {least:g} and at most {most:g}")
        return value

    return parse


def precision(text: str) -> str:
    """Parse the name of a precision, in any form that LMI or vLLM accepts."""
    names = {"auto": "auto", "fp32": "fp32", "f32": "fp32", "float32": "fp32", "float": "fp32"}
    names |= {"fp16": "fp16", "f16": "fp16", "float16": "fp16", "half": "fp16", "bf16": "bf16", "bfloat16": "bf16"}
    if text.lower() not in names:
        raise ValueError(f"must be one of {', '.join(names)}")
    return names[text.lower()]


def integer_or(word: str, least: int, most: int | None = None) -> Callable[[str], str]:
    def parse(text: str) -> str:
        try:
            return word if text == word else str(integer(least, most)(text))
        except ValueError as error:
            raise ValueError(f"{error}, or {word}") from None

    return parse


def read_json(text: str) -> Any:
    """Parse a JSON value of any type.

    Raises:
        ValueError: if the text is not JSON or is nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def json_object(text: str) -> dict[str, Any]:
    try:
        value = read_json(text)
    except ValueError as error:
        raise ValueError(f"must be a JSON object: {error}") from None
    if not isinstance(value, dict):
        raise ValueError("must be a JSON object")
    return value


def dotted_value(text: str, *, is_list: bool) -> Any:
    """Parse the value of a dotted name: JSON, a number such as 1k (1000), 1K (1024) or 01, or else a string.

    Args:
        text: the value.
        is_list: whether the value is a list of strings separated by commas.

    Raises:
        RecursionError: if the value is JSON that is nested too deeply.
    """
    if is_list:
        return text.split(",")
    with contextlib.suppress(ValueError):
        return json.loads(text)
    match = _READABLE.fullmatch(text.strip())
    if match is None or (match[2] and match[3].isupper()):
        with contextlib.suppress(ValueError):
            return whole(text)  # 01, +5 and 1_000 are not JSON
        return text
    power = _UNITS.index(match[3].lower()) + 1
    if match[3].isupper():
        return int(match[1]) * 1024**power
    return int(float(match[1] + match[2]) * 1000**power)


class MediaLimits:
    """Parser for the maximum number of media per request: {"image": n}, or image=n as in LMI.

    The maximum for any other kind of media must be 0.

    Attributes:
        argument: whether the parser also applies to the argument of the same name in option.engine_args.
    """

    argument = True

    def __call__(self, text: str) -> dict[str, int]:
        pairs = (limit.partition("=")[::2] for limit in text.split(","))
        numbers = json_object(text) if text.startswith("{") else {name.strip(): value.strip() for name, value in pairs}
        if any(value not in (0, "0") for name, value in numbers.items() if name not in MEDIA):
            raise ValueError(f"must be a number of {ALL_MEDIA}, such as image=4: other media are not supported")
        try:
            return {name: integer(0, _LARGEST_MAX_MEDIA)(str(value)) for name, value in numbers.items()}
        except ValueError as error:
            raise ValueError(f"{ALL_MEDIA}: {error}") from None


def lora_modules(text: str) -> dict[str, str]:
    """Parse adapters in the forms that vLLM accepts, and return their paths by name.

    The forms are `name=path` (several are separated by spaces), a JSON object with name and path, or a list of either.
    Source: vllm/entrypoints/openai/cli_args.py, LoRAParserAction.
    """
    items: Any = text.split()
    if text.lstrip().startswith(("{", "[")):
        try:
            items = json.loads(text)
        except (ValueError, RecursionError):
            raise ValueError("is not JSON") from None
    adapters: dict[str, str] = {}
    for item in items if isinstance(items, list) else [items]:
        name, path = item.partition("=")[::2] if isinstance(item, str) else _name_and_path(item)
        if not (name and isinstance(name, str) and path and isinstance(path, str)):
            raise ValueError('must be name=path, {"name": ..., "path": ...}, or a list of them')
        if adapters.setdefault(name, path) != path:
            raise ValueError(f"two adapters have the name {name[:64]!r}")
    return adapters


def _name_and_path(item: Any) -> tuple[Any, Any]:
    return (item.get("name"), item.get("path")) if isinstance(item, dict) else (None, None)


@dataclass(frozen=True)
class Gone:
    """Parser for an option that is refused.

    Attributes:
        reason: why the option is refused, and what to use instead.
        unless: values that have no effect, which are accepted.
        argument: whether the option is also refused in option.engine_args.
    """

    reason: str
    unless: tuple[str, ...] = ()
    argument: bool = False

    def __call__(self, text: str) -> Any:
        if text.lower() not in self.unless:
            raise ValueError(self.reason)
        return None

    @property
    def answer(self) -> str:
        """Return the error message for the option."""
        values = " or ".join(filter(None, (", ".join(self.unless[:-1]), *self.unless[-1:])))
        return f"refused{', except for ' + values if values else ''}: {self.reason}"
