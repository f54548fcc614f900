"""LoRA adapters of SGLang's servers, which load them when they start, or by /load_lora_adapter.

A request contains the name of an adapter at its server. Adapters that this engine loads get names that depend only on
their paths, so no name ever stands for other weights, and every engine in front of a server uses the same names.

Sources: SGLang 0.5.23 (sglang/srt/managers/tokenizer_control_mixin.py, managers/tokenizer_manager.py,
lora/lora_manager.py, lora/lora_registry.py, utils/auth.py), and 0.5.2 to 0.5.10 for what has changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path, PurePath, PurePosixPath
from typing import NamedTuple

from handler.engines.base import EngineConfig
from handler.engines.openai.client import HttpModel

_WITHOUT_FILES = "__tensor__"  # the path of adapters that the server has received as tensors
_IS_LOADED = ("already loaded", "already exists")
_IS_UNKNOWN = ("has never been loaded", "are not loaded", "LoRA is not enabled")


class ServerAdapters:
    """The adapters of one server, as far as this engine knows them.

    SGLang does not list the adapters that --max-loaded-loras has moved out of its memory, but loads them again for a
    request. Therefore, a list only adds adapters.
    """

    def __init__(self) -> None:
        self._paths: dict[str, str] = {}  # by name

    def add(self, name: str, path: str) -> None:
        self._paths[name] = path

    def add_listed(self, models: Iterable[HttpModel]) -> None:
        """Add the adapters in a server's list of models."""
        for model in models:
            if model.is_adapter:
                self.add(model.name, model.path)

    def forget(self, name: str) -> None:
        self._paths.pop(name, None)

    def find(self, path: str) -> str | None:
        """Return the name of an adapter at the server. `path` may also be this name."""
        if path in self._paths:
            return path
        same = (name for name, own in self._paths.items() if own and PurePath(own) == PurePath(path))
        return None if path == _WITHOUT_FILES else next(same, None)

    def paths_by_name(self) -> tuple[tuple[str, str], ...]:
        """Return names for the adapters that others have loaded, each with its path, or its name if it has no files.

        An adapter of --lora-paths without a name has its path as its name; here it gets the name of its directory.
        """
        paths: dict[str, str] = {}
        for name, path in self._paths.items():
            if name != loaded_name(path):
                paths.setdefault(PurePath(name).name, name if path in ("", _WITHOUT_FILES) else path)
        return tuple(paths.items())


class AllowedPaths(NamedTuple):
    """The paths from which a server may be told to load adapters. It would download other paths from the hub.

    Attributes:
        modules: paths that the operator has listed.
        root: directory on the servers from which clients may register adapters; None if they may not.
    """

    modules: frozenset[str]
    root: str | None

    @classmethod
    def of(cls, config: EngineConfig) -> AllowedPaths:
        options = config.engine_options
        modules = options.get("lora_modules") or {}
        return cls(frozenset(str(Path(path)) for path in modules.values()), options.get("adapters_root"))

    def __contains__(self, path: object) -> bool:
        if path in self.modules:
            return True
        pure_path = PurePosixPath(str(path))
        is_plain = pure_path.is_absolute() and ".." not in pure_path.parts
        return self.root is not None and is_plain and PurePosixPath(self.root) in pure_path.parents


def loaded_name(path: str) -> str:
    """Return the name under which this engine makes servers load an adapter."""
    digest = hashlib.sha256(path.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{PurePosixPath(path).name[:64]}-{digest[:12]}"


def is_loaded(words: str) -> bool:
    """Return whether a server refuses to load an adapter because it has loaded it already."""
    return any(part in words for part in _IS_LOADED)


def is_unknown(words: str) -> bool:
    """Return whether a server refuses a request because it does not know the adapter."""
    return any(part in words for part in _IS_UNKNOWN)
