"""Command-line parsing, with errors that suggest the most similar known word and show the usage of the command."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import ipaddress
import json
import math
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any, NoReturn

from handler.core import deprecations
from handler.core.numbers import decimal, is_digits

_PLAIN = {
    r"ignored explicit argument (.+)": r"takes no value, but got \1",
    r"expected one argument": "needs a value",
    r"expected at least one argument": "needs at least one value",
}
"""Maps regular expressions that match argparse messages to plainer messages."""


class Parser(argparse.ArgumentParser):
    """A parser whose flags cannot be abbreviated, so that a new flag cannot change the meaning of a command line.

    Attributes:
        hint: text that is appended to the error about an unknown flag. `{word}` is the name of the flag without dashes.
        meant: maps choices of other programs to the equivalent choices of this program.
        lead: function that returns text for the error about an unknown flag, or "" to suggest the most similar flag.
        meant_flags: maps flags of other programs to what this program takes instead.
        rewrite: function that converts the words of a command line before argparse parses them.
    """

    hint = ""
    lead: Callable[[str], str] = staticmethod(lambda flag: "")
    meant: Mapping[str, str] = MappingProxyType({})
    meant_flags: Mapping[str, str] = MappingProxyType({})
    rewrite: Callable[[Sequence[str]], Sequence[str]] = staticmethod(lambda words: words)

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **more})
        self.set_defaults(parser=self)  # a subcommand sets its own parser

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = sys.argv[1:] if args is None else args
        for word in words:
            if instead := self.meant_flags.get(word.partition("=")[0]):
                self.error(f"there is no flag {word.partition('=')[0]} here; use {instead}")
        flags = (f"{self.prog} {word.partition('=')[0]}" for word in words if word.startswith("-"))
        for warning in deprecations.warnings((self.prog, *flags)):
            print(warning, file=sys.stderr)
        return super().parse_known_args(self.rewrite(words), namespace)

    def parse_all(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse a command line. If a word is unknown, show the usage of the command and exit with status 2."""
        arguments: argparse.Namespace
        arguments, unknown = self.parse_known_args(words)
        if unknown:
            command = arguments.parser
            command.error(_unknown(unknown, command))
        return arguments

    def error(self, message: str) -> NoReturn:
        for theirs, plain in _PLAIN.items():
            message = re.sub(theirs, plain, message)
        super().error(message)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        if value in self.meant:
            raise argparse.ArgumentError(action, f"{value!r} is not supported here; use {self.meant[value]}")
        choices = [*map(str, action.choices)]
        raise argparse.ArgumentError(action, f"invalid choice: {value!r}{hint_of(str(value), choices)} (choose from "
                                             f"{', '.join(map(repr, choices))})")  # fmt: skip


class KeptLines(argparse.HelpFormatter):
    """Help formatter that preserves the line breaks of a description.

    If a line has two columns, its continuation lines are indented to the second column.
    """

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(_wrapped(line, width) for line in text.splitlines())


def _wrapped(line: str, width: int) -> str:
    column = re.match(r" *\S.*? {2,}|\s*", line)
    return wrap(line, width, indent=" " * (column.end() if column else 0))


def wrap(text: str, width: int, first: str = "", indent: str = "") -> str:
    """Wrap text between words, with `first` before the first line and `indent` before all other lines."""
    return textwrap.fill(
        text, width, initial_indent=first, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def add_installed(commands: Any, group: str) -> None:
    """Add the commands that installed packages declare as entry points of a group.

    An entry point is a function that adds its command to `commands`.
    """
    for point in sorted(entry_points(group=group)):
        point.load()(commands)


def add_repeatable(parser: Any, flag: str, dest: str, metavar: str, help: str) -> None:
    """Add a flag that may be repeated. Its values are collected in a list."""
    parser.add_argument(flag, dest=dest, action="append", default=[], metavar=metavar, help=f"{help}; repeatable")


def add_json(parser: Any) -> None:
    """Add the flag `--json`. A command prints the same facts with and without it, and has the same exit status."""
    parser.add_argument("--json", action="store_true", help="print JSON; the exit status is the same")


def print_json(value: Any) -> None:
    """Print what a command has to say as one JSON document on standard output. Errors go to standard error as text."""
    print(json.dumps(value, indent=2), flush=True)


def positive(text: str) -> float:
    """Parse an argument as a finite number above 0."""
    with contextlib.suppress(ValueError):
        if 0 < (value := decimal(text)) < math.inf:
            return value
    raise argparse.ArgumentTypeError("must be a number above 0")


def host(text: str) -> str:
    """Parse an argument as an address or a host name. An IPv6 address may be in brackets."""
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(bare.partition("%")[0])
        return bare
    name, colon, number = text.rpartition(":")
    if colon and is_digits(number):
        raise argparse.ArgumentTypeError(f"must not contain a port: write --host {name} --port {number}")
    if not re.fullmatch(r"[\w.-]+", text):
        raise argparse.ArgumentTypeError("must be an address or a host name, such as 0.0.0.0")
    return text


def port(text: str) -> int:
    """Parse an argument as a port number. 0 selects any free port."""
    if not is_digits(text) or int(text) > 65535:
        raise argparse.ArgumentTypeError("must be a number from 0 to 65535")
    return int(text)


def _unknown(words: Sequence[str], command: argparse.ArgumentParser) -> str:
    """Return the error message for unknown words. It suggests the flag most similar to the first unknown flag."""
    flags = [word for word in words if word.startswith("-")]
    if not flags:
        return f"unexpected arguments: {' '.join(words)}"
    name = flags[0].partition("=")[0]
    more = getattr(command, "hint", "").format(word=name.strip("-").replace("-", "_"))
    lead = getattr(command, "lead", str)(name) or hint_of(name.replace("_", "-"), command._option_string_actions)
    return f"unknown flag {name}{lead}{more}"


def hint_of(word: str, names: Iterable[str]) -> str:
    """Return text such as `; did you mean NAME?`, or "" if no known word is similar.

    The suggestion is the shortest known word that begins with `word`, or else the most similar known word.
    """
    names = [*names]
    begun = sorted((name for name in names if len(word.strip("-")) > 1 and name.startswith(word)), key=len)
    near = begun or difflib.get_close_matches(word, names, n=1, cutoff=0.7)
    return f"; did you mean {near[0]}?" if near else ""
