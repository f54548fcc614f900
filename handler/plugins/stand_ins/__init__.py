"""Stand-ins for packages that user files import but that may not be installed. They contain only a few modules."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from handler.core.user_functions import imports

Modules = Mapping[str, Mapping[str, Any]]
"""Maps the full name of each module to the contents of the module, by name."""


class StandIn(MetaPathFinder, Loader):
    """Import hook that provides the modules of one package.

    Args:
        modules: the modules to provide.
        first: whether the stand-in replaces an installed package. Otherwise, it is used only if the package is not
            installed.
    """

    def __init__(self, modules: Modules, *, first: bool = False) -> None:
        self.modules = modules
        self._first = first
        self.package = next(iter(modules)).partition(".")[0]

    def install(self) -> None:
        """Add the stand-in to Python's finders. It remains there, because functions may import from it when called."""
        if self not in sys.meta_path and self._is_needed():
            sys.meta_path.insert(0 if self._first else len(sys.meta_path), self)

    def uninstall(self) -> None:
        """Remove the stand-in from Python's finders. Modules that have been imported remain usable."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        for name in self.modules:
            if name in sys.modules and sys.modules[name].__loader__ is self:
                del sys.modules[name]

    def lacking(self, tree: ast.Module) -> Iterator[tuple[int, str]]:
        """Yield the line and the full name of each import that the stand-in does not provide.

        If the package itself is installed and used, nothing is yielded.
        """
        if not self._is_needed():
            return
        for line, module, name in imports(ast.walk(tree)):
            if module.partition(".")[0] == self.package and not self._has(module, name):
                yield line, f"{module}.{name}" if name else module

    def _is_needed(self) -> bool:
        module = sys.modules.get(self.package)
        if module is not None:
            return isinstance(module.__loader__, StandIn)
        return self._first or PathFinder.find_spec(self.package) is None

    def _has(self, module: str, name: str) -> bool:
        if name in ("", "*"):
            return module in self.modules
        return name in self.modules.get(module, {}) or f"{module}.{name}" in self.modules

    # -- the methods that Python's import system calls -----------------------------------------------------------

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if fullname not in self.modules:
            return None
        is_package = any(name.startswith(f"{fullname}.") for name in self.modules)
        return ModuleSpec(fullname, self, origin="stand-in", is_package=is_package)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(self.modules[module.__name__])
