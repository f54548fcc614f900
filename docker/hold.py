"""pip constraints for an image that has an engine: every package stays at the version the engine was built with.

`python3 hold.py OURS [NAME ...]` prints them: what is installed here, but for the NAMEs, which may move; and from the
constraints file OURS what is not installed, and the NAMEs. It runs in the images, on the standard library alone.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import distributions
from pathlib import Path


def constraints(installed: Mapping[str, str], ours: Iterable[str], free: Iterable[str]) -> list[str]:
    """
    Args:
        installed: versions by name.
        ours: lines `name==version`, comments among them.
        free: names that may be another version than the installed one.
    """
    may_move = {_plain(name) for name in free}
    held = {_plain(name): f"{name}=={version}" for name, version in installed.items() if _plain(name) not in may_move}
    wanted = {_plain(line.split("==")[0]): line for line in map(str.strip, ours) if line and not line.startswith("#")}
    return sorted((wanted | held).values())


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _installed() -> dict[str, str]:
    # A local version (2.9.1+cu130) is matched as it is; what is no version by PEP 440 could not be a constraint.
    form = re.compile(r"(\d+!)?\d+(\.\d+)*((a|b|rc)\d+)?(\.post\d+)?(\.dev\d+)?(\+[a-z0-9]+([._-][a-z0-9]+)*)?")
    found = {found.metadata["Name"]: found.version for found in distributions()}
    return {name: version for name, version in found.items() if name and form.fullmatch(version)}


if __name__ == "__main__":
    print("\n".join(constraints(_installed(), Path(sys.argv[1]).read_text().splitlines(), sys.argv[2:])))
