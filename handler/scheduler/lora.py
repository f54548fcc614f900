"""LoRA adapters: one state machine, from the call that registers an adapter until the engine has dropped it.

    state       requests may name it   ends when
    loading     no, its name is taken  the engine has loaded it: registered; the load failed: forgotten
    registered  yes                    it is unregistered, or its update is registered: leaving
    leaving     no, but some still do  no request uses it any more: the engine drops it, forgotten

A restarted engine has no adapters. Requests carry theirs, and the engine loads them when it needs them.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import re
import stat
import urllib.parse
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from handler.core import text_files
from handler.core.errors import (
    AdapterFailed,
    BadRequest,
    ConfigError,
    Conflict,
    InvalidPayload,
    NoRoom,
    NotFound,
    ServingError,
    Unavailable,
)
from handler.core.values import Adapter, Request
from handler.engines.base import Output
from handler.scheduler.engine import SteppedEngine

log = logging.getLogger("handler.adapters")

_NAME = re.compile(r"(?!\.+$)[A-Za-z0-9._:@+=~-]{1,256}")
"""Names go into paths, headers and logs, so they contain no character that needs escaping."""

_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
"""Weight files that PEFT's `save_pretrained` writes next to adapter_config.json."""

_OF_MACOS = "__MACOSX"  # beside the files of an archive that macOS has packed
_MAX_CONFIG = 1 << 20  # bytes of an adapter_config.json; PEFT writes about one thousand


def check_name(name: str) -> None:
    """Check an adapter's name.

    Raises:
        BadRequest: the name has a character that is not allowed, or a wrong length.
    """
    if not _NAME.fullmatch(name):
        raise BadRequest(f"name={name!r}: must be 1 to 256 letters, digits and . _ : @ + = ~ -, and not only dots")


def adapter_path(src: str, base: Path | None) -> Path:
    """Find the directory that `src` names and check its files; a relative path begins at `base`.

    Raises:
        BadRequest: `src` is neither a path nor a file URL.
        AdapterFailed: the directory has no adapter_config.json or no weights, or one of them is broken.
    """
    directory = _local(src, base)
    try:
        if not directory.is_dir():
            raise AdapterFailed(f"src={src}: there is no such directory")
        _check_config(src, directory / "adapter_config.json")
        weights = [file for name in _WEIGHTS if (file := directory / name).exists()]
        if not weights:
            raise AdapterFailed(f"src={src}: contains neither {' nor '.join(_WEIGHTS)}")
        for file in weights:  # check all: each engine opens another one
            _check_regular(src, file)
    except OSError as error:
        raise AdapterFailed(f"src={src}: cannot be read: {error.strerror or error}") from None
    return directory


def _local(src: str, base: Path | None) -> Path:
    if not src.isprintable():
        raise BadRequest(f"src={src!r}: must be a path")
    scheme, colon, _ = src.partition(":")
    if colon and re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*", scheme):
        try:
            url = urllib.parse.urlsplit(src)
        except ValueError as error:
            raise BadRequest(f"src={src}: {error}") from None
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
        raise BadRequest(f"src={src}: must be an absolute path: the model has no directory to resolve it against")
    return base / path


def _check_config(src: str, file: Path) -> None:
    try:
        _check_regular(src, file)
        with file.open("rb") as stream:
            content = stream.read(_MAX_CONFIG + 1)
        if len(content) > _MAX_CONFIG:
            raise AdapterFailed(f"src={src}: {file.name} has more than {_MAX_CONFIG} bytes")
        config = json.loads(text_files.decode(content, mark=False), parse_constant=_finite, parse_float=_finite)
    except FileNotFoundError:
        raise AdapterFailed(f"src={src}: contains no {file.name}") from None
    except RecursionError:
        raise AdapterFailed(f"src={src}: {file.name} is nested too deeply") from None
    except ValueError as error:
        raise AdapterFailed(f"src={src}: {file.name} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise AdapterFailed(f"src={src}: {file.name} is not a LoRA adapter's: not a JSON object")
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        value = repr(kind[:80]) if isinstance(kind, str) else "no string"  # it may be anything, at any depth
        raise AdapterFailed(f"src={src}: {file.name} is not a LoRA adapter's (peft_type: {value})")


def _check_regular(src: str, file: Path) -> None:
    """Check that a file is regular: reading a FIFO or a device may never end.

    Raises:
        AdapterFailed: the file is not regular.
        OSError: the file is missing, or its status cannot be read.
    """
    if not stat.S_ISREG(file.stat().st_mode):
        raise AdapterFailed(f"src={src}: {file.name} is not a regular file")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is not a number in JSON")
    return value


def adapters_of(directory: Path) -> dict[str, Path]:
    """List the adapters in a directory by name: one subdirectory each, hidden ones left out.

    Raises:
        ConfigError: an adapter cannot be used; the message names it.
    """
    adapters = {}
    for path in sorted(directory.iterdir()):
        if path.is_dir() and not path.name.startswith(".") and path.name != _OF_MACOS:
            try:
                check_name(path.name)
                adapters[path.name] = adapter_path(str(path.absolute()), None)
            except ServingError as error:
                raise ConfigError(f"the adapter {path.name} cannot be used: {error.message}") from None
    return adapters


def named_adapters(named: Mapping[str, str], base: Path | None) -> dict[str, Path]:
    """Find adapters by name and path; a relative path begins at `base`.

    Raises:
        ConfigError: an adapter cannot be used; the message names it.
    """
    adapters = {}
    for name, path in named.items():
        try:
            check_name(name)
            adapters[name] = adapter_path(path, base)
        except ServingError as error:
            raise ConfigError(f"option.lora_modules: the adapter {name} cannot be used: {error.message}") from None
    return adapters


def adapters_in(homes: Iterable[Path]) -> dict[str, Path]:
    """List the adapters of several directories by name, sorted.

    Raises:
        ConfigError: two have the same name.
    """
    adapters: dict[str, Path] = {}
    for home in homes:
        for name, path in adapters_of(home).items():
            if (other := adapters.setdefault(name, path)).resolve() != path.resolve():
                raise ConfigError(f"the adapter {name} is in two places: {other} and {path}")
    return dict(sorted(adapters.items()))


class Registered(NamedTuple):
    """An adapter that requests may name.

    Attributes:
        adapter: the engine's; an update gives it a new `id`.
        number: the clients' number: 1, 2, ... in the order of success. Updates keep it; none is used again.
        preload: whether the engine loaded it when it was registered.
    """

    adapter: Adapter
    number: int
    preload: bool = True


Outcome = Registered | ServingError
"""Result of a change: the adapter that now has the name, or the reason why nothing has changed."""

Then = Callable[[Outcome], None]
"""Receives the outcome of a change."""

Change = Callable[[Then], None]
"""Starts a change."""


class _Command(NamedTuple):
    """A load or a drop that the engine has not answered yet; `then` is None for a drop."""

    adapter: Adapter
    then: Then | None


class AdapterRegistry:
    """The adapters of one model, in the order of registration.

    `find`, `by_number`, `get`, `check` and `path` may run on any thread, everything else on the batcher's.

    Args:
        limit: maximum number of adapters; None: no limit.
        base: directory where a relative `src` begins.
        unavailable: the reason why this server has no adapters; "" if it has.
    """

    def __init__(self, limit: int | None = None, base: Path | None = None, unavailable: str = "") -> None:
        self.base = base
        self._limit = limit
        self._unavailable = unavailable
        self._ids = itertools.count(1)
        self._numbers = itertools.count(1)
        self._by_name: dict[str, Registered] = {}
        self._by_number: dict[int, Registered] = {}
        self._loading: dict[str, Adapter] = {}
        self._leaving: dict[int, Adapter] = {}
        # A request that was read before its adapter left gets the successor, or is refused where there is none.
        self._successors: weakref.WeakKeyDictionary[Adapter, Adapter | None] = weakref.WeakKeyDictionary()
        self._commands: dict[int, _Command] = {}  # by the engine's key
        self._engine: SteppedEngine | None = None
        self._keys: Iterator[int] = itertools.count()
        self._requests: Callable[[], Iterable[Request]] = tuple

    def bind(self, engine: SteppedEngine, keys: Iterator[int], requests: Callable[[], Iterable[Request]]) -> None:
        """Set the engine; called once, by the batcher.

        Args:
            keys: gives unused keys of engine commands.
            requests: lists the requests that wait or run.
        """
        self._engine, self._keys, self._requests = engine, keys, requests

    # -- look-ups ------------------------------------------------------------------------------------------------

    def find(self, name: str) -> Adapter | None:
        entry = self._by_name.get(name)
        return entry.adapter if entry is not None else None

    def by_number(self, number: int) -> Adapter | None:
        entry = self._by_number.get(number)
        return entry.adapter if entry is not None else None

    def names(self) -> Sequence[str]:
        return [*self._by_name]

    def get(self, name: str) -> Registered:
        """Look up a name.

        Raises:
            NotFound: no adapter has it.
        """
        entry = self._by_name.get(name)
        if entry is None:
            raise NotFound(f"The adapter {name} was not found")
        return entry

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[Registered]:
        return iter(list(self._by_name.values()))

    def check(self) -> None:
        """Raise BadRequest if this server does not support adapters."""
        if self._unavailable:
            raise BadRequest(f"LoRA is not enabled: {self._unavailable}")

    def path(self, src: str) -> Path:
        """See `adapter_path`; reads files."""
        return adapter_path(src, self.base)

    # -- changes -------------------------------------------------------------------------------------------------

    def register(self, name: str, path: Path, then: Then, *, preload: bool = True) -> None:
        """Add an adapter; `then` gets the outcome, except for errors raised here.

        Raises:
            BadRequest: the name is not allowed, or this server has no adapters.
            Conflict: the name is taken, or another call is changing it.
            NoRoom: the limit is reached.
            Unavailable: the engine is not ready.
        """
        self.check()
        check_name(name)
        self._check_unchanging(name)
        if name in self._by_name:
            raise Conflict(f"The adapter {name} already exists")
        num_coming = sum(other not in self._by_name for other in self._loading)
        if self._limit is not None and len(self._by_name) + num_coming >= self._limit:
            raise NoRoom(f"there is room for {self._limit} adapters (SAGEMAKER_MAX_NUMBER_OF_ADAPTERS_IN_MEMORY)")
        self._load(name, path, preload, then)

    def update(self, name: str, then: Then, path: Path | None = None, preload: bool | None = None) -> None:
        """Replace an adapter, or reload changed weights from the same directory.

        Requests in the engine keep the earlier adapter, later ones get the new one.

        Args:
            path: by default the earlier adapter's.
            preload: by default the earlier adapter's.

        Raises:
            BadRequest, NotFound, Conflict, Unavailable.
        """
        self.check()
        earlier = self.get(name)
        self._check_unchanging(name)
        self._load(name, path or Path(earlier.adapter.path), earlier.preload if preload is None else preload, then)

    def unregister(self, name: str) -> None:
        """Hide an adapter from new requests; the engine drops it after the last request that uses it.

        Raises:
            BadRequest, NotFound, Conflict.
        """
        self.check()
        self._check_unchanging(name)
        entry = self.get(name)
        del self._by_name[name], self._by_number[entry.number]
        self._leave(entry.adapter, None)
        log.info("adapter %s unregistered", name)

    def _check_unchanging(self, name: str) -> None:
        if name in self._loading:
            raise Conflict(f"The adapter {name} is being changed by another call")

    def _load(self, name: str, path: Path, preload: bool, then: Then) -> None:
        adapter = Adapter(name, next(self._ids), str(path))
        if not preload:
            return then(self._enter(adapter, preload=False))
        if self._engine is None or not self._engine.ready:
            raise Unavailable("the engine is not ready: no adapter can be loaded")
        self._loading[name] = adapter
        self._send(_Command(adapter, then))

    def _enter(self, adapter: Adapter, *, preload: bool) -> Registered:
        """Register an adapter: new requests can name it."""
        earlier = self._by_name.get(adapter.name)
        number = next(self._numbers) if earlier is None else earlier.number
        entry = self._by_name[adapter.name] = self._by_number[number] = Registered(adapter, number, preload)
        if earlier is not None:
            self._leave(earlier.adapter, adapter)
        log.info("adapter %s (%d) from %s", adapter.name, number, adapter.path)
        return entry

    def _leave(self, adapter: Adapter, successor: Adapter | None) -> None:
        for earlier, other in list(self._successors.items()):
            if other == adapter:
                self._successors[earlier] = successor
        self._successors[adapter] = successor
        self._leaving[adapter.id] = adapter
        self.drop_unused()

    def _fail(self, command: _Command, error: ServingError) -> None:
        if command.then is not None:
            adapter = command.adapter
            del self._loading[adapter.name]
            log.warning("adapter %s from %s: %s", adapter.name, adapter.path, error.public)
            command.then(error)

    # -- the batcher's side --------------------------------------------------------------------------------------

    def current(self, request: Request) -> Request:
        """Return the request with the current version of its adapter, which may have been updated while it waited.

        Raises:
            InvalidPayload: its adapter was unregistered.
        """
        adapter = request.adapter
        if adapter is None or adapter not in self._successors:
            return request
        successor = self._successors[adapter]
        if successor is None:
            raise InvalidPayload(f"the adapter {adapter.name} was unregistered before the request began")
        return request._replace(adapter=successor)

    def take(self, output: Output) -> None:
        """Process the engine's answer to a load or a drop; ignore any other output."""
        command = self._commands.pop(output.key, None)
        if command is None:
            return
        adapter = command.adapter
        if output.error is None:
            if command.then is not None:
                del self._loading[adapter.name]
                command.then(self._enter(adapter, preload=True))
        elif command.then is None:
            log.warning("the engine could not drop the adapter %s: %s", adapter.name, output.detail or output.error)
        else:
            reason = f"the engine could not load the adapter {adapter.name}: {output.error}"
            self._fail(command, AdapterFailed(reason, detail=output.detail))

    def drop_unused(self) -> None:
        """Have the engine drop leaving adapters that no request uses."""
        for adapter in self._forget_unused():
            if self._engine is not None and self._engine.ready:  # a restarted engine never had it
                self._send(_Command(adapter, None))

    def lose_engine(self, error: ServingError) -> None:
        """End every load with `error`; the next engine loads only the adapters of waiting requests."""
        self._forget_unused()
        commands, self._commands = self._commands, {}
        for command in commands.values():
            self._fail(command, error)

    def _forget_unused(self) -> list[Adapter]:
        if not self._leaving:
            return []
        used = {request.adapter.id for request in self._requests() if request.adapter is not None}
        unused = [adapter for id, adapter in self._leaving.items() if id not in used]
        for adapter in unused:
            del self._leaving[adapter.id]
        return unused

    def _send(self, command: _Command) -> None:
        assert self._engine is not None
        key = next(self._keys)
        self._commands[key] = command
        self._engine.change_adapter(key, command.adapter, drop=command.then is None)


class AdapterHome(NamedTuple):
    """A model's registry, empty at first, and the adapters next to the model, by name."""

    registry: AdapterRegistry
    at_start: Mapping[str, Path] = MappingProxyType({})


# -- calls about adapters: the names that DJL's query and SageMaker's body share ---------------------------------------


_KNOWN = {"name", "src", "preload", "pin"}


class AdapterCall(NamedTuple):
    """A call about an adapter; a value is None if it is not given. `ignored` lists its unknown names."""

    name: str | None = None
    src: str | None = None
    preload: bool | None = None
    ignored: tuple[str, ...] = ()


def read_adapter_call(values: Mapping[str, Any], *, refuse_unknown: bool) -> AdapterCall:
    """Read a call: `name`, `src`, `preload`, `pin`.

    Raises:
        BadRequest: a value has a wrong type, a name is unknown, or `pin` is true.
    """
    ignored = tuple(name for name in values if name not in _KNOWN)
    if ignored and refuse_unknown:
        raise BadRequest(f"unknown parameter {ignored[0]!r}; known: name, src, preload, pin")
    if _boolean(values, "pin"):
        raise BadRequest("pin=true: no engine here can pin an adapter in memory")
    return AdapterCall(_text(values, "name"), _text(values, "src"), _boolean(values, "preload"), ignored)


def required(value: str | None, name: str) -> str:
    """Return a required value.

    Raises:
        BadRequest: it is missing.
    """
    if value is None:
        raise BadRequest(f"Parameter {name} is required.")
    return value


def _text(values: Mapping[str, Any], name: str) -> str | None:
    value = values.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise BadRequest(f"{name}={value!r}: must be a non-empty string")
    return value


def _boolean(values: Mapping[str, Any], name: str) -> bool | None:
    value = values.get(name)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise BadRequest(f"{name}={value!r}: must be true or false")
