"""Formatters of LoRA adapters' own: a model.py in an adapter's directory takes the place of the model's."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from handler.core.errors import AdapterFailed, ConfigError
from handler.core.values import Adapter
from handler.plugins.functions import Formatters, choose, find_formatters


def load_adapter_formatters(directory: Path, name: str) -> Formatters | None:
    """Run the model.py in an adapter's directory; return None without one.

    Args:
        name: of the adapter; that of the module follows from it, as in LMI.

    Raises:
        AdapterFailed: it cannot be used.
    """
    try:
        found = find_formatters(directory, module="ns_" + name.replace("-", "_").replace(".", "_"))
        formatters = Formatters(choose(found.inputs, None, "input"), choose(found.outputs, None, "output"))
    except (ConfigError, ValueError) as error:
        raise AdapterFailed(f"src={directory}: {error}") from None
    return formatters if formatters.input or formatters.output else None


class AdapterFormatters:
    """The formatters of registered adapters, by their directories. Thread-safe.

    Attributes:
        exist: some adapter has a formatter.
        read: some adapter has an input formatter.
    """

    def __init__(self) -> None:
        self._by_path: dict[str, Formatters] = {}
        self.exist = self.read = False

    def set(self, path: str, formatters: Formatters | None) -> Formatters | None:
        """Replace those of a directory; return the earlier ones."""
        earlier = self._by_path.pop(path, None)
        if formatters is not None:
            self._by_path[path] = formatters
        self._note()
        return earlier

    def keep(self, paths: Collection[str]) -> None:
        """Forget those of all other directories."""
        self._by_path = {path: one for path, one in self._by_path.items() if path in paths}
        self._note()

    def of(self, adapter: Adapter | None, base: Formatters) -> Formatters:
        """Return the formatters for a request: the adapter's, and the model's own where it has none."""
        own = None if adapter is None else self._by_path.get(adapter.path)
        if own is None:
            return base
        return base._replace(input=own.input or base.input, output=own.output or base.output)

    def _note(self) -> None:
        self.exist = bool(self._by_path)
        self.read = any(one.input is not None for one in self._by_path.values())
