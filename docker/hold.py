"""What an image that has an engine gets of ours: every package stays at the version the engine was built with.

`python3 hold.py PINS HELD WANTED [NAME ...]` writes two files for pip. HELD has constraints: what is installed here,
but for the NAMEs, which may move. WANTED has requirements with hashes: of the file PINS, what is not installed here,
and the NAMEs. It runs in the images, on the standard library alone.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import distributions
from pathlib import Path


def split(installed: Mapping[str, str], pins: str, free: Iterable[str]) -> tuple[list[str], list[str]]:
    """The lines of HELD, and the entries of WANTED, each a pin with the lines of its hashes.

    Args:
        installed: versions by name.
        pins: as `uv pip compile --generate-hashes` writes them.
        free: names that may be another version than the installed one.
    """
    may_move = {_plain(name) for name in free}
    held = {_plain(name): f"{name}=={version}" for name, version in installed.items() if _plain(name) not in may_move}
    entries = re.findall(r"^(([\w.-]+)==.*(?:\n .*)*)", pins, re.MULTILINE)
    return sorted(held.values()), [entry for entry, name in entries if _plain(name) not in held]


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _installed() -> dict[str, str]:
    # A local version (2.9.1+cu130) is matched as it is; what is no version by PEP 440 could not be a constraint.
    form = re.compile(r"(\d+!)?\d+(\.\d+)*((a|b|rc)\d+)?(\.post\d+)?(\.dev\d+)?(\+[a-z0-9]+([._-][a-z0-9]+)*)?")
    found = {found.metadata["Name"]: found.version for found in distributions()}
    return {name: version for name, version in found.items() if name and form.fullmatch(version)}


def main(pins: str, held: str, wanted: str, *free: str) -> None:
    for file, lines in zip((held, wanted), split(_installed(), Path(pins).read_text(), free), strict=True):
        Path(file).write_text("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    main(*sys.argv[1:])
