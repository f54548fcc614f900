"""The public names of this package: `from lmi_handler import Predictor`.

The code is in the packages `handler`, `deploy` and `proof`. If the user's own folder has one of these names, a plain
import finds the user's folder, and an import from this module finds ours and warns (docs/decisions.md).
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
    """Import one of our modules, even if another package of the same name comes first on `sys.path`.

    Raises:
        ImportError: If another package of the same name has already been imported.
    """
    package = path.partition(".")[0]
    if (known := sys.modules.get(package)) is not None:
        place = Path(next(iter(getattr(known, "__path__", [known.__file__])))).resolve()
        if place != _HOME / package:
            raise ImportError(f"{place} has the same name as a package of lmi-handler and has been imported: rename it")
        return importlib.import_module(path)
    found = PathFinder.find_spec(package)
    hidden = [Path(place).resolve() for place in (found and found.submodule_search_locations) or ()]
    if hidden and _HOME / package not in hidden:
        warnings.warn(f"{hidden[0]} cannot be imported: lmi-handler also has a package {package!r}", stacklevel=3)
    sys.path.insert(0, str(_HOME))
    try:
        return importlib.import_module(path)
    finally:
        sys.path.remove(str(_HOME))
