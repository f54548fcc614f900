"""The public names of this package: `from lmi_handler import Predictor`.

Its code is in the packages `handler`, `deploy` and `proof`. A folder of the user's with such a name hides them from a
plain import, and is hidden in turn by an import of a name from here, with a warning (docs/decisions.md).
"""

from __future__ import annotations

import importlib
import sys
import warnings
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deploy import client
    from deploy.client import Predictor
    from handler import formatters
    from handler.http.app import create_app

__all__ = ["Predictor", "client", "create_app", "formatters"]

_PLACES = {
    "Predictor": ("deploy.client", "Predictor"),
    "client": ("deploy.client", ""),
    "create_app": ("handler.http.app", "create_app"),
    "formatters": ("handler.formatters", ""),
}
_HOME = Path(__file__).resolve().parent


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    path, attribute = _PLACES[name]
    module = _imported(path)
    value = globals()[name] = getattr(module, attribute) if attribute else module
    return value


def _imported(path: str) -> Any:
    """Import a module of ours, whatever lies before it on the path.

    Raises:
        ImportError: a package of the user's has its name, and has been imported.
    """
    package = path.partition(".")[0]
    if (known := sys.modules.get(package)) is not None:
        place = Path(next(iter(getattr(known, "__path__", [known.__file__])))).resolve()
        if place != _HOME / package:
            raise ImportError(f"{place} is imported as {package!r}, which is also a package of lmi-handler: rename it")
        return importlib.import_module(path)
    found = PathFinder.find_spec(package)
    hidden = [Path(place).resolve() for place in (found and found.submodule_search_locations) or ()]
    if hidden and _HOME / package not in hidden:
        warnings.warn(f"{hidden[0]} cannot be imported: lmi-handler has a package {package!r} too", stacklevel=3)
    sys.path.insert(0, str(_HOME))
    try:
        return importlib.import_module(path)
    finally:
        sys.path.remove(str(_HOME))
