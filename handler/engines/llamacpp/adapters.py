"""LoRA adapters of llama-server, which loads them only when it starts.

A request contains the scale of each adapter. Without scales, the server would apply those of its start. The engine
never runs requests for different adapters at once, because llama-server would let some of them wait in silence until
the others have ended.

Sources: llama.cpp b11434, tools/server/server-context.cpp (`launch_slot_with_task`, `can_batch_with`,
`get_available_slot`, `get_lora_adapters`) and common/arg.cpp (`parse_csv_row`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import orjson

from handler.config import gguf
from handler.core.errors import Problem, Problems
from handler.engines.base import EngineConfig
from handler.engines.openai.answer import shortened
from handler.engines.remote.servers import Failed, score

_DIRECTORY = "adapters"  # next to the model
_MODULES = "option.lora_modules"


class LoadedAdapter(NamedTuple):
    """An adapter that a server has loaded.

    Attributes:
        path: the path as the server knows it.
        scale: factor of the adapter.
        is_activated: whether only certain tokens in a prompt activate the adapter (aLoRA).
    """

    path: str
    scale: float
    is_activated: bool


class LoadedAdapters(tuple[LoadedAdapter, ...]):
    """The adapters of a server, indexed by the server's id."""

    __slots__ = ()

    @classmethod
    def read(cls, data: bytes) -> LoadedAdapters:
        """Read /lora-adapters. An older server without this route has no adapters.

        Raises:
            Failed: it cannot be read.
        """
        try:
            entries = orjson.loads(data or b"[]")
            if [entry["id"] for entry in entries] != [*range(len(entries))]:
                raise ValueError("the ids are not consecutive")
            return cls(map(_adapter, entries))
        except (ValueError, TypeError, KeyError) as error:
            detail = f"its /lora-adapters cannot be read: {error!r}: {shortened(data)}"
            raise Failed("does not describe its adapters", detail) from None

    def find(self, path: str) -> int | None:
        """Return the id of an adapter by its path, or by its file name if no other adapter has this name."""
        pure_path, paths = PurePath(path), [PurePath(adapter.path) for adapter in self]
        for names in (paths, [PurePath(own.name) for own in paths]):
            if names.count(pure_path) == 1:
                return names.index(pure_path)
        return None

    def scales(self, used: int | None) -> list[Mapping[str, Any]]:
        """Return the scales in a request that uses an adapter, or the model itself if `used` is None."""
        return [{"id": id, "scale": adapter.scale if id == used else 0.0} for id, adapter in enumerate(self)]

    def paths_by_name(self) -> tuple[tuple[str, str], ...]:
        """Return names for the adapters, each with the path: the names of their files, without the suffix."""
        names: dict[str, str] = {}
        for adapter in self:
            names.setdefault(PurePath(adapter.path).stem, adapter.path)
        return tuple(names.items())

    @property
    def has_activated(self) -> bool:
        return any(adapter.is_activated for adapter in self)


def _adapter(entry: Mapping[str, Any]) -> LoadedAdapter:
    path = entry["path"]
    if not isinstance(path, str):
        raise ValueError("a path is not a string")
    # With a scale of 0, the server loads an adapter without applying it.
    return LoadedAdapter(path, score(entry["scale"]) or 1.0, bool(entry.get("alora_invocation_tokens")))


def files_of(config: EngineConfig) -> dict[str, Path]:
    """Return the adapters that a server gets from the engine: those next to the model, and of option.lora_modules."""
    if not config.engine_options.get("enable_lora"):
        return {}
    adapters_by_name = {}
    if config.weights is not None:
        directory = config.weights.absolute().parent / _DIRECTORY
        adapters_by_name = {
            path.stem: path for path in sorted(directory.glob("*.gguf")) if not path.name.startswith(".")
        }
    modules = config.engine_options.get("lora_modules") or {}
    return {**adapters_by_name, **{name: Path(path).absolute() for name, path in modules.items()}}


def check_files(config: EngineConfig) -> None:
    """Raise ConfigError if an adapter file is missing or broken."""
    problems = Problems()
    for name, path in files_of(config).items():
        try:
            kind = gguf.contents(path)[0]
            if kind != "adapter":
                raise ValueError(f"{path} is not an adapter, but a {kind}")
        except (OSError, ValueError) as error:
            problems.append(Problem("", _MODULES, f"the adapter {name} cannot be used: {error}"))
    problems.check()


def flags(config: EngineConfig) -> Sequence[str]:
    """Return the flags with which a server loads the adapters.

    Its cache of earlier prompts is off: it ignores which adapter has computed a prompt.

    Raises:
        ConfigError: a file is missing or broken.
    """
    check_files(config)
    paths = dict.fromkeys(str(path) for path in files_of(config).values())
    if not paths:
        return ()
    quoted = [path.replace('"', '""') for path in paths]
    return ("--lora", ",".join(f'"{path}"' for path in quoted), "--lora-init-without-apply", "--cache-ram", "0")
