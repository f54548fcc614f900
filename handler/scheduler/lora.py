"""LoRA adapters of a model, from their registration until the engine has dropped them.

    state       new requests may name it      next state
    loading     no, but its name is reserved  registered when the engine has loaded it; removed if the load failed
    registered  yes                           leaving when it is unregistered, or when its update is registered
    leaving     no, older requests use it     removed from the engine when no request uses it any more

A restarted engine has no adapters. Each request contains its adapter, so that the engine can load the adapter if it is
missing.
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
"""Pattern for allowed names. Names appear in paths, headers and logs, so they must not contain characters that need
escaping.
"""

_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
"""Weight files that PEFT's `save_pretrained` writes next to adapter_config.json."""

_OF_MACOS = "__MACOSX"  # directory that macOS adds to archives
MAX_CONFIG = 1 << 20  # maximum size of an adapter_config.json, in bytes; PEFT writes about one thousand


def is_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def check_name(name: str) -> None:
    """Check an adapter's name.

    Raises:
        BadRequest: the name is empty, too long or only dots, or contains a character that is not allowed.
    """
    if not is_name(name):
        raise BadRequest(
            f"={name!r}: must be 1 to 256 letters, digits and . _ : @ + = ~ -, and not only dots", field="name"
        )


def adapter_path(src: str, base: Path | None) -> Path:
    """Return the adapter's directory after checking its files. A relative path is resolved against `base`.

    Raises:
        BadRequest: `src` is neither a path nor a file URL, or is a relative path and there is no `base`.
        AdapterFailed: the directory, its adapter_config.json or its weights are missing or cannot be used.
    """
    directory = _local(src, base)
    try:
        if not directory.is_dir():
            raise AdapterFailed(f"={src}: there is no such directory", field="src")
        _check_config(src, directory / "adapter_config.json")
        weights = [file for name in _WEIGHTS if (file := directory / name).exists()]
        if not weights:
            raise AdapterFailed(f"={src}: contains neither {' nor '.join(_WEIGHTS)}", field="src")
        for file in weights:  # check all of them, since engines differ in which one they open
            _check_regular(src, file)
    except OSError as error:
        raise AdapterFailed(f"={src}: cannot be read: {error.strerror or error}", field="src") from None
    return directory


def _local(src: str, base: Path | None) -> Path:
    if not src.isprintable():
        raise BadRequest(f"={src!r}: must be a path of printable characters", field="src")
    scheme, colon, _ = src.partition(":")
    if colon and re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*", scheme):
        try:
            url = urllib.parse.urlsplit(src)
        except ValueError as error:
            raise BadRequest(f"={src}: {error}", field="src") from None
        if url.scheme != "file" or url.netloc not in ("", "localhost") or url.query or url.fragment:
            raise BadRequest(f"={src}: must be a directory on this machine, as a path or as file:///path", field="src")
        path = Path(urllib.parse.unquote(url.path))
        if not path.is_absolute():
            raise BadRequest(f"={src}: the path in a file URL must be absolute, as in file:///path", field="src")
        return path
    path = Path(src)
    if path.is_absolute():
        return path
    if base is None:
        raise BadRequest(
            f"={src}: must be an absolute path: the model has no directory to resolve it against", field="src"
        )
    return base / path


def _check_config(src: str, file: Path) -> None:
    try:
        _check_regular(src, file)
        with file.open("rb") as stream:
            content = stream.read(MAX_CONFIG + 1)
        if len(content) > MAX_CONFIG:
            raise AdapterFailed(f"={src}: {file.name} has more than {MAX_CONFIG} bytes", field="src")
        config = json.loads(text_files.decode(content, mark=False), parse_constant=_finite, parse_float=_finite)
    except FileNotFoundError:
        raise AdapterFailed(f"={src}: contains no {file.name}", field="src") from None
    except RecursionError:
        raise AdapterFailed(f"={src}: {file.name} is nested too deeply", field="src") from None
    except ValueError as error:
        raise AdapterFailed(f"={src}: {file.name} is not JSON: {error}", field="src") from None
    if not isinstance(config, dict):
        raise AdapterFailed(
            f"={src}: {file.name} does not describe a LoRA adapter: it is not a JSON object", field="src"
        )
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        value = repr(kind[:80]) if isinstance(kind, str) else "not a string"  # its repr may have any length
        raise AdapterFailed(f"={src}: {file.name} does not describe a LoRA adapter (peft_type: {value})", field="src")


def _check_regular(src: str, file: Path) -> None:
    """Check that a file is a regular file, because reading a FIFO or a device may never end.

    Raises:
        AdapterFailed: the file is not a regular file.
        OSError: the file is missing, or its status cannot be read.
    """
    if not stat.S_ISREG(file.stat().st_mode):
        raise AdapterFailed(f"={src}: {file.name} is not a regular file", field="src")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is not a valid JSON number")
    return value


def adapters_of(directory: Path) -> dict[str, Path]:
    """Return the adapters in the subdirectories of a directory, by name. Skip hidden directories and `__MACOSX`.

    Raises:
        ConfigError: an adapter cannot be used; the message names the adapter.
    """
    paths = (path for path in sorted(directory.iterdir()) if path.is_dir() and not path.name.startswith("."))
    own = {path.name: str(path.absolute()) for path in paths if path.name != _OF_MACOS}
    return named_adapters(own, None)


def named_adapters(paths: Mapping[str, str], base: Path | None, option: str = "") -> dict[str, Path]:
    """Return the directories of adapters by name, after checking them. Relative paths are resolved against `base`.

    Args:
        option: name of the option that lists the adapters, or "" if they come from a directory.

    Raises:
        ConfigError: an adapter cannot be used; the message names the adapter.
    """
    adapters = {}
    for name, path in paths.items():
        try:
            check_name(name)
            adapters[name] = adapter_path(path, base)
        except ServingError as error:
            where = option and f"{option}: "
            raise ConfigError(f"{where}the adapter {name} cannot be used: {error.message}") from None
    return adapters


def files_by_name(paths: Mapping[str, str], option: str) -> dict[str, Path]:
    """Return the files of adapters by name, which only the engine can check.

    Args:
        option: name of the option that lists the adapters.

    Raises:
        ConfigError: a name is not allowed.
    """
    try:
        for name in paths:
            check_name(name)
    except ServingError as error:
        raise ConfigError(f"{option}: {error.message}") from None
    return {name: Path(path) for name, path in paths.items()}


def adapters_in(homes: Iterable[Path]) -> dict[str, Path]:
    """Return the adapters in several directories, sorted by name.

    Raises:
        ConfigError: two adapters have the same name, or an adapter cannot be used.
    """
    adapters: dict[str, Path] = {}
    for home in homes:
        for name, path in adapters_of(home).items():
            if (other := adapters.setdefault(name, path)).resolve() != path.resolve():
                raise ConfigError(f"the adapter {name} exists in two directories: {other} and {path}")
    return dict(sorted(adapters.items()))


class Registered(NamedTuple):
    """A registered adapter, which requests may name.

    Attributes:
        adapter: adapter that the engine loads. Each update has a new `id`.
        number: number that clients see: 1, 2, ... in order of registration. It does not change when the adapter is
            updated, and is never reused.
        preload: whether registering it included loading it, which updates then do too.
    """

    adapter: Adapter
    number: int
    preload: bool = True


Outcome = Registered | ServingError
"""Result of a change: the adapter that is now registered under the name, or the error if nothing has changed."""

Then = Callable[[Outcome], None]
"""Callback for the outcome of a change."""

Change = Callable[[Then], None]
"""Function that starts a change and calls its argument with the outcome."""


class _Command(NamedTuple):
    """A command to which the engine has not replied yet: a load, or a drop if `then` is None."""

    adapter: Adapter
    then: Then | None


class _Link(NamedTuple):
    """The connection of a registry to its engine (see `AdapterRegistry.bind`)."""

    engine: SteppedEngine
    keys: Iterator[int]
    requests: Callable[[], Iterable[Request]]


class AdapterRegistry:
    """The adapters of a model, in order of registration.

    `find`, `by_number`, `get` and `check` may be called on any thread, all other methods only on the batcher's thread.

    Args:
        limit: maximum number of adapters, or None for no limit.
        base: directory against which a relative `src` is resolved.
        unavailable: reason why this server does not support adapters; "" if it supports them.

    Attributes:
        next_number: number of the next adapter to be registered.
    """

    def __init__(self, limit: int | None = None, base: Path | None = None, unavailable: str = "") -> None:
        self.base = base
        self._limit = limit
        self._unavailable = unavailable
        self._ids = itertools.count(1)
        self.next_number = 1
        self._by_name: dict[str, Registered] = {}
        self._by_number: dict[int, Registered] = {}
        self._loading: dict[str, Adapter] = {}
        self.leaving: dict[int, Adapter] = {}
        # A request that was read before its adapter was replaced gets the successor. If there is none, it is refused.
        self._successors: weakref.WeakKeyDictionary[Adapter, Adapter | None] = weakref.WeakKeyDictionary()
        self._commands: dict[int, _Command] = {}  # by the engine's key
        self._link: _Link | None = None

    def bind(self, engine: SteppedEngine, keys: Iterator[int], requests: Callable[[], Iterable[Request]]) -> None:
        """Connect the registry to the engine. The batcher calls this once.

        Args:
            keys: unused keys for engine commands.
            requests: function that returns all waiting and running requests.
        """
        self._link = _Link(engine, keys, requests)

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
        """Return the adapter with a name.

        Raises:
            NotFound: no adapter has this name.
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

    # -- changes -------------------------------------------------------------------------------------------------

    def register(self, name: str, path: Path, then: Then, *, preload: bool = True) -> None:
        """Register an adapter. `then` is called with the outcome unless this method raises an error.

        Raises:
            BadRequest: the name is not allowed, or this server does not support adapters.
            Conflict: the name is already in use, or another call is changing its adapter.
            NoRoom: the maximum number of adapters is reached.
            Unavailable: the engine must load the adapter now, but is not ready.
        """
        self.check()
        check_name(name)
        self._check_unchanging(name)
        if name in self._by_name:
            raise Conflict(f"The adapter {name} already exists")
        num_coming = sum(other not in self._by_name for other in self._loading)
        if self._limit is not None and len(self._by_name) + num_coming + len(self.leaving) >= self._limit:
            raise NoRoom(f"the limit of {self._limit} adapters is reached (SAGEMAKER_MAX_NUMBER_OF_ADAPTERS_IN_MEMORY)")
        self._load(name, path, preload, then)

    def update(self, name: str, then: Then, path: Path | None = None, preload: bool | None = None) -> None:
        """Replace an adapter, or reload changed weights from the same directory.

        Waiting and running requests keep the earlier version of the adapter, and later requests use the new version.

        Args:
            path: directory of the new version; defaults to the directory of the earlier version.
            preload: whether the engine loads the new version now; defaults to the setting of the earlier version.

        Raises:
            BadRequest: this server does not support adapters.
            NotFound: no adapter has this name.
            Conflict: another call is changing the adapter.
            Unavailable: the engine must load the new version now, but is not ready.
        """
        self.check()
        earlier = self.get(name)
        self._check_unchanging(name)
        self._load(name, path or Path(earlier.adapter.path), earlier.preload if preload is None else preload, then)

    def unregister(self, name: str) -> None:
        """Hide an adapter from new requests. The engine drops it after the last request that uses it.

        Raises:
            BadRequest: this server does not support adapters.
            NotFound: no adapter has this name.
            Conflict: another call is changing the adapter.
        """
        self.check()
        self._check_unchanging(name)
        entry = self.get(name)
        del self._by_name[name]
        self._free_number(entry)
        self._leave(entry.adapter, None)
        log.info("adapter %s unregistered", name)

    def take_over(self, name: str, path: Path, then: Then, *, number: int, preload: bool) -> None:
        """Register an adapter, or its new version, that another process serving this model has registered.

        The engine loads it for its first request.
        """
        adapter = Adapter(name, next(self._ids), str(path))
        then(self._enter(adapter, preload=preload, number=number))

    def _free_number(self, entry: Registered) -> None:
        """Forget the number of an adapter, unless one that was taken over has it now."""
        if self._by_number.get(entry.number) is entry:
            del self._by_number[entry.number]

    def _check_unchanging(self, name: str) -> None:
        if name in self._loading:
            raise Conflict(f"The adapter {name} is being changed by another call")

    def _load(self, name: str, path: Path, preload: bool, then: Then) -> None:
        adapter = Adapter(name, next(self._ids), str(path))
        if not preload:
            return then(self._enter(adapter, preload=False))
        if self._link is None or not self._link.engine.ready:
            raise Unavailable("the engine is not ready: no adapter can be loaded")
        self._loading[name] = adapter
        self._send(self._link, _Command(adapter, then))

    def _enter(self, adapter: Adapter, *, preload: bool, number: int | None = None) -> Registered:
        """Make an adapter, or its new version, available to new requests. By default, a new adapter has a new number,
        and a new version the number of the earlier one.
        """
        earlier = self._by_name.get(adapter.name)
        if number is None:
            number = self.next_number if earlier is None else earlier.number
        self.next_number = max(self.next_number, number + 1)
        if earlier is not None:
            self._free_number(earlier)
        entry = self._by_name[adapter.name] = self._by_number[number] = Registered(adapter, number, preload)
        if earlier is not None:
            self._leave(earlier.adapter, adapter)
        log.info("adapter %s (number %d) registered from %s", adapter.name, number, adapter.path)
        return entry

    def _leave(self, adapter: Adapter, successor: Adapter | None) -> None:
        for earlier, other in list(self._successors.items()):
            if other == adapter:
                self._successors[earlier] = successor
        self._successors[adapter] = successor
        self.leaving[adapter.id] = adapter
        self.drop_unused()

    def _fail(self, command: _Command, error: ServingError) -> None:
        if command.then is not None:
            adapter = command.adapter
            del self._loading[adapter.name]
            log.warning("cannot load the adapter %s from %s: %s", adapter.name, adapter.path, error.public)
            command.then(error)

    # -- calls of the batcher ------------------------------------------------------------------------------------

    def current(self, adapter: Adapter) -> Adapter:
        """Return the current version of a request's adapter, which may have been updated in the meantime.

        Raises:
            InvalidPayload: the adapter was unregistered.
        """
        successor = self._successors.get(adapter, adapter)
        if successor is None:
            raise InvalidPayload(f"the adapter {adapter.name} was unregistered before the request started")
        return successor

    def take(self, output: Output) -> None:
        """Process the engine's response to a load or drop command. Any other output is ignored."""
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
        """Drop leaving adapters from the engine if no request uses them any more."""
        for adapter in self._forget_unused():
            if self._link is not None and self._link.engine.ready:  # an engine that restarts has no adapters to drop
                self._send(self._link, _Command(adapter, None))

    def lose_engine(self, error: ServingError) -> None:
        """Fail all pending loads with `error`. The next engine loads adapters only when a request needs them."""
        self._forget_unused()
        commands, self._commands = self._commands, {}
        for command in commands.values():
            self._fail(command, error)

    def _forget_unused(self) -> list[Adapter]:
        requests = self._link.requests() if self._link is not None else ()
        used = {request.adapter.id for request in requests if request.adapter is not None}
        unused = [adapter for id, adapter in self.leaving.items() if id not in used]
        for adapter in unused:
            del self.leaving[adapter.id]
        return unused

    def _send(self, link: _Link, command: _Command) -> None:
        key = next(link.keys)
        self._commands[key] = command
        link.engine.change_adapter(key, command.adapter, drop=command.then is None)


class AdapterRoots(NamedTuple):
    """The directories from which clients may register adapters.

    Attributes:
        own: directories of the model, whose code the server may run.
        others: further directories.
        runs_code: whether the server also runs code from `others`.
    """

    own: Sequence[Path] = ()
    others: Sequence[Path] = ()
    runs_code: bool = False

    def check(self, src: str, base: Path | None) -> None:
        """Check the directory of an adapter without reading it. `src` and `base` are those of `adapter_path`.

        Raises:
            BadRequest: it is in none of the directories.
        """
        if not _is_below(_local(src, base), (*self.own, *self.others)):
            raise BadRequest(
                f"={src}: adapters can be registered only from the model's directory and from option.adapters_root",
                field="src",
            )

    def allow_code(self, directory: Path) -> bool:
        """Return whether the server may run the code of an adapter."""
        return self.runs_code or _is_below(directory, self.own)


def _is_below(path: Path, roots: Iterable[Path]) -> bool:
    """Return whether a path is in one of the directories after symbolic links have been followed."""
    try:
        resolved = path.resolve()
        return any(resolved.is_relative_to(root.resolve()) for root in roots)
    except (OSError, RuntimeError, ValueError):  # a loop of links, or a null character
        return False


class AdapterHome(NamedTuple):
    """The adapter registry of a model, and the adapters to register at startup.

    Attributes:
        registry: registry of the model, empty at first.
        at_start: directories of the adapters next to the model or in option.lora_modules, by name.
        roots: directories from which clients may register adapters.
        of_server: whether the adapters are files of llama.cpp's or SGLang's server. The engine finds out whether the
            server has loaded them, or can load them.
    """

    registry: AdapterRegistry
    at_start: Mapping[str, Path] = MappingProxyType({})
    roots: AdapterRoots = AdapterRoots()
    of_server: bool = False


# -- calls that change adapters: parameters that DJL's query and SageMaker's body share --------------------------------


_KNOWN = {"name", "src", "preload", "pin"}


class AdapterCall(NamedTuple):
    """The parameters of a call that changes an adapter. A missing parameter is None.

    Attributes:
        ignored: names of unknown parameters.
    """

    name: str | None = None
    src: str | None = None
    preload: bool | None = None
    ignored: tuple[str, ...] = ()


def read_adapter_call(values: Mapping[str, Any], *, refuse_unknown: bool) -> AdapterCall:
    """Read the parameters `name`, `src`, `preload` and `pin` of a call.

    Raises:
        BadRequest: a value has the wrong type, an unknown parameter is refused, or `pin` is true.
    """
    ignored = tuple(name for name in values if name not in _KNOWN)
    if ignored and refuse_unknown:
        raise BadRequest(f"unknown parameter {ignored[0]!r}; known: name, src, preload, pin")
    if _boolean(values, "pin"):
        raise BadRequest("pin=true is not supported: the engines cannot pin an adapter in memory")
    return AdapterCall(_text(values, "name"), _text(values, "src"), _boolean(values, "preload"), ignored)


def required(value: str | None, name: str) -> str:
    """Return the value of a required parameter.

    Raises:
        BadRequest: the parameter is missing.
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
