"""Processes that can only import the packages of some extras, as in the environments that the Makefile makes."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_GUARD = '''
import sys
FOREIGN = frozenset({foreign})
class Guard:
    """A finder that does not find the foreign modules, as if they were not installed."""
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in FOREIGN else self.finder.find_spec(name, path, target)
sys.meta_path[:] = map(Guard, sys.meta_path)
'''


def only(extras: Collection[str] | None, directory: Path) -> dict[str, str]:
    """Return variables with which Python and its child processes import no package outside the extras.

    Args:
        extras: the extras of lmi-handler, or None if not even lmi-handler is installed.
        directory: where the guard is written, which Python runs at its start.
    """
    allowed = {name for name, _ in _closure("lmi-handler", extras, set())} if extras is not None else set[str]()
    allowed.add("lmi-handler")  # it is in the working directory
    foreign = {
        module
        for module, owners in packages_distributions().items()
        if not allowed & {canonicalize_name(owner) for owner in owners}
    }
    directory.mkdir(exist_ok=True)
    (directory / "sitecustomize.py").write_text(_GUARD.format(foreign=json.dumps(sorted(foreign))))
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(directory), os.environ.get("PYTHONPATH", "")]))}


def _closure(name: str, extras: Collection[str], seen: set[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield each distribution that a distribution with extras needs, with the extra that it is needed for or ""."""
    for extra in ("", *extras):
        if (key := (canonicalize_name(name), extra)) in seen:
            continue
        seen.add(key)
        yield key
        for text in distribution(name).requires or ():
            need = Requirement(text)
            if need.marker is None or need.marker.evaluate({"extra": extra}):
                yield from _closure(need.name, need.extras, seen)
