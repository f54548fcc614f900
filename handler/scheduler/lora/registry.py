"""The LoRA adapters that there are, by name and by number; loading them in an engine is the hosts' business."""

from __future__ import annotations

import itertools
import json
import math
import re
import stat
import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from handler.core.errors import AdapterFailed, BadRequest, ConfigError, Conflict, NoRoom, NotFound, ServingError
from handler.core.values import Adapter

_NAME = re.compile(r"(?!\.+$)[A-Za-z0-9._:@+=~-]{1,256}")
"""A name goes into paths, headers and logs: nothing that would have to be escaped there."""

_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
"""What PEFT's `save_pretrained` writes beside adapter_config.json."""

_MAX_CONFIG = 1 << 20  # bytes of an adapter_config.json; PEFT writes about one thousand


class Registered(NamedTuple):
    """An adapter that requests may name.

    Attributes:
        adapter: its `id` is the engine's: another one after each update.
        number: what clients may call it by: 1, 2, ... in the order in which registering succeeded. Updates keep it,
            and no other adapter ever gets it.
        preload: it was loaded in the engine when it was registered.
    """

    adapter: Adapter
    number: int
    preload: bool = True


class AdapterRegistry:
    """Names, numbers and paths, in the order of registering.

    A change takes two steps, between which an engine may try the adapter: `begin` or `begin_update` reserves the name
    and makes the new Adapter, `settle` lets requests find it, `abandon` forgets it. `find`, `get` and `by_number` may
    be called on any thread, the others on one at a time.

    Args:
        most: adapters at once; None is any number.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self._ids = itertools.count(1)
        self._numbers = itertools.count(1)
        self._by_name: dict[str, Registered] = {}
        self._by_number: dict[int, Registered] = {}
        self._changing: dict[str, Adapter] = {}

    def find(self, name: str) -> Adapter | None:
        found = self._by_name.get(name)
        return found.adapter if found is not None else None

    def by_number(self, number: int) -> Adapter | None:
        found = self._by_number.get(number)
        return found.adapter if found is not None else None

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[Registered]:
        return iter(list(self._by_name.values()))

    def get(self, name: str) -> Registered:
        """
        Raises:
            NotFound: there is none of that name.
        """
        found = self._by_name.get(name)
        if found is None:
            raise NotFound(f"The adapter {name} was not found")
        return found

    def begin(self, name: str, path: Path) -> Adapter:
        """Reserve the name of a new adapter.

        Raises:
            BadRequest: nothing may be called that.
            Conflict: the name is taken.
            NoRoom: there are as many as there may be.
        """
        check_name(name)
        self._check_unchanging(name)
        if name in self._by_name:
            raise Conflict(f"The adapter {name} already exists")
        coming = sum(other not in self._by_name for other in self._changing)
        if self._most is not None and len(self._by_name) + coming >= self._most:
            raise NoRoom(f"there is room for {self._most} adapters (SAGEMAKER_MAX_NUMBER_OF_ADAPTERS_IN_MEMORY)")
        return self._reserve(name, path)

    def begin_update(self, name: str, path: Path) -> Adapter:
        """Reserve the name of an adapter that others will take the place of; until then it stays.

        Raises:
            NotFound: there is none of that name.
            Conflict: another call is changing it.
        """
        self.get(name)
        self._check_unchanging(name)
        return self._reserve(name, path)

    def settle(self, adapter: Adapter, *, preload: bool = True) -> Adapter | None:
        """Let requests find what was begun; returns the adapter that it takes the place of."""
        del self._changing[adapter.name]
        earlier = self._by_name.get(adapter.name)
        number = next(self._numbers) if earlier is None else earlier.number
        self._by_name[adapter.name] = self._by_number[number] = Registered(adapter, number, preload)
        return earlier.adapter if earlier is not None else None

    def abandon(self, adapter: Adapter) -> None:
        """Forget what was begun."""
        del self._changing[adapter.name]

    def remove(self, name: str) -> Adapter:
        """Let no request find it any more.

        Raises:
            NotFound: there is none of that name.
            Conflict: another call is changing it.
        """
        self._check_unchanging(name)
        found = self.get(name)
        del self._by_name[name], self._by_number[found.number]
        return found.adapter

    def _reserve(self, name: str, path: Path) -> Adapter:
        adapter = Adapter(name, next(self._ids), str(path))
        self._changing[name] = adapter
        return adapter

    def _check_unchanging(self, name: str) -> None:
        if name in self._changing:
            raise Conflict(f"The adapter {name} is being changed by another call")


class AdapterHome(NamedTuple):
    """What a model brings about adapters.

    Attributes:
        registry: nothing in it yet.
        base: where a relative path to an adapter begins.
        at_start: the adapters that lie beside the model, by name.
    """

    registry: AdapterRegistry
    base: Path | None = None
    at_start: Mapping[str, Path] = MappingProxyType({})


def check_name(name: str) -> None:
    """
    Raises:
        BadRequest: nothing may be called that.
    """
    if not _NAME.fullmatch(name):
        raise BadRequest(f"name={name!r}: must be 1 to 256 letters, digits and . _ : @ + = ~ -, and not dots alone")


def adapter_path(src: str, base: Path | None) -> Path:
    """The directory that `src` names; a relative path is one below `base`.

    Raises:
        BadRequest: it names nothing on this machine.
        AdapterFailed: there is no adapter as PEFT writes them: adapter_config.json and the weights.
    """
    directory = _local(src, base)
    try:
        if not directory.is_dir():
            raise AdapterFailed(f"src={src}: there is no such directory")
        _check_config(src, directory / "adapter_config.json")
        weights = [file for name in _WEIGHTS if (file := directory / name).exists()]
        if not weights:
            raise AdapterFailed(f"src={src}: holds neither {' nor '.join(_WEIGHTS)}")
        for file in weights:  # all: which of them an engine opens is its own choice
            _check_regular(src, file)
        if (directory / "model.py").exists():
            raise AdapterFailed(f"src={src}: holds a model.py; formatters of an adapter's own are not supported")
    except OSError as error:
        raise AdapterFailed(f"src={src}: cannot be read: {error.strerror or error}") from None
    return directory


def _local(src: str, base: Path | None) -> Path:
    if not src.isprintable():
        raise BadRequest(f"src={src!r}: must be a path")
    scheme, colon, _ = src.partition(":")
    if colon and re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*", scheme):
        url = urllib.parse.urlsplit(src)
        if url.scheme != "file" or url.netloc not in ("", "localhost") or url.query or url.fragment:
            raise BadRequest(f"src={src}: adapters are read from directories of this machine: a path, or file:///path")
        path = Path(urllib.parse.unquote(url.path))
        if not path.is_absolute():
            raise BadRequest(f"src={src}: a file URL has an absolute path: file:///path")
        return path
    path = Path(src)
    if path.is_absolute():
        return path
    if base is None:
        raise BadRequest(f"src={src}: must be an absolute path: the model has no directory that it could lie in")
    return base / path


def _check_config(src: str, file: Path) -> None:
    try:
        _check_regular(src, file)
        with file.open("rb") as opened:
            content = opened.read(_MAX_CONFIG + 1)
        if len(content) > _MAX_CONFIG:
            raise AdapterFailed(f"src={src}: {file.name} has more than {_MAX_CONFIG} bytes")
        config = json.loads(content, parse_constant=_finite, parse_float=_finite)
    except FileNotFoundError:
        raise AdapterFailed(f"src={src}: holds no {file.name}") from None
    except RecursionError:
        raise AdapterFailed(f"src={src}: {file.name} is nested too deeply") from None
    except ValueError as error:
        raise AdapterFailed(f"src={src}: {file.name} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise AdapterFailed(f"src={src}: {file.name} is not that of a LoRA adapter: no JSON object")
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        told = repr(kind[:80]) if isinstance(kind, str) else "no string"  # it may be anything, at any depth
        raise AdapterFailed(f"src={src}: {file.name} is not that of a LoRA adapter (peft_type: {told})")


def _check_regular(src: str, file: Path) -> None:
    """Of what is no regular file, or no link to one, who reads may never see the end.

    Raises:
        AdapterFailed: it is not.
        OSError: it is not there, or cannot be looked at.
    """
    if not stat.S_ISREG(file.stat().st_mode):
        raise AdapterFailed(f"src={src}: {file.name} is no regular file")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is no number in JSON")
    return value


def adapters_of(directory: Path) -> dict[str, Path]:
    """The adapters that lie in a directory, each in a directory of its own, by name; what begins with a dot is not one.

    Raises:
        ConfigError: one of them cannot be used; names it.
    """
    found = {}
    for path in sorted(directory.iterdir()):
        if path.is_dir() and not path.name.startswith("."):
            try:
                check_name(path.name)
                found[path.name] = adapter_path(str(path.absolute()), None)
            except ServingError as error:
                raise ConfigError(f"the adapter {path.name} cannot be used: {error.message}") from None
    return found
